"""How cost grows with the number of responses and of tokens: our sampler and update, and transformers' `generate`.

The three take turns on the same work. Responses don't end before their last token, so all have the same length.

Run it:  python -m lab.speed.growth                                                       two minutes on two cores
         python -m lab.speed.growth --model weights/smollm2 --dtype bfloat16 --puzzles 1 --rounds 1   six minutes
"""
import argparse
import statistics
import time
from dataclasses import replace
from typing import Callable

import torch

from grpo import update
from lab.speed.contestants import ANSWERS, peer
from plumbing.optimizer import Optimizer
from plumbing.report import Table
from rollout import rollout
from settings import Settings
from plumbing.launch import BUNDLED
from train import load_policy

TIMES, TOKENS = (1, 4, 8), (64, 256, 1024)  # as many responses, and tokens of a response


def seconds(work: Callable) -> tuple[float, object]:
    """How long it took, and what it returned."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    """Measure every size, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED), help="a Hugging Face folder (default: the bundled one)")
    parser.add_argument("--dtype", default="float32", help="of the weights (default float32)")
    parser.add_argument("--puzzles", type=int, default=8, help="for the smallest size (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is taken (default 3)")
    args = parser.parse_args()
    s = Settings(model=args.model, dtype=args.dtype, answers=ANSWERS)
    policy = load_policy(s)
    policy.tokenizer.end_tokens, optimizer, theirs = [], Optimizer(policy.model, 0.0), peer(args.model, args.dtype)
    puzzles, rows = policy.task.load("train", max(TIMES) * args.puzzles), []
    sizes = [(args.puzzles * k, TOKENS[0]) for k in TIMES] + [(args.puzzles, T) for T in TOKENS[1:]]
    for Q, T in [(1, 8), *sizes]:  # the first one warms up
        s, rates = replace(s, questions=Q, max_new_tokens=T), []
        prompts = [policy.prompt(puzzle) for puzzle in puzzles[:Q] for _ in range(ANSWERS)]
        for seed in range(args.rounds):
            sampling, batch = seconds(lambda: rollout(policy, puzzles[:Q], replace(s, seed=seed), step=1))
            updating, _ = seconds(lambda: update(policy, optimizer, batch, torch.randn(batch.mask.shape), s))
            generating, _ = seconds(lambda: theirs(prompts, T, []))
            rates.append([batch.mask.sum().item() / x for x in (sampling, updating, generating)])
        rows.append([f"{Q} x {ANSWERS} x {T}", *(f"{statistics.median(column):,.0f}" for column in zip(*rates))])
        print(*rows[-1], flush=True)
    header = ["puzzles x responses x tokens", "sampler", "update", "generate"]
    print(Table(f"Tokens per second, {args.dtype}", "", header, rows[1:]))


if __name__ == "__main__":
    main()
