"""Controls to compare with: random weights, another function's reversed or shuffled, or credit on some responses alone.

Beside them stands `expert_iteration`, which compares no response with others.

Run it:  python train.py --mitigation random
"""
import math

import torch
from torch import Tensor

from methods.credit_function import CREDIT_FUNCTIONS, CreditFunction, token_credit
from mitigations import reweighting
from plumbing.checks import required
from plumbing.files import require
from rollout import TokenBatch


@reweighting
def random(batch: TokenBatch) -> Tensor:
    """credit = A * w, w ~ Exponential(1): a control that any reweighting has to beat (ours)."""
    return torch.empty(batch.mask.shape).exponential_(generator=batch.ask.generator("random"))


def needs_of(of: str) -> tuple[str, ...]:
    """What another credit function needs; nothing where there is none of that name, which is refused later."""
    method = CREDIT_FUNCTIONS.get(of.partition(":")[0])
    return required(method, hyper_parameters(of)) if method else ()


def hyper_parameters(of: str) -> dict:
    """Those that --of gives behind the name of a method, as in surprise:power=2, each of its default's type."""
    name, *given = of.split(":")
    defaults, values = CREDIT_FUNCTIONS[name].parameters, {}
    for flag, _, text in (word.partition("=") for word in given):
        require(flag in defaults, f"--of {of}: {name} has no {flag}, only {', '.join(defaults) or 'its name'}")
        kind = type(defaults[flag])
        try:
            values[flag] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise ValueError(f"--of {of}: {flag} must be {kind.__name__}, not {text!r}") from None
    return values


def another(of: str, own: str, only: str = "") -> tuple[CreditFunction, dict]:
    """The method named by --of, and its hyper-parameters. ValueError for `own`, the control itself, and where `only`
    says that just reweightings will do, for any other."""
    choices = [m.name for m in CREDIT_FUNCTIONS.values() if m.name != own and (m.is_reweighting or not only)]
    name = of.partition(":")[0]
    require(name in choices, f"--of {name}: {only}choose one of {', '.join(choices)}")
    return CREDIT_FUNCTIONS[name], hyper_parameters(of)


@reweighting(needs=needs_of)
def inverted(batch: TokenBatch, of: str = "entropy_weighted") -> Tensor:
    """credit = A * (max w + min w - w), w the weights of --of: a control that reverses a method (2602.09331).

    --of surprise:power=2 gives that method a hyper-parameter; the others have their defaults.
    """
    method, values = another(of, "inverted", "only a reweighting can be inverted; ")
    weight = method.raw(batch, **values)  # (B, T)
    largest = weight.masked_fill(~batch.mask, -math.inf).amax(1, keepdim=True)  # (B, 1)
    smallest = weight.masked_fill(~batch.mask, math.inf).amin(1, keepdim=True)  # (B, 1)
    return (largest + smallest - weight).clamp(min=0)  # only rounding takes it below 0


@token_credit(from_advantage=True, needs=needs_of)
def shuffled(batch: TokenBatch, of: str = "entropy_ratio") -> Tensor:
    """credit = that of --of, in random order within each response: its sizes without their places (ours).

    --of surprise:power=2 gives that method a hyper-parameter; the others have their defaults.
    """
    place = torch.rand(batch.mask.shape, generator=batch.ask.generator("shuffled")).to(batch.mask.device)  # (B, T)
    order = place.masked_fill(~batch.mask, math.inf).argsort(1)  # (B, T) its tokens in random order, then padding
    method, values = another(of, "shuffled")
    return method(batch, **values).gather(1, order)


@token_credit
def expert_iteration(batch: TokenBatch) -> Tensor:
    """credit = 1 in right responses, else 0: supervised learning on one's own right answers (1705.08439).

    This is its usual form for language models, as in STaR (2203.14465) and ReST (2308.08998), with one step on each
    batch.
    """
    return batch.success[:, None].expand(batch.mask.shape)


@token_credit(from_advantage=True)
def share(batch: TokenBatch) -> Tensor:
    """credit = A n / kept on random responses, else 0: as many as are right, a control (ours).

    Of the n responses whose A is not 0, `kept` are trained on: as many as are right in the step, at most n. So an
    update costs about what one of `expert_iteration` does. With --advantage rloo the expected update is RLOO's,
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
