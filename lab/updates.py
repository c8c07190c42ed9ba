"""The update that a credit causes: the gradient of sum credit * log pi in all parameters, and how two of them agree."""
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from lab.statistics import jackknife
from plumbing.report import Estimate
from plumbing.shared_prompts import PromptCache, ResponseCache, shared_logprobs
from rollout import TokenBatch


def credit_gradients(batch: TokenBatch, credits: Tensor, size: int) -> Iterator[Tensor]:
    """For every `size` responses, which must answer one puzzle, the gradients (M, P) of sum credit * log pi.

    One for each of the credits (M, B, T), with respect to all P parameters.
    """
    model, prompts = batch.ask.policy.model, batch.ask.prompts
    prompt_of = torch.zeros(size, dtype=torch.long, device=batch.mask.device)  # (size,) there is one prompt
    for first in range(0, len(batch.text), size):
        rows = slice(first, first + size)
        T = int(batch.mask[rows].sum(1).max())
        cache = ResponseCache(PromptCache(model, [prompts[int(batch.group[first])]]), prompt_of)
        logprob = shared_logprobs(model, cache, batch.tokens[rows, :T], batch.mask[rows, :T])  # (size, T)
        parts = [torch.autograd.grad(logprob, list(model.parameters()), credit[rows, :T], retain_graph=True)
                 for credit in credits]
        yield torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])


def on_tokens(column: np.ndarray, batch: TokenBatch) -> Tensor:
    """A column (N,) of a truth as (B, T), 0 on padding."""
    return torch.zeros_like(batch.logprob).masked_scatter(batch.mask, torch.from_numpy(column).to(batch.logprob))


def updates_of(credits: list[np.ndarray], batch: TokenBatch) -> np.ndarray:
    """The gradients (M, Q, P) that each of M credits (N,) causes at each puzzle."""
    spread = torch.stack([on_tokens(credit, batch) for credit in credits])  # (M, B, T)
    parts = credit_gradients(batch, spread, len(batch.text) // len(batch.puzzles))  # Q of (M, P)
    return torch.stack(list(parts), dim=1).cpu().numpy()


def cosine_of(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Cosine of two sums of puzzle gradients (Q, P), with its interval.

    By the jackknife: a resample that draws puzzles twice holds fewer of them, and their noise shrinks every cosine.
    """
    grams = x @ y.T, x @ x.T, y @ y.T  # (Q, Q) each
    value, low, high, _ = jackknife(lambda use: cosine(*grams, use), len(x))
    return Estimate(value, max(low, -1.0), min(high, 1.0))


def cosine(xy: np.ndarray, xx: np.ndarray, yy: np.ndarray, use: np.ndarray) -> float:
    """The cosine of two sums of gradients over the puzzles or batches use (n,), from products (n, n) of their parts.

    Noise of their own shrinks it, shared noise raises it.
    """
    sum_xy, sum_xx, sum_yy = (gram[np.ix_(use, use)].sum() for gram in (xy, xx, yy))
    return sum_xy / np.sqrt(sum_xx * sum_yy) if sum_xx * sum_yy > 0 else np.nan
