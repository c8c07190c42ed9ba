"""Credit functions: each one gives every token of a step its credit, the number that multiplies
grad log pi(token).

This file has GRPO, the seven strategies that the original work (github.com/Ja-Crispy/GRPO-Zero)
proposed, in its order, what its text asks for beyond them, and the place for yours. Further ones,
such as PPO, are in methods/, a file for each family. The flag is called --mitigation, because that
work called such a function a mitigation of GRPO. *Here* says what became of each on easy puzzles,
if nothing else is named: success averaged over training, minus GRPO's, or RLOO's where that is
named, in points; or success at the end, from 29.9% at the start, as the model then was.

To try an idea, write one decorated function at the end of this file. Under @token_credit it returns
the credit itself; under @reweighting it returns weights, by which the response's advantage is
multiplied. Both are (B, T). Its keyword arguments become flags, and the first line of its docstring
their help. What it puts into batch.log, by name, is logged beside the credit. plumbing/checks.py
checks both, and sets padding to 0. A critic is a head: methods/heads.py.

How this differs from the original work and from most published code:
1. Weights carry no gradient and are computed on the whole step instead of a micro-batch. By default
   (--normalize) they average 1 in each response: a reweighting moves credit between the tokens of a
   response, whose mean credit stays.
2. Where a credit function is undefined for a response, as for one without an answer, that response
   gets plain GRPO.
3. Where a paper and its code disagree, the docstring says which of them we follow.

Shapes: Q puzzles a step, G responses to each (a group), B = Q G responses, T tokens of the longest
one. In the formulas, A is the response's advantage, L its length and r its reward; p is the token's
probability, H the entropy of the distribution it was sampled from and V the expected reward of the
response, given the text before the token; z is a z-score. For a reweighting the formula shows A *
weight, before the weights are rescaled.

Run it:  python train.py --mitigation outcome_conditional --think_discount 0.5
"""
import inspect
import math
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from plumbing.checks import check_name, checked
from plumbing.files import require
from rollout import TokenBatch, by_group, graded_without, z_score
from settings import Settings
from tasks.arithmetic import CalculationSpan
# The first three for your idea, as in `batch.role == FILLER`.
from tasks.text import FILLER, REASONING, ROLES, STRUCTURE, anchors  # noqa: F401

# -------------------------------------------------------------------------------- a credit function


@dataclass(frozen=True)
class CreditFunction:
    """What a decorator makes of a function: it is called as before, and returns credit (B, T)."""

    name: str  # of --mitigation
    function: Callable[..., Tensor]  # as it was written
    is_reweighting: bool  # whether it returns weights, else credit
    from_advantage: bool  # whether it reads batch.advantage: only then --advantage has an effect
    needs: tuple[str, ...] | Callable  # what a run must provide; or a function of the flags

    def __call__(self, batch: TokenBatch, /, *arguments, **hyper_parameters) -> Tensor:
        """Credit (B, T), 0 on padding."""
        values = self.raw(batch, *arguments, **hyper_parameters)  # (B, T)
        return reweight(batch, values) if self.is_reweighting else values

    def raw(self, batch: TokenBatch, /, *arguments, **hyper_parameters) -> Tensor:
        """The weights or credit (B, T) that the function returns, checked, and 0 on padding."""
        return checked(self.function(batch, *arguments, **hyper_parameters), self, batch)

    @property
    def summary(self) -> str:
        """The first paragraph of the function's docstring."""
        document = inspect.getdoc(self.function) or "no docstring yet"
        return " ".join(document.split("\n\n")[0].split())

    @property
    def parameters(self) -> dict[str, bool | int | float | str]:
        """The hyper-parameters and their defaults, read from the function's signature."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


MITIGATIONS: dict[str, CreditFunction] = {}  # by name; importing `methods` completes it


def register(function: Callable | None, name: str = "", **properties) -> Callable:
    """The CreditFunction of a function, which MITIGATIONS has by its name from now on."""
    if function is None:  # @reweighting(needs=...) is called before it gets the function
        return lambda function: register(function, name, **properties)
    name = name or getattr(function, "__name__", "")
    check_name(function, name, MITIGATIONS)
    MITIGATIONS[name] = CreditFunction(name, function, **properties)
    return MITIGATIONS[name]


def token_credit(
    function: Callable | None = None,
    *,
    name: str = "",
    from_advantage: bool = False,
    needs: tuple[str, ...] | Callable = (),
) -> Callable:
    """Decorator for a function that returns the credit (B, T) itself. What it returns on padding is
    set to 0.

    It is called as before, and its result is checked. MITIGATIONS has it by its name.
    from_advantage=True says that it reads batch.advantage: only then does train.py take --advantage
    and --shaping. needs: what it asks for beyond the batch, see `reweighting`. name: that of
    --mitigation, if not the function's own.
    """
    properties = {"is_reweighting": False, "from_advantage": from_advantage, "needs": needs}
    return register(function, name, **properties)


def reweighting(
    function: Callable | None = None, *, needs: tuple[str, ...] | Callable = ()
) -> Callable:
    """Decorator for a function that returns weights (B, T) >= 0. Decorated, it returns credit, made
    by `reweight`.

        @reweighting
        def early(batch: TokenBatch, power: float = 0.5) -> Tensor:
            return batch.mask.cumsum(1).clamp(min=1) ** -power

    Now `python train.py --mitigation early --power 1.0` trains with it. `needs` names what it asks
    for beyond the batch, as in @reweighting(needs=("critic",)): a head (batch.ask.head),
    "reference" (batch.ask.reference_logprob), or a function that not every task has
    (batch.task.calculations). Where that depends on hyper-parameters, needs is a function of these.
    Weights may be bool or int, and on any device.
    """
    return register(function, is_reweighting=True, from_advantage=True, needs=needs)


@torch.no_grad()
def assign_credit(batch: TokenBatch, mitigation: Callable, s: Settings) -> Tensor:
    """The credit (B, T) that the chosen function gives to each token. Tokens that --skip_unfinished
    leaves without credit still count in N."""
    credit = mitigation(batch)  # (B, T)
    return credit * batch.ended[:, None] if s.skip_unfinished else credit


# --------------------------------------------------------------- GRPO, and what a weight does to it


@token_credit(name="none", from_advantage=True)
def grpo(batch: TokenBatch) -> Tensor:
    """credit = A, the same number on every token of a response: GRPO (2402.03300). --advantage
    names A's formula."""
    return batch.advantage[:, None] * batch.mask


def reweight(batch: TokenBatch, weight: Tensor) -> Tensor:
    """Credit (B, T) from weights (B, T) >= 0 that are 0 on padding: advantage * weight, after two
    corrections.

    1. Weights that are all 0 don't say which token of a response matters: they become 1. So the
       response gets plain GRPO and does not drop out.
    2. The weights are rescaled as batch.normalize says. response: those of each response average 1,
       so that its credit still averages its advantage. step: they average 1 over all tokens of the
       step. none: they stay as they are.
    """
    all_zero = ~weight.any(1, keepdim=True)  # (B, 1)
    scaled = torch.where(all_zero & batch.mask, 1.0, weight)  # (B, T)
    return batch.advantage[:, None] * NORMALIZATIONS[batch.normalize](scaled, batch.mask)


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


# ------------------------------------------------------------ the original work's seven strategies


@reweighting
def entropy_ratio(batch: TokenBatch) -> Tensor:
    """credit = A * H / mean H of the response: favour uncertain tokens in proportion (the original
    work).

    Strategy 1, as written there, "GTPO-style"; `gtpo` differs.
    Here: 2.7 ± 1.1; with RLOO's advantage on word problems -3.3 ± 1.4, lab/study/tables.md.
    """
    return unit_mean(batch.entropy * batch.mask, batch.mask)


@reweighting(needs=("importance",))
def learned_importance(batch: TokenBatch) -> Tensor:
    """credit = A * L * softmax(s), s a learned score: favour tokens that predict success (the
    original work).

    Strategy 2: a small network beside the policy says which tokens are important. What trains it is
    left open; ours learns to predict the response's success from its hidden states, pooled by the
    softmax (1802.04712; heads.py), and scores a step before it learns from it. (Its name there,
    lambda-GRPO, is also that of a learned exponent on the length, 2510.06870, of `prefix_tree`,
    2509.21154, and of eligibility traces, 2510.00194.)
    Here: -4.3 ± 3.4, lab/study/tables.md.
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
    Here: 1.0 ± 1.2, lab/study/tables.md.
    """
    require(credit_scale >= 0, "--credit_scale must be 0 or more")
    answer = batch.in_answer
    # ask.attention[:, t, u]: what token t's state pays to token u. (B, T) from the whole answer:
    total = (batch.ask.attention * answer[:, :, None]).sum(1)
    later = answer.sum(1, keepdim=True) - answer.cumsum(1)  # (B, T) answer tokens after this one
    mean = total / later.clamp(min=1) * batch.mask  # (B, T) what each of them pays
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
    to its own tokens instead. A response without an answer or a calculation gets plain GRPO; where
    it has none, its share of 0 still counts in the group's z-score. (The paper also normalizes the
    sum over the batch.)
    Here: it learns true calculations, not right answers: 12.7% at the end, lab/study/collapse.md.
    """
    try:
        a, b, c = map(float, weights.split(","))
    except ValueError:
        raise ValueError("--weights must be three numbers, as in 0.1,0.3,1") from None
    written = [written_calculations(batch, i) for i in range(len(batch.text))]  # B lists of S
    verdicts = [torch.tensor([float(right) for *_, right in found]) for found in written]  # B, (S,)
    share = torch.stack([v.sum() / max(len(v), 1) for v in verdicts])  # (B,) 0 without any
    share = share.to(batch.reward.device)
    process, format, answer = (  # (B,) each -> (B, 1) each, in each group
        z_score(by_group(batch, reward[:, None])).view(-1, 1)
        for reward in (share, batch.format, batch.success))
    thinking = process  # (B, 1)
    if stepwise:
        thinking = calculation_advantage(batch, written, verdicts)  # (B, T)
    section = torch.where(batch.in_answer, c * answer, b * thinking)  # (B, T)
    credit = a * format * (batch.role == STRUCTURE) + section  # (B, T)
    calculates = torch.tensor([len(v) > 0 for v in verdicts], device=share.device)  # (B,)
    defined = calculates & batch.in_answer.any(1)  # (B,)
    return torch.where(defined[:, None], credit, grpo(batch))


def written_calculations(batch: TokenBatch, i: int) -> list[tuple[Tensor, CalculationSpan, bool]]:
    """Each calculation written in response i: its tokens (T,) bool, the spans of its parts, and
    whether it is right."""
    position = torch.from_numpy(anchors(batch.text[i], batch.spans[i]))  # (L,) decides of each
    position = position.to(batch.mask.device)
    found = []
    for span, right in batch.task.calculations(batch.text[i], batch.puzzles[batch.group[i]]):
        tokens = torch.zeros_like(batch.mask[i])  # (T,)
        tokens[: len(position)] = (position >= span.a[0]) & (position < span.result[1])
        found.append((tokens, span, right))
    return found


def calculation_advantage(batch: TokenBatch, written: list[list], verdicts: list[Tensor]) -> Tensor:
    """The verdict (0 or 1) on each calculation, z-scored over its group, on its tokens (B, T); 0
    elsewhere."""
    advantage = batch.advantage.new_zeros(batch.mask.shape)
    G = len(batch.text) // len(batch.puzzles)
    for i, verdict in enumerate(verdicts):
        if len(verdict):
            first = i // G * G
            group = torch.cat(verdicts[first : first + G])  # all calculations of the group
            z = (verdict - group.mean()) / (group.std(correction=0) + 1e-4)  # (S,)
            for (tokens, *_), value in zip(written[i], z.to(advantage.device)):
                advantage[i, tokens] = value
    return advantage


@reweighting(needs=lambda tokens: () if tokens else ("calculations",))
def regrade_ablation(batch: TokenBatch, tokens: bool = False) -> Tensor:
    """credit = A * |r - r of the text without it| on each calculation: remove it and grade again
    (the original work).

    Strategy 5 removes a token: that is tokens=True. The reward looks at the answer and the tags
    alone. So removing a calculation from the thoughts changes nothing, and nearly all weights are
    0, which is nearly plain GRPO. Removing a token of a tag or of a right answer does. How much a
    token changed the chance of success: lab/truth/measure.py.
    Here: with tokens=True and RLOO's advantage 0.0% at the end, lab/study/tables.md.
    """
    weight = batch.advantage.new_zeros(batch.mask.shape)  # (B, T)
    for i, spans in enumerate(batch.spans):
        if tokens:
            parts = [(t, start, stop) for t, (start, stop) in enumerate(spans)]
        else:
            parts = [(where, span.a[0], span.result[1])
                     for where, span, _ in written_calculations(batch, i)]
        reward = graded_without(batch, i, 0, 0)
        for where, start, stop in parts:  # where: a mask of tokens, or one of them
            weight[i, where] = abs(reward - graded_without(batch, i, start, stop))
    return weight


@reweighting
def outcome_conditional(batch: TokenBatch, think_discount: float = 0.5) -> Tensor:
    """credit = A * (1 in <answer>, think_discount before it): reward the conclusion more (the
    original work).

    Strategy 6, whose weights depend on the section alone. A response without an answer gets plain
    GRPO. (The original discounted such a response as a whole, so that credit depended on the
    format.)
    Here: -2.1 ± 1.6, lab/study/tables.md.
    """
    require(think_discount >= 0, "--think_discount must be 0 or more")
    unanswered = ~batch.in_answer.any(1, keepdim=True)  # (B, 1)
    return torch.where(batch.in_answer | unanswered, 1.0, think_discount)


@reweighting
def inverse_logprob(batch: TokenBatch, epsilon: float = 0.1) -> Tensor:
    """credit = A / (|log p| + epsilon): favour tokens the model was sure of (the original work).

    Strategy 7, meant to make |credit * log p| equal on all tokens. That holds where |log p| is well
    above epsilon. (The original did not rescale its weight, see --normalize none, nor detach it:
    lab/original/methods.md.)
    Here: 0.2% at the end, lab/study/collapse.md.
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
    keeps none gets plain GRPO; in the paper it drops out.
    Here: -0.1 ± 1.7, lab/study/tables.md.
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
    Here: 0.6 ± 1.5, lab/study/tables.md.
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

    The original asks for it in its conclusions: tell filler from reasoning within the thoughts. On
    hard puzzles two of its three runs fall: lab/study/collapse.md.
    Here: 1.8 ± 1.4; on word problems -4.0 ± 1.8, lab/study/tables.md.
    """
    weights = dict(zip(ROLES, (filler, reasoning, structure)))
    for role, weight in weights.items():
        require(weight >= 0, f"--{role} must be 0 or more")
    return torch.tensor(list(weights.values()), device=batch.role.device)[batch.role.int()]


# -------------------------------------------------------------------------------------------- yours


# <- your idea here: a function under @reweighting or @token_credit, and nothing else to touch
