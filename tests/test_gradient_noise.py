"""Noise and bias of gradients: baselines by loops, estimates on gradients drawn from known distributions, the trainer.

Run it:  python -m pytest tests/test_gradient_noise.py
"""

import itertools
import math
import re
from copy import deepcopy

import numpy as np
import pytest
import torch
from tests.plain import plain_logprobs

import grpo
from countdown_task import Puzzle
from experiments import gradient_noise, truth_scores
from mitigations import MITIGATIONS
from plumbing.optimizer import Optimizer


def number(text):
    """The figure at the beginning of a table's cell."""
    return float(re.match(r"-?[\d.]+", text)[0])


# ------------------------------------------------------------------------------------------------- baselines


def test_baselines_are_what_loops_find():
    """Guards against a baseline that sees the response, and answers behind the first R."""
    rng = np.random.default_rng(0)
    r, n = (rng.random((6, 8)) < 0.4).astype(float), rng.lognormal(size=(6, 8)) * 3
    rows = gradient_noise.table_baseline(r, n).rows
    assert [row[0] for row in rows] == ["2", "4", "8"]  # groups of 16 are not there
    for R, row in zip((2, 4, 8), rows):
        total = dict.fromkeys(("none", "mean", "best", "others"), 0.0)
        for q, i in itertools.product(range(6), range(R)):
            others = [j for j in range(R) if j != i]
            baseline = {"none": 0.0, "mean": r[q, :R].mean(), "others": r[q, others].mean(),
                        "best": (r[q, others] * n[q, others]).sum() / n[q, others].sum()}  # fmt: skip
            for name, b in baseline.items():
                total[name] += (r[q, i] - b) ** 2 * n[q, i]
        expected = [total[name] / total["others"] for name in ("none", "mean", "best")]
        assert [number(row[i]) for i in (1, 3, 5)] == pytest.approx(expected, abs=6e-3)
        assert number(row[4]) == pytest.approx(expected[1], abs=6e-3)  # the theory


def test_baselines_on_a_problem_with_a_known_answer(monkeypatch):
    """With |g|^2 = 1 for right and 9 for wrong answers, half of each, the optimum is E r |g|^2 / E |g|^2 = 0.1."""
    monkeypatch.setattr(gradient_noise, "SIZES", (64,))
    monkeypatch.setattr(truth_scores, "RESAMPLES", 20)
    r = (np.random.default_rng(0).random((1000, 64)) < 0.5).astype(float)
    table = gradient_noise.table_baseline(r, np.where(r > 0, 1.0, 9.0))
    assert number(table.rows[0][5]) == pytest.approx(0.45 / 1.25, abs=0.02)
    assert number(table.rows[0][1]) == pytest.approx(0.5 / 1.25, abs=0.02)
    assert "correlate by -1.00" in table.note


def test_success_and_size_correlate_within_questions():
    """Guards against a correlation between puzzles: hard ones have long answers."""
    rng, level = np.random.default_rng(0), np.linspace(0.1, 0.9, 50)[:, None]
    r = (rng.random((50, 16)) < level).astype(float)
    n = rng.exponential(size=r.shape) - 30 * level + 30
    x, y = ((v - v.mean(1, keepdims=True)).flatten() for v in (r, n))
    found = re.search(r"correlate by (-?\d\.\d+)", gradient_noise.table_baseline(r, n).note)
    assert float(found[1]) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=6e-3)


# --------------------------------------------------------------------------------------------- signal and noise


def gaussian(rng, n, P, shift):
    """n draws of a gradient (n, P) of unit variance, with a mean along the first direction."""
    x = rng.normal(size=(n, P))
    x[:, 0] += shift
    return x


def test_signal_noise_and_cosines_by_their_definitions():
    """Guards against pairs of a batch with itself, batches that were left out, and n for n - 1."""
    rng, use = np.random.default_rng(0), np.arange(7) != 3
    x, y = gaussian(rng, 7, 20, 2.0), gaussian(rng, 7, 20, 2.0)
    a, b = x[use], y[use]

    def crossed(u, v):
        return np.mean([u[i] @ v[j] for i in range(6) for j in range(6) if i != j])

    S, grams = a.var(0, ddof=1).sum(), (x @ y.T, x @ x.T, y @ y.T)
    assert gradient_noise.cross(grams[0], use) == pytest.approx(crossed(a, b))
    assert gradient_noise.signal_to_noise(grams[1], use) == pytest.approx(((a.mean(0) ** 2).sum() - S / 6) / S)
    cosine = a.mean(0) @ b.mean(0) / np.linalg.norm(a.mean(0)) / np.linalg.norm(b.mean(0))
    assert gradient_noise.cosine(*grams, use) == pytest.approx(cosine)
    clean = crossed(a, b) / (crossed(a, a) * crossed(b, b)) ** 0.5
    assert gradient_noise.corrected_cosine(*grams, use) == pytest.approx(clean)


def test_the_corrected_cosine_is_that_of_the_expectations():
    """Guards against a cosine that noise makes smaller, and noise that two methods share makes larger."""
    rng, n, P, found = np.random.default_rng(0), 16, 200, {True: [], False: []}
    one, other = np.zeros((2, P))
    one[0], other[:2] = 8.0, (4.8, 6.4)  # expectations at an angle whose cosine is 0.6
    for shared in [True, False] * 100:
        noise = rng.normal(size=(2, n, P))
        x, y = one + noise[0], other + noise[0 if shared else 1]
        grams = x @ y.T, x @ x.T, y @ y.T, np.ones(n, bool)
        found[shared].append([gradient_noise.cosine(*grams), gradient_noise.corrected_cosine(*grams)])
    (with_shared, freed), (with_own, clean) = np.mean(found[True], axis=0), np.mean(found[False], axis=0)
    assert with_own < 0.54
    assert with_shared > 0.63
    assert (clean, freed) == pytest.approx((0.6, 0.6), abs=0.012)


def test_no_cosine_where_noise_hides_the_signal():
    """Guards against the root of a negative number, and two negative signals whose product is positive."""
    x, y = np.array([[1.0, 0.1], [-1.0, 0.1]]), np.array([[1.0, 0.0], [1.0, 0.0]])  # pairs: -0.99, 1
    for a, b in ((x, y), (y, x), (x, x)):
        assert math.isnan(gradient_noise.corrected_cosine(a @ b.T, a @ a.T, b @ b.T, np.ones(2, bool)))


def test_the_cosine_of_halves():
    """Guards against halves that share a batch, or are of unequal size."""
    rng = np.random.default_rng(0)
    for n in (2, 5):
        x, found = gaussian(rng, n, 6, 1.0), []
        for a in itertools.combinations(range(n), n // 2):
            for b in itertools.combinations([i for i in range(n) if i not in a], n // 2):
                u, v = x[list(a)].mean(0), x[list(b)].mean(0)
                found.append(u @ v / np.linalg.norm(u) / np.linalg.norm(v))
        error = np.std(found) / 200**0.5
        assert gradient_noise.halves_cosine(x @ x.T) == pytest.approx(np.mean(found), abs=4 * error + 1e-9)


def test_the_table_of_methods_by_hand(monkeypatch):
    """Guards against figures in another row, another reference than the last, and a cosine without a signal."""
    monkeypatch.setattr(gradient_noise, "MITIGATIONS", {"one": None, "two": None, "weak": None})
    rng, n = np.random.default_rng(0), 9
    x = torch.tensor(np.stack([gaussian(rng, n, 40, shift) for shift in (5.0, -4.0, 0.0, 6.0)]))
    x[1, :, 1] += 3
    x[2] -= x[2].mean(0)
    table = gradient_noise.table_methods(x)
    assert [row[0] for row in table.rows] == ["one", "two", "weak", "r - others' mean"]
    for g, row in zip(x.numpy(), table.rows):
        S, mean, unbiased = g.var(0, ddof=1).sum(), g.mean(0), x[-1].numpy().mean(0)
        assert number(row[1]) == pytest.approx((mean @ mean - S / n) / S, abs=6e-4)
        if row[0] != "weak":
            cosine = mean @ unbiased / np.linalg.norm(mean) / np.linalg.norm(unbiased)
            assert number(row[2]) == pytest.approx(cosine, abs=6e-3)
            assert number(row[3]) == pytest.approx(gradient_noise.corrected_cosine(
                *(u @ v.T for u, v in ((g, x[-1].numpy()), (g, g), (x[-1].numpy(),) * 2)), np.ones(n, bool)), abs=6e-3)
    assert table.rows[2][3] == ""


PUZZLES = [Puzzle((4, 3, 5), 8), Puzzle((7, 18, 2, 11), 36)]


def test_method_gradients_are_what_the_trainer_applies(codec, random_model, exact, monkeypatch):
    """Guards against another normalizer than the trainer's, a prompt of another puzzle, and a policy gradient that is
    not the one of r - the others' mean."""
    few = {name: MITIGATIONS[name] for name in ("none", "random")}
    monkeypatch.setattr(gradient_noise, "MITIGATIONS", few)
    batches = []
    for step in (1, 2):
        batch = grpo.rollout(random_model, codec, PUZZLES, grpo.draw_uniforms(0, step, 2, 3, 9))
        batch.reward = torch.rand(6, generator=torch.Generator().manual_seed(step))
        batch.advantage, batch.mask[4, 3:] = grpo.group_advantage(batch.reward.view(2, 3)).flatten(), False
        batches.append((PUZZLES, batch))
    found = gradient_noise.method_gradients(random_model, codec, batches)
    assert found.shape[:2] == (3, 2)
    prompts = [codec.prompt(puzzle) for puzzle in PUZZLES]
    for i, (_, batch) in enumerate(batches):
        for k, method in enumerate(few.values()):
            twin = deepcopy(random_model)
            grpo.update(twin, Optimizer(twin, 0.0), prompts, batch, method(batch), max_new_tokens=9,
                        max_grad_norm=math.inf)  # fmt: skip
            applied = -torch.cat([w.grad.flatten() for w in twin.parameters()])
            torch.testing.assert_close(found[k, i], applied, rtol=1e-4, atol=1e-5 * applied.abs().max().item())
        reward = batch.reward.view(2, 3)
        weight = (reward - (reward.sum(1, keepdim=True) - reward) / 2).view(6, 1) / 6
        logprob = plain_logprobs(random_model, [prompts[g] for g in batch.group.tolist()], batch.tokens, batch.mask)
        expected = torch.autograd.grad((weight * logprob).sum(), list(random_model.parameters()))
        torch.testing.assert_close(found[-1, i], torch.cat([g.flatten() for g in expected]))
