"""Sections 9 and 10 of designs.md: is exact credit more than less noise, and are right answers more than cheap steps?

    python -m lab.study.run --tables        has these tables

Section 9 also needs lab/study/signal.md, which `python -m lab.study.signal` writes.
"""
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from lab.estimates import cell, points, read_column
from lab.statistics import holm
from lab.study.engine import (BOTH, EXPERT, MORE_ANSWERS, RLOO, Column, Pair, at_equal_cost, at_rates, difference,
                              equal, make_table, measured, minus, name_of, select, spent, success_at)
from lab.study.plan import BEST
from plumbing.comparison import Group, Run
from plumbing.report import Estimate, Table, t_estimate

LINE = (RLOO, "none answers=16 advantage=rloo", MORE_ANSWERS, "none answers=90 advantage=rloo",
        "none answers=180 advantage=rloo")  # the area of RLOO by its signal to noise
MIXES = ("oracle k=4", "oracle k=4 mix=0.25", "oracle k=4 mix=0.5")  # of the primary contrast
MARGIN = 0.02  # of area
SIGNAL = Path(__file__).with_name("signal.md")
SHARE, POSITIVES = "share advantage=rloo", "positives advantage=rloo"
CONTRASTS = ((EXPERT, RLOO), (EXPERT, SHARE), (POSITIVES, RLOO), (POSITIVES, EXPERT),
             (SHARE, RLOO))  # the last was added once the others were known
LATE = 200  # a step; looked at afterwards


# ------------------------------------------------------------------------------- section 9: noise, or credit?


def section_9(small: dict[str, list[Run]]) -> dict[str, Group]:
    """Its arms at their rate by label without the rate."""
    every = at_rates(select(small, "oracle", "noise"))
    return {name: group for (name, rate), group in every.items() if rate == BEST}


def read_signal() -> dict[str, Estimate]:
    """The signal to noise of each arm's step over the three policies."""
    return read_column(SIGNAL, "Signal to noise of a step", "all")


def read_noise(file: Path = SIGNAL) -> dict[str, Estimate]:
    """1 / the noise of each arm's step, RLOO's = 1: its signal to noise, but for a factor that all arms share."""
    return {name: Estimate(1 / e.value, 1 / e.high, 1 / e.low)
            for name, e in read_column(file, "Noise of a step", "all").items()}


def on_line(signal: float, line: list[float]) -> np.ndarray:
    """The weights (n,) of the areas of n arms, whose signals to noise are `line`, in the area between them by log
    signal; beyond either end, that end has all of it."""
    order = np.argsort(line)
    return np.array([np.interp(np.log(signal), np.log(line)[order], own[order]) for own in np.eye(len(line))])


def above_line(groups: dict[str, Group], signals: dict[str, float], names: tuple[str, ...], outside: float = 0.05,
               line: tuple[str, ...] = LINE) -> Estimate:
    """The mean area of some arms minus that of RLOO, whose arms are `line`, where its signal to noise is theirs, with
    Welch's interval."""
    places = [signals[name] for name in line]
    weights = np.mean([on_line(signals[name], places) for name in names], 0)  # (n,)
    return t_estimate(*(groups[name].values("area") for name in (*names, *line)),
                      weights=(*[1 / len(names)] * len(names), *-weights), outside=outside)


def values_of(places: dict[str, Estimate]) -> dict[str, float]:
    """Estimates without their intervals."""
    return {name: e.value for name, e in places.items()}


def d_of(groups: dict[str, Group], signals: dict[str, Estimate]) -> Estimate:
    """D of the design, with its 90% interval."""
    return above_line(groups, values_of(signals), MIXES, 0.10)


def range_of_d(groups: dict[str, Group], signals: dict[str, Estimate]) -> tuple[float, float]:
    """The smallest and the largest D with every signal to noise at either end of its interval."""
    names = (*LINE, *MIXES)
    found = [above_line(groups, dict(zip(names, ends)), MIXES, 0.10).value
             for ends in product(*((signals[name].low, signals[name].high) for name in names))]
    return min(found), max(found)


def answer(d: Estimate) -> str:
    """What the design says of D by its 90% interval."""
    if -MARGIN < d.low and d.high < MARGIN:
        return "noise explains it"
    return "credit does more" if d.low > MARGIN else "credit does less" if d.high < -MARGIN else "undecided"


def table_noise(groups: dict[str, Group], *places: dict[str, Estimate]) -> Table:
    """A row for each arm, and D. places: where an arm stands on the line, by `read_signal` and by `read_noise`."""
    rows = []
    for name in sorted((name for name in groups if name in places[0]), key=values_of(places[-1]).get):
        above = ["" if name in LINE else points(above_line(groups, values_of(place), (name,)))
                 for place in places]
        rows.append([name_of(name), f"{len(groups[name].rows)}", points(t_estimate(groups[name].values("area"))),
                     "" if name == MORE_ANSWERS else points(difference(groups[name], groups[MORE_ANSWERS])),
                     *(x for place, own in zip(places, above) for x in (cell(place[name], 3), own))])
    ds, ends = [d_of(groups, place) for place in places], [range_of_d(groups, place) for place in places]
    between = " and ".join(f"{100 * low:.1f} to {100 * high:.1f}" for low, high in ends)
    rows.append(["D", "", "", "", *(x for d in ds for x in (answer(d), points(d)))])
    note = ("The small model at 2.8e-4. Signal to noise, and 1 / noise, RLOO's = 1: of a step (signal.md); the second "
            "was added afterwards. Above the line: area minus RLOO's at the same place, linear in its logarithm "
            "between RLOO's arms with 8, 16, 45, 90 and 180 responses to a puzzle, and the last one's beyond them. D "
            "is the mean over the mixes 0, 0.25 and 0.5, ± half of a 90% interval over seeds: *noise explains it* if "
            "that lies within two points of 0, *credit does more* if above 2. With every arm at either end of its "
            f"place's interval D is {between}.")
    return Table("Noise, or credit?", note, ["arm", "seeds", "area", "area - 45 responses", "signal to noise",
                                             "above the line", "1 / noise", "above by it"], rows)


# ---------------------------------------------------------------- section 10: right answers, or the cheaper step?


def section_10(first: dict[str, list[Run]]) -> dict[str, Group]:
    """Its arms by label without rate and steps, which they have in common."""
    groups = {}
    for (label, _), group in at_rates(select(first, "negatives")).items():
        name = label.replace(" steps=300", "")
        groups[name] = replace(group, label=name)
    return groups


def crossing(a: Group, b: Group) -> float:
    """The step from which the mean curve of a group stays above that of another; NaN if it ends below."""
    curves = [np.mean([list(row["curve"].values()) for row in group.rows.values()], 0) for group in (a, b)]
    # Rounded, because a tie in counts is none in the digits of runs.csv.
    steps, above = measured(a), np.round(curves[0] - curves[1], 6)  # (m,) each
    below = np.flatnonzero(above <= 0)
    if not len(below) or below[-1] == len(steps) - 1:
        return float("nan") if len(below) else float(steps[0])
    i = below[-1]
    return float(np.interp(0, above[i:i + 2], steps[i:i + 2]))


def after_late(a: Group, b: Group) -> tuple[Estimate, Estimate]:
    """How success of a group changes from step LATE to its end, and what it is at LATE minus that of another at the
    largest cost that both reached."""
    at_late = success_at(a, measured(a), [LATE])[:, 0]  # (seeds,)
    at_cost = success_at(b, spent(b), [at_equal_cost(a, b)["cost"]])[:, 0]  # (seeds,)
    return t_estimate(a.values("end") - at_late), t_estimate(at_late, at_cost)


def joint(found: list[Estimate]) -> Estimate:
    """Independent differences as one: their mean, weighted by the inverse of the variance."""
    weight = np.array([1 / (e.high - e.low) ** 2 for e in found])
    mean, half = np.average([e.value for e in found], weights=weight), weight.sum() ** -0.5 / 2
    return Estimate(float(mean), float(mean - half), float(mean + half))


def table_negatives(groups: dict[str, Group], unit: float, others: list[Pair]) -> Table:
    """A row for each contrast, and pass@16 of the first jointly with that of pairs in other settings."""
    pairs = [Pair(groups[a], groups[b], unit=unit) for a, b in CONTRASTS]
    solved = joint([difference(*pair[:2], "pass@16") for pair in (pairs[0], *others)])
    step, (change, lead) = crossing(groups[RLOO], groups[EXPERT]), after_late(groups[EXPERT], groups[RLOO])
    note = ("Easy puzzles, 2.8e-4, 300 steps, twelve fresh seeds. * is significant at 5% after Holm's correction over "
            "the two primary contrasts: the end of the first row at equal cost, the area of the second. 1:0:0 counts "
            f"sampled tokens alone. Updated: tokens of both, in millions a run. The mean curve of RLOO "
            f"{'ends below' if np.isnan(step) else f'stays from step {step:.0f} on above'} that of `expert_iteration`. "
            f"pass@16 of the first over this and the settings of sections 1 and 7: {points(solved)}. Added afterwards: "
            f"the last row; area at equal cost; from step {LATE} on `expert_iteration` changes by {points(change)}, "
            f"and at that step it is RLOO's success at the named cost plus {points(lead)}.")
    table = make_table("Right answers, or the cheaper step?", note, pairs, [
        Column("contrast", lambda pair: " - ".join(name_of(g.label) for g in pair[:2])), BOTH,
        Column("updated", lambda pair: ", ".join(f"{g.values('tokens_updated').mean() / 1e6:.2f}" for g in pair[:2])),
        minus("area"), minus("end", "end"), equal("at cost", "cost"), equal("end, equal cost", "end"),
        equal("area, equal cost", "area"),
        equal("end, 1:0:0", "end", weights="1:0:0"), minus("pass@16", "pass@16")])
    primary = {(0, "end, equal cost"): at_equal_cost(*pairs[0][:2])["end"], (1, "area"): difference(*pairs[1][:2])}
    for row, column in holm({place: e.p for place, e in primary.items()}):
        table.rows[row][table.header.index(column)] += " *"
    return table
