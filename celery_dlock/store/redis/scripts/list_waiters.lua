-- list_waiters: return the first waiters of a lock.
-- Safe to send twice: it writes nothing.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys debounced  hash: lib/debounce
-- @args limit  highest number of waiters to name
-- @reply {number of waiters, identity, rank, state, due, first line of its message, ...}
--   state: "granted", "waiting", "delayed" (it lost a grant), "debounced", or "replaced" by a newer call.
--   due: the time in us from which it may be granted the lock; "0" for "granted" and "waiting"

-- @include time message place

local answer, newest = {count_waiters()}, redis.call('HGET', debounced, 'identity')

local function add_waiter(identity, rank, state, due)
  local message = redis.call('HGET', messages, identity)
  if message and #answer < 5 * limit then
    for _, value in ipairs({identity, shown_place(rank), state, due, string.match(message, FIRST_LINE)}) do
      answer[#answer + 1] = value
    end
  end
end

-- A name with seats has several locks (seats/list_waiters).
for _, one in ipairs(... or {lock}) do
  local granted_due, granted, rank = unpack(redis.call('HMGET', one, 'due', 'identity', 'rank'))
  if granted_due then
    answer[1] = answer[1] + 1
    add_waiter(granted, rank, 'granted', '0')
  end
end
local ranked = redis.call('ZRANGEBYSCORE', waiting, '0', '+inf', 'WITHSCORES', 'LIMIT', '0', limit)
for index = 1, #ranked, 2 do
  add_waiter(ranked[index], ranked[index + 1], 'waiting', '0')
end
-- These get the lock after all others: a free lock is granted to a waiter that is due.
local later = redis.call('ZRANGE', delayed, '0', limit - 1, 'WITHSCORES')
for index = 1, #later, 2 do
  local identity = later[index]
  local rank, tries, replaced_by = unpack(
    redis.call('HMGET', messages, identity .. ':rank', identity .. ':tries', identity .. ':replaced_by'))
  local state = replaced_by and 'replaced' or (identity == newest and not tries) and 'debounced' or 'delayed'
  add_waiter(identity, rank or '0', state, later[index + 1])
end
return answer
