-- lib/replaced_waiter: the end of a waiter that a newer call replaced (debounce, on_conflict="replace").
-- @uses lock waiting messages delayed queues dead replaced acquisition identity message lock_name replace
-- @after time holder full_memory grant ended_grant unpublished_grant
--
-- The replaced call stays in `delayed` until its end is stored, with the field <identity>:replaced_by, so that its
-- copies do not run. If the process that has to store this end dies, the call becomes a waiter again END_WITHIN_US
-- later. When it is granted the lock, its message is published once more. The worker that receives the message stores
-- the end and does not run it.
--
-- The including script has set: now, rank, queued, held, inherited_notify, evicted_by_this.

-- Time in us in which the process that replaced a call stores that call's end.
local END_WITHIN_US = 10000000

-- Have a replaced call wait until its end is stored. A call that is not parked yet is parked with its message.
local function await_end(waiter, its_rank, by, its_message)
  redis.call('ZADD', delayed, decimal(now + END_WITHIN_US), waiter)
  local facts = {waiter .. ':replaced_by', by, waiter .. ':rank', its_rank}
  if its_message then
    facts[5], facts[6] = waiter, its_message
  end
  redis.call('HSET', messages, unpack(facts))
  redis.call('ZREM', waiting, waiter)
end

-- Have the queue swept at `due`, and earlier if the lock expires earlier. lib/grant says why this is the first write.
local function sweep_at(due)
  local latest = now + END_WITHIN_US
  if held then
    redis.call('HSET', lock, 'has_waiters', '1')
    latest = now + math.max(0, remaining_ms()) * 1000
  end
  redis.call('ZADD', queues, 'LT', decimal(math.min(due, latest)), lock_name)
end

-- If the lock is free, grant it to a waiter that is due. Return the grant that this command, or its first copy, has
-- made; nil if there is none.
local function grant_if_free()
  if held then
    return unpublished_grant(acquisition)
  end
  return grant_next(now, acquisition)
end

local function parked(waiter, its_message, its_grant, evicted, evicted_message, by)
  return {'parked', rank, '1', waiter or '', its_message or '', its_grant or '', evicted or '', evicted_message or '',
          by or ''}
end

local replaced_by = queued and redis.call('HGET', messages, identity .. ':replaced_by')

-- Return the message of another call, if it waits and no newer call has replaced it.
local function message_of_waiter(other)
  local its_message = other and other ~= identity and redis.call('HGET', messages, other)
  return its_message and not redis.call('HGET', messages, other .. ':replaced_by') and its_message
end

-- Have this call, whose grant this is, give way to a newer one.
local function give_way(by)
  local its_message = redis.call('HGET', messages, identity)
  await_end(identity, rank, by)
  if REPLACE then
    redis.call('HDEL', replaced, 'stop:' .. identity)
  end
  local waiter, next_message, next_grant = grant_or_free(now, acquisition)
  keep_notify(inherited_notify, waiter)
  return parked(waiter, next_message, next_grant, identity, its_message, by)
end

-- Park this call, which a newer one has replaced before it came.
local function park_replaced(by)
  sweep_at(now + END_WITHIN_US)
  await_end(identity, rank, by, message)
  redis.call('HDEL', dead, identity)
  if REPLACE then
    redis.call('HDEL', replaced, 'stop:' .. identity)
  end
  local waiter, its_message, its_grant = grant_if_free()
  return parked(waiter, its_message, its_grant, identity, message, by)
end

-- Return the answer for a call that is parked already.
local function queued_answer()
  local waiter, its_message, its_grant = unpublished_grant(acquisition)
  if replaced_by then
    -- A newer call replaced this one. If this is the second copy of the command that parked it, the worker that sent
    -- both has to store its end.
    return parked(waiter, its_message, its_grant, identity, redis.call('HGET', messages, identity), replaced_by)
  end
  return parked(waiter, its_message, its_grant, evicted_by_this())
end
