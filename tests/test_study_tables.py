"""The tables of the study, against numbers worked out by hand, simulations, and the published rows.

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
from experiments.correlation import ranks, spearman, with_errors, without_two
from plumbing.report import Estimate, cell, holm, t_estimate, t_quantile, welch, write_csv
from plumbing.runs import Run, group_runs

RESULTS = study.ROOT / "results"


def study_run(method, seed, end, setting="", **figures):
    """A Run of the study from 0.1 at the start to `end` after nine steps."""
    zero = dict.fromkeys((*analyze.LEARNING, *analyze.CREDIT), 0.0)
    rows = zero | {"start": 0.1, "end": end, "climb": end - 0.1, "area": end / 2, "pass@16": 0.5, "steps": 9.0,
                   "gradient norm": 0.5, "curve": {0.0: 0.0, 9.0: end}}
    label = f"{method} {setting}".strip()
    return Run(f"{label}-{seed}", label, setting, method == "none", seed, rows | figures)


@pytest.mark.parametrize("label, default", [
    ("vineppo k=3 cuts=uncertain", "vineppo k=3"), ("none advantage=batch", "none"), ("none", None),
    ("none advantage=rloo answers=9", "none advantage=rloo"), ("token_type filler=2.0", None)])  # fmt: skip
def test_a_default_is_the_same_method_with_fewer_flags(label, default):
    """Guards against another method whose name begins alike, and a flag with another value."""
    assert study_tables.default_of(label, {"none", "none advantage=rloo", "vineppo k=3", "token"}) == default


def study_runs(method, *ends, seeds=(0, 1, 2), setting="", **figures):
    """A run of a method for each of these ends, on one seed after the other."""
    return [study_run(method, seed, end, setting, **figures) for seed, end in zip(seeds, ends)]


def cells(table):
    """The cells of each row of a table by column, by the method in the first cell."""
    return {row[0].strip("`"): dict(zip(table.header, row)) for row in table.rows}


def difference(x, y, star=""):
    """A cell with the difference of two methods, in points, from their figures in percent."""
    e = welch(np.array(x), np.array(y))
    return f"{e.value:.1f} ± {e.high - e.value:.1f}{star}"


# ------------------------------------------------------------------------------------------------ rank correlation


def test_spearman_by_the_textbook():
    """Guards against ranks of ties by place, and an interval of Pearson's or of what does not vary."""
    x, y = np.array([3.0, 1, 2, 10, 5, 4]), np.array([0.1, 0.3, 0.2, 0.9, 0.5, 0.05])
    d = np.array([3, 1, 2, 6, 5, 4]) - [2, 4, 3, 6, 5, 1]  # without ties it is 1 - 6 sum d^2 / (n^3 - n)
    e = spearman(x, y)
    assert e.value == pytest.approx(1 - 6 * sum(d**2) / (6**3 - 6))
    width = 1.96 * math.sqrt((1 + e.value**2 / 2) / 3)
    assert np.arctanh(e[1:3]) - np.arctanh(e.value) == pytest.approx([-width, width])
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


def test_a_correlation_of_estimates_is_lower_and_wider_than_that_of_exact_values():
    """Guards against errors that are ignored: with none it is Spearman's, with large ones it is nothing."""
    x = np.arange(12.0)
    exact, blurred = ([Estimate(v, v - half, v + half) for v in x] for half in (0.0, 50.0))
    found = with_errors(exact, exact)
    assert found.value > 0.95 and found.low > 0.8
    found = with_errors(exact, blurred)
    assert abs(found.value) < 0.4 and found.low < 0 < found.high
    assert math.isnan(with_errors(exact[:3], exact[:3]).value)


@pytest.mark.parametrize("errors", [(0.0, 0.0), (1.0, 0.5)])
def test_errors_shrink_a_correlation_by_as_much_as_they_should(errors):
    """Guards against errors twice or half as large: of a normal pair of correlation r, each redrawn with its error e,
    the correlation is r / sqrt((1 + e_x^2) (1 + e_y^2)), here with that of ranks."""
    rng, r = np.random.default_rng(3), 0.8
    x, noise = rng.normal(size=(2, 3000))
    columns = [[Estimate(v, v - 1.96 * e, v + 1.96 * e) for v in values]
               for values, e in zip((x, r * x + math.sqrt(1 - r**2) * noise), errors)]
    shrunk = r / math.sqrt(math.prod(1 + e**2 for e in errors))
    found = with_errors(*columns, draws=100)
    assert found.value == pytest.approx(6 / math.pi * math.asin(shrunk / 2), abs=0.03)


# ----------------------------------------------------------------------------------------------- scores and learning


def test_scores_are_read_from_their_tables(tmp_path):
    """Guards against a column of another table, and an empty cell that becomes 0."""
    truth = ["## Credit against A*, all tokens", "| method | Spearman | cosine of update |", "|---|--:|--:|",
             "| a | 0.90 (0.80 to 0.95) | -0.24 (-0.56 to 0.08) |", "",
             "## Credit against A* and the solver, within responses", "| method | Spearman | solver |",
             "|---|--:|--:|", "| a | | 0.50 |", "", "## Other", "| method | Spearman |", "|---|--:|", "| a | 9.9 |"]
    noise = ["## Noise and bias of each method's gradient", "", "| method | signal to noise |",
             "|---|--:|", "| a | -0.001 |"]
    (tmp_path / "truth-scores.md").write_text("\n".join(truth))
    (tmp_path / "gradients.md").write_text("\n".join(noise))
    scores = study_scores.read_scores(tmp_path)["a"]
    assert scores[study_scores.COSINE][:3] == (-0.24, -0.56, 0.08)
    assert scores[study_scores.RANK].value == 0.9
    assert math.isnan(scores[study_scores.WITHIN].value)
    assert scores[study_scores.SOLVER].value == 0.5
    assert scores[study_scores.SIGNAL].value == -0.001


def test_scores_and_learning_by_hand():
    """Guards against a correlation with the wrong figure, methods that fell among those that climbed, and a cut by the
    point of GRPO instead of its interval."""
    ends = {"none": 0.3, "a": 0.4, "b": 0.5, "c": 0.2, "d": 0.15, "e": 0.1}  # from 0.1: e did not climb
    truths = {"none": 0.5, "a": 0.45, "b": 0.6, "c": 0.4, "d": 0.1, "e": 0.9}  # that of GRPO reaches down to 0.4
    groups = group_runs([study_run(m, 0, end, area=1 - end) for m, end in ends.items()])
    scores = {m: {study_scores.COSINE: Estimate(t, t - 0.1, t + 0.1)} for m, t in truths.items()}
    rows = study_scores.table_truth("easy", groups, scores).rows
    subsets = {"all, 6": [*ends], "those that climbed, 5": [*"abcd", "none"],
               "of these, cosine not below GRPO's, 4": [*"abc", "none"]}
    assert [row[1] for row in rows] == [*subsets]
    for row, subset in zip(rows, subsets.values()):
        assert row[2] == cell(spearman(*np.array([(truths[m], 1 - ends[m]) for m in subset]).T))


# ---------------------------------------------------------------------------------------------------------- tables

NONE, BETTER, UNCLEAR, RLOO = (40, 42, 44), (50, 53, 56), (41, 41, 46), (45, 47, 49)  # ends in percent, three seeds
MAIN = [*study_runs("none", *(x / 100 for x in NONE)), *study_runs("unclear", *(x / 100 for x in UNCLEAR)),
        *study_runs("better", *(x / 100 for x in BETTER), **{"gradient norm": 1.0}), study_run("once k=3", 1, 0.30)]
COSTS = {"none": 1.0, "better": 1.25, "unclear": 1.04, "once k=3": 9.0}


@pytest.fixture(scope="module")
def tables():
    """The tables that compare the methods of MAIN with each other, and with other runs of them."""
    groups = group_runs([*MAIN, *study_runs("none", *(x / 100 for x in RLOO), setting="advantage=rloo")])
    for group in groups:
        group.baseline = next(g for g in groups if g.label == "none")
    records = {group.label: analyze.record(group) for group in groups}
    scores = {"once": {score: Estimate(k, k - 0.5, k + 0.5) for k, score in enumerate(study_scores.MEASURED)}}
    sweeps = [*study_runs("better x=1", 0.20, 0.21, 0.24), study_run("once", 0, 0.40)]
    return {"study": study_tables.table_study("easy", groups, records, COSTS),
            "scores": study_tables.table_scores("easy", records, scores),
            "cost": study_tables.table_cost("easy", groups, COSTS, {"better": 1.3}),
            "settings": study_tables.table_settings("", MAIN, sweeps)}


@pytest.mark.parametrize("table, method, expected", [
    ("study", "GRPO", {"end": "42.0 ± 5.0", "end - GRPO": "", "end - RLOO": difference(NONE, RLOO), "cost": "1.00",
                       "steps to GRPO's end": "9 (2)", "gradient": "1.0"}),
    ("study", "RLOO", {"end - GRPO": difference(RLOO, NONE), "end - RLOO": "", "cost": ""}),
    ("study", "better", {  # by a straight line from 0 at the start to its end at step 9, it reaches the 42 of GRPO
        "seeds": "3", "end - GRPO": difference(BETTER, NONE, " *"), "end - RLOO": difference(BETTER, RLOO),
        "area - GRPO": difference([x / 2 for x in BETTER], [x / 2 for x in NONE], " *"), "gradient": "2.0",
        "steps to GRPO's end": f"{statistics.mean(9 * 42 / end for end in BETTER):.0f} (3)", "cost": "1.25"}),
    ("study", "once k=3", {"seeds": "1", "end - GRPO": "-12.0", "steps to GRPO's end": "(0)", "cost": "9.00"}),
    ("scores", "once k=3", {"cosine with A*": "0.00 (-0.50 to 0.50)", "rank in response": "2.00 (1.50 to 2.50)",
                            "signal to noise": "4.00 (3.50 to 4.50)"}),
    ("cost", "better", {  # 0.8 of the steps: ends of 40, 42.4 and 44.8
        "cost": "1.25", "time": "1.30", "% of the steps": "80",
        "end - GRPO": difference([0.8 * x for x in BETTER], NONE),
        "area - RLOO": difference([0.4 * x for x in BETTER], [x / 2 for x in RLOO])}),
    ("cost", "once k=3", {"time": "", "% of the steps": "11"}),
    ("settings", "better x=1", {"end - GRPO": difference([20, 21, 24], NONE, " *"), "least climb": "10.0",
                                "end - default": difference([20, 21, 24], BETTER, " *")}),
    ("settings", "better", {"end - default": ""}),
])
def test_a_table_by_hand(tables, table, method, expected):
    """Guards against points for percent, figures under each other's name, opponents mixed up, a baseline against
    itself, and scores or costs of a method with other flags."""
    row = cells(tables[table])[method]
    assert {name: row[name] for name in expected} == expected


def test_tables_name_their_methods_in_the_order_of_their_area(tables):
    """Guards against a method left out or out of order, and one as cheap as GRPO among the costly."""
    methods = {name: list(cells(table)) for name, table in tables.items()}
    assert methods["study"] == ["better", "RLOO", "unclear", "GRPO", "once k=3"]
    assert methods["scores"] == ["better", "unclear", "GRPO", "once k=3"]  # RLOO was not scored
    assert methods["cost"] == ["better", "once k=3"]


def test_stars_are_corrected_for_all_methods_of_the_table():
    """Guards against a star for a difference that is one of many: p = 0.03 is a star alone, and none beside another."""
    one = {"a": {"x": Estimate(1.0, 0.1, 1.9, 0.03)}}
    assert study_tables.starred(one, ["x"])["a"] == ["100.0 ± 90.0 *"]
    two = one | {"b": {"x": Estimate(1.0, -1.0, 3.0, 0.4)}, "c": {}}
    assert holm({"a": 0.03, "b": 0.4}) == set()
    assert study_tables.starred(two, ["x"]) == {"a": ["100.0 ± 90.0"], "b": ["100.0 ± 200.0"], "c": [""]}


def test_the_power_that_the_table_states_is_that_of_simulated_studies():
    """Guards against a wrong factor: 40,000 pairs of five seeds whose means differ by the stated number of spreads."""
    reach = (t_quantile(8) + t_quantile(8, 0.4)) * math.sqrt(2 / 5)
    x, y = np.random.default_rng(5).normal(size=(2, 40000, 5))
    t = (x.mean(1) + reach - y.mean(1)) / np.sqrt((x.var(1, ddof=1) + y.var(1, ddof=1)) / 5)
    assert np.mean(t > t_quantile(8)) == pytest.approx(0.8, abs=0.02)
    spread = np.std([0.4, 0.42, 0.44, 0.46, 0.5], ddof=1)
    group = group_runs(study_runs("none", 0.4, 0.42, 0.44, 0.46, 0.5, seeds=range(5)))
    assert f"{100 * reach * spread:.1f} points at the end" in study_tables.power(group)


@pytest.mark.parametrize("cost, end, area", [
    (1, 0.7, (4 * 0.3 + 4 * 0.6) / 8),
    (4 / 3, 0.6, (4 * 0.3 + 2 * 0.55) / 6),  # reaches step 6, half way from 0.5 to 0.7
    (2, 0.5, 0.3)])  # reaches a measurement
def test_a_costly_method_is_cut_off_when_the_budget_is_spent(cost, end, area):
    """Guards against steps that cost less instead of more, an end beyond what was reached, and an area by steps."""
    assert study_tables.slowed({0.0: 0.1, 4.0: 0.5, 8.0: 0.7}, cost) == pytest.approx({"end": end, "area": area})


def test_costs_and_times_are_read_from_their_files(tmp_path):
    """Guards against a share for a multiple, a token's weight left out, and one of two models left out."""
    lines = ["what,value,unit,ratio,against", "credit log,0.3,% of a step of 0.88 s,,", "credit of a,36,% of a step,,"]
    (tmp_path / "benchmark.csv").write_text("\n".join(lines) + "\n")
    assert study_tables.read_times(tmp_path / "benchmark.csv") == pytest.approx({"a": 1.36})
    rows = ["level,method,model,tokens_sampled,tokens_read,tokens_updated", "easy,none,start,10,10,10",
            "easy,none,end,20,10,10", "easy,a,start,10,20,10", "easy,a,end,20,20,20"]  # 50 and 60; 60 and 100
    (tmp_path / "costs.csv").write_text("\n".join(rows) + "\n")
    assert study_tables.read_costs(tmp_path / "costs.csv")["easy"] == pytest.approx({"none": 1, "a": 160 / 110})


def test_learning_rates_by_hand():
    """Guards against methods under each other's rates, a best that is no best, and seeds that lack a rate."""
    ends = {"none": (0.4, 0.2, 0.3), "a": (0.5, 0.1, 0.2), "b": (0.3, 0.6, 0.1), "c": (0.1, 0.05, 0.0)}
    runs = [run for method, means in ends.items() for mean, setting in zip(means, ("", "lr=0.1", "lr=0.4"))
            for run in study_runs(method, mean - 0.02, mean + 0.02, setting=setting)]
    table = study_tables.table_rates("", [*runs, study_run("a", 7, 0.9), study_run("once", 0, 0.5)], "end")
    rows = cells(table)
    assert list(rows) == ["a", "GRPO", "b", "c"]
    assert rows["b"]["default lr"] == "30.0 (28.0 to 32.0)" and rows["b"]["lr 0.1"] == "60.0 (58.0 to 62.0)"
    assert [row["best - GRPO's best"] for row in rows.values()] == ["+10.0", "+0.0", "+20.0", "-30.0"]
    first, *others = (np.array(x) for x in zip(*ends.values()))
    orders = " at lr 0.1, ".join(cell(spearman(first, other)) for other in others) + " at lr 0.4"
    assert f"over all 4 methods: {orders}." in table.note


def test_fresh_seeds_by_hand():
    """Guards against the first mean in the second interval instead of the other way round, and a pool without one of
    the two."""
    fresh = [*study_runs("none", 0.46, 0.46, seeds=(5, 6)), *study_runs("better", 0.75, 0.76, seeds=(5, 6))]
    table = study_tables.table_fresh("", [run for run in MAIN if run.label in ("none", "better")], fresh)
    rows = {(row[0].strip("`"), row[1]): dict(zip(table.header[2:], row[2:])) for row in table.rows}
    assert rows["GRPO", "end"] == {"main table": "42.0 ± 5.0", "fresh seeds": "46.0 ± 0.0", "inside": "yes",
                                   "all seeds": rows["GRPO", "end"]["all seeds"]}
    assert rows["GRPO", "end"]["all seeds"].startswith("43.6 ± ")
    assert rows["better", "end - GRPO"]["fresh seeds"] == difference([75, 76], [46, 46])
    assert rows["better", "end - GRPO"]["inside"] == "no"
    assert ("GRPO", "end - GRPO") not in rows


def test_fresh_seeds_fall_inside_as_often_as_the_table_says():
    """Guards against the share that the note of the table names: 4,000 pairs of five seeds of one normal law."""
    x, y = np.random.default_rng(4).normal(size=(2, 4000, 5))
    inside = [e.low <= new.mean() <= e.high for e, new in zip(map(t_estimate, x), y)]
    share = int(re.search(r"(\d+)% of the figures", study_tables.table_fresh("", [], []).note)[1])
    assert 100 * np.mean(inside) == pytest.approx(share, abs=2)


def test_conclusions_that_travel_and_one_that_turns_round():
    """Guards against levels mixed up, a method that only one level has, and one left out because it is below by a
    single seed."""
    wide, thin, none = 0.04, 0.01, float("nan")  # half widths
    means = {"holds": (0.10, thin, 0.05, thin), "fades": (-0.10, thin, -0.02, wide), "turns": (0.05, thin, -0.05, thin),
             "late": (0.01, wide, 0.08, thin), "single": (-0.03, none, 0.03, thin)}
    records = {"easy": {"none": {}, "gone": {"end - GRPO": Estimate(0.9, 0.8, 1.0)}}, "hard": {"none": {}}}
    for label, (easy, width, hard, width_too) in means.items():
        records["easy"][label] = {"end - GRPO": Estimate(easy, easy - width, easy + width)}
        records["hard"][label] = {"end - GRPO": Estimate(hard, hard - width_too, hard + width_too)}
    row = cells(study_tables.table_travel("easy", "hard", records))["end - GRPO"]
    every = np.array([*means.values()]).T[::2]
    assert row["methods"] == "5" and row["rank correlation"] == cell(spearman(*every))
    assert row["not below"] == "3"  # fades is below 0 on easy, turns on hard
    assert row["their correlation"] == cell(spearman(*every[:, [0, 3, 4]]))
    assert (row["same sign"], row["opposite"]) == ("1", "1")  # holds; turns


# ------------------------------------------------------------------------------------------------------- all of it


@pytest.fixture
def folder(tmp_path):
    """The published scores and costs, which the tables need beside the rows."""
    for name in (*study_scores.SCORES, study_tables.TOKENS, study_tables.TIMES):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    return tmp_path


def test_the_published_study_is_what_its_rows_give(folder):
    """Guards against a figure that no row of results/runs.csv gives: all tables again, from the rows alone."""
    (folder / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    study_tables.write_study(folder / "runs.csv")
    assert (folder / "study.md").read_text(encoding="utf-8") == (RESULTS / "study.md").read_text(encoding="utf-8")
    for name in ("forest", "learning", "truth"):
        assert (folder / f"hard-{name}.png").is_file()


def test_a_study_that_was_hardly_begun_has_tables(folder, capsys):
    """Guards against a crash on what an interrupted study, or a method of somebody's own, leaves."""
    row = study_tables.read_rows(RESULTS / "runs.csv")[0]
    made = [("hard", "main", "none", "", 0), ("easy", "main", "none", "", 0), ("easy", "main", "mine", "", 0),
            ("easy", "main", "ppo", "kl=0.1", 0), ("easy", "rates", "ppo", "lr=0.4", 1),
            ("easy", "sweeps", "mine x=1", "", 0), ("easy", "rloo", "none", "advantage=rloo", 1),
            ("easy", "fresh", "none", "", 5), ("easy", "fresh", "ppo", "", 5), ("other", "main", "alone", "", 0)]
    rows = [row | dict(zip(("level", "part", "method", "setting", "seed"), one)) | {"run": str(one)} for one in made]
    write_csv([*rows, row | {"version": "0", "method": "old"}], folder / "runs.csv")
    study_tables.write_study(folder / "runs.csv")
    text = capsys.readouterr().out
    assert "`old`" not in text and "`alone`" not in text and "`mine`" in text


ABOUT = ",".join(study_tables.ABOUT)


@pytest.mark.parametrize("content, said", [
    (None, "there is no run of none"), (f"{ABOUT},curve\n", "there is no run of none"),
    ("a,b\n1,2\n", "it has no column command"), (f"{ABOUT},curve\n<<<<<<< HEAD\n", "merge conflict"),
], ids=["no file", "no rows", "another table", "conflict"])
def test_a_broken_table_of_runs_is_refused_in_one_sentence(content, said, tmp_path):
    """Guards against a traceback where a file is not the study's."""
    if content is not None:
        (tmp_path / "runs.csv").write_text(content)
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        study_tables.write_study(tmp_path / "runs.csv")
