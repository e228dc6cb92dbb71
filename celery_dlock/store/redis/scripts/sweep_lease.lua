-- sweep_lease: take or keep the sweep lease of a broker. Only the worker that has it looks for queues that are due.
-- Safe to send twice: the second copy finds its own lease.
--
-- The lease saves work and protects nothing: two workers may sweep at once, because each sweep is one script.
--
-- @keys sweeper  string: the worker that has the lease
-- @args worker  identifies the worker
-- @args life_ms  milliseconds that the lease lasts without a renewal
-- @reply 0  this worker has it
-- @reply left_ms  another worker has it for so long

local holder = redis.call('MGET', sweeper)[1]
if holder and holder ~= worker then
  local left_ms = redis.call('PTTL', sweeper)
  if left_ms < 0 or left_ms > tonumber(life_ms) then
    -- No worker requested such a long lease, so the server's clock went back.
    redis.call('PEXPIRE', sweeper, life_ms)
    left_ms = tonumber(life_ms)
  end
  return math.max(1, left_ms)
end
redis.call('SET', sweeper, worker, 'PX', life_ms)
return 0
