"""The inverse log-prob weights as the original work trained with them, as a credit function of train.py.

Its loss was -A * log p / (|log p| + epsilon), and the weight was not detached, so the gradient went through it, too.
With l = log p, the gradient of l / (|l| + epsilon) is epsilon / (|l| + epsilon)^2: that is the weight it trained with,
and nearly all of it goes to tokens with p near 1. The original did not rescale: --normalize none.

Run it:  python -m lab.original.undetached --mitigation inverse_undetached --epsilon 0.1 --normalize none
"""
from torch import Tensor

import train
from mitigations import reweighting
from plumbing.registry import require
from rollout import TokenBatch


def inverse_undetached(batch: TokenBatch, epsilon: float = 0.1) -> Tensor:
    """credit = A * epsilon / (|log p| + epsilon)^2: what inverse_logprob becomes without detach (the original work)."""
    require(epsilon > 0, "--epsilon must be above 0")
    return epsilon / (batch.logprob.abs() + epsilon) ** 2


def main() -> None:
    """train.py with this function among its own."""
    reweighting(inverse_undetached)
    train.main()


if __name__ == "__main__":
    main()
