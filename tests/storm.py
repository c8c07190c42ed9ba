"""A storm: runs that are killed, stopped, out of disk space or started twice at once, against undisturbed ones.

    python tests/storm.py      100 runs of 12 steps, half an hour on two cores; tests/test_train.py has two more

A run meets up to three disasters at random moments, each in a process of its own, and is resumed after each. In the end
everything that it wrote must be what an undisturbed run wrote, to the byte, but for what a clock measured.
"""
import csv
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

TRAIN = Path(__file__).parents[1] / "train.py"
METHODS = {"none": ["--updates_per_batch", "2"],
           "ppo": ["--kl", "0.1", "--temperature", "0.8", "--warmup_steps", "5", "--linear_decay", "--eval_greedy"],
           "vineppo": ["--k", "2"],
           "learned_importance": ["--reward", "random"]}
FLAGS = ("--steps 12 --questions 2 --answers 3 --eval_problems 4 --max_new_tokens 40 --eval_every 5 --state_every 3 "
         "--checkpoint_every 4 --out run").split()
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
        del state["lengths"]["metrics.csv"], state["checksums"]["metrics.csv"]  # of times
        return repr_of(state)
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()


def repr_of(value: object) -> object:
    """A nested dict with its tensors as bytes."""
    if isinstance(value, dict):
        return {key: repr_of(inner) for key, inner in value.items()}
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)


def start(method: str, place: Path, largest_file: int = resource.RLIM_INFINITY) -> subprocess.Popen:
    """Begin the run of a place, or go on with it. No file may grow beyond largest_file bytes, as on a full disk."""
    place.mkdir(exist_ok=True)
    words = ["--resume", "run"] if (place / "run").exists() else ["--mitigation", method, *METHODS[method], *FLAGS]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    return subprocess.Popen([sys.executable, TRAIN, *words], cwd=place, preexec_fn=limit, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def expect(codes: list[int], process: subprocess.Popen) -> None:
    """Wait for the end of a process, which must have one of the exit codes and no traceback."""
    _, complaint = process.communicate()
    assert process.returncode in codes and "Traceback" not in complaint, (process.returncode, complaint)


def wreck(disaster: str, method: str, place: Path, rng: np.random.Generator, seconds: float) -> None:
    """Begin or continue a run and let it meet a disaster. seconds: how long an undisturbed run takes."""
    if disaster == "disk full":
        return expect([0, 1], start(method, place, largest_file=int(10 ** rng.uniform(2, 7))))
    process = start(method, place)
    time.sleep(rng.uniform(0.2, 1.0) * seconds)
    if disaster == "second process":
        for each in (process, start(method, place)):  # which of the two comes too late depends on the moment
            expect([0, 1], each)
    else:
        process.send_signal(signal.Signals[disaster])
        process.communicate()


def disturbed(method: str, place: Path, seed: int, seconds: float) -> list[str]:
    """A run through up to three disasters, and to its end. Returns the disasters."""
    rng = np.random.default_rng(seed)
    met = list(rng.permutation(DISASTERS)[: rng.integers(1, 4)])
    for disaster in met:
        if not (place / "run" / "final.json").is_file():
            wreck(disaster, method, place, rng, seconds)
    if not (place / "run" / "final.json").is_file():
        expect([0], start(method, place))
    return met


def storm(runs: int, folder: Path, seed: int = 0) -> tuple[Counter, dict[str, list[str]]]:
    """How often each disaster was met, and what differs in the runs that differ from undisturbed ones."""
    methods, seconds, undisturbed = list(METHODS)[:runs], {}, {}
    for method in methods:
        began = time.perf_counter()
        expect([0], start(method, folder / method))
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
