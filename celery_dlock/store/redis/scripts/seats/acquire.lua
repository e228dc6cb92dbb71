-- seats/acquire: take the first free seat, or return why all are taken.
-- Safe to send twice: the second copy finds the seat of its own acquisition, and asks for that one again.
--
-- It has the keys and the arguments of acquire, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys seat_wake  list: lib/wake
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply "token since_us rank_us seat"  acquired
-- @reply as acquire  refused: the message concerns one seat, or no seat is free and the reply names the holder of one

-- @include seats/common seats/choose

local place = related_seat() or free_seat() or busiest_seat()
lock = seat_key(place)
used_places = math.max(used_places, place + 1)
local reply = on_seat()
keep_record()
return with_seat(reply, place)
