"""Wash-out against plain gradients, token by token."""
from types import SimpleNamespace

import pytest
import torch

import countdown_task
import rollout
from countdown_task import Puzzle
from lab.gradients import washout
from rollout import Policy
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
    role = batch.role[batch.mask].numpy()
    for name, use in {"all": role >= 0, "filler": role == 0, "structure": role == 2}.items():
        sum_of_norms, norm_of_sum = every[use].norm(dim=1).sum(), every[use].sum(0).norm()
        share, of_size, of_sum, washed = rows[name]
        assert share == f"{use.mean():.1%}" and of_size == f"{sum_of_norms / every.norm(dim=1).sum():.1%}"
        assert of_sum == f"{norm_of_sum / every.sum(0).norm():.2f}"
        assert float(washed) == pytest.approx((norm_of_sum / sum_of_norms).item(), abs=1e-3)
