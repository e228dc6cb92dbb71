-- release: end an acquisition: free its lock, set its marks, wake callers that wait. For Lock() and every policy except
-- "queue" and "replace".
-- Safe to send twice: the second copy finds the lock free or held by another acquisition. It sets the same marks again.
--
-- @group message  the caller is a message, so it has an identity
-- @group once requires message  this acquisition has a run mark (once_per)
-- @group unconfirmed  it is unknown whether the acquire took effect
-- @group reserve  the lock is reserved for the retry of this run (keep_on_retry)
-- @keys lock  hash: the lock, lib/take_lock
-- @keys wake  list: lib/wake
-- @keys tombstone  string: this acquisition was abandoned by its owner [unconfirmed]
-- @keys done  string: the message has finished; server time in us [message]
-- @keys run  string: lib/run_mark [once]
-- @keys unsettled  sorted set of this bucket: lib/unsettled [once]
-- @args acquisition  owner and number
-- @args tombstone_ms  milliseconds that a late acquire is refused [unconfirmed]
-- @args rolled_back  "1": the body did not run, so min_hold does not apply [unconfirmed]
-- @args done_ms  milliseconds that a done mark lives; "0": the message has not finished [message]
-- @args identity  digest of the message's identity [once]
-- @args used_ms  milliseconds that the run counts as succeeded; "0": it did not succeed [once]
-- @args requester_json  task, id, node and pid of the run as JSON [once]
-- @args seed  seed of the run's idempotency key [once]
-- @args seed_ms  milliseconds that the seed of an unsuccessful run is kept; "0": leave the run mark alone [once]
-- @args reserved_for  identity of the retry [reserve]
-- @args reserve_ms  milliseconds that the lock is reserved at most [reserve]
-- @reply sum of 1: the acquisition held the lock. 2: a duplicate of its message was seen.
--   4: the caller has to sweep the queue, because this script does not have the queue's keys. 8: a caller was woken.
--   16: the server refused to wake one
-- @reply {sum, "", "", "", error}  the error of RPUSH, if the sum contains 16

local holder, dup, notify, has_waiters, min_hold_ms =
  unpack(call('HMGET', lock, 'acq', 'dup', 'notify', 'has_waiters', 'min_hold'))
local ours = holder == acquisition
if ours and not (dup or notify or has_waiters or min_hold_ms or UNCONFIRMED or ONCE or RESERVE) then
  -- Most calls end here and create no closures.
  call('DEL', lock)
  return 1
end

local stopped_by = nil -- only a run under the policy "replace" is stopped

-- @include time acquisition run_mark unsettled wake release full_memory

-- The lock last: if the script stops before, the second copy finds its acquisition and does the rest.
begin_writing()
save_marks()
local wake_sum, refusal = wake_waiter()
free_or_hold()

local sum = (ours and 1 or 0) + (duplicate_seen and 2 or 0) + wake_sum
local granter, published = false, false
if not ours then
  granter, published = unpack(call('HMGET', lock, 'granter', 'published'))
end
if crowded or (granter == acquisition and not published) then
  sum = sum + 4
end
if refusal then
  return {sum, '', '', '', refusal}
end
return sum
