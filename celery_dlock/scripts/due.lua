-- Say which locks of a bucket a sweep has to look after.
--
-- KEYS  1 index as in acquire
-- ARGV  1 how many at most
--       2 within so many microseconds from now
-- Result their names

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2] + ARGV[2])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', '0', ARGV[1])
