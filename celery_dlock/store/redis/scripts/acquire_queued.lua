-- acquire_queued: take a lock under the policy "queue" or "replace", or park the message that waits, or report why not.
-- Safe to send twice: the second copy returns the reply of the first. It finds its own acquisition, its own place in
-- the queue, or the grant that the first copy made.
--
-- @group once  the task has once_per
-- @group hold  the task has min_hold
-- @group debounce  the call waits until no newer call has arrived for some time
-- @group replace  the newest call of the name stops the running one
-- @group quarantine  a server that may have lost leases grants nothing new for a while
-- @keys lock  hash: the lock, lib/take_lock
-- @keys last_token  string: highest fencing token of this bucket
-- @keys tombstone  string: this acquisition was abandoned by its owner
-- @keys done  string: the message has finished; server time in us
-- @keys run  string: lib/run_mark [once]
-- @keys unsettled  sorted set of this bucket: lib/unsettled [once]
-- @keys waiting  sorted set: identities of the waiters, by place
-- @keys messages  hash: identity to parked message. Also <identity>:rank and :tries of waiters that lost a grant.
--   <identity>:evicted is the identity of the waiter that this one evicted,
--   <identity>:replaced_by as in lib/replaced_waiter
-- @keys delayed  sorted set: identities that lost a grant, by the time from which they wait again
-- @keys queues  sorted set of this bucket: names of locks with waiters, by the time of the next sweep
-- @keys dead  hash: identity to message of dead letters, and of removed waiters until their result is stored
-- @keys wake  list: lib/wake
-- @keys debounced  hash: lib/debounce [debounce]
-- @keys replaced  hash: lib/replace [replace]
-- @keys quarantine  string: lib/quarantine [quarantine]
-- @args acquisition  owner and number
-- @args ttl_ms  milliseconds that the lock is held without a renewal
-- @args identity  digest of the message's identity
-- @args age_us  microseconds since the message arrived
-- @args notify  "1": the caller waits if the lock is held, so the release has to wake it. "2": it has waited, and others
--   may still wait, so its own release has to wake the next one. "0": it does not wait
-- @args task  name of the caller's task
-- @args task_id  id of the caller's task
-- @args process  node name of the caller's worker, a space, and the caller's process id
-- @args redelivered  "1" if the broker flagged this delivery as redelivered. A republished message inherits the flag of
--   the delivery that it continues
-- @args may_be_copied  "1" if other copies of this message may exist
-- @args rank_us  rank that a republished copy keeps, in us; "" for a new message
-- @args doubt_us  microseconds by which the rank may be too late; "0" unless workers' clocks measured the age
-- @args lock_name  text of the lock name
-- @args message  the message to park; "": do not park, and report that it has to wait
-- @args queue_limit  highest number of waiters; "0": no limit
-- @args evict_oldest  "1": if the queue is full, the oldest waiter makes room
-- @args after_us  rank of the message that the same worker received before this one
-- @args sent_us  time of publication by the publisher's clock; "0" if the message does not carry it
-- @args grant_id  id of the grant for which this copy was published, or ""
-- @args park_duplicate  "1": if the holder runs this message, park it before all waiters, so that it runs if the holder
--   dies
-- @args min_hold_ms  milliseconds from now that the lock stays held at least [hold]
-- @args requester_json  task, id, node and pid as JSON [once]
-- @args run_mark_ms  milliseconds that the mark of this run lives [once]
-- @args hold_if_unknown  "1": do not run while the outcome of an earlier run is unknown [once]
-- @args debounce_ms  milliseconds without a newer call after which the call is due [debounce]
-- @args debounce_max_ms  milliseconds from the first waiting call after which the newest one is due anyway [debounce]
-- @args replace_max_ms  if no body has ended by itself for this long, the running one is not stopped [replace]
-- @args is_retry  "1": the call retried itself; "2": it replaced a call (self.replace); "0": neither [replace]
-- @args quarantine_ms  milliseconds that a quarantine lasts [quarantine]
-- @args failover_epoch  number that grows with each failover; 0 if failovers are not counted [quarantine]
-- @reply "token since_us rank_us"  acquired; with [once] "... seed after_crash"
-- @reply {"held", rank_us, HOLDER}  the holder runs the same message, or this is its retry.
--   HOLDER: acquisition, identity, token, since_us, releasing, count, left_ms, task, id, node, pid
-- @reply {"queue", waiters, rank_us, HOLDER}  it has to wait and was not parked.
--   Without HOLDER if only waiters precede it
-- @reply {"parked", rank_us, position, GRANT, evicted identity, its message}  "" for missing values. position: its
--   number among the waiters, from 1; also "1" if this command granted it the lock. It is "0" if an earlier command did so,
--   if the message was evicted itself, or if the holder runs it (park_duplicate). GRANT: identity, message, grant id.
--   With [debounce] or [replace] also the task id of the call that replaced the evicted one
-- @reply {"tombstoned"}  this acquisition was abandoned
-- @reply {"done", GRANT}  this message has finished; the grant that it passed on, if any
-- @reply {"used", run mark, GRANT}  an earlier run succeeded
-- @reply {"unknown", run mark, GRANT}  the outcome of an earlier run is unknown
-- @reply {"quarantined", left_ms, "1" if the quarantine started with this call}

local holder = redis.call('HGET', lock, 'acq')
local marks
if ONCE then
  marks = redis.call('MGET', last_token, tombstone, done, run)
else
  marks = redis.call('MGET', last_token, tombstone, done)
end
local highest_token, abandoned, finished_at, run_mark = marks[1], marks[2], marks[3], marks[4]

-- @include time acquisition holder run_mark quarantine wake place message grant ended_grant unpublished_grant
-- @include expiry full_memory conflict

local now = server_time_us()
local since = decimal(now)
local rank = since
if rank_us ~= '' then
  rank = rank_us
elseif age_us ~= '0' then
  rank = decimal(now - age_us)
end

if holder == acquisition then
  return repeated_answer()
end
if abandoned then
  return {'tombstoned'}
end
if tonumber(rank) <= tonumber(after_us) then
  -- Keep the order in which the worker received its messages. The delay of this command makes ranks inexact.
  rank = decimal(after_us + 1)
end
-- The place among the waiters. Two workers may receive the calls of one publisher in the wrong order, so the time of
-- publication decides. It moves a call by SENT_MARGIN_US at most, however wrong the publisher's clock is.
local SENT_MARGIN_US = 10000000
local place = rank
if sent_us ~= '0' then
  place = decimal(math.max(0, rank - SENT_MARGIN_US, math.min(rank + SENT_MARGIN_US, tonumber(sent_us))))
end

-- keep_on_retry: an earlier run has reserved the lock for its retry, and this message is that retry.
local reserved = holder == RESERVED .. identity
local granted = holder == GRANT .. identity

-- Remove this message from the queue. If the lock is granted to it or reserved for it, grant the next waiter.
local function end_waiting()
  remove_from_queue(identity)
  if not (reserved or granted) then
    return unpublished_grant(acquisition)
  end
  local marked = redis.call('HGET', lock, 'notify')
  local waiter, its_message, its_grant = grant_or_free(now, acquisition)
  keep_notify(marked, waiter)
  return waiter, its_message, its_grant
end

local function evicted_by_this()
  local evicted = redis.call('HGET', messages, identity .. ':evicted') or ''
  local its_message = redis.call('HGET', (DEBOUNCE or REPLACE) and messages or dead, evicted)
  return its_message and evicted or '', its_message or '', (DEBOUNCE or REPLACE) and task_id or nil
end

if finished_at and (redelivered == '1' or rank - doubt_us <= tonumber(finished_at)) then
  return {'done', end_waiting()}
end
local previous_run, outcome_unknown = nil, false
if ONCE then
  previous_run = parse_run_mark(run_mark)
  if previous_run.state == 'used' then
    return {'used', run_mark, end_waiting()}
  end
  -- While the lock is held, a started run may be its holder, and alive. So an unknown outcome refuses a call only when
  -- the lock is free.
  outcome_unknown = previous_run.state == 'unknown' or
    (previous_run.state == 'started' and previous_run.acquisition ~= acquisition)
end
local refused = outcome_unknown and hold_if_unknown == '1'

local queued = redis.call('HEXISTS', messages, identity) == 1
if queued then
  -- The message keeps its place, whichever of its copies runs this script.
  local its_place = redis.call('ZSCORE', waiting, identity) or redis.call('HGET', messages, identity .. ':rank')
  if its_place and tonumber(its_place) < tonumber(place) then
    if tonumber(its_place) >= 0 then
      rank = decimal(math.min(rank, its_place + (rank - place)))
    end
    place = decimal(its_place)
  end
end

if refused and holder and not queued then
  local waiter, its_message, its_grant = unpublished_grant(acquisition)
  if waiter then
    -- This command was sent twice: the first copy was refused, and passed the message's grant on. Only such a command
    -- is refused while the lock is held.
    return {'unknown', run_mark, waiter, its_message, its_grant}
  end
end

local first_waiter, preceded, for_this_grant = {}, false, false
local inherited_notify
if reserved or granted then
  inherited_notify = redis.call('HGET', lock, 'notify')
end
if granted then
  for_this_grant = redis.call('HGET', lock, 'since') == grant_id
  if not for_this_grant then
    -- Only the copy that was published for this grant may take the lock, and this is another copy. Answer as if it had
    -- just been parked. If this command was sent twice and its first copy made the grant, the reply names it again.
    local waiter, its_message, its_grant = unpublished_grant(acquisition)
    return {'parked', rank, waiter and '1' or '0', waiter or '', its_message or '', its_grant or '', evicted_by_this()}
  end
elseif not holder then
  -- The lock is free. Find waiters that are placed before this message; later ones do not block it. If this message is already
  -- queued, it was delivered twice: only the copy published for its grant may take the lock.
  first_waiter = redis.call('ZRANGE', waiting, '0', '0', 'WITHSCORES')
  preceded = queued or (first_waiter[1] and tonumber(first_waiter[2]) < tonumber(place))
end

local held, runs_already = holder and not (reserved or granted), false
if held then
  repair_expiry()
  local related = string.sub(holder, 1, #GRANT) ~= GRANT and redis.call('HMGET', lock, 'identity', 'reserved_for')
  runs_already = related and related[1] == identity
  if related and ((runs_already and (park_duplicate ~= '1' or message == '')) or related[2] == identity) then
    -- This message is a duplicate of the holder's message, or the holder's retry (keep_on_retry).
    return describe_holder('held', rank)
  end
end

-- Return the answer for a message that has to wait and is not parked.
local function must_wait(waiters)
  if held then
    return describe_holder('queue', waiters, rank)
  end
  return {'queue', waiters, rank}
end

-- Return how many delayed messages are duplicates of started ones (sweep), and the first other one.
local function delayed_waiters()
  local duplicates, first = 0, nil
  for _, waiter in ipairs(redis.call('ZRANGE', delayed, '0', MOST_DUPLICATES - 1)) do
    if tonumber(redis.call('HGET', messages, waiter .. ':rank') or '0') < 0 then
      duplicates = duplicates + 1
    else
      first = first or waiter
    end
  end
  return duplicates, first
end

local debounced_life_ms = DEBOUNCE and decimal(86400000 + debounce_max_ms)
if DEBOUNCE or REPLACE then
  -- @include replaced_waiter
  if DEBOUNCE then
    -- @include debounce
  else
    -- @include replace
  end
end

-- Return identity and message of the oldest waiter of a full queue, or nil if this message is the oldest.
local function oldest_waiter()
  local oldest = redis.call('ZRANGEBYSCORE', waiting, '0', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
  if not oldest[1] then
    local _, first_delayed = delayed_waiters()
    if not first_delayed then
      return nil
    end
    oldest = {first_delayed, redis.call('HGET', messages, first_delayed .. ':rank') or '0'}
  end
  if tonumber(oldest[2]) > tonumber(place) then
    return nil
  end
  return oldest[1], redis.call('HGET', messages, oldest[1]) or ''
end

-- Park this message in place of an evicted one, if there is one. Return the grant that this command made, or nil if
-- there is none. lib/grant has the order of the writes.
local function park(evicted, evicted_message)
  if held then
    redis.call('HSET', lock, 'has_waiters', '1')
    redis.call('ZADD', queues, 'LT', decimal(now + math.max(0, remaining_ms()) * 1000), lock_name)
  end
  redis.call('ZADD', waiting, place, identity)
  redis.call('HSET', messages, identity, message)
  redis.call('ZREM', delayed, identity)
  redis.call('HDEL', dead, identity)
  -- Forget the grants that the message has lost: this delivery shows that the broker still has the message.
  redis.call('HDEL', messages, identity .. ':rank', identity .. ':tries')
  if evicted then
    -- Keep the evicted message until its result is stored: the reply may be lost, or the caller may die.
    redis.call('HSET', dead, evicted, evicted_message)
    redis.call('HSET', messages, identity .. ':evicted', evicted)
    remove_from_queue(evicted)
  end
  if held then
    return unpublished_grant(acquisition)
  end
  return grant_next(now, acquisition)
end

if runs_already then
  -- If the holder ends, its release sets the done mark (dup) and removes this duplicate. If the holder dies, the
  -- duplicate is granted the lock before all waiters.
  redis.call('HSET', lock, 'dup', '1')
  place = place_before_all(rank)
  park()
  return {'parked', rank, '0', '', '', '', '', ''}
end

if held or preceded then
  local paused = delayed_waiters()
  local waiters = count_waiters() - paused
  local full = not queued and queue_limit ~= '0' and waiters >= tonumber(queue_limit)
  if message == '' or (full and evict_oldest ~= '1') then
    return must_wait(waiters)
  end
  local evicted, evicted_message = '', ''
  if full then
    evicted, evicted_message = oldest_waiter()
    if not evicted then
      -- This message itself has the first place, so it is the one to evict.
      return {'parked', rank, '0', '', '', '', identity, message}
    end
  elseif queued then
    evicted, evicted_message = evicted_by_this()
  end
  local waiter, its_message, its_grant = park(full and evicted, evicted_message)
  local position = (redis.call('ZRANK', waiting, identity) or 0) + 1
  return {'parked', rank, decimal(position), waiter or '', its_message or '', its_grant or '', evicted, evicted_message}
end

if refused then
  return {'unknown', run_mark, end_waiting()}
end
if QUARANTINE then
  -- Check this last, so that a caller learns during a quarantine, too, that the lock is held.
  local left_ms, started = quarantine_left_ms(now)
  if left_ms > 0 then
    return {'quarantined', left_ms, started}
  end
end

-- The message takes the lock.
-- A finished message: lib/take_lock says why.
local duplicate_possible, has_waiters = may_be_copied == '1' or for_this_grant or finished_at, false
if duplicate_possible or reserved then
  remove_from_queue(identity)
  redis.call('HDEL', dead, identity)
end
if duplicate_possible or reserved or first_waiter[1] then
  has_waiters = redis.call('EXISTS', waiting, delayed, messages) > 0
  if has_waiters then
    redis.call('ZADD', queues, decimal(now + ttl_ms * 1000), lock_name)
  else
    redis.call('ZREM', queues, lock_name)
  end
end
if duplicate_possible or reserved then
  redis.call('DEL', lock)
end

if DEBOUNCE then
  redis.call('HSET', debounced, 'started', rank)
  redis.call('PEXPIRE', debounced, debounced_life_ms)
end
local replaceable = REPLACE
if REPLACE then
  -- @include replace_start
end

-- @include take_lock
