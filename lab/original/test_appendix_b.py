"""Appendix B of the original, made again: against logs whose figures were worked out by hand.

Run it:  python -m pytest lab/original/test_appendix_b.py
"""
import csv
import json
import math
import sys

import numpy as np
import pytest
import torch

from lab.estimates import read_cell, read_table
from lab.original import appendix_b
from plumbing.metrics import ALWAYS, COLUMNS, write_credit_log
from plumbing.report import t_quantile
from tests.fixtures import make_batch

WEIGHTS = [0.5, 0.5, 1, 1, 2]  # of the five tokens of a response: filler, reasoning, reasoning, filler, a tag
ROLES, LOGPROB, SLOPE = [0, 1, 1, 0, 2], [-1, -2, -1, -0.5, -0.25], [1, 0.5, 1, 0.5, 0.25]


def make_log(*advantages):
    """The columns of a log of responses with these advantages, whose tokens are those above."""
    n, rows = len(advantages), np.repeat(advantages, 5).astype(float)
    log = {"role": np.tile(ROLES, n), "relative": np.tile(np.arange(5) / 5, n), "id": np.repeat(np.arange(n), 5),
           "credit": rows * np.tile(WEIGHTS, n), "as they logged": rows * np.tile(LOGPROB, n)}
    return log | {"contribution": log["credit"] * np.tile(LOGPROB, n), "gradient": log["credit"] * np.tile(SLOPE, n)}


def test_sizes_by_hand():
    """Guards against a type, fifth or measure under another's name, signs that cancel, and a weight in their measure.

    Contributions of the tokens are 0.5, 1, 1, 0.5, 0.5 times the advantage, gradients 0.5, 0.25, 1, 0.5, 0.5.
    """
    figures = appendix_b.size_figures(make_log(2.0, -2.0, 0.0, 0.0))  # mean abs(advantage) is 1
    expected = {
        "contribution, filler, all": 0.5, "contribution, reasoning, all": 1, "contribution, structure, all": 0.5,
        "contribution, filler and tags, all": 0.5, "contribution, filler and tags / reasoning": 0.5,
        "contribution, reasoning, 20-40%": 1, "contribution, filler and tags, 80-100%": 0.5,
        "gradient, filler, all": 0.5, "gradient, reasoning, all": 0.625, "gradient, reasoning, 20-40%": 0.25,
        "gradient, reasoning, 40-60%": 1, "gradient, filler and tags / reasoning": 0.8,
        "credit, first / last": 0.25, "contribution, first / last": 1, "gradient, first / last": 1,
        "as they logged, first / last": 4, "as they logged, filler and tags / reasoning": (1.75 / 3) / (3 / 2),
        "tokens, filler share": 0.4, "credit, filler share": 0.3, "credit, reasoning share": 0.3,
        "credit, structure share": 0.4, "contribution, reasoning share": 2 / 3.5,
        "gradient, structure share": 0.5 / 2.75}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert math.isnan(figures["contribution, filler, 80-100%"])  # no such token


def test_quarters_by_hand():
    """Guards against a ratio of totals, and of another time: three responses, in steps 1, 2 and 8 of eight."""
    log = make_log(2.0, 2.0, 1.0) | {"step": np.repeat([1, 2, 8], 5)}
    log["gradient"][10] = 0  # filler of the last step
    figures = appendix_b.quarter_figures(log)
    assert figures == pytest.approx({"contribution, first quarter": 0.5, "contribution, last quarter": 0.5,
                                     "gradient, first quarter": 0.8, "gradient, last quarter": 0.4})


def test_weights_by_hand():
    """Guards against weights over the run, a response without credit that counts, and the sign of the advantage."""
    log = make_log(3.0, 0.0, -0.1)
    log["credit"][10:] = [-0.1, 0, 0, 0, 0]  # the whole weight on one token of five
    figures = appendix_b.weight_figures(log)
    assert figures["largest weight"] == pytest.approx((2 + 5) / 2)
    assert figures["largest of the run"] == pytest.approx(5)
    assert figures["effective number"] == pytest.approx((25 / 6.5 + 1) / 2)
    assert all(map(math.isnan, appendix_b.weight_figures(make_log(0.0)).values()))


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
        """Write a run of a method and return its folder."""
        folder = tmp_path / f"{name}-seed{seed}"
        (folder / "credit").mkdir(parents=True)
        tensors = {"logprob": LOGPROB, "logit_grad": SLOPE}
        batch = make_batch([5, 5], [1.0, -1.0], role=torch.tensor([ROLES] * 2, dtype=torch.int8),
                           **{name: torch.tensor([values] * 2) for name, values in tensors.items()})
        credit = batch.advantage[:, None] * torch.tensor(weights)
        checksums = {step: write_credit_log(folder / "credit" / f"step-{step:06d}.npz", step, batch, credit)
                     for step in range(1, steps + 1)}
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerow({"step": 0, "heldout_success": 0.25, "heldout_stderr": 0.1})
            row = dict.fromkeys(ALWAYS, 0.0) | {"length": 5, "entropy": 1, "grad_norm": 0.5}
            measured = {"heldout_success": end, "heldout_stderr": 0.1}
            writer.writerows(row | {"step": step, "credit_checksum": checksum} | (measured if step == steps else {})
                             for step, checksum in checksums.items())
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


def call(monkeypatch, out, *words):
    """Run the command, which writes to `out`."""
    monkeypatch.setattr(appendix_b, "RESULTS", out)
    monkeypatch.setattr(sys, "argv", ["appendix_b", *map(str, words)])
    appendix_b.main()


def test_settings_are_rows_and_seeds_their_mean(study, tmp_path, monkeypatch):
    """Guards against settings averaged as seeds, rows in the order of files, and percent for shares."""
    call(monkeypatch, tmp_path / "out", *study)
    tables = {}
    for title in ("Learning", "Summary, contribution", "Early and late", "Weights", "Type by position, gradient"):
        header, rows = read_table(tmp_path / "out" / "appendix-b.md", title)
        tables[title] = {row[0] + (row[1] if "position" in title else ""): dict(zip(header, row)) for row in rows}
    learning, none, half = tables["Learning"], "GRPO", "`m x=0.5`"
    assert list(learning) == [none, half, "`m x=0.75`"]
    assert learning[none]["step 1"] == f"75.0 ± {100 * t_quantile(1) * 0.05:.1f}" and learning[none]["end - GRPO"] == ""
    assert read_cell(learning[half]["end - GRPO"]).value == -45
    assert learning[half]["seeds"] == "2" and learning[half]["step 0"] == "25.0 ± 0.0"
    assert tables["Summary, contribution"][half]["filler / reasoning"] == "1.667 ± 0.000"  # (1.25 / 2) / (0.75 / 2)
    assert tables["Summary, contribution"][half]["as they logged"] == "0.389 ± 0.000"  # (1.75 / 3) / (3 / 2)
    assert tables["Early and late"][half]["credit"] == "0.125 ± 0.000"
    assert tables["Early and late"][none]["contribution"] == "4.000 ± 0.000"
    assert tables["Weights"][half]["largest weight"] == "2.105 ± 0.000"  # 2 of 0.95 on average
    assert tables["Weights"][none]["effective number"] == "5.000 ± 0.000"
    assert tables["Type by position, gradient"]["`m x=0.75`reasoning"]["40-60%"] == "0.500 ± 0.000"
    assert tables["Type by position, gradient"]["`m x=0.75`reasoning"]["0-20%"] == ""


def test_pictures_show_the_tables(study, tmp_path, monkeypatch, figures):
    """Guards against a curve of another setting, and a bar of another type."""
    call(monkeypatch, tmp_path, *study)
    (panel,), (_, credit, _) = (figure.axes for figure in figures)
    ends = {bars.get_label(): bars.lines[0].get_ydata()[-1] for bars in panel.containers}
    assert ends == pytest.approx({"GRPO": 0.75, "x=0.5": 0.3, "x=0.75": 0.55})
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in credit.containers}
    ends = {bars.get_label(): [bar.get_x() + bar.get_width() for bar in bars] for bars in credit.containers}
    assert widths["filler"] == pytest.approx([0.4, 2.25 / 4.75, 2.5 / 5.5])
    assert widths["structure"] == pytest.approx([0.2, 2 / 4.75, 2 / 5.5])
    assert ends["structure"] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("spoil, said", [
    (lambda runs: (runs[0] / "final.json").unlink(), "m-b-seed0 is not finished; resume it with"),
    (lambda runs: (runs[1] / "credit" / "step-000001.npz").unlink(), "m-b-seed1 has no credit log"),
    (lambda runs: (runs[1] / "credit" / "step-000001.npz").write_bytes(b"PK"), "is not the one of metrics.csv"),
    (lambda runs: (runs.pop(2), runs.pop(2)), "name runs of GRPO"),
], ids=["unfinished", "no log", "broken log", "no GRPO"])
def test_what_cannot_be_read_is_said_in_a_sentence(study, spoil, said, tmp_path, monkeypatch):
    """Guards against a traceback, and half a table."""
    spoil(study)
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{said}[^\n]*$"):
        call(monkeypatch, tmp_path / "out", *study)
    assert not (tmp_path / "out").exists()


def test_runs_of_another_length_are_refused(study, make_run, tmp_path, monkeypatch):
    """Guards against a short run that looks worse than a longer one."""
    with pytest.raises(SystemExit, match="different numbers of steps"):
        call(monkeypatch, tmp_path, *study, make_run("m-c", 0.5, seed=2, steps=7, x=0.5))
