-- seats/remove_waiter: remove a waiter, and grant its seat to the next one if it had a grant.
-- @include time grant seats/common seats/queue

local function concerns_this(seat)
  return seat.identity == identity
end

local function is_granted_by_this(seat)
  return seat.granter == granter and not seat.published
end

local place = seat_where(function(seat) return concerns_this(seat) and string.sub(seat.acq, 1, 6) ~= 'grant:' end) or
  seat_where(concerns_this) or seat_where(is_granted_by_this) or 0
lock = seat_key(place)
local reply = on_seat()
if take_back_grant(place) then
  reply = {reply[1], '', '', ''}
end
keep_earlier_due()
return reply
