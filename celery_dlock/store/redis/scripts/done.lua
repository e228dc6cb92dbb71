-- Mark the message of an identity as ended, where nobody did so when it ended.
--
-- KEYS  1 lock    hash    as in acquire
--       2 done    string  done mark of the identity
-- ARGV  1 identity
--       2 life            milliseconds
--       3 age             microseconds since its run began: a message of the same id that came later is another
--       4 owner           of that run, whose release may be still to come
-- Result 1, or 0 if it was marked, or another message of the same id runs already. Safe to be sent twice: the first mark
-- stands.

local time = redis.call('TIME')
local began = time[1] * 1000000 + time[2] - ARGV[3]
local lock = redis.call('HMGET', KEYS[1], 'identity', 'since', 'token', 'acq')
local its_own = lock[4] and string.find(lock[4], ARGV[4] .. '.', 1, true) == 1
if lock[1] == ARGV[1] and not its_own and tonumber(lock[2] or lock[3]) > began then
  return 0
end
return redis.call('SET', KEYS[2], string.format('%.0f', began), 'PX', ARGV[2], 'NX') and 1 or 0
