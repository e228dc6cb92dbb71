"""The project. Celery's app is imported with it, so that every process of Django publishes with the same app."""

from project.celery import app

__all__ = ["app"]
