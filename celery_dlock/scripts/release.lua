-- End an acquisition: free its lock, wake who waits, and mark what its end means.
--
-- KEYS  1 lock    hash
--       2 wake    channel on which a release is told
--       3 gone    string  tombstone of this acquisition
--       4 done    string  done mark of the identity (only with an identity)
--       5 used    string  mark of the name's last success (only with once_per)
-- ARGV  1 acquisition     owner and number
--       2 tombstone       milliseconds that a late acquire is refused, "0": none
--       3 done            milliseconds that a done mark lives, "0": this end is not final
--       4 used            milliseconds that the name stays used, "0": it does not
--       5 identity, 6 by  of the run that used the name
-- Result 1 if the lock was held by that acquisition, plus 2 if a twin or the keeper had left word in it; else 0
--
-- Marks are set also when the lease was lost: the owner test guards only the lock. Done marks are rare: only when
-- a copy is known (word) or the lock, and with it any word, was lost. Safe to be sent twice.

local lock = redis.call('HMGET', KEYS[1], 'acq', 'word', 'wake')
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
if final or ARGV[4] ~= '0' then
  local time = redis.call('TIME')
  local now = string.format('%.0f', time[1] * 1000000 + time[2])
  if final then
    redis.call('SET', KEYS[4], now, 'PX', ARGV[3])
  end
  if ARGV[4] ~= '0' then
    redis.call('SET', KEYS[5], now .. '\n' .. ARGV[5] .. '\n' .. ARGV[6], 'PX', ARGV[4])
  end
end
return (ours and 1 or 0) + (word and 2 or 0)
