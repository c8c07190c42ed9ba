"""Ctrl-C and the signals that end a program stop a run after its last whole step, so that no finished work is lost.

A first reading can skip it.
"""
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import Any, Iterator

from torch import Tensor

from plumbing.processes import leads

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Ctrl-C; a scheduler's; a terminal that was closed
PATIENCE = 2.0  # seconds in which a second Ctrl-C counts as the first one, which a launcher may hand on


class Stop:
    """Handles the signals: KeyboardInterrupt at once, while the learners are those of the last whole step; otherwise,
    as weights have moved, when the step is whole. A second Ctrl-C doesn't wait."""

    def __init__(self, learners: dict, step: int):
        self.learners, self.asked = learners, None  # when it was asked for
        self.whole(step)

    def versions(self) -> list[tuple[int, int]]:
        """Where each tensor of the learners is, and how often it was written to, as PyTorch counts."""
        found, nested = [], [learner.state_dict() for learner in self.learners.values()]
        while nested:
            value = nested.pop()
            if isinstance(value, Tensor):
                found.append((value.data_ptr(), value._version))
            elif isinstance(value, dict):
                nested += value.values()
        return found

    def moved(self) -> bool:
        """Whether the learners are no longer those of the last whole step."""
        return self.versions() != self.known

    def whole(self, step: int) -> None:
        """A step is whole: its row is written. KeyboardInterrupt where somebody waits for that."""
        self.step, self.known = step, self.versions()
        if self.asked:
            raise KeyboardInterrupt

    def __call__(self, number: int, frame: Any) -> None:
        """Stop now, or after this step."""
        first, now = self.asked is None, time.monotonic()
        again = not first and number == signal.SIGINT and now > self.asked + PATIENCE
        self.asked = now if first else self.asked
        if again or first and not self.moved():
            raise KeyboardInterrupt
        if first and leads():
            with suppress(OSError):  # the terminal may be gone. (A print could interrupt another one.)
                os.write(2, b"stopping after this step; Ctrl-C once more doesn't wait for it\n")


@contextmanager
def handled(stop: Stop) -> Iterator[None]:
    """Meanwhile the signals are a Stop's, but for those that are ignored, as after nohup."""
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():  # where Python has no handlers
        numbers = []
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
