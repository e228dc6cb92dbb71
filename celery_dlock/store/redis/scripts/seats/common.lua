-- seats/common: the seats of a name with `limit`: one lock for each call that may hold the name at once.
-- @uses lock seats seat_limit
--
-- Each file of this folder finds the seat that concerns its command, sets `lock` to the key of that seat, and calls
-- on_seat(). That function is the whole script of a lock: acquire, release and so on. So each seat has its own holder,
-- expiry and crash handling. The queue, the done marks and the highest token are those of the name and its bucket.
--
-- A file has the keys and the arguments of that script, and these:
--   seats        the key of the record of the seats
--   absent       no key has this name: with it, a Cluster runs the script only where no key of its slot is migrating
--   seat_limit   argument: the limit of the task; "0": the caller does not know it
--
-- Seat 0 has the key of the lock itself. Seat k has that key, a colon and k. Calls with a smaller limit look at all
-- seats that may be held, because a duplicate of their message may run there.
--
-- The record of the seats is a string of three numbers. The first is the limit in force. The second is the time (s)
-- when a command with this limit last ran. The third is how many seats may be taken now. If workers have different
-- limits, the largest one is in force. When no command with it has run for LIMIT_S, the next smaller one is.
-- The record lives as long as a done mark, from the last acquisition or renewal of any seat.

local LIMIT_S, RECORD_MS, MOST_SEATS = 60, '86400000', 100

local first_lock = lock
local clock_s, own_limit = tonumber(redis.call('TIME')[1]), tonumber(seat_limit)
local allowed, seen_s, seat_count = string.match(redis.call('MGET', seats)[1] or '', '^(%d+) (%d+) (%d+)$')
allowed, seen_s, seat_count = tonumber(allowed or '1'), tonumber(seen_s or '0'), tonumber(seat_count or '1')
if own_limit >= allowed or (own_limit > 0 and clock_s - seen_s > LIMIT_S) then
  allowed, seen_s = own_limit, clock_s
end
-- If the clock went back, the stored time is later than now, and the larger limit would not run out.
seen_s = math.min(seen_s, clock_s)
seat_count = math.min(math.max(seat_count, allowed), MOST_SEATS)

local function seat_key(number)
  return number == 0 and first_lock or first_lock .. ':' .. number
end

-- The fields of each seat that is not free, by its number.
local taken, used_seats = {}, 0
for number = 0, seat_count - 1 do
  local fields = redis.call('HMGET', seat_key(number), 'acq', 'identity', 'granter', 'published', 'reserved_for')
  if fields[1] then
    taken[number] = {acq = fields[1], identity = fields[2], granter = fields[3], published = fields[4],
                    reserved_for = fields[5]}
    used_seats = number + 1
  end
end

-- Return the first seat whose fields match; nil if there is none.
local function seat_where(matches)
  for number = 0, seat_count - 1 do
    if taken[number] and matches(taken[number]) then
      return number
    end
  end
end

-- Return the seat whose unpublished grant an earlier copy of this command made; nil if there is none.
local function granted_seat(granter)
  return seat_where(function(seat) return seat.granter == granter and not seat.published end)
end

-- Return the seat of this acquisition, else a seat whose unpublished grant an earlier copy of this command made.
local function seat_of(acquisition)
  return seat_where(function(seat) return seat.acq == acquisition end) or granted_seat(acquisition)
end

-- Write the record. Call this after the writes of on_seat(): if the server's memory is full, it refuses SET unless the
-- script has written before. A refusal must not undo the rest.
local function keep_record()
  local record = string.format('%d %d %d', allowed, seen_s, math.max(allowed, used_seats))
  redis.pcall('SET', seats, record, 'PX', RECORD_MS)
end
