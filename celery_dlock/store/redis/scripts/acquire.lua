-- Take a lock for one acquisition, or say why not; under the queue policy, park the message that has to wait.
--
-- KEYS  1 lock     hash    the lock
--       2 last     string  the last token of this bucket
--       3 gone     string  tombstone of this acquisition
--       4 done     string  done mark of this identity (only with an identity): server time, microseconds
--       5 used     string  what became of the name's last run, as in mark.lua (only with once_per)
--       ... and last, only under the queue policy:
--         waiting  zset    identities by rank
--         parked   hash    identity to entry; also identity:rank and :tries of those who lost a turn, and :ousts, whom it
--                          put out
--         later    zset    identities that lost a turn, by the time from which they wait again
--         index    zset    of this bucket: names with waiters, by the time at which a sweep has to look
--         dead     hash    dead letters, and whoever was taken out until its end is stored
--       ... and behind all of them, only where a server that may have lost leases grants nothing new for a while:
--         office   string  of this bucket: who is in office, as in probation.lua
-- ARGV  1 acquisition     owner and number
--       2 ttl             milliseconds
--       3 identity        of the message, or ""
--       4 redelivered     "1" if the broker flagged this delivery, or the one that it copies
--       5 copied          "1" if other copies of this message may live
--       6 age             microseconds since the message arrived
--       7 rank            carried by a copy of ours, microseconds, or ""
--       8 waits           "1" to be woken by the release, "s" through a channel of the slot, "0" not to be
--       9 task, 10 id, 11 node, 12 pid of who asks
--       13 keep           milliseconds from now that the lock is kept at least, "0": until its release
--         under the queue policy: 14 name of the lock, 15 entry to park ("": only ask), 16 limit of waiters ("0": none),
--         17 "1" if the oldest makes room for the newest where the limit is reached, 18 rank of the message before it,
--         19 turn for which this copy was published, or ""
--         and last, only with once_per: who asks as JSON, milliseconds from now that this run's mark lives,
--         "1" to be refused where nobody knows what became of an earlier run
--         and behind all of them, only with office: milliseconds that such a while lasts; the server's term, which grows each time
--         that another server takes its place, or 0
-- Result "token since rank" if acquired, since and rank in microseconds: one string, because a reply of four parts
--        takes the client longer to read than all else it does; with once_per "... seed crash", crash "1" or "0"
--        {"held", rank, acquisition, identity, token, since, left, count, pttl, task, id, node, pid}
--        {"gone"} | {"used", mark} | {"unknown", mark} | {"done"}, the last three with {..., granted identity, entry,
--        turn} where one passes on
--        {"queue", waiting, and as behind "held"; after the rank no more where only waiters are in the way}
--        {"parked", rank, position, granted identity, entry, turn, ousted identity, entry}, "" for what there is not
--        {"probation", milliseconds, "1" if that began now}
--
-- The lock's fields: acq, identity, token, count, and who holds it in fields of its own (a value of more than 64 bytes
-- would make the hash a table, which costs more memory and time); since where it is not the token; ttl, the longest life
-- that was asked for; keep where it is not 0; left, word, wake and queue where they are true; heir, the
-- identity of the holder's retry; rank, due, granter, tries and published of a grant. Safe to be sent twice: the second
-- finds its own lock, its own place in the queue or its own grant, and answers as the first did.

local office = string.sub(KEYS[#KEYS], -7) == ':office' and table.remove(KEYS)
local term = office and table.remove(ARGV)
local delay = office and table.remove(ARGV)

local name = #KEYS > 5 and ARGV[14]
local marked = name and #KEYS - 5 or #KEYS
local once = marked == 5
local queue = name and {KEYS[marked + 1], KEYS[marked + 2], KEYS[marked + 3], KEYS[marked + 4]}

local held = redis.call('HGET', KEYS[1], 'acq')
local marks = redis.call('MGET', unpack(KEYS, 2, marked))
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = string.format('%.0f', now)
local rank = since
if ARGV[7] ~= '' then
  rank = ARGV[7]
elseif ARGV[6] ~= '0' then
  rank = string.format('%.0f', now - ARGV[6])
end
local copied, crowded, handed, mark, doubt = ARGV[5] == '1', false, {}, nil, false

if held or queue or once or office or marks[2] or marks[3] then
  -- Most calls pass by all this. A script makes its functions anew each time it runs, so they are made only here.
  -- parts

  if held == ARGV[1] then
    local lock = redis.call('HMGET', KEYS[1], 'token', 'since')
    if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    local since = lock[2] or lock[1]
    local answer = lock[1] .. ' ' .. since .. ' ' .. since
    if once then
      local mark = lines(redis.call('MGET', KEYS[5])[1])
      local seed, crashed = mark.seed or '', (mark.crashed_at or '') ~= ''
      answer = answer .. ' ' .. (seed ~= '' and seed or lock[1]) .. ' ' .. (crashed and '1' or '0')
    end
    return answer
  end
  local met = held
  -- Kept by the run that this message retries: its alone.
  local kept = ARGV[3] ~= '' and 'keep:' .. ARGV[3]

  if marks[2] then
    return {'gone'}
  end

  if name and tonumber(rank) <= tonumber(ARGV[18]) then
    -- What a worker received in a row keeps that order, although its age takes its time to get here.
    rank = digits(ARGV[18] + 1)
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
    -- It waits no more, and if its turn has come or the lock was kept for it, that is the next one's.
    if not queue then
      if met == kept and not redis.call('HGET', KEYS[1], 'queue') then
        redis.call('DEL', KEYS[1])
      end
      return nil
    end
    forget(queue, ARGV[3])
    if met ~= kept and met ~= 'grant:' .. ARGV[3] then
      return own_grant()
    end
    redis.call('DEL', KEYS[1])
    return grant(KEYS[1], queue, name, now, ARGV[1])
  end

  if marks[3] and (ARGV[4] == '1' or tonumber(rank) <= tonumber(marks[3])) then
    return {'done', pass_on()}
  end
  if once then
    mark = lines(marks[4])
    if mark.state == 'used' then
      return {'used', marks[4], pass_on()}
    end
    -- Of a body that runs this is never asked: its lock is held, and nobody comes so far as to take it.
    doubt = mark.state == 'unknown' or (mark.state == 'begun' and mark.acquisition ~= ARGV[1])
  end
  local refused = doubt and ARGV[#ARGV] == '1'

  local known = queue and redis.call('HEXISTS', queue[2], ARGV[3]) == 1
  if known then
    -- However it came back, it has a place.
    local place = redis.call('ZSCORE', queue[1], ARGV[3]) or redis.call('HGET', queue[2], ARGV[3] .. ':rank')
    if place and tonumber(place) < tonumber(rank) then
      rank = digits(place)
    end
  end

  if refused and queue and held and not known then
    local granted, entry, turn = own_grant()
    if granted then
      -- Sent twice: the first one was refused, and its turn passed on.
      return {'unknown', marks[4], granted, entry, turn}
    end
  end

  -- Whom a free lock finds waiting; none of those who come after the asker is in its way.
  local first, mine, crowd = {}, false, false
  if kept and held == kept then
    handed = redis.call('HMGET', KEYS[1], 'acq', 'wake', 'queue')
    held = false
  elseif queue then
    if held == 'grant:' .. ARGV[3] then
      mine = redis.call('HGET', KEYS[1], 'since') == ARGV[19]
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

  if held then
    local ttl = redis.call('HGET', KEYS[1], 'ttl')
    if ttl and redis.call('PTTL', KEYS[1]) > tonumber(ttl) then
      -- The server's clock went back: nobody asked for so long a life.
      redis.call('PEXPIRE', KEYS[1], ttl)
    end
  end

  local function holder(...)
    local lock = redis.call('HMGET', KEYS[1], 'identity', 'token', 'since', 'left', 'count', 'task', 'id', 'node', 'pid')
    if ARGV[3] ~= '' and lock[1] == ARGV[3] then
      -- A twin leaves word, so that the holder's release marks the identity done.
      redis.call('HSET', KEYS[1], 'word', '1')
    end
    if ARGV[8] ~= '0' then
      redis.call('HSET', KEYS[1], 'wake', ARGV[8])
    end
    local answer = {...}
    for _, fact in ipairs({held, lock[1], lock[2], lock[3] or lock[2], lock[4] or '', lock[5], life(KEYS[1]),
                           lock[6], lock[7], lock[8], lock[9]}) do
      answer[#answer + 1] = fact
    end
    return answer
  end

  local own = held and queue and string.sub(held, 1, 6) ~= 'grant:' and redis.call('HMGET', KEYS[1], 'identity', 'heir')
  if held and (not queue or (own and (own[1] == ARGV[3] or own[2] == ARGV[3]))) then
    -- Under the queue policy, too, a twin is no waiter: it comes back, and takes nobody's place. Nor is the retry for
    -- which its holder is about to keep the lock.
    return holder('held', rank)
  end

  if held or crowd then
    local count = redis.call('ZCARD', queue[1]) + redis.call('ZCARD', queue[3])
    local full = not known and ARGV[16] ~= '0' and count >= tonumber(ARGV[16])
    if ARGV[15] == '' or (full and ARGV[17] ~= '1') then
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
        return {'parked', rank, '0', '', '', '', ARGV[3], ARGV[15]}
      end
      ousted, its_entry = oldest[1], redis.call('HGET', queue[2], oldest[1]) or ''
      forget(queue, ousted)
      -- Kept until its end is stored, by whoever hears of it: this answer may be lost, or its reader die.
      redis.call('HSET', KEYS[marked + 5], ousted, its_entry)
      redis.call('HSET', queue[2], ARGV[3] .. ':ousts', ousted)
    elseif known then
      ousted, its_entry = own_ousted()
    end
    redis.call('HSET', queue[2], ARGV[3], ARGV[15])
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

  if refused then
    return {'unknown', marks[4], pass_on()}
  end

  if office then
    -- Only here: whoever meets a held lock is told so at any time.
    local left, began = probation(office, now, delay, term)
    if left > 0 then
      return {'probation', left, began}
    end
  end

  -- It gets the lock.
  copied = copied or mine
  if marks[3] then
    -- An id that was used before: its mark would end this message's own copies.
    redis.call('DEL', KEYS[4])
    copied = true
  end
  if queue then
    if copied or handed[1] then
      redis.call('DEL', KEYS[1])
      forget(queue, ARGV[3])
      redis.call('HDEL', KEYS[marked + 5], ARGV[3])
    end
    if copied or handed[1] or first[1] then
      crowded = redis.call('EXISTS', queue[1], queue[3]) > 0
      if crowded then
        redis.call('ZADD', queue[4], digits(now + ARGV[2] * 1000), name)
      else
        redis.call('ZREM', queue[4], name)
      end
    end
  end
  if handed[1] then
    redis.call('DEL', KEYS[1])
    -- Those who wait for a release wait for this one.
    crowded = crowded or (not queue and handed[3])
  end
end

local token = since
if marks[1] and tonumber(marks[1]) >= now then
  token = string.format('%.0f', marks[1] + 1)
end
redis.call('SET', KEYS[2], token)
redis.call('HSET', KEYS[1], 'acq', ARGV[1], 'identity', ARGV[3], 'token', token, 'count', '1',
           'task', ARGV[9], 'id', ARGV[10], 'node', ARGV[11], 'pid', ARGV[12], 'ttl', ARGV[2])
if ARGV[13] ~= '0' then
  redis.call('HSET', KEYS[1], 'keep', ARGV[13])
end
if token ~= since then
  redis.call('HSET', KEYS[1], 'since', since)
end
if copied then
  redis.call('HSET', KEYS[1], 'word', '1')
end
if handed[2] then
  redis.call('HSET', KEYS[1], 'wake', handed[2])
end
if crowded then
  redis.call('HSET', KEYS[1], 'queue', '1')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if once then
  local seed = (mark.seed or '') ~= '' and mark.seed or token
  local at, of, by = mark.crashed_at or '', mark.crashed_of or '', mark.crashed_by or ''
  if doubt then
    at, of, by = mark.at, mark.identity, mark.by
  end
  redis.call('SET', KEYS[5], table.concat({'begun', since, ARGV[3], ARGV[1], seed, ARGV[#ARGV - 2], at, of, by}, '\n'),
             'PX', ARGV[#ARGV - 1])
  return token .. ' ' .. since .. ' ' .. rank .. ' ' .. seed .. ' ' .. (at ~= '' and '1' or '0')
end
return token .. ' ' .. since .. ' ' .. rank
