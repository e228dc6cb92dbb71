-- Take or keep the sweep lease: of the workers of one broker, the one that has it looks for queues that are due.
--
-- KEYS  1 sweeper string  the worker that has the lease
-- ARGV  1 worker
--       2 life            milliseconds that the lease lasts, if it is not taken again
-- Result 0 if this worker has it now, else milliseconds until it ends. Safe to be sent twice: the second finds its own.
--
-- It saves work and protects nothing: two workers that sweep at once are as safe as one, because each sweep is a script.

local worker = redis.call('MGET', KEYS[1])[1]
if worker and worker ~= ARGV[1] then
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 or left > tonumber(ARGV[2]) then
    -- The server's clock went back: no worker asked for so long a life.
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    left = tonumber(ARGV[2])
  end
  return math.max(1, left)
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
