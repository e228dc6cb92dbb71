-- Say who holds a lock.
--
-- KEYS  1 lock    hash
-- Result {acquisition, identity, token, since, left, count, pttl, task, id, node, pid}, or {} if nobody holds it

local lock = redis.call('HMGET', KEYS[1], 'acq', 'identity', 'token', 'since', 'left', 'count',
                        'task', 'id', 'node', 'pid')
if not lock[1] then
  return {}
end
return {lock[1], lock[2], lock[3], lock[4] or lock[3], lock[5] or '', lock[6],
        life(KEYS[1]), unpack(lock, 7, 10)}
