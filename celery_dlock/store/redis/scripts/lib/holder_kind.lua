-- lib/holder_kind: the kind of holder that the field acq of a lock names.
-- @after acquisition

-- Return "owner", "grant", "min_hold", "keep_on_retry" or "operator".
local function kind_of(acquisition)
  local kinds = {[KEPT] = 'min_hold', [GRANT] = 'grant', [RESERVED] = 'keep_on_retry', [OPERATOR] = 'operator'}
  return kinds[acquisition] or kinds[string.match(acquisition, '^%a+:') or ''] or 'owner'
end
