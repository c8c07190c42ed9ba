"""Credit from what the sampler recorded of each token: its probability and its entropy.

Run it:  python train.py --mitigation curious --bonus 0.01
"""
from torch import Tensor

from methods.credit_function import token_credit
from mitigations import reweighting
from plumbing.files import require
from rollout import TokenBatch


@token_credit(from_advantage=True)
def curious(batch: TokenBatch, bonus: float = 0.01) -> Tensor:
    """credit = A - bonus (log p + H): raises H, on average, as an entropy bonus in the loss would (1602.01783).

    Over the tokens that may be drawn, -(log p + H) averages 0, and its policy gradient is the gradient of H. That holds
    for the first update on a batch. In a further one it is that of the cross entropy with the sampling policy.
    """
    batch.log["bonus"] = -bonus * (batch.logprob + batch.entropy)  # (B, T)
    return batch.advantage[:, None] + batch.log["bonus"]


@reweighting
def advantage_reweighting(batch: TokenBatch, alpha: float = 0.2) -> Tensor:
    """credit = A * (alpha * p + 1 - alpha): damp rare tokens, whose gradients are large (2505.12929)."""
    require(0 <= alpha <= 1, "--alpha must be between 0 and 1")
    return alpha * batch.logprob.exp() + 1 - alpha
