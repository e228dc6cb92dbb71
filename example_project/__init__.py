"""A small shop that uses celery-dlock as any project would, and a demo that puts it under stress."""
