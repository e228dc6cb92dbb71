-- lib/ended_grant: remember callers that wait in their thread or pool slot when a grant ends.
-- @uses lock
-- @after wake
--
-- They have marked the grant (notify), and the mark is deleted together with the grant.

-- Mark the lock of the next waiter, or wake one of these callers if the lock is free.
local function keep_notify(marked, next_waiter)
  if marked and next_waiter then
    redis.call('HSET', lock, 'notify', '1')
  elseif marked then
    wake_one()
  end
end
