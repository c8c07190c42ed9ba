"""lab/study/runs.csv read as groups of runs, and what its tables share: names, differences, Holm's correction."""
import csv
from pathlib import Path

import numpy as np

from analyze import COSTS, RLOO, method_name
from lab.estimates import points
from lab.statistics import holm
from plumbing.report import welch
from plumbing.runs import Group, Run, group_runs

ABOUT = ("run", "version", "part", "level", "method", "setting", "seed", "command")  # columns of text
BY_STEP = ("curve", "spent")  # held-out success, and weighted tokens so far, as `step:value` pairs
FIRST = "easy"  # the level where all methods ran, and those with several updates

MORE_ANSWERS = "none answers=45 advantage=rloo"  # RLOO for what vineppo costs on easy puzzles
CHEAPER = "vineppo cuts=uncertain"  # a form of vineppo for two thirds of its cost
RATIO = "entropy_ratio advantage=rloo"  # the reweighting furthest ahead of GRPO, here of RLOO's advantage

Levels = dict[str, dict[str, list[Run]]]  # runs by level and part


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of lab/study/runs.csv as text, of all versions; none where there is no such file yet."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if any(None in (*row, *row.values()) for row in rows):
        raise ValueError(f"{file} has a line that is not a row: was a merge conflict left in it?")
    return rows


def weighted_tokens(metrics: dict[str, np.ndarray]) -> np.ndarray:
    """The cost (steps + 1,) of a run up to each step: its tokens through the model, weighted as analyze.COSTS says."""
    return np.nancumsum(sum(weight * metrics[name] for name, weight in COSTS.items()))  # NaN at the start


def to_run(row: dict[str, str]) -> Run:
    """A row of lab/study/runs.csv as a run to compare."""
    figures = {name: float(text or "nan") for name, text in row.items() if name not in (*ABOUT, *BY_STEP)}
    by_step = {name: dict(map(float, point.split(":")) for point in (row.get(name) or "").split()) for name in BY_STEP}
    label = f"{row['method']} {row['setting']}".strip()
    return Run(row["run"], label, row["setting"], row["method"] == "none", int(row["seed"]), figures | by_step)


def read_versions(file: Path) -> dict[int, Levels]:
    """The runs of a file by version of the results, level and part; only levels with a run of GRPO."""
    versions: dict[int, Levels] = {}
    for row in read_rows(file):
        levels = versions.setdefault(int(row["version"]), {})
        levels.setdefault(row["level"], {}).setdefault(row["part"], []).append(to_run(row))
    for levels in versions.values():
        for level, parts in list(levels.items()):
            if not any(run.label == "none" for run in parts.get("main", [])):
                del levels[level]
    if not versions or FIRST not in versions[max(versions)]:
        raise ValueError(f"there is no run of none on {FIRST} puzzles in {file}; make it with: python -m "
                         f"lab.study.run --parts main --levels {FIRST} --methods none")
    return versions


def compared_groups(parts: dict[str, list[Run]]) -> list[Group]:
    """The groups of a level that its comparisons name: the main table's, two forms, and longer or larger runs."""
    forms = [run for run in parts.get("forms", []) if run.label in (CHEAPER, RATIO)]
    return group_runs(parts["main"] + forms + parts.get("budget", []))


def against_rloo(groups: list[Group]) -> list[Group]:
    """The same groups with RLOO as their baseline, for pictures; with the one they have where RLOO is missing."""
    rloo = {group.label: group for group in groups}.get(RLOO)
    return [Group(group.label, group.rows, rloo or group.baseline) for group in groups if group is not rloo]


def is_uniform(label: str) -> bool:
    """Whether all tokens of a response get the same credit: GRPO or RLOO."""
    return label.split()[0] == "none"


def name_of(label: str) -> str:
    """What a method is called in a table: GRPO and RLOO by name, others by their label, as code."""
    return method_name(label) if is_uniform(label) else f"`{label}`"


def seeds_of(group: Group, other: Group | None) -> str:
    """A cell with the number of seeds of both sides of a comparison; of the group alone for none and for itself."""
    alone = other is None or other is group
    return f"{len(group.rows)}" if alone else f"{len(group.rows)}, {len(other.rows)}"


def minus(group: Group, other: Group | None, figure: str = "area") -> str:
    """A cell: a group minus another one in a figure, in points; empty for none and for itself."""
    return "" if other is None or other is group else points(welch(group.values(figure), other.values(figure)))


def with_asterisks(differences: dict) -> dict:
    """A cell in points for each Estimate, with * where it is significant after Holm's correction over all of them."""
    significant = holm({key: e.p for key, e in differences.items()})
    return {key: points(e) + " *" * (key in significant) for key, e in differences.items()}
