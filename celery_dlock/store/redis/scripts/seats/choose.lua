-- seats/choose: which seat an acquire asks for.
-- @uses lock acquisition identity notify seats wake seat_limit
-- @after acquisition holder_kind wake expiry seats/common

local function is_running(seat)
  return seat.identity == identity and kind_of(seat.acq) ~= 'grant'
end

local function is_for_this(seat)
  return seat.acq == GRANT .. identity or seat.acq == RESERVED .. identity
end

local function awaits_this(seat)
  return seat.reserved_for == identity
end

-- Return the seat of this acquisition, else one that this message runs on or is to get; nil if there is none. Seats
-- above the limit count too.
local function related_seat()
  local number = seat_where(function(seat) return seat.acq == acquisition end)
  if number or identity == '' then
    return number
  end
  return seat_where(is_running) or seat_where(is_for_this) or seat_where(awaits_this)
end

local function free_seat()
  for number = 0, allowed - 1 do
    if not taken[number] then
      return number
    end
  end
end

-- All seats are taken. Return the seat whose holder the answer names: one whose body has ended, else the first one to
-- expire. If this call waits, mark all seats, so that each release wakes a waiting call.
local function busiest_seat()
  local chosen, soonest_ms
  for number = 0, seat_count - 1 do
    if taken[number] then
      lock = seat_key(number)
      repair_expiry()
      if notify ~= '0' then
        redis.call('HSET', lock, 'notify', '1')
      end
      if number < allowed then
        local releasing, due = unpack(redis.call('HMGET', lock, 'releasing', 'due'))
        local left_ms = due and math.max(0, due / 1000 - clock_s * 1000) or redis.call('PTTL', lock)
        left_ms = releasing and -1 or left_ms
        if not chosen or left_ms < soonest_ms then
          chosen, soonest_ms = number, left_ms
        end
      end
    end
  end
  return chosen
end

-- This call has waited, and took a seat. One wake-up may stand for several releases. If another seat is free, wake
-- the next waiting call. Mark the taken seats again: a call may have taken one after the waiting calls marked them.
local function wake_others(number)
  local one_is_free = false
  for other = 0, allowed - 1 do
    if taken[other] then
      redis.call('HSET', seat_key(other), 'notify', '1')
    elseif other ~= number then
      one_is_free = true
    end
  end
  if one_is_free then
    wake_one()
  end
end

-- Add the number of the seat to the reply of an acquire that took it.
local function with_seat(reply, number)
  if type(reply) ~= 'string' then
    return reply
  end
  if notify == '2' then
    wake_others(number)
  end
  return reply .. ' ' .. number
end
