"""The runs of a method gathered over seeds, beside those of its baseline; and what keeps runs from being compared."""
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plumbing.files import require
from plumbing.runs import FREE, PATHS, is_finished

# Runs that differ in these can be compared: they name a run, belong to its method, change results by rounding at most,
# or say when something is measured or saved. Some are settings of older runs.
NO_DIFFERENCE = {"mitigation", "advantage", "normalize", "seed", "out", "sample_every", "step_length", "plain", *FREE}


class Run(NamedTuple):
    """One run in a comparison."""

    folder: Path
    config: dict
    figures: dict  # what was measured; `curve` and `end` are always there


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
    ValueError where two runs have the same label and seed. Baselines are runs of `none`: GRPO, else RLOO or another."""
    configs = unmoved([run.config for run in runs])
    methods, names, measured = [*map(run_method, configs)], labels(configs), [x for run in runs for x in run.figures]
    none = min((method for method in methods if method.split()[0] == "none"), default="",
               key=lambda method: (method != "none", method != "none advantage=rloo", method))
    shared = [json.dumps({name: x for name, x in config["settings"].items() if name not in NO_DIFFERENCE})
              for config in configs]  # equal for runs that share all settings but those of the method
    groups = {name: Group(name, {}) for name in names}
    baselines = {setting: groups[name] for setting, name, method in zip(shared, names, methods) if method == none}
    for run, setting, name in sorted(zip(runs, shared, names), key=lambda each: each[0].config["settings"]["seed"]):
        group, seed, baseline = groups[name], run.config["settings"]["seed"], baselines.get(setting)
        require(seed not in group.rows,
                f"{run.folder} has the settings and the seed {seed} of another run: name one of them")
        group.rows[seed] = dict.fromkeys(measured, np.nan) | run.figures  # NaN where a run has not measured it
        group.baseline = baseline if baseline is not group else None
    first = [group.label for group in baselines.values()]
    def place(group: Group) -> tuple:
        """RLOO and GRPO first, then the best end; without one, such as imported rollouts', last and by name."""
        end = group.values("end").mean()
        return group.label not in first, np.isnan(end), -np.nan_to_num(end), group.label
    return sorted(groups.values(), key=place)


def comparison_warnings(runs: list[Run]) -> list[str]:
    """What keeps runs from being compared: no end yet, other steps measured, another content of an input."""
    unfinished = ", ".join(run.folder.name for run in runs if run.figures["curve"] and not is_finished(run.folder))
    found = {"": f"Not finished, so the end is the last measurement: {unfinished}."} if unfinished else {}
    first = {}  # of each fact: its value in the first run that has it, and that run's folder
    for run in runs:
        steps = "Measured steps (--steps, --eval_every)", [*run.figures["curve"]]
        for fact, value in [steps, *run.config["inputs"].items()]:
            known, other = first.setdefault(fact, (value, run.folder))
            if value != known:
                found[fact] = f"{fact}: not the same in {other} and {run.folder}, so the results are not comparable."
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
