-- remove_waiter: remove a waiter that was revoked, has expired, or is unreadable. Its grant goes to the next waiter.
-- Safe to send twice: the second copy finds the message among the dead letters, and the grant that the first copy made.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys wake  list: lib/wake
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @keys dead  hash, as in acquire_queued
-- @keys dead_letters  sorted set of this bucket: lib/dead_letter
-- @keys done  string: the message has finished; server time in us
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args lock_name  text of the lock name
-- @args identity  identity of the waiter
-- @args done_ms  milliseconds that its done mark lives; "0": make it a dead letter
-- @args granter  names the grants of this caller
-- @args ended  "1": the result of its task is stored, so the done mark is set even if it does not wait any more.
--   "0": keep the message among the dead letters until then, so that it is not lost if the caller dies
-- @reply {its message, identity, message, grant id}  the last three of the next grant; "" for missing values

-- @include time acquisition wake message grant ended_grant unpublished_grant dead_letter

local holder, holder_identity, notify = unpack(redis.call('HMGET', lock, 'acq', 'identity', 'notify'))
local granted = holder == GRANT .. identity
if holder_identity == identity and not granted then
  -- The message runs, so the parked one was a duplicate. Leave the lock alone.
  return {'', '', '', ''}
end
local its_message = redis.call('HGET', messages, identity) or redis.call('HGET', dead, identity)
local now = server_time_us()
-- The dead letter first: until its result is stored, the message must not be lost.
if ended ~= '1' and its_message then
  store_dead_letter(identity, its_message, now)
end
if done_ms ~= '0' and (its_message or ended == '1') then
  -- If the broker still has a copy of the removed message, it must not run.
  redis.call('SET', done, decimal(now), 'PX', done_ms)
end
if ended == '1' then
  drop_dead_letter(identity)
end
remove_from_queue(identity)
local waiter, message, grant_id
if granted then
  waiter, message, grant_id = grant_or_free(now, granter)
  keep_notify(notify, waiter)
else
  waiter, message, grant_id = unpublished_grant(granter)
end
return {its_message or '', waiter or '', message or '', grant_id or ''}
