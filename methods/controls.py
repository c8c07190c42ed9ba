"""Controls: credit from noise, and another method's weights reversed. No method to use.

Run it:  python train.py --mitigation random
"""
import math

import torch
from torch import Tensor

from mitigations import MITIGATIONS, require, required, reweighting
from rollout import TokenBatch


@reweighting
def random(batch: TokenBatch) -> Tensor:
    """credit = A * w, w ~ Exponential(1): a control that any reweighting has to beat."""
    return torch.empty(batch.mask.shape).exponential_(generator=batch.ask.generator("random"))


@reweighting(needs=lambda of: required(of, {}) if of in MITIGATIONS else ())  # an unknown one is refused below
def inverted(batch: TokenBatch, of: str = "entropy_weighted") -> Tensor:
    """credit = A * (max w + min w - w), w the weights of --of: a control that reverses a method (2602.09331).

    The method --of runs with its default hyper-parameters.
    """
    choices = [m.name for m in MITIGATIONS.values() if m.is_reweighting and m.name != "inverted"]
    require(of in choices, f"--of {of}: only a reweighting can be inverted; choose one of {', '.join(choices)}")
    weight = MITIGATIONS[of].raw(batch)  # (B, T)
    largest = weight.masked_fill(~batch.mask, -math.inf).amax(1, keepdim=True)  # (B, 1)
    smallest = weight.masked_fill(~batch.mask, math.inf).amin(1, keepdim=True)  # (B, 1)
    return (largest + smallest - weight).clamp(min=0)  # only rounding takes it below 0
