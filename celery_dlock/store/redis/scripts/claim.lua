-- Claim a lock's name for one message that is about to be published.
--
-- KEYS  1 queued  hash    the claim: id, task, node of who published it, since (µs), turn, attempt
--       2 lock            as in acquire
--       3 waiting, 4 parked, 5 later: as in acquire
--       6 gone            tombstone of this attempt
-- ARGV  1 id              of the task
--       2 life            milliseconds
--       3 "1"             refused, too, while another task runs
--       4 turn            a message of the same id that follows this one (a retry) has a higher one
--       5 task, 6 node    who claims
--       7 cut             the id, as the lock has it
--       8 attempt         names this publication: an id may be published twice
-- Result {} if it is claimed, or was given up before it came; else {state, id, task, node, since}: "queued", "waiting", "running"; since 0: not known
--
-- Safe to be sent twice: the second finds its own claim. A waiter of the queue policy needs no claim to be queued.

local first = redis.call('HMGET', KEYS[1], 'id', 'task', 'node', 'since', 'turn', 'attempt')
local turn = tonumber(ARGV[4])
local ours = first[1] == ARGV[1] and (first[6] == ARGV[8] or turn > tonumber(first[5]))
if first[1] and not ours then
  return {'queued', unpack(first, 1, 4)}
end

if redis.call('EXISTS', KEYS[6]) == 1 then
  return {}
end
if not ours then
  -- What is of its id is what it follows, where it follows anything.
  local lock = redis.call('HMGET', KEYS[2], 'acq', 'id', 'task', 'node', 'since', 'token', 'left')
  local granted = lock[1] and string.sub(lock[1], 1, 6) == 'grant:'
  -- Who has left its body is about to release, unless the lock is kept for its retry; what is kept for min_hold has
  -- ended. Neither runs.
  local left = lock[1] == 'kept' or (lock[7] and string.sub(lock[1] or '', 1, 5) ~= 'keep:')
  local runs = lock[1] and not granted and not left and ARGV[3] == '1'
  if (granted or runs) and (turn == 0 or lock[2] ~= ARGV[7]) then
    return {granted and 'waiting' or 'running', lock[2] or '', lock[3] or '', lock[4] or '', lock[5] or lock[6] or '0'}
  end
  for _, place in ipairs({KEYS[3], KEYS[5]}) do
    local waiter = redis.call('ZRANGE', place, '0', '0')[1]
    local who = waiter and string.match(redis.call('HGET', KEYS[4], waiter) or '', '^[^\n]*')
    local known, named = pcall(cjson.decode, who or '')
    if known and type(named) == 'table' and (turn == 0 or named[2] ~= ARGV[1]) then
      return {'waiting', tostring(named[2]), tostring(named[1]), '', '0'}
    end
  end
end

local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'task', ARGV[5], 'node', ARGV[6],
           'turn', ARGV[4], 'attempt', ARGV[8])
if not ours then
  redis.call('HSET', KEYS[1], 'since', string.format('%.0f', time[1] * 1000000 + time[2]))
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return {}
