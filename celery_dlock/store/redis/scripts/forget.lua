-- Make a name as if it had never run. A body that runs just now is not stopped: only its success is noted again.
--
-- KEYS  1 used    string  its mark, as in mark.lua
-- ARGV  1 number  of this command
--       2 life    milliseconds that the number is kept, so that the same command sent twice answers as the first did
-- Result 1 if there was anything to forget

local mark = lines(redis.call('MGET', KEYS[1])[1])
if mark.acquisition == ARGV[1] then
  return 1
end
if not mark.at or (mark.state == 'free' and mark.seed == '') then
  return 0
end
redis.call('SET', KEYS[1], text_of('free', mark.at, '', ARGV[1], '', '', '', '', ''), 'PX', ARGV[2])
return 1
