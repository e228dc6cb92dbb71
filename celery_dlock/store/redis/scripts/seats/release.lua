-- seats/release: free the seat of an acquisition.
-- Safe to send twice: the second copy finds no seat of the acquisition, so it frees none. It sets the same marks again.
--
-- seats/common has its keys and arguments.
-- @reply as release

-- @include seats/common

lock = seat_key(seat_of(acquisition) or 0)
return on_seat()
