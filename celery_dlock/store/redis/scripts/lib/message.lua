-- lib/message: what the scripts read of a parked message. Its first line is task name and task id as JSON, the rest is
-- an object as JSON.

local FIRST_LINE = '^[^\n]*'

-- Return task name and task id, "" for a part that is missing.
local function task_of(message)
  local readable, names = pcall(cjson.decode, string.match(message, FIRST_LINE))
  if not readable or type(names) ~= 'table' then
    return '', ''
  end
  return type(names[1]) == 'string' and names[1] or '', type(names[2]) == 'string' and names[2] or ''
end
