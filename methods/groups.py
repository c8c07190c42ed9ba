"""Credit from a comparison with the group's other responses: shared prefixes, baselines per token, pairs, lengths.

Q puzzles, G responses to each.

Run it:  python train.py --mitigation prefix_tree
"""
import torch
from torch import Tensor

from grpo import LOSS_NORMS
from methods.credit_function import token_credit, z_score
from mitigations import none
from plumbing.files import require
from rollout import TokenBatch, by_group
from settings import Settings


@token_credit(from_advantage=True)
def prefix_tree(batch: TokenBatch) -> Tensor:
    """credit = A / (responses of the group that share the prefix up to here): GRPO as a process reward (2509.21154).

    A process reward is one for a part of a response. A prefix that n responses share occurs n times in the loss;
    divided by n, it counts once.
    """
    sharing = same_prefix(batch).sum(2).view_as(batch.mask)  # (B, T)
    return batch.advantage[:, None] / sharing.clamp(min=1)


def same_prefix(batch: TokenBatch) -> Tensor:
    """1 at [q, i, j, t] where responses i and j to puzzle q begin with the same tokens 0 to t, else 0: (Q, G, G, T).

    They have also read the same replies before these: an environment may draw them. A response shares every prefix with
    itself. From the end of the shorter response on, the entry is 0.
    """
    numbers, reply = {(): 0}, torch.zeros_like(batch.tokens)  # of each text; (B, T) the one read before a token
    for row, before in zip(reply, batch.before):
        for t, said in before.items():
            row[t] = numbers.setdefault(tuple(said), len(numbers))
    tokens, reply, mask = (by_group(batch, x) for x in (batch.tokens, reply, batch.mask))  # (Q, G, T) each
    same = (tokens[:, :, None] == tokens[:, None]) & (reply[:, :, None] == reply[:, None])  # (Q, G, G, T)
    same &= mask[:, :, None] & mask[:, None]
    return same.int().cumprod(-1)


@token_credit(from_advantage=True)
def tempo(batch: TokenBatch) -> Tensor:
    """credit = A + V_{t+1} - V_t, V the mean A of the group's responses that share the prefix: TEMPO (2509.18314).

    In rewards: ((r - mean r) + v_{t+1} - v_t) / std r, with v the mean reward of those responses, as in the authors'
    code (whose std is the unbiased one). V changes only where responses part; elsewhere the credit is A.
    """
    same, A = same_prefix(batch), by_group(batch, batch.advantage)  # (Q, G, G, T), (Q, G)
    after = (same * A[:, None, :, None]).sum(2) / same.sum(2).clamp(min=1)  # (Q, G, T) V_{t+1}
    before = after.roll(1, dims=2)  # (Q, G, T) V_t
    before[..., 0] = A.mean(1, keepdim=True)  # all responses share the empty prefix
    return none(batch) + (after - before).view_as(batch.mask)


@token_credit
def optimal_baseline(batch: TokenBatch) -> Tensor:
    """credit = r_k - sum_i r_i W_it / sum_i W_it, W_it = sum_{j<=t} logit_grad_ij^2: least variance (2602.07078).

    k is the response itself, and logit_grad the norm of onehot - p. The sums run over the group's responses i that have
    not ended before t. Where only one is left, its baseline would be its own reward, so we take the group mean instead.
    (In the code of verl, an RL library, the credit there is 0.)
    """
    r, mask = by_group(batch, batch.reward), by_group(batch, batch.mask)  # (Q, G), (Q, G, T)
    W = by_group(batch, batch.logit_grad.square().cumsum(1)) * mask  # (Q, G, T)
    usable = (mask.sum(1, keepdim=True) > 1) & W.any(1, keepdim=True)  # (Q, 1, T)
    W = torch.where(usable, W, 1.0)  # (Q, G, T)
    difference = r[:, :, None] - r[:, None]  # (Q, G, G) r_k - r_i, whose mean is exactly 0 where all r_i are equal
    return (difference @ W.to(r) / W.sum(1, keepdim=True)).view_as(batch.mask)


@token_credit(from_advantage=True)
def gtpo(batch: TokenBatch, a1: float = 1.0, a2: float = 0.1, joint: bool = False) -> Tensor:
    """credit = z(a1 + a2 R (H / sum H)) if right, z(-a1 - a2 W (1/H / sum 1/H)) if wrong: pay for entropy (2508.04349).

    The sums run over the R right, or the W wrong, responses of the group that have not ended before t. As published,
    right and wrong tokens are z-scored separately, so the credit of each side averages 0: *the outcome is lost*, and
    all that remains is which token was more uncertain. joint=True z-scores both together. A group that is all right
    or all wrong gets plain GRPO.
    """
    # 1e-12: if all H are 0, their shares are equal.
    H, mask = by_group(batch, batch.entropy) + 1e-12, by_group(batch, batch.mask)  # (Q, G, T) each
    right = by_group(batch, batch.success)[..., None] > 0  # (Q, G, 1)
    up, down = mask & right, mask & ~right  # (Q, G, T) each
    certainty = down / (H + 1e-6)  # (Q, G, T) 1 / H, so that a wrong token is punished for being certain
    share_up = H * up / (H * up).sum(1, keepdim=True)  # (Q, G, T) NaN at a t without a right response
    share_down = certainty / certainty.sum(1, keepdim=True)  # (Q, G, T) NaN at a t without a wrong one
    if_right = a1 + a2 * share_up * up.sum(1, keepdim=True)  # (Q, G, T)
    if_wrong = -a1 - a2 * share_down * down.sum(1, keepdim=True)  # (Q, G, T)
    paid = torch.where(up, if_right, if_wrong)  # (Q, G, T) NaN at most on padding, which z_score leaves out
    credit = z_score(paid, mask) if joint else z_score(paid, up) + z_score(paid, down)
    mixed = (right.any(1) & ~right.all(1))[..., None]  # (Q, 1, 1)
    return torch.where(mixed, credit, by_group(batch, none(batch))).view_as(batch.mask)


@token_credit(needs=("reference",))
def dpo(batch: TokenBatch, beta: float = 0.1) -> Tensor:
    """credit = push on the best, -push on the worst response, push = beta sigmoid(-margin): online DPO (2305.18290).

    margin = beta * (log ratio to the reference model of the best - that of the worst). At the first update on a batch
    the loss then has DPO's gradient, summed over groups and divided by the tokens of the step (--loss_norm token) or by
    B * max_new_tokens (constant). Ties go to the lowest index; a group of equal rewards has no pair.
    """
    require(beta > 0, "--beta must be above 0")
    ratio = ((batch.logprob - batch.ask.reference_logprob) * batch.mask).sum(1)  # (B,) log ratio of the whole response
    rewards, ratios = by_group(batch, batch.reward), by_group(batch, ratio)  # (Q, G)
    best, worst = rewards.argmax(1, keepdim=True), rewards.argmin(1, keepdim=True)  # (Q, 1)
    margin = beta * (ratios.gather(1, best) - ratios.gather(1, worst))  # (Q, 1)
    push = beta * (-margin).sigmoid()  # (Q, 1)
    credit = torch.zeros_like(ratios).scatter(1, best, push).scatter_add(1, worst, -push)  # (Q, G) 0 if best is worst
    return credit.view(-1, 1) * batch.mask


def longer_weigh_more(mask: Tensor, s: Settings) -> Tensor:
    """f_i / N: longer responses of a group weigh more. f = G softmax(h), h = 1 + z / 9, z the z-score of the length.

    lambda-GRPO (2510.06870) has h^lambda and learns lambda, and 9 keeps h positive in its groups. Here lambda is 1.
    """
    length = mask.sum(1).view(-1, s.responses).to(torch.float32)  # (Q, G)
    z = (length - length.mean(1, keepdim=True)) / (length.std(1, correction=0, keepdim=True) + 1e-6)  # (Q, G)
    f = s.responses * (z / 9).softmax(1)  # (Q, G) on average 1; the 1 of h cancels
    return mask * f.view(-1, 1) / mask.sum()


LOSS_NORMS["lambda"] = longer_weigh_more
