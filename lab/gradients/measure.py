"""What a step's gradient is made of, and which method's is noisy or biased.

Is the gradient of a group of rank 2? See rank.py, and pretrained.py. Which method has the least noise and bias? See
noise.py.

Run it:  python -m lab.gradients.measure        within a quarter of an hour
"""
from pathlib import Path
from typing import Iterator

from countdown_task import generate_puzzles
from lab.gradients.noise import method_gradients, table_methods
from lab.gradients.rank import SIZES, by_success, group_spectra, rank_rows, tables_rank
from lab.heads import LIMIT, find_heads, sample
from plumbing.flags import new_parser
from plumbing.launch import check_lengths
from plumbing.progress import follow, one_sentence
from plumbing.report import Table
from rollout import Policy, TokenBatch
from settings import Settings
from plumbing.launch import BUNDLED
from start import load_policy

QUESTIONS = 12  # training puzzles
BATCHES = 16  # for noise and bias
CRITIC_BATCHES = 40  # of 96 responses, for `ppo`
NOTE = ("Rewards right or wrong; weight matrices averaged over layers; `ppo` with the reward that its critic was "
        "fitted to, 0.1 · format + success.")


def independent_batches(policy: Policy) -> Iterator[TokenBatch]:
    """BATCHES batches: 8 answers to each of 6 puzzles that no other batch has."""
    puzzles = generate_puzzles(6 * BATCHES, "train", seed=1)
    for i in follow("gradients of the methods", range(BATCHES)):
        yield sample(policy, puzzles[6 * i : 6 * i + 6], 8, (0, 1000 + i))


def measure(model: str, out: Path) -> list[Table]:
    """All tables of a model; its heads are fitted and saved in the folder `out`, or found there."""
    s = Settings(model=model, max_new_tokens=LIMIT)
    policy, puzzles = load_policy(s), generate_puzzles(QUESTIONS, "train")
    check_lengths(policy, puzzles, s)
    out.mkdir(parents=True, exist_ok=True)
    policy = policy._replace(heads=find_heads(out, policy, CRITIC_BATCHES))
    batch = by_success(sample(policy, puzzles, max(SIZES), (0, 0)))
    if not batch.advantage.any():
        raise ValueError("no puzzle got both right and wrong answers, so there is no gradient: take a --model that "
                         "solves some")
    return [*tables_rank(rank_rows(group_spectra(batch)), NOTE),
            table_methods(method_gradients(independent_batches(policy)))]


@one_sentence()
def main() -> None:
    """Measure, print, and write tables.md."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args = parser.parse_args()
    text, file = "\n".join(map(str, measure(args.model, args.out))), args.out / "tables.md"
    file.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {args.out}")


if __name__ == "__main__":
    main()
