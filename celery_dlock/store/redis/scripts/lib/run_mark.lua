-- lib/run_mark: the run mark, a string of nine lines that describes a name's last run (once_per).
--
-- state         "used": the run succeeded. "started": it runs if its acquisition holds the lock; else its process died.
--               "unknown": its process died, and a later run ended without a success. "cleared": it ended without a
--               success, and only its seed is kept
-- at            microseconds: when the run succeeded; in any other state, when it started
-- identity, acquisition, by
--               of that run; by is JSON. After an operator's command, the acquisition is the id of the command. A
--               second copy of the command finds this id, and changes nothing
-- seed          part of the idempotency key: the token of the first run. Later runs inherit it until one succeeds.
-- crashed_at, crashed_of, crashed_by
--               of a started mark: at, identity and by of an earlier run whose process died; "" if there is none

local function parse_run_mark(text)
  local fields = {'state', 'at', 'identity', 'acquisition', 'seed', 'by', 'crashed_at', 'crashed_of', 'crashed_by'}
  local mark, number = {}, 1
  for line in string.gmatch((text or '') .. '\n', '([^\n]*)\n') do
    mark[fields[number] or number] = line
    number = number + 1
  end
  -- A text that another program wrote counts as no mark.
  return number == #fields + 1 and mark or {}
end

local function format_run_mark(...)
  return table.concat({...}, '\n')
end

local function read_run_mark(key)
  -- MGET, because GET fails on a key of another type.
  return parse_run_mark(redis.call('MGET', key)[1])
end
