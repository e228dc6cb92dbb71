-- release_queued: end an acquisition under the policy "queue" or "replace": like release.lua, and also grant the lock to
-- the next waiter.
-- Safe to send twice: the second copy finds the lock that the first one granted. It names that grant until the message
-- is known to be published.
--
-- @group message  the caller is a message, so it has an identity
-- @group once requires message  this acquisition has a run mark (once_per)
-- @group unconfirmed  it is unknown whether the acquire took effect
-- @group reserve  the lock is reserved for the retry of this run (keep_on_retry)
-- @group replace requires message  newer calls may have stopped this run (lib/replace)
-- @keys lock  hash: the lock, lib/take_lock
-- @keys wake  list: lib/wake
-- @keys tombstone  string: this acquisition was abandoned by its owner [unconfirmed]
-- @keys done  string: the message has finished; server time in us [message]
-- @keys run  string: lib/run_mark [once]
-- @keys unsettled  sorted set of this bucket: lib/unsettled [once]
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @keys replaced  hash: lib/replace [replace]
-- @args acquisition  owner and number
-- @args tombstone_ms  milliseconds that a late acquire is refused [unconfirmed]
-- @args rolled_back  "1": the body did not run, so min_hold does not apply [unconfirmed]
-- @args done_ms  milliseconds that a done mark lives; "0": the message has not finished [message]
-- @args identity  digest of the message's identity, or ""
-- @args lock_name  text of the lock name
-- @args used_ms  milliseconds that the run counts as succeeded; "0": it did not succeed [once]
-- @args requester_json  task, id, node and pid of the run as JSON [once]
-- @args seed  seed of the run's idempotency key [once]
-- @args seed_ms  milliseconds that the seed of an unsuccessful run is kept; "0": leave the run mark alone [once]
-- @args reserved_for  identity of the retry [reserve]
-- @args reserve_ms  milliseconds that the lock is reserved at most [reserve]
-- @args body_ended  "1": the body ended by itself; "0": it was stopped [replace]
-- @reply sum of 1: the acquisition held the lock. 2: a duplicate of its message was seen.
--   8: a caller was woken. 16: the server refused to wake one. (Only release.lua uses 4.)
-- @reply {sum, identity, message, grant id, error}  the grant to publish; error: that of RPUSH, if the sum contains 16.
--   "" for missing values

local holder, dup, notify, has_waiters, min_hold_ms =
  unpack(redis.call('HMGET', lock, 'acq', 'dup', 'notify', 'has_waiters', 'min_hold'))
local ours = holder == acquisition

-- The id of the newer call that asked this run to stop, if there is one. While this field exists, any other delivery of
-- this message ends without running (lib/replace). At the end of the run, the field is deleted: from then on, a done
-- mark refuses these deliveries.
local stopped_by = REPLACE and redis.call('HGET', replaced, 'stop:' .. identity)

-- @include time acquisition run_mark unsettled wake release full_memory message grant ended_grant unpublished_grant

local retry_queued = reserves and not operator and redis.call('HEXISTS', messages, reserved_for) == 1
begin_writing()
if retry_queued then
  -- The retry precedes all waiters. Its own min_hold starts when it takes the lock.
  hold_ms, crowded = 0, true
  redis.call('ZADD', waiting, '0', reserved_for)
  redis.call('ZREM', delayed, reserved_for)
end
-- The lock last: if the script stops before, the second copy finds its acquisition and does the rest.
save_marks()
local wake_sum, refusal = wake_waiter()

if REPLACE and final then
  redis.call('HDEL', replaced, 'stop:' .. identity)
end
if REPLACE and ours and body_ended == '1' then
  redis.call('HDEL', replaced, 'busy_since')
end

-- The lease was lost, and the lock was granted to a copy of this message. The message has finished: end the grant.
local ended_grant = final and holder == GRANT .. identity
if final then
  remove_from_queue(identity)
end
local waiter, message, grant_id
if ended_grant or (crowded and hold_ms <= 0) then
  waiter, message, grant_id = grant_or_free(now, acquisition)
  keep_notify(ended_grant and notify, waiter)
else
  if crowded then
    redis.call('ZADD', queues, decimal(now + hold_ms * 1000), lock_name)
  end
  free_or_hold()
  if not ours then
    waiter, message, grant_id = unpublished_grant(acquisition)
  end
end
local sum = (ours and 1 or 0) + (duplicate_seen and 2 or 0) + wake_sum
if message or refusal then
  return {sum, waiter or '', message or '', grant_id or '', refusal or ''}
end
return sum
