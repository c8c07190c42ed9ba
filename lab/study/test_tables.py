"""Tables of the study against hand computations, simulations and the published rows."""
import math

import numpy as np
import pytest

import analyze
from lab.estimates import cell, points
from lab.statistics import spearman, t_quantile
from lab.study import engine, pictures, tables
from lab.study.engine import RLOO, Column, Pair, cells, select
from lab.study.run import ROOT
from plumbing.report import Estimate, t_estimate
from plumbing.comparison import Group, Run

RESULTS = ROOT / "lab" / "study"
KINDS = {"tokens_sampled": 100.0, "tokens_read": 50.0, "tokens_updated": 50.0}  # of a run: 300 units


def study_run(label, seed, end, **figures):
    """A run from 0 to `end` along a straight line of success, and of cost, in nine steps."""
    line = {"curve": {0.0: 0.0, 3.0: end / 3, 9.0: end}, "spent": {0.0: 0.0, 3.0: 10 / 3, 9.0: 10.0}}
    zero = dict.fromkeys((*analyze.SIZES, "effective sample size", "varies within", "gradient norm", "start", "pass@16",
                          "step length", "step cosine", "others"), 0.0)
    given = zero | {"end": end, "climb": end - 0.1, "area": end / 2, "steps": 9.0, "gradient norm": 0.5} | KINDS | line
    setting = " ".join(label.split()[1:])
    return Run(f"{label}-{seed}", label, setting, label == "none", seed, given | figures)


def runs(label, ends, spent=10.0, first=0, **figures):
    """A run for each end, on one seed after the other."""
    return [study_run(label, first + i, end, spent={0.0: 0.0, 3.0: spent / 3, 9.0: spent}, **figures)
            for i, end in enumerate(ends)]


def group(*curves):
    """A group of runs given as (cost so far, success) pairs from one measurement to the next."""
    return Group("a", {seed: {"curve": {i: y for i, (_, y) in enumerate(curve)},
                              "spent": {i: float(x) for i, (x, _) in enumerate(curve)}} | KINDS
                       for seed, curve in enumerate(curves)})


def rows_of(table):
    """The cells of each row by column, by the row's first cell."""
    return {row[0].strip("`"): dict(zip(table.header, row)) for row in table.rows}


def test_both_curves_are_read_where_the_coarser_one_was_measured():
    """Guards against a concave curve that looks better the more often it was measured, and a mean over measurements
    instead of cost: until 300, the second group's mean is 0.45 by its own measurements."""
    coarse = group([(0, 0.2), (200, 0.6), (400, 0.6)], [(0, 0.2), (200, 0.8), (400, 0.8)])
    fine = group(*[[(0, 0.2), (100, 0.5), (200, y), (300, y)] for y in (0.5, 0.6)])
    ends, areas = t_estimate(np.array([0.6, 0.8]), np.array([0.5, 0.6])), t_estimate(
        np.array([(0.4 * 2 + 0.6) / 3, (0.5 * 2 + 0.8) / 3]), np.array([(0.35 * 2 + 0.5) / 3, (0.4 * 2 + 0.6) / 3]))
    found, other = engine.at_equal_cost(coarse, fine), engine.at_equal_cost(fine, coarse)
    assert found == {"cost": 300, "end": pytest.approx(ends), "area": pytest.approx(areas)}
    assert [other["end"].value, other["area"].value] == pytest.approx([-ends.value, -areas.value])


def test_areas_are_subtracted_over_the_same_measurements():
    """Guards against a lead that comes from measuring more often, and a shorter run that is stretched."""
    a = Group("a", {0: {"curve": {0: 0.0, 10: 0.6, 20: 0.6}, "area": 0.45}, 1: {"curve": {0: 0.0, 10: 0.4, 20: 0.6},
                                                                                    "area": 0.35}})
    b = Group("b", {0: {"curve": {0: 0.0, 20: 0.5}, "area": 0.25}})
    assert engine.difference(a, b).value == pytest.approx(0.3 - 0.25)  # both from 0 to the end
    longer = Group("c", {0: {"curve": {0: 0.0, 40: 0.5}, "area": 0.25}})
    assert engine.difference(a, longer).value == pytest.approx(0.4 - 0.25)


def test_a_contrast_across_versions_is_refused():
    """Guards against arms whose evaluation drew other numbers: a table, a pair of tables' groups, one group's seeds."""
    old, new = (runs("a", (0.5, 0.6), version=2.0), runs("b", (0.5, 0.7), version=3.0))
    (a,), (b,) = (select({"": some}, "").values() for some in (old, new))
    for compare in (engine.difference, engine.at_equal_cost):
        assert compare(a, a)
        with pytest.raises(ValueError, match=r"^[^\n]*several versions[^\n]*a \(2\), b \(3\)$"):
            compare(a, b)
    for parts in ({"x": old, "y": new}, {"x": old, "y": runs("a", (0.1, 0.2), first=5, version=3.0)}):
        with pytest.raises(ValueError, match="several versions"):
            select(parts, "x", "y")


def test_other_weights_of_tokens_change_the_cost_of_a_whole_run():
    """Guards against weights by the wrong kind: 100 + 50 + 3 * 50 = 300 units are 450 with 1:1:6 and 100 with 1:0:0."""
    g = group([(0, 0.1), (60, 0.2), (300, 0.3)])
    assert engine.spent(g, engine.WEIGHTS["1:1:6"]) == pytest.approx([0, 90, 450])
    assert engine.spent(g, engine.WEIGHTS["1:0:0"]) == pytest.approx([0, 20, 100])


def test_asterisks_are_corrected_within_their_family():
    """Guards against an asterisk for p = 0.04 beside another difference, and families that are joined."""
    pairs = [Pair(None, setting=name) for name in ("a", "a", "b", "none")]
    found = dict(zip(map(id, pairs), (Estimate(0.02, 0.01, 0.03, p) for p in (0.04, 0.5, 0.04, 0.001))))
    column = Column("x", lambda pair: found[id(pair)], lambda pair: None if pair.setting == "none" else pair.setting)
    assert cells(column, pairs) == ["2.0 ± 1.0", "2.0 ± 1.0", "2.0 ± 1.0 *", "2.0 ± 1.0"]
    assert cells(Column("x", lambda pair: Estimate(0.02)), pairs[:1]) == ["2.0"]  # a single seed has no interval


def test_a_merge_conflict_in_the_rows_is_refused_in_one_sentence(tmp_path):
    """Guards against a traceback, or a run with the figures of another one."""
    (tmp_path / "torn.csv").write_text("run,version\n<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match="^[^\n]*merge[^\n]*$"):
        engine.read_rows(tmp_path / "torn.csv")


NONE, BETTER, OTHER = (0.40, 0.42, 0.44), (0.50, 0.53, 0.56), (0.43, 0.45, 0.47)
MAIN = [*runs("none", NONE), *runs("better", BETTER, 12.5, **{"gradient norm": 1.0}),
        *runs("none advantage=rloo", OTHER)]


def half(values):
    """The areas of runs with these ends."""
    return np.array(values) / 2


def test_methods_and_settings_by_hand():
    """Guards against points for percent, GRPO and RLOO mixed up, a baseline against itself, and other seeds' runs."""
    found = rows_of(tables.table_methods("easy", {"main": MAIN}))
    assert list(found) == ["better", "RLOO", "GRPO"]  # by area
    expected = {"area - GRPO": points(t_estimate(half(BETTER), half(NONE))), "gradient": "2.0",
                "area - RLOO": points(t_estimate(half(BETTER), half(OTHER))), "cost": "1.25"}
    assert found["better"].items() >= expected.items()
    assert found["GRPO"]["area - GRPO"] == "" == found["RLOO"]["area - RLOO"]
    changed = runs("better x=1", (0.20, 0.21))
    (row,) = [row for name, row in rows_of(tables.table_settings("", MAIN, changed)).items() if name == "better x=1"]
    assert row["area - default"] == points(t_estimate(half((0.20, 0.21)), half(BETTER[:2])))


@pytest.mark.parametrize("label, default", [
    ("vineppo k=3 cuts=uncertain", "vineppo k=3"), ("none advantage=step_mean", "none"), ("none", None),
    ("none advantage=rloo answers=9", "none advantage=rloo"), ("token_type filler=2.0", None)])
def test_a_default_is_the_same_method_with_fewer_flags(label, default):
    assert tables.default_of(label, {"none", "none advantage=rloo", "vineppo k=3", "token"}) == default


def test_the_power_that_the_table_states_is_that_of_simulated_studies():
    """Guards against a wrong factor: 40,000 pairs of five seeds whose means differ by the stated number of spreads."""
    reach = (t_quantile(8) + t_quantile(8, 0.4)) * math.sqrt(2 / 5)
    x, y = np.random.default_rng(5).normal(size=(2, 40000, 5))
    t = (x.mean(1) + reach - y.mean(1)) / np.sqrt((x.var(1, ddof=1) + y.var(1, ddof=1)) / 5)
    assert np.mean(t > t_quantile(8)) == pytest.approx(0.8, abs=0.02)
    ends = (0.4, 0.42, 0.44, 0.46, 0.5)
    assert f"{100 * reach * np.std(ends, ddof=1):.1f} points" in tables.power(select({"": runs("none", ends)}, ""))


def test_costly_methods_are_compared_with_what_spent_enough():
    """Guards against a cheap method, a run that did not spend as much, and a difference at another cost."""
    main = runs("none", NONE) + runs("vineppo", BETTER, 30.0) + runs("cheap", BETTER, 10.0)
    budget = runs("none steps=400 advantage=rloo", OTHER, 40.0) + runs("none answers=9", OTHER, 20.0)
    (row,) = tables.table_equal("easy", {"main": main, "budget": budget}).rows
    e = t_estimate(half(BETTER), half(OTHER) * 0.75)  # straight lines, the longer one up to three quarters
    assert row[:5] == ["`vineppo`", "RLOO steps=400", "3, 3", "3.00", points(e) + " *"]


def test_scores_and_learning_by_hand(monkeypatch):
    """Guards against the wrong figure, methods that fell among those that climbed, and a cut at the point of GRPO."""
    ends = {"none": 0.3, "a": 0.4, "b": 0.5, "c": 0.2, "d": 0.15, "e": 0.1}  # from 0.1: e did not climb
    truths = {"none": 0.5, "a": 0.45, "b": 0.6, "c": 0.4, "d": 0.1, "e": 0.9}  # that of GRPO reaches down to 0.4
    main = [study_run(m, seed, end, area=1 - end) for m, end in ends.items() for seed in range(3)]
    monkeypatch.setattr(tables, "SCORES", {"cosine with A*": ("", "", "", "cosine")})
    scores = {"cosine with A*": {m: Estimate(t, t - 0.1, t + 0.1) for m, t in truths.items()}}
    found = tables.table_correlations({"main": main}, scores).rows
    subsets = {"all, 6": [*ends], "those that climbed, 5": [*"abcd", "none"],
               "of these, cosine as GRPO's or above, 4": [*"abc", "none"]}
    assert [row[1] for row in found] == [*subsets]
    for row, subset in zip(found, subsets.values()):
        assert row[2] == cell(spearman(*np.array([(truths[m], 1 - ends[m]) for m in subset]).T))


@pytest.fixture
def leads():
    """The rows of both tables of leads by method and setting: RLOO also took four times the steps on easy puzzles."""
    easy = [*MAIN, *runs("ppo", BETTER, 13.0)]
    budget = [*runs("none steps=400 advantage=rloo", (0.60, 0.64, 0.62), 40.0),
              *runs("none steps=410 advantage=rloo", NONE, 41.0), *runs("none answers=16 advantage=rloo", BETTER, 50.0)]
    more = (runs("none advantage=rloo updates_per_batch=4", BETTER, 30.0) + runs("ppo updates_per_batch=4", OTHER, 50.0)
            + runs("none advantage=rloo lr=5e-05 updates_per_batch=4", NONE, 30.0)
            + runs("ppo lr=5e-05 updates_per_batch=4", BETTER, 90.0))
    hard = runs("none", BETTER) + runs("none advantage=rloo", BETTER)
    levels = {"easy": {"main": easy, "budget": budget, "updates": more}, "hard": {"main": hard},
              "other": {"main": runs("none", NONE)}}
    return {(row[0].strip("`"), row[1]): row[2:] for table in tables.tables_leads(levels) for row in table.rows}


def test_each_setting_has_its_own_rloo(leads):
    """Guards against RLOO of another setting, RLOO against itself, a setting without it, and a * or † by chance."""
    assert set(leads) == {("ppo", "easy"), ("GRPO", "easy"), ("GRPO", "hard"), ("RLOO", "4 updates"),
                          ("ppo", "4 updates"), ("RLOO", "4 updates, lr 5e-05"), ("ppo", "4 updates, lr 5e-05")}
    gain = points(t_estimate(half(BETTER), half(OTHER)))
    assert leads["ppo", "easy"][:3] == ["3, 3", "1.30", f"{gain} *"]
    assert leads["ppo", "4 updates"][2] == f"-{gain} * †"
    assert leads["GRPO", "hard"][2] == points(t_estimate(half(BETTER), half(BETTER)))
    assert leads["RLOO", "4 updates"][2:4] == ["", ""]


def test_at_equal_cost_rloo_takes_one_update_and_more_steps_if_it_must(leads):
    """Guards against RLOO with more updates or responses, of more steps than needed, at another cost, or too cheap."""
    longer = np.array((0.60, 0.64, 0.62))
    for where, name, rloo, cost, ours, theirs in (
            ("easy", "ppo", "RLOO", "1.00", np.array(BETTER) * 10 / 13, np.array(OTHER)),
            ("4 updates", "RLOO", "RLOO steps=400", "3.00", np.array(BETTER), longer * 0.75),
            ("4 updates", "ppo", "RLOO steps=400", "4.00", np.array(OTHER) * 0.8, longer)):
        found = leads[name, where][4:]
        assert found[:2] + found[3:] == [rloo, cost, points(t_estimate(ours, theirs))]
        assert found[2].removesuffix(" *") == points(t_estimate(ours / 2, theirs / 2))
    assert leads["ppo", "4 updates, lr 5e-05"][4:] == [""] * 4


def stage_two(rng):
    """Twenty runs of each arm at some rate, ten of vineppo; success is proportional to the cost so far."""
    names = RLOO, tables.RATIO, tables.SHUFFLED, "ppo", "vineppo", tables.EXPERT
    return [run for k, name in enumerate(names) for run in runs(
        name, 0.5 + 0.02 * k + 0.01 * rng.standard_normal(10 if name == "vineppo" else 20),
        {"vineppo": 50.0, tables.EXPERT: 5.0}.get(name, 10.0), 30)]


def test_the_contrasts_of_stage_two_by_hand():
    """Guards against a correction over more than four rows, a wrong pair, and extrapolation."""
    first = {"main": runs("none", NONE), "test": stage_two(np.random.default_rng(0))}
    found = rows_of(tables.table_tested(first))
    assert [row["seeds"] for row in found.values()] == ["20, 20"] * 3 + ["10, 20", "20, 20"]
    assert [row["area"].endswith("*") for row in found.values()][-1] is False  # the last is not corrected
    expert, rloo = (np.array([r.figures["end"] for r in first["test"] if r.label == label])
                    for label in (tables.EXPERT, RLOO))
    row = found[f"{tables.EXPERT}` - RLOO"]
    assert row["area"] == points(t_estimate(expert / 2, rloo / 2)) and row["cost"] == "0.50, 1.00"
    assert row["area, equal cost"] == points(t_estimate(expert / 2, rloo / 4)) + " *"  # a line from 0, and half of one


def test_rates_are_compared_on_the_same_seeds_and_each_at_its_best():
    """Guards against other seeds of the default rate, a best rate by the end, and the two methods exchanged."""
    parts = {"main": runs(RLOO, (0.60, 0.64, 0.99)), "successes": runs("expert_iteration", (0.80, 0.84, 0.99)),
             "faster": runs("none lr=0.0004 advantage=rloo", (0.74, 0.78)) + runs("expert_iteration lr=0.0004",
                                                                                 (0.66, 0.70))}
    table = tables.table_faster({"math": parts, "latin": {"main": []}})
    found = [dict(zip(table.header, row)) for row in table.rows]
    assert [(row["rate"], row["RLOO's rate"]) for row in found] == [
        ("0.0002", "0.0002"), ("0.0004", "0.0004"), ("0.0002", "0.0004")]
    assert [row["area, equal steps"].split()[0] for row in found] == ["10.0", "-4.0", "3.0"]


def test_each_setting_of_successes_has_its_own_rloo_and_unit():
    """Guards against RLOO of the main table where the part has its own, one unit for all, and areas of other steps."""
    fresh = runs("none lr=0.00028 advantage=rloo", (0.40, 0.46), 12.0)
    own = runs("expert_iteration steps=15", (0.60, 0.66), 8.0, steps=15.0) + fresh
    main = runs("none", NONE) + runs(RLOO, OTHER)
    levels = {"easy": {"main": main, "successes": own}, "latin": {"main": main},
              "hard": {"main": runs("none", NONE, 20.0) + runs(RLOO, OTHER),
                       "successes": runs("expert_iteration", (0.60, 0.66), 5.0)}}
    found = rows_of(tables.table_successes(levels))
    assert [*found] == ["easy", "hard"] and found["easy"]["area, equal steps"] == ""
    assert (found["easy"]["cost"], found["hard"]["cost"]) == ("0.80, 1.20", "0.25, 0.50")
    for level, share, other in (("easy", 8 / 12, (0.40, 0.46)), ("hard", 5 / 10, OTHER)):
        e = t_estimate(half((0.60, 0.66)), share * half(other))  # means of straight lines from 0
        assert found[level]["area, equal cost"].removesuffix(" *") == points(e)


def test_all_seeds_of_the_default_rate_count():
    """Guards against seeds of one part alone, and runs at another rate."""
    first = {part: [run for name, ends in ((RLOO, OTHER), (tables.RATIO, BETTER), ("ppo", NONE), ("vineppo", BETTER))
                    for run in runs(name, ends, first=seed)] for part, seed in (("main", 0), ("tune", 20))}
    first["tune"] += runs("none lr=0.00028 advantage=rloo", (0.01, 0.02), first=20)
    row = rows_of(tables.table_all_seeds(first))[tables.RATIO]
    assert row["seeds"] == "6, 6" and row["end"] == points(t_estimate(np.array(BETTER * 2), np.array(OTHER * 2)))


def test_a_level_gets_the_error_of_its_draw_by_hand():
    """Guards against a deviation between puzzles or runs, one run's error for that of their mean, and errors that are
    added plainly. Variances between draws are 0.01, 0, 0, 0 of single runs, and 0.0025, 0 of the mean over both runs:
    deviations of 5.0 points, ± 1.96 sqrt(2 / 3 * 8.33), and of 3.54. With 2 over seeds sqrt(2^2 + (1.96 * 3.54)^2) is
    7.2."""
    rows = [{"run": run, "puzzles": puzzles, "success": success} for run, puzzles, success in (
        ("a", "usual", "0.5 0.6 0.7"), ("a", "others", "0.4 0.4 0.4"), ("b", "usual", "0.5 0.5 0.5"),
        ("b", "others", "0.3 0.3 0.3"))]
    table = tables.table_draws(rows, Estimate(0.54, 0.52, 0.56))
    assert table.rows[:2] == [["a", "usual", "50.0", "60.0", "10.0"], ["a", "others", "40.0", "40.0", "0.0"]]
    for text in ("easier by 20.0 ±", "5.0 ± 4.6 of a run, 3.5 ±", "54.0 ± 2.0 is 54.0 ± 7.2 as"):
        assert text in table.note


def test_perfect_credit_is_compared_with_rloo_at_its_rate(monkeypatch):
    """Guards against RLOO at another rate, a cost in other units, and an accuracy of another credit."""
    monkeypatch.setattr(tables, "read_accuracy", lambda: {"oracle": Estimate(0.8, 0.7, 0.9)})
    small = {"main": runs("none", NONE, 5.0), "oracle": runs("none lr=0.00028 advantage=rloo", OTHER)
             + runs("none lr=0.00039 advantage=rloo", NONE) + runs("oracle lr=0.00028", BETTER, 50.0)}
    row = rows_of(tables.table_perfect(small))["oracle"]
    assert row["area - RLOO"] == points(t_estimate(half(BETTER), half(OTHER)))
    assert (row["cost"], row["accuracy"], row["area - 45"]) == ("10.0", "0.80 (0.70 to 0.90)", "")


def test_the_published_study_is_what_its_rows_give(tmp_path):
    """Guards against a figure that no row of lab/study/runs.csv gives: all tables again, from the rows alone."""
    (tmp_path / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    pictures.write_study(tmp_path / "runs.csv")
    for name in ("tables.md", "tables-1.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (RESULTS / name).read_text(encoding="utf-8")
    assert {file.name for file in tmp_path.glob("*.png")} == {file.name for file in RESULTS.glob("*.png")} - {
        "collapse-hard.png"}
