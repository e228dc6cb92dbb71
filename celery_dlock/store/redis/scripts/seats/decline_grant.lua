-- seats/decline_grant: leave a granted message to another worker.
-- Safe to send twice: the second copy finds the same grant, and declines it again.
--
-- seats/common has its keys and arguments.
-- @reply as decline_grant

-- @include acquisition seats/common seats/granted
