-- seats/acquire_queued: take the first free seat, or park the message that has to wait.
-- @include time grant seats/common seats/choose seats/queue

-- Grant the free seats to waiters. If the limit has grown, or a lease has expired, a seat is free although calls wait.
local function grant_free_seats()
  for place = 0, allowed - 1 do
    -- Name another granter: a second copy of this command must find only the grant that on_seat() makes.
    if not taken[place] and not grant_for_sweep(place, 'sweep') then
      return
    end
  end
end

-- A second copy of this command finds the grant that the first one made.
local place = related_seat() or seat_of(acquisition) or free_seat() or busiest_seat()
lock = seat_key(place)
local reply = on_seat()
if redis.call('EXISTS', lock) == 1 then
  taken[place] = taken[place] or {acq = acquisition, identity = identity}
  used_places = math.max(used_places, place + 1)
end
if has_waiters() then
  for other = 0, places - 1 do
    if taken[other] then
      -- A release under another policy reads this field.
      redis.call('HSET', seat_key(other), 'has_waiters', '1')
    end
  end
  grant_free_seats()
end
keep_earlier_due()
keep_record()
return with_seat(reply, place)
