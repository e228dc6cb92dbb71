"""What a task's author may choose, checked when it is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ..errors import InvalidLockOptions
from .durability import Durability, durability_of
from .other_libraries import equivalent
from .validation import FOREVER, Seconds, as_seconds, did_you_mean, invalid_value, seconds_within, ttl_seconds

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DEFAULT_TTL",
    "POLICIES",
    "SKEW",
    "UNSET",
    "LockOptions",
    "ineffective_options",
    "tick_mark_ttl",
]

POLICIES: Final = ("skip", "retry", "queue", "wait", "raise")
#: Policies that the design names and this version does not carry out yet.
_COMING: Final = ("replace",)
OVERFLOW: Final = ("raise", "skip", "drop_oldest", "keep_latest")
AFTER_WAIT: Final = ("raise", "skip", "retry")
SCOPES: Final = ("task", "shared")
ON_LOST: Final = ("continue", "abort")
AFTER_LOST: Final = ("fail", "retry")
ON_USED: Final = ("skip", "return", "raise")
AFTER_CRASH: Final = ("run", "hold")
ON_STORE_ERROR: Final = ("retry", "fail", "run")
UNIQUE: Final = ("queued", "queued+running")
ON_DUPLICATE: Final = ("return", "raise")
DEFAULT_QUEUED_TTL: Final = 3600.0
#: The least ttl in which the keeper has the time for disks of replicas.
DISKS_TTL: Final = 15.0
DEFAULT_GRACE: Final = 24 * 3600.0

#: The default ttl is one particular object, so that ``dlock_ttl`` can apply where the author wrote none.
DEFAULT_TTL: Final[float] = float("30")

#: Seconds by which any two clocks of beats, workers and store may differ.
SKEW: Final = 60.0
#: Seconds beyond what the skew asks for: a mark is written a little after its body has begun.
_MARGIN: Final = 60.0


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


#: ``skip_result`` may be any value, None too; this one means that none was given.
UNSET: Final = _Unset()

Key = str | Sequence[str] | Callable[..., str] | None


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """How a task is locked. Every field is checked here; a wrong one raises :class:`InvalidLockOptions`.

    Args:
        key: What is locked: None for all bound arguments; a ``str.format`` template over argument names
            (``"sms:{user_id}"``); a sequence of argument names; or a callable taking the call's arguments and
            returning a non-empty string.
        scope: ``"task"`` keeps the key to this task; with ``"shared"`` every task and ``Lock`` that names the same
            key excludes the others.
        ttl: Seconds (or a ``timedelta``), at least 1, that a lock outlives its last renewal. The worker renews at a
            third of it, so it bounds how long a dead host keeps a lock, not how long a body may run. Default: 30,
            or the app's ``dlock_ttl``.
        on_conflict: What happens to a call that meets a held lock: ``"skip"``, ``"retry"``, ``"queue"``, ``"wait"``,
            ``"raise"``.
        skip_result: With it, a skipped call ends SUCCESS with this value and its chain goes on.
        retry_delay: Seconds before the first new try under ``retry``; doubled each time, jittered.
        retry_delay_max: The longest such delay, in seconds.
        retry_limit: Most tries before the call fails with ``LockHeld``; None: no limit.
        wait_timeout: Seconds that ``wait`` blocks in the worker slot at most.
        after_wait: What then happens: ``"raise"``, ``"skip"`` or ``"retry"``.
        queue_limit: Most messages that wait for one lock under ``queue``; None: any number.
        queue_overflow: What happens to the next one: ``"raise"`` fails it with ``LockHeld``, ``"skip"`` skips it,
            ``"drop_oldest"`` ends the oldest waiter REVOKED, ``"keep_latest"`` lets only the newest call wait.
        on_lost: What happens to a body whose lease is lost: ``"continue"`` leaves it to find out by
            ``lease.ensure()``; ``"abort"`` raises :class:`LockLost` in it (not in the solo pool, nor in an eager call).
        after_lost: What becomes of a task that ends with ``LockLost`` because its lease was lost: ``"fail"``, or
            ``"retry"`` to run its message again.
        min_hold: Seconds (or a ``timedelta``) that the lock is kept at least after it was taken, whenever the body
            ends: against schedulers that do not agree about the time. Default: 0.
        max_hold: Seconds (or a ``timedelta``), at least 1, after which a lease is renewed no more and is lost, however
            long the body runs; None: no such time. A body that Celery kills for its hard time limit has 10 s to end.
        once_per: Seconds (or a ``timedelta``) that the name stays used after a successful body, at most ten years;
            ``"forever"``: ten years; ``"tick"``: each due time of a schedule entry runs once, of messages that
            :mod:`celery_dlock.beat` sent, and any other call as without it; None: not at all.
        misfire_grace: Seconds (or a ``timedelta``), at least 1, by which a tick may start late; later it is skipped.
            With ``once_per="tick"`` only.
        on_used: What happens to a call whose name is used: ``"skip"``; ``"return"`` ends it SUCCESS with the first
            run's result, as long as the result backend has that, and else skips it; ``"raise"`` fails it with
            :class:`NameUsed`. With ``once_per`` only.
        after_crash: What happens to a call after a body that died (not failed), so that nobody knows how far it came:
            ``"run"`` runs it, with ``lease.after_crash`` and the same ``lease.idempotency_key``; ``"hold"`` fails it
            with :class:`UnknownOutcome` until ``task.resolve()``. With ``once_per`` only.
        unique: Until when a second ``apply_async`` of the name is refused: None, it is not; ``"queued"``,
            until the first call starts; ``"queued+running"``, until it ends.
        on_duplicate: What a refused ``apply_async`` does: ``"return"`` gives the first call's ``AsyncResult``,
            ``"raise"`` raises :class:`LockHeld`. With ``unique`` only.
        queued_ttl: Seconds (or a ``timedelta``), at least 1, that a queued call keeps the name while no worker knows
            its message: the bound on what a message that got lost costs. It counts from the call's ETA. With
            ``unique`` only.
        keep_on_retry: With True, a run that ends in ``self.retry()`` (also by ``autoretry_for``) keeps the lock for
            its retry, so that nobody comes between: until the retry takes it, at most its countdown and the ttl.
        on_store_error: What happens to a call that cannot ask for its lock, because the store is away or broken:
            ``"retry"`` publishes it again with a growing delay; ``"fail"`` ends it FAILURE with
            :class:`StoreUnavailable`; ``"run"`` runs the body **without the lock**.
        durability: Who has to confirm what is written about the lock before it counts. ``"primary"``: nobody but the
            server itself. ``{"replicas": n, "timeout": s}``: n of its replicas, within so many seconds (0.001 to 30 and
            at most half of ``dlock_timeout``; by default 0.5, of disks 1.5). ``{"fsync": "local", "timeout": s}``: its
            disk; ``{"fsync": n, "timeout": s}``: that and the disks of n replicas, with a ttl of at least 15. What is
            not confirmed counts as a store that did not answer: what was taken is given back, and ``on_store_error``
            decides. Default: the app's ``dlock_durability``.
    """

    key: Key = None
    scope: Literal["task", "shared"] = "task"
    ttl: Seconds = DEFAULT_TTL
    on_conflict: str = "skip"
    skip_result: Any = UNSET
    retry_delay: Seconds = 1.0
    retry_delay_max: Seconds = 60.0
    retry_limit: int | None = None
    wait_timeout: Seconds = 10.0
    after_wait: str = "raise"
    queue_limit: int | None = None
    queue_overflow: str = "raise"
    once_per: Seconds | str | None = None
    misfire_grace: Seconds = DEFAULT_GRACE
    on_used: str = "skip"
    after_crash: str = "run"
    unique: str | None = None
    on_duplicate: str = "return"
    queued_ttl: Seconds = DEFAULT_QUEUED_TTL
    keep_on_retry: bool = False
    on_store_error: str = "retry"
    durability: str | Mapping[str, Any] | None = None
    on_lost: str = "continue"
    after_lost: str = "fail"
    min_hold: Seconds = 0.0
    max_hold: Seconds | None = None

    if not TYPE_CHECKING:

        def __new__(cls, *_args: Any, **options: Any) -> Self:
            # The dataclass would raise a TypeError, without the option that was meant.
            for name in options.keys() - cls.__dataclass_fields__.keys():
                known = ", ".join(cls.names())
                raise InvalidLockOptions(f"unknown option {name!r}{cls.meant(name)}; known are {known}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_key()
        _one_of("scope", self.scope, SCOPES)
        if self.scope == "shared" and self.key is None:
            raise invalid_value(
                "scope", self.scope, "'task', or 'shared' together with key=: without a key there is no name to share"
            )
        if self.on_conflict in _COMING:
            raise invalid_value(
                "on_conflict", self.on_conflict, f"{_listed(POLICIES)}; {self.on_conflict!r} is not available yet"
            )
        _one_of("on_conflict", self.on_conflict, POLICIES)
        if self.ttl is not DEFAULT_TTL:
            self._set("ttl", ttl_seconds("ttl", self.ttl))
        self._check_tries()
        self._check_queue()
        self._check_once()
        self._check_unique()
        self._check_idle()
        _true_or_false("keep_on_retry", self.keep_on_retry)
        self._check_faults()

    def _check_tries(self) -> None:
        self._set("retry_delay", seconds_within("retry_delay", self.retry_delay, 0.01))
        self._set("retry_delay_max", seconds_within("retry_delay_max", self.retry_delay_max, 0.01))
        if as_seconds(self.retry_delay_max) < as_seconds(self.retry_delay):
            raise invalid_value("retry_delay", self.retry_delay, f"at most retry_delay_max ({self.retry_delay_max})")
        limit: object = self.retry_limit
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise invalid_value("retry_limit", limit, "None or a whole number of at least 0")
        self._set("wait_timeout", seconds_within("wait_timeout", self.wait_timeout, 0.0))
        _one_of("after_wait", self.after_wait, AFTER_WAIT)
        self._only_under("wait", wait_timeout=10.0, after_wait="raise")

    def _check_once(self) -> None:
        once: object = self.once_per
        if isinstance(once, str):
            others = "seconds (int, float or timedelta) of at least 0.001, or None"
            _one_of_or("once_per", once, ("forever", "tick"), others)
        elif once is not None:
            try:
                self._set("once_per", seconds_within("once_per", once, 0.001, FOREVER))
            except InvalidLockOptions as error:
                raise InvalidLockOptions(f"{error}, 'forever' or 'tick'") from None
        self._check_tick()
        _one_of("on_used", self.on_used, ON_USED)
        _one_of("after_crash", self.after_crash, AFTER_CRASH)
        for option, value in {"on_used": "skip", "after_crash": "run"}.items():
            if once is None and getattr(self, option) != value:
                raise invalid_value(option, getattr(self, option), f"{value!r} without once_per: no name is ever used")

    def _check_tick(self) -> None:
        self._set("misfire_grace", seconds_within("misfire_grace", self.misfire_grace, 1.0))
        if self.once_per != "tick" and self.misfire_grace != DEFAULT_GRACE:
            allowed = f"{DEFAULT_GRACE:g} without once_per='tick': only a tick has a due time"
            raise invalid_value("misfire_grace", self.misfire_grace, allowed)

    @property
    def once_seconds(self) -> float | None:
        """How long a name stays used; None: not at all."""
        if self.once_per == "tick":
            return tick_mark_ttl(as_seconds(self.misfire_grace))
        if isinstance(self.once_per, str):
            return FOREVER
        return None if self.once_per is None else as_seconds(self.once_per)

    def _check_idle(self) -> None:
        for option, choices in ineffective_options(self).items():
            if (given := getattr(self, option)) is not self.default(option):
                raise invalid_value(option, given, f"none with {choices}")

    def _only_under(self, policy: str, **unset: object) -> None:
        """What does nothing under another policy was meant for this one."""
        for option, value in unset.items():
            if self.on_conflict != policy and getattr(self, option) != value:
                raise invalid_value(option, getattr(self, option), f"{value!r} without on_conflict={policy!r}")

    def _check_unique(self) -> None:
        if self.unique is not None:
            off = "; None, its default, switches it off" if self.unique == "running" else ""
            _one_of_or("unique", self.unique, UNIQUE, f"or None{off}")
        _one_of("on_duplicate", self.on_duplicate, ON_DUPLICATE)
        self._set("queued_ttl", seconds_within("queued_ttl", self.queued_ttl, 1.0))
        if not self.claims:
            for option, value in {"on_duplicate": "return", "queued_ttl": DEFAULT_QUEUED_TTL}.items():
                if getattr(self, option) != value:
                    raise invalid_value(
                        option, getattr(self, option), f"{value!r} without unique='queued' or 'queued+running'"
                    )
            return
        window: object = self.once_per
        if isinstance(window, float) and window < as_seconds(self.queued_ttl):
            raise invalid_value(
                "once_per",
                window,
                f"at least queued_ttl ({self.queued_ttl}) with unique={self.unique!r}: a call whose message got lost "
                f"would keep the name for longer than a success does; or queued_ttl={window:g} or less",
            )

    def _check_faults(self) -> None:
        _one_of("on_lost", self.on_lost, ON_LOST)
        _one_of("after_lost", self.after_lost, AFTER_LOST)
        self._set("min_hold", seconds_within("min_hold", self.min_hold, 0.0))
        if self.max_hold is not None:
            self._set("max_hold", seconds_within("max_hold", self.max_hold, 1.0))
            if as_seconds(self.max_hold) < as_seconds(self.min_hold):
                raise invalid_value("max_hold", self.max_hold, f"at least min_hold ({self.min_hold})")
        self._check_durability()
        _one_of("on_store_error", self.on_store_error, ON_STORE_ERROR)
        if self.on_store_error == "run" and self.on_lost == "abort":
            raise invalid_value(
                "on_store_error", "run", "'retry' or 'fail' with on_lost='abort': it would run with no lease to lose"
            )
        if self.on_store_error == "run" and self.once_per is not None:
            raise invalid_value(
                "on_store_error", "run", "'retry' or 'fail' with once_per: no store, no mark of a success"
            )
        if self.on_store_error == "run" and self.on_conflict == "queue":
            # Its entry would stay among the waiters, and run once more when its turn comes.
            raise invalid_value(
                "on_store_error", "run", "'retry' or 'fail' with on_conflict='queue': it may wait in the store"
            )

    def _check_durability(self) -> None:
        asked = self.confirmation
        if asked is not None and asked.fsync and asked.replicas and as_seconds(self.ttl) < DISKS_TTL:
            allowed = f"with a ttl of at least {DISKS_TTL:g}: a replica says once a second what it has written to disk"
            raise invalid_value("durability", self.durability, allowed)

    @property
    def claims(self) -> bool:
        """Does a call claim the name when it is published?"""
        return self.unique is not None

    @property
    def loses_published_calls(self) -> bool:
        """Whether a call is published while the first one runs (``unique="queued"``), only to be skipped."""
        skips = self.on_conflict == "skip" or (self.on_conflict == "wait" and self.after_wait == "skip")
        return self.unique == "queued" and skips

    @property
    def most_waiting(self) -> int:
        """Waiters allowed per lock name; 0: any number."""
        return 1 if self.queue_overflow == "keep_latest" else self.queue_limit or 0

    def ttl_or(self, default: float) -> float:
        """Its own ttl in seconds; ``default`` where its author named none."""
        return default if self.ttl is DEFAULT_TTL else as_seconds(self.ttl)

    @property
    def confirmation(self) -> Durability | None:
        """Who has to confirm its lock; None where its author did not say."""
        return None if self.durability is None else durability_of("durability", self.durability)

    @classmethod
    def default(cls, option: str) -> Any:
        """What an option is where nobody chose."""
        return next(field.default for field in dataclasses.fields(cls) if field.name == option)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Every option's name."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def meant(cls, name: object) -> str:
        """Behind an unknown name, in an error: what stands here for another library's option, or the most like one."""
        return equivalent(name) or did_you_mean(name, cls.names())

    @property
    def skips_with_result(self) -> bool:
        return self.skip_result is not UNSET

    def _check_key(self) -> None:
        key = self.key
        if key is None or callable(key):
            return
        if isinstance(key, str):
            if not key:
                raise invalid_value("key", key, _KEYS)
            return
        given: object = key  # whatever the annotation says, anything may have been given
        if not isinstance(given, list | tuple) or not given or not all(isinstance(name, str) for name in given):
            raise invalid_value("key", key, _KEYS)
        self._set("key", tuple(given))

    def _check_queue(self) -> None:
        limit: object = self.queue_limit
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise invalid_value("queue_limit", limit, "None or a whole number of at least 1")
        _one_of("queue_overflow", self.queue_overflow, OVERFLOW)
        self._only_under("queue", queue_limit=None, queue_overflow="raise")
        if self.queue_overflow == "keep_latest" and limit not in (None, 1):
            raise invalid_value("queue_limit", limit, "None or 1 under queue_overflow='keep_latest'")
        if self.queue_overflow in ("skip", "drop_oldest") and limit is None:
            raise invalid_value("queue_overflow", self.queue_overflow, "'raise' or 'keep_latest' without a queue_limit")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass to normalise its own fields


def ineffective_options(options: Any) -> dict[str, str]:
    """Options that do nothing, and beside which choices; of anything that has the fields of the options."""
    choices = {"skip_result": _never_skips(options), "retry_limit": _never_tries_again(options)}
    return {option: why for option, why in choices.items() if why}


def _never_skips(options: Any) -> str:
    """The choices by which no call is ever skipped; "" if one may be."""
    policy = options.on_conflict
    if options.once_per is not None or policy == "skip":
        return ""
    if policy == "wait":
        return "" if options.after_wait == "skip" else f"on_conflict='wait', after_wait={options.after_wait!r}"
    if policy == "queue":
        return "" if options.queue_overflow != "raise" else "on_conflict='queue', queue_overflow='raise'"
    return f"on_conflict={policy!r}"


def _never_tries_again(options: Any) -> str:
    """The choices by which no call that met a held lock comes back."""
    policy = options.on_conflict
    if policy == "wait" and options.after_wait == "raise":
        return "on_conflict='wait', after_wait='raise'"
    return f"on_conflict={policy!r}" if policy in ("raise", "queue") else ""


_KEYS = "None, a non-empty template such as 'sms:{user_id}', a non-empty sequence of argument names, or a callable"


def _true_or_false(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise invalid_value(option, value, "True or False")


def _one_of(option: str, value: object, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise invalid_value(option, value, _listed(allowed))


def _one_of_or(option: str, value: object, allowed: Sequence[str], others: str) -> None:
    if value not in allowed:
        raise invalid_value(option, value, f"{', '.join(map(repr, allowed))}, {others}")


def _listed(allowed: Sequence[str]) -> str:
    return "one of " + ", ".join(map(repr, allowed))


def tick_mark_ttl(misfire_grace: float) -> float:
    """Seconds that a tick's run is remembered from its success on.

    So that none runs twice, a message of that tick which starts later must meet the mark or be a misfire. Let no two
    clocks differ by more than the skew. A run starts at ``due - skew`` of its worker's clock at the earliest (else its
    stamp is refused), hence at ``due - 2 skew`` of the store's, and is marked later. A message that is no misfire
    starts at ``due + misfire_grace`` of its worker's clock at the latest, hence at ``due + misfire_grace + skew`` of
    the store's. Between the two lie ``misfire_grace + 3 skew``.
    """
    return misfire_grace + 3 * SKEW + _MARGIN
