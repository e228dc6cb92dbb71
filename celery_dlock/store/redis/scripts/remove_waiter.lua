-- remove_waiter: remove a waiter that was revoked, has expired, or is unreadable. Its grant goes to the next waiter.
-- Safe to send twice: the second copy finds the message among the dead letters, and the grant that the first copy made.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @keys dead  hash, as in acquire_queued
-- @keys done  string: the message has finished; server time in us
-- @keys channel  no name of a key: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args lock_name  text of the lock name
-- @args identity  identity of the waiter
-- @args done_ms  milliseconds that its done mark lives; "0": make it a dead letter
-- @args granter  names the grants of this caller
-- @args ended  "1": its result is stored, so the done mark is set even if it does not wait any more.
--   Until then its message is kept among the dead letters: it is not lost if the caller dies
-- @reply {its message, identity, message, grant id}  the last three of the next grant; "" for missing values

-- @include time grant unpublished_grant

local holder, holder_identity = unpack(redis.call('HMGET', lock, 'acq', 'identity'))
local granted = holder == 'grant:' .. identity
if holder_identity == identity and not granted then
  -- It runs. The message to be removed was a duplicate.
  return {'', '', '', ''}
end
local its_message = redis.call('HGET', messages, identity) or redis.call('HGET', dead, identity)
local now = server_time_us()
if done_ms ~= '0' and (its_message or ended == '1') then
  -- Its result is stored, so a copy that the broker still has must not run.
  redis.call('SET', done, decimal(now), 'PX', done_ms)
end
if ended == '1' then
  redis.call('HDEL', dead, identity)
elseif its_message then
  redis.call('HSET', dead, identity, its_message)
end
local waiter, message, grant_id
if granted then
  remove_from_queue(identity)
  redis.call('DEL', lock)
  waiter, message, grant_id = grant_next(now, granter)
else
  remove_from_queue(identity)
  waiter, message, grant_id = unpublished_grant(granter)
end
return {its_message or '', waiter or '', message or '', grant_id or ''}
