-- Mark the message of an identity as ended, where nobody did so when it ended.
--
-- KEYS  1 done    string  done mark of the identity
-- ARGV  1 life            milliseconds
--       2 age             microseconds since that end: a message of the same id that came after it is another
-- Result 1, or 0 if it was marked. Safe to be sent twice: the first mark stands.

local time = redis.call('TIME')
local ended = string.format('%.0f', time[1] * 1000000 + time[2] - ARGV[2])
return redis.call('SET', KEYS[1], ended, 'PX', ARGV[1], 'NX') and 1 or 0
