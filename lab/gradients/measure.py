"""How noisy and how biased is a gradient estimate, by method?

The policy gradient of a group is the sum of (r - b) g_i, with g_i the gradient of response i's log-prob. Any baseline b
that does not see the response itself leaves its expectation as it is. A method that gives tokens other credit may be
biased. Its gradients on independent batches say how noisy and how biased, because products of *different* batches
estimate inner products of expectations without the bias that noise would cause.

Run it:  python -m lab.gradients.measure        writes noise.md and its rows, noise.npz, in minutes
         python -m lab.gradients.measure --mitigation surprise --power 0.5 --advantage rloo      one method, in one
"""
from functools import partial
from pathlib import Path
from typing import Iterable

import numpy as np
import torch
from torch import Tensor

import countdown_task
from grpo import compare
from lab.heads import FITTED, LIMIT, credit_gradients, find_heads, fitted_methods, sample
from lab.statistics import cell, jackknife
from methods.registry import CREDIT_FUNCTIONS
from methods.credit_function import CreditFunction
from plumbing.checks import required
from plumbing.files import require
from plumbing.flags import new_parser
from plumbing.launch import BUNDLED, check_lengths, lacking
from plumbing.terminal import follow, one_sentence
from plumbing.report import Table
from rollout import TokenBatch
from settings import Settings
from start import load_policy, parse_flags

BATCHES = 16  # of 8 answers to each of 6 puzzles that no other batch has
REFERENCE = "r - others' mean"  # the unbiased policy gradient
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


def choose(words: list[str]) -> tuple[dict[str, CreditFunction], str, tuple[str, ...]]:
    """The methods to measure, by name: that of train.py's flags, or all; the advantage, and what they need."""
    found = parse_flags(words)
    if not words:
        return fitted_methods(countdown_task), found.settings.advantage, FITTED
    method, name = CREDIT_FUNCTIONS[found.settings.mitigation], " ".join(words).removeprefix("--mitigation ")
    needs = required(method, found.hyper_parameters)
    missing = lacking(needs, countdown_task, FITTED)
    require(not missing, f"{method.name} needs {', '.join(missing)}, which is not fitted here")
    return {name: partial(method, **found.hyper_parameters)}, found.settings.advantage, needs


def method_gradients(batches: Iterable[TokenBatch], methods: Iterable[CreditFunction]) -> Tensor:
    """(M + 1, n, P): each method's gradient on n independent batches of groups, as the trainer's loss makes it.

    The last is the unbiased policy gradient, with credit r - mean of the others, averaged over responses.
    """
    found = []
    for batch in batches:
        with torch.no_grad():
            credits = [method(batch) / batch.mask.sum() for method in methods]
            unbiased = compare(batch, "rloo").view(-1, 1)  # (B, 1)
            credits.append(unbiased * batch.mask / len(batch.text))
        G = len(batch.text) // len(batch.puzzles)
        found.append(sum(credit_gradients(batch, torch.stack(credits), G)))  # (M + 1, P)
    return torch.stack(found, dim=1)


def products(gradients: Tensor) -> np.ndarray:
    """(M + 1, 2, n, n): of each method's gradients (M + 1, n, P), by pairs of batches, with themselves and with the
    unbiased policy gradient's."""
    return np.stack([[(g.double() @ other.double().T).cpu().numpy() for other in (g, gradients[-1])]
                     for g in gradients])


def table_methods(found: np.ndarray, names: Iterable[str]) -> Table:
    """Signal to noise, |E g|^2 / tr Cov(g), and direction against the unbiased policy gradient, of each method, by its
    products (M + 1, 2, n, n)."""
    n, rows, yy = found.shape[-1], [], found[-1, 0]
    for name, (xx, xy) in zip((*names, REFERENCE), found, strict=True):
        signal = jackknife(lambda use: cross(xx, use) / total_variance(xx, use), n)
        clean = jackknife(lambda use: corrected_cosine(xy, xx, yy, use), n)
        rows.append([name, cell(signal, 3), cell(clean) if np.isfinite(clean.low) or name == REFERENCE else ""])
    return Table("Noise and bias of each method's gradient", (
        f"{n} batches, by `python -m lab.gradients.measure`. Signal to noise: |E g|^2 / tr Cov(g), corrected for the noise in the mean. Cosine, corrected: "
        "of the expectation with that of the unbiased policy gradient, of r - the others' mean, from pairs of "
        "different batches, so that noise does not shrink it; empty where noise hides the signal. Jackknife 95% "
        "intervals."),
        ["method", "signal to noise", "cosine, corrected"], rows)


def measure(words: list[str], out: Path, model: str = str(BUNDLED)) -> str:
    """The table of a method and its flags, or of all, also as noise.md in a folder; the model's heads are fitted where
    they are needed, and saved beside it, or found there."""
    methods, advantage, needs = choose(words)
    s = Settings(model=model, max_new_tokens=LIMIT)
    policy, puzzles = load_policy(s), countdown_task.generate_puzzles(6 * BATCHES, "train", seed=1)
    check_lengths(policy, puzzles, s)
    out.mkdir(parents=True, exist_ok=True)
    if set(FITTED) & set(needs):
        policy = policy._replace(heads=find_heads(out, policy, CRITIC_BATCHES))
    batches = (sample(policy, puzzles[6 * i : 6 * i + 6], 8, (0, 1000 + i), advantage)
               for i in follow("noise of the gradient", range(BATCHES)))
    gradients = method_gradients(batches, list(methods.values()))  # (M + 1, BATCHES, P)
    require(gradients[-1].any(), "no puzzle got both right and wrong answers, so there is no gradient: take a --model "
            "that solves some")
    np.savez(out / "noise.npz", methods=list(methods), products=(found := products(gradients)))  # the rows of the table
    text = str(table_methods(found, methods))
    (out / "noise.md").write_text(text, encoding="utf-8")
    return f"{text}\nwrote {out / 'noise.md'}"


@one_sentence()
def main() -> None:
    """Measure what the command line asks for."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args, words = parser.parse_known_args()
    print(measure(words, args.out, args.model))


if __name__ == "__main__":
    main()
