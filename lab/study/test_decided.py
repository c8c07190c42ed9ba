"""Sections 9 and 10 of the designs: known answers for made-up runs."""
import numpy as np
import pytest

from lab.estimates import points, read_cell
from lab.study import decided, pictures
from lab.study.engine import RLOO
from lab.study.test_tables import group, rows_of, runs
from plumbing.report import Estimate, Table, t_estimate
from plumbing.comparison import Group

SIGNALS = dict(zip(decided.LINE, (1.0, 2.0, 4.0, 8.0, 16.0)))  # a step each by logarithm


def areas(*means, spread=0.01, n=5):
    """n areas around each mean, all with the same variance."""
    around = np.linspace(-1, 1, n) * spread
    return [Group("", {i: {"area": mean + x} for i, x in enumerate(around)}) for mean in means]


def test_the_line_is_linear_in_the_logarithm_and_ends():
    """Guards against a line by signal itself, weights of other arms, extrapolation, and an order that noise changed."""
    line = list(SIGNALS.values())
    assert decided.on_line(2**1.25, line) == pytest.approx([0, 0.75, 0.25, 0, 0])
    assert decided.on_line(99.0, line) == pytest.approx([0, 0, 0, 0, 1])
    assert decided.on_line(0.5, line) == pytest.approx([1, 0, 0, 0, 0])
    assert decided.on_line(2**1.5, [1.0, 4.0, 2.0, 8.0, 16.0]) == pytest.approx([0, 0.5, 0.5, 0, 0])


def test_d_and_its_interval_by_hand():
    """Guards against a mean of intervals, arms of the line that count more than once, and 95% for 90%."""
    groups = dict(zip((*decided.LINE, *decided.MIXES), areas(0.1, 0.2, 0.3, 0.4, 0.5, 0.38, 0.33, 0.27)))
    signals = SIGNALS | dict(zip(decided.MIXES, (2**2.5, 4.0, 2.0)))  # on the line: 0.35, 0.3, 0.2
    d = decided.above_line(groups, signals, decided.MIXES, 0.10)
    assert d.value == pytest.approx((0.03 + 0.03 + 0.07) / 3)
    # The mixes have weights 1/3 each; of the line, arm 2 has 1/3, arm 3 has 1/2, arm 4 has 1/6.
    v = np.var(np.linspace(-1, 1, 5) * 0.01, ddof=1) / 5 * np.array([1 / 9] * 3 + [1 / 9, 1 / 4, 1 / 36])
    rng, freedom = np.random.default_rng(0), v.sum() ** 2 / (v**2 / 4).sum()
    beyond = np.quantile(np.abs(rng.standard_t(freedom, 400_000)), 0.90)
    assert d.high - d.value == pytest.approx(beyond * v.sum() ** 0.5, rel=0.01)
    ends = {name: Estimate(s, s / 2**0.5, s * 2**0.5) for name, s in signals.items()}
    low, high = decided.range_of_d(groups, ends)
    assert low < d.value - 0.05 and high > d.value + 0.05  # all mixes half a step up, and the line half a step down


@pytest.mark.parametrize("low, high, answer", [
    (-0.019, 0.019, "noise explains it"), (-0.021, 0.0, "undecided"), (0.01, 0.03, "undecided"),
    (0.021, 0.09, "credit does more"), (-0.09, -0.021, "credit does less")])
def test_the_answer_is_that_of_the_design(low, high, answer):
    assert decided.answer(Estimate(0.0, low, high)) == answer


def test_one_over_the_noise_turns_its_interval_around(tmp_path):
    """Guards against the noise itself, and ends that are left where they were."""
    file = tmp_path / "signal.md"
    file.write_text(str(Table("Noise of a step", "", ["arm", "all"], [["a", "0.500 (0.400 to 0.800)"]])))
    assert decided.read_noise(file)["a"] == pytest.approx((2.0, 1.25, 2.5, np.nan), nan_ok=True)


def noise_rows():
    """Five seeds of each arm of section 9 as a level's parts: each doubling of the signal gains a point."""
    arms = (*decided.LINE, *decided.MIXES)
    other = runs(f"{RLOO} lr=0.00039", [0.01] * 5)  # another rate
    return {"oracle": other, "noise": [run for i, name in enumerate(arms) for run in runs(
        f"{name} lr=0.00028", 0.2 + 0.02 * (i if i < 5 else 2) + np.linspace(-0.005, 0.005, 5))]}


def test_noise_has_a_table_and_a_picture(tmp_path):
    """Guards against an arm at another rate, and a row on the line that is compared with itself."""
    signals = {**SIGNALS, **dict.fromkeys(decided.MIXES, 8.0)}
    estimates = {name: Estimate(s, s * 0.9, s * 1.1) for name, s in signals.items()}
    groups = decided.section_9(noise_rows())
    less = estimates | dict.fromkeys(decided.MIXES, Estimate(1.0, 0.9, 1.1))
    found = rows_of(decided.table_noise(groups, estimates, less))
    assert found["D"]["signal to noise"] == "noise explains it" and found["D"]["1 / noise"] == "undecided"
    assert found["D"]["above the line"].startswith("-1.0 ± ")  # area of 45, noise of 90
    assert found["D"]["above by it"].startswith("2.0 ± ")  # noise of 8
    assert found["oracle k=4"]["area - 45 responses"].startswith("0.0 ± ") and found["RLOO"]["above the line"] == ""
    assert found["RLOO"]["area"].startswith("10.0 ± ")
    pictures.draw_noise(groups, estimates, tmp_path / "noise.png")
    assert (tmp_path / "noise.png").is_file()


def test_a_crossing_is_the_last_one():
    """Guards against the first crossing, and one where the curve ends below."""
    a, b = group([(0, 0.1), (1, 0.4), (2, 0.3), (3, 0.6)]), group([(0, 0.1), (1, 0.2), (2, 0.4), (3, 0.4)])
    assert decided.crossing(a, b) == pytest.approx(2 + 1 / 3) and np.isnan(decided.crossing(b, a))
    a.rows[0]["curve"][2] = 0.4 + 8e-8  # a tie, but for the digits of a file
    assert decided.crossing(a, b) == 2


def test_what_became_of_a_group_after_a_step_by_hand(monkeypatch):
    """Guards against a change with the other sign, and the other group at its own end."""
    monkeypatch.setattr(decided, "LATE", 1)
    a = group([(0, 0.1), (1, 0.6), (2, 0.4)], [(0, 0.1), (1, 0.7), (2, 0.5)])
    b = group([(0, 0.1), (4, 0.5)], [(0, 0.1), (4, 0.7)])  # at cost 2: 0.3 and 0.4
    for one in (a, b):
        for row in one.rows.values():
            row["end"] = list(row["curve"].values())[-1]
    change, lead = decided.after_late(a, b)
    assert change.value == pytest.approx(-0.2) and lead == pytest.approx(t_estimate([0.6, 0.7], [0.3, 0.4]))


def test_differences_are_joined_by_the_inverse_of_their_variance():
    """Guards against weights by the interval itself: 4 to 1 for half the width."""
    found = decided.joint([Estimate(1.0, 0.5, 1.5), Estimate(2.0, 1.0, 3.0)])
    assert found == pytest.approx((1.2, 1.2 - 0.2**0.5, 1.2 + 0.2**0.5, np.nan), nan_ok=True)


def test_the_two_primary_contrasts_are_corrected_together(tmp_path, figures):
    """Guards against a correction over a column, rates and steps in a name, and a picture by step in both halves."""
    rng, names = np.random.default_rng(0), (RLOO, decided.EXPERT, decided.SHARE, decided.POSITIVES)
    rows = [run for name, end, cost in zip(names, (0.5, 0.5, 0.4, 0.5), (20.0, 10.0, 10.0, 10.0))
            for run in runs(f"{name} lr=0.00028 steps=300", end + 0.01 * rng.standard_normal(12), cost, 70)]
    for run in rows:
        run.figures["pass@16"] = rng.random()
    groups = decided.section_10({"negatives": rows})
    table = decided.table_negatives(groups, 10.0, [])
    found = rows_of(table)
    first, second = (found[f"{decided.EXPERT}` - {other}"] for other in ("RLOO", f"`{decided.SHARE}"))
    expert, rloo, share = (groups[name].values("end") for name in (decided.EXPERT, RLOO, decided.SHARE))
    assert first["end, equal cost"] == points(t_estimate(expert, rloo / 2)) + " *"  # half of a straight line
    assert second["area"] == points(t_estimate(expert / 2, share / 2)) + " *" and first["area"][-1] != "*"
    assert read_cell(first["end"]).value == pytest.approx(100 * (expert - rloo).mean(), abs=0.05)
    pictures.draw_negatives(groups, 10.0, tmp_path / "negatives.png")
    by_step, by_cost = ([line.get_xydata()[-1].tolist() for line in axis.lines] for axis in figures[0].axes)
    ends = [100 * groups[name].values("end").mean() for name in names]
    assert by_cost == [pytest.approx([cost, end]) for cost, end in zip((2, 1, 1, 1), ends)]
    assert [x for x, _ in by_step] == [9] * 4
