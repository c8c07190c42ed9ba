"""Gradient anatomy: how large a token's gradient is, what a step's gradient is made of, and which method's is biased.

Four questions about a fixed policy, and, with --run, about the checkpoints of a run:

1. Which tokens get the most gradient? See lab/gradients/size.py.
2. Is the gradient of a group of rank 2? See lab/gradients/rank.py.
3. When is the group mean the best baseline? See lab/gradients/noise.py.
4. How biased and how noisy is each method's gradient? See there, too.

Run it:  python -m lab.gradients.measure                                  the bundled model, about four minutes
         python -m lab.gradients.measure --run runs/watched               also along runs/watched/checkpoints
"""
import argparse
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from countdown_task import Puzzle, generate_puzzles
from lab.estimates import cell
from lab.gradients.noise import method_gradients, table_baseline, table_methods
from lab.gradients.rank import (CONTROLS_AT, SIZES, TRUTH_PUZZLES, by_success, draw_ranks, effective_rank,
                                gram_spectrum, products, rank_rows, tables_rank)
from lab.gradients.size import (MEASURES, draw_sizes, known, table_phase1, tables_tokens, three_sizes, token_columns,
                                type_ratio)
from lab.truth.critic import LIMIT, find_heads, sample
from lab.truth.measure import add_values, describe, sample_truth
from lab.updates import credit_gradients, on_tokens
from plumbing.flags import new_parser
from plumbing.progress import Progress, fail, one_sentence
from plumbing.report import Table, interval, pm
from plumbing.runs import read_config
from rollout import Policy, TokenBatch
from train import BUNDLED, Settings, check_lengths, load_policy

TRUTH_ROLLOUTS = 24  # of a token, for the control A*
SPARSITY = ("Hoyer", "Gini", "below rms / 100")


# -------------------------------------------------------------------------------------------- over training


def sparsity(x: np.ndarray) -> dict[str, float]:
    """Hoyer's measure and the Gini coefficient of |x| (P,), 0 where all are equal and 1 where one has all; and the
    share of entries below a hundredth of the root mean square."""
    x, n = np.sort(np.abs(x.astype(np.float64))), len(x)
    rms = np.sqrt((x**2).mean())
    return dict(zip(SPARSITY, ((np.sqrt(n) - x.sum() / (rms * np.sqrt(n))) / (np.sqrt(n) - 1),
                               1 - 2 * ((x / x.sum()) * (n - np.arange(1, n + 1) + 0.5) / n).sum(),
                               (x < 0.01 * rms).mean())))


def checkpoint_row(folder: Path, puzzles: list[Puzzle], answers: int, seed: int) -> list[str]:
    """One line of the table over training."""
    policy = load_policy(Settings(model=str(folder)))
    batch = by_success(sample(policy, puzzles, answers, (seed, 0)))
    c = token_columns(batch, seed)
    sizes = three_sizes(c)
    use = known(c, *sizes.values())
    credit = (batch.advantage[:, None] * batch.mask)[None]  # (1, B, T)
    rows = torch.cat(list(credit_gradients(batch, credit, 1))).view(len(puzzles), answers, -1)
    groups = [g for g in rows if g.any()]  # (G, P) each
    sparse = [sparsity(g.sum(0).numpy()) for g in groups]
    ranked = [effective_rank(gram_spectrum(products(g, g))) for g in groups]
    columns = [([s[k] for s in sparse], 3) for k in SPARSITY] + [(ranked, 1)]
    return [f"{batch.success.mean():.2f}", *(pm(*interval(x), digits) if x else "" for x, digits in columns),
            *(cell(type_ratio(x, c, use, False)) for x in sizes.values())]


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Step and folder of each complete checkpoint of a run."""
    folders = [file.parent for file in sorted(run.glob("checkpoints/step-*/model.safetensors"))]
    return [(int(folder.name[5:]), folder) for folder in folders]


def table_training(run: Path, puzzles: list[Puzzle], answers: int, seed: int) -> Table:
    """How sparse, of what rank, and on which tokens the gradient is along a run."""
    start = Path(read_config(run)["settings"]["model"])
    rows = []
    for step, folder in [(0, start), *checkpoints(run)]:
        print(f"checkpoint of step {step}", flush=True)
        rows.append([str(step), *checkpoint_row(folder, puzzles, answers, seed)])
    return Table("Over training", (
        f"{run.name}; the same {len(puzzles)} puzzles at each checkpoint, {answers} answers each. Sparsity of a "
        "puzzle's gradient, effective rank of its responses x parameters, means over puzzles ± half of a 95% "
        "interval; filler / reasoning by the three measures with 95% bootstrap intervals over puzzles."),
        ["step", "success", *SPARSITY, "effective rank", *MEASURES], rows)


# -------------------------------------------------------------------------------------------- the command


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
    if args.questions < TRUTH_PUZZLES or args.batches < 4 or args.critic_batches < 1:
        fail(f"--questions must be at least {TRUTH_PUZZLES}, --batches 4 and --critic_batches 1")
    if args.run and not checkpoints(args.run):
        fail(f"{args.run} has no checkpoints: make the run with --checkpoint_every 25")
    if args.run and not (args.run / "config.json").is_file():
        fail(f"{args.run} is not a run folder: it has no config.json")
    return args


def sampled_truth(batch: TokenBatch, seed: int) -> Tensor:
    """A* (B, T) of the first CONTROLS_AT answers to the first TRUTH_PUZZLES puzzles, 0 elsewhere."""
    ask, G, truth = batch.ask, len(batch.text) // len(batch.puzzles), describe(batch, {})
    chosen = (truth["response"] % G < CONTROLS_AT) & (truth["group"] < TRUTH_PUZZLES)
    truth["logprob"] = np.where(chosen, truth["logprob"], 0.0).astype(np.float32)  # a certain token gets no rollouts
    sample_truth(ask.policy, ask.puzzles, truth, TRUTH_ROLLOUTS, seed, LIMIT, lambda: None)
    add_values(truth)
    return on_tokens(truth["a_star"], batch)


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
    truth = sampled_truth(batch, args.seed)
    found = rank_rows(batch, truth, args.seed)
    ones = credit_gradients(batch, batch.mask.float()[None], 1)
    shape = len(puzzles), max(SIZES)
    norms = np.array([g.double().square().sum().item() for g in ones]).reshape(shape)
    success = batch.success.view(shape).numpy().astype(float)
    tables = [*tables_tokens(columns), table_phase1(columns), *tables_rank(found), table_baseline(success, norms)]
    batches = independent_batches(policy, args.batches, args.seed)
    tables.append(table_methods(method_gradients(batches)))
    if args.run:
        tables.append(table_training(args.run, puzzles, CONTROLS_AT, args.seed))
    return tables


@one_sentence()
def main() -> None:
    """Measure, print, and write tables.md and two pictures of its tables."""
    args = arguments()
    tables = measure(args)
    text = "\n".join(map(str, tables))
    (args.out / "tables.md").write_text(text, encoding="utf-8")
    draw_sizes(args.out / "tables.md", args.out / "size.png")
    draw_ranks(args.out / "tables.md", args.out / "rank.png")
    print(f"{text}\nwrote {args.out}")


if __name__ == "__main__":
    main()
