-- resolve_run: set the outcome of a run whose outcome is unknown.
-- Safe to send twice: the second copy finds its own command id.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys run  string: lib/run_mark
-- @keys unsettled  sorted set of this bucket: lib/unsettled
-- @args command_id  names this command
-- @args shown_mark  lib/run_command: the run that the operator was shown; "": whichever run it is
-- @args state  "used": the run did its work; "cleared": it did not, and the next run has its seed
-- @args window_ms  milliseconds that the outcome is kept
-- @reply 1  the outcome was unknown until now
-- @reply 0  there is no run whose outcome is unknown, or it is another one

-- @include run_mark unsettled run_command

local crashed = mark.state == 'started' and redis.call('HGET', lock, 'acq') ~= mark.acquisition
if mark.state ~= 'unknown' and not crashed then
  return 0
end
redis.call('SET', run, format_run_mark(state, mark.at, mark.identity, command_id, mark.seed, mark.by, '', '', ''),
           'PX', window_ms)
settle()
return 1
