"""Accuracy of the credit and what it buys, against hand computations."""
import numpy as np
import pytest
import torch

import countdown_task
from analyze import RLOO
from lab import statistics
from lab.estimates import points, read_cell
from lab.study import accuracy, perfect
from lab.study.test_tables import area_runs
from plumbing.report import Estimate, welch
from rollout import Policy, rollout
from train import Settings


def test_accuracy_is_pearsons_correlation_over_all_tokens(monkeypatch):
    """Guards against ranks, responses centred, a mean of the steps, and puzzles of two steps taken for one."""
    monkeypatch.setattr(statistics, "RESAMPLES", 50)
    rng = np.random.default_rng(0)
    steps = [({name: rng.normal(size=40) for name in (*accuracy.CREDITS, "truth")}, np.arange(40) // 4 % 5)
             for _ in accuracy.CHECKPOINTS]
    steps[1][0]["RLOO"] = 3 * steps[1][0]["truth"] + 1
    rows = {row[0]: row[1:] for row in accuracy.table_accuracy(steps).rows}
    assert read_cell(rows["RLOO"][1]).value == 1.0
    joined = [np.concatenate([credits[name] for credits, _ in steps]) for name in ("vineppo", "truth")]
    assert read_cell(rows["vineppo"][3]).value == pytest.approx(np.corrcoef(*joined)[0, 1], abs=0.005)


def test_the_truth_is_independent_of_the_credit(random_model, tokenizer):
    """Guards against rollouts of a credit that are those of the truth it is compared with, and other responses."""
    policy = Policy(random_model, tokenizer, countdown_task)
    s = Settings(questions=2, answers=2, max_new_tokens=6)
    batch = rollout(policy, countdown_task.load("train", 2), s, 1)
    other = accuracy.again(batch)
    assert torch.equal(other.tokens, batch.tokens) and torch.equal(other.reward, batch.reward)
    counts = batch.mask * 3
    grade = {"answer": 0.0, "format": 0.0}
    batch.ask.grade = other.ask.grade = lambda text, puzzle: grade | {"reward": len(text) % 7 + 0.5}
    mine, its = (b.ask.rollout_values(counts, other=True) for b in (batch, other))
    assert not torch.equal(mine, its)


def test_each_arm_is_compared_with_rloo_at_its_rate(monkeypatch, tmp_path, figures):
    """Guards against RLOO at another rate, a cost in other units, and an accuracy of another credit."""
    accuracy = {RLOO: Estimate(0.1, 0.05, 0.15), "oracle": Estimate(0.8, 0.7, 0.9)}
    monkeypatch.setattr(perfect, "read_accuracy", lambda: accuracy)
    runs = (area_runs("none lr=0.00028 advantage=rloo", 0.40, 0.42)
            + area_runs("none lr=0.00039 advantage=rloo", 0.30, 0.32)
            + area_runs("oracle lr=0.00028", 0.50, 0.53, spent={0.0: 0.0, 9.0: 90.0})
            + area_runs("none lr=0.00028 answers=45 advantage=rloo", 0.45, 0.47))
    table = perfect.table_perfect(runs, area_runs("none", 0.3, 0.3))
    rows = {(row[0].strip("`"), row[1]): dict(zip(table.header, row)) for row in table.rows}
    best = rows["oracle", "0.00028"]
    assert best["area - RLOO"] == points(welch(np.array([0.50, 0.53]), np.array([0.40, 0.42])))
    assert best["area - 45"].startswith("5.5 ± ") and rows["RLOO", "0.00039"]["area - 45"] == ""
    assert best["gradient norm"] == "0.500 ± 0.000" and best["step length"] == "0.100 ± 0.000"
    assert [best[name] for name in ("seeds", "accuracy", "cost")] == ["2, 2", "0.80 (0.70 to 0.90)", "9.0"]
    assert list(rows)[0] == ("oracle", "0.00028") and rows["RLOO", "0.00039"]["area - RLOO"] == ""
    perfect.draw_perfect(runs, tmp_path / "perfect.png")
    lines = {line.get_label(): line for line in figures[0].axes[0].get_lines()}
    assert np.allclose(lines["RLOO with 45 responses"].get_ydata(), 46)


def test_no_picture_while_its_runs_are_half_done(tmp_path):
    """Guards against tables that can't be written while the first seeds run."""
    for runs in (area_runs("oracle lr=0.00028", 0.5), area_runs("oracle lr=0.00028", 0.5, 0.6)):
        perfect.draw_perfect(runs, tmp_path / "a.png")
        assert not (tmp_path / "a.png").exists()
