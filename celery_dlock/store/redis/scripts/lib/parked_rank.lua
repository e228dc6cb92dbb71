-- lib/parked_rank: the rank that a parked message had at its arrival (lib/message).
-- @after time

-- Return the rank as a text, or nil if the message cannot be read. With it, the message comes before later ones.
local function parked_rank(message)
  local readable, facts = pcall(cjson.decode, string.match(message, '\n(.*)$') or '')
  return readable and type(facts) == 'table' and type(facts.rank) == 'number' and decimal(facts.rank) or nil
end
