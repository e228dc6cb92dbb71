-- hold_lock: hold a lock for an operator, at once or from the release of its present holder.
-- Safe to send twice: the second copy sets the same hold again.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys waiting  sorted set, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args operator  "operator:", user, "@" and host
-- @args hold_ms  milliseconds of the hold, from now
-- @args reason  the operator's reason
-- @args lock_name  text of the lock name
-- @reply "held"  the operator holds the lock
-- @reply "pending"  the hold begins when the present holder releases the lock; it is dropped if the lease expires first
--
-- A pending hold is the fields operator, reason and asked, and a min_hold up to the end of the hold. lib/release does the rest.

-- @include time acquisition holder_kind expiry

local holder, since, token, due, min_hold, waiter, rank, notify =
  unpack(redis.call('HMGET', lock, 'acq', 'since', 'token', 'due', 'min_hold', 'identity', 'rank', 'notify'))
local now = server_time_us()
if holder and kind_of(holder) == 'owner' then
  repair_expiry()
  local whole_ms = math.ceil((now - (since or token)) / 1000) + hold_ms
  redis.call('HSET', lock, 'operator', operator, 'reason', reason, 'asked', decimal(now), 'min_hold',
             decimal(math.max(whole_ms, tonumber(min_hold or '0'))))
  return 'pending'
end
if due then
  -- The lock is granted. Take the grant back: its waiter waits again at its rank. Its message may already be published.
  redis.call('ZADD', waiting, rank, waiter)
end
redis.call('DEL', lock)
redis.call('HSET', lock, 'acq', operator, 'identity', '', 'token', '0', 'since', decimal(now), 'task', '', 'id', '',
           'process', reason .. ' 0', 'ttl', hold_ms)
redis.call('PEXPIRE', lock, hold_ms)
if notify then
  redis.call('HSET', lock, 'notify', notify)
end
if redis.call('EXISTS', waiting, delayed) > 0 then
  redis.call('HSET', lock, 'has_waiters', '1')
  redis.call('ZADD', queues, decimal(now + hold_ms * 1000), lock_name)
end
return 'held'
