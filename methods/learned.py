"""Weights from a trained head: how the critic's value changes, and what the importance head looks at.

Run it:  python train.py --mitigation learned_importance
"""
from torch import Tensor

from mitigations import is_last_token, next_value, reweighting
from rollout import TokenBatch


@reweighting(needs=("critic",))
def value_change(batch: TokenBatch) -> Tensor:
    """credit = A * |V_{t+1} - V_t|, V the critic's: favour tokens that change the expected reward (ours).

    The last token gets 0, since no value follows it. Where the critic gives all tokens the same value, as before its
    first training, the response gets plain GRPO.
    """
    value = batch.ask.head("critic")  # (B, T)
    change = (next_value(batch, value) - value).abs()  # (B, T)
    return change.masked_fill(is_last_token(batch), 0.0)


@reweighting(needs=("importance",))
def learned_importance(batch: TokenBatch) -> Tensor:
    """credit = A * L * softmax(s), s a learned score: favour tokens that predict success (the original work).

    The second of its strategies: a small network beside the policy says which tokens are important. The original leaves
    open what trains that network. Here it learns to predict the response's success from its hidden states, pooled by
    the softmax (1802.04712; see heads.py), and it scores a step before it learns from it. The original calls this
    lambda-GRPO. Three other methods go by that name: a learned exponent on a response's length (2510.06870),
    `prefix_tree` (2509.21154) and eligibility traces (2510.00194).
    """
    return batch.ask.head("importance") * batch.mask.sum(1, keepdim=True)
