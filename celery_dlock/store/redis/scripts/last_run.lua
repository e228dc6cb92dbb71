-- last_run: return the state of a name's last run.
-- Safe to send twice: it writes nothing.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys run  string: lib/run_mark
-- @reply {run mark, left_ms, acquisition that holds the lock or ""}
-- @reply {}  no run counts

-- @include run_mark

local text = redis.call('MGET', run)[1]
local state = parse_run_mark(text).state
if state ~= 'used' and state ~= 'started' and state ~= 'unknown' then
  return {}
end
return {text, redis.call('PTTL', run), redis.call('HGET', lock, 'acq') or ''}
