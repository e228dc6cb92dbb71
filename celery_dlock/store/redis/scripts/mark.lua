-- Part of every script that knows what became of a name's last run (once_per): its mark, a string of nine lines.
--
-- state         'used': it succeeded. 'begun': it runs, or died; it runs while the lock is held by its acquisition.
--               'unknown': it died, and so nobody knows how far it came; a later one ended without a success.
--               'free': it ended without a success, and only its seed is kept
-- at            microseconds: when it succeeded; of any other, when it began
-- identity, acquisition, by   of that run; by as JSON. Of a name that was settled by hand the acquisition is the number
--               of that command, so that the second of two equal ones finds that it is done
-- seed          what the idempotency key is made of: the token of the first run, handed on until a success
-- crashed_at, crashed_of, crashed_by   of a begun mark: at, identity and by of an earlier run that died, '' if none did

local function lines(mark)
  -- Here, not above: who has no once_per pays nothing for it.
  local fields = {'state', 'at', 'identity', 'acquisition', 'seed', 'by', 'crashed_at', 'crashed_of', 'crashed_by'}
  local found, place = {}, 1
  for line in string.gmatch((mark or '') .. '\n', '([^\n]*)\n') do
    found[fields[place] or place] = line
    place = place + 1
  end
  -- What is not ours says nothing.
  return place == #fields + 1 and found or {}
end

local function text_of(...)
  return table.concat({...}, '\n')
end
