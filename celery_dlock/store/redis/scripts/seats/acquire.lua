-- seats/acquire: take the first free seat, or return why all are taken.
-- @include seats/common seats/choose

local place = related_seat() or free_seat() or busiest_seat()
lock = seat_key(place)
used_places = math.max(used_places, place + 1)
local reply = on_seat()
keep_record()
return with_seat(reply, place)
