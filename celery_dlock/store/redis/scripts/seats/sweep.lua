-- seats/sweep: visit every seat of a name with waiters, up to the first one with something to do.
-- @include time grant seats/common seats/queue

local next_due, reply
for place = 0, places - 1 do
  lock = seat_key(place)
  redis.call('ZREM', queues, lock_name)
  reply = {'', '', '', '', ''}
  if place < allowed then
    reply = on_seat()
  elseif taken[place] and tonumber(redis.call('HGET', lock, 'due') or server_time_us() + 1) <= server_time_us() then
    take_back_grant(place)
  end
  local due = redis.call('ZSCORE', queues, lock_name)
  if due and (not next_due or tonumber(due) < tonumber(next_due)) then
    next_due = due
  end
  if reply[1] ~= '' or reply[4] ~= '' or reply[5] ~= '' then
    -- The reply can name one grant only. The next sweep goes on with the other seats.
    next_due = decimal(server_time_us())
    break
  end
end
if next_due then
  redis.call('ZADD', queues, next_due, lock_name)
else
  redis.call('ZREM', queues, lock_name)
end
keep_record()
return reply
