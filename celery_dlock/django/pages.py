"""The pages of the admin: a list with actions, and the page of one lock.

They use Django's permissions, CSRF check, log entries and styles, and not its change list, which needs a query set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_protect

from ..control import LockControl, LockView
from ..errors import DLockError
from ..runtime import Runtime
from .celery_app import celery_app, import_tasks
from .operations import Operation, Target, act_on

__all__ = ["LockPage", "confirmation", "lock_url", "opened", "permitted", "report", "shown", "state_of"]

#: Entries of one page.
PAGE: Final = 100
#: Texts about refused entries that one message shows.
MOST_REFUSALS: Final = 10

Column = tuple[str, Callable[[Any], object]]


@contextmanager
def opened(request: HttpRequest) -> Iterator[LockControl]:
    """Open the locks of the current Celery app. The audit names the user of the request.

    Raises:
        DLockError: The settings name no lock store, or locks are switched off.
    """
    app = celery_app()
    if not Runtime.of(app).enabled:
        raise DLockError("locks are switched off: dlock_enabled is False")
    with LockControl(app, user=request.user.get_username()) as control:
        yield control


def permitted(request: HttpRequest, model: Any, operation: Operation) -> bool:
    """Return whether the user of the request may do this on this page."""
    codename = get_permission_codename(operation.permission, model._meta)  # noqa: SLF001  # Django's documented API
    return bool(request.user.has_perm(f"{model._meta.app_label}.{codename}"))  # noqa: SLF001


def lock_url(name: str) -> str:
    """Return the address of the page of a lock."""
    return str(reverse("admin:celery_dlock_heldlock_change", args=[quote(name)]))


def shown(seconds: float) -> str:
    """Return a time since the epoch in the time zone of the user."""
    return f"{datetime.fromtimestamp(seconds, timezone.get_current_timezone()):%Y-%m-%d %H:%M:%S %Z}"


def state_of(view: LockView) -> str:
    """Return the state of a lock, and what keeps it, in words."""
    holder = view.holder
    if holder is None:
        return "free"
    if holder.operator and holder.kept_by != "operator":
        return f"{holder.state}, then held by an operator"
    return f"{holder.state} ({holder.kept_by})" if holder.kept_by else holder.state


def confirmation(
    page: Any, request: HttpRequest, operation: Operation, targets: Sequence[Target], form: forms.Form, back: str
) -> HttpResponse:
    """Return the page that asks whether to act on these entries. Its other answer leads to the address ``back``."""
    request.current_app = page.admin_site.name
    context = {
        **page.admin_site.each_context(request),
        "title": operation.label,
        "opts": page.opts,
        "operation": operation,
        "targets": targets,
        "checkbox_name": ACTION_CHECKBOX_NAME,
        "form": form,
        "back": back,
    }
    return TemplateResponse(request, "admin/celery_dlock/confirmation.html", context)


def report(request: HttpRequest, operation: Operation, done: int, refused: Sequence[str]) -> None:
    """Show the user the result of an action."""
    if done:
        messages.success(request, f"{operation.label}: {done} done.")
    if refused:
        more = f" … and {len(refused) - MOST_REFUSALS} more" if len(refused) > MOST_REFUSALS else ""
        texts = "; ".join(refused[:MOST_REFUSALS])
        messages.error(request, f"{operation.label}: {len(refused)} not done. {texts}{more}")


class FilterForm(forms.Form):
    """The filter of a list."""

    name = forms.CharField(required=False, label="Lock name", help_text="A pattern, such as shop.*")
    task = forms.CharField(required=False)


class LockPage(admin.ModelAdmin):
    """A list of entries of the lock store, with actions."""

    operations: ClassVar[Sequence[Operation]] = ()
    columns: ClassVar[Sequence[Column]] = ()
    filter_form: ClassVar[type[FilterForm]] = FilterForm

    def entries(self, control: LockControl, filters: dict[str, str], cursor: str) -> tuple[Iterable[Any], str]:
        """Return the entries of one page, and the cursor of the next page; "" after the last one.

        Raises:
            ValueError: The cursor is malformed.
        """
        raise NotImplementedError

    def target(self, entry: Any) -> Target:
        """Return what an action on this entry names."""
        raise NotImplementedError

    # -- permissions: nothing is added, changed or deleted here

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the lock of this name, for Django's own page of its history."""
        return self.model(name=object_id)

    def allowed(self, request: HttpRequest) -> list[Operation]:
        """Return the actions that the user may do."""
        return [one for one in self.operations if permitted(request, self.model, one)]

    # -- views

    @method_decorator(csrf_protect)
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list, ask to confirm an action, or act."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        try:
            return self._act(request) if request.method == "POST" else self._list(request)
        except DLockError as error:
            return self._unavailable(request, error)

    @method_decorator(csrf_protect)
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Lead to the page of the lock. Links in Django's list of recent actions come here."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect(lock_url(unquote(object_id)))

    def _list(self, request: HttpRequest) -> HttpResponse:
        form = self.filter_form(request.GET)
        form.is_valid()
        filters = {key: str(form.cleaned_data.get(key, "")) for key in form.fields}
        try:
            with opened(request) as control:
                entries, cursor = self.entries(control, filters, request.GET.get("cursor", ""))
        except ValueError as error:
            if isinstance(error, DLockError):
                raise
            messages.warning(request, "That page is no longer there. This is the first page.")
            return HttpResponseRedirect(request.path)
        operations = self.allowed(request)
        context = {
            **self.admin_site.each_context(request),
            "title": str(self.opts.verbose_name_plural).capitalize(),
            "opts": self.opts,
            "headers": [header for header, _ in self.columns],
            "rows": [self._row(entry) for entry in entries],
            "operations": operations,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            "form": form,
            "is_filtered": any(filters.values()),
            "is_first": not request.GET.get("cursor"),
            "first_query": _query(request, ""),
            "next_query": _query(request, cursor) if cursor else "",
        }
        return TemplateResponse(request, "admin/celery_dlock/list.html", context)

    def _row(self, entry: Any) -> dict[str, Any]:
        return {
            "name": entry.name,
            "url": lock_url(entry.name),
            "target": self.target(entry).text,
            "cells": [value(entry) for _, value in self.columns],
        }

    def _act(self, request: HttpRequest) -> HttpResponse:
        operation = next((one for one in self.operations if one.name == request.POST.get("action")), None)
        targets = [target for text in request.POST.getlist(ACTION_CHECKBOX_NAME) if (target := Target.parse(text))]
        if operation is None or not targets:
            missing = "No action selected." if operation is None else "Select the entries to act on."
            messages.warning(request, f"{missing} Nothing was changed.")
            return HttpResponseRedirect(request.get_full_path())
        if not permitted(request, self.model, operation):
            raise PermissionDenied
        confirmed = "confirmed" in request.POST
        form = operation.form(request.POST if confirmed else None)
        if not confirmed or not form.is_valid():
            return confirmation(self, request, operation, targets, form, request.get_full_path())
        with opened(request) as control:
            import_tasks(celery_app())  # the end of a message is stored by its task
            done, refused = act_on(control, operation, targets, form.cleaned_data)
        reason = form.cleaned_data["reason"]
        for target, text in done:
            self.log_change(request, self.model(name=target.name), f"{text} Reason: {reason}" if reason else text)
        report(request, operation, len(done), refused)
        return HttpResponseRedirect(request.get_full_path())

    def _unavailable(self, request: HttpRequest, error: DLockError) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": str(self.opts.verbose_name_plural).capitalize(),
            "opts": self.opts,
            "error": str(error),
        }
        return TemplateResponse(request, "admin/celery_dlock/unavailable.html", context, status=503)


def _query(request: HttpRequest, cursor: str) -> str:
    """Return the query of another page of the same list."""
    query: QueryDict = request.GET.copy()
    query.pop("cursor", None)
    if cursor:
        query["cursor"] = cursor
    return f"?{query.urlencode()}"
