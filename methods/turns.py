"""Credit by turns, for tasks that reply (tasks/guess_task.py): a turn is what the policy says between two replies.

In a response of one turn turn_mean, where --of is a reweighting, is GRPO, and the other two are RLOO.

Run it:  python train.py --task guess --mitigation turn_baseline
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from methods.calculations import from_here_on
from methods.controls import another, needs_of
from methods.credit_function import token_credit
from methods.values import segment_credit
from plumbing.files import require
from plumbing.metrics import turn_of
from rollout import TokenBatch, by_group


@token_credit(from_advantage=True, needs=needs_of)
def turn_mean(batch: TokenBatch, of: str = "entropy_ratio") -> Tensor:
    """credit = mean over the token's turn of the credit of --of: a turn has the sum, evenly spread (ours).

    --of surprise:power=2 gives that method a hyper-parameter; the others have their defaults.
    """
    turn, empty = turn_of(batch), batch.advantage.new_zeros(batch.mask.shape)  # (B, T) each
    method, values = another(of, "turn_mean")
    credit = method(batch, **values)  # (B, T)
    total = empty.scatter_add(1, turn, credit)  # (B, T) the sum over each turn, in the turn's column
    length = empty.scatter_add(1, turn, batch.mask.to(empty))  # (B, T) tokens of each turn
    return (total / length.clamp(min=1)).gather(1, turn)


@token_credit
def turn_vine(batch: TokenBatch, k: int = 3) -> Tensor:
    """credit = V(next turn) - V(this turn), V the mean reward of k continuations: `vineppo` by turns (2410.01679).

    A turn's luck is in its credit: V(next turn) is that after the reply.
    """
    require(k >= 1, "--k must be at least 1: it is the number of continuations sampled before each turn")
    turn = turn_of(batch)  # (B, T)
    return segment_credit(batch, batch.mask & (turn > F.pad(turn, (1, -1))), k)


@token_credit
def turn_baseline(batch: TokenBatch, to_end: bool = False) -> Tensor:
    """credit = r - b_l of its turn and the response's later ones: b_l is what others earn at turn l (2505.11821).

    b_l is the mean, over the group's other responses that have a turn l, of what they earn by it: their reward if it is
    their last one, else 0. That normalizes each turn by its number, as MT-GRPO does. It is biased where the policy
    decides when to stop: whoever goes on has more b_l subtracted, whatever comes of it
    (https://github.com/verl-project/verl/issues/7244). to_end=True sums to the last turn of the whole group, which no
    response decides alone: then others alone make the baseline, and there is no bias.
    """
    turn = turn_of(batch)  # (B, T)
    last = (turn * batch.mask).amax(1)  # (B,)
    reached = torch.arange(int(last.max()) + 1, device=last.device) <= last[:, None]  # (B, K)
    earned = F.one_hot(last, reached.shape[1]) * batch.reward[:, None]  # (B, K)

    def of_others(values: Tensor) -> Tensor:
        grouped = by_group(batch, values)  # (Q, G, K)
        return (grouped.sum(1, keepdim=True) - grouped).view_as(values)

    b = of_others(earned) / of_others(reached.double()).clamp(min=1) * (reached | to_end)  # (B, K)
    credit = batch.reward[:, None] - from_here_on(b).gather(1, turn)  # (B, T)
    return credit * (credit.abs() > 1e-14 * batch.reward.abs().max())  # drops what rounding leaves
