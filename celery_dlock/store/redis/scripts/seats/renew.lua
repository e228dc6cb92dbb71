-- seats/renew: renew the lease of a seat. This keeps the record of the seats, too.
-- Safe to send twice: the values are absolute, and no key's life is shortened.
--
-- seats/common has its keys and arguments.
-- @reply as renew

-- @include seats/common

lock = seat_key(seat_where(function(seat) return seat.acq == acquisition end) or 0)
local renewed = on_seat()
if renewed == 1 then
  keep_record()
end
return renewed
