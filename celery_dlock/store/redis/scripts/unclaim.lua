-- Give a claim up: its message has started or ended, or was not published.
--
-- KEYS  1 queued          as in claim
--       2 gone            tombstone of this attempt, only with one
-- ARGV  1 id, 2 turn      as in claim; a claim of a later turn stays
--       3 attempt         as in claim, where it is not known whether that claim took effect: it will not any more, and
--                         another attempt's stays
--       4 tombstone       milliseconds that a late claim is refused
-- Result 1 if the claim was this one's

if KEYS[2] then
  redis.call('SET', KEYS[2], '1', 'PX', ARGV[4])
end
local claim = redis.call('HMGET', KEYS[1], 'id', 'turn', 'attempt')
if claim[1] ~= ARGV[1] or tonumber(claim[2]) > tonumber(ARGV[2]) or (ARGV[3] and claim[3] ~= ARGV[3]) then
  return 0
end
return redis.call('DEL', KEYS[1])
