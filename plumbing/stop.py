"""Ctrl-C, and the signals that end a program, stop a run after its last whole step. A first reading can skip it."""
import os
import signal
import threading
from contextlib import contextmanager
from typing import Any, Iterator

from torch import Tensor

from plumbing.processes import leads

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Ctrl-C; a scheduler's; a terminal that was closed


class Stop:
    """What the signals do: KeyboardInterrupt at once, or after the step where the learners (objects with state_dict(),
    by name) are no longer those of the last whole step."""

    def __init__(self, learners: dict, step: int):
        self.learners, self.asked = learners, False
        self.whole(step)

    def whole(self, step: int) -> None:
        """A step is whole: its row is written."""
        self.step, self.known = step, self.versions()
        if self.asked:
            raise KeyboardInterrupt

    def versions(self) -> list[tuple[int, int]]:
        """Where each tensor of the learners is, and how often it was written to, as PyTorch counts. (It doesn't count
        what the fused AdamW writes to weights, but Adam's counters of steps, which change first.)"""
        found, nested = [], [learner.state_dict() for learner in self.learners.values()]
        while nested:
            value = nested.pop()
            found += [(value.data_ptr(), value._version)] if isinstance(value, Tensor) else []
            nested += value.values() if isinstance(value, dict) else []
        return found

    def __call__(self, number: int, frame: Any) -> None:
        """Handle a signal. Others after it, which a launcher may hand on, change nothing."""
        first, self.asked = not self.asked, True
        if first and self.versions() == self.known:
            raise KeyboardInterrupt
        if first and leads():  # not with print, which may be interrupted here
            os.write(2, b"stopping when this step is done (Ctrl-\\ does not wait for it)\n")


@contextmanager
def handled(stop: Stop) -> Iterator[None]:
    """Have a Stop handle the signals, but for ignored ones, as after nohup, and only in the thread that gets them."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in SIGNALS if main and hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
