"""The study: does better credit learn faster? Methods and hyper-parameters over seeds, each run a plain train.py.

    python -m lab.study.run                                 the toys, in the order of PARTS: two days, two cores
    python -m lab.study.run --parts main --levels easy      the main table: five or ten seeds
    python -m lab.study.run --list                          the commands that are left, for Slurm, parallel or Ray
    python -m lab.study.run --device cuda                   on a GPU, which runs of many responses gain from
    python -m lab.study.run --collect                       only take over the finished runs in runs/study-2
    python -m lab.study.run --draws runs/none-seed*         success by ten draws of evaluation's numbers: draws.csv
    python -m lab.study.run --tables                        tables and pictures of lab/study/runs.csv, beside it

As many runs at a time as the machine has cores, each with its share of threads. A finished run becomes a row of
lab/study/runs.csv, for a pretrained model (lab/real/weights.py) of lab/real/runs.csv. A run with a row is done, so the
same command resumes an interrupted study, on another machine too; a run that was killed resumes from its last saved
state. Seeds are the outer loop, so that the rows compare all methods on the same seeds at any time. A finished run
loses its credit/ (24 MB) and its state unless --keep. While a program measures speed (lab/quiet.py) all runs pause.
The runs of a pretrained model (first, words, laptop, mitigations, rank, original, warm) must be named. Not on Windows.

`easy` is the bundled default. `hard` has only puzzles that a single sequence of steps solves, and allows more tokens.
`small` is a model with a fifth of the parameters. `latin` and `math` are other tasks (predictions.md).
"""
import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np

import train
from analyze import position_bins, read_log, summarize
from countdown_task import solutions, universe
from lab import quiet
from lab.original.undetached import registered
from lab.statistics import spread_within
from lab.study.engine import COSTS, FIRST, read_rows, write_rows
from lab.study.pictures import write_study
from lab.study.plan import COUNTED, HARD, LEVELS, PARTS, PRETRAINED, RUNS, VERSION, today
from methods import MITIGATIONS
from plumbing.comparison import NO_DIFFERENCE
from plumbing.files import read_json, replace_file, write_json
from plumbing.flags import new_parser
from plumbing.launch import with_model
from plumbing.progress import fail, follow, one_sentence
from plumbing.report import ratio
from plumbing.runs import is_finished, read_config
from plumbing.task_file import load_task
from rollout import EVALUATION, draw_uniforms, generate_and_grade
from start import load_policy, parse_flags

RESULTS, REAL = Path("lab/study/runs.csv"), Path("lab/real/runs.csv")
ROOT = Path(__file__).parents[2]  # commands run here, and the paths above are relative to it
CHECKED = ("test", "words", "laptop")  # parts whose runs are measured on other puzzles, too
OTHERS = "weights/gsm_symbolic.jsonl"  # of lab/real/problems.py


def values_of(flags: str) -> dict:
    """All settings and hyper-parameters that flags of train.py, or of lab/original's, stand for."""
    with registered():
        settings, method, *_ = parse_flags(shlex.split(flags))
    return asdict(with_model(settings)) | method


class Experiment(NamedTuple):
    """One run; `flags` begins with the name of the method."""

    part: str
    level: str
    flags: str
    seed: int
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Its name and folder, without the study's: easy/outcome_conditional-think_discount-0.25-seed1."""
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
    def table(self) -> Path:
        """Where its row goes."""
        return REAL if self.level in PRETRAINED else RESULTS

    @property
    def command(self) -> str:
        """The command that makes the run."""
        device = "" if self.device == "cpu" else f" --device {self.device}"
        if device and self.level not in PRETRAINED:
            device += " --micro_batch 96"
        return today(f"python train.py --mitigation {self.flags}{LEVELS[self.level]} --seed {self.seed} "
                     f"--out {self.folder}{device}")

    def next_command(self) -> str:
        """The same, or the one that resumes the run."""
        program = self.command.partition(" --")[0]  # python train.py, or lab/original's
        return f"{program} --resume {self.folder}" if self.folder.is_dir() else self.command


def list_experiments(parts: list[str], levels: list[str], methods: list[str], device: str) -> list[Experiment]:
    """The runs of some parts, levels and methods on a device, in order."""
    return [Experiment(part, level, flags, seed, device) for part in PARTS if part in parts
            for level, listed, seeds in PARTS[part] if level in levels
            for seed in seeds for flags in listed if flags.split()[0] in methods]


def write_hard_puzzles() -> None:
    """Every puzzle that a single sequence of whole-number steps solves, its numbers in random order. Equal numbers
    count as different: 7, 7 and 10 make 11 by either 7 / the other, so that puzzle is not one of them."""
    if not HARD.is_file():
        rng = np.random.default_rng(0)
        text = "".join(json.dumps({"nums": rng.permutation(p.numbers).tolist(), "target": p.target}) + "\n"
                       for p in universe() if len(solutions(p, whole=True)) == 1)
        HARD.parent.mkdir(parents=True, exist_ok=True)
        replace_file(HARD, lambda part: part.write_text(text, encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------- rows


def changes(values: dict, defaults: dict) -> str:
    """The values that differ from the defaults, such as `lr=0.0001`."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value != defaults.get(name))


def make_row(e: Experiment) -> dict:
    """The row of a finished run; ValueError for one with other settings, as after a trial."""
    config = read_config(e.folder)
    if config["command"].partition(" --")[2] != e.command.partition(" --")[2]:  # before it may be a module or its path
        raise ValueError(f"{e.folder} was made by another command than the study's: move it away")
    settings, method = config["settings"], config["method"]
    defaults = values_of(f"--mitigation {settings['mitigation']}")
    of_level = {word[2:] for word in LEVELS[e.level].split() if word.startswith("--")}
    unnamed = NO_DIFFERENCE - {"steps", "advantage"} | {"model"} | of_level
    shared = {key: value for key, value in settings.items() if key not in unnamed}
    changed = changes(method | {"normalize": settings["normalize"]}, defaults)
    name = settings["mitigation"].replace("inverse_undetached", "inverse_logprob detach=False")  # as in older rows
    log = read_log(e.folder)
    figures = summarize(e.folder, log) | spread_within(log["credit"], log["response_id"])
    curve, metrics = figures.pop("curve"), figures.pop("metrics")
    cost = np.nancumsum(sum(weight * metrics[name] for name, weight in COSTS.items()))  # (steps + 1,) NaN at the start
    by_step = {"curve": curve, "spent": {step: cost[int(step)] for step in curve}}
    figures["seconds"] = np.nansum(metrics["seconds"])  # of all steps, without evaluation
    if e.level == "twenty":
        figures |= answers(log)
    if e.part in CHECKED:
        figures["others"] = success_on("others", e.folder, e.level)
    return {"run": e.name, "version": VERSION, "part": e.part, "level": e.level,
            "method": f"{name} {changed}".strip(), "setting": changes(shared, defaults),
            "seed": e.seed, "command": e.command,
            **{key: f"{value:.6g}" for key, value in figures.items()},
            **{key: " ".join(f"{step:.0f}:{x:.6g}" for step, x in values.items()) for key, values in by_step.items()}}


def answers(log: dict[str, np.ndarray]) -> dict[str, float]:
    """Of the responses of a run's last ten steps the share that answer at all, of right ones among these, and the mean
    entropy; and the mean size of contribution in the first fifth of a response over that in the last, of all steps."""
    late = log["step"] > log["step"].max() - 10
    begins = np.flatnonzero(late & (log["position"] == 0))
    right = log["reward"][begins] > 0.5  # (n,) a layout earns 0.1, an answer 1
    answered = np.logical_or.reduceat(log["in_answer"] > 0, begins)  # (n,)
    (_, first), *_, (_, last) = position_bins(log, 5)
    size = np.abs(log["contribution"])
    return {"answered": answered.mean(), "right of answered": ratio((right & answered).sum(), answered.sum()),
            "entropy": log["entropy"][late].mean(),
            "contribution, first / last": size[first].mean() / size[last].mean()}


def success_on(which: str, run: Path, level: str, draw: int = 1) -> float:
    """Success of a run's last model by a draw of evaluation's random numbers; training has draw 0. which: the `usual`
    held-out puzzles, or 512 `others`, which no run measures; a pretrained model's are OTHERS."""
    s = replace(train.Settings(**read_config(run)["settings"]), model=str(run / "checkpoint"))
    policy = load_policy(s, load_task(s.task))
    if level in PRETRAINED:
        puzzles, s = policy.task.load("all", None, OTHERS), replace(s, max_new_tokens=256)
    else:
        puzzles = policy.task.load("heldout", s.eval_problems)
        if which == "others":
            measured = {puzzle.id for puzzle in puzzles}
            puzzles = [puzzle for puzzle in policy.task.load("heldout", 1400) if puzzle.id not in measured][:512]
    uniforms = draw_uniforms(draw, EVALUATION, len(puzzles), 1, s.max_new_tokens)  # (n, max_new_tokens)
    return float(np.mean([grade["answer"] for grade in generate_and_grade(policy, puzzles, uniforms)[1]]))


def score_draws(runs: list[Path]) -> None:
    """Write draws.csv: success of each of some runs of `easy` by draws 0 to 9, on both kinds of puzzles."""
    cases = follow("runs and puzzles", [*product(runs, ("usual", "others"))])
    write_rows([{"run": run.name, "puzzles": which, "success": " ".join(
        f"{success_on(which, run, FIRST, draw):.6g}" for draw in range(10))} for run, which in cases],
        RESULTS.with_name("draws.csv"))


def done_runs() -> dict[str, dict]:
    """The rows that count, by name of the run."""
    rows = [row for table in (RESULTS, REAL) for row in read_rows(table)]
    return {row["run"]: row for row in rows if int(row["version"]) in COUNTED}


def take_over(e: Experiment, keep: bool) -> None:
    """Give a finished run its row, also kept in its folder, and a pretrained model's run a copy of its metrics.csv in
    data/ beside the rows; remove its credit log and its state unless `keep`."""
    kept = e.folder / "row.json"
    if e.name not in done_runs() and not kept.is_file():
        write_json(kept, make_row(e))  # before the lock: it may measure for minutes
    with (RUNS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another study may be writing the table
        if e.name not in done_runs():
            rows = [*read_rows(e.table), read_json(kept)]
            replace_file(e.table, lambda part: write_rows(rows, part))
            if e.level in PRETRAINED:  # a row has no figure of a single step
                beside = REAL.parent / "data" / f"{e.name}.csv"
                beside.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(e.folder / "metrics.csv", beside)
    if not keep:
        shutil.rmtree(e.folder / "credit", ignore_errors=True)
        (e.folder / "state.pt").unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------- processes


def train_all(experiments: list[Experiment], processes: int, threads: int) -> Iterator[tuple[Experiment, int]]:
    """Start or resume runs, `processes` at a time; yields each with its exit code when it ends, or is found finished.
    Nothing runs after this is closed."""
    waiting, running, paused = list(experiments), {}, False
    try:
        while waiting or running:
            while waiting and len(running) < processes and not paused:
                e = waiting.pop(0)
                if is_finished(e.folder):
                    yield e, 0
                else:
                    running[e] = start(e, threads)
            for e in [e for e, process in running.items() if process.poll() is not None]:
                yield e, running.pop(e).returncode
            if quiet.asked_for() != paused:
                paused = not paused
                signal_all(running, signal.SIGSTOP if paused else signal.SIGCONT)
            time.sleep(quiet.LOOK)
    finally:
        signal_all(running, signal.SIGCONT)  # a paused process would not notice that it is to end
        signal_all(running, signal.SIGTERM)
        for process in running.values():
            process.wait()


def signal_all(running: dict[Experiment, subprocess.Popen], number: signal.Signals) -> None:
    """Send a signal to all runs."""
    for process in running.values():
        process.send_signal(number)


def start(e: Experiment, threads: int) -> subprocess.Popen:
    """Start or resume a run, its output in its log."""
    e.log.parent.mkdir(parents=True, exist_ok=True)
    with e.log.open("a") as log:
        return subprocess.Popen([sys.executable, *shlex.split(e.next_command())[1:]], stdout=log, stderr=log,
                                env=os.environ | {"OMP_NUM_THREADS": str(threads)})


def settle(e: Experiment, code: int, keep: bool) -> str:
    """Give a run that ended its row. Returns what is wrong where it gets none."""
    try:
        if not is_finished(e.folder):
            lines = e.log.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing"]
            return f"ended with code {code}, and its last line was: {lines[-1]}"
        take_over(e, keep)
        return ""
    except (ValueError, OSError) as error:
        return str(error)


def seconds(e: Experiment, done: list[dict]) -> float:
    """What a run takes: a fifth more, for evaluation, than its other seeds did, else its level, else all rows."""
    same = [row for row in done if row["run"].rpartition("-seed")[0] == e.name.rpartition("-seed")[0]]
    level = [row for row in done if row["level"] == e.level]
    return 1.2 * float(np.mean([float(row["seconds"]) for row in same or level or done]))


def progress(experiments: list[Experiment], processes: int) -> str:
    """How many runs are done, and how long the others will take."""
    done = done_runs()
    left = [e for e in experiments if e.name not in done]
    count = f"{len(experiments) - len(left)}/{len(experiments)} runs done"
    if not done:
        return f"{count}, ETA after the first run"
    eta = sum(seconds(e, list(done.values())) for e in left) / processes
    return f"{count}, ETA {eta // 3600:.0f} h {eta % 3600 // 60:02.0f} min"


# ---------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(description=__doc__, usage="python -m lab.study.run [--flag value ...]")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    toys = [part for part, runs in PARTS.items() if not any(level in PRETRAINED for level, *_ in runs)]
    for name, choices, default in (("parts", PARTS, toys), ("levels", LEVELS, LEVELS),
                                   ("methods", MITIGATIONS, MITIGATIONS)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(choices), default=list(default),
                            help=f"only these, of: {', '.join(choices)}", metavar=name.upper())
    parser.add_argument("--processes", type=int, default=cores, help=f"runs at a time (default: the {cores} cores)")
    parser.add_argument("--device", default="cpu", help="of the runs, such as cuda (default: cpu)")
    parser.add_argument("--keep", action="store_true", help="keep the credit logs of finished runs")
    parser.add_argument("--list", action="store_true", help="print the commands that are left, and start nothing")
    parser.add_argument("--collect", action="store_true", help="only take over finished runs, and start nothing")
    parser.add_argument("--draws", nargs="+", type=Path, metavar="RUN", help="only score runs by ten draws")
    parser.add_argument("--tables", action="store_true", help=f"only write the tables and pictures of {RESULTS}")
    args = parser.parse_args(arguments)
    if args.processes < 1:
        fail("--processes must be at least 1")
    args.threads = max(1, cores // args.processes)
    return args


def run(args: argparse.Namespace) -> None:
    """Run, list or take over what is left."""
    listed, done, failed = list_experiments(args.parts, args.levels, args.methods, args.device), done_runs(), 0
    todo = [e for e in listed if e.name not in done]
    if any(e.level == "hard" for e in todo):
        write_hard_puzzles()
    if args.list:
        print("".join(f"{e.next_command()}\n" for e in todo if not is_finished(e.folder)), end="")
        return
    if args.collect:
        todo = [e for e in todo if is_finished(e.folder)]
    print(progress(listed, args.processes), flush=True)
    with closing(train_all(todo, args.processes, args.threads)) as ended:
        for e, code in ended:
            problem = settle(e, code, args.keep)
            failed += bool(problem)
            print(f"{progress(listed, args.processes)}  {e.name}: {problem or 'done'}", flush=True)
    if failed:
        fail(f"runs that failed: {failed}; see above, and {RUNS}/*/*.log")
    print("make tables with: python -m lab.study.run --tables")


def main() -> None:
    """Do what the command line says; report errors in one sentence."""
    args = parse(sys.argv[1:])
    os.chdir(ROOT)
    with one_sentence("stopped; the same command resumes from here"):
        write_study(RESULTS) if args.tables else score_draws(args.draws) if args.draws else run(args)


if __name__ == "__main__":
    main()
