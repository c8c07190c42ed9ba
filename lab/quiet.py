"""Quiet for whoever measures speed: a lock of this machine, and long background runs pause while somebody holds it.

    with quiet():                                       in a program, such as lab/speed/benchmark.py
    flock "${TMPDIR:-/tmp}/token-credit.quiet" COMMAND  in a shell
"""
import fcntl
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

LOCK = Path(tempfile.gettempdir()) / "token-credit.quiet"
LOOK = 0.5  # seconds between two looks of the runs in the background


@contextmanager
def quiet() -> Iterator[None]:
    """Hold the lock; others that want it wait, and runs in the background pause."""
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(4 * LOOK)  # until they have noticed
        yield


def asked_for() -> bool:
    """Whether somebody holds the lock. The system lets go of it when its holder ends, however that comes about."""
    with LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
