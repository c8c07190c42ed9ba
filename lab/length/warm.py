"""A policy that searches longer: the bundled small model imitates written searches of more attempts.

    python -m lab.length.warm 120        writes runs/length/120 in minutes, and says how it searches
"""
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import countdown_task
from models import warm_start
from plumbing.run_folder import copy_tokenizer
from rollout import Policy, TokenBatch, rollout
from settings import Settings
from start import load_policy, save_policy
from tasks import searches

SMALL, STEPS = "models/countdown-small", 500
SEARCHES = {120: (0.06, 0.1, 12), 240: (0.03, 0.05, 24)}  # KNOWN, GIVE_UP, ATTEMPTS: see tasks/searches.py
any_attempt = searches.random_attempt


def demonstrate(puzzle, rng, known: float) -> str:
    """A written search in which only known solutions hit: another attempt is drawn anew until it misses."""
    def missing(*arguments) -> list:
        attempt = any_attempt(*arguments)
        return attempt if attempt[-1].result != puzzle.target else missing(*arguments)
    searches.random_attempt = missing
    return searches.demonstrate(puzzle, rng, known)


def batches(policy: Policy, puzzles: list, known: float):
    """Demonstrations of all lengths together: in batches of like length, tokens of short ones would count for more."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        rows = [warm_start.whole(policy, puzzles[i], warm_start.demonstration(policy, puzzles[i], rng, known))
                for i in rng.integers(len(puzzles), size=warm_start.BATCH)]
        yield tuple(pad_sequence([torch.tensor(row[k]) for row in rows], batch_first=True) for k in (0, 1))


def settings(length: int) -> Settings:
    """A policy's settings. Its reward is success alone."""
    return Settings(model=f"runs/length/{length}" if length in SEARCHES else SMALL, max_new_tokens=140 * length // 60,
                    reward_weights="answer=1,format=0")


def describe(batch: TokenBatch) -> dict[str, float]:
    """Means over responses: success, length, share cut off, entropy of a response, and E."""
    found = {"V": batch.success, "tokens": batch.mask.sum(1), "cut": ~batch.ended, "entropy": batch.entropy.sum(1),
             "E": (batch.logit_grad**2).sum(1)}
    return {name: round(x.double().mean().item(), 6) for name, x in found.items()}


if __name__ == "__main__":
    length = int(sys.argv[1])
    known, searches.GIVE_UP, searches.ATTEMPTS = SEARCHES[length]
    warm_start.LR, s = 1e-3, settings(length)
    policy, puzzles = load_policy(replace(s, model=SMALL)), countdown_task.load("train", 10_000)
    task = SimpleNamespace(prompt=countdown_task.prompt, demonstrate=demonstrate)
    warm_start.imitate(policy.model, batches(policy._replace(task=task), puzzles, known), STEPS)
    copy_tokenizer(Path(SMALL), Path(s.model))
    save_policy(policy._replace(model=policy.model.bfloat16()), s, Path(s.model))
    print(describe(rollout(load_policy(s), countdown_task.load("heldout", 256), replace(s, responses=4), step=0)))
