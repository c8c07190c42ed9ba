"""Weights from what is known of each token: its role, its probability, its entropy, what a head (heads.py) says of it.

Run it:  python train.py --mitigation entropy_ratio --advantage rloo
"""
import torch
from torch import Tensor

from mitigations import is_last_token, next_value, reweighting, unit_mean
from plumbing.registry import require
from rollout import TokenBatch
from tasks.text import ROLES


@reweighting
def token_type(batch: TokenBatch, filler: float = 0.5, reasoning: float = 1.0, structure: float = 1.0) -> Tensor:
    """credit = A * the flag of the token's role: filler is prose, reasoning arithmetic, structure tags (ours).

    The original work asks for it in its conclusions: tell filler from reasoning among the thoughts.
    """
    weights = dict(zip(ROLES, (filler, reasoning, structure)))
    for role, weight in weights.items():
        require(weight >= 0, f"--{role} must be 0 or more")
    return torch.tensor(list(weights.values()), device=batch.role.device)[batch.role.int()]


@reweighting
def advantage_reweighting(batch: TokenBatch, alpha: float = 0.2) -> Tensor:
    """credit = A * (alpha * p + 1 - alpha): damp rare tokens, whose gradients are large (2505.12929)."""
    require(0 <= alpha <= 1, "--alpha must be between 0 and 1")
    return alpha * batch.logprob.exp() + 1 - alpha


@reweighting
def entropy_ratio(batch: TokenBatch) -> Tensor:
    """credit = A * H / mean H of the response: favour uncertain tokens in proportion (the original work).

    The first of the strategies that it proposes, as written there. It calls that GTPO-style; `gtpo` differs.
    """
    return unit_mean(batch.entropy * batch.mask, batch.mask)


@reweighting
def entropy_masking(batch: TokenBatch, mask_percentile: float = 80.0) -> Tensor:
    """credit = A where H >= the mask_percentile-th percentile of the step, else 0: forking tokens only (2506.01939).

    A forking token is one where the text could go several ways. Where every response keeps a token, --normalize none is
    the paper's equation, which divides the loss by the number of all tokens, and --normalize step is its code, which
    divides by the number of kept ones. A response that keeps none gets plain GRPO here; in paper and code it drops out.
    """
    require(0 <= mask_percentile <= 100, "--mask_percentile must be between 0 and 100")
    threshold = batch.entropy[batch.mask].quantile(mask_percentile / 100)  # ()
    return batch.entropy >= threshold


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
