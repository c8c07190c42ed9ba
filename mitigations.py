"""Credit functions: each one gives every token of a step its credit, the number that multiplies grad log pi(token).

This file has GRPO, an entropy bonus, the weights of the original work, PPO, VinePPO and, at its end, the place for
yours. Further published ones are in methods/, a file for each family. The flag is called --mitigation, because the
original work (github.com/Ja-Crispy/GRPO-Zero) called such a function a mitigation of GRPO.

To try an idea, write one decorated function at the end of this file. Under @token_credit it returns the credit itself;
under @reweighting it returns weights, by which the response's advantage is multiplied. Both are (B, T). Its keyword
arguments become flags, and the first line of its docstring their help. What it puts into batch.log, by name, is logged
beside the credit. plumbing/registry.py checks both, and sets padding to 0. A critic is a head: methods/heads.py.

How this differs from the original work and from most published code:
1. Weights carry no gradient and are computed on the whole step instead of a micro-batch. By default (--normalize) they
   average 1 in each response: a reweighting moves credit between the tokens of a response, whose mean credit stays.
2. Where a credit function is undefined for a response, as for one without an answer, that response gets plain GRPO.
3. Where a paper and its code disagree, the docstring says which of them we follow.

Shapes: Q puzzles a step, G responses to each (a group), B = Q G responses, T tokens of the longest one.
In the formulas, A is the response's advantage, L its length and r its reward; p is the token's probability, H the
entropy of the distribution it was sampled from and V the expected reward of the response, given the text before the
token; z is a z-score. For a reweighting the formula shows A * weight, before the weights are rescaled.

Run it:  python train.py --mitigation outcome_conditional --think_discount 0.5
"""
import math
from typing import Callable

import torch
from torch import Tensor

from plumbing.registry import register, require
from rollout import TokenBatch, by_group, group_mean
from tasks.text import FILLER, REASONING, STRUCTURE  # noqa: F401  for your idea: `batch.role == FILLER`


def token_credit(function: Callable | None = None, *, name: str = "", from_advantage: bool = False,
                 needs: tuple[str, ...] | Callable = ()) -> Callable:
    """Decorator for a function that returns the credit (B, T) itself. What it returns on padding is set to 0.

    The decorated function is called as before, and its result is checked. MITIGATIONS has it by its name.
    from_advantage=True says that it reads batch.advantage: only then does train.py take --advantage and --shaping.
    needs: what it asks for beyond the batch, see `reweighting`. name: that of --mitigation, if not the function's own.
    """
    return register(function, name=name, weights_to_credit=None, from_advantage=from_advantage, needs=needs)


@token_credit(name="none", from_advantage=True)
def uniform(batch: TokenBatch) -> Tensor:
    """credit = A, the same number on every token of a response: GRPO (2402.03300). --advantage names A's formula."""
    return batch.advantage[:, None] * batch.mask


@token_credit(from_advantage=True)
def curious(batch: TokenBatch, bonus: float = 0.01) -> Tensor:
    """credit = A - bonus (log p + H): raises H, on average, as an entropy bonus in the loss would (1602.01783)."""
    # Over the tokens that may be drawn, -(log p + H) averages 0, and its policy gradient is the gradient of H.
    batch.log["bonus"] = -bonus * (batch.logprob + batch.entropy)  # (B, T)
    return batch.advantage[:, None] + batch.log["bonus"]


# -------------------------------------------------------------------------------- reweightings: the original work's


def reweight(batch: TokenBatch, weight: Tensor) -> Tensor:
    """Credit (B, T) from weights (B, T) >= 0 that are 0 on padding: advantage * weight, after two corrections.

    1. Weights that are all 0 don't say which token of a response matters: they become 1. So the response gets plain
       GRPO and does not drop out.
    2. The weights are rescaled as batch.normalize says. response: those of each response average 1, so that its credit
       still averages its advantage. step: they average 1 over all tokens of the step. none: they stay as they are.
    """
    all_zero = ~weight.any(1, keepdim=True)  # (B, 1)
    scaled = torch.where(all_zero & batch.mask, 1.0, weight)  # (B, T)
    return batch.advantage[:, None] * NORMALIZATIONS[batch.normalize](scaled, batch.mask)


def reweighting(function: Callable | None = None, *, needs: tuple[str, ...] | Callable = ()) -> Callable:
    """Decorator for a function that returns weights (B, T) >= 0. Decorated, it returns credit, made by `reweight`.

        @reweighting
        def early(batch: TokenBatch, power: float = 0.5) -> Tensor:
            return batch.mask.cumsum(1).clamp(min=1) ** -power

    Now `python train.py --mitigation early --power 1.0` trains with it. `needs` names what it asks for beyond the
    batch, as in @reweighting(needs=("critic",)): a head (batch.ask.head), "reference" (batch.ask.reference_logprob),
    or a function that not every task has (batch.task.calculations). Where that depends on hyper-parameters, needs is a
    function of these. Weights may be bool or int, and on any device.
    """
    return register(function, name="", weights_to_credit=reweight, from_advantage=True, needs=needs)


def unit_mean(weight: Tensor, mask: Tensor) -> Tensor:
    """Rescale weights (B, T), 0 outside mask (B, T), so that each row averages 1 over its mask; zeros stay zeros."""
    total = weight.sum(1, keepdim=True)  # (B, 1)
    return weight * (mask.sum(1, keepdim=True) / torch.where(total > 0, total, 1.0))


NORMALIZATIONS = {"response": unit_mean, "none": lambda weight, mask: weight,
                  "step": lambda weight, mask: unit_mean(weight.reshape(1, -1), mask.reshape(1, -1)).view_as(weight)}


@reweighting
def outcome_conditional(batch: TokenBatch, think_discount: float = 0.5) -> Tensor:
    """credit = A * (1 in <answer>, think_discount before it): reward the conclusion more (the original work).

    The name is the original's; the weights depend on the section alone. A response without an answer gets plain GRPO.
    (The original discounted such a response as a whole, so that credit depended on the format.)
    """
    require(think_discount >= 0, "--think_discount must be 0 or more")
    unanswered = ~batch.in_answer.any(1, keepdim=True)  # (B, 1)
    return torch.where(batch.in_answer | unanswered, 1.0, think_discount)


@reweighting
def inverse_logprob(batch: TokenBatch, epsilon: float = 0.1) -> Tensor:
    """credit = A / (|log p| + epsilon): favour tokens the model was sure of (the original work).

    It was meant to make |credit * log p| equal on all tokens. That holds where |log p| is well above epsilon. (The
    original did not rescale its weight, see --normalize none, nor detach it: lab/original/methods.md.)
    """
    require(epsilon > 0, "--epsilon must be above 0")
    return 1 / (batch.logprob.abs() + epsilon)


@reweighting
def entropy_weighted(batch: TokenBatch, entropy_temp: float = 1.0) -> Tensor:
    """credit = A * L * softmax(H / entropy_temp): favour a response's uncertain tokens (the original work).

    The original took the softmax over a micro-batch, so that its results depended on a memory setting.
    """
    require(entropy_temp > 0, "--entropy_temp must be above 0")
    score = (batch.entropy / entropy_temp).masked_fill(~batch.mask, -math.inf)  # (B, T)
    return score.softmax(1) * batch.mask.sum(1, keepdim=True)


@reweighting
def attention_credit(batch: TokenBatch, credit_scale: float = 2.0) -> Tensor:
    """credit = A * (1 + credit_scale * a): the answer pays attention a to the token (after the original work).

    The attention is that of the last layer, averaged over heads and over the states that predict the answer's tokens
    after this one, then scaled to mean 1 over the response. Prompt tokens, such as the attention sink at position 0,
    don't count. Without an answer a = 0, which is plain GRPO. (The original has other formulas, and its code gave token
    t + 1 what was paid to token t: lab/original/methods.md.)
    """
    require(credit_scale >= 0, "--credit_scale must be 0 or more")
    # ask.attention[:, t, u]: what token t's state pays to token u. Summed over the answer's t, by u:
    total = (batch.ask.attention * batch.in_answer[:, :, None]).sum(1)  # (B, T) what the whole answer pays to the token
    later = batch.in_answer.sum(1, keepdim=True) - batch.in_answer.cumsum(1)  # (B, T) answer tokens after this one
    mean = total / later.clamp(min=1) * batch.mask  # (B, T) what each of them pays
    return 1 + credit_scale * unit_mean(mean, batch.mask)


# --------------------------------------------------------------------------------------------------- PPO and VinePPO


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


def z_score(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean) / (std + 1e-4) of values x (..., n, T), over the last two dimensions and mask; 0 outside mask.

    In double, where the mean of equal float32 values is that value exactly, and their z-score 0.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = mask.sum((-2, -1), keepdim=True).clamp(min=1)  # (..., 1, 1)
    mean = torch.where(mask, values.double(), 0.0).sum((-2, -1), keepdim=True) / count  # (..., 1, 1)
    deviation = torch.where(mask, values - mean, 0.0)  # (..., n, T)
    std = ((deviation**2).sum((-2, -1), keepdim=True) / count).sqrt()  # (..., 1, 1)
    return (deviation / (std + 1e-4)).to(values)


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


# ---------------------------------------------------------------------------------------------------------------- yours


# <- your idea here: a function under @reweighting or @token_credit, and nothing else to touch
