"""Success at equal cost, by hand.

Run it:  python -m pytest tests/test_study_budget.py
"""
import numpy as np
import pytest

from experiments import study_budget
from plumbing.report import points, t_estimate, welch
from plumbing.runs import Group, Run, group_runs


KINDS = {"tokens_sampled": 100.0, "tokens_read": 50.0, "tokens_updated": 50.0}  # of a run: 300 units
MANY = {"tokens_sampled": 210.0, "tokens_read": 60.0, "tokens_updated": 10.0}  # 300 units, too


def runs(label, ends, cost, steps=100, kinds=KINDS):
    """A run per end, from 0.2 at the start to the end in two measurements at half and all of the cost."""
    setting = " ".join(label.split()[1:])
    return [Run(f"{label}-{seed}", label, setting, label.startswith("none"), seed, {
        "end": end, "area": end, "climb": end, "steps": steps,
        "curve": {0.0: 0.2, steps / 2: (0.2 + end) / 2, steps: end},
        "spent": {0.0: 0.0, steps / 2: cost / 4, steps: cost}} | kinds) for seed, end in enumerate(ends)]  # fmt: skip


@pytest.fixture
def groups():
    """GRPO; both opponents with four times its cost; and a method whose run costs three times as much."""
    return group_runs(runs("none", (0.4, 0.6), 1000.0) + runs("none advantage=rloo steps=400", (0.6, 0.8), 4000.0, 400)
                      + runs("none answers=16", (0.3, 0.5), 4000.0)
                      + runs("vineppo", (0.5, 0.7), 3000.0, kinds=MANY))


@pytest.mark.parametrize("cost, ends, areas", [
    (75, [0.3, 0.35], [0.25, 0.275]), (150, [0.4, 0.5], [0.3, 0.35]), (300, [0.5, 0.6], [0.375, 0.45]), (301, [], [])])
def test_success_until_a_cost_by_hand(cost, ends, areas):
    """Guards against a curve over steps instead of cost, a run that counts beyond its end, and a mean over steps. The
    two runs had spent 200 and 100 at half of the steps: 150 in the mean."""
    rows = {seed: {"curve": dict(zip((0, 50, 100), curve)), "spent": {0: 0.0, 50: half, 100: 300.0}} | KINDS
            for seed, (curve, half) in enumerate([((0.2, 0.4, 0.5), 200.0), ((0.2, 0.5, 0.6), 100.0)])}
    found = study_budget.until(Group("a", rows), float(cost))
    assert [x.tolist() for x in found] == [pytest.approx(ends), pytest.approx(areas)]


def test_other_weights_rescale_a_run(groups):
    """Guards against weights of another kind of token: per run 100 sampled, 50 read and 50 updated are 300 units."""
    none = next(g for g in groups if g.label == "none")
    assert study_budget.spent(none, study_budget.WEIGHTS["1:0:0"]) == pytest.approx(study_budget.spent(none) / 3)
    assert study_budget.spent(none, study_budget.WEIGHTS["3:1:3"]) == pytest.approx(study_budget.spent(none) * 5 / 3)


def test_the_tables_by_hand(groups):
    """Guards against another unit, an opponent that did not spend as much, and a difference at another cost."""
    by_cost = {row[0]: row[1:] for row in study_budget.table_budget("easy", groups).rows}
    assert set(by_cost) == {"GRPO", "RLOO steps=400", "GRPO answers=16", "`vineppo`"}
    assert by_cost["GRPO"][1:] == ["1.00", "50.0 ± 127.1", "", "", "50.0 ± 127.1"]
    assert by_cost["`vineppo`"][1:4] == ["3.00", points(t_estimate(np.array([0.35 + 0.15 / 9, 0.45 + 0.25 / 9]))),
                                             points(t_estimate(np.array([0.35 + 0.75 / 9, 0.45 + 1.25 / 9])))]
    rows = {row[1]: row for row in study_budget.table_equal("easy", groups).rows}
    assert set(rows) == {"RLOO steps=400", "GRPO answers=16"}
    # vineppo was measured at 0, 750 and 3,000, RLOO at 0, 1,000 and 4,000.
    middle, end = np.array([0.4, 0.5]), np.array([0.4 + 0.2 * 2 / 3, 0.5 + 0.3 * 2 / 3])
    theirs = (0.2 + middle) / 2 / 3 + (middle + end) / 2 * 2 / 3
    ours = np.array([(0.2 + y) / 2 / 4 + (y + z) / 2 * 3 / 4 for y, z in ((0.35, 0.5), (0.45, 0.7))])
    assert rows["RLOO steps=400"][2:7] == ["2, 2", "3.00", points(welch(ours, theirs)), "open",
                                           points(welch(np.array([0.5, 0.7]), end))]
    # With 1:1:6 vineppo was measured at 825 and 3,300, RLOO at 1,500 and 6,000; with 3:1:3 at 1,800 and 7,200, and at
    # 1,667 and 6,667; with 1:1:1 at 700 and 2,800, and at 667 and 2,667; with 1:0:0 at 525 and 2,100, and at 333 and
    # 1,333. The first comparison ends with vineppo's runs, the others with RLOO's.
    for cell, (half, whole, their_half, their_whole) in zip(rows["RLOO steps=400"][7:], (
            (825, 3300, 1500, 6000), (1800, 7200, 5000 / 3, 20000 / 3), (700, 2800, 2000 / 3, 8000 / 3),
            (525, 2100, 1000 / 3, 4000 / 3)), strict=True):
        common = min(whole, their_whole)
        ours = [mean_until(common, half, whole, middle, end) for middle, end in ((0.35, 0.5), (0.45, 0.7))]
        theirs = [mean_until(common, their_half, their_whole, middle, end) for middle, end in ((0.4, 0.6), (0.5, 0.8))]
        assert cell == points(welch(np.array(ours), np.array(theirs)))


def mean_until(cost, half, whole, middle, end):
    """The mean up to a cost of a curve from 0.2 that was measured at two costs; by hand."""
    last = middle + (end - middle) * (cost - half) / (whole - half)
    return ((0.2 + middle) / 2 * half + (middle + last) / 2 * (cost - half)) / cost


def test_the_picture_shows_cost_and_steps(tmp_path, figures):
    """Guards against curves of other groups, the two x-axes swapped, a long run that is cut off by step, and fractions
    under a label of percent."""
    groups = group_runs(runs("none", (0.4, 0.6), 1000.0) + runs("vineppo", (0.5, 0.7), 3000.0) +
                        runs("none steps=560 advantage=rloo", (0.6, 0.8), 4000.0, 560))
    study_budget.draw_budget(groups, tmp_path / "budget.png")
    by_cost, by_step = ({line.get_label(): line for line in axis.lines} for axis in figures[0].axes)
    assert set(by_cost) == {"RLOO steps=560, seeds: 2", "vineppo, seeds: 2"}
    assert set(by_step) == {"vineppo, seeds: 2"}
    assert by_cost["vineppo, seeds: 2"].get_xdata() == pytest.approx([np.nan, 0.75, 3], nan_ok=True)
    assert figures[0].axes[0].get_xscale() == "log"
    assert by_step["vineppo, seeds: 2"].get_xdata().tolist() == [0, 50, 100]
    assert by_cost["vineppo, seeds: 2"].get_ydata() == pytest.approx([20, 40, 60])
