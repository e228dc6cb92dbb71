-- Take a lock for one acquisition, or say why not.
--
-- KEYS  1 lock    hash    the lock
--       2 last    string  the last token of this bucket
--       3 gone    string  tombstone of this acquisition
--       4 done    string  done mark of this identity (only with an identity): server time, microseconds
--       5 used    string  mark of the name's last success (only with once_per)
-- ARGV  1 acquisition     owner and number
--       2 ttl             milliseconds
--       3 identity        of the message, or ""
--       4 redelivered     "1" if the broker flagged this delivery
--       5 copied          "1" if other copies of this message may live
--       6 age             microseconds since the message arrived
--       7 rank            carried by a copy of ours, microseconds, or ""
--       8 waits           "1" to be woken by the release
--       9 task, 10 id, 11 node, 12 pid of who asks
-- Result "token since rank" if acquired, since and rank in microseconds: one string, because a reply of four parts
--        takes the client longer to read than all else it does
--        {"held", rank, acquisition, identity, token, since, left, count, pttl, task, id, node, pid}
--        {"used", mark} | {"done"} | {"gone"}
--
-- The lock's fields: acq, identity, token, count, and who holds it in fields of its own (a value of more than 64 bytes
-- would make the hash a table, which costs more memory and time); since where it is not the token; left, word and wake
-- where they are true. Safe to be sent twice: the second finds its own lock and answers as the first did.

local held = redis.call('HGET', KEYS[1], 'acq')
if held == ARGV[1] then
  local lock = redis.call('HMGET', KEYS[1], 'token', 'since')
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  local since = lock[2] or lock[1]
  return lock[1] .. ' ' .. since .. ' ' .. since
end

local marks = redis.call('MGET', unpack(KEYS, 2))
if marks[2] then
  return {'gone'}
end

-- Lua prints large numbers as 1.8e+15; '%.0f' keeps all digits (exact up to 2^53).
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = string.format('%.0f', now)
local rank = since
if ARGV[7] ~= '' then
  rank = ARGV[7]
elseif ARGV[6] ~= '0' then
  rank = string.format('%.0f', now - ARGV[6])
end

if marks[3] and (ARGV[4] == '1' or tonumber(rank) <= tonumber(marks[3])) then
  return {'done'}
end
if marks[4] then
  return {'used', marks[4]}
end

if held then
  local lock = redis.call('HMGET', KEYS[1], 'identity', 'token', 'since', 'left', 'count', 'task', 'id', 'node', 'pid')
  if ARGV[3] ~= '' and lock[1] == ARGV[3] then
    -- A twin leaves word, so that the holder's release marks the identity done.
    redis.call('HSET', KEYS[1], 'word', '1')
  end
  if ARGV[8] == '1' then
    redis.call('HSET', KEYS[1], 'wake', '1')
  end
  return {'held', rank, held, lock[1], lock[2], lock[3] or lock[2], lock[4] or '', lock[5],
          redis.call('PTTL', KEYS[1]), unpack(lock, 6, 9)}
end

local token = since
if marks[1] and tonumber(marks[1]) >= now then
  token = string.format('%.0f', marks[1] + 1)
end
redis.call('SET', KEYS[2], token)
redis.call('HSET', KEYS[1], 'acq', ARGV[1], 'identity', ARGV[3], 'token', token, 'count', '1',
           'task', ARGV[9], 'id', ARGV[10], 'node', ARGV[11], 'pid', ARGV[12])
if token ~= since then
  redis.call('HSET', KEYS[1], 'since', since)
end
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[1], 'word', '1')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return token .. ' ' .. since .. ' ' .. rank
