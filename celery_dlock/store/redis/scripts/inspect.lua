-- inspect: return the holder of a lock.
-- Safe to send twice: it writes at most an expiry that is missing.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @reply {acquisition, identity, token, since_us, releasing, count, left_ms, task, id, node, pid}  held
-- @reply {}  free

-- @include time holder expiry

if redis.call('HEXISTS', lock, 'acq') == 0 then
  return {}
end
-- A caller that polls until the lock is free must not poll for ever.
repair_expiry()
return with_holder()
