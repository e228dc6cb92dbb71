-- End an acquisition: free its lock, mark what its end means, grant the next waiter, and wake who waits.
--
-- KEYS  1 lock    hash
--       2 wake    channel on which a release is told; the name of no key, which is of use as in sweep
--       3 gone    string  tombstone of this acquisition
--       4 done    string  done mark of the identity (only with an identity)
--       5 used    string  what became of the name's last run, as in mark.lua (only with once_per)
--       ... and last, only under the queue policy: waiting, parked, later, index as in acquire
-- ARGV  1 acquisition     owner and number
--       2 tombstone       milliseconds that a late acquire is refused, "0": none; with "-" before
--                         them nothing came of the acquisition, and its lock is not kept
--       3 done            milliseconds that a done mark lives, "0": this end is not final
--       4 used            milliseconds that the name stays used, "0": it does not
--       5 identity, 6 by, 7 seed  of the run that used the name
--       8 window          milliseconds that a name that is free keeps its seed, "0": this acquisition has no mark, or its
--                         body died
--       9 heir, 10 life   the identity of its retry, for which the lock is kept, "" for none; so many milliseconds
--       11 name           of the lock, only under the queue policy
-- Result a sum: 1 if the lock was held by that acquisition, 2 if a twin or the keeper had left word in it, 4 if it has
--        waiters whom a script that knows their keys has to grant it; or {that sum, granted identity, entry, turn}
--
-- A lock that was taken with "keep" stays until that time has passed, as 'kept', held by nobody; one that has an heir,
-- as 'keep:' and the heir's identity, which alone may take it. An heir that is parked already is granted it instead.
-- Marks are set also when the lease was lost: the owner test guards only the lock. Done marks are rare: only when
-- a copy is known (word), or the lock, and with it any word, was lost, or there is an heir. Safe to be sent twice: the second finds the lock
-- granted by the first, and names that grant until its message is known to be published.

local lock = redis.call('HMGET', KEYS[1], 'acq', 'word', 'wake', 'queue', 'keep')
local ours = lock[1] == ARGV[1]
if ours and not (lock[2] or lock[3] or lock[4] or lock[5]) and #ARGV == 4 and ARGV[2] == '0' then
  -- Nobody waits, and nothing is to be remembered: most calls end here, and make none of the functions below.
  redis.call('DEL', KEYS[1])
  return 1
end

-- parts

-- Who holds it has taken its grant, and with it all that was said of that.
local told = ours and {} or redis.call('HMGET', KEYS[1], 'granter', 'published', 'identity', 'since')
local until_then = ours and string.sub(ARGV[2], 1, 1) ~= '-' and lock[5]
local word = ours and lock[2] == '1'
local heir = ours and (ARGV[9] or '') ~= '' and ARGV[9]
-- A copy of a run that has an heir must not be taken for a rival of its own retry.
local final = ARGV[3] ~= '0' and (word or heir or not ours)
local crowded = ours and lock[4]
local now = nil
local queue = ARGV[11] and {unpack(KEYS, #KEYS - 3)}
local parked = heir and queue and redis.call('HEXISTS', queue[2], heir) == 1
if final or crowded or parked or ARGV[4] ~= '0' or until_then then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local keep = 0
if until_then then
  local taken = redis.call('HMGET', KEYS[1], 'since', 'token')
  -- No longer than was asked for, though the server's clock went back.
  keep = math.ceil(until_then - math.max(0, now - (taken[1] or taken[2])) / 1000)
end
if parked then
  -- Its retry came first. That is the next one, whoever waits; its own time of keeping begins with it.
  keep, crowded = 0, true
  redis.call('ZREM', queue[3], heir)
  redis.call('ZADD', queue[1], '0', heir)
elseif heir then
  keep = math.max(keep, tonumber(ARGV[10]))
end
if keep > 0 then
  -- Nobody's any more, and yet not free: taken too short a time ago, or kept for its heir.
  redis.call('HSET', KEYS[1], 'acq', heir and 'keep:' .. heir or 'kept', 'identity', '', 'ttl', digits(keep))
  redis.call('HDEL', KEYS[1], 'left', 'word', 'keep', 'heir')
  redis.call('PEXPIRE', KEYS[1], digits(keep))
elseif ours then
  redis.call('DEL', KEYS[1])
end
if ours and lock[3] then
  -- As who waits has subscribed: in a Cluster there is no need to tell all of its nodes. Where the lock is kept, who waits
  -- may be the heir, and all others learn until when they wait.
  if lock[3] == 's' then
    redis.call('SPUBLISH', KEYS[2], '1')
  else
    redis.call('PUBLISH', KEYS[2], '1')
  end
end
if ARGV[2] ~= '0' then
  redis.call('SET', KEYS[3], '1', 'PX', digits(math.abs(ARGV[2])))
end
if final then
  redis.call('SET', KEYS[4], digits(now), 'PX', ARGV[3])
end
if ARGV[4] ~= '0' then
  redis.call('SET', KEYS[5], text_of('used', digits(now), ARGV[5], ARGV[1], ARGV[7], ARGV[6], '', '', ''), 'PX',
             ARGV[4])
elseif ARGV[8] and ARGV[8] ~= '0' then
  local mark = lines(redis.call('MGET', KEYS[5])[1])
  if mark.state == 'begun' and mark.acquisition == ARGV[1] then
    local ended = text_of('free', mark.at, mark.identity, '', mark.seed, mark.by, '', '', '')
    if mark.crashed_at ~= '' then
      -- What became of the run before this one is as unknown as it was.
      ended = text_of('unknown', mark.crashed_at, mark.crashed_of, '', mark.seed, mark.crashed_by, '', '', '')
    end
    redis.call('SET', KEYS[5], ended, 'PX', ARGV[8])
  end
end
local sum = (ours and 1 or 0) + (word and 2 or 0)
local unpublished = told[1] == ARGV[1] and not told[2]
if queue then
  if final then
    forget(queue, ARGV[5])
    if lock[1] == 'grant:' .. ARGV[5] then
      -- Its lease was lost, and its own copy's turn had come: that is over with it.
      redis.call('DEL', KEYS[1])
      crowded = true
    end
  end
  local identity, entry, turn
  if crowded and keep > 0 then
    redis.call('ZADD', queue[4], digits(now + keep * 1000), ARGV[11])
  elseif crowded then
    identity, entry, turn = grant(KEYS[1], queue, ARGV[11], now, ARGV[1])
  elseif unpublished then
    identity, entry, turn = told[3], redis.call('HGET', queue[2], told[3]), told[4]
  end
  if entry then
    return {sum, identity, entry, turn}
  end
elseif crowded or unpublished then
  sum = sum + 4
end
return sum
