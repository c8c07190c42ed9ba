"""Does exact credit of turns learn faster than GRPO and RLOO? The runs of designs.md, their table and their picture.

    python -m lab.turns.run             trains what has no row in lab/turns/runs.csv, one run at a time; resumes
    python -m lab.turns.run --tables    only writes lab/turns/tables.md and learning.png

Success is exact: V(prompt) of values.py at every tenth step, from the run's checkpoints. Seeds are the outer loop. A
finished run loses its folder. While a program measures speed (lab/quiet.py) the run pauses.
"""
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.estimates import mean_cell, points, read_column
from lab.statistics import holm
from lab.study.decided import on_line
from lab.study.engine import COSTS, RLOO, difference, name_of, read_rows, read_versions, select, spent
from lab.study.run import train_all
from lab.turns.values import grow
from plumbing.comparison import Group
from plumbing.files import replace_file
from plumbing.progress import clock, one_sentence
from plumbing.report import GREY, PALETTE, Estimate, Table, new_figure, t_estimate, write_csv
from plumbing.runs import read_config, read_metrics
from settings import Settings
from train import load_policy

HERE, RUNS = Path(__file__).parent, Path("runs/turns")
RESULTS = HERE / "runs.csv"
ALIKE = "--task guess --max_new_tokens 24 --steps 100 --checkpoint_every 10 --eval_every 0 --pass_at 0"
EVERY, SEEDS = 10, range(10)
LINE = (RLOO, *(f"none answers={G} advantage=rloo" for G in (16, 32, 64)))  # RLOO's area by its noise
GRPO, WITH, WITHOUT = "none", "exact_turns", "exact_turns luck=false"  # A1, A2
MIXED = "exact_turns luck=false mix=MMM"  # as noisy as A1
ARMS = (GRPO, *LINE, WITH, WITHOUT, "turn_vine", "turn_baseline", "exact_turns mix=0.5", MIXED)
MARGIN = 0.02  # of area, the smallest effect of interest


class Experiment(NamedTuple):
    """A run: what train_all of lab/study/run.py starts or resumes."""

    label: str
    seed: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.label.replace(' ', '-').replace('=', '-')}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return RUNS / self.name

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return RUNS / f"{self.name}.log"

    @property
    def command(self) -> str:
        """The command that makes it."""
        flags = self.label.replace(" ", " --").replace("=", " ")
        return f"python -m lab.turns.credit --mitigation {flags} {ALIKE} --seed {self.seed} --out {self.folder}"

    def next_command(self) -> str:
        """The same, or the one that resumes it."""
        return f"python -m lab.turns.credit --resume {self.folder}" if self.folder.is_dir() else self.command


def exact_success(e: Experiment) -> dict[int, float]:
    """V(prompt) of the start model and of each checkpoint, by step."""
    s = Settings(**read_config(e.folder)["settings"])
    weights = {0: s.model} | {step: f"{e.folder}/checkpoints/step-{step:06d}" for step in range(EVERY, s.steps, EVERY)}
    weights[s.steps] = f"{e.folder}/checkpoint"
    return {step: float(grow(load_policy(replace(s, model=model))).V[0].mean()) for step, model in weights.items()}


def make_row(e: Experiment) -> dict:
    """The row of a finished run."""
    curve, metrics = exact_success(e), read_metrics(e.folder)
    cost = np.nancumsum(sum(weight * metrics[name] for name, weight in COSTS.items()))  # (steps + 1,) NaN at the start
    method, _, setting = e.label.partition(" ")
    area = np.trapezoid(list(curve.values()), list(curve)) / max(curve)
    figures = {"area": area, "start": curve[0], "end": curve[max(curve)],
               **{name: np.nansum(metrics[name]) for name in (*COSTS, "seconds")}}
    return {"run": e.name, "version": 1, "part": "turns", "level": "guess", "method": method, "setting": setting,
            "seed": e.seed, "command": e.command, "steps": max(curve),
            **{name: f"{x:.7g}" for name, x in figures.items()},
            "curve": " ".join(f"{step}:{x:.6f}" for step, x in curve.items()),
            "spent": " ".join(f"{step}:{cost[step]:.7g}" for step in curve)}


def run() -> None:
    """Train what has no row."""
    done = {row["run"] for row in read_rows(RESULTS)}
    todo = [e for seed in SEEDS for label in ARMS if (e := Experiment(label, seed)).name not in done]
    seconds, total = [], len(SEEDS) * len(ARMS)
    with closing(train_all(todo, 1, 1)) as ended:
        for i, (e, code) in enumerate(ended, 1):
            if code:
                raise ValueError(f"{e.name} ended with code {code}: see {e.log}")
            rows = [*read_rows(RESULTS), make_row(e)]
            replace_file(RESULTS, lambda part: write_csv(rows, part))
            shutil.rmtree(e.folder)
            seconds.append(float(rows[-1]["seconds"]))
            print(f"{total - len(todo) + i}/{total} runs done  {e.name}  end {float(rows[-1]['end']):.3f}  "
                  f"ETA {clock(1.3 * np.mean(seconds) * (len(todo) - i))}", flush=True)


# ---------------------------------------------------------------------------------------------- tables and picture


def above_line(groups: dict[str, Group], noise: dict[str, Estimate], *names: str) -> Estimate:
    """The mean area of some arms minus that of RLOO where it is as noisy, linear in the logarithm between LINE."""
    line = [noise[name].value for name in LINE]
    weights = np.mean([on_line(noise[name].value, line) for name in names], 0)  # (4,)
    return t_estimate(*(groups[name].values("area") for name in (*names, *LINE)),
                      weights=(*[1 / len(names)] * len(names), *-weights))


def contrasts(groups: dict[str, Group], noise: dict[str, Estimate]) -> dict[str, Estimate]:
    """The primary contrasts of designs.md, in area."""
    found = {f"{a} - {b}": difference(groups[x], groups[y]) for a, x in (("A1", WITH), ("A2", WITHOUT))
             for b, y in (("RLOO", RLOO), ("GRPO", GRPO))}
    return found | {"A1 - RLOO as noisy": above_line(groups, noise, WITH, "exact_turns mix=0.5"),
                    "A2 - RLOO as noisy": above_line(groups, noise, WITHOUT, MIXED),
                    "A2 as noisy as A1 - A1": difference(groups[MIXED], groups[WITH])}
