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

-- Return the given values, and behind them: acquisition, identity, token, since_us, releasing, count, left_ms, task, id,
-- node, pid.
local function with_holder(...)
  local found = redis.call('HMGET', lock, 'acq', 'identity', 'token', 'since', 'releasing', 'count', 'task', 'id',
                           'process')
  local answer = {...}
  for _, value in ipairs({found[1], found[2], found[3], found[4] or found[3], found[5] or '', found[6] or '1',
                          remaining_ms(), found[7], found[8], node_and_pid(found[9])}) do
    answer[#answer + 1] = value
  end
  return answer
end
