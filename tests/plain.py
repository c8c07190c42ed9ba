"""Oracles: the policy-gradient update in its plainest form, and what is found by brute force.

A row holds a prompt, padded on the left, and one response to it, padded on the right. The logits of a column predict
the token of the next one. With P = 3 prompt columns and T = 2 response columns:

    column          0    1    2   | 3    4
    row             pad  2    +   | 3    end
    predicts                  3     end             columns P-1 .. P+T-2, which is the slice P-1:-1
"""
import functools
import itertools
from fractions import Fraction

import torch
from torch import Tensor


def plain_rows(prompts: list[list[int]], tokens: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rows (B, P + T) of B prompts and responses (B, T), which of their columns are not padding on the left, and P."""
    P = max(map(len, prompts))
    padded = [[0] * (P - len(prompt)) + prompt for prompt in prompts]
    rows = torch.cat((torch.tensor(padded, device=tokens.device), tokens), dim=1)  # (B, P + T)
    real = [[column >= P - len(prompt) for column in range(rows.shape[1])] for prompt in prompts]
    return rows, torch.tensor(real, device=tokens.device), P


def plain_logprobs(model, prompts: list[list[int]], tokens: Tensor, mask: Tensor) -> Tensor:
    """log pi (B, T) of the tokens (B, T) of B responses to B prompts, with gradient; 0 where mask (B, T) is False.

    model(rows, real) returns logits (B, P + T, V). Where it has a real_vocab, tokens from there on do not exist.
    """
    rows, real, P = plain_rows(prompts, tokens)
    logits = model(rows, real)[:, P - 1 : -1, : getattr(model, "real_vocab", None)]  # (B, T, V)
    return (logits / getattr(model, "temperature", 1.0)).log_softmax(-1).gather(-1, tokens[..., None])[..., 0] * mask


def plain_update(model, prompts: list[list[int]], batch, credit: Tensor, reference=None, kl: float = 0.0,
                 clip: tuple[float, float] = (0.2, 0.2)) -> Tensor:
    """The loss of a step, a scalar; adds its gradient to the parameters'. prompts: one for each puzzle.

    PPO's clipped objective minus kl times the k3 estimate of the KL divergence, averaged over each response's tokens.
    """
    repeated = [prompts[puzzle] for puzzle in batch.group.tolist()]  # one per response
    logprob = plain_logprobs(model, repeated, batch.tokens, batch.mask)  # (B, T)
    ratio = (logprob - batch.logprob).exp()  # (B, T)
    gain = torch.minimum(ratio * credit, ratio.clamp(1 - clip[0], 1 + clip[1]) * credit)  # (B, T)
    if reference is not None:
        with torch.no_grad():
            reference_logprob = plain_logprobs(reference, repeated, batch.tokens, batch.mask)  # (B, T)
        d = reference_logprob - logprob  # (B, T)
        gain = gain - kl * (d.exp() - d - 1)
    loss = -((gain * batch.mask).sum(1) / batch.mask.sum(1)).mean()
    loss.backward()
    return loss.detach()


def flat_gradient(model, total: Tensor) -> Tensor:
    """d total / d all parameters (P,)."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()), retain_graph=True)])


def exact_moments(policy, puzzle, prefix: tuple, limit: int, grade) -> tuple[float, float]:
    """Mean and mean square of the grade over all responses that begin with `prefix`, each with its probability."""
    model, tokenizer = policy.model, policy.tokenizer
    if tokenizer.end_tokens[0] in prefix or len(prefix) == limit:
        r = grade(tokenizer.decode(prefix)[0], puzzle)
        return r, r * r
    with torch.no_grad():
        p = model(torch.tensor([[*policy.prompt(puzzle), *prefix]]))[0, -1, : tokenizer.size].softmax(-1).tolist()
    later = [exact_moments(policy, puzzle, (*prefix, token), limit, grade) for token in range(tokenizer.size)]
    return tuple(sum(q * moments[i] for q, moments in zip(p, later)) for i in (0, 1))


@functools.cache
def expressions(values: tuple, whole: bool = False) -> list[tuple[str, Fraction]]:
    """Every expression that uses each of the values once, as text, and its value; whole: by way of 0, 1, 2 ... only."""
    if len(values) == 1:
        return [(str(values[0]), Fraction(values[0]))]
    found = []
    for chosen in range(1, 2 ** len(values) - 1):
        left, right = (tuple(v for i, v in enumerate(values) if (chosen >> i & 1) == side) for side in (1, 0))
        for (a, x), (b, y) in itertools.product(expressions(left, whole), expressions(right, whole)):
            made = {"+": x + y, "-": x - y, "*": x * y} | ({"/": x / y} if y else {})
            found += [(f"({a} {operator} {b})", value) for operator, value in made.items()
                      if not whole or (value.denominator == 1 and value >= 0)]
    return found
