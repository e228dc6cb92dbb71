-- lib/quarantine: refuse new locks while this server may have lost leases that have not expired.
-- @uses quarantine quarantine_ms failover_epoch
--
-- After a failover, a FLUSHALL or a restart without its data, a server does not know all owners. It grants nothing new
-- until the leases that it may have lost have expired. It still renews and releases the leases that it has, and it
-- answers reads. Chubby calls this lock-delay, Redlock delayed restart.
--
-- Each bucket has a record of the server that grants there. It has the server's run id, its replication id, the end of
-- the quarantine (us), its length (ms), and the failover epoch. The epoch is 0 if failovers are not counted.
--
-- A server gets a new run id at each start. At each promotion, it gets a new replication id and keeps the old one as
-- its second id. A primary whose replicas were all away for long changes its id too, and then has no second id. Only
-- the epoch reveals a primary that was paused or cut off while another server replaced it. It did not become a replica.
--
-- A start always begins a quarantine, also with an append-only file. That file may lack a lease, because `appendfsync`
-- may have had another value when the lease was written.

-- Return the milliseconds that are left of the quarantine, and "1" if it started with this call, else "0".
local function quarantine_left_ms(now)
  local replication = redis.call('INFO', 'replication')
  local replication_id = string.match(replication, 'master_replid:(%x+)')
  local text = redis.call('MGET', quarantine)[1] or ''
  local last_run_id, last_replication_id, ends_at, length_ms, last_epoch =
    string.match(text, '^(%x+) (%x+) (%d+) (%d+) (%d+)$')
  local run_id, started = last_run_id, false
  if last_replication_id ~= replication_id then
    run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    started = last_run_id ~= run_id or not string.match(replication, 'master_replid2:0+%s')
  end
  local epoch = math.max(tonumber(failover_epoch), tonumber(last_epoch or '0'))
  started = started or epoch > tonumber(last_epoch or '0')
  if started then
    ends_at, length_ms = now + quarantine_ms * 1000, quarantine_ms
  end
  ends_at, length_ms = tonumber(ends_at), tonumber(length_ms)
  if tonumber(quarantine_ms) > length_ms then
    -- An earlier caller had a shorter setting. The start of the quarantine stays.
    ends_at, length_ms = ends_at + (quarantine_ms - length_ms) * 1000, tonumber(quarantine_ms)
  end
  -- If the server's clock went back, the quarantine must not last longer than its length.
  ends_at = math.min(ends_at, now + length_ms * 1000)
  local record = string.format('%s %s %.0f %.0f %.0f', run_id, replication_id, ends_at, length_ms, epoch)
  if record ~= text then
    redis.call('SET', quarantine, record)
  end
  return math.ceil((ends_at - now) / 1000), started and '1' or '0'
end
