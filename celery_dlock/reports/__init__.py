"""Texts of the command line and the dashboard: JSON documents, facts, checks, options and durations.

The ``celery`` command imports this package at each start, so it imports only the standard library.
"""
