"""Gradient anatomy: how large a token's gradient is, what a step's gradient is made of, and which method's is biased.

1. Which tokens get the most gradient? See size.py.
2. Is the gradient of a group of rank 2? See rank.py.
3. Which baseline, and which method, has the least noise and bias? See noise.py.
4. What do several updates on one batch do to the gradient? See ratio.py.
5. How much of it cancels, and what of it does Adam take? See washout.py.
6. Does the gradient get sparser along a run? See below.

Run it:  python -m lab.gradients.measure                        the bundled model, about a quarter of an hour
         python -m lab.gradients.measure --run runs/watched     also along runs/watched/checkpoints
"""
import argparse
from pathlib import Path
from typing import Iterator

import numpy as np

from countdown_task import Puzzle, generate_puzzles
from lab.gradients.noise import method_gradients, table_baseline, table_methods
from lab.gradients.rank import CONTROLS_AT, SIZES, by_success, draw_ranks, group_spectra, tables_rank
from lab.gradients.ratio import draw_ratio, ratio_rows, table_ratio
from lab.gradients.size import draw_sizes, table_phase1, tables_tokens, token_columns
from lab.gradients.washout import adam_steps, table_adam, table_washout
from lab.truth.critic import LIMIT, find_heads, sample
from lab.updates import credit_gradients
from plumbing.flags import new_parser
from plumbing.launch import check_lengths
from plumbing.progress import Progress, fail, one_sentence
from plumbing.report import Table, interval, pm
from plumbing.runs import read_config
from rollout import Policy, TokenBatch
from train import BUNDLED, Settings, load_policy


def sparsity(x: np.ndarray) -> tuple[float, float]:
    """Hoyer's measure and the Gini coefficient of |x| (P,): 0 where all are equal and 1 where one has all."""
    x, n = np.sort(np.abs(x.astype(np.float64))), len(x)
    hoyer = (np.sqrt(n) - x.sum() / np.sqrt((x**2).sum())) / (np.sqrt(n) - 1)
    return hoyer, 1 - 2 * ((x / x.sum()) * (n - np.arange(1, n + 1) + 0.5) / n).sum()


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Step and folder of the model that a run starts from, and of each of its complete checkpoints."""
    start = Path(read_config(run)["settings"]["model"])
    folders = [file.parent for file in sorted(run.glob("checkpoints/step-*/model.safetensors"))]
    return [(0, start), *((int(folder.name.removeprefix("step-")), folder) for folder in folders)]


def table_training(run: Path, puzzles: list[Puzzle], answers: int, seed: int) -> Table:
    """How sparse the gradient is along a run."""
    rows = []
    for step, folder in checkpoints(run):
        batch = by_success(sample(load_policy(Settings(model=str(folder))), puzzles, answers, (seed, 0)))
        credit = (batch.advantage[:, None] * batch.mask)[None]  # (1, B, T)
        gradients = [g[0].numpy() for g in credit_gradients(batch, credit, answers) if g.any()]  # (P,) for each puzzle
        cells = [pm(*interval(x)) for x in zip(*map(sparsity, gradients))] or ["", ""]
        rows.append([str(step), f"{batch.success.mean():.2f}", *cells])
    return Table("Over training", (
        f"{run.name}; the same {len(puzzles)} puzzles at each checkpoint, {answers} answers each. Sparsity of a "
        "puzzle's gradient: means over puzzles ± half of a 95% interval."), ["step", "success", "Hoyer", "Gini"], rows)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--run", type=Path, help="a run made with --checkpoint_every: also over its training")
    parser.add_argument("--questions", type=int, default=12, help="training puzzles (default 12)")
    parser.add_argument("--batches", type=int, default=12, help="of 6 x 8 responses, for noise and bias (default 12)")
    parser.add_argument("--critic_batches", type=int, default=30, help="of 96 responses, for `ppo` (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of responses (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args = parser.parse_args()
    if args.questions < 1 or args.batches < 4 or args.critic_batches < 1:
        fail("--questions must be at least 1, --batches 4 and --critic_batches 1")
    if args.run and len(checkpoints(args.run)) < 2:
        fail(f"{args.run} has no checkpoints: make the run with --checkpoint_every 25")
    return args


def independent_batches(policy: Policy, count: int, seed: int) -> Iterator[TokenBatch]:
    """`count` batches: 8 answers to each of 6 puzzles that no other batch has."""
    puzzles = generate_puzzles(6 * count, "train", seed=seed + 1)
    progress = Progress("gradients of the methods", count)
    for i in range(count):
        yield sample(policy, puzzles[6 * i : 6 * i + 6], 8, (seed, 1000 + i))
        progress.show(i + 1)


def measure(args: argparse.Namespace) -> list[Table]:
    """All tables."""
    s = Settings(model=args.model, max_new_tokens=LIMIT)
    policy = load_policy(s)
    puzzles = generate_puzzles(args.questions, "train", seed=args.seed)
    check_lengths(policy, puzzles, s)
    args.out.mkdir(parents=True, exist_ok=True)
    policy = policy._replace(heads=find_heads(args.out, args.model, policy, args.critic_batches))
    batch = by_success(sample(policy, puzzles, max(SIZES), (args.seed, 0)))
    if not batch.advantage.any():
        raise ValueError("no puzzle got both right and wrong answers, so there is no gradient: ask more --questions, "
                         "or take a --model that solves some")
    columns = token_columns(batch, args.seed)
    ones = credit_gradients(batch, batch.mask.float()[None], 1)
    shape = len(puzzles), max(SIZES)
    norms = np.array([g.double().square().sum().item() for g in ones]).reshape(shape)
    success = batch.success.view(shape).numpy().astype(float)
    batches = independent_batches(policy, args.batches, args.seed)
    tables = [*tables_tokens(columns), table_phase1(columns), *tables_rank(group_spectra(batch, args.seed)),
              table_baseline(success, norms), table_methods(method_gradients(batches)),
              table_ratio(ratio_rows(args.model, args.seed)),
              table_washout(sample(policy, puzzles, 8, (args.seed, 1)), args.seed),
              table_adam(adam_steps(args.model, args.seed))]
    if args.run:
        tables.append(table_training(args.run, puzzles, CONTROLS_AT, args.seed))
    return tables


@one_sentence()
def main() -> None:
    """Measure, print, and write tables.md and three pictures of its tables."""
    args = arguments()
    tables = measure(args)
    text, file = "\n".join(map(str, tables)), args.out / "tables.md"
    file.write_text(text, encoding="utf-8")
    draw_sizes(file, args.out / "size.png")
    draw_ranks(file, args.out / "rank.png")
    draw_ratio(file, args.out / "ratio.png")
    print(f"{text}\nwrote {args.out}")


if __name__ == "__main__":
    main()
