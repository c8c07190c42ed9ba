"""The truth checked by what it must obey, and the question it was measured for: do few tokens decide?

Let r be a response's success, V_0 its chance before the first token, A*_t = V_{t+1} - V_t. That the A* of a response
sum to r - V_0 holds here by construction. Four other laws could fail:

    E sum_t A*_t^2 = V_0 (1 - V_0)            a martingale's steps are orthogonal, and r is 0 or 1
    E sum_{s != t} A*_s A*_t = 0              the same, so that E (r - V_0)^2 is all in the squares
    E r = V_0                                 the responses of a puzzle succeed as often as rollouts say
    V_0 is one number for each puzzle         however many of its responses measure it

Squares are products of two halves of the rollouts, so that noise is not in their mean. Tokens are selected by one half
and squared by the quarters of the other: else the noise that selects them counts as their size.

Run it:  python -m lab.truth.checks        writes checks.md: every file of this room, and of lab/real
"""
import math
from pathlib import Path

import numpy as np

from lab.estimates import cell
from lab.statistics import bootstrap, rank_pair, share, sums
from lab.truth.file import read_truth
from lab.truth.measure import PACKET, a_star_of
from lab.truth.scoring import share_of, squares, top_tenth
from plumbing.progress import one_sentence
from plumbing.report import Estimate, Table

ROOM, REAL = Path(__file__).parent, Path(__file__).parents[1] / "real" / "data"
FILES = {"countdown-tiny": ROOM / "data/ground_truth.npz", "countdown-small": ROOM / "data-small/ground_truth.npz",
         "Qwen, at the start": REAL / "truth-start.npz", "Qwen, after training": REAL / "truth-trained.npz"}
SPLITS = 20  # of each half of the rollouts into quarters


def few_tokens(truth: dict) -> Estimate:
    """The share of A*^2 on the tenth of the tokens with the largest abs(A*), with its interval over puzzles.

    One half of the rollouts selects; the other is split into two quarters, whose product is the square. Which of a
    half's rollouts succeeded is exchangeable, so a quarter's successes are hypergeometric."""
    rng, parts, tried = np.random.default_rng(0), [], truth["packets"] * PACKET // 2  # tried (N,): of a half
    for half in (0, 1):
        chosen = top_tenth(np.abs(truth["a_star_halves"][:, half]))
        solved = truth["solved"][:, 1 - half]
        for _ in range(SPLITS):
            quarter = rng.hypergeometric(solved, tried - solved, tried // 2)  # (N,)
            square = np.prod([a_star_of(truth, x, tried // 2)[0] for x in (quarter, solved - quarter)], axis=0)
            parts.append(sums(truth["group"].astype(int), square * chosen, square))
    return bootstrap(share, np.mean(parts, axis=0))


def laws(truth: dict) -> dict[str, Estimate]:
    """What theory says is 1, 0 and 0, with intervals over puzzles: sum of squares over V_0 (1 - V_0), the products of
    different tokens over it, and r - V_0."""
    first = truth["position"] == 0
    columns = np.column_stack((truth["a_star_halves"].astype(float), squares(truth)))  # (N, 3)
    *totals, square = np.add.reduceat(columns, np.flatnonzero(first)).T  # (B,) each, by response
    totals = np.stack(totals, 1)  # (B, 2) r - V_0, from each half
    V = truth["success"][first][:, None] - totals  # (B, 2)
    variance = V.mean(1) - V.prod(1)  # (B,) V_0 (1 - V_0), without the noise that V_0^2 would have
    puzzle, ones = truth["group"][first].astype(int), np.ones(len(square))
    return {"sum of squares": bootstrap(share, sums(puzzle, square, variance)),
            "products of different tokens": bootstrap(share, sums(puzzle, totals.prod(1) - square, variance)),
            "r - V_0": bootstrap(share, sums(puzzle, totals.mean(1), ones))}


def agreement(truth: dict) -> tuple[float, int, float]:
    """Chi squared of the responses' V_0 around their puzzle's weighted mean, its degrees of freedom, and how probable a
    larger one is where only the rollouts differ (Wilson and Hilferty's normal approximation)."""
    known = (truth["position"] == 0) & (truth["value_error"] > 0)
    value, error, puzzle = (truth[name][known] for name in ("value", "value_error", "group"))
    weight, puzzle = error**-2.0, puzzle.astype(int)
    total, each = sums(puzzle, weight * value, weight).T  # (Q,) each
    mean = total / np.maximum(each, 1e-30)  # of each puzzle
    chi = float((weight * (value - mean[puzzle]) ** 2).sum())
    freedom = len(puzzle) - int((each > 0).sum())
    z = ((chi / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    return chi, freedom, math.erfc(z / math.sqrt(2)) / 2


def table_laws(truths: dict[str, dict]) -> Table:
    """What A* must obey, file by file."""
    rows = []
    for name, truth in truths.items():
        total, freedom, p = agreement(truth)
        rows.append([name, str((truth["position"] == 0).sum()), *map(cell, laws(truth).values()),
                     f"{total:.0f} on {freedom}, p {p:.2f}"])
    return Table("What A* must obey", (
        "The sum of A* squared over a response's tokens over V_0 (1 - V_0), 1 in theory; that of the products of "
        "different tokens over it, 0 in theory; mean r - V_0, 0 in theory; chi squared of V_0 between responses to one "
        "puzzle, with the probability of a larger one. Squares by halves of the rollouts; 95% intervals over puzzles."),
        ["truth", "responses", "sum of squares", "products", "r - V_0", "V_0 between responses"], rows)


def table_few(truths: dict[str, dict]) -> Table:
    """Do few tokens decide, and does a cheap size find them?"""
    rows = []
    for name, truth in truths.items():
        other, noise = -np.expm1(truth["logprob"]), np.ptp(truth["a_star_halves"].astype(float), axis=1)  # (N,) each
        rows.append([name, cell(few_tokens(truth)), cell(share_of(truth, top_tenth(other), squares(truth))),
                     *(cell(rank_pair(other, size, truth)[0]) for size in (np.abs(truth["a_star"]), noise))])
    return Table("Do few tokens decide?", (
        "The share of A* squared on the tenth of the tokens with the largest abs(A*), selected by one half of the "
        "rollouts, squared by the quarters of the other; then on the tenth with the largest 1 - p. The rank "
        "correlation of 1 - p with abs(A*) over all tokens, and with A*'s noise alone, the difference of the halves: "
        "where the two are alike, the first shows nothing. 95% intervals over puzzles."),
        ["truth", "largest tenth", "tenth by 1 - p", "1 - p and abs(A*)", "1 - p and noise"], rows)


@one_sentence()
def main() -> None:
    """Write checks.md from the published truths."""
    truths = {name: read_truth(file) for name, file in FILES.items()}
    text = f"{table_laws(truths)}\n{table_few(truths)}"
    (ROOM / "checks.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {ROOM / 'checks.md'}")


if __name__ == "__main__":
    main()
