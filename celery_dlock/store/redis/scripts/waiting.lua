-- Say who waits for a lock, by rank.
--
-- KEYS  1 lock, 2 waiting, 3 parked, 4 later as in acquire
-- ARGV  1 how many to name
-- Result {how many, rank, who, rank, who, ...}, who as the first line of the entry; a granted message waits until it runs

local lock = redis.call('HMGET', KEYS[1], 'due', 'identity', 'rank')
local count = redis.call('ZCARD', KEYS[2]) + redis.call('ZCARD', KEYS[4]) + (lock[1] and 1 or 0)
local answer = {count}
local function name(identity, rank)
  local entry = redis.call('HGET', KEYS[3], identity)
  if entry and #answer < 2 * ARGV[1] then
    answer[#answer + 1] = rank
    answer[#answer + 1] = string.match(entry, '^[^\n]*')
  end
end
if lock[1] then
  name(lock[2], lock[3])
end
for _, identity in ipairs(redis.call('ZRANGE', KEYS[4], '0', ARGV[1] - 1)) do
  name(identity, redis.call('HGET', KEYS[3], identity .. ':rank') or '0')
end
local waiting = redis.call('ZRANGE', KEYS[2], '0', ARGV[1] - 1, 'WITHSCORES')
for place = 1, #waiting, 2 do
  name(waiting[place], waiting[place + 1])
end
return answer
