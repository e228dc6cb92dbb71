-- seats/list_waiters: return the first waiters of a name. The granted ones of all seats come first.
-- Safe to send twice: it writes nothing.
--
-- It has the keys and the arguments of list_waiters, and these:
-- @keys seats  string: the record of the seats, seats/common
-- @keys absent  no key has this name: with it, a Cluster runs this script only where no key of its slot is migrating
-- @args seat_limit  limit of the task; "0": the caller does not know it
-- @reply as list_waiters

-- @include seats/common

local answer = {0}
for place = 0, places - 1 do
  local rank, waiter, due = unpack(redis.call('HMGET', seat_key(place), 'rank', 'identity', 'due'))
  local message = due and redis.call('HGET', messages, waiter)
  answer[1] = answer[1] + (due and 1 or 0)
  if message and #answer < 5 * limit then
    for _, value in ipairs({waiter, rank, 'granted', '0', string.match(message, '^[^\n]*')}) do
      answer[#answer + 1] = value
    end
  end
end
lock = first_lock .. ':none' -- no seat, so that on_seat() counts no grant
local waiters = on_seat()
answer[1] = answer[1] + waiters[1]
for place = 2, #waiters do
  if #answer < 5 * limit + 1 then
    answer[#answer + 1] = waiters[place]
  end
end
return answer
