-- acquire: take a lock, or return why it was refused. For Lock() and every policy except "queue" and "replace".
-- Safe to send twice: the second copy finds its own acquisition in the lock, and returns the reply of the first.
--
-- @group message  the caller is a message, so it has an identity
-- @group once requires message  the task has once_per
-- @group again  an earlier attempt or another copy of the message may have sent this command before
-- @group hold  the task has min_hold
-- @group quarantine  a server that may have lost leases grants nothing new for a while
-- @keys lock  hash: the lock, lib/take_lock
-- @keys last_token  string: highest fencing token of this bucket
-- @keys tombstone  string: this acquisition was abandoned by its owner
-- @keys done  string: the message has finished; server time in us [message]
-- @keys run  string: lib/run_mark [once]
-- @keys unsettled  sorted set of this bucket: lib/unsettled [once]
-- @keys quarantine  string: lib/quarantine [quarantine]
-- @args acquisition  owner and number
-- @args ttl_ms  milliseconds that the lock is held without a renewal
-- @args identity  digest of the message's identity, or ""
-- @args age_us  microseconds since the message arrived
-- @args notify  "1": the caller waits if the lock is held, so the release has to wake it. "2": it has waited, and others
--   may still wait, so its own release has to wake the next one. "0": it does not wait
-- @args task  name of the caller's task
-- @args task_id  id of the caller's task
-- @args process  node name of the caller's worker, a space, and the caller's process id
-- @args redelivered  "1" if the broker flagged this delivery, or the one that it copies, as redelivered [again]
-- @args may_be_copied  "1" if other copies of this message may exist [again]
-- @args rank_us  rank that a republished copy keeps, in us; "" for a new message [again]
-- @args doubt_us  microseconds by which the rank may be too late; "0" unless workers' clocks measured the age [again]
-- @args min_hold_ms  milliseconds from now that the lock stays held at least [hold]
-- @args requester_json  task, id, node and pid as JSON [once]
-- @args run_mark_ms  milliseconds that the mark of this run lives [once]
-- @args hold_if_unknown  "1": do not run while the outcome of an earlier run is unknown [once]
-- @args quarantine_ms  milliseconds that a quarantine lasts [quarantine]
-- @args failover_epoch  number that grows with each failover; 0 if failovers are not counted [quarantine]
-- @reply "token since_us rank_us"  acquired; with [once] "... seed after_crash". lib/run_mark explains the seed.
--   If the text "-" is in place of rank_us, the client computes it: since_us minus age_us.
--   The reply is one string, because the client needs more time to parse several parts than for the rest of the call.
-- @reply {"held", rank_us, acquisition, identity, token, since_us, releasing, count, left_ms, task, id, node, pid}
-- @reply {"tombstoned"}  this acquisition was abandoned
-- @reply {"done"}  this message has finished
-- @reply {"used", run mark}  an earlier run succeeded
-- @reply {"unknown", run mark}  the outcome of an earlier run is unknown
-- @reply {"quarantined", left_ms, "1" if the quarantine started with this call}

local holder = call('HGET', lock, 'acq')
local marks
if ONCE then
  marks = call('MGET', last_token, tombstone, done, run)
elseif MESSAGE then
  marks = call('MGET', last_token, tombstone, done)
else
  marks = call('MGET', last_token, tombstone)
end
local highest_token, abandoned, finished_at, run_mark = marks[1], marks[2], marks[3], marks[4]
-- Inline instead of lib/time, because each run of a script creates its closures again, and most runs need none.
-- The time stays a text, because formatting a number with 16 digits takes longer than most commands do.
local time = call('TIME')
local seconds, micros = time[1], time[2]
if #micros < 6 then
  micros = string.sub('00000' .. micros, -6)
end
local since = seconds .. micros
local rank = AGAIN and rank_us ~= '' and rank_us or '-'
local duplicate_possible = AGAIN and may_be_copied == '1'
local inherited_notify, has_waiters, replaceable, previous_run, outcome_unknown = nil, false, false, nil, false

if holder or abandoned or finished_at or ONCE or QUARANTINE then
  -- @include time acquisition holder run_mark quarantine expiry conflict

  local now = tonumber(since)
  if rank == '-' then
    rank = decimal(now - age_us)
  end
  if holder == acquisition then
    return repeated_answer()
  end
  if abandoned then
    return {'tombstoned'}
  end

  -- keep_on_retry: an earlier run has reserved the lock for its retry, and this message is that retry.
  local reserved = MESSAGE and holder == RESERVED .. identity

  local function drop_reservation()
    -- If the lock has waiters, do not delete it: a sweep grants it when the reservation expires.
    if reserved and not call('HGET', lock, 'has_waiters') then
      call('DEL', lock)
    end
  end

  if finished_at and (redelivered == '1' or rank - (doubt_us or 0) <= tonumber(finished_at)) then
    drop_reservation()
    return {'done'}
  end
  if ONCE then
    previous_run = parse_run_mark(run_mark)
    if previous_run.state == 'used' then
      drop_reservation()
      return {'used', run_mark}
    end
    -- outcome_unknown is used only if the lock is free: while the body of a started run is alive, it holds the lock.
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
    -- Check this last, so that a caller learns during a quarantine, too, that the lock is held.
    local left_ms, started = quarantine_left_ms(now)
    if left_ms > 0 then
      return {'quarantined', left_ms, started}
    end
  end
  duplicate_possible = duplicate_possible or finished_at -- lib/take_lock says why
  if reserved then
    -- Callers that waited for the reserved lock wait for this acquisition's release from now on.
    inherited_notify, has_waiters = unpack(call('HMGET', lock, 'notify', 'has_waiters'))
    call('DEL', lock)
  end
end

-- @include take_lock
