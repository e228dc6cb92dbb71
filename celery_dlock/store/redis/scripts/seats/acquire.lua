-- seats/acquire: take the first free seat, or return why all are taken.
-- Safe to send twice: the second copy finds the seat of its own acquisition, and asks for that one again.
--
-- seats/common has its keys and arguments, except this one:
-- @keys wake  list: lib/wake
-- @reply "token since_us rank_us seat"  acquired
-- @reply as acquire  refused: the message concerns one seat, or no seat is free and the reply names the holder of one

-- @include acquisition holder_kind wake expiry seats/common seats/choose

local number = related_seat() or free_seat() or busiest_seat()
lock = seat_key(number)
used_seats = math.max(used_seats, number + 1)
local reply = on_seat()
keep_record()
return with_seat(reply, number)
