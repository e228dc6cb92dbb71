-- renew: move a lease's deadline and set facts about the holder, if the acquisition still holds the lock.
-- Safe to send twice: the values are absolute, and the key's life is never shortened.
--
-- @group stoppable  the holder may have been asked to stop (lib/replace)
-- @keys lock  hash: the lock, lib/take_lock
-- @args acquisition  owner and number
-- @args ttl_ms  milliseconds that the key lives at least
-- @args facts...  field, value, field, value: count, releasing, dup
-- @reply 1  renewed
-- @reply task id  renewed, and this newer call asks the holder to stop [stoppable]. Not before min_hold is over
-- @reply 0  the acquisition does not hold the lock; a renewal never creates one

local holder, longest_ttl_ms = unpack(redis.call('HMGET', lock, 'acq', 'ttl'))
if holder ~= acquisition then
  return 0
end
local ttl = tonumber(ttl_ms)
local longest = math.max(ttl, tonumber(longest_ttl_ms or '0'))
local left_ms = redis.call('PTTL', lock)
if left_ms > longest then
  -- No holder requested such a long lease, so the server's clock went back.
  left_ms = ttl
end
-- Always written: a script that has written once may go on to write when the server's memory is full.
redis.call('PEXPIRE', lock, math.max(left_ms, ttl))
if longest_ttl_ms and ttl > tonumber(longest_ttl_ms) then
  redis.call('HSET', lock, 'ttl', ttl_ms)
end
if facts[1] then
  redis.call('HSET', lock, unpack(facts))
end
if STOPPABLE then
  local by, min_hold_ms, since, token = unpack(redis.call('HMGET', lock, 'stop', 'min_hold', 'since', 'token'))
  if by then
    -- @include time
    if server_time_us() - (since or token) >= (min_hold_ms or 0) * 1000 then
      return by
    end
  end
end
return 1
