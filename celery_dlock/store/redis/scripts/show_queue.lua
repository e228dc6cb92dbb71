-- show_queue: return the first waiters of a lock with their identities, for operators.
-- Safe to send twice: it writes nothing.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @args limit  highest number of waiters to name
-- @reply {number of waiters, identity, rank, state, first line of its message, ...}  state: "granted", "delayed" or
--   "waiting"

local due, granted, granted_rank = unpack(redis.call('HMGET', lock, 'due', 'identity', 'rank'))
local answer = {redis.call('ZCARD', waiting) + redis.call('ZCARD', delayed) + (due and 1 or 0)}

local function add_waiter(identity, rank, state)
  local message = redis.call('HGET', messages, identity)
  if message and #answer < 4 * limit then
    for _, value in ipairs({identity, rank, state, string.match(message, '^[^\n]*')}) do
      answer[#answer + 1] = value
    end
  end
end

if due then
  add_waiter(granted, granted_rank, 'granted')
end
for _, identity in ipairs(redis.call('ZRANGE', delayed, '0', limit - 1)) do
  add_waiter(identity, redis.call('HGET', messages, identity .. ':rank') or '0', 'delayed')
end
local ranked = redis.call('ZRANGE', waiting, '0', limit - 1, 'WITHSCORES')
for place = 1, #ranked, 2 do
  add_waiter(ranked[place], ranked[place + 1], 'waiting')
end
return answer
