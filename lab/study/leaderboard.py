"""What does it cost to solve 60% of the easy puzzles? Trains an entry of leaderboard.md on its five seeds.

    python -m lab.study.leaderboard --mitigation none --advantage rloo --steps 240

All flags are those of train.py, which runs once for each seed, with held-out success measured every ten steps. The
entry's cost is read where the mean over the seeds first reaches 60%: the tokens through the model so far, those of
heads and rollouts too, sampled and read ones counted once and updated ones three times. A finished run is not trained
again, and an interrupted one is resumed.
"""
import subprocess
import sys
from pathlib import Path

import numpy as np

import train
from lab.study.rows import weighted_tokens
from plumbing.progress import fail, one_sentence
from plumbing.runs import heldout, is_finished, read_metrics

SEEDS, TARGET, EVERY = range(50, 55), 0.6, 10
FIXED = {"model", "task", "data", "eval_every", "eval_problems", "seed", "out", "reward", "max_new_tokens"}


def train_seed(arguments: list[str], folder: Path, seed: int) -> None:
    """Start, resume or skip the run of a seed; exits where it fails."""
    if not is_finished(folder):
        new = [*arguments, "--eval_every", str(EVERY), "--seed", str(seed), "--out", str(folder)]
        command = [sys.executable, "train.py", *(["--resume", str(folder)] if folder.is_dir() else new)]
        if code := subprocess.run(command).returncode:
            fail(f"seed {seed} ended with code {code}; the same command resumes it")


def cost_at(success: np.ndarray, cost: np.ndarray, steps: np.ndarray, target: float = TARGET) -> tuple[int, float]:
    """The step and the mean cost where the mean success (seeds, n) first reaches the target; ValueError if it doesn't.

    cost (seeds, n): weighted tokens up to each of the measured steps (n,).
    """
    reached = success.mean(0) >= target  # (n,)
    if not reached.any():
        raise ValueError(f"the mean of {len(success)} seeds reached {success.mean(0).max():.1%}, not {target:.0%}: "
                         "take more --steps, in a new entry")
    first = int(reached.argmax())
    return int(steps[first]), float(cost[:, first].mean())


def read_entry(folders: list[Path]) -> tuple[int, float]:
    """`cost_at` of finished runs."""
    success, cost = [], []
    for folder in folders:
        metrics = read_metrics(folder)
        steps, measured, _ = heldout(metrics)
        success.append(measured)
        cost.append(weighted_tokens(metrics)[steps.astype(int)])
    return cost_at(np.array(success), np.array(cost), steps)


@one_sentence()
def main() -> None:
    """Train the five seeds, and print the entry's row."""
    arguments = sys.argv[1:]
    train.parse_flags(arguments)  # exits where one is wrong
    for word in arguments:
        if word.removeprefix("--") in FIXED:
            fail(f"{word} is the same for all entries")
    name = "-".join(word.removeprefix("--") for word in arguments) or "none"
    folders = [Path("runs/leaderboard") / f"{name}-seed{seed}" for seed in SEEDS]
    for folder, seed in zip(folders, SEEDS):
        train_seed(arguments, folder, seed)
    step, cost = read_entry(folders)
    print(f"| `{' '.join(arguments)}` | {cost / 1e6:.2f} | {step} |")


if __name__ == "__main__":
    main()
