-- confirm_publish: record that a granted message was published. From now on, the grant timeout counts.
-- Safe to send twice: the second copy only sets the deadline again.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys messages  hash, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @args identity  identity of the granted waiter
-- @args lock_name  text of the lock name
-- @args grant_timeout_ms  milliseconds; doubled with each grant that the waiter lost
-- @reply 1  the grant stands
-- @reply 0  the grant is over

-- @include time acquisition

if redis.call('HGET', lock, 'acq') ~= GRANT .. identity then
  return 0
end
local now = server_time_us()
local tries = redis.call('HGET', messages, identity .. ':tries') or 0
local due = decimal(now + grant_timeout_ms * 1000 * 2 ^ tries)
redis.call('HSET', lock, 'published', '1', 'due', due)
redis.call('ZADD', queues, due, lock_name)
return 1
