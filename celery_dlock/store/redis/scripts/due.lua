-- Say which locks of these buckets a sweep has to look after.
--
-- KEYS  indexes as in acquire, one for each bucket; in a Cluster one only, because a script names keys of one slot
-- ARGV  1 how many of each at most
--       2 within so many microseconds from now
-- Result {place of an index in KEYS, {names}, ...} of those that have any. Changes nothing, so it is safe to be sent twice.

local GROUP = 64

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2] + ARGV[2])
local found, broken = {}, nil
for first = 1, #KEYS, GROUP do
  local last = math.min(first + GROUP - 1, #KEYS)
  -- Most buckets have no index, and one command tells so of a whole group.
  if redis.call('EXISTS', unpack(KEYS, first, last)) > 0 then
    for place = first, last do
      local names = redis.pcall('ZRANGEBYSCORE', KEYS[place], '-inf', now, 'LIMIT', '0', ARGV[1])
      if names.err then
        -- Somebody overwrote this index. The other buckets are looked at all the same.
        broken = names
      elseif names[1] then
        found[#found + 1] = place
        found[#found + 1] = names
      end
    end
  end
end
return broken and not found[1] and broken or found
