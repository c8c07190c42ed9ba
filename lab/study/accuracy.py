"""How close to the truth is the credit of `oracle`, by its K? The axis of section 2 of designs.md.

The responses are those of steps 1, 50 and 100 of a run of RLOO at its rate of stage one (LR below); the truth is an
independent estimate at K = 200.

Run it:  python train.py --mitigation none --advantage rloo --model models/countdown-small --lr LR --steps 99 \\
             --checkpoint_every 49 --out runs/accuracy
         python -m lab.study.accuracy runs/accuracy        writes lab/study/accuracy.md, half an hour
"""
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from grpo import compare
from lab.estimates import cell
from lab.statistics import correlate
from methods import MITIGATIONS
from plumbing.flags import new_parser
from plumbing.progress import Progress, one_sentence
from plumbing.report import Table
from plumbing.runs import read_config
from rollout import TokenBatch, draw_puzzles, rollout, token_batch
from train import Settings, load_policy

CHECKPOINTS = {1: "", 50: "checkpoints/step-000049", 100: "checkpoint"}  # by step, the weights that sample it
CREDITS = {"RLOO": ("none", {}), "vineppo": ("vineppo", {}), "oracle k=4": ("oracle", {"k": 4}),
           "oracle k=16": ("oracle", {"k": 16}), "oracle k=64": ("oracle", {"k": 64})}
EXACT = 200  # K of the truth
OTHER_SEED = 1000  # added to the seed: rollouts that have nothing to do with those of the credit


def again(batch: TokenBatch) -> TokenBatch:
    """The same responses, about which the model is asked with other random numbers."""
    ask = batch.ask
    return token_batch(ask.policy, ask.puzzles, ask.samples, replace(ask.s, seed=ask.s.seed + OTHER_SEED), ask.step)


@torch.no_grad()
def credits_of(batch: TokenBatch) -> dict[str, np.ndarray]:
    """By name, the credit (N,) of each of CREDITS; `truth` is independent of them."""
    found = {name: MITIGATIONS[method](batch, **flags) for name, (method, flags) in CREDITS.items()}
    found["truth"] = MITIGATIONS["oracle"](again(batch), k=EXACT)
    return {name: credit[batch.mask].double().numpy() for name, credit in found.items()}


def table_accuracy(steps: list[tuple[dict[str, np.ndarray], np.ndarray]]) -> Table:
    """Pearson's correlation of each credit with the truth; steps: of each its credits, and its tokens' puzzles (N,)."""
    first = np.cumsum([0, *(int(puzzle.max()) + 1 for _, puzzle in steps)])  # each step has puzzles of its own
    puzzle = np.concatenate([puzzle + start for (_, puzzle), start in zip(steps, first)])
    joined = {name: np.concatenate([credits[name] for credits, _ in steps]) for name in steps[0][0]}
    rows = [[name, *(cell(correlate(credits[name], credits["truth"], own)) for credits, own in
                     [*steps, (joined, puzzle)])] for name in CREDITS]
    note = (f"Pearson's correlation of a credit with an independent estimate of A* of the reward at K = {EXACT}, over "
            "the tokens of a step. In brackets, 95% intervals over puzzles, by bootstrap.")
    return Table("Accuracy of the credit", note,
                 ["credit", *(f"step {step}" for step in CHECKPOINTS), "all"], rows)


@one_sentence()
def main() -> None:
    """Measure, and write the table."""
    parser = new_parser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run of RLOO with the checkpoints above")
    run = parser.parse_args().run
    s, steps, progress = Settings(**read_config(run)["settings"]), [], Progress("steps", len(CHECKPOINTS))
    for step, weights in CHECKPOINTS.items():
        policy = load_policy(replace(s, model=str(run / weights) if weights else s.model))
        batch = rollout(policy, draw_puzzles(policy.task.load("train"), s, step), s, step)  # sampled again
        batch.advantage = compare(batch, s.advantage)
        group = batch.group[:, None].expand_as(batch.mask)[batch.mask].numpy()  # (N,)
        steps.append((credits_of(batch), group))
        progress.show(len(steps))
    table = table_accuracy(steps)
    Path(__file__).with_suffix(".md").write_text(str(table), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
