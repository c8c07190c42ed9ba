"""Every table of a run, and of runs compared, against numbers worked out by hand; pictures by what they draw.

Run it:  python -m pytest tests/test_analyze.py
"""
import csv
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import analyze
import grpo
from conftest import make_batch
from plumbing import runs

BUNDLED = Path(analyze.__file__).parent / "models" / "countdown-tiny"
METRICS = ("step", "success", "format", "length", "entropy", "grad_norm", "zero_variance_groups", "seconds",
           "heldout_success", "heldout_stderr")


def write_metrics(folder, heldout):
    """metrics.csv with the given steps and held-out success: step 0 has nothing else, and every other figure is 0.5."""
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, METRICS)
        writer.writeheader()
        for step, success in heldout:
            row = dict.fromkeys(METRICS, "" if step == 0 else 0.5)
            writer.writerow(row | {"step": step, "heldout_success": success, "heldout_stderr": success and success / 5})


def config(mitigation, seed=0, method=None, **settings):
    """A config.json."""
    shared = {"mitigation": mitigation, "seed": seed, "lr": 0.1, "normalize": "response"}
    return {"settings": shared | settings, "method": method or {}}


@pytest.fixture
def run(tmp_path):
    """A run of two steps with two responses each: a reinforced one of 2 tokens, a discouraged one of 4."""
    folder = tmp_path / "none-seed0"
    (folder / "credit").mkdir(parents=True)
    (folder / "checkpoint").symlink_to(BUNDLED)
    for step in (1, 2):
        batch = make_batch(
            [2, 4], [1.0, -0.5], reward=torch.tensor([1.1, 0.1]),
            tokens=torch.tensor([[300, 1, 0, 0], [300, 301, 302, 1]]),
            logprob=torch.tensor([[-1.0, -0.5, 0, 0], [-2, -0.25, -4, 0]]),
            logit_grad=torch.tensor([[0.5, 0.25, 0, 0], [1.0, 0.125, 1.25, 0]]),
            role=torch.tensor([[0, 2, 0, 0], [0, 1, 1, 2]], dtype=torch.int8))
        credit = batch.advantage[:, None] * batch.mask * step
        grpo.write_credit_log(folder / "credit" / f"step-{step:06d}.npz", step, batch, credit)
    write_metrics(folder, [[0, 0.25], [1, ""], [2, 0.75]])
    (folder / "config.json").write_text(json.dumps(config("none")))
    return folder


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, kept open."""
    kept = []
    monkeypatch.setattr(analyze.plt, "close", kept.append)
    return kept


def call(monkeypatch, *arguments):
    """Run the command."""
    monkeypatch.setattr(sys, "argv", ["analyze.py", *map(str, arguments)])
    analyze.main()


def row_of(table, first):
    """The row that begins with a name, by column."""
    return next(dict(zip(table.header, row)) for row in table.rows if row[0] == first)


# ------------------------------------------------------------------------------------------------ tables of one run


def test_measures_by_hand(run):
    """Guards against a measure without the method's credit, with the sign of the other, or of another response."""
    log = analyze.read_log(run)
    contribution, gradient = [-1, -0.5, 1, 0.125, 2, 0], [0.5, 0.25, -0.5, -0.0625, -0.625, 0]
    assert log["contribution"].tolist() == contribution + [2 * x for x in contribution]
    assert log["gradient"].tolist() == gradient + [2 * x for x in gradient]
    assert log["id"].tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3]
    assert log["relative"][:6].tolist() == [0, 0.5, 0, 0.25, 0.5, 0.75]


def test_the_first_table_by_hand(run):
    """Guards against start for end, success for its error, step 0 among the trained, and an unmeasured 0."""
    log, metrics = analyze.read_log(run), runs.read_metrics(run)
    assert math.isnan(metrics["success"][0])
    assert [x.tolist() for x in runs.heldout(metrics)] == [[0, 2], [0.25, 0.75], [0.05, 0.15]]
    rows = dict(analyze.table_basics(log, metrics).rows)
    assert rows["steps, responses, tokens"] == "2, 4, 12"
    assert rows["tokens whose credit is 0"] == "0.0%"
    assert rows["held-out success, start"] == "0.250 ± 0.050"
    assert rows["held-out success, step 2"] == "0.750 ± 0.150"
    counting = {name: np.arange(13.0) for name in METRICS}
    log["credit"][:3] = 0
    rows = dict(analyze.table_basics(log, counting).rows)
    assert rows["success, first and last ten steps"] == "5.500, 7.500"
    assert rows["tokens whose credit is 0"] == "25.0%"


def test_statistics_by_hand(run):
    """Guards against the spread of one measure in the other's column, and the sample's deviation."""
    table = analyze.table_statistics(analyze.read_log(run))
    contribution = [-1, -0.5, 1, 0.125, 2, 0, -2, -1, 2, 0.25, 4, 0]
    expected = [statistics.mean(contribution), statistics.pstdev(contribution),
                statistics.mean(map(abs, contribution)), -2, 4]
    assert [row[1] for row in table.rows] == [f"{x:.3f}" for x in expected]
    assert row_of(table, "minimum")["gradient"] == "-1.250"
    assert row_of(table, "maximum")["gradient"] == "1.000"


def test_table_of_t_by_construction():
    """Guards against a sign that hides a large t, wrong limits, and 30 responses counted as too few."""
    z = np.tile([1.0, -1], 15)
    z /= z.std(ddof=1)
    values = np.concatenate([z + t / math.sqrt(30) for t in (-3.5, 2, 0.5)])
    log = {"position": np.repeat([0, 1, 2], 30), "contribution": values, "gradient": 2 * values}
    for column in (1, 2):
        assert [row[column] for row in analyze.table_t(log).rows] == ["33.3%", "33.3%", "2.00", "3"]


def test_positions_by_hand(run):
    """Guards against absolute positions. Step 2 is step 1 with twice the credit: means are 1.5 times those of it."""
    table = analyze.table_positions(analyze.read_log(run))
    assert [row[1] for row in table.rows] == ["4", "0", "2", "0", "0", "4", "0", "2", "0", "0"]
    first, middle = row_of(table, "0-10%"), row_of(table, "50-60%")
    assert first["contribution"].startswith("1.500") and first["gradient"].startswith("0.750")
    assert middle["contribution"].startswith("1.875")  # 1.5 times 1.25
    assert middle["gradient"].startswith("0.656")  # 1.5 times 0.4375
    assert (middle["log p"], middle["entropy"]) == ("-2.250", "1.000")  # of -0.5 and -4


def test_signs_by_hand(run):
    """Guards against responses counted as tokens, and signed means for sizes."""
    table = analyze.table_signs(analyze.read_log(run))
    positive, negative = row_of(table, "positive"), row_of(table, "negative")
    assert list(positive.values())[1:5] == ["2", "4", "-1.125", "0.562"]  # 1.5 times -0.75 and 0.375
    assert list(negative.values())[1:5] == ["2", "8", "1.172", "-0.445"]  # 1.5 times 3.125 / 4 and -1.1875 / 4
    assert positive["size of contribution"].startswith("1.125")
    assert list(row_of(table, "zero").values())[1:] == ["0", "0", "", "", "", ""]


def test_token_types_by_hand(run):
    """Guards against unclustered errors and columns under another's name. Reasoning: clusters (.125, 2), (.25, 4)."""
    table = analyze.table_roles(analyze.read_log(run))
    row = row_of(table, "reasoning")
    assert row["size of contribution"] == "1.594 ± 0.531"  # sqrt(2 * 2 * 1.0625**2) / 4
    assert row["size of gradient"].startswith("0.516")
    assert [row[n] for n in ("contribution", "gradient", "log p", "entropy")] == ["1.594", "-0.516", "-2.125", "1.000"]
    assert list(row_of(table, "structure").values())[1:3] == ["4", "33.3%"]
    assert "0.94 by contribution, 1.45 by gradient" in table.note  # 1 / 1.0625, .5 / .34375


def test_token_types_by_position_by_hand(run):
    """Guards against types or measures in each other's columns."""
    table = analyze.table_roles_by_position(analyze.read_log(run))
    start, middle = row_of(table, "0-20%"), row_of(table, "40-60%")
    assert start["contribution, filler"].startswith("1.500") and start["gradient, reasoning"] == ""
    assert middle["contribution, reasoning"].startswith("3.000") and middle["gradient, reasoning"].startswith("0.938")
    assert middle["contribution, structure"].startswith("0.750")


def test_top_tokens_are_counted_within_their_type(codec):
    """Guards against rare tokens first, one token's types mixed, and a name that breaks the table."""
    ones, bar = np.ones(15), codec.tokenizer.token_to_id("|") or 300
    tokens = np.array([300, 301, 301, 301, bar, *range(310, 320)])
    log = dict(role=np.array([0, 0, 0, 1, 2] + [1] * 10), token=tokens, contribution=ones, gradient=ones, logprob=ones,
               entropy=2 * ones, id=np.arange(15))
    rows = analyze.table_tokens(log, codec).rows
    assert [(row[0], row[2]) for row in rows[:3]] == [("filler", "2"), ("filler", "1"), ("reasoning", "1")]
    assert rows[0][1] == f"`{codec.bytes[301].decode()!r}`"
    assert rows[0][-2:] == ["1.000", "2.000"]
    assert [row[0] for row in rows].count("reasoning") == 8
    end = np.array([codec.tokenizer.token_to_id("<|im_end|>")] * 15)
    assert "im_end" in analyze.table_tokens(log | {"token": end}, codec).rows[0][1]


def test_credit_over_training_by_hand(run):
    """Guards against a run that does not begin at step 0, and signs that cancel."""
    assert analyze.training_time({"step": np.array([5, 6, 7, 8])}).tolist() == [0, 0.25, 0.5, 0.75]
    first, second = analyze.table_training(analyze.read_log(run)).rows
    assert first[:2] == ["1-1", "0.667"] and second[:2] == ["2-2", "1.333"]  # (2 * 1 + 4 * 0.5) / 6, and twice that
    assert second[2].startswith("2.000")  # filler: contributions of 2 and 2


# ---------------------------------------------------------------------------------------------- pictures of one run


def test_chosen_responses_answer_the_same_question():
    """Guards against pairs of different puzzles or in the other order, and long responses."""
    log = dict(step=np.repeat([1, 2], 6), id=np.array([0, 1, 2, 3, 3, 4] * 2) + np.repeat([0, 5], 6),
               group=np.array([0, 0, 1, 1, 1, 1] * 2), advantage=np.array([1, 0, -1, 2, 2, 1] * 2))
    assert [rows.tolist() for rows in analyze.choose_responses(log)] == [[5], [2], [11], [8]]


def test_curves_draw_the_named_columns(tmp_path, figures):
    """Guards against a curve of another column, and bars of one standard error."""
    metrics = {name: np.arange(3.0) + 10 * i for i, name in enumerate(METRICS)}
    analyze.draw_learning(metrics, "x", tmp_path / "a.png")
    left, right = figures[0].axes
    assert left.lines[0].get_ydata().tolist() == metrics["success"].tolist()
    assert right.lines[0].get_ydata().tolist() == metrics["length"].tolist()
    ends = left.containers[0][2][0].get_segments()[0][:, 1]
    assert ends == pytest.approx([80 - 1.96 * 90, 80 + 1.96 * 90])


def test_the_picture_of_credit_shows_the_tables(tmp_path, figures):
    """Guards against a type, measure or part in another's place, and points of a few tokens."""
    n = 100  # tokens of each type in each of five parts; of structure one fewer
    role, part = np.repeat([0, 1, 2], 5 * n), np.tile(np.repeat(np.arange(5), n), 3)
    kept = ~((role == 2) & (np.arange(15 * n) % n == 0))
    log = dict(role=role, relative=part / 5 + 0.1, step=np.arange(15 * n) % n, id=np.arange(15 * n) % 7,
               contribution=-1.0 * (part + 1), gradient=10.0 * (role + 1))
    analyze.draw_credit({name: x[kept] for name, x in log.items()}, tmp_path / "a.png")
    (contribution, gradient), later = figures[0].axes[:2], figures[0].axes[2:]
    filler, reasoning, structure = (line.lines[0].get_ydata() for line in contribution.containers)
    assert filler == pytest.approx([1, 2, 3, 4, 5]) and np.isnan(structure).all()
    assert gradient.containers[1].lines[0].get_ydata() == pytest.approx([20] * 5)
    assert later[0].containers[0].lines[0].get_ydata() == pytest.approx([3] * 5)
    assert [text.get_text() for text in contribution.get_legend().get_texts()] == ["filler", "reasoning", "structure"]


def test_the_picture_of_tokens_shows_each_token_twice(run, tmp_path, figures, codec):
    """Guards against a token left out, a shade that does not follow the credit, and the same for both measures."""
    analyze.draw_tokens(analyze.read_log(run), codec, tmp_path / "a.png")
    axis = figures[0].axes[0]
    shown = [text.get_text() for text in axis.texts]
    assert sum("Credit:" in text for text in shown) == 4 and "Step 2, reward 1.10, advantage +1.00. Credit:" in shown
    assert len(axis.patches) == 24 and len(shown) == 24 + 8
    shades = [patch.get_facecolor() for patch in axis.patches]
    assert shades[0] == analyze.plt.cm.PuOr_r(0.5 + 0.45 * 1 / 2)  # of a largest credit of 2
    assert shades[2] == analyze.plt.cm.PuOr_r(0.5 + 0.45 * 0.5 / 2)  # its gradient
    assert shades[12] == analyze.plt.cm.PuOr_r(0.95) and shades[4] == analyze.plt.cm.PuOr_r(0.5 - 0.45 * 0.5 / 2)


def test_a_run_is_analyzed(run, capsys, monkeypatch):
    """Guards against a table that is computed and not shown, and pictures that are not written."""
    call(monkeypatch, run)
    text = capsys.readouterr().out
    titles = ["The run", "Contribution statistics", "t-statistics", "Position in the response", "Sign of the advantage",
              "Token types", "Token types by position", "Top tokens of each type", "Credit over training"]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == titles
    assert (run / "analysis" / "tables.md").read_text() in text
    for picture in ("learning.png", "credit.png", "tokens.png"):
        assert (run / "analysis" / picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_any_credit_is_analyzed(run, monkeypatch, capsys):
    """Guards against a division by zero where every group had equal rewards."""
    for file in (run / "credit").iterdir():
        log = dict(np.load(file))
        np.savez(file, **log | {"credit": 0 * log["credit"]})
    call(monkeypatch, run)
    assert "Filler / reasoning: nan" in capsys.readouterr().out
    call(monkeypatch, run, run)  # the same folder once more is not another run
    assert "# Comparison" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- comparison


def test_labels_name_what_differs():
    """Guards against settings averaged as seeds, and labels full of what only one method has."""
    a, b = config("a", 1, {"x": 1}), config("b", 2, {"x": 2}, normalize="none", steps=7, out="elsewhere")
    assert runs.labels([a, b, config("a", 3, {"x": 1})]) == ["a", "b", "a"]
    assert runs.labels([a, config("a", 1, {"x": 3}), b]) == ["a x=1", "a x=3", "b"]
    names = runs.labels([a, config("a", 1, {"x": 1}, normalize="batch")])
    assert names == ["a normalize=response", "a normalize=batch"]
    assert runs.labels([a, config("b", 1, {}, lr=0.2)]) == ["a lr=0.1", "b lr=0.2"]
    assert runs.labels([config("a", new=1), config("a", new=2), config("a")]) == ["a new=1", "a new=2", "a"]


def test_spread_within_by_loops():
    """Guards against shares over the whole run, signs that cancel, and responses without credit that count."""
    responses = [[1.0, 1, 1], [0.5, -0.5], [0.0, 0], [3.0, 0, 0, 1]]
    credit = np.concatenate(responses)
    spread = analyze.spread_within(credit, np.repeat(np.arange(4), [len(r) for r in responses]))
    effective = [sum(map(abs, r)) ** 2 / (len(r) * sum(x * x for x in r)) for r in responses if any(r)]
    within = sum((x - statistics.mean(r)) ** 2 for r in responses for x in r)
    assert spread["effective sample size"] == pytest.approx(statistics.mean(effective))
    assert spread["varies within"] == pytest.approx(within / sum(x * x for x in credit))
    assert math.isnan(analyze.spread_within(np.zeros(2), np.array([0, 1]))["effective sample size"])


def test_steps_to_a_goal_by_hand():
    """Guards against the step after the goal, and a goal that was never met."""
    curve = {0.0: 0.2, 25.0: 0.4, 50.0: 0.3, 75.0: 0.6}
    steps = [analyze.steps_to(goal, curve) for goal in (0.1, 0.2, 0.3, 0.4, 0.45)]
    assert steps == pytest.approx([0, 0, 12.5, 25, 62.5])
    assert math.isnan(analyze.steps_to(0.7, curve))


def group(label, ends, baseline=None):
    """A Group whose runs ended, by seed, with these successes."""
    zero = dict.fromkeys((*analyze.LEARNING, *analyze.CREDIT), 0.0)
    rows = {seed: zero | {"end": end, "area": end / 2, "steps": 9.0, "curve": {0.0: 0.0, 9.0: end}}
            for seed, end in ends.items()}
    return runs.Group(label, rows, baseline)


def test_differences_are_paired_by_seed():
    """Guards against runs paired by order, and seeds that only one of them has."""
    base = group("none", {3: 0.5, 1: 0.1, 2: 0.9})
    other = group("m", {1: 0.2, 4: 1.0, 3: 0.4}, base)
    assert other.differences("end") == pytest.approx([0.1, -0.1])
    row = analyze.record(other)
    assert row["end - none"] == pytest.approx((0, -12.706 * 0.1, 12.706 * 0.1))
    assert row["area - none"].high == pytest.approx(12.706 * 0.05)
    assert row["seeds that get there"].value == 1 and row["steps to none's end"].value == pytest.approx(4.5)
    assert "end - none" not in analyze.record(base) and "seeds that get there" not in analyze.record(base)
    base.baseline = base
    assert "end - none" not in analyze.record(base) and analyze.record(base)["seeds that get there"].value == 2


def test_no_effect_gives_false_alarms_at_the_stated_rate():
    """Guards against intervals that exclude zero too often: 3,000 pairs of methods that do not differ, five seeds."""
    rng, alarms = np.random.default_rng(5), []
    for _ in range(3000):
        luck, a, b = rng.normal(size=(3, 5))  # the effect of a seed on both methods, and on each
        other = group("m", dict(enumerate(luck + b)), group("none", dict(enumerate(luck + a))))
        e = analyze.t_estimate(other.differences("end"))
        alarms.append(not e.low <= 0 <= e.high)
    assert np.mean(alarms) == pytest.approx(0.05, abs=0.016)  # four standard errors


def copy_of(run, name, end, steps=2, **changes):
    """Another run beside `run`, with its credit log, that ends with this held-out success."""
    folder = run.parent / name
    folder.mkdir()
    (folder / "credit").symlink_to(run / "credit")
    write_metrics(folder, [[0, 0.25], [1, ""], [steps, end]])
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    return folder


def compare(monkeypatch, *folders):
    """Run the command on some folders; the rows of table.csv by method, their numbers as such."""
    call(monkeypatch, *folders)
    with (folders[-1].parent / "comparison" / "table.csv").open() as file:
        return {row.pop("method"): {k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)}


def test_methods_are_compared_over_seeds(run, capsys, monkeypatch):
    """Guards against seeds counted as methods, methods averaged as seeds, and our own output taken for a run."""
    (run / "final.json").write_text('{"pass@16": 0.9}')
    others = [copy_of(run, "none-seed1", 0.85, mitigation="none", seed=1)]
    others += [copy_of(run, f"m-seed{seed}", end, mitigation="m", seed=seed) for seed, end in ((0, 0.5), (1, 0.7))]
    compare(monkeypatch, run, *others)
    capsys.readouterr()
    rows = compare(monkeypatch, run.parent / "comparison", run, *others)
    text = capsys.readouterr().out
    none, m = rows["none"], rows["m"]
    assert list(rows) == ["none", "m"]
    assert "nothing can be concluded" not in text and "different numbers of steps" not in text
    assert none["end"] == pytest.approx(0.8)
    assert none["end high"] - none["end"] == pytest.approx(12.706 * 0.05, rel=1e-4)
    assert (none["start"], none["climb"], none["least climb"]) == pytest.approx((0.25, 0.55, 0.5))
    assert (m["seeds"], m["steps"]) == (2, 2) and "pass@16" not in m
    assert m["area"] == pytest.approx(0.425)  # of straight lines from 0.25 to 0.5 and 0.7, over the whole time
    assert m["end - none"] == pytest.approx(-0.2) and "end - none" not in none
    assert m["contribution, filler / reasoning"] == pytest.approx(1 / 1.0625, rel=1e-5)
    assert m["contribution, filler"] == pytest.approx(2 / (2 + 2.125 + 0.5), rel=1e-5)
    assert m["gradient, reasoning"] == pytest.approx(0.6875 / (1 + 0.6875 + 0.25), rel=1e-5)
    assert (m["gradient norm"], m["its spread"], m["seconds a step"]) == (0.5, 0, 0.5)
    assert m["effective sample size"] == pytest.approx(1) and m["varies within"] == pytest.approx(0)
    assert "0.800 ± 0.635" in text and "-0.200 ± 0.635" in text
    assert "|     2 |     2 |" in text  # counts without decimals
    assert (run.parent / "comparison" / "table.md").read_text() in text
    for name in ("learning.png", "forest.png"):
        assert (run.parent / "comparison" / name).read_bytes().startswith(b"\x89PNG")


def test_one_seed_concludes_nothing(run, capsys, monkeypatch):
    """Guards against a verdict from a single run."""
    compare(monkeypatch, run, copy_of(run, "m", 0.9, mitigation="m"))
    assert capsys.readouterr().out.count("With one seed, nothing can be concluded") == 3


def test_runs_of_unequal_steps_are_compared_with_a_warning(run, capsys, monkeypatch):
    """Guards against a short run that looks worse than a longer one, without a word."""
    others = [copy_of(run, name, 0.9, steps, mitigation=name) for name, steps in (("a", 5), ("b", 2))]
    compare(monkeypatch, run, *others)
    text = capsys.readouterr().out
    said = ("The runs have different numbers of steps, so their results are not comparable "
            "(2 steps: none-seed0, b; 5 steps: a).")
    assert text.splitlines()[-1] == f"warning: {said}"
    assert (run.parent / "comparison" / "table.md").read_text().count(f"**{said}**") == 3


def test_a_baseline_has_the_same_settings(run, monkeypatch):
    """Guards against a method measured against `none` at another learning rate, and --normalize taken for a setting."""
    rows = compare(monkeypatch, run, copy_of(run, "a", 0.9, mitigation="m", lr=0.2),
                   copy_of(run, "b", 0.8, mitigation="k", normalize="none"))
    assert "end - none" in rows["k lr=0.1"]
    assert "end - none" not in rows["m lr=0.2"]


def test_the_same_run_twice_is_refused(run, monkeypatch):
    """Guards against one seed counted as two."""
    with pytest.raises(SystemExit, match="seed 0 of another run"):
        compare(monkeypatch, run, copy_of(run, "twin", 0.9, mitigation="none"))


def test_groups_are_sorted_by_success_and_their_seeds_by_number():
    """Guards against a method before its baseline, and values of which nobody knows the seed."""
    listed = [runs.Run(f"{m}-{seed}", m, "", m == "none", seed, {"end": end})
              for m, end in (("low", 0.1), ("none", 0.2), ("high", 0.9)) for seed in (3, 0, 1)]
    groups = runs.group_runs(listed)
    assert [g.label for g in groups] == ["none", "high", "low"]
    assert [list(g.rows) for g in groups] == [[0, 1, 3]] * 3
    assert [g.compared for g in groups] == [False, True, True]


# ------------------------------------------------------------------------------------------- pictures of a comparison


def test_learning_curves_show_the_mean_and_its_interval(tmp_path, figures):
    """Guards against a band of standard errors, seeds left out, and a baseline that is not shown."""
    base = group("none", {0: 0.25, 1: 0.35})
    base.baseline = base
    base.rows[1]["curve"][4.0] = 0.1  # which the other seed did not measure
    analyze.draw_curves([base], tmp_path / "a.png")
    axis = figures[0].axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [pytest.approx([0, end]) for end in (0.3, 0.25, 0.35)]
    assert axis.collections[0].get_paths()[0].get_extents().y0 == pytest.approx(0.3 - 12.706 * 0.05)
    assert axis.get_title() == "GRPO (none) (2)"
    analyze.draw_curves([base, group("a", {0: 0.5}, base), group("b", {0: 0.5})], tmp_path / "b.png")
    assert [(axis.get_title(), len(axis.lines)) for axis in figures[1].axes] == [("a (1)", 5), ("b (1)", 2)]


def test_the_forest_shows_differences_with_the_best_on_top(tmp_path, figures):
    """Guards against a forest in the wrong order or unit, and seeds that only one method has."""
    base = group("none", {0: 0.25, 1: 0.35})
    base.baseline = base
    better, worse = group("better", {0: 0.35, 1: 0.55, 7: 0.9}, base), group("worse", {0: 0.2, 1: 0.2}, base)
    analyze.draw_forest([base, better, worse, group("alone", {0: 0.5})], tmp_path / "a.png")
    ends, areas = figures[0].axes
    assert [t.get_text() for t in ends.get_yticklabels()] == ["worse (2)", "better (2)"]
    bars = [line.get_xdata() for line in ends.lines[1:]]  # of each method: interval, mean, seeds
    assert bars[3] == pytest.approx([15 - 12.706 * 5, 15 + 12.706 * 5]) and bars[4] == pytest.approx([15])
    assert bars[5] == pytest.approx([10, 20]) and bars[2] == pytest.approx([-5, -15])
    assert areas.lines[5].get_xdata() == pytest.approx([7.5])
    assert "With one seed" not in figures[0].get_suptitle()
    analyze.draw_forest([base, better, group("single", {0: 0.2}, base)], tmp_path / "b.png")
    assert "With one seed" in figures[1].get_suptitle()


def test_a_fallen_method_is_an_arrow_in_the_forest(tmp_path, figures):
    """Guards against an axis that a collapse stretches until nothing else can be read, and a collapse not shown."""
    base = group("none", {0: 0.5, 1: 0.51})
    base.baseline = base
    methods = [group("good", {0: 0.53, 1: 0.54}, base), group("fallen", {0: 0.1, 1: 0.11}, base)]
    methods.append(group("wide", {0: 0.31, 1: 0.34}, base))  # 18 points below: the interval is drawn whole
    analyze.draw_forest([base, *methods], tmp_path / "a.png")
    axis = figures[0].axes[0]
    assert [t.get_text() for t in axis.texts] == ["-40.0 ± 0.0"]
    assert max(max(line.get_xdata()) for line in axis.lines) == pytest.approx(3)
    assert axis.get_xlim()[0] == pytest.approx(-18 - 12.706, abs=4)


# ----------------------------------------------------------------------------------------------------- command line


def test_a_run_that_only_evaluated_is_left_out(run, monkeypatch, capsys):
    """Guards against one folder of --steps 0 that keeps all the others from being read."""
    evaluated = run.parent / "evaluated"
    evaluated.mkdir()
    write_metrics(evaluated, [[0, 0.25]])
    write_metrics(run, [[0, 0.25], [1, 0.5]])  # a single step is enough
    call(monkeypatch, run, evaluated)
    text = capsys.readouterr().out
    assert f"left out: {evaluated} has no step" in text and f"left out: {run} " not in text
    assert "## Token types" in text
    for folder in (run.parent / "comparison", evaluated):
        with pytest.raises(SystemExit, match="no run with a step of training"):
            call(monkeypatch, folder)


def test_help_is_the_docstring(monkeypatch, capsys):
    """Guards against --help taken for a folder."""
    call(monkeypatch, "--help")
    assert capsys.readouterr().out.strip() == analyze.__doc__.strip()


@pytest.mark.parametrize("arguments, said", [
    ([], "name one or more run folders"),
    (["--steps", "3"], "no flags"),
    (["results/runs.csv"], "python -m experiments.study --tables"),
    (["nowhere"], "nowhere is not a run folder"),
], ids=["nothing", "a flag", "rows of the study", "no folder"])
def test_a_wrong_command_is_refused_in_one_sentence(arguments, said, monkeypatch):
    """Guards against a traceback, and a wrong command that does something."""
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{said}[^\n]*$"):
        call(monkeypatch, *arguments)


@pytest.mark.parametrize("breaking, said", [
    (lambda run: (run / "metrics.csv").unlink(), "it has no metrics.csv"),
    (lambda run: [f.unlink() for f in (run / "credit").iterdir()], "has no credit log"),
    (lambda run: (run / "credit" / "step-000002.npz").write_bytes(b"PK no"), "a file of .*credit can't be read"),
    (lambda run: (run / "metrics.csv").write_text("step\n"), "stopped before its first measurement"),
], ids=["no metrics", "no log", "broken log", "no rows"])
def test_broken_runs_are_refused_in_one_sentence(run, breaking, said, monkeypatch):
    """Guards against a traceback where a folder is not a whole run."""
    breaking(run)
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{said}[^\n]*$"):
        call(monkeypatch, run)


def test_a_run_without_settings_is_not_compared(run, monkeypatch):
    """Guards against a traceback where config.json is missing."""
    other = copy_of(run, "m", 0.5, mitigation="m")
    (other / "config.json").unlink()
    with pytest.raises(SystemExit, match="^error: [^\n]*no config.json$"):
        call(monkeypatch, run, other)
