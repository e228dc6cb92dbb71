-- lib/run_command: what the commands begin with by which an operator changes the last run of a name. Statements.
-- @uses run command_id shown_mark
-- @after run_mark

local mark = read_run_mark(run)
if mark.acquisition == command_id then
  return 1
end
-- The operator is shown a text that tells the mark from a later one. An unknown or a cleared mark may have no
-- acquisition.
local this_mark = mark.acquisition ~= '' and mark.acquisition or 'at:' .. (mark.at or '')
if shown_mark ~= '' and shown_mark ~= this_mark then
  return 0
end
