-- Begin, or look at, the probation of one bucket of a server.
--
-- KEYS  1 office  string  marker, as in probation.lua
-- ARGV  1 delay     milliseconds for which a server that may have lost leases grants nothing new
--       2 term      a number that grows each time that another server takes its place; 0 where nobody counts
-- Result milliseconds that are left; 0 if it grants

local time = redis.call('TIME')
return (probation(KEYS[1], time[1] * 1000000 + time[2], ARGV[1], ARGV[2]))
