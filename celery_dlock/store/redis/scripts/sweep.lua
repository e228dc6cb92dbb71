-- Look after one lock with waiters: grant it where it is free, and end a grant that nobody took.
--
-- KEYS  1 lock, 2 waiting, 3 parked, 4 later, 5 index, 6 dead, as in acquire
--       7 wake    the name of no key: so a Cluster runs this script only where no key of its slot is on its way to
--                 another node. Else it would be cut off at the first key that it deletes, half done
-- ARGV  1 name     of the lock
--       2 granter  an acquisition whose own unpublished grant is wanted at once, or whom to note
--       3 turn     milliseconds from a lost turn to the next, doubled with each
--       4 tries    lost turns after which a message goes to the dead letters
--       5 foreign  milliseconds after which it does so too if only workers of other brokers were to publish it
-- Result {granted identity, entry, turn, buried identity}, "" for what there is not; behind a buried identity " foreign" if
-- no worker of its broker published it
--
-- A grant that is not known to be published is given out again when it is due, to be published by whoever sweeps.

local queue = {KEYS[2], KEYS[3], KEYS[4], KEYS[5]}
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local lock = redis.call('HMGET', KEYS[1], 'acq', 'due', 'granter', 'published', 'identity', 'rank', 'since', 'buried',
                        'foreign')
local nothing = {'', '', '', ''}
local buried = ''
if lock[1] and not lock[2] then
  if redis.call('EXISTS', KEYS[2], KEYS[4]) > 0 then
    redis.call('HSET', KEYS[1], 'queue', '1')
    redis.call('ZADD', KEYS[5], digits(now + math.max(0, redis.call('PTTL', KEYS[1])) * 1000), ARGV[1])
  else
    redis.call('ZREM', KEYS[5], ARGV[1])
  end
  return nothing
end
if lock[1] then
  local entry = redis.call('HGET', KEYS[3], lock[5])
  local early = tonumber(lock[2]) > now
  if entry and early and (lock[4] or lock[3] ~= ARGV[2]) then
    redis.call('ZADD', KEYS[5], lock[2], ARGV[1])
    return nothing
  end
  local abandoned = lock[9] and not lock[4] and now - lock[9] >= ARGV[5] * 1000
  if entry and not lock[4] and not abandoned then
    local due = digits(now + PUBLISH_WITHIN)
    if lock[3] ~= ARGV[2] then
      redis.call('HDEL', KEYS[1], 'buried')
    end
    redis.call('HSET', KEYS[1], 'due', due, 'granter', ARGV[2])
    redis.call('ZADD', KEYS[5], due, ARGV[1])
    return {lock[5], entry, lock[7], lock[3] == ARGV[2] and lock[8] or ''}
  end
  redis.call('DEL', KEYS[1])
  if entry then
    local tries = abandoned and 0 or redis.call('HINCRBY', KEYS[3], lock[5] .. ':tries', '1')
    if abandoned or tries >= tonumber(ARGV[4]) then
      redis.call('HSET', KEYS[6], lock[5], entry)
      forget(queue, lock[5])
      buried = lock[5] .. (abandoned and ' foreign' or '')
    else
      redis.call('HSET', KEYS[3], lock[5] .. ':rank', lock[6])
      redis.call('ZADD', KEYS[4], digits(now + ARGV[3] * 1000 * 2 ^ (tries - 1)), lock[5])
    end
  end
end
local identity, entry, turn = grant(KEYS[1], queue, ARGV[1], now, ARGV[2])
if identity and buried ~= '' then
  -- Sent twice, the second says so again.
  redis.call('HSET', KEYS[1], 'buried', buried)
end
return {identity or '', entry or '', turn or '', buried}
