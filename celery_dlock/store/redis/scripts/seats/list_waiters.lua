-- seats/list_waiters: return the first waiters of a name. The granted messages of all seats come first.
-- Safe to send twice: it writes nothing.
--
-- It has the keys and the arguments of list_waiters, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as list_waiters

-- @include seats/common

local granted = {}
for place = 0, places - 1 do
  local rank, waiter, due = unpack(redis.call('HMGET', seat_key(place), 'rank', 'identity', 'due'))
  if due then
    granted[#granted + 1] = {rank, waiter}
  end
end
lock = first_lock .. ':none' -- no seat, so that on_seat() counts no grant
local waiters = on_seat()
local answer = {waiters[1] + #granted}
for _, one in ipairs(granted) do
  local message = redis.call('HGET', messages, one[2])
  if message and #answer < 2 * limit then
    answer[#answer + 1] = one[1]
    answer[#answer + 1] = string.match(message, '^[^\n]*')
  end
end
for place = 2, #waiters do
  if #answer < 2 * limit + 1 then
    answer[#answer + 1] = waiters[place]
  end
end
return answer
