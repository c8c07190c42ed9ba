"""Which method's gradient is noisy or biased? See noise.py.

Run it:  python -m lab.gradients.measure        writes noise.md, in minutes
"""
from pathlib import Path
from typing import Iterator

from countdown_task import generate_puzzles
from lab.gradients.noise import method_gradients, table_methods
from lab.heads import LIMIT, find_heads, sample
from plumbing.flags import new_parser
from plumbing.launch import BUNDLED, check_lengths
from plumbing.progress import follow, one_sentence
from rollout import Policy, TokenBatch
from settings import Settings
from start import load_policy

BATCHES = 16
CRITIC_BATCHES = 40  # of 96 responses, for `ppo`


def independent_batches(policy: Policy, puzzles: list) -> Iterator[TokenBatch]:
    """BATCHES batches: 8 answers to each of 6 puzzles that no other batch has."""
    for i in follow("gradients of the methods", range(BATCHES)):
        yield sample(policy, puzzles[6 * i : 6 * i + 6], 8, (0, 1000 + i))


@one_sentence()
def main() -> None:
    """Measure, print, and write noise.md; the model's heads are fitted and saved beside it, or found there."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args = parser.parse_args()
    s = Settings(model=args.model, max_new_tokens=LIMIT)
    policy, puzzles = load_policy(s), generate_puzzles(6 * BATCHES, "train", seed=1)
    check_lengths(policy, puzzles, s)
    args.out.mkdir(parents=True, exist_ok=True)
    policy = policy._replace(heads=find_heads(args.out, policy, CRITIC_BATCHES))
    gradients = method_gradients(independent_batches(policy, puzzles))  # (M + 1, BATCHES, P)
    if not gradients[-1].any():
        raise ValueError("no puzzle got both right and wrong answers, so there is no gradient: take a --model that "
                         "solves some")
    text, file = str(table_methods(gradients)), args.out / "noise.md"
    file.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {file}")


if __name__ == "__main__":
    main()
