-- lib/holder: how long the lock's holder has it, and where it runs.
-- @uses lock
-- @after time

-- Return the milliseconds until the lock's key expires, or until the grant is due if the lock is granted.
local function remaining_ms()
  local due = redis.call('HGET', lock, 'due')
  if due then
    return math.max(0, math.floor((due - server_time_us()) / 1000))
  end
  return redis.call('PTTL', lock)
end

-- Return the node name and the process id from the field process; '' and '0' for a grant.
local function node_and_pid(process)
  local node, pid = string.match(process or '', '^(.*) (%d+)$')
  return node or '', pid or '0'
end
