"""What a step's gradient is made of, and which method's is noisy or biased.

Is the gradient of a group of rank 2? See rank.py. Which baseline, and which method, has the least noise and bias, and
how much of the gradient cancels? See noise.py.

Run it:  python -m lab.gradients.measure        within a quarter of an hour
"""
import argparse
from pathlib import Path
from typing import Iterator

import numpy as np

from countdown_task import generate_puzzles
from lab.gradients.noise import method_gradients, table_baseline, table_methods, table_washout
from lab.gradients.rank import SIZES, by_success, draw_ranks, group_spectra, tables_rank
from lab.heads import LIMIT, find_heads, sample
from lab.updates import credit_gradients
from plumbing.flags import new_parser
from plumbing.launch import check_lengths
from plumbing.progress import fail, follow, one_sentence
from plumbing.report import Table
from rollout import Policy, TokenBatch
from train import BUNDLED, Settings, load_policy


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--questions", type=int, default=12, help="training puzzles (default 12)")
    parser.add_argument("--batches", type=int, default=12, help="of 6 x 8 responses, for noise and bias (default 12)")
    parser.add_argument("--critic_batches", type=int, default=30, help="of 96 responses, for `ppo` (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of responses (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args = parser.parse_args()
    if args.questions < 1 or args.batches < 4 or args.critic_batches < 1:
        fail("--questions must be at least 1, --batches 4 and --critic_batches 1")
    return args


def independent_batches(policy: Policy, count: int, seed: int) -> Iterator[TokenBatch]:
    """`count` batches: 8 answers to each of 6 puzzles that no other batch has."""
    puzzles = generate_puzzles(6 * count, "train", seed=seed + 1)
    for i in follow("gradients of the methods", range(count)):
        yield sample(policy, puzzles[6 * i : 6 * i + 6], 8, (seed, 1000 + i))


def measure(args: argparse.Namespace) -> list[Table]:
    """All tables."""
    s = Settings(model=args.model, max_new_tokens=LIMIT)
    policy, puzzles = load_policy(s), generate_puzzles(args.questions, "train", seed=args.seed)
    check_lengths(policy, puzzles, s)
    args.out.mkdir(parents=True, exist_ok=True)
    policy = policy._replace(heads=find_heads(args.out, policy, args.critic_batches))
    batch = by_success(sample(policy, puzzles, max(SIZES), (args.seed, 0)))
    if not batch.advantage.any():
        raise ValueError("no puzzle got both right and wrong answers, so there is no gradient: ask more --questions, "
                         "or take a --model that solves some")
    norms = np.array([g.double().square().sum() for g in credit_gradients(batch, batch.mask.float()[None], 1)])
    success, norms = (x.reshape(len(puzzles), max(SIZES)) for x in (batch.success.double().numpy(), norms))
    return [*tables_rank(group_spectra(batch, args.seed)), table_baseline(success, norms),
            table_methods(method_gradients(independent_batches(policy, args.batches, args.seed))),
            table_washout(sample(policy, puzzles, 8, (args.seed, 1)))]


@one_sentence()
def main() -> None:
    """Measure, print, and write tables.md and a picture of one of its tables."""
    args = arguments()
    text, file = "\n".join(map(str, measure(args))), args.out / "tables.md"
    file.write_text(text, encoding="utf-8")
    draw_ranks(file, args.out / "rank.png")
    print(f"{text}\nwrote {args.out}")


if __name__ == "__main__":
    main()
