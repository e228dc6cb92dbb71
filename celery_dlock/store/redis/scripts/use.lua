-- Say what became of the last run of a name.
--
-- KEYS  1 lock    hash
--       2 used    string  its mark, as in mark.lua
-- Result {mark, pttl, acquisition that holds the lock or ""}, or {} if the name is free

local mark = redis.call('MGET', KEYS[2])[1]
local state = lines(mark).state
if state ~= 'used' and state ~= 'begun' and state ~= 'unknown' then
  return {}
end
return {mark, redis.call('PTTL', KEYS[2]), redis.call('HGET', KEYS[1], 'acq') or ''}
