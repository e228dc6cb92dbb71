-- seats/release: free the seat of an acquisition.
-- Safe to send twice: the second copy finds no seat of the acquisition, so it frees none. It sets the same marks again.
--
-- It has the keys and the arguments of release, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as release

-- @include seats/common

lock = seat_key(seat_of(acquisition) or 0)
return on_seat()
