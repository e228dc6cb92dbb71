-- check_run: return a run that the index of unsettled runs names, or remove it from the index if it is settled.
-- Safe to send twice: the second copy finds the same mark.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys run  string: lib/run_mark
-- @keys unsettled  sorted set of this bucket: lib/unsettled
-- @reply {run mark, left_ms, acquisition that holds the lock or ""}
-- @reply {}  the run is settled, or its mark has expired

-- @include run_mark unsettled

local text = redis.call('MGET', run)[1]
local state = parse_run_mark(text).state
if state ~= 'started' and state ~= 'unknown' then
  settle()
  return {}
end
return {text, redis.call('PTTL', run), redis.call('HGET', lock, 'acq') or ''}
