"""Other papers' advantages, losses, KL gradients and shapings of the reward: in the same dicts as those of grpo.py, by
the same flags.

Q puzzles, G responses to each, B = Q G responses; a loss gets b of them at a time, of T tokens at most.

Run it:  python train.py --mitigation none --loss cispo
"""
import torch
from torch import Tensor

from grpo import (ADVANTAGES, KL_GRADIENTS, LOSSES, SHAPINGS, clipped_minimum, group_mean, k3, minus_mean,
                  over_deviation)
from rollout import TokenBatch, by_group
from settings import Settings

# ------------------------------------------------------------------------------------------------------------ shapings


def overlong(batch: TokenBatch, s: Settings) -> Tensor:
    """r - beta * x, x from 0 to 1 over the last fifth of --max_new_tokens: DAPO's soft punishment (2503.14476).

    In the paper beta is 1 and r is 1 or -1. x counts what the limit counts: sampled tokens, and the replies between
    turns. A response that is cut off loses all of beta, also one whose next reply would not have fit.
    """
    replied = [sum(map(len, replies.values())) for replies in batch.before]  # B
    length = batch.mask.sum(1).double() + batch.reward.new_tensor(replied)  # (B,)
    x = (5 * length / s.max_new_tokens - 4).clamp(min=0)
    return batch.reward - s.shaping_beta * torch.where(batch.ended, x, 1.0)


def minus_divergence(batch: TokenBatch, s: Settings) -> Tensor:
    """r - beta * log(pi / ref) of the whole response: the KL to the start model in the reward (RLOO, 2402.14740).

    With --advantage rloo and --loss_norm constant the gradient of the first update is on average that of E[r] - beta
    KL(pi || ref), a KL of whole responses, divided by --max_new_tokens; with dr_grpo also times (G - 1) / G. Compare
    --kl.
    """
    log_ratio = batch.logprob - batch.ask.reference_logprob  # (B, T)
    return batch.reward - s.shaping_beta * log_ratio.double().sum(1)


SHAPINGS |= {"overlong": overlong, "kl": minus_divergence}

# ---------------------------------------------------------------------------------------------------------- advantages


def over_success(rewards: Tensor, batch: TokenBatch) -> Tensor:
    """MaxRL: (success - mean) / mean, 0 where none succeeds (2602.02710). It compares successes, not rewards.

    In a large group the mean is p(success), so the gradient is grad p / p = grad log p(success). In a small group it is
    smaller, because a rare success often does not occur there.
    """
    success = by_group(batch, batch.success).double()  # (Q, G)
    mean = group_mean(success)  # (Q, 1)
    return (success - mean) / torch.where(mean > 0, mean, 1.0)


def over_each_deviation(rewards: Tensor, batch: TokenBatch) -> Tensor:
    """GDPO: the sum of weight * (part - mean) / std over the reward's parts, over that sum's std in the step (2601.05242).

    So a part counts by its weight, however little it varies in the group. Each group's sums have mean 0. They may be
    unequal where rewards are equal.
    """
    total = sum(weight * over_deviation(by_group(batch, batch.grades[part]), batch)
                for part, weight in batch.parts.items())  # (Q, G)
    return total / (total.square().mean().sqrt() + 1e-4)


def minus_step_mean(rewards: Tensor, batch: TokenBatch) -> Tensor:
    """r - mean of the whole step, as if it were one group."""
    return minus_mean(rewards.view(1, -1), batch).view_as(rewards)


ADVANTAGES |= {"maxrl": over_success, "gdpo": over_each_deviation, "step_mean": minus_step_mean}

# -------------------------------------------------------------------------------------------------------------- losses


def cispo(logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """clip(ratio) c log pi, with a constant clip(ratio): no token loses its gradient (CISPO, 2506.13585).

    The paper tunes the upper bound alone: --clip_low 0.999 leaves hardly any lower one.
    """
    weight = (logprob.detach() - old).exp().clamp(1 - s.clip_low, 1 + s.clip_high)  # (b, T)
    return weight * credit * logprob, torch.zeros_like(mask)


def gspo(logprob: Tensor, old: Tensor, credit: Tensor, mask: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """PPO's minimum with one ratio for a whole response, the geometric mean of its tokens' (GSPO, 2507.18071).

    This is the paper's form for credit per token: each token's ratio has the value of the response's, and the gradient
    of its own. The paper has --loss_norm sequence, --clip_low 3e-4 and --clip_high 4e-4. In bfloat16 add --old_logprob
    update: rounding alone can exceed such narrow bounds.
    """
    change = (logprob - old).detach() * mask  # (b, T)
    mean = change.sum(1, keepdim=True) / mask.sum(1, keepdim=True)  # (b, 1) log of the response's ratio
    only_gradient = logprob - logprob.detach()  # (b, T) 0, with the gradient of log pi
    return clipped_minimum((mean + only_gradient).exp(), credit, s)


LOSSES |= {"cispo": cispo, "gspo": gspo}


def weighted_k3(logprob: Tensor, reference_logprob: Tensor, old: Tensor) -> Tensor:
    """ratio * k3 (b, T), whose gradient is that of KL(pi || reference) itself: DeepSeek-V3.2 (2512.02556), TRL.

    Take the text before a token as given. Over samples of pi_old the mean of ratio * k3 is the mean of k3 over pi: the
    KL. That holds for every pi, so the gradients are equal, too, in every update, if the ratio has a gradient.
    """
    return (logprob - old).exp() * k3(logprob, reference_logprob, old)


KL_GRADIENTS["unbiased"] = weighted_k3
