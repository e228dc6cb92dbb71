-- Note that a granted message was published: from now on its grant is due only when its turn is over.
--
-- KEYS  1 lock, 2 parked, 3 index as in acquire
-- ARGV  1 identity, 2 name of the lock, 3 turn in milliseconds, doubled with each turn that was lost
-- Result 1 if the grant still stands

if redis.call('HGET', KEYS[1], 'acq') ~= 'grant:' .. ARGV[1] then
  return 0
end
local time = redis.call('TIME')
local tries = redis.call('HGET', KEYS[2], ARGV[1] .. ':tries') or 0
local due = digits(time[1] * 1000000 + time[2] + ARGV[3] * 1000 * 2 ^ tries)
redis.call('HSET', KEYS[1], 'published', '1', 'due', due)
redis.call('ZADD', KEYS[3], due, ARGV[2])
return 1
