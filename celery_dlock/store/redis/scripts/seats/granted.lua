-- seats/granted: run the script on the seat that is granted to a waiter. Statements, the whole of a file.
-- @uses lock queues lock_name identity
-- @after acquisition seats/common

lock = seat_key(seat_where(function(seat) return seat.acq == GRANT .. identity end) or 0)
local earlier_due = redis.call('ZSCORE', queues, lock_name)
local reply = on_seat()
if earlier_due then
  -- Another seat may be due sooner.
  redis.call('ZADD', queues, 'LT', earlier_due, lock_name)
end
return reply
