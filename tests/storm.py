"""Runs that are killed while they write, in processes of their own; and what their folders hold, in a form to compare.

In the end a run that is resumed after each of them must hold what an undisturbed one wrote, to the byte, but for what a
clock measured: tests/test_train.py.
"""
import csv
import itertools
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

PROCESSES = multiprocessing.get_context("forkserver")  # which imports torch once, and is copied for each process
PROCESSES.set_forkserver_preload(["train"])


def contents(place: Path) -> dict[str, object]:
    """What each file below a folder holds, without what a clock measured and the number of the process."""
    files = [file for file in place.rglob("*") if file.is_file() and file.name != "lock"]
    return {str(file.relative_to(place)): content(file) for file in files}


def content(file: Path) -> object:
    """What a file holds, in a form that == compares."""
    if file.name == "metrics.csv":
        rows = csv.DictReader(file.open())
        return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows]
    if file.name == "state.pt":
        state = torch.load(file, weights_only=True)
        del state["lengths"]["metrics.csv"]  # of times
        return repr_of(state)
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()


def repr_of(value: object) -> object:
    """A nested dict with its tensors as bytes."""
    if isinstance(value, dict):
        return {key: repr_of(inner) for key, inner in value.items()}
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)


def run(words: list, place: Path, last: int) -> None:
    """What a process does: train.py in a folder, until it is killed before its write number `last`."""
    import train
    assert "matplotlib" not in sys.modules  # it takes as long to import as a step of training
    train.evaluate = lambda policy, puzzles, k, s: np.zeros((len(puzzles), k))
    place.mkdir(exist_ok=True)
    os.chdir(place)
    sys.stdout, sys.argv, number = open(os.devnull, "w"), ["train.py", *map(str, words)], itertools.count(1)

    def hook(event: str, arguments: tuple) -> None:
        writes = event in ("os.mkdir", "os.rename") or event == "open" and {*"wa"} & {*str(arguments[1])}
        if writes and str(arguments[0]).startswith("run") and next(number) == last:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    train.main()


def killed(*arguments) -> int:
    """The exit code of a process that did that."""
    process = PROCESSES.Process(target=run, args=arguments)
    process.start()
    process.join()
    return process.exitcode
