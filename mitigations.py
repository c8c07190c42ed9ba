"""Credit functions: each one gives every token of a step its credit, the number that multiplies grad log pi(token).

A function under @token_credit returns the credit itself, (B, T) for B responses of up to T tokens. A function under
@reweighting returns weights, by which the response's advantage is multiplied.

The original work, a study of credit in GRPO-Zero (github.com/Ja-Crispy/GRPO-Zero), called such a function a
*mitigation* of GRPO, which gives every token of a response the same credit. Hence the flag --mitigation. A *method*, in
tables that compare runs, is a credit function with its settings.

The loss does not know which function its credit came from. To try an idea, write one decorated function at the end of
this file: its keyword arguments become command-line flags, the first line of its docstring becomes its help text.

How this differs from the original work and from most published code:
1. Weights carry no gradient and are computed on the whole step instead of a micro-batch. By default (--normalize) they
   average 1 in each response: a reweighting moves credit between the tokens of a response and changes nothing else.
2. Where a credit function is undefined for a response, as for one without an answer, that response gets plain GRPO.
3. Where a paper and its code disagree, we follow the paper, and the docstring says so.

In the formulas, A is the response's advantage, L its length and r its reward; p is the token's probability, H the
entropy of the distribution it was sampled from and V the expected reward of the response, given the text before it; z
is a z-score. For a reweighting the formula shows A * weight, before the weights are rescaled.

Run it:  python train.py --mitigation outcome_conditional --think_discount 0.5
"""
import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from countdown_task import FILLER, REASONING  # noqa: F401  for your idea: `batch.role == FILLER`
from countdown_task import (ANSWER, ROLES, STRUCTURE, CalculationSpan, anchors, check_calculations, reachability,
                            reward, sentence_starts)

NORMALIZATIONS = ("response", "batch", "none")
PROVIDED = ("critic", "importance", "reference")  # what a run provides to the methods that need it


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to T tokens.

    Column t is the t-th token of the response; padding is 0 or False. Nothing carries a gradient. The batch is built
    once a step, before it is cut into micro-batches. The G responses to a puzzle are neighbours.

    `ask` runs the model again. Only the functions that use it pay for it, and each attribute is computed once a step:
    ask.hidden                       (B, T, D) last hidden state of the model, before it emits each token
    ask.attention                    (B, T, T) [:, t, u]: how much the state that predicts token t attends to u < t, in
                                     the last layer, mean over its heads
    ask.values                       (B, T) the critic's estimate of the reward before each token, 0 on padding
    ask.importance_weights           (B, T) how much a small trained network (critic.py) looks at each token to predict
                                     success; sum 1 over a response
    ask.reference_logprob            (B, T) log-probability of each token under the reference model
    ask.logprob_without(rows, hide)  (R, T) log-probabilities of the responses rows (R,), repeats allowed, when no later
                                     token can attend to those marked in hide (R, T)
    ask.rollout_values(cuts, k)      (B, T) at each True of cuts (B, T), of any column, the mean reward of k
                                     continuations, sampled from the text before that token; 0 elsewhere
    ask.generator(name)              torch.Generator on the CPU, seeded by --seed, step and name
    """

    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    reward: Tensor  # (B,) 0.1 * format + success, or a coin toss (--reward random)
    success: Tensor  # (B,) 1 where the answer is right (or the coin shows heads), else 0
    format: Tensor  # (B,) how much of the requested layout it has, from 0 to 1
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    group: Tensor  # (B,) int64, index of the puzzle that the response answers
    numbers: list[tuple[int, ...]]  # per puzzle
    target: list[int]  # per puzzle
    advantage: Tensor  # (B,) one number per response: how its reward compares, see grpo.group_advantage
    role: Tensor  # (B, T) int8: FILLER (prose), REASONING (arithmetic) or STRUCTURE (tags and the end token)
    in_answer: Tensor  # (B, T) bool, from the last <answer> on, which is the graded one
    text: list[str]  # per response, decoded, end token removed
    spans: list[list[tuple[int, int]]]  # per response, the character span of each token in the text
    calculations: list[list[CalculationSpan]]  # per response, the spans (a, operator, b, result) of each `a + b = c`
    normalize: str  # how `reweight` rescales weights: one of NORMALIZATIONS
    ask: Any  # Queries of queries.py, see above


# ------------------------------------------------------------------------------------- the two decorators


def reweighting(function: Callable | None = None, *, needs: tuple[str, ...] = ()) -> Callable:
    """Decorator for a function that returns weights (B, T) >= 0. `reweight` turns them into credit.

        @reweighting
        def early(batch: TokenBatch, power: float = 0.5) -> Tensor:
            return batch.mask.cumsum(1).clamp(min=1) ** -power

    Now `python train.py --mitigation early --power 1.0` trains with it. A function that uses batch.ask.values says so:
    @reweighting(needs=("critic",)); likewise "importance" for batch.ask.importance_weights and "reference" for
    batch.ask.reference_logprob. Weights may be bool or int, and on any device.
    """
    return register(function, is_reweighting=True, from_advantage=True, needs=needs)


def token_credit(function: Callable | None = None, *, from_advantage: bool = False,
                 needs: tuple[str, ...] = ()) -> Callable:
    """Decorator for a function that returns the credit (B, T) itself. Otherwise it is like `reweighting`.

    from_advantage=True says that the function reads batch.advantage: only then does train.py accept --advantage, which
    selects how rewards become advantages.
    """
    return register(function, is_reweighting=False, from_advantage=from_advantage, needs=needs)


def reweight(batch: TokenBatch, weight: Tensor) -> Tensor:
    """Credit (B, T) from weights (B, T) >= 0 that are 0 on padding: advantage * weight, after two corrections.

    1. Weights that are all 0 don't say which token of a response matters: they become 1. So the response gets plain
       GRPO and does not drop out.
    2. The weights are rescaled as batch.normalize says. response: those of each response average 1, so that its credit
       still averages its advantage. batch: they average 1 over all tokens of the step. none: they stay as they are.
    """
    all_zero = ~weight.any(1, keepdim=True)  # (B, 1)
    scaled = torch.where(all_zero & batch.mask, 1.0, weight)  # (B, T)
    if batch.normalize == "response":
        scaled = unit_mean(scaled, batch.mask)
    if batch.normalize == "batch":
        scaled = unit_mean(scaled.view(1, -1), batch.mask.view(1, -1)).view_as(scaled)
    return batch.advantage[:, None] * scaled


@dataclass(frozen=True)
class CreditFunction:
    """A registered credit function: called with a TokenBatch and hyper-parameters, it returns credit (B, T)."""

    name: str
    function: Callable[..., Tensor]  # as it was written, before decoration
    is_reweighting: bool  # whether it returns weights, else credit
    from_advantage: bool  # whether it reads batch.advantage, so that --advantage has an effect
    needs: tuple[str, ...]  # what a run must provide for it, of PROVIDED

    def __call__(self, batch: TokenBatch, *arguments, **hyper_parameters) -> Tensor:
        """Credit (B, T), 0 on padding."""
        values = self.raw(batch, *arguments, **hyper_parameters)  # (B, T)
        return reweight(batch, values) if self.is_reweighting else values

    def raw(self, batch: TokenBatch, *arguments, **hyper_parameters) -> Tensor:
        """The weights or credit (B, T) that the function returns, 0 on padding.

        ValueError for a wrong shape, for NaN or infinity, for negative weights, and where the function wrote into the
        batch, which the update reads, too.
        """
        shape, before = tuple(batch.mask.shape), versions(batch)
        returned = self.function(batch, *arguments, **hyper_parameters)
        require(versions(batch) == before,
                f"{self.name} changes a tensor of the batch: write x.exp() or x * y instead of x.exp_() or x *= y")
        result = "weights" if self.is_reweighting else "credit"
        found = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
        require(found == shape, f"{self.name} must return {result} of shape (B, T) = {shape}, not {found}")
        values = torch.where(batch.mask, returned.to(batch.logprob), 0.0)  # (B, T) of the batch's type, on its device
        require(values.isfinite().all(), f"{self.name} returned {result} with NaN or infinity in it, as division by 0 "
                "gives; quotient(a, b) avoids it")
        require(not self.is_reweighting or (values >= 0).all(), f"{self.name} returned a negative weight: credit of "
                "either sign is for @token_credit")
        return values

    @property
    def parameters(self) -> dict[str, bool | int | float | str]:
        """The hyper-parameters and their defaults, read from the function's signature."""
        signature = inspect.signature(self.function)
        return {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}

    def check_parameters(self) -> None:
        """ValueError for a hyper-parameter that can't become a flag: its default says the flag's type."""
        for p in list(inspect.signature(self.function).parameters.values())[1:]:  # the first one is the batch
            by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            require(by_name and type(p.default) in (bool, int, float, str),
                    f"{self.name}: the parameter {p} can't become a flag; give it a bool, int, float or str as default")
            require(p.annotation in (p.empty, type(p.default)), f"{self.name}: the default of {p} is of another type, "
                    "and the flag would get that: write 2.0, say, for a float of 2")

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "no docstring yet").splitlines()[0]


def versions(batch: TokenBatch) -> dict[str, int]:
    """How often each tensor of a batch was written to in place, by torch's own count."""
    return {name: value._version for name, value in vars(batch).items() if isinstance(value, Tensor)}


MITIGATIONS: dict[str, CreditFunction] = {}  # by name, filled by the decorators


def register(function: Callable | None, **properties) -> Callable:
    """Put a function into MITIGATIONS.

    ValueError for a name that is taken, unknown needs, and anything but a plain function, such as a decorated one.
    """
    if function is None:  # the decorator has arguments, so Python hands over the function in a second call
        return functools.partial(register, **properties)
    require(inspect.isfunction(function), "decorate a function made by def, once")
    name = function.__name__
    require(name not in MITIGATIONS, f"there are two credit functions named {name}: rename one of them")
    require(set(properties["needs"]) <= set(PROVIDED),
            f'{name}: needs must be a tuple of some of {PROVIDED}, such as ("critic",), not {properties["needs"]!r}')
    MITIGATIONS[name] = CreditFunction(name, function, **properties)
    return MITIGATIONS[name]


def required(name: str, hyper_parameters: dict) -> set[str]:
    """What a run must provide for a method, of PROVIDED; for `inverted`, what the method that it inverts needs."""
    if name == "inverted":
        name = (MITIGATIONS[name].parameters | hyper_parameters)["of"]
    return {*MITIGATIONS[name].needs} if name in MITIGATIONS else set()  # `inverted` itself refuses an unknown one


def require(condition: bool | Tensor, message: str) -> None:
    """ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def is_last_token(batch: TokenBatch) -> Tensor:
    """True (B, T) at the last token of each response."""
    return batch.mask & (batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True))


def unit_mean(weight: Tensor, mask: Tensor) -> Tensor:
    """Rescale weights (B, T), 0 outside mask (B, T), so that each row averages 1 over its mask; zeros stay zeros."""
    return weight * quotient(mask.sum(1, keepdim=True), weight.sum(1, keepdim=True))


def quotient(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole for whole >= 0, and part itself where whole is 0: so 0 / 0 is 0."""
    return part / torch.where(whole > 0, whole, 1.0)


# ------------------------------------------------------------ the baseline, and weights from what the sampler recorded


@token_credit(from_advantage=True)
def none(batch: TokenBatch) -> Tensor:
    """credit = A: GRPO, the same number on every token of a response (2402.03300)."""
    return batch.advantage[:, None] * batch.mask


@reweighting
def outcome_conditional(batch: TokenBatch, think_discount: float = 0.5) -> Tensor:
    """credit = A * (1 in <answer>, think_discount before it): reward the conclusion more (the original work).

    The name is the original's; the weights depend on the section alone. A response without an answer gets plain GRPO.
    (The original discounted all of it, so that credit depended on the format.)
    """
    require(think_discount >= 0, "--think_discount must be 0 or more")
    unanswered = ~batch.in_answer.any(1, keepdim=True)  # (B, 1)
    return torch.where(batch.in_answer | unanswered, 1.0, think_discount)


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
def inverse_logprob(batch: TokenBatch, epsilon: float = 0.1, detach: bool = True) -> Tensor:
    """credit = A / (|log p| + epsilon): favour tokens the model was sure of (the original work).

    It was meant to make |credit * log p| equal on all tokens. That holds where |log p| is well above epsilon.
    detach=False reproduces a bug of the original, which did not detach its weight. With l = log p, the gradient of
    l / (|l| + epsilon) is epsilon / (|l| + epsilon)^2. That is the weight it trained with, and nearly all of it goes to
    tokens with p near 1. Add --normalize none: the original did not rescale.
    """
    require(epsilon > 0, "--epsilon must be above 0")
    size = batch.logprob.abs() + epsilon  # (B, T)
    return 1 / size if detach else epsilon / size**2


@reweighting
def advantage_reweighting(batch: TokenBatch, alpha: float = 0.2) -> Tensor:
    """credit = A * (alpha * p + 1 - alpha): damp rare tokens, whose gradients are large (2505.12929)."""
    require(0 <= alpha <= 1, "--alpha must be between 0 and 1")
    return alpha * batch.logprob.exp() + 1 - alpha


@reweighting
def entropy_weighted(batch: TokenBatch, entropy_temp: float = 1.0) -> Tensor:
    """credit = A * L * softmax(H / entropy_temp): favour a response's uncertain tokens (the original work).

    The original took the softmax over a micro-batch, so that its results depended on a memory setting.
    """
    require(entropy_temp > 0, "--entropy_temp must be above 0")
    score = (batch.entropy / entropy_temp).masked_fill(~batch.mask, -math.inf)  # (B, T)
    return score.softmax(1) * batch.mask.sum(1, keepdim=True)


@reweighting
def entropy_ratio(batch: TokenBatch) -> Tensor:
    """credit = A * H / mean H of the response: favour uncertain tokens in proportion (the original work).

    The first of the strategies that it proposes, as written there. It calls that GTPO-style; `gtpo` differs.
    """
    return unit_mean(batch.entropy * batch.mask, batch.mask)


@reweighting
def entropy_masking(batch: TokenBatch, mask_percentile: float = 80.0) -> Tensor:
    """credit = A where H >= the mask_percentile-th percentile of the step, else 0: forking tokens only (2506.01939).

    A forking token is one where the text could go several ways. --normalize none is the paper's equation, which divides
    the loss by the number of all tokens. --normalize batch is its code, which divides by the number of kept ones. (In
    paper and code, a response without a kept one drops out.)
    """
    require(0 <= mask_percentile <= 100, "--mask_percentile must be between 0 and 100")
    # double: where all H are equal, rounding in float32 may lift the percentile above all of them.
    threshold = batch.entropy[batch.mask].double().quantile(mask_percentile / 100)  # ()
    return batch.entropy >= threshold


# ----------------------------------------------------------------------------- comparison with the rest of the group


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G responses to each of Q puzzles."""
    return values.view(len(batch.numbers), -1, *values.shape[1:])


def has_variance(rewards: Tensor) -> Tensor:
    """Which puzzles (Q, ...) have responses of unequal rewards (Q, G, ...): the others teach plain GRPO nothing."""
    return rewards.amax(1) > rewards.amin(1)


@token_credit(from_advantage=True)
def prefix_tree(batch: TokenBatch) -> Tensor:
    """credit = A / (responses of the group that share the prefix up to here): GRPO as a process reward (2509.21154).

    A process reward is one for a part of a response. A prefix that n responses share occurs n times in the loss;
    divided by n, it counts once.
    """
    sharing = same_prefix(batch).sum(2).view_as(batch.mask)  # (B, T)
    return quotient(batch.advantage[:, None], sharing)


def same_prefix(batch: TokenBatch) -> Tensor:
    """1 at [q, i, j, t] where responses i and j to puzzle q begin with the same tokens 0 to t, else 0: (Q, G, G, T).

    A response shares every prefix with itself. From the end of the shorter response on, the entry is 0.
    """
    tokens, mask = by_group(batch, batch.tokens), by_group(batch, batch.mask)  # (Q, G, T) each
    same = (tokens[:, :, None] == tokens[:, None]) & mask[:, :, None] & mask[:, None]  # (Q, G, G, T)
    return same.int().cumprod(-1)


@token_credit(from_advantage=True)
def tempo(batch: TokenBatch) -> Tensor:
    """credit = A + V_{t+1} - V_t, V the mean A of the group's responses that share the prefix: TEMPO (2509.18314).

    In rewards: ((r - mean r) + v_{t+1} - v_t) / std r, with v the mean reward of those responses, as in the authors'
    code (whose std is the unbiased one). V changes only where responses part; elsewhere the credit is A.
    """
    same, A = same_prefix(batch), by_group(batch, batch.advantage)  # (Q, G, G, T), (Q, G)
    after = quotient((same * A[:, None, :, None]).sum(2), same.sum(2))  # (Q, G, T) V_{t+1}
    before = after.roll(1, dims=2)  # (Q, G, T) V_t
    before[..., 0] = A.mean(1, keepdim=True)  # all responses share the empty prefix
    return none(batch) + (after - before).view_as(batch.logprob)


@token_credit
def optimal_baseline(batch: TokenBatch) -> Tensor:
    """credit = r_k - sum_i r_i W_it / sum_i W_it, W_it = sum_{j<=t} logit_grad_ij^2: least variance (2602.07078).

    k is the response itself, and logit_grad the norm of onehot - p. The sums run over the group's responses i that have
    not ended before t. Where only one is left, its baseline would be its own reward, so we take the group mean instead.
    (In the code of verl, an RL library, the credit there is 0.)
    """
    r, mask = by_group(batch, batch.reward)[..., None], by_group(batch, batch.mask)  # (Q, G, 1), (Q, G, T)
    W = by_group(batch, batch.logit_grad.square().cumsum(1)) * mask  # (Q, G, T)
    total = W.sum(1, keepdim=True)  # (Q, 1, T)
    weighted_mean = quotient((r * W).sum(1, keepdim=True), total)  # (Q, 1, T)
    usable = (mask.sum(1, keepdim=True) > 1) & (total > 0)  # (Q, 1, T)
    baseline = torch.where(usable, weighted_mean, r.mean(1, keepdim=True))  # (Q, 1, T)
    unequal = has_variance(r)[..., None]  # (Q, 1, 1) the rest is rounding noise, which Adam would blow up
    return torch.where(unequal, r - baseline, 0.0).view_as(batch.logprob)


@token_credit(from_advantage=True)
def gtpo(batch: TokenBatch, a1: float = 1.0, a2: float = 0.1, joint: bool = False) -> Tensor:
    """credit = z(a1 + a2 R (H / sum H)) if right, z(-a1 - a2 W (1/H / sum 1/H)) if wrong: pay for entropy (2508.04349).

    The sums run over the R right, or the W wrong, responses of the group that have not ended before t. As published,
    right and wrong tokens are z-scored separately, so the credit of each side averages 0: *the outcome is lost*, and
    all that remains is which token was more uncertain. joint=True z-scores both together. A group that is all right
    or all wrong gets plain GRPO.
    """
    # 1e-12: if all H are 0, their shares are equal.
    H, mask = by_group(batch, batch.entropy) + 1e-12, by_group(batch, batch.mask)  # (Q, G, T) each
    right = by_group(batch, batch.success)[..., None] > 0  # (Q, G, 1)
    up, down = mask & right, mask & ~right  # (Q, G, T) each
    certainty = down / (H + 1e-6)  # (Q, G, T) 1 / H, so that a wrong token is punished for being certain
    share_up = quotient(H * up, (H * up).sum(1, keepdim=True))  # (Q, G, T)
    share_down = quotient(certainty, certainty.sum(1, keepdim=True))  # (Q, G, T)
    if_right = a1 + a2 * share_up * up.sum(1, keepdim=True)  # (Q, G, T)
    if_wrong = -a1 - a2 * share_down * down.sum(1, keepdim=True)  # (Q, G, T)
    paid = torch.where(up, if_right, if_wrong)  # (Q, G, T)
    credit = z_score(paid, mask) if joint else z_score(paid, up) + z_score(paid, down)
    mixed = (right.any(1) & ~right.all(1))[..., None]  # (Q, 1, 1)
    return torch.where(mixed, credit, by_group(batch, none(batch))).view_as(batch.logprob)


def z_score(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Values (Q, G, T) minus their mean, over their standard deviation, per puzzle and over mask; 0 outside it.

    In double, where the mean of equal values is that value exactly, and their z-score 0.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = mask.sum((1, 2), keepdim=True).clamp(min=1)  # (Q, 1, 1)
    mean = (values.double() * mask).sum((1, 2), keepdim=True) / count  # (Q, 1, 1)
    deviation = torch.where(mask, values - mean, 0.0)  # (Q, G, T)
    std = ((deviation**2).sum((1, 2), keepdim=True) / count).sqrt()  # (Q, 1, 1)
    return (deviation / (std + 1e-4)).to(values)


@token_credit(from_advantage=True)
def ktae(batch: TokenBatch) -> Tensor:
    """credit = A + a score of the token id: how much more often responses that contain it are right (2505.16826).

    The score is 0 for the end token, and in a group that is all right or all wrong.
    """
    credit, is_end = none(batch), is_last_token(batch) & batch.ended[:, None]  # (B, T) each
    for group in batch.group.unique():
        rows = batch.group == group  # (B,)
        right, mask = batch.success[rows] > 0, batch.mask[rows]  # (G,), (G, T)
        if right.any() and not right.all():
            score = torch.zeros_like(credit[rows])  # (G, T)
            score[mask] = key_token_scores(batch.tokens[rows], mask, right)
            credit[rows] += score.masked_fill(is_end[rows], 0.0)
    return credit


def key_token_scores(tokens: Tensor, mask: Tensor, right: Tensor) -> Tensor:
    """KTAE's score (N,) in [-1, 1] of each of the N tokens of one group: tokens (G, T), mask (G, T), right (G,).

    A token id occurs in a right and b wrong responses. score = 2 sigmoid((F + IG) / 2 * x) - 1 with F = exp(-2 p) of
    Fisher's exact test (0 where p is 1), IG the information gain in bits. f is the frequency of the id among the right
    and among the wrong responses, damped as in BM25, so that repeats count ever less. The direction is x = Cohen's h (a
    difference of two proportions) + f_right / f_wrong - f_wrong / f_right. All of these are the paper's choices.
    """
    ids, index = tokens[mask].unique(return_inverse=True)  # (U,), (N,)
    # (G, U) how often each id occurs in each response
    counts = ((tokens[:, :, None] == ids) & mask[:, :, None]).sum(1).double()
    a, b = ((counts[side] > 0).sum(0) for side in (right, ~right))  # (U,), (U,)
    R, W = int(right.sum()), int((~right).sum())
    p = fisher_p(R, W).to(tokens.device)[a, b]  # (U,)
    strength = torch.where(p < 1 - 1e-9, (-2 * p).exp(), 0.0) + information_gain(a, b, R, W)  # (U,) F + IG
    lengths = torch.stack([counts[side].sum() for side in (right, ~right)])  # (2,) tokens on each side
    frequency = torch.stack([counts[side].sum(0) for side in (right, ~right)]) / lengths[:, None]  # (2, U)
    # BM25: frequency (k + 1) / (frequency + k (1 - c + c length / mean length)), with the authors' k = 2, c = 1/2.
    f = frequency * 3 / (frequency + (1 + lengths / lengths.mean())[:, None])  # (2, U)
    h = 2 * (a / R).sqrt().asin() - 2 * (b / W).sqrt().asin()  # (U,) Cohen's h; the authors' code omits both 2s
    x = h + f[0] / (f[1] + 1e-5) - f[1] / (f[0] + 1e-5)  # (U,)
    return (2 * (strength / 2 * x).sigmoid() - 1)[index].float()


@functools.cache
def fisher_p(R: int, W: int) -> Tensor:
    """Two-sided p (R + 1, W + 1) of Fisher's exact test: a of R right and b of W wrong responses contain a token.

    p is the probability of all outcomes with the same n = a + b that are no likelier than the one observed.
    """
    p = torch.zeros(R + 1, W + 1, dtype=torch.float64)
    for n in range(R + W + 1):  # responses that contain it: the margin that the test holds fixed
        a = range(max(0, n - W), min(R, n) + 1)
        ways = [math.comb(R, i) * math.comb(W, n - i) for i in a]
        probability = torch.tensor(ways, dtype=torch.float64) / math.comb(R + W, n)  # (len(a),)
        as_rare = probability <= probability[:, None] * (1 + 1e-9)  # (len(a), len(a)), up to rounding
        p[list(a), [n - i for i in a]] = (probability * as_rare).sum(1)
    return p


def information_gain(a: Tensor, b: Tensor, R: int, W: int) -> Tensor:
    """Bits (U,) that a token's presence, in a of R right and b of W wrong responses (U,), tells about being right."""
    def entropy(x: Tensor, y: Tensor) -> Tensor:  # of the split into x and y, times x + y
        total = (x + y).clamp(min=1)
        return -(torch.xlogy(x, x / total) + torch.xlogy(y, y / total)) / math.log(2)
    a, b = a.double(), b.double()
    whole = entropy(a.new_tensor(R), a.new_tensor(W))  # ()
    return (whole - entropy(a, b) - entropy(R - a, W - b)) / (R + W)


# ------------------------------------------------------------------------------------- checking what was written


def calculation_masks(batch: TokenBatch, i: int) -> Tensor:
    """The tokens (S, T) bool of each of the S calculations written in response i."""
    position = torch.from_numpy(anchors(batch.text[i], batch.spans[i]))  # (L,) each token's deciding character
    masks = torch.zeros(len(batch.calculations[i]), batch.mask.shape[1], dtype=torch.bool)  # (S, T)
    for row, span in zip(masks, batch.calculations[i]):
        row[: len(position)] = (position >= span.a[0]) & (position < span.result[1])
    return masks.to(batch.mask.device)


@token_credit(from_advantage=True)
def reward_decomposition(batch: TokenBatch, weights: str = "0.1,0.3,1", stepwise: bool = False) -> Tensor:
    """credit = a A_format on tags + b A_steps before <answer> + c A_success in it: normalize, then add (2601.05242).

    --weights are a,b,c. Each reward is z-scored in its group by itself, then they are added. A_steps: the share of
    written calculations that are true and use available numbers, a process reward. With stepwise=True each
    calculation's own verdict, z-scored over all calculations of the group, goes to its own tokens instead. A response
    without an answer or without a calculation gets plain GRPO. Without a calculation, its share of 0 still counts in
    the group's z-score. (The paper also normalizes the sum over the batch.)
    """
    try:
        a, b, c = map(float, weights.split(","))
    except ValueError:
        raise ValueError("--weights must be three numbers, as in 0.1,0.3,1") from None
    verdicts = [torch.tensor(check_calculations(text, spans, batch.numbers[group]), dtype=torch.float32)
                for text, spans, group in zip(batch.text, batch.calculations, batch.group.tolist())]  # B tensors (S,)
    share = torch.stack([v.sum() / max(len(v), 1) for v in verdicts]).to(batch.reward.device)  # (B,) 0 without any
    process, format, answer = (z_score(by_group(batch, r)[..., None]).view(-1, 1)
                               for r in (share, batch.format, batch.success))  # (B, 1) each
    thinking = calculation_advantage(batch, verdicts) if stepwise else process  # (B, T) or (B, 1)
    section = torch.where(batch.in_answer, c * answer, b * thinking)  # (B, T)
    credit = a * format * (batch.role == STRUCTURE) + section  # (B, T)
    written = torch.tensor([len(v) > 0 for v in verdicts], device=share.device) & batch.in_answer.any(1)  # (B,)
    return torch.where(written[:, None], credit, none(batch))


def calculation_advantage(batch: TokenBatch, verdicts: list[Tensor]) -> Tensor:
    """The verdict (0 or 1) on each calculation, z-scored over its group, on its tokens (B, T); 0 elsewhere."""
    advantage, G = torch.zeros_like(batch.logprob), len(batch.text) // len(batch.numbers)
    for i, verdict in enumerate(verdicts):
        if len(verdict):
            group = torch.cat(verdicts[i // G * G : i // G * G + G])  # all calculations of the group
            z = ((verdict - group.mean()) / (group.std(correction=0) + 1e-4)).to(advantage.device)  # (S,)
            for tokens, value in zip(calculation_masks(batch, i), z):
                advantage[i, tokens] = value
    return advantage


@reweighting
def regrade_ablation(batch: TokenBatch) -> Tensor:
    """credit = A * |r - r of the text without it| on each calculation: remove it and grade again (the original work).

    The fifth of its strategies, as written. The reward looks at the answer and the tags alone, so removing a
    calculation from the thoughts does not change it: nearly all weights are 0, and this is nearly plain GRPO. What the
    strategy is after, how much a token changed the probability of success, experiments/ground_truth.py measures.
    """
    def grade(text: str, group: int) -> float:
        return reward(text, batch.numbers[group], batch.target[group])["reward"]

    weight = torch.zeros_like(batch.logprob)  # (B, T)
    for i, (text, group) in enumerate(zip(batch.text, batch.group.tolist())):
        for tokens, c in zip(calculation_masks(batch, i), batch.calculations[i]):
            weight[i, tokens] = abs(grade(text, group) - grade(text[: c.a[0]] + text[c.result[1] :], group))
    return weight


@token_credit
def first_error(batch: TokenBatch, alpha: float = 0.5, solver: bool = False) -> Tensor:
    """credit = s_t - mean s: with s 1 in a right response, alpha up to the first error of a wrong one (2601.18984).

    From the error on, s is 0. mean s averages the responses of the group, each by its own mean.

    The paper asks a model where the first error is. Here the task tells: it is the first calculation that is false or
    uses a number that is not there; failing that, the `<answer>`, and failing that, the last token. With solver=True it
    is the first operand, operator or result after which no solution is left: in `5 - 3 = 2` the 5, if no solution
    subtracts anything from it.

    (The paper can also end the rewarded prefix some tokens early, so that inflating it does not pay. Written from its
    abstract and from a summary of its equations.)
    """
    require(0 <= alpha <= 1, "--alpha must be between 0 and 1")
    column = torch.arange(batch.mask.shape[1], device=batch.mask.device)  # (T,)
    start = torch.tensor([error_column(batch, i, solver) for i in range(len(batch.text))], device=column.device)  # (B,)
    wrong = alpha * (column < start[:, None])  # (B, T)
    s = torch.where(batch.success[:, None] > 0, 1.0, wrong) * batch.mask  # (B, T)
    mean = by_group(batch, s.sum(1) / batch.mask.sum(1)).mean(1)  # (Q,)
    return s - mean[batch.group, None]


def error_column(batch: TokenBatch, i: int, solver: bool) -> int:
    """The column where the first error of response i begins; see `first_error`."""
    text, written, group = batch.text[i], batch.calculations[i], batch.group[i]
    numbers, answer = batch.numbers[group], text.rfind(ANSWER)
    if solver:
        within_reach = reachability(text, written, numbers, batch.target[group])  # (S, 5) before and after each part
        starts = [part[0] for parts, row in zip(written, within_reach)
                  for part, before, after in zip(parts, row, row[1:]) if before and not after]
    else:
        starts = [parts.a[0] for parts, right in zip(written, check_calculations(text, written, numbers)) if not right]
    first = min([*starts, answer if answer >= 0 else len(text)])
    places = anchors(text, batch.spans[i])  # (L,) the character that classifies each token
    return min(int((places < first).sum()), len(places) - 1)


# ----------------------------------------------------------------------------------- running the model again


@reweighting
def attention_credit(batch: TokenBatch, credit_scale: float = 2.0) -> Tensor:
    """credit = A * (1 + credit_scale * a): with a the attention that the answer pays to the token (the original work).

    The attention is that of the last layer, averaged over heads and over the states of the answer that come after the
    token, then scaled to mean 1 over the response. Prompt tokens, such as the attention sink at position 0, don't
    count. Without an answer a = 0, which is plain GRPO. (The original was off by one: token t + 1 got what was paid to
    token t.)
    """
    require(credit_scale >= 0, "--credit_scale must be 0 or more")
    attention = (batch.ask.attention * batch.in_answer[:, :, None]).sum(1)  # (B, T)
    readers = batch.in_answer.sum(1, keepdim=True) - batch.in_answer.cumsum(1)  # (B, T) answer tokens after this one
    return 1 + credit_scale * unit_mean(quotient(attention, readers) * batch.mask, batch.mask)


@reweighting
def causal_ablation(batch: TokenBatch) -> Tensor:
    """credit = A * (1.5 in <answer>, 0.5 + 0.5 drop / max drop on a calculation, else 0.5): causal (2602.09331).

    Favour the calculations that the answer depends on. The drop is the fall of the answer's log-probability, at least
    0, when the calculation is hidden from all later tokens (its keys are masked, positions stay); max drop is the
    largest in the response. A response without an answer, or without a calculation before it, gets plain GRPO.
    """
    masks = [calculation_masks(batch, i) & ~batch.in_answer[i] for i in range(len(batch.text))]  # B of (S, T)
    hide = [m[m.any(1)] if batch.in_answer[i].any() else m[:0] for i, m in enumerate(masks)]  # B of (S', T)
    # Each response as often as it hides a calculation: counts 2, 0, 1 give rows 0, 0, 2.
    rows = torch.repeat_interleave(torch.tensor([len(h) for h in hide])).to(batch.mask.device)  # (N,)
    if not len(rows):
        return torch.ones_like(batch.logprob)
    weight = torch.where(batch.in_answer, 1.5, 0.5)  # (B, T)
    fall = batch.logprob[rows] - batch.ask.logprob_without(rows, torch.cat(hide))  # (N, T)
    drop = (fall * batch.in_answer[rows]).sum(1).clamp(min=0)  # (N,)
    largest = torch.zeros_like(batch.advantage).scatter_reduce(0, rows, drop, "amax")[rows]  # (N,) in its response
    for i, tokens, share in zip(rows, torch.cat(hide), quotient(drop, largest)):
        weight[i, tokens] = 0.5 + 0.5 * share
    defined = torch.zeros_like(batch.ended).index_fill(0, rows, True)  # (B,)
    return torch.where(defined[:, None], weight, 1.0)


@token_credit
def vineppo(batch: TokenBatch, k: int = 3, cuts: str = "sentence", mask: bool = False) -> Tensor:
    """credit = V(next cut) - V(this cut), V the mean reward of k continuations: cuts at sentence ends (2410.01679).

    All tokens between two cuts get the same credit. V at the end is the reward. V at the start costs nothing: it is
    the mean reward of the group's other responses. cuts="uncertain" is SPO-chain (2505.23564): a cut comes before the
    6th, 11th, 16th ... *cutpoint*, a token with p below 90%. mask=True gives credit to cutpoints alone, and divides the
    loss by their number (with --loss_norm token). (The paper has k = 9, and its code also z-scores the credit.)
    """
    require(k >= 1, "--k must be at least 1: it is the number of continuations sampled at each cut")
    require(cuts in ("sentence", "uncertain"), "--cuts must be sentence or uncertain")
    cutpoint = batch.mask & (batch.logprob < math.log(0.9))  # (B, T)
    credit = segment_credit(batch, sentence_cuts(batch) if cuts == "sentence" else fifths(cutpoint), k)
    return credit * cutpoint * quotient(batch.mask.sum(), cutpoint.sum()) if mask else credit


def sentence_cuts(batch: TokenBatch) -> Tensor:
    """True (B, T) at the first token of each sentence but the first."""
    cuts = torch.zeros(batch.mask.shape, dtype=torch.bool)  # (B, T)
    for row, text, spans in zip(cuts, batch.text, batch.spans):
        row[: len(spans)] = torch.from_numpy(sentence_starts(text, spans))
    return cuts.to(batch.mask.device)


def fifths(cutpoint: Tensor) -> Tensor:
    """True (B, T) at the 6th, 11th, 16th ... place of each row where cutpoint (B, T) is True."""
    count = cutpoint.cumsum(1)  # (B, T)
    return cutpoint & (count % 5 == 1) & (count > 1)


def segment_credit(batch: TokenBatch, cuts: Tensor, k: int) -> Tensor:
    """V at the end of each token's segment minus V at its start (B, T); cuts (B, T): starts of all but the first."""
    rewards = by_group(batch, batch.reward)  # (Q, G)
    others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)  # (Q, G) mean reward
    sampled = batch.ask.rollout_values(cuts, k)  # (B, T)
    value = torch.cat((others.view(-1, 1), sampled[:, 1:], batch.reward[:, None]), dim=1)  # (B, T + 1)
    edge = torch.ones_like(cuts[:, :1])  # (B, 1)
    bounds = torch.cat((edge, cuts[:, 1:], edge), dim=1)  # (B, T + 1) where segments begin, and where the last one ends
    places = [row.nonzero()[:, 0] for row in bounds]  # B tensors, of one more than the response has segments
    return torch.stack([v[at].diff().repeat_interleave(at.diff()) for v, at in zip(value, places)])


@token_credit(needs=("reference",))
def dpo(batch: TokenBatch, beta: float = 0.1) -> Tensor:
    """credit = push on the best, -push on the worst response, push = beta sigmoid(-margin): online DPO (2305.18290).

    margin = beta * (log ratio to the reference model of the best - that of the worst). At the first update on a batch
    the loss then has DPO's gradient, summed over groups and divided by the tokens of the step (--loss_norm token) or by
    B * max_new_tokens (constant). Ties go to the lowest index; a group of equal rewards has no pair.
    """
    require(beta > 0, "--beta must be above 0")
    ratio = ((batch.logprob - batch.ask.reference_logprob) * batch.mask).sum(1)  # (B,) log ratio of the whole response
    rewards, ratios = by_group(batch, batch.reward), by_group(batch, ratio)  # (Q, G)
    best, worst = rewards.argmax(1, keepdim=True), rewards.argmin(1, keepdim=True)  # (Q, 1)
    margin = beta * (ratios.gather(1, best) - ratios.gather(1, worst))  # (Q, 1)
    push = beta * (-margin).sigmoid()  # (Q, 1)
    credit = torch.zeros_like(rewards).scatter(1, best, push).scatter_add(1, worst, -push)  # (Q, G) 0 if best is worst
    return credit.view(-1, 1) * batch.mask


# --------------------------------------------------------------------------------------- with a trained critic


def next_value(batch: TokenBatch, value: Tensor) -> Tensor:
    """V_{t+1} from V_t (B, T): the value after each token, 0 after the last one."""
    return value.roll(-1, dims=1) * (batch.mask & ~is_last_token(batch))


@token_credit(needs=("critic",))
def ppo(batch: TokenBatch, gae_lambda: float = 0.95, whiten: bool = False, gamma: float = 1.0) -> Tensor:
    """credit = sum_l (gamma gae_lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t: PPO with GAE (1707.06347).

    GAE is generalized advantage estimation (1506.02438). r_t is the reward at the last token, 0 before. The value after
    the last token is 0, even in a response cut off by the token limit. gamma discounts per token. It is 1, because a
    right answer is worth as much after a long derivation, and because the critic predicts the undiscounted reward.
    whiten=True rescales credit to mean 0 and standard deviation 1 over the step.
    """
    require(0 <= gae_lambda <= 1, "--gae_lambda must be between 0 and 1")
    require(0 <= gamma <= 1, "--gamma must be between 0 and 1")
    value = batch.ask.values  # (B, T)
    delta = is_last_token(batch) * batch.reward[:, None] + gamma * next_value(batch, value) - value  # (B, T)
    credit = torch.zeros_like(delta)  # (B, T)
    later = torch.zeros_like(batch.reward)  # (B,) the credit of the token after t
    for t in reversed(range(delta.shape[1])):
        later = delta[:, t] + gamma * gae_lambda * later
        credit[:, t] = later
    return z_score(credit[None], batch.mask[None])[0] if whiten else credit


@reweighting(needs=("critic",))
def value_change(batch: TokenBatch) -> Tensor:
    """credit = A * |V_{t+1} - V_t|, V the critic's: favour tokens that change the expected reward (ours).

    The last token gets 0, since no value follows it. Where the critic gives all tokens the same value, as before its
    first training, the response gets plain GRPO.
    """
    change = (next_value(batch, batch.ask.values) - batch.ask.values).abs()  # (B, T)
    return change.masked_fill(is_last_token(batch), 0.0)


@reweighting(needs=("importance",))
def learned_importance(batch: TokenBatch) -> Tensor:
    """credit = A * L * softmax(s), s a learned score: favour tokens that predict success (the original work).

    The second of its strategies: a small network beside the policy says which tokens are important. The original leaves
    open what trains that network. Here it learns to predict the response's success from its hidden states, pooled by
    the softmax (1802.04712; see critic.py), and it scores a step before it learns from it. The original calls this
    lambda-GRPO. Three other methods go by that name: a learned exponent on a response's length (2510.06870),
    `prefix_tree` (2509.21154) and eligibility traces (2510.00194).
    """
    return batch.ask.importance_weights * batch.mask.sum(1, keepdim=True)


# ----------------------------------------------------------------------------------------------- the controls


@reweighting
def random(batch: TokenBatch) -> Tensor:
    """credit = A * w, w ~ Exponential(1): a control that any reweighting has to beat."""
    return torch.empty(batch.mask.shape).exponential_(generator=batch.ask.generator("random"))


@reweighting
def inverted(batch: TokenBatch, of: str = "entropy_weighted") -> Tensor:
    """credit = A * (max w + min w - w), w the weights of --of: a control that reverses a method (2602.09331).

    The method --of runs with its default hyper-parameters.
    """
    choices = [m.name for m in MITIGATIONS.values() if m.is_reweighting and m.name != "inverted"]
    require(of in choices, f"--of {of}: only a reweighting can be inverted; choose one of {', '.join(choices)}")
    weight = MITIGATIONS[of].raw(batch)  # (B, T)
    largest = weight.masked_fill(~batch.mask, -math.inf).amax(1, keepdim=True)  # (B, 1)
    smallest = weight.masked_fill(~batch.mask, math.inf).amin(1, keepdim=True)  # (B, 1)
    return (largest + smallest - weight).clamp(min=0)  # only rounding takes it below 0


# <- your idea here: a function under @reweighting or @token_credit, and nothing else to touch
