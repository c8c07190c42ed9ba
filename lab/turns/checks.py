"""Is the exact credit of turns right, and whose credit is close to it? Against Monte Carlo on the same responses.

    python -m lab.truth.measure --task guess --questions 60 --rollouts 200 --max_new_tokens 24 --only_rollouts \\
        --out runs/turns-truth
    python -m lab.truth.measure --task guess --questions 60 --rollouts 200 --max_new_tokens 24 --only_rollouts \\
        --seed 1 --critic_batches 0 --methods none --out runs/turns-truth-1
    python -m lab.turns.checks runs/turns-truth runs/turns-truth-1        writes lab/turns/checks.md

The first two commands sample 8 responses to each of 60 games and measure A* of their tokens by rollouts; the first also
keeps the credit of every method. The third reads off A1 and A2 of the same tokens (credit.py). Scores are of the first.
"""
from pathlib import Path

import numpy as np

from lab.estimates import cell
from lab.statistics import bootstrap, rank_pair, share, sums
from lab.truth.file import by_response, read_truth
from lab.truth.score import recorded_puzzles
from lab.turns.credit import credits_along
from lab.turns.values import Tree, grow
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import Table
from settings import Settings
from train import load_policy

NAMES = ("A1", "A2", "minus the regret")


def exact_columns(truth: dict, tree: Tree, puzzles: list) -> dict[str, np.ndarray]:
    """NAMES (N,) of the recorded tokens, and V(prompt, s) (N,) of their response."""
    found, start = [], np.zeros(len(truth["token"]))
    for rows in by_response(truth):
        secret = puzzles[truth["group"][rows[0]]].secret
        found.append(credits_along(tree, truth["token"][rows].tolist(), secret, truth["success"][rows[0]]))
        start[rows] = tree.V[0][0, secret - 1]
    return dict(zip(NAMES, np.concatenate(found, 1))) | {"start": start}


def by_turn(values: np.ndarray, truth: dict) -> np.ndarray:
    """The sum of values (N,) over each turn (M,)."""
    first = np.flatnonzero((np.diff(truth["response"], prepend=-1) != 0) | (np.diff(truth["turn"], prepend=0) != 0))
    return np.add.reduceat(values.astype(float), first)


def columns_of(truth: dict, turns: bool) -> dict[str, np.ndarray]:
    """Response, puzzle and use of each token, or of each turn."""
    columns = {"response": truth["response"], "group": truth["group"], "packets": np.ones(len(truth["token"]))}
    if not turns:
        return columns
    count = by_turn(columns["packets"], truth)
    return {name: by_turn(column, truth) / count for name, column in columns.items()}


def checks(truth: dict, exact: dict[str, np.ndarray]) -> dict[str, str]:
    """What was sampled against what is exact."""
    puzzle, (A1, A2, regret, start) = truth["group"].astype(int), exact.values()
    tried, first = truth["packets"] > 0, truth["position"] == 0
    error = np.where(tried, (truth["a_star"] - A1) / truth["a_star_error"], 0.0)

    def ratio(x: np.ndarray, y: np.ndarray, use: np.ndarray | bool = True) -> str:
        return cell(bootstrap(share, sums(puzzle, x * use, y * use)))

    M1, M2 = (by_turn(x, truth) for x in (A1, A2))
    group = columns_of(truth, True)["group"].astype(int)
    return {"responses, tokens, tokens with rollouts": f"{first.sum()}, {len(A1):,}, {tried.sum():,}",
            "Monte Carlo A\\* - A1 in its standard errors: mean square": ratio(error**2, tried * 1.0),
            "the largest; of tokens without rollouts, the largest difference":
                f"{np.abs(error).max():.1f}; {np.abs(truth['a_star'] - A1)[~tried].max():.3f}",
            "slope of Monte Carlo A\\* on A1": ratio(truth["a_star"] * A1, A1 * A1, tried),
            "success over V(prompt, s)": ratio(truth["success"] * first, start * first),
            "sum of A1² over V(prompt, s) (1 - V(prompt, s))": ratio(A1**2, start * (1 - start) * first),
            "slope of A1 on A2, turns": cell(bootstrap(share, sums(group, M1 * M2, M2 * M2))),
            "share of A1² that is luck, (A1 - A2)², turns": cell(bootstrap(share, sums(group, (M1 - M2)**2, M1**2))),
            "regret of a game": cell(bootstrap(share, sums(puzzle, -regret, first * 1.0)))}


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
    found = [checks(*pair) for pair in zip(truths, exact)]
    table = Table("Checks", f"Bundled model, whose V(prompt) is {tree.V[0].mean():.4f}, and may lack {tree.elsewhere:.0e}. "
                  "A column for each seed. Brackets: 95% bootstrap intervals over games. Expected: 1 in the rows of mean "
                  "square, slopes, success, and the sum of squares.", ["", *(f"seed {i}" for i in range(len(found)))],
                  [[name, *(one[name] for one in found)] for name in found[0]])
    text = f"{table}\n{table_scores(truths[0], exact[0])}"
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
