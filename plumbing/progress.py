"""What a long command says while it works."""
import os
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from plumbing.processes import leads, world

QUIET = 10.0  # seconds between two lines where the output is not a terminal


class Progress:
    """`name: done/total, ETA`: one line that overwrites itself on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str, total: int):
        self.name, self.total = name, total
        self.start = self.last = time.perf_counter()

    def show(self, done: int) -> None:
        """Print how much is done, and the ETA."""
        now, terminal = time.perf_counter(), sys.stderr.isatty()
        if not leads() or not terminal and now - self.last < QUIET:
            return
        self.last = now
        eta = clock((now - self.start) / max(done, 1) * (self.total - done))
        end = "\r" if terminal and done < self.total else "\n"
        print(f"{self.name}: {done:,}/{self.total:,}  ETA {eta} ", end=end, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds, such as 1:05."""
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def fail(message: str) -> None:
    """Say in one sentence what is wrong, and exit with an error."""
    sys.exit(f"error: {message}" if leads() else 1)


@contextmanager
def one_sentence(interrupted: str = "interrupted", run: Path | None = None) -> Iterator[None]:
    """Exit with one sentence on an error that the user can fix, and on Ctrl-C. Also a decorator: @one_sentence().

    run: the run folder that is being written, if any.
    """
    kept = f"; what finished before is in {run}" if run else ""
    resume = ", which --resume continues" if run else ""
    for name in ("stdout", "stderr"):  # None where a shell closed it
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="replace")  # a terminal without a ± shows ?
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # which a full disk refuses
    except KeyboardInterrupt:
        fail(interrupted)
    except (ValueError, FloatingPointError) as error:
        fail(f"{error}{kept}")
    except BrokenPipeError:  # whoever reads the output, such as `head`, has enough
        sys.stdout = open(os.devnull, "w")
        sys.exit(1)
    except OSError as error:
        fail(f"{error}{kept}{resume}")
    except (MemoryError, RuntimeError) as error:
        said = str(error) or "out of memory"
        if world()[1] > 1 and re.search("gloo|Connection|NCCL", said):
            fail("another of the processes ended: see what it said")
        if not re.search("allocate memory|out of memory", said):  # torch has no type of its own for that
            raise
        fail(f"there is not enough memory for this{kept}{resume}")
