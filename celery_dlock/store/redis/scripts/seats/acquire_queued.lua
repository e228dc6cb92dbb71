-- seats/acquire_queued: take the first free seat, or park the message that has to wait.
-- Safe to send twice: the second copy finds the seat of its own acquisition, or names the grant of the first copy. No
-- reply names the other seats that the first copy granted: they are due, so a sweep publishes their messages.
--
-- seats/common has its keys and arguments.
-- @reply "token since_us rank_us seat"  acquired
-- @reply as acquire_queued  it has to wait, or it is not to run

-- @include time acquisition holder_kind wake expiry message grant seats/common seats/choose seats/queue

-- Grant the free seats to waiters. If the limit has grown, or a lease has expired, a seat is free although calls wait.
local function grant_free_seats()
  for number = 0, allowed - 1 do
    -- Name another granter: a second copy of this command must find only the grant that on_seat() makes.
    if not taken[number] and not grant_for_sweep(number, 'sweep') then
      return
    end
  end
end

-- A second copy of this command finds the grant that the first one made.
local number = related_seat() or seat_of(acquisition) or free_seat() or busiest_seat()
lock = seat_key(number)
local reply = on_seat()
if type(reply) == 'table' and reply[1] == 'parked' and reply[4] == '' then
  -- The first copy of this command may have granted one seat to another waiter, and one to this message itself.
  local granted = granted_seat(acquisition)
  if granted then
    local waiter, grant_id = unpack(redis.call('HMGET', seat_key(granted), 'identity', 'since'))
    reply[4], reply[5], reply[6] = waiter, redis.call('HGET', messages, waiter) or '', grant_id
  end
end
if redis.call('EXISTS', lock) == 1 then
  taken[number] = taken[number] or {acq = acquisition, identity = identity}
  used_seats = math.max(used_seats, number + 1)
else
  taken[number] = nil -- a finished message has given its grant back, and no call was next
end
if has_waiters() then
  for other = 0, seat_count - 1 do
    if taken[other] then
      -- A release under another policy reads this field.
      redis.call('HSET', seat_key(other), 'has_waiters', '1')
    end
  end
  grant_free_seats()
end
keep_earlier_due()
keep_record()
return with_seat(reply, number)
