-- lib/holder: how long the lock's holder has it.
-- @uses lock
-- @after time

-- Return the milliseconds until the lock's key expires. Of a grant, return those until it is due.
local function remaining_ms()
  local due = redis.call('HGET', lock, 'due')
  if due then
    return math.max(0, math.floor((due - server_time_us()) / 1000))
  end
  return redis.call('PTTL', lock)
end
