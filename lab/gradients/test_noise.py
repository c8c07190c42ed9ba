"""Noise and bias of gradients: baselines by loops, estimates by definition, the gradient that training applies."""
import itertools
import math
import re
from copy import deepcopy

import numpy as np
import pytest
import torch

import countdown_task
import grpo
from countdown_task import Puzzle
from lab.gradients import noise as gradient_noise
from methods import MITIGATIONS
from plumbing.optimizer import Optimizer
from rollout import Policy, rollout
from tests.plain import flat_gradient, plain_logprobs
from train import Settings


def test_baselines_are_what_loops_find():
    """Guards against a baseline that sees the response, and a correlation between puzzles: hard ones have long ones."""
    rng, level = np.random.default_rng(0), np.linspace(0.1, 0.9, 6)[:, None]
    r = (rng.random((6, 16)) < level).astype(float)
    n = rng.exponential(size=r.shape) * 9 - 30 * level + 30
    table = gradient_noise.table_baseline(r, n)
    for R, row in zip((2, 4, 8, 16), table.rows, strict=True):
        total = dict.fromkeys(("none", "best", "others"), 0.0)
        for q, i in itertools.product(range(6), range(R)):
            others = [j for j in range(R) if j != i]
            baseline = {"none": 0.0, "others": r[q, others].mean(),
                        "best": (r[q, others] * n[q, others]).sum() / n[q, others].sum()}
            for name, b in baseline.items():
                total[name] += (r[q, i] - b) ** 2 * n[q, i]
        none, best = (total[name] / total["others"] for name in ("none", "best"))
        assert [float(text.split()[0]) for text in row] == pytest.approx([R, none, best], abs=6e-3)
    x, y = ((v - v.mean(1, keepdims=True)).flatten() for v in (r, n))
    found = re.search(r"correlate by (-?\d\.\d+)", table.note)
    assert float(found[1]) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=6e-3)


def test_no_cosine_where_noise_hides_the_signal():
    """Guards against the root of a negative number, and two negative signals whose product is positive."""
    x, y = np.array([[1.0, 0.1], [-1.0, 0.1]]), np.array([[1.0, 0.0], [1.0, 0.0]])  # pairs: -0.99, 1
    for a, b in ((x, y), (y, x), (x, x)):
        assert math.isnan(gradient_noise.corrected_cosine(a @ b.T, a @ a.T, b @ b.T, np.ones(2, bool)))


def test_the_table_of_methods_by_definition(monkeypatch):
    """Guards against pairs of a batch with itself, n for n - 1, figures in another row, another reference than the
    last, an interval of something else, and a cosine without a signal."""
    monkeypatch.setattr(gradient_noise, "METHODS", {"one": None, "two": None, "weak": None})
    x, n = np.random.default_rng(0).normal(size=(4, 9, 40)), 9  # three methods and the reference, batches, parameters
    x[:, :, 0] += np.array([5.0, -4.0, 0.0, 6.0])[:, None]
    x[1, :, 1] += 3
    x[2] -= x[2].mean(0)

    def crossed(a, b):
        return np.mean([a[i] @ b[j] for i in range(len(a)) for j in range(len(a)) if i != j])

    def signal(a, b):
        noise = a.var(0, ddof=1).sum()
        return (a.mean(0) @ a.mean(0) - noise / len(a)) / noise

    def cosine(a, b):
        return crossed(a, b) / (crossed(a, a) * crossed(b, b)) ** 0.5

    rows = gradient_noise.table_methods(torch.tensor(x)).rows
    assert [row[0] for row in rows] == ["one", "two", "weak", "r - others' mean"]
    assert rows[2][2] == ""
    for i, j, measure in [(0, 1, signal), (1, 1, signal), (3, 1, signal), (0, 2, cosine), (1, 2, cosine)]:
        value = measure(x[i], x[3])
        without = [measure(*(np.delete(g, k, 0) for g in (x[i], x[3]))) for k in range(n)]
        half = 1.96 * (n - 1) * np.std(without, ddof=1) / n**0.5
        found = [float(text) for text in re.findall(r"-?\d+\.\d+", rows[i][j])]
        assert found == pytest.approx([value, value - half, value + half], abs=6e-3)


def test_method_gradients_are_what_training_applies(tokenizer, random_model, exact, monkeypatch):
    """Guards against another normalizer than training's, a prompt of another puzzle, and a policy gradient that is not
    the one of r - the others' mean."""
    puzzles = [Puzzle((4, 3, 5), 8), Puzzle((7, 18, 2, 11), 36)]
    few = {name: MITIGATIONS[name] for name in ("none", "random")}
    monkeypatch.setattr(gradient_noise, "METHODS", few)
    batches, policy = [], Policy(random_model, tokenizer, countdown_task)
    s = Settings(answers=3, max_new_tokens=9, max_grad_norm=math.inf)
    for step in (1, 2):
        batch = rollout(policy, puzzles, s, step)
        batch.reward = torch.rand(6, generator=torch.Generator().manual_seed(step))
        batch.advantage, batch.mask[4, 3:] = grpo.compare(batch), False
        batches.append(batch)
    found = gradient_noise.method_gradients(batches)
    assert found.shape[:2] == (3, 2)
    prompts = [policy.prompt(puzzle) for puzzle in puzzles]
    for i, batch in enumerate(batches):
        for k, method in enumerate(few.values()):
            twin = deepcopy(random_model)
            grpo.update(policy._replace(model=twin), Optimizer(twin, 0.0), batch, method(batch), s)
            applied = -torch.cat([w.grad.flatten() for w in twin.parameters()])
            torch.testing.assert_close(found[k, i], applied, rtol=1e-4, atol=1e-5 * applied.abs().max().item())
        reward = batch.reward.view(2, 3)
        weight = (reward - (reward.sum(1, keepdim=True) - reward) / 2).view(6, 1) / 6
        logprob = plain_logprobs(random_model, [prompts[g] for g in batch.group.tolist()], batch.tokens, batch.mask)
        torch.testing.assert_close(found[-1, i], flat_gradient(random_model, (weight * logprob).sum()))
