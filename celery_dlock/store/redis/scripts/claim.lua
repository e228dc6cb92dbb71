-- claim: claim a lock name for a message that is about to be published (unique).
-- Safe to send twice: the second copy finds its own claim.
--
-- @keys claim  hash: id, task and node of the publisher, since (us), generation, attempt
-- @keys lock  hash: the lock, lib/take_lock
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys tombstone  string: this attempt was abandoned
-- @args task_id  id of the task
-- @args life_ms  milliseconds that the claim lasts without a renewal
-- @args while_running  "1": a running call has the name too, so the claim is refused
-- @args generation  number of the message among those of its id: a retry has a higher one
-- @args task  name of the publisher's task
-- @args node  node name of the publisher
-- @args short_id  id of the task as the lock stores it: cut after 150 characters
-- @args attempt  id of this publication, because one task id may be published twice
-- @reply {}  claimed; or the attempt was abandoned before this command came, and nothing is claimed
-- @reply {state, id, task, node, since_us}  taken. State: "queued", "waiting" or "running"; since "0": unknown
--
-- A waiter of the policy "queue" has the name too, without a claim.

-- @include time acquisition holder_kind holder expiry message lifetime

local first = redis.call('HMGET', claim, 'id', 'task', 'node', 'since', 'generation', 'attempt')
local number = tonumber(generation)
local ours = first[1] == task_id and (first[6] == attempt or number > tonumber(first[5]))
if first[1] and not ours then
  if redis.call('PTTL', claim) < 0 then
    -- The script that claimed the name stopped before it set the expiry.
    redis.call('PEXPIRE', claim, life_ms)
  end
  return {'queued', unpack(first, 1, 4)}
end

if redis.call('EXISTS', tombstone) == 1 then
  return {}
end

-- Return the call that runs or has the lock granted, in the shape of a reply, or nil.
local function running_call()
  local found = redis.call('HMGET', lock, 'acq', 'id', 'task', 'process', 'since', 'token', 'releasing')
  local kind, id = found[1] and kind_of(found[1]), found[2]
  -- No call runs if the lock is kept by min_hold, or if its holder's body has ended (releasing). A lock that is
  -- reserved for a retry counts as running.
  local ended = kind == 'min_hold' or (found[7] and kind ~= 'keep_on_retry')
  local runs = kind and not ended and while_running == '1'
  -- A retry (generation above 0) follows a call with its own id. That call does not refuse the retry.
  if (kind == 'grant' or runs) and (number == 0 or id ~= short_id) then
    local state = kind == 'grant' and 'waiting' or 'running'
    local node_name = node_and_pid(found[4])
    repair_expiry()
    return {state, id or '', found[3] or '', node_name, found[5] or found[6] or '0'}
  end
end

-- Return the first waiter of a sorted set, in the shape of a reply, or nil.
local function first_waiter(sorted_set)
  local waiter = redis.call('ZRANGE', sorted_set, '0', '0')[1]
  local its_task, its_id = task_of(waiter and redis.call('HGET', messages, waiter) or '')
  if its_id ~= '' and (number == 0 or its_id ~= task_id) then
    return {'waiting', its_id, its_task, '', '0'}
  end
end

local other = not ours and (running_call() or first_waiter(waiting) or first_waiter(delayed))
if other then
  return other
end

local since = ours and first[4] or decimal(server_time_us())
redis.call('HSET', claim, 'id', task_id, 'task', task, 'node', node, 'generation', generation, 'attempt', attempt,
           'since', since)
live_at_least(claim, life_ms)
return {}
