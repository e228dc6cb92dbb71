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
--       8 by              JSON, who asks
-- Result "token since rank" if acquired, since and rank in microseconds: one string, because a reply of four parts
--        takes the client longer to read than all else it does
--        {"held", acquisition, identity, token, since, by, left, count, pttl, rank}
--        {"used", mark} | {"done"} | {"gone"}
--
-- Safe to be sent twice: the second finds the acquisition's own lock and answers as the first did.

local lock = redis.call('HMGET', KEYS[1], 'acq', 'identity', 'token', 'since', 'by', 'left', 'count')
if lock[1] == ARGV[1] then
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  return lock[3] .. ' ' .. lock[4] .. ' ' .. lock[4]
end

local marks = redis.call('MGET', unpack(KEYS, 2))
if marks[2] then
  return {'gone'}
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local rank = ARGV[7] ~= '' and tonumber(ARGV[7]) or now - ARGV[6]

if marks[3] and (ARGV[4] == '1' or rank <= tonumber(marks[3])) then
  return {'done'}
end
if marks[4] then
  return {'used', marks[4]}
end

if lock[1] then
  if ARGV[3] ~= '' and lock[2] == ARGV[3] then
    -- A twin leaves word, so that the holder's release marks the identity done.
    redis.call('HSET', KEYS[1], 'word', '1')
  end
  return {'held', lock[1], lock[2], lock[3], lock[4], lock[5], lock[6] or '', lock[7],
          redis.call('PTTL', KEYS[1]), string.format('%.0f', rank)}
end

-- Lua prints large numbers as 1.8e+15; '%.0f' keeps all digits (exact up to 2^53).
local token = now
if marks[1] and tonumber(marks[1]) >= token then
  token = tonumber(marks[1]) + 1
end
token = string.format('%.0f', token)
local since = string.format('%.0f', now)
redis.call('SET', KEYS[2], token)
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[1], 'acq', ARGV[1], 'identity', ARGV[3], 'token', token, 'since', since,
             'by', ARGV[8], 'count', '1', 'word', '1')
else
  redis.call('HSET', KEYS[1], 'acq', ARGV[1], 'identity', ARGV[3], 'token', token, 'since', since,
             'by', ARGV[8], 'count', '1')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return token .. ' ' .. since .. ' ' .. string.format('%.0f', rank)
