-- seats/inspect: return the holder of the first seat that is held.
-- @include seats/common

lock = seat_key(seat_where(function() return true end) or 0)
return on_seat()
