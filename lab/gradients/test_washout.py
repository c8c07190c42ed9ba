"""Wash-out and what a kind of token adds to a step, against plain gradients token by token."""
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import countdown_task
import rollout
from countdown_task import Puzzle
from lab.gradients import washout
from rollout import Policy
from tests.fixtures import BUNDLED
from tests.plain import flat_gradient, plain_logprobs
from train import Settings

ASKED = [Puzzle((3, 4, 5), 8), Puzzle((11, 2, 7), 30)]  # prompts of unequal length


def draw(model, tokenizer, lengths):
    """Responses of at most these lengths from a model in float64, half of them to each of ASKED, and a critic."""
    model.real_vocab = tokenizer.size
    critic = SimpleNamespace(read=lambda hidden, mask: hidden[..., 0] * mask)
    policy, T = Policy(model, tokenizer, countdown_task, {"critic": critic}), max(lengths)
    batch = rollout.rollout(policy, ASKED, Settings(answers=len(lengths) // 2, max_new_tokens=T), step=1)
    batch.mask &= torch.arange(T) < torch.tensor(lengths)[:, None]
    batch.ask.samples = batch.ask.samples._replace(mask=batch.mask)
    return batch


def test_wash_out_by_hand(random_model, tokenizer, exact):
    """Guards against the norm of each response's sum, another unit above than below, and padding as a token."""
    batch = draw(random_model, tokenizer, (6, 2, 5, 6, 4, 6))
    batch.advantage = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.0, 0.3])
    batch.role = torch.arange(6).expand(batch.mask.shape) % 3 * batch.mask
    rows = {name: row for name, *row in washout.table_washout(batch).rows}
    prompts = [batch.ask.prompts[q] for q in batch.group.tolist()]
    logprob = plain_logprobs(random_model, prompts, batch.tokens, batch.mask) * batch.advantage[:, None]
    every = torch.stack([flat_gradient(random_model, x) for x in logprob[batch.mask]])  # (N, P)
    role, place = batch.role[batch.mask].numpy(), np.concatenate([np.arange(n) / n for n in batch.mask.sum(1).tolist()])
    kinds = {"all": role >= 0, "filler": role == 0, "structure": role == 2, "40-60% of the response":
             (place >= 0.4) & (place < 0.6)}
    for name, use in kinds.items():
        sum_of_norms, norm_of_sum = every[use].norm(dim=1).sum(), every[use].sum(0).norm()
        share, of_size, of_sum, washed = rows[name]
        assert share == f"{use.mean():.1%}" and of_size == f"{sum_of_norms / every.norm(dim=1).sum():.1%}"
        assert of_sum == f"{norm_of_sum / every.sum(0).norm():.2f}"
        assert float(washed) == pytest.approx((norm_of_sum / sum_of_norms).item(), abs=1e-3)


def test_steps_start_from_the_same_weights_and_moments(monkeypatch):
    """Guards against a second step on top of the first, the credit of the role alone, and the smaller step as unit."""
    monkeypatch.setattr(washout, "Settings", partial(Settings, questions=2, answers=4, max_new_tokens=50))
    for name, value in {"WARM_UP": 1, "BATCHES": 1, "ROLES": ("nothing", "filler")}.items():
        monkeypatch.setattr(washout, name, value)

    def one_role(*arguments):
        """All tokens have role 1, so leaving out role 0 changes nothing, and leaving out role 1 leaves no credit."""
        batch = rollout.rollout(*arguments)
        batch.role = torch.ones_like(batch.role)
        return batch

    monkeypatch.setattr(washout, "rollout", one_role)
    (found,) = washout.adam_steps(str(BUNDLED), 0)
    assert found["nothing"] == pytest.approx((0.0, 1.0), abs=1e-5)
    assert found["filler"][0] > 0.1 and found["filler"][1] < 0.999  # Adam's momentum alone takes another step
    assert washout.compare_steps(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx((0.8, 0.6))
