-- lib/take_lock: take the free lock, and answer. Statements instead of a function: the uncontended path of acquire
-- creates no closures.
-- @uses lock last_token run acquisition ttl_ms identity task task_id node pid
-- @uses min_hold_ms requester_json run_mark_ms once
--
-- The lock's hash has these fields. The holder has one field per fact. With a value of more than 64 bytes, Redis would
-- convert the hash to a larger and slower encoding.
--   acq            acquisition that holds it; "grant:" or "reserved:" and an identity; or "kept" (min_hold)
--   identity       digest of the holder's message, or ""
--   token          fencing token; also the time of the acquisition (us), unless since is set
--   since          time of the acquisition (us), if the token differs from it
--   count          hold count
--   ttl            longest ttl asked for (ms)
--   task, id, node, pid    the holder
--   min_hold       milliseconds from the acquisition that the lock stays held at least; absent for none
--   releasing      the holder's body has ended, and its release follows
--   dup            a duplicate of the holder's message may exist: its release sets the done mark
--   reserved_for   identity of the holder's retry, for which the lock will be reserved
--   notify         the release publishes on the channel: "1" with PUBLISH, "s" with SPUBLISH
--   has_waiters    the lock may have waiters: its release grants
--   rank, due, granter, published, dead_letter, foreign    of a grant only
--
-- The including script has set: highest_token, now, since, rank, duplicate_possible, inherited_notify, has_waiters,
-- previous_run, outcome_unknown.

local token = since
if highest_token and tonumber(highest_token) >= now then
  token = string.format('%.0f', highest_token + 1)
end
redis.call('SET', last_token, token)
redis.call('HSET', lock, 'acq', acquisition, 'identity', identity, 'token', token, 'count', '1',
           'task', task, 'id', task_id, 'node', node, 'pid', pid, 'ttl', ttl_ms)
if min_hold_ms ~= '0' then
  redis.call('HSET', lock, 'min_hold', min_hold_ms)
end
if token ~= since then
  redis.call('HSET', lock, 'since', since)
end
if duplicate_possible then
  redis.call('HSET', lock, 'dup', '1')
end
if inherited_notify then
  redis.call('HSET', lock, 'notify', inherited_notify)
end
if has_waiters then
  redis.call('HSET', lock, 'has_waiters', '1')
end
redis.call('PEXPIRE', lock, ttl_ms)
if ONCE then
  local seed = (previous_run.seed or '') ~= '' and previous_run.seed or token
  local crashed_at, crashed_of = previous_run.crashed_at or '', previous_run.crashed_of or ''
  local crashed_by = previous_run.crashed_by or ''
  if outcome_unknown then
    crashed_at, crashed_of, crashed_by = previous_run.at, previous_run.identity, previous_run.by
  end
  local mark = {'started', since, identity, acquisition, seed, requester_json, crashed_at, crashed_of, crashed_by}
  redis.call('SET', run, table.concat(mark, '\n'), 'PX', run_mark_ms)
  return token .. ' ' .. since .. ' ' .. rank .. ' ' .. seed .. ' ' .. (crashed_at ~= '' and '1' or '0')
end
return token .. ' ' .. since .. ' ' .. rank
