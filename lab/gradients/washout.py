"""How much of the tokens' gradients cancels in their sum, and what each kind of token adds to the step that Adam takes.

A token's gradient can be large and still change nothing, where other tokens pull the other way. So beside the size of
the gradients of a kind of token stands the size of their sum: wash-out = |sum of gradients| / sum of |gradients|, 1
where all pull in one direction. And Adam divides by the size of what it has seen before: what a kind of token adds to
the step is the step with its credit minus the step without it, from the same weights and moments.

Run it:  python -m lab.gradients.measure
"""
import copy

import torch
from torch import Tensor

from grpo import compare, update
from lab.updates import credit_gradients
from plumbing.optimizer import Optimizer
from plumbing.progress import Progress
from plumbing.report import Table, interval, pm
from qwen2_model import take
from rollout import Policy, TokenBatch, draw_puzzles, rollout
from tasks.text import ROLES
from train import Settings, load_policy

WARM_UP, BATCHES = 20, 10  # steps of RLOO before, which fill Adam's moments, and batches to measure on


def token_norms(batch: TokenBatch) -> Tensor:
    """The norm (B, T) of the gradient of each token's log-prob over all parameters, 0 on padding."""
    model, lengths, norms = batch.ask.policy.model, batch.mask.sum(1).tolist(), torch.zeros_like(batch.logprob)
    progress = Progress("gradients of single tokens", len(lengths))
    for i, L in enumerate(lengths):
        prompt, tokens = batch.ask.prompts[int(batch.group[i])], batch.tokens[i, :L]
        row = torch.cat((torch.tensor(prompt), tokens))[None]  # (1, P + L)
        logits = model(row)[0, len(prompt) - 1 : -1, : model.real_vocab]  # (L, V)
        for t, logprob in enumerate(take(logits.log_softmax(-1), tokens)):
            parts = torch.autograd.grad(logprob, list(model.parameters()), retain_graph=True)
            norms[i, t] = sum(g.square().sum() for g in parts).sqrt()
        progress.show(i + 1)
    return norms


def kinds_of(batch: TokenBatch) -> dict[str, Tensor]:
    """Masks (B, T) of the tokens of each role, and of each fifth of the response; without those that are empty."""
    fifth = 5 * (batch.mask.cumsum(1) - 1) // batch.mask.sum(1, keepdim=True)  # (B, T)
    kinds = {role: batch.role == i for i, role in enumerate(ROLES)}
    kinds |= {f"{20 * i}-{20 * i + 20}% of the response": fifth == i for i in range(5)}
    kinds = {"all": batch.mask} | {name: use & batch.mask for name, use in kinds.items()}
    return {name: use for name, use in kinds.items() if use.any()}


def table_washout(batch: TokenBatch) -> Table:
    """Size and sum of the gradients of each kind of token, with GRPO's credit."""
    kinds, A = kinds_of(batch), batch.advantage[:, None]  # (B, 1)
    where = torch.stack(list(kinds.values()))  # (M, B, T)
    size = (where * (A.abs() * token_norms(batch)).double()).sum((1, 2))  # (M,)
    sums = sum(credit_gradients(batch, where * A, len(batch.text) // len(batch.puzzles)))  # (M, P)
    norm, share = sums.double().norm(dim=1), where.sum((1, 2)) / batch.mask.sum()  # (M,) each
    columns = zip(share, size / size[0], norm / norm[0], norm / size)
    rows = [[name, f"{a:.1%}", f"{b:.1%}", f"{c:.2f}", f"{d:.3f}"] for name, (a, b, c, d) in zip(kinds, columns)]
    return Table("Wash-out", (
        f"GRPO's credit on {len(batch.text)} responses. Size: the sum of the norms of the tokens' gradients, as a "
        "share of that of all tokens. Sum: the norm of the sum of the gradients, in units of that of all tokens. "
        "Wash-out: sum over size, both in the same unit."),
        ["tokens", "share of tokens", "size", "sum", "wash-out"], rows)


def adam_steps(model: str, seed: int) -> list[dict[str, tuple[float, float]]]:
    """For each batch and role: |step - step without its credit| / |step|, and the cosine of the two steps."""
    s, found = Settings(model=model, seed=seed, advantage="rloo"), []
    policy, progress = load_policy(s), Progress("what each kind adds to Adam's step", WARM_UP + BATCHES)
    optimizer, training = Optimizer(policy.model, s.lr, (s.beta1, s.beta2)), policy.task.load("train")
    for step in range(1, WARM_UP + BATCHES + 1):
        batch = rollout(policy, draw_puzzles(training, s, step), s, step)
        credit = compare(batch, s.advantage)[:, None] * batch.mask  # (B, T)
        if step <= WARM_UP:
            update(policy, optimizer, batch, credit, s)
        else:
            whole, *less = (step_with(c, policy, optimizer, batch, s)
                            for c in (credit, *(credit * (batch.role != i) for i in range(len(ROLES)))))
            found.append({role: compare_steps(whole, without) for role, without in zip(ROLES, less)})
        progress.show(step)
    return found


def step_with(credit: Tensor, policy: Policy, optimizer: Optimizer, batch: TokenBatch, s: Settings) -> Tensor:
    """The step (P,) that Adam would take with credit (B, T); weights and moments are left as they were."""
    start, before = copy.deepcopy(optimizer.state_dict()), optimizer.flat_weights()
    update(policy, optimizer, batch, credit, s)
    after = optimizer.flat_weights()
    optimizer.load_state_dict(start)
    return (after - before).double()


def compare_steps(whole: Tensor, without: Tensor) -> tuple[float, float]:
    """|whole - without| / |whole|, and the cosine of the two, each (P,)."""
    return (((whole - without).norm() / whole.norm()).item(),
            torch.cosine_similarity(whole, without, dim=0).item())


def table_adam(found: list[dict[str, tuple[float, float]]]) -> Table:
    """What each role adds to the step, means over batches."""
    rows = [[role, *(pm(*interval(x), 2) for x in zip(*(row[role] for row in found)))] for role in ROLES]
    return Table("What a kind of token adds to Adam's step", (
        f"RLOO, after {WARM_UP} steps; the step with all credit against the step without that of a role, from the same "
        f"weights and moments. Size: |difference| / |step|. Means over {BATCHES} batches ± half of a 95% interval."),
        ["without", "size of the difference", "cosine of the steps"], rows)
