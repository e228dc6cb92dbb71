"""Locks on Redis or Valkey, on the servers of one topology."""

from __future__ import annotations

import functools
import operator
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...errors import GuardRefused, NotConfirmed, ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable
from ...keys.lock_name import LockName, name_from_member
from ...options.durability import PRIMARY, Durability, check_ttl
from ...utils.log import logger
from ..base import (
    DUPLICATE_PAUSE_MS,
    FOREIGN_MS,
    NO_GUARD,
    QueueStepResult,
    ReleaseListener,
    ReleaseRequest,
    call_again_if_reply_lost,
)
from ..claim_model import ClaimExtension, ClaimRequest, ExistingCall
from ..holder_model import Holder
from ..model import Acquired, AcquireRequest, Grant, Refusal, Released, Renewal, RenewalResult
from ..operator_model import RunView, Waiting
from ..rules.views import run_view
from ..server_model import Quarantine, StoreInfo
from . import commands, replies
from .commands import DONE_MS, TOMBSTONE_MS, Command, command
from .connection import ErrorReply
from .execution import ExistsPipeline, ScriptPipeline, execute, execute_confirmed, read_hash
from .keys import LockKeys, bucket_keys, node_key, presence_key, sweeper_key
from .seat_renewals import send_renewals
from .server_errors import error_from_reply, quarantined
from .server_info import read_info, store_info
from .topology import Pipeline, Topology
from .wakeups import Listener, Wakeups

__all__ = ["RedisStore"]

#: Types of the scripts' replies, except errors.
_REPLY_TYPES = frozenset({bytes, int, list, type(None)})
#: The result of most releases: the lock was held, and there was neither a duplicate nor a waiter.
_FREED: Final = Released(ours=True, duplicate_seen=False)
#: Number of lock names whose keys a store caches.
NAMES = 128
#: Commands in one write. More would block the server for longer; fewer would need more round trips.
BATCH = 500
#: Arguments of a sweep that makes no dead letter: grant timeout (ms), then limits that no message reaches.
_NO_DEAD_LETTERS = 60_000, 1_000_000, 10**12


class RedisStore:
    """A store that runs one script for each operation. It repeats a script whose reply was lost, if that is safe.

    Args:
        topology: The servers.
        prefix: Start of every key.
        quarantine: Quarantine of a server that may have lost leases; None: no quarantine.
        durability: Confirmation that each write about a lock or a claim needs.
    """

    def __init__(
        self,
        topology: Topology,
        prefix: str,
        quarantine: Quarantine | None = None,
        durability: Durability = PRIMARY,
    ) -> None:
        self._topology = topology
        self._prefix = prefix
        #: Cached, because a run needs the keys of its lock four times.
        self._keys: Callable[[LockName], LockKeys] = functools.lru_cache(NAMES)(functools.partial(LockKeys.of, prefix))
        self._quarantine = quarantine
        self._durability = durability
        self._renewals = ScriptPipeline(durability)
        self._claims = ScriptPipeline(durability, operator.not_)
        self._wakeups = Wakeups(topology, self._exception_for)
        self._warned = False

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
        keys = self._keys(name)
        quarantine_args = () if self._quarantine is None else self._quarantine_args(keys, self._quarantine)
        variant, texts = commands.acquire(keys, name.seats, acquisition, ttl_ms, request, quarantine_args)
        if self._durability is PRIMARY:
            reply = self._topology.call(keys.lock, execute, variant, texts)
        else:
            check_ttl("ttl", self._durability, ttl_ms / 1000)
            reply, unconfirmed = self._run_confirmed((variant, texts), self._durability)
            # Of the refusals, only parking wrote something that needs a confirmation.
            if unconfirmed is not None and (type(reply) is bytes or reply[0] == b"parked"):
                raise unconfirmed
        if type(reply) is bytes:
            token, since, rank, *more = reply.split()
            since_us = int(since)
            rank_us = since_us - request.age_us if rank == b"-" else int(rank)
            if more:
                return replies.with_more(Acquired(int(token), since_us / 1e6, rank_us), more)
            return Acquired(int(token), since_us / 1e6, rank_us)
        self._checked(reply)
        if self._quarantine is not None:
            self._raise_if_quarantined(reply, quarantine_args)
        return replies.refusal(reply, request.identity.digest if request.identity else "")

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[RenewalResult]:
        answers: list[RenewalResult] = []
        refusals: list[ErrorReply] = []
        for start in range(0, len(renewals), BATCH):
            batch = renewals[start : start + BATCH]
            answered = send_renewals(self._topology, self._renewals, self._prefix, batch, within)
            refusals += filter(replies.unexecuted, answered)
            answers += map(replies.renewed, answered)
        if refusals:
            # Build the error even if other leases were renewed: this makes the topology look for a promoted server.
            error = self._exception_for(refusals[0])
            if len(refusals) == len(answers):
                raise error
        return answers

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        keys = self._keys(name)
        variant, texts = commands.release(keys, name.seats, acquisition, ending)
        durability = self._durability
        if durability is not PRIMARY and not (ending.final or ending.used_ms or ending.once):
            durability = PRIMARY  # this release sets no mark; if a failover restores the lock, the lock expires
        try:
            if durability is PRIMARY:
                reply = self._topology.call(keys.lock, execute, variant, texts)
                if reply == 1:  # most calls
                    return _FREED
                unconfirmed = None
            else:
                reply, unconfirmed = self._run_confirmed((variant, texts), durability)
            repeated = False
        except ReplyTimeout:
            raise
        except ReplyLost:
            # The first command may have freed the lock, so the second reply cannot prove a lost lease.
            (reply, unconfirmed), repeated = self._run_confirmed((variant, texts), durability), True
        self._warn_unconfirmed(name, unconfirmed)
        if reply == 1 and not repeated:
            return _FREED
        return self._released(name, acquisition, self._checked(reply), ending, repeated=repeated)

    def _warn_unconfirmed(self, name: LockName, unconfirmed: NotConfirmed | None) -> None:
        if unconfirmed is not None and not self._warned:
            self._warned = True
            logger.warning("%s: a failover may forget that a run has ended: %s", name.text, unconfirmed)

    def _released(
        self, name: LockName, acquisition: str, reply: Any, ending: ReleaseRequest, *, repeated: bool
    ) -> Released:
        """Return the result of a release from its reply. If a waiter may still need a grant, sweep the queue."""
        ended, must_sweep, wake_error = replies.released(reply)
        if wake_error:
            self._wakeups.warn_refused("RPUSH", wake_error)
        if must_sweep or (repeated and not ending.queue):
            pause_ms = DUPLICATE_PAUSE_MS if ending.of_dead_child else 0
            ended = ended._replace(granted=self.sweep(name, acquisition, *_NO_DEAD_LETTERS, pause_ms).granted)
        return ended._replace(ours=True) if repeated else ended

    def shard(self, name: LockName) -> int:
        return self._topology.shard(self._keys(name).lock) if self._topology.clustered else 0

    def inspect(self, name: LockName) -> Holder | None:
        reply = self._ask("inspect", name)
        return replies.holder(reply) if reply else None

    def adopt_token(
        self, name: LockName, acquisition: str, token: int, seed: str = "", tick: str = "", *, waited: bool = False
    ) -> bool:
        """Adopt the token (and the seed) of a won vote. Return False if the acquisition does not hold the lock here."""
        groups = [group for group, present in (("once", seed), ("waited", waited)) if present]
        once = {"run": self._keys(name).run(tick), "seed": seed} if seed else {}
        return bool(self._ask("adopt_token", name, *groups, acquisition=acquisition, token=token, **once))

    # -- last runs

    def last_run(self, name: LockName, tick: str = "") -> RunView | None:
        reply = self._ask("last_run", name, run=self._keys(name).run(tick))
        return run_view(name.text, tick, *replies.run_mark(reply)) if reply else None

    def forget_run(self, name: LockName, tick: str = "", mark: str = "") -> bool:
        return self._settle("forget_run", name, tick, mark, life_ms=TOMBSTONE_MS)

    def resolve_run(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "", mark: str = "") -> bool:
        return self._settle("resolve_run", name, tick, mark, state="used" if sent else "cleared", window_ms=window_ms)

    def _settle(self, script: str, name: LockName, tick: str, mark: str, **given: str | int) -> bool:
        run = self._keys(name).run(tick)
        # By the id, the script recognises a second copy of this command.
        return bool(self._ask(script, name, run=run, command_id=uuid.uuid4().hex, shown_mark=mark, **given))

    # -- claims of published messages

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        calls = [self._claim(*publication) for publication in publications]
        return list(map(replies.first, self._run_batches(self._claims, calls)))

    def _claim(self, name: LockName, request: ClaimRequest) -> Command:
        keys, by = self._keys(name), request.requester
        return command(
            "claim", keys, tombstone=keys.tombstone(request.attempt), task_id=request.task_id, life_ms=request.life_ms,
            while_running=request.refuse_while_running, generation=request.generation, task=by.task, node=by.node,
            short_id=by.task_id, attempt=request.attempt,
        )  # fmt: skip

    def release_claim(self, name: LockName, task_id: str, generation: int, attempt: str = "") -> bool:
        if not attempt:
            return bool(self._ask("release_claim", name, task_id=task_id, generation=generation))
        reply = self._ask(
            "release_claim", name, "unconfirmed", tombstone=self._keys(name).tombstone(attempt), task_id=task_id,
            generation=generation, attempt=attempt, tombstone_ms=TOMBSTONE_MS,
        )  # fmt: skip
        return bool(reply)

    def extend_claims(self, claims: Sequence[ClaimExtension]) -> None:
        calls = [
            command("extend_claim", self._keys(one.name), task_id=one.task_id, life_ms=one.life_ms) for one in claims
        ]
        self._run_batches(ScriptPipeline(), calls)

    # -- queues

    def sweep(
        self,
        name: LockName,
        granter: str,
        grant_timeout_ms: int,
        tries: int,
        foreign_ms: int = FOREIGN_MS,
        pause_ms: int = 0,
    ) -> QueueStepResult:
        reply = self._ask(
            "sweep", name, granter=granter, grant_timeout_ms=grant_timeout_ms, max_tries=tries, foreign_ms=foreign_ms,
            pause_ms=pause_ms,
        )  # fmt: skip
        return replies.swept(reply)

    def confirm_publish(self, name: LockName, identity: str, grant_timeout_ms: int) -> bool:
        return bool(self._ask("confirm_publish", name, identity=identity, grant_timeout_ms=grant_timeout_ms))

    def decline_grant(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        origin = (2 if present else 1) if foreign else 0
        return bool(self._ask("decline_grant", name, identity=grant.identity, grant_id=grant.grant_id, foreign=origin))

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, dead_letter: bool = False, ended: bool = False
    ) -> QueueStepResult:
        reply = self._ask(
            "remove_waiter", name, done=self._keys(name).done(identity), identity=identity,
            done_ms=0 if dead_letter else DONE_MS, granter=granter, ended=ended,
        )  # fmt: skip
        return replies.removed(reply)

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        done = self._keys(name).done(identity)
        self._ask("mark_done", name, done=done, identity=identity, life_ms=DONE_MS, age_us=age_us, owner=owner)

    def list_waiters(self, name: LockName, most: int) -> Waiting:
        return replies.waiting(name, self._ask("list_waiters", name, limit=most))

    @property
    def clustered(self) -> bool:
        return self._topology.clustered

    def dead_letters_at(self, name: LockName) -> str:
        return self._keys(name).named("dead")

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        sweeper = sweeper_key(self._prefix, broker, duty)
        return int(self._run_safe(command("sweep_lease", None, sweeper=sweeper, worker=worker, life_ms=life_ms)))

    def list_due_queues(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        indexes, within_us = bucket_keys(self._prefix, "queues"), round(within * 1e6)
        refusals: list[ErrorReply] = []
        # One script reads all buckets. In a Cluster their slots differ, so each index that exists gets its own script.
        parts = self._existing(indexes, buckets, refusals) if self.clustered else [list(buckets)]
        built = [
            command("list_due_queues", None, indexes=[indexes[at] for at in part], limit=most, within_us=within_us)
            for part in parts
        ]
        found_replies = self._collect(ScriptPipeline(), built, refusals) if built else []
        # If a server does not answer or refuses, the next round reads its buckets.
        answered = [(part, reply) for part, reply in zip(parts, found_replies, strict=True) if isinstance(reply, list)]
        found = [(part[number - 1], names) for part, reply in answered for number, names in replies.pairs(reply)]
        error = self._exception_for(refusals[0]) if refusals else None
        if error is not None and not found:
            raise error
        return [name_from_member(name.decode(), bucket) for bucket, names in found for name in names]

    def _existing(self, indexes: Sequence[str], buckets: Sequence[int], refusals: list[ErrorReply]) -> list[list[int]]:
        found = self._collect(ExistsPipeline(), [("EXISTS", (indexes[bucket],)) for bucket in buckets], refusals)
        return [[bucket] for bucket, reply in zip(buckets, found, strict=True) if reply == 1]

    def _collect(self, pipeline: Pipeline, calls: Sequence[Any], refusals: list[ErrorReply]) -> list[Any]:
        """Return the replies, and add the error replies among them to ``refusals``."""
        collected = self._each(pipeline, calls)
        refusals += [reply for reply in collected if type(reply) is ErrorReply]
        return collected

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        self._save_record(node_key(self._prefix, node), worker, text, life_ms)

    def _save_record(self, key: str, process: str, record: str, life_ms: int) -> None:
        self._run_safe(command("save_worker_record", None, worker=key, process=process, record=record, life_ms=life_ms))

    def worker_records(self, node: str) -> dict[str, str]:
        return self._read_hash(node_key(self._prefix, node))

    def announce_workers(self, broker: str, life_ms: int) -> None:
        self._save_record(presence_key(self._prefix, broker), "workers", "running", life_ms)

    def has_workers(self, broker: str) -> bool:
        return bool(self._read_hash(presence_key(self._prefix, broker)))

    def _read_hash(self, key: str) -> dict[str, str]:
        reply = self._topology.call(key, read_hash, key)
        if type(reply) is ErrorReply:
            raise self._exception_for(reply)
        texts = [part.decode("utf-8", "replace") for part in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def info(self) -> StoreInfo:
        return store_info(self._topology.everywhere(read_info), clustered=self._topology.clustered)

    def guard(self, name: LockName, acquisition: str, connection: Any, settles: ReleaseRequest | None = None) -> bool:
        raise GuardRefused(NO_GUARD)

    def release_listener(self, name: LockName) -> ReleaseListener:
        return Listener(self._wakeups, self._keys(name))

    def close(self) -> None:
        self._topology.close()

    # -- one call

    def _run(self, built: Command) -> Any:
        return self._run_confirmed(built, PRIMARY)[0]

    def _run_confirmed(self, built: Command, durability: Durability) -> tuple[Any, NotConfirmed | None]:
        """Run a command. Return its reply, and the exception for a missing confirmation."""
        variant, texts = built
        if durability is PRIMARY or durability == PRIMARY:
            reply = self._topology.call(texts[0], execute, variant, texts)
            return (reply if type(reply) in _REPLY_TYPES else self._checked(reply)), None
        result = self._topology.call(texts[0], execute_confirmed, variant, texts, durability)
        if isinstance(result, ErrorReply):
            raise self._exception_for(result)
        reply, unconfirmed = result
        return self._checked(reply), unconfirmed

    def _checked(self, reply: Any) -> Any:
        if type(reply) is ErrorReply:
            raise self._exception_for(reply)
        if type(reply) is str:  # a status reply, which no script returns
            raise StoreRefused(
                f"unexpected reply {reply[:40]!r}: the server is not Redis or Valkey, or a proxy answered; "
                "check dlock_url"
            )
        return reply

    def _quarantine_args(self, keys: LockKeys, quarantine: Quarantine) -> tuple[str, ...]:
        return quarantine.delay_ms, str(self._topology.failover_epoch(keys.lock))

    def _raise_if_quarantined(self, reply: Any, quarantine_args: tuple[str, ...]) -> None:
        """Raise StoreQuarantined if that is the reply."""
        if reply[0] == b"quarantined":
            _, left_ms, began = reply
            if began == b"1":
                self._start_quarantines(*quarantine_args)
            raise quarantined(left_ms)

    def _start_quarantines(self, delay_ms: str, failover_epoch: str) -> None:
        """Start the quarantine of every bucket when the first one has started."""
        records = bucket_keys(self._prefix, "quarantine")
        for start in range(0, len(records), BATCH):
            batch = records[start : start + BATCH]
            calls = [
                command("start_quarantine", None, quarantine=one, quarantine_ms=delay_ms, failover_epoch=failover_epoch)
                for one in batch
            ]
            try:
                self._each(ScriptPipeline(), calls)
            except StoreUnavailable:
                return  # the quarantine of a remaining bucket starts at its next acquire

    def _exception_for(self, reply: ErrorReply) -> StoreUnavailable:
        """Return the exception for an error reply."""
        error = error_from_reply(reply)
        if isinstance(error, StoreNotReady):
            # Another server may have been promoted, so look the server up again before the next call.
            self._topology.invalidate()
        return error

    def _each(self, pipeline: Pipeline, calls: Sequence[Any], within: float | None = None) -> list[Any]:
        return self._topology.each(pipeline, [(call[1][0], call) for call in calls], within)

    def _ask(self, script: str, name: LockName, *groups: str, **given: str | int) -> Any:
        """Run the script of a lock name, as :func:`.commands.command` builds it."""
        return self._run_safe(command(script, self._keys(name), *groups, seats=name.seats, **given))

    def _run_safe(self, built: Command) -> Any:
        """Run a command that is safe to send twice. If its reply is lost, send it again."""
        return call_again_if_reply_lost(self._run, built)

    def _each_safe(self, pipeline: Pipeline, calls: Sequence[Any]) -> list[Any]:
        answers = call_again_if_reply_lost(self._each, pipeline, calls)
        # If one of several servers cut its connection, repeat only that server's commands.
        lost = [index for index, answer in enumerate(answers) if type(answer) is ReplyLost]
        if lost:
            for index, answer in zip(lost, self._each(pipeline, [calls[index] for index in lost]), strict=True):
                answers[index] = answer
        return answers

    def _run_batches(self, pipeline: Pipeline, calls: Sequence[Any]) -> list[Any]:
        """Run commands that are safe to send twice, in few writes. Raise the first error among the replies."""
        collected: list[Any] = []
        for start in range(0, len(calls), BATCH):
            collected += self._each_safe(pipeline, calls[start : start + BATCH])
        for reply in collected:
            if type(reply) is ErrorReply:
                raise self._exception_for(reply)
            if isinstance(reply, StoreUnavailable):
                raise reply
        return collected
