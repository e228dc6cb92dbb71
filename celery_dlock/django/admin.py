"""Django's admin of the locks: held locks, waiting calls, unknown outcomes and dead letters; and ``LockAdminMixin``."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

from django import forms
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_protect

from ..control import DeadLetter, HolderView, LockControl, LockView, RunView, State, WaiterView
from ..errors import DLockError, LockKeyError
from . import models
from .mixin import LockAdminMixin
from .operations import DROP, HOLD, RELEASE, REQUEUE, SENT, UNHOLD, UNSENT, Operation, Target
from .pages import PAGE, Column, FilterForm, LockPage, opened, permitted, shown, state_of

__all__ = ["LockAdminMixin"]

#: The largest number of entries of a list, over all of its pages: waiting calls, unknown outcomes or dead letters.
MOST: Final = 10_000
#: The largest number of waiting calls on the page of a lock.
FIRST: Final = 20
_HELD: Final[tuple[State, ...]] = ("held", "granted", "kept")

T = TypeVar("T", WaiterView, RunView, DeadLetter)


class HeldLockFilter(FilterForm):
    """The filter of held locks."""

    state = forms.ChoiceField(required=False, choices=[("", "any state"), *((one, one) for one in _HELD)])


@admin.register(models.HeldLock)
class HeldLockAdmin(LockPage):
    """The locks that are held, granted or kept, and the page of one lock."""

    operations = (RELEASE, HOLD, UNHOLD)
    filter_form = HeldLockFilter
    columns: ClassVar[Sequence[Column]] = (
        ("State", state_of),
        ("Task", lambda view: view.holder.task),
        ("Task id", lambda view: view.holder.task_id),
        ("Worker", lambda view: view.holder.operator or view.holder.worker),
        ("Since", lambda view: shown(view.holder.since)),
        ("Expires in", lambda view: f"{view.holder.expires_in:.0f} s"),
        ("Token", lambda view: view.holder.token or ""),
        ("Waiting", lambda view: view.waiting),
    )

    def entries(self, control: LockControl, filters: dict[str, str], cursor: str) -> tuple[Iterable[Any], str]:
        chosen = [state for state in _HELD if state == filters.get("state")]
        page = control.locks(
            name=filters["name"] or None,
            task=filters["task"] or None,
            state=chosen or _HELD,
            cursor=cursor,
            limit=PAGE,
        )
        return [view for view in page.items if view.holder], page.cursor

    def target(self, entry: LockView) -> Target:
        holder = entry.holder
        return Target(entry.name, holder.acquisition, holder.hold) if holder else Target(entry.name, "")

    @method_decorator(csrf_protect)
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show everything about one lock, also about a free one."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        name = unquote(object_id)
        request.current_app = self.admin_site.name
        try:
            with opened(request) as control:
                view = control.lock(name)
                waiters = control.waiting(name, limit=FIRST) if view.waiting else ()
        except LockKeyError as error:
            raise Http404(str(error)) from None
        except DLockError as error:
            return self._unavailable(request, error)
        context = {
            **self.admin_site.each_context(request),
            "title": name,
            "opts": self.opts,
            "object": self.model(name=name),
            "view": view,
            "facts": _facts(view),
            "waiters": [(one, shown(one.since)) for one in waiters],
            "buttons": self._buttons(request, view),
            "checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return TemplateResponse(request, "admin/celery_dlock/lock.html", context)

    def _buttons(self, request: HttpRequest, view: LockView) -> list[dict[str, str]]:
        """Return the actions on a lock that the user may do, each with the page that does it."""
        target = self.target(view)
        found: list[tuple[Any, Operation, Target]] = [(models.HeldLock, HOLD, target)]
        if view.holder:
            found.append((models.HeldLock, RELEASE, target))
            found += [(models.HeldLock, UNHOLD, target)] * bool(view.holder.operator)
        if view.run and view.run.state == "unknown":
            settled = _run_target(view.run)
            found += [(models.UnknownOutcome, SENT, settled), (models.UnknownOutcome, UNSENT, settled)]
        return [
            {"page": _page(model), "action": operation.name, "label": operation.label, "target": about.text}
            for model, operation, about in found
            if permitted(request, model, operation)
        ]


@admin.register(models.WaitingCall)
class WaitingCallAdmin(LockPage):
    """The calls that wait for their lock (``on_conflict="queue"``), by lock and place."""

    operations = (DROP,)
    columns: ClassVar[Sequence[Column]] = (
        ("Place", lambda one: one.position),
        ("State", lambda one: f"{one.state}, due {shown(one.due)}" if one.due else one.state),
        ("Task", lambda one: one.task),
        ("Task id", lambda one: one.task_id),
        ("Since", lambda one: shown(one.since)),
    )

    def entries(self, control: LockControl, filters: dict[str, str], cursor: str) -> tuple[Iterable[Any], str]:
        return _part(control.waiting(limit=MOST), filters, cursor)

    def target(self, entry: WaiterView) -> Target:
        return Target(entry.name, entry.identity)


@admin.register(models.UnknownOutcome)
class UnknownOutcomeAdmin(LockPage):
    """The runs whose process died in the body (``once_per``), the oldest first."""

    operations = (SENT, UNSENT)
    columns: ClassVar[Sequence[Column]] = (
        ("Task", lambda one: one.task),
        ("Task id", lambda one: one.task_id),
        ("Worker", lambda one: one.worker),
        ("Started", lambda one: shown(one.since)),
        ("Idempotency key", lambda one: one.idempotency_key),
    )

    def entries(self, control: LockControl, filters: dict[str, str], cursor: str) -> tuple[Iterable[Any], str]:
        found = sorted(control.unknown_outcomes(limit=MOST), key=lambda one: one.since)
        return _part(found, filters, cursor)

    def target(self, entry: RunView) -> Target:
        return _run_target(entry)


@admin.register(models.DeadLetter)
class DeadLetterAdmin(LockPage):
    """The parked messages that were set aside, the oldest first."""

    operations = (REQUEUE, DROP)
    columns: ClassVar[Sequence[Column]] = (
        ("Task", lambda one: one.task),
        ("Task id", lambda one: one.task_id),
        ("Set aside", lambda one: shown(one.since)),
    )

    def entries(self, control: LockControl, filters: dict[str, str], cursor: str) -> tuple[Iterable[Any], str]:
        found = sorted(control.dead_letters(limit=MOST), key=lambda one: one.since)
        return _part(found, filters, cursor)

    def target(self, entry: DeadLetter) -> Target:
        return Target(entry.name, entry.identity)


def _part(found: Sequence[T], filters: Mapping[str, str], cursor: str) -> tuple[Sequence[T], str]:
    """Return a page of a list that was read as a whole. Its cursor is a number."""
    name, task = filters["name"], filters["task"]
    wanted = [
        one for one in found if (not name or fnmatch.fnmatchcase(one.name, name)) and (not task or one.task == task)
    ]
    start = int(cursor or 0)
    end = start + PAGE
    return wanted[start:end], str(end) if end < len(wanted) else ""


def _run_target(run: RunView) -> Target:
    return Target(run.name, run.mark, run.tick)


def _page(model: Any) -> str:
    return str(reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"))  # noqa: SLF001


def _renewed(holder: HolderView) -> str:
    if holder.state != "held":
        return ""
    return "within half its ttl: its holder is alive" if holder.fresh else "not within half its ttl"


def _facts(view: LockView) -> list[tuple[str, object]]:
    """Return what is known about a lock, as rows of a table."""
    rows: list[tuple[str, object]] = [("States", ", ".join(view.states) or "free")]
    if holder := view.holder:
        rows += [
            ("Holder", state_of(view)),
            ("Task", holder.task),
            ("Task id", holder.task_id),
            ("Worker", f"{holder.worker} (process {holder.pid})" if holder.pid else holder.worker),
            ("Since", shown(holder.since)),
            ("Expires in", f"{holder.expires_in:.0f} s"),
            ("Renewed", _renewed(holder)),
            ("Fencing token", holder.token or ""),
            ("Operator", holder.operator),
            ("Reason", holder.reason),
        ]
    if run := view.run:
        rows += [
            ("Last run", run.state),
            ("Run of", f"{run.task} {run.task_id}"),
            ("Run on", run.worker),
            ("Run since", shown(run.since)),
            ("Idempotency key", run.idempotency_key),
        ]
    if claim := view.claim:
        rows.append(("Claimed by", f"{claim.task} {claim.task_id}, published by {claim.publisher}"))
    rows.append(("Waiting calls", view.waiting))
    return [(label, value) for label, value in rows if value != ""]
