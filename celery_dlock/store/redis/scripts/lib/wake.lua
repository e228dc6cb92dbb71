-- lib/wake: wake the caller that has waited for the lock for the longest time.
-- @uses wake
--
-- Waiting callers block on the list (BLPOP), and the server serves them in the order in which they came. The entry wakes
-- one of them. If none blocks at this moment, the next one to block takes it. An entry that is left expires.

local WAKE_MS = '2000'

-- Push the entry, unless there is one. If the server refuses RPUSH, return its error: then callers poll, and the
-- rest of the script must still take effect.
local function wake_one()
  if redis.call('EXISTS', wake) == 0 then
    local pushed = redis.pcall('RPUSH', wake, '1')
    if type(pushed) == 'table' then
      return pushed.err
    end
  end
  -- Also for an entry that was there: the script that pushed it may have stopped before this command.
  redis.call('PEXPIRE', wake, WAKE_MS)
  return nil
end
