"""Success at equal cost, by hand."""
import numpy as np
import pytest

from lab.estimates import points
from lab.study import budget as study_budget
from plumbing.report import welch
from plumbing.runs import Group, Run, group_runs


KINDS = {"tokens_sampled": 100.0, "tokens_read": 50.0, "tokens_updated": 50.0}  # of a run: 300 units
MANY = {"tokens_sampled": 210.0, "tokens_read": 60.0, "tokens_updated": 10.0}  # 300 units, too


def runs(label, ends, cost, steps=100, kinds=KINDS):
    """A run per end, from 0.2 at the start to the end in two measurements at half and all of the cost."""
    setting = " ".join(label.split()[1:])
    return [Run(f"{label}-{seed}", label, setting, label.startswith("none"), seed, {
        "end": end, "area": end, "climb": end, "steps": steps,
        "curve": {0.0: 0.2, steps / 2: (0.2 + end) / 2, steps: end},
        "spent": {0.0: 0.0, steps / 2: cost / 4, steps: cost}} | kinds) for seed, end in enumerate(ends)]


@pytest.fixture
def groups():
    """GRPO; RLOO and GRPO with four times its cost; and a method whose run costs three times as much."""
    return group_runs(runs("none", (0.4, 0.6), 1000.0) + runs("none advantage=rloo steps=400", (0.6, 0.8), 4000.0, 400)
                      + runs("none answers=16", (0.3, 0.5), 4000.0)
                      + runs("vineppo", (0.5, 0.7), 3000.0, kinds=MANY))


def group(*curves):
    """A group of runs given as (cost so far, success) pairs from one measurement to the next."""
    return Group("a", {seed: {"curve": {i: y for i, (_, y) in enumerate(curve)},
                              "spent": {i: float(x) for i, (x, _) in enumerate(curve)}} | KINDS
                       for seed, curve in enumerate(curves)})


def test_success_at_a_cost_by_hand():
    """Guards against a curve over steps instead of cost. The runs had spent 200 and 100 at the second measurement: 150
    in the mean."""
    pair = group([(0, 0.2), (200, 0.4), (300, 0.5)], [(0, 0.2), (100, 0.5), (300, 0.6)])
    assert study_budget.success_at(pair, np.array([75.0, 150.0, 225.0])) == pytest.approx(
        np.array([[0.3, 0.4, 0.45], [0.35, 0.5, 0.55]]))


def test_both_curves_are_read_where_the_coarser_one_was_measured():
    """Guards against a concave curve that looks better the more often it was measured, and a mean over measurements
    instead of cost: until 300, the second group's mean is 0.45 by its own measurements."""
    coarse = group([(0, 0.2), (200, 0.6), (400, 0.6)], [(0, 0.2), (200, 0.8), (400, 0.8)])
    fine = group(*[[(0, 0.2), (100, 0.5), (200, y), (300, y)] for y in (0.5, 0.6)])
    ends, areas = welch(np.array([0.6, 0.8]), np.array([0.5, 0.6])), welch(
        np.array([(0.4 * 2 + 0.6) / 3, (0.5 * 2 + 0.8) / 3]), np.array([(0.35 * 2 + 0.5) / 3, (0.4 * 2 + 0.6) / 3]))
    assert study_budget.at_equal_cost(coarse, fine) == (300, pytest.approx(ends), pytest.approx(areas))
    _, end, area = study_budget.at_equal_cost(fine, coarse)
    assert [end.value, area.value] == pytest.approx([-ends.value, -areas.value])


def test_the_table_by_hand(groups):
    """Guards against another unit, a run that did not spend as much, and a difference at another cost."""
    rows = {row[1]: row for row in study_budget.table_equal("easy", groups).rows}
    assert set(rows) == {"RLOO steps=400", "GRPO answers=16"}
    # vineppo was measured at 0, 750 and 3,000, RLOO at 0, 1,000 and 4,000. With 1:1:6 vineppo was measured at 825 and
    # 3,300, RLOO at 1,500 and 6,000; with 1:0:0 at 525 and 2,100, and at 333 and 1,333. The first two comparisons end
    # with vineppo's runs and are read where RLOO was measured, the last the other way round.
    for column, costs in {4: (750, 3000, 1000, 4000), 6: (825, 3300, 1500, 6000),
                          7: (525, 2100, 1000 / 3, 4000 / 3)}.items():
        half, whole, their_half, their_whole = costs
        common = min(whole, their_whole)
        x = max(half, their_half)
        ours = [mean_until(x, common, half, whole, *ends) for ends in ((0.35, 0.5), (0.45, 0.7))]
        theirs = [mean_until(x, common, their_half, their_whole, *ends) for ends in ((0.4, 0.6), (0.5, 0.8))]
        assert rows["RLOO steps=400"][column] == points(welch(np.array(ours), np.array(theirs)))
    end = np.array([0.4 + 0.2 * 2 / 3, 0.5 + 0.3 * 2 / 3])
    assert rows["RLOO steps=400"][2:4] == ["2, 2", "3.00"]
    assert rows["RLOO steps=400"][5] == points(welch(np.array([0.5, 0.7]), end))


def mean_until(x, cost, half, whole, middle, end):
    """The mean until a cost of a curve from 0.2 that was measured at two costs, read at x and at that cost; by hand."""
    at_x, last = (0.2 + (middle - 0.2) * at / half if at < half else
                  middle + (end - middle) * (at - half) / (whole - half) for at in (x, cost))
    return ((0.2 + at_x) / 2 * x + (at_x + last) / 2 * (cost - x)) / cost


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
