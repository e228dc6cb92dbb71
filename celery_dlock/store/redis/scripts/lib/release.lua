-- lib/release: what both release scripts do with a lock and its marks.
-- @uses lock channel tombstone done run acquisition tombstone_ms rolled_back done_ms
-- @uses identity used_ms requester_json seed seed_ms reserved_for once reserve
-- @after time run_mark
--
-- The including script has read fields of the lock into `ours`, `notify` and `min_hold_ms`.

-- Return the milliseconds that the lock stays held after this release because of min_hold.
local function remaining_hold_ms(now)
  local since, token = unpack(redis.call('HMGET', lock, 'since', 'token'))
  -- If the server's clock went back, the hold must not last longer than was asked for.
  return math.ceil(min_hold_ms - math.max(0, now - (since or token)) / 1000)
end

-- Free the lock, or keep it for hold_ms: for the holder's retry, or for no owner.
local function free_or_hold(hold_ms)
  if hold_ms > 0 then
    local holder = RESERVE and 'reserved:' .. reserved_for or 'kept'
    redis.call('HSET', lock, 'acq', holder, 'identity', '', 'ttl', decimal(hold_ms))
    redis.call('HDEL', lock, 'releasing', 'dup', 'min_hold', 'reserved_for')
    redis.call('PEXPIRE', lock, decimal(hold_ms))
  elseif ours then
    redis.call('DEL', lock)
  end
end

-- Wake callers that wait in their pool slot, by the command that matches their subscription. With SPUBLISH, a Cluster
-- does not forward the message to all of its nodes. A lock that stays held is announced too. The waiting caller may be
-- the retry, and other callers learn how long they have to wait.
local function notify_waiters()
  if not (ours and notify) then
    return
  elseif notify == 's' then
    redis.call('SPUBLISH', channel, '1')
  else
    redis.call('PUBLISH', channel, '1')
  end
end

local function save_run_mark(now)
  if used_ms ~= '0' then
    local used = format_run_mark('used', decimal(now), identity, acquisition, seed, requester_json, '', '', '')
    redis.call('SET', run, used, 'PX', used_ms)
  elseif seed_ms ~= '0' then
    local mark = read_run_mark(run)
    if mark.state == 'started' and mark.acquisition == acquisition then
      local ended = format_run_mark('cleared', mark.at, mark.identity, '', mark.seed, mark.by, '', '', '')
      if mark.crashed_at ~= '' then
        -- The outcome of the crashed run before this one is as unknown as it was.
        ended = format_run_mark('unknown', mark.crashed_at, mark.crashed_of, '', mark.seed, mark.crashed_by, '', '', '')
      end
      redis.call('SET', run, ended, 'PX', seed_ms)
    end
  end
end

-- Set the marks that outlive the lock. They are set even if the lease was lost: the owner check guards the lock only.
local function save_marks(final, now)
  if tombstone_ms ~= '0' then
    redis.call('SET', tombstone, '1', 'PX', tombstone_ms)
  end
  if final then
    redis.call('SET', done, decimal(now), 'PX', done_ms)
  end
  if ONCE then
    save_run_mark(now)
  end
end
