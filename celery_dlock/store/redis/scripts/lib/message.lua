-- lib/message: what the scripts read of a parked message. Its first line is task name and task id as JSON, the rest is
-- an object as JSON.
-- @after time

local function first_line(message)
  return string.match(message, '^[^\n]*')
end

-- Return task name and task id, "" for a part that is missing.
local function task_of(message)
  local readable, names = pcall(cjson.decode, first_line(message))
  if not readable or type(names) ~= 'table' then
    return '', ''
  end
  return type(names[1]) == 'string' and names[1] or '', type(names[2]) == 'string' and names[2] or ''
end

-- Return the rank that the message had at its arrival, as a text, or nil if the message cannot be read. With it, the
-- message comes before later ones.
local function parked_rank(message)
  local readable, facts = pcall(cjson.decode, string.match(message, '\n(.*)$') or '')
  return readable and type(facts) == 'table' and type(facts.rank) == 'number' and decimal(facts.rank) or nil
end
