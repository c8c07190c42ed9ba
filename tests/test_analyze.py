"""Statistics against slow computations; tables, of one run and of several, against numbers by hand; and pictures."""
import ast
import itertools
import json
import math
import re
import shutil
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import analyze
from analyze import read_log
from grpo import instrument
from methods.registry import CREDIT_FUNCTIONS
from plumbing import comparison, metrics, part4, report, run_folder, runs, tokens_page
from plumbing.files import checksum
from plumbing.metrics import COLUMNS, write_credit_log
from settings import Settings
from tests.fixtures import BUNDLED, check_texts, make_batch, refused


def write_log(folder, step, factor):
    """The credit log of a step of two responses, a reinforced one of 2 tokens, a discouraged one of 4."""
    batch = make_batch(
        [2, 4], [1.0, -0.5], reward=torch.tensor([1.1, 0.1]),
        tokens=torch.tensor([[300, 1, 0, 0], [300, 301, 302, 1]]),
        logprob=torch.tensor([[-1.0, -0.5, 0, 0], [-2, -0.25, -4, 0]]),
        logit_grad=torch.tensor([[0.5, 0.25, 0, 0], [1.0, 0.125, 1.25, 0]]),
        role=torch.tensor([[0, 2, 0, 0], [0, 1, 1, 2]], dtype=torch.int8))
    credit = batch.advantage[:, None] * batch.mask * factor
    measured = instrument(batch, credit, Settings())
    write_credit_log(folder / "credit" / f"step-{step:06d}.npz", step, batch, measured)


def write_metrics(folder, heldout=((0, 0.25), (1, ""), (2, 0.75))):
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
def call(run_program, capsys, monkeypatch):
    """Runs the command on some folders; what it prints. Pictures take most of the time: they are drawn if asked for."""
    def said(*folders, draw=False):
        with monkeypatch.context() as patch:
            if not draw:
                patch.setattr(Figure, "savefig", lambda *_: None)
            run_program(analyze, *folders)
        return capsys.readouterr().out
    return said


def credit_table(run, tokenizer, title):
    """One of the tables that say where the credit went."""
    return next((table for table in analyze.credit_tables(read_log(run), tokenizer) if table.title == title), None)


def row_of(table, first):
    """The row that begins with a name, by column."""
    return next(dict(zip(table.header, row)) for row in table.rows if row[0] == first)


# ------------------------------------------------------------------------------------------------------- statistics


def test_clustered_mean_by_hand():
    """Guards against errors that treat the tokens of one response as independent: clusters (1, 3), (5), (7, 8)."""
    mean, half = report.clustered_mean(np.array([1.0, 3, 5, 7, 8]), np.array([0, 0, 1, 2, 2]))
    residuals = [4 - 2 * 4.8, 5 - 4.8, 15 - 2 * 4.8]
    assert mean == pytest.approx(4.8)
    assert half == pytest.approx(1.96 * math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 5)
    for alike in [0.0, 0, 0, 0, 0], [0.1] * 5, [1, 3, 2, 4, 0]:  # clusters (x, x), (x), (x, x) of equal means
        mean, half = report.clustered_mean(np.array(alike), np.array([0, 0, 1, 2, 2]))
        assert mean == pytest.approx(np.mean(alike)) and math.isnan(half)
    mean, half = report.clustered_mean(np.array([1.0, 3]), np.array([4, 4]))
    assert mean == 2 and math.isnan(half)  # a single cluster has no error
    assert all(map(math.isnan, report.clustered_mean(np.array([]), np.array([], int))))


@pytest.mark.parametrize("t", [0.0, 0.3, 2.5, 40.0])
def test_students_t_in_closed_form(t):
    """With 1, 2 and 4 degrees of freedom the distribution has a formula; the last line is from a table."""
    one, two, four = (np.interp(t, *report.student(freedom)) for freedom in (1, 2, 4))
    assert one == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-6)
    assert two == pytest.approx(1 - t / math.sqrt(2 + t**2), abs=1e-6)
    x = t**2 / (4 + t**2)
    assert four == pytest.approx(1 - math.sqrt(x) * (1 + (1 - x) / 2), abs=1e-6)
    assert np.interp(1.98397, *report.student(100)) == pytest.approx(0.05, abs=1e-6)


def test_means_and_their_differences_by_hand():
    """Guards against an interval of width 0 for a single value. x has mean 3 and variance 4, y mean 5 and variance 1:
    a = 4 / 3 and b = 1 / 4."""
    e = report.t_estimate(np.array([1.0, 3]))
    assert (e.value, e.low, e.high) == pytest.approx((2, 2 - 12.706, 2 + 12.706), abs=1e-3)
    x, y = np.array([1.0, 3, 5]), np.array([4.134, 4.134, 5.866, 5.866])
    a, b = 4 / 3, np.var(y, ddof=1) / 4
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 3)
    e, error = report.t_estimate(x, y), math.sqrt(a + b)
    assert e.value == pytest.approx(-2)
    assert np.interp((e.high - e.value) / error, *report.student(freedom)) == pytest.approx(0.05)
    assert e.p == pytest.approx(np.interp(2 / error, *report.student(freedom)))
    for single in (x[:1],), (x, y[:1]):
        assert math.isfinite(report.t_estimate(*single).value) and math.isnan(report.t_estimate(*single).high)
    assert all(math.isnan(report.t_estimate(*none).value) for none in ((x[:0],), (x, y[:0])))
    for equal in (np.full(3, 0.1), np.full(3, 0.7)), (np.full(3, 0.1),), (np.zeros(2), np.zeros(4)):  # 0.1 has a var
        assert all(map(math.isnan, report.t_estimate(*equal)[1:]))
    assert report.t_estimate(np.full(3, 0.1), y).p < 0.05  # one of them varies


def test_t_statistics_by_the_textbook():
    """Guards against the population variance, and positions that too few responses reach."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 9, 80)
    position = np.concatenate([np.arange(n) for n in lengths])
    values = rng.normal(0.3, 1, len(position))
    samples = [[float(v) for v in values[position == p]] for p in range(8)]
    expected = [statistics.mean(x) / (statistics.stdev(x) / math.sqrt(len(x))) for x in samples if len(x) >= 30]
    assert 2 < len(expected) < 8
    np.testing.assert_allclose(report.t_statistics(values, position), expected, rtol=1e-9)


def test_early_over_late_by_hand():
    """Guards against fifths of a response for those of all positions, a quantile that belongs to a side, and signs.
    Of six tokens at 0, 1, 1, 2, 4, 5 the quantiles are 1 and 4; of the twelve below 0.2 and 4.8."""
    assert report.early_over_late(np.array([3.0, 9, 9, 9, 9, -2]), np.array([0, 1, 1, 2, 4, 5])) == 1.5
    position = np.array([0, 1, 0, 1, *range(8)])  # by fifths of each response the early sum is 2 + 4 + 6 + 9
    values = np.array([2, 9, -4, 9, 6, 9, 9, 9, 9, 1.0, -2, 5])
    assert report.early_over_late(values, position) == pytest.approx((2 + 4 + 6) / (1 + 2 + 5))
    assert math.isnan(report.early_over_late(np.ones(4), np.array([0, 0, 1, 1])))  # none before the quantile, 0


# ------------------------------------------------------------------------------------------------ tables of one run

def test_rows_of_the_steps_that_the_documents_print(run):
    """Guards against start for end, success for its error, a row of steps that the run lacks, and an unmeasured 0."""
    metrics = runs.read_metrics(run)
    assert math.isnan(metrics["success"][0])
    assert [x.tolist() for x in runs.heldout(metrics)] == [[0, 2], [0.25, 0.75], [0.05, 0.15]]
    table = analyze.learning_table(metrics)
    assert [row[0] for row in table.rows] == ["0", "1", "2"]
    # With an error of 0.05 a quarter is 19 of 76, enough for ± 1.96 errors; with 0.15 three quarters are 7 of 28 / 3.
    assert row_of(table, "0")["held-out success"] == "0.250 ± 0.098" and row_of(table, "0")["reward"] == ""
    assert row_of(table, "2") == {"step": "2", "reward": "0.500", "success": "0.500", "format": "0.50",
                                  "length": "0.5", "entropy": "0.500", "grad_norm": "0.500",
                                  "zero_variance_groups": "0", "held-out success": "0.750 (0.432 to 0.922)"}
    few = analyze.learning_table({name: np.arange(11.0) for name in COLUMNS})
    assert [row[0] for row in few.rows] == [f"{n}" for n in range(11)]
    table = analyze.learning_table({name: np.arange(124.0) for name in COLUMNS})
    assert [row[:2] for row in table.rows] == [[f"{n}", f"{n}.000"] for n in (0, 1, 10, 50, 100, 123)]


WHERE, FIFTHS = "Where credit went", "Types by position"


def test_tables_by_hand(run, tokenizer):
    """Every cell, from the six tokens of step 1. Guards against figures under each other's name, signed means taken for
    sizes, and a 0 or nan where nothing was measured."""
    sign, role, start = [1, 1, -1, -1, -1, -1], [0, 2, 0, 1, 1, 2], [0, 50, 0, 25, 50, 75]  # % of the response before
    contribution, gradient = [-1, -0.5, 1, 0.125, 2, 0], [0.5, 0.25, -0.5, -0.0625, -0.625, 0]
    logprob, types = [-1, -0.5, -2, -0.25, -4, 0], ("filler", "reasoning", "structure")
    rows = {"all": sign} | {name: [x == i for x in role] for i, name in enumerate(types)}
    rows |= {f"advantage {name}": [x == i for x in sign] for name, i in (("> 0", 1), ("< 0", -1), ("0", 0))}
    rows |= {f"{i}-{i + 10}%": [i <= x < i + 10 for x in start] for i in range(0, 100, 10)}
    rows |= {f"{i}-{i + 20}%, {name}": [i <= x < i + 20 and of_type for x, of_type in zip(start, rows[name])]
             for i in range(0, 100, 20) for name in types}
    tables = [credit_table(run, tokenizer, title) for title in (WHERE, FIFTHS)]
    assert [row[0] for table in tables for row in table.rows] == [*rows]
    for name, *cells in tables[0].rows + tables[1].rows:
        c, g, p = ([*itertools.compress(x, rows[name])] for x in (contribution, gradient, logprob))
        numbers = [float(x.strip("%")) for cell in cells if cell for x in cell.partition(" ± ")[0].split(" to ")]
        if not c:
            assert numbers == [0, 0], name
            continue
        both = c + [2 * x for x in c]  # of both steps: a mean is 1.5 times that of step 1
        sizes = [1.5 * statistics.fmean(map(abs, x)) for x in (c, g)]
        means = [1.5 * statistics.fmean(c), 1.5 * statistics.fmean(g), statistics.fmean(p), 1]
        assert numbers == pytest.approx([2 * len(c), round(100 * len(c) / 6, 1), *sizes, *means], abs=6e-4), name
    assert tables[0].header == tables[1].header == [
        "", "tokens", "share", "abs(contribution)", "abs(gradient)", "contribution", "gradient", "log p", "entropy"]


def test_the_documents_tables_by_hand(run, tokenizer, monkeypatch):
    """Every figure of part4.md, from the tokens of both steps: contributions are -1, -0.5; 1, 0.125, 2, 0, then twice
    these. Guards against the document's figures in a run's column, tags outside filler, and t without its sign."""
    monkeypatch.setattr(report, "early_over_late", lambda values, _: np.abs(values).sum())
    monkeypatch.setattr(report, "t_statistics", lambda *_: np.array([-3.5, 2.5, 0.5]))
    tables = part4.tables(read_log(run), runs.read_metrics(run), tokenizer)
    number = lambda cell: float(cell.partition(" ± ")[0].strip("%").replace(",", "")) if cell else None
    found = {row[0]: [*map(number, row[1:])] for table in (*tables[:3], *tables[4:6]) for row in table.rows
             if row[0] != "Range"}
    assert all(table.title.startswith(("Part 4: ", "Appendix A: ")) for table in tables)
    x = [-1, -0.5, 1, 0.125, 2, 0, -2, -1, 2, 0.25, 4, 0]
    assert found["Mean contribution"] == [0.079, pytest.approx(statistics.fmean(x), abs=6e-4)]
    assert found["Std contribution"][1] == pytest.approx(statistics.pstdev(x), abs=6e-4)
    assert found["Mean |contribution|"][1] == pytest.approx(13.875 / 12, abs=6e-4)
    assert tables[0].rows[3] == ["Range", "-28.0 to 33.3", "-2.0 to 4.0"]
    assert [found[name][1] for name in ("High t-stat (>3.0)", "Low t-stat (<1.5)", "Mean |t-stat|")] == [33, 33, 2.17]
    assert [cells[1] for name, cells in found.items() if name.startswith(("Posi", "Nega"))] == [-1.125, 1.172, 1.172]
    # Filler with tags: -1, -0.5, 1, 0 and twice these; reasoning 0.125, 2. Beside each, the document's figure.
    assert found["filler"][::2] == [8, 66.7, 0.938, -0.875, -0.1875, 0.469]  # gradients .5 .25 .5 0
    assert found["without tags"][::2] == [4, 33.3, 1.5, -1.5, 0, 0.75]
    assert found["reasoning"][::2] == [4, 33.3, 1.594, -2.125, 1.5938, 0.516] and found["reasoning"][5] == 0.254
    assert "0.59 by contribution" in tables[4].note
    assert tables[3].rows[0][1:] == ["0.000", "1.581", "1.500 ± 0.980", "0.347", "-1.500", "4"]  # -1, -2; 1, 2
    assert tables[3].rows[9][1:] == ["", "", "", "0.213", "", "0"]
    assert found["0-20%"] == [1.5, 0.358, None, 0.346, -1.5, -0.666, None, -0.409]
    assert found["80-100%"][::2] == [None] * 4 and found["60-80%"][0] == 0
    assert tables[3].note.endswith("last: 9.25.") and "tenth" not in tables[3].note  # without step 2's doubled credit
    steps = {row[0]: row[1:] for row in tables[-1].rows}
    assert steps["100"] == ["", "0.24", "", "0.14", "", "2.38", "", "42"]
    assert steps["2"] == ["0.50", "", "0.50", "", "0.50", "", "0", ""] and "Eval: 0.75," in tables[-1].note
    [filler, reasoning] = tables[-2].rows  # of 8 tokens: 300 four times, 301 twice, 1 six times
    assert [cell.count("`") for cell in filler[2:]] == [4, 4] and filler[2] != filler[3]


def test_the_table_of_a_credit_functions_own_numbers(run, tokenizer):
    """Guards against a type in another's column, tokens of a puzzle that count as independent, digits of a small number
    that are all 0, a table without rows, and a column that some steps lack."""
    assert credit_table(run, tokenizer, "Your own numbers") is None
    change_log(run, "mine", lambda _: np.array([1, 2, 3, 4, 5, 9]) * np.float32(1e-4), step=1)
    change_log(run, "mine", lambda _: np.array([3, 2, 3, 4, 5, 7]) * np.float32(1e-4))
    write_metrics(run)
    table = credit_table(run, tokenizer, "Your own numbers")
    # Two puzzles whose sums differ by d = 2 (filler), 0 and -2: half = 1.96 sqrt(2 * 2 * (d / 2)^2) / tokens;
    # but two equal means, as of d = 0, tell nothing of an error.
    assert table.header == ["", "all", "filler", "reasoning", "structure"] and table.rows == [
        ["mine", "0.0004", "0.00025 ± 9.8e-05", "0.00045", "0.0005 ± 9.8e-05"]]
    write_log(run, 2, factor=2)
    write_metrics(run)
    with pytest.raises(ValueError, match="step-000002.npz has no mine"):
        read_log(run)


def test_errors_are_clustered_by_puzzle(run, tokenizer):
    """Guards against tokens and responses to a puzzle that count as independent: filler is (1, 1) and (2, 2)."""
    table = credit_table(run, tokenizer, WHERE)
    assert row_of(table, "filler")["abs(contribution)"] == "1.500 ± 0.980"  # 1.96 * sqrt(2 * 2 * 1**2) / 4
    assert table.note.startswith("4 responses. ")
    assert "0.94 by contribution, 1.45 by gradient" in table.note  # filler / reasoning: 1 / 1.0625, .5 / .34375


def test_top_tokens_are_paid_within_their_type(tokenizer):
    """Guards against frequent tokens without a gradient, sums that cancel, one token's types mixed, and parts of
    letters that all look the same."""
    bar = tokenizer.library.token_to_id("|") or 300
    log = dict(role=np.array([0, 0, 0, 1, 2] + [1] * 10), token=np.array([300, 301, 301, 301, bar, *range(310, 320)]),
               gradient=np.array([1.9, -1, 1, 5, 0] + [0.5] * 10))
    found = [(name.split()[0], chosen.sum()) for name, chosen in analyze.top_tokens(log, tokenizer)]
    assert found[:3] == [("filler", 2), ("filler", 1), ("reasoning", 1)]
    assert [name for name, _ in found].count("reasoning") == 8
    end = np.array([tokenizer.library.token_to_id("<|im_end|>")] * 15)
    assert "im_end" in analyze.top_tokens(log | {"token": end}, tokenizer)[0][0]
    for token, letters in enumerate(tokenizer.bytes):
        [(name, _)] = analyze.top_tokens({"role": np.zeros(1), "token": np.array([token]), "gradient": np.ones(1)},
                                         tokenizer)
        written = ast.literal_eval(re.fullmatch(r"filler (`+) ?(.*?) ?\1", name)[2])
        assert token in tokenizer.end_tokens or re.sub(
            rb"\\x(..)", lambda byte: bytes.fromhex(byte[1].decode()), written.encode()) == letters


# ---------------------------------------------------------------------------------------------- pictures of one run


@pytest.mark.slow
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
    assert "structure" not in contribution
    assert gradient["reasoning"] == pytest.approx([20] * 5)


def test_a_new_column_leaves_older_runs_readable(run, monkeypatch, capsys):
    """It is found by its name, wherever it stands; a run without it has NaN there, and that is said. Without credit, or
    where a later step alone lacks it, the run is refused."""
    before = read_log(run)
    monkeypatch.setattr(metrics, "CREDIT_LOG", {"surprise": np.float32} | metrics.CREDIT_LOG)
    monkeypatch.setattr(runs, "CREDIT_LOG", metrics.CREDIT_LOG)
    log = read_log(run)
    assert np.isnan(log.pop("surprise")).all() and all(np.array_equal(log[name], before[name]) for name in before)
    assert "has no surprise: it is taken for NaN" in capsys.readouterr().out
    file = run / "credit" / "step-000002.npz"
    columns = dict(np.load(file))
    for missing in ("credit", "entropy", "token"):
        np.savez(file, **{name: x for name, x in columns.items() if name != missing})
        write_metrics(run)
        with pytest.raises(ValueError, match=f"has no {missing}"):
            read_log(run)


def test_a_puzzle_keeps_its_name_whatever_it_looks_like(run, tmp_path):
    """Guards against a puzzle with line breaks, or that looks like our own headings, which gave the next its name; and
    a run of an older version, which has no names."""
    texts = ["a\n\n=== step 1  b  reward 1", "第二"]
    batch = make_batch([1, 1, 2], [1.0, 0.0, 0.0], groups=[0, 1, 1], puzzles=tuple(texts),
                       task=SimpleNamespace(show=lambda puzzle: puzzle))
    write_credit_log(run / "credit" / "step-000002.npz", 2, batch, instrument(batch, batch.mask.float(), Settings()))
    write_metrics(run)
    log = read_log(run)
    rows = np.flatnonzero(log["position"] == 0)
    assert [tokens_page.heading(log, row).partition("Puzzle: ")[2] for row in rows] == ["[1, 2, 3] -> 6"] * 2 + [
        texts[0], texts[1], texts[1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps, factor", [(1, 0), (12, 1)])
def test_pictures_can_be_read_whatever_the_question(tmp_path, figures, call, steps, factor):
    """Guards against a title or a question that runs into its neighbour, half steps, a single step not seen, and, with
    a factor of 0, a division by zero where every group had equal rewards."""
    question = "Somchai (สมชาย, 你好) has $x_1$ coins in `{\\frac` and 😀 " * 8
    run = make_run(tmp_path / "a", 0.75, steps, mitigation="one_of_a_rather_long_name_for_a_picture", advantage="rloo")
    for step in range(1, steps + 1):
        write_log(run, step, factor)
        change_log(run, "puzzle_text", lambda _: np.array([question]), step)
    write_metrics(run, [[0, 0.25], *([step, ""] for step in range(1, steps)), [steps, 0.75]])
    text = call(run, f"{run}/", draw=True)  # the same folder once more is not another run
    assert "nan" not in text and "# Comparison" not in text
    for figure in figures:
        check_texts(figure)
    learning, _ = figures
    for axis in learning.axes[:3]:
        assert axis.lines[0].get_marker() == "o" and all(tick == int(tick) for tick in axis.get_xticks())


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_log_without_training_is_analyzed(run, call, figures):
    """Guards against a failure, and empty rows, columns and panels, where nobody measured success or a gradient, as of
    somebody else's rollouts; and against the advice to finish such a run."""
    run_folder.write_header(run, [])
    run_folder.append_row(run, {"step": 0})
    for step in (1, 2):
        log = run / "credit" / f"step-{step:06d}.npz"
        run_folder.append_row(run, {"step": step, "reward": step / 4 - 0.5, "length": 3, "seconds": 1,
                                     "credit_checksum": checksum(log)})
    text = call(run, draw=True)
    table = analyze.learning_table(runs.read_metrics(run))
    assert [table.header, *table.rows] == [["step", "reward", "length"], ["1", "-0.250", "3.0"], ["2", "0.000", "3.0"]]
    assert [axis.get_title() for axis in figures[0].axes] == ["Reward", "Tokens a response", "Contribution"]
    assert figures[0].axes[0].lines[0].get_ydata().tolist() == [-0.25, 0] and figures[0].axes[0].get_ylim()[0] == -0.25
    assert "nan" not in text and "| 12 | 100.0% |" in " ".join(text.split())
    summary = analyze.summarize(run, read_log(run))
    assert summary["curve"] == {} and math.isnan(summary["end"]) and math.isnan(summary["area"])
    other = shutil.copytree(run, run.parent / "other", ignore=shutil.ignore_patterns("analysis"))
    (other / "config.json").write_text(json.dumps(config("none", seed=1)))
    assert "Not finished" not in call(run, other)


# ------------------------------------------------------------------------------------------------------- comparison


def test_labels_name_what_differs():
    """Guards against settings averaged as seeds, and labels full of what only one method has."""
    a, b = config("a", 1, {"x": 1}), config("b", 2, {"x": 2}, normalize="none", steps=7, out="elsewhere")
    assert comparison.labels([a, b, config("a", 3, {"x": 1})]) == ["a", "b", "a"]
    assert [analyze.method_name(x) for x in ("none advantage=rloo lr=0.1", "a x=1")] == ["RLOO lr=0.1", "a x=1"]
    assert comparison.labels([a, config("a", 1, {"x": 3}), b]) == ["a x=1", "a x=3", "b"]
    names = comparison.labels([a, config("a", 1, {"x": 1}, normalize="step")])
    assert names == ["a normalize=response", "a normalize=step"]
    assert comparison.labels([a, config("b", 1, {}, lr=0.2)]) == ["a lr=0.1", "b lr=0.2"]
    moved = [config("a", seed, model=model, data=data) | {"inputs": inputs | {"the list": [1, seed]}}
             for seed, model, data, inputs in (
                 (0, "/x/m", "", {"/x/m/config.json": [2, 2]}), (1, "m", "", {"m/config.json": [2, 2]}),
                 (2, "m", "", {"m/config.json": [2, 3]}), (3, "m", "d", {"m/config.json": [2, 2], "d": [2, 2]}))]
    assert comparison.labels(comparison.unmoved(moved)) == ["a model=/x/m", "a model=/x/m", "a model=m",
                                                               "a data=d model=/x/m"]
    assert comparison.labels([config("a", new=1), config("a", new=2), config("a")]) == ["a new=1", "a new=2", "a"]


def table_of(run):
    """The rows of table.md beside a run by method: their cells by column, those of all tables."""
    found = {}
    for table in (run.parent / "comparison" / "table.md").read_text().split("\n## ")[1:]:
        header, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()
                            if line.startswith("|")]
        for row in rows:
            found.setdefault(row[0], {}).update(zip(header[1:], row[1:]))
    return found


def number(cell):
    """A cell without its interval."""
    return float(cell.partition(" ± ")[0])


@pytest.mark.slow
def test_methods_are_compared_over_seeds(run, call):
    """Guards against seeds counted as methods, methods averaged as seeds, and our own output taken for a run."""
    (run / "final.json").write_text('{"step": 2, "heldout_success": 0.75, "heldout_stderr": NaN, "pass@16": 0.9}')
    others = [make_run(run.parent / "none-seed1", 0.85, mitigation="none", seed=1)]
    others += [make_run(run.parent / f"m-seed{seed}", end, mitigation="m", seed=seed)
               for seed, end in ((0, 0.5), (7, 0.7))]
    call(run, *others)
    text = call(run.parent / "comparison", run, *others, draw=True)
    rows = table_of(run)
    none, m = rows["none"], rows["m"]
    assert list(rows) == ["none", "m"] and (none["seeds"], m["seeds"]) == ("2", "2")
    assert not any(said in text for said in ("nothing can be concluded", "not comparable", "left out"))
    assert none["start"] == "0.250" and none["end"] == "0.800 ± 0.635"  # 12.706 * 0.05
    assert none["pass@16"] == m["pass@16"] == ""  # one seed of two was measured
    assert number(m["area"]) == 0.425  # of straight lines from 0.25 to 0.5 and 0.7, over the whole time
    half = report.t_estimate(np.array([0.5, 0.7]), np.array([0.75, 0.85])).high + 0.2
    assert m["end - baseline"] == f"-0.200 ± {half:.3f}" and none["end - baseline"] == ""
    assert [number(m[name]) for name in ("Filler \\|contrib\\|", "Reasoning \\|contrib\\|", "Ratio")] == [
        0.938, 1.594, 0.588]  # of Appendix B, with tags: (1 + 0.5 + 1 + 0) / 4 and (0.125 + 2) / 2, times 1.5
    # and without
    assert [number(m[name]) for name in ("end", "contribution, filler size", "contribution, reasoning size",
                                         "contribution, filler / reasoning")] == pytest.approx(
        [0.6, 1.5 * 1, 1.5 * 1.0625, 1 / 1.0625], abs=6e-4)
    assert number(m["gradient, reasoning size"]) == pytest.approx(1.5 * 0.34375, abs=6e-4)
    assert [m[name] for name in ("gradient norm", "its spread", "seconds a step")] == [
        "0.500", "0.000", "0.500"]
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
    assert "nothing can be concluded" in text  # the baseline has one seed
    assert (number(rows["none"]["pass@4"]), number(rows["a"]["pass@4"])) == (0.6, 0.8)
    assert number(rows["a"]["pass@4 - baseline"]) == 0.2
    assert not any(cell for name, cell in rows["b"].items() if name.startswith("pass@"))  # each k of one seed alone


@pytest.mark.parametrize("measured, area", [
    ([[0, 0.25], [1, 0.5], [2, ""], [3, ""], [4, 0.9]], (1 * 0.375 + 3 * 0.7) / 4), ([[0, 0.25], [1, 0.9]], 0.575)])
def test_every_table_warns_of_what_is_not_comparable(tmp_path, call, measured, area):
    """Guards against a verdict from a single seed, from runs of unequal length, from a file that was edited, and from
    the mean of a curve of three points held against a straight line's, or one that ignores how far they are apart."""
    run, *others = [make_run(tmp_path / name, 0.9, 4, mitigation=name) for name in ("none", "a", "b")]
    write_metrics(others[0], measured)
    for folder, content in ((run, 1), (others[0], 1), (others[1], 2)):
        written = json.loads((folder / "config.json").read_text()) | {"inputs": {"same": [4], "my.jsonl": [content]}}
        (folder / "config.json").write_text(json.dumps(written))
    last = call(run, *others).splitlines()[-1]
    text = (run.parent / "comparison" / "table.md").read_text()
    for warning in ("Measured steps (--steps, --eval_every): not the same in "
                    f"{run} and {others[0]}, so the results are not comparable",
                    f"my.jsonl: not the same in {run} and {others[1]}, so", "Not finished, so the end is the last"):
        assert warning in last and text.count(warning) == 4
    assert text.count("With one seed, nothing can be concluded") == text.count("\n## ") == 4
    assert number(table_of(run)["a"]["area"]) == pytest.approx(area, abs=6e-4)


@pytest.mark.slow
def test_the_baseline_is_none_with_the_same_settings(run, call):
    """Guards against RLOO that is called GRPO, a baseline of another learning rate, --normalize taken for one, and a
    user who begins with RLOO, as README says, and gets no difference."""
    found = lambda *runs: (call(*runs), [(label, row["end - baseline"]) for label, row in table_of(run).items()])[1]
    rloo = make_run(run.parent / "rloo", 0.9, mitigation="none", advantage="rloo")
    others = [make_run(run.parent / "m", 0.8, mitigation="m", lr=0.2),
              make_run(run.parent / "k", 0.7, mitigation="k", normalize="none", device="cuda")]
    assert found(run, rloo, *others) == [  # the best of the others first
        ("none lr=0.1", ""), ("none advantage=rloo lr=0.1", "0.150"), ("m lr=0.2", ""), ("k lr=0.1", "-0.050")]
    assert found(rloo, others[1]) == [("none advantage=rloo", ""), ("k", "-0.200")]
    gdpo = make_run(run.parent / "gdpo", 0.8, mitigation="none", advantage="gdpo")  # as long a name
    assert found(gdpo, rloo)[0] == ("none advantage=rloo", "")


def group(label, ends):
    """A Group whose runs ended, by seed, with these successes; gradients are twice, lengths ten times as large."""
    def row(end):
        success = np.array([0.0, np.nan, end])
        return {"metrics": {"step": np.arange(3.0), "heldout_success": success, "heldout_stderr": success / 10,
                            "length": np.array([np.nan, 0, 10 * end]), "grad_norm": np.array([np.nan, end, 2 * end])},
                "curve": {0: 0.0, 2: end},
                "contribution, filler size": end, "contribution, reasoning size": end / 2}
    return comparison.Group(label, {seed: row(end) for seed, end in ends.items()})


@pytest.mark.slow
def test_the_picture_of_methods_shows_means_and_intervals(tmp_path, figures, recwarn):
    """Guards against a band or a bar of standard errors, one column's curve for another's, and methods that look
    alike."""
    base = group("none", {0: 0.25, 1: 0.35})
    base.rows[1]["metrics"]["heldout_success"][1] = 0.1  # which the other seed did not measure
    analyze.draw_methods([base], tmp_path / "a.png")
    success, length, norm, bars = figures[0].axes
    assert [axis.lines[0].get_ydata() for axis in (success, length, norm)] == [
        pytest.approx(y) for y in ([0, 0.3], [0, 3], [0.3, 0.6])]
    assert success.lines[0].get_xdata().tolist() == [0, 2]
    assert success.collections[0].get_paths()[0].get_extents().y0 == pytest.approx(0.3 - 12.706 * 0.05, abs=1e-4)
    assert [bar.get_height() for bar in bars.patches] == pytest.approx([0.3, 0.15])
    low, high = bars.collections[0].get_segments()[0]
    assert (high[1] - low[1]) / 2 == pytest.approx(12.706 * 0.05, abs=1e-4)
    long = [f"{name} model=" + 99 * "x" for name in "de"]
    analyze.draw_methods([group(name, {0: 0.5, 1: 0.6}) for name in [*"abc", *long]], tmp_path / "b.png")
    lines = figures[1].axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 5
    assert [line.get_label() for line in lines] == [*"abc", "d …", "e …"]
    analyze.draw_methods([group("none", {0: 0.5})], tmp_path / "c.png")
    [(low, high)] = figures[2].axes[0].collections[-1].get_segments()[-1:]
    assert (low[1], high[1]) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05))  # over puzzles
    for row in base.rows.values():
        row["metrics"] |= {f"a number of the task, {i}": np.array([np.nan, i, row["curve"][2]]) for i in range(2)}
    analyze.draw_methods([base, group("a", {0: 0.5})], tmp_path / "d.png")
    shown = [axis.lines[0].get_ydata().tolist() for axis in figures[-1].axes[3:5]]
    assert shown == [[0, pytest.approx(0.3)], [1, pytest.approx(0.3)]]
    assert [bar.get_height() for bar in figures[-1].axes[5].patches][:2] == pytest.approx([0.3, 0.15])
    for figure in figures:
        check_texts(figure)
    assert not recwarn.list  # as matplotlib's, where a long name leaves the curves no room


@pytest.mark.slow
def test_methods_differ_in_their_looks_as_far_as_there_are_any(tmp_path, figures):
    """All credit functions, and more: colour, line and marker of no two are the same."""
    analyze.draw_methods([group(f"m{i}", {0: 0.5}) for i in range(64)], tmp_path / "a.png")
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figures[0].axes[0].lines}
    assert len(looks) == 64 > len(CREDIT_FUNCTIONS)


def test_methods_without_an_end_stand_last():
    """Imported rollouts have none: among themselves they go by name, however the command line has them."""
    made = [("ktae", math.nan), ("random", 0.3), ("dpo", math.nan), ("tempo", 0.5)]
    for order in itertools.permutations(made):
        found = comparison.group_runs([comparison.Run(name, config(name), {"end": end}) for name, end in order])
        assert [group.label for group in found] == ["tempo", "random", "dpo", "ktae"]


def test_a_column_may_be_named_like_a_difference(run, call):
    """A user's column is data: it is taken apart nowhere."""
    for folder in (run, make_run(run.parent / "other", 0.5, mitigation="ppo")):
        header, start, *lines = (folder / "metrics.csv").read_text().splitlines()
        (folder / "metrics.csv").write_text("\n".join([header + ",reward - baseline", start + ",", *(x + ",7" for x in lines)]))
    assert "reward - baseline" in call(run, run.parent / "other").partition("Further columns")[2]


def test_numbers_of_a_grade_are_in_the_tables(run, call):
    """Guards against a column that only metrics.csv shows, also where one of the runs has none of it."""
    header, start, *lines = (run / "metrics.csv").read_text().splitlines()
    (run / "metrics.csv").write_text("\n".join([header, start, lines[0] + "17000", lines[1] + "0.5"]))
    assert row_of(analyze.learning_table(runs.read_metrics(run)), "1")["of a head"] == "1.7e+04"
    text = call(run, make_run(run.parent / "other", 0.5, mitigation="ppo"))
    table = text.partition("Further columns")[2]
    assert re.search(r"none +\| +1 \|.* 8500.250 \|\n", table) and re.search(r"ppo +\| +1 \|.*\| +\|\n", table)


# ----------------------------------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_a_run_that_only_evaluated_is_left_out(run, call):
    """Guards against one folder of --steps 0 that keeps the others from being read, and a table that is not shown."""
    evaluated = run.parent / "evaluated"
    evaluated.mkdir()
    write_metrics(evaluated, [[0, 0.25]])
    write_metrics(run, [[0, 0.25], [1, 0.5]])  # a single step is enough
    text = call(run, evaluated, draw=True)
    assert f"left out: {evaluated} has no step" in text and f"left out: {run} " not in text
    printed, tables = text.partition("\nwrote")[0].split("\n## ")[1:], (run / "analysis" / "tables.md").read_text()
    assert len(printed) == 3 and all(f"\n## {table.strip()}\n" in tables for table in printed)
    for picture in ("learning.png", "credit.png"):
        assert (run / "analysis" / picture).read_bytes().startswith(b"\x89PNG")
    assert "is not a run folder" in refused(call, run.parent / "comparison")
    assert "no run with a step of" in refused(call, evaluated)


def change_log(run, column, change, step=2):
    """Change a column of a step's log."""
    file = run / "credit" / f"step-{step:06d}.npz"
    columns = dict(np.load(file))
    np.savez(file, **columns | {column: change(columns.get(column))})


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
    assert re.search(said, refused(call, run, other))
