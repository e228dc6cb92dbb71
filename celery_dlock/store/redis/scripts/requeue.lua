-- requeue: put a dead letter back into the queue of its lock. A later sweep grants it the lock.
-- Safe to send twice: the second copy finds the message in the queue.
--
-- @keys dead  hash, as in acquire_queued
-- @keys dead_letters  sorted set of this bucket: lib/dead_letter
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args lock_name  text of the lock name
-- @args identity  identity of the message
-- @reply 1  it is in the queue
-- @reply 0  there is no such dead letter

-- @include time parked_rank

local message = redis.call('HGET', dead, identity)
if not message then
  return redis.call('HEXISTS', messages, identity)
end
local now = decimal(server_time_us())
local rank = parked_rank(message) or now
-- lib/grant has the order of the writes.
redis.call('ZADD', queues, now, lock_name)
redis.call('ZADD', waiting, rank, identity)
redis.call('HSET', messages, identity, message)
redis.call('ZREM', dead_letters, identity .. ' ' .. lock_name)
redis.call('HDEL', dead, identity)
return 1
