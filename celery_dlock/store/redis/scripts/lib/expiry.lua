-- lib/expiry: give a held lock the expiry that it must have.
-- @uses lock
--
-- A right may be missing for a moment. If a script stops for that after the write that creates a lock, the lock has no
-- expiry. Every script that finds the lock held calls this function. A grant has no ttl, so it never expires.

local function repair_expiry()
  local longest_ttl_ms = redis.call('HGET', lock, 'ttl')
  local left_ms = longest_ttl_ms and redis.call('PTTL', lock)
  -- If the key lives longer than every requested ttl, the server's clock went back: shorten its life.
  if left_ms and (left_ms < 0 or left_ms > tonumber(longest_ttl_ms)) then
    redis.call('PEXPIRE', lock, longest_ttl_ms)
  end
end
