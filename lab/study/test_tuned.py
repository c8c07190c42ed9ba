"""Tuned rates: which is best, and the contrasts that designs.md names, against hand computations and definitions."""
import statistics

import numpy as np
import pytest

from analyze import RLOO
from lab.estimates import points
from lab.study import tuned
from lab.study.rows import RATIO
from lab.study.test_tables import study_run
from plumbing.report import t_quantile, welch
from plumbing.runs import Group

ARMS = (RLOO, RATIO, tuned.SHUFFLED, "ppo", "vineppo", tuned.EXPERT)


def group(label, areas):
    """A group with an area for each seed from 30 on."""
    return Group(label, {30 + i: {"area": area} for i, area in enumerate(areas)})


def test_the_best_rate_is_that_of_the_largest_mean_area():
    """Guards against the highest end, or the best single seed."""
    figures = {"step length": 0.1, "step cosine": 0.5}
    runs = [study_run("ppo", seed, end, setting, area=area, **figures) for setting, end, areas in
            (("lr=0.00014", 0.9, (0.3, 0.3)), ("", 0.5, (0.4, 0.3)), ("lr=0.00028", 0.5, (0.1, 0.5)))
            for seed, area in enumerate(areas)]
    shown = {row[1]: row for row in tuned.table_tuning(runs).rows}
    assert list(shown) == ["0.00014", "**0.0002**", "0.00028"]
    assert shown["**0.0002**"][2:4] == ["2", "35.0 ± 63.5"]  # t with one degree of freedom: 12.7 times 5 points


SPENT = {"vineppo": 50.0, tuned.EXPERT: 5.0}  # where it is not 10


def stage_two(rng):
    """Twenty runs of each arm at some rate, ten of vineppo; success is proportional to the cost so far."""
    def run(arm, k, seed):
        end, spent = 0.5 + 0.01 * k + 0.01 * rng.standard_normal(), SPENT.get(arm, 10.0)
        line = {name: {0.0: 0.0, 3.0: 0.3 * full, 9.0: full} for name, full in (("curve", end), ("spent", spent))}
        return study_run(*arm.split(" ")[:1], seed, end, " ".join(arm.split(" ")[1:]), others=0.5,
                         area=0.4 + 0.02 * k + 0.01 * rng.standard_normal(), **line)

    return [run(arm, k, 30 + i) for k, arm in enumerate(ARMS) for i in range(10 if arm == "vineppo" else 20)]


GRPO = [study_run("none", 0, 0.5)]  # the unit of cost


def test_nobody_looks_before_the_last_seed():
    """Guards against a table of some seeds, a correction over more rows than four, and the wrong pair."""
    runs = stage_two(np.random.default_rng(0))
    assert tuned.table_tested(runs[:-1], GRPO) is None
    table = tuned.table_tested(runs, GRPO)
    assert [row[1] for row in table.rows] == ["20, 20"] * 3 + ["10, 20", "20, 20"]
    assert [row[2].endswith("*") for row in table.rows] == [True, True, True, True, False]  # the last is not corrected
    (mine,), (other,) = ([[r.figures["area"] for r in runs if r.label == label]] for label in ("ppo", RLOO))
    assert table.rows[2][2] == points(welch(np.array(mine), np.array(other))) + " *"


def test_the_default_rate_has_all_of_its_seeds():
    """Guards against RLOO at its own rate on both sides, and against another method's runs."""
    runs, others = stage_two(np.random.default_rng(0)), [study_run("none", seed, end, "advantage=rloo", area=0.3)
                                                         for seed, end in ((0, 0.4), (20, 0.5), (21, 0.6))]
    table = tuned.table_default(runs, others + [study_run("ppo", 0, 0.9, area=0.9)])
    rows = {row[0]: row for row in table.rows}
    ends = [r.figures["end"] for r in runs if r.label == RLOO]
    assert rows["RLOO"][1] == "20, 3" and rows["RLOO"][3] == points(welch(np.array(ends), np.array([0.4, 0.5, 0.6])))
    assert tuned.table_default(runs[:-1], others) is None


def test_equal_cost_ends_where_the_cheaper_run_does():
    """Guards against a comparison at the other's end."""
    runs = stage_two(np.random.default_rng(0))
    table = tuned.table_tested(runs, GRPO)
    rows = {row[0]: dict(zip(table.header, row)) for row in table.rows}
    expert, rloo = (np.array([r.figures["end"] for r in runs if r.label == label]) for label in (tuned.EXPERT, RLOO))
    e = welch(expert / 2, rloo / 4)  # a straight line from 0, to its end and to half of it
    row = rows[f"`{tuned.EXPERT}` - RLOO"]
    assert row["area, equal cost"] == points(e) + " *"
    assert row["cost"] == "0.50, 1.00" and rows["`vineppo` - RLOO"]["cost"] == "5.00, 1.00"


def test_no_picture_before_the_last_seed(tmp_path):
    """Guards against a look at stage two, and a line drawn through another method's areas."""
    runs, rates = stage_two(np.random.default_rng(0)), {(name, 1e-4 * k): group("", [0.1 * k, 0.1 * k + 0.02])
                                                        for name in tuned.STYLES for k in (1, 2)}
    tuned.draw_tuned([], runs[:-1], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
    _, ((axis,),) = tuned.new_figure(1, 1, 2)
    rates["ppo", 2e-4] = group("", [0.6, 0.6])
    tuned.draw_rates(axis, rates)
    assert [round(line.get_ydata()[-1]) for line in axis.get_lines() if len(line.get_ydata()) == 2
            and line.get_color() == tuned.STYLES["ppo"][0] and line.get_linestyle() == "-"] == [60]


def test_equivalence_is_two_one_sided_tests():
    """Guards against the 95% interval, and a difference near the margin that counts as inside."""
    a, b = [0.50, 0.52, 0.51, 0.49], [0.50, 0.51, 0.52, 0.50]
    v = [statistics.variance(x) / 4 for x in (a, b)]
    half = t_quantile(sum(v) ** 2 / sum(x**2 / 3 for x in v), 0.10) * sum(v) ** 0.5
    edge = abs(statistics.mean(a) - statistics.mean(b)) + half
    assert tuned.equivalent(group("a", a), group("b", b), edge + 1e-9)
    assert not tuned.equivalent(group("a", a), group("b", b), edge - 1e-9)


def test_the_middle_half_and_the_probability_of_improvement_by_hand():
    """Guards against quartiles that drop whole runs, and ties that count as wins."""
    assert tuned.middle_half(group("a", [0, 1, 2, 3, 4, 5, 6, 99.0])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert tuned.middle_half(group("a", [0, 1, 2, 3, 90.0])) == pytest.approx((0.75 * 1 + 2 + 0.75 * 3) / 2.5)
    assert tuned.beats(group("a", [1, 2.0]), group("b", [1, 0, 5.0])) == (0.5 + 1 + 1 + 1) / 6


def test_pairs_are_of_the_same_seed():
    """Guards against runs paired by their place in a list."""
    a, b = Group("a", {30: {"area": 0.3}, 31: {"area": 0.5}}), group("b", [0.1, 0.4, 0.9])
    assert tuned.paired(a, b).value == pytest.approx(0.15)
