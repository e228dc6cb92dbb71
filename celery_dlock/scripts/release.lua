-- End an acquisition: free its lock, mark what its end means, grant the next waiter, and wake who waits.
--
-- KEYS  1 lock    hash
--       2 wake    channel on which a release is told
--       3 gone    string  tombstone of this acquisition
--       4 done    string  done mark of the identity (only with an identity)
--       5 used    string  mark of the name's last success (only with once_per)
--       ... and last, only under the queue policy: waiting, parked, later, index as in acquire
-- ARGV  1 acquisition     owner and number
--       2 tombstone       milliseconds that a late acquire is refused, "0": none
--       3 done            milliseconds that a done mark lives, "0": this end is not final
--       4 used            milliseconds that the name stays used, "0": it does not
--       5 identity, 6 by  of the run that used the name
--       7 name            of the lock, only under the queue policy
-- Result a sum: 1 if the lock was held by that acquisition, 2 if a twin or the keeper had left word in it, 4 if it has
--        waiters whom a script that knows their keys has to grant it; or {that sum, granted identity, entry, turn}
--
-- Marks are set also when the lease was lost: the owner test guards only the lock. Done marks are rare: only when
-- a copy is known (word) or the lock, and with it any word, was lost. Safe to be sent twice: the second finds the lock
-- granted by the first, and names that grant until its message is known to be published.

local lock = redis.call('HMGET', KEYS[1], 'acq', 'word', 'wake', 'queue', 'granter', 'published', 'identity', 'since')
local ours = lock[1] == ARGV[1]
local word = ours and lock[2] == '1'
if ours then
  redis.call('DEL', KEYS[1])
  if lock[3] then
    redis.call('PUBLISH', KEYS[2], '1')
  end
end
if ARGV[2] ~= '0' then
  redis.call('SET', KEYS[3], '1', 'PX', ARGV[2])
end
local final = ARGV[3] ~= '0' and (word or not ours)
local crowded = ours and lock[4]
local now = nil
if final or crowded or ARGV[4] ~= '0' then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
if final then
  redis.call('SET', KEYS[4], digits(now), 'PX', ARGV[3])
end
if ARGV[4] ~= '0' then
  redis.call('SET', KEYS[5], digits(now) .. '\n' .. ARGV[5] .. '\n' .. ARGV[6], 'PX', ARGV[4])
end
local sum = (ours and 1 or 0) + (word and 2 or 0)
local unpublished = lock[5] == ARGV[1] and not lock[6]
if ARGV[7] then
  local queue = {unpack(KEYS, #KEYS - 3)}
  if final then
    forget(queue, ARGV[5])
    if lock[1] == 'grant:' .. ARGV[5] then
      -- Its lease was lost, and its own copy's turn had come: that is over with it.
      redis.call('DEL', KEYS[1])
      crowded = true
    end
  end
  local identity, entry, turn
  if crowded then
    identity, entry, turn = grant(KEYS[1], queue, ARGV[7], now, ARGV[1])
  elseif unpublished then
    identity, entry, turn = lock[7], redis.call('HGET', queue[2], lock[7]), lock[8]
  end
  if entry then
    return {sum, identity, entry, turn}
  end
elseif crowded or unpublished then
  sum = sum + 4
end
return sum
