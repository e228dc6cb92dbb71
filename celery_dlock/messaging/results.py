"""Task states that Celery's tracer does not store: of skipped and parked tasks, and STARTED at a body's real start."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Task, states
from celery.app.task import Context
from celery.backends.base import Backend, DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, TaskRevokedError

from ..errors import CallNotRun
from ..utils.log import log_fields, logger
from .message_checks import MALFORMED

__all__ = [
    "END_WITHIN",
    "QUEUED",
    "CallSkipped",
    "Replaced",
    "has_backend",
    "has_end",
    "replaces_no_end",
    "store_queued",
    "store_revoked",
    "store_started",
    "stored_failure",
    "try_end",
]

#: The state of a parked task.
QUEUED = "QUEUED"
#: Seconds for which a process tries to store an end that the result backend does not take. A call that ends so occupies
#: its pool slot.
END_WITHIN: Final = 10.0
#: Seconds between two such tries: at first, and at most.
_END_DELAY, _END_DELAY_MAX = 0.1, 1.0

Signature = Mapping[str, Any]  # as in a message
_Task: TypeAlias = "Task[..., Any]"


# Not in `errors`, because that module does not import Celery.
class CallSkipped(CallNotRun, TaskRevokedError):
    """The call was skipped. Its state is REVOKED, as is that of every part of its canvas that can never run.

    A call that an operator revoked, or that expired, raises ``TaskRevokedError`` itself.
    """

    # Result backends store this path, and processes of other versions read it.
    __module__ = "celery_dlock"


class Replaced(Ignore):
    """A newer call replaces the running one (``on_conflict="replace"``). Clean up, and let this exception pass.

    It derives from Celery's ``Ignore``, so ``autoretry_for=(Exception,)`` does not catch it. The task ends REVOKED.

    Args:
        message: The newer call, as text for people.
        name: The lock name; None if it is unknown.
        task_id: The task id of the newer call; None if it is unknown.
    """

    __module__ = "celery_dlock"

    def __init__(
        self,
        message: str = "a newer call replaces the running task",
        name: str | None = None,
        task_id: str | None = None,
    ) -> None:
        super().__init__(message, name, task_id)
        self.message = message
        self.name = name
        self.task_id = task_id

    def __str__(self) -> str:
        return self.message


def store_revoked(task: _Task, request: Context, error: TaskRevokedError) -> None:
    """Store REVOKED for a task that does not run, and for every task that can never run because of that.

    The process that skips the task calls this before it raises ``Ignore``. ``Ignore`` alone would leave the task
    PENDING, and its chain and its chord would wait for ever.

    REVOKED is stored for:

    - the task itself;
    - every later member of its chain: groups, nested chains, chords with their headers;
    - the tasks after a chord that can no longer complete, and those after the chords that contain this chord.

    It is not stored for a task whose result is ignored, unless the task is a member of a chord. The chord looks up the
    ends of its members, so each member's part is also returned to its chord. Links and errbacks do not run.

    Celery's own limits stay:

    - The body of a chord with a skipped member becomes FAILURE with ``ChordError`` when the whole header has ended.
      Then Celery calls that body's errbacks.
    - A body that is a canvas, or that belongs to an outer chord, is REVOKED at once. Celery may also end some of the
      body's tasks with FAILURE; newer versions do so for more of them.
    - Chains of task protocol 1 consist of links, so their later members are not ended.

    An error of the result backend is not caught (:func:`try_end`). Some ends may be stored then, and a second call is
    harmless. The end of a chord's last member can take up to ``result_chord_join_timeout``. The end of an eager task is
    stored only with ``task_store_eager_result``.

    Args:
        task: The skipped task.
        request: Its request.
        error: The reason. It is stored for the later tasks too, so it must contain no secret.
    """
    if request.is_eager and not task.store_eager_result:
        return
    ends = [_End(task.backend, request, ignored=_ignored(task, vars(request))), *_never_run(task, request)]
    # Store all results before returning any part: a chord that completes waits for members without a result.
    # mark_as_revoked() and mark_as_failure() do both at once, and each leaves some later tasks waiting.
    for end in ends:
        if end.request.chord or not end.ignored:
            end.backend.store_result(end.request.id, error, states.REVOKED, request=end.request)
    for end in ends:
        if end.request.chord:
            end.backend.on_chord_part_return(_with_body_id(end.request), states.REVOKED, error)


def try_end(
    task: _Task, task_id: str, store: Callable[[], object], within: float = END_WITHIN, *, gives_up: bool = True
) -> bool | None:
    """Store an end. If the result backend does not take it, try again for some time, and then log an error.

    Args:
        task: The task that has ended.
        task_id: Its id.
        store: Stores the end. It may be called repeatedly.
        within: Seconds after which the last try begins; 0: try once.
        gives_up: False: log a warning instead of an error, because the caller tries again later.

    Returns:
        Whether the end is stored; None if a later try may store it, and ``gives_up`` is false.
    """
    until, delay = time.monotonic() + within, _END_DELAY
    while True:
        try:
            store()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # each result backend raises errors of its own
            # A later try cannot store the end of a malformed canvas. A refused certificate is a ValueError too.
            malformed = isinstance(error, MALFORMED) and not isinstance(error, OSError)
            if not malformed and time.monotonic() + delay <= until:
                time.sleep(delay)
                delay = min(2 * delay, _END_DELAY_MAX)
                continue
            fields = log_fields(task.name, task_id)
            if malformed or gives_up:
                logger.exception(
                    "Task %s[%s] has ended, but its end cannot be stored. Its result, or that of a task after it, "
                    "may stay pending", task.name, task_id, extra=fields,
                )  # fmt: skip
                return False
            logger.warning(
                "Task %s[%s] has ended, but its end cannot be stored; retrying: %s", task.name, task_id, error,
                extra=fields,
            )  # fmt: skip
            return None
        return True


def has_backend(task: _Task) -> bool:
    """Return whether there is a result backend. Without one, Celery's ``DisabledBackend`` raises on every call."""
    return not isinstance(task.backend, DisabledBackend)


def has_end(task: _Task, task_id: str) -> bool:
    """Return whether the end of a task is stored. An error of the result backend is not caught.

    Over ``rpc://`` that is unknown, and the answer is False: only the process that published the call can read it.
    """
    return _is_readable(task.backend) and task.backend.get_state(task_id) in states.READY_STATES


def _is_readable(backend: Any) -> bool:
    return not isinstance(backend, DisabledBackend | RPCBackend)


def stored_failure(task: _Task, task_id: str) -> tuple[Any, str | None] | None:
    """Return the exception and traceback of a failed task; None for another state, or if the backend fails."""
    if not has_backend(task):
        return None
    try:
        stored = task.backend.get_task_meta(task_id, cache=False)
    except Exception:  # noqa: BLE001  # each result backend raises errors of its own
        return None
    return (stored.get("result"), stored.get("traceback")) if stored.get("status") == states.FAILURE else None


def store_started(task: _Task, request: Any) -> None:
    """Store STARTED as Celery does for ``track_started``, unless the result is ignored."""
    if not _ignored(task, vars(request)):
        meta = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(request.id, meta, states.STARTED, request=request)


def store_queued(task: _Task, request: Any, position: int, reason: str, *, copied: bool) -> None:
    """Store QUEUED for a parked task, unless its result is ignored. ``get()`` keeps waiting.

    If :func:`replaces_no_end` is true, call this after the message is parked. Otherwise, call it before: a granted call
    may end at any time, and QUEUED must not replace its end.

    Args:
        task: The task.
        request: Its request.
        position: Its position in the queue.
        reason: The reason for which it waits.
        copied: A duplicate of the message may have run, so a stored end must not be overwritten.
    """
    backend, meta = task.backend, {"position": position, "reason": reason}
    if _ignored(task, vars(request)) or not has_backend(task):
        return
    if replaces_no_end(task):
        _store_unless_ended(backend, request, meta)
    elif not copied or (_is_readable(backend) and not has_end(task, request.id)):
        backend.store_result(request.id, meta, QUEUED, request=request)


def replaces_no_end(task: _Task) -> bool:
    """Return whether the result backend can store QUEUED only if no end is stored, in one step: Redis can."""
    # If the module is not loaded, the backend is another one. To import it would load the Redis driver.
    module = sys.modules.get("celery.backends.redis")
    return module is not None and isinstance(task.backend, module.RedisBackend)


def _store_unless_ended(backend: Any, request: Any, meta: Mapping[str, Any]) -> None:
    """Store QUEUED as Celery's Redis backend stores any state, in a transaction that fails if another state comes."""
    key = backend.get_key_for_task(request.id)
    stored_meta = {**backend._get_result_meta(meta, QUEUED, None, request), "task_id": request.id}  # noqa: SLF001
    text = backend.encode(stored_meta)

    def store(pipe: Any) -> None:
        stored = pipe.get(key)
        pipe.multi()
        if stored is None or backend.decode_result(stored)["status"] not in states.READY_STATES:
            pipe.set(key, text, ex=backend.expires or None)
            pipe.publish(key, text)

    backend.client.transaction(store, key)  # repeats itself if the key changes meanwhile


class _End(NamedTuple):
    """One task that ends here."""

    backend: Backend
    request: Any  # a Context; celery-types declares its chain and chord as str, which is wrong
    ignored: bool


def _never_run(task: _Task, request: Any) -> Iterator[_End]:
    for signature, unsent in _followers(request.chain or (), request.chord):
        options = signature["options"]
        # None if the task belongs to another app. Then only its options are known.
        follower = task.app.tasks.get(signature["task"])
        # The request that the task would have had, made as Celery does when it fails a chain.
        known = {**signature, **options, "id": options["task_id"], "group": options.get("group_id")}
        # Over rpc://, the end is sent to the process that published the canvas.
        known["reply_to"] = options.get("reply_to") or request.reply_to
        if unsent:
            known["chord"] = None  # a chord that was never sent counts no ends
        yield _End(follower.backend if follower else task.backend, Context(known), ignored=_ignored(follower, options))


def _with_body_id(request: Any) -> Any:
    """Return the request of a chord member, with an id for its chord's body.

    Celery 5.5 and 5.6 fail a chord by the id of its body. If the body is a chain without an id, they raise ValueError.
    """
    options = request.chord.get("options") or {}
    if options.get("task_id") or not (task_id := _last_id(request.chord)):
        return request
    return Context(vars(request), chord={**request.chord, "options": {**options, "task_id": task_id}})


def _last_id(signature: Signature) -> str | None:
    """Return the id under which a caller reads the result."""
    own = (signature.get("options") or {}).get("task_id")
    return own or next(filter(None, map(_last_id, reversed(_parts(signature) or []))), None)


def _ignored(task: _Task | None, options: Mapping[str, Any]) -> bool:
    explicit = options.get("ignore_result")
    if explicit is None and task is not None:
        explicit = task.ignore_result
    return bool(explicit)


def _followers(chain: Iterable[Signature], body: Signature | None) -> Iterator[tuple[Signature, bool]]:
    """Yield each single task that would have run after a task with this chain and this chord body, once.

    With each task comes whether it is in the header of a chord that is never sent.
    """
    seen = set()
    pending = deque((later, False, False) for later in chain)
    if body:
        pending.append((body, True, False))
    while pending:
        signature, is_body, unsent = pending.popleft()
        options = signature.get("options") or {}
        pending.extend((later, False, unsent) for later in options.get("chain") or ())
        parts = _parts(signature)
        if parts is not None:
            pending.extend((part, False, unsent) for part in parts)
            pending.extend((member, False, True) for member in _header(signature))
            continue
        task_id, outer_body = options.get("task_id"), None if unsent else options.get("chord")
        # All members of a group have the same chord body. Visit it once.
        if not task_id or task_id in seen:
            continue
        seen.add(task_id)
        if outer_body:
            pending.append((outer_body, True, False))
        # Celery itself ends the plain body of a failed chord, but never returns that body's part to an outer chord.
        if outer_body or not is_body:
            yield signature, unsent


def _parts(signature: Signature) -> list[Signature] | None:
    """Return the signatures in a canvas, without the header of a chord; None for a single task."""
    kind, kwargs = signature.get("subtask_type"), signature.get("kwargs") or {}
    if kind == "chord":
        return [kwargs["body"]] if kwargs.get("body") else []
    if kind in {"group", "chain"}:
        return list(kwargs["tasks"])
    return None


def _header(signature: Signature) -> list[Signature]:
    """Return the signatures in the header of a chord; empty for another canvas."""
    header = signature["kwargs"].get("header") if signature.get("subtask_type") == "chord" else None
    return [header] if isinstance(header, Mapping) else list(header or ())
