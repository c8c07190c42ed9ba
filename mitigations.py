"""Credit functions: each one gives every token of a step its credit, the number that multiplies grad log pi(token).

A function under @token_credit returns the credit itself, (B, T) for B responses of up to T tokens. A function under
@reweighting returns weights, by which the response's advantage is multiplied.

This file says what a credit function is, and has GRPO, the weights of the original work, PPO, VinePPO and, at its end,
the place for yours. Further published ones are in methods/, a file for each family.

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
entropy of the distribution it was sampled from and V the expected reward of the response, given the text before the
token; z is a z-score. For a reweighting the formula shows A * weight, before the weights are rescaled.

Run it:  python train.py --mitigation outcome_conditional --think_discount 0.5
"""
import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from rollout import TokenBatch, by_group
from tasks.text import FILLER, REASONING, STRUCTURE  # noqa: F401  for your idea: `batch.role == FILLER`

NORMALIZATIONS = ("response", "batch", "none")


# ------------------------------------------------------------------------------------- the two decorators


def reweighting(function: Callable | None = None, *, needs: tuple[str, ...] | Callable = ()) -> Callable:
    """Decorator for a function that returns weights (B, T) >= 0. `reweight` turns them into credit.

        @reweighting
        def early(batch: TokenBatch, power: float = 0.5) -> Tensor:
            return batch.mask.cumsum(1).clamp(min=1) ** -power

    Now `python train.py --mitigation early --power 1.0` trains with it. What it needs beyond the batch it says here,
    as in @reweighting(needs=("critic",)): a head (batch.ask.head), "reference" (batch.ask.reference_logprob),
    or a function that not every task has (batch.task.calculations). Where that depends on hyper-parameters, needs is a
    function of these. Weights may be bool or int, and on any device.
    """
    return register(function, is_reweighting=True, from_advantage=True, needs=needs)


def token_credit(function: Callable | None = None, *, from_advantage: bool = False,
                 needs: tuple[str, ...] | Callable = ()) -> Callable:
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
    needs: tuple[str, ...] | Callable  # what a run must provide for it, or a function of its hyper-parameters

    def __call__(self, batch: TokenBatch, /, *arguments, **hyper_parameters) -> Tensor:
        """Credit (B, T), 0 on padding."""
        values = self.raw(batch, *arguments, **hyper_parameters)  # (B, T)
        if not self.is_reweighting:
            return values
        credit = reweight(batch, values)  # (B, T)
        require(credit.isfinite().all(), f"{self.name} returned weights that are too small for float32 to rescale")
        return credit

    def raw(self, batch: TokenBatch, /, *arguments, **hyper_parameters) -> Tensor:
        """The weights or credit (B, T) that the function returns, 0 on padding.

        ValueError for a wrong shape, for NaN or infinity, for negative weights, and where the function wrote into the
        batch, which the update reads, too.
        """
        shape = tuple(batch.mask.shape)
        before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(batch).items()}
        returned = self.function(batch, *arguments, **hyper_parameters)
        require(unchanged(before, batch),
                f"{self.name} changes a field of the batch: write x.exp() or x * y instead of x.exp_() or x *= y")
        result = "weights" if self.is_reweighting else "credit"
        found = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
        require(found == shape, f"{self.name} must return {result} of shape (B, T) = {shape}, not {found}")
        require(returned.layout == torch.strided and not returned.is_complex() and not returned.is_meta,
                f"{self.name} must return a dense tensor of real numbers")
        values = torch.where(batch.mask, returned.to(batch.logprob), 0.0)  # (B, T) of the batch's type, on its device
        require(values.isfinite().all(), f"{self.name} returned {result} with NaN or infinity in it, as division by 0 "
                "gives; quotient(a, b) avoids it")
        if self.is_reweighting:
            require((values >= 0).all(), f"{self.name} returned a negative weight: credit of either sign is for "
                    "@token_credit")
            require((values < 1e30).all(), f"{self.name} returned a weight above 1e30: the sum of a response would "
                    "overflow")
        return values

    @property
    def parameters(self) -> dict[str, bool | int | float | str]:
        """The hyper-parameters and their defaults, read from the function's signature."""
        signature = inspect.signature(self.function)
        return {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}

    def check_parameters(self) -> None:
        """ValueError for a hyper-parameter that can't become a flag: its default says the flag's type."""
        batch, *others = inspect.signature(self.function).parameters.values() or [None]
        require(batch and batch.default is batch.empty, f"{self.name}: its first parameter must be the batch")
        for p in others:
            by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            require(by_name and type(p.default) in (bool, int, float, str),
                    f"{self.name}: the parameter {p} can't become a flag; give it a bool, int, float or str as default")
            require(p.annotation in (p.empty, type(p.default)), f"{self.name}: the default of {p} is of another type, "
                    "and the flag would get that: write 2.0, say, for a float of 2")

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "no docstring yet").splitlines()[0]


def unchanged(before: dict, batch: TokenBatch) -> bool:
    """Whether the fields of a batch are those of `before`, which holds copies of its tensors."""
    now = vars(batch)
    return now.keys() == before.keys() and all(same(value, now[name]) for name, value in before.items())


def same(before: Any, now: Any) -> bool:
    """Whether a field is what it was: a tensor by its values and type, anything else by identity."""
    if not isinstance(before, Tensor):
        return now is before
    as_before = isinstance(now, Tensor) and now.dtype == before.dtype and not now.requires_grad
    return as_before and torch.equal(before, now)


MITIGATIONS: dict[str, CreditFunction] = {}  # by name, filled by the decorators


def register(function: Callable | None, **properties) -> Callable:
    """Put a function into MITIGATIONS as a CreditFunction, and return that: its call checks, masks and rescales.

    ValueError for a name that is taken, and for anything but a plain function, such as a decorated one.
    """
    if function is None:  # the decorator has arguments, so Python hands over the function in a second call
        return functools.partial(register, **properties)
    require(inspect.isfunction(function), "decorate a function made by def, once")
    name = function.__name__
    require(name not in MITIGATIONS, f"there are two credit functions named {name}: rename one of them")
    MITIGATIONS[name] = CreditFunction(name, function, **properties)
    return MITIGATIONS[name]


def required(name: str, hyper_parameters: dict) -> tuple[str, ...]:
    """What the credit function `name` needs of a run, with these hyper-parameters."""
    needs = MITIGATIONS[name].needs
    values = MITIGATIONS[name].parameters | hyper_parameters  # defaults, and what the flags say
    names = needs(**values) if callable(needs) else needs
    require(isinstance(names, tuple) and all(isinstance(need, str) for need in names),
            f'{name}: needs must be a tuple of names, such as ("critic",), not {names!r}')
    return names


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


# ----------------------------------------------------------------------------------------------------------------- GRPO


@token_credit(from_advantage=True)
def none(batch: TokenBatch) -> Tensor:
    """credit = A: GRPO, the same number on every token of a response (2402.03300)."""
    return batch.advantage[:, None] * batch.mask


# -------------------------------------------------------------------------------------------------- the original work's


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
def entropy_weighted(batch: TokenBatch, entropy_temp: float = 1.0) -> Tensor:
    """credit = A * L * softmax(H / entropy_temp): favour a response's uncertain tokens (the original work).

    The original took the softmax over a micro-batch, so that its results depended on a memory setting.
    """
    require(entropy_temp > 0, "--entropy_temp must be above 0")
    score = (batch.entropy / entropy_temp).masked_fill(~batch.mask, -math.inf)  # (B, T)
    return score.softmax(1) * batch.mask.sum(1, keepdim=True)


@reweighting
def attention_credit(batch: TokenBatch, credit_scale: float = 2.0) -> Tensor:
    """credit = A * (1 + credit_scale * a): with a the attention that the answer pays to the token (the original work).

    The attention is that of the last layer, averaged over heads and over the states that predict the answer's tokens
    after this one, then scaled to mean 1 over the response. Prompt tokens, such as the attention sink at position 0,
    don't count. Without an answer a = 0, which is plain GRPO. (The original was off by one: token t + 1 got what was
    paid to token t.)
    """
    require(credit_scale >= 0, "--credit_scale must be 0 or more")
    attention = (batch.ask.attention * batch.in_answer[:, :, None]).sum(1)  # (B, T) what each token gets from readers
    readers = batch.in_answer.sum(1, keepdim=True) - batch.in_answer.cumsum(1)  # (B, T) answer tokens after this one
    return 1 + credit_scale * unit_mean(quotient(attention, readers) * batch.mask, batch.mask)


# ------------------------------------------------------------------------------------------------------------------ PPO


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
    credit = gae(batch, is_last_token(batch) * batch.reward[:, None], batch.ask.head("critic"), gae_lambda, gamma)
    return z_score(credit[None], batch.mask[None])[0] if whiten else credit  # (B, T); the step as one group


def gae(batch: TokenBatch, reward: Tensor, value: Tensor, gae_lambda: float, gamma: float = 1.0) -> Tensor:
    """The sum (B, T) in the formula of `ppo`, from a reward at each token (B, T) and the value before it (B, T)."""
    delta = reward + gamma * next_value(batch, value) - value  # (B, T)
    credit, later = torch.zeros_like(delta), torch.zeros_like(batch.reward)  # (B, T), (B,) credit of the token after t
    for t in reversed(range(delta.shape[1])):
        later = delta[:, t] + gamma * gae_lambda * later
        credit[:, t] = later
    return credit


# -------------------------------------------------------------------------------------------------------------- VinePPO


@token_credit(needs=lambda cuts, **_: ("sentence_starts",) if cuts == "sentence" else ())
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
        row[: len(spans)] = torch.from_numpy(batch.task.sentence_starts(text, spans))
    return cuts.to(batch.mask.device)


def fifths(cutpoint: Tensor) -> Tensor:
    """True (B, T) at the 6th, 11th, 16th ... place of each row where cutpoint (B, T) is True."""
    count = cutpoint.cumsum(1)  # (B, T)
    return cutpoint & (count % 5 == 1) & (count > 1)


def segment_credit(batch: TokenBatch, cuts: Tensor, k: int) -> Tensor:
    """V at the end of each token's segment minus V at its start (B, T); cuts (B, T): starts of all but the first.

    Of 5 tokens with a cut at 2, tokens 0 and 1 get V_2 - V_0, the others reward - V_2.
    """
    rewards = by_group(batch, batch.reward)  # (Q, G)
    others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)  # (Q, G) mean reward
    value = torch.cat((batch.ask.rollout_values(cuts * k), batch.reward[:, None]), dim=1)  # (B, T + 1)
    value[:, 0] = others.flatten()
    bounds = torch.cat((cuts, torch.ones_like(cuts[:, :1])), dim=1)  # (B, T + 1) where segments begin, and the end
    bounds[:, 0] = True
    credit = torch.empty_like(batch.logprob)  # (B, T); the last segment covers the padding, which is masked later
    for row, v, is_bound in zip(credit, value, bounds):
        places = is_bound.nonzero()[:, 0]  # one more than there are segments
        row[:] = v[places].diff().repeat_interleave(places.diff())
    return credit


# ---------------------------------------------------------------------------------------------------------------- yours


# <- your idea here: a function under @reweighting or @token_credit, and nothing else to touch
