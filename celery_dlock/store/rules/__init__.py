"""The rules of locks, queues, claims and run marks, for stores that do not run the Lua scripts.

Each function is one verb: it reads and writes the records of one lock name (:mod:`.records`). The engine
(:mod:`celery_dlock.store.engine`) runs it in one transaction of a backend. It reads nothing else, so it can run again.
The scripts of the Redis store are the same rules in Lua; a test compares both on random histories.
"""
