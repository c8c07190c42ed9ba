"""Credit from the calculations that a response contains. The task says where they are and which are right.

Run it:  python train.py --mitigation causal_ablation
"""
import torch
from torch import Tensor

from grpo import group_mean
from methods.credit_function import token_credit
from methods.values import gae, is_last_token
from methods.written import written_calculations
from mitigations import none, reweighting
from plumbing.files import require
from rollout import TokenBatch, by_group
from tasks.text import anchors


@token_credit(from_advantage=True, needs=("calculations",))
def process_reward(batch: TokenBatch, process: float = 0.1) -> Tensor:
    """credit = A + process * (sum of v - mean v over calculations that end at t or later): process GRPO (2402.03300).

    v is 1 for a calculation that is true and uses available numbers, else 0; mean v is over all calculations of the
    group. The paper's process supervision also divides by their standard deviation, and has no outcome beside them.
    """
    require(process >= 0, "--process must be 0 or more")
    ends, true = calculation_ends(batch)  # (B, T) each
    count, right = (by_group(batch, x).sum((1, 2)) for x in (ends, true))  # (Q,) each, in the group
    mean = (right / count.clamp(min=1))[batch.group, None]  # (B, 1)
    return none(batch) + process * from_here_on(true - mean * ends)


def calculation_ends(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """(B, T) each: 1 at the last token of every calculation; 1 at that of each true one with available numbers."""
    ends, true = (batch.advantage.new_zeros(batch.mask.shape) for _ in range(2))  # (B, T) each
    for i in range(len(batch.text)):
        for calculation in written_calculations(batch, i):
            last = calculation.tokens.nonzero()[-1:, 0]  # (1,), or (0,) where no token is its own
            ends[i, last], true[i, last] = 1.0, float(calculation.is_right)
    return ends, true


def from_here_on(values: Tensor) -> Tensor:
    """For each column the sum of values (B, T) in it and in later ones."""
    return values.flip(1).cumsum(1).flip(1)


@token_credit(needs=("critic", "process_critic", "calculations"))
def ppo_process(batch: TokenBatch, process: float = 0.1, gae_lambda: float = 0.95) -> Tensor:
    """credit = that of ppo with r_t + process * (1 at the end of a true calculation, else 0): PPO (1707.06347).

    The sum in PPO's credit is linear in rewards and values. So each reward has a critic of its own, and its own sum.
    """
    require(process >= 0, "--process must be 0 or more")
    require(0 <= gae_lambda <= 1, "--gae_lambda must be between 0 and 1")
    outcome = gae(batch, is_last_token(batch) * batch.reward[:, None], batch.ask.head("critic"), gae_lambda)  # (B, T)
    return outcome + process * gae(batch, calculation_ends(batch)[1], batch.ask.head("process_critic"), gae_lambda)


@token_credit(needs=lambda solver, **_: ("calculations", "reachable") if solver else ("calculations",))
def first_error(batch: TokenBatch, alpha: float = 0.5, solver: bool = False) -> Tensor:
    """credit = s_t - mean s: with s 1 in a right response, alpha up to the first error of a wrong one (2601.18984).

    From the error on, s is 0. mean s averages the responses of the group, each by its own mean.

    The paper asks a model where the first error is. Here it is the first calculation that is false or uses a number
    that is not there, else the answer, else the last token; with solver=True the first operand, operator or result
    after which no solution is left: in `5 - 3 = 2` the 5, if no solution subtracts anything from it. (Written from the
    paper's abstract and a summary of its equations.)
    """
    require(0 <= alpha <= 1, "--alpha must be between 0 and 1")
    column = torch.arange(batch.mask.shape[1], device=batch.mask.device)  # (T,)
    start = torch.tensor([error_column(batch, i, solver) for i in range(len(batch.text))], device=column.device)  # (B,)
    wrong = alpha * (column < start[:, None])  # (B, T)
    s = torch.where(batch.success[:, None] > 0, 1.0, wrong) * batch.mask  # (B, T)
    mean = group_mean(by_group(batch, s.sum(1) / batch.mask.sum(1)))  # (Q, 1)
    return s - mean[batch.group]


def error_column(batch: TokenBatch, i: int, solver: bool) -> int:
    """The column where the first error of response i begins; see `first_error`."""
    text, written = batch.text[i], written_calculations(batch, i)
    if solver:
        within_reach = batch.task.reachable(text, batch.puzzles[batch.group[i]])  # (S, 5) before and after each part
        starts = [part[0] for calculation, row in zip(written, within_reach)
                  for part, before, after in zip(calculation.span, row, row[1:]) if before and not after]
    else:
        starts = [calculation.span.a[0] for calculation in written if not calculation.is_right]
    places = anchors(text, batch.spans[i])  # (L,) the character that classifies each token
    in_answer = batch.in_answer[i, : len(places)].cpu().numpy()  # (L,)
    answer = places[in_answer][0] if in_answer.any() else len(text)
    first = min([*starts, answer])
    return min(int((places < first).sum()), len(places) - 1)


@reweighting(needs=("calculations",))
def causal_ablation(batch: TokenBatch) -> Tensor:
    """credit = A * (1.5 in <answer>, 0.5 + 0.5 drop / max drop on a calculation, else 0.5): causal (2602.09331).

    Favour the calculations that the answer depends on. The drop is the fall of the answer's log-probability, at least
    0, when no later state attends to the calculation (its keys are masked, positions stay); max drop is the largest in
    the response. A response without an answer, or without a calculation before it, gets plain GRPO.
    """
    before = [(i, calculation.tokens & ~batch.in_answer[i]) for i in batch.in_answer.any(1).nonzero()[:, 0].tolist()
              for calculation in written_calculations(batch, i)]  # responses with an answer, calculations outside of it
    hidden = [(i, tokens) for i, tokens in before if tokens.any()]  # N
    if not hidden:
        return batch.advantage.new_ones(batch.mask.shape)
    rows = torch.tensor([i for i, _ in hidden], device=batch.mask.device)  # (N,) a response as often as it hides one
    hide = torch.stack([tokens for _, tokens in hidden])  # (N, T)
    weight = torch.where(batch.in_answer, 1.5, 0.5)  # (B, T)
    fall = batch.logprob[rows] - batch.ask.logprob_without(rows, hide)  # (N, T)
    drop = (fall * batch.in_answer[rows]).sum(1).clamp(min=0)  # (N,)
    largest = torch.zeros_like(batch.advantage).scatter_reduce(0, rows, drop, "amax")[rows]  # (N,) in its response
    for i, tokens, share in zip(rows, hide, drop / torch.where(largest > 0, largest, 1.0)):
        weight[i, tokens] = 0.5 + 0.5 * share
    defined = torch.zeros_like(batch.ended).index_fill(0, rows, True)  # (B,)
    return torch.where(defined[:, None], weight, 1.0)
