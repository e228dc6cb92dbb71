-- seats/remove_waiter: remove a waiter, and grant its seat to the next one if it had a grant.
-- Safe to send twice: the second copy finds the message among the dead letters, and the seat that the first copy
-- granted.
--
-- It has the keys and the arguments of remove_waiter, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as remove_waiter

-- @include time grant seats/common seats/queue

local function concerns_this(seat)
  return seat.identity == identity
end

local place = seat_where(function(seat) return concerns_this(seat) and string.sub(seat.acq, 1, 6) ~= 'grant:' end) or
  seat_where(concerns_this) or granted_seat(granter) or 0
lock = seat_key(place)
local reply = on_seat()
if take_back_grant(place) then
  reply = {reply[1], '', '', ''}
end
keep_earlier_due()
return reply
