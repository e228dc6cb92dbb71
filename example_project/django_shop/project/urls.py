"""The admin, and the dashboard of the locks."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("locks/", include("celery_dlock.django.urls")),
]
