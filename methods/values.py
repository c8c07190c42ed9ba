"""Credit from V, the expected reward, before and after a token or a segment: as a critic (heads.py) predicts it (PPO),
or as the mean reward of continuations that are sampled there (VinePPO).

Run it:  python train.py --mitigation ppo
"""
import math

import torch
from torch import Tensor

from grpo import group_mean
from methods.credit_function import token_credit, z_score
from mitigations import reweighting
from plumbing.files import require
from rollout import TokenBatch, by_group

# ---------------------------------------------------------------------------------------------------- by a critic


@token_credit(needs=("critic",))
def ppo(batch: TokenBatch, gae_lambda: float = 0.95, whiten: bool = False, gamma: float = 1.0) -> Tensor:
    """credit = sum_l (gamma gae_lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t: PPO with GAE (1707.06347).

    GAE is generalized advantage estimation (1506.02438). (PPO's clip, --loss ppo, serves all methods.) r_t is the
    reward at the last token, 0 before. The value after the last token is 0, also in a response that was cut off. gamma
    discounts per token: it is 1, because a right answer is worth as much after a long derivation, and the critic
    predicts the undiscounted reward. With gae_lambda=1 no error of the critic biases the gradient, but more noise is
    left: the toy learned less (lab/study/tables.md, PPO by lambda). whiten=True rescales credit to mean 0 and standard
    deviation 1 over the step.
    """
    require(0 <= gae_lambda <= 1, "--gae_lambda must be between 0 and 1")
    require(0 <= gamma <= 1, "--gamma must be between 0 and 1")
    credit = gae(batch, is_last_token(batch) * batch.reward[:, None], batch.ask.head("critic"), gae_lambda, gamma)
    return z_score(credit, batch.mask) if whiten else credit  # (B, T)


def gae(batch: TokenBatch, reward: Tensor, value: Tensor, gae_lambda: float, gamma: float = 1.0) -> Tensor:
    """The sum (B, T) in the formula of `ppo`, from a reward at each token (B, T) and the value before it (B, T)."""
    delta = reward + gamma * next_value(batch, value) - value  # (B, T)
    credit, later = torch.zeros_like(delta), torch.zeros_like(batch.reward)  # (B, T), (B,) credit of the token after t
    for t in reversed(range(delta.shape[1])):
        later = delta[:, t] + gamma * gae_lambda * later
        credit[:, t] = later
    return credit


def next_value(batch: TokenBatch, value: Tensor) -> Tensor:
    """V_{t+1} from V_t (B, T): the value after each token, 0 after the last one."""
    return value.roll(-1, dims=1) * (batch.mask & ~is_last_token(batch))


def is_last_token(batch: TokenBatch) -> Tensor:
    """True (B, T) at the last token of each response."""
    return batch.mask & (batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True))


@reweighting(needs=("critic",))
def value_change(batch: TokenBatch) -> Tensor:
    """credit = A * |V_{t+1} - V_t|, V the critic's: favour tokens that change the expected reward (ours).

    The last token gets 0, since no value follows it. Where the critic gives all tokens the same value, as before its
    first training, the response gets plain GRPO.
    """
    value = batch.ask.head("critic")  # (B, T)
    change = (next_value(batch, value) - value).abs()  # (B, T)
    return change.masked_fill(is_last_token(batch), 0.0)


# ----------------------------------------------------------------------------------------------------- by continuations


@token_credit(needs=lambda cuts, **_: ("sentence_starts",) if cuts == "sentence" else ())
def vineppo(batch: TokenBatch, k: int = 3, cuts: str = "sentence") -> Tensor:
    """credit = V(next cut) - V(this cut), V the mean reward of k continuations: cuts at sentence ends (2410.01679).

    All tokens between two cuts get the same credit. V at the end is the reward. V at the start costs nothing: it is the
    mean reward of the group's other responses. (The paper has k = 9; its code z-scores the credit.) cuts="uncertain" is
    SPO-chain (2505.23564): it cuts before every fifth of the tokens with p below 90%, the paper's *cutpoints*, from the
    6th on. (The paper gives credit to those tokens only.)
    """
    require(k >= 1, "--k must be at least 1: it is the number of continuations sampled at each cut")
    require(cuts in ("sentence", "uncertain"), "--cuts must be sentence or uncertain")
    if cuts == "sentence":
        return segment_credit(batch, sentence_cuts(batch), k)
    unsure = batch.mask & (batch.logprob < math.log(0.9))  # (B, T)
    count = unsure.cumsum(1)  # (B, T)
    return segment_credit(batch, unsure & (count % 5 == 1) & (count > 1), k)  # the 6th, 11th, 16th ... of them


def sentence_cuts(batch: TokenBatch) -> Tensor:
    """True (B, T) at the first token of each sentence but the first."""
    cuts = torch.zeros(batch.mask.shape, dtype=torch.bool)  # (B, T)
    for row, text, spans in zip(cuts, batch.text, batch.spans):
        row[1 : len(spans)] = torch.from_numpy(batch.task.sentence_starts(text, spans))[1:]
    return cuts.to(batch.mask.device)


def segment_credit(batch: TokenBatch, cuts: Tensor, k: int) -> Tensor:
    """V at the end of each token's segment minus V at its start (B, T). cuts (B, T): where all but the first begin.

    Of 5 tokens with a cut at 2, tokens 0 and 1 get V[1] - V[0], the others V[2] - V[1], where V[2] is the reward.
    """
    rewards = by_group(batch, batch.reward)  # (Q, G)
    mean = group_mean(rewards)  # (Q, 1)
    others = mean - (rewards - mean) / (rewards.shape[1] - 1)  # (Q, G) mean reward: no rounding where all are equal
    segment = cuts.cumsum(1)  # (B, T) 0 0 1 1 1 for a cut at 2 of 5 tokens
    V = rewards.view(-1, 1).repeat(1, cuts.shape[1] + 1)  # (B, T + 1): segment j begins at V[:, j]; past the last: r
    V[:, 0] = others.flatten()
    row, t = cuts.nonzero(as_tuple=True)
    V[row, segment[row, t]] = batch.ask.rollout_values(k * cuts)[row, t].to(V)
    return (V.gather(1, segment + 1) - V.gather(1, segment)).to(batch.logprob)
