-- forget_run: forget a name's last run. A body that runs now goes on, and its success is remembered again.
-- Safe to send twice: the second copy finds its own command id.
--
-- @keys run  string: lib/run_mark
-- @args command_id  names this command
-- @args life_ms  milliseconds that the command id is kept
-- @reply 1  a run was forgotten
-- @reply 0  there was nothing to forget

-- @include run_mark

local mark = read_run_mark(run)
if mark.acquisition == command_id then
  return 1
end
if not mark.at or (mark.state == 'cleared' and mark.seed == '') then
  return 0
end
redis.call('SET', run, format_run_mark('cleared', mark.at, '', command_id, '', '', '', '', ''), 'PX', life_ms)
return 1
