-- seats/confirm_publish: record that the message of a granted waiter was published.
-- Safe to send twice: the second copy finds the same grant, and only sets its deadline again.
--
-- It has the keys and the arguments of confirm_publish, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as confirm_publish

-- @include seats/common

lock = seat_key(seat_where(function(seat) return seat.acq == 'grant:' .. identity end) or 0)
local earlier_due = redis.call('ZSCORE', queues, lock_name)
local reply = on_seat()
if earlier_due then
  -- Another seat may be due sooner.
  redis.call('ZADD', queues, 'LT', earlier_due, lock_name)
end
return reply
