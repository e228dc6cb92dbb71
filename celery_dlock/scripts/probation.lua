-- Part of the scripts that grant: may this server grant anything new yet, or could it have lost leases that still run?
--
-- A marker, one in each bucket, says who is in office: run_id, replication id, from when on it grants (µs), the length of
-- its probation (ms), and '1' if it found the marker of another (it was promoted, or restarted with its data), '0' if it
-- found none (it is new, or was emptied), '2' once that other is known to have been itself, with all that it ever
-- confirmed; and its term, as far as somebody counts those. A server has another run_id after each start, and another
-- replication id after each promotion, which then keeps the id before it as the second one. It changes its id too when all
-- its replicas have been away for long; then there is no second one. Only the term tells of a primary that was paused, or
-- cut off, while another was in its place, and that nobody has made a replica.

local function probation(marker, now, delay, trusted, term)
  -- Milliseconds that are left of it, '1' if it began with this call, '1' if there was a marker of another.
  local info = redis.call('INFO', 'replication')
  local id = string.match(info, 'master_replid:(%x+)')
  local text = redis.call('MGET', marker)[1] or ''
  local of, of_id, till, length, kept, of_term = string.match(text, '^(%x+) (%x+) (%d+) (%d+) ([012]) (%d+)$')
  local run, began = of, false
  if of_id ~= id then
    run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    began = of ~= run or not string.match(info, 'master_replid2:0+%s')
  end
  term = math.max(tonumber(term), tonumber(of_term or '0'))
  began = began or term > tonumber(of_term or '0')
  if began then
    till, length, kept = now + delay * 1000, delay, of and '1' or '0'
  end
  till, length = tonumber(till), tonumber(length)
  if kept == '1' and trusted == run then
    kept, till = '2', math.min(till, now)
  end
  if kept ~= '2' and tonumber(delay) > length then
    -- Who asked before knew of shorter leases only. It began when it began.
    till, length = till + (delay - length) * 1000, tonumber(delay)
  end
  -- Never longer than it was meant to be, though the server's clock went back.
  till = math.min(till, now + length * 1000)
  local stands = string.format('%s %s %.0f %.0f %s %.0f', run, id, till, length, kept, term)
  if stands ~= text then
    redis.call('SET', marker, stands)
  end
  return math.ceil((till - now) / 1000), began and '1' or '0', kept
end
