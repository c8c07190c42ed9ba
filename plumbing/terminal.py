"""What a long command says while it works, the one sentence with which it fails, and how a signal stops it."""
import os
import re
import shlex
import signal
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Collection, Iterator

FIRST, EVERY = 2, 10  # seconds before the first line of Progress, and between two
PYTHON, HOME = ("<frozen", sysconfig.get_path("stdlib")), Path(__file__).resolve().parents[1]  # whose code is where


class Progress:
    """`name: done/total, ETA`, a line after FIRST seconds and then every EVERY seconds."""

    def __init__(self, name: str, total: int):
        self.name, self.total = name, total
        self.start = time.perf_counter()
        self.last = self.start + FIRST - EVERY  # as if a line had been shown

    def show(self, done: float) -> None:
        """Print how much is done, and the ETA, if the last line is old enough."""
        now = time.perf_counter()
        if now - self.last >= EVERY:
            self.last = now
            left = clock((now - self.start) / done * (self.total - done)) if done > self.total / 50 else "unknown yet"
            print(f"{self.name}: {int(done):,}/{self.total:,}  ETA {left}", file=sys.stderr, flush=True)

    def part(self, done: int, size: int, limit: int) -> Callable[[int, float], None]:
        """The `watch` of sampler.generate that shows a part of `size` responses, after `done` others, as if those that
        are running went on to the limit (tokens)."""
        return lambda columns, running: self.show(done + size * (1 - running * (1 - columns / limit)))


def follow(name: str, items: Collection) -> Iterator:
    """The items one after the other, with Progress."""
    progress = Progress(name, len(items))
    for done, item in enumerate(items, 1):
        yield item
        progress.show(done)


def clock(seconds: float) -> str:
    """Minutes and seconds, such as 1:05."""
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def command_line() -> list[str]:
    """sys.argv; in a Jupyter kernel, where it is the kernel's own, a program without flags."""
    return ["train.py"] if sys.argv[0].endswith("kernel_launcher.py") else sys.argv


def fail(message: str) -> None:
    """Say in one sentence what is wrong, and exit with an error."""
    sys.exit(f"error: {message}")


def place(error: BaseException | None) -> str:
    """Type, function, line and file of an error, as ` (ValueError in grade, line 7 of my_task.py)`, or those of its
    cause; nothing where our code words what it refuses, by `require` or `raise`, or where it reads or writes a file.
    """
    where = None
    while error:
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith(PYTHON) and not re.search("(site|dist)-packages", frame.filename):
                where, kind = frame, type(error).__name__
        error = error.__cause__
    file = Path(where.filename).resolve()
    ours = HOME in file.parents and file.name not in ("mitigations.py", "grpo.py")  # where others write, too
    if ours and (file.parent.name == "plumbing" or file.name == "data.py" or re.search(r"\braise\b", where.line)):
        return ""
    return f" ({kind} in {where.name}, line {where.lineno} of {file})"


@contextmanager
def one_sentence(interrupted: str = "interrupted", run: Path | None = None) -> Iterator[None]:
    """Exit with one sentence on an error that the user can fix, and on Ctrl-C. Also a decorator: @one_sentence()."""
    kept = f"; what finished before is in {run}" if run else ""  # the run folder that is being written
    resume = ", which --resume continues" if run else ""
    for output in filter(None, (sys.stdout, sys.stderr)):
        if not hasattr(output, "flush"):  # somebody's own object, whose only method is `write`
            output.flush = lambda: None
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's output has no such method, nor has a StringIO
        sys.stdout.reconfigure(errors="replace")  # a terminal without a ± shows ?
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # which a full disk refuses
    except KeyboardInterrupt as stopped:
        fail(str(stopped) or interrupted)
    except (ValueError, FloatingPointError, OSError) as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line  # a pipe of somebody's function may break, too
        if isinstance(error, BrokenPipeError) and re.search(r"print\(|stdout|\bfile\.write", line):
            sys.stdout = open(os.devnull, "w")  # whoever reads the output, such as `head`, has enough
            sys.exit(1)
        fail(f"{error}{place(error)}{kept}{resume if isinstance(error, OSError) else ''}")
    except (MemoryError, RuntimeError) as error:
        said = str(error) or "out of memory"
        if not re.search("allocate memory|out of memory", said):  # torch has no type of its own for that
            raise
        fail(f"there is not enough memory for this{kept}{resume}" + ", also with a smaller --micro_batch" * bool(run))


SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Ctrl-C; a scheduler's; a terminal that was closed


@dataclass
class Stop:
    """What the signals do: KeyboardInterrupt at once or, while `held`, when the step is whole."""

    step: int = 0  # the last whole one
    held: bool = False  # from a step's update until its row is written: half a step can't be resumed
    asked: bool = False

    def whole(self, step: int) -> None:
        """A step is whole."""
        self.step, self.held = step, False
        if self.asked:
            raise KeyboardInterrupt

    def __call__(self, number: int, frame: Any) -> None:
        """Handle a signal. Others after it, which a launcher may hand on, change nothing."""
        first, self.asked = not self.asked, True
        if first and not self.held:
            raise KeyboardInterrupt
        if first:  # not with print, which may be interrupted here
            os.write(2, b"stopping when this step is done (Ctrl-\\ does not wait for it)\n")


@contextmanager
def stoppable(writer: Any, done: int) -> Iterator[None]:
    """Let signals stop a run that has done so many steps: who stops it finds the state of its last whole step. Signals
    that are ignored, as after nohup, stay so, and a thread that gets none changes nothing."""
    stop, main = writer.stop, threading.current_thread() is threading.main_thread()
    stop.step = done
    numbers = [getattr(signal, name) for name in SIGNALS if main and hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    except KeyboardInterrupt:
        if stop.step == 0 or stop.held:
            raise
        writer.save_state(stop.step)
        raise KeyboardInterrupt(f"interrupted after step {stop.step}; continue with: python train.py --resume "
                                f"{shlex.quote(str(writer.run))}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        (writer.run / "lock").read_bytes()  # to open and close it unlocks it; a notebook's process would keep it locked
