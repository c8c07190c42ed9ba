"""Policies that search longer: the bundled small model imitates written searches of more attempts.

    python -m lab.length.warm 120        writes runs/length/120 in minutes, and says how it searches
"""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import countdown_task
from models import warm_start
from plumbing.flags import new_parser
from plumbing.launch import MODELS
from plumbing.policy import Policy
from plumbing.progress import one_sentence
from plumbing.run_folder import copy_tokenizer
from rollout import TokenBatch, rollout
from settings import Settings
from start import load_policy, save_policy
from tasks import searches

SMALL = str(MODELS / "countdown-small")


class Search(NamedTuple):
    """How a search is written, the token limit, and the steps of imitation."""

    known: float
    give_up: float
    attempts: int
    limit: int
    steps: int


LENGTHS = {60: Search(searches.KNOWN[1], searches.GIVE_UP, searches.ATTEMPTS, 140, 0),
           120: Search(0.06, 0.1, 12, 280, 600), 240: Search(0.03, 0.05, 24, 560, 600)}


def demonstrate(puzzle, rng, known: float) -> str:
    """A written search in which only known solutions hit: another attempt is drawn anew until it misses."""
    drawn = searches.random_attempt

    def missing(*arguments) -> list:
        attempt = drawn(*arguments)
        return attempt if attempt[-1].result != puzzle.target else missing(*arguments)

    searches.random_attempt = missing
    try:
        return searches.demonstrate(puzzle, rng, known)
    finally:
        searches.random_attempt = drawn


def settings(length: int) -> Settings:
    """A policy's settings. Its reward is success alone."""
    model = f"runs/length/{length}" if LENGTHS[length].steps else SMALL
    return Settings(model=model, max_new_tokens=LENGTHS[length].limit, reward_weights="answer=1,format=0")


def describe(batch: TokenBatch) -> dict[str, float]:
    """Means over responses: success, length, share cut off, entropy of a response, and E."""
    found = {"V": batch.success, "tokens": batch.mask.sum(1), "cut": ~batch.ended, "entropy": batch.entropy.sum(1),
             "E": (batch.logit_grad**2).sum(1)}
    return {name: x.double().mean().item() for name, x in found.items()}


@one_sentence()
def main() -> None:
    """Make one of the longer policies."""
    parser = new_parser(description=__doc__)
    parser.add_argument("length", type=int, choices=[n for n, search in LENGTHS.items() if search.steps])
    length = parser.parse_args().length
    search, s = LENGTHS[length], settings(length)
    searches.ATTEMPTS, searches.GIVE_UP, warm_start.LR = search.attempts, search.give_up, 1e-3
    policy, out = load_policy(replace(s, model=SMALL)), Path(s.model)
    task = SimpleNamespace(**vars(countdown_task) | {"KNOWN": (search.known,) * 2, "demonstrate": demonstrate})
    puzzles = countdown_task.load("train", 10_000)
    warm_start.imitate(policy.model, warm_start.batches(policy._replace(task=task), puzzles, search.steps, 0),
                       search.steps)
    copy_tokenizer(Path(SMALL), out)
    save_policy(Policy(policy.model.bfloat16(), policy.tokenizer, countdown_task), s, out)
    print(describe(rollout(load_policy(s), countdown_task.load("heldout", 256), replace(s, answers=4), step=0)))


if __name__ == "__main__":
    main()
