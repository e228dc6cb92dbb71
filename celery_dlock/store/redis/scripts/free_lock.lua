-- free_lock: release a lock for an operator, but only from the acquisition that the operator was shown.
-- Safe to send twice: the second copy finds the lock free, or the grant that the first one made.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @keys wake  list: lib/wake
-- @keys waiting  sorted set, as in acquire_queued
-- @keys messages  hash, as in acquire_queued
-- @keys delayed  sorted set, as in acquire_queued
-- @keys queues  sorted set, as in acquire_queued
-- @args acquisition  value of the field acq
-- @args token  fencing token of that acquisition, or the start of an operator's hold in microseconds; "": the
--       acquisition alone identifies it
-- @args force  "1": also if the holder is alive, or if the lock is kept on purpose
-- @args lock_name  text of the lock name
-- @reply {"freed", identity, message, grant id}  the last three describe the next grant, if any
-- @reply {"free"}  no acquisition holds the lock
-- @reply {"other"}  another acquisition holds it
-- @reply {"granted"}  it is granted to a waiter
-- @reply {"kept"}  it is kept on purpose
-- @reply {"fresh"}  the lease was renewed within half its ttl

-- @include time acquisition holder_kind wake full_memory message grant unpublished_grant

local holder, current_token, since, notify, ttl, due =
  unpack(redis.call('HMGET', lock, 'acq', 'token', 'since', 'notify', 'ttl', 'due'))
if kind_of(acquisition) == 'operator' then
  current_token = since -- an operator's holds have no token
end
if holder ~= acquisition or (token ~= '' and token ~= current_token) then
  local waiter, message, grant_id = unpublished_grant(acquisition)
  if waiter then
    return {'freed', waiter, message, grant_id}
  end
  return {holder and 'other' or 'free'}
end
if due then
  return {'granted'}
end
if force ~= '1' then
  if kind_of(holder) ~= 'owner' then
    return {'kept'}
  elseif redis.call('PTTL', lock) > tonumber(ttl) / 2 then
    return {'fresh'}
  end
end
begin_writing()
if notify then
  wake_one()
end
return {'freed', grant_or_free(server_time_us(), acquisition)}
