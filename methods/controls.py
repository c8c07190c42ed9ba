"""Controls to compare with: random weights, another method's reversed or shuffled, or credit on some responses alone.

Beside them stands `expert_iteration`, which compares no response with others.

Run it:  python train.py --mitigation random
"""
import math

import torch
from torch import Tensor

from mitigations import MITIGATIONS, CreditFunction, reweighting, token_credit
from plumbing.checks import required
from plumbing.files import require
from rollout import TokenBatch


@reweighting
def random(batch: TokenBatch) -> Tensor:
    """credit = A * w, w ~ Exponential(1): a control that any reweighting has to beat (ours)."""
    return torch.empty(batch.mask.shape).exponential_(generator=batch.ask.generator("random"))


def needs_of(of: str) -> tuple[str, ...]:
    """What another method needs; nothing where there is none of that name, which is refused later."""
    return required(MITIGATIONS[of], {}) if of in MITIGATIONS else ()


def another(of: str, own: str, only: str = "") -> CreditFunction:
    """The method named by --of, which has its default hyper-parameters. ValueError for `own`, the control itself, and
    where `only` says that just reweightings will do, for any other."""
    choices = [m.name for m in MITIGATIONS.values() if m.name != own and (m.is_reweighting or not only)]
    require(of in choices, f"--of {of}: {only}choose one of {', '.join(choices)}")
    return MITIGATIONS[of]


@reweighting(needs=needs_of)
def inverted(batch: TokenBatch, of: str = "entropy_weighted") -> Tensor:
    """credit = A * (max w + min w - w), w the weights of --of: a control that reverses a method (2602.09331).

    The method named by --of has its default hyper-parameters.
    """
    weight = another(of, "inverted", "only a reweighting can be inverted; ").raw(batch)  # (B, T)
    largest = weight.masked_fill(~batch.mask, -math.inf).amax(1, keepdim=True)  # (B, 1)
    smallest = weight.masked_fill(~batch.mask, math.inf).amin(1, keepdim=True)  # (B, 1)
    return (largest + smallest - weight).clamp(min=0)  # only rounding takes it below 0


@token_credit(from_advantage=True, needs=needs_of)
def shuffled(batch: TokenBatch, of: str = "entropy_ratio") -> Tensor:
    """credit = that of --of, in random order within each response: its sizes without their places (ours).

    The method named by --of has its default hyper-parameters.
    """
    place = torch.rand(batch.mask.shape, generator=batch.ask.generator("shuffled")).to(batch.mask.device)  # (B, T)
    order = place.masked_fill(~batch.mask, math.inf).argsort(1)  # (B, T) its tokens in random order, then padding
    return another(of, "shuffled")(batch).gather(1, order)


@token_credit
def expert_iteration(batch: TokenBatch) -> Tensor:
    """credit = 1 in right responses, else 0: supervised learning on one's own right answers (1705.08439).

    This is its usual form for language models, as in STaR (2203.14465) and ReST (2308.08998), with one step on each
    batch.
    """
    return batch.success[:, None].expand(batch.mask.shape)


@token_credit(from_advantage=True)
def share(batch: TokenBatch) -> Tensor:
    """credit = A n / kept on `kept` random responses, else 0: as many as are right, a control (ours).

    Of the n responses whose A is not 0, a random `kept` are trained on: as many as are right in the step, at most n. So
    an update costs about what one of `expert_iteration` does. With --advantage rloo the expected update is RLOO's,
    except in a step without a right response. Such a step teaches nothing: a policy that solves nothing stays as it is.
    """
    candidates = batch.advantage.nonzero()[:, 0]  # (n,)
    kept = min(int(batch.success.sum()), len(candidates))
    order = torch.randperm(len(candidates), generator=batch.ask.generator("share")).to(candidates)  # (n,)
    credit = torch.zeros_like(batch.advantage)  # (B,)
    chosen = candidates[order[:kept]]  # (kept,)
    credit[chosen] = batch.advantage[chosen] * len(candidates) / max(kept, 1)
    return credit[:, None].expand(batch.mask.shape)


@token_credit(from_advantage=True)
def positives(batch: TokenBatch) -> Tensor:
    """credit = max(A, 0): of GRPO the responses that are better than their group, and none that is worse (ours)."""
    return batch.advantage.clamp(min=0)[:, None].expand(batch.mask.shape)
