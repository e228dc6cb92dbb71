-- lib/unsettled: the index of runs whose success is not recorded: they run, or their outcome is unknown (once_per).
-- @uses lock run unsettled
--
-- A sorted set per bucket. A member is the key of the run mark, with a space between the lock name and the tick (""
-- for the mark of the name). Its score is the time when the mark expires (us). Each new run removes up to two expired
-- members, and a reader removes a member whose run is settled (check_run). The key lives at least as long as its last
-- mark, and at most twice as long.

-- "run:" is one character shorter than "lock:", so the name ends before the last character's position of the lock key.
local function unsettled_member()
  return string.sub(run, 1, #lock - 1) .. ' ' .. string.sub(run, #lock + 1)
end

local function settle()
  redis.call('ZREM', unsettled, unsettled_member())
end
