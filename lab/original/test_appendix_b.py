"""Appendix B of the original, made again: against logs whose figures were worked out by hand."""
import json
import math
import sys

import numpy as np
import pytest
import torch

from lab.estimates import read_cell, read_table
from lab.original import appendix_b
from plumbing.metrics import ALWAYS, COLUMNS, write_credit_log
from plumbing.report import t_quantile, write_csv
from tests.fixtures import make_batch

# The five tokens of a response are filler, reasoning, reasoning, filler and a tag.
WEIGHTS = [0.5, 0.5, 1, 1, 2]
ROLES, LOGPROB, SLOPE = [0, 1, 1, 0, 2], [-1, -2, -1, -0.5, -0.25], [1, 0.5, 1, 0.5, 0.25]


def make_log(*advantages):
    """The columns of a log of responses with these advantages, one a step, whose tokens are those above."""
    n, by_token = len(advantages), np.outer(advantages, WEIGHTS)  # (n, 5)
    return {"role": np.tile(ROLES, n), "relative": np.tile(np.arange(5) / 5, n), "tokens": np.ones(5 * n),
            "id": np.repeat(np.arange(n), 5), "step": np.repeat(np.arange(n), 5), "credit": by_token.ravel(),
            "contribution": (by_token * LOGPROB).ravel(), "gradient": (by_token * SLOPE).ravel(),
            "as they logged": np.outer(advantages, LOGPROB).ravel()}


def test_types_by_hand():
    """Guards against a type or measure under another's name, signs that cancel, a weight in their measure, and a ratio
    of totals or of another time.

    Contributions of the tokens are 0.5, 1, 1, 0.5, 0.5 times the advantage, gradients 0.5, 0.25, 1, 0.5, 0.5.
    """
    log = make_log(2.0, -2.0, 1.0, 1.0, 1.0)  # the first two of the five steps are the first quarter
    log["gradient"][20] = 0  # filler of the last step
    assert appendix_b.type_figures(log) == pytest.approx({
        "contribution, tags as filler": 0.5, "gradient, tags as filler": (10 / 15) / (8.75 / 10),
        "contribution, first quarter": 0.5, "gradient, first quarter": 0.8, "as they logged": (1.75 / 3) / (3 / 2),
        "tokens, filler": 0.4, "tokens, reasoning": 0.4, "tokens, structure": 0.2,
        "credit, filler": 0.3, "credit, reasoning": 0.3, "credit, structure": 0.4,
        "gradient, filler": 6.5 / 18.75, "gradient, reasoning": 8.75 / 18.75, "gradient, structure": 3.5 / 18.75})


def test_positions_by_hand():
    """Guards against a fifth under another's name, and a size of 0 where there is no such token."""
    figures = appendix_b.position_figures(make_log(2.0, -2.0, 0.0, 0.0))  # mean abs(advantage) is 1
    expected = {"contribution, reasoning, 20-40%": 1, "contribution, filler, 60-80%": 0.5,
                "gradient, reasoning, 20-40%": 0.25, "gradient, reasoning, 40-60%": 1, "gradient, filler, 0-20%": 0.5,
                "contribution, first / last": 1, "gradient, first / last": 1}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert math.isnan(figures["contribution, filler, 80-100%"])


def test_norms_by_hand():
    """Guards against the row of the start model, and a spread over seeds."""
    figures = appendix_b.norm_figures({"grad_norm": np.array([math.nan, *[1.0] * 10, 4.0, *[3.0] * 9])})
    assert (figures["first ten steps"], figures["last ten steps"]) == pytest.approx((1, 3.1))
    assert figures["spread / mean"] == pytest.approx(math.sqrt((10 + 16 + 81) / 20 - 2.05**2) / 2.05)


# ---------------------------------------------------------------------------------------------------- run folders


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a finished run, two responses a step, and returns its folder."""
    def make(name, end, weights=(1.0, 1.0, 1.0, 1.0, 1.0), seed=0, steps=1, **method):
        """A run that ends with a held-out success, and gives its tokens these weights."""
        folder = tmp_path / f"{name}-seed{seed}"
        (folder / "credit").mkdir(parents=True)
        batch = make_batch([5, 5], [1.0, -1.0], role=torch.tensor([ROLES] * 2, dtype=torch.int8),
                           logprob=torch.tensor([LOGPROB] * 2), logit_grad=torch.tensor([SLOPE] * 2))
        credit = batch.advantage[:, None] * torch.tensor(weights)
        rows = [dict.fromkeys(COLUMNS) | {"step": 0, "heldout_success": 0.25, "heldout_stderr": 0.1}]
        for step in range(1, steps + 1):
            checksum = write_credit_log(folder / "credit" / f"step-{step:06d}.npz", step, batch, credit)
            rows.append(dict.fromkeys(ALWAYS, 0.5) | {"step": step, "heldout_success": end, "heldout_stderr": 0.1,
                                                      "credit_checksum": checksum})
        write_csv(rows, folder / "metrics.csv")
        settings = {"mitigation": name.partition("-")[0], "seed": seed, "steps": steps, "lr": 0.1}
        (folder / "config.json").write_text(json.dumps({"settings": settings, "method": method}))
        (folder / "final.json").write_text(json.dumps({"step": steps, "heldout_success": end, "pass@16": 0.5}))
        return folder
    return make


@pytest.fixture
def study(make_run):
    """Two seeds of GRPO and of two settings of a method that discounts the first three tokens, in mixed order."""
    runs = [make_run("m-b", 0.5 + seed / 10, [0.5, 0.5, 0.5, 2, 2], seed, x=0.75) for seed in (0, 1)]
    runs += [make_run("none", 0.7 + seed / 10, seed=seed) for seed in (0, 1)]
    return runs + [make_run("m-a", 0.3, [0.25, 0.25, 0.25, 2, 2], seed, x=0.5) for seed in (0, 1)]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that runs the command on folders; it writes to tmp_path."""
    def run(folders):
        monkeypatch.setattr(appendix_b, "RESULTS", tmp_path)
        monkeypatch.setattr(sys, "argv", ["appendix_b", *map(str, folders)])
        appendix_b.main()
    return run


def test_settings_are_rows_and_seeds_their_mean(study, call, tmp_path):
    """Guards against settings averaged as seeds, rows in the order of files, and percent for shares."""
    call(study)
    tables = {}
    for title in ("Learning", "Filler / reasoning", "Early and late", "Type by position, gradient"):
        header, rows = read_table(tmp_path / "appendix-b.md", title)
        tables[title] = {row[0] + (row[1] if "position" in title else ""): dict(zip(header, row)) for row in rows}
    learning, none, half = tables["Learning"], "GRPO", "`m x=0.5`"
    assert list(learning) == [none, half, "`m x=0.75`"]
    assert learning[none]["step 1"] == f"75.0 ± {100 * t_quantile(1) * 0.05:.1f}" and learning[none]["end - GRPO"] == ""
    assert read_cell(learning[half]["end - GRPO"]).value == -45
    assert learning[half]["seeds"] == "2" and learning[half]["step 0"] == "25.0 ± 0.0"
    ratios = tables["Filler / reasoning"][half]
    assert ratios["contribution, filler / reasoning"] == "1.667 ± 0.000"  # (1.25 / 2) / (0.75 / 2)
    assert ratios["as they logged"] == "0.389 ± 0.000"  # (1.75 / 3) / (3 / 2)
    assert tables["Early and late"][half]["contribution, first / last"] == "0.500 ± 0.000"  # 0.25 / (2 * 0.25)
    assert tables["Early and late"][none]["contribution, first / last"] == "4.000 ± 0.000"
    assert tables["Type by position, gradient"]["`m x=0.75`reasoning"]["40-60%"] == "0.500 ± 0.000"
    assert tables["Type by position, gradient"]["`m x=0.75`reasoning"]["0-20%"] == ""


def test_pictures_show_the_tables(study, call, figures):
    """Guards against a curve of another setting, and a bar of another type."""
    call(study)
    (panel,), (_, credit, _) = (figure.axes for figure in figures)
    ends = {bars.get_label(): bars.lines[0].get_ydata()[-1] for bars in panel.containers}
    assert ends == pytest.approx({"GRPO": 0.75, "x=0.5": 0.3, "x=0.75": 0.55})
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in credit.containers}
    ends = {bars.get_label(): [bar.get_x() + bar.get_width() for bar in bars] for bars in credit.containers}
    assert widths["filler"] == pytest.approx([0.4, 2.25 / 4.75, 2.5 / 5.5])
    assert widths["structure"] == pytest.approx([0.2, 2 / 4.75, 2 / 5.5])
    assert ends["structure"] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("spoil, said", [
    (lambda runs, _: (runs[0] / "final.json").unlink(), "Not finished, .* m-b-seed0"),
    (lambda runs, _: (runs.pop(2), runs.pop(2)), "name runs of GRPO"),
    (lambda runs, make: runs.append(make("m-c", 0.5, seed=2, steps=7, x=0.5)), "different numbers of steps"),
], ids=["unfinished", "no GRPO", "another length"])
def test_what_cannot_be_compared_is_refused_in_a_sentence(study, make_run, spoil, said, call, tmp_path):
    """Guards against half a table, and a short run that looks worse than a longer one."""
    spoil(study, make_run)
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{said}[^\n]*$"):
        call(study)
    assert not (tmp_path / "appendix-b.md").exists()
