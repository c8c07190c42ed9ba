"""KTAE: which token ids are associated with success in their group, by the statistics of 2x2 tables (2505.16826).

Run it:  python train.py --mitigation ktae
"""
import functools
import math

import torch
from torch import Tensor

from methods.credit_function import token_credit
from methods.values import is_last_token
from mitigations import none
from rollout import TokenBatch


@token_credit(from_advantage=True)
def ktae(batch: TokenBatch) -> Tensor:
    """credit = A + a score of the token id: how much more often responses that contain it are right (2505.16826).

    The score is 0 for the end token, and in a group that is all right or all wrong.
    """
    credit, is_end = none(batch), is_last_token(batch) & batch.ended[:, None]  # (B, T) each
    for group in batch.group.unique():
        rows = batch.group == group  # (B,)
        right, mask = batch.success[rows] > 0, batch.mask[rows]  # (G,), (G, T)
        if right.any() and not right.all():
            score = torch.zeros_like(credit[rows])  # (G, T)
            score[mask] = key_token_scores(batch.tokens[rows], mask, right).to(score)
            credit[rows] += score.masked_fill(is_end[rows], 0.0)
    return credit


def key_token_scores(tokens: Tensor, mask: Tensor, right: Tensor) -> Tensor:
    """KTAE's score (N,) in [-1, 1] of each of the N tokens of one group: tokens (G, T), mask (G, T), right (G,).

    A token id occurs in a right and b wrong responses. score = 2 sigmoid((F + IG) / 2 * x) - 1 with F = exp(-2 p) of
    Fisher's exact test (0 where p is 1), IG the information gain in bits. f is the frequency of the id among the right
    and among the wrong responses, damped as in BM25, so that repeats count ever less. The direction is x = Cohen's h (a
    difference of two proportions) + f_right / f_wrong - f_wrong / f_right. All of these are the paper's choices.
    """
    ids, index = tokens[mask].unique(return_inverse=True)  # (U,), (N,)
    counts = ((tokens[:, :, None] == ids) & mask[:, :, None]).sum(1).double()  # (G, U) of each id in each response
    a, b = ((counts[side] > 0).sum(0) for side in (right, ~right))  # (U,), (U,)
    R, W = int(right.sum()), int((~right).sum())
    p = fisher_p(R, W).to(tokens.device)[a, b]  # (U,)
    strength = torch.where(p < 1 - 1e-9, (-2 * p).exp(), 0.0) + information_gain(a, b, R, W)  # (U,) F + IG
    occurrences = torch.stack([counts[side].sum(0) for side in (right, ~right)])  # (2, U)
    length = occurrences.sum(1, keepdim=True)  # (2, 1) tokens on each side
    frequency = occurrences / length  # (2, U)
    # BM25: frequency (k + 1) / (frequency + k (1 - c + c length / mean length)), with the authors' k = 2, c = 1/2.
    f = frequency * 3 / (frequency + (1 + length / length.mean()))  # (2, U)
    h = 2 * (a / R).sqrt().asin() - 2 * (b / W).sqrt().asin()  # (U,) Cohen's h; the authors' code omits both 2s
    x = h + f[0] / (f[1] + 1e-5) - f[1] / (f[0] + 1e-5)  # (U,)
    return (2 * (strength / 2 * x).sigmoid() - 1)[index]


@functools.cache
def fisher_p(R: int, W: int) -> Tensor:
    """Two-sided p (R + 1, W + 1) of Fisher's exact test: a of R right and b of W wrong responses contain a token.

    p is the probability of all outcomes with the same n = a + b that are no likelier than the one observed.
    """
    p = torch.zeros(R + 1, W + 1, dtype=torch.float64)
    for n in range(R + W + 1):  # responses that contain it: the margin that the test holds fixed
        a = range(max(0, n - W), min(R, n) + 1)
        ways = [math.comb(R, i) * math.comb(W, n - i) for i in a]
        probability = torch.tensor(ways, dtype=torch.float64) / math.comb(R + W, n)  # (len(a),)
        as_rare = probability <= probability[:, None] * (1 + 1e-9)  # (len(a), len(a)), up to rounding
        p[list(a), [n - i for i in a]] = (probability * as_rare).sum(1)
    return p


def information_gain(a: Tensor, b: Tensor, R: int, W: int) -> Tensor:
    """Information gain (U,), in bits, about being right from presence in a of R right and b of W wrong responses."""
    def entropy(x: Tensor, y: Tensor) -> Tensor:  # of the split into x and y, times x + y
        total = (x + y).clamp(min=1)
        return -(torch.xlogy(x, x / total) + torch.xlogy(y, y / total)) / math.log(2)
    a, b = a.double(), b.double()
    whole = entropy(a.new_tensor(R), a.new_tensor(W))  # ()
    return (whole - entropy(a, b) - entropy(R - a, W - b)) / (R + W)
