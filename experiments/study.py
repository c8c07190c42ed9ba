"""The study: does better credit learn faster? Methods and hyper-parameters over seeds, each run a plain train.py.

    python -m experiments.study                                 all of it, in the order of PARTS: a night on two cores
    python -m experiments.study --parts main --levels easy      the main table: every method, five seeds
    python -m experiments.study --list                          what is left, a command a line: for Slurm, parallel, Ray
    python -m experiments.study --collect                       only take over the runs that finished in runs/study
    python analyze.py results/runs.csv                          the tables and pictures of what is there

As many runs at a time as the machine has cores, each with its share of threads. A finished run becomes a row of
results/runs.csv, which git tracks, and what has a row there is done: the same command goes on after an interruption,
on another machine too. Seeds are the outer loop, so that whatever is there compares all methods on the same seeds.
A run that was cut off is resumed. Of a finished one, credit/ (24 MB) is removed unless --keep. Linux and macOS.

Two levels. `easy` is the bundled default. `hard` asks the same model only for the puzzles that a single sequence of
steps solves, and gives it more tokens: half as many succeed at the start, and the more failed attempts a response
holds, the less a credit that is the same on all of them says.
"""
import argparse
import csv
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np

import train
from analyze import NO_DIFFERENCE, read_metrics, read_rows, summarize
from countdown_task import solutions, universe
from mitigations import MITIGATIONS, parameters
from qwen2_model import read_json, replace_file

VERSION = 1  # of the results: rows of another one do not count as done; raise it when a change alters what a run gives
ROOT = Path(__file__).parent.parent
RUNS, RESULTS = Path("runs/study"), Path("results/runs.csv")  # both relative to ROOT, where the commands run
HARD = RUNS / "hard.jsonl"
LEVELS = {"easy": "", "hard": f" --data {HARD} --max_new_tokens 240"}
METHODS = tuple(name + " --k 3" * (name == "vineppo") for name in MITIGATIONS)  # its 9 take three times as long
SWEEPS = (*(f"outcome_conditional --think_discount {x}" for x in (0.25, 0.75, 1.0)),  # beside the default of each
          *(f"inverse_logprob --epsilon {x}" for x in (0.01, 0.5)),
          *(f"inverse_logprob --epsilon {x} --detach false" for x in (0.01, 0.1, 0.5)),
          *(f"attention_credit --credit_scale {x}" for x in (0.5, 1.0, 4.0)),
          *(f"entropy_weighted --entropy_temp {x}" for x in (0.5, 2.0)),
          *(f"entropy_masking --mask_percentile {x}" for x in (70.0, 90.0)), "vineppo --k 9")
UNSCALED = tuple(f"{name} --normalize none" for name in (
    "outcome_conditional", "inverse_logprob", "inverse_logprob --detach false", "attention_credit", "entropy_weighted",
    "entropy_masking", "learned_importance"))
RATES = tuple(f"{name} --lr {train.Settings().lr * factor:g}" for name in METHODS for factor in (0.5, 2))
PARTS = {  # level, methods with their flags, seeds
    "main": [(level, METHODS, range(5)) for level in LEVELS],
    "sweeps": [("easy", SWEEPS, range(3))],
    "unscaled": [("easy", UNSCALED, range(3))],
    "rates": [("easy", RATES, range(2))],
    "fresh": [("easy", ("none", "ppo", "entropy_weighted"), range(5, 10))],  # does the main table repeat?
}


class Experiment(NamedTuple):
    """One run: `flags` begins with the method's name."""

    part: str
    level: str
    flags: str
    seed: int

    @property
    def name(self) -> str:
        """Such as easy/outcome_conditional-think_discount-0.25-seed1."""
        return f"{self.level}/{self.flags.replace(' --', '-').replace(' ', '-')}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """Where the run is."""
        return RUNS / self.name

    @property
    def log(self) -> Path:
        """What the run prints."""
        return RUNS / f"{self.name}.log"

    def command(self) -> str:
        """The run's train.py command: of the beginning, or to go on with what is there."""
        if (self.folder / "config.json").is_file():
            return f"python train.py --resume {self.folder}"
        return (f"python train.py --mitigation {self.flags}{LEVELS[self.level]} --seed {self.seed} "
                f"--out {self.folder}")


def list_experiments(parts: list[str], levels: list[str], methods: list[str]) -> list[Experiment]:
    """All runs of some parts, levels and methods, in order."""
    return [Experiment(part, level, flags, seed) for part in PARTS if part in parts
            for level, some, seeds in PARTS[part] if level in levels
            for seed in seeds for flags in some if flags.split()[0] in methods]


def write_hard_puzzles(file: Path) -> None:
    """Every puzzle of the universe that a single sequence of whole-number steps solves, its numbers in random order.

    Equal numbers count apart: 7, 7 and 10 make 11 by either 7 / the other, so that is not one of them."""
    rng = np.random.default_rng(0)
    rows = [{"nums": rng.permutation(p.numbers).tolist(), "target": p.target} for p in universe()
            if len(solutions(p, whole=True)) == 1]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, lambda part: part.write_text(text, encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------- rows


def is_finished(run: Path) -> bool:
    """Whether a run took all its steps and was measured after them."""
    final = run / "final.json"
    return final.is_file() and "pass@16" in (known := read_json(final)) \
        and known["step"] == read_json(run / "config.json")["settings"]["steps"]


def changes(values: dict, defaults: dict) -> str:
    """What differs from the defaults, as in `lr=0.0001`."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value != defaults.get(name))


def make_row(e: Experiment) -> dict:
    """A finished run's row of results/runs.csv."""
    config = read_json(e.folder / "config.json")
    settings, name = config["settings"], config["settings"]["mitigation"]
    defaults = {f.name: f.default for f in fields(train.Settings)}
    own = parameters(name) | {"normalize": defaults["normalize"]}
    common = NO_DIFFERENCE | {"model"} | {word[2:] for word in LEVELS[e.level].split() if word.startswith("--")}
    figures = summarize(e.folder)
    curve = " ".join(f"{step:.0f}:{success:.6g}" for step, success in figures.pop("curve").items())
    method = f"{name} {changes(config['method'] | {'normalize': settings['normalize']}, own)}".strip()
    setting = changes({key: value for key, value in settings.items() if key not in common}, defaults)
    return {"run": e.name, "version": VERSION, "part": e.part, "level": e.level, "method": method, "setting": setting,
            "seed": e.seed, "command": config["command"]} | {key: f"{value:.6g}" for key, value in figures.items()} | {
            "seconds": f"{np.nansum(read_metrics(e.folder)['seconds']):.0f}", "curve": curve}


def append_row(row: dict) -> None:
    """Add a row to results/runs.csv; readers, and a kill at any moment, find the old file or the new one, whole."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RUNS.joinpath("rows.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several studies may share a disk
        rows = read_rows(RESULTS) if RESULTS.is_file() else []
        if any(old["run"] == row["run"] and old["version"] == str(row["version"]) for old in rows):
            return

        def write(part: Path) -> None:
            with part.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, row, lineterminator="\n")
                writer.writeheader()
                writer.writerows([*rows, row])
        replace_file(RESULTS, write)


def done_runs() -> dict[str, dict]:
    """The rows of this version of the results, by run."""
    rows = read_rows(RESULTS) if RESULTS.is_file() else []
    return {row["run"]: row for row in rows if row["version"] == str(VERSION)}


# -------------------------------------------------------------------------------------------------- processes


def start(e: Experiment, threads: int) -> subprocess.Popen | None:
    """Start a run, or go on with it; None where another process has it.

    The lock is on the log that the run prints into, so it lasts as long as the run, even if this process is killed.
    """
    e.folder.parent.mkdir(parents=True, exist_ok=True)
    with e.log.open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        command = [sys.executable, *shlex.split(e.command())[1:]]
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": str(threads)})


class Study:
    """The runs still to do, those at work, and those that failed."""

    def __init__(self, experiments: list[Experiment], processes: int, threads: int, keep: bool):
        self.all, self.processes, self.threads, self.keep = experiments, processes, threads, keep
        self.done = done_runs()
        self.todo = [e for e in experiments if e.name not in self.done]
        self.running: dict[Experiment, subprocess.Popen] = {}
        self.failed: dict[Experiment, str] = {}  # and why
        self.began, self.trained = time.monotonic(), 0.0  # when this session began; seconds of training in its rows

    def work(self) -> None:
        """Keep the processes busy until all is done."""
        height = 0
        try:
            while self.todo or self.running:
                ended = [e for e, process in self.running.items() if process.poll() is not None]
                for e in ended:
                    del self.running[e]
                    self.settle(e)
                    self.trained += float(self.done[e.name]["seconds"]) if e.name in self.done else 0
                height = show(self, ended + self.fill(), height)
                time.sleep(1)
        finally:  # Ctrl-C reached them, too: they stop after the running step, and write down what to go on from
            for process in self.running.values():
                process.wait()

    def fill(self) -> list[Experiment]:
        """Start runs while there is room; those that turn out to be finished are settled, and returned."""
        finished = []
        for e in list(self.todo):
            if len(self.running) == self.processes:
                break
            if is_finished(e.folder):
                finished.append(e)
                self.todo.remove(e)
                self.settle(e)
            elif process := start(e, self.threads):
                self.todo.remove(e)
                self.running[e] = process
        return finished

    def settle(self, e: Experiment) -> None:
        """Turn a finished run into a row, then remove its credit log; or remember that it failed."""
        try:
            if not is_finished(e.folder):
                raise ValueError(last_line(e))
            append_row(make_row(e))
        except (ValueError, OSError) as error:
            self.failed[e] = str(error)
            return
        if not self.keep:
            shutil.rmtree(e.folder / "credit")
        self.done = done_runs()

    def eta(self) -> float:
        """Seconds until all is done, if runs take as long as those of their method took; NaN before the first."""
        if not self.trained:
            return float("nan")
        known: dict[str, list[float]] = {}
        for row in self.done.values():
            known.setdefault(row["method"].split()[0], []).append(float(row["seconds"]))
        mean = np.mean([x for some in known.values() for x in some])
        left = sum(np.mean(known.get(e.flags.split()[0], mean)) for e in (*self.todo, *self.running))
        return left * (time.monotonic() - self.began) / self.trained

    def progress(self) -> str:
        """How much is done, and when all will be."""
        eta, done = self.eta(), sum(e.name in self.done for e in self.all)
        when = f"{eta // 3600:.0f} h {eta % 3600 // 60:02.0f} min" if eta == eta else "after the first run"
        return f"{done}/{len(self.all)} runs done, ETA {when}"


def last_line(e: Experiment) -> str:
    """The last that a run printed."""
    text = e.log.read_text(encoding="utf-8", errors="replace") if e.log.is_file() else ""
    return (text.split() and text.strip().splitlines()[-1]) or "it printed nothing"


def table(study: Study) -> Iterator[str]:
    """A line for each part and level, a line for each process at work, those that failed, and the sum."""
    yield f"{'part':<10}{'level':<7}{'runs':>5}{'done':>6}{'running':>9}{'failed':>8}"
    for part, level in dict.fromkeys((e.part, e.level) for e in study.all):
        some = [e for e in study.all if (e.part, e.level) == (part, level)]
        counts = (sum(e.name in study.done for e in some), *(sum(e in group for e in some)
                                                             for group in (study.running, study.failed)))
        yield f"{part:<10}{level:<7}{len(some):>5}{counts[0]:>6}{counts[1]:>9}{counts[2]:>8}"
    yield from (f"{e.name}: {last_line(e)}" for e in study.running)
    yield from (f"{e.name} failed: {why}" for e, why in study.failed.items())
    yield study.progress()


def show(study: Study, settled: list[Experiment], height: int) -> int:
    """Draw the table over the last one, of so many lines, and return its height; where the output is no terminal, print
    a line for each run that was settled."""
    if sys.stdout.isatty():
        lines, width = list(table(study)), shutil.get_terminal_size().columns
        print(f"\x1b[{height}A\x1b[J" * (height > 0) + "\n".join(line[:width] for line in lines), flush=True)
        return len(lines)
    for e in settled:
        end = f"{float(study.done[e.name]['end']):.1%} solved" if e.name in study.done else f"failed: {study.failed[e]}"
        print(f"{study.progress()}  {e.name}: {end}", flush=True)
    return 0


# ---------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="python -m experiments.study [--flag value ...]", allow_abbrev=False)
    parser.error = train.fail
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for name, choices in (("parts", PARTS), ("levels", LEVELS), ("methods", MITIGATIONS)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices),
                            help=f"only these of: {', '.join(choices)}", metavar=name.upper())
    parser.add_argument("--processes", type=int, default=cores, help=f"runs at a time (default: the cores, {cores})")
    parser.add_argument("--keep", action="store_true", help="keep the credit logs of finished runs")
    parser.add_argument("--list", action="store_true", help="print the commands of what is left, and start nothing")
    parser.add_argument("--collect", action="store_true", help="only take over finished runs, and start nothing")
    args = parser.parse_args(arguments)
    if args.processes < 1:
        train.fail("--processes must be at least 1")
    args.threads = max(1, cores // args.processes)
    return args


def main() -> None:
    """Run what is left, or list it."""
    args = parse(sys.argv[1:])
    os.chdir(ROOT)
    try:
        if not HARD.is_file():
            write_hard_puzzles(HARD)
        study = Study(list_experiments(args.parts, args.levels, args.methods), args.processes, args.threads, args.keep)
        if args.list:
            return print("\n".join(e.command() for e in study.todo if not is_finished(e.folder)))
        if args.collect:
            study.todo = [e for e in study.todo if is_finished(e.folder)]
        study.work()
    except KeyboardInterrupt:
        train.fail("stopped; the same command goes on from here")
    except (ValueError, OSError) as error:
        train.fail(str(error))
    if study.failed:
        train.fail("; ".join(f"{e.name} failed: {why}, see {e.log}" for e, why in study.failed.items()))
    print(f"{study.progress().split(',')[0]}; read them with: python analyze.py {RESULTS}")


if __name__ == "__main__":
    main()
