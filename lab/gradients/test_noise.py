"""Noise and bias: estimates by definition, gradients by plain autograd."""
import math
import re
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import countdown_task
import grpo
import rollout
from countdown_task import Puzzle
from lab.gradients import noise
from methods import MITIGATIONS
from plumbing.optimizer import Optimizer
from queries import Queries
from rollout import Policy
from tests.plain import flat_gradient, plain_logprobs
from settings import Settings

ASKED = [Puzzle((3, 4, 5), 8), Puzzle((11, 2, 7), 30)]  # prompts of unequal length


def draw(model, tokenizer, lengths):
    """Responses of at most these lengths from a model in float64, half of them to each of ASKED, and a critic."""
    model.real_vocab = tokenizer.size
    critic = SimpleNamespace(read=lambda hidden, mask: hidden[..., 0] * mask)
    policy, T = Policy(model, tokenizer, countdown_task, {"critic": critic}), max(lengths)
    batch = rollout.rollout(policy, ASKED, Settings(answers=len(lengths) // 2, max_new_tokens=T), step=1)
    batch.ask = Queries(policy, batch, Settings(answers=len(lengths) // 2, max_new_tokens=T), 1)
    batch.mask &= torch.arange(T) < torch.tensor(lengths)[:, None]
    return batch


def test_the_table_of_methods_by_definition(monkeypatch):
    """Guards against pairs of a batch with itself, n for n - 1, figures in another row, another reference than the
    last, an interval of something else, and a cosine without a signal, also where two negative ones multiply."""
    monkeypatch.setattr(noise, "METHODS", {"one": None, "two": None, "weak": None})
    x, n = np.random.default_rng(0).normal(size=(4, 9, 40)), 9  # three methods and the reference, batches, parameters
    x[:, :, 0] += np.array([5.0, -4.0, 0.0, 6.0])[:, None]
    x[1, :, 1] += 3
    x[2] -= x[2].mean(0)

    def crossed(a, b):
        return np.mean([a[i] @ b[j] for i in range(len(a)) for j in range(len(a)) if i != j])

    def signal(a, b):
        variance = a.var(0, ddof=1).sum()
        return (a.mean(0) @ a.mean(0) - variance / len(a)) / variance

    def cosine(a, b):
        return crossed(a, b) / (crossed(a, a) * crossed(b, b)) ** 0.5

    rows = noise.table_methods(torch.tensor(x)).rows
    weak = x[2] @ x[2].T
    assert rows[2][2] == "" and math.isnan(noise.corrected_cosine(weak, weak, weak, np.ones(n, bool)))
    for i, j, measure in [(0, 1, signal), (1, 1, signal), (3, 1, signal), (0, 2, cosine), (1, 2, cosine)]:
        value = measure(x[i], x[3])
        without = [measure(*(np.delete(g, k, 0) for g in (x[i], x[3]))) for k in range(n)]
        half = 1.96 * (n - 1) * np.std(without, ddof=1) / n**0.5
        found = [float(text) for text in re.findall(r"-?\d+\.\d+", rows[i][j])]
        assert found == pytest.approx([value, value - half, value + half], abs=6e-3)


def test_method_gradients_are_what_training_applies(tokenizer, random_model, exact, monkeypatch):
    """Guards against another normalizer than training's, a prompt of another puzzle, and a policy gradient that is not
    the one of r - the others' mean."""
    few, s = {name: MITIGATIONS[name] for name in ("none", "random")}, Settings(answers=3, max_grad_norm=math.inf)
    monkeypatch.setattr(noise, "METHODS", few)
    batches = draw(random_model, tokenizer, (9, 9, 9, 9, 3, 9)), draw(random_model, tokenizer, (2, 7, 5, 8, 1, 4))
    for batch in batches:
        batch.reward = torch.rand(6, generator=torch.Generator().manual_seed(1))
        batch.advantage = grpo.compare(batch)
    found = noise.method_gradients(batches)
    assert found.shape[:2] == (3, 2)
    for i, batch in enumerate(batches):
        for k, method in enumerate(few.values()):
            twin = deepcopy(random_model)
            grpo.update(batch.ask.policy._replace(model=twin), Optimizer(twin, 0.0), batch, method(batch), s)
            applied = -torch.cat([w.grad.flatten() for w in twin.parameters()])
            torch.testing.assert_close(found[k, i], applied, rtol=1e-4, atol=1e-5 * applied.abs().max().item())
        reward = batch.reward.view(2, 3)
        weight = (reward - (reward.sum(1, keepdim=True) - reward) / 2).view(6, 1) / 6
        prompts = [batch.prompts[g] for g in batch.group.tolist()]
        logprob = plain_logprobs(random_model, prompts, batch.tokens, batch.mask)
        torch.testing.assert_close(found[-1, i], flat_gradient(random_model, (weight * logprob).sum()))
