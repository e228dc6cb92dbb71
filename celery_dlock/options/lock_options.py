"""The options of a singleton task: :class:`LockOptions`.

Each field declares one option: its default, check, requirement, bound in a message and words for operators
(:mod:`.option`). The docstrings of the fields are the only description of the options. The options reference is
generated from them: the first sentence is the summary, and the rest is the detail. Write each text that is a value in
double quotes and double backticks: the reference lists those that the check accepts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ..errors import InvalidLockOptions
from ..utils.text import did_you_mean
from . import bounds, requirements, values, words
from .combinations import check_combinations
from .derived import StopReason, tick_mark_ttl
from .durations import FOREVER, Seconds, as_seconds
from .error_texts import ALL_OPTIONS, unmet_requirement
from .option import Chapter, Option, declared, option
from .other_libraries import equivalent
from .values import DEFAULT_TTL

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_TTL", "OPTIONS", "UNSET", "LockOptions", "ineffective_options"]


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


#: The default of ``skip_result``: no result was given. ``None`` cannot mean that, because it is a valid result.
UNSET: Final = _Unset()

Key = str | Sequence[str] | Callable[..., str] | None


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """The options of a singleton task: how it is locked, and what a conflict does.

    Durations are seconds (an int or a float) or a ``timedelta``, and are stored as float seconds. Their maximum is 366
    days unless the option says otherwise.

    Raises:
        InvalidLockOptions: A value is invalid, or has no effect beside the others.
    """

    key: Key = option(None, values.key, Chapter.LOCK, words.key, bound=bounds.key)
    """The arguments that make the lock name.

    ``None`` uses all bound arguments, and a non-empty sequence of names uses these. A ``str.format`` template names
    arguments: ``"sms:{user_id}"``. A callable takes the arguments of the call and returns a non-empty string.
    """

    scope: Literal["task", "shared"] = option(
        "task",
        values.one_of("task", "shared"),
        Chapter.LOCK,
        "other tasks with the same key share the lock",
        bound=bounds.scope,
    )
    """The tasks that share the lock.

    With ``"task"``, the key belongs to this task alone. With ``"shared"``, all tasks and every :class:`Lock` with the
    same key exclude one another. ``"shared"`` needs ``key``.
    """

    ttl: Seconds = option(DEFAULT_TTL, values.ttl, Chapter.TIME, words.ttl, bound=bounds.ttl)
    """The time that the lock outlives its last renewal; at least 1 s.

    The worker renews the lease when a third of the ttl has passed, so the ttl does not limit the body. It is the time
    for which the lock of a dead host stays taken. If it is not set, the setting ``dlock_ttl`` applies.
    """

    min_hold: Seconds = option(
        0.0, values.seconds(0.0), Chapter.TIME, "the lock is held for at least {}", bound=bounds.at_most("min_hold")
    )
    """The shortest time that the lock is held, counted from its acquisition.

    A body that ends earlier, or whose process dies, does not release the lock before this time.
    """

    max_hold: Seconds | None = option(
        None, values.seconds_or_none(1.0), Chapter.TIME, "the lock is held for at most {}", bound=bounds.max_hold
    )
    """The longest time that the lock is held; at least 1 s and at least ``min_hold``.

    After this time the lease is not renewed and counts as lost, even if the body still runs. ``on_lost`` then decides
    about the body. ``None`` sets no limit.
    """

    limit: int = option(
        1, values.limit, Chapter.LOCK, "up to {} calls of one lock name run at once", bound=bounds.limit
    )
    """The number of calls that may hold one lock name at once: 1 to 100.

    Each holder has a seat of its own, ``lease.seat``, from 0 to ``limit`` - 1. Fencing tokens of different seats are
    not comparable. Cannot be combined with ``on_conflict='replace'``, ``once_per``, ``unique='queued+running'``,
    ``debounce`` or ``on_store_error='local'``. Redlock does not support it.
    """

    keep_on_retry: bool = option(
        False,  # noqa: FBT003  # the default
        values.flag,
        Chapter.TIME,
        "a retry keeps the lock",
        bound=bounds.only_own_in_shared("keep_on_retry", bool),
    )
    """Whether a run that ends in ``self.retry()`` keeps the lock for its retry.

    With ``True``, no other call can run before the retry. A retry by ``autoretry_for`` counts too. If the retry never
    comes, the lock expires one ``ttl`` after the end of the retry's countdown.
    """

    wait: Seconds = option(
        0.0,
        values.seconds(0.0),
        Chapter.CONFLICT,
        "a call whose lock is held first waits in its worker slot for {}",
        bound=bounds.at_most("wait"),
    )
    """The time that a call waits in its worker slot for a held lock, before ``on_conflict`` applies; at least 0 s.

    If other calls of the name wait in the lock store, they come first, so ``on_conflict`` applies at once. Cannot be
    combined with ``debounce``.
    """

    on_conflict: str = option(
        "skip",
        values.one_of(*values.POLICIES),
        Chapter.CONFLICT,
        words.CONFLICT,
        bound=bounds.only_own_in_shared("on_conflict", "replace".__eq__),
    )
    """The conflict policy: the treatment of a call whose lock is held.

    - ``"skip"``: the call ends REVOKED. A call that ran before (``retries > 0``) is retried instead.
    - ``"retry"``: the message is published again after a delay, unchanged except for its ETA.
    - ``"queue"``: the call waits in the lock store, without a worker slot. Calls that wait run in the order in which
      they were sent.
    - ``"raise"``: the call ends FAILURE with :class:`LockHeld`.
    - ``"replace"``: the newest call wins. The running body is stopped (``stop``) and ends REVOKED, and the call runs
      after it. Of several waiting calls, only the newest runs. After an hour in which newer calls have stopped one body
      after another, the running one is left alone. Cannot be combined with ``once_per``, ``keep_on_retry``, ``unique``
      or ``limit``.
    """

    skip_result: Any = option(UNSET, values.anything, Chapter.CONFLICT, None, needs=requirements.SKIPS)
    """The result of a skipped call.

    If it is given, a skipped call ends SUCCESS with this value, its callbacks run, and its chain or chord continues. A
    waiting call that a newer one removes still ends REVOKED. Requires ``on_conflict='skip'``,
    ``on_conflict='queue'`` with a ``queue_overflow`` other than ``'raise'``, or ``once_per``.
    """

    retry_delay: Seconds = option(1.0, values.seconds(0.01), Chapter.CONFLICT, "its first retry comes after {}")
    """The delay before the first retry of a call whose lock is held; at least 0.01 s.

    Each further delay is twice as long, at most ``retry_delay_max``, and each is shortened at random by up to half.
    """

    retry_delay_max: Seconds = option(60.0, values.seconds(0.01), Chapter.CONFLICT, "a retry comes after at most {}")
    """The longest delay before a retry of a call whose lock is held; at least ``retry_delay``."""

    retry_limit: int | None = option(
        None, values.count_or_none(0), Chapter.CONFLICT, "it fails after {} retries", needs=requirements.RETRIES
    )
    """The number of retries because of a held lock before the call ends FAILURE with :class:`LockHeld`.

    ``None`` sets no limit. These retries do not count for Celery's ``max_retries``. Requires ``on_conflict='retry'`` or
    ``on_conflict='skip'``.
    """

    queue_limit: int | None = option(
        None, values.count_or_none(1), Chapter.CONFLICT, "at most {} calls wait in the queue", needs=requirements.QUEUE
    )
    """The number of calls that may wait for one lock name; at least 1.

    ``None`` sets no limit. Requires ``on_conflict='queue'``.
    """

    queue_overflow: str = option(
        "raise",
        values.one_of(*values.OVERFLOW),
        Chapter.CONFLICT,
        words.OVERFLOW,
        needs=requirements.QUEUE,
        # It removes waiters, perhaps of other tasks.
        bound=bounds.only_own_in_shared("queue_overflow", "drop_oldest".__eq__),
    )
    """The treatment of a call when ``queue_limit`` calls wait already.

    - ``"raise"``: the call ends FAILURE with :class:`LockHeld`.
    - ``"skip"``: the call is skipped. A call that ran before (``retries > 0``) is retried instead.
    - ``"drop_oldest"``: the oldest waiter ends REVOKED, and the call waits. With ``queue_limit=1``, the name runs now,
      and once more with the newest arguments.

    ``"skip"`` and ``"drop_oldest"`` need ``queue_limit``. Requires ``on_conflict='queue'``.
    """

    stop: Seconds | str = option(
        "raise", values.stop, Chapter.CONFLICT, words.STOP, needs=requirements.REPLACE, bound=bounds.stop
    )
    """The way in which a newer call stops the running body.

    - ``"raise"``: the worker raises :class:`Replaced`, which derives from Celery's ``Ignore``, once in the body. That
      does not interrupt a long C call.
    - ``"ask"``: only ``lease.ensure()`` raises :class:`Replaced`, and ``lease.replaced`` becomes true.
    - Seconds: as ``"raise"``. If the body has not ended this much later, the worker kills the pool child that runs it.
      Only a prefork pool can kill.

    In the solo pool, ``"raise"`` and seconds work as ``"ask"``. If the body does not stop, the newer call waits for its
    end. Requires ``on_conflict='replace'``.
    """

    debounce: Seconds | tuple[Seconds, Seconds] | None = option(
        None, values.debounce, Chapter.CONFLICT, words.debounce, needs=requirements.QUEUE, bound=bounds.debounce
    )
    """The time for which a call waits for newer calls of its lock name; from 0.001 s.

    A pair, such as ``(5, 60)``, is that time, and the longest time for which newer calls delay the body, counted from
    the first waiting call. Without a pair, the longest time is ten times the first.

    Each newer call replaces the waiting one, which ends REVOKED ("debounced by <id>"), and the time starts again. A
    running body is never stopped. Retries do not wait for newer calls. Cannot be combined with ``unique``,
    ``once_per='tick'``, ``queue_limit`` or ``queue_overflow``. Requires ``on_conflict='queue'``.
    """

    unique: str | None = option(None, values.unique, Chapter.PUBLISH, words.UNIQUE)
    """The period in which ``apply_async`` rejects a second call of the same lock name.

    - ``None``: no call is rejected.
    - ``"queued"``: until the first call starts.
    - ``"queued+running"``: until the first call ends.
    """

    on_duplicate: str = option(
        "return",
        values.one_of("return", "raise"),
        Chapter.PUBLISH,
        {"raise": "the caller of a rejected call gets LockHeld"},
        needs=requirements.UNIQUE,
    )
    """The response of ``apply_async`` to a rejected call.

    - ``"return"``: the ``AsyncResult`` of the first call.
    - ``"raise"``: :class:`LockHeld`.

    Requires ``unique='queued'`` or ``unique='queued+running'``.
    """

    queued_ttl: Seconds = option(
        3600.0,
        values.seconds(1.0),
        Chapter.PUBLISH,
        "a call that no worker has rejects others for {}",
        needs=requirements.UNIQUE,
        bound=bounds.at_most("queued_ttl"),
    )
    """The time that a published call keeps its claim while no worker has its message; at least 1 s.

    It limits how long a lost message blocks its name. The time counts from the publication, or from the call's ETA. If
    ``once_per`` is a duration, ``queued_ttl`` may be at most that long. Requires ``unique='queued'`` or
    ``unique='queued+running'``.
    """

    once_per: Seconds | str | None = option(None, values.once_per, Chapter.SUCCESS, words.ONCE_PER, bound=bounds.once)
    """The time that a lock name stays used after a successful body.

    A call of a used name does not run, whatever ``on_conflict`` says. The time is 0.001 s to 3660 days, counted from
    the release. ``"forever"`` means 3660 days. A failure, a retry or an ``Ignore`` leaves the name free, unless
    ``settle`` ran before it. With ``"tick"``, each due time of a schedule entry runs once, if a scheduler of
    :mod:`celery_dlock.beat` sent it. All other calls then run as with ``None``.
    """

    on_used: str = option(
        "skip",
        values.one_of("skip", "return", "raise"),
        Chapter.SUCCESS,
        words.ON_USED,
        needs=requirements.ONCE_PER,
    )
    """The treatment of a call whose name is used.

    - ``"skip"``: the call ends REVOKED, or SUCCESS with its ``skip_result``.
    - ``"return"``: the call ends SUCCESS with the result of the first run. If the result backend no longer has it, the
      call is skipped.
    - ``"raise"``: the call ends FAILURE with :class:`NameUsed`.

    Requires ``once_per``.
    """

    after_crash: str = option(
        "run", values.one_of("run", "hold"), Chapter.SUCCESS, words.CRASH, needs=requirements.ONCE_PER
    )
    """The treatment of the next call after the process of a body died and its outcome is unknown.

    - ``"run"``, for at-least-once: the call runs. ``lease.after_crash`` is ``True``, and ``lease.idempotency_key`` is
      that of the dead run.
    - ``"hold"``, for at-most-once: calls end FAILURE with :class:`UnknownOutcome`, until ``task.resolve()`` is called.
      Without that, they fail for ``max_hold`` (24 h if not set) plus ``once_per``, counted from the start of the body.

    Requires ``once_per``.
    """

    misfire_grace: Seconds = option(
        24 * 3600.0,
        values.seconds(1.0),
        Chapter.SUCCESS,
        "a tick that would start more than {} late is skipped",
        needs=requirements.TICK,
        bound=bounds.once,
    )
    """The time by which a tick may start late; at least 1 s.

    A tick that would start later is skipped as a misfire. Requires ``once_per='tick'``.
    """

    on_lost: str = option(
        "continue",
        values.one_of("continue", "abort"),
        Chapter.LOSS,
        {"abort": "a body whose lease is lost is stopped"},
    )
    """The treatment of a body whose lease is lost.

    - ``"continue"``: the body goes on, and ``lease.ensure()`` raises :class:`LockLost`.
    - ``"abort"``: the worker raises :class:`LockLost` once in the body. If the store does not answer, the worker raises
      it before the lease expires. That does not interrupt a long C call, and has no effect in the solo pool.

    A body that raises :class:`LockLost` ends FAILURE. With Celery's ``autoretry_for=(LockLost,)`` it runs again.
    """

    on_store_error: str = option(
        "retry", values.one_of("retry", "fail", "run", "local"), Chapter.STORE, words.STORE_ERROR
    )
    """The treatment of a call if the lock store does not answer, or refuses a command.

    - ``"retry"``: the message is published again after a delay, unchanged except for its ETA. The delay is random, at
      most 60 s. In a quarantine of the store, it lasts until the quarantine ends.
    - ``"fail"``: the call ends FAILURE with :class:`StoreUnavailable`. Its body did not run.
    - ``"run"``: the body runs **without the lock**. ``lease.held`` is ``False``, and ``lease.ensure()`` raises
      :class:`LockLost`.
    - ``"local"``: the body runs **with a lock on its machine only**. If another body of the name runs on this machine,
      ``on_conflict`` applies. Bodies on other machines may run at the same time. ``lease.local`` is ``True``, the rest
      of the lease is as with ``"run"``.

    ``"run"`` and ``"local"`` cannot be combined with ``once_per``, ``on_conflict='queue'`` or ``'replace'``, or
    ``on_lost='abort'``. For such a body, ``min_hold``, ``max_hold`` and ``keep_on_retry`` have no effect.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *_args: Any, **options: Any) -> Self:
            # The dataclass would raise a TypeError that suggests no option.
            for name in options.keys() - cls.__dataclass_fields__.keys():
                raise InvalidLockOptions(f"unknown option {name!r}{cls.meant(name)}; {ALL_OPTIONS}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, declaration in OPTIONS.items():
            object.__setattr__(self, name, declaration.check(name, getattr(self, name)))  # the class is frozen
        for name, requirement in ineffective_options(self).items():
            given, default = getattr(self, name), OPTIONS[name].default
            # Compare the types first, so that != of a user's skip_result is never called: it may return anything.
            if given is not default and (type(given) is not type(default) or given != default):
                raise unmet_requirement(name, given, requirement)
        check_combinations(self)

    # Values that follow from the options, for the rest of the library

    @property
    def once_seconds(self) -> float | None:
        """Seconds that a name stays used; None if names are never used."""
        if self.once_per == "tick":
            return tick_mark_ttl(as_seconds(self.misfire_grace))
        if isinstance(self.once_per, str):
            return FOREVER
        return None if self.once_per is None else as_seconds(self.once_per)

    @property
    def claims(self) -> bool:
        """Whether a call claims its name when it is published."""
        return self.unique is not None

    # Cached, because each run of a task reads these four.

    @functools.cached_property
    def is_simple(self) -> bool:
        """Whether a run only takes its lock before the body and releases it afterwards, as by default.

        If so, the run skips each step that some other option adds.
        """
        return not (
            self.parks
            or self.claims
            or self.wait
            or self.once_per is not None
            or self.min_hold
            or self.max_hold is not None
            or self.keep_on_retry
            or self.on_store_error == "local"
        )

    @functools.cached_property
    def parks(self) -> bool:
        """Whether a call whose lock is held waits in the lock store."""
        return self.on_conflict in ("queue", "replace")

    @functools.cached_property
    def is_stoppable(self) -> bool:
        """Whether a body may be stopped before its end."""
        return self.on_lost == "abort" or self.replaces

    @functools.cached_property
    def marks_release(self) -> bool:
        """Whether a release tells the store how the body has ended."""
        return self.once_per is not None or self.replaces

    @property
    def replaces(self) -> bool:
        """Whether a newer call stops the running one."""
        return self.on_conflict == "replace"

    @property
    def stop_reasons(self) -> tuple[StopReason, ...]:
        """The reasons for which the worker raises an exception in the body."""
        lost: tuple[StopReason, ...] = ("lost",) if self.on_lost == "abort" else ()
        return (*lost, "replaced") if self.replaces and self.stop != "ask" else lost

    @property
    def kill_after(self) -> float | None:
        """Seconds after which a replaced body that has not ended is killed; None if it is never killed."""
        return self.stop if self.replaces and isinstance(self.stop, float) else None

    @property
    def loses_published_calls(self) -> bool:
        """Whether a call that is published while the first one runs will be skipped."""
        return self.unique == "queued" and self.on_conflict == "skip"

    @property
    def debounce_ms(self) -> tuple[int, int]:
        """``debounce`` and the longest delay in milliseconds; (0, 0) if calls are not debounced."""
        if self.debounce is None:
            return 0, 0
        wait, longest = self.debounce if isinstance(self.debounce, tuple) else (self.debounce, 10 * self.debounce)
        return round(as_seconds(wait) * 1000), round(as_seconds(longest) * 1000)

    @property
    def skips_with_result(self) -> bool:
        return self.skip_result is not UNSET

    def ttl_or(self, default: float) -> float:
        """Return the ttl in seconds; ``default`` if the author chose none."""
        return default if self.ttl is DEFAULT_TTL else as_seconds(self.ttl)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(OPTIONS)

    @classmethod
    def meant(cls, name: object) -> str:
        """Return the suggestion for an unknown option, or "".

        An option of another library gets the equivalent one, any other name the most similar one.
        """
        return equivalent(name) or did_you_mean(name, cls.names())


OPTIONS: Final[Mapping[str, Option]] = declared(LockOptions)
"""The options by name."""


def ineffective_options(options: Any) -> dict[str, str]:
    """Return the options whose requirement is not met, each with the text of the requirement.

    Args:
        options: An object that has the fields of :class:`LockOptions`.
    """
    found = {name: one.needs for name, one in OPTIONS.items() if one.needs is not None}
    return {name: needed.text for name, needed in found.items() if not needed.met(options)}
