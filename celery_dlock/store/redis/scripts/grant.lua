-- Part of every script that can free a lock: keep it for the waiter with the lowest rank.
--
-- A grant is a lock without an expiry, whose acq is 'grant:' and the waiter's identity; only a script ends it: the
-- waiter takes it, is taken out, or a sweep finds it due. Until its message is known to be published it is due soon,
-- so that a sweep publishes what a dead process did not.
-- Takes  the keys of the lock and its queue, the lock's name, the server's time, and who grants
-- Result the waiter's identity, its entry, and its turn: when it was granted. Only the copy that was published for this
--        turn may take it: another one's delivery may be lost to its broker, which then has no copy any more.

local PUBLISH_WITHIN = 5000000
local GROUP = 16

local function digits(number)
  -- Lua prints large numbers as 1.8e+15; this keeps all digits (exact up to 2^53).
  return string.format('%.0f', number)
end

local function text(value)
  return type(value) == 'string' and value or ''
end

local function grant(lock, queue, name, now, granter)
  local waiting, parked, later, index = unpack(queue)
  -- Those who gave a turn away come back to their old rank; a group at a time, so that no script walks the queue.
  for _, identity in ipairs(redis.call('ZRANGEBYSCORE', later, '-inf', digits(now), 'LIMIT', '0', GROUP)) do
    redis.call('ZADD', waiting, redis.call('HGET', parked, identity .. ':rank') or digits(now), identity)
    redis.call('ZREM', later, identity)
  end
  while true do
    local head = redis.call('ZPOPMIN', waiting)
    local identity = head[1]
    if not identity then
      local soonest = redis.call('ZRANGE', later, '0', '0', 'WITHSCORES')
      if soonest[1] then
        redis.call('ZADD', index, soonest[2], name)
      else
        redis.call('ZREM', index, name)
      end
      return nil
    end
    local entry = redis.call('HGET', parked, identity)
    if entry then
      local due = digits(now + PUBLISH_WITHIN)
      local readable, who = pcall(cjson.decode, string.match(entry, '^[^\n]*'))
      if not readable or type(who) ~= 'table' then
        who = {}
      end
      redis.call('HSET', lock, 'acq', 'grant:' .. identity, 'identity', identity, 'token', '0', 'count', '0',
                 'since', digits(now), 'task', text(who[1]), 'id', text(who[2]), 'node', '', 'pid', '0',
                 'rank', head[2], 'due', due, 'granter', granter, 'queue', '1')
      redis.call('PERSIST', lock)
      redis.call('ZADD', index, due, name)
      return identity, entry, digits(now)
    end
  end
end

-- Seconds are told as milliseconds, of a grant those until it is due.
local function life(lock)
  local due = redis.call('HGET', lock, 'due')
  if due then
    local time = redis.call('TIME')
    return math.max(0, math.floor((due - time[1] * 1000000 - time[2]) / 1000))
  end
  return redis.call('PTTL', lock)
end

-- Take an identity out of the queue, wherever it waits.
local function forget(queue, identity)
  redis.call('ZREM', queue[1], identity)
  redis.call('ZREM', queue[3], identity)
  redis.call('HDEL', queue[2], identity, identity .. ':rank', identity .. ':tries', identity .. ':ousts')
end
