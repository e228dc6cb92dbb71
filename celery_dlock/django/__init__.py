"""A Django app: system checks of the lock settings and of the singleton tasks, and pages of the admin.

Add ``"celery_dlock.django"`` to ``INSTALLED_APPS``. Its models have no tables, so there are no migrations.
"""
