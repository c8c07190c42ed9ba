"""Is the exact credit of turns right, and whose credit is close to it? Against Monte Carlo on the same responses.

    python -m lab.truth.measure --task guess --questions 60 --rollouts 200 --max_new_tokens 24 --only_rollouts \\
        --out runs/turns-truth
    python -m lab.truth.measure --task guess --questions 60 --rollouts 200 --max_new_tokens 24 --only_rollouts \\
        --seed 1 --critic_batches 0 --methods none --out runs/turns-truth-1
    python -m lab.turns.checks runs/turns-truth runs/turns-truth-1        writes lab/turns/checks.md

The first two commands sample 8 responses to each of 60 games and measure A* of their tokens by rollouts; the first also
keeps the credit of every method, which is scored. The third reads off A1 and A2 of the same tokens (credit.py).
"""
from pathlib import Path

import numpy as np
import torch

from lab.estimates import cell
from lab.statistics import bootstrap, rank_pair, share, sums
from lab.truth.file import by_response, read_truth
from lab.truth.score import recorded_puzzles
from lab.turns.credit import credits_along, credits_of
from lab.turns.values import Tree, grow
from plumbing.flags import new_parser
from plumbing.metrics import turn_of
from plumbing.progress import one_sentence
from plumbing.report import Table
from queries import Queries
from rollout import Policy, rollout
from settings import Settings
from start import load_policy

NAMES = ("A1", "A2", "minus the regret")
GAMES = 1500  # with 8 responses each


def exact_columns(truth: dict, tree: Tree, puzzles: list) -> dict[str, np.ndarray]:
    """NAMES (N,) of the recorded tokens."""
    found = []
    for rows in by_response(truth):
        secret = puzzles[truth["group"][rows[0]]].secret
        found.append(credits_along(tree, truth["token"][rows].tolist(), secret, truth["success"][rows[0]]))
    return dict(zip(NAMES, np.concatenate(found, 1)))


def by_turn(values: np.ndarray, truth: dict) -> np.ndarray:
    """The sum of values (N,) over each turn (M,)."""
    first = np.flatnonzero((np.diff(truth["response"], prepend=-1) != 0) | (np.diff(truth["turn"], prepend=0) != 0))
    return np.add.reduceat(values.astype(float), first)


def columns_of(truth: dict, turns: bool) -> dict[str, np.ndarray]:
    """Response, puzzle and use of each token, or of each turn."""
    columns = {"response": truth["response"], "group": truth["group"], "packets": np.ones(len(truth["turn"]))}
    if not turns:
        return columns
    count = by_turn(columns["packets"], truth)
    return {name: by_turn(column, truth) / count for name, column in columns.items()}


def against_rollouts(truth: dict, A1: np.ndarray, seed: int) -> list[list[str]]:
    """Rows on Monte Carlo A* and A1 (N,)."""
    puzzle, tried, difference = truth["group"].astype(int), truth["packets"] > 0, truth["a_star"] - A1
    error = np.where(tried, difference / truth["a_star_error"], 0.0)
    square = bootstrap(share, sums(puzzle, error**2, tried * 1.0))
    slope = bootstrap(share, sums(puzzle, truth["a_star"] * A1 * tried, A1 * A1 * tried))
    return [[f"Monte Carlo A\\* - A1 in its standard errors: mean square, seed {seed}", cell(square)],
            [f"the largest of {tried.sum():,} tokens, seed {seed}; without rollouts, the largest difference",
             f"{np.abs(error).max():.1f}; {np.abs(difference[~tried]).max():.3f}"],
            [f"slope of Monte Carlo A\\* on A1, seed {seed}", cell(slope)]]


def against_outcomes(policy: Policy, tree: Tree) -> list[list[str]]:
    """Rows on fresh responses to GAMES games: sums over the parts of each, compared over all."""
    batch = rollout(policy, policy.task.load("train", GAMES), Settings(task="guess", max_new_tokens=24), 1)
    batch.ask = Queries(policy, batch, Settings(task="guess", max_new_tokens=24), 1)
    A1, A2, better = credits_of(batch, tree)  # (B, T) each
    start = torch.from_numpy(tree.V[0][0])[[batch.puzzles[g].secret - 1 for g in batch.group]]  # (B,)
    M1, M2 = (torch.zeros_like(x).scatter_add(1, turn_of(batch), x) for x in (A1, A2))  # (B, T) by turn
    pairs = {"success over V(prompt, s)": (batch.success, start),
             "sum of A1² over tokens, over V(prompt, s) (1 - V(prompt, s))": (A1**2, start * (1 - start)),
             "slope of A1 on A2, turns": (M1 * M2, M2**2), "luck: (A1 - A2)² over A1², turns": ((M1 - M2)**2, M1**2),
             "regret of a game": (-better, torch.ones_like(start))}
    by_game = {name: sums(batch.group.numpy(), *(x.view(len(start), -1).sum(1).numpy() for x in pair))
               for name, pair in pairs.items()}  # (GAMES, 2) each
    return [[name, cell(bootstrap(share, both))] for name, both in by_game.items()]


def table_scores(truth: dict, exact: dict[str, np.ndarray]) -> Table:
    """Rank correlation of every credit with A1 and A2, by turn and by token, everywhere and within responses."""
    credits = dict(zip(truth["methods"].tolist(), truth["credits"])) | {name: exact[name] for name in NAMES}
    rows = []
    for name, credit in (credits | {"A\\*, Monte Carlo": truth["a_star"]}).items():
        pairs = []
        for turns in (True, False):
            own, *targets = (by_turn(x, truth) if turns else x for x in (credit, exact["A1"], exact["A2"]))
            pairs += [rank_pair(own, target, columns_of(truth, turns)) for target in targets]
        rows.append([name, *(cell(pair[i]) for i in (0, 1) for pair in pairs)])
    places = [f"{name}, {unit}" for unit in ("turns", "tokens") for name in ("A1", "A2")]
    return Table("Scores", "Rank correlation of credit with A1 and A2, all together, and centred within responses "
                 "(empty where credit is the same on all). Brackets: 95% bootstrap intervals over games.",
                 ["credit", *places, *(f"{place}, within" for place in places)], rows)


@one_sentence()
def main() -> None:
    """Check, score, and write the tables."""
    parser = new_parser(description=__doc__)
    parser.add_argument("truths", type=Path, nargs="+", help="folders that lab.truth.measure wrote")
    truths = [read_truth(folder / "ground_truth.npz") for folder in parser.parse_args().truths]
    policy = load_policy(Settings(task="guess"))
    tree = grow(policy, bound=True)
    exact = [exact_columns(truth, tree, recorded_puzzles(truth, policy.task)) for truth in truths]
    rows = [row for i, (truth, own) in enumerate(zip(truths, exact)) for row in against_rollouts(truth, own["A1"], i)]
    table = Table("Checks", f"Bundled model: V(prompt) is {tree.V[0].mean():.4f}, and may lack {tree.elsewhere:.0e}. "
                  "Brackets: 95% bootstrap intervals over games. Expected: 1, but for the largest, luck and regret.",
                  ["check", "found"], rows + against_outcomes(policy, tree))
    text = f"{table}\n{table_scores(truths[0], exact[0])}"
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
