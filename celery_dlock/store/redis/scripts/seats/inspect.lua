-- seats/inspect: return the holder of the first seat that is held.
-- Safe to send twice: it writes nothing.
--
-- seats/common has its keys and arguments.
-- @reply as inspect

-- @include seats/common

lock = seat_key(seat_where(function() return true end) or 0)
return on_seat()
