"""How close each method's credit comes to the truth of lab/truth/measure.py: scores and tables.

A method is compared in two ways. Over all tokens, even plain GRPO agrees with A*, because the A* of a response sum to
its success - V_0. Within responses, after subtracting each response's mean, GRPO knows nothing of single tokens.

Puzzles are the unit of all intervals: answers to one share its difficulty, and their advantages depend on each other.

Run it:  python -m lab.truth.measure        writes scores.md
"""
from typing import NamedTuple

import numpy as np
import torch

from lab.heads import credit_gradients
from lab.statistics import bootstrap, by_response, cell, correlate, jackknife, ranks, share, sums, within
from plumbing.terminal import follow
from plumbing.report import Estimate, Table
from rollout import TokenBatch
from tasks.text import END_THINK

ALL, WITHIN = "Credit against A*, all tokens", "Credit against A* and the solver, within responses"  # two headings
HALVES = "half against half"
ENTROPY = "entropy, whatever the credit"
TAG = "minus one on `</think>`"  # a credit that looks at nothing
RIGHT_SIZES = "A·abs(A*)"  # GRPO's sign with the sizes of A*, of the same rollouts: what sizes alone can reach


class Score(NamedTuple):
    """How close one credit is to A*, over all tokens and within responses; the notes of the tables say how."""

    spearman: Estimate
    cosine: Estimate
    location: Estimate
    within_spearman: Estimate
    within_pearson: Estimate
    solver: Estimate


def score(x: np.ndarray, y: np.ndarray, truth: dict, cosine: Estimate) -> Score:
    """How close credit x (N,) is to the truth y (N,)."""
    x, y, puzzle = x.astype(float), y.astype(float), truth["group"].astype(int)
    tried, asked = truth["packets"] > 0, truth["reachable_before"] == 1
    return Score(correlate(ranks(x), ranks(y), puzzle), cosine,
                 location=share_of_tenth(np.abs(x), truth),
                 within_spearman=within(x, y, truth, tried, by_rank=True),
                 within_pearson=within(x, y, truth, tried, by_rank=False),
                 solver=within(x, truth["reachable"], truth, asked, by_rank=True))


def share_of_tenth(x: np.ndarray, truth: dict) -> Estimate:
    """The share of A*^2 on the tenth of the tokens with the largest x (N,), with its interval over puzzles."""
    size = squares(truth)
    return bootstrap(share, sums(truth["group"].astype(int), size * top_tenth(x), size))


def squares(truth: dict) -> np.ndarray:
    """A*^2 (N,), by products of two halves of the rollouts: no noise is left in their mean."""
    return np.prod(truth["a_star_halves"].astype(float), axis=1)


def top_tenth(x: np.ndarray) -> np.ndarray:
    """How much of each token (N,), 0 to 1, is in the tenth with the largest x (N,). Equal ones share the places that
    are left, as on average over all orders of them: where all are equal, a tenth of each."""
    _, index, tied = np.unique(-x, return_inverse=True, return_counts=True)
    larger = np.cumsum(tied) - tied
    return ((len(x) / 10 - larger) / tied).clip(0, 1)[index]


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


def credit_scores(credits: dict[str, np.ndarray], batch: TokenBatch, truth: dict) -> dict[str, Score]:
    """By name, the score of each credit (N,)."""
    scores, (exact,) = {}, updates_of([truth["a_star"]], batch)
    for name in follow("scoring", list(credits)):
        (update,) = updates_of([credits[name]], batch)
        scores[name] = score(credits[name], truth["a_star"], truth, cosine_of(update, exact))
    return scores


def closing_tag(truth: dict) -> np.ndarray:
    """Credit (N,) that looks at nothing: minus one on the tokens of a response's first `</think>`, and 0 elsewhere."""
    credit = np.zeros(len(truth["piece"]))
    for rows in by_response(truth):
        stop = np.cumsum([len(piece) for piece in truth["piece"][rows]])  # (L,) characters up to a token's end
        start = "".join(truth["piece"][rows]).find(END_THINK)
        inside = (stop > start) & (np.append(0, stop[:-1]) < start + len(END_THINK))  # (L,)
        credit[rows] = -1.0 * inside * (start >= 0)
    return credit


def all_scores(batch: TokenBatch, truth: dict) -> dict[str, Score]:
    """The score of every method, of a constant, of the right sizes, and of one half of the rollouts against the other."""
    credits = dict(zip(truth["methods"].tolist(), truth["credits"]))
    credits |= {TAG: closing_tag(truth), RIGHT_SIZES: truth["advantage"] * np.abs(truth["a_star"])}
    scores = credit_scores(credits, batch, truth)
    halves = truth["a_star_halves"].T
    scores[HALVES] = score(*halves, truth, cosine_of(*updates_of(list(halves), batch)))
    unknown = Estimate(float("nan"))  # noise of A* would choose the tokens, and count as its size
    return scores | {name: scores[name]._replace(location=unknown) for name in (RIGHT_SIZES, HALVES)}


def score_tables(scores: dict[str, Score]) -> list[Table]:
    """Both tables of scores: all tokens together, and counting only what differs within a response."""
    return [Table(ALL, (
        "Rank correlation; cosine of the updates that credit and A* cause, in all parameters; location: the share of "
        "A* squared, by products of halves of the rollouts, on the tenth with the largest abs(credit), in which equal "
        "ones share the places left. Brackets: 95% intervals over puzzles, by bootstrap, of the cosine by jackknife. "
        "Half against half: A* from either half; halves that agree by r leave room for about sqrt(2 r / (1 + r))."),
        ["method", "Spearman", "cosine of update", "location"],
        [[name, *map(cell, s[:3])] for name, s in scores.items()]), Table(WITHIN, (
            "Tokens with rollouts, ranks and values centred in each response; empty where credit is the same on all. "
            "Solver: rank correlation with its verdict on operands, operators and results before which the target was "
            "within reach: 0 where it stays so, -1 where it is lost."),
            ["method", "Spearman", "Pearson", "solver"], [[name, *map(cell, s[3:])] for name, s in scores.items()])]
