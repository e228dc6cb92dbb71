"""Claims (``unique=``): reserve a call's lock name before its message is published, or refuse the call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from celery import states
from celery.app.task import Context
from celery.result import AsyncResult
from celery.utils import uuid

from ..errors import LockHeld, LockKeyError, ScriptStopped, StoreRefused, StoreUnavailable
from ..keys.lock_name import LockName
from ..messaging.message_times import start_delay
from ..messaging.results import CallSkipped, has_backend, store_revoked, try_end
from ..options.durations import as_seconds
from ..options.lock_options import LockOptions
from ..runtime import Runtime
from ..store.claim_model import ClaimRequest, ExistingCall
from ..store.model import CUT, Identity, Requester
from ..utils.log import log_fields, logger
from .call_options import ARGUMENT, OPTIONS_HEADER, Call, call_of, headers_for

if TYPE_CHECKING:
    from .base import SingletonTask

__all__ = ["BatchClaim", "claiming_call", "publish", "release_claim"]


#: The positional arguments of Celery's ``apply_async``, in their order.
_POSITIONAL: Final = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")


#: The answer for a call that is published without a claim, because the store is unavailable.
_UNCLAIMED: Final = "unclaimed"
#: The call that has the name; None: the name is claimed.
_Answer = ExistingCall | Literal["unclaimed"] | None
#: The answers to claims that a group made for its members, by task id.
_batch_answers: ContextVar[dict[str, _Answer] | None] = ContextVar("celery_dlock_batch_answers", default=None)


class _ClaimingCall(NamedTuple):
    """A call that claims its name.

    Args:
        task: The task that is called.
        name: The call's lock name.
        options: The call's options.
        request: The claim, as the store receives it.
        follows: Whether Celery publishes the call after another task has run. Then an error would reach no caller.
    """

    task: SingletonTask
    name: LockName
    options: LockOptions
    request: ClaimRequest
    follows: bool

    @property
    def never_refused(self) -> bool:
        """Whether the call continues a run (``self.retry()``, ``self.replace()``), whose work is half done."""
        return self.request.generation > 0

    def held_by(self, first: ExistingCall) -> LockHeld:
        return LockHeld(f"{self.name}: {first}", self.name.text, first.task_id, first.node, first.since)


def claiming_call(task: SingletonTask, headers: Mapping[str, Any] | None) -> Call | None:
    """Return the options of a call that claims its name when it is published; None for any other call."""
    if not task.lock_options.claims and OPTIONS_HEADER not in (headers or ()):
        return None
    call = call_of(task, headers)
    return call if call.enabled and call.options.claims else None


def publish(
    task: SingletonTask, send: Callable[..., AsyncResult[Any]], args: tuple[Any, ...], options: dict[str, Any]
) -> AsyncResult[Any]:
    """Publish a call, unless another call has its name.

    Args:
        task: The task that is called.
        send: Celery's ``apply_async``.
        args: The positional arguments of ``apply_async``.
        options: Its keyword arguments.

    Returns:
        The result of the call, or of the call that has the name (``on_duplicate="return"``).

    Raises:
        LockHeld: Another call has the name, and ``on_duplicate`` is ``"raise"``. Or a ``Lock`` has the
            name, so there is no result to return.
        LockKeyError: The arguments give no lock name.
        StoreUnavailable: The store did not answer, and ``on_store_error`` is neither ``"run"`` nor ``"local"``. A call
            that follows another task or continues a run is published without a claim instead.
    """
    call = claiming_call(task, options.get("headers"))
    if call is None or task.app.conf.task_always_eager:
        return send(*args, **options)
    given = {**dict(zip(_POSITIONAL, args, strict=False)), **options}
    id_given = given.get("task_id") is not None
    given["task_id"] = task_id = given.get("task_id") or uuid()
    claiming = _claiming_call(task, call, given)
    if claiming is None:
        return send(**given)
    answered = _batch_answers.get() or {}
    answer = answered.pop(task_id) if task_id in answered else _answers([claiming])[0]
    if isinstance(answer, ExistingCall) and not claiming.never_refused:
        return _refused(claiming, answer, given, id_given=id_given)
    try:
        return send(**given)
    except BaseException:
        if answer is None:
            _release([claiming])
        raise


def release_claim(task: SingletonTask, name: LockName, identity: Identity) -> bool:
    """Release the claim of a message that has started or ended.

    Returns:
        False if the store did not answer. Unless this is called again, the claim then ends after ``queued_ttl``.
    """
    try:
        task.dlock.lock_store.release_claim(name, identity.task_id, identity.generation)
    except StoreUnavailable as error:
        logger.warning(
            "Task %s[%s] cannot release its claim of %s, which ends after queued_ttl at the latest: %s",
            task.name, identity.task_id, name, error, extra=log_fields(task.name, identity.task_id, name.text),
        )  # fmt: skip
        return False
    return True


class BatchClaim:
    """The claims of a group's calls, made together: one round trip for many calls.

    Args:
        calls: For each call, its task and the arguments of its ``apply_async``.

    Raises:
        LockHeld: A call is refused and its ``on_duplicate`` is ``"raise"``. No name is claimed then.
        StoreUnavailable: The store did not answer, and ``on_store_error`` of a call is neither ``"run"`` nor
            ``"local"``. A call that follows another task or continues a run does not cause this error.
    """

    def __init__(self, calls: Iterable[tuple[SingletonTask, dict[str, Any]]]) -> None:
        self._calls: dict[str, _ClaimingCall] = {}
        for task, given in calls:
            call = claiming_call(task, headers_for(task, given.get(ARGUMENT), given.get("headers")))
            claiming = _claiming_call(task, call, given) if call is not None else None
            if claiming is not None:
                self._calls[claiming.request.task_id] = claiming
        self._answers: dict[str, _Answer] = dict(zip(self._calls, _answers(list(self._calls.values())), strict=True))
        for task_id, answer in self._answers.items():
            claiming = self._calls[task_id]
            if isinstance(answer, ExistingCall) and claiming.options.on_duplicate == "raise" and not claiming.follows:
                self.release_unpublished()
                raise claiming.held_by(answer)

    def enter(self) -> None:
        """Make the answers available to :func:`publish` in this context."""
        self._outer = _batch_answers.get()
        _batch_answers.set(self._answers)

    def leave(self) -> None:
        """Restore the answers of the group around this one."""
        # Not ContextVar.reset: the caller is a generator. It may be closed in another context, where reset() refuses
        # the token of set().
        _batch_answers.set(self._outer)

    def release_unpublished(self) -> None:
        """Release the claims of the calls that were not published."""
        _release([self._calls[task_id] for task_id, answer in self._answers.items() if answer is None])


def _claiming_call(task: SingletonTask, call: Call, given: Mapping[str, Any]) -> _ClaimingCall | None:
    """Return the claim of a call; None if it follows another task and has no lock name, so the worker will fail it."""
    args, kwargs = given.get("args") or (), given.get("kwargs") or {}
    # Celery passes parent_id to apply_async only for a call that it publishes after another task has run, such as the
    # next step of a chain. No caller would see an error of that call.
    follows = given.get("parent_id") is not None
    # Raises Celery's own TypeError for wrong arguments. A class-based task has no __header__.
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
    life = as_seconds(call.options.queued_ttl) + start_delay(given)
    request = ClaimRequest(
        task_id,
        Identity.of(task_id, given).generation,
        round(life * 1000),
        call.options.unique == "queued+running",
        Requester.of(task.name, task_id, runtime.node, os.getpid()),
        uuid(),
    )
    return _ClaimingCall(task, name, call.options, request, follows)


def _answers(calls: list[_ClaimingCall]) -> list[_Answer]:
    if not calls:
        return []
    runtime = calls[0].task.dlock
    try:
        return _claim(runtime, calls)
    except StoreUnavailable as error:
        goes_on = ("run", "local")
        if not all(call.options.on_store_error in goes_on or call.follows or call.never_refused for call in calls):
            raise
        for call in calls:
            name, task_id = call.task.name, call.request.task_id
            logger.warning(
                "Task %s[%s] is published without a claim of %s: %s", name, task_id, call.name, error,
                extra=log_fields(name, task_id, call.name.text),
            )  # fmt: skip
        return [_UNCLAIMED] * len(calls)


def _refused(
    claiming: _ClaimingCall, first: ExistingCall, given: Mapping[str, Any], *, id_given: bool
) -> AsyncResult[Any]:
    task, task_id, held = claiming.task, claiming.request.task_id, claiming.held_by(first)
    facts = {"task": task.name, "task_id": task_id, "reason": held.message}
    task.dlock.listeners.emit("refused", name=claiming.name.text, owner="", **facts)
    if first.task_id is not None and len(first.task_id) >= CUT:
        first = replace(first, task_id=None)  # cut to CUT characters, so it identifies no result
    wants_error = claiming.options.on_duplicate == "raise" and not claiming.follows
    if wants_error or (first.task_id is None and not id_given):
        raise held
    logger.info(
        "Task %s[%s] is not published: %s", task.name, task_id, held.message,
        extra=log_fields(task.name, task_id, claiming.name.text),
    )  # fmt: skip
    if id_given and first.task_id != task_id and not _id_may_be_in_use(claiming, given):
        # The caller or a canvas knows this id. If no end were stored, waiting for its result would never return.
        try_end(task, task_id, lambda: store_revoked(task, _request(task, given), CallSkipped(*held.args)))
    return task.AsyncResult(first.task_id or task_id)


def _id_may_be_in_use(claiming: _ClaimingCall, given: Mapping[str, Any]) -> bool:
    """Return whether an earlier call may have this id. If so, its stored end must not be overwritten."""
    # Celery gives every call in a canvas a new id.
    if any(given.get(of) for of in ("group_id", "chord", "chain", "parent_id")):
        return False
    task, task_id = claiming.task, claiming.request.task_id
    if not has_backend(task):
        return True  # without a result backend, there is no end to store
    if task.backend.get_state(task_id) != states.PENDING:
        return True
    holder = task.dlock.lock_client.holder(claiming.name)
    return holder is not None and holder.task_id == task_id[:CUT]


def _request(task: SingletonTask, given: Mapping[str, Any]) -> Context:
    """Return the request that the call would have had, without its arguments, which may hold secrets."""
    named = ("chain", "chord", "group_index", "ignore_result", "parent_id", "root_id")
    facts = {name: given[name] for name in named if given.get(name) is not None}
    origin = {"reply_to": given.get("reply_to") or task.app.thread_oid}  # over rpc://, the end is sent there
    return Context({**facts, **origin, "id": given["task_id"], "group": given.get("group_id")})


def _claim(runtime: Runtime, calls: list[_ClaimingCall]) -> list[_Answer]:
    try:
        return list(runtime.lock_store.claim([(call.name, call.request) for call in calls]))
    except BaseException as error:
        # Unless the store refused, the server may have the claims already, or receive them later. This also holds if
        # a time limit or a signal interrupted the call, or if the script stopped in its middle.
        if not isinstance(error, StoreRefused) or isinstance(error, ScriptStopped):
            for call in calls:
                runtime.claim_rollback.take_back(call.name, call.request)
        raise


def _release(calls: Iterable[_ClaimingCall]) -> None:
    for call in calls:
        request = call.request
        try:
            call.task.dlock.lock_store.release_claim(call.name, request.task_id, request.generation)
        except StoreUnavailable:
            call.task.dlock.claim_rollback.take_back(call.name, request)
