-- seats/decline_grant: leave a granted message to another worker.
-- Safe to send twice: the second copy finds the same grant, and declines it again.
--
-- It has the keys and the arguments of decline_grant, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as decline_grant

-- @include seats/common

lock = seat_key(seat_where(function(seat) return seat.acq == 'grant:' .. identity end) or 0)
local earlier_due = redis.call('ZSCORE', queues, lock_name)
local reply = on_seat()
if earlier_due then
  -- Another seat may be due sooner.
  redis.call('ZADD', queues, 'LT', earlier_due, lock_name)
end
return reply
