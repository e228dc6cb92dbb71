-- Agree on a fencing token, and on a seed, with the other servers of a Redlock, while the acquisition holds the lock here.
--
-- KEYS  1 lock    hash
--       2 last    string  the last token of this bucket
--       3 used    string  the mark of this run, as in mark.lua (only with a seed)
-- ARGV  1 acquisition     owner and number
--       2 token           the highest that a server of its majority gave
--       3 seed            of the idempotency key, behind the token of this agreement: "token/seed"
-- Result 1 if it is so from now on, 0 if another holds the lock or nobody does. Safe to be sent twice: a token never
--        goes back.

local lock = redis.call('HMGET', KEYS[1], 'acq', 'token', 'since')
if lock[1] ~= ARGV[1] then
  return 0
end
local last = redis.call('MGET', KEYS[2])[1]
if not last or tonumber(last) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[2], ARGV[2])
end
if lock[2] ~= ARGV[2] then
  redis.call('HSET', KEYS[1], 'token', ARGV[2], 'since', lock[3] or lock[2])
end
if KEYS[3] then
  local mark = lines(redis.call('MGET', KEYS[3])[1])
  if mark.state == 'begun' and mark.acquisition == ARGV[1] then -- else somebody made the name free meanwhile
    redis.call('SET', KEYS[3], text_of(mark.state, mark.at, mark.identity, mark.acquisition, ARGV[3], mark.by,
                                       mark.crashed_at, mark.crashed_of, mark.crashed_by),
               'PX', math.max(1, redis.call('PTTL', KEYS[3])))
  end
end
return 1
