-- check_dead_letter: return the task of a dead letter that the index names, or remove it from the index if it is gone.
-- Safe to send twice: the second copy finds the same message.
--
-- @keys dead  hash, as in acquire_queued
-- @keys dead_letters  sorted set of this bucket: lib/dead_letter
-- @args lock_name  text of the lock name
-- @args identity  identity of the message
-- @reply first line of its message: task name and task id as JSON
-- @reply 0  there is no such dead letter

-- @include message

local message = redis.call('HGET', dead, identity)
if not message then
  redis.call('ZREM', dead_letters, identity .. ' ' .. lock_name)
  return 0
end
return string.match(message, FIRST_LINE)
