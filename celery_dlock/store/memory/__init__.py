"""A store in the memory of one process, for tests and for workers of one process (``memory://``)."""
