"""The update that a credit causes: the gradient of sum credit * log pi in all parameters, and how two of them agree."""
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from lab.statistics import jackknife
from plumbing.report import Estimate
from rollout import TokenBatch, responses
from sampler import response_logprobs


def credit_gradients(batch: TokenBatch, credits: Tensor, size: int) -> Iterator[Tensor]:
    """For every `size` responses, which must answer one puzzle, the gradients (M, P) of sum credit * log pi in all P
    parameters, one for each of the credits (M, B, T)."""
    model, T = batch.ask.policy.model, batch.tokens.shape[1]
    for rows in torch.arange(len(batch.text)).split(size):
        logprob = response_logprobs(model, *responses(batch, rows))[:, :T]  # (size, T)
        parts = [torch.autograd.grad(logprob, list(model.parameters()), credit[rows], retain_graph=True)
                 for credit in credits]
        yield torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])


def updates_of(credits: list[np.ndarray], batch: TokenBatch) -> np.ndarray:
    """The gradients (M, Q, P) that each of M credits (N,) causes at each puzzle."""
    spread = batch.logprob.new_zeros(len(credits), *batch.mask.shape)  # (M, B, T) 0 on padding
    spread[:, batch.mask] = torch.from_numpy(np.stack(credits)).to(spread)
    parts = credit_gradients(batch, spread, len(batch.text) // len(batch.puzzles))  # Q of (M, P)
    return torch.stack(list(parts), dim=1).cpu().numpy()


def cosine_of(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Cosine of two sums of puzzle gradients (Q, P), with its interval by the jackknife: a resample that draws puzzles
    twice holds fewer of them, and noise of their own shrinks a cosine (shared noise raises it)."""
    grams = x @ y.T, x @ x.T, y @ y.T  # (Q, Q) each

    def cosine(use: np.ndarray) -> float:
        xy, xx, yy = (gram[np.ix_(use, use)].sum() for gram in grams)
        return xy / np.sqrt(xx * yy) if xx * yy > 0 else np.nan

    value, low, high, _ = jackknife(cosine, len(x))
    return Estimate(value, max(low, -1.0), min(high, 1.0))
