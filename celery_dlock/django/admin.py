"""The locks in Django's admin: the dashboard's entry on the index, and the lock of an object on the object's page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from celery.app import app_or_default
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import select_template
from django.urls import NoReverseMatch, path, reverse

from ..control import LockControl
from ..errors import DLockError
from ..reports.tables import LOCKS
from . import models

if TYPE_CHECKING:
    from ..lock import Lock

__all__ = ["LockAdminMixin"]

#: The facts that the page of an object shows.
_SHOWN = ("name", "states", "holder", "holder.since", "holder.operator", "waiting", "next_call")
_NOT_MOUNTED = "The dashboard is not mounted: add path('locks/', include('celery_dlock.django.urls')) to your urls.py."


def dashboard_url(page: str = "", **query: str) -> str:
    """Return the address of a page of the dashboard; "" if the dashboard is not mounted."""
    try:
        address = reverse("celery_dlock:dashboard", args=[page])
    except NoReverseMatch:
        return ""
    return f"{address}?{urlencode(query)}" if query else address


@admin.register(models.Lock)
class DashboardAdmin(admin.ModelAdmin):
    """The entry of the dashboard on the index of the admin. It has no pages of its own."""

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_changelist"
        return [path("", self.admin_site.admin_view(self.changelist_view), name=name)]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Lead to the dashboard."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        address = dashboard_url()
        if not address:
            messages.error(request, _NOT_MOUNTED)
        return HttpResponseRedirect(address or reverse("admin:index", current_app=self.admin_site.name))


class LockAdminMixin:
    """A base of your ``ModelAdmin`` that shows the lock of an object on the object's page.

    Put it before ``ModelAdmin``, and say which lock is that of an object::

        @admin.register(Order)
        class OrderAdmin(LockAdminMixin, admin.ModelAdmin):
            def lock_of(self, obj):
                return send_invoice.lock_for(obj.pk)

    Users with the permission ``celery_dlock.view_lock`` also see a link to the lock in the dashboard, if that is
    mounted. There they can act on the lock, by their permissions.

    If you set ``change_form_template``, let your template extend ``admin/celery_dlock/change_form.html``.
    """

    change_form_template: str | None = "admin/celery_dlock/change_form.html"

    def lock_of(self, obj: Any) -> Lock | str | None:
        """Return the lock of an object, its name, or None if the object has no lock. Override this method."""
        raise NotImplementedError(f"{type(self).__name__} needs a method lock_of(self, obj)")

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, obj: Any = None, **kwargs: Any
    ) -> HttpResponse:
        """Add the lock of the object to the page's context."""
        context["lock_base_template"] = self._base_template()
        if obj is not None and obj.pk is not None:
            context["dlock"] = self._shown(request, obj)
        rendered: HttpResponse = super().render_change_form(request, context, *args, obj=obj, **kwargs)  # type: ignore[misc]  # of ModelAdmin
        return rendered

    def _shown(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return what the template shows of an object's lock. A store that is away does not break the page."""
        try:
            lock = self.lock_of(obj)
            if lock is None:
                return {}
            name = lock if isinstance(lock, str) else lock.name
            with LockControl(app_or_default()) as control:
                view = control.lock(name)
        except DLockError as error:
            return {"error": str(error)}
        may_see = request.user.has_perm("celery_dlock.view_lock")
        return {
            "facts": [(fact.title, text) for fact in LOCKS.details if fact.key in _SHOWN and (text := fact.text(view))],
            "url": dashboard_url("lock", name=name) if may_see else "",
        }

    def _base_template(self) -> Any:
        """Return the template that Django would use without this class."""
        opts: Any = self.opts  # type: ignore[attr-defined]  # of ModelAdmin
        own = super().change_form_template  # type: ignore[misc]
        folder = f"admin/{opts.app_label}"
        names = [f"{folder}/{opts.model_name}/change_form.html", f"{folder}/change_form.html", "admin/change_form.html"]
        return select_template([own] if own else names)
