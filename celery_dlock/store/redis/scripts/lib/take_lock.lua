-- lib/take_lock: take the free lock, and return the reply. It has statements instead of a function, so that the
-- uncontended path of acquire creates no closures.
-- @uses lock last_token done run unsettled acquisition ttl_ms identity task task_id process
-- @uses min_hold_ms notify requester_json run_mark_ms once hold
--
-- The lock's hash has these fields. The holder has one field per fact. With a value of more than 64 bytes, Redis would
-- convert the hash to a larger and slower encoding.
--   acq            acquisition that holds it; "grant:" or "reserved:" and an identity; "kept" (min_hold); or
--                  "operator:" and an operator (hold_lock)
--   identity       digest of the holder's message, or ""
--   token          fencing token; also the time of the acquisition (us), unless since is set
--   since          time of the acquisition (us), if the token differs from it
--   count          hold count; absent for 1
--   ttl            longest ttl asked for (ms)
--   task, id       the holder's task
--   process        its node name and process id, with a space between them
--   min_hold       milliseconds from the acquisition that the lock stays held at least; absent for none
--   releasing      the holder's body has ended, and its release follows
--   dup            a duplicate of the holder's message may exist: its release sets the done mark
--   reserved_for   identity of the holder's retry, for which the lock will be reserved
--   notify         callers may wait in their thread or pool slot: the release wakes one of them
--   has_waiters    the lock may have waiters: its release grants the lock to the next one
--   operator, reason, asked    the operator whose hold begins with the holder's release, the reason, and the time when
--                  the hold was asked for (us) (hold_lock)
--   replaceable    a newer call may ask the holder to stop (lib/replace)
--   stop           task id of the newer call that has asked
--   rank, due, granter, published, dead_letter, foreign    of a grant only
--
-- The including script has set: highest_token, since, rank, finished_at, duplicate_possible, inherited_notify,
-- has_waiters, replaceable, previous_run, outcome_unknown.

local token = since
if highest_token and highest_token - since >= 0 then
  token = string.format('%.0f', highest_token + 1)
end
call('SET', last_token, token)
call('HSET', lock, 'acq', acquisition, 'identity', identity, 'token', token, 'task', task, 'id', task_id,
           'process', process, 'ttl', ttl_ms)
-- Directly after the write that creates the key. If the script stops between the two, lib/expiry repairs it.
call('PEXPIRE', lock, ttl_ms)
if HOLD then
  call('HSET', lock, 'min_hold', min_hold_ms)
end
if token ~= since then
  call('HSET', lock, 'since', since)
end
if duplicate_possible then
  call('HSET', lock, 'dup', '1')
  if finished_at then
    -- A new message has the id of a finished one. Delete its done mark, which would refuse copies of the new message.
    -- Copies of the finished one may still come, so the release sets the mark again.
    call('DEL', done)
  end
end
if inherited_notify or notify == '2' then
  -- A release wakes one caller only. The others wait for the release of the acquisition that follows.
  call('HSET', lock, 'notify', '1')
end
if has_waiters then
  call('HSET', lock, 'has_waiters', '1')
end
if replaceable then
  call('HSET', lock, 'replaceable', '1')
end
if ONCE then
  local seed = (previous_run.seed or '') ~= '' and previous_run.seed or token
  local crashed_at, crashed_of = previous_run.crashed_at or '', previous_run.crashed_of or ''
  local crashed_by = previous_run.crashed_by or ''
  if outcome_unknown then
    crashed_at, crashed_of, crashed_by = previous_run.at, previous_run.identity, previous_run.by
  end
  local mark = {'started', since, identity, acquisition, seed, requester_json, crashed_at, crashed_of, crashed_by}
  call('SET', run, table.concat(mark, '\n'), 'PX', run_mark_ms)
  -- Enter the run in the index (lib/unsettled). Its function is not used, because it would be a closure.
  call('ZADD', unsettled, string.format('%.0f', since + run_mark_ms * 1000),
             string.sub(run, 1, #lock - 1) .. ' ' .. string.sub(run, #lock + 1))
  local index_ttl_ms = call('PTTL', unsettled)
  if index_ttl_ms < tonumber(run_mark_ms) then
    call('PEXPIRE', unsettled, string.format('%.0f', 2 * run_mark_ms))
  end
  if index_ttl_ms >= 0 then
    -- The index had members before this one, so some may be expired. Usually this run is its only member.
    for _, expired in ipairs(call('ZRANGEBYSCORE', unsettled, '-inf', since, 'LIMIT', '0', '2')) do
      call('ZREM', unsettled, expired)
    end
  end
  return token .. ' ' .. since .. ' ' .. rank .. ' ' .. seed .. ' ' .. (crashed_at ~= '' and '1' or '0')
end
return token .. ' ' .. since .. ' ' .. rank
