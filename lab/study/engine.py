"""The rows of lab/study/runs.csv as groups of runs, how two groups compare, and how a table is made of such pairs.

A table is a list of pairs of groups and a list of columns, each a function of a pair: lab/study/tables.py has them, and
decided.py those of two designs. A run's cost so far is its weighted tokens (COSTS), recorded with every
measurement of held-out success.
"""
import csv
from dataclasses import fields
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

import numpy as np

from analyze import method_name
from lab.estimates import mean_cell, points
from lab.statistics import holm
from plumbing.comparison import Group, Run, group_runs
from plumbing.report import Estimate, Table, t_estimate
from settings import Settings

ABOUT = ("run", "part", "level", "method", "setting", "seed", "command")  # columns of text
BY_STEP = ("curve", "spent")  # held-out success, and weighted tokens so far, as `step:value` pairs
FIRST = "easy"  # the level where all methods ran
RLOO, EXPERT = "none advantage=rloo", "expert_iteration"
MORE_ANSWERS = "none answers=45 advantage=rloo"  # RLOO for what vineppo costs on easy puzzles
# Columns of metrics.csv, and what a token costs in forward passes (a backward pass counts as two).
COSTS = {"tokens_sampled": 1, "tokens_read": 1, "tokens_updated": 3}
WEIGHTS = {"1:1:3": COSTS, "1:1:6": COSTS | {"tokens_updated": 6},
           "1:0:0": COSTS | {"tokens_read": 0, "tokens_updated": 0}}  # of sampled, read and updated tokens

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


def write_rows(rows: list[dict], file: Path) -> None:
    """Such a file, with the columns of all rows; a row may lack some."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def in_order(setting: str) -> str:
    """What a row says of its settings, the method's own first: rows are older than the present order of Settings."""
    order = [field.name for field in fields(Settings)]
    names = {word: word.partition("=")[0] for word in setting.split()}
    return " ".join(sorted(names, key=lambda word: order.index(names[word]) if names[word] in order else -1))


def to_run(row: dict[str, str]) -> Run:
    """A row of lab/study/runs.csv as a run to compare."""
    figures = {name: float(text or "nan") for name, text in row.items() if name not in (*ABOUT, *BY_STEP)}
    by_step = {name: dict(map(float, point.split(":")) for point in (row.get(name) or "").split()) for name in BY_STEP}
    setting = in_order(row["setting"])
    label = f"{row['method']} {setting}".strip()
    return Run(row["run"], label, setting, row["method"] == "none", int(row["seed"]), figures | by_step)


def read_levels(file: Path, *versions: int) -> Levels:
    """The runs of some versions of the results in a file by level and part."""
    levels: Levels = {}
    for row in read_rows(file):
        if int(row["version"]) in versions:
            levels.setdefault(row["level"], {}).setdefault(row["part"], []).append(to_run(row))
    return levels


def select(parts: dict[str, list[Run]], *names: str, seeds: set[int] | None = None) -> dict[str, Group]:
    """The groups of some parts of a level by label, all of one version; with seeds, only their runs."""
    groups = {group.label: group for group in group_runs(
        [run for name in names for run in parts.get(name, []) if seeds is None or run.seed in seeds])}
    check_version(*groups.values())
    return groups


def check_version(*groups: Group) -> None:
    """ValueError where runs are of several versions. (A run that is in no table of rows has none.)"""
    found = {row.get("version"): group.label for group in groups for row in group.rows.values()}
    if len(found) > 1:
        raise ValueError("runs of several versions can't be compared: "
                         + ", ".join(f"{label} ({version:.0f})" for version, label in found.items()))


def arm(label: str) -> tuple[str, float]:
    """A label without its learning rate, and the rate."""
    words = label.split()
    rates = [float(word[3:]) for word in words if word.startswith("lr=")]
    return " ".join(word for word in words if not word.startswith("lr=")), rates[0] if rates else Settings.lr


def at_rates(groups: dict[str, Group]) -> dict[tuple[str, float], Group]:
    """Groups by `arm` of their label."""
    return {arm(label): group for label, group in groups.items()}


def is_uniform(label: str) -> bool:
    """Whether all tokens of a response get the same credit: GRPO or RLOO."""
    return label.split()[0] == "none"


def name_of(label: str) -> str:
    """What a method is called in a table: GRPO and RLOO by name, others by their label, as code."""
    return method_name(label) if is_uniform(label) else f"`{label}`"


def measured(group: Group) -> np.ndarray:
    """The steps (m,) at which held-out success of a group's runs was measured."""
    return np.array(list(next(iter(group.rows.values()))["curve"]))


def difference(a: Group, b: Group, figure: str = "area") -> Estimate:
    """A group minus another one in a figure, with Welch's interval. After as many steps, areas are read at the steps
    of the group that was measured less often, as at equal cost. ValueError for groups of two versions."""
    check_version(a, b)
    first, second = (measured(group).tolist() for group in (a, b))
    if figure != "area" or first == second or first[-1] != second[-1]:
        return t_estimate(a.values(figure), b.values(figure))
    steps = min(first, second, key=len)
    return t_estimate(mean_success(a, first, steps), mean_success(b, second, steps))


def success_at(group: Group, own: Iterable[float], places: Iterable[float]) -> np.ndarray:
    """Held-out success (seeds, n) of each run at n steps or costs, linear between its own (m,), where it was seen."""
    return np.array([np.interp(places, own, list(row["curve"].values())) for row in group.rows.values()])


def mean_success(group: Group, own: Iterable[float], places: Iterable[float]) -> np.ndarray:
    """The mean (seeds,) over places of `success_at`."""
    return np.trapezoid(success_at(group, own, places), places) / np.ptp(places)


def spent(group: Group, weights: dict[str, float] = COSTS) -> np.ndarray:
    """The mean cost (m,) of a group's runs up to each measurement. Rows record it with the weights of COSTS; others
    change it by the same factor all along a run."""
    def total(row: dict, by_kind: dict[str, float]) -> float:
        return sum(weight * row[kind] for kind, weight in by_kind.items())

    return np.mean([np.array(list(row["spent"].values())) * (total(row, weights) / total(row, COSTS))
                    for row in group.rows.values()], 0)


def at_equal_cost(group: Group, other: Group, weights: dict[str, float] = COSTS) -> dict[str, float | Estimate]:
    """The largest `cost` that both groups reached, and their difference there (`end`) and until there (`area`).

    A line between two measurements lies below a concave curve, and further below where they are far apart. So both are
    read at the costs of the group whose measurements are further apart. ValueError for groups of two versions.
    """
    check_version(group, other)
    sides = [(g, spent(g, weights)) for g in (group, other)]  # with the cost (m,) of each measurement
    cost = float(min(own[-1] for _, own in sides))
    coarser = max((own for _, own in sides), key=lambda own: own[1])
    costs = np.append(coarser[coarser < cost * (1 - 1e-9)], cost)  # (n,)
    return {"cost": cost, "end": t_estimate(*(success_at(*side, [cost])[:, 0] for side in sides)),
            "area": t_estimate(*(mean_success(*side, costs) for side in sides))}


def spent_enough(group: Group, other: Group, share: float) -> bool:
    """Whether another group spent that share of what a group did, and was measured before."""
    return bool(spent(other)[1] < share * spent(group)[-1] < spent(other)[-1])


class Pair(NamedTuple):
    """A row of a table: a group, what it is compared with, and perhaps a second thing to compare with."""

    a: Group
    b: Group | None = None
    c: Group | None = None
    unit: float = float("nan")  # the cost of GRPO's default run in the setting
    setting: str = ""


Cell = Estimate | str | None


class Column(NamedTuple):
    """A column: what it says of a pair, and the family of tests in which its asterisks are corrected, if any."""

    header: str
    value: Callable[[Pair], Cell]
    family: Callable[[Pair], str | None] | None = None


def together(_: Pair) -> str:
    """The family of a column that is corrected as a whole."""
    return ""


def make_table(title: str, note: str, pairs: list[Pair], columns: list[Column]) -> Table:
    """The rows of pairs under columns."""
    made = [cells(column, pairs) for column in columns]
    return Table(title, note, [column.header for column in columns], [list(row) for row in zip(*made)])


def cells(column: Column, pairs: list[Pair]) -> list[str]:
    """A column's cells: an Estimate in points, with * where it is significant in its family after Holm's correction."""
    values, significant = [column.value(pair) for pair in pairs], set()
    families = [column.family(pair) if column.family else None for pair in pairs]
    for family in {*families} - {None}:
        significant |= holm({i: e.p for i, e in enumerate(values) if families[i] == family and e is not None})
    texts = [points(value) if isinstance(value, Estimate) else value or "" for value in values]
    return [text + " *" * (i in significant) for i, text in enumerate(texts)]


METHOD = Column("method", lambda pair: name_of(pair.a.label))
SEEDS = Column("seeds", lambda pair: f"{len(pair.a.rows)}")
BOTH = Column("seeds", lambda pair: ", ".join(f"{len(g.rows)}" for g in pair[: 2 - (pair.b in (None, pair.a))]))
MINUS = Column("minus", lambda pair: name_of(pair.b.label))
COST = Column("cost", lambda pair: f"{spent(pair.a)[-1] / pair.unit:.2f}")
COSTS_OF_BOTH = Column("cost", lambda pair: ", ".join(f"{spent(g)[-1] / pair.unit:.2f}" for g in pair[:2]))


def mean(figure: str) -> Column:
    """A share in percent."""
    return Column(figure, lambda pair: t_estimate(pair.a.values(figure)))


def plain(figure: str, digits: int = 3) -> Column:
    """A figure that is no share."""
    return Column(figure, lambda pair: mean_cell(pair.a.values(figure), digits))


def minus(header: str, figure: str = "area", second: bool = False, family: Callable | None = None) -> Column:
    """A figure's difference to what a pair names first or second; empty for none, and for the group itself."""
    def value(pair: Pair) -> Estimate | None:
        other = pair.c if second else pair.b
        return None if other is None or other is pair.a else difference(pair.a, other, figure)

    return Column(header, value, family)


def equal(header: str, figure: str = "area", weights: str = "1:1:3", second: bool = False,
          family: Callable | None = None) -> Column:
    """A difference at equal cost, or that cost itself; empty for none."""
    def value(pair: Pair) -> Cell:
        other = pair.c if second else pair.b
        if other is None:
            return None
        found = at_equal_cost(pair.a, other, WEIGHTS[weights])[figure]
        return f"{found / pair.unit:.2f}" if figure == "cost" else found

    return Column(header, value, family)


def cost_unit(groups: dict[str, Group]) -> float:
    """The cost of GRPO's run."""
    return float(spent(groups["none"])[-1])
