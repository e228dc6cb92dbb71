-- mark_done: set the done mark of a message whose release did not set it.
-- Safe to send twice: the first mark stands.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys done  string: the message has finished; server time in us
-- @args identity  digest of the message's identity
-- @args life_ms  milliseconds that the mark lives
-- @args age_us  microseconds since the run started; a message of the same id that came later is another message
-- @args owner  owner of that run, whose release may still come
-- @reply 1  marked
-- @reply 0  there was a mark already, or a later message with the same id holds the lock

-- @include time

local started = server_time_us() - age_us
local holder_identity, since, token, holder = unpack(redis.call('HMGET', lock, 'identity', 'since', 'token', 'acq'))
local of_that_run = holder and string.find(holder, owner .. '.', 1, true) == 1
if holder_identity == identity and not of_that_run and tonumber(since or token) > started then
  return 0
end
return redis.call('SET', done, decimal(started), 'PX', life_ms, 'NX') and 1 or 0
