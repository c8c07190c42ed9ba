"""The truth about a pretrained model's tokens: A* of success, and the credit that every function gives them.

Like lab/truth/measure.py, without what a large model has no room for: a gradient of all its weights for each puzzle,
which the cosines of updates need, and functions with a head.

Run it:  python -m lab.real.truth --task math --model weights/qwen --dtype bfloat16 --device cuda --out runs/truth-qwen
"""
import functools

from lab.truth.measure import add_credit, arguments, prepare, read_rollouts, sample_truth, save_truth, table_facts
from plumbing.progress import one_sentence


def main() -> None:
    """Sample responses and rollouts, and write ground_truth.npz."""
    args = arguments()
    args.critic_batches = 0
    file = args.out / "ground_truth.npz"
    with one_sentence(f"interrupted; the same command resumes from what is in {args.out}"):
        policy, puzzles, batch, truth = prepare(args)
        if file.is_file():
            read_rollouts(truth, file)
        add_credit(truth, batch)
        save = functools.partial(save_truth, truth, file)
        sample_truth(policy, puzzles, truth, args.rollouts, args.seed, args.max_new_tokens, save)
        save()
        print(table_facts(truth))


if __name__ == "__main__":
    main()
