-- forget_run: forget a name's last run. A body that runs now goes on, and its success is remembered again.
-- Safe to send twice: the second copy finds its own command id.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys run  string: lib/run_mark
-- @keys unsettled  sorted set of this bucket: lib/unsettled
-- @args command_id  names this command
-- @args shown_mark  lib/run_command: the run that the operator was shown; "": whichever run it is
-- @args life_ms  milliseconds that the command id is kept
-- @reply 1  a run was forgotten
-- @reply 0  there was nothing to forget, or it is another run

-- @include run_mark unsettled run_command

if not mark.at or (mark.state == 'cleared' and mark.seed == '') then
  return 0
end
redis.call('SET', run, format_run_mark('cleared', mark.at, '', command_id, '', '', '', '', ''), 'PX', life_ms)
settle()
return 1
