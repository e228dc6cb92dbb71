"""A Django app: system checks of the lock settings and of the singleton tasks, and the dashboard under Django's login.

Add ``"celery_dlock.django"`` to ``INSTALLED_APPS``. Its migrations make the tables of a lock store that is in the
project's database.
"""
