-- pass_on_wake: wake the next caller that waits, because the one that was woken will not take the lock.
-- Safe to send twice: the list has one entry at most, and a caller that is woken too often finds the lock held.
--
-- @keys wake  list: lib/wake
-- @reply 1  there is an entry now
-- @reply error  the server refuses RPUSH, with this error

-- @include wake

return wake_one() or 1
