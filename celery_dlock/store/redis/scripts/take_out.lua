-- Take a waiter out of the queue: it was revoked, has expired, or cannot be read. Its turn, if it had it, passes on.
--
-- KEYS  1 lock, 2 waiting, 3 parked, 4 later, 5 index, 6 dead, 7 done of that identity, as in acquire
--       8 wake    the name of no key, as in sweep
-- ARGV  1 name of the lock, 2 identity, 3 milliseconds that its done mark lives, "0" to bury it, 4 who asks,
--       5 "1" if its end is stored: that mark is set also if it does not wait any more. Until then its entry is kept
--         among the dead letters, so that who dies before loses nothing
-- Result {its entry, granted identity, entry, turn}, "" for what there is not

local queue = {KEYS[2], KEYS[3], KEYS[4], KEYS[5]}
local lock = redis.call('HMGET', KEYS[1], 'acq', 'granter', 'published', 'identity', 'since')
if lock[4] == ARGV[2] and lock[1] ~= 'grant:' .. ARGV[2] then
  -- It runs; what ended was a copy of it.
  return {'', '', '', ''}
end
local entry = redis.call('HGET', KEYS[3], ARGV[2]) or redis.call('HGET', KEYS[6], ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if ARGV[3] ~= '0' and (entry or ARGV[5] == '1') then
  -- Its end is stored: a copy that the broker still holds must not run.
  redis.call('SET', KEYS[7], digits(now), 'PX', ARGV[3])
end
if ARGV[5] == '1' then
  redis.call('HDEL', KEYS[6], ARGV[2])
elseif entry then
  redis.call('HSET', KEYS[6], ARGV[2], entry)
end
forget(queue, ARGV[2])
local granted, its_entry, turn
if lock[1] == 'grant:' .. ARGV[2] then
  redis.call('DEL', KEYS[1])
  granted, its_entry, turn = grant(KEYS[1], queue, ARGV[1], now, ARGV[4])
elseif lock[2] == ARGV[4] and not lock[3] then
  -- Sent twice: the first one granted, and its answer was lost.
  granted, its_entry, turn = lock[4], redis.call('HGET', KEYS[3], lock[4]), lock[5]
end
return {entry or '', granted or '', its_entry or '', turn or ''}
