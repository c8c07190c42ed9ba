"""Which predictions of predictions.md held: its intervals beside what was found.

    python -m lab.study.run --tables
"""
import re
from pathlib import Path

from analyze import RLOO
from lab.estimates import in_points, read_cell, read_table
from lab.study.budget import at_equal_cost
from lab.study.rows import RATIO, Levels, compared_groups
from plumbing.report import Estimate, Table, pm, t_estimate, welch
from plumbing.runs import Group

FILE = Path(__file__).with_name("predictions.md")
TRUTH = FILE.parents[1] / "truth"  # has scores-latin.md and scores-math.md, of lab/truth/measure.py
MORE = "none answers=24 advantage=rloo"
LEVELS = {"latin": 1, "math": 3}  # columns of its table
MINUS = {"RLOO - GRPO": (RLOO, "none"), "`entropy_ratio` on RLOO - RLOO": (RATIO, RLOO), "`ppo` - RLOO": ("ppo", RLOO),
         "`vineppo` - RLOO": ("vineppo", RLOO), "`token_type` - GRPO": ("token_type", "none"),
         "`random` - GRPO": ("random", "none")}  # differences of area


def read_predictions() -> list[tuple[str, dict[str, tuple[float, float]]]]:
    """The name of each row of predictions.md, and its interval for each level."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in FILE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [(row[0], {level: tuple(map(float, re.findall(r"-?[\d.]+", row[i]))) for level, i in LEVELS.items()})
            for row in rows[1:]]


def found(name: str, level: str, groups: dict[str, Group]) -> Estimate:
    """What the runs of a level, or its truth, say of a row of predictions.md: in points, or as a correlation."""
    if name == "GRPO: end - start":
        return in_points(t_estimate(groups["none"].values("climb")))
    if name in MINUS:
        return in_points(welch(*(groups[label].values("area") for label in MINUS[name])))
    if name.startswith("`vineppo` - RLOO with 24"):
        return in_points(at_equal_cost(groups["vineppo"], groups[MORE]).area)
    if name.startswith("`vineppo`'s rank"):
        header, rows = read_table(TRUTH / f"scores-{level}.md", "Credit against A* and the solver, within responses")
        (row,) = (row for row in rows if row[0] == "vineppo")
        return read_cell(row[header.index("Spearman")])
    facts = dict(read_table(TRUTH / f"scores-{level}.md", "What was measured")[1])
    return Estimate(float(facts["share of the sum of abs(A*) on filler"].rstrip("%")))


def table_predictions(levels: Levels) -> Table | None:
    """Each prediction, what was found, and whether it lies in the interval; None before all of them were run."""
    groups = {level: {group.label: group for group in compared_groups(levels[level])}
              for level in LEVELS if level in levels}
    needed = {MORE, *(label for pair in MINUS.values() for label in pair)}
    if not all(needed <= groups.get(level, {}).keys() for level in LEVELS):
        return None
    rows = []
    for name, intervals in read_predictions():
        cells = []
        for level, (low, high) in intervals.items():
            e = found(name, level, groups[level])
            digits = 2 if "rank" in name else 1
            cells += [f"{low:g} to {high:g}", pm(e.value, e.high - e.value, digits),
                      "yes" if low <= e.value <= high else "no"]
        rows.append([name, *cells])
    note = ("The 80% intervals of predictions.md, written before the first run on either task, and what was found. "
            "Differences are of area, in points; five seeds a side see differences of 2 to 2.5 points. Shares are in "
            "percent.")
    return Table("Predictions", note, ["", *(f"{level}{column}" for level in LEVELS for column in
                                             (", predicted", ", found", ", held"))], rows)
