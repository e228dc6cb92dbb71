-- lib/unpublished_grant: recognise the grant that an earlier copy of this command made.
-- @uses lock messages

-- Return identity, message and id of the grant that the granter made, while its message is not known to be published.
-- If the first reply was lost, the second copy of the command returns this grant. Without this, no reply would name it.
local function unpublished_grant(granter)
  local grant = redis.call('HMGET', lock, 'granter', 'published', 'identity', 'since')
  if grant[1] ~= granter or grant[2] then
    return nil
  end
  return grant[3], redis.call('HGET', messages, grant[3]), grant[4]
end
