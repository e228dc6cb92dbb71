-- lib/lifetime: a key's life is never shortened.

local function live_at_least(key, life_ms)
  if redis.call('PTTL', key) < tonumber(life_ms) then
    redis.call('PEXPIRE', key, life_ms)
  end
end
