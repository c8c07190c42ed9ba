"""Oracles: the policy-gradient update in its plainest form, and what is found by brute force.

Each response is read alone, with a prompt of its own. With a prompt of 3 tokens and a response of 2:

    column          0    1    2   | 3    4
    row             2    +    3   | 5    end
    predicts                  5     end             columns P-1 .. P+L-2, which is the slice P-1:-1
"""
import functools
import itertools
from fractions import Fraction

import torch
from torch import Tensor


def plain_logprobs(model, prompts: list[list[int]], tokens: Tensor, mask: Tensor) -> Tensor:
    """log pi (B, T) of the tokens (B, T) of B responses to B prompts, with gradient; 0 where mask (B, T) is False.

    model(row) returns logits (1, P + L, V). Where it has a real_vocab, tokens from there on do not exist.
    """
    rows = []
    for prompt, response, T in zip(prompts, tokens, mask.sum(1).tolist()):
        row = torch.cat((torch.tensor(prompt), response[:T]))[None]  # (1, P + L)
        logits = model(row)[0, len(prompt) - 1 : -1, : getattr(model, "real_vocab", None)]  # (L, V)
        log_probs = (logits / getattr(model, "temperature", 1.0)).log_softmax(-1)
        rows.append(torch.nn.functional.pad(log_probs[torch.arange(T), response[:T]], (0, tokens.shape[1] - T)))
    return torch.stack(rows)


def plain_update(model, prompts: list[list[int]], batch, credit: Tensor, kl: float, clip: tuple[float, float],
                 unbiased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a step, a scalar, each token's ratio and its k3 (B, T); adds the loss's gradient to the parameters'.

    PPO's clipped objective minus kl times the k3 estimate of the KL divergence, averaged over each response's tokens.
    unbiased: the ratio multiplies that estimate. prompts: one for each response.
    """
    logprob = plain_logprobs(model, prompts, batch.tokens, batch.mask)  # (B, T)
    ratio, d = (logprob - batch.logprob).exp(), batch.ask.reference_logprob - logprob  # (B, T) each
    k3 = (d.exp() - d - 1) * (ratio if unbiased else 1)  # (B, T)
    gain = torch.minimum(ratio * credit, ratio.clamp(1 - clip[0], 1 + clip[1]) * credit) - kl * k3  # (B, T)
    loss = -((gain * batch.mask).sum(1) / batch.mask.sum(1)).mean()
    loss.backward()
    return loss.detach(), ratio.detach(), k3.detach()


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
