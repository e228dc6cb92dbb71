-- seats/list_waiters: return the first waiters of a name. The granted ones of all seats come first.
-- Safe to send twice: it writes nothing.
--
-- seats/common has its keys and arguments.
-- @reply as list_waiters

-- @include seats/common

local locks = {}
for place = 0, places - 1 do
  locks[place + 1] = seat_key(place)
end
return on_seat(locks)
