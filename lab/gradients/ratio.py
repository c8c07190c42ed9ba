"""What does the ratio pi / pi_old add to a token's credit when a batch is used for several updates?

Before the first update on a batch the ratio is 1. From the second on, the gradient of PPO's loss is

    sum_t share_t * factor_t * credit_t * grad log pi(token_t),    factor = ratio, or 0 where the clip takes over

with share_t the token's share of the loss. So each token's credit is multiplied by a factor of its own, also in GRPO.
Before each later update we measure, on the tokens that have credit, how many are clipped and how the ratio varies; and
the cosine of the gradient with the one whose factors are all 1, at the same weights.

The model first trains for some steps, because Adam's moments decide how far an update goes. Every batch then starts
from that state, so batches differ in their samples only.

Run it:  python -m lab.gradients.measure
"""
import copy
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from analyze import COLOURS
from grpo import LOSS_NORMS, compare, ppo_loss, update
from lab.estimates import read_cell, read_table
from lab.statistics import explained
from lab.updates import credit_gradients
from plumbing.optimizer import Optimizer
from plumbing.progress import Progress
from plumbing.report import GREY, PALETTE, Table, interval, new_figure, pm, save_figure
from plumbing.shared_prompts import shared_logprobs
from rollout import Policy, TokenBatch, draw_puzzles, rollout
from tasks.text import ROLES
from train import Settings, assign_credit, load_policy

METHODS = ("none", "entropy_masking")
CLIPS = (0.2, 0.28)  # --clip_high: the default, and DAPO's (2503.14476), which lets rare tokens rise further
UPDATES = 4  # on each batch
WARM_UP, BATCHES = 10, 10  # steps of training before, and batches to measure on
GRADIENTS = ("ratio and clip", "ratio alone", "clip alone")  # each against factors of 1
COLUMNS = {"clipped": 2, **{f"clipped, {role}": 2 for role in ROLES}, "deviation of log ratio": 3,
           "within responses": 3, **dict.fromkeys((*GRADIENTS, "relative size"), 2)}  # and their digits


def observe(batch: TokenBatch, credit: Tensor, s: Settings) -> dict[str, float]:
    """COLUMNS of the table, before the next update on a batch with credit (B, T)."""
    logprob = batch.ask.read(shared_logprobs, batch.ask.policy.model)  # (B, T)
    share = LOSS_NORMS[s.loss_norm](batch.mask, s)  # (B, T)
    log_ratio = logprob - batch.logprob  # (B, T)
    (_, clipped), ratio = ppo_loss(logprob, batch.logprob, credit, batch.mask, s), log_ratio.exp()  # (B, T) each
    factors = torch.stack((ratio * ~clipped, ratio, (~clipped).float(), torch.ones_like(ratio)))  # (4, B, T)
    gradients = sum(credit_gradients(batch, factors * share * credit, s.answers))  # (4, P)
    return against_ones(gradients) | spread(log_ratio, clipped, batch.role, batch.mask & (credit != 0))


def against_ones(gradients: Tensor) -> dict[str, float]:
    """Cosines of three gradients of (4, P) with the last, whose factors are 1, and the first one's size over its."""
    g = gradients.double()
    sizes = g.norm(dim=1)  # (4,)
    cosines = (g[:3] @ g[3] / (sizes[:3] * sizes[3])).tolist()
    return dict(zip(GRADIENTS, cosines)) | {"relative size": (sizes[0] / sizes[3]).item()}


def spread(log_ratio: Tensor, clipped: Tensor, role: Tensor, use: Tensor) -> dict[str, float]:
    """Of the tokens `use` (B, T): those clipped, in percent, of all and of each role; and how the log ratio varies."""
    groups = {"clipped": use} | {f"clipped, {name}": use & (role == i) for i, name in enumerate(ROLES)}
    found = {name: 100 * clipped[group].double().mean().item() for name, group in groups.items()}
    x, response = log_ratio[use].numpy(), use.nonzero()[:, 0].numpy()  # (N,) each
    return found | {"deviation of log ratio": float(x.std()), "within responses": 1 - explained(x, response)}


def sampled(policy: Policy, training: list, s: Settings, step: int) -> tuple[TokenBatch, Tensor]:
    """Responses and credit (B, T) of a step."""
    batch = rollout(policy, draw_puzzles(training, s, step), s, step)
    batch.advantage = compare(batch, s.advantage)
    return batch, assign_credit(batch, s, {})


def warmed_up(s: Settings, steps: int, progress: Progress) -> tuple[Policy, Optimizer, list]:
    """A policy after some steps of training, its optimizer, whose moments these filled, and the puzzles."""
    policy = load_policy(s)
    optimizer, training = Optimizer(policy.model, s.lr, (s.beta1, s.beta2)), policy.task.load("train")
    for step in range(1, steps + 1):
        update(policy, optimizer, *sampled(policy, training, s, step), s)
        progress.show(step)
    return policy, optimizer, training


def observations(s: Settings) -> Iterator[dict]:
    """What is observed with each clip, on BATCHES batches after WARM_UP steps."""
    progress = Progress(f"several updates, {s.mitigation}", WARM_UP + BATCHES)
    policy, optimizer, training = warmed_up(replace(s, updates_per_batch=UPDATES), WARM_UP, progress)
    start = copy.deepcopy(optimizer.state_dict())  # weights and moments
    for step in range(WARM_UP + 1, WARM_UP + BATCHES + 1):
        batch, credit = sampled(policy, training, s, step)
        for clip in CLIPS:
            yield from observed_updates(policy, optimizer, batch, credit, replace(s, clip_high=clip))
            optimizer.load_state_dict(copy.deepcopy(start))  # a copy, since Adam changes what it loads
        progress.show(step)


def observed_updates(policy: Policy, optimizer: Optimizer, batch: TokenBatch, credit: Tensor,
                     s: Settings) -> Iterator[dict]:
    """What is observed before each update but the first, of --updates_per_batch 4 on a batch with credit (B, T)."""
    for number in range(2, UPDATES + 1):
        update(policy, optimizer, batch, credit, s)
        yield {"method": s.mitigation, "clip_high": s.clip_high, "update": number} | observe(batch, credit, s)


def ratio_rows(model: str, seed: int) -> list[dict]:
    """A row for each method, batch, clip and update."""
    return [row for method in METHODS for row in observations(Settings(mitigation=method, model=model, seed=seed))]


def table_ratio(found: list[dict]) -> Table:
    """Means over batches: how far the factors are from 1, and what they do to the gradient."""
    groups = {}
    for row in found:
        groups.setdefault((row["method"], str(row["clip_high"]), str(row["update"])), []).append(row)
    lines = [[*group, *(pm(*interval([row[name] for row in rows]), digits) for name, digits in COLUMNS.items())]
             for group, rows in groups.items()]
    return Table("Several updates on a batch", (
        "Tokens clipped in percent, of all and of each role; standard deviation of the log ratio; share of the "
        "variance of the log ratio that is within responses; cosine with the gradient of factors 1; size over the "
        "size of that one, with ratio and clip. Tokens with credit, before each update on their batch, after "
        f"{WARM_UP} steps of training; means over {BATCHES} batches of {Settings.questions * Settings.answers} "
        "responses, ± half of a 95% interval (Student's t)."), ["method", "clip_high", "update", *COLUMNS], lines)


def draw_ratio(tables: Path, file: Path) -> None:
    """GRPO's clipped tokens by role, and its cosines, by update, read from the file of tables."""
    header, rows = read_table(tables, "Several updates on a batch")
    grpo = [dict(zip(header, row)) for row in rows if row[:2] == [METHODS[0], str(CLIPS[0])]]
    figure, ((left, right),) = new_figure(2, 1, 3.4)
    clipped = {f"clipped, {role}": COLOURS[role] for role in ROLES}
    for axis, columns in {left: clipped, right: dict(zip(GRADIENTS, PALETTE))}.items():
        for (column, colour), marker in zip(columns.items(), "os^"):
            value, _, high, _ = np.array([read_cell(row[column]) for row in grpo]).T  # (updates,)
            axis.errorbar([int(row["update"]) for row in grpo], value, high - value, marker=marker, color=colour,
                          capsize=3, label=column, clip_on=False)
        axis.set(xlabel="update on the same batch", xticks=range(2, UPDATES + 1), ylim=(0, None))
        axis.legend()
    left.set(ylabel="clipped tokens, %, 95% interval", title="Reasoning is clipped")
    right.set(ylabel="cosine, 95% interval", title="The clip turns GRPO's gradient")
    right.axhline(1, color=GREY, lw=1)
    save_figure(figure, file)
