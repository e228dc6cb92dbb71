-- Part of the scripts that grant: may this server grant anything new yet, or could it have lost leases that still run?
--
-- A marker, one in each bucket, says who is in office: run_id, replication id, from when on it grants (µs), the length of
-- its probation (ms), and its term, as far as somebody counts those. A server has another run_id after each start, and
-- another replication id after each promotion, which then keeps the id before it as the second one. It changes its id too
-- when all its replicas have been away for long; then there is no second one. Only the term tells of a primary that was
-- paused, or cut off, while another was in its place, and that nobody has made a replica.
--
-- A start always begins a probation. No setting that is read now tells whether what the server confirmed before was on disk.

local function probation(marker, now, delay, term)
  -- Milliseconds that are left of it, '1' if it began with this call.
  local info = redis.call('INFO', 'replication')
  local id = string.match(info, 'master_replid:(%x+)')
  local text = redis.call('MGET', marker)[1] or ''
  local of, of_id, till, length, of_term = string.match(text, '^(%x+) (%x+) (%d+) (%d+) (%d+)$')
  local run, began = of, false
  if of_id ~= id then
    run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    began = of ~= run or not string.match(info, 'master_replid2:0+%s')
  end
  term = math.max(tonumber(term), tonumber(of_term or '0'))
  began = began or term > tonumber(of_term or '0')
  if began then
    till, length = now + delay * 1000, delay
  end
  till, length = tonumber(till), tonumber(length)
  if tonumber(delay) > length then
    -- Who asked before knew of shorter leases only. It began when it began.
    till, length = till + (delay - length) * 1000, tonumber(delay)
  end
  -- Never longer than it was meant to be, though the server's clock went back.
  till = math.min(till, now + length * 1000)
  local stands = string.format('%s %s %.0f %.0f %.0f', run, id, till, length, term)
  if stands ~= text then
    redis.call('SET', marker, stands)
  end
  return math.ceil((till - now) / 1000), began and '1' or '0'
end
