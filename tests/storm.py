"""A storm: runs that are killed, stopped, out of disk space or resumed twice at once, against undisturbed ones.

    python tests/storm.py                100 runs of 12 steps, half an hour on two cores
    python tests/storm.py --runs 4       one of each method; tests/test_train.py has the first two

A run meets up to three disasters at random moments, each in a process of its own, and is resumed after each. In the end
everything that it wrote must be what an undisturbed run wrote, to the byte, but for what a clock measured.
"""
import argparse
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

ROOT = Path(__file__).parent.parent
METHODS = {"none": ["--updates_per_batch", "2"],
           "ppo": ["--kl", "0.1", "--temperature", "0.8", "--warmup_steps", "5", "--linear_decay", "--eval_greedy"],
           "vineppo": ["--k", "2"],
           "learned_importance": ["--reward", "random"]}
FLAGS = ("--steps 12 --questions 2 --answers 3 --eval_problems 4 --max_new_tokens 40 --eval_every 5 --state_every 3 "
         "--checkpoint_every 4 --sample_every 2").split()
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
DISASTERS = (*(s.name for s in SIGNALS), "disk full", "second --resume")
BY_THE_CLOCK = ("seconds", "tokens_per_second")  # columns of metrics.csv


# ---------------------------------------------------------------------------------------------- what differs


def differences(run: Path, other: Path) -> list[str]:
    """The files in which two runs differ, other than by a clock, by the run's own path and by the process's number."""
    files = [{str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()} for folder in (run, other)]
    names = files[0].keys() | files[1].keys()
    return sorted(name for name in names - {"lock", "writer"}
                  if not all(name in f for f in files) or content(files[0][name]) != content(files[1][name]))


def content(file: Path) -> object:
    """What a file holds, without what may differ."""
    if file.name == "metrics.csv":
        return [{k: v for k, v in row.items() if k not in BY_THE_CLOCK} for row in csv.DictReader(file.open())]
    if file.name == "config.json" and (config := json.loads(file.read_text())).keys() >= {"settings", "command"}:
        return config | {"settings": config["settings"] | {"out": ""}, "command": ""}
    if file.name == "state.pt":
        state = torch.load(file, weights_only=True)
        del state["settings"]["out"]
        del state["lengths"]["metrics.csv"], state["checksums"]["metrics.csv"]  # of times
        return repr_of(state)
    return file.read_bytes()


def repr_of(value: object) -> object:
    """A nested dict with its tensors as bytes, so that == compares them."""
    if isinstance(value, dict):
        return {key: repr_of(inner) for key, inner in value.items()}
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)


# ------------------------------------------------------------------------------------------------ a disturbed run


def start(arguments: list[str], largest_file: int | None = None) -> subprocess.Popen:
    """Start train.py. A file that would grow beyond largest_file bytes can't be written, as on a full disk."""
    def limit():
        if largest_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    return subprocess.Popen([sys.executable, "train.py", *arguments], cwd=ROOT, preexec_fn=limit, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def arguments(method: str, run: Path) -> list[str]:
    """How to begin a run, or to go on with it."""
    new = ["--mitigation", method, *METHODS[method], *FLAGS, "--out", str(run)]
    return ["--resume", str(run)] if run.exists() else new


def wreck(disaster: str, method: str, run: Path, rng: np.random.Generator, seconds: float) -> None:
    """Begin or continue a run and let it meet a disaster. seconds: how long an undisturbed run takes."""
    limit = int(10 ** rng.uniform(2, 7)) if disaster == "disk full" else None
    process, delay = start(arguments(method, run), limit), rng.uniform(0.2, 1.0) * seconds
    if disaster == "disk full":
        expect(process, [0, 1])
    elif disaster == "second --resume":
        time.sleep(delay)
        second = [start(["--resume", str(run)])] if run.exists() else []
        for each in (process, *second):  # which of the two comes too late depends on the moment
            expect(each, [0, 1])
    else:
        time.sleep(delay)
        process.send_signal(signal.Signals[disaster])
        process.communicate()


def expect(process: subprocess.Popen, codes: list[int]) -> None:
    """Wait for the end of a process, which must have one of the exit codes and no traceback."""
    _, complaint = process.communicate()
    assert process.returncode in codes and "Traceback" not in complaint, (process.returncode, complaint)


def disturbed(method: str, run: Path, seed: int, seconds: float) -> list[str]:
    """A run through up to three disasters, and to its end. Returns the disasters."""
    rng = np.random.default_rng(seed)
    met = list(rng.permutation(DISASTERS)[: rng.integers(1, 4)])
    for disaster in met:
        if not (run / "final.json").is_file():
            wreck(disaster, method, run, rng, seconds)
    if not (run / "final.json").is_file():
        expect(start(arguments(method, run)), [0])
    return met


# -------------------------------------------------------------------------------------------------- the command


def storm(runs: int, folder: Path, seed: int = 0) -> tuple[Counter, dict[str, list[str]]]:
    """How often each method met each disaster, and what differs in the runs that differ from undisturbed ones."""
    methods, seconds = list(METHODS)[:runs], {}
    for method in methods:
        began = time.perf_counter()
        expect(start(arguments(method, folder / method)), [0])
        seconds[method] = time.perf_counter() - began
    met, different = Counter(), {}

    def one(i: int) -> None:
        method = methods[i % len(methods)]
        run = folder / f"{i:03d}-{method}"
        met.update((disaster, method) for disaster in disturbed(method, run, seed + i, seconds[method]))
        if found := differences(folder / method, run):
            different[run.name] = found
        print(f"{i + 1}/{runs} {run.name}: {', '.join(found) or 'same'}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(runs)))  # the list asks for each result, so an exception is raised here
    return met, different


def main() -> None:
    """Print how often each method met each disaster; exit with 1 where a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        met, different = storm(args.runs, Path(folder), args.seed)
    for (disaster, method), count in sorted(met.items()):
        print(f"{disaster} met by {method}: {count}")
    print(f"{args.runs} runs, of which {len(different)} differ from an undisturbed one")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
