"""The study: does better credit learn faster? Methods and hyper-parameters over seeds, each run a plain train.py.

    python -m experiments.study                                 all of it, in the order of PARTS: a day on two cores
    python -m experiments.study --parts main --levels easy      the main table: every method, five seeds
    python -m experiments.study --list                          what is left, a command a line: for Slurm, parallel, Ray
    python -m experiments.study --collect                       only take over the runs that finished in runs/study
    python analyze.py results/runs.csv                          the tables and pictures of what is there

As many runs at a time as the machine has cores, each with its share of threads. A finished run becomes a row of
results/runs.csv, which git tracks, and what has a row there is done: the same command goes on after an interruption,
on another machine too. Seeds are the outer loop, so that whatever is there compares all methods on the same seeds.
A run that was cut off is resumed; of a finished one, credit/ (24 MB) is removed unless --keep. Several studies may
share a disk; commands of --list take no lock, so let no study do the same runs beside them. Linux and macOS.

Two levels. `easy` is the bundled default. `hard` asks the same model only for the puzzles that a single sequence of
steps solves, and gives it more tokens: half as many succeed at the start, and the more failed attempts a response
holds, the less a credit that is the same on all of them says.
"""
import argparse
import csv
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Iterator, NamedTuple, TextIO

import numpy as np

import train
from analyze import NO_DIFFERENCE, read_metrics, read_rows, summarize
from countdown_task import solutions, universe
from mitigations import MITIGATIONS, parameters
from qwen2_model import read_json, replace_file

VERSION = 1  # of the results: rows of another one are not done. When a change alters what runs give, raise it, and
RUNS = Path("runs/study")  # name another folder here, since what lies in this one was made by the old code
RESULTS = Path("results/runs.csv")
ROOT = Path(__file__).parent.parent  # where the commands run, and what those two are relative to
HARD = RUNS / "hard.jsonl"
LEVELS = {"easy": "", "hard": f" --data {HARD} --max_new_tokens 240"}
METHODS = tuple(name + " --k 3" * (name == "vineppo") for name in MITIGATIONS)  # its 9 take more than twice as long
SWEEPS = (*(f"outcome_conditional --think_discount {x}" for x in (0.25, 0.75, 1.0)),  # beside the default of each
          *(f"inverse_logprob --epsilon {x}" for x in (0.01, 0.5)),
          *(f"inverse_logprob --epsilon {x} --detach false" for x in (0.01, 0.1, 0.5)),
          *(f"attention_credit --credit_scale {x}" for x in (0.5, 1.0, 4.0)),
          *(f"entropy_weighted --entropy_temp {x}" for x in (0.5, 2.0)),
          *(f"entropy_masking --mask_percentile {x}" for x in (70.0, 90.0)))
UNSCALED = tuple(f"{name} --normalize none" for name in (
    "outcome_conditional", "inverse_logprob", "inverse_logprob --detach false", "attention_credit", "entropy_weighted",
    "entropy_masking", "learned_importance"))
RATES = tuple(f"{name} --lr {train.Settings().lr * factor:g}" for name in METHODS for factor in (0.5, 2))
PARTS = {  # level, methods with their flags, seeds
    "main": [(level, METHODS, range(5)) for level in LEVELS],
    "rloo": [(level, ("none --advantage rloo",), range(5)) for level in LEVELS],  # is it only the division by std(r)?
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

    @property
    def command(self) -> str:
        """The train.py command that makes the run."""
        return (f"python train.py --mitigation {self.flags}{LEVELS[self.level]} --seed {self.seed} "
                f"--out {self.folder}")

    def next_command(self) -> str:
        """The same, or the one that goes on with what is there."""
        begun = (self.folder / "config.json").is_file()
        return f"python train.py --resume {self.folder}" if begun else self.command


def list_experiments(parts: list[str], levels: list[str], methods: list[str]) -> list[Experiment]:
    """All runs of some parts, levels and methods, in order."""
    return [Experiment(part, level, flags, seed) for part in PARTS if part in parts
            for level, some, seeds in PARTS[part] if level in levels
            for seed in seeds for flags in some if flags.split()[0] in methods]


def write_hard_puzzles() -> None:
    """Every puzzle of the universe that a single sequence of whole-number steps solves, its numbers in random order.

    Equal numbers count apart: 7, 7 and 10 make 11 by either 7 / the other, so that is not one of them."""
    with lock():
        if not HARD.is_file():
            rng = np.random.default_rng(0)
            rows = [{"nums": rng.permutation(p.numbers).tolist(), "target": p.target} for p in universe()
                    if len(solutions(p, whole=True)) == 1]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            replace_file(HARD, lambda part: part.write_text(text, encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------- rows


@contextmanager
def lock() -> Iterator[None]:
    """Only one process at a time writes what all studies share."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with (RUNS / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_finished(run: Path) -> bool:
    """Whether a run took all its steps and was measured after them."""
    if not (run / "final.json").is_file():
        return False
    final, wanted = read_json(run / "final.json"), read_json(run / "config.json")["settings"]["steps"]
    return final["step"] == wanted and "pass@16" in final


def changes(values: dict, defaults: dict) -> str:
    """What differs from the defaults, as in `lr=0.0001`."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value != defaults.get(name))


def check_settings(e: Experiment, config: dict) -> None:
    """Raises ValueError where the run in the folder is not that of the experiment's command, as after a trial of it."""
    settings, own, _ = train.parse(shlex.split(e.command)[2:])
    found = config["settings"] | config["method"]
    if other := [key for key, value in (asdict(settings) | own).items() if key != "out" and found.get(key) != value]:
        raise ValueError(f"{e.folder} is a run with another --{other[0]} than the study's: move it away")


def make_row(e: Experiment) -> dict:
    """A finished run's row of results/runs.csv."""
    config = read_json(e.folder / "config.json")
    check_settings(e, config)
    settings, name = config["settings"], config["settings"]["mitigation"]
    defaults = {f.name: f.default for f in fields(train.Settings)}
    own = parameters(name) | {"normalize": defaults["normalize"]}
    common = NO_DIFFERENCE | {"model"} | {word[2:] for word in LEVELS[e.level].split() if word.startswith("--")}
    figures = summarize(e.folder)
    curve = " ".join(f"{step:.0f}:{success:.6g}" for step, success in figures.pop("curve").items())
    figures["seconds"] = np.nansum(read_metrics(e.folder)["seconds"])  # of all steps; measuring not counted
    method = f"{name} {changes(config['method'] | {'normalize': settings['normalize']}, own)}".strip()
    setting = changes({key: value for key, value in settings.items() if key not in common}, defaults)
    return {"run": e.name, "version": VERSION, "part": e.part, "level": e.level, "method": method, "setting": setting,
            "seed": e.seed, "command": config["command"]} | {
            key: f"{value:.6g}" for key, value in figures.items()} | {"curve": curve}


def done_runs() -> dict[str, dict]:
    """The rows of this version of the results, by run."""
    rows = read_rows(RESULTS) if RESULTS.is_file() else []
    return {row["run"]: row for row in rows if row["version"] == str(VERSION)}


def take_over(e: Experiment, keep: bool) -> None:
    """Give a finished run its row, also kept in its folder, and remove its credit log.

    Readers, and a kill at any moment, find the old table or the new one, whole."""
    with lock():
        if e.name not in done_runs():
            kept = e.folder / "row.json"
            row = read_json(kept) if kept.is_file() else make_row(e)
            if str(row["version"]) != str(VERSION):
                raise ValueError(f"{e.folder} is of version {row['version']} of the results: move it away")
            replace_file(kept, lambda part: part.write_text(json.dumps(row), encoding="utf-8"))
            rows = [*(read_rows(RESULTS) if RESULTS.is_file() else []), row]
            RESULTS.parent.mkdir(exist_ok=True)
            replace_file(RESULTS, lambda part: write_rows(rows, part))
        if not keep:
            shutil.rmtree(e.folder / "credit", ignore_errors=True)


def write_rows(rows: list[dict], file: Path) -> None:
    """A table with all columns of all rows: versions may differ in them."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# -------------------------------------------------------------------------------------------------- processes


def hold(e: Experiment) -> TextIO | None:
    """The run's log, open and locked, or None where another process has it.

    The run prints into it, so the lock lasts as long as the run, even if the study is killed."""
    e.log.parent.mkdir(parents=True, exist_ok=True)
    log = e.log.open("a")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return log
    except BlockingIOError:
        log.close()


def launch(e: Experiment, threads: int) -> subprocess.Popen | None:
    """Start a run, or go on with it; None where another process has it."""
    if (log := hold(e)) is None:
        return None
    with log:
        return subprocess.Popen([sys.executable, *shlex.split(e.next_command())[1:]], stdout=log, stderr=log,
                                env=os.environ | {"OMP_NUM_THREADS": str(threads)}, start_new_session=True)


class Study:
    """The runs still to do, those at work, and those that failed."""

    def __init__(self, experiments: list[Experiment], processes: int, threads: int, keep: bool):
        self.all, self.processes, self.threads, self.keep = experiments, processes, threads, keep
        self.done = done_runs()
        self.todo = [e for e in experiments if e.name not in self.done]
        self.running: dict[Experiment, subprocess.Popen] = {}
        self.began: dict[Experiment, float] = {}  # when those started
        self.failed: dict[Experiment, str] = {}  # and why

    def work(self) -> None:
        """Keep the processes busy until all is done."""
        height = 0
        try:
            while self.todo or self.running:
                ended = [e for e, process in self.running.items() if process.poll() is not None]
                for e in ended:
                    self.settle(e, self.running.pop(e).returncode)
                height = draw(self, ended + self.fill(), height)
                time.sleep(1)
        finally:
            self.stop()

    def stop(self) -> None:
        """Let the runs at work end with their step, which they write down to go on from."""
        if self.running:
            print("stopping the runs after their step; Ctrl-C again leaves them to it", flush=True)
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        for process in self.running.values():
            process.wait()

    def fill(self) -> list[Experiment]:
        """Start runs while there is room; those that turn out to be finished are settled, and returned."""
        finished = []
        for e in list(self.todo):
            if e.name in self.done:  # by another study, since this one began
                pass
            elif is_finished(e.folder):
                finished.append(e)
                self.settle(e, 0)
            elif len(self.running) == self.processes:
                break
            elif process := launch(e, self.threads):
                self.running[e], self.began[e] = process, time.monotonic()
            else:
                continue
            self.todo.remove(e)
        return finished

    def settle(self, e: Experiment, code: int) -> None:
        """Give a run that ended its row, or remember why it has none."""
        if not is_finished(e.folder):
            self.failed[e] = f"ended with code {code}, and last said: {last_line(e)}"
            return
        try:
            take_over(e, self.keep)
            self.done = done_runs()
        except (ValueError, OSError) as error:
            self.failed[e] = str(error)

    def expected(self, e: Experiment) -> float:
        """Seconds that a run takes, as the same with other seeds did or now say, else those of its level, else all; a
        fifth is added for measuring."""
        same = [row for row in self.done.values() if row["run"].rpartition("-seed")[0] == e.name.rpartition("-seed")[0]]
        alike = [] if same else [r for r in self.running if (r.level, r.flags) == (e.level, e.flags)]
        if say := [whole for r in alike if np.isfinite(whole := seconds_said(r)[1])]:
            return float(np.mean(say))
        level = [row for row in self.done.values() if row["level"] == e.level]
        return 1.2 * float(np.mean([float(row["seconds"]) for row in same or level or self.done.values()]))

    def left(self, e: Experiment) -> float:
        """Seconds until a run at work has ended, as it says, or as expected where it says nothing yet."""
        left, _ = seconds_said(e)
        return max(0.0, self.expected(e) - (time.monotonic() - self.began[e])) if np.isnan(left) else left

    def eta(self) -> float:
        """Seconds until all is done, at least until the last of the running ones is; NaN before there is a row."""
        if not self.done:
            return float("nan")
        left = [self.left(e) for e in self.running]
        return max(sum([*left, *map(self.expected, self.todo)]) / self.processes, *left, 0.0)

    def progress(self) -> str:
        """How much is done, and when all will be."""
        eta, done = self.eta(), sum(e.name in self.done for e in self.all)
        when = "after the first run" if np.isnan(eta) else f"{eta // 3600:.0f} h {eta % 3600 // 60:02.0f} min"
        return f"{done}/{len(self.all)} runs done, ETA {when}"


def last_line(e: Experiment) -> str:
    """The last that a run printed."""
    text = e.log.read_text(encoding="utf-8", errors="replace").strip() if e.log.is_file() else ""
    return text.splitlines()[-1] if text else "nothing"


def seconds_said(e: Experiment) -> tuple[float, float]:
    """What a run said last that it still needs, and what it would need in all; NaN where it said nothing of it."""
    if not (said := re.search(r"step +(\d+)/(\d+) .*ETA (\d+):(\d\d)", last_line(e))):
        return float("nan"), float("nan")
    step, steps, minutes, seconds = map(int, said.groups())
    left = 60.0 * minutes + seconds
    return left, left * steps / (steps - step) if step < steps else float("nan")


def table(study: Study) -> Iterator[str]:
    """A line for each part and level, a line for each process at work, those that failed, and the sum."""
    yield f"{'part':<10}{'level':<7}{'runs':>5}{'done':>6}{'running':>9}{'failed':>8}"
    for part, level in dict.fromkeys((e.part, e.level) for e in study.all):
        some = [e for e in study.all if (e.part, e.level) == (part, level)]
        done, running, failed = (sum(test) for test in zip(*(
            (e.name in study.done, e in study.running, e in study.failed) for e in some)))
        yield f"{part:<10}{level:<7}{len(some):>5}{done:>6}{running:>9}{failed:>8}"
    yield from (f"{e.name}: {last_line(e)}" for e in study.running)
    yield from (f"{e.name} failed: {why}" for e, why in study.failed.items())
    yield study.progress()


def draw(study: Study, settled: list[Experiment], height: int) -> int:
    """Draw the table over the last one, of so many lines, and return its height; where the output is no terminal, print
    a line for each run that was settled."""
    if sys.stdout.isatty():
        lines, size = list(table(study)), shutil.get_terminal_size()
        lines = [*lines[:-1][: size.lines - 3], lines[-1]]  # what does not fit can't be drawn over
        print(f"\x1b[{height}A\x1b[J" * (height > 0) + "\n".join(line[: size.columns] for line in lines), flush=True)
        return len(lines)
    for e in settled:
        end = f"failed: {study.failed[e]}" if e in study.failed else f"{float(study.done[e.name]['end']):.1%} solved"
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
        study = Study(list_experiments(args.parts, args.levels, args.methods), args.processes, args.threads, args.keep)
        if any(e.level == "hard" for e in study.todo):
            write_hard_puzzles()
        if args.list:
            left = [e.next_command() for e in study.todo if not is_finished(e.folder)]
            sys.stdout.write("".join(f"{command}\n" for command in left))  # at once: head may close the pipe early
            return
        if args.collect:
            study.todo = [e for e in study.todo if is_finished(e.folder)]
        study.work()
    except KeyboardInterrupt:
        train.fail("stopped; the same command goes on from here")
    except (ValueError, OSError) as error:
        train.fail(str(error))
    for e, why in study.failed.items():
        print(f"{e.name} failed: {why}", file=sys.stderr)
    if study.failed:
        train.fail(f"{len(study.failed)} runs failed; see {RUNS}/*/*.log")
    print(f"{study.progress().split(',')[0]}; read them with: python analyze.py {RESULTS}")


if __name__ == "__main__":
    main()
