"""How much of the tokens' gradients cancels in their sum, and what each kind of token adds to the step that Adam takes.

A token's gradient can be large and still change nothing, where other tokens pull the other way. So beside the size of
the gradients of a kind of token stands the size of their sum: wash-out = |sum of gradients| / sum of |gradients|, 1
where all pull in one direction. And Adam divides by the size of what it has seen before: what a kind of token adds to
the step is the step with its credit minus the step without it, from the same weights and moments.

Run it:  python -m lab.gradients.measure
"""
import copy

import numpy as np
import torch
from torch import Tensor

from grpo import update
from lab.gradients.ratio import sampled, warmed_up
from lab.gradients.size import token_columns
from lab.updates import credit_gradients
from plumbing.progress import Progress
from plumbing.report import Table, bins, interval, pm, ratio
from rollout import TokenBatch
from tasks.text import ROLES
from train import Settings

WARM_UP, BATCHES = 20, 10  # steps of RLOO before, which fill Adam's moments, and batches to measure on


def kinds_of(c: dict) -> dict[str, np.ndarray]:
    """Masks (N,) of the tokens of each role, and of each fifth of the response, from the columns of token_columns."""
    fifth = bins(c["relative"], 5)
    return ({"all": np.ones(len(c["role"]), bool)} | {role: c["role"] == i for i, role in enumerate(ROLES)}
            | {f"{20 * i}-{20 * i + 20}% of the response": fifth == i for i in range(5)})


def table_washout(batch: TokenBatch, seed: int) -> Table:
    """Size and sum of the gradients of each kind of token, with GRPO's credit."""
    c = token_columns(batch, seed, each=batch.mask.shape[1])  # of all tokens
    size = np.abs(c["advantage"]) * c["whole"]  # (N,)
    kinds = {name: use for name, use in kinds_of(c).items() if use.any()}
    where = torch.zeros(len(kinds), *batch.mask.shape, dtype=torch.bool)  # (M, B, T)
    where[:, batch.mask] = torch.from_numpy(np.stack(list(kinds.values())))
    sums = sum(credit_gradients(batch, where * batch.advantage[:, None], len(batch.text) // len(batch.puzzles)))
    sizes = sums.double().norm(dim=1).tolist()  # M norms of (P,)
    rows = []
    for (name, use), norm in zip(kinds.items(), sizes):
        rows.append([name, f"{use.mean():.1%}", f"{size[use].sum() / size.sum():.1%}", f"{norm / sizes[0]:.2f}",
                     f"{ratio(norm, size[use].sum()):.3f}"])
    return Table("Wash-out", (
        f"GRPO's credit on {len(batch.text)} responses. Size: the sum of the norms of the tokens' gradients, as a "
        "share of that of all tokens. Sum: the norm of the sum of the gradients, in units of that of all tokens. "
        "Wash-out: sum over size, both in the same unit."),
        ["tokens", "share of tokens", "size", "sum", "wash-out"], rows)


def adam_steps(model: str, seed: int) -> list[dict[str, tuple[float, float]]]:
    """For each batch and role: |step - step without its credit| / |step|, and the cosine of the two steps."""
    s = Settings(model=model, seed=seed, advantage="rloo")
    progress, found = Progress("what each kind adds to Adam's step", WARM_UP + BATCHES), []
    policy, optimizer, training = warmed_up(s, WARM_UP, progress)
    start = copy.deepcopy(optimizer.state_dict())
    for step in range(WARM_UP + 1, WARM_UP + BATCHES + 1):
        batch, credit = sampled(policy, training, s, step)

        def change(kept: Tensor) -> Tensor:
            """The step (P,) that Adam takes with the credit of some tokens (B, T)."""
            before = optimizer.flat_weights()
            update(policy, optimizer, batch, credit * kept, s)
            after = optimizer.flat_weights()
            optimizer.load_state_dict(copy.deepcopy(start))  # a copy, since Adam changes what it loads
            return after - before

        whole = change(batch.mask)
        found.append({role: compare_steps(whole, change(batch.role != i)) for i, role in enumerate(ROLES)})
        progress.show(step)
    return found


def compare_steps(whole: Tensor, without: Tensor) -> tuple[float, float]:
    """|whole - without| / |whole|, and the cosine of the two, each (P,)."""
    return (((whole - without).norm() / whole.norm()).item(),
            torch.cosine_similarity(whole, without, dim=0).item())


def table_adam(found: list[dict[str, tuple[float, float]]]) -> Table:
    """What each role adds to the step, means over batches."""
    rows = [[role, *(pm(*interval(np.array([row[role][i] for row in found])), 2) for i in (0, 1))] for role in ROLES]
    return Table("What a kind of token adds to Adam's step", (
        f"RLOO, after {WARM_UP} steps; the step with all credit against the step without that of a role, from the same "
        f"weights and moments. Size: |difference| / |step|. Means over {BATCHES} batches ± half of a 95% interval."),
        ["without", "size of the difference", "cosine of the steps"], rows)
