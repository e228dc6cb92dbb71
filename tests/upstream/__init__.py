"""Faults of Celery, kombu and redis-py that celery-dlock works around, each as a small script without celery-dlock.

Each module has a function `fault`. It returns what goes wrong, or "" if the installed version has mended the fault.
The rows of docs/contributing/upstream.md name the modules, and the code that can go then. To run one, or all:

    python -m tests.upstream [NAME...]
"""
