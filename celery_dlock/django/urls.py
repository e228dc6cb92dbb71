"""The addresses of the dashboard: ``path("locks/", include("celery_dlock.django.urls"))``.

Importing this module needs the extra ``celery-dlock[web]``.
"""

from __future__ import annotations

from django.urls import re_path

from .dashboard import dashboard_view

__all__ = ["app_name", "urlpatterns"]

app_name = "celery_dlock"
urlpatterns = [re_path(r"^(?P<path>.*)$", dashboard_view, name="dashboard")]
