"""Success at equal cost, by hand.

Run it:  python -m pytest tests/test_study_budget.py
"""
import numpy as np
import pytest

from experiments import study_budget
from plumbing.report import welch
from plumbing.runs import Group, Run, group_runs


def runs(label, ends, cost, steps=100):
    """A run per end, from 0.2 at the start to the end in two measurements at half and all of the cost."""
    setting = " ".join(label.split()[1:])
    return [Run(f"{label}-{seed}", label, setting, label.startswith("none"), seed, {
        "end": end, "area": end, "climb": end, "steps": steps,
        "curve": {0.0: 0.2, steps / 2: (0.2 + end) / 2, steps: end},
        "spent": {0.0: 0.0, steps / 2: cost / 4, steps: cost}}) for seed, end in enumerate(ends)]  # fmt: skip


@pytest.fixture
def groups():
    """GRPO; RLOO with four times the steps; and a method whose run costs three times GRPO's."""
    return group_runs(runs("none", (0.4, 0.6), 1000.0) + runs("none advantage=rloo steps=400", (0.6, 0.8), 4000.0, 400)
                      + runs("none answers=16", (0.3, 0.5), 4000.0) + runs("vineppo k=3", (0.5, 0.7), 3000.0))


@pytest.mark.parametrize("cost, expected", [
    (0, [0.2, 0.2]), (75, [0.3, 0.35]), (150, [0.4, 0.5]), (300, [0.5, 0.6]), (315, [0.5, 0.6]), (316, [])])
def test_success_at_a_cost_is_linear_between_measurements(cost, expected):
    """Guards against a curve over steps instead of cost, and a run that counts beyond its end. The two runs had spent
    200 and 100 at half of the steps: 150 in the mean."""
    rows = {seed: {"curve": dict(zip((0, 50, 100), curve)), "spent": {0: 0.0, 50: half, 100: 300.0}}
            for seed, (curve, half) in enumerate([((0.2, 0.4, 0.5), 200.0), ((0.2, 0.5, 0.6), 100.0)])}
    found = study_budget.at_costs(Group("a", rows), np.array([float(cost)]))
    assert found[:, 0].tolist() == pytest.approx(expected)


def test_the_table_by_hand(groups):
    """Guards against another unit, an opponent that did not spend as much, and a difference at another cost."""
    table = study_budget.table_budget("easy", groups)
    rows = {row[0]: dict(zip(table.header, row)) for row in table.rows}
    assert set(rows) == {"GRPO", "RLOO steps=400", "GRPO answers=16", "`vineppo k=3`"}
    assert [rows[name]["cost"] for name in ("GRPO", "RLOO steps=400", "`vineppo k=3`")] == ["1.00", "4.00", "3.00"]
    # Half of GRPO's cost lies a third of the way from a quarter to all of it.
    values = np.array([0.3 + 0.1 / 3, 0.4 + 0.2 / 3]) * 100
    assert rows["GRPO"]["0.5"].startswith(f"{values.mean():.1f} ± ")
    assert rows["GRPO"]["2"] == "" and rows["`vineppo k=3`"]["4"] == ""
    assert rows["`vineppo k=3`"]["opponent"] == "RLOO steps=400"
    assert rows["RLOO steps=400"]["opponent"] == rows["GRPO"]["end"] == ""
    # vineppo was measured at 0, 750 and 3,000. RLOO's curves at these costs, between its own at 0, 1,000 and 4,000:
    middle, end = np.array([0.2 + 0.2 * 3 / 4, 0.2 + 0.3 * 3 / 4]), np.array([0.4 + 0.2 * 2 / 3, 0.5 + 0.3 * 2 / 3])
    areas = [(0.2 + y) / 2 / 4 + (y + z) / 2 * 3 / 4 for y, z in
             ((np.array([0.35, 0.45]), np.array([0.5, 0.7])), (middle, end))]
    for column, e in (("end", welch(np.array([0.5, 0.7]), end)), ("area", welch(*areas))):
        assert rows["`vineppo k=3`"][column] == f"{100 * e.value:.1f} ± {100 * (e.high - e.value):.1f}"


@pytest.mark.parametrize("label, name", [
    ("none", "GRPO"), ("none advantage=rloo", "RLOO"), ("none answers=38 advantage=rloo", "RLOO answers=38"),
    ("none steps=480", "GRPO steps=480"), ("vineppo k=3", "`vineppo k=3`")])  # fmt: skip
def test_names(label, name):
    assert study_budget.name_of(label) == name


def test_the_picture_shows_cost_and_steps(groups, tmp_path, figures):
    """Guards against curves of other groups, and the two x-axes swapped."""
    study_budget.draw_budget(groups, tmp_path / "budget.png")
    by_cost, by_step = ({line.get_label(): line for line in axis.lines} for axis in figures[0].axes)
    assert set(by_cost) == set(by_step) == {"GRPO, seeds: 2", "vineppo k=3, seeds: 2"}
    assert by_cost["vineppo k=3, seeds: 2"].get_xdata().tolist() == [0, 0.75, 3]
    assert by_step["vineppo k=3, seeds: 2"].get_xdata().tolist() == [0, 50, 100]
    assert by_cost["vineppo k=3, seeds: 2"].get_ydata() == pytest.approx([0.2, 0.4, 0.6])
