-- inspect: return the holder of a lock.
-- Safe to send twice: it writes at most an expiry that is missing.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @reply {acquisition, identity, token, since_us, releasing, count, left_ms, task, id, node, pid}  held
-- @reply {}  free

-- @include time holder expiry

local found = redis.call('HMGET', lock, 'acq', 'identity', 'token', 'since', 'releasing', 'count', 'task', 'id',
                         'process')
if not found[1] then
  return {}
end
-- A caller that polls until the lock is free must not poll for ever.
repair_expiry()
return {found[1], found[2], found[3], found[4] or found[3], found[5] or '', found[6] or '1',
        remaining_ms(), found[7], found[8], node_and_pid(found[9])}
