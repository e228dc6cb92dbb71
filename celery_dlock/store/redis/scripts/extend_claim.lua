-- extend_claim: extend a claim, because a worker has its message.
-- Safe to send twice: the key's life is never shortened, and no claim is created.
--
-- @keys claim  hash, as in claim
-- @args task_id  id of the task
-- @args life_ms  milliseconds that the claim lasts at least
-- @reply 1  the claim stands
-- @reply 0  there is no claim of this task id

-- @include lifetime

if redis.call('HGET', claim, 'id') ~= task_id then
  return 0
end
live_at_least(claim, life_ms)
return 1
