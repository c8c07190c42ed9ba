"""The table of learning from successes alone, against hand computations."""
import numpy as np

from lab.estimates import points
from lab.study.successes import draw_successes, table_faster, table_successes
from lab.study.test_tables import area_runs, study_run
from plumbing.report import welch


def line_runs(method, ends, spent, setting="", steps=9.0, area=0.4):
    """A run for each end, whose success and cost grow in proportion to the step."""
    def line(full):
        return {0.0: 0.0, 3.0: full / 3, 9.0: full}

    return [study_run(method, seed, end, setting, steps=steps, area=area + 0.01 * seed, curve=line(end),
                      spent=line(spent)) for seed, end in enumerate(ends)]


def test_each_setting_has_its_own_rloo_and_unit():
    """Guards against RLOO of the main table where the part has its own, one unit for all, and areas of other steps."""
    grpo, rloo = line_runs("none", [0.5, 0.6], 10.0), line_runs("none", [0.50, 0.54], 10.0, "advantage=rloo")
    expert, fresh = [0.60, 0.66], [0.40, 0.46]
    rate = "lr=0.00028"
    own = (line_runs("expert_iteration", expert, 8.0, f"steps=15 {rate}", 15.0)
           + line_runs("none", fresh, 12.0, f"{rate} advantage=rloo"))
    levels = {"easy": {"main": grpo + rloo, "successes": own},
              "hard": {"main": line_runs("none", [0.5, 0.6], 20.0) + rloo,
                       "successes": line_runs("expert_iteration", expert, 5.0, area=0.5)},
              "latin": {"main": grpo + rloo}}
    table = table_successes(levels)
    rows = {row[0]: dict(zip(table.header, row)) for row in table.rows}
    assert [*rows] == ["easy", "hard"]
    for level, share, other in (("easy", 8 / 12, fresh), ("hard", 5 / 10, [0.50, 0.54])):
        e = welch(np.array(expert) / 2, share * np.array(other) / 2)  # means of straight lines from 0
        assert rows[level]["area, equal cost"].removesuffix(" *") == points(e)
    assert (rows["easy"]["cost"], rows["hard"]["cost"]) == ("0.80, 1.20", "0.25, 0.50")
    assert rows["easy"]["area, equal steps"] == "" and rows["hard"]["area, equal steps"].startswith("10.0 ")


def test_rates_are_compared_on_the_same_seeds_and_each_at_its_best():
    """Guards against other seeds of the default rate, a best rate by the end, and the two methods exchanged."""
    parts = {"main": area_runs("none advantage=rloo", 0.30, 0.32, 0.99),
             "successes": area_runs("expert_iteration", 0.40, 0.42, 0.99),
             "faster": area_runs("none lr=0.0004 advantage=rloo", 0.37, 0.39, curve={0.0: 0.9, 9.0: 0.9})
             + area_runs("expert_iteration lr=0.0004", 0.33, 0.35)}
    table = table_faster({"math": parts, "latin": {"main": []}})
    rows = [dict(zip(table.header, row)) for row in table.rows]
    pairs = [(row["rate"], row["RLOO's rate"]) for row in rows]
    assert pairs == [("0.0002", "0.0002"), ("0.0004", "0.0004"), ("0.0002", "0.0004")]
    assert [row["area, equal steps"].split()[0] for row in rows] == ["10.0", "-4.0", "3.0"]
    assert {row["seeds"] for row in rows} == {"2, 2"} and rows[0]["area"].startswith("41.0 ")
    assert table_faster({"latin": {"main": []}}) is None


def test_nothing_before_the_first_run(tmp_path):
    """Guards against a table of headings, a picture without axes, and a run of RLOO that came first."""
    levels = {"easy": {"main": line_runs("none", [0.5], 10.0), "successes": line_runs("none", [0.5], 10.0)}}
    assert table_successes(levels) is None and table_faster(levels) is None
    draw_successes(levels, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_the_picture_has_costs_in_units_of_its_setting(figures, tmp_path):
    """Guards against steps on the axis, the unit of another setting, and the two curves exchanged."""
    main = line_runs("none", [0.5, 0.6], 20.0) + line_runs("none", [0.4, 0.5], 22.0, "advantage=rloo")
    levels = {"hard": {"main": main,
                       "successes": line_runs("expert_iteration", [0.7, 0.9], 10.0)}}
    draw_successes(levels, tmp_path / "a.png")
    lines = {line.get_label(): line for line in figures[0].axes[0].get_lines()}
    assert lines["expert_iteration"].get_xdata()[-1] == 0.5 and lines["RLOO"].get_xdata()[-1] == 1.1
    assert np.isclose(lines["expert_iteration"].get_ydata()[-1], 80) and np.isclose(lines["RLOO"].get_ydata()[-1], 45)
