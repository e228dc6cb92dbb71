-- list_waiters: return the first waiters of a lock, by rank.
-- Safe to send twice: it writes nothing.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @args limit  highest number of waiters to name
-- @reply {number of waiters, rank, first line of its message, rank, ...}  a granted message counts until it runs

-- @include time place

local due, granted, granted_rank = unpack(redis.call('HMGET', lock, 'due', 'identity', 'rank'))
local count = redis.call('ZCARD', waiting) - count_duplicates() + redis.call('ZCARD', delayed) + (due and 1 or 0)
local answer = {count}

local function add_waiter(identity, rank)
  local message = redis.call('HGET', messages, identity)
  if message and #answer < 2 * limit then
    answer[#answer + 1] = shown_place(rank)
    answer[#answer + 1] = string.match(message, '^[^\n]*')
  end
end

if due then
  add_waiter(granted, granted_rank)
end
for _, identity in ipairs(redis.call('ZRANGE', delayed, '0', limit - 1)) do
  add_waiter(identity, redis.call('HGET', messages, identity .. ':rank') or '0')
end
local ranked = redis.call('ZRANGEBYSCORE', waiting, '0', '+inf', 'WITHSCORES', 'LIMIT', '0', limit)
for place = 1, #ranked, 2 do
  add_waiter(ranked[place], ranked[place + 1])
end
return answer
