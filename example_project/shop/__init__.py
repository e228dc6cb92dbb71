"""The shop: `celery -A example_project.shop worker` and `celery -A example_project.shop beat` start it."""

from example_project.shop.app import app

__all__ = ["app"]
