"""The tables of the study, against numbers worked out by hand, simulations, and the published rows."""
import math

import numpy as np
import pytest

import analyze
from lab.estimates import cell
from lab.statistics import spearman
from lab.study import run as study
from lab.study import correlations
from lab.study import tables as study_tables
from lab.study.rows import read_rows
from plumbing.report import Estimate, t_quantile, welch, write_csv
from plumbing.runs import Run, group_runs

RESULTS = study.ROOT / "lab" / "study"


def study_run(method, seed, end, setting="", **figures):
    """A Run of the study from 0.1 at the start to `end` after nine steps."""
    zero = dict.fromkeys((*analyze.LEARNING, *analyze.CREDIT), 0.0)
    rows = zero | {"start": 0.1, "end": end, "climb": end - 0.1, "area": end / 2, "pass@16": 0.5, "steps": 9.0,
                   "gradient norm": 0.5, "step length": 0.1, "curve": {0.0: 0.0, 9.0: end},
                   "spent": {0.0: 0.0, 9.0: 10.0}, **dict.fromkeys(analyze.COSTS, 1.0)}
    label = f"{method} {setting}".strip()
    return Run(f"{label}-{seed}", label, setting, method == "none", seed, rows | figures)


def area_runs(label, *areas, **figures):
    """A run for each of these areas, on one seed after the other. label: method and setting."""
    method, _, setting = label.partition(" ")
    return [study_run(method, seed, area + 0.1, setting, area=area, **figures) for seed, area in enumerate(areas)]


@pytest.mark.parametrize("label, default", [
    ("vineppo k=3 cuts=uncertain", "vineppo k=3"), ("none advantage=batch", "none"), ("none", None),
    ("none advantage=rloo answers=9", "none advantage=rloo"), ("token_type filler=2.0", None)])
def test_a_default_is_the_same_method_with_fewer_flags(label, default):
    """Guards against another method whose name begins alike, and a flag with another value."""
    assert study_tables.default_of(label, {"none", "none advantage=rloo", "vineppo k=3", "token"}) == default


def study_runs(method, *ends, seeds=(0, 1, 2), setting="", **figures):
    """A run of a method for each of these ends, on one seed after the other."""
    return [study_run(method, seed, end, setting, **figures) for seed, end in zip(seeds, ends)]


def cells(table):
    """The cells of each row of a table by column, by the method in the first cell."""
    return {row[0].strip("`"): dict(zip(table.header, row)) for row in table.rows}


def areas(x, y):
    """A cell with the difference of two methods' areas, in points, from their ends in percent."""
    e = welch(np.array(x) / 2, np.array(y) / 2)
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
    for name, lines in zip(correlations.FILES, (truth, noise)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("\n".join(lines))
    scores = correlations.read_scores(tmp_path)["a"]
    assert scores[correlations.COSINE][:3] == (-0.24, -0.56, 0.08)
    assert scores[correlations.RANK].value == 0.9
    assert math.isnan(scores[correlations.WITHIN].value)
    assert scores[correlations.SOLVER].value == 0.5
    assert scores[correlations.SIGNAL].value == -0.001


def test_scores_and_learning_by_hand():
    """Guards against a correlation with the wrong figure, methods that fell among those that climbed, and a cut by the
    point of GRPO instead of its interval."""
    ends = {"none": 0.3, "a": 0.4, "b": 0.5, "c": 0.2, "d": 0.15, "e": 0.1}  # from 0.1: e did not climb
    truths = {"none": 0.5, "a": 0.45, "b": 0.6, "c": 0.4, "d": 0.1, "e": 0.9}  # that of GRPO reaches down to 0.4
    groups = group_runs([study_run(m, 0, end, area=1 - end) for m, end in ends.items()])
    scores = {m: {correlations.COSINE: Estimate(t, t - 0.1, t + 0.1)} for m, t in truths.items()}
    rows = correlations.table_correlations("easy", groups, scores).rows
    subsets = {"all, 6": [*ends], "those that climbed, 5": [*"abcd", "none"],
               "of these, cosine as GRPO's or above, 4": [*"abc", "none"]}
    assert [row[1] for row in rows] == [*subsets]
    for row, subset in zip(rows, subsets.values()):
        assert row[2] == cell(spearman(*np.array([(truths[m], 1 - ends[m]) for m in subset]).T))


def test_the_picture_of_scores_puts_each_method_on_its_line(tmp_path, figures):
    """Guards against scores beside another method's gain, methods out of order, and a correlation of another panel."""
    groups = group_runs([*study_runs("none", 0.4, 0.4), *study_runs("a", 0.5, 0.5), *study_runs("b", 0.2, 0.2)])
    truths = {"none": 0.1, "a": 0.3, "b": 0.2}
    scores = {m: {correlations.COSINE: Estimate(t), correlations.WITHIN: Estimate(1 - t)} for m, t in truths.items()}
    correlations.draw_scores(groups, scores, tmp_path / "truth.png")
    cosine, within, signal = figures[0].axes
    assert dots(cosine) == {25.0: 0.3, 20.0: 0.1, 10.0: 0.2}  # half of the ends is the area, in percent
    assert dots(within) == {25.0: 0.7, 20.0: 0.9, 10.0: 0.8}
    assert not dots(signal)
    assert [axis.get_title().split()[-1] for axis in (cosine, within)] == ["0.50", "-0.50"]  # ranks 3 1 2, areas 3 2 1


def dots(axis):
    """The places of the dots of a panel by their height."""
    return {round(line.get_ydata()[0], 6): line.get_xdata()[0] for line in axis.lines if line.get_marker() == "o"}


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
    scores = {"once": {score: Estimate(k, k - 0.5, k + 0.5) for k, score in enumerate(correlations.SCORES)}}
    sweeps = [*study_runs("better x=1", 0.20, 0.21, 0.24), study_run("once", 0, 0.40)]
    return {"methods": study_tables.table_methods("easy", groups, COSTS),
            "scores": study_tables.table_scores("easy", groups, scores),
            "types": study_tables.table_types("easy", groups),
            "settings": study_tables.table_settings("", MAIN, sweeps)}


@pytest.mark.parametrize("table, method, expected", [
    ("methods", "GRPO", {"end": "42.0 ± 5.0", "area - GRPO": "", "area - RLOO": areas(NONE, RLOO), "cost": "1.00",
                         "gradient": "1.0"}),
    ("methods", "RLOO", {"area - GRPO": areas(RLOO, NONE), "area - RLOO": "", "cost": ""}),
    ("methods", "better", {"seeds": "3", "area - GRPO": areas(BETTER, NONE), "area - RLOO": areas(BETTER, RLOO),
                           "gradient": "2.0", "cost": "1.25"}),
    ("methods", "once k=3", {"seeds": "1", "area - GRPO": "-6.0", "cost": "9.00"}),
    ("scores", "once k=3", {"cosine with A*": "0.00 (-0.50 to 0.50)", "rank in response": "2.00 (1.50 to 2.50)",
                            "solver": "3.00 (2.50 to 3.50)"}),
    ("types", "better", {name: f"{value:.3f} ± 0.000" for name, value in TYPES.items()}),
    ("settings", "better x=1", {"baseline": "GRPO", "area - baseline": areas((20, 21, 24), NONE),
                                "area - default": areas((20, 21, 24), BETTER)}),
    ("settings", "better", {"area - default": ""}),
])
def test_a_table_by_hand(tables, table, method, expected):
    """Guards against points for percent, figures under each other's name, GRPO and RLOO mixed up, a baseline against
    itself, and scores or costs of a method with other flags."""
    row = cells(tables[table])[method]
    assert {name: row[name] for name in expected} == expected


def test_tables_name_their_methods_in_the_order_of_their_area(tables):
    """Guards against a method left out or out of order, and scores of RLOO."""
    methods = {name: list(cells(table)) for name, table in tables.items()}
    assert methods["methods"] == ["better", "RLOO", "unclear", "GRPO", "once k=3"]
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
    """Guards against a difference that mixes old seeds and fresh ones."""
    rloo = {"setting": "advantage=rloo"}
    old = [*study_runs("none", *(x / 100 for x in RLOO), **rloo), *(run for run in MAIN if run.label == "better")]
    fresh = [*study_runs("none", 0.50, 0.60, seeds=(5, 6), **rloo), *study_runs("better", 0.41, 0.53, seeds=(5, 6))]
    rows = study_tables.table_fresh("easy", group_runs(old), group_runs(fresh)).rows
    assert rows == [["`better`", "3", areas(BETTER, RLOO), "2", areas((41, 53), (50, 60))]]


# ------------------------------------------------------------------------------------------------------- all of it


def test_the_published_study_is_what_its_rows_give(tmp_path):
    """Guards against a figure that no row of lab/study/runs.csv gives: all tables again, from the rows alone."""
    (tmp_path / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    study_tables.write_study(tmp_path / "runs.csv")
    for name in ("tables.md", "tables-1.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (RESULTS / name).read_text(encoding="utf-8")
    for name in ("forest", "scores", "budget"):
        assert (tmp_path / f"{name}.png").is_file()


def test_a_study_that_was_hardly_begun_has_tables(tmp_path):
    """Guards against a crash on what an interrupted study, or a method of somebody's own, leaves."""
    row = read_rows(RESULTS / "runs.csv")[-1]
    made = [("hard", "main", "none", "", 0), ("easy", "main", "none", "", 0), ("easy", "main", "mine", "", 0),
            ("easy", "main", "ppo", "kl=0.1", 0), ("easy", "forms", "none", "advantage=batch", 1),
            ("easy", "sweeps", "mine x=1", "", 0), ("easy", "updates", "none", "updates_per_batch=2", 1),
            ("easy", "updates", "none", "advantage=rloo updates_per_batch=4", 1),
            ("easy", "budget", "none", "steps=480", 1), ("easy", "fresh", "none", "", 5),
            ("easy", "fresh", "ppo", "", 5), ("other", "main", "alone", "", 0)]
    rows = [row | dict(zip(("level", "part", "method", "setting", "seed"), one)) | {"run": str(one)} for one in made]
    write_csv([*rows, row | {"version": "1", "method": "old"}], tmp_path / "runs.csv")
    study_tables.write_study(tmp_path / "runs.csv")
    text = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert "`old`" not in text and "`alone`" not in text and "`mine`" in text
