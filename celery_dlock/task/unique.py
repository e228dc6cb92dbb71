"""A call claims its lock's name before its message is published (``unique=``), and who was refused is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, NamedTuple

from celery import states
from celery.app.task import Context
from celery.result import AsyncResult
from celery.utils import uuid

from ..errors import LockHeld, LockKeyError, StoreRefused, StoreUnavailable
from ..keys.lock_name import LockName
from ..messaging.message_times import seconds_until
from ..messaging.results import CallSkipped, has_backend, store_revoked
from ..options.lock_options import LockOptions
from ..options.validation import as_seconds
from ..runtime import Runtime
from ..store.model import CUT, ClaimRequest, ExistingCall, Identity, Requester
from ..utils.log import logger
from .call_options import ARGUMENT, OPTIONS_HEADER, Call, LockedTask, call_of, headers_for

__all__ = ["BatchClaim", "claiming_call", "publish", "release_claim"]


#: As Celery's apply_async takes them.
_POSITIONAL: Final = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")


class _NotAsked:
    """The store is away, and the call is published without a claim."""


_Answer = ExistingCall | _NotAsked | None
_NOT_ASKED: Final = _NotAsked()
_together: ContextVar[dict[str, _Answer] | None] = ContextVar("celery_dlock_together", default=None)


class _Wanted(NamedTuple):
    """One call that wants its name."""

    task: LockedTask
    name: LockName
    options: LockOptions
    publication: ClaimRequest
    follows: bool

    @property
    def bears_no_refusal(self) -> bool:
        """``self.retry()`` or ``self.replace()``: its work is half done."""
        return self.publication.turn > 0

    def held_by(self, first: ExistingCall) -> LockHeld:
        return LockHeld(f"{self.name}: {first}", self.name.text, first.task_id, first.node, first.since)


def claiming_call(task: LockedTask, headers: Mapping[str, Any] | None) -> Call | None:
    """A call's options, if it claims its name when it is published."""
    if not task.lock_options.claims and OPTIONS_HEADER not in (headers or ()):
        return None
    call = call_of(task, headers)
    return call if call.enabled and call.options.claims else None


def publish(
    task: LockedTask, send: Callable[..., AsyncResult[Any]], args: tuple[Any, ...], options: dict[str, Any]
) -> AsyncResult[Any]:
    """Publish a call, if its name is free.

    Args:
        task: Whose call it is.
        send: Celery's ``apply_async``.
        args: Its positional arguments.
        options: Its others.

    Raises:
        LockHeld: The name is another call's, and the task wants to be told so; or it is a ``Lock``'s, of which there
            is no result.
        LockKeyError: The call has no lock name.
        StoreUnavailable: The store could not be asked, and the task may not be published without a claim.
    """
    call = claiming_call(task, options.get("headers"))
    if call is None or task.app.conf.task_always_eager:
        return send(*args, **options)
    given = {**dict(zip(_POSITIONAL, args, strict=False)), **options}
    awaited = given.get("task_id") is not None
    given["task_id"] = task_id = given.get("task_id") or uuid()
    wanted = _wanted(task, call, given)
    if wanted is None:
        return send(**given)
    asked_before = _together.get() or {}
    answer = asked_before.pop(task_id) if task_id in asked_before else _ask(wanted)
    if isinstance(answer, ExistingCall) and not wanted.bears_no_refusal:
        return _refused(wanted, answer, given, awaited=awaited)
    try:
        return send(**given)
    except BaseException:
        if answer is None:
            _give_back([wanted])
        raise


def release_claim(runtime: Runtime, name: LockName, identity: Identity) -> bool:
    """Give up the claim of a message that has started or ended; false if the store did not hear of it."""
    turn = ClaimRequest.generation_of(identity.retries, identity.nesting)
    try:
        runtime.claims.unclaim(name, identity.task_id, turn)
    except StoreUnavailable as error:
        logger.warning("the claim of %s is not given up: %s", name, error)
        return False
    return True


class BatchClaim:
    """Calls of one canvas that claim their names in one write.

    Args:
        calls: Of each its task and the arguments of its ``apply_async``.

    Raises:
        LockHeld: One of them is refused and wants to be told so. Nothing is claimed then.
        StoreUnavailable: The store could not be asked, and not all may be published without a claim.
    """

    def __init__(self, calls: Iterable[tuple[LockedTask, dict[str, Any]]]) -> None:
        self._wanted: dict[str, _Wanted] = {}
        for task, given in calls:
            chosen, headers = given.get(ARGUMENT), given.get("headers")
            call = claiming_call(task, headers if chosen is None else headers_for(task, chosen, headers))
            wanted = _wanted(task, call, given) if call is not None else None
            if wanted is not None:
                self._wanted[wanted.publication.task_id] = wanted
        self._answers: dict[str, _Answer] = dict(zip(self._wanted, _answers(list(self._wanted.values())), strict=True))
        for task_id, answer in self._answers.items():
            wanted = self._wanted[task_id]
            if isinstance(answer, ExistingCall) and wanted.options.on_duplicate == "raise" and not wanted.follows:
                self.give_back()
                raise wanted.held_by(answer)

    def enter(self) -> None:
        """Let the calls of this context that are published now find their claims."""
        self._outer = _together.get()
        _together.set(self._answers)

    def leave(self) -> None:
        # Not by a token: whoever closes a generator may do so in another context.
        _together.set(self._outer)

    def give_back(self) -> None:
        """Give back the claims of those that were not published."""
        _give_back([self._wanted[task_id] for task_id, answer in self._answers.items() if answer is None])


def _wanted(task: LockedTask, call: Call, given: Mapping[str, Any]) -> _Wanted | None:
    """None where it is not to be claimed, and a worker will say why."""
    args, kwargs = given.get("args") or (), given.get("kwargs") or {}
    # Celery publishes it for a task that has run: nobody is there to be told of an error.
    follows = given.get("parent_id") is not None
    # Raises the TypeError that Celery's callers know. Celery gives it to functions; a class-based task has none.
    check_arguments: Callable[..., object] | None = getattr(task, "__header__", None)
    if check_arguments is not None and task.typing and not follows:
        check_arguments(*args, **kwargs)
    dump = getattr(task, "_dump_pydantic_arguments", None)
    if dump is not None and given.get("serializer", task.serializer) != "pickle":
        args, kwargs = dump(args, kwargs)
    try:
        name = call.name_of(args, kwargs)
    except LockKeyError:
        if follows:
            return None
        raise
    runtime, task_id = task.dlock, given["task_id"]
    life = as_seconds(call.options.queued_ttl) + _delay(given)
    publication = ClaimRequest(
        task_id,
        ClaimRequest.generation_of(given.get("retries") or 0, given.get("replaced_task_nesting") or 0),
        round(life * 1000),
        call.options.unique == "queued+running",
        Requester.of(task.name, task_id, runtime.node, os.getpid()),
        uuid(),
        runtime.settings.confirmed_by(call.options.confirmation),
    )
    return _Wanted(task, name, call.options, publication, follows)


def _delay(given: Mapping[str, Any]) -> float:
    """Seconds until its ETA."""
    if given.get("countdown"):
        return max(0.0, float(given["countdown"]))
    return max(0.0, seconds_until(given.get("eta") or None) or 0.0)


def _ask(wanted: _Wanted) -> _Answer:
    return _answers([wanted])[0]


def _answers(calls: list[_Wanted]) -> list[_Answer]:
    if not calls:
        return []
    runtime = calls[0].task.dlock
    try:
        return _told(runtime, calls)
    except StoreUnavailable as error:
        if not all(call.options.on_store_error == "run" or call.follows or call.bears_no_refusal for call in calls):
            raise
        for call in calls:
            name, task_id = call.task.name, call.publication.task_id
            logger.warning("Task %s[%s] is published without a claim of %s: %s", name, task_id, call.name, error)
        return [_NOT_ASKED] * len(calls)


def _refused(wanted: _Wanted, first: ExistingCall, given: Mapping[str, Any], *, awaited: bool) -> AsyncResult[Any]:
    task, task_id, held = wanted.task, wanted.publication.task_id, wanted.held_by(first)
    facts = {"task": task.name, "task_id": task_id, "reason": held.message}
    task.dlock.listeners.tell("refused", name=wanted.name.text, owner="", **facts)
    if first.task_id is not None and len(first.task_id) >= CUT:
        first = replace(first, task_id=None)  # cut: its result cannot be named
    wants_error = wanted.options.on_duplicate == "raise" and not wanted.follows
    if wants_error or (first.task_id is None and not awaited):
        raise held
    logger.info("Task %s[%s] is not published: %s", task.name, task_id, held.message)
    if awaited and first.task_id != task_id and not _lives(wanted, given):
        # Somebody has this id, a canvas perhaps: what waits for it must not wait for ever.
        store_revoked(task, _request(given), CallSkipped(*held.args))
    return task.AsyncResult(first.task_id or task_id)


def _lives(wanted: _Wanted, given: Mapping[str, Any]) -> bool:
    """Is there an earlier call of this id, whose end it would be? Not in a canvas, whose ids are its own."""
    if any(given.get(of) for of in ("group_id", "chord", "chain", "parent_id")):
        return False
    task, task_id = wanted.task, wanted.publication.task_id
    if not has_backend(task):
        return True  # nobody can wait for it
    if task.backend.get_state(task_id) != states.PENDING:
        return True
    holder = task.dlock.locker.holder(wanted.name)
    return holder is not None and holder.task_id == task_id[:CUT]


def _request(given: Mapping[str, Any]) -> Context:
    """The request that the call would have had, without its arguments, which may be secrets."""
    named = ("chain", "chord", "group_index", "ignore_result", "parent_id", "root_id")
    facts = {name: given[name] for name in named if given.get(name) is not None}
    return Context({**facts, "id": given["task_id"], "group": given.get("group_id")})


def _told(runtime: Runtime, calls: list[_Wanted]) -> list[_Answer]:
    try:
        return list(runtime.claims.claim([(call.name, call.publication) for call in calls]))
    except BaseException as error:
        # Also where a limit or a signal struck: the server may have it, or get it later.
        if not isinstance(error, StoreRefused):
            for call in calls:
                runtime.unsure_claims.take_back(call.name, call.publication)
        raise


def _give_back(calls: Iterable[_Wanted]) -> None:
    for call in calls:
        publication = call.publication
        try:
            call.task.dlock.claims.unclaim(call.name, publication.task_id, publication.turn)
        except StoreUnavailable:
            call.task.dlock.unsure_claims.take_back(call.name, publication)
