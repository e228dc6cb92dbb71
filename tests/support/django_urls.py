"""The addresses of the tests' Django project, and the admin of a model with locks."""

from typing import Any

from django.contrib import admin
from django.contrib.auth.models import Group
from django.urls import include, path

from celery_dlock.django.admin import LockAdminMixin
from celery_dlock.keys.lock_name import shared_name


class GroupAdmin(LockAdminMixin, admin.ModelAdmin):  # type: ignore[misc]  # Django is untyped
    def lock_of(self, obj: Any) -> str | None:
        return None if obj.name == "without a lock" else shared_name(obj.name).text


admin.site.unregister(Group)
admin.site.register(Group, GroupAdmin)

urlpatterns = [
    path("admin/", admin.site.urls),
    path("locks/", include("celery_dlock.django.urls")),
]
