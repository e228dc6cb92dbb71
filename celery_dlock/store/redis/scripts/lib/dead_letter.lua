-- lib/dead_letter: store a dead letter, and enter it in the index of its bucket.
-- @uses dead dead_letters lock_name
-- @after time
--
-- The index is a sorted set. A member is the message's identity, a space and the lock name. Its score is the time when
-- the message became a dead letter (us). A reader removes a member whose message is not among the dead letters any more
-- (check_dead_letter).

-- The index of a bucket has the newest members only. Older dead letters stay in the hash of their lock.
local INDEX_SIZE = 1000

local function store_dead_letter(identity, message, now)
  local stored_before = redis.call('HSET', dead, identity, message) == 0
  -- NX: if the command is sent twice, the time of the first copy stands. CH: a stale entry gets the new time.
  redis.call('ZADD', dead_letters, stored_before and 'NX' or 'CH', decimal(now), identity .. ' ' .. lock_name)
  if redis.call('ZCARD', dead_letters) > INDEX_SIZE then
    redis.call('ZREM', dead_letters, redis.call('ZRANGE', dead_letters, '0', '0')[1])
  end
end

local function drop_dead_letter(identity)
  redis.call('HDEL', dead, identity)
  redis.call('ZREM', dead_letters, identity .. ' ' .. lock_name)
end
