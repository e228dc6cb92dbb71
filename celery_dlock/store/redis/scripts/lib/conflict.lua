-- lib/conflict: answers of an acquire that does not take the lock.
-- @uses lock acquisition ttl_ms identity notify once
-- @after time holder run_mark
--
-- The including script has read the field acq into the local `holder` and the run mark into `run_mark`.

-- Return the reply of the first copy of this command. The second copy may have a longer ttl, so extend the lease.
local function repeated_answer()
  local token, since = unpack(redis.call('HMGET', lock, 'token', 'since'))
  if redis.call('PTTL', lock) < tonumber(ttl_ms) then
    redis.call('PEXPIRE', lock, ttl_ms)
  end
  since = since or token
  local answer = token .. ' ' .. since .. ' ' .. since
  if ONCE then
    local mark = parse_run_mark(run_mark)
    local seed, crashed = mark.seed or '', (mark.crashed_at or '') ~= ''
    answer = answer .. ' ' .. (seed ~= '' and seed or token) .. ' ' .. (crashed and '1' or '0')
  end
  return answer
end

-- Return the given values and the holder's fields. Set dup and notify in the lock, which its release reads.
local function describe_holder(...)
  local found = redis.call('HMGET', lock, 'identity', 'token', 'since', 'releasing', 'count', 'task', 'id',
                           'process')
  if identity ~= '' and found[1] == identity then
    -- A duplicate of the holder's message exists. The holder's release will set the done mark for it.
    redis.call('HSET', lock, 'dup', '1')
  end
  if notify ~= '0' then
    redis.call('HSET', lock, 'notify', '1')
  end
  local answer = {...}
  for _, value in ipairs({holder, found[1], found[2], found[3] or found[2], found[4] or '', found[5] or '1', remaining_ms(),
                          found[6], found[7], node_and_pid(found[8])}) do
    answer[#answer + 1] = value
  end
  return answer
end
