-- lib/time: the server's clock, in microseconds since the epoch.

local function server_time_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Return a number with all its digits, exactly up to 2^53. Lua itself prints 1.8e+15.
local function decimal(number)
  return string.format('%.0f', number)
end
