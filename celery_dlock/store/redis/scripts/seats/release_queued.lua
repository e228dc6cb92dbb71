-- seats/release_queued: free the seat of an acquisition, and grant this seat to the next waiter.
-- Safe to send twice: the second copy finds the seat that the first one granted. It names that grant until the message
-- is known to be published.
--
-- seats/common has its keys and arguments.
-- @reply as release_queued

-- @include time acquisition full_memory message grant seats/common seats/queue

local number = seat_of(acquisition) or
  (identity ~= '' and seat_where(function(seat) return seat.acq == GRANT .. identity end)) or 0
lock = seat_key(number)
begin_writing()
if taken[number] and taken[number].acq == acquisition and has_waiters() then
  redis.call('HSET', lock, 'has_waiters', '1')
end
local reply = on_seat()
if take_back_grant(number) and type(reply) == 'table' then
  reply[2], reply[3], reply[4] = '', '', ''
end
keep_earlier_due()
return reply
