-- seats/sweep: visit every seat of a name with waiters, up to the first one with something to do.
-- Safe to send twice: the second copy first visits the seat that the first copy granted. It names that grant until the
-- message is published.
--
-- seats/common has its keys and arguments.
-- @reply as sweep  about that seat

-- @include time acquisition holder_kind message grant seats/common seats/queue full_memory parked_rank restore_places

-- Another seat may have become free since the first copy of this command. It must not hide the grant of the first copy.
local first_seat = granted_seat(granter) or 0
-- While the index has this score, the seat has no time for its next sweep. If the script stops, the name is due at once.
local UNSET = '1'
begin_writing()
local granted = {}
for _, seat in pairs(taken) do
  granted[kind_of(seat.acq) == 'grant' and seat.identity or ''] = true
end
restore_places(server_time_us(), granted)

local next_due, reply
for offset = 0, seat_count - 1 do
  local number = (first_seat + offset) % seat_count
  lock = seat_key(number)
  redis.call('ZADD', queues, UNSET, lock_name)
  reply = {'', '', '', '', ''}
  if number < allowed then
    reply = on_seat(true)
  elseif taken[number] and tonumber(redis.call('HGET', lock, 'due') or server_time_us() + 1) <= server_time_us() then
    take_back_grant(number)
  end
  local due = redis.call('ZSCORE', queues, lock_name)
  if due and due ~= UNSET and (not next_due or tonumber(due) < tonumber(next_due)) then
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
elseif redis.call('EXISTS', messages) == 0 then
  redis.call('ZREM', queues, lock_name)
end
keep_record()
return reply
