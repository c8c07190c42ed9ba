"""Every table of a run, and of runs compared, against numbers worked out by hand; pictures by what they draw."""
import ast
import csv
import json
import math
import statistics
import sys

import numpy as np
import pytest
import torch

import analyze
from plumbing import comparison, report, run_folder, runs
from plumbing.files import checksum
from plumbing.metrics import COLUMNS, write_credit_log
from tests.fixtures import BUNDLED, check_texts, make_batch


def write_log(folder, step, factor):
    """The credit log of a step of two responses, a reinforced one of 2 tokens, a discouraged one of 4."""
    batch = make_batch(
        [2, 4], [1.0, -0.5], reward=torch.tensor([1.1, 0.1]),
        tokens=torch.tensor([[300, 1, 0, 0], [300, 301, 302, 1]]),
        logprob=torch.tensor([[-1.0, -0.5, 0, 0], [-2, -0.25, -4, 0]]),
        logit_grad=torch.tensor([[0.5, 0.25, 0, 0], [1.0, 0.125, 1.25, 0]]),
        role=torch.tensor([[0, 2, 0, 0], [0, 1, 1, 2]], dtype=torch.int8))
    credit = batch.advantage[:, None] * batch.mask * factor
    write_credit_log(folder / "credit" / f"step-{step:06d}.npz", step, batch, credit)


def write_metrics(folder, heldout):
    """metrics.csv with the given steps and held-out success. Step 0 has nothing else, the others 0.5 of all else."""
    run_folder.write_header(folder, ["of a head"])
    for step, success in heldout:
        log, row = folder / "credit" / f"step-{step:06d}.npz", dict.fromkeys(COLUMNS, 0.5) if step else {}
        row |= {"step": step, "heldout_success": success, "heldout_stderr": success and success / 5}
        run_folder.append_row(folder, row | {"credit_checksum": checksum(log) if log.is_file() else ""})


def config(mitigation, seed=0, method=None, **settings):
    """A config.json."""
    shared = {"mitigation": mitigation, "seed": seed, "steps": 2, "lr": 0.1, "normalize": "response",
              "advantage": "grpo", "pass_at": 16}
    return {"settings": shared | settings, "method": method or {}, "inputs": {}}


def make_run(folder, end, steps=2, **settings):
    """A run that ends with this held-out success. From step 2 on, each step is step 1 with twice the credit."""
    (folder / "credit").mkdir(parents=True)
    for step in range(1, steps + 1):
        write_log(folder, step, factor=min(step, 2))
    write_metrics(folder, [[0, 0.25], *([step, ""] for step in range(1, steps)), [steps, end]])
    (folder / "config.json").write_text(json.dumps(config(**settings)))
    (folder / "checkpoint").symlink_to(BUNDLED)
    return folder


@pytest.fixture
def run(tmp_path):
    """A run of two steps, so a mean over both is 1.5 times that of step 1."""
    return make_run(tmp_path / "none-seed0", 0.75, mitigation="none")


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command on some folders; what it prints."""
    def said(*folders):
        monkeypatch.setattr(sys, "argv", ["analyze.py", *map(str, folders)])
        analyze.main()
        return capsys.readouterr().out
    return said


def read_log(run):
    """The credit log as analyze.py reads it."""
    return analyze.read_log(run, runs.read_metrics(run))


def credit_table(run, tokenizer, title):
    """One of the tables that say where the credit went."""
    return next(table for table in analyze.credit_tables(read_log(run), tokenizer) if table.title == title)


def row_of(table, first):
    """The row that begins with a name, by column."""
    return next(dict(zip(table.header, row)) for row in table.rows if row[0] == first)


# ------------------------------------------------------------------------------------------------ tables of one run

CONTRIBUTION, GRADIENT = [-1, -0.5, 1, 0.125, 2, 0], [0.5, 0.25, -0.5, -0.0625, -0.625, 0]  # of the tokens of step 1


def test_the_first_table_by_hand(run):
    """Guards against start for end, success for its error, step 0 among the trained, and an unmeasured 0."""
    log, metrics = read_log(run), runs.read_metrics(run)
    assert math.isnan(metrics["success"][0])
    assert [x.tolist() for x in runs.heldout(metrics)] == [[0, 2], [0.25, 0.75], [0.05, 0.15]]
    rows = dict(analyze.table_basics(log, metrics).rows)
    assert rows["steps, responses, tokens"] == "2, 4, 12"
    assert rows["tokens whose credit is 0"] == "0.0%"
    assert rows["held-out success, start"] == "0.250 ± 0.098"
    assert rows["held-out success, step 2"] == "0.750 ± 0.294"
    log["credit"][:3] = 0
    rows = dict(analyze.table_basics(log, {name: np.arange(13.0) for name in COLUMNS}).rows)
    assert rows["success, first and last ten steps"] == "5.500, 7.500"
    assert rows["tokens whose credit is 0"] == "25.0%"


@pytest.mark.parametrize("title, row, expected", [
    # over all twelve tokens; the deviation is that of the population
    ("Contribution statistics", "mean", {"contribution": 1.5 * 1.625 / 6, "gradient": 1.5 * -0.4375 / 6}),
    ("Contribution statistics", "standard deviation",
     {"contribution": statistics.pstdev(CONTRIBUTION + [2 * x for x in CONTRIBUTION])}),
    ("Contribution statistics", "mean size", {"contribution": 1.5 * 4.625 / 6, "gradient": 1.5 * 1.9375 / 6}),
    ("Contribution statistics", "minimum", {"contribution": -2, "gradient": -1.25}),
    ("Contribution statistics", "maximum", {"contribution": 4, "gradient": 1}),
    # positions are relative: the second token of two stands beside the third of four
    ("Position in the response", "0-10%", {"tokens": 4, "size of contribution": 1.5, "size of gradient": 1.5 * 0.5}),
    ("Position in the response", "10-20%", {"tokens": 0, "size of contribution": None, "log p": None}),
    ("Position in the response", "20-30%", {"tokens": 2}),
    ("Position in the response", "50-60%",
     {"tokens": 4, "size of contribution": 1.5 * 1.25, "size of gradient": 1.5 * 0.4375, "log p": -2.25, "entropy": 1}),
    # responses are not tokens, and signed means are not sizes
    ("Sign of the advantage", "positive",
     {"responses": 2, "tokens": 4, "contribution": 1.5 * -0.75, "gradient": 1.5 * 0.375,
      "size of contribution": 1.5 * 0.75}),
    ("Sign of the advantage", "negative",
     {"responses": 2, "tokens": 8, "contribution": 1.5 * 3.125 / 4, "gradient": 1.5 * -1.1875 / 4,
      "size of gradient": 1.5 * 1.1875 / 4}),
    ("Sign of the advantage", "zero", {"responses": 0, "tokens": 0, "contribution": None, "size of gradient": None}),
    ("Token types", "reasoning",
     {"contribution": 1.5 * 2.125 / 2, "gradient": 1.5 * -0.6875 / 2, "log p": -2.125, "entropy": 1,
      "size of gradient": 1.5 * 0.6875 / 2}),
    ("Token types", "structure", {"tokens": 4, "share": 33.3}),
    ("Token types by position", "0-20%", {"contribution, filler": 1.5, "gradient, reasoning": None}),
    ("Token types by position", "40-60%",
     {"contribution, reasoning": 1.5 * 2, "gradient, reasoning": 1.5 * 0.625, "contribution, structure": 1.5 * 0.5}),
    ("Credit over training", "1-1", {"size of credit": (2 * 1 + 4 * 0.5) / 6, "contribution, filler": 1}),
    ("Credit over training", "2-2", {"size of credit": 2 * (2 * 1 + 4 * 0.5) / 6, "contribution, filler": 2}),
])
def test_a_table_by_hand(run, tokenizer, title, row, expected):
    """Guards against figures under each other's name, and a 0 or nan where nothing was measured."""
    cells = row_of(credit_table(run, tokenizer, title), row)
    for name, value in expected.items():
        figure = cells[name].partition(" ± ")[0].rstrip("%")
        assert figure == "" if value is None else float(figure) == pytest.approx(value, abs=6e-4), name


def test_parts_have_no_gap_at_their_borders():
    """Guards against a token that rounding moves: position t of a response of length L lies in part floor(10 t / L)."""
    position, length = np.array([(t, L) for L in range(1, 200) for t in range(L)]).T
    parts = np.array([part for _, part in analyze.position_bins({"relative": position / length}, 10)])  # (10, N)
    assert (parts.sum(0) == 1).all() and (parts.argmax(0) == 10 * position // length).mean() > 0.999


def test_errors_are_clustered_by_puzzle(run, tokenizer):
    """Guards against tokens and responses to a puzzle that count as independent: filler is (1, 1) and (2, 2)."""
    table = credit_table(run, tokenizer, "Token types")
    assert row_of(table, "filler")["size of contribution"] == "1.500 ± 0.980"  # 1.96 * sqrt(2 * 2 * 1**2) / 4
    assert "0.94 by contribution, 1.45 by gradient" in table.note  # filler / reasoning: 1 / 1.0625, .5 / .34375


def test_table_of_t_by_construction():
    """Guards against a sign that hides a large t, wrong limits, and 30 responses counted as too few."""
    z = np.tile([1.0, -1], 15)
    z /= z.std(ddof=1)
    values = np.concatenate([z + t / math.sqrt(30) for t in (-3.5, 2, 0.5)])
    log = {"position": np.repeat([0, 1, 2], 30), "contribution": values, "gradient": 2 * values}
    for column in (1, 2):
        assert [row[column] for row in analyze.table_t(log).rows] == ["33.3%", "33.3%", "2.00", "3"]


def test_top_tokens_are_counted_within_their_type(tokenizer):
    """Guards against rare tokens first, one token's types mixed, and parts of letters that all look the same."""
    ones, bar = np.ones(15), tokenizer.library.token_to_id("|") or 300
    tokens = np.array([300, 301, 301, 301, bar, *range(310, 320)])
    log = dict(role=np.array([0, 0, 0, 1, 2] + [1] * 10), token=tokens, contribution=ones, gradient=ones, logprob=ones,
               entropy=2 * ones, puzzle=np.arange(15))
    rows = analyze.table_tokens(log, tokenizer).rows
    assert [(row[0], row[2]) for row in rows[:3]] == [("filler", "2"), ("filler", "1"), ("reasoning", "1")]
    assert rows[0][1] == f"`{tokenizer.bytes[301].decode()!r}`"
    assert rows[0][-2:] == ["1.000", "2.000"]
    assert [row[0] for row in rows].count("reasoning") == 8
    end = np.array([tokenizer.library.token_to_id("<|im_end|>")] * 15)
    assert "im_end" in analyze.table_tokens(log | {"token": end}, tokenizer).rows[0][1]
    for token, letters in enumerate(tokenizer.bytes):
        name = ast.literal_eval(analyze.name_of(token, tokenizer))
        assert (name if isinstance(name, bytes) else name.encode()) == letters or token in tokenizer.end_tokens
    assert any(analyze.name_of(token, tokenizer).startswith("b") for token in tokenizer.encode("你"))


def test_parts_of_the_layout_by_hand(tokenizer):
    """Guards against a part that takes in another, a tag counted twice in a response, and steps mixed up."""
    steps = [["x</think>\n<answer>1</answer>", "x</think><answer>1</answer>", "y</think>\n<answer>1<answer>2</answer>",
              "x</th>\n<answer>1</answer></th> Thanks! 你"], ["<answer>1</answer></b>", "</p></b> </b>"]]
    written = [(step, tokenizer.encode(text) + tokenizer.end_tokens[:1]) for step in (1, 2) for text in steps[step - 1]]
    log = {name: np.concatenate(values) for name, values in {
        "step": [[step] * len(tokens) for step, tokens in written], "token": [tokens for _, tokens in written],
        "position": [range(len(tokens)) for _, tokens in written],
        "response_id": [[i] * len(tokens) for i, (_, tokens) in enumerate(written)]}.items()}
    [table] = analyze.table_layout(log, tokenizer)
    assert table.rows == [
        ["1-1", "4", "75.0%", "50.0%", "100.0%", "75.0%", "75.0%", "25.0%", "`</th>` 25.0%"],
        ["2-2", "2", "0.0%", "0.0%", "50.0%", "50.0%", "0.0%", "0.0%", "`</b>` 100.0%, `</p>` 50.0%"]]
    last = {name: values[log["response_id"] == 5] for name, values in log.items()}
    assert analyze.table_layout(last | {"response_id": 0 * last["response_id"]}, tokenizer) == []  # another task's


# ---------------------------------------------------------------------------------------------- pictures of one run


def chosen(log):
    """The rows of the responses in the picture."""
    return [tuple(rows.tolist() for rows in pair) for pair in analyze.choose_pairs(log)]


def test_chosen_responses_answer_the_same_question():
    """Guards against pairs of different puzzles or in the other order, long responses, and one step shown twice."""
    log = dict(step=np.repeat([1, 2], 6), position=np.array([0, 0, 0, 0, 1, 0] * 2),
               puzzle=np.array([0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3]), advantage=np.array([1, 0, -1, 2, 2, 1] * 2),
               reward=np.zeros(12))
    assert chosen(log) == [([5], [2]), ([11], [8])]
    assert chosen({name: values[:6] for name, values in log.items()}) == [([5], [2])]
    log = dict(step=np.ones(6, int), position=np.zeros(6), puzzle=np.repeat([0, 1, 2], 2),
               advantage=np.array([1, -1] * 3),
               reward=np.array([0.1, 0.0, 1.1, 0.1, 1.1, 0.0]))  # the layout alone, then success in two groups
    assert chosen(log) == [([2], [3])]


def test_the_picture_of_credit_shows_the_tables(tmp_path, figures):
    """Guards against a type, measure or part in another's place, and points of a few tokens."""
    n = 100  # tokens of each type in each of five parts; of structure one fewer
    role, part = np.repeat([0, 1, 2], 5 * n), np.tile(np.repeat(np.arange(5), n), 3)
    kept = ~((role == 2) & (np.arange(15 * n) % n == 0))
    log = dict(role=role, relative=part / 5 + 0.1, puzzle=np.arange(15 * n) % 7,
               contribution=-1.0 * (part + 1), gradient=10.0 * (role + 1))
    analyze.draw_credit({name: x[kept] for name, x in log.items()}, tmp_path / "a.png")
    contribution, gradient = ({bars.get_label(): bars.lines[0].get_ydata() for bars in axis.containers}
                              for axis in figures[0].axes)
    assert contribution["filler"] == pytest.approx([1, 2, 3, 4, 5])
    assert np.isnan(contribution["structure"]).all()
    assert gradient["reasoning"] == pytest.approx([20] * 5)


def test_the_picture_of_tokens_shows_credit_and_gradient(run, tmp_path, figures, tokenizer):
    """Guards against a token left out, a shade of another measure or scale, and the puzzle of another step."""
    log = read_log(run)
    log["credit"][3] = 1.5  # the second response's differs from token to token; the others' is one number
    (run / "samples.txt").write_text("".join(f"=== step {step}  {puzzle}  reward\na\n\n" for step, puzzle in (
        (1, "[4, 3] -> 7"), (1, "[5, 4] -> 9"), (2, "[9, 2] -> 11"))))
    analyze.draw_responses(log, tokenizer, "x", analyze.sampled_puzzles(run), tmp_path / "a.png")
    first, second = [1, *GRADIENT[:2], -0.5, 1.5, -0.5, -0.5, *GRADIENT[2:]], [1, *GRADIENT[:2], -0.5, *GRADIENT[2:]]
    shades = [report.SHADES(0.5 + value / 2 / 2) for value in first + [2 * x for x in second]]  # at most 2
    axis = figures[0].axes[0]
    assert [patch.get_facecolor() for patch in axis.patches] == shades
    shown = [text.get_text() for text in axis.texts]
    assert len(shown) == len(shades) + 8  # a heading for each measure of each response
    headings = [text for text in shown if text.startswith("Step")]
    assert [p in text for text, p in zip(headings, ["[4, 3] → 7"] * 2 + ["[9, 2] → 11"] * 2)] == [True] * 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 40])
def test_pictures_can_be_read_whatever_the_question(tmp_path, figures, call, steps):
    """Guards against a title or a question that runs into its neighbour, and a single step that is not seen."""
    question = "Somchai (สมชาย, 你好) has $x_1$ coins in `{\\frac` and 😀 " * 8
    run = make_run(tmp_path / "a", 0.75, steps, mitigation="one_of_a_rather_long_name_for_a_picture", advantage="rloo")
    (run / "samples.txt").write_text(f"=== step 1  {question} -> 42  reward 0.10\na\n\n", encoding="utf-8")
    call(run)
    for figure in figures:
        check_texts(figure)
    assert steps > 1 or figures[0].axes[1].lines[0].get_marker() == "."
    assert "frac" in "".join(text.get_text() for text in figures[2].axes[0].texts)


@pytest.mark.filterwarnings("error")
def test_a_run_without_any_credit_is_analyzed(run, call):
    """Guards against a division by zero where every group had equal rewards."""
    for step in (1, 2):
        write_log(run, step, factor=0)
    write_metrics(run, [[0, 0.25], [1, ""], [2, 0.75]])  # with the checksums of the changed log
    assert "nan" not in call(run)
    assert "# Comparison" not in call(run, f"{run}/")  # the same folder once more is not another run


# ------------------------------------------------------------------------------------------------------- comparison


def test_labels_name_what_differs():
    """Guards against settings averaged as seeds, and labels full of what only one method has."""
    a, b = config("a", 1, {"x": 1}), config("b", 2, {"x": 2}, normalize="none", steps=7, out="elsewhere")
    assert comparison.labels([a, b, config("a", 3, {"x": 1})]) == ["a", "b", "a"]
    assert comparison.labels([a, config("a", 1, {"x": 3}), b]) == ["a x=1", "a x=3", "b"]
    names = comparison.labels([a, config("a", 1, {"x": 1}, normalize="step")])
    assert names == ["a normalize=response", "a normalize=step"]
    assert comparison.labels([a, config("b", 1, {}, lr=0.2)]) == ["a lr=0.1", "b lr=0.2"]
    assert comparison.labels([config("a", new=1), config("a", new=2), config("a")]) == ["a new=1", "a new=2", "a"]


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


def group(label, ends):
    """A Group whose runs ended, by seed, with these successes."""
    return comparison.Group(label, {seed: {"end": end, "curve": {0.0: 0.0, 9.0: end}} for seed, end in ends.items()})


def table_of(run):
    """The rows of table.csv beside a run by method, their numbers as such."""
    with (run.parent / "comparison" / "table.csv").open() as file:
        return {row.pop("method"): {k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)}


def test_methods_are_compared_over_seeds(run, call):
    """Guards against seeds counted as methods, methods averaged as seeds, and our own output taken for a run."""
    (run / "final.json").write_text('{"step": 2, "heldout_success": 0.75, "heldout_stderr": NaN, "pass@16": 0.9}')
    others = [make_run(run.parent / "none-seed1", 0.85, mitigation="none", seed=1)]
    others += [make_run(run.parent / f"m-seed{seed}", end, mitigation="m", seed=seed)
               for seed, end in ((0, 0.5), (7, 0.7))]
    call(run, *others)
    text = call(run.parent / "comparison", run, *others)
    rows = table_of(run)
    none, m = rows["none"], rows["m"]
    assert list(rows) == ["none", "m"]
    assert "nothing can be concluded" not in text and "not comparable" not in text
    assert none["end"] == pytest.approx(0.8)
    assert none["end high"] - none["end"] == pytest.approx(12.706 * 0.05, rel=1e-4)
    assert (none["start"], none["climb"], none["least climb"]) == pytest.approx((0.25, 0.55, 0.5))
    assert (m["seeds"], m["steps"]) == (2, 2) and "pass@16" not in m
    assert m["area"] == pytest.approx(0.425)  # of straight lines from 0.25 to 0.5 and 0.7, over the whole time
    assert m["end - GRPO"] == pytest.approx(-0.2) and "end - GRPO" not in none
    assert m["contribution, filler / reasoning"] == pytest.approx(1 / 1.0625, rel=1e-5)
    assert m["contribution, filler"] == pytest.approx(2 / (2 + 2.125 + 0.5), rel=1e-5)
    assert m["gradient, reasoning"] == pytest.approx(0.6875 / (1 + 0.6875 + 0.25), rel=1e-5)
    assert (m["gradient norm"], m["its spread"], m["seconds a step"]) == (0.5, 0, 0.5)
    assert m["effective sample size"] == pytest.approx(1) and m["varies within"] == pytest.approx(0)
    half = report.t_estimate(np.array([0.5, 0.7]), np.array([0.75, 0.85])).high + 0.2
    assert "0.800 ± 0.635" in text and f"-0.200 ± {half:.3f}" in text
    assert "|     2 |     2 |" in text  # counts without decimals
    assert (run.parent / "comparison" / "table.md").read_text() in text
    assert (run.parent / "comparison" / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_a_column_for_every_pass_at_k_that_was_measured(run, call):
    """Guards against an empty column where --pass_at is not 16, a mean over some of the seeds, and a standard error."""
    runs = {"none": run} | {name: make_run(run.parent / name, 0.5, mitigation=name[0], seed=int(name[1]))
                            for name in ("a0", "a1", "b0", "b1")}
    assert "pass@" not in call(*runs.values())
    for name, passed in (("none", {"pass@4": 0.6}), ("a0", {"pass@4": 0.7}), ("a1", {"pass@4": 0.9}),
                         ("b0", {"pass@4": 0.5, "pass@4_stderr": 0.1}), ("b1", {"pass@16": 0.8})):
        (runs[name] / "final.json").write_text(json.dumps({"step": 2} | passed | {
            "heldout_success": 0.75 if name == "none" else 0.5}))
    text, rows = call(*runs.values()), table_of(run)
    assert "area | pass@4 | pass@16 |" in " ".join(text.split()) and "stderr" not in text
    assert (rows["none"]["pass@4"], rows["a"]["pass@4"]) == pytest.approx((0.6, 0.8))
    assert rows["a"]["pass@4 - GRPO"] == pytest.approx(0.2)
    assert not any(name.startswith("pass@") for name in rows["b"])  # each k of one seed alone


def test_every_table_warns_of_what_is_not_comparable(run, call):
    """Guards against a verdict from a single seed, from runs of unequal length, and from a file that was edited."""
    others = [make_run(run.parent / name, 0.9, steps, mitigation=name) for name, steps in (("a", 5), ("b", 2))]
    for folder, content in ((run, 1), (others[0], 1), (others[1], 2)):
        written = json.loads((folder / "config.json").read_text()) | {"inputs": {"same": [4], "my.jsonl": [content]}}
        (folder / "config.json").write_text(json.dumps(written))
    last = call(run, *others).splitlines()[-1]
    text = (run.parent / "comparison" / "table.md").read_text()
    for warning in ("not comparable (2 steps: none-seed0, b; 5 steps: a)",
                    f"my.jsonl was not the same in {run} and {others[1]}"):
        assert warning in last and text.count(warning) == 3
    assert text.count("With one seed, nothing can be concluded") == text.count("\n## ") == 3


def test_areas_of_other_grids_are_not_comparable(tmp_path, call):
    """Guards against the mean of a curve of three points held against that of a straight line, or that ignores how far
    apart its points are."""
    runs = [make_run(tmp_path / name, 0.9, 4, mitigation=name) for name in "ab"]
    (runs[1] / "metrics.csv").unlink()
    write_metrics(runs[1], [[0, 0.25], [1, 0.5], [2, ""], [3, ""], [4, 0.9]])
    assert "measured at different steps" in call(*runs).splitlines()[-1]
    assert table_of(runs[1])["b"]["area"] == pytest.approx((1 * 0.375 + 3 * 0.7) / 4)


def test_the_baseline_is_none_with_the_same_settings(run, call):
    """Guards against RLOO that is called GRPO, a baseline of another learning rate, and --normalize taken for one."""
    call(run, make_run(run.parent / "m", 0.8, mitigation="m", lr=0.2),
         make_run(run.parent / "rloo", 0.9, mitigation="none", advantage="rloo"),
         make_run(run.parent / "k", 0.7, mitigation="k", normalize="none", device="cuda"))
    assert [(label, row.get("end - GRPO")) for label, row in table_of(run).items()] == [  # the best of the others first
        ("none lr=0.1", None), ("none advantage=rloo lr=0.1", pytest.approx(0.15)), ("m lr=0.2", None),
        ("k lr=0.1", pytest.approx(-0.05))]


def test_learning_curves_show_the_mean_and_its_interval(tmp_path, figures, recwarn):
    """Guards against a band of standard errors, and seeds left out."""
    base = group("none", {0: 0.25, 1: 0.35})
    base.rows[1]["curve"][4.0] = 0.1  # which the other seed did not measure
    analyze.draw_curves([base], tmp_path / "a.png")
    axis = figures[0].axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [pytest.approx([0, end]) for end in (0.3, 0.25, 0.35)]
    assert axis.collections[0].get_paths()[0].get_extents().y0 == pytest.approx(0.3 - 12.706 * 0.05, abs=1e-4)
    analyze.draw_curves([group(name, {0: 0.5, 1: 0.6}) for name in "abcde"], tmp_path / "b.png")
    lines = figures[1].axes[0].lines  # no seeds among several
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 5
    assert [line.get_label() for line in lines] == [f"{name}, seeds: 2" for name in "abcde"]
    assert figures[0].axes[0].lines[0].get_label() == "GRPO, seeds: 2"
    analyze.draw_curves([group(f"{name} model=" + 99 * "x", {0: 0.5, 1: 0.6}) for name in "ab"], tmp_path / "c.png")
    assert not recwarn.list  # as matplotlib's, where a long name leaves the curves no room


# ----------------------------------------------------------------------------------------------------- command line


def test_a_run_that_only_evaluated_is_left_out(run, call):
    """Guards against one folder of --steps 0 that keeps the others from being read, and a table that is not shown."""
    evaluated = run.parent / "evaluated"
    evaluated.mkdir()
    write_metrics(evaluated, [[0, 0.25]])
    write_metrics(run, [[0, 0.25], [1, 0.5]])  # a single step is enough
    text = call(run, evaluated)
    assert f"left out: {evaluated} has no step" in text and f"left out: {run} " not in text
    assert text.count("\n## ") == 9 and (run / "analysis" / "tables.md").read_text() in text
    for picture in ("learning.png", "credit.png", "tokens.png"):
        assert (run / "analysis" / picture).read_bytes().startswith(b"\x89PNG")
    for folder, said in ((run.parent / "comparison", "is not a run folder"), (evaluated, "no run with a step of")):
        with pytest.raises(SystemExit, match=said):
            call(folder)


def change_log(run, column, change):
    """Change a column of the second step's log."""
    file = run / "credit" / "step-000002.npz"
    columns = dict(np.load(file))
    np.savez(file, **columns | {column: change(columns[column])})


def change_metrics(run, old, new):
    file = run / "metrics.csv"
    file.write_text(file.read_text().replace(old, new, 1))


@pytest.mark.parametrize("breaking, said", [
    (lambda run: (run / "metrics.csv").unlink(), "it has no metrics.csv"),
    (lambda run: (run / "config.json").unlink(), "it has no config.json"),
    (lambda run: (run / "credit" / "step-000002.npz").unlink(), "there is no .*step-000002.npz"),
    (lambda run: change_log(run, "entropy", lambda x: x * np.float32(1.01)), "is it another run's"),
    (lambda run: write_metrics(run, []), "stopped before its first measurement"),
    (lambda run: change_metrics(run, "0.5", "half"), "is no table of numbers"),
    (lambda run: change_metrics(run, "0.5,", ""), "line 3 is not as long as the header"),
    (lambda run: change_metrics(run, "loss", "los"), "has no column loss"),
    (lambda run: write_metrics(run, [[0, 0.25], [1, ""], [1, ""], [2, 0.75]]), "its steps are not 0, 1, 2"),
    (lambda run: (run / "config.json").write_text('{"settings": {}, "method": {}}'), "config.json has no inputs"),
    (lambda run: (run / "config.json").write_text(json.dumps(config("m"))), "seed 0 of another run"),
    (lambda run: (run / "final.json").write_text('{"step": 2, "heldout_success": 0.7}'), "final.json is not of"),
])
def test_broken_runs_are_refused_in_one_sentence(run, breaking, said, call):
    other = make_run(run.parent / "m", 0.5, mitigation="m")
    breaking(run)
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{said}[^\n]*$"):
        call(run, other)


def test_tokens_of_another_tokenizer_are_refused_in_one_sentence(run, call):
    """Guards against the name of another token: Python takes -1 for the last one."""
    for shift in (9999, -9999 - 400):
        change_log(run, "token", lambda x: x + np.int32(shift))
        write_metrics(run, [[0, 0.25], [1, ""], [2, 0.75]])  # with the checksum of the changed log
        with pytest.raises(SystemExit, match="^error: .*credit has tokens that .*tokenizer.json lacks$"):
            call(run)
