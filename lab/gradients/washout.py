"""How much of the tokens' gradients cancels in their sum.

A token's gradient can be large and still change nothing, where other tokens pull the other way. So beside the size of
the gradients of a kind of token stands the size of their sum: wash-out = |sum of gradients| / sum of |gradients|, 1
where all pull in one direction.

Run it:  python -m lab.gradients.measure
"""
import torch
from torch import Tensor

from lab.updates import credit_gradients
from plumbing.progress import Progress
from plumbing.report import Table
from qwen2_model import take
from rollout import TokenBatch
from tasks.text import ROLES


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


def table_washout(batch: TokenBatch) -> Table:
    """Size and sum of the gradients of each kind of token, with GRPO's credit."""
    kinds = {"all": batch.mask} | {role: (batch.role == i) & batch.mask for i, role in enumerate(ROLES)}
    kinds, A = {name: use for name, use in kinds.items() if use.any()}, batch.advantage[:, None]  # A (B, 1)
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
