"""Ways to assign credit: each one function, TokenBatch -> credit (B, T), the number that multiplies grad log pi(token).

The loss never knows which of them its credit came from. To try an idea, write a function and name it in MITIGATIONS
below. Its keyword arguments become command-line flags, the first line of its docstring becomes its help; the README
has an example. How this differs from the original work: weights carry no gradient, see the whole step and not a
micro-batch, and keep a mean of 1 in each response, so that a method moves credit and nothing else.

Run it:  python train.py --mitigation outcome_conditional --think_discount 0.5
"""
import inspect
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from countdown_task import StepSpan

NORMALIZATIONS = ("response", "batch", "none")


@dataclass
class TokenBatch:
    """All that a credit function may look at: the B responses of one step, padded to T on the right, no gradient.

    Column t is the t-th token of the response. Built once a step, before micro-batching.
    """

    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    reward: Tensor  # (B,) 0.1 * format + success
    success: Tensor  # (B,) 1 where the answer is right, else 0
    format: Tensor  # (B,) 0..1
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    group: Tensor  # (B,) int64, which question the response answers
    numbers: list[tuple[int, ...]]  # per question
    target: list[int]  # per question
    advantage: Tensor  # (B,) one number a response, normalized within its group
    role: Tensor  # (B, T) int8: 0 filler, 1 reasoning, 2 structure
    in_answer: Tensor  # (B, T) bool, from the graded <answer> on
    text: list[str]  # per response, decoded, end token removed
    spans: list[list[tuple[int, int]]]  # per response, each token's character span in its text
    steps: list[list[StepSpan]]  # per response, the character spans of the calculations written in its text
    normalize: str = "response"  # how `reweight` rescales


def reweight(batch: TokenBatch, weight: Tensor) -> Tensor:
    """The response's advantage times weight (B, T) >= 0, rescaled as batch.normalize says; credit (B, T).

    response: the weights of each response average 1, so a method moves credit within a response and can't change how
    responses compare. batch: they average 1 over the step's tokens. none: as they are. A response whose weights
    are all 0 gets no credit.
    """
    weight = weight * batch.mask  # (B, T)
    count, total = batch.mask.sum(1, keepdim=True), weight.sum(1, keepdim=True)  # (B, 1)
    if batch.normalize == "batch":
        count, total = count.sum(), total.sum()  # ()
    if batch.normalize != "none":
        weight = weight * torch.where(total > 0, count / total, 0.0)
    return batch.advantage[:, None] * weight


# ------------------------------------------------------------------------------------------ credit functions


def none(batch: TokenBatch) -> Tensor:
    """credit = advantage: GRPO, the same number on every token of a response (2402.03300)."""
    return batch.advantage[:, None] * batch.mask


def outcome_conditional(batch: TokenBatch, think_discount: float = 0.5) -> Tensor:
    """credit = advantage * (1 in <answer>, think_discount before it): reward the conclusion more."""
    return reweight(batch, torch.where(batch.in_answer, 1.0, think_discount))


MITIGATIONS: dict[str, Callable[..., Tensor]] = {
    "none": none,
    "outcome_conditional": outcome_conditional,
    # <- your idea here
}


# ------------------------------------------------------------------------------------------ what they take


def parameters(name: str) -> dict[str, bool | int | float | str]:
    """The keyword arguments of a credit function and their defaults: its hyper-parameters."""
    signature = inspect.signature(MITIGATIONS[name])
    return {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}


def is_reweighting(name: str) -> bool:
    """Whether a credit function calls `reweight` itself, and so obeys --normalize."""
    return "reweight" in MITIGATIONS[name].__code__.co_names


def summary(name: str) -> str:
    """The first line of a credit function's docstring."""
    return (inspect.getdoc(MITIGATIONS[name]) or "no docstring yet").splitlines()[0]
