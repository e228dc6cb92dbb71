-- Say who holds a lock.
--
-- KEYS  1 lock    hash
-- Result {acquisition, identity, token, since, by, left, count, pttl}, or {} if nobody holds it

local lock = redis.call('HMGET', KEYS[1], 'acq', 'identity', 'token', 'since', 'by', 'left', 'count')
if not lock[1] then
  return {}
end
return {lock[1], lock[2], lock[3], lock[4] or lock[3], lock[5], lock[6] or '', lock[7],
        redis.call('PTTL', KEYS[1])}
