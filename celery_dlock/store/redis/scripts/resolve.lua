-- Say what became of a run of which nobody knows that.
--
-- KEYS  1 lock    hash
--       2 used    string  its mark, as in mark.lua
-- ARGV  1 number  of this command
--       2 state   'used': it did its work. 'free': it did not, and the next run has its seed
--       3 window  milliseconds that this is kept
-- Result 1 if it was unknown until now; sent twice, the second finds its own number

local mark = lines(redis.call('MGET', KEYS[2])[1])
if mark.acquisition == ARGV[1] then
  return 1
end
local died = mark.state == 'begun' and redis.call('HGET', KEYS[1], 'acq') ~= mark.acquisition
if mark.state ~= 'unknown' and not died then
  return 0
end
redis.call('SET', KEYS[2], text_of(ARGV[2], mark.at, mark.identity, ARGV[1], mark.seed, mark.by, '', '', ''), 'PX',
           ARGV[3])
return 1
