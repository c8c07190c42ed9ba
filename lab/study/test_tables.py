"""The tables of the study, against numbers worked out by hand, simulations, and the published rows.

Run it:  python -m pytest lab/study/test_tables.py
"""
import math

import numpy as np
import pytest

import analyze
from lab.estimates import cell
from lab.statistics import spearman
from lab.study import run as study
from lab.study import scores as study_scores
from lab.study import tables as study_tables
from plumbing.report import Estimate, t_quantile, welch, write_csv
from plumbing.runs import Run, group_runs

RESULTS = study.ROOT / "lab" / "study"


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


def difference(x, y):
    """A cell with the difference of two methods, in points, from their figures in percent."""
    e = welch(np.array(x), np.array(y))
    return f"{e.value:.1f} ± {e.high - e.value:.1f}"


# ----------------------------------------------------------------------------------------------- scores and learning


def test_scores_are_read_from_their_tables(tmp_path):
    """Guards against a column of another table, and an empty cell that becomes 0."""
    truth = ["## Credit against A*, all tokens", "| method | Spearman | cosine of update |", "|---|--:|--:|",
             "| a | 0.90 (0.80 to 0.95) | -0.24 (-0.56 to 0.08) |", "",
             "## Credit against A* and the solver, within responses", "| method | Spearman | solver |",
             "|---|--:|--:|", "| a | | 0.50 |", "", "## Other", "| method | Spearman |", "|---|--:|", "| a | 9.9 |"]
    noise = ["## Noise and bias of each method's gradient", "", "| method | signal to noise |",
             "|---|--:|", "| a | -0.001 |"]
    for name, lines in zip(study_scores.FILES, (truth, noise)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("\n".join(lines))
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


def test_the_picture_of_scores_puts_each_method_on_its_line(tmp_path, figures):
    """Guards against scores beside another method's gain, methods out of order, and a correlation of another panel."""
    groups = group_runs([*study_runs("none", 0.4, 0.4), *study_runs("a", 0.5, 0.5), *study_runs("b", 0.2, 0.2)])
    truths = {"none": 0.1, "a": 0.3, "b": 0.2}
    scores = {m: {study_scores.COSINE: Estimate(t), study_scores.WITHIN: Estimate(1 - t)} for m, t in truths.items()}
    study_scores.draw_truth(groups, scores, tmp_path / "truth.png")
    gain, cosine, within, signal = figures[0].axes
    assert [text.get_text() for text in gain.get_yticklabels()] == ["a", "GRPO", "b"]
    assert dots(gain) == {0: pytest.approx(5), 2: pytest.approx(-10)}  # half of the ends is the area
    assert dots(cosine) == {0: 0.3, 1: 0.1, 2: 0.2}
    assert dots(within) == {0: 0.7, 1: 0.9, 2: 0.8}
    assert not dots(signal)
    assert [axis.get_xlabel().split()[-1] for axis in (cosine, within)] == ["0.50", "-0.50"]  # ranks 3 1 2, areas 3 2 1


def dots(axis):
    """The places of the dots of a panel by their line."""
    return {line.get_ydata()[0]: line.get_xdata()[0] for line in axis.lines if line.get_marker() == "o"}


# ---------------------------------------------------------------------------------------------------------- tables

NONE, BETTER, UNCLEAR, RLOO = (40, 42, 44), (50, 53, 56), (41, 41, 46), (45, 47, 49)  # ends in percent, three seeds
TYPES = {"contribution, filler / reasoning": 0.4, "gradient, filler / reasoning": 0.3, "effective sample size": 0.9,
         "varies within": 0.1}
MAIN = [*study_runs("none", *(x / 100 for x in NONE)), *study_runs("unclear", *(x / 100 for x in UNCLEAR)),
        *study_runs("better", *(x / 100 for x in BETTER), **TYPES, **{"gradient norm": 1.0}),
        study_run("once k=3", 1, 0.30)]
COSTS = {"none": 1.0, "better": 1.25, "unclear": 1.04, "once k=3": 9.0}


@pytest.fixture(scope="module")
def tables():
    """The tables that compare the methods of MAIN with each other, and with other runs of them."""
    groups = group_runs([*MAIN, *study_runs("none", *(x / 100 for x in RLOO), setting="advantage=rloo")])
    records = study_tables.read_records(groups)
    scores = {"once": {score: Estimate(k, k - 0.5, k + 0.5) for k, score in enumerate(study_scores.MEASURED)}}
    sweeps = [*study_runs("better x=1", 0.20, 0.21, 0.24), study_run("once", 0, 0.40)]
    return {"study": study_tables.table_study("easy", groups, records, COSTS),
            "scores": study_tables.table_scores("easy", records, scores),
            "types": study_tables.table_types("easy", records),
            "settings": study_tables.table_settings("", MAIN, sweeps)}


@pytest.mark.parametrize("table, method, expected", [
    ("study", "GRPO", {"end": "42.0 ± 5.0", "end - GRPO": "", "end - RLOO": difference(NONE, RLOO), "cost": "1.00",
                       "gradient": "1.0"}),
    ("study", "RLOO", {"end - GRPO": difference(RLOO, NONE), "end - RLOO": "", "cost": ""}),
    ("study", "better", {
        "seeds": "3", "end - GRPO": difference(BETTER, NONE), "end - RLOO": difference(BETTER, RLOO),
        "area - GRPO": difference([x / 2 for x in BETTER], [x / 2 for x in NONE]), "gradient": "2.0",
        "cost": "1.25"}),
    ("study", "once k=3", {"seeds": "1", "end - GRPO": "-12.0", "cost": "9.00"}),
    ("scores", "once k=3", {"cosine with A*": "0.00 (-0.50 to 0.50)", "rank in response": "2.00 (1.50 to 2.50)",
                            "signal to noise": "4.00 (3.50 to 4.50)"}),
    ("types", "better", {name: f"{value:.3f} ± 0.000" for name, value in TYPES.items()}),
    ("settings", "better x=1", {"baseline": "GRPO", "end - baseline": difference([20, 21, 24], NONE),
                                "least climb": "10.0",
                                "end - default": difference([20, 21, 24], BETTER)}),
    ("settings", "better", {"end - default": ""}),
])
def test_a_table_by_hand(tables, table, method, expected):
    """Guards against points for percent, figures under each other's name, opponents mixed up, a baseline against
    itself, and scores or costs of a method with other flags."""
    row = cells(tables[table])[method]
    assert {name: row[name] for name in expected} == expected


def test_tables_name_their_methods_in_the_order_of_their_area(tables):
    """Guards against a method left out or out of order, and scores of RLOO."""
    methods = {name: list(cells(table)) for name, table in tables.items()}
    assert methods["study"] == ["better", "RLOO", "unclear", "GRPO", "once k=3"]
    assert methods["scores"] == ["better", "unclear", "GRPO", "once k=3"]  # RLOO was not scored


def test_the_power_that_the_table_states_is_that_of_simulated_studies():
    """Guards against a wrong factor: 40,000 pairs of five seeds whose means differ by the stated number of spreads."""
    reach = (t_quantile(8) + t_quantile(8, 0.4)) * math.sqrt(2 / 5)
    x, y = np.random.default_rng(5).normal(size=(2, 40000, 5))
    t = (x.mean(1) + reach - y.mean(1)) / np.sqrt((x.var(1, ddof=1) + y.var(1, ddof=1)) / 5)
    assert np.mean(t > t_quantile(8)) == pytest.approx(0.8, abs=0.02)
    spread = np.std([0.4, 0.42, 0.44, 0.46, 0.5], ddof=1)
    group = group_runs(study_runs("none", 0.4, 0.42, 0.44, 0.46, 0.5, seeds=range(5)))
    assert f"{100 * reach * spread:.1f} points at the end" in study_tables.power(group)


def test_fresh_seeds_by_hand():
    """Guards against an interval of the mean in place of one seed, fresh seeds that help to make it, and a difference
    that mixes the two."""
    rloo = {"setting": "advantage=rloo"}
    old = [*study_runs("none", *(x / 100 for x in RLOO), **rloo), *(run for run in MAIN if run.label == "better")]
    fresh = [*study_runs("none", 0.50, 0.60, seeds=(5, 6), **rloo), *study_runs("better", 0.41, 0.53, seeds=(5, 6))]
    rows = cells(table := study_tables.table_fresh("easy", group_runs(old), group_runs(fresh)))
    half = 4.303 * 1 * math.sqrt(4 / 3)  # t of 2 degrees of freedom, deviation of the areas 22.5, 23.5, 24.5
    assert rows["RLOO"] == {
        "method": "RLOO", "seeds": "3", "95% of single seeds": f"{23.5 - half:.1f} to {23.5 + half:.1f}",
        "fresh seeds": "25.0 30.0", "inside": "1 of 2", "- RLOO": "", "fresh - RLOO": ""}
    assert rows["better"]["inside"] == "2 of 2" and rows["better"]["fresh seeds"] == "20.5 26.5"
    assert rows["better"]["- RLOO"] == difference([25, 26.5, 28], [22.5, 23.5, 24.5])
    assert rows["better"]["fresh - RLOO"] == difference([20.5, 26.5], [25, 30])
    assert "3 of 4 lie inside" in table.note


def test_a_prediction_holds_the_next_seed_as_often_as_it_says():
    """Guards against a factor left out: 4,000 times five seeds and a sixth of one normal law."""
    x = np.random.default_rng(4).normal(size=(4000, 6))
    inside = [low <= seed[5] <= high for seed in x for low, high in [study_tables.prediction(seed[:5])]]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.01)


# ------------------------------------------------------------------------------------------------------- all of it


def test_the_published_study_is_what_its_rows_give(tmp_path):
    """Guards against a figure that no row of lab/study/runs.csv gives: all tables again, from the rows alone."""
    (tmp_path / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    study_tables.write_study(tmp_path / "runs.csv")
    for name in ("tables.md", "tables-1.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (RESULTS / name).read_text(encoding="utf-8")
    for name in ("forest", "scores", "budget", "travel"):
        assert (tmp_path / f"{name}.png").is_file()


def test_a_study_that_was_hardly_begun_has_tables(tmp_path, capsys):
    """Guards against a crash on what an interrupted study, or a method of somebody's own, leaves."""
    row = study_tables.read_rows(RESULTS / "runs.csv")[-1]
    made = [("hard", "main", "none", "", 0), ("easy", "main", "none", "", 0), ("easy", "main", "mine", "", 0),
            ("easy", "main", "ppo", "kl=0.1", 0), ("easy", "forms", "none", "advantage=batch", 1),
            ("easy", "sweeps", "mine x=1", "", 0), ("easy", "updates", "none", "updates_per_batch=2", 1),
            ("easy", "updates", "none", "advantage=rloo updates_per_batch=4", 1),
            ("easy", "budget", "none", "steps=480", 1), ("easy", "fresh", "none", "", 5),
            ("easy", "fresh", "ppo", "", 5), ("other", "main", "alone", "", 0)]
    rows = [row | dict(zip(("level", "part", "method", "setting", "seed"), one)) | {"run": str(one)} for one in made]
    write_csv([*rows, row | {"version": "1", "method": "old"}], tmp_path / "runs.csv")
    study_tables.write_study(tmp_path / "runs.csv")
    text = capsys.readouterr().out
    assert "`old`" not in text and "`alone`" not in text and "`mine`" in text


ABOUT = ",".join(study_tables.ABOUT)


def test_hard_rows_alone_are_refused_in_one_sentence(tmp_path):
    """Guards against a traceback where nothing was trained on easy puzzles, which have most tables."""
    row = study_tables.read_rows(RESULTS / "runs.csv")[-1] | {"level": "hard", "part": "main", "method": "none"}
    write_csv([row], tmp_path / "runs.csv")
    with pytest.raises(ValueError, match="^there is no run of none on easy puzzles[^\n]*$"):
        study_tables.read_versions(tmp_path / "runs.csv")


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
