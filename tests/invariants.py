"""The invariants and guarantees of the design, one sentence each.

A test holds one of them by `@pytest.mark.invariant("slug")`. `tools/invariants.py` writes
docs/contributing/invariants.md from both; see tests/docs/test_invariants.py.
"""

from typing import Final

#: Section, then slug, then sentence.
INVARIANTS: Final[dict[str, dict[str, str]]] = {
    "Locks, leases and tokens": {
        "state-change-is-atomic": (
            "Each state change is one script. All of a script's keys share one hash tag. They are declared, except "
            "those of seats above the first one."
        ),
        "store-calls-are-idempotent": (
            "A store call that is sent twice has the effect of one. An acquire of unknown outcome is released "
            "with a tombstone."
        ),
        "cut-scripts-leave-nothing-for-ever": (
            "If a script stops after any of its writes, the next call repairs what it left. No lock, mark or claim "
            "stays without an expiry, no call is lost, and no lock has two holders."
        ),
        "stores-agree": (
            "The rules of the memory store are written in Python. In every history of commands they give the answers "
            "of the Lua scripts, and keep the same facts."
        ),
        "lease-deadline-precedes-request": (
            "A lease's deadline counts from before the request was sent. It moves only after the store confirmed."
        ),
        "seats-are-locks": (
            "A name with `limit=N` has at most N holders. Each has a seat, with an expiry of its own and with tokens "
            "that grow."
        ),
        "seats-share-a-queue": (
            "The seats of a name share one queue. A seat that becomes free is granted to the first waiter. No seat is "
            "idle while a call waits, for longer than a sweep takes."
        ),
        "largest-limit-counts": (
            "If workers have different limits for a name, the largest one counts. A duplicate of a message is found at "
            "every seat, also above the limit of its worker."
        ),
        "tokens-never-decrease": (
            "A fencing token is minted at a new acquisition only, and is greater than every earlier token of "
            "its bucket."
        ),
        "owner-is-one-delivery": (
            "The owner is one delivery of one message, or one thread. Only the process that acquired a lock "
            "releases it."
        ),
        "release-at-every-ending": (
            "A lock is acquired in `before_start` and released at every ending of its task. The first exit hook "
            "releases."
        ),
        "interruption-leaks-no-lock": (
            "A soft limit, a signal's exception or a killed greenlet leaves no lock, at whatever line it strikes."
        ),
        "lease-is-recorded-before-acquire": (
            "A pool child writes its lease to shared memory before it asks the store. A fork inherits no taken mutex."
        ),
        "counters-are-exact": (
            "Metrics show what happened, exactly: in every pool, under threads, and also for pool children that died."
        ),
        "watchdog-renews": (
            "One thread of the main process renews all leases. An error in one renewal stops no other renewal."
        ),
        "plugins-do-not-stop-threads": (
            "An error in a log handler or a listener, also SystemExit, ends no background thread."
        ),
        "thread-start-is-retried": (
            "A thread that cannot be started is started later. A lock that no watchdog can renew is released."
        ),
        "dead-owner-is-released": (
            "The watchdog releases the locks of a dead pool child within 1 s. A dead worker's locks end by "
            "their ttl or by crash recovery."
        ),
        "no-mutex-between-thread-and-greenlets": (
            "No mutex is shared by a native thread and greenlets. Log records and signals of the thread are "
            "delivered by a greenlet."
        ),
        "lost-lease-is-reported": "A lost lease is always reported: by signal, log line, event and the lease itself.",
        "lost-lease-stops-its-body": (
            'Under `on_lost="abort"`, a body is stopped before its lease ends, once, and nowhere outside the body.'
        ),
        "hold-times-are-kept": "A lock is held for at least `min_hold` and at most `max_hold`.",
        "kept-lock-belongs-to-its-retry": (
            "Under `keep_on_retry`, only the retry takes the kept lock. If the retry never arrives, the lock "
            "ends by its ttl."
        ),
        "fork-inherits-no-mutex": (
            "No child is forked during a TLS handshake, or while a background thread publishes, logs or calls a "
            "listener."
        ),
        "arguments-stay-secret": "Names, errors, logs, events and metrics show no task argument and no password.",
        "names-agree": (
            "Publisher and worker compute the same lock name in every process, with every hash seed and Python version."
        ),
        "direct-call-needs-no-store": "A direct call of a task needs no store. A call in eager mode takes the lock.",
    },
    "Conflicts, messages and results": {
        "done-is-final": "A done mark is written only for an acknowledged message whose end is stored. It is final.",
        "duplicates-do-not-run": (
            "A duplicate of a finished message does not run. A new message under the same id runs."
        ),
        "duplicate-delivery-is-no-conflict": (
            "A duplicate delivery of a running message is republished, and runs only if the first delivery dies."
        ),
        "finished-holder-is-no-conflict": "A holder whose body has ended is not a conflict for its own followers.",
        "call-options-stay-with-the-call": (
            "The options of one call apply to that call alone, through retries and duplicates. Forged options "
            "fail their task."
        ),
        "conflict-is-a-value": "A conflict is a value. A pure function turns it into a decision.",
        "no-result-hangs": (
            "A skip ends every member of a canvas that can no longer run. So does the end of a parked call that never "
            "ran, also over `rpc://`."
        ),
        "informing-decides-nothing": (
            "What only informs decides about no call: states before the end, events, the log, metrics, signals. If the "
            "result backend is away, a call is parked and runs all the same."
        ),
        "ends-are-tried-again": (
            "An end that the result backend does not take is tried again for a limited time. If that fails, an error "
            "in the log names the task id."
        ),
        "conflict-is-no-failure": (
            "A conflict uses none of the task's retries. The original message is republished, with a new ETA."
        ),
        "hostile-messages-end-alone": (
            "A malformed message fails its own task. It ends no worker and reaches no other task's lock."
        ),
    },
    "Queue": {
        "grants-survive-deaths": (
            "A grant survives the death of the releaser, the waiter and the parking process, at each step."
        ),
        "queue-steps-are-constant": (
            "A queue step costs the same for ten waiters and for twenty thousand. Every key is declared."
        ),
        "queue-order-is-by-rank": (
            "Waiters are granted by place: the rank, moved by at most 10 s to the time of publication. A message that "
            "is parked twice keeps its place."
        ),
        "rank-follows-receipt": (
            "Within a worker, ranks follow the order of receipt. Waiters keep the order of publication."
        ),
        "waiters-are-not-overtaken": (
            "A free lock is not taken past a waiter of a lower rank. A `Lock` meets a grant as a held lock."
        ),
        "every-release-grants": (
            "Every release grants the first waiter, whatever ended its body. After a child's death it happens "
            "within 1 s."
        ),
        "foreign-messages-block-no-name": (
            "A parked message of another broker blocks no name. If no worker of its broker takes it, it becomes "
            "a dead letter."
        ),
        "one-sweeper-per-broker": (
            "One worker of a broker sweeps its queues. Another one continues within 2 s of its death."
        ),
        "sweep-failures-stay-local": "A failure in the sweep of one lock does not stop the sweep of another lock.",
        "grants-end-by-script": (
            "Only a script ends a grant. An unpublished grant is published again and is not counted as failed."
        ),
        "granted-copy-takes-the-grant": (
            "Only the copy that was published for a grant takes it. Any other copy is acknowledged and changes nothing."
        ),
        "failed-grants-pass-on": (
            "A failed grant passes to the next waiter. After `dlock_grant_attempts` failures the message becomes a "
            "dead letter."
        ),
        "running-message-is-no-waiter": (
            "A duplicate of the running message is no waiter. It runs next if the holder dies, and is dropped with the "
            "holder's end. A duplicate of a waiter is that waiter."
        ),
        "finished-message-is-not-queued": (
            "A final end removes its own parked copy. A waiter that is removed is marked done."
        ),
        "queue-calls-are-idempotent": (
            "A queue call that is sent twice has the effect of one. The second call names the grant of the first."
        ),
        "parked-message-is-unchanged": "What is parked is published unchanged, byte for byte.",
        "acknowledged-after-parking": (
            "No message is acknowledged before the store has parked it or granted its lock, also under early "
            "acknowledgement."
        ),
        "queued-state-hides-no-end": (
            "QUEUED never replaces an end. Redis stores it only if no end is stored, in one step. Any other result "
            "backend stores it before the message is parked."
        ),
        "removed-waiters-end-revoked": "Revoked and expired waiters end REVOKED and delay no other waiter.",
        "queue-limit-is-per-name": (
            "A queue limit counts the waiters of one name. The waiter that makes room ends REVOKED."
        ),
        "unreadable-messages-become-dead-letters": (
            "A message that cannot be republished fails. A parked message that cannot be read becomes a dead "
            "letter, and the queue continues."
        ),
        "dead-letter-can-be-replayed": "A dead letter that an operator publishes runs.",
        "unused-queue-costs-little": (
            "A worker without queues asks the store twice a minute. Its publishers ask nothing."
        ),
        "debounce-runs-the-newest-call": (
            "Of the calls of a burst, only the newest starts, once, and after the longest delay at the latest. "
            "The others end REVOKED."
        ),
        "newest-call-stops-the-running-one": (
            "Under on_conflict='replace', the newest call stops the running one and runs after it, never beside it. "
            "Each other call ends REVOKED with the id of the call that replaced it."
        ),
        "queue-protocol-is-explored": (
            "No order of the queue protocol's steps breaks an invariant: neither in the model, nor in random "
            "runs of the scripts."
        ),
    },
    "Unique claims": {
        "claim-belongs-to-one-message": "A claim belongs to one message, from its publication until it starts or ends.",
        "claim-follows-its-message": (
            "A claim stays with its message through conflicts, redeliveries, waits in a worker and retries."
        ),
        "claim-loses-no-work": "A retry is never refused. A call that is refused ends REVOKED, and its canvas ends.",
        "claim-costs-one-round-trip": (
            "A publication with a claim costs one round trip, also for a group. A task without claims pays nothing."
        ),
    },
    "once_per and ticks": {
        "used-name-is-not-run": "A used name does not run. Only a success uses a name, also if its lease was lost.",
        "death-is-no-failure": (
            "The script that grants a lock marks the run as begun. Only an end settles a run whose process died."
        ),
        "no-unknown-outcome-without-a-body": "An acquire that was rolled back leaves no unknown outcome.",
        "beats-share-ticks": "All beats compute the same ticks. A beat that was down sends only the latest one.",
        "tick-runs-once": "A tick runs once. A tick that arrives later is skipped or is a misfire.",
        "idempotency-key-is-stable": (
            "A name has one idempotency key from its first run until the window of a success is over."
        ),
    },
    "Stores and topologies": {
        "cluster-asks-primaries": (
            "In a Cluster only primaries are asked, each for its own slots. Calls to several nodes are written "
            "before any is read."
        ),
        "redirections-are-followed": (
            "A redirection is followed. ASK leaves the slot map as it is and MOVED corrects it."
        ),
        "absent-node-costs-only-its-locks": "A Cluster node that is away costs the leases on the other nodes nothing.",
        "waiters-wake-across-slots": (
            "A waiting call is woken at the server that owns its lock, also after its slot moved or after a failover."
        ),
        "one-waiter-per-release": (
            "A release wakes one waiting call, the first of the line. Without a waiting call it sends nothing more."
        ),
        "no-wake-up-is-lost": (
            "A woken call that does not take the lock passes its wake-up on. A death or an expiry costs one slow poll."
        ),
        "durability-is-confirmed": (
            "A lock counts only if all requested replicas and disks confirmed it. An unconfirmed renewal does "
            "not move the deadline."
        ),
        "quarantine-grants-nothing-new": (
            "A server that may have lost leases grants nothing new until those leases are over."
        ),
        "majority-decides": (
            "On Redlock a majority decides. A client that loses the vote leaves no lease on any server."
        ),
        "tokens-are-agreed": (
            "On Redlock a majority confirms the highest token and the idempotency key before the lock is granted."
        ),
        "dead-store-costs-one-timeout": "A store that is down costs a worker one timeout, not one per task or child.",
        "store-errors-name-the-remedy": (
            "Each refusal of the store has an exception class and names its remedy. The documented permissions suffice."
        ),
        "nothing-runs-unlocked": (
            "While the store is away, nothing runs unlocked unless the task allows it. A failed release fails no task."
        ),
        "sentinel-primary-is-verified": (
            "Under Sentinel only the current primary is used. No lock is taken at a replica or at an old primary."
        ),
        "one-server-has-one-vote": "A server under two names has one vote, also after a name moves to another member.",
        "locks-use-celerys-connection": (
            "Without `dlock_url`, locks are where Celery connects, with the same user. Timeouts and retries are "
            "those of celery-dlock."
        ),
        "unusable-setting-ends-the-worker": (
            "A setting that cannot be used ends the worker with one line, which shows no password."
        ),
    },
    "Guarantees when a lease is lost": {
        "guarded-writes-are-never-late": (
            "While a transaction that `lease.guard()` guards is open, no other call takes the lock, also if the lease "
            "has expired. After the lease was taken over, `guard()` refuses."
        ),
        "settled-run-is-used-with-its-rows": (
            "The run mark that `lease.settle()` writes commits with the user's rows or not at all. If it commits, no "
            "later call of the name runs; otherwise the outcome is known, and the next call may run."
        ),
        "forgotten-lock-is-reported": (
            "If the store forgot a lock, the holder learns it at its next renewal or `ensure()`."
        ),
        "silent-store-is-reported": "If the store is silent, a running holder learns it before its lease ends.",
        "abort-strikes-in-the-body": "Under `abort`, the exception is raised in the body or not at all.",
        "caught-loss-is-raised-again": "If a body catches `LockLost`, every `ensure()` raises it again.",
        "autoretry-after-loss-runs-again": "With `autoretry_for=(LockLost,)`, a stopped body runs again.",
        "solo-pool-stops-no-body": "In the solo pool only `ensure()` raises. The worker warns at its start.",
        "late-release-frees-nothing": "A late holder's release does not free the lock of the next holder.",
        "max-hold-ends-a-hanging-body": (
            "If a body hangs, `max_hold` ends its lease, and the lock is free within the ttl."
        ),
    },
    "Guarantees when the store fails": {
        "store-error-retry-republishes": (
            'Under `on_store_error="retry"`, a message is republished until the store answers, and runs once.'
        ),
        "store-error-fail-fails": 'Under `on_store_error="fail"`, the task fails with `StoreUnavailable`.',
        "store-error-run-reports": (
            'Under `on_store_error="run"`, the body runs without a lock, and its lease reports that.'
        ),
        "store-error-local-excludes": (
            'Under `on_store_error="local"`, at most one body of a name runs on one machine, with and without a store.'
        ),
        "one-holder-per-lock-file": (
            "Two calls never hold the lock file of one name together, also while files are deleted or a release is "
            "interrupted."
        ),
        "killed-holder-frees-lock-file": (
            "If the holder of a lock file is killed, the name is free at once, whatever processes the holder started."
        ),
        "run-directory-is-private": (
            "Lock files are only in a directory of the worker's user with mode 0700. Symbolic links are not followed."
        ),
        "main-process-answers": (
            "A store that is away for long costs a worker one timeout. Its main process continues to answer."
        ),
        "release-is-repeated": "If a release fails, the task's end is kept and the watchdog repeats the release.",
        "lost-replies-leave-no-lock": "A lost reply leaves no lock held for ever, and no lock held twice.",
        "emptied-store-is-reported": (
            "If the store is emptied, holders learn it, the next call may start and tokens still grow."
        ),
        "restart-with-data-keeps-leases": "A store that restarts with its data loses no lease.",
        "script-flush-costs-nothing": "Flushed scripts and killed connections lose no lease.",
        "refusing-store-is-unavailable": (
            "A store that refuses is treated as unavailable. An unanswered renewal is not a lost lease."
        ),
        "overwritten-key-loses-one-lock": "An overwritten lock key loses that lock only. Other leases are renewed.",
        "failing-connection-is-unavailable": (
            "An exception while a connection is made is treated as an unavailable store."
        ),
        "risky-configuration-is-reported": (
            "A store that may evict or forget keys is reported once at the worker's start."
        ),
        "failover-loss-is-reported": (
            'Under `dlock_durability="primary"`, a holder whose lock a failover lost learns it at its next renewal.'
        ),
        "confirmed-locks-survive-failover": "With confirmed replicas, a promoted replica knows every granted lock.",
        "unconfirmed-acquire-is-released": (
            "An acquire without its confirmations is rolled back, and nothing runs under it."
        ),
        "quarantine-delays-grants": (
            "With `dlock_quarantine`, nothing new is granted until all leases that may be lost are over."
        ),
        "old-sentinel-is-ignored": "A sentinel that returns with an old configuration is not followed.",
        "foreign-cluster-is-refused": "A node or Cluster that replaced another one at its address gets no lock.",
        "killed-server-grants-nothing-twice": (
            "A server that is killed under load grants no lock twice if replicas, a quarantine or Redlock are used."
        ),
        "documented-permissions-suffice": "The documented ACL permissions suffice, and each of them is needed.",
        "redlock-survives-a-minority": (
            "On Redlock, one of three or two of five servers may die, hang or lose their connections."
        ),
        "redlock-counts-servers": "On Redlock, a name that leads to another member later has no vote of its own.",
        "redlock-needs-a-majority": (
            "Without a majority, no lock is granted and a holder learns it before its lease ends."
        ),
        "redlock-restart-waits": "A Redlock member that restarted empty takes no part until the longest ttl is over.",
        "redlock-tokens-grow": "On Redlock tokens grow strictly, whichever servers die, return or lose replies.",
        "sentinel-failover-keeps-leases": "A lease whose data was copied continues at the new primary.",
        "sentinel-failover-loss-is-reported": (
            "A holder whose lock a Sentinel failover lost learns it before the ttl is over."
        ),
        "old-primary-takes-no-lock": "No lock is taken at an old primary that wakes up, for longer than a second.",
        "hanging-servers-cost-one-timeout": (
            "A server, a sentinel or a Cluster that hangs costs `dlock_timeout` and one try."
        ),
    },
    "Guarantees of a Cluster that changes": {
        "resharding-loses-no-lease": (
            "While slots move, no lease is lost, no bodies overlap and each script runs completely or not at all."
        ),
        "absent-node-is-reported": (
            "If a node is away, leases on the other nodes are renewed. Holders on it learn it in time."
        ),
        "promoted-replica-keeps-leases": (
            "If a replica is promoted, a lease whose data it has survives. Other holders learn it."
        ),
        "foreign-node-gets-no-lock": "A node of another Cluster at a dead node's address gets no lock.",
        "wrong-topology-is-refused": (
            "A single server named as a Cluster, or a node named as a server, is refused with one clear line."
        ),
    },
    "Guarantees when the network or a clock fails": {
        "slow-answers-lose-no-lease": "Answers that take up to 1 s lose no lease and no task.",
        "cut-connections-lose-no-lease": (
            "Connections that are cut, half open or silent for less than the ttl lose no lease."
        ),
        "partitioned-worker-is-reported": (
            "A worker that is cut off for longer than the ttl learns it before another one holds its locks."
        ),
        "partitioned-host-is-reported": "The same guarantees hold for a host that is cut off from everything.",
        "partitioned-lock-is-reported": "A `Lock` outside a worker has the same guarantees.",
        "store-clock-steps": "If the store's clock steps, tokens never decrease and locks last at most one ttl longer.",
        "worker-clock-does-not-matter": "A worker's wall clock that is wrong by an hour changes nothing.",
    },
    "Guarantees when a process fails": {
        "hard-limit-frees-after-death": (
            "After a hard time limit, the next body starts only when the first one has ended or its process is dead."
        ),
        "unenforced-limit-keeps-the-lock": (
            "If a hard time limit is not enforced, the body keeps its lock until its end."
        ),
        "living-worker-is-not-recovered": "Crash recovery releases no lock of a worker that may be alive.",
        "stopped-process-keeps-or-reports": (
            "A stopped child keeps its lock. A stopped worker learns of a lost lease before it releases."
        ),
        "descendants-hold-nothing": "Forks, threads and programs of a body hold no lock, and their end releases none.",
        "shutdown-keeps-locks": "At shutdown, locks are kept until the last body ends, and are free then.",
        "child-per-task-leaks-nothing": "With one task per child, no lock, descriptor or memory map is left.",
        "busy-interpreter-keeps-the-lock": (
            "In the prefork pool, a body that holds the interpreter for three ttls keeps its lock."
        ),
    },
    "Guarantees of beats and of bodies that die": {
        "every-due-tick-runs": "Whichever beats die or stop, every due tick runs and none runs twice.",
        "late-tick-is-a-misfire": "A tick that arrives later than `misfire_grace` does not run.",
        "after-crash-hold-blocks": (
            'Under `after_crash="hold"`, no further call runs until an operator resolves the outcome.'
        ),
        "after-crash-run-continues": (
            'Under `after_crash="run"`, the next call runs, knows of the crash and has the same idempotency key.'
        ),
    },
    "Guarantees when the broker fails": {
        "broker-outage-loses-no-lock": "If the broker is away for longer than the ttl, no lease is lost.",
        "lost-connection-runs-nothing-twice": (
            "A connection that is cut, or a broker that is killed and restarts, runs no body twice."
        ),
        "lost-ack-runs-nothing-twice": "If an acknowledgement is lost, the redelivered message does not run again.",
        "new-message-runs": "A new message under the id of a finished one runs.",
        "failure-stays-failure": "A task that failed stays FAILURE if its connection is lost and it is cancelled.",
        "unfinished-message-runs-again": (
            "A message that was ignored or rejected runs again if its acknowledgement is lost."
        ),
        "deduplicated-copy-is-acknowledged": (
            "A duplicate that Celery itself recognizes is acknowledged. A body that a cold shutdown killed has no end, "
            "so its duplicate runs."
        ),
        "prefetched-messages-are-kept": "If a worker stops with messages that it prefetched, none is lost.",
        "visibility-timeout-runs-nothing-twice": "A message that outlives its visibility timeout runs once.",
        "killed-worker-runs-again": (
            "If a worker or child is killed, the redelivered message runs as its acknowledgement mode says."
        ),
        "restored-snapshot-is-that-moment": (
            "If the store is restored from an older snapshot, calls that ended since wait again, and calls parked "
            "since are lost. A call that is dropped before workers start does not run again."
        ),
        "queue-survives-faults": "A fault of broker, worker or child loses no waiter and keeps the order.",
        "republishing-is-confirmed": "A message that cannot be republished fails, runs or waits, and is not lost.",
        "claim-is-released": (
            "A claim is released if its publication fails, or its message expires or is revoked or skipped."
        ),
        "claim-survives-the-worker": (
            "If a worker ends before a message starts, its claim stays until the redelivery starts."
        ),
        "no-claim-without-store": "Without a store, nothing is published unless the task runs without a lock too.",
    },
    "Versions": {
        "two-versions-share-locks": (
            "While workers of one version replace those of another with the same wire format, no call is lost and "
            "none runs twice, under any policy."
        ),
        "old-wire-is-understood": (
            "What an earlier version with the same or an older wire wrote into the store is understood. A version "
            "writes the wire that was frozen for its number."
        ),
        "newer-wire-is-left-alone": (
            "A worker that meets a message or a record of a newer wire version does not read it. The message waits "
            "for a newer worker."
        ),
    },
    "Operators": {
        "operators-see-each-state": (
            "An operator sees each lock name that is held, granted, kept, used, of unknown outcome or claimed."
        ),
        "operators-free-no-successor": (
            "An operator's release frees only the acquisition that was shown. If its lease is fresh, it needs force."
        ),
        "admin-actions-are-permitted": (
            "An action of the dashboard under Django's login needs its permission. The store records it with Django's "
            "user."
        ),
        "stale-page-hits-no-successor": (
            "A form of the dashboard names the holder, run, claim or message that it showed, and acts on no later one."
        ),
        "forged-requests-change-nothing": (
            "The dashboard changes something only by a POST from its own site, with the cookie and its token."
        ),
        "dashboard-access-is-asked": (
            "The dashboard shows nothing and does nothing that access() does not permit. By default it only reads."
        ),
        "dashboard-limits-its-clients": (
            "No client uses up the connections of the dashboard's own server, or its checks of passwords. A connection "
            "that waits for its client ends after a time, and at once if a new one needs its place."
        ),
        "dashboard-shows-text-as-text": (
            "Text of tasks and operators is never markup or a script on a page of the dashboard."
        ),
        "operators-slow-no-client": "No command of an operator takes the store longer than 20 ms.",
    },
}
