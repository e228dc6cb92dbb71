-- Move a lease's deadline and note facts about the holder, if the acquisition still holds the lock.
--
-- KEYS  1 lock    hash
-- ARGV  1 acquisition     owner and number
--       2 ttl             milliseconds; the key's life is never shortened
--       3... field, value facts to set: count (stated absolutely), left, word
-- Result 1 if renewed, 0 if another holds the lock or nobody does: renewing never creates.

if redis.call('HGET', KEYS[1], 'acq') ~= ARGV[1] then
  return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if #ARGV > 2 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 3))
end
return 1
