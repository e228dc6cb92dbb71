-- lib/debounce: park a call until no newer call of its name has arrived for some time. Statements, not a function:
-- acquire_queued goes on after them only if this copy may take the lock.
-- @uses lock waiting messages delayed queues dead debounced acquisition identity task_id lock_name message
-- @uses debounce_ms debounce_max_ms debounce
-- @after time full_memory grant ended_grant unpublished_grant conflict replaced_waiter
--
-- A call waits in `delayed` until it is due. A newer call replaces it (lib/replaced_waiter).
--
-- debounced is a hash. It has identity, rank and task id of the newest call, and the time in us at which that call is
-- due in any case. It also has the rank of the last call that started. After its last change, it lives a day longer
-- than debounce_max_ms.
--
-- The including script has set: now, rank, holder, queued, granted, for_this_grant, held, inherited_notify,
-- evicted_by_this, debounced_life_ms.

local record = redis.call('HMGET', debounced, 'identity', 'rank', 'task_id', 'due_at_last', 'started')
local newest, newest_rank, newest_id, due_at_last, started = unpack(record)
local older = started and newest ~= identity and tonumber(rank) < tonumber(started)

if for_this_grant then
  if replaced_by or older then
    begin_writing()
    return give_way(replaced_by or newest_id)
  end
  if not newest then
    -- The record expired while the call waited, for example while all workers were away.
    redis.call('HSET', debounced, 'identity', identity, 'rank', rank, 'task_id', task_id, 'due_at_last', since)
    redis.call('PEXPIRE', debounced, debounced_life_ms)
  end
elseif queued then
  return queued_answer()
else
  if message == '' then
    return {'queue', redis.call('ZCARD', waiting) + redis.call('ZCARD', delayed), rank}
  end
  local newest_message = message_of_waiter(newest)
  if older or (newest_message and tonumber(rank) < tonumber(newest_rank)) then
    return park_replaced(newest_id)
  end
  local due, last = now + debounce_ms * 1000, now + debounce_max_ms * 1000
  -- A granted call is about to start, so it is not replaced.
  local evicted = newest_message and holder ~= GRANT .. newest and newest or nil
  if evicted then
    last = tonumber(due_at_last)
    due = math.max(due, tonumber(redis.call('ZSCORE', delayed, newest) or 0))
  end
  due = math.min(due, last)
  sweep_at(due)
  redis.call('ZADD', delayed, decimal(due), identity)
  redis.call('HSET', messages, identity, message, identity .. ':rank', rank)
  redis.call('HDEL', dead, identity)
  if evicted then
    await_end(newest, newest_rank, task_id)
    redis.call('HSET', messages, identity .. ':evicted', newest)
  end
  redis.call('HSET', debounced, 'identity', identity, 'rank', rank, 'task_id', task_id, 'due_at_last', decimal(last))
  redis.call('PEXPIRE', debounced, debounced_life_ms)
  local waiter, its_message, its_grant = grant_if_free()
  return parked(waiter, its_message, its_grant, evicted, evicted and newest_message, task_id)
end
