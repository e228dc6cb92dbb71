-- lib/grant: reserve a free lock for the waiter with the lowest rank.
-- @uses lock waiting messages delayed queues lock_name
-- @after time acquisition message
--
-- A grant is a lock without an expiry, whose acq is "grant:" and the waiter's identity. Only a script ends it: the
-- waiter takes the lock, the waiter is removed, or a sweep finds the grant due. Until its message is known to be
-- published, the grant is due within 5 s. Then a sweep publishes the message, in case the granting process died.
--
-- A script may stop between any two of its writes. Therefore all scripts write in this order, and a removal reverses it:
-- 1. the name enters the index `queues`, 2. the waiter gets a place (waiting, delayed or a grant), 3. its message is
-- stored. So a stored message has a place, and a sweep finds it. A place without a message is skipped.

local PUBLISH_WITHIN_US = 5000000
-- Waiters per step, so that no script walks the whole queue.
local GROUP_SIZE = 16

-- Remove a waiter from its queue, wherever it waits. The message goes first: a place without a message is skipped.
local function remove_from_queue(waiter)
  redis.call('HDEL', messages, waiter, waiter .. ':rank', waiter .. ':tries', waiter .. ':evicted',
             waiter .. ':replaced_by')
  redis.call('ZREM', waiting, waiter)
  redis.call('ZREM', delayed, waiter)
end

local function return_delayed_waiters(now)
  for _, waiter in ipairs(redis.call('ZRANGEBYSCORE', delayed, '-inf', decimal(now), 'LIMIT', '0', GROUP_SIZE)) do
    redis.call('ZADD', waiting, redis.call('HGET', messages, waiter .. ':rank') or decimal(now), waiter)
    redis.call('ZREM', delayed, waiter)
  end
end

-- Sweep the queue again when its first delayed waiter returns.
local function schedule_next_sweep()
  local soonest = redis.call('ZRANGE', delayed, '0', '0', 'WITHSCORES')
  if soonest[1] then
    redis.call('ZADD', queues, soonest[2], lock_name)
  elseif redis.call('EXISTS', messages) == 0 then
    redis.call('ZREM', queues, lock_name)
  end
end

-- Grant the lock, which is free or ends now. Return the waiter's identity, its message, and the grant's id, or nil if no call waits.
-- The id is the time of the grant. Only the copy that was published for this grant may take the lock. A copy of an
-- earlier grant may still be at the broker, or the broker may have lost it.
local function grant_next(now, granter)
  return_delayed_waiters(now)
  while true do
    local first = redis.call('ZRANGE', waiting, '0', '0', 'WITHSCORES')
    local waiter = first[1]
    if not waiter then
      schedule_next_sweep()
      return nil
    end
    local message = redis.call('HGET', messages, waiter)
    if message then
      local grant_id, due = decimal(now), decimal(now + PUBLISH_WITHIN_US)
      local task_name, task_id = task_of(message)
      redis.call('ZADD', queues, due, lock_name)
      redis.call('DEL', lock)
      redis.call('HSET', lock, 'acq', GRANT .. waiter, 'identity', waiter, 'token', '0', 'count', '0',
                 'since', grant_id, 'task', task_name, 'id', task_id, 'process', '',
                 'rank', first[2], 'due', due, 'granter', granter, 'has_waiters', '1')
      redis.call('ZREM', waiting, waiter)
      return waiter, message, grant_id
    end
    redis.call('ZREM', waiting, waiter)
  end
end

-- End a lock that a call holds or was granted: grant it to the next waiter, or free it.
local function grant_or_free(now, granter)
  local waiter, message, grant_id = grant_next(now, granter)
  if not waiter then
    redis.call('DEL', lock)
  end
  return waiter, message, grant_id
end
