"""How close each method's credit comes to the truth of lab/truth/measure.py: scores and tables.

A method is compared in two ways. Over all tokens, even plain GRPO agrees with A*, because the A* of a response sum to
its success - V_0. Within responses, after subtracting each response's mean, GRPO knows nothing of single tokens.

Puzzles are the unit of all intervals: answers to one share its difficulty, and their advantages depend on each other.

Run it:  python -m lab.truth.measure        writes scores.md
"""
from typing import NamedTuple

import numpy as np

from lab.estimates import cell
from lab.statistics import bootstrap, rank_pair, share, sums, within
from lab.truth.solver import DECISIONS, KINDS
from lab.updates import cosine_of, updates_of
from plumbing.progress import follow
from plumbing.report import Estimate, Table, clustered_mean, pm
from rollout import TokenBatch

HALVES = "half against half"
ALL, WITHIN = "Credit against A*, all tokens", "Credit against A* and the solver, within responses"  # two headings
GRADIENT, RIGHT_SIZES = "A·‖onehot - p‖", "A·abs(A*)"  # RIGHT_SIZES: what sizes alone can reach
LOCATED = ("none", "entropy_ratio", "vineppo", "ppo", "learned_importance", GRADIENT)  # in the table Where it lies


class Score(NamedTuple):
    """How close one credit is to A*; the notes of the tables say what each figure means."""

    spearman: Estimate
    cosine: Estimate
    location: Estimate
    within_spearman: Estimate
    within_pearson: Estimate
    solver: Estimate


def score(x: np.ndarray, y: np.ndarray, truth: dict, cosine: Estimate) -> Score:
    """How close credit x (N,) is to the truth y (N,), over all tokens and within responses."""
    x, y = x.astype(float), y.astype(float)
    spearman, within_spearman = rank_pair(x, y, truth)
    return Score(spearman, cosine, share_of(truth, top_tenth(np.abs(x)), squares(truth)), within_spearman,
                 within_pearson=within(x, y, truth, truth["packets"] > 0, False),
                 solver=within(x, truth["reachable"], truth, truth["reachable_before"] == 1, True))


def squares(truth: dict) -> np.ndarray:
    """A*^2 (N,), by products of two halves of the rollouts: no noise is left in their mean."""
    return np.prod(truth["a_star_halves"].astype(float), axis=1)


def top_tenth(x: np.ndarray) -> np.ndarray:
    """How much of each token (N,), 0 to 1, is in the tenth with the largest x (N,). Equal ones share the places that
    are left, as on average over all orders of them: where all are equal, a tenth of each."""
    _, index, tied = np.unique(-x, return_inverse=True, return_counts=True)
    larger = np.cumsum(tied) - tied
    return ((len(x) / 10 - larger) / tied).clip(0, 1)[index]


def share_of(truth: dict, chosen: np.ndarray, size: np.ndarray) -> Estimate:
    """The share of the sum of a size (N,) on chosen tokens, or parts of tokens (N,), with its interval over puzzles."""
    return bootstrap(share, sums(truth["group"].astype(int), size * chosen, size))


def credit_scores(credits: dict[str, np.ndarray], batch: TokenBatch, truth: dict) -> dict[str, Score]:
    """By name, the score of each credit (N,)."""
    scores, (exact,) = {}, updates_of([truth["a_star"]], batch)
    for name in follow("scoring", list(credits)):
        (update,) = updates_of([credits[name]], batch)
        scores[name] = score(credits[name], truth["a_star"], truth, cosine_of(update, exact))
    return scores


def all_scores(batch: TokenBatch, truth: dict) -> dict[str, Score]:
    """The score of every method, of the original's two measures, and of one half of the rollouts against the other."""
    halves = truth["a_star_halves"].T
    between = score(*halves, truth, cosine_of(*updates_of(list(halves), batch)))
    scores = credit_scores(all_credit(truth), batch, truth) | {HALVES: between}
    unknown = Estimate(float("nan"))  # noise of A* would choose the tokens, and count as its size
    return scores | {name: scores[name]._replace(location=unknown) for name in (RIGHT_SIZES, HALVES)}


def all_credit(truth: dict) -> dict[str, np.ndarray]:
    """By name, the credit (N,) of every method, what the original work tabulated of GRPO's, and the right sizes.

    RIGHT_SIZES is GRPO's sign with the sizes of A* (of the same rollouts, so with their errors). It is no ceiling:
    weights could also tell which tokens had an A* of the other sign.
    """
    measures = seed_measures(truth) | {RIGHT_SIZES: truth["advantage"] * np.abs(truth["a_star"])}
    return dict(zip(truth["methods"].tolist(), truth["credits"])) | measures


def seed_measures(truth: dict) -> dict[str, np.ndarray]:
    """The original's measure of GRPO's credit, and its gradient in logit space (N,), signed as the advantage."""
    return {"A·abs(log p)": truth["advantage"] * -truth["logprob"],
            GRADIENT: truth["advantage"] * truth["logit_grad"]}


def score_tables(scores: dict[str, Score], truth: dict) -> list[Table]:
    """All tables of scores.md but the first; the last two only where there are calculations, and a solver of them."""
    decides = np.isin(truth["kind"], [KINDS.index(kind) for kind in DECISIONS])
    return [table_pooled(scores), table_within(scores), table_sizes(truth),
            *([table_kinds(truth)] if decides.any() else []),
            *([table_solver(truth)] if (truth["reachable_before"][decides] == 1).any() else [])]


def table_pooled(scores: dict[str, Score]) -> Table:
    """Each method against A*, all tokens together."""
    rows = [[name, cell(s.spearman), cell(s.cosine), cell(s.location)] for name, s in scores.items()]
    return Table(ALL, (
        "Rank correlation; cosine of the updates that credit and A* cause, in all parameters; location: the share of "
        "A* squared, by products of halves of the rollouts, on the tenth with the largest abs(credit), in which equal "
        "ones share the places left. Brackets: 95% intervals over puzzles, by bootstrap, of the cosine by jackknife. "
        "Half against half: A* from either half; halves that agree by r leave room for about sqrt(2 r / (1 + r))."),
        ["method", "Spearman", "cosine of update", "location"], rows)


def table_within(scores: dict[str, Score]) -> Table:
    """Each method against A* and the solver, counting only what differs within a response."""
    rows = [[name, cell(s.within_spearman), cell(s.within_pearson), cell(s.solver)] for name, s in scores.items()]
    return Table(WITHIN, (
        "Tokens with rollouts, ranks and values centred in each response; empty where credit is the same on all. "
        "Solver: rank correlation with its verdict on operands, operators and results before which the target was "
        "within reach: 0 where it stays so, -1 where it is lost."),
        ["method", "Spearman", "Pearson", "solver"], rows)


def table_sizes(truth: dict) -> Table:
    """Does more gradient lie on the tokens that matter?"""
    sizes = {f"abs({name})": np.abs(x) for name, x in seed_measures(truth).items()}
    sizes |= {"entropy": truth["entropy"], "1 - p": -np.expm1(truth["logprob"])}
    rows = [[name, *map(cell, rank_pair(x, np.abs(truth["a_star"]), truth))] for name, x in sizes.items()]
    return Table("Size against abs(A*)", "Rank correlation over all tokens, and within responses over those with "
                 "rollouts.", ["size", "all tokens", "within"], rows)


def table_kinds(truth: dict) -> Table:
    """How much of A*, and of some credit, lies on each kind of token."""
    groups = {kind: truth["kind"] == k for k, kind in enumerate(KINDS[:-1])}  # unfinished: one token in a thousand
    def means(x: np.ndarray, digits: int) -> list[str]:
        return [pm(*clustered_mean(x[group], truth["group"][group].astype(int)), digits) for group in groups.values()]
    listed = {name: credit for name, credit in all_credit(truth).items() if name in LOCATED}
    rows = [["tokens"] + [f"{group.mean():.1%}" for group in groups.values()]]
    for name, credit in ({"A*": truth["a_star"]} | listed).items():
        size = np.abs(credit.astype(float))
        rows.append([name, *means(size / size.mean(), 2)])
    rows.append(["mean A*", *means(truth["a_star"], 3)])
    return Table("Where it lies", (
        "Mean abs(credit) of a kind of token over that of all, ± half of its 95% interval, clustered by puzzle. "
        "Opening: words before a sentence's first calculation; verdict: a sentence without one."),
        ["", *groups], rows)


def table_solver(truth: dict) -> Table:
    """What the policy's value says of the tokens that lose the target."""
    rows, puzzle = [], truth["group"].astype(int)
    for name in ("operand", "operator", "result"):
        asked = (truth["kind"] == KINDS.index(name)) & (truth["reachable_before"] == 1)
        lost, kept = asked & (truth["reachable"] == 0), asked & (truth["reachable"] == 1)
        rows.append([name, f"{asked.sum():,}", f"{lost.sum() / asked.sum():.1%}" if asked.any() else "",
                     *(pm(*clustered_mean(truth["a_star"][use], puzzle[use])) for use in (kept, lost))])
    return Table("The solver's verdict and A*", (
        "Tokens before which the target could be reached in the attempt being written; how many lose it; mean A* where "
        "they keep it and where they lose it, ± half of its 95% interval, clustered by puzzle."),
        ["", "tokens", "lose the target", "A*, kept", "A*, lost"], rows)
