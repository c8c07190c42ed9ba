"""The runs of a method gathered over seeds, beside those of its baseline; and what keeps runs from being compared."""
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plumbing.runs import FREE, PATHS

# Runs that differ in these can be compared: they name a run, belong to its method, change results by rounding at most,
# or say when something is measured or saved. Some are settings of older runs.
NO_DIFFERENCE = {"mitigation", "advantage", "normalize", "seed", "out", "sample_every", "step_length", "plain", *FREE}


class Run(NamedTuple):
    """One run in a comparison."""

    name: str
    label: str  # method and settings: runs with the same label differ in their seed
    setting: str  # equal for runs that share all settings but those of the method
    is_baseline: bool  # a run of `none`: GRPO, or where there is none of it, RLOO or another
    seed: int
    figures: dict  # what was measured; `steps` and `end` are always there
    inputs: dict = {}  # what it read, by name, with a checksum
    finished: bool = True


@dataclass
class Group:
    """The runs of one method with the same settings, one per seed. (Not GRPO's group: the responses to one puzzle.)"""

    label: str
    rows: dict[int, dict]  # seed: figures of its run
    baseline: "Group | None" = None  # the runs of `none` with the same settings, unless these are themselves

    def values(self, figure: str) -> np.ndarray:
        """A figure (n,) of each run."""
        return np.array([row[figure] for row in self.rows.values()], float)


def unmoved(configs: list[dict]) -> list[dict]:
    """The configs, in which a file or folder gets the name of the first that had its content, as if none had moved."""
    names = {}
    for config in configs:
        s, read = config["settings"], config["inputs"]
        for name in filter(s.get, PATHS):
            content = sorted(read[file] for file in read if Path(s[name]) in (Path(file), Path(file).parent))
            s[name] = names.setdefault((name, str(content or s[name])), s[name])
    return configs


def group_runs(runs: list[Run]) -> list[Group]:
    """Runs by method and settings: baselines first, then the others by held-out success at the end, best first.
    ValueError where two runs have the same label and seed."""
    groups = {run.label: Group(run.label, {}) for run in runs}
    baselines = {run.setting: groups[run.label] for run in runs if run.is_baseline}
    for run in sorted(runs, key=lambda run: run.seed):
        group = groups[run.label]
        if run.seed in group.rows:
            raise ValueError(f"{run.name} has the settings and the seed {run.seed} of another run: name one of them")
        group.rows[run.seed], group.baseline = run.figures, None if run.is_baseline else baselines.get(run.setting)
    first = {run.label for run in runs if run.is_baseline}
    return sorted(groups.values(), key=lambda group: (group.label not in first, -group.values("end").mean()))


def comparison_warnings(runs: list[Run]) -> list[str]:
    """What keeps runs from being compared: no end yet, other steps measured, another content of an input."""
    unfinished = ", ".join(Path(run.name).name for run in runs if run.figures["curve"] and not run.finished)
    found = {"": f"Not finished, so the end is the last measurement: {unfinished}."} if unfinished else {}
    first = {}  # of each fact: its value in the first run that has it, and that run's name
    for run in runs:
        for fact, value in [("Measured steps (--steps, --eval_every)", [*run.figures["curve"]]), *run.inputs.items()]:
            known, other = first.setdefault(fact, (value, run.name))
            if value != known:
                found[fact] = f"{fact}: not the same in {other} and {run.name}, so the results are not comparable."
    return [*found.values()]


def run_method(config: dict) -> str:
    """The method of a run, with --advantage where it is not the default: `none advantage=rloo` is RLOO."""
    advantage = config["settings"]["advantage"]
    return config["settings"]["mitigation"] + f" advantage={advantage}" * (advantage != "grpo")


def labels(configs: list[dict]) -> list[str]:
    """A label for each run: its method, and the settings in which the runs differ; of --normalize and the method's own
    hyper-parameters those in which the runs of this method differ."""
    methods, settings = [run_method(config) for config in configs], []  # by owner, the method or "", and name
    for method, config in zip(methods, configs):
        own = config["method"] | {"normalize": config["settings"]["normalize"]}
        settings.append({("", name): value for name, value in config["settings"].items() if name not in NO_DIFFERENCE}
                        | {(method, name): value for name, value in own.items()})
    differ = [key for key in sorted({key for own in settings for key in own})
              if len({json.dumps(own[key]) for own in settings if key in own}) > 1]
    return [" ".join([method, *(f"{key[1]}={own[key]}" for key in differ if own.get(key, "") != "")])
            for method, own in zip(methods, settings)]
