"""Stores what became of a task that Celery's tracer does not: its end when skipped, its start when it really starts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from celery import Celery, states
from celery.app.task import Context
from celery.backends.base import Backend, DisabledBackend
from celery.exceptions import TaskRevokedError

from ..errors import CallNotRun

__all__ = [
    "QUEUED",
    "CallSkipped",
    "ResultTask",
    "has_backend",
    "store_queued",
    "store_revoked",
    "store_started",
    "stored_failure",
]

#: The state of a parked task.
QUEUED = "QUEUED"

Signature = Mapping[str, Any]  # as it stands in a message


class ResultTask(Protocol):
    """A Celery task, as far as storing its results needs it."""

    ignore_result: bool
    store_eager_result: bool

    @property
    def app(self) -> Celery: ...
    @property
    def backend(self) -> Any: ...


# Not in `errors`, which does not import Celery.
class CallSkipped(CallNotRun, TaskRevokedError):
    """The call was skipped, and so is everything of its canvas that can never run; its state is REVOKED.

    A call that an operator revoked, or that expired, raises ``TaskRevokedError`` itself.
    """

    # Result backends store this path, and processes of other versions read it.
    __module__ = "celery_dlock"


def store_revoked(task: ResultTask, request: Context, error: TaskRevokedError) -> None:
    """Store REVOKED for a task that is not run, and for all that can never run now.

    Meant for the process that skips the task, just before it raises ``Ignore``: that alone would leave the task
    PENDING and its chain and its chord waiting for ever. The task is stored unless its result is ignored (the end of
    a chord member always is: the chord looks it up), and its part is returned to its chord. The same is done for
    every later member of its chain, down into groups, nested chains and chord bodies, and for what follows a chord
    that cannot complete any more, outward through the chords around it. Their links and errbacks do not run.

    Celery's own limits stay. Ids inside a chord header that was never sent stay PENDING; the chord itself ends. The
    body of a chord with a skipped member becomes FAILURE with ``ChordError`` when the whole header has ended, and
    then Celery calls that body's errbacks. A body that is a canvas, or that belongs to an outer chord, is REVOKED at
    once, and what Celery (more of it from version to version) ends there too reads FAILURE afterwards. Chains of
    task protocol 1 are made of links, so nothing of them is ended.

    An error of the result backend is not caught; a part of the ends may be stored then, and calling again is
    harmless. The end of a chord's last member can take Celery up to ``result_chord_join_timeout``. An eager task is
    stored only where ``task_store_eager_result`` says so.

    Args:
        task: The skipped task.
        request: Its request.
        error: Why. It is stored, for the followers too, so it must hold no secret.
    """
    if request.is_eager and not task.store_eager_result:
        return
    ends = [_End(task.backend, request, ignored=_ignored(task, vars(request))), *_never_run(task, request)]
    # All results before any part: a chord that completes looks up its members and waits for those that have none.
    # Not mark_as_revoked() and mark_as_failure(): they do both at once, and each leaves some followers waiting.
    for end in ends:
        if end.request.chord or not end.ignored:
            end.backend.store_result(end.request.id, error, states.REVOKED, request=end.request)
    for end in ends:
        if end.request.chord:
            end.backend.on_chord_part_return(_with_body_id(end.request), states.REVOKED, error)


def has_backend(task: ResultTask) -> bool:
    """Is there a result backend? Without one, Celery's raises ``NotImplementedError`` or ``AttributeError``."""
    return not isinstance(task.backend, DisabledBackend)


def stored_failure(task: ResultTask, task_id: str) -> tuple[Any, str | None] | None:
    """The exception and traceback of a task that has failed; None for any other state, or if that cannot be told."""
    if not has_backend(task):
        return None
    try:
        stored = task.backend.get_task_meta(task_id, cache=False)
    except Exception:  # noqa: BLE001  # whatever the backend raises
        return None
    return (stored.get("result"), stored.get("traceback")) if stored.get("status") == states.FAILURE else None


def store_started(task: ResultTask, request: Any) -> None:
    """Store STARTED as Celery does for ``track_started``, unless the result is ignored."""
    if not _ignored(task, vars(request)):
        meta = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(request.id, meta, states.STARTED, request=request)


def store_queued(task: ResultTask, request: Any, position: int, reason: str, *, copied: bool) -> None:
    """Store that the task waits for its turn, unless its result is ignored. ``get()`` goes on waiting.

    Args:
        task: The task.
        request: Its request.
        position: Its place among those who wait.
        reason: Why it waits.
        copied: Another copy of the message may have run, so an end that is stored already stays.
    """
    if _ignored(task, vars(request)) or not has_backend(task):
        return
    if not copied or task.backend.get_state(request.id) not in states.READY_STATES:
        meta = {"position": position, "reason": reason}
        task.backend.store_result(request.id, meta, QUEUED, request=request)


class _End(NamedTuple):
    """One task that ends here."""

    backend: Backend
    request: Any  # a Context; celery-types has its chain and chord as texts, which they never are
    ignored: bool


def _never_run(task: ResultTask, request: Any) -> Iterator[_End]:
    for signature in _followers(request.chain or (), request.chord):
        options = signature["options"]
        # None where it belongs to another app: then nothing but its options is known of it.
        follower = task.app.tasks.get(signature["task"])
        yield _End(
            follower.backend if follower else task.backend,
            # The request that it would have had, as Celery's own failing of chains makes it up.
            Context({**signature, **options, "id": options["task_id"], "group": options.get("group_id")}),
            ignored=_ignored(follower, options),
        )


def _with_body_id(request: Any) -> Any:
    """The request of a chord member, its chord's body with an id.

    Celery 5.5 and 5.6 fail a chord by the id of its body, and raise ValueError where that is a chain without one.
    """
    options = request.chord.get("options") or {}
    if options.get("task_id") or not (task_id := _last_id(request.chord)):
        return request
    return Context(vars(request), chord={**request.chord, "options": {**options, "task_id": task_id}})


def _last_id(signature: Signature) -> str | None:
    """The id by which the result is read."""
    own = (signature.get("options") or {}).get("task_id")
    return own or next(filter(None, map(_last_id, reversed(_parts(signature) or []))), None)


def _ignored(task: ResultTask | None, options: Mapping[str, Any]) -> bool:
    explicit = options.get("ignore_result")
    if explicit is None and task is not None:
        explicit = task.ignore_result
    return bool(explicit)


def _followers(chain: Iterable[Signature], body: Signature | None) -> Iterator[Signature]:
    """The single tasks that would have run after one with this chain and this chord body, each once."""
    seen = set()
    pending = deque((later, False) for later in chain)
    if body:
        pending.append((body, True))
    while pending:
        signature, is_body = pending.popleft()
        options = signature.get("options") or {}
        pending.extend((later, False) for later in options.get("chain") or ())
        parts = _parts(signature)
        if parts is not None:
            pending.extend((part, False) for part in parts)
            continue
        task_id, outer_body = options.get("task_id"), options.get("chord")
        # All members of a group lead to the same body: it is followed once.
        if not task_id or task_id in seen:
            continue
        seen.add(task_id)
        if outer_body:
            pending.append((outer_body, True))
        # Celery ends the plain body of a failed chord itself, but it never returns its part to an outer chord.
        if outer_body or not is_body:
            yield signature


def _parts(signature: Signature) -> list[Signature] | None:
    """What a canvas would have run, without the header of a chord; None for a single task."""
    kind, kwargs = signature.get("subtask_type"), signature.get("kwargs") or {}
    if kind == "chord":
        return [kwargs["body"]] if kwargs.get("body") else []
    if kind in {"group", "chain"}:
        return list(kwargs["tasks"])
    return None
