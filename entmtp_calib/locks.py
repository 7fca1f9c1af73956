"""A folder's lock: one process at a time works in it, and others are told which.

The system frees the lock of a process that has died, however it did. This module does not know what
the folder holds.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from entmtp_calib.errors import BusyError
from entmtp_calib.files import writing


def acquire(path: Path) -> IO[str]:
    """Lock the folder by its lock file, which names the holder; `BusyError` where there is one."""
    while True:
        with writing(path), ExitStack() as on_failure:
            lock = on_failure.enter_context(path.open("a+", encoding="utf-8"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise BusyError(
                    f"{path.parent} is in use by process {lock.read().strip() or 'unknown'}",
                    action="wait until it has finished, or choose another folder",
                ) from None
            if _is_at(path, lock):  # else its last holder has just removed it
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
                on_failure.pop_all()
                return lock


def release(path: Path, lock: IO[str]) -> None:
    """Give the lock back."""
    with suppress(OSError):  # the lock goes with the file handle; the file is only a name
        path.unlink(missing_ok=True)
    lock.close()


def _is_at(path: Path, lock: IO[str]) -> bool:
    """Whether the open file is the one that has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    return False
