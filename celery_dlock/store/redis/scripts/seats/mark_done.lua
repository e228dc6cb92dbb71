-- seats/mark_done: set the done mark of a message, unless a later message with its id holds a seat.
-- Safe to send twice: the first mark stands.
--
-- It has the keys and the arguments of mark_done, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as mark_done

-- @include seats/common

lock = seat_key(seat_where(function(seat) return seat.identity == identity end) or 0)
return on_seat()
