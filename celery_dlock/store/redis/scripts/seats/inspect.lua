-- seats/inspect: return the holder of the first seat that is held.
-- Safe to send twice: it writes nothing.
--
-- It has the keys and the arguments of inspect, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as inspect

-- @include seats/common

lock = seat_key(seat_where(function() return true end) or 0)
return on_seat()
