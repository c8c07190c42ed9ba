"""The truth as credit: how much each token changed the expected reward. A ceiling, not a method: sampling it costs far
more than the step it serves. lab/truth/measure.py measures the same of success, on recorded responses, with errors.

Let V_t be the expected reward of a response when the policy continues from just before token t. What token t did is the
difference that it made:

    A*_t = V_{t+1} - V_t

The obvious way to measure it samples continuations from every prefix and subtracts. Its error is as large as most of
the differences. But the token that was taken is one of the two things that can happen at t. With its probability p_t
the policy takes it, and the value becomes V_{t+1}. Otherwise it takes any other token; call the value of that U_t:

    V_t = p_t V_{t+1} + (1 - p_t) U_t

So work backwards. V_T, behind the last token, is the response's own reward. At every step only U_t is unknown, and
rollouts estimate it: their first token is drawn from all but the actual one, the rest as usual, within what is left of
the token limit. Substituting V_t gives

    A*_t = (1 - p_t) (V_{t+1} - U_t)

A token that was nearly certain can hardly have mattered, so it needs no rollouts, and most tokens are nearly certain.
Where the policy had a choice, U_t counts for 1 - p_t, so the number of rollouts is proportional to that. And the A* of
a response sum to its reward - V_0, whatever the sampling errors are. We have not found this form in the literature.

Run it:  python train.py --model models/countdown-small --mitigation oracle --k 4      seven minutes
"""
import torch
from torch import Tensor

from methods.credit_function import token_credit
from plumbing.files import require
from rollout import TokenBatch

# A token with 1 - p <= SURE gets no rollouts: its A* is set to 0. That is wrong by at most SURE * the range of rewards,
# and the V before it inherits the error.
SURE = 0.005


@token_credit
def oracle(batch: TokenBatch, k: int = 16, mix: float = 0.0) -> Tensor:
    """credit = A* = (1 - p) (V_{t+1} - U_t), from about k (1 - p) rollouts a token: a ceiling, not a method (ours).

    --mix m takes (1 - m) A*_t + m (r - V_0): at 1 all tokens of a response get the same. Every m has the same expected
    gradient, because r - V_0 is the sum of all A*, and those of other tokens than t average to 0 against grad log
    pi_t. So m changes how noisy the update is, and nothing else.
    """
    require(k >= 1, "--k must be at least 1: it is the number of rollouts for a token of probability 0")
    require(0 <= mix <= 1, "--mix must be between 0 and 1")
    other = -torch.expm1(batch.logprob) * batch.mask  # (B, T) 1 - p, 0 on padding
    counts = torch.where(other > SURE, (k * other).ceil(), 0.0)  # (B, T)
    U = batch.ask.rollout_values(counts, other=True)  # (B, T)
    weight = torch.where(counts > 0, other, 0.0)  # (B, T) where nothing was sampled, V_t = V_{t+1}
    V = work_backwards(weight, U, batch.reward.to(U))  # (B, T + 1)
    return (1 - mix) * weight * (V[:, 1:] - U) + mix * (batch.reward - V[:, 0])[:, None]


def work_backwards(weight: Tensor, U: Tensor, last: Tensor) -> Tensor:
    """V (B, T + 1) with V_t = V_{t+1} + weight_t (U_t - V_{t+1}), from V_T = last (B,) to V_0; weight and U are (B, T).

    That is (1 - weight_t) V_{t+1} + weight_t U_t, written so that V_t is exactly V_{t+1} where U_t is.
    """
    V = [last]
    for t in reversed(range(U.shape[1])):
        V.append(V[-1] + weight[:, t] * (U[:, t] - V[-1]))
    return torch.stack(V[::-1], 1)
