-- Take a lock for one acquisition, or say why not; under the queue policy, park the message that has to wait.
--
-- KEYS  1 lock     hash    the lock
--       2 last     string  the last token of this bucket
--       3 gone     string  tombstone of this acquisition
--       4 done     string  done mark of this identity (only with an identity): server time, microseconds
--       5 used     string  mark of the name's last success (only with once_per)
--       ... and last, only under the queue policy:
--         waiting  zset    identities by rank
--         parked   hash    identity to entry; also identity:rank and :tries of those who lost a turn, and :ousts, whom it
--                          put out
--         later    zset    identities that lost a turn, by the time from which they wait again
--         index    zset    of this bucket: names with waiters, by the time at which a sweep has to look
--         dead     hash    dead letters, and whoever was taken out until its end is stored
-- ARGV  1 acquisition     owner and number
--       2 ttl             milliseconds
--       3 identity        of the message, or ""
--       4 redelivered     "1" if the broker flagged this delivery
--       5 copied          "1" if other copies of this message may live
--       6 age             microseconds since the message arrived
--       7 rank            carried by a copy of ours, microseconds, or ""
--       8 waits           "1" to be woken by the release
--       9 task, 10 id, 11 node, 12 pid of who asks
--         under the queue policy: 13 name of the lock, 14 entry to park ("": only ask), 15 limit of waiters ("0": none),
--         16 "1" if the oldest makes room for the newest where the limit is reached, 17 rank of the message before it,
--         18 turn for which this copy was published, or ""
-- Result "token since rank" if acquired, since and rank in microseconds: one string, because a reply of four parts
--        takes the client longer to read than all else it does
--        {"held", rank, acquisition, identity, token, since, left, count, pttl, task, id, node, pid}
--        {"gone"} | {"used", mark} | {"done"}, the last two with {..., granted identity, entry, turn} where one passes on
--        {"queue", waiting, and as behind "held"; after the rank no more where only waiters are in the way}
--        {"parked", rank, position, granted identity, entry, turn, ousted identity, entry}, "" for what there is not
--
-- The lock's fields: acq, identity, token, count, and who holds it in fields of its own (a value of more than 64 bytes
-- would make the hash a table, which costs more memory and time); since where it is not the token; left, word, wake and
-- queue where they are true; rank, due, granter, tries and published of a grant. Safe to be sent twice: the second
-- finds its own lock, its own place in the queue or its own grant, and answers as the first did.

local name = ARGV[13]
local marked = name and #KEYS - 5 or #KEYS
local queue = name and {KEYS[marked + 1], KEYS[marked + 2], KEYS[marked + 3], KEYS[marked + 4]}

local held = redis.call('HGET', KEYS[1], 'acq')
if held == ARGV[1] then
  local lock = redis.call('HMGET', KEYS[1], 'token', 'since')
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  local since = lock[2] or lock[1]
  return lock[1] .. ' ' .. since .. ' ' .. since
end

local marks = redis.call('MGET', unpack(KEYS, 2, marked))
if marks[2] then
  return {'gone'}
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = digits(now)
local rank = since
if ARGV[7] ~= '' then
  rank = ARGV[7]
elseif ARGV[6] ~= '0' then
  rank = digits(now - ARGV[6])
end
if name and tonumber(rank) <= tonumber(ARGV[17]) then
  -- What a worker received in a row keeps that order, although its age takes its time to get here.
  rank = digits(ARGV[17] + 1)
end

local function own_grant()
  -- Sent twice: the first one granted, and its answer was lost.
  local lock = redis.call('HMGET', KEYS[1], 'granter', 'published', 'identity', 'since')
  if lock[1] ~= ARGV[1] or lock[2] then
    return nil
  end
  return lock[3], redis.call('HGET', queue[2], lock[3]), lock[4]
end

local function own_ousted()
  local identity = redis.call('HGET', queue[2], ARGV[3] .. ':ousts') or ''
  local entry = redis.call('HGET', KEYS[marked + 5], identity)
  return entry and identity or '', entry or ''
end

local function pass_on()
  -- It waits no more, and if its turn has come, that is the next one's.
  if not queue then
    return nil
  end
  forget(queue, ARGV[3])
  if held ~= 'grant:' .. ARGV[3] then
    return own_grant()
  end
  redis.call('DEL', KEYS[1])
  return grant(KEYS[1], queue, name, now, ARGV[1])
end

-- A copy that carries its rank is judged by that alone: flagged, it may copy a message that reused a finished id.
if marks[3] and ((ARGV[4] == '1' and ARGV[7] == '') or tonumber(rank) <= tonumber(marks[3])) then
  return {'done', pass_on()}
end
if marks[4] then
  return {'used', marks[4], pass_on()}
end

local known = queue and redis.call('HEXISTS', queue[2], ARGV[3]) == 1
if known then
  -- However it came back, it has a place.
  local place = redis.call('ZSCORE', queue[1], ARGV[3]) or redis.call('HGET', queue[2], ARGV[3] .. ':rank')
  if place and tonumber(place) < tonumber(rank) then
    rank = digits(place)
  end
end

-- Whom a free lock finds waiting; none of those who come after the asker is in its way.
local first, mine, crowd = {}, false, false
if queue then
  if held == 'grant:' .. ARGV[3] then
    mine = redis.call('HGET', KEYS[1], 'since') == ARGV[18]
    if not mine then
      local granted, entry, turn = own_grant()
      return {'parked', rank, granted and '1' or '0', granted or '', entry or '', turn or '', own_ousted()}
    end
    held = false
  elseif not held then
    -- One that finds itself parked was delivered twice. It leaves its turn to the copy that is published for it.
    first = redis.call('ZRANGE', queue[1], '0', '0', 'WITHSCORES')
    crowd = known or (first[1] and tonumber(first[2]) < tonumber(rank))
  end
end

local function holder(...)
  local lock = redis.call('HMGET', KEYS[1], 'identity', 'token', 'since', 'left', 'count', 'task', 'id', 'node', 'pid')
  if ARGV[3] ~= '' and lock[1] == ARGV[3] then
    -- A twin leaves word, so that the holder's release marks the identity done.
    redis.call('HSET', KEYS[1], 'word', '1')
  end
  if ARGV[8] == '1' then
    redis.call('HSET', KEYS[1], 'wake', '1')
  end
  local answer = {...}
  for _, fact in ipairs({held, lock[1], lock[2], lock[3] or lock[2], lock[4] or '', lock[5], life(KEYS[1]),
                         lock[6], lock[7], lock[8], lock[9]}) do
    answer[#answer + 1] = fact
  end
  return answer
end

local twin = held and queue and string.sub(held, 1, 6) ~= 'grant:' and redis.call('HGET', KEYS[1], 'identity') == ARGV[3]
if held and (twin or not queue) then
  -- Under the queue policy, too, a twin is no waiter: it comes back, and takes nobody's place.
  return holder('held', rank)
end

if held or crowd then
  local count = redis.call('ZCARD', queue[1]) + redis.call('ZCARD', queue[3])
  local full = not known and ARGV[15] ~= '0' and count >= tonumber(ARGV[15])
  if ARGV[14] == '' or (full and ARGV[16] ~= '1') then
    if not held then
      return {'queue', count, rank}
    end
    return holder('queue', count, rank)
  end
  local ousted, its_entry = '', ''
  if full then
    local oldest = redis.call('ZRANGE', queue[1], '0', '0', 'WITHSCORES')
    if not oldest[1] then
      oldest = redis.call('ZRANGE', queue[3], '0', '0')
      oldest[2] = redis.call('HGET', queue[2], oldest[1] .. ':rank') or '0'
    end
    if tonumber(oldest[2]) > tonumber(rank) then
      -- It is itself the oldest, and only came late.
      return {'parked', rank, '0', '', '', '', ARGV[3], ARGV[14]}
    end
    ousted, its_entry = oldest[1], redis.call('HGET', queue[2], oldest[1]) or ''
    forget(queue, ousted)
    -- Kept until its end is stored, by whoever hears of it: this answer may be lost, or its reader die.
    redis.call('HSET', KEYS[marked + 5], ousted, its_entry)
    redis.call('HSET', queue[2], ARGV[3] .. ':ousts', ousted)
  elseif known then
    ousted, its_entry = own_ousted()
  end
  redis.call('HSET', queue[2], ARGV[3], ARGV[14])
  redis.call('ZREM', queue[3], ARGV[3])
  redis.call('HDEL', KEYS[marked + 5], ARGV[3])
  -- Turns that it lost while its copy was on its way do not count: it is not lost.
  redis.call('HDEL', queue[2], ARGV[3] .. ':rank', ARGV[3] .. ':tries')
  redis.call('ZADD', queue[1], rank, ARGV[3])
  local granted, entry, turn
  if held then
    redis.call('HSET', KEYS[1], 'queue', '1')
    redis.call('ZADD', queue[4], 'LT', digits(now + math.max(0, life(KEYS[1])) * 1000), name)
    granted, entry, turn = own_grant()
  else
    granted, entry, turn = grant(KEYS[1], queue, name, now, ARGV[1])
  end
  local position = (redis.call('ZRANK', queue[1], ARGV[3]) or 0) + 1
  return {'parked', rank, digits(position), granted or '', entry or '', turn or '', ousted, its_entry}
end

local token = since
if marks[1] and tonumber(marks[1]) >= now then
  token = digits(marks[1] + 1)
end
redis.call('SET', KEYS[2], token)
local copied, crowded = ARGV[5] == '1' or mine, false
if marks[3] then
  -- An id that was used before: its mark would end this message's own copies.
  redis.call('DEL', KEYS[4])
  copied = true
end
if queue then
  if copied then
    redis.call('DEL', KEYS[1])
    forget(queue, ARGV[3])
    redis.call('HDEL', KEYS[marked + 5], ARGV[3])
  end
  if copied or first[1] then
    crowded = redis.call('EXISTS', queue[1], queue[3]) > 0
    if crowded then
      redis.call('ZADD', queue[4], digits(now + ARGV[2] * 1000), name)
    else
      redis.call('ZREM', queue[4], name)
    end
  end
end
redis.call('HSET', KEYS[1], 'acq', ARGV[1], 'identity', ARGV[3], 'token', token, 'count', '1',
           'task', ARGV[9], 'id', ARGV[10], 'node', ARGV[11], 'pid', ARGV[12])
if token ~= since then
  redis.call('HSET', KEYS[1], 'since', since)
end
if copied then
  redis.call('HSET', KEYS[1], 'word', '1')
end
if crowded then
  redis.call('HSET', KEYS[1], 'queue', '1')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return token .. ' ' .. since .. ' ' .. rank
