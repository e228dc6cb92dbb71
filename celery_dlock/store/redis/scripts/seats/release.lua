-- seats/release: free the seat of an acquisition.
-- @include seats/common

lock = seat_key(seat_of(acquisition) or 0)
return on_seat()
