-- lib/restore_places: give its place back to a message that has none.
-- @uses waiting messages delayed
-- @after time parked_rank
--
-- The scripts keep a place for each stored message (lib/grant). But an operator may have deleted a sorted set, because
-- another program had overwritten it. Without a place, a message would never be granted the lock.

-- Fields of `messages` that one sweep looks at. A larger hash is checked in random parts.
local CHECKED_FIELDS = 16

-- Check some messages. `granted` has the identities of granted ones, whose place is the grant.
local function restore_places(now, granted)
  local fields, waiters = redis.call('HRANDFIELD', messages, CHECKED_FIELDS), {}
  for index, field in ipairs(fields) do
    waiters[index] = string.match(field, '^[^:]*')
  end
  if not fields[1] then
    return
  end
  local waits, later = redis.call('ZMSCORE', waiting, unpack(waiters)), redis.call('ZMSCORE', delayed, unpack(waiters))
  for index, waiter in ipairs(waiters) do
    if not (waits[index] or later[index] or granted[waiter]) then
      local message, rank = unpack(redis.call('HMGET', messages, waiter, waiter .. ':rank'))
      if message then
        redis.call('ZADD', waiting, rank or parked_rank(message) or decimal(now), waiter)
      else
        redis.call('HDEL', messages, fields[index])
      end
    end
  end
end
