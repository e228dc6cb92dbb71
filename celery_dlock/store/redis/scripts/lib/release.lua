-- lib/release: what both release scripts do with a lock and its marks.
-- @uses lock tombstone done run unsettled acquisition tombstone_ms rolled_back done_ms
-- @uses identity used_ms requester_json seed seed_ms reserved_for once unconfirmed reserve
-- @after time run_mark unsettled wake
--
-- The including script has read fields of the lock into `ours`, `notify`, `min_hold_ms` and `operator`.

-- Return the milliseconds that the lock stays held after this release because of min_hold.
local function remaining_hold_ms(now)
  local since, token = unpack(redis.call('HMGET', lock, 'since', 'token'))
  -- If the server's clock went back, the hold must not last longer than was asked for.
  return math.ceil(min_hold_ms - math.max(0, now - (since or token)) / 1000)
end

-- Free the lock, or keep it for hold_ms: for the holder's retry, or for no owner.
local function free_or_hold(hold_ms)
  if hold_ms > 0 then
    -- The expiry first, then the new owner in one write. If the script stops before, the second copy finds its
    -- acquisition. If it stops after, the lock is kept for no longer than hold_ms.
    redis.call('PEXPIRE', lock, decimal(hold_ms))
    if operator then
      -- hold_lock asked for the lock while it was held.
      redis.call('HSET', lock, 'acq', operator, 'identity', '', 'ttl', decimal(hold_ms), 'task', '', 'id', '', 'token',
                 '0', 'since', decimal(server_time_us()), 'process', (redis.call('HGET', lock, 'reason') or '') .. ' 0')
    else
      redis.call('HSET', lock, 'acq', RESERVE and 'reserved:' .. reserved_for or 'kept', 'identity', '', 'ttl',
                 decimal(hold_ms))
    end
    redis.call('HDEL', lock, 'releasing', 'dup', 'min_hold', 'reserved_for', 'operator', 'reason', 'asked')
  elseif ours then
    redis.call('DEL', lock)
  end
end

-- Wake a caller that waits in its thread or pool slot, also if the lock stays held. That caller may be the retry, or it
-- learns how long it has to wait. Return 0: no caller waits; 8: one was woken; or 16 and the error of the server, which
-- refused to wake one.
local function wake_waiter()
  if not (ours and notify) then
    return 0
  end
  local refusal = wake_one()
  return refusal and 16 or 8, refusal
end

local function save_run_mark(now)
  if used_ms ~= '0' then
    local used = format_run_mark('used', decimal(now), identity, acquisition, seed, requester_json, '', '', '')
    redis.call('SET', run, used, 'PX', used_ms)
    settle()
  elseif seed_ms ~= '0' then
    local mark = read_run_mark(run)
    if mark.state == 'started' and mark.acquisition == acquisition then
      local ended = format_run_mark('cleared', mark.at, mark.identity, '', mark.seed, mark.by, '', '', '')
      if mark.crashed_at ~= '' then
        -- This run did not succeed, so the outcome of the crashed run before it is still unknown.
        ended = format_run_mark('unknown', mark.crashed_at, mark.crashed_of, '', mark.seed, mark.crashed_by, '', '', '')
      end
      redis.call('SET', run, ended, 'PX', seed_ms)
      if mark.crashed_at == '' then
        settle()
      else
        redis.call('ZADD', unsettled, decimal(server_time_us() + seed_ms * 1000), unsettled_member())
        if redis.call('PTTL', unsettled) < tonumber(seed_ms) then
          redis.call('PEXPIRE', unsettled, decimal(2 * seed_ms))
        end
      end
    end
  end
end

-- Set the marks that outlive the lock. They are set even if the lease was lost: the owner check guards the lock only.
local function save_marks(final, now)
  if UNCONFIRMED then
    redis.call('SET', tombstone, '1', 'PX', tombstone_ms)
  end
  if final then
    redis.call('SET', done, decimal(now), 'PX', done_ms)
  end
  if ONCE then
    save_run_mark(now)
  end
end
