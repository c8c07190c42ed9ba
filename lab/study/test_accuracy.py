"""Accuracy of the credit, against numpy and an independent grade."""
import numpy as np
import pytest
import torch

import countdown_task
from lab import statistics
from lab.estimates import read_cell
from lab.study import accuracy
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
