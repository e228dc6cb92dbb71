-- seats/mark_done: set the done mark of a message, unless a later message with its id holds a seat.
-- Safe to send twice: the first mark stands.
--
-- seats/common has its keys and arguments.
-- @reply as mark_done

-- @include seats/common

lock = seat_key(seat_where(function(seat) return seat.identity == identity end) or 0)
return on_seat()
