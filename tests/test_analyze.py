"""Tables and pictures: every statistic against a slow computation, every table against numbers worked out by hand.

Run it:  python -m pytest tests/test_analyze.py
"""

import csv
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import analyze
import grpo
from conftest import make_batch
from countdown_task import ROLES
from mitigations import MITIGATIONS
from train import BUNDLED, COLUMNS, copy_tokenizer

# ------------------------------------------------------------------------------------------------- statistics


def test_clustered_mean_by_hand():
    """Guards against errors that treat the tokens of one response as independent: clusters (1, 3), (5), (7, 8)."""
    mean, error = analyze.clustered_mean(np.array([1.0, 3, 5, 7, 8]), np.array([0, 0, 1, 2, 2]))
    residuals = [4 - 2 * 4.8, 5 - 4.8, 15 - 2 * 4.8]
    assert math.isnan(analyze.clustered_mean(np.array([1.0, 3]), np.array([4, 4]))[1])
    assert mean == pytest.approx(4.8) and error == pytest.approx(math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 5)


def test_clustered_error_is_the_spread_over_repeated_experiments():
    """Guards against a formula that is merely plausible: 4,000 simulated runs of 60 unequal clusters, within 10%."""
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(4000):
        cluster = np.repeat(np.arange(60), rng.integers(1, 20, 60))
        mean, error = analyze.clustered_mean(rng.normal(size=60)[cluster] + rng.normal(size=len(cluster)), cluster)
        means.append(mean)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_t_statistics_by_the_textbook():
    """Guards against the population variance, and positions that too few responses reach."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 9, 80)
    position = np.concatenate([np.arange(n) for n in lengths])
    values = rng.normal(0.3, 1, len(position))
    expected = []
    for p in range(8):
        x = [float(v) for v in values[position == p]]
        if len(x) >= analyze.MIN_RESPONSES:
            expected.append(statistics.mean(x) / (statistics.stdev(x) / math.sqrt(len(x))))
    assert 2 < len(expected) < 8
    np.testing.assert_allclose(analyze.t_statistics(values, position), expected, rtol=1e-9)


def test_interval_covers_as_often_as_it_says():
    """Guards against a wrong quantile of Student's t: 20,000 samples of five, 95% of the intervals hold the mean."""
    samples = np.random.default_rng(2).normal(size=(20000, 5))
    hits = [abs(mean) <= half for mean, half in map(analyze.interval, samples)]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.01)  # 0.01 is six standard errors
    assert math.isnan(analyze.interval([1.0])[1])


# ---------------------------------------------------------------------------------------------------- tables


@pytest.fixture
def run(tmp_path):
    """Two steps of two responses, worked out by hand below."""
    folder = tmp_path / "none-seed0"
    (folder / "credit").mkdir(parents=True)
    copy_tokenizer(BUNDLED, folder / "checkpoint")
    for step in (1, 2):
        batch = make_batch(
            [2, 4],
            [1.0, -0.5],
            reward=torch.tensor([1.1, 0.1]),
            tokens=torch.tensor([[300, 1, 0, 0], [300, 301, 302, 1]]),
            logprob=torch.tensor([[-1.0, -0.5, 0, 0], [-2, -0.25, -4, 0]]),
            logit_grad=torch.tensor([[0.5, 0.25, 0, 0], [1.0, 0.125, 1.25, 0]]),
            role=torch.tensor([[0, 2, 0, 0], [0, 1, 1, 2]], dtype=torch.int8),
        )
        grpo.write_credit_log(
            folder / "credit" / f"step-{step:06d}.npz", step, batch, batch.advantage[:, None] * batch.mask * step
        )
    write_metrics(folder, [[0, 0.25], [1, ""], [2, 0.75]])
    (folder / "config.json").write_text('{"settings": {"mitigation": "none", "seed": 0, "lr": 0.1}, "method": {}}')
    return folder


def write_metrics(folder, heldout):
    """metrics.csv with the given steps and held-out success, and 0.5 wherever else a number belongs."""
    rows = [
        {name: "" if step == 0 else 0.5 for name in COLUMNS}
        | {"step": step, "heldout_success": success, "heldout_stderr": success and 0.1}
        for step, success in heldout
    ]
    text = "\n".join([",".join(COLUMNS)] + [",".join(str(row[name]) for name in COLUMNS) for row in rows])
    (folder / "metrics.csv").write_text(text + "\n")


def cells(table, first):
    """The numbers, errors left out, of the row that begins with a name."""
    row = next(r for r in table.rows if r[0] == first)
    return [float(re.match(r"[-+\d.,]+", c)[0].replace(",", "")) if c else None for c in row[1:]]


def test_measures_by_hand(run):
    """Guards against a measure without the method's credit, or with the sign of the other."""
    log = analyze.read_log(run)
    assert log["contribution"][:6].tolist() == [-1, -0.5, 1, 0.125, 2, 0] and log["gradient"][:6].tolist() == [
        0.5,
        0.25,
        -0.5,
        -0.0625,
        -0.625,
        0,
    ]
    np.testing.assert_allclose(log["contribution"][6:], 2 * log["contribution"][:6])
    assert log["id"].tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3]
    assert log["relative"][:6].tolist() == [0, 0.5, 0, 0.25, 0.5, 0.75]


def test_tables_by_hand(run):
    """Guards against a table whose rows or columns are swapped. Step 2 is step 1 with twice the credit: means times
    1.5."""
    log = analyze.read_log(run)
    roles = analyze.table_roles(log)
    assert cells(roles, "filler")[2:4] == pytest.approx([1.5 * 1.0, 1.5 * 0.5], abs=1e-3)  # |-1|, |1|; |.5|, |-.5|
    assert cells(roles, "reasoning")[2:4] == pytest.approx([1.5 * 1.0625, 1.5 * 0.34375], abs=1e-3)
    assert cells(roles, "reasoning")[4:6] == pytest.approx([1.5 * 1.0625, -1.5 * 0.34375], abs=1e-3)
    assert cells(roles, "structure")[:2] == [4, 33.3]
    signs = analyze.table_signs(log)
    assert cells(signs, "positive")[:4] == pytest.approx([2, 4, 1.5 * -0.75, 1.5 * 0.375], abs=1e-3)
    assert cells(signs, "negative")[:4] == pytest.approx([2, 8, 1.5 * 3.125 / 4, 1.5 * -1.1875 / 4], abs=1e-3)
    assert cells(signs, "zero")[:2] == [0, 0]
    positions = analyze.table_positions(log)
    assert cells(positions, "0-10%")[:3] == pytest.approx([4, 1.5, 0.75], abs=1e-3)
    assert cells(positions, "50-60%")[:3] == pytest.approx([4, 1.5 * 1.25, 1.5 * 0.4375], abs=1e-3)
    spread = analyze.table_statistics(log)
    assert cells(spread, "minimum") == [-2, -1.25] and cells(spread, "maximum") == [4, 1]
    training = analyze.table_training(log)
    assert cells(training, "1-1")[0] == pytest.approx((2 * 1 + 4 * 0.5) / 6, abs=1e-3) and cells(training, "2-2")[
        0
    ] == pytest.approx(4 / 3, abs=1e-3)
    by_position = analyze.table_roles_by_position(log)
    assert cells(by_position, "0-20%")[0] == pytest.approx(1.5) and cells(by_position, "40-60%")[1] == pytest.approx(3)


def test_cells_stand_under_their_headers(run):
    """Guards against unclustered errors and columns under another's name. Reasoning: clusters (.125, 2), (.25, 4)."""
    log = analyze.read_log(run)
    table = analyze.table_roles(log)
    row = dict(zip(table.header, table.rows[1]))
    assert row["size of contribution"] == "1.594 ± 0.531"  # sqrt(2 * 2 * 1.0625**2) / 4
    assert [row[n] for n in ("contribution", "gradient", "log p", "entropy")] == ["1.594", "-0.516", "-2.125", "1.000"]
    assert "0.94 by contribution, 1.45 by gradient" in table.note  # 1 / 1.0625, .5 / .34375
    table = analyze.table_positions(log)
    row = dict(zip(table.header, table.rows[5]))
    assert (row["log p"], row["entropy"]) == ("-2.250", "1.000")  # -0.5 and -4
    table = analyze.table_roles_by_position(log)
    row = dict(zip(table.header, table.rows[2]))
    assert row["contribution, reasoning"].startswith("3.000") and row["gradient, reasoning"].startswith("0.938")
    values = [-1, -0.5, 1, 0.125, 2, 0] + [2 * v for v in (-1, -0.5, 1, 0.125, 2, 0)]
    spread = analyze.table_statistics(log)
    assert cells(spread, "standard deviation")[0] == pytest.approx(statistics.pstdev(values), abs=1e-3)
    assert cells(spread, "mean size")[0] == pytest.approx(statistics.mean(map(abs, values)), abs=1e-3)


def test_the_first_table_by_hand(run):
    """Guards against start for end, success for its error, step 0 among the trained, and an unmeasured 0."""
    log, metrics = analyze.read_log(run), analyze.read_metrics(run)
    assert math.isnan(metrics["reward"][0]) and analyze.heldout(metrics)[0].tolist() == [0, 2]
    rows = dict(analyze.table_basics(log, metrics).rows)
    assert rows["steps, responses, tokens"] == "2, 4, 12" and rows["tokens whose credit is 0"] == "0.0%"
    assert rows["held-out success, start"] == "0.250 ± 0.100" and rows["held-out success, step 2"] == "0.750 ± 0.100"
    counting = {name: np.arange(13.0) for name in COLUMNS}
    rows = dict(analyze.table_basics(log, counting).rows)
    assert rows["success, first and last ten steps"] == "5.500, 7.500"


def test_table_of_t_by_construction():
    """Guards against a sign that hides a large t, wrong limits, and 30 responses counted as too few."""
    z = np.tile([1.0, -1], 15)
    z /= z.std(ddof=1)
    values = np.concatenate([z + t / math.sqrt(30) for t in (-5, 2, 0.5)])
    log = {"position": np.repeat([0, 1, 2], 30), "contribution": values, "gradient": values}
    assert [row[1] for row in analyze.table_t(log).rows] == ["33.3%", "33.3%", "2.50", "3"]


def test_top_tokens_are_counted_within_their_type(codec):
    """Guards against rare tokens first, and one token's types mixed."""
    ones = np.ones(4)
    columns = dict(contribution=ones, gradient=ones, logprob=ones, entropy=ones, id=np.arange(4))
    log = dict(role=np.array([0, 0, 0, 1]), token=np.array([300, 301, 301, 301]), **columns)
    counted = [(row[0], row[2]) for row in analyze.table_tokens(log, codec).rows]
    assert counted == [("filler", "2"), ("filler", "1"), ("reasoning", "1")]


def test_time_and_chosen_responses():
    """Guards against a run that does not begin at 0, and pairs of different questions or in the other order."""
    assert analyze.training_time({"step": np.array([5, 6, 7, 8])}).tolist() == [0, 0.25, 0.5, 0.75]
    log = dict(
        step=np.repeat([1, 2], 3), id=np.arange(6), group=np.array([0, 1, 1] * 2), advantage=np.array([1, 2, -1] * 2)
    )
    assert [rows.tolist() for rows in analyze.choose_responses(log)] == [[1], [2], [4], [5]]


def test_pictures_draw_the_named_columns(run, tmp_path, monkeypatch):
    """Guards against a curve of another column, and a mean over the wrong step."""
    kept = []
    monkeypatch.setattr(analyze.plt, "close", kept.append)
    counting = {name: np.arange(3.0) + 10 * i for i, name in enumerate(COLUMNS)}
    analyze.draw_learning(counting, "x", tmp_path / "a.png")
    assert kept[0].axes[0].lines[0].get_ydata().tolist() == counting["success"].tolist()


def test_position_bins_have_no_gap_at_their_borders():
    """Guards against a token that rounding moves: position t of a response of length L lies in bin floor(10 t / L)."""
    position, length = np.array([(t, L) for L in range(1, 200) for t in range(L)]).T
    assert (analyze.bins(position / length, 10) == np.minimum(10 * position // length, 9)).mean() > 0.999


def test_a_run_is_analyzed(run, capsys, monkeypatch):
    """Guards against a table that is computed and not shown, and pictures that are not written."""
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(run)])
    analyze.main()
    text = capsys.readouterr().out
    for title in (
        "The run",
        "Contribution statistics",
        "t-statistics",
        "Position in the response",
        "Sign of the advantage",
        "Token types",
        "Token types by position",
        "Top tokens of each type",
        "Credit over training",
    ):
        assert f"## {title}\n" in text and f"## {title}\n" in (run / "analysis" / "tables.md").read_text()
    for picture in ("learning.png", "credit.png", "tokens.png"):
        assert (run / "analysis" / picture).read_bytes().startswith(b"\x89PNG")
    assert all(role in text for role in ROLES)


def test_a_run_without_any_credit_is_analyzed(run, monkeypatch, capsys):
    """Guards against a division by zero where every group had equal rewards."""
    for file in (run / "credit").iterdir():
        log = dict(np.load(file))
        np.savez(file, **log | {"credit": 0 * log["credit"]})
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(run)])
    analyze.main()
    assert "Filler / reasoning: nan" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(run), str(run)])
    analyze.main()
    assert (run / "analysis" / "tokens.png").is_file()


def test_tokens_are_wrapped_without_loss():
    """Guards against a token that vanishes or overlaps its neighbour in the picture."""
    texts = [" Maybe", " 5", "\n", "<answer>", "x" * 9, ""]
    placed = analyze.place_tokens(texts, 12)
    assert "".join(text for *_, text in placed) == " Maybe 5↵<answer>" + "x" * 9 + "■"
    assert [(x, y) for x, y, _ in placed] == [(0, 0), (6, 0), (8, 0), (0, 1), (0, 2), (9, 2)]


# ------------------------------------------------------------------------------------------------ comparison


def config(mitigation, seed=0, method=None, **settings):
    """A config.json."""
    return {
        "settings": {"mitigation": mitigation, "seed": seed, "lr": 0.1, "normalize": "response"} | settings,
        "method": method or {},
    }


def test_labels_name_what_differs():
    """Guards against settings averaged as seeds, and labels full of what only one method has."""
    a, b = config("a", 1, {"x": 1}), config("b", 2, {"x": 2}, normalize="none", steps=7, out="elsewhere")
    assert analyze.labels([a, b, config("a", 3, {"x": 1})]) == ["a", "b", "a"]
    assert analyze.labels([a, config("a", 1, {"x": 3}), b]) == ["a x=1", "a x=3", "b"]
    assert analyze.labels([a, config("a", 1, {"x": 1}, normalize="batch")]) == [
        "a normalize=response",
        "a normalize=batch",
    ]
    assert analyze.labels([a, config("b", 1, {}, lr=0.2)]) == ["a lr=0.1", "b lr=0.2"]


def test_spread_within_by_loops():
    """Guards against shares over the whole run, signs that cancel, and responses without credit that count."""
    responses = [[1.0, 1, 1], [0.5, -0.5], [0.0, 0], [3.0, 0, 0, 1]]
    credit = np.concatenate(responses)
    got = analyze.spread_within(credit, np.repeat(np.arange(4), [len(r) for r in responses]))
    ess = [sum(map(abs, r)) ** 2 / (len(r) * sum(x * x for x in r)) for r in responses if any(r)]
    within = sum((x - statistics.mean(r)) ** 2 for r in responses for x in r)
    assert got["effective sample size"] == pytest.approx(statistics.mean(ess))
    assert got["varies within"] == pytest.approx(within / sum(x * x for x in credit))


def test_probability_of_improvement_by_loops():
    """Guards against ties that count as wins, and x and y swapped."""
    x, y = np.array([1.0, 2, 3, 3]), np.array([2.0, 3, 0])
    wins = sum((a > b) + 0.5 * (a == b) for a in x for b in y) / 12
    assert analyze.improvement(x, y) == pytest.approx(wins) and analyze.mean_difference(x, y) == pytest.approx(
        2.25 - 5 / 3
    )


@pytest.mark.parametrize("statistic", [analyze.mean_difference, analyze.improvement])
def test_bootstrap_against_all_resamples(statistic):
    """Guards against resampling pairs, or both methods together: all 27 * 27 resamples of three runs each."""
    x, y = np.array([0.1, 0.5, 0.6]), np.array([0.2, 0.3, 0.55])
    every = [np.array(r) for r in itertools.product(range(3), repeat=3)]
    exact = np.sort([float(statistic(x[i], y[j])) for i in every for j in every])
    got = analyze.bootstrap(statistic, x, y, resamples=100_000)
    assert got.value == pytest.approx(float(statistic(x, y)))
    for end, share in ((got.low, 0.025), (got.high, 0.975)):  # where the exact distribution function passes the share
        assert (exact < end - 1e-9).mean() <= share + 0.005 and (exact <= end + 1e-9).mean() >= share - 0.005
    assert math.isnan(analyze.bootstrap(statistic, x[:1], y).low)


def test_steps_to_a_goal_by_hand():
    """Guards against the step after the goal, and a goal that was never met."""
    curve = {0.0: 0.2, 25.0: 0.4, 50.0: 0.3, 75.0: 0.6}
    assert [analyze.steps_to(g, curve) for g in (0.1, 0.3, 0.45)] == pytest.approx([0, 12.5, 62.5])
    assert math.isnan(analyze.steps_to(0.7, curve))


def group(label, rows, baseline=None):
    """A Group whose runs ended, by seed, with these successes."""
    figures = dict.fromkeys((*analyze.LEARNING, *analyze.CREDIT), 0.0)
    return analyze.Group(
        label,
        {seed: figures | {"end": end, "steps": 9.0, "curve": {0.0: 0.0, 9.0: end}} for seed, end in rows.items()},
        baseline,
    )


def test_differences_are_paired_by_seed():
    """Guards against runs paired by order, and seeds that only one of them has."""
    base = group("none", {3: 0.5, 1: 0.1, 2: 0.9})
    other = group("m", {1: 0.2, 4: 1.0, 3: 0.4}, base)
    assert other.differences("end") == pytest.approx([0.1, -0.1])
    row = analyze.record(other)
    assert row["end - none"].value == pytest.approx(0) and row["end - none"].high == pytest.approx(12.706 * 0.1)
    assert row["end - none, bootstrap"].value == pytest.approx(1.6 / 3 - 0.5)
    assert row["seeds that get there"].value == 1 and row["steps to none's end"].value == pytest.approx(4.5)


def test_no_effect_gives_false_alarms_at_the_stated_rate():
    """Guards against intervals that exclude zero too often: 3,000 pairs of methods that do not differ, five seeds."""
    rng, alarms = np.random.default_rng(5), []
    for _ in range(3000):
        luck, a, b = rng.normal(size=(3, 5))  # what a seed does to both methods, and to each
        base = group("none", dict(enumerate(luck + a)))
        e = analyze.t_estimate(group("m", dict(enumerate(luck + b)), base).differences("end"))
        alarms.append(not e.low <= 0 <= e.high)
    assert np.mean(alarms) == pytest.approx(0.05, abs=0.016)  # four standard errors


def copy_of(run, name, end, **changes):
    """Another run beside `run`, with its credit log, that ends with this held-out success."""
    folder = run.parent / name
    folder.mkdir()
    (folder / "credit").symlink_to(run / "credit")
    write_metrics(folder, [[0, 0.25], [1, ""], [2, end]])
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    return str(folder)


def compare(monkeypatch, *folders):
    """Run the command on some folders; the rows of table.csv by method."""
    monkeypatch.setattr(sys, "argv", ["analyze.py", *map(str, folders)])
    analyze.main()
    with (Path(folders[-1]).parent / "comparison" / "table.csv").open() as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_methods_are_compared_over_seeds(run, capsys, monkeypatch):
    """Guards against seeds counted as methods, methods averaged as seeds, and our own output taken for a run."""
    (run / "config.json").write_text(json.dumps(config("none")))
    others = [
        copy_of(run, "none-seed1", 0.85, mitigation="none", seed=1),
        *(copy_of(run, f"m-seed{seed}", end, mitigation="m", seed=seed) for seed, end in ((0, 0.5), (1, 0.7))),
    ]
    compare(monkeypatch, run, *others)
    rows = compare(monkeypatch, run.parent / "comparison", run, *others)
    text = capsys.readouterr().out
    assert list(rows) == ["none", "m"] and "nothing can be concluded" not in text
    none, m = ({k: float(v) for k, v in rows[name].items() if k != "method" and v} for name in ("none", "m"))
    assert none["end"] == pytest.approx(0.8) and none["end high"] - none["end"] == pytest.approx(
        12.706 * 0.05, rel=1e-4
    )
    assert none["climb"] == pytest.approx(0.55) and none["least climb"] == 0.5 and none["seeds"] == 2 == m["seeds"]
    assert m["area"] == pytest.approx(0.425)  # of straight lines from 0.25 to 0.5 and 0.7, over the whole time
    assert m["end - none"] == pytest.approx(-0.2) and m["end, P(better), bootstrap"] == 0 and "end - none" not in none
    assert m["contribution, filler / reasoning"] == pytest.approx(1 / 1.0625, rel=1e-5)
    assert m["contribution, filler"] == pytest.approx(2 / (2 + 2.125 + 0.5), rel=1e-5)
    assert m["gradient norm"] == 0.5 and m["its spread"] == 0 and m["seconds a step"] == 0.5
    assert m["effective sample size"] == pytest.approx(1) and m["varies within"] == pytest.approx(0)
    assert "0.800 ± 0.635" in text and "-0.200 ± 0.635" in text and "-0.200 (-0.350 to -0.050)" in text
    for name in ("learning.png", "forest.png"):
        assert (run.parent / "comparison" / name).read_bytes().startswith(b"\x89PNG")


def test_one_seed_concludes_nothing(run, capsys, monkeypatch):
    """Guards against a verdict from a single run."""
    (run / "config.json").write_text(json.dumps(config("none")))
    compare(monkeypatch, run, copy_of(run, "m", 0.9, mitigation="m"))
    assert capsys.readouterr().out.count("With one seed, nothing can be concluded") == 3


def test_a_baseline_has_the_same_settings(run, monkeypatch):
    """Guards against a method measured against `none` at another learning rate, and --normalize taken for a setting."""
    (run / "config.json").write_text(json.dumps(config("none")))
    rows = compare(
        monkeypatch,
        run,
        copy_of(run, "a", 0.9, mitigation="m", lr=0.2),
        copy_of(run, "b", 0.8, mitigation="k", normalize="none"),
    )
    assert "end - none" in rows["k lr=0.1"] and rows["k lr=0.1"]["end - none"] and not rows["m lr=0.2"]["end - none"]


def test_the_same_run_twice_is_refused(run, monkeypatch):
    """Guards against one seed counted as two."""
    (run / "config.json").write_text(json.dumps(config("none")))
    with pytest.raises(SystemExit, match="seed 0 of another run"):
        compare(monkeypatch, run, copy_of(run, "twin", 0.9, mitigation="none"))


def test_pictures_show_the_mean_and_its_interval(run, tmp_path, monkeypatch):
    """Guards against a band of standard errors, and a forest in the wrong order or unit."""
    kept = []
    monkeypatch.setattr(analyze.plt, "close", kept.append)
    base = group("none", {0: 0.25, 1: 0.35})
    base.baseline = base
    analyze.draw_curves([base], tmp_path / "a.png")
    axis = kept[0].axes[0]
    assert axis.lines[0].get_ydata().tolist() == pytest.approx([0, 0.3])
    assert axis.collections[0].get_paths()[0].get_extents().y0 == pytest.approx(0.3 - 12.706 * 0.05)
    better, worse = group("better", {0: 0.35, 1: 0.55}, base), group("worse", {0: 0.2, 1: 0.2}, base)
    groups = [base, better, worse]
    analyze.draw_forest(groups, {g.label: analyze.record(g) for g in groups}, tmp_path / "b.png")
    axis = kept[1].axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["worse (2)", "better (2)"]
    bars = [line.get_xdata() for line in axis.lines[1:]]  # of each method: interval, mean, seeds
    assert bars[3] == pytest.approx([15 - 12.706 * 5, 15 + 12.706 * 5]) and bars[4] == pytest.approx([15])
    assert bars[5] == pytest.approx([10, 20]) and bars[2] == pytest.approx([-5, -15])


def test_a_run_that_only_evaluated_is_left_out(run, monkeypatch, capsys):
    """Guards against one folder of --steps 0 that keeps all the others from being read."""
    (run.parent / "evaluated").mkdir()
    write_metrics(run.parent / "evaluated", [[0, 0.25]])
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(run), str(run.parent / "evaluated")])
    analyze.main()
    text = capsys.readouterr().out
    assert "left out" in text and "## Token types" in text
    for alone in ("comparison", "evaluated"):
        monkeypatch.setattr(sys, "argv", ["analyze.py", str(run.parent / alone)])
        with pytest.raises(SystemExit, match="no run with a step of training"):
            analyze.main()


# -------------------------------------------------------------------------------------------------- the study


def test_spearman_by_the_textbook():
    """Guards against ranks of ties by place, and an interval of Pearson's: without ties 1 - 6 sum d^2 / (n^3 - n)."""
    x, y = np.array([3.0, 1, 2, 10, 5, 4]), np.array([0.1, 0.3, 0.2, 0.9, 0.5, 0.05])
    d = [sum(a < v for a in x) - sum(b < w for b in y) for v, w in zip(x, y)]
    e = analyze.spearman(x, y)
    assert e.value == pytest.approx(1 - 6 * sum(k * k for k in d) / (6**3 - 6))
    half = 1.96 * math.sqrt((1 + e.value**2 / 2) / 3)
    assert [math.atanh(e.low), math.atanh(e.high)] == pytest.approx(
        [math.atanh(e.value) - half, math.atanh(e.value) + half]
    )
    tied = analyze.spearman(np.array([1.0, 1, 2, 3]), np.array([5.0, 6, 7, 7]))
    assert tied.value == pytest.approx(statistics.correlation([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5]))
    assert math.isnan(analyze.spearman(np.ones(5), x[:5]).value) and math.isnan(analyze.spearman(x, x).low)


@pytest.mark.parametrize("n", [12, 18])
@pytest.mark.parametrize("correlation", [0, 0.6, 0.87])
def test_spearman_covers_as_often_as_it_says(correlation, n):
    """Guards against an interval too narrow for a dozen methods, and for those that nearly agree: 2,000 samples of a
    normal pair."""
    rng, truth, inside = np.random.default_rng(3), 6 / math.pi * math.asin(correlation / 2), []
    for _ in range(2000):
        x, noise = rng.normal(size=(2, n))
        e = analyze.spearman(x, correlation * x + math.sqrt(1 - correlation**2) * noise)
        inside.append(e.low <= truth <= e.high)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_a_correlation_that_two_points_made():
    """Guards against a correlation that one or two methods make: five pairs that do not agree and two far out."""
    x, y = np.array([1.0, 2, 3, 4, 5, 8, 9]), np.array([3.0, 1, 5, 2, 4, 8, 9])
    kept = [
        statistics.correlation(analyze.ranks(x[list(k)]), analyze.ranks(y[list(k)]))
        for k in itertools.combinations(range(7), 5)
    ]
    assert min(kept) == pytest.approx(0.3) and analyze.without_two([*"abcde", "f x=1", "g"], x, y) == "0.30 (f, g)"
    assert analyze.without_two([*"abcd"], x[:4], y[:4]) == ""


def test_a_study_without_effects_finds_as_many_as_it_says():
    """Guards against a note that promises fewer false alarms than there are: 18 methods that do nothing, measured
    against the same runs of `none` on five seeds, 1,500 times. Their mean is 5% of 18, though they come in bunches."""
    rng, alarms = np.random.default_rng(8), []
    for _ in range(1500):
        base = group("none", dict(enumerate(rng.normal(size=5))))
        methods = [group("m", dict(enumerate(rng.normal(size=5))), base) for _ in range(18)]
        alarms.append(sum(analyze.excludes_zero(analyze.t_estimate(m.differences("end"))) for m in methods))
    assert np.mean(alarms) == pytest.approx(0.9, abs=0.15) and max(alarms) > 4


def study_run(method, seed, end, setting="", **figures):
    """A Run of the study that began at 0.1."""
    rows = group(method, {seed: end}).rows[seed] | {"start": 0.1, "climb": end - 0.1, "area": end / 2, "pass@16": 0.5}
    label = f"{method} {setting}".strip()
    return analyze.Run(f"{label}-{seed}", label, setting, method == "none", seed, rows | figures)


def test_the_main_table_of_the_study_by_hand():
    """Guards against points for percent, a star on the wrong side, and a sum of stars over other rows."""
    cost, more = {"gradient norm": 0.5}, {"gradient norm": 1.0}
    runs = [study_run("none", s, 0.4 + 0.02 * s, **cost) for s in range(3)]
    runs += [study_run("better", s, 0.5 + 0.02 * s + (0.0, 0.01, 0.02)[s], **more) for s in range(3)]
    runs += [
        study_run("unclear", s, 0.4 + 0.02 * s + (0.01, -0.01, 0.02)[s], **{"pass@16": 0.6 + s / 100}) for s in range(3)
    ]
    runs += [study_run("once", 1, 0.3)]
    groups = analyze.group_runs(runs)
    table = analyze.table_study("easy", groups, {g.label: analyze.record(g) for g in groups})
    half = 100 * 4.303 * 0.01 / math.sqrt(3)  # of the differences 0.10, 0.11, 0.12
    rows = {row[0].strip("`"): row for row in table.rows}
    assert list(rows) == ["none", "better", "unclear", "once"] and rows["none"][4:7] == ["", "", ""]
    assert (
        rows["better"][1] == "3" and rows["better"][2].startswith("53.0 ± ") and rows["none"][2].startswith("42.0 ± ")
    )
    assert rows["better"][4] == f"11.0 ± {half:.1f} *" and rows["better"][5] == f"5.5 ± {half / 2:.1f} *"
    assert rows["unclear"][4].startswith("0.7 ± ") and "*" not in rows["unclear"][4]
    assert (
        rows["unclear"][6] == f"11.0 ± {half:.1f} *" and rows["better"][6] == "0.0 ± 0.0" and rows["once"][4] == "-12.0"
    )
    assert "after 9 steps, from 10.0 at" in table.note
    by_chance = (f"1 of 2 for {figure} (0.1 by chance)" for figure in analyze.DIFFERENCES)
    ends = [0.4, 0.42, 0.44], [0.5, 0.53, 0.56], [0.41, 0.41, 0.46]
    alike = f"by a median of {np.median([statistics.correlation(ends[0], e) for e in ends[1:]]):.2f} for end and "
    assert f" The interval excludes 0 in {', '.join(by_chance)}. Over seeds " in table.note and alike in table.note
    assert rows["none"][8:] == ["1.0"] and rows["better"][8:] == ["2.0"]
    # from 0.1 at the start by a straight line to the end at step 9, `none` to 0.42 and `better` to 0.5, 0.53 and 0.56
    steps = np.mean([9 * 0.32 / (end - 0.1) for end in (0.5, 0.53, 0.56)])
    assert rows["better"][7] == f"{steps:.0f} (3)" and rows["once"][7] == "(0)"


def test_hyper_parameters_stand_beside_their_default():
    """Guards against methods that were not varied, and seeds that only the default has."""
    runs = [study_run("none", s, 0.4 + s / 100) for s in range(4)] + [study_run("other", 0, 0.9)]
    runs += [study_run("m", s, 0.5 + s / 100) for s in range(4)]
    table = analyze.table_settings("Sweeps", runs, [study_run("m x=1", s, 0.2 + s / 50) for s in (0, 1)])
    assert [row[0] for row in table.rows] == ["`m`", "`m x=1`"] and [row[1] for row in table.rows] == ["2", "2"]
    assert (
        table.rows[0][2:4] == [f"50.5 ± {12.706 * 0.5:.1f}", "10.0 ± 0.0"]
        and table.rows[1][3] == f"-19.5 ± {12.706 * 0.5:.1f} *"
    )
    assert table.rows[0][5:7] == ["", ""] and table.rows[1][5:7] == [
        f"-29.5 ± {12.706 * 0.5:.1f} *",  # 20 and 22 against 50 and 51
        f"-14.8 ± {12.706 * 0.25:.1f} *",
    ]
    assert table.rows[1][7] == "10.0" and "1 of 2 for end - none (0.1 by chance)" in table.note
    assert "1 of 1 for area - default" in table.note
    runs += [study_run("v k=3", s, 0.5 + s / 100) for s in (0, 1)]  # the main table has it with a flag
    table = analyze.table_settings("Sweeps", runs, [study_run("v", s, 0.4 + s / 50) for s in (0, 1)])
    assert [row[0] for row in table.rows] == ["`v`", "`v k=3`"]
    assert table.rows[0][5:7] == ["", ""] and table.rows[1][5] == f"9.5 ± {12.706 * 0.5:.1f} *"


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
    records = {"easy": {"none": {}, "gone": {"end - none": analyze.Estimate(0.9, 0.8, 1.0)}}, "hard": {"none": {}}}
    for label, levels in means.items():
        for level, (mean, half) in zip(records, levels):
            records[level][label] = {"end - none": analyze.Estimate(mean, mean - half, mean + half)}
    table = analyze.table_travel("easy", "hard", records)
    every = np.array([[mean for mean, _ in levels] for levels in means.values()]).T
    near = every[:, [0, 3, 4, 5]]  # fades is below 0 on easy, and turns on hard
    order = ["6", analyze.cell(analyze.spearman(*every)), "4", analyze.cell(analyze.spearman(*near)), ""]
    # easy: holds, fades and turns, the last of another sign on hard; hard: holds, turns, late and single
    assert table.rows[0] == ["end - none", *order, "3", "2", "4", "2", "1", "1"]
    assert table.header[6:8] == ["exclude 0, easy", "same sign, hard"]
    nothing = ["0", analyze.cell(analyze.Estimate(none))]
    assert table.rows[1] == ["area - none", *nothing, *nothing, "", *"000000"]


def test_an_interval_without_width_says_nothing():
    """Guards against a star for seeds whose differences happen to be the same, but for the rounding of the rows and of
    the subtraction, for a single seed, and for none where only a puzzle differs."""
    estimates = [(0.1, 0.05, 0.2), (-0.1, -0.2, -0.05), (0.1, -0.1, 0.3), (0.1, 0.1, 0.1), (0.1,)]
    estimates = [analyze.Estimate(*e) for e in estimates]
    assert [analyze.excludes_zero(e) for e in estimates] == [True, True, False, False, False]
    assert [analyze.is_below(e) for e in estimates] == [False, True, False, False, False]
    rows = np.array([float(f"{k / 512:.6g}") for k in (153, 216, 294, 148, 211, 289)]).reshape(2, 3)
    same = analyze.t_estimate(rows[0] - rows[1])
    assert same.low < same.high and same.low > 0 and not analyze.excludes_zero(same)
    areas = np.full(10, 0.2)
    areas[0] += 1 / 512 / 8  # an end counts an eighth
    assert analyze.excludes_zero(analyze.t_estimate(areas))


def test_rloo_beside_grpo_by_hand():
    """Guards against the difference to the other baseline, or to that of other seeds, and a baseline against itself."""
    runs = [study_run("none", s, 0.4) for s in range(3)] + [study_run("m", s, 0.5 + s / 100) for s in range(2)]
    rloo = [study_run("none", s, 0.45 + (s == 1) / 50 + (s == 2), "advantage=rloo") for s in range(3)]
    table = analyze.table_rloo("", runs, rloo)
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header == ["method", "seeds", "end", "end - none", "area - none", "end - rloo", "area - rloo"]
    assert rows["`none`"][2:4] == ["", ""] and rows["`none advantage=rloo`"][4:] == ["", ""]
    # 50 and 51 against 40 and 40, and against 45 and 47; areas are half of the ends
    t = 12.706
    assert rows["`m`"][2:] == [
        f"{mean} ± {t * half:.1f}{star}"
        for mean, half, star in (("10.5", 0.5, " *"), ("5.2", 0.25, " *"), ("4.5", 0.5, ""), ("2.2", 0.25, ""))
    ]
    assert rows["`none`"][4].startswith("-39.0") and "1 of 2 for end - none (0.1 by chance)" in table.note


def test_learning_rates_by_hand():
    """Guards against methods under each other's rates, a best that is no best, and an order compared with itself."""
    ends = {"none": (0.4, 0.2, 0.3), "a": (0.5, 0.1, 0.2), "b": (0.3, 0.6, 0.1), "c": (0.1, 0.05, 0.0)}
    runs = [
        study_run(method, seed, mean + sign * 0.02, setting)
        for method, means in ends.items()
        for mean, setting in zip(means, ("", "lr=0.1", "lr=0.4"))
        for seed, sign in ((0, -1), (1, 1))
    ]
    table = analyze.table_rates("", runs, "end")
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header[2:5] == ["default lr", "lr 0.1", "lr 0.4"] and rows["`b`"][2] == "60.0 (58.0 to 62.0)"
    assert [rows[f"`{m}`"][4] for m in ends] == ["+0.0", "+10.0", "+20.0", "-30.0"]
    first, second = (
        analyze.spearman(np.array([m[0] for m in ends.values()]), np.array([m[k] for m in ends.values()]))
        for k in (1, 2)
    )
    orders = f"{analyze.cell(first)} at lr 0.1, {analyze.cell(second)} at lr 0.4"
    assert table.note.endswith(f" order at the default lr, over all 4 methods: {orders}.")
    assert first.value == pytest.approx(0.2) and second.value == pytest.approx(0.8)
    others = [study_run(m, 2, end) for m, end in {"none": 0.3, "a": 0.6, "b": 0.5, "c": 0.4}.items()]
    note = analyze.table_rates("", runs + others, "end").note
    # at the default a none b c, by the others a b c none: squares of d 4 + 1 + 1, 1 - 6 * 6 / 60
    assert f"all 4 methods: {orders}, 0.40 (-0.92 to 0.99) at default lr by as many other seeds." in note
    others += [study_run(m, 3, end) for m, end in {"none": 0.3, "a": 0.2, "b": 0.5, "c": 0.4}.items()]
    others += [study_run(m, 4, 0.9 * (m == "c")) for m in ends]  # one more than there are at a rate: not counted
    note = analyze.table_rates("", runs + others, "end").note  # now b, then a and c, none
    ranks = np.array([2, 1, 3, 4]), np.array([4, 2.5, 1, 2.5])
    assert f"{analyze.cell(analyze.spearman(*map(np.negative, ranks)))} at default lr by as many other" in note
    less = [
        run for run in runs if (run.label, run.seed) not in {("none lr=0.4", 0), ("none lr=0.4", 1), ("a lr=0.1", 0)}
    ]
    rows = {row[0]: row[1:] for row in analyze.table_rates("", less + [study_run("b", 7, 0.9)], "end").rows}
    assert list(rows) == ["`a`", "`b`", "`c`"] and rows["`a`"] == [
        "1",
        "52.0 (52.0 to 52.0)",
        "12.0 (12.0 to 12.0)",
        "22.0 (22.0 to 22.0)",
        "",
    ]
    assert rows["`b`"][0] == "2" and analyze.table_rates("", less[:1], "end").rows[0][1] == "1"
    assert analyze.table_rates("", less[:1], "area").rows[0][2] == "19.0 (19.0 to 19.0)"


def test_the_order_of_methods_by_hand():
    """Guards against an order without the methods that are above `none`, or with those that are below it, a method
    called below by seeds that happen to agree, and the same said twice."""
    columns = {"one": [1.0, 2, 3, 4, 5], "two": [2.0, 1, 9, 4, 3], "three": [3.0, 2, 0, 1, 0.5]}
    # ranks 2 1 5 4 3, squares of d 1 + 1 + 4 + 0 + 4 = 10, 1 - 6 * 10 / 120; 5 4 1 3 2, 16 + 4 + 4 + 1 + 9 = 34
    every = "Rank correlation with the order at the one, over all 5 methods: 0.50 ("
    says = analyze.same_order(columns, np.zeros(5, bool))
    assert says.startswith(every) and ") at two, -0.70 (" in says and says.count("Rank") == 1
    says = analyze.same_order(columns, np.arange(5) == 2)  # 2 1 4 3 and 4 3 2 1
    assert says.startswith(every) and says.count("Rank") == 2
    assert "over the 4 that all their seeds together do not show to be below `none`: 0.60 (" in says
    assert says.endswith(", -1.00 at three.")
    ends = {"none": (0.4, 0.4, 0.4), "up": (0.5, 0.6, 0.7), "low": (0.1, 0.2, 0.0), "wide": (0.1, 0.6, 0.3)}
    ends["same"] = (0.3, 0.3, 0.3)
    runs = [study_run(method, seed, end) for method, values in ends.items() for seed, end in enumerate(values)]
    runs += [study_run(method, seed, 0.5, "lr=0.1") for method in ends for seed in (0, 1)]
    assert " over the 4 that " in analyze.table_rates("", runs, "end").note


def test_the_same_time_by_hand():
    """Guards against steps that cost less instead of more, an end beyond what was reached, an area by steps, a method
    as fast as `none`, and the cost of another one's flags."""
    curve = {0.0: 0.1, 4.0: 0.5, 8.0: 0.7}
    end, area = analyze.slowed(curve, 1.0).values()
    assert (end, area) == pytest.approx((0.7, (4 * 0.3 + 4 * 0.6) / 8))
    end, area = analyze.slowed(curve, 4 / 3).values()  # reaches step 6, half way from 0.5 to 0.7
    assert (end, area) == pytest.approx((0.6, (4 * 0.3 + 2 * 0.55) / 6))
    end, area = analyze.slowed(curve, 2.0).values()  # reaches a measurement
    assert (end, area) == pytest.approx((0.5, 0.3))
    runs = []
    for label, end, more in (("none", 0.6, 0.1), ("slow", 0.7, 0.2), ("fast", 0.7, 0.2), ("v k=3", 0.7, 0.2)):
        for seed in range(3):
            curve = {0.0: 0.1, 4.0: 0.5, 8.0: end + more * seed}
            area = (4 * 0.3 + 4 * (0.5 + curve[8.0]) / 2) / 8
            runs.append(study_run(label, seed, curve[8.0], curve=curve, area=area))
    table = analyze.table_time("easy", runs, {"none": 1.0, "slow": 2.0, "fast": 1.04, "v": 9.0})
    half = 100 * 4.303 * 0.1 / math.sqrt(3)  # 0.5 of each seed against 0.6, 0.7 and 0.8; area 0.3 against 0.425 and on
    end, area = (f"20.0 ± {half:.1f}", f"-20.0 ± {half:.1f}"), (f"5.0 ± {half / 4:.1f}", f"-15.0 ± {half / 4:.1f} *")
    assert table.rows == [["`slow`", "3", "2.00", end[0], area[0], end[1], area[1]]]
    assert table.note.endswith(" Not timed: `v k=3`.")


def test_costs_are_read_from_the_benchmark(tmp_path):
    """Guards against a share for a multiple, and another line of the benchmark for a method."""
    lines = ["what,value,unit,ratio,against", "credit log,0.3,% of a step of 0.88 s,,", "credit of a,36,% of a step,,"]
    (tmp_path / "benchmark.csv").write_text("\n".join(lines) + "\n")
    assert analyze.read_costs(tmp_path / "benchmark.csv") == pytest.approx({"a": 1.36})
    published = analyze.read_costs(RESULTS / "benchmark.csv")
    assert published.keys() == set(MITIGATIONS) and min(published.values()) > 1


def test_fresh_seeds_by_hand():
    """Guards against the first mean in the second interval instead of the other way round, and a pool without one of
    the two."""
    main = [study_run("none", s, 0.4 + s / 100) for s in (0, 1)] + [study_run("m", s, 0.5 + s / 50) for s in (0, 1)]
    fresh = [study_run("none", s, 0.47) for s in (5, 6)] + [study_run("m", s, 0.8 + s / 100) for s in (5, 6)]
    rows = {(row[0], row[1]): row[2:] for row in analyze.table_fresh("", main, fresh).rows}
    half = 12.706 * 0.5
    assert rows["`none`", "end"][:3] == [f"40.5 ± {half:.1f}", "47.0 ± 0.0", "no"] and rows["`none`", "end"][
        3
    ].startswith("43.8 ± ")
    one = analyze.table_fresh("", main[:1], fresh).rows[0]
    assert one[2:5] == ["40.0", "47.0 ± 0.0", ""]
    assert rows["`m`", "end"][2] == "no" and rows["`m`", "end - none"][1].startswith("38.5 ± ")
    assert ("`none`", "end - none") not in rows and rows["`m`", "pass@16"] == [
        "50.0 ± 0.0",
        "50.0 ± 0.0",
        "yes",
        "50.0 ± 0.0",
    ]


def test_every_choice_of_seeds_is_counted_by_hand():
    """Guards against choices left out or counted twice, and the mean of the wrong seeds. Of 1, 2, 3 and 100, three
    pairs are without 100: their intervals, 12.706 / 2 times their distance to either side, miss the others' mean of 50
    and more; those of the three pairs with it are so wide that all is inside. The second figure never varies."""
    text = analyze.other_choices(np.array([[1.0, 2, 3, 100], [7.0, 7, 7, 7]]), 2, 1)
    assert text.startswith("Whichever 2 of the 4 seeds are taken for the table, 75% of the others' means are inside; ")
    assert text.endswith("of the 6 choices 50% have 1 of 2 inside, as this one has, or fewer.")
    rows = [study_run(m, s, x) for m in ("none", "m") for s, x in ((3, 0.5), (0, 0.1), (1, 0.2))]
    assert [list(g.rows) for g in analyze.group_runs(rows)] == [[0, 1, 3]] * 2


def test_fresh_seeds_fall_inside_as_often_as_the_table_says():
    """Guards against the share that the note of the table names: 4,000 pairs of five seeds of one normal law."""
    x, y = np.random.default_rng(4).normal(size=(2, 4000, 5))
    inside = [e.low <= new.mean() <= e.high for e, new in zip(map(analyze.t_estimate, x), y)]
    share = int(re.search(r"expected of (\d+)%", analyze.table_fresh("", [], []).note)[1])
    assert 100 * np.mean(inside) == pytest.approx(share, abs=2)


def test_truth_scores_are_read_from_their_table(tmp_path):
    """Guards against a column of another table, and an empty cell that becomes 0."""
    lines = [
        "## Credit against A*, all tokens",
        "note",
        "",
        "| method | Spearman | cosine of update |",
        "|---|--:|--:|",
        "| a | 0.90 (0.80 to 0.95) | -0.24 (-0.56 to 0.08) |",
        "",
        "## Credit against A* and the solver, within responses",
        "| method | Spearman | Pearson |",
        "|---|--:|--:|",
        "| a | | 0.50 |",
        "| b | 0.10 | 0.20 |",
        "",
        "## Other",
        "| method | Spearman |",
        "|---|--:|",
        "| a | 0.99 |",
    ]
    noise = ["## Noise and bias of each method's gradient", "", "| method | signal to noise |", "| a | -0.001 |"]
    (tmp_path / "truth-scores.md").write_text("\n".join(lines))
    (tmp_path / "gradients.md").write_text("\n".join(["| method | Spearman |", "| a | 0.77 |", *noise]))
    scores = analyze.read_scores(tmp_path)
    cosine, within, signal = analyze.MEASURED
    assert scores["a"][signal].value == -0.001 and signal not in scores["b"]
    assert scores["a"][cosine] == (-0.24, -0.56, 0.08) and math.isnan(scores["a"][within].value)
    assert scores["b"][within].value == 0.1 and cosine not in scores["b"]
    base = group("none", {0: 0.5, 1: 0.5})
    groups = [group(name, {0: 0.5}, base) for name in ("b k=3", "a", "unknown")]
    groups += [group("b", {0: 0.5}), group("b", {7: 0.5}, base)]  # without a baseline, or one on other seeds
    assert analyze.with_scores(groups, scores, within) == [(0, scores["b"][within])]
    assert [i for i, _ in analyze.with_scores(groups, scores, cosine)] == [1]


def test_truth_and_learning_by_hand():
    """Guards against a correlation with the wrong figure, methods that fell among those that climbed, and ends compared
    over unequal seeds: seed 1 was lucky for `none`, and only m0 has it."""
    ends, truths = (0.5, 0.4, 0.3, 0.02, 0.45), (0.3, 0.4, 0.5, 0.9, 0.1)
    runs = [study_run(f"m{i}", 0, end, area=1 - end) for i, end in enumerate(ends)]
    runs += [
        study_run("none", 0, 0.2, area=0.1),
        study_run("none", 1, 0.9, area=0.1),
        study_run("m0", 1, 1.2, area=0.5),
    ]
    groups = analyze.group_runs(runs)
    cosine, *_ = analyze.MEASURED
    scores = {f"m{i}": {cosine: analyze.Estimate(t)} for i, t in enumerate(truths)}
    rows = analyze.table_truth("easy", groups, scores).rows
    every, climbed = (
        analyze.spearman(np.array(truths[:n] + truths[4:]), np.array(ends[:n] + ends[4:])) for n in (4, 3)
    )
    assert rows[0][1:3] == ["all, 5", analyze.cell(every)] and rows[1][1:3] == [
        "those that climbed, 4",
        analyze.cell(climbed),
    ]
    assert rows[0][3].startswith(f"{-every.value:.2f} ")


def test_scores_that_are_bad_are_left_out_by_the_score():
    """Guards against a cut by the point of `none` instead of its interval, and a row that repeats the one before."""
    ends = {"none": 0.3, "a": 0.4, "b": 0.5, "c": 0.2, "d": 0.15, "e": 0.05}  # all but e climbed
    truths = {"none": 0.5, "a": 0.45, "b": 0.6, "c": 0.42, "d": 0.1, "e": 0.9}
    groups = analyze.group_runs([study_run(m, 0, end) for m, end in ends.items()])
    cosine, within, signal = analyze.MEASURED
    scores = {
        m: {cosine: analyze.Estimate(t, t - 0.1, t + 0.1), within: analyze.Estimate(t)} for m, t in truths.items()
    }
    table = analyze.table_truth("easy", groups, scores)
    assert [row[1] for row in table.rows] == 2 * [
        "all, 6",
        "those that climbed, 5",
        "of these, cosine not below none, 4",
    ]
    near = analyze.spearman(*np.array([(truths[m], ends[m]) for m in ("none", "a", "b", "c")]).T)
    assert table.rows[2][2] == analyze.cell(near) and near.value == pytest.approx(0.8)
    least, one, other = re.fullmatch(r"(\S+) \((\w), (\w)\)", table.rows[0][4]).groups()  # the two that are named
    left = analyze.spearman(*np.array([(truths[m], ends[m]) for m in ends if m not in (one, other)]).T)
    assert least == f"{left.value:.2f}" and float(least) < 0
    twice = {m: s | {signal: s[cosine]} for m, s in scores.items()}
    same = "Over all 6 methods cosine with A* and signal to noise correlate by 1.00 with each other."
    assert analyze.between_scores(groups, twice) == same


def test_what_is_known_before_stands_beside_what_was_learned():
    """Guards against scores under each other's heading, and those of a method for one whose flags only name it."""
    runs = [study_run(m, s, 0.2 + s * x) for m, x in (("none", 0.1), ("m k=3", 0.2), ("k", 0.4)) for s in (0, 1, 2)]
    groups = analyze.group_runs(runs)
    scores = {"m": {score: analyze.Estimate(k, k - 0.5, k + 0.5) for k, score in enumerate(analyze.MEASURED)}}
    table = analyze.table_scores("easy", groups, {g.label: analyze.record(g) for g in groups}, scores)
    half = 100 * 4.303 * 0.1 / math.sqrt(3)  # of the differences 0, 0.1 and 0.2
    assert table.header[1:4] == [score.name for score in analyze.MEASURED]
    assert {row[0]: row[1:5] for row in table.rows} == {
        "`none`": ["", "", "", ""],
        "`m k=3`": ["0.00 (-0.50 to 0.50)", "1.00 (0.50 to 1.50)", "2.00 (1.50 to 2.50)", f"10.0 ± {half:.1f}"],
        "`k`": ["", "", "", f"30.0 ± {3 * half:.1f}"],
    }


def test_credit_by_token_type_by_hand():
    """Guards against shares for ratios, and one measure under the other's heading."""
    runs = [study_run("none", s, 0.5, **{figure: k + s for k, figure in enumerate(analyze.TYPES)}) for s in (0, 1)]
    groups = analyze.group_runs(runs)
    table = analyze.table_types("easy", {g.label: analyze.record(g) for g in groups})
    assert table.header[1:] == list(analyze.TYPES) and "gradient, filler / reasoning" in table.header
    assert table.rows == [["`none`", *(f"{k + 0.5:.3f} ± {12.706 * 0.5:.3f}" for k in range(4))]]


def test_the_picture_of_truth_shows_what_the_table_says(tmp_path, monkeypatch):
    """Guards against numbers beside the wrong names, another figure than the table's, and methods outside the axes."""
    kept = []
    monkeypatch.setattr(analyze.plt, "close", kept.append)
    runs = [
        study_run(m, s, end + s / 100) for m, end in (("none", 0.5), ("good", 0.6), ("fallen", 0.1)) for s in (0, 1)
    ]
    groups = analyze.group_runs(runs)
    scores = {
        m: {score: analyze.Estimate(x, x - 0.1, x + 0.1) for score in analyze.MEASURED}
        for m, x in (("none", 0.8), ("good", 0.9), ("fallen", -0.2))
    }
    analyze.draw_truth("easy", groups, scores, tmp_path / "a.png")
    axis, *_, last = kept[0].axes
    assert {t.get_text(): t.xy for t in axis.texts} == {
        "0": (0.8, 0.0),
        "1": (0.9, pytest.approx(5)),
        "2": (-0.2, pytest.approx(-20)),
    }
    assert axis.get_ylim()[0] < -20
    names = [t.get_text() for t in last.texts if "none" in t.get_text()]
    assert [line.split() for line in names[0].splitlines()] == [["0", "none"], ["1", "good"], ["2", "fallen"]]


def test_a_fallen_method_is_an_arrow_in_the_forest(tmp_path, monkeypatch):
    """Guards against an axis that a collapse stretches until nothing else can be read, and a collapse not shown."""
    kept = []
    monkeypatch.setattr(analyze.plt, "close", kept.append)
    runs = [
        study_run(m, s, end + s / 100) for m, end in (("none", 0.5), ("good", 0.53), ("fallen", 0.1)) for s in (0, 1)
    ]
    groups = analyze.group_runs(runs)
    analyze.draw_forest(groups, {g.label: analyze.record(g) for g in groups}, tmp_path / "a.png")
    axis = kept[0].axes[0]
    assert analyze.LOWEST - 4 < axis.get_xlim()[0] < analyze.LOWEST and [t.get_text() for t in axis.texts] == [
        "-40.0 ± 0.0"
    ]
    assert max(max(line.get_xdata()) for line in axis.lines) == pytest.approx(3)


def test_an_interval_that_reaches_far_down_is_whole(tmp_path, monkeypatch):
    """Guards against an interval that ends at the edge of the picture: a mean of -18 points, down to -31."""
    kept = []
    monkeypatch.setattr(analyze.plt, "close", kept.append)
    runs = [study_run("none", s, 0.5, area=0.5) for s in (0, 1)]
    runs += [study_run("wide", s, 0.31 + s / 50, area=0.31 + s / 50) for s in (0, 1)]
    groups = analyze.group_runs(runs)
    analyze.draw_forest(groups, {g.label: analyze.record(g) for g in groups}, tmp_path / "a.png")
    scores = {m: {score: analyze.Estimate(0.5, 0.4, 0.6) for score in analyze.MEASURED} for m in ("none", "wide")}
    analyze.draw_truth("easy", groups, scores, tmp_path / "b.png")
    low = -18 - 12.706
    assert kept[0].axes[0].get_xlim()[0] < low < kept[0].axes[0].get_xlim()[0] + 3
    assert kept[1].axes[0].get_ylim()[0] < low


RESULTS = Path(analyze.__file__).parent / "results"


def test_the_published_study_is_what_analyze_makes_of_its_rows(tmp_path, monkeypatch, capsys):
    """Guards against a figure that no row of results/runs.csv gives: all tables again, from the rows alone."""
    for name in ("runs.csv", *analyze.SCORES, analyze.COSTS):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(tmp_path / "runs.csv")])
    analyze.main()
    assert (tmp_path / "study.md").read_text(encoding="utf-8") == (RESULTS / "study.md").read_text(encoding="utf-8")
    assert {f.name for f in tmp_path.glob("*.png")} <= {f.name for f in RESULTS.iterdir()}


def test_a_study_that_was_hardly_begun_has_tables(tmp_path, monkeypatch, capsys):
    """Guards against a crash on what an interrupted study, or a method of somebody's own, leaves: one seed, a method
    without truth score, one without `none` beside it, a learning rate without the others, levels in any order."""
    with (RESULTS / "runs.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["method"] == "none")
    made = [
        ("hard", "main", "none", "", 0),
        ("easy", "main", "none", "", 0),
        ("easy", "main", "mine", "", 0),
        ("easy", "main", "ppo", "kl=0.1", 0),
        ("easy", "rates", "ppo", "lr=0.4", 1),
        ("easy", "sweeps", "mine x=1", "", 0),
        ("easy", "rloo", "none", "advantage=rloo", 1),
        ("easy", "fresh", "none", "", 5),
        ("easy", "fresh", "ppo", "", 5),
    ]
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows(
            row | dict(zip(("level", "part", "method", "setting", "seed"), one)) | {"run": str(one)} for one in made
        )
        writer.writerow(row | {"version": "0", "method": "old"})
    for name in (*analyze.SCORES, analyze.COSTS):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(tmp_path / "runs.csv")])
    analyze.main()
    text = capsys.readouterr().out
    titles = [
        *(
            f"{title}, {level}"
            for level in ("hard", "easy")
            for title in (
                "Methods",
                "What is known before",
                "Scores and learning",
                "Credit by token type",
                "In as much time",
            )
        ),
        "Against RLOO, easy",
        "Hyper-parameters, easy",
        "Learning rates by end, easy",
        "Learning rates by area, easy",
        "Fresh seeds, easy",
        "Do conclusions travel, hard and easy",
    ]
    assert re.findall(r"^## (.*)", text, re.M) == titles and "old" not in text and text.count("`mine`") == 6
    assert (tmp_path / "easy-truth.png").exists() and (tmp_path / "hard-forest.png").exists()


@pytest.mark.parametrize(
    "content, named",
    [
        (None, "there is no"),
        ("a,b\n1,2\n", "no column"),
        ("", "no run of none"),
        (f"{','.join(analyze.ABOUT)},curve\n", "no run of none"),
        (f"{','.join(analyze.ABOUT)},curve\n<<<<<<< HEAD\n", "merge"),
    ],
    ids=["no file", "another table", "empty", "no rows", "conflict"],
)
def test_a_broken_table_of_runs_is_refused_in_one_sentence(content, named, tmp_path, monkeypatch):
    """Guards against a traceback where a file is not the study's."""
    if content is not None:
        (tmp_path / "runs.csv").write_text(content)
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(tmp_path / "runs.csv")])
    with pytest.raises(SystemExit, match=f"^error: .*{named}[^\n]*$"):
        analyze.main()


def test_a_study_without_truth_scores_is_refused_in_one_sentence(tmp_path, monkeypatch):
    """Guards against a traceback where runs.csv was copied alone."""
    (tmp_path / "runs.csv").write_bytes((RESULTS / "runs.csv").read_bytes())
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(tmp_path / "runs.csv")])
    with pytest.raises(SystemExit, match="^error: there is no .*truth-scores.md[^\n]*$"):
        analyze.main()


# ------------------------------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize(
    "breaking, named",
    [
        (lambda run: (run / "metrics.csv").unlink(), "metrics.csv"),
        (lambda run: [f.unlink() for f in (run / "credit").iterdir()], "credit log"),
        (lambda run: (run / "credit" / "step-000002.npz").write_bytes(b"PK no"), "credit"),
        (lambda run: (run / "metrics.csv").write_text("step\n"), "metrics.csv"),
    ],
    ids=["no metrics", "no log", "broken log", "no rows"],
)
def test_broken_runs_are_refused_in_one_sentence(run, breaking, named, monkeypatch):
    """Guards against a traceback where a folder is not a run."""
    breaking(run)
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(run)])
    with pytest.raises(SystemExit) as stop:
        analyze.main()
    assert (
        str(stop.value.code).startswith("error: ")
        and named in str(stop.value.code)
        and "\n" not in str(stop.value.code)
    )
