-- seats/renew: renew the lease of a seat. This keeps the record of the seats, too.
-- @include seats/common

lock = seat_key(seat_where(function(seat) return seat.acq == acquisition end) or 0)
local renewed = on_seat()
if renewed == 1 then
  keep_record()
end
return renewed
