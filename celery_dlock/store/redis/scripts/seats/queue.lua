-- seats/queue: the queue that the seats of a name share.
-- @uses lock waiting delayed queues lock_name
-- @after time acquisition grant seats/common

local earlier_due = redis.call('ZSCORE', queues, lock_name)

-- on_seat() enters the name in the index for its own seat. Another seat may be due sooner.
local function keep_earlier_due()
  if earlier_due then
    redis.call('ZADD', queues, 'LT', earlier_due, lock_name)
  end
end

local function has_waiters()
  return redis.call('EXISTS', waiting, delayed) > 0
end

-- If a seat above the limit was granted, take the grant back: its waiter waits at its rank again. Return whether a
-- grant was taken back. If the waiter's message was published already, it finds itself queued.
local function take_back_grant(number)
  local key = seat_key(number)
  local rank, waiter, due = unpack(redis.call('HMGET', key, 'rank', 'identity', 'due'))
  if number < allowed or not due then
    return false
  end
  redis.call('ZADD', waiting, rank, waiter)
  redis.call('DEL', key)
  redis.call('ZADD', queues, decimal(server_time_us()), lock_name)
  return true
end

-- Grant a free seat. No reply names this grant, so it is due at once, and a sweep publishes the waiter's message.
-- Return the waiter or nil.
local function grant_for_sweep(number, granter)
  lock = seat_key(number)
  local now = server_time_us()
  local waiter = grant_next(now, granter)
  if waiter then
    redis.call('HSET', lock, 'due', decimal(now))
    earlier_due = decimal(now)
    taken[number] = {acq = GRANT .. waiter, identity = waiter, granter = granter}
    used_seats = math.max(used_seats, number + 1)
  end
  return waiter
end
