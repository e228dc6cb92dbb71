-- seats/list_waiters: return the first waiters of a name. The granted ones of all seats come first.
-- Safe to send twice: it writes nothing.
--
-- seats/common has its keys and arguments.
-- @reply as list_waiters

-- @include seats/common

local locks = {}
for number = 0, seat_count - 1 do
  locks[number + 1] = seat_key(number)
end
return on_seat(locks)
