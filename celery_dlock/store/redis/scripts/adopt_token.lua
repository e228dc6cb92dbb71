-- adopt_token: adopt the fencing token and the seed on which a majority of a Redlock agreed.
-- Safe to send twice: the second copy writes the same values, and the highest token never decreases.
--
-- @group once  the run has a seed (once_per)
-- @group waited  the caller has waited, and others may still wait: its release has to wake the next one
-- @keys lock  hash: the lock, lib/take_lock
-- @keys last_token  string: highest fencing token of this bucket
-- @keys run  string: lib/run_mark [once]
-- @args acquisition  owner and number
-- @args token  highest token that a server of the majority issued
-- @args seed  "token/seed": the seed of the idempotency key, and the token of this agreement [once]
-- @reply 1  adopted
-- @reply 0  the acquisition does not hold the lock on this server

-- @include run_mark

local holder, current_token, since = unpack(redis.call('HMGET', lock, 'acq', 'token', 'since'))
if holder ~= acquisition then
  return 0
end
local highest_token = redis.call('MGET', last_token)[1]
if not highest_token or tonumber(highest_token) < tonumber(token) then
  redis.call('SET', last_token, token)
end
if current_token ~= token then
  redis.call('HSET', lock, 'token', token, 'since', since or current_token)
end
if WAITED then
  redis.call('HSET', lock, 'notify', '1')
end
if ONCE then
  local mark = read_run_mark(run)
  -- If the mark is not that of this run, an operator's command has changed it meanwhile. Leave it alone.
  if mark.state == 'started' and mark.acquisition == acquisition then
    redis.call('SET', run, format_run_mark(mark.state, mark.at, mark.identity, mark.acquisition, seed, mark.by,
                                           mark.crashed_at, mark.crashed_of, mark.crashed_by),
               'PX', math.max(1, redis.call('PTTL', run)))
  end
end
return 1
