-- lib/acquisition: the kind of holder that the field acq of a lock names, as in store/acquisition.py.
--
-- An owner has a body, and its text is the owner's id and a number. The other texts are read and written only here.

local KEPT = 'kept'

local function grant_to(identity)
  return 'grant:' .. identity
end

local function reservation_for(identity)
  return 'reserved:' .. identity
end

-- Return "owner", "grant", "min_hold", "keep_on_retry" or "operator".
local function kind_of(acquisition)
  local kinds = {[KEPT] = 'min_hold', ['grant:'] = 'grant', ['reserved:'] = 'keep_on_retry', ['operator:'] = 'operator'}
  return kinds[acquisition] or kinds[string.match(acquisition, '^%a+:') or ''] or 'owner'
end
