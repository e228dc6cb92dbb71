-- lib/replace_start: note the start of a call that a newer one may stop (on_conflict="replace"). Statements.
-- @uses replaced task_id replace_max_ms is_retry replace
-- @after time
--
-- The including script has set: now, rank, for_this_grant. lib/replace has the fields.

local last = redis.call('HMGET', replaced, 'started_rank', 'started_id', 'busy_since')
local started_rank = rank
if last[2] == task_id and is_retry ~= '0' then
  -- A retry is as old as the run that it repeats.
  started_rank = last[1]
end
redis.call('HSET', replaced, 'started_rank', started_rank, 'started_id', task_id)
if not (last[3] and for_this_grant) then
  -- A call that starts without a grant found no waiting call, so newer calls no longer stop one body after the other.
  redis.call('HSET', replaced, 'busy_since', decimal(now))
end
redis.call('PEXPIRE', replaced, decimal(86400000 + replace_max_ms))
