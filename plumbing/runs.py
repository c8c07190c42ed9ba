"""Run folders read back, and the runs of a method gathered over seeds beside those of its baseline.

A run folder holds config.json, metrics.csv, credit/ and, once the run is finished, final.json.
"""
import csv
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plumbing.files import check_fields, checksum, read_arrays, read_json
from plumbing.metrics import COLUMNS, CREDIT_LOG
from plumbing.report import Estimate, welch

# Settings in which runs may differ and still be compared: they name the run, belong to its method, or change results by
# rounding at most, or belong to what is measured after the last step.
# `steps` is among them so that a stopped run can be looked at; comparison_warnings tells of it.
NO_DIFFERENCE = {"mitigation", "advantage", "normalize", "seed", "out", "steps", "eval_every", "sample_every",
                 "checkpoint_every", "state_every", "micro_batch", "checkpoint_activations", "device",
                 "optimizer_device", "step_length", "pass_at", "plain"}


# --------------------------------------------------------------------------------------------------- reading


def read_metrics(run: Path, length: int | None = None) -> dict[str, np.ndarray]:
    """metrics.csv, or its first `length` bytes, as columns, NaN where nothing was measured.

    ValueError where it is not what a run writes.
    """
    file = run / "metrics.csv"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no metrics.csv")
    try:
        header, *rows = list(csv.reader(file.read_bytes()[:length].decode().splitlines())) or [[]]
        if torn := [line for line, row in enumerate(rows, 2) if len(row) != len(header)]:
            raise ValueError(f"line {torn[0]} is not as long as the header")
        table = np.array([[float(cell or "nan") for cell in row] for row in rows]).reshape(len(rows), len(header))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file} is no table of numbers ({error}): is it damaged?") from None
    if missing := [name for name in COLUMNS if name not in header]:
        raise ValueError(f"{file} has no column {missing[0]}: was it written by this version of train.py?")
    if not rows:
        raise ValueError(f"{file} has no rows: the run was stopped before its first measurement")
    metrics = dict(zip(header, table.T))
    if not np.array_equal(metrics["step"], np.arange(len(rows))):
        raise ValueError(f"{file} is damaged: its steps are not 0, 1, 2, ...")
    return metrics


def read_credit(run: Path, metrics: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The credit log of each step in metrics.csv; ValueError where one is missing, or is not of this run."""
    steps = []
    for step in range(1, len(metrics["step"])):
        file = run / "credit" / f"step-{step:06d}.npz"
        if not file.is_file():
            raise ValueError(f"there is no {file}, but metrics.csv has that step")
        if checksum(file) != metrics["credit_checksum"][step]:
            raise ValueError(f"{file} is not the one of metrics.csv: was it changed, or is it another run's?")
        steps.append(read_arrays(file, CREDIT_LOG))
    return steps


def heldout(metrics: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps at which held-out success was measured, the success, and its standard error."""
    measured = ~np.isnan(metrics["heldout_success"])
    return tuple(metrics[name][measured] for name in ("step", "heldout_success", "heldout_stderr"))


def read_config(run: Path) -> dict:
    """config.json of a run. ValueError where it is not what a run writes."""
    file = run / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no config.json")
    config = read_json(file)
    check_fields(config, {"settings": dict, "method": dict, "inputs": dict}, file)
    check_fields(config["settings"], {"mitigation": str, "seed": int, "steps": int}, file)
    return config


def read_final(run: Path) -> dict:
    """final.json of a run; empty for a run that is not finished."""
    file = run / "final.json"
    return read_json(file) if file.is_file() else {}


def is_finished(run: Path) -> bool:
    """Whether a run took all its steps and was measured after them."""
    if not (final := read_final(run)):
        return False
    settings = read_config(run)["settings"]
    k = settings["pass_at"]
    return final["step"] == settings["steps"] and (k == 0 or f"pass@{k}" in final)


def sampled_puzzles(run: Path) -> dict[tuple[int, int], str]:
    """The puzzles in samples.txt by step and group: headings `=== step 10  [3, 4, 5] -> 8  reward`, in their order."""
    file, puzzles, groups = run / "samples.txt", {}, Counter()
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        if found := re.match(r"=== step (\d+)  (.*?)  reward\b", line):
            step = int(found[1])
            puzzles[step, groups[step]] = found[2].replace("->", "→")
            groups[step] += 1
    return puzzles


# ------------------------------------------------------------------------------------ runs of the same method


class Run(NamedTuple):
    """One run in a comparison."""

    name: str
    label: str  # method and settings: runs with the same label differ in their seed
    setting: str  # equal for runs that share all settings but those of the method
    is_baseline: bool  # a run of plain GRPO
    seed: int
    figures: dict  # what was measured; `steps` and `end` are always there
    inputs: dict = {}  # what it read, by name, with a checksum
    finished: bool = True


@dataclass
class Group:
    """The runs of one method with the same settings, one per seed. (Not GRPO's group: the responses to one puzzle.)"""

    label: str
    rows: dict[int, dict]  # seed: figures of its run
    baseline: "Group | None" = None  # the runs of `none` with the same settings; of `none` itself: this group

    @property
    def compared(self) -> bool:
        """Whether there are runs of `none` to compare with, other than these."""
        return self.baseline not in (None, self)

    def values(self, figure: str) -> np.ndarray:
        """A figure (n,) of each run."""
        return np.array([row[figure] for row in self.rows.values()], float)

    def difference(self, figure: str) -> Estimate:
        """This method minus the baseline, with Welch's interval.

        Seeds are not paired: they draw the same puzzles, but two methods' results on a seed are hardly correlated.
        """
        return welch(self.values(figure), self.baseline.values(figure))


def group_runs(runs: list[Run]) -> list[Group]:
    """Runs by method and settings: baselines first, then the others by held-out success at the end, best first.

    Raises ValueError where two runs have the same label and seed.
    """
    groups, baselines = {}, {}
    for run in runs:
        group = groups.setdefault(run.label, Group(run.label, {}))
        if run.seed in group.rows:
            raise ValueError(f"{run.name} has the settings and the seed {run.seed} of another run: name one of them")
        group.rows[run.seed] = run.figures
        if run.is_baseline:
            baselines[run.setting] = group
    for run in runs:
        groups[run.label].baseline = baselines.get(run.setting)
    for group in groups.values():
        group.rows = dict(sorted(group.rows.items()))
    return sorted(groups.values(), key=lambda g: (g.baseline is not g, -g.values("end").mean()))


def comparison_warnings(runs: list[Run]) -> list[str]:
    """What keeps runs from being compared: other steps, or steps measured, no end yet, another content of an input."""
    found, by_steps, inputs = [], {}, {}
    for run in runs:
        by_steps.setdefault(int(run.figures["steps"]), []).append(Path(run.name).name)
    if len(by_steps) > 1:
        listed = "; ".join(f"{steps} steps: {', '.join(names)}" for steps, names in sorted(by_steps.items()))
        found.append(f"The runs have different numbers of steps, so their results are not comparable ({listed}).")
    elif len({tuple(run.figures["curve"]) for run in runs}) > 1:
        found.append("The runs were measured at different steps (--eval_every), so their areas are not comparable.")
    if names := [Path(run.name).name for run in runs if not run.finished]:
        found.append(f"Not finished, so the end is the last measurement: {', '.join(names)}.")
    for run in runs:
        for name, content in run.inputs.items():
            known, of = inputs.setdefault(name, (content, run.name))
            if content != known:
                return [*found, f"{name} was not the same in {of} and {run.name}, so the results are not comparable."]
    return found


# ------------------------------------------------------------------------------------------------------ labels


def shared_settings(config: dict) -> dict:
    """The settings of a run that a comparison has to hold fixed."""
    return {name: value for name, value in config["settings"].items() if name not in NO_DIFFERENCE}


def labels(configs: list[dict]) -> list[str]:
    """A label for each run: its method, and the settings in which the runs differ.

    --normalize and the hyper-parameters of a method are named only where they differ among runs of this method.
    """
    methods, shared = [run_method(config) for config in configs], [shared_settings(config) for config in configs]
    own = [config["method"] | {"normalize": config["settings"]["normalize"]} for config in configs]
    names = []
    for method, settings, parameters in zip(methods, shared, own):
        same_method = [others for name, others in zip(methods, own) if name == method]
        named = [f"{name}={settings[name]}" for name in varied(shared) if name in settings]
        named += [f"{name}={parameters[name]}" for name in varied(same_method) if name in parameters]
        names.append(" ".join([method, *named]))
    return names


def run_method(config: dict) -> str:
    """The method of a run, with --advantage where it is not the default: `none advantage=rloo` is RLOO."""
    advantage = config["settings"]["advantage"]
    return config["settings"]["mitigation"] + f" advantage={advantage}" * (advantage != "grpo")


def varied(settings: list[dict]) -> list[str]:
    """Names of the settings whose value is not the same in all dicts that have them."""
    names = sorted(set().union(*settings))
    return [name for name in names if len({json.dumps(s[name]) for s in settings if name in s}) > 1]
