-- acquire: take a lock, or report why not. For Lock() and every policy except "queue".
-- Safe to send twice: the second copy finds its own acquisition in the lock, and answers as the first did.
--
-- @group message  the caller is a message, so it has an identity
-- @group once requires message  the task has once_per
-- @group quarantine  a server that may have lost leases grants nothing new for a while
-- @keys lock  hash: the lock, lib/take_lock
-- @keys last_token  string: highest fencing token of this bucket
-- @keys tombstone  string: this acquisition was abandoned by its owner
-- @keys done  string: the message has finished; server time in us [message]
-- @keys run  string: lib/run_mark [once]
-- @keys quarantine_record  string: lib/quarantine [quarantine]
-- @args acquisition  owner and number
-- @args ttl_ms  milliseconds that the lock is held without a renewal
-- @args identity  digest of the message's identity, or ""
-- @args redelivered  "1" if the broker flagged this delivery, or the one that it copies
-- @args may_be_copied  "1" if other copies of this message may exist
-- @args age_us  microseconds since the message arrived
-- @args rank_us  rank that a republished copy keeps, in us; "" for a new message
-- @args notify  how the release wakes this caller: "1" by PUBLISH, "s" by SPUBLISH, "0" not at all
-- @args task  name of the caller's task
-- @args task_id  id of the caller's task
-- @args node  node name of the caller's worker
-- @args pid  process id of the caller
-- @args min_hold_ms  milliseconds from now that the lock stays held at least; "0": until its release
-- @args requester_json  task, id, node and pid as JSON [once]
-- @args run_mark_ms  milliseconds that the mark of this run lives [once]
-- @args hold_if_unknown  "1": do not run while the outcome of an earlier run is unknown [once]
-- @args quarantine_ms  milliseconds that a quarantine lasts [quarantine]
-- @args failover_epoch  number that grows with each failover; 0 if failovers are not counted [quarantine]
-- @reply "token since_us rank_us"  acquired; with [once] "... seed after_crash".
--   One string: parsing a reply of several parts would cost the client more than the rest of the call.
-- @reply {"held", rank_us, acquisition, identity, token, since_us, releasing, count, left_ms, task, id, node, pid}
-- @reply {"tombstoned"}  this acquisition was abandoned
-- @reply {"done"}  this message has finished
-- @reply {"used", run mark}  an earlier run succeeded
-- @reply {"unknown", run mark}  the outcome of an earlier run is unknown
-- @reply {"quarantined", left_ms, "1" if the quarantine started with this call}

local holder = redis.call('HGET', lock, 'acq')
local marks
if ONCE then
  marks = redis.call('MGET', last_token, tombstone, done, run)
elseif MESSAGE then
  marks = redis.call('MGET', last_token, tombstone, done)
else
  marks = redis.call('MGET', last_token, tombstone)
end
local highest_token, abandoned, finished_at, run_mark = marks[1], marks[2], marks[3], marks[4]
-- Inline instead of lib/time: a script creates its closures anew on each run, and most runs need none.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local since = string.format('%.0f', now)
local rank = since
if rank_us ~= '' then
  rank = rank_us
elseif age_us ~= '0' then
  rank = string.format('%.0f', now - age_us)
end
local duplicate_possible = may_be_copied == '1'
local inherited_notify, has_waiters, previous_run, outcome_unknown = nil, false, nil, false

if holder or abandoned or finished_at or ONCE or QUARANTINE then
  -- @include time holder run_mark quarantine conflict

  if holder == acquisition then
    return repeated_answer()
  end
  if abandoned then
    return {'tombstoned'}
  end

  -- keep_on_retry: a run reserved the lock for this message, its retry.
  local reserved = MESSAGE and holder == 'reserved:' .. identity

  local function drop_reservation()
    -- With waiters, a sweep grants the reserved lock when it expires.
    if reserved and not redis.call('HGET', lock, 'has_waiters') then
      redis.call('DEL', lock)
    end
  end

  if finished_at and (redelivered == '1' or tonumber(rank) <= tonumber(finished_at)) then
    drop_reservation()
    return {'done'}
  end
  if ONCE then
    previous_run = parse_run_mark(run_mark)
    if previous_run.state == 'used' then
      drop_reservation()
      return {'used', run_mark}
    end
    -- This matters only if the lock is free. While the body runs, its lock is held.
    outcome_unknown = previous_run.state == 'unknown' or
      (previous_run.state == 'started' and previous_run.acquisition ~= acquisition)
  end
  if holder and not reserved then
    repair_expiry()
    return describe_holder('held', rank)
  end
  if outcome_unknown and hold_if_unknown == '1' then
    drop_reservation()
    return {'unknown', run_mark}
  end
  if QUARANTINE then
    -- Checked last: during a quarantine too, a caller learns that the lock is held.
    local left_ms, started = quarantine_left_ms(now)
    if left_ms > 0 then
      return {'quarantined', left_ms, started}
    end
  end
  if finished_at then
    -- A new message reuses a finished id. The old done mark would end the new message's own copies.
    redis.call('DEL', done)
    duplicate_possible = true
  end
  if reserved then
    -- Callers that wait for the release of the reserved lock wait for the release of this one.
    inherited_notify, has_waiters = unpack(redis.call('HMGET', lock, 'notify', 'has_waiters'))
    redis.call('DEL', lock)
  end
end

-- @include take_lock
