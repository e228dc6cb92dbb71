-- lib/replace: park the newest call of a name as the only waiter, and ask the running one to stop. Statements, not a
-- function: acquire_queued goes on after them only if this copy may take the lock.
-- @uses lock waiting messages delayed dead replaced identity task_id message replace_max_ms is_retry replace
-- @after time full_memory grant ended_grant unpublished_grant conflict replaced_waiter
--
-- replaced is a hash. It lives a day longer than replace_max_ms. Its fields:
--   newest, newest_rank, newest_id    identity, rank and task id of the newest call that waits or has waited
--   started_rank, started_id          the last call that started
--   busy_since                        time (us) of the first start since a body ended by itself. It may also be the
--                                     time when a granted call gave way to a newer one
--   stop:<identity>                   task id of the call that asked this holder to stop. If the holder's process dies,
--                                     the broker delivers its message again. This mark ends that delivery.
--
-- The lock has the field stop with the same task id. The holder's renewals return it (renew). It ends with the lock.
--
-- The including script has set: now, rank, holder, queued, for_this_grant, held, preceded, inherited_notify,
-- evicted_by_this.

local REPLACED_MS = 86400000
-- If the last start lies further in the future than this (us), the server's clock went back. That start is ignored.
local CLOCK_STEP_US = 1000000

local record = redis.call('HMGET', replaced, 'newest', 'newest_rank', 'newest_id', 'started_rank', 'started_id',
                          'busy_since', 'stop:' .. identity)
local newest, newest_rank, newest_id, started_rank, started_id, busy_since, stopped_by = unpack(record)
-- No body has ended by itself for replace_max_ms, so the running one is left alone.
local left_alone = busy_since and now - busy_since >= replace_max_ms * 1000
local newest_message = message_of_waiter(newest)

-- The id of a newer call that has started. A retry is as old as the run that it repeats. After self.replace ("2"), the
-- message has the id of a call that may have run under another name. Such a message is as old as its own rank.
local started_later = false
if started_id and tonumber(started_rank) <= now + CLOCK_STEP_US then
  if started_id == task_id then
    if is_retry ~= '0' then
      rank = started_rank
    end
  elseif is_retry == '1' or tonumber(rank) < tonumber(started_rank) then
    started_later = started_id
  end
end
local another = newest_message and newest_id ~= task_id and newest_id
local newer = another and tonumber(rank) < tonumber(newest_rank) and newest_id

-- Ask the holder to stop, once. Only a holder that took the lock under this policy listens.
local function request_stop()
  local fields = redis.call('HMGET', lock, 'replaceable', 'stop', 'identity', 'id')
  local listens, asked, its_identity, its_id = unpack(fields)
  -- The identity is empty if an operator holds the lock, or if min_hold keeps it after its run.
  if listens and not asked and its_identity ~= '' and its_id ~= task_id then
    redis.call('HSET', lock, 'stop', task_id)
    redis.call('HSET', replaced, 'stop:' .. its_identity, task_id)
  end
end

if for_this_grant then
  -- This call may have been granted the lock before a newer one came.
  local by = replaced_by or stopped_by or started_later or (not left_alone and another)
  if by then
    begin_writing()
    if not busy_since then
      -- No body starts while each granted call finds a newer one. So the time for replace_max_ms begins here.
      redis.call('HSET', replaced, 'busy_since', decimal(now))
      redis.call('PEXPIRE', replaced, decimal(REPLACED_MS + replace_max_ms))
    end
    return give_way(by)
  end
elseif queued then
  return queued_answer()
elseif stopped_by or started_later or held or preceded or newest_message then
  if message == '' then
    return must_wait(count_waiters() - delayed_waiters())
  end
  local by = stopped_by or started_later or newer
  if by then
    return park_replaced(by)
  end
  sweep_at(math.huge)
  redis.call('ZADD', waiting, rank, identity)
  redis.call('HSET', messages, identity, message)
  redis.call('HDEL', dead, identity)
  -- A granted call that finds this newer one ends itself.
  local evicted = newest_message and holder ~= GRANT .. newest and newest or nil
  if evicted then
    await_end(newest, newest_rank, task_id)
    redis.call('HSET', messages, identity .. ':evicted', newest)
  end
  redis.call('HSET', replaced, 'newest', identity, 'newest_rank', rank, 'newest_id', task_id)
  redis.call('PEXPIRE', replaced, decimal(REPLACED_MS + replace_max_ms))
  if held and not left_alone then
    request_stop()
  end
  local waiter, its_message, its_grant = grant_if_free()
  return parked(waiter, its_message, its_grant, evicted, evicted and newest_message, task_id)
end
