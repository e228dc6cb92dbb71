-- release_claim: release a claim, because its message has started, has ended, or was not published.
-- Safe to send twice: the second copy finds no claim of this generation.
--
-- @group unconfirmed  it is unknown whether the claim took effect
-- @keys claim  hash, as in claim
-- @keys tombstone  string: this attempt was abandoned [unconfirmed]
-- @args task_id  id of the task
-- @args generation  as in claim; a claim of a later generation stays
-- @args attempt  as in claim; a claim of another attempt stays [unconfirmed]
-- @args tombstone_ms  milliseconds that a late claim is refused [unconfirmed]
-- @reply 1  released
-- @reply 0  there was no such claim

if UNCONFIRMED then
  redis.call('SET', tombstone, '1', 'PX', tombstone_ms)
end
local found = redis.call('HMGET', claim, 'id', 'generation', 'attempt')
if found[1] ~= task_id or tonumber(found[2]) > tonumber(generation) or (UNCONFIRMED and found[3] ~= attempt) then
  return 0
end
return redis.call('DEL', claim)
