"""The study: does better credit learn faster? Methods and hyper-parameters over seeds, each run a plain train.py.

    python -m lab.study.run                                 everything, in the order of PARTS: a day on two cores
    python -m lab.study.run --parts main --levels easy      the main table: every method, five or ten seeds
    python -m lab.study.run --list                          the commands that are left, for Slurm, parallel or Ray
    python -m lab.study.run --collect                       only take over the finished runs in runs/study-2
    python -m lab.study.run --tables                        tables and pictures of lab/study/runs.csv, beside it

As many runs at a time as the machine has cores, each with its share of threads. A finished run becomes a row of
lab/study/runs.csv, which git tracks. A run with a row is done, so the same command resumes an interrupted study, on
another machine too; a run that was killed resumes from its last saved state. Seeds are the outer loop, so that the rows
compare all methods on the same seeds at any time. A finished run loses its credit/ (24 MB) unless --keep. Studies may
share a disk. Commands from --list take no lock: run them beside no study of the same runs. Linux and macOS only.

`easy` is the bundled default. Each other level changes one thing. `hard` asks the same model only for puzzles that a
single sequence of steps solves, and allows more tokens: half as many responses succeed at the start, and the more
failed attempts a response holds, the less is said by credit that is the same on all of them. `small` is a model with a
fifth of the parameters, trained by lab/warm_start.py until it solves about as many puzzles at the start. `latin` and
`math` are other tasks, with models of their own: see predictions.md, which is older than their runs.
"""
import argparse
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np

import train
from analyze import COSTS, summarize
from countdown_task import solutions, universe
from lab.study.tables import read_rows, write_study
from methods import MITIGATIONS
from plumbing.files import read_json, replace_file, write_json
from plumbing.flags import new_parser
from plumbing.progress import fail, one_sentence
from plumbing.report import write_csv
from plumbing.runs import NO_DIFFERENCE, read_config, read_final, read_metrics

VERSION = 2  # of the results; rows of another version do not count. Raise it when a change alters what runs give
RUNS = Path(f"runs/study-{VERSION}")
RESULTS = Path("lab/study/runs.csv")
ROOT = Path(__file__).parents[2]  # commands run here, and the two paths above are relative to it
HARD = RUNS / "hard.jsonl"
LEVELS = {"easy": "", "hard": f" --data {HARD} --max_new_tokens 240", "small": " --model models/countdown-small",
          "latin": " --task latin", "math": " --task math"}


def values_of(flags: str) -> dict:
    """All settings and hyper-parameters that flags of train.py stand for."""
    settings, method, _ = train.parse_flags(shlex.split(flags))
    return asdict(train.with_model(settings)) | method


METHODS = tuple(name for name in MITIGATIONS if name != "regrade_ablation")  # which is hardly more than `none`
RLOO_FLAGS = "none --advantage rloo"  # is it only the division by the deviation of the rewards?
AHEAD = ("none", RLOO_FLAGS, "optimal_baseline", "ppo", "vineppo")  # what is ahead, and its opponents: ten seeds
RATIO_FLAGS = "entropy_ratio --advantage rloo"  # of the reweightings, the one that was furthest ahead of GRPO
# So near GRPO with five seeds that it took ten to tell.
CLOSE = ("entropy_ratio", "token_type", "entropy_weighted", "attention_credit", "outcome_conditional")
FORMS = ("none --advantage maxrl", "none --advantage batch", "none --reward random", "first_error --solver true",
         "vineppo --cuts uncertain", "ppo --gamma 0.99", *(f"token_type --filler {x}" for x in (0.0, 2.0)),
         *(f"{name} --advantage rloo" for name in ("entropy_masking", "entropy_weighted", "attention_credit")))
SWEEPS = (*(f"outcome_conditional --think_discount {x}" for x in (0.25, 0.75, 1.0)),  # beside the default of each
          *(f"inverse_logprob --epsilon {x}" for x in (0.01, 0.5)))
# RLOO and GRPO for about 15% more than the measured cost of `vineppo`, 4.9 times GRPO's on easy puzzles and 7.4
# times on hard ones, where its responses grow longer: by more steps or by more responses.
MORE = {"easy": ("--steps 560", "--answers 45"), "hard": ("--steps 800", "--answers 64")}
SIZED = ("none", RLOO_FLAGS, "ppo", "entropy_masking", "entropy_weighted")  # do gains of entropy grow with the model?
NEW = ("none", RLOO_FLAGS, "ppo", "vineppo", "token_type", "random")  # on other tasks
UPDATES = (*(f"{name} --updates_per_batch 4{clip}" for name in ("none", RLOO_FLAGS, "ppo", "entropy_masking")
             for clip in ("", " --clip_high 0.28")), "vineppo --updates_per_batch 4",
           f"{RLOO_FLAGS} --answers 45 --updates_per_batch 4",  # less noise, and no credit per token
           *(f"{name} --updates_per_batch 4 --lr 5e-05" for name in (RLOO_FLAGS, "ppo")))  # four steps of a quarter
PARTS = {  # level, methods with their flags, seeds
    "main": [("easy", (*METHODS, RLOO_FLAGS), range(5)), ("easy", AHEAD + CLOSE, range(5, 10)),
             ("hard", AHEAD, range(5)), ("hard", AHEAD[:-1], range(5, 10)), ("small", SIZED, range(5)),
             ("small", ("vineppo",), range(3)), ("latin", NEW, range(5)), ("math", NEW, range(5))],
    "budget": [("easy", tuple(f"{RLOO_FLAGS} {more}" for more in MORE["easy"]), range(10)),
               ("easy", tuple(f"none {more}" for more in MORE["easy"]), range(5)),
               ("hard", tuple(f"{RLOO_FLAGS} {more}" for more in MORE["hard"]), range(3)),
               ("easy", (f"{RLOO_FLAGS} --answers 115",), range(3)),  # as many sampled tokens as vineppo
               *((level, (f"{RLOO_FLAGS} --answers 24",), range(5)) for level in ("latin", "math"))],
    "forms": [("easy", FORMS, range(5)), ("easy", (RATIO_FLAGS,), range(10)), ("hard", (RATIO_FLAGS,), range(10)),
              *((level, (RATIO_FLAGS,), range(5)) for level in ("small", "latin", "math"))],
    "sweeps": [("easy", SWEEPS, range(3))],
    "updates": [("easy", UPDATES, range(3))],
    "rates": [("easy", tuple(f"{name} --lr 0.0004" for name in (RLOO_FLAGS, "ppo")), range(3))],  # is it the step size?
    "breaks": [("hard", ("value_change",), range(5)), ("hard", ("token_type",), range(3))],  # lab/study/collapse.py
    "trial": [("hard", ("entropy_ratio", "tempo", "first_error", "learned_importance", *FORMS[:6]), range(1))],
    # To check what was written before they ran.
    "fresh": [("easy", (RLOO_FLAGS, "ppo", "vineppo", RATIO_FLAGS), range(10, 15))],
}


class Experiment(NamedTuple):
    """One run; `flags` begins with the name of the method."""

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
        """The run folder."""
        return RUNS / self.name

    @property
    def log(self) -> Path:
        """Where the output of the run goes."""
        return RUNS / f"{self.name}.log"

    @property
    def command(self) -> str:
        """The command that makes the run."""
        return (f"python train.py --mitigation {self.flags}{LEVELS[self.level]} --seed {self.seed} "
                f"--out {self.folder}")

    def is_begun(self) -> bool:
        """Whether there is a run in the folder."""
        return (self.folder / "config.json").is_file()

    def next_command(self) -> str:
        """The same, or the one that resumes the run."""
        return f"python train.py --resume {self.folder}" if self.is_begun() else self.command

    def is_finished(self) -> bool:
        """Whether the run took all its steps and was measured after them."""
        final = read_final(self.folder)
        return "pass@16" in final and final["step"] == read_config(self.folder)["settings"]["steps"]

    def last_line(self) -> str:
        """The last line that the run printed."""
        text = self.log.read_text(encoding="utf-8", errors="replace").strip() if self.log.is_file() else ""
        return text.splitlines()[-1] if text else "nothing"


def list_experiments(parts: list[str], levels: list[str], methods: list[str]) -> list[Experiment]:
    """The runs of some parts, levels and methods, in order."""
    return [Experiment(part, level, flags, seed) for part in PARTS if part in parts
            for level, listed, seeds in PARTS[part] if level in levels
            for seed in seeds for flags in listed if flags.split()[0] in methods]


def write_hard_puzzles() -> None:
    """Every puzzle that a single sequence of whole-number steps solves, its numbers in random order. Equal numbers
    count as different: 7, 7 and 10 make 11 by either 7 / the other, so that puzzle is not one of them."""
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
    """Lets only one process at a time write the files that all studies share."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with (RUNS / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def changes(values: dict, defaults: dict) -> str:
    """The values that differ from the defaults, such as `lr=0.0001`."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value != defaults.get(name))


def own_config(e: Experiment) -> dict:
    """config.json of a run. ValueError where it has other settings than the study's, as after a trial."""
    config = read_config(e.folder)
    made, asked = config["settings"] | config["method"], values_of(e.command.partition("train.py")[2])
    for values in (made, asked):
        values["model"] = Path(values["model"]).name  # a checkout may lie elsewhere
    for name, value in asked.items():
        if name != "out" and made.get(name) != value:
            raise ValueError(f"{e.folder} is a run with another --{name} than the study's: move it away")
    return config


def make_row(e: Experiment) -> dict:
    """The row of a finished run, ValueError for one that is not the study's."""
    config = own_config(e)
    settings, method = config["settings"], config["method"]
    defaults = values_of(f"--mitigation {settings['mitigation']}")
    of_level = {word[2:] for word in LEVELS[e.level].split() if word.startswith("--")}
    unnamed = NO_DIFFERENCE - {"steps", "advantage"} | {"model"} | of_level
    shared = {key: value for key, value in settings.items() if key not in unnamed}
    changed = changes(method | {"normalize": settings["normalize"]}, defaults)
    figures, metrics = summarize(e.folder), read_metrics(e.folder)
    curve, spent = figures.pop("curve"), weighted_tokens(metrics)
    by_step = {"curve": curve, "spent": {step: spent[step] for step in curve}}
    figures["seconds"] = np.nansum(metrics["seconds"])  # of all steps, without evaluation
    return {"run": e.name, "version": VERSION, "part": e.part, "level": e.level,
            "method": f"{settings['mitigation']} {changed}".strip(), "setting": changes(shared, defaults),
            "seed": e.seed, "command": config["command"],
            **{key: f"{value:.6g}" for key, value in figures.items()},
            **{key: " ".join(f"{step:.0f}:{x:.6g}" for step, x in values.items()) for key, values in by_step.items()}}


def weighted_tokens(metrics: dict[str, np.ndarray]) -> dict[float, float]:
    """The cost of a run up to each step: its tokens through the model, weighted as analyze.COSTS says."""
    cost = sum(weight * metrics[name] for name, weight in COSTS.items())  # (steps + 1,) NaN at the start
    return dict(zip(metrics["step"], np.nancumsum(cost)))


def done_runs() -> dict[str, dict]:
    """The rows of this version, by name of the run."""
    return {row["run"]: row for row in read_rows(RESULTS) if row["version"] == str(VERSION)}


def take_over(e: Experiment, keep: bool) -> None:
    """Give a finished run its row, also kept in its folder, and remove its credit log unless `keep`.

    Files are replaced whole, so a kill at any moment leaves the old table or the new one.
    """
    with lock():
        if e.name not in done_runs():
            kept = e.folder / "row.json"
            row = read_json(kept) if kept.is_file() else make_row(e)
            if str(row["version"]) != str(VERSION):
                raise ValueError(f"{e.folder} is of version {row['version']} of the results: move it away")
            write_json(kept, row)
            rows = [*read_rows(RESULTS), row]
            RESULTS.parent.mkdir(exist_ok=True)
            replace_file(RESULTS, lambda part: write_csv(rows, part))
        if not keep:
            shutil.rmtree(e.folder / "credit", ignore_errors=True)


# -------------------------------------------------------------------------------------------------- processes


def launch(e: Experiment, threads: int) -> subprocess.Popen | None:
    """Start or resume a run; None where another process is at it. ValueError for one that is not the study's.

    The run inherits its locked log, so the lock lasts as long as the run, even if the study is killed. It has a session
    of its own, so that Ctrl-C reaches only the study.
    """
    e.log.parent.mkdir(parents=True, exist_ok=True)
    if e.is_begun():
        own_config(e)
    with e.log.open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return subprocess.Popen([sys.executable, *shlex.split(e.next_command())[1:]], stdout=log, stderr=log,
                                env=os.environ | {"OMP_NUM_THREADS": str(threads)}, start_new_session=True)


class Study:
    """The experiments, and which of them wait, run or have failed."""

    def __init__(self, experiments: list[Experiment], processes: int, threads: int, keep: bool):
        self.all, self.processes, self.threads, self.keep = experiments, processes, threads, keep
        self.done = done_runs()
        self.todo = [e for e in experiments if e.name not in self.done]
        self.running: dict[Experiment, subprocess.Popen] = {}
        self.began: dict[Experiment, float] = {}  # by the monotonic clock
        self.failed: dict[Experiment, str] = {}  # the reason

    def work(self) -> None:
        """Keep the processes busy until everything is done. On Ctrl-C, stop the runs; each resumes from its state."""
        try:
            while self.todo or self.running:
                ended = [e for e, process in self.running.items() if process.poll() is not None]
                for e in ended:
                    self.settle(e, self.running.pop(e).returncode)
                report(self, ended + self.fill())
                time.sleep(1)
        finally:
            for process in self.running.values():
                process.terminate()
            for process in self.running.values():
                process.wait()

    def fill(self) -> list[Experiment]:
        """Start runs while there is room. Those found finished are settled instead, and returned."""
        finished = []
        for e in list(self.todo):
            if e.name in self.done:  # by another study, since this one began
                pass
            elif e.is_finished():
                finished.append(e)
                self.settle(e, 0)
            elif len(self.running) == self.processes:
                break
            elif not self.start(e):
                continue
            self.todo.remove(e)
        return finished

    def start(self, e: Experiment) -> bool:
        """Start a run, or record why it can't be; False where another process is at it."""
        try:
            if process := launch(e, self.threads):
                self.running[e], self.began[e] = process, time.monotonic()
            return process is not None
        except ValueError as error:
            self.failed[e] = str(error)
            return True

    def settle(self, e: Experiment, code: int) -> None:
        """Give a run that ended its row, or record why it has none."""
        if not e.is_finished():
            self.failed[e] = f"ended with code {code}, and its last line was: {e.last_line()}"
            return
        try:
            take_over(e, self.keep)
            self.done = done_runs()
        except (ValueError, OSError) as error:
            self.failed[e] = str(error)

    def expected(self, e: Experiment) -> float:
        """Seconds that a run takes: as other seeds of it did, else the mean of its level, else of all rows. A fifth is
        added for evaluation."""
        same = [row for row in self.done.values() if row["run"].rpartition("-seed")[0] == e.name.rpartition("-seed")[0]]
        level = [row for row in self.done.values() if row["level"] == e.level]
        return 1.2 * float(np.mean([float(row["seconds"]) for row in same or level or self.done.values()]))

    def eta(self) -> float:
        """Seconds until everything is done, at least until the slowest running run is; NaN while there is no row."""
        if not self.done:
            return float("nan")
        left = [max(0.0, self.expected(e) - (time.monotonic() - self.began[e])) for e in self.running]
        return max(sum([*left, *map(self.expected, self.todo)]) / self.processes, *left, 0.0)

    def progress(self) -> str:
        """How much is done, and when everything will be."""
        eta, done = self.eta(), sum(e.name in self.done for e in self.all)
        when = "after the first run" if np.isnan(eta) else f"{eta // 3600:.0f} h {eta % 3600 // 60:02.0f} min"
        return f"{done}/{len(self.all)} runs done, ETA {when}"


def report(study: Study, settled: list[Experiment]) -> None:
    """A line for each run that settled; on a terminal, the progress in a last line that overwrites itself."""
    for e in settled:
        end = f"failed: {study.failed[e]}" if e in study.failed else f"{float(study.done[e.name]['end']):.1%} solved"
        print(f"{study.progress()}  {e.name}: {end}", flush=True)
    if sys.stdout.isatty():
        print(study.progress(), end="  \r", flush=True)


# ---------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(description=__doc__, usage="python -m lab.study.run [--flag value ...]")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for name, choices in (("parts", PARTS), ("levels", LEVELS), ("methods", MITIGATIONS)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(choices),
                            help=f"only these, of: {', '.join(choices)}", metavar=name.upper())
    parser.add_argument("--processes", type=int, default=cores, help=f"runs at a time (default: the {cores} cores)")
    parser.add_argument("--keep", action="store_true", help="keep the credit logs of finished runs")
    parser.add_argument("--list", action="store_true", help="print the commands that are left, and start nothing")
    parser.add_argument("--collect", action="store_true", help="only take over finished runs, and start nothing")
    parser.add_argument("--tables", action="store_true", help=f"only write the tables and pictures of {RESULTS}")
    args = parser.parse_args(arguments)
    if args.processes < 1:
        fail("--processes must be at least 1")
    args.threads = max(1, cores // args.processes)
    return args


def run(args: argparse.Namespace) -> None:
    """Run, list or take over what is left."""
    study = Study(list_experiments(args.parts, args.levels, args.methods), args.processes, args.threads, args.keep)
    if any(e.level == "hard" for e in study.todo):
        write_hard_puzzles()
    if args.list:
        commands = [e.next_command() for e in study.todo if not e.is_finished()]
        sys.stdout.write("".join(f"{command}\n" for command in commands))  # at once: head may close the pipe early
        return
    if args.collect:
        study.todo = [e for e in study.todo if e.is_finished()]
    study.work()
    for e, reason in study.failed.items():
        print(f"{e.name} failed: {reason}", file=sys.stderr)
    if study.failed:
        fail(f"runs that failed: {len(study.failed)}; see {RUNS}/*/*.log")
    print(f"{study.progress().split(',')[0]}; make tables of them with: python -m lab.study.run --tables")


def main() -> None:
    """Do what the command line says; report errors in one sentence."""
    args = parse(sys.argv[1:])
    os.chdir(ROOT)
    if args.tables and args.list:
        fail("--tables writes tables and --list lists commands: choose one")
    with one_sentence("stopped; the same command resumes from here"):
        write_study(RESULTS) if args.tables else run(args)


if __name__ == "__main__":
    main()
