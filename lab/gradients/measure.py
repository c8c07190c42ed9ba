"""How noisy and how biased is a gradient estimate, by method?

The policy gradient of a group is the sum of (r - b) g_i, with g_i the gradient of response i's log-prob. Any baseline b
that does not see the response itself leaves its expectation as it is. A method that gives tokens other credit may be
biased. Its gradients on independent batches say how noisy and how biased, because products of *different* batches
estimate inner products of expectations without the bias that noise would cause.

Run it:  python -m lab.gradients.measure        writes noise.md, in minutes
"""
from pathlib import Path
from typing import Iterable

import numpy as np
import torch
from torch import Tensor

import countdown_task
from grpo import compare
from lab.heads import LIMIT, credit_gradients, find_heads, fitted_methods, sample
from lab.statistics import cell, jackknife
from plumbing.files import require
from plumbing.flags import new_parser
from plumbing.launch import BUNDLED, check_lengths
from plumbing.progress import follow, one_sentence
from plumbing.report import Table
from rollout import TokenBatch
from settings import Settings
from start import load_policy

METHODS = fitted_methods(countdown_task)
BATCHES = 16  # of 8 answers to each of 6 puzzles that no other batch has
CRITIC_BATCHES = 40  # of 96 responses, for `ppo`


def cross(gram: np.ndarray, use: np.ndarray) -> float:
    """Unbiased estimate of <E x, E y> from the products (n, n) of two methods' gradients on the batches use (n,)."""
    used, n = gram[np.ix_(use, use)], use.sum()
    return (used.sum() - np.trace(used)) / (n * (n - 1))


def total_variance(gram: np.ndarray, use: np.ndarray) -> float:
    """tr Cov(g) from the products (n, n) of a method's gradients with themselves."""
    used = gram[np.ix_(use, use)]
    return (np.trace(used) - used.sum() / use.sum()) / (use.sum() - 1)


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
        with torch.no_grad():
            credits = [method(batch) / batch.mask.sum() for method in METHODS.values()]
            unbiased = compare(batch, "rloo").view(-1, 1)  # (B, 1)
            credits.append(unbiased * batch.mask / len(batch.text))
        G = len(batch.text) // len(batch.puzzles)
        found.append(sum(credit_gradients(batch, torch.stack(credits), G)))  # (M + 1, P)
    return torch.stack(found, dim=1)


def table_methods(gradients: Tensor) -> Table:
    """Signal to noise, |E g|^2 / tr Cov(g), and direction against the unbiased policy gradient, of each method's
    gradient (M + 1, n, P)."""
    n, rows = gradients.shape[1], []
    gram = lambda x, y: (x.double() @ y.double().T).cpu().numpy()  # (n, n) products of the rows of x and y (n, P)
    yy = gram(gradients[-1], gradients[-1])
    for name, g in zip((*METHODS, "r - others' mean"), gradients, strict=True):
        xx, xy = gram(g, g), gram(g, gradients[-1])
        signal = jackknife(lambda use: cross(xx, use) / total_variance(xx, use), n)
        clean = jackknife(lambda use: corrected_cosine(xy, xx, yy, use), n)
        rows.append([name, cell(signal, 3), cell(clean) if np.isfinite(clean.low) else ""])
    return Table("Noise and bias of each method's gradient", (
        f"{n} batches. Signal to noise: |E g|^2 / tr Cov(g), corrected for the noise in the mean. Cosine, corrected: "
        "of the expectation with that of the unbiased policy gradient, of r - the others' mean, from pairs of "
        "different batches, so that noise does not shrink it; empty where noise hides the signal. Jackknife 95% "
        "intervals."),
        ["method", "signal to noise", "cosine, corrected"], rows)


@one_sentence()
def main() -> None:
    """Measure, print, and write noise.md; the model's heads are fitted and saved beside it, or found there."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args = parser.parse_args()
    s = Settings(model=args.model, max_new_tokens=LIMIT)
    policy, puzzles = load_policy(s), countdown_task.generate_puzzles(6 * BATCHES, "train", seed=1)
    check_lengths(policy, puzzles, s)
    args.out.mkdir(parents=True, exist_ok=True)
    policy = policy._replace(heads=find_heads(args.out, policy, CRITIC_BATCHES))
    gradients = method_gradients(sample(policy, puzzles[6 * i : 6 * i + 6], 8, (0, 1000 + i))
                                 for i in follow("gradients of the methods", range(BATCHES)))  # (M + 1, BATCHES, P)
    require(gradients[-1].any(), "no puzzle got both right and wrong answers, so there is no gradient: take a --model "
            "that solves some")
    text, file = str(table_methods(gradients)), args.out / "noise.md"
    file.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {file}")


if __name__ == "__main__":
    main()
