-- Note that a granted message is of another broker than the worker that was to publish it, or that a worker of its own
-- broker was here and only could not reach it.
--
-- KEYS  1 lock, 2 index as in acquire
-- ARGV  1 identity, 2 turn of the grant, 3 name of the lock
--       4 "1": of another broker, "2": of another broker of which workers run, "0": of its own
-- Result 1 if the grant still stands and nobody published it. Safe to be sent twice: the first note stands.

local lock = redis.call('HMGET', KEYS[1], 'acq', 'since', 'published', 'foreign')
if lock[1] ~= 'grant:' .. ARGV[1] or lock[2] ~= ARGV[2] or lock[3] then
  return 0
end
if ARGV[4] ~= '1' then
  redis.call('HDEL', KEYS[1], 'foreign')
  if ARGV[4] == '0' then
    return 1
  end
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if ARGV[4] == '1' and not lock[4] then
  redis.call('HSET', KEYS[1], 'foreign', string.format('%.0f', now))
end
-- At once, for a worker of its broker. The worker that passes it on does not look at this lock for a while.
local due = string.format('%.0f', now)
redis.call('HSET', KEYS[1], 'due', due)
redis.call('ZADD', KEYS[2], due, ARGV[3])
return 1
