"""Ranks of gradients: spectra against numpy's SVD of matrices made by plain autograd, measures by their formulas."""
import dataclasses
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

from lab.gradients import rank
from lab.gradients.rank import RESPONSES, SIDES
from lab.gradients.test_noise import draw
from mitigations import ppo
from qwen2_model import to_checkpoint
from tests.plain import flat_gradient, plain_logprobs


@pytest.fixture
def batch(tokenizer, random_model, exact):
    """Two groups of four responses of unequal length; the first two of the second are alike."""
    batch = draw(random_model, tokenizer, (9, 3, 1, 7, 2, 8, 4, 5))
    batch.success = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
    return rank.by_success(batch)


def expected_matrices(model, batch, q, rows, credit):
    """Every matrix of the responses `rows` to puzzle q with credit (R, T), made explicitly by plain autograd."""
    logprob = plain_logprobs(model, [batch.prompts[q]] * len(credit), batch.tokens[rows], batch.mask[rows])
    each = torch.stack([flat_gradient(model, total) for total in (credit * logprob).sum(1)])  # (R, P)
    right = batch.success[rows] > 0
    found = {RESPONSES: [each], SIDES: [torch.stack((each[right].sum(0), each[~right].sum(0)))]}
    parts = each.sum(0).split([weight.numel() for weight in model.parameters()])
    gradients = {name: part.view_as(weight) for (name, weight), part in zip(model.named_parameters(), parts)}
    for name, gradient in to_checkpoint(gradients, model.config).items():
        if gradient.dim() == 2:
            found.setdefault(re.search(r"(\w+)\.weight", name)[1], []).append(gradient)
    return found


def test_spectra_are_of_the_first_responses_to_each_puzzle(batch, random_model, monkeypatch):
    """Guards against another puzzle's prompt or responses, advantages over the whole group, groups that are all alike,
    and a gradient of another matrix or credit."""
    monkeypatch.setattr(rank, "SIZES", (2, 4))
    monkeypatch.setattr(rank, "CONTROLS_AT", 4)
    monkeypatch.setattr(rank, "controls", lambda group, rng: {"imitation": group.mask.double()})
    monkeypatch.setattr(rank, "methods", lambda group: {"random": weights[: len(group.mask)] * group.mask})
    weights = torch.rand(4, batch.mask.shape[1])
    found = rank.group_spectra(batch)
    wanted = {(q, 4, name): credit * batch.mask[4 * q : 4 * q + 4] for q in (0, 1)
              for name, credit in (("imitation", 1.0), ("random", weights))}
    for q, R in ((0, 2), (0, 4), (1, 4)):  # the first two of puzzle 1 are both wrong
        right = batch.success[4 * q : 4 * q + R]
        A = (right - right.mean()) / (right.std(correction=0) + 1e-4)
        wanted[q, R, "GRPO"] = A[:, None] * batch.mask[4 * q : 4 * q + R]
    assert {(q, *key[:2]) for key, puzzles in found.items() for q in puzzles} == set(wanted)
    for (q, R, variant), credit in wanted.items():
        expected = expected_matrices(random_model, batch, q, slice(4 * q, 4 * q + R), credit)
        here = {matrix: puzzles[q] for (*key, matrix), puzzles in found.items() if key == [R, variant] and q in puzzles}
        assert set(here) == set(expected)
        for matrix, layers in here.items():
            for s, X in zip(layers, expected[matrix], strict=True):
                true = np.linalg.svd(X.numpy(), compute_uv=False)
                np.testing.assert_allclose(s, true, rtol=1e-6, atol=3e-6 * true[0], err_msg=matrix)


def test_controls_by_hand(batch):
    """Guards against a shuffle within responses, or that moves nothing; weights other than Exponential(1); a baseline
    where there is none; and a critic that expects another reward or saw other responses."""
    batch.format = torch.tensor([1.0, 0, 1, 0.1, 1.0, 0.1, 0, 1])
    group, rng, right, weights = rank.responses_of(batch, range(4, 8)), np.random.default_rng(0), Counter(), []
    mask = group.mask
    for _ in range(300):
        found = rank.controls(group, rng) | rank.methods(group)
        right[tuple((found["shuffled advantages"][:, 0] > 0).tolist())] += 1
        weights.append((found["random credit"] / group.advantage[:, None])[mask])
    assert len(right) == 4 and min(right.values()) > 50  # each of four is right 75 times
    w = torch.cat(weights)
    assert (w.mean().item(), w.std().item()) == pytest.approx((1, 1), abs=0.05)
    assert (w > 1).double().mean().item() == pytest.approx(1 / math.e, abs=0.02)
    assert torch.equal(found["shuffled advantages"], found["shuffled advantages"][:, :1] * mask)
    assert torch.equal(found["random credit"] != 0, mask)
    assert torch.equal(found["no baseline: credit r"], torch.tensor([0, 0, 1.0, 0])[:, None] * mask)
    reward = torch.tensor([0, 0, 0, 0, 0.1, 0.01, 1.0, 0.1])  # of training, of the second puzzle
    last = dataclasses.replace(batch, reward=reward, mask=batch.mask & (batch.group == 1)[:, None])
    torch.testing.assert_close(found["ppo"], ppo(last)[4:])
    assert not torch.allclose(found["ppo"], ppo(group))


def test_measures_of_rank_by_hand():
    """Guards against another logarithm, squares for values or values for squares, and values that are not sorted."""
    for s, *expected in (([2.0, 2, 2], 3, 3, 3, 3), ([0.0, 0], *[math.nan] * 4),
                         ([1.0, 5, 0, 3], 9 / (5 ** (5 / 9) * 3 ** (3 / 9)), 35 / 25, 2, 3)):  # squares: 25 + 9 + 1
        assert [measure(np.array(s)) for measure in rank.MEASURES.values()] == pytest.approx(expected, nan_ok=True)


def test_the_spectrum_of_a_gram_matrix():
    """Guards against eigenvalues for singular values, another order, and rounding that counts as rank."""
    rng, singular = np.random.default_rng(0), np.array([5.0, 3.0, 0.2, 1e-4])
    U, V = (np.linalg.qr(rng.normal(size=(n, 4)))[0] for n in (9, 30))
    X = torch.tensor(U * singular @ V.T)
    assert rank.gram_spectrum(rank.products(X, X)) == pytest.approx([*singular, *[0] * 5], rel=1e-6, abs=0)
    assert not rank.gram_spectrum(np.zeros((3, 3))).any()


def test_the_tables_of_ranks_by_hand():
    """Guards against layers counted as puzzles, means over all sizes, kinds of credit or matrices, and a difference
    between unlike puzzles."""
    ranks = {(2, "GRPO", SIDES): [[1]], (2, "GRPO", "q_proj"): [[0]],  # by puzzle and layer
             (8, "GRPO", SIDES): [[1], [2]], (8, "GRPO", RESPONSES): [[2], [5]],
             (8, "GRPO", "q_proj"): [[1, 3], [4, 4]],
             (8, "random", SIDES): [[2], [2]], (8, "random", RESPONSES): [[6], [6]]}
    found = {key: {q: [np.eye(8)[:n].sum(0) for n in layers] for q, layers in enumerate(puzzles)}
             for key, puzzles in ranks.items()}  # as many equal singular values as the rank says
    *by_size, by_credit, also = rank.tables_rank(rank.rank_rows(found), "")
    assert by_size[0].header == ["matrix", "credit", "groups", "R = 2", "R = 8", "R = 8 minus R = 2"]
    for table in by_size:  # of equal values every measure is their number
        # With two puzzles 1 apart the interval is 12.7 / 2, with one degree of freedom.
        assert table.rows == [[SIDES, "GRPO", "1, 2", "1.0", "1.5 ± 6.4", "0.0"],
                              ["q_proj", "GRPO", "0, 2", "", "3.0 ± 12.7", ""],
                              [RESPONSES, "GRPO", "0, 2", "", "3.5 ± 19.1", ""]]
    assert by_credit.header[3:] == ["GRPO", "this credit", "this credit minus GRPO"]
    assert also.rows == by_credit.rows == [
        [SIDES, "random", "2, 2", "1.5 ± 6.4", "2.0 ± 0.0", "0.5 ± 6.4"],  # 2 - 1, 2 - 2
        [RESPONSES, "random", "2, 2", "3.5 ± 19.1", "6.0 ± 0.0", "2.5 ± 19.1"],  # 6 - 2, 6 - 5
        ["q_proj", "random", "2, 0", "3.0 ± 12.7", "", ""]]
