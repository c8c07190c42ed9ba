"""The tables and pictures of the study, against numbers worked out by hand, simulations, and the published rows.

Run it:  python -m pytest tests/test_study_tables.py
"""
import itertools
import math
import re
import statistics

import numpy as np
import pytest

import analyze
from experiments import study, study_scores, study_tables
from experiments.correlation import ranks, spearman, without_two
from mitigations import MITIGATIONS
from plumbing.report import Estimate, cell, plt, t_estimate, write_csv
from plumbing.runs import Run, group_runs

RESULTS = study.ROOT / "results"
COSINE, WITHIN, SIGNAL = study_scores.MEASURED


def study_run(method, seed, end, setting="", **figures):
    """A Run of the study from 0.1 at the start to `end` after nine steps."""
    zero = dict.fromkeys((*analyze.LEARNING, *analyze.CREDIT), 0.0)
    rows = zero | {"start": 0.1, "end": end, "climb": end - 0.1, "area": end / 2, "pass@16": 0.5, "steps": 9.0,
                   "gradient norm": 0.5, "curve": {0.0: 0.0, 9.0: end}}
    label = f"{method} {setting}".strip()
    return Run(f"{label}-{seed}", label, setting, method == "none", seed, rows | figures)


def study_runs(method, *ends, seeds=(0, 1, 2), setting="", **figures):
    """A run of a method for each of these ends, on one seed after the other."""
    return [study_run(method, seed, end, setting, **figures) for seed, end in zip(seeds, ends)]


def half(distance, runs=3):
    """Half of the 95% interval of two or three runs whose figures are so far apart."""
    return distance * (12.706 / 2 if runs == 2 else 4.303 / math.sqrt(3))


def shown(points, half_width, star=""):
    """A figure in a cell."""
    return f"{points:.1f} ± {half_width:.1f}{star}"


def cells(table):
    """The cells of each row of a table by column, by the method in the first cell."""
    return {row[0].strip("`"): dict(zip(table.header, row)) for row in table.rows}


# ------------------------------------------------------------------------------------------------ rank correlation


def test_spearman_by_the_textbook():
    """Guards against ranks of ties by place, and an interval of Pearson's or of what does not vary."""
    x, y = np.array([3.0, 1, 2, 10, 5, 4]), np.array([0.1, 0.3, 0.2, 0.9, 0.5, 0.05])
    d = np.array([3, 1, 2, 6, 5, 4]) - [2, 4, 3, 6, 5, 1]  # without ties it is 1 - 6 sum d^2 / (n^3 - n)
    e = spearman(x, y)
    assert e.value == pytest.approx(1 - 6 * sum(d**2) / (6**3 - 6))
    width = 1.96 * math.sqrt((1 + e.value**2 / 2) / 3)
    assert np.arctanh(e[1:]) - np.arctanh(e.value) == pytest.approx([-width, width])
    tied = spearman(np.array([1.0, 1, 2, 3]), np.array([5.0, 6, 7, 7]))
    assert tied.value == pytest.approx(statistics.correlation([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5]))
    assert math.isnan(spearman(np.ones(5), x[:5]).value) and math.isnan(spearman(x[:5], np.ones(5)).value)
    assert math.isnan(spearman(x, x).low) and math.isnan(spearman(x[:3], y[:3]).low)
    assert math.isfinite(spearman(x[:4], y[:4]).low)


@pytest.mark.parametrize("rho", [0, 0.87])
def test_spearman_covers_as_often_as_it_says(rho):
    """Guards against an interval too narrow for a dozen methods: 2,000 samples of a normal pair."""
    rng, truth, inside = np.random.default_rng(3), 6 / math.pi * math.asin(rho / 2), []
    for _ in range(2000):
        x, noise = rng.normal(size=(2, 12))
        e = spearman(x, rho * x + math.sqrt(1 - rho**2) * noise)
        inside.append(e.low <= truth <= e.high)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_a_correlation_that_two_points_made():
    """Guards against a correlation that one or two methods make: five pairs that do not agree and two far out."""
    x, y = np.array([1.0, 2, 3, 4, 5, 8, 9]), np.array([3.0, 1, 5, 2, 4, 8, 9])
    kept = [statistics.correlation(ranks(x[list(k)]), ranks(y[list(k)])) for k in itertools.combinations(range(7), 5)]
    assert without_two([*"abcde", "f x=1", "g"], x, y) == f"{min(kept):.2f} (f, g)"
    assert without_two([*"abcd"], x[:4], y[:4]) == "" != without_two([*"abcde"], x[:5], y[:5])


# ----------------------------------------------------------------------------------------------- scores and learning


def test_scores_are_read_from_their_tables(tmp_path):
    """Guards against a column of another table, and an empty cell that becomes 0."""
    truth = ["## Credit against A*, all tokens", "| method | Spearman | cosine of update |", "|---|--:|--:|",
             "| a | 0.90 (0.80 to 0.95) | -0.24 (-0.56 to 0.08) |", "",
             "## Credit against A* and the solver, within responses", "| method | Spearman | Pearson |", "|---|--:|--:|",
             "| a | | 0.50 |", "| b | 0.10 | 0.20 |", "", "## Other", "| method | Spearman |", "|---|--:|", "| a | 9.9 |"]
    noise = ["| method | Spearman |", "| a | 0.77 |",
             "## Noise and bias of each method's gradient", "", "| method | signal to noise |", "| a | -0.001 |"]
    (tmp_path / "truth-scores.md").write_text("\n".join(truth))
    (tmp_path / "gradients.md").write_text("\n".join(noise))
    scores = study_scores.read_scores(tmp_path)
    assert scores["a"][COSINE] == (-0.24, -0.56, 0.08)
    assert math.isnan(scores["a"][WITHIN].value) and scores["a"][SIGNAL].value == -0.001
    assert scores["b"] == {WITHIN: pytest.approx((0.1, math.nan, math.nan), nan_ok=True)}
    runs = [study_run(method, 0, 0.5) for method in ("none", "b k=3", "a", "c")]
    runs += [study_run("b", 7, 0.5), study_run("b", 0, 0.5, "lr=1")]  # shares no seed with `none`; has no `none`
    groups = group_runs(runs)
    assert [groups[i].label for i, _ in study_scores.scored_groups(groups, scores, WITHIN)] == ["b k=3"]


def test_scores_and_learning_by_hand():
    """Guards against a correlation with the wrong figure, methods that fell among those that climbed, a cut by the
    point of `none` instead of its interval, and ends compared over unequal seeds: seed 1 was lucky for `none`."""
    ends = {"none": 0.3, "a": 0.4, "b": 0.5, "c": 0.2, "d": 0.15, "e": 0.1}  # from 0.1: e did not climb
    truths = {"none": 0.5, "a": 0.45, "b": 0.6, "c": 0.4, "d": 0.1, "e": 0.9}  # that of `none` reaches down to 0.4
    groups = group_runs([study_run(m, 0, end, area=1 - end) for m, end in ends.items()]
                        + [study_run("none", 1, 0.9, area=0.1), study_run("a", 1, 1.0, area=0.1)])
    scores = {m: {COSINE: Estimate(t, t - 0.1, t + 0.1), SIGNAL: Estimate(t)} for m, t in truths.items()}
    table = study_scores.table_truth("easy", groups, scores)
    subsets = {"all, 6": [*ends], "those that climbed, 5": [*"abcd", "none"],
               "of these, cosine not below none, 4": [*"abc", "none"]}
    assert [row[1] for row in table.rows] == 2 * [*subsets]
    for row, subset in zip(table.rows, subsets.values()):
        truth, end = np.array([(truths[m], ends[m]) for m in subset]).T
        assert row[2:4] == [cell(spearman(truth, end)), cell(spearman(truth, -end))]
    left = [[m for m in ends if m not in pair] for pair in itertools.combinations(ends, 2)]
    least = min(spearman(*np.array([(truths[m], -ends[m]) for m in subset]).T).value for subset in left)
    assert table.rows[0][4].startswith(f"{least:.2f} (")
    assert "all 6 methods cosine with A* and signal to noise correlate by 1.00" in table.note
    del scores["e"]  # then all climbed: a row is not said twice
    names = [row[1] for row in study_scores.table_truth("easy", groups, scores).rows]
    assert names == 2 * ["all, 5", "of these, cosine not below none, 4"]


def test_the_picture_of_truth_shows_what_the_tables_say(tmp_path, monkeypatch):
    """Guards against numbers beside the wrong names, another figure than the table's, and intervals that are cut off."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    runs = [*study_runs("none", 0.5, 0.51), *study_runs("good", 0.6, 0.61), *study_runs("fallen", 0.1, 0.11),
            *study_runs("wide", 0.14, 0.18)]
    truths = {"none": 0.8, "good": 0.9, "fallen": -0.2, "wide": 0.5}
    scores = {m: {score: Estimate(x, x - 0.1, x + 0.1) for score in study_scores.MEASURED} for m, x in truths.items()}
    study_scores.draw_truth("easy", group_runs(runs), scores, tmp_path / "a.png")
    axis, *_, last = kept[0].axes
    gains = {"0": (0.8, 0), "1": (0.9, 5), "2": (0.5, -17.25), "3": (-0.2, -20)}  # points of area
    assert {t.get_text(): t.xy for t in axis.texts} == {i: pytest.approx(xy) for i, xy in gains.items()}
    drawn = [line.get_xydata().tolist() for line in axis.lines]
    low, high = -17.25 - half(1.5, 2), -17.25 + half(1.5, 2)
    for ends in ([[0.4, -17.25], [0.6, -17.25]], [[0.5, low], [0.5, high]]):  # of `wide`: both intervals
        assert any(np.shape(line) == (2, 2) and np.allclose(line, ends) for line in drawn)
    assert axis.get_ylim()[0] < low
    names = next(t.get_text() for t in last.texts if "none" in t.get_text())
    assert names.split() == ["0", "none", "1", "good", "2", "wide", "3", "fallen"]


# ---------------------------------------------------------------------------------------------------------- tables


def test_an_interval_without_width_says_nothing():
    """Guards against a star for seeds whose differences happen to be the same, but for the rounding of the rows and of
    the subtraction, for a single seed, and for none where only a puzzle differs."""
    estimates = [Estimate(0.1, 0.05, 0.2), Estimate(-0.1, -0.2, -0.05), Estimate(0.1, -0.1, 0.3),
                 Estimate(0.1, 0.1, 0.1), Estimate(0.1)]
    assert [study_tables.excludes_zero(e) for e in estimates] == [True, True, False, False, False]
    assert [study_tables.is_below(e) for e in estimates] == [False, True, False, False, False]
    rows = np.array([float(f"{k / 512:.6g}") for k in (153, 216, 294, 148, 211, 289)]).reshape(2, 3)
    same = t_estimate(rows[0] - rows[1])
    assert 0 < same.low < same.high and not study_tables.excludes_zero(same)
    areas = np.full(10, 0.2)
    areas[0] += 1 / 512 / 8  # an end counts an eighth
    assert study_tables.excludes_zero(t_estimate(areas))


MAIN = [*study_runs("none", 0.40, 0.42, 0.44),
        *study_runs("better", 0.50, 0.53, 0.56, **{"gradient norm": 1.0}),  # 10, 11 and 12 points more
        *(study_run("unclear", s, (0.41, 0.41, 0.46)[s], **{"pass@16": 0.6 + s / 100, "varies within": s})
          for s in range(3)),
        study_run("once k=3", 1, 0.30)]


@pytest.fixture(scope="module")
def tables():
    """The tables that compare the methods of MAIN with each other, and with other runs of them."""
    groups = group_runs(MAIN)
    records = {group.label: analyze.record(group) for group in groups}
    scores = {"once": {score: Estimate(k, k - 0.5, k + 0.5) for k, score in enumerate(study_scores.MEASURED)}}
    rloo = study_runs("none", 0.45, 0.47, 0.49, setting="advantage=rloo")
    sweeps = [*study_runs("better x=1", 0.20, 0.21), *study_runs("once", 0.40, 0.41)]
    return {"study": study_tables.table_study("easy", groups, records),
            "scores": study_tables.table_scores("easy", groups, records, scores),
            "types": study_tables.table_types("easy", records),
            "time": study_tables.table_time("easy", MAIN, {"none": 1.0, "better": 1.25, "unclear": 1.04, "once": 9.0}),
            "rloo": study_tables.table_rloo("", MAIN, rloo),
            "settings": study_tables.table_settings("", MAIN, sweeps)}


@pytest.mark.parametrize("table, method, expected", [
    ("study", "none", {"end": shown(42, half(2)), "end - none": "", "steps to none's end": "9 (2)", "gradient": "1.0"}),
    ("study", "better", {  # by a straight line from 0 at the start to its end at step 9, it reaches the 42 of `none`
        "seeds": "3", "end": shown(53, half(3)), "pass@16": shown(50, 0), "end - none": shown(11, half(1), " *"),
        "area - none": shown(5.5, half(0.5), " *"), "pass@16 - none": shown(0, 0), "gradient": "2.0",
        "steps to none's end": f"{statistics.mean(9 * 42 / end for end in (50, 53, 56)):.0f} (3)"}),
    ("study", "unclear", {"end - none": shown(2 / 3, half(math.sqrt(7 / 3))),  # 1, -1 and 2
                          "pass@16 - none": shown(11, half(1), " *")}),
    ("study", "once k=3", {"seeds": "1", "end - none": "-12.0", "steps to none's end": "(0)"}),  # 30 against 42
    ("scores", "none", {"cosine with A*": "", "end - none": ""}),
    ("scores", "better", {"signal to noise": "", "end - none": shown(11, half(1), " *"),
                          "area - none": shown(5.5, half(0.5), " *")}),
    ("scores", "once k=3", {"cosine with A*": "0.00 (-0.50 to 0.50)", "rank in response": "1.00 (0.50 to 1.50)",
                            "signal to noise": "2.00 (1.50 to 2.50)", "end - none": "-12.0"}),
    ("types", "unclear", {"varies within": f"1.000 ± {half(1):.3f}", "effective sample size": "0.000 ± 0.000"}),
    ("time", "better", {  # in 0.8 of the steps: 40, 42.4 and 44.8, and half of it as area
        "seeds": "3", "time of a step": "1.25", "end - none": shown(11, half(1), " *"),
        "end in time": shown(0.4, half(0.4)), "area in time": shown(0.2, half(0.2))}),
    ("rloo", "none", {"end - none": "", "end - rloo": shown(-5, 0)}),
    ("rloo", "none advantage=rloo", {"end": shown(47, half(2)), "end - rloo": "", "area - rloo": ""}),
    ("rloo", "better", {"end - none": shown(11, half(1), " *"), "end - rloo": shown(6, half(1), " *"),
                        "area - rloo": shown(3, half(0.5), " *")}),
    ("rloo", "once k=3", {"end - rloo": "-17.0"}),  # against the 47 of the same seed
    ("settings", "better", {"seeds": "2", "end": shown(51.5, half(3, 2)), "end - none": shown(10.5, half(1, 2), " *"),
                            "end - default": "", "area - default": ""}),
    ("settings", "better x=1", {"end - none": shown(-20.5, half(1, 2), " *"),
                                "end - default": shown(-31, half(2, 2), " *"),
                                "area - default": shown(-15.5, half(1, 2), " *"), "least climb": "10.0"}),
    ("settings", "once", {"end - default": ""}),
    ("settings", "once k=3", {"seeds": "1", "end - default": "-11.0"}),  # the main table has it with a flag
])
def test_a_table_by_hand(tables, table, method, expected):
    """Guards against points for percent, figures under each other's name, a star on the wrong side, differences over
    seeds that only one of two has, a baseline against itself, and scores or costs of a method with other flags."""
    row = cells(tables[table])[method]
    assert {name: row[name] for name in expected} == expected


def test_tables_name_their_methods_and_count_their_stars(tables):
    """Guards against a method left out or out of order, one as fast as `none` among the slow, and stars of other rows
    or of differences without an interval."""
    methods = {name: list(cells(table)) for name, table in tables.items()}
    assert methods["study"] == methods["scores"] == methods["types"] == ["none", "better", "unclear", "once k=3"]
    assert methods["settings"] == ["better", "better x=1", "once", "once k=3"]
    assert methods["time"] == ["better"] and "Not timed: `once k=3`." in tables["time"].note
    for figure in analyze.DIFFERENCES:
        assert f"1 of 2 for {figure} (0.1 by chance)" in tables["study"].note
    assert "1 of 3 for end - none" in tables["rloo"].note and "1 of 1 for area - default" in tables["settings"].note
    alike = statistics.median([1, statistics.correlation([0.40, 0.42, 0.44], [0.41, 0.41, 0.46])])
    assert f"correlates with `none` by a median of {alike:.2f} for end and {alike:.2f} for area" in tables["study"].note


@pytest.mark.parametrize("cost, end, area", [
    (1, 0.7, (4 * 0.3 + 4 * 0.6) / 8),
    (4 / 3, 0.6, (4 * 0.3 + 2 * 0.55) / 6),  # reaches step 6, half way from 0.5 to 0.7
    (2, 0.5, 0.3)])  # reaches a measurement
def test_a_slower_method_is_cut_off_when_none_is_done(cost, end, area):
    """Guards against steps that cost less instead of more, an end beyond what was reached, and an area by steps."""
    assert study_tables.slowed({0.0: 0.1, 4.0: 0.5, 8.0: 0.7}, cost) == pytest.approx({"end": end, "area": area})
    later = study_tables.slowed({3.0: 0.1, 7.0: 0.5, 11.0: 0.7}, cost)  # of a run that did not begin at step 0
    assert later == pytest.approx({"end": end, "area": area})


def test_costs_are_read_from_the_benchmark(tmp_path):
    """Guards against a share for a multiple, and another line of the benchmark for a method."""
    lines = ["what,value,unit,ratio,against", "credit log,0.3,% of a step of 0.88 s,,", "credit of a,36,% of a step,,"]
    (tmp_path / "benchmark.csv").write_text("\n".join(lines) + "\n")
    assert study_tables.read_costs(tmp_path / "benchmark.csv") == pytest.approx({"a": 1.36})
    published = study_tables.read_costs(RESULTS / "benchmark.csv")
    assert published.keys() <= set(MITIGATIONS) and len(published) > 10 and min(published.values()) > 1


def test_learning_rates_by_hand():
    """Guards against methods under each other's rates, a best that is no best, seeds or methods that lack a rate, and
    an order compared with itself."""
    ends = {"none": (0.4, 0.2, 0.3), "a": (0.5, 0.1, 0.2), "b": (0.3, 0.6, 0.1), "c": (0.1, 0.05, 0.0)}
    runs = [run for method, means in ends.items() for mean, setting in zip(means, ("", "lr=0.1", "lr=0.4"))
            for run in study_runs(method, mean - 0.02, mean + 0.02, setting=setting)]
    lacking = [study_run("a", 7, 0.9), study_run("a", 7, 0.9, "lr=0.1"), study_run("once", 0, 0.5)]
    table = study_tables.table_rates("", runs + lacking, "end")
    rows = cells(table)
    assert list(rows) == ["a", "none", "b", "c"]
    assert rows["b"] | {"default lr": "30.0 (28.0 to 32.0)", "lr 0.1": "60.0 (58.0 to 62.0)",
                        "lr 0.4": "10.0 (8.0 to 12.0)", "best - none's best": "+20.0"} == rows["b"]
    assert [row["seeds"] for row in rows.values()] == ["2"] * 4
    assert [rows[method]["best - none's best"] for method in ends] == ["+0.0", "+10.0", "+20.0", "-30.0"]
    first, *others = (np.array(x) for x in zip(*ends.values()))
    orders = " at lr 0.1, ".join(cell(spearman(first, other)) for other in others) + " at lr 0.4"
    assert f"over all 4 methods: {orders}." in table.note
    areas = cells(study_tables.table_rates("", [run for run in runs if run.label != "none lr=0.1"], "area"))
    assert (areas["b"]["lr 0.1"], areas["b"]["best - none's best"]) == ("30.0 (29.0 to 31.0)", "")
    later = {"none": (0.3, 0.3), "a": (0.6, 0.2), "b": (0.5, 0.5), "c": (0.4, 0.4)}
    spare = [run for method, values in later.items() for run in study_runs(method, *values, seeds=(2, 3))]
    spare += [study_run(m, 4, 0.9 * (m == "c")) for m in ends]  # one more than there are at a rate: not counted
    note = study_tables.table_rates("", runs + spare, "end").note
    expected = cell(spearman(np.array([2, 1, 3, 4]), np.array([4, 2.5, 1, 2.5])))  # a none b c; now b, a and c, none
    assert f"{orders}, {expected} at default lr by as many other seeds" in note
    ends = {"none": (0.4, 0.4, 0.4), "up": (0.5, 0.6, 0.7), "low": (0.1, 0.2, 0.0), "wide": (0.1, 0.6, 0.3)}
    runs = [run for method, values in ends.items() for setting in ("", "lr=0.1")
            for run in study_runs(method, *values, setting=setting)]
    assert " over the 3 that all their seeds" in study_tables.table_rates("", runs, "end").note  # without `low`


def test_the_order_of_methods_by_hand():
    """Guards against an order without the methods that are above `none`, or with those that are below it, and the same
    said twice."""
    columns = {"one": [1.0, 2, 3, 4, 5], "two": [2.0, 1, 9, 4, 3], "three": [3.0, 2, 0, 1, 0.5]}
    # ranks 2 1 5 4 3, squares of d 1 + 1 + 4 + 0 + 4 = 10, 1 - 6 * 10 / 120; 5 4 1 3 2, 16 + 4 + 4 + 1 + 9 = 34
    text = study_tables.same_order(columns, np.zeros(5, bool))
    assert "5 methods: 0.50 (" in text and ") at two, -0.70 (" in text and text.count("Rank") == 1
    text = study_tables.same_order(columns, np.arange(5) == 2)  # 2 1 4 3 and 4 3 2 1
    assert "5 methods: 0.50 (" in text and "the 4 that" in text and "below `none`: 0.60 (" in text
    assert text.endswith(", -1.00 at three.") and text.count("Rank") == 2


def test_fresh_seeds_by_hand():
    """Guards against the first mean in the second interval instead of the other way round, and a pool without one of
    the two."""
    fresh = [*study_runs("none", 0.46, 0.46, seeds=(5, 6)), *study_runs("better", 0.75, 0.76, seeds=(5, 6))]
    table = study_tables.table_fresh("", MAIN[:6], fresh)  # of `none` and `better`
    rows = {(row[0].strip("`"), row[1]): dict(zip(table.header[2:], row[2:])) for row in table.rows}
    figures = ["end", "area", "pass@16"]
    assert list(rows) == [("none", figure) for figure in figures] + [
        ("better", figure) for figure in (*figures, "end - none", "area - none", "pass@16 - none")]
    assert rows["none", "end"]["main table"] == shown(42, half(2))
    assert rows["none", "end"]["fresh seeds"] == shown(46, 0)
    assert rows["none", "end"]["all seeds"].startswith("43.6 ± ")
    assert rows["better", "end - none"]["fresh seeds"] == shown(29.5, half(1, 2))
    assert [row["inside"] for row in rows.values()] == ["yes", "yes", "yes", "no", "no", "yes", "no", "no", "yes"]
    assert re.search(r"of the 10 choices, \d+% have, like this one, at most 5 of 9 inside", table.note)
    one = study_tables.table_fresh("", MAIN[:1], fresh)
    assert cells(one)["none"]["inside"] == "" and "choices" not in one.note


def test_every_choice_of_seeds_is_counted_by_hand():
    """Guards against choices left out or counted twice, and the mean of the wrong seeds. Of 1, 2, 3 and 100, three
    pairs are without 100: their intervals, 12.706 / 2 times their distance to either side, miss the others' mean of 50
    and more; those of the three pairs with it are so wide that all is inside. The second figure never varies."""
    text = study_tables.other_choices(np.array([[1.0, 2, 3, 100], [7.0, 7, 7, 7]]), 2, 1)
    assert "choices of 2 of the 4 seeds for the table, 75% of the means of the other seeds are inside" in text
    assert "of the 6 choices, 50% have, like this one, at most 1 of 2 inside" in text


def test_fresh_seeds_fall_inside_as_often_as_the_table_says():
    """Guards against the share that the note of the table names: 4,000 pairs of five seeds of one normal law."""
    x, y = np.random.default_rng(4).normal(size=(2, 4000, 5))
    inside = [e.low <= new.mean() <= e.high for e, new in zip(map(t_estimate, x), y)]
    share = int(re.search(r"(\d+)% are expected", study_tables.table_fresh("", [], []).note)[1])
    assert 100 * np.mean(inside) == pytest.approx(share, abs=2)


def test_conclusions_that_travel_and_one_that_turns_round():
    """Guards against levels mixed up, a method that only one level has, a difference without interval counted, and a
    method left out because it is below by a single seed."""
    wide, thin, none = 0.04, 0.01, float("nan")  # half widths
    means = {"holds": (0.10, thin, 0.05, thin), "fades": (-0.10, thin, -0.02, wide), "turns": (0.05, thin, -0.05, thin),
             "late": (0.01, wide, 0.08, thin), "single": (-0.03, none, 0.03, thin), "seed": (0.02, wide, -0.03, none)}
    records = {"easy": {"none": {}, "gone": {"end - none": Estimate(0.9, 0.8, 1.0)}}, "hard": {"none": {}}}
    for label, (easy, width, hard, width_too) in means.items():
        records["easy"][label] = {"end - none": Estimate(easy, easy - width, easy + width)}
        records["hard"][label] = {"end - none": Estimate(hard, hard - width_too, hard + width_too)}
    table = study_tables.table_travel("easy", "hard", records)
    rows, every = cells(table), np.array([*means.values()]).T[::2]
    near = every[:, [0, 3, 4, 5]]  # fades is below 0 on easy, and turns on hard
    # easy: holds, fades and turns, the last of another sign on hard; hard: holds, turns, late and single
    assert rows["end - none"] == {
        "difference": "end - none", "methods": "6", "rank correlation": cell(spearman(*every)), "not below": "4",
        "their correlation": cell(spearman(*near)), "without two": "", "exclude 0, easy": "3", "same sign, hard": "2",
        "exclude 0, hard": "4", "same sign, easy": "2", "on both": "1", "reversed": "1"}
    assert rows["area - none"]["methods"] == "0" and rows["area - none"]["rank correlation"] == ""


# ------------------------------------------------------------------------------------------------------- all of it


@pytest.fixture
def folder(tmp_path):
    """The published scores and costs, which the tables need beside the rows."""
    for name in (*study_scores.SCORES, study_tables.COSTS):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    return tmp_path


def test_the_published_study_is_what_its_rows_give(folder, capsys):
    """Guards against a figure that no row of results/runs.csv gives: all tables again, from the rows alone."""
    (folder / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    study_tables.write_study(folder / "runs.csv")
    text = (folder / "study.md").read_text(encoding="utf-8")
    assert text == (RESULTS / "study.md").read_text(encoding="utf-8") and text in capsys.readouterr().out
    names = {f"{level}-{name}.png" for level in study.LEVELS for name in ("forest", "learning", "truth")}
    assert {file.name for file in folder.glob("*.png")} == names
    (folder / study_scores.SCORES[0]).unlink()
    with pytest.raises(OSError, match="^there is no .*truth-scores.md[^\n]*$"):
        study_tables.write_study(folder / "runs.csv")


def test_a_study_that_was_hardly_begun_has_tables(folder, capsys):
    """Guards against a crash on what an interrupted study, or a method of somebody's own, leaves: one seed, a method
    without truth score, one without `none` beside it, a learning rate without the others, levels in any order."""
    row = study_tables.read_rows(RESULTS / "runs.csv")[0]
    made = [("hard", "main", "none", "", 0), ("easy", "main", "none", "", 0), ("easy", "main", "mine", "", 0),
            ("easy", "main", "ppo", "kl=0.1", 0), ("easy", "rates", "ppo", "lr=0.4", 1),
            ("easy", "sweeps", "mine x=1", "", 0), ("easy", "rloo", "none", "advantage=rloo", 1),
            ("easy", "fresh", "none", "", 5), ("easy", "fresh", "ppo", "", 5), ("other", "main", "alone", "", 0)]
    rows = [row | dict(zip(("level", "part", "method", "setting", "seed"), one)) | {"run": str(one)} for one in made]
    write_csv([*rows, row | {"version": "0", "method": "old"}], folder / "runs.csv")
    study_tables.write_study(folder / "runs.csv")
    text = capsys.readouterr().out
    assert re.findall(r"^## .*, (.*)", text, re.M) == ["hard"] * 5 + ["easy"] * 10 + ["hard and easy"]
    assert "old" not in text and "alone" not in text and text.count("`mine`") == 6


ABOUT = ",".join(study_tables.ABOUT)


@pytest.mark.parametrize("content, said", [
    (None, "there is no run of none"), ("", "there is no run of none"), (f"{ABOUT},curve\n", "there is no run of none"),
    ("a,b\n1,2\n", "it has no column command"), (f"{ABOUT},curve\n<<<<<<< HEAD\n", "merge conflict"),
], ids=["no file", "empty", "no rows", "another table", "conflict"])
def test_a_broken_table_of_runs_is_refused_in_one_sentence(content, said, tmp_path):
    """Guards against a traceback where a file is not the study's."""
    if content is not None:
        (tmp_path / "runs.csv").write_text(content)
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        study_tables.write_study(tmp_path / "runs.csv")
