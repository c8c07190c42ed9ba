"""Credit functions: each one gives every token of a step its credit, the number that multiplies
grad log pi(token).

First GRPO; then the seven strategies that the original work (github.com/Ja-Crispy/GRPO-Zero)
proposed, in its order, and what its text asks for beyond them; last the place for yours. methods/
has others, such as PPO, a file for each family; docs/methods.md tells what became of each. The flag
is --mitigation: that work called such a function a mitigation of GRPO.

To try an idea, write one decorated function at the end of this file. Under @reweighting it returns
weights, by which the response's advantage is multiplied; under @token_credit it returns the credit
itself. Both are (B, T). A @token_credit function that reads batch.advantage says
from_advantage=True: only then does train.py take --advantage and --shaping, which would have no
effect on the others.
Keyword arguments become flags, and the first paragraph of the docstring is the text in --help. What
the function puts into batch.log, by name, is logged beside the credit. What it returns is checked,
and set to 0 on padding. A critic is a head: methods/heads.py.

How this differs from the original work and from most published code:
1. Weights carry no gradient and are computed on the whole step instead of a micro-batch. By default
   (--normalize) they average 1 in each response: a reweighting moves credit between the tokens of a
   response, whose mean credit stays.
2. Where a credit function is undefined for a response, as for one without an answer, that response
   gets plain GRPO.
3. Where a paper and its code disagree, the docstring says which of them we follow.

Shapes: Q puzzles a step, G responses to each (a group), B = Q G responses, T tokens of the longest
one. In the formulas, A is the response's advantage, L its length and r its reward; p is the token's
probability, and H the entropy of the distribution before it. (In methods/: V is the expected reward
of the response, given the text before the token; z is a z-score.) For a reweighting the formula
shows A * weight, before the weights are rescaled.

Run it:  python train.py --mitigation outcome_conditional --think_discount 0.5
"""
import math
from typing import Callable

import torch
from torch import Tensor

from methods.credit_function import register, token_credit, z_score
from methods.written import calculation_advantage, reward_without, written_calculations
from plumbing.files import require
from rollout import TokenBatch, by_group
# FILLER, REASONING and STRUCTURE for your idea, as in `batch.role == FILLER`.
from tasks.text import FILLER, REASONING, ROLES, STRUCTURE  # noqa: F401

# ------------------------------------------------------------------------------------------- GRPO


@token_credit(from_advantage=True)
def none(batch: TokenBatch) -> Tensor:
    """credit = A, the same number on every token of a response: GRPO (2402.03300). --advantage
    names A's formula."""
    return batch.advantage[:, None] * batch.mask


# ----------------------------------------------------------------------- what a weight does to it


def reweight(batch: TokenBatch, weight: Tensor) -> Tensor:
    """Credit (B, T) from weights (B, T) >= 0 that are 0 on padding: advantage * weight, after two
    corrections.

    1. Weights that are all 0 don't say which token of a response matters: they become 1. So the
       response gets plain GRPO and does not drop out. (With --normalize step these ones are
       rescaled with the others' weights.)
    2. The weights are rescaled as batch.normalize says. response: those of each response average 1,
       so that its credit still averages its advantage. step: they average 1 over all tokens of the
       step. none: they stay as they are.
    """
    all_zero = ~weight.any(1, keepdim=True)  # (B, 1)
    weight_or_one = torch.where(all_zero & batch.mask, 1.0, weight)  # (B, T)
    rescaled = NORMALIZATIONS[batch.normalize](weight_or_one, batch.mask)  # (B, T)
    return batch.advantage[:, None] * rescaled


def unit_mean(weight: Tensor, mask: Tensor) -> Tensor:
    """Rescale weights (B, T), 0 outside mask (B, T), so that each row averages 1 over its mask;
    zeros stay zeros."""
    total = weight.sum(1, keepdim=True)  # (B, 1)
    return weight * (mask.sum(1, keepdim=True) / torch.where(total > 0, total, 1.0))


def unit_mean_in_step(weight: Tensor, mask: Tensor) -> Tensor:
    """The same over all tokens of the step."""
    return unit_mean(weight.reshape(1, -1), mask.reshape(1, -1)).view_as(weight)


NORMALIZATIONS = {
    "response": unit_mean, "step": unit_mean_in_step, "none": lambda weight, mask: weight}


def reweighting(
    function: Callable | None = None, *, needs: tuple[str, ...] | Callable = ()
) -> Callable:
    """Decorator for a function that returns weights (B, T) >= 0. Decorated, it returns credit, made
    by `reweight`.

        @reweighting
        def early(batch: TokenBatch, power: float = 0.5) -> Tensor:
            return batch.mask.cumsum(1).clamp(min=1) ** -power

    Now `python train.py --mitigation early --power 1.0` trains with it. What it asks for beyond the
    batch, it names: @reweighting(needs=("critic",)) for batch.ask.head("critic"), "reference" for
    batch.ask.reference_logprob, "calculations" for batch.task.calculations, which not every task
    has. Where that depends on hyper-parameters, needs is a function of these. Weights may be bool
    or int, and on any device.
    """
    # `register` lists the function by its name; see methods/credit_function.py.
    return register(function, reweight, from_advantage=True, needs=needs)


# ------------------------------------------------------------ the original work's seven strategies


@reweighting
def entropy_ratio(batch: TokenBatch) -> Tensor:
    """credit = A * H / mean H of the response: favour uncertain tokens in proportion (the original
    work).

    Strategy 1, as written there, "GTPO-style"; the `gtpo` of methods/groups.py differs.
    """
    return unit_mean(batch.entropy * batch.mask, batch.mask)  # H / mean H, with any --normalize


@reweighting(needs=("importance",))
def learned_importance(batch: TokenBatch) -> Tensor:
    """credit = A * L * softmax(s), s a learned score: favour tokens that predict success (the
    original work).

    Strategy 2: a small network beside the policy says which tokens are important. What trains it is
    left open; ours learns to predict the response's success from its hidden states, pooled by the
    softmax (1802.04712; methods/heads.py), and scores a step before it learns from it. (Three
    published algorithms bear its name there, lambda-GRPO: 2510.06870, 2509.21154 and 2510.00194.)
    """
    return batch.ask.head("importance") * batch.mask.sum(1, keepdim=True)


@reweighting
def attention_credit(batch: TokenBatch, credit_scale: float = 2.0) -> Tensor:
    """credit = A * (1 + credit_scale * a): the answer pays attention a to the token (after the
    original work).

    Strategy 3. The attention is the last layer's, averaged over heads and over the states that
    predict the answer's tokens after this one, then scaled to mean 1 over the response. Prompt
    tokens, such as the attention sink at position 0, don't count. Without an answer a = 0, which is
    plain GRPO. (The original has other formulas, and its code gave token t + 1 what was paid to
    token t: lab/original/methods.md.)
    """
    require(credit_scale >= 0, "--credit_scale must be 0 or more")
    in_answer = batch.in_answer  # (B, T)
    # paid[:, t, u]: what the state that predicts token t pays to an earlier token u, if t is in the
    # answer. Of each u the sum over t, and the number of such t behind it:
    paid = batch.ask.attention * in_answer[:, :, None]  # (B, T, T)
    total = paid.sum(1)  # (B, T)
    answer_tokens_behind = in_answer.sum(1, keepdim=True) - in_answer.cumsum(1)  # (B, T)
    mean = total / answer_tokens_behind.clamp(min=1) * batch.mask  # (B, T)
    return 1 + credit_scale * unit_mean(mean, batch.mask)


@token_credit(from_advantage=True, needs=("calculations",))
def reward_decomposition(
    batch: TokenBatch, weights: str = "0.1,0.3,1", stepwise: bool = False
) -> Tensor:
    """credit = a A_format on tags + b A_steps before <answer> + c A_success in it: normalize, then
    add (2601.05242).

    Strategy 4. --weights are a,b,c. Each reward is z-scored in its group by itself. A_steps: the
    share of written calculations that are true and use available numbers, a process reward. With
    stepwise=True each calculation's own verdict, z-scored over all calculations of the group, goes
    to its own tokens instead. A response without an answer or a calculation gets plain GRPO; one
    without a calculation counts as 0 in A_steps. (The paper also normalizes the sum over a batch.)
    """
    try:
        a, b, c = map(float, weights.split(","))
    except ValueError:
        raise ValueError("--weights must be three numbers, as in 0.1,0.3,1") from None
    written = [written_calculations(batch, i) for i in range(len(batch.text))]  # B lists
    verdicts = [torch.tensor([float(x.is_right) for x in row]) for row in written]  # B, (S,) each
    right_share = torch.stack([v.sum() / max(len(v), 1) for v in verdicts])  # (B,) 0 without any
    right_share = right_share.to(batch.reward.device)
    in_group = lambda x: z_score(by_group(batch, x[:, None])).view(-1, 1)  # (B,) -> (B, 1)
    if stepwise:
        steps = calculation_advantage(batch, written, verdicts)  # (B, T)
    else:
        steps = in_group(right_share)  # (B, 1)
    section = torch.where(batch.in_answer, c * in_group(batch.success), b * steps)  # (B, T)
    credit = a * in_group(batch.format) * (batch.role == STRUCTURE) + section  # (B, T)
    calculates = torch.tensor([len(v) > 0 for v in verdicts], device=right_share.device)  # (B,)
    defined = calculates & batch.in_answer.any(1)  # (B,)
    return torch.where(defined[:, None], credit, none(batch))


@reweighting(needs=lambda tokens: () if tokens else ("calculations",))
def regrade_ablation(batch: TokenBatch, tokens: bool = False) -> Tensor:
    """credit = A * |r - r of the text without it| on each calculation: remove it and grade again
    (the original work).

    Strategy 5, there `causal intervention`, removes a token: that is tokens=True. The reward looks
    at the answer and the tags alone. So removing a calculation from the thoughts changes nothing:
    in most responses all weights are 0, which is plain GRPO. Removing a token of a tag or of a
    right answer changes it. How much a token changed the chance of success: lab/truth/measure.py.
    """
    weight = batch.advantage.new_zeros(batch.mask.shape)  # (B, T)
    for i, spans in enumerate(batch.spans):
        if tokens:
            parts = [(t, start, stop) for t, (start, stop) in enumerate(spans)]
        else:
            parts = [(x.tokens, x.span.a[0], x.span.result[1])
                     for x in written_calculations(batch, i)]
        reward = reward_without(batch, i, 0, 0)  # of the whole text, also where a coin graded it
        for columns, start, stop in parts:  # one column, or a mask (T,) of them
            weight[i, columns] = abs(reward - reward_without(batch, i, start, stop))
    return weight


@reweighting
def outcome_conditional(batch: TokenBatch, think_discount: float = 0.5) -> Tensor:
    """credit = A * (1 in <answer>, think_discount before it): reward the conclusion more (the
    original work).

    Strategy 6, whose weights depend on the section alone. A response without an answer gets plain
    GRPO. (The original discounted such a response as a whole, so that credit depended on the
    format.)
    """
    require(think_discount >= 0, "--think_discount must be 0 or more")
    unanswered = ~batch.in_answer.any(1, keepdim=True)  # (B, 1)
    return torch.where(batch.in_answer | unanswered, 1.0, think_discount)


@reweighting
def inverse_logprob(batch: TokenBatch, epsilon: float = 0.1) -> Tensor:
    """credit = A / (|log p| + epsilon): favour tokens the model was sure of (the original work).

    Strategy 7, meant to make |credit * log p| equal on all tokens of a response. That holds where
    |log p| is well above epsilon. (The original did not rescale its weight, see --normalize none,
    nor detach it: lab/original/methods.md.)
    """
    require(epsilon > 0, "--epsilon must be above 0")
    return 1 / (batch.logprob.abs() + epsilon)


# --------------------------------------------------------------- what its text asks for beyond them


@reweighting
def entropy_masking(batch: TokenBatch, mask_percentile: float = 80.0) -> Tensor:
    """credit = A where H >= the mask_percentile-th percentile of the step, else 0: forking tokens
    only (2506.01939).

    Hard masking: a forking token is one where the text could go several ways. Where every response
    keeps a token, --normalize none is the paper's equation, which divides the loss by the number of
    all tokens, and --normalize step its code, which divides by that of kept ones. A response that
    keeps none gets plain GRPO, by `reweight`; in the paper it drops out.
    """
    require(0 <= mask_percentile <= 100, "--mask_percentile must be between 0 and 100")
    threshold = batch.entropy[batch.mask].quantile(mask_percentile / 100)  # ()
    return batch.entropy >= threshold


@reweighting
def entropy_weighted(batch: TokenBatch, entropy_temp: float = 1.0) -> Tensor:
    """credit = A * L * softmax(H / entropy_temp): favour a response's uncertain tokens (the
    original work).

    Soft weights. The original's softmax ran over a micro-batch, so that its results depended on a
    memory setting.
    """
    require(entropy_temp > 0, "--entropy_temp must be above 0")
    score = (batch.entropy / entropy_temp).masked_fill(~batch.mask, -math.inf)  # (B, T)
    return score.softmax(1) * batch.mask.sum(1, keepdim=True)


@reweighting
def token_type(
    batch: TokenBatch, filler: float = 0.5, reasoning: float = 1.0, structure: float = 1.0
) -> Tensor:
    """credit = A * the flag of the token's role: filler is prose, reasoning arithmetic, structure
    tags (ours).

    The original asks for it in its conclusions: tell filler from reasoning within the thoughts.
    """
    weights = (filler, reasoning, structure)  # in the order of ROLES; batch.role is the index
    for role, weight in zip(ROLES, weights):
        require(weight >= 0, f"--{role} must be 0 or more")
    return torch.tensor(weights, device=batch.role.device)[batch.role.int()]  # (B, T)


# -------------------------------------------------------------------------------------------- yours


# <- your idea here: a function under @reweighting or @token_credit, and nothing else to touch
