-- seats/renew: renew the lease of a seat. This keeps the record of the seats, too.
-- Safe to send twice: the values are absolute, and no key's life is shortened.
--
-- It has the keys and the arguments of renew, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as renew

-- @include seats/common

lock = seat_key(seat_where(function(seat) return seat.acq == acquisition end) or 0)
local renewed = on_seat()
if renewed == 1 then
  keep_record()
end
return renewed
