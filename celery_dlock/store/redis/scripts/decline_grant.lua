-- decline_grant: record that this worker did not publish the message of this grant. If the message belongs to another
-- broker, make the grant due at once for that broker's workers.
-- Safe to send twice: the second copy does not change the time since which the message counts as foreign.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys queues  sorted set, as in acquire_queued
-- @args identity  identity of the granted waiter
-- @args grant_id  id of the grant
-- @args lock_name  text of the lock name
-- @args foreign  "0": the message is of this worker's broker, which could not be reached. "1": it is of another broker.
--   "2": it is of another broker, which has running workers
-- @reply 1  the grant stands, and its message was not published
-- @reply 0  the grant is over, or its message was published

-- @include time acquisition

local holder, since, published, foreign_since =
  unpack(redis.call('HMGET', lock, 'acq', 'since', 'published', 'foreign'))
if holder ~= GRANT .. identity or since ~= grant_id or published then
  return 0
end
local now = decimal(server_time_us())
if foreign ~= '1' then
  redis.call('HDEL', lock, 'foreign')
elseif not foreign_since then
  redis.call('HSET', lock, 'foreign', now)
end
if foreign ~= '0' then
  -- Make the grant due at once, for a worker of the message's broker. The worker that declined ignores it for a while.
  redis.call('HSET', lock, 'due', now)
  redis.call('ZADD', queues, now, lock_name)
end
return 1
