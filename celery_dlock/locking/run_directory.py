"""The run directory: where the lock files of one machine and one user are."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ..errors import LockFilesUnusable

__all__ = ["RunDirectory"]

_TRAILING: Final = re.compile(r"(/\.?)+\Z")


class RunDirectory:
    """The run directory.

    Other users must not reach it. They could lock a file for ever, delete it, or put a symbolic link in its place.

    Args:
        path: Its absolute path; None for ``celery-dlock-<uid>`` in the directory for temporary files.
    """

    def __init__(self, path: str | None) -> None:
        # With a slash or a dot at its end, O_NOFOLLOW would follow a symbolic link.
        self.path = _TRAILING.sub("", path) or "/" if path else f"{tempfile.gettempdir()}/celery-dlock-{os.geteuid()}"

    def check(self) -> None:
        """Check the directory. Create it if it is missing.

        Raises:
            LockFilesUnusable: It cannot be used, or is not safe to use.
        """
        with self.opened():
            pass

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Return a context with the descriptor of the checked directory, which is created with mode 0700.

        Open files relative to the descriptor, so that a directory that replaces this one meanwhile is not used.

        Raises:
            LockFilesUnusable: The directory cannot be used, another user could change it, or the context raised an
                ``OSError``.
        """
        try:
            directory = self._open()
        except OSError as error:
            linked = error.errno in (errno.ELOOP, errno.ENOTDIR)
            reason = "it is a symbolic link, or no directory" if linked else error.strerror
            raise LockFilesUnusable(f"the run directory {self.path} cannot be used: {reason}") from error
        try:
            self._refuse_others(os.fstat(directory))
            yield directory
        except OSError as error:
            raise LockFilesUnusable(f"no lock file in {self.path} can be used: {error.strerror}") from error
        finally:
            os.close(directory)

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self.path, flags)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(self.path, 0o700)  # noqa: PTH102  # like os.open above and below
            return os.open(self.path, flags)

    def _refuse_others(self, found: os.stat_result) -> None:
        if found.st_uid != os.geteuid():
            raise LockFilesUnusable(
                f"the run directory {self.path} belongs to user {found.st_uid}, but this process runs as user "
                f"{os.geteuid()}; set dlock_run_dir to a directory of this user"
            )
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise LockFilesUnusable(
                f"the run directory {self.path} is open to other users (mode {mode:04o}); make it mode 0700"
            )
