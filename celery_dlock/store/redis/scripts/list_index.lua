-- list_index: return members of indexes of buckets, for operators.
-- Safe to send twice: it writes nothing.
--
-- @keys indexes...  sorted sets, one per bucket. In a Cluster only one, because all keys of a script must be in one slot
-- @args first  number of the first member to return, from 0
-- @args last  number of the last one
-- @reply {number of an index, {member, score, ...}, ...}  of the buckets that have any

local found = {}
if redis.call('EXISTS', unpack(indexes)) > 0 then
  for number = 1, #indexes do
    local members = redis.call('ZRANGE', indexes[number], first, last, 'WITHSCORES')
    if members[1] then
      found[#found + 1] = number
      found[#found + 1] = members
    end
  end
end
return found
