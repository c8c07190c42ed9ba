"""A storm: runs that are killed, stopped, out of disk space or started twice at once, against undisturbed ones.

    python tests/storm.py      100 runs of 12 steps, half an hour on two cores; tests/test_train.py has two more

A run meets up to three disasters at random moments, each in a process of its own, and is resumed after each. In the end
everything that it wrote must be what an undisturbed run wrote, to the byte, but for what a clock measured.
"""
import csv
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where train.py is
METHODS = {"none": ["--updates_per_batch", "2"],
           "ppo": ["--task", "guess", "--kl", "0.1", "--temperature", "0.8", "--warmup_steps", "5", "--linear_decay",
                   "--eval_greedy"],
           "vineppo": ["--k", "2"],
           "learned_importance": ["--reward", "random"]}
FLAGS = ("--steps 12 --questions 2 --responses 3 --eval_problems 4 --max_new_tokens 40 --eval_every 5 --state_every 3 "
         "--checkpoint_every 4 --out run").split()
PROCESSES = multiprocessing.get_context("forkserver")  # which imports torch once, and is copied for each process
PROCESSES.set_forkserver_preload(["train"])
DISASTERS = ("SIGKILL", "SIGTERM", "SIGINT", "disk full", "second process")


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


def run(words: list[str], place: Path, largest_file: int, pipe: Connection) -> None:
    """What a process does: train.py, which may write no larger file, as on a full disk. It hands back what it says."""
    import train
    assert "matplotlib" not in sys.modules  # it takes as long to import as a step of training
    os.chdir(place)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.stdout, sys.argv = open(os.devnull, "w"), ["train.py", *words]
    try:
        train.main()
        pipe.send("")
    except SystemExit as stop:
        pipe.send(stop.code)
        os._exit(1)


def start(method: str, place: Path, largest_file: int = resource.RLIM_INFINITY) -> tuple:
    """Begin the run of a place, or go on with it: the process, and where it says how it ended."""
    place.mkdir(exist_ok=True)
    begun = (place / "run" / "config.json").exists()
    words = ["--resume", "run"] if begun else ["--mitigation", method, *METHODS[method], *FLAGS]
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=run, args=(words, place, largest_file, there))
    process.start()
    there.close()
    return process, here


def expect(codes: list[int], process: multiprocessing.Process, pipe: Connection) -> str:
    """What a process says at its end, in one line; it must have one of the exit codes."""
    said = pipe.recv()  # EOFError after a traceback
    process.join()
    assert process.exitcode in codes and "\n" not in said, (process.exitcode, said)
    return said


def wreck(disaster: str, method: str, place: Path, rng: np.random.Generator, seconds: float) -> None:
    """Begin or continue a run and let it meet a disaster. seconds: how long an undisturbed run takes."""
    full = disaster == "disk full"
    first = start(method, place, int(10 ** rng.uniform(2, 7)) if full else resource.RLIM_INFINITY)
    if not full:
        time.sleep(rng.uniform(0.2, 1.0) * seconds)
    if full or disaster == "second process":
        for each in [first] if full else [first, start(method, place)]:  # which comes too late depends on the moment
            expect([0, 1], *each)
    else:
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(first[0].pid, signal.Signals[disaster])
        first[0].join()


def disturbed(method: str, place: Path, seed: int, seconds: float) -> list[str]:
    """A run through up to three disasters, and to its end. Returns the disasters."""
    rng = np.random.default_rng(seed)
    met = list(rng.permutation(DISASTERS)[: rng.integers(1, 4)])
    for disaster in met:
        if not (place / "run" / "final.json").is_file():
            wreck(disaster, method, place, rng, seconds)
    if not (place / "run" / "final.json").is_file():
        expect([0], *start(method, place))
    return met


def storm(runs: int, folder: Path, seed: int = 0) -> tuple[Counter, dict[str, list[str]]]:
    """How often each disaster was met, and what differs in the runs that differ from undisturbed ones."""
    methods, seconds, undisturbed = list(METHODS)[:runs], {}, {}
    (warm := PROCESSES.Process(target=int)).start()  # the first one waits for the import
    warm.join()
    for method in methods:
        began = time.perf_counter()
        expect([0], *start(method, folder / method))
        seconds[method] = time.perf_counter() - began
        undisturbed[method] = contents(folder / method)
    met, different = Counter(), {}

    def one(i: int) -> None:
        method = methods[i % len(methods)]
        place = folder / f"{i:03d}-{method}"
        met.update(disturbed(method, place, seed + i, seconds[method]))
        found, expected = contents(place), undisturbed[method]
        if names := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
            different[place.name] = names
        print(f"{i + 1}/{runs} {place.name}: {', '.join(names) or 'same'}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(runs)))  # the list asks for each result, so an exception is raised here
    return met, different


def main() -> None:
    """Print how often each disaster was met; exit with 1 where a run differs."""
    with tempfile.TemporaryDirectory() as folder:
        met, different = storm(100, Path(folder))
    print(f"met {dict(met)}; {len(different)} of 100 runs differ from an undisturbed one")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
