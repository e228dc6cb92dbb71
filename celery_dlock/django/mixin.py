"""``LockAdminMixin``: the lock of one object, on its page in Django's admin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import select_template
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_protect

from ..errors import DLockError
from . import models
from .celery_app import celery_app, import_tasks
from .operations import RELEASE, ReleaseForm, Target, act_on
from .pages import confirmation, lock_url, opened, permitted, report, shown, state_of

if TYPE_CHECKING:
    from ..lock import Lock

__all__ = ["LockAdminMixin"]


class LockAdminMixin:
    """A base of your ``ModelAdmin`` that shows the lock of an object on the object's page.

    Put it before ``ModelAdmin``, and say which lock is that of an object::

        @admin.register(Order)
        class OrderAdmin(LockAdminMixin, admin.ModelAdmin):
            def lock_of(self, obj):
                return send_invoice.lock_for(obj.pk)

    Users with the permission ``celery_dlock.release_heldlock`` see a link that releases the lock. The release names the
    acquisition that the page showed, so it never frees a later one.

    If you set ``change_form_template``, let your template extend ``admin/celery_dlock/change_form.html``.
    """

    change_form_template: str | None = "admin/celery_dlock/change_form.html"

    def lock_of(self, obj: Any) -> Lock | str | None:
        """Return the lock of an object, its name, or None if the object has no lock. Override this method."""
        raise NotImplementedError(f"{type(self).__name__} needs a method lock_of(self, obj)")

    def get_urls(self) -> list[Any]:
        """Return the addresses of this admin, with that of the release."""
        admin: Any = self
        name = f"{admin.opts.app_label}_{admin.opts.model_name}_release_lock"
        view = admin.admin_site.admin_view(self.release_lock_view)
        own = [path("<path:object_id>/release-lock/", view, name=name)]
        return own + list(super().get_urls())  # type: ignore[misc]  # ModelAdmin comes after this class

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, obj: Any = None, **kwargs: Any
    ) -> HttpResponse:
        """Add the lock of the object to the page's context."""
        context["lock_base_template"] = self._base_template()
        if obj is not None and obj.pk is not None:
            context["dlock"] = self._shown(request, obj)
        rendered: HttpResponse = super().render_change_form(request, context, *args, obj=obj, **kwargs)  # type: ignore[misc]
        return rendered

    @method_decorator(csrf_protect)
    def release_lock_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask to confirm the release of an object's lock, or release it."""
        admin: Any = self
        obj = admin.get_object(request, unquote(object_id))
        if obj is None:
            raise Http404
        if not admin.has_view_or_change_permission(request, obj) or not permitted(request, models.HeldLock, RELEASE):
            raise PermissionDenied
        name = self._name(obj)
        acquisition = request.GET.get("acquisition", "")
        form = ReleaseForm(request.POST if request.method == "POST" else None)
        if not form.is_valid():
            return confirmation(self, request, RELEASE, [Target(name, acquisition)], form, self._address("change", obj))
        try:
            with opened(request) as control:
                import_tasks(celery_app())
                done, refused = act_on(control, RELEASE, [Target(name, acquisition)], form.cleaned_data)
        except DLockError as error:
            done, refused = [], [str(error)]
        for _, text in done:
            admin.log_change(request, obj, f"Lock {name}: {text}")
        report(request, RELEASE, len(done), refused)
        return HttpResponseRedirect(self._address("change", obj))

    def _name(self, obj: Any) -> str:
        lock = self.lock_of(obj)
        return lock if isinstance(lock, str) else lock.name if lock is not None else ""

    def _shown(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return what the template shows of an object's lock. A store that is away does not break the page."""
        try:
            name = self._name(obj)
            if not name:
                return {}
            with opened(request) as control:
                view = control.lock(name)
        except DLockError as error:
            return {"error": str(error)}
        holder = view.holder
        found: dict[str, Any] = {"name": name, "holder": holder, "state": state_of(view)}
        if holder is not None:
            found["since"] = shown(holder.since)
            if permitted(request, models.HeldLock, RELEASE):
                query = urlencode({"acquisition": holder.acquisition})
                found["release"] = f"{self._address('release_lock', obj)}?{query}"
        if request.user.has_perm("celery_dlock.view_heldlock"):
            found["url"] = lock_url(name)
        return found

    def _address(self, page: str, obj: Any) -> str:
        opts: Any = self.opts  # type: ignore[attr-defined]  # of ModelAdmin
        site: Any = self.admin_site  # type: ignore[attr-defined]
        name = f"admin:{opts.app_label}_{opts.model_name}_{page}"
        return str(reverse(name, args=[quote(obj.pk)], current_app=site.name))

    def _base_template(self) -> Any:
        """Return the template that Django would use without this class."""
        opts: Any = self.opts  # type: ignore[attr-defined]
        own = super().change_form_template  # type: ignore[misc]
        folder = f"admin/{opts.app_label}"
        names = [f"{folder}/{opts.model_name}/change_form.html", f"{folder}/change_form.html", "admin/change_form.html"]
        return select_template([own] if own else names)
