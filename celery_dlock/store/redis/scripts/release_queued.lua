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
--
-- A lock with min_hold stays held until min_hold has passed. Its holder is then "kept", so no owner has it. A lock that
-- is reserved for a retry has the holder "reserved:" and the identity of the retry. If the retry is already queued, the
-- lock is granted to it instead.
--
-- Done marks are rare. One is set if a duplicate is known: the lock has the field dup. One is also set if the lock was
-- lost, because that field was lost with it, and a duplicate may have been noted in it. One is also set if the lock is
-- reserved for a retry, or if a newer call asked this run to stop.

local holder, dup, notify, has_waiters, min_hold_ms =
  unpack(redis.call('HMGET', lock, 'acq', 'dup', 'notify', 'has_waiters', 'min_hold'))
local ours = holder == acquisition

-- The id of the newer call that asked this run to stop, if there is one. While this field exists, any other delivery of
-- this message ends without running (lib/replace). At the end of the run, the field is deleted: from then on, a done
-- mark refuses these deliveries.
local stopped_by = REPLACE and redis.call('HGET', replaced, 'stop:' .. identity)

-- An operator asked for the lock while this run held it (hold_lock, which has set min_hold). This release keeps it for
-- the operator.
local operator = ours and min_hold_ms and redis.call('HGET', lock, 'operator')

-- @include time run_mark unsettled wake release full_memory grant ended_grant unpublished_grant

local duplicate_seen = ours and dup == '1'
local crowded = ours and has_waiters
local reserves = ours and RESERVE
-- If the lock is reserved for a retry, set the mark: a late duplicate of this message must not compete with the retry.
local final = MESSAGE and done_ms ~= '0' and (duplicate_seen or reserves or stopped_by or not ours)
local holds = ours and (rolled_back ~= '1' or operator) and min_hold_ms
local retry_queued = reserves and not operator and redis.call('HEXISTS', messages, reserved_for) == 1
begin_writing()
local now = nil
if final or crowded or holds or retry_queued or (ONCE and used_ms ~= '0') then
  now = server_time_us()
end
local hold_ms = holds and remaining_hold_ms(now) or 0
if retry_queued then
  -- The retry precedes all waiters. Its own min_hold starts when it takes the lock.
  hold_ms, crowded = 0, true
  redis.call('ZADD', waiting, '0', reserved_for)
  redis.call('ZREM', delayed, reserved_for)
elseif reserves then
  hold_ms = math.max(hold_ms, tonumber(reserve_ms))
end
-- The lock last: if the script stops before, the second copy finds its acquisition and does the rest.
save_marks(final, now)
local wake_sum, refusal = wake_waiter()

if REPLACE and final then
  redis.call('HDEL', replaced, 'stop:' .. identity)
end
if REPLACE and ours and body_ended == '1' then
  redis.call('HDEL', replaced, 'busy_since')
end

-- The lease was lost, and the lock was granted to a copy of this message. The message has finished: end the grant.
local ended_grant = final and holder == 'grant:' .. identity
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
  free_or_hold(hold_ms)
  if not ours then
    waiter, message, grant_id = unpublished_grant(acquisition)
  end
end
local sum = (ours and 1 or 0) + (duplicate_seen and 2 or 0) + wake_sum
if message or refusal then
  return {sum, waiter or '', message or '', grant_id or '', refusal or ''}
end
return sum
