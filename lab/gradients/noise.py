"""How noisy and how biased is a gradient estimate, by method?

The policy gradient of a group is the sum of (r - b) g_i, with g_i the gradient of response i's log-prob. Any baseline b
that does not see the response itself leaves its expectation as it is. A method that gives tokens other credit may be
biased. Its gradients on independent batches say how noisy and how biased, because products of *different* batches
estimate inner products of expectations without the bias that noise would cause.

Run it:  python -m lab.gradients.measure
"""
from typing import Iterable

import numpy as np
import torch
from torch import Tensor

import countdown_task
from grpo import compare
from lab.estimates import cell
from lab.heads import fitted_methods
from lab.statistics import jackknife
from lab.updates import credit_gradients
from plumbing.report import Table
from rollout import TokenBatch

METHODS = fitted_methods(countdown_task)


def products(x: Tensor, y: Tensor) -> np.ndarray:
    """All inner products (n, m) of the rows of x (n, P) and y (m, P), in double precision."""
    return (x.double() @ y.double().T).cpu().numpy()


def cross(gram: np.ndarray, use: np.ndarray) -> float:
    """Unbiased estimate of <E x, E y> from the products (n, n) of two methods' gradients on the batches use (n,)."""
    used, n = gram[np.ix_(use, use)], use.sum()
    return (used.sum() - np.trace(used)) / (n * (n - 1))


def total_variance(gram: np.ndarray, use: np.ndarray) -> float:
    """tr Cov(g) from the products (n, n) of a method's gradients with themselves."""
    used = gram[np.ix_(use, use)]
    return (np.trace(used) - used.sum() / use.sum()) / (use.sum() - 1)


def signal_to_noise(gram: np.ndarray, use: np.ndarray) -> float:
    """|E g|^2 / tr Cov(g) from the same products."""
    return cross(gram, use) / total_variance(gram, use)


def corrected_cosine(xy: np.ndarray, xx: np.ndarray, yy: np.ndarray, use: np.ndarray) -> float:
    """The cosine of the expected gradients, free of noise; NaN where noise hides the signal of either."""
    x, y = cross(xx, use), cross(yy, use)
    return cross(xy, use) / np.sqrt(x * y) if x > 0 and y > 0 else float("nan")


def method_gradients(batches: Iterable[TokenBatch]) -> Tensor:
    """(M + 1, n, P): each method's gradient on n independent batches of groups, as the trainer's loss makes it.

    The last is the unbiased policy gradient, with credit r - mean of the others, averaged over responses.
    """
    found = []
    for batch in batches:
        G = len(batch.text) // len(batch.puzzles)
        with torch.no_grad():
            credits = [method(batch) / batch.mask.sum() for method in METHODS.values()]
            unbiased = compare(batch, "rloo").view(-1, 1)  # (B, 1)
            credits.append(unbiased * batch.mask / len(batch.text))
        found.append(sum(credit_gradients(batch, torch.stack(credits), G)))  # (M + 1, P)
    return torch.stack(found, dim=1)


def table_methods(gradients: Tensor) -> Table:
    """Signal to noise, and direction against the unbiased policy gradient, of each method's gradient (M + 1, n, P)."""
    n, unbiased = gradients.shape[1], gradients[-1]
    yy, rows = products(unbiased, unbiased), []
    for name, g in zip((*METHODS, "r - others' mean"), gradients):
        xx, xy = products(g, g), products(g, unbiased)
        signal = jackknife(lambda use: signal_to_noise(xx, use), n)
        clean = jackknife(lambda use: corrected_cosine(xy, xx, yy, use), n)
        rows.append([name, cell(signal, 3), cell(clean) if np.isfinite(clean.low) else ""])
    return Table("Noise and bias of each method's gradient", (
        f"{n} batches. Signal to noise: |E g|^2 / tr Cov(g), corrected for the noise in the mean. Cosine, corrected: "
        "of the expectation with that of the unbiased policy gradient, of r - the others' mean, from pairs of "
        "different batches, so that noise does not shrink it; empty where noise hides the signal. Jackknife 95% "
        "intervals."),
        ["method", "signal to noise", "cosine, corrected"], rows)
