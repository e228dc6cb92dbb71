-- lib/place: the place of a waiter in its queue.
-- @uses waiting delayed
-- @after time
--
-- A place is the waiter's rank, moved to the time of publication. But a duplicate of a message that has started
-- precedes all waiters: its place is negative. Its message runs, or its process has died. So it is no waiter: it does
-- not count for queue_limit, is not evicted, and operators see it only once it is granted the lock.

local BEFORE_ALL_US = 4503599627370496 -- 2^52
-- A name has one such duplicate, or a few if several of its processes have died.
local MOST_DUPLICATES = 16

local function place_before_all(rank)
  return decimal(math.min(-1, rank - BEFORE_ALL_US))
end

-- Return a place as operators see it.
local function shown_place(place)
  return tonumber(place) < 0 and decimal(place + BEFORE_ALL_US) or place
end

-- Return how many calls wait. Duplicates of started messages in `waiting` do not count, those in `delayed` do.
local function count_waiters()
  local duplicates = redis.call('ZRANGEBYSCORE', waiting, '-inf', '(0', 'LIMIT', '0', MOST_DUPLICATES)
  return redis.call('ZCARD', waiting) - #duplicates + redis.call('ZCARD', delayed)
end
