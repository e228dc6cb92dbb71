-- lib/release: what both release scripts do with a lock and its marks.
-- @uses lock tombstone done run unsettled acquisition tombstone_ms rolled_back done_ms message unconfirmed reserve
--
-- @uses identity used_ms requester_json seed seed_ms reserved_for reserve_ms once
-- @after time acquisition run_mark unsettled wake
--
-- The including script has set `ours`, `stopped_by`, and from the fields of the lock: dup, notify, has_waiters and
-- min_hold_ms.
--
-- A lock with min_hold stays held until min_hold has passed. Its holder is then "kept", so no owner has it. A lock that
-- is reserved for a retry has the holder "reserved:" and the identity of the retry.
--
-- Done marks are rare. One is set if a duplicate is known: the lock has the field dup. One is also set if the lock was
-- lost, because that field was lost with it, and a duplicate may have been noted in it. One is also set if a newer call
-- asked this run to stop, or if the lock is reserved for a retry. Otherwise a late duplicate of this message would
-- compete with the retry.

local duplicate_seen = ours and dup == '1'
local crowded = ours and has_waiters
local reserves = ours and RESERVE
local final = MESSAGE and done_ms ~= '0' and (duplicate_seen or reserves or stopped_by or not ours)
-- Set if an operator's hold begins with this release: hold_lock has set min_hold.
local operator = ours and min_hold_ms and redis.call('HGET', lock, 'operator')
local holds = ours and (rolled_back ~= '1' or operator) and min_hold_ms
local now = nil
if final or crowded or holds or reserves or (ONCE and used_ms ~= '0') then
  now = server_time_us()
end

-- Milliseconds that the lock stays held after this release.
local hold_ms = reserves and tonumber(reserve_ms) or 0
if holds then
  local since, token = unpack(redis.call('HMGET', lock, 'since', 'token'))
  -- If the server's clock went back, the hold must not last longer than was asked for.
  hold_ms = math.max(hold_ms, math.ceil(min_hold_ms - math.max(0, now - (since or token)) / 1000))
end

-- Free the lock, or keep it for hold_ms: for the holder's retry, for an operator, or for no owner.
local function free_or_hold()
  if hold_ms > 0 then
    -- The expiry first, then the new owner in one write. If the script stops before, the second copy finds its
    -- acquisition. If it stops after, the lock is kept for no longer than hold_ms.
    redis.call('PEXPIRE', lock, decimal(hold_ms))
    if operator then
      -- hold_lock asked for the lock while it was held.
      redis.call('HSET', lock, 'acq', operator, 'identity', '', 'ttl', decimal(hold_ms), 'task', '', 'id', '', 'token',
                 '0', 'since', decimal(server_time_us()), 'process', (redis.call('HGET', lock, 'reason') or '') .. ' 0')
    else
      redis.call('HSET', lock, 'acq', RESERVE and RESERVED .. reserved_for or KEPT, 'identity', '', 'ttl',
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

local function save_run_mark()
  if used_ms ~= '0' then
    local used = format_run_mark('used', decimal(now), identity, acquisition, seed, requester_json, '', '', '')
    redis.call('SET', run, used, 'PX', used_ms)
    settle()
  elseif seed_ms ~= '0' then
    local mark = read_run_mark(run)
    if mark.state == 'started' and mark.acquisition == acquisition then
      if mark.crashed_at == '' then
        local ended = format_run_mark('cleared', mark.at, mark.identity, '', mark.seed, mark.by, '', '', '')
        redis.call('SET', run, ended, 'PX', seed_ms)
        settle()
      else
        -- This run did not succeed, so the outcome of the crashed run before it is still unknown.
        local unknown = format_run_mark('unknown', mark.crashed_at, mark.crashed_of, '', mark.seed, mark.crashed_by,
                                        '', '', '')
        redis.call('SET', run, unknown, 'PX', seed_ms)
        redis.call('ZADD', unsettled, decimal(server_time_us() + seed_ms * 1000), unsettled_member())
        if redis.call('PTTL', unsettled) < tonumber(seed_ms) then
          redis.call('PEXPIRE', unsettled, decimal(2 * seed_ms))
        end
      end
    end
  end
end

-- Set the marks that outlive the lock. They are set even if the lease was lost: the owner check guards the lock only.
local function save_marks()
  if UNCONFIRMED then
    redis.call('SET', tombstone, '1', 'PX', tombstone_ms)
  end
  if final then
    redis.call('SET', done, decimal(now), 'PX', done_ms)
  end
  if ONCE then
    save_run_mark()
  end
end
