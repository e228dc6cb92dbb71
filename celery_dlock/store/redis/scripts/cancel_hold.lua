-- cancel_hold: cancel an operator's hold that waits for the holder's release.
-- Safe to send twice: the second copy finds no such hold.
--
-- @keys lock  hash: the lock, lib/take_lock
-- @args acquisition  the acquisition that holds the lock now
-- @args asked  the time when the hold was asked for (us); "": it was asked for by a version that did not store the time
-- @reply 1  cancelled
-- @reply 0  there is no such hold, or another acquisition holds the lock

local holder, operator, current = unpack(redis.call('HMGET', lock, 'acq', 'operator', 'asked'))
if not operator or holder ~= acquisition or (current or '') ~= asked then
  return 0
end
-- This also ends the task's own min_hold: hold_lock replaced its length, so it is not known any more.
return redis.call('HDEL', lock, 'operator', 'reason', 'asked', 'min_hold') and 1
