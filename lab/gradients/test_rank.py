"""Ranks of gradients: spectra against numpy's SVD of matrices made by plain autograd, measures by their formulas."""
import dataclasses
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

import countdown_task
from countdown_task import Puzzle
from lab.gradients import rank as gradient_rank
from mitigations import ppo
from qwen2_model import causal_bias
from rollout import Policy
from tests.fixtures import FakeQueries, make_written
from tests.plain import flat_gradient, plain_logprobs, plain_rows

ASKED = [Puzzle((3, 4, 5), 8), Puzzle((11, 2, 7, 9), 30)]  # prompts of unequal length
TEXTS = (" Maybe 5 - 3 = 2.</think>\n<answer>4 * (5 - 3)</answer>", " Try 5 + 3 = 9.", "",
         " How about 4 + 3 = 7, 7 - 5 = 2.</think>\n<answer>4 + 3 - 5</answer>",
         " No.", " Maybe 11 + 2 = 13, 7 + 9 = 16.", " 11 * 2 = 22.</think>\n<answer>11 + 9 + 7</answer>", " 2 + 7 = 9")
SUCCESS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]  # the first two of the second puzzle are alike


@pytest.fixture
def batch(tokenizer, random_model, exact):
    """Two groups of four responses of very unequal length, with random tokens and the hidden states of plain_rows."""
    random_model.real_vocab, policy = 700, Policy(random_model, tokenizer, countdown_task)
    pieces = [[*re.findall(r" ?\w+|\W", text), ""] for text in TEXTS]
    batch = make_written(pieces, [0.0] * 8, [0] * 4 + [1] * 4, success=torch.tensor(SUCCESS),
                         reward=torch.rand(8), puzzles=ASKED)
    batch.tokens = torch.randint(700, batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
    rows, pad, P = plain_rows([policy.prompt(ASKED[g]) for g in batch.group.tolist()], batch.tokens)
    positions = torch.arange(rows.shape[1]) - pad[:, None]
    with torch.no_grad():
        states = random_model.hidden(rows, positions.clamp(min=0), causal_bias(positions >= 0))[:, P - 1 : -1]
    values = torch.rand(batch.mask.shape) * batch.mask
    batch.ask = FakeQueries(policy=policy, prompts=[policy.prompt(puzzle) for puzzle in ASKED], hidden=states,
                            head={"critic": values}.__getitem__)
    return gradient_rank.by_success(batch)


def plain_gradients(model, prompt, batch, rows, credit):
    """(R, P): the gradient of sum credit * log pi of each of the responses `rows` to a prompt, in the plain layout."""
    logprob = plain_logprobs(model, [prompt] * len(credit), batch.tokens[rows], batch.mask[rows])
    return torch.stack([flat_gradient(model, total) for total in (credit * logprob).sum(1)])


def expected_matrices(model, batch, rows, credit, each):
    """Every matrix of a group with credit (R, T) and gradients `each` (R, P), made explicitly."""
    right, states, tokens = batch.success[rows] > 0, batch.ask.hidden[rows], []
    for i, t in batch.mask[rows].nonzero().tolist():
        error = -(model.output_weight[:700] @ states[i, t]).softmax(0)
        error[batch.tokens[rows][i, t]] += 1
        tokens.append((credit[i, t] * torch.outer(error, states[i, t])).flatten().detach())
    found = {gradient_rank.RESPONSES: [each], gradient_rank.TOKENS: [torch.stack(tokens)],
             gradient_rank.SIDES: [torch.stack((each[right].sum(0), each[~right].sum(0)))]}
    parts = each.sum(0).split([weight.numel() for weight in model.parameters()])
    for (name, weight), part in zip(model.named_parameters(), parts):
        if weight.dim() == 2:
            found.setdefault(re.search(r"(\w+)\.weight", name)[1], []).append(part.view_as(weight))
    return found


def test_spectra_are_of_the_first_responses_to_each_puzzle(batch, random_model, monkeypatch):
    """Guards against another puzzle's prompt or responses, groups that are all alike, and a gradient of another matrix
    or credit."""
    monkeypatch.setattr(gradient_rank, "SIZES", (2, 4))
    monkeypatch.setattr(gradient_rank, "CONTROLS_AT", 4)
    monkeypatch.setattr(gradient_rank, "controls", lambda group, rng: {"imitation": group.mask.double()})
    found = gradient_rank.group_spectra(batch, 0)
    wanted = {(0, 4, "imitation"): batch.mask[:4], (1, 4, "imitation"): batch.mask[4:]}
    for q, R in ((0, 2), (0, 4), (1, 4)):  # the first two of puzzle 1 are both wrong
        right = batch.success[4 * q : 4 * q + R]
        A = (right - right.mean()) / (right.std(correction=0) + 1e-4)
        wanted[q, R, "GRPO"] = A[:, None] * batch.mask[4 * q : 4 * q + R]
    assert {(q, *key[:2]) for key, puzzles in found.items() for q in puzzles} == set(wanted)
    for (q, R, variant), credit in wanted.items():
        rows = slice(4 * q, 4 * q + R)
        each = plain_gradients(random_model, batch.ask.prompts[q], batch, rows, credit)
        expected = expected_matrices(random_model, batch, rows, credit, each)
        here = {matrix: puzzles[q] for (*key, matrix), puzzles in found.items() if key == [R, variant] and q in puzzles}
        assert set(here) == (set(expected) if variant == "GRPO" else {gradient_rank.SIDES, gradient_rank.RESPONSES})
        for matrix, layers in here.items():
            for s, X in zip(layers, expected[matrix], strict=True):
                true = np.linalg.svd(X.numpy(), compute_uv=False)
                np.testing.assert_allclose(s, true, rtol=1e-6, atol=3e-6 * true[0], err_msg=matrix)


def test_a_group_is_the_first_responses_to_its_puzzle(batch):
    """Guards against advantages over the whole group, rewards other than right or wrong, and fields of others."""
    group = gradient_rank.group_of(batch, 1, 3)
    assert group.text == tuple(TEXTS[4:7])
    assert group.success.tolist() == group.reward.tolist() == SUCCESS[4:7]
    assert group.advantage.tolist() == pytest.approx([-0.70696, -0.70696, 1.41391], abs=1e-4)
    assert (group.group.tolist(), group.puzzles) == ([0, 0, 0], (Puzzle((11, 2, 7, 9), 30),))
    assert torch.equal(group.ask.hidden, batch.ask.hidden[4:7])
    assert torch.equal(group.ask.head("critic"), batch.ask.head("critic")[4:7])
    for name in ("tokens", "mask", "role", "format"):
        assert torch.equal(getattr(group, name), getattr(batch, name)[4:7])


def test_controls_by_hand(batch):
    """Guards against a shuffle within responses, or that moves nothing; weights other than Exponential(1); a baseline
    of other responses or rewards; and a critic that expects another reward."""
    batch.format = torch.tensor([1.0, 0.1, 0, 1, 0, 0, 1, 0])
    group, rng, right, weights = gradient_rank.group_of(batch, 0, 4), np.random.default_rng(0), Counter(), []
    mask = group.mask
    for _ in range(300):
        found = gradient_rank.controls(group, rng)
        right[tuple((found["shuffled advantages"][:, 0] > 0).tolist())] += 1
        weights.append((found["random credit"] / group.advantage[:, None])[mask])
    assert len(right) == 6  # ways to choose two of four, 50 times each
    assert min(right.values()) > 25
    w = torch.cat(weights)
    assert (w.mean().item(), w.std().item()) == pytest.approx((1, 1), abs=0.05)
    assert (w > 1).double().mean().item() == pytest.approx(1 / math.e, abs=0.02)
    assert torch.equal(found["shuffled advantages"], found["shuffled advantages"][:, :1] * mask)
    assert torch.equal(found["random credit"] != 0, mask)
    of_others = torch.tensor([1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3])[:, None] * mask  # right, wrong, wrong, right
    torch.testing.assert_close(found["RLOO"], of_others.to(found["RLOO"]))
    assert torch.equal(found["no baseline: credit r"], torch.tensor([1.0, 0, 0, 1])[:, None] * mask)
    trained = torch.tensor([1.1, 0.01, 0, 1.1])  # the reward of training
    torch.testing.assert_close(found["ppo"], ppo(dataclasses.replace(group, reward=trained)))
    assert not torch.allclose(found["ppo"], ppo(group))


@pytest.mark.parametrize(
    "singular, effective, stable",
    [([2.0, 2.0, 2.0], 3, 3),
     ([1.0, 5.0, 0.0, 3.0], 9 / (5 ** (5 / 9) * 3 ** (3 / 9)), 35 / 25),  # squares: 25 + 9 + 1
     ([0.0, 0.0], math.nan, math.nan)])
def test_measures_of_rank_by_hand(singular, effective, stable):
    """Guards against another logarithm, squares for values, and values that are not sorted."""
    s = np.array(singular)
    assert gradient_rank.effective_rank(s) == pytest.approx(effective, nan_ok=True)
    assert gradient_rank.stable_rank(s) == pytest.approx(stable, nan_ok=True)


def test_the_spectrum_of_a_gram_matrix():
    """Guards against eigenvalues for singular values, another order, and rounding that counts as rank."""
    rng, singular = np.random.default_rng(0), np.array([5.0, 3.0, 0.2, 1e-4])
    U, V = (np.linalg.qr(rng.normal(size=(n, 4)))[0] for n in (9, 30))
    X = U * singular @ V.T
    found = gradient_rank.gram_spectrum(gradient_rank.products(torch.tensor(X), torch.tensor(X)))
    assert found[:4] == pytest.approx(singular, rel=1e-6)
    assert found[4:].tolist() == [0.0] * 5
    assert not gradient_rank.gram_spectrum(np.zeros((3, 3))).any()


def test_the_tables_of_ranks_by_hand(monkeypatch):
    """Guards against layers counted as puzzles, and means over all sizes, kinds of credit or matrices."""
    monkeypatch.setattr(gradient_rank, "SIZES", (2, 8))
    sides, responses = gradient_rank.SIDES, gradient_rank.RESPONSES
    ranks = {(2, "GRPO", sides): [[1]], (2, "GRPO", "q_proj"): [[0]],  # by puzzle and layer
             (8, "GRPO", sides): [[1], [2]], (8, "GRPO", responses): [[2], [5]],
             (8, "GRPO", "q_proj"): [[1, 3], [4, 4]],
             (8, "random", sides): [[2], [2]], (8, "random", responses): [[6], [6]]}
    found = {key: {q: [np.eye(8)[:rank].sum(0) for rank in layers] for q, layers in enumerate(puzzles)}
             for key, puzzles in ranks.items()}  # as many equal singular values as the rank says
    by_size, by_variant = gradient_rank.tables_rank(found)
    # With two puzzles 1 apart the interval is 12.7 / 2, with one degree of freedom.
    assert by_size.rows == [[sides, "1.0", "1.5 ± 6.4", "1.5 ± 6.4"],
                            ["q_proj", "", "3.0 ± 12.7", "3.0 ± 12.7"],
                            [responses, "", "3.5 ± 19.1", "3.5 ± 19.1"]]
    assert by_variant.rows == [["GRPO", "1.5 ± 6.4", "3.5 ± 19.1", "0.0 ± 0.0"],
                               ["random", "2.0 ± 0.0", "6.0 ± 0.0", "2.5 ± 19.1"]]  # 6 - 2, 6 - 5
    assert "up to 2 puzzles" in by_size.note
