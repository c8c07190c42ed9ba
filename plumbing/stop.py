"""Ctrl-C, and the signals that end a program, stop a run after its last whole step. A first reading can skip it."""
import os
import shlex
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterator

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Ctrl-C; a scheduler's; a terminal that was closed


@dataclass
class Stop:
    """What the signals do: KeyboardInterrupt at once or, while `held`, when the step is whole."""

    step: int  # the last whole one
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
def stoppable(writer: Any, done: int) -> Iterator[Any]:
    """The Writer of a run that has done so many steps. Who stops the run finds the state of its last whole step.
    Signals that are ignored, as after nohup, stay so, and a thread that gets none changes nothing."""
    stop, main = Stop(done), threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in SIGNALS if main and hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield writer._replace(stop=stop)
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
