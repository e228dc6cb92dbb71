-- Prolong a claim, because a worker knows its message. Never creates one.
--
-- KEYS  1 queued          as in claim
-- ARGV  1 id, 2 life      as in claim; the key's life is never shortened
-- Result 1 if the claim stands

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then
  return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
