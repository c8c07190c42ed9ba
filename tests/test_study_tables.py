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
                   "curve": {0.0: 0.0, 9.0: end}}
    label = f"{method} {setting}".strip()
    return Run(f"{label}-{seed}", label, setting, method == "none", seed, rows | figures)


def study_runs(ends, seeds=(0, 1), step=0.01):
    """A run of each method on each seed: the end of seed s is `step * s` higher."""
    return [study_run(method, s, end + step * s) for method, end in ends.items() for s in seeds]


def grouped(runs):
    """The groups of some runs, and their records."""
    groups = group_runs(runs)
    return groups, {group.label: analyze.record(group) for group in groups}


def by_name(table):
    """The rows of a table by the method in their first cell."""
    return {row[0].strip("`"): row for row in table.rows}


# ------------------------------------------------------------------------------------------------ rank correlation


def test_spearman_by_the_textbook():
    """Guards against ranks of ties by place, and an interval of Pearson's: without ties 1 - 6 sum d^2 / (n^3 - n)."""
    x, y = np.array([3.0, 1, 2, 10, 5, 4]), np.array([0.1, 0.3, 0.2, 0.9, 0.5, 0.05])
    d = [sum(a < v for a in x) - sum(b < w for b in y) for v, w in zip(x, y)]
    e = spearman(x, y)
    assert e.value == pytest.approx(1 - 6 * sum(k * k for k in d) / (6**3 - 6))
    half = 1.96 * math.sqrt((1 + e.value**2 / 2) / 3)
    assert [math.atanh(end) - math.atanh(e.value) for end in e[1:]] == pytest.approx([-half, half])
    tied = spearman(np.array([1.0, 1, 2, 3]), np.array([5.0, 6, 7, 7]))
    assert tied.value == pytest.approx(statistics.correlation([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5]))
    assert math.isnan(spearman(np.ones(5), x[:5]).value) and math.isnan(spearman(x[:5], np.ones(5)).value)
    assert math.isnan(spearman(x, x).low) and math.isnan(spearman(x[:3], y[:3]).low)


@pytest.mark.parametrize("rho", [0, 0.87])
def test_spearman_covers_as_often_as_it_says(rho):
    """Guards against an interval too narrow for a dozen methods, and for those that nearly agree: 2,000 samples of a
    normal pair."""
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
    assert min(kept) == pytest.approx(0.3)
    assert without_two([*"abcde", "f x=1", "g"], x, y) == "0.30 (f, g)"
    assert without_two([*"abcd"], x[:4], y[:4]) == "" != without_two([*"abcde"], x[:5], y[:5])


# ----------------------------------------------------------------------------------------------- scores and learning


def test_scores_are_read_from_their_tables(tmp_path):
    """Guards against a column of another table, and an empty cell that becomes 0."""
    truth = ["## Credit against A*, all tokens", "note", "",
             "| method | Spearman | cosine of update |", "|---|--:|--:|", "| a | 0.90 (0.80 to 0.95) | -0.24 (-0.56 to 0.08) |", "",
             "## Credit against A* and the solver, within responses", "| method | Spearman | Pearson |",
             "|---|--:|--:|", "| a | | 0.50 |", "| b | 0.10 | 0.20 |", "",
             "## Other", "| method | Spearman |", "|---|--:|", "| a | 0.99 |"]
    noise = ["| method | Spearman |", "| a | 0.77 |",
             "## Noise and bias of each method's gradient", "", "| method | signal to noise |", "| a | -0.001 |"]
    (tmp_path / "truth-scores.md").write_text("\n".join(truth))
    (tmp_path / "gradients.md").write_text("\n".join(noise))
    scores = study_scores.read_scores(tmp_path)
    assert scores["a"][COSINE] == (-0.24, -0.56, 0.08) and math.isnan(scores["a"][WITHIN].value)
    assert scores["a"][SIGNAL].value == -0.001 and scores["b"].keys() == {WITHIN} and scores["b"][WITHIN].value == 0.1
    groups = group_runs([study_run(m, s, 0.5) for m, s in (("none", 0), ("b k=3", 0), ("a", 0), ("c", 0), ("b", 7))]
                        + [study_run("b", 0, 0.5, "lr=1")])  # b shares no seed with `none`, its lr=1 has no `none`
    labels = [groups[i].label for i, _ in study_scores.scored_groups(groups, scores, WITHIN)]
    assert labels == ["b k=3"]


def test_scores_and_learning_by_hand():
    """Guards against a correlation with the wrong figure, methods that fell among those that climbed, a cut by the
    point of `none` instead of its interval, and ends compared over unequal seeds: seed 1 was lucky for `none`."""
    ends = {"none": 0.3, "a": 0.4, "b": 0.5, "c": 0.2, "d": 0.15, "e": 0.1}  # from 0.1: e did not climb
    truths = {"none": 0.5, "a": 0.45, "b": 0.6, "c": 0.4, "d": 0.1, "e": 0.9}  # that of `none` reaches down to 0.4
    runs = [study_run(m, 0, end, area=1 - end) for m, end in ends.items()]
    runs += [study_run("none", 1, 0.9, area=0.1), study_run("a", 1, 1.0, area=0.1)]
    scores = {m: {COSINE: Estimate(t, t - 0.1, t + 0.1), WITHIN: Estimate(t)} for m, t in truths.items()}
    table = study_scores.table_truth("easy", group_runs(runs), scores)
    names = ["all, 6", "those that climbed, 5", "of these, cosine not below none, 4"]
    assert [row[1] for row in table.rows] == 2 * names
    for row, subset in zip(table.rows, ("none a b c d e".split(), "none a b c d".split(), "none a b c".split())):
        truth, end = np.array([(truths[m], ends[m]) for m in subset]).T
        assert row[2:4] == [cell(spearman(truth, end)), cell(spearman(truth, -end))]
    least, one, other = re.fullmatch(r"(\S+) \((\w+), (\w+)\)", table.rows[0][4]).groups()  # the two that are named
    left = spearman(*np.array([(truths[m], -ends[m]) for m in ends if m not in (one, other)]).T)
    assert least == f"{left.value:.2f}"
    twice = {m: s | {SIGNAL: s[COSINE]} for m, s in scores.items()}
    same = "Over all 6 methods cosine with A* and signal to noise correlate by 1.00 with each other."
    assert study_scores.between_scores(group_runs(runs), twice) == same
    everybody = {m: s for m, s in scores.items() if m != "e"}  # then all climbed: a row is not said twice
    names = [row[1] for row in study_scores.table_truth("easy", group_runs(runs), everybody).rows]
    assert names == 2 * ["all, 5", "of these, cosine not below none, 4"]


def test_the_picture_of_truth_shows_what_the_tables_say(tmp_path, monkeypatch):
    """Guards against numbers beside the wrong names, another figure than the table's, and intervals that are cut off."""
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    runs = study_runs({"none": 0.5, "good": 0.6, "fallen": 0.1}) + study_runs({"wide": 0.14}, step=0.04)
    truths = {"none": 0.8, "good": 0.9, "fallen": -0.2, "wide": 0.5}
    scores = {m: {score: Estimate(x, x - 0.1, x + 0.1) for score in study_scores.MEASURED} for m, x in truths.items()}
    study_scores.draw_truth("easy", group_runs(runs), scores, tmp_path / "a.png")
    axis, *_, last = kept[0].axes
    gains = {"0": (0.8, 0), "1": (0.9, 5), "2": (0.5, -17.25), "3": (-0.2, -20)}  # points of area
    assert {t.get_text(): t.xy for t in axis.texts} == {i: pytest.approx(xy) for i, xy in gains.items()}
    drawn = [line.get_xydata() for line in axis.lines[7:9]]  # of `wide`: both intervals
    low, high = -17.25 - 12.706 * 0.75, -17.25 + 12.706 * 0.75
    assert drawn == [pytest.approx(np.array(ends)) for ends in ([(0.4, -17.25), (0.6, -17.25)],
                                                                [(0.5, low), (0.5, high)])]
    assert axis.get_ylim()[0] < low
    names = next(t.get_text() for t in last.texts if "none" in t.get_text())
    assert names.split() == ["0", "none", "1", "good", "2", "wide", "3", "fallen"]


# ----------------------------------------------------------------------------------------------------------- cells


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


def test_a_study_without_effects_finds_as_many_as_it_says():
    """Guards against a note that promises fewer false alarms than there are: 18 methods that do nothing, measured
    against the same runs of `none` on five seeds, 1,500 times. Their mean is 5% of 18, though they come in bunches."""
    rng = np.random.default_rng(8)
    base, methods = rng.normal(size=(1500, 1, 5)), rng.normal(size=(1500, 18, 5))
    alarms = [sum(study_tables.excludes_zero(t_estimate(x)) for x in study) for study in methods - base]
    assert np.mean(alarms) == pytest.approx(0.9, abs=0.15) and max(alarms) > 4


# ---------------------------------------------------------------------------------------------------------- tables


def test_the_main_table_by_hand():
    """Guards against points for percent, a star on the wrong side, and a sum of stars over other rows."""
    seeds = (0, 1, 2)
    runs = study_runs({"none": 0.4}, seeds, 0.02) + study_runs({"better": 0.5}, seeds, 0.03)
    runs.append(study_run("once", 1, 0.3))
    runs += [study_run("unclear", s, (0.41, 0.41, 0.46)[s], **{"pass@16": 0.6 + s / 100}) for s in seeds]
    for run in runs:
        run.figures["gradient norm"] = 1.0 if run.label == "better" else 0.5
    groups, records = grouped(runs)
    table = study_tables.table_study("easy", groups, records)
    half = 100 * 4.303 * 0.01 / math.sqrt(3)  # of the differences 0.10, 0.11, 0.12
    # by a straight line from 0 at the start to 0.5, 0.53 and 0.56 at step 9, `better` reaches the 0.42 of `none`
    steps = statistics.mean(9 * 0.42 / end for end in (0.5, 0.53, 0.56))
    rows = by_name(table)
    assert list(rows) == ["none", "better", "unclear", "once"]
    assert rows["none"][1:3] == ["3", f"42.0 ± {2 * half:.1f}"] and rows["none"][4:] == ["", "", "", "9 (2)", "1.0"]
    assert rows["better"][1:] == ["3", f"53.0 ± {3 * half:.1f}", "50.0 ± 0.0", f"11.0 ± {half:.1f} *",
                                  f"5.5 ± {half / 2:.1f} *", "0.0 ± 0.0", f"{steps:.0f} (3)", "2.0"]
    assert rows["unclear"][4].startswith("0.7 ± ") and "*" not in rows["unclear"][4]
    assert rows["unclear"][6] == f"11.0 ± {half:.1f} *"
    assert rows["once"][4] == "-12.0" and rows["once"][7] == "(0)"
    assert "after 9 steps, from 10.0 at" in table.note
    counts = ", ".join(f"1 of 2 for {figure} (0.1 by chance)" for figure in analyze.DIFFERENCES)
    assert f" The interval excludes 0 in {counts}. " in table.note
    alike = statistics.median([1, statistics.correlation([0.4, 0.42, 0.44], [0.41, 0.41, 0.46])])
    assert f"correlates with `none` by a median of {alike:.2f} for end and {alike:.2f} for area. " in table.note


def test_scores_stand_beside_what_was_learned():
    """Guards against scores under each other's heading, and those of a method for one whose flags only name it."""
    groups, records = grouped([study_run(m, s, 0.2 + s * x) for m, x in (("none", 0.1), ("m k=3", 0.2), ("k", 0.4))
                               for s in (0, 1, 2)])
    scores = {"m": {score: Estimate(k, k - 0.5, k + 0.5) for k, score in enumerate(study_scores.MEASURED)}}
    table = study_tables.table_scores("easy", groups, records, scores)
    half = 100 * 4.303 * 0.1 / math.sqrt(3)  # of the differences 0, 0.1 and 0.2
    known = ["0.00 (-0.50 to 0.50)", "1.00 (0.50 to 1.50)", "2.00 (1.50 to 2.50)"]
    assert table.header[1:4] == [score.name for score in study_scores.MEASURED]
    assert by_name(table) == {
        "none": ["`none`", "", "", "", "", ""],
        "m k=3": ["`m k=3`", *known, f"10.0 ± {half:.1f}", f"5.0 ± {half / 2:.1f}"],
        "k": ["`k`", "", "", "", f"30.0 ± {3 * half:.1f}", f"15.0 ± {1.5 * half:.1f}"]}


def test_credit_by_token_type_by_hand():
    """Guards against shares for ratios, and one measure under the other's heading."""
    names = ["contribution, filler / reasoning", "gradient, filler / reasoning", "effective sample size",
             "varies within"]
    _, records = grouped([study_run("none", s, 0.5, **{name: k + s for k, name in enumerate(names)}) for s in (0, 1)])
    table = study_tables.table_types("easy", records)
    assert table.header == ["method", *names]
    assert table.rows == [["`none`", *(f"{k + 0.5:.3f} ± {12.706 * 0.5:.3f}" for k in range(4))]]


def test_the_same_time_by_hand():
    """Guards against steps that cost less instead of more, an end beyond what was reached, an area by steps, a method
    as fast as `none`, and the cost of another one's flags."""
    curve = {0.0: 0.1, 4.0: 0.5, 8.0: 0.7}
    for cost, end, area in ((1, 0.7, (4 * 0.3 + 4 * 0.6) / 8),
                            (4 / 3, 0.6, (4 * 0.3 + 2 * 0.55) / 6),  # reaches step 6, half way from 0.5 to 0.7
                            (2, 0.5, 0.3)):  # reaches a measurement
        assert study_tables.slowed(curve, cost) == pytest.approx({"end": end, "area": area})
    assert study_tables.slowed({4.0: 0.2, 8.0: 0.6}, 2) == pytest.approx({"end": 0.4, "area": 0.3})
    runs = []
    for label, end, more in (("none", 0.6, 0.1), ("slow", 0.7, 0.2), ("fast", 0.7, 0.2), ("v k=3", 0.7, 0.2)):
        curves = [{0.0: 0.1, 4.0: 0.5, 8.0: end + more * seed} for seed in range(3)]
        runs += [study_run(label, seed, curve[8.0], curve=curve, area=(4 * 0.3 + 2 * (0.5 + curve[8.0])) / 8)
                 for seed, curve in enumerate(curves)]
    table = study_tables.table_time("easy", runs, {"none": 1.0, "slow": 2.0, "fast": 1.04, "v": 9.0})
    half = 100 * 4.303 * 0.1 / math.sqrt(3)  # 0.5 of each seed against 0.6, 0.7 and 0.8; area 0.3 against 0.425 and on
    assert table.rows == [["`slow`", "3", "2.00", f"20.0 ± {half:.1f}", f"5.0 ± {half / 4:.1f}", f"-20.0 ± {half:.1f}",
                           f"-15.0 ± {half / 4:.1f} *"]]
    assert table.note.endswith(" Not timed: `v k=3`.")


def test_costs_are_read_from_the_benchmark(tmp_path):
    """Guards against a share for a multiple, and another line of the benchmark for a method."""
    lines = ["what,value,unit,ratio,against", "credit log,0.3,% of a step of 0.88 s,,", "credit of a,36,% of a step,,"]
    (tmp_path / "benchmark.csv").write_text("\n".join(lines) + "\n")
    assert study_tables.read_costs(tmp_path / "benchmark.csv") == pytest.approx({"a": 1.36})
    published = study_tables.read_costs(RESULTS / "benchmark.csv")
    assert published.keys() <= set(MITIGATIONS) and len(published) > 10 and min(published.values()) > 1


def test_rloo_beside_grpo_by_hand():
    """Guards against the difference to the other baseline, or to that of other seeds, and a baseline against itself."""
    runs = study_runs({"none": 0.4}, (0, 1, 2), 0) + study_runs({"m": 0.5})
    rloo = [study_run("none", s, end, "advantage=rloo") for s, end in enumerate((0.45, 0.47, 1.45))]
    table = study_tables.table_rloo("", runs, rloo)
    rows = by_name(table)
    assert table.header == ["method", "seeds", "end", "end - none", "area - none", "end - rloo", "area - rloo"]
    assert rows["none"][3:5] == ["", ""] and rows["none advantage=rloo"][5:] == ["", ""]
    # 50 and 51 against 40 and 40, and against 45 and 47; areas are half of the ends
    half = 12.706 / 2
    assert rows["m"][1:] == ["2", f"50.5 ± {half:.1f}", f"10.5 ± {half:.1f} *", f"5.2 ± {half / 2:.1f} *",
                             f"4.5 ± {half:.1f}", f"2.3 ± {half / 2:.1f}"]
    assert rows["none"][5].startswith("-39.0") and "1 of 2 for end - none (0.1 by chance)" in table.note


def test_hyper_parameters_stand_beside_their_default():
    """Guards against methods that were not varied, and seeds that only the default has."""
    runs = study_runs({"none": 0.4, "m": 0.5}, range(4)) + [study_run("other", 0, 0.9)]
    table = study_tables.table_settings("Sweeps", runs, study_runs({"m x=1": 0.2}, step=0.02))
    (first, second), half = table.rows, 12.706 * 0.5
    assert first[:7] == ["`m`", "2", f"50.5 ± {half:.1f}", "10.0 ± 0.0", "5.0 ± 0.0", "", ""]
    assert second[:4] == ["`m x=1`", "2", f"21.0 ± {2 * half:.1f}", f"-19.5 ± {half:.1f} *"]
    assert second[5:8] == [f"-29.5 ± {half:.1f} *", f"-14.8 ± {half / 2:.1f} *", "10.0"]  # 20, 22 against 50, 51
    assert "1 of 2 for end - none (0.1 by chance)" in table.note and "1 of 1 for area - default" in table.note
    runs += study_runs({"v k=3": 0.5})  # the main table has it with a flag
    first, second = study_tables.table_settings("Sweeps", runs, study_runs({"v": 0.4}, step=0.02)).rows
    assert (first[0], first[5:7]) == ("`v`", ["", ""])
    assert (second[0], second[5]) == ("`v k=3`", f"9.5 ± {half:.1f} *")


def test_learning_rates_by_hand():
    """Guards against methods under each other's rates, a best that is no best, and an order compared with itself."""
    ends = {"none": (0.4, 0.2, 0.3), "a": (0.5, 0.1, 0.2), "b": (0.3, 0.6, 0.1), "c": (0.1, 0.05, 0.0)}
    runs = [study_run(method, seed, mean + sign * 0.02, setting) for method, means in ends.items()
            for mean, setting in zip(means, ("", "lr=0.1", "lr=0.4")) for seed, sign in ((0, -1), (1, 1))]
    table = study_tables.table_rates("", runs, "end")
    assert table.header == ["method", "seeds", "default lr", "lr 0.1", "lr 0.4", "best - none's best"]
    assert by_name(table)["b"][1:5] == ["2", "30.0 (28.0 to 32.0)", "60.0 (58.0 to 62.0)", "10.0 (8.0 to 12.0)"]
    assert [by_name(table)[method][5] for method in ends] == ["+0.0", "+10.0", "+20.0", "-30.0"]
    assert list(by_name(table)) == ["a", "none", "b", "c"]
    first, *others = (np.array(x) for x in zip(*ends.values()))
    orders = " at lr 0.1, ".join(cell(spearman(first, other)) for other in others) + " at lr 0.4"
    assert table.note.endswith(f" order at the default lr, over all 4 methods: {orders}.")
    spare = [study_run(m, 2, end) for m, end in {"none": 0.3, "a": 0.6, "b": 0.5, "c": 0.4}.items()]
    # at the default a none b c, by the spare seed a b c none: squares of d 4 + 1 + 1, 1 - 6 * 6 / 60
    note = study_tables.table_rates("", runs + spare, "end").note
    assert f"all 4 methods: {orders}, 0.40 (-0.92 to 0.99) at default lr by as many other seeds." in note
    spare += [study_run(m, 3, end) for m, end in {"none": 0.3, "a": 0.2, "b": 0.5, "c": 0.4}.items()]
    spare += [study_run(m, 4, 0.9 * (m == "c")) for m in ends]  # one more than there are at a rate: not counted
    expected = cell(spearman(np.array([2, 1, 3, 4]), np.array([4, 2.5, 1, 2.5])))  # now b, then a and c, none
    assert f"{expected} at default lr by as many other" in study_tables.table_rates("", runs + spare, "end").note


def test_learning_rates_are_compared_on_common_seeds():
    """Guards against seeds that a method lacks at one of the rates, and methods that lack a rate."""
    runs = [study_run(m, s, end, setting) for m, end in (("none", 0.4), ("a", 0.5), ("b", 0.2)) for s in (0, 1)
            for setting in ("", "lr=0.1") if (m, s, setting) != ("a", 0, "lr=0.1") and m + setting != "nonelr=0.1"]
    rows = by_name(study_tables.table_rates("", runs + [study_run("b", 7, 0.9)], "end"))
    assert rows == {"a": ["`a`", "1", "50.0 (50.0 to 50.0)", "50.0 (50.0 to 50.0)", ""],
                    "b": ["`b`", "2", "20.0 (20.0 to 20.0)", "20.0 (20.0 to 20.0)", ""]}
    assert by_name(study_tables.table_rates("", runs, "area"))["a"][2] == "25.0 (25.0 to 25.0)"


def test_the_order_of_methods_by_hand():
    """Guards against an order without the methods that are above `none`, or with those that are below it, a method
    called below by seeds that happen to agree, and the same said twice."""
    columns = {"one": [1.0, 2, 3, 4, 5], "two": [2.0, 1, 9, 4, 3], "three": [3.0, 2, 0, 1, 0.5]}
    # ranks 2 1 5 4 3, squares of d 1 + 1 + 4 + 0 + 4 = 10, 1 - 6 * 10 / 120; 5 4 1 3 2, 16 + 4 + 4 + 1 + 9 = 34
    every = "Rank correlation with the order at the one, over all 5 methods: 0.50 ("
    text = study_tables.same_order(columns, np.zeros(5, bool))
    assert text.startswith(every) and ") at two, -0.70 (" in text and text.count("Rank") == 1
    text = study_tables.same_order(columns, np.arange(5) == 2)  # 2 1 4 3 and 4 3 2 1
    assert text.startswith(every) and text.count("Rank") == 2
    assert "over the 4 that all their seeds together do not show to be below `none`: 0.60 (" in text
    assert text.endswith(", -1.00 at three.")
    ends = {"none": (0.4, 0.4, 0.4), "up": (0.5, 0.6, 0.7), "low": (0.1, 0.2, 0.0), "wide": (0.1, 0.6, 0.3),
            "same": (0.3, 0.3, 0.3)}
    runs = [study_run(method, seed, end) for method, values in ends.items() for seed, end in enumerate(values)]
    runs += [study_run(method, seed, 0.5, "lr=0.1") for method in ends for seed in (0, 1)]
    assert " over the 4 that " in study_tables.table_rates("", runs, "end").note


def test_fresh_seeds_by_hand():
    """Guards against the first mean in the second interval instead of the other way round, and a pool without one of
    the two."""
    main = study_runs({"none": 0.4}) + study_runs({"m": 0.5}, step=0.02)
    fresh = study_runs({"none": 0.47}, (5, 6), 0) + study_runs({"m": 0.75}, (5, 6))
    table = study_tables.table_fresh("", main, fresh)
    rows, half = {(row[0], row[1]): row[2:] for row in table.rows}, 12.706 * 0.5
    assert rows["`none`", "end"][:3] == [f"40.5 ± {half:.1f}", "47.0 ± 0.0", "no"]
    assert rows["`none`", "end"][3].startswith("43.8 ± ")
    assert rows["`m`", "end"][2] == "no" and rows["`m`", "end - none"][1].startswith("33.5 ± ")
    assert rows["`m`", "pass@16"] == ["50.0 ± 0.0", "50.0 ± 0.0", "yes", "50.0 ± 0.0"]
    assert list(rows) == [("`none`", figure) for figure in ("end", "area", "pass@16")] + [
        ("`m`", figure) for figure in ("end", "area", "pass@16", "end - none", "area - none", "pass@16 - none")]
    found = [row[4] for row in table.rows].count("yes")
    assert re.search(rf"of the 6 choices, \d+% have, like this one, at most {found} of 9 inside\.$", table.note)
    one = study_tables.table_fresh("", main[:1], fresh)
    assert one.rows[0][2:5] == ["40.0", "47.0 ± 0.0", ""] and "choices" not in one.note


def test_every_choice_of_seeds_is_counted_by_hand():
    """Guards against choices left out or counted twice, and the mean of the wrong seeds. Of 1, 2, 3 and 100, three
    pairs are without 100: their intervals, 12.706 / 2 times their distance to either side, miss the others' mean of 50
    and more; those of the three pairs with it are so wide that all is inside. The second figure never varies."""
    text = study_tables.other_choices(np.array([[1.0, 2, 3, 100], [7.0, 7, 7, 7]]), 2, 1)
    assert text == ("Over all choices of 2 of the 4 seeds for the table, 75% of the means of the other seeds are "
                    "inside; of the 6 choices, 50% have, like this one, at most 1 of 2 inside.")


def test_fresh_seeds_fall_inside_as_often_as_the_table_says():
    """Guards against the share that the note of the table names: 4,000 pairs of five seeds of one normal law."""
    x, y = np.random.default_rng(4).normal(size=(2, 4000, 5))
    inside = [e.low <= new.mean() <= e.high for e, new in zip(map(t_estimate, x), y)]
    share = int(re.search(r"(\d+)% are expected", study_tables.table_fresh("", [], []).note)[1])
    assert 100 * np.mean(inside) == pytest.approx(share, abs=2)


def test_conclusions_that_travel_and_one_that_turns_round():
    """Guards against levels mixed up, a method that only one level has, a difference without interval counted, and a
    method left out because it is below by a single seed."""
    wide, thin, none = 0.04, 0.01, float("nan")  # half widths, of means from 0.01 up
    means = {  # on easy and on hard
        "holds": ((0.10, thin), (0.05, thin)),
        "fades": ((-0.10, thin), (-0.02, wide)),
        "turns": ((0.05, thin), (-0.05, thin)),
        "late": ((0.01, wide), (0.08, thin)),
        "single": ((-0.03, none), (0.03, thin)),
        "seed": ((0.02, wide), (-0.03, none)),
    }
    records = {"easy": {"none": {}, "gone": {"end - none": Estimate(0.9, 0.8, 1.0)}}, "hard": {"none": {}}}
    for label, levels in means.items():
        for level, (mean, half) in zip(records, levels):
            records[level][label] = {"end - none": Estimate(mean, mean - half, mean + half)}
    table = study_tables.table_travel("easy", "hard", records)
    every = np.array([[mean for mean, _ in levels] for levels in means.values()]).T
    near = every[:, [0, 3, 4, 5]]  # fades is below 0 on easy, and turns on hard
    order = ["6", cell(spearman(*every)), "4", cell(spearman(*near)), ""]
    # easy: holds, fades and turns, the last of another sign on hard; hard: holds, turns, late and single
    assert table.rows[0] == ["end - none", *order, "3", "2", "4", "2", "1", "1"]
    assert table.header[6:8] == ["exclude 0, easy", "same sign, hard"]
    assert table.rows[1] == ["area - none", "0", "", "0", "", "", *"000000"]


# ------------------------------------------------------------------------------------------------------- all of it


def copy_scores(folder):
    """The published scores and costs, which the tables need beside the rows."""
    for name in (*study_scores.SCORES, study_tables.COSTS):
        (folder / name).write_bytes((RESULTS / name).read_bytes())


def test_the_published_study_is_what_its_rows_give(tmp_path, capsys):
    """Guards against a figure that no row of results/runs.csv gives: all tables again, from the rows alone."""
    copy_scores(tmp_path)
    (tmp_path / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    study_tables.write_study(tmp_path / "runs.csv")
    text = (tmp_path / "study.md").read_text(encoding="utf-8")
    assert text == (RESULTS / "study.md").read_text(encoding="utf-8") and text in capsys.readouterr().out
    names = {f"{level}-{name}.png" for level in study.LEVELS for name in ("forest", "learning", "truth")}
    assert {file.name for file in tmp_path.glob("*.png")} == names


def test_a_study_that_was_hardly_begun_has_tables(tmp_path, capsys):
    """Guards against a crash on what an interrupted study, or a method of somebody's own, leaves: one seed, a method
    without truth score, one without `none` beside it, a learning rate without the others, levels in any order."""
    row = study_tables.read_rows(RESULTS / "runs.csv")[0]
    made = [("hard", "main", "none", "", 0), ("easy", "main", "none", "", 0), ("easy", "main", "mine", "", 0),
            ("easy", "main", "ppo", "kl=0.1", 0), ("easy", "rates", "ppo", "lr=0.4", 1),
            ("easy", "sweeps", "mine x=1", "", 0), ("easy", "rloo", "none", "advantage=rloo", 1),
            ("easy", "fresh", "none", "", 5), ("easy", "fresh", "ppo", "", 5), ("other", "main", "alone", "", 0)]
    rows = [row | dict(zip(("level", "part", "method", "setting", "seed"), one)) | {"run": str(one)} for one in made]
    write_csv([*rows, row | {"version": "0", "method": "old"}], tmp_path / "runs.csv")
    copy_scores(tmp_path)
    study_tables.write_study(tmp_path / "runs.csv")
    text = capsys.readouterr().out
    titles = [f"{title}, {level}" for level in ("hard", "easy") for title in (
        "Methods", "What is known before", "Scores and learning", "Credit by token type", "In as much time")]
    titles += [f"{title}, easy" for title in ("Against RLOO", "Hyper-parameters", "Learning rates by end",
                                              "Learning rates by area", "Fresh seeds")]
    assert re.findall(r"^## (.*)", text, re.M) == [*titles, "Do conclusions travel, hard and easy"]
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


def test_a_study_without_scores_is_refused_in_one_sentence(tmp_path):
    """Guards against a traceback where runs.csv was copied alone."""
    (tmp_path / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    with pytest.raises(OSError, match="^there is no .*truth-scores.md[^\n]*$"):
        study_tables.write_study(tmp_path / "runs.csv")
