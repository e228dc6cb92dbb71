-- Note what a worker holds, for the worker that starts where it died.
--
-- KEYS  1 node    hash    of one node name: a worker's process to its note
-- ARGV  1 worker          its process
--       2 note            JSON; "": it holds nothing any more
--       3 life            milliseconds; the key's life is never shortened, because two workers may have one name

if ARGV[2] == '' then
  return redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 1
