-- seats/remove_waiter: remove a waiter, and grant its seat to the next one if it had a grant.
-- Safe to send twice: the second copy finds the message among the dead letters, and the seat that the first copy
-- granted.
--
-- seats/common has its keys and arguments.
-- @reply as remove_waiter

-- @include time acquisition holder_kind message grant seats/common seats/queue

local function concerns_this(seat)
  return seat.identity == identity
end

local number = seat_where(function(seat) return concerns_this(seat) and kind_of(seat.acq) ~= 'grant' end) or
  seat_where(concerns_this) or granted_seat(granter) or 0
lock = seat_key(number)
local reply = on_seat()
if take_back_grant(number) then
  reply = {reply[1], '', '', ''}
end
keep_earlier_due()
return reply
