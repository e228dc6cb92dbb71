-- Move a lease's deadline and note facts about the holder, if the acquisition still holds the lock.
--
-- KEYS  1 lock    hash
-- ARGV  1 acquisition     owner and number
--       2 ttl             milliseconds; the key's life is never shortened
--       3... field, value facts to set: count (stated absolutely), left, word
-- Result 1 if renewed, 0 if another holds the lock or nobody does: renewing never creates.

local lock = redis.call('HMGET', KEYS[1], 'acq', 'ttl')
if lock[1] ~= ARGV[1] then
  return 0
end
local ttl = tonumber(ARGV[2])
local longest = math.max(ttl, tonumber(lock[2] or '0'))
local life = redis.call('PTTL', KEYS[1])
if life > longest then
  -- Nobody asked for so long a life: the server's clock went back.
  life = ttl
end
-- Also where nothing changes: a script that has written may go on to write when the server's memory is full.
redis.call('PEXPIRE', KEYS[1], math.max(life, ttl))
if lock[2] and ttl > tonumber(lock[2]) then
  redis.call('HSET', KEYS[1], 'ttl', ARGV[2])
end
if #ARGV > 2 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 3))
end
return 1
