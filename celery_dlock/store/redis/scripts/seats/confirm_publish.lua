-- seats/confirm_publish: record that the message of a granted waiter was published.
-- Safe to send twice: the second copy finds the same grant, and only sets its deadline again.
--
-- seats/common has its keys and arguments.
-- @reply as confirm_publish

-- @include acquisition seats/common seats/granted
