-- describe: return what the store knows about one lock name, for operators.
-- Safe to send twice: it writes nothing.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys run  string: lib/run_mark
-- @keys claim  hash, as in claim
-- @keys waiting  sorted set, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys dead  hash, as in acquire_queued
-- @reply {now_us, waiters, 1 if it has dead letters, LOCK, RUN, CLAIM}  nil or {} for missing values.
--   LOCK: {left_ms, acq, token, since_us, releasing, task, id, process, ttl, due_us, operator, reason, asked_us}.
--   RUN: {left_ms, run mark}. CLAIM: {left_ms, id, task, node, since_us, generation}

-- @include time run_mark place

local lock_fields, claim_fields = {}, {}
local found = redis.call('HMGET', lock, 'acq', 'token', 'since', 'releasing', 'task', 'id', 'process', 'ttl', 'due',
                         'operator', 'reason', 'asked')
if found[1] then
  found[3] = found[3] or found[2]
  lock_fields = {redis.call('PTTL', lock), unpack(found)}
end
local text, run_fields = redis.call('MGET', run)[1], {}
local state = parse_run_mark(text).state
if state == 'used' or state == 'started' or state == 'unknown' then
  run_fields = {redis.call('PTTL', run), text}
end
local claimed = redis.call('HMGET', claim, 'id', 'task', 'node', 'since', 'generation')
if claimed[1] then
  claim_fields = {redis.call('PTTL', claim), unpack(claimed)}
end
local waiters = count_waiters() + (found[9] and 1 or 0)
return {decimal(server_time_us()), waiters, redis.call('EXISTS', dead), lock_fields, run_fields, claim_fields}
