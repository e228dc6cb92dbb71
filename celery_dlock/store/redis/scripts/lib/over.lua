-- lib/over: the end of a waiter that a newer call replaced (debounce, on_conflict="replace").
-- @uses lock waiting messages delayed queues acquisition lock_name
-- @after time holder grant unpublished_grant
--
-- The replaced call stays in `delayed` until its end is stored, with the field <identity>:over, so that its copies do
-- not run. If the process that has to store this end dies, the call becomes a waiter again END_WITHIN_US later. When
-- it is granted the lock, its message is published once more. The worker that receives the message stores the end and
-- does not run it.
--
-- The including script has set: now, rank, held.

-- Time in us in which the process that replaced a call stores that call's end.
local END_WITHIN_US = 10000000

-- Have a replaced call wait until its end is stored.
local function await_end(waiter, its_rank, by)
  redis.call('ZREM', waiting, waiter)
  redis.call('HSET', messages, waiter .. ':over', by, waiter .. ':rank', its_rank)
  redis.call('ZADD', delayed, decimal(now + END_WITHIN_US), waiter)
end

-- If the lock is free, grant it to a waiter that is due. Otherwise have the queue swept at `due`. Return the grant that
-- this command, or its first copy, has made; nil if there is none.
local function wait_until(due)
  if not held then
    return grant_next(now, acquisition)
  end
  redis.call('HSET', lock, 'has_waiters', '1')
  redis.call('ZADD', queues, 'LT', decimal(math.min(due, now + math.max(0, remaining_ms()) * 1000)), lock_name)
  return unpublished_grant(acquisition)
end

local function parked(waiter, its_message, its_grant, evicted, evicted_message, by)
  return {'parked', rank, '1', waiter or '', its_message or '', its_grant or '', evicted or '', evicted_message or '',
          by or ''}
end
