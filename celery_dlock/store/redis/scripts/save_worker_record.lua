-- save_worker_record: store which leases a worker has, for the worker that starts where it died.
-- Safe to send twice: the record is absolute, and the key's life is never shortened.
--
-- @keys worker  hash of one node name: process of a worker to its record
-- @args process  identifies the worker's process
-- @args record  JSON; "": it has no leases any more
-- @args life_ms  milliseconds that the key lives at least: two workers may have one node name
-- @reply 1  saved, or removed
-- @reply 0  there was no record to remove

-- @include lifetime

if record == '' then
  return redis.call('HDEL', worker, process)
end
redis.call('HSET', worker, process, record)
live_at_least(worker, life_ms)
return 1
