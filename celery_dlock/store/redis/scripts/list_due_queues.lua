-- list_due_queues: return the locks of some buckets that a sweep has to visit.
-- Safe to send twice: it writes nothing.
--
-- @keys indexes...  sorted sets, as queues in acquire_queued, one per bucket. In a Cluster only one, because all keys
--   of a script must be in one slot
-- @args limit  highest number of names per bucket
-- @args within_us  include queues that are due within this many microseconds
-- @reply {number of an index, {name, ...}, ...}  of the buckets that have any

-- @include time

local GROUP_SIZE = 64

local until_us = decimal(server_time_us() + within_us)
local found, failed = {}, nil
for first = 1, #indexes, GROUP_SIZE do
  local last = math.min(first + GROUP_SIZE - 1, #indexes)
  -- Most buckets have no index. One command finds that out for a whole group.
  if redis.call('EXISTS', unpack(indexes, first, last)) > 0 then
    for number = first, last do
      local names = redis.pcall('ZRANGEBYSCORE', indexes[number], '-inf', until_us, 'LIMIT', '0', limit)
      if names.err then
        -- Another program overwrote this index. Go on with the other buckets.
        failed = names
      elseif names[1] then
        found[#found + 1] = number
        found[#found + 1] = names
      end
    end
  end
end
return failed and not found[1] and failed or found
