"""The update that a credit causes against plain autograd, and the cosine of two updates by numpy."""
import math

import numpy as np
import pytest
import torch

import countdown_task
from countdown_task import Puzzle
from lab import updates
from queries import Queries
from rollout import Policy, rollout
from tests.plain import flat_gradient, plain_logprobs
from settings import Settings


def test_updates_are_plain_autograd_s(tokenizer, random_model, exact):
    """Guards against gradients of another credit, puzzle, response or token."""
    puzzles, s = [Puzzle((4, 3, 5), 8), Puzzle((7, 18, 2, 11), 36)], Settings(answers=3, max_new_tokens=9)
    policy = Policy(random_model, tokenizer, countdown_task)
    batch = rollout(policy, puzzles, s, step=0)
    batch.ask = Queries(policy, batch, s, 0)
    batch.mask[4, 3:] = False
    logprob = plain_logprobs(random_model, [policy.prompt(puzzles[g]) for g in batch.group], batch.tokens, batch.mask)
    credits = np.random.default_rng(0).normal(size=(2, int(batch.mask.sum())))
    for credit, parts in zip(credits, updates.updates_of(list(credits), batch), strict=True):  # (2, P)
        weighted = torch.zeros_like(logprob)
        weighted[batch.mask] = logprob[batch.mask] * torch.from_numpy(credit)
        for puzzle, gradient in enumerate(parts):
            expected = flat_gradient(random_model, weighted[batch.group == puzzle].sum()).numpy()
            assert gradient == pytest.approx(expected, abs=1e-8 * np.abs(expected).max())


def test_the_cosine_is_of_summed_gradients():
    """Guards against a mean of the puzzles' cosines, and limits beyond 1."""
    rng, Q = np.random.default_rng(0), 5
    x = rng.normal(size=(Q, 9))
    y = x * rng.random((Q, 1)) + 0.4 * rng.normal(size=(Q, 9))

    def direct(left_out):
        a, b = (np.delete(g, left_out, 0).sum(0) for g in (x, y))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    half = 1.96 * (Q - 1) * np.std([direct([q]) for q in range(Q)], ddof=1) / Q**0.5
    e = updates.cosine_of(x, y)
    assert list(e[:3]) == pytest.approx([direct([]), direct([]) - half, min(direct([]) + half, 1)])
    assert list(updates.cosine_of(x, -2 * x)[:3]) == pytest.approx([-1, -1, -1])
    assert updates.cosine_of(x, -x - y).low >= -1
    assert math.isnan(updates.cosine_of(x, 0 * x).value)
