-- sweep: visit one lock with waiters: grant it if it is free, and end a grant that no worker took in time.
-- Safe to send twice: the second copy finds the grant of the first, and names it until its message is published.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys wake  list: lib/wake
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @keys dead  hash, as in acquire_queued
-- @keys dead_letters  sorted set of this bucket: lib/dead_letter
-- @keys seats  string: seats/common; only tasks with `limit` write it
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args lock_name  text of the lock name
-- @args granter  id of this call; a second copy of the command returns the unpublished grant of the first at once
-- @args grant_timeout_ms  milliseconds from a lost grant to the waiter's next one, doubled with each lost grant. None
--   after the first lost grant of the only waiter
-- @args max_tries  lost grants after which a message becomes a dead letter
-- @args foreign_ms  milliseconds after which a message becomes a dead letter if only workers of other brokers swept
-- @args pause_ms  milliseconds for which duplicates of started messages wait; "0": none. The pool child of such a message
--   has died, and the done mark of the message may still be set
-- @reply {identity, message, grant id, dead letter, lost grant}  "" for missing values.
--   The lost grant is an identity. A second copy of the command does not name it.
--   The dead letter is an identity, followed by " foreign" if no worker of its broker published it

-- @include time acquisition wake message grant ended_grant dead_letter expiry full_memory parked_rank restore_places

local found = redis.call('HMGET', lock, 'acq', 'due', 'granter', 'published', 'identity', 'rank', 'since',
                         'dead_letter', 'foreign', 'notify')
local holder, due, current_granter, published, waiter, rank, grant_id, last_dead_letter, foreign_since, notify =
  unpack(found)
local now = server_time_us()
local nothing = {'', '', '', '', ''}
-- seats/sweep has checked the places of all seats. If a task without `limit` uses the name too, leave that to seats/sweep.
local places_checked = ...
begin_writing()
if not places_checked and redis.call('EXISTS', seats) == 0 then
  restore_places(now, {[due and waiter or ''] = true})
end
if holder and not due then
  repair_expiry()
  -- A lease, not a grant: visit the lock again when the lease has expired.
  if redis.call('EXISTS', waiting, delayed, messages) > 0 then
    redis.call('HSET', lock, 'has_waiters', '1')
    redis.call('ZADD', queues, decimal(now + math.max(0, redis.call('PTTL', lock)) * 1000), lock_name)
  else
    redis.call('ZREM', queues, lock_name)
  end
  return nothing
end

local dead_letter, lost_grant, lost_grants = '', '', nil
if holder then
  local message = redis.call('HGET', messages, waiter)
  local early = tonumber(due) > now
  if message and early and (published or current_granter ~= granter) then
    redis.call('ZADD', queues, due, lock_name)
    return nothing
  end
  local abandoned = foreign_since and not published and now - foreign_since >= foreign_ms * 1000
  if message and not published and not abandoned then
    -- The granter may have died before it published the message: this caller publishes it.
    local next_due = decimal(now + PUBLISH_WITHIN_US)
    if current_granter ~= granter then
      redis.call('HDEL', lock, 'dead_letter')
    end
    redis.call('HSET', lock, 'due', next_due, 'granter', granter)
    redis.call('ZADD', queues, next_due, lock_name)
    return {waiter, message, grant_id, current_granter == granter and last_dead_letter or '', ''}
  end
  if message then
    lost_grant = not abandoned and waiter or ''
    local tries = (redis.call('HGET', messages, waiter .. ':tries') or 0) + 1
    if abandoned or tries >= tonumber(max_tries) then
      store_dead_letter(waiter, message, now)
      remove_from_queue(waiter)
      dead_letter = waiter .. (abandoned and ' foreign' or '')
    else
      local pause_ms = grant_timeout_ms * 2 ^ (tries - 1)
      if tries == 1 and redis.call('EXISTS', waiting, delayed) == 0 then
        -- No other call waits. Grant it again at once after its first lost grant: usually a worker died.
        pause_ms = 0
      end
      redis.call('ZADD', delayed, decimal(now + pause_ms * 1000), waiter)
      redis.call('HSET', messages, waiter .. ':rank', rank)
      lost_grants = tries
    end
  end
end
if pause_ms ~= '0' then
  -- A negative place: lib/place.
  for _, duplicate in ipairs(redis.call('ZRANGEBYSCORE', waiting, '-inf', '(0', 'LIMIT', '0', GROUP_SIZE)) do
    redis.call('HSET', messages, duplicate .. ':rank', redis.call('ZSCORE', waiting, duplicate))
    redis.call('ZADD', delayed, decimal(now + pause_ms * 1000), duplicate)
    redis.call('ZREM', waiting, duplicate)
  end
end
-- If the script stops before the lock ends, the next sweep does all this again. So the lost grant is counted after it.
local end_lock = holder and grant_or_free or grant_next
local next_waiter, next_message, next_grant = end_lock(now, granter)
if lost_grants then
  redis.call('HSET', messages, waiter .. ':tries', decimal(lost_grants))
end
keep_notify(notify, next_waiter)
if next_waiter and dead_letter ~= '' then
  -- If this command is sent twice, the second copy names the dead letter again.
  redis.call('HSET', lock, 'dead_letter', dead_letter)
end
return {next_waiter or '', next_message or '', next_grant or '', dead_letter, lost_grant}
