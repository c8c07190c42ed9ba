"""Ranks of gradients: spectra against numpy's SVD of matrices made by plain autograd, measures by their formulas.

Run it:  python -m pytest tests/test_gradient_rank.py
"""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import FakeQueries, make_written
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plain import plain_logprobs, plain_rows

from countdown_task import Puzzle
from experiments import gradient_rank
from mitigations import reward_decomposition
from qwen2_model import causal_bias

ASKED = [Puzzle((3, 4, 5), 8), Puzzle((11, 2, 7, 9), 30)]  # prompts of unequal length
TEXTS = (
    " Maybe 5 - 3 = 2.</think>\n<answer>4 * (5 - 3)</answer>",
    " Try 5 + 3 = 9.",
    "",
    " How about 4 + 3 = 7, 7 - 5 = 2.</think>\n<answer>4 + 3 - 5</answer>",
    " No.",
    " Maybe 11 + 2 = 13, 7 + 9 = 16.",
    " So 11 * 2 = 22, 7 + 22 = 30.</think>\n<answer>11 + 9 + 7</answer>",
    " 2 + 7 = 9",
)
SUCCESS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]  # the first two of the second puzzle are alike


def written(codec):
    """Two groups of four responses of very unequal length, with tokens drawn at random."""
    pieces = [[*re.findall(r"</?\w+>| ?\w+|\s|[^\w\s]", text), ""] for text in TEXTS]
    numbers, target = map(list, zip(*ASKED))
    facts = dict(success=torch.tensor(SUCCESS), numbers=numbers, target=target, format=torch.linspace(0, 1, 8))
    batch = make_written(pieces, [0.0] * 8, [0] * 4 + [1] * 4, **facts)
    random = torch.Generator().manual_seed(0)
    batch.tokens = torch.randint(codec.size, batch.mask.shape, generator=random) * batch.mask
    return gradient_rank.by_success(replace(batch, reward=batch.success + 0.1 * batch.format))


@pytest.fixture
def batch(codec, random_model, exact):
    """Those responses, with the model's hidden states by the plain layout."""
    batch = written(codec)
    rows, pad, P = plain_rows([codec.prompt(ASKED[g]) for g in batch.group.tolist()], batch.tokens)
    positions = torch.arange(rows.shape[1]) - pad[:, None]
    with torch.no_grad():
        states = random_model.hidden(rows, positions.clamp(min=0), causal_bias(positions >= 0))[:, P - 1 : -1]
    return replace(batch, ask=FakeQueries(hidden=states))


def plain_gradients(model, codec, batch, rows, credit):
    """(R, P): the gradient of sum credit * log pi of each of the responses `rows`, in the plain layout."""
    prompts = [codec.prompt(ASKED[g]) for g in batch.group[rows].tolist()]
    logprob = plain_logprobs(model, prompts, batch.tokens[rows], batch.mask[rows])
    parts = [torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
             for total in (credit * logprob).sum(1)]  # fmt: skip
    return torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])


def expected_matrices(model, batch, rows, credit, each):
    """Every matrix of a group with credit (R, T) and gradients `each` (R, P), made explicitly."""
    right, states, tokens = batch.success[rows] > 0, batch.ask.hidden[rows], []
    for i, t in batch.mask[rows].nonzero().tolist():
        error = -(model.output_weight[: model.real_vocab] @ states[i, t]).softmax(0)
        error[batch.tokens[rows][i, t]] += 1
        tokens.append((credit[i, t] * torch.outer(error, states[i, t])).flatten().detach())
    found = {"rollouts x parameters": [each], "tokens x (vocabulary · hidden)": [torch.stack(tokens)],
             "right, wrong x parameters": [torch.stack((each[right].sum(0), each[~right].sum(0)))]}  # fmt: skip
    start, total = 0, each.sum(0)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            part = total[start : start + weight.numel()].view_as(weight)
            found.setdefault(re.search(r"(\w+)\.weight", name)[1], []).append(part)
        start += weight.numel()
    return found


def check_spectra(found, expected):
    """Spectra by matrix against numpy's SVD."""
    assert set(found) == set(expected)
    for matrix, spectra in found.items():
        for s, X in zip(spectra, expected[matrix], strict=True):
            true = np.linalg.svd(np.asarray(X), compute_uv=False)
            size = max(len(s), len(true))
            padded = [np.pad(np.asarray(x), (0, size - len(x))) for x in (s, true)]
            np.testing.assert_allclose(*padded, rtol=1e-6, atol=3e-6 * true[0], err_msg=matrix)


def test_ranks_are_of_the_first_answers_to_each_question(batch, random_model, codec, monkeypatch):
    """Guards against another puzzle's prompt or answers, a group size that takes other answers, groups that are all
    alike, a gradient of another matrix or credit, and measures that are not those of the spectrum beside them."""
    for name, value in {"SIZES": (2, 4), "CONTROLS_AT": 4, "TRUTH_PUZZLES": 1}.items():
        monkeypatch.setattr(gradient_rank, name, value)
    made, controls = [], gradient_rank.controls

    def recorded(group, a_star, rng):
        credits = controls(group, a_star, rng)
        made.append({name: credits[name].double() for name in credits if name in ("random credit", "A*")})
        return made[-1]

    monkeypatch.setattr(gradient_rank, "controls", recorded)
    random_model.real_vocab = 700
    batch.tokens %= 700
    truth = torch.randn(batch.mask.shape) * batch.mask
    found = gradient_rank.rank_rows(random_model, codec, ASKED, batch, truth, 0)
    assert [list(credits) for credits in made] == [["random credit", "A*"], ["random credit"]]
    assert torch.equal(made[0]["A*"], truth[:4])
    wanted = {(q, 4, name): credit for q, credits in enumerate(made) for name, credit in credits.items()}
    for q, R in ((0, 2), (0, 4), (1, 4)):  # the first two of puzzle 1 are both wrong
        right = batch.success[4 * q : 4 * q + R]
        A = (right - right.mean()) / (right.std(correction=0) + 1e-4)
        wanted[q, R, "GRPO"] = A[:, None] * batch.mask[4 * q : 4 * q + R]
    assert {(row["puzzle"], row["R"], row["variant"]) for row in found} == set(wanted)
    for (q, R, variant), credit in wanted.items():
        rows, spectra = slice(4 * q, 4 * q + R), {}
        for row in found:
            if (row["puzzle"], row["R"], row["variant"]) == (q, R, variant):
                spectra.setdefault(row["matrix"], []).append(row["spectrum"])
        each = plain_gradients(random_model, codec, batch, rows, credit)
        check_spectra(spectra, expected_matrices(random_model, batch, rows, credit, each))
    for row in found:
        s = row["spectrum"]
        assert row["effective"] == gradient_rank.effective_rank(s)
        assert row["stable"] == gradient_rank.stable_rank(s)
        assert [row[f"{e}%"] for e in (90, 95, 99)] == [gradient_rank.components(s, e / 100) for e in (90, 95, 99)]


def left_over(target, *directions):
    """How much of a vector its best combination of directions misses, as a share of its length."""
    A = torch.stack(directions, dim=1)
    return ((target - A @ torch.linalg.lstsq(A, target[:, None]).solution[:, 0]).norm() / target.norm()).item()


def test_with_right_or_wrong_a_group_s_gradient_is_made_of_two(batch, random_model, codec):
    """Guards against rewards of more levels: the gradient is A+ S+ + A- S-, and that of random credit is not."""
    rows, group = slice(0, 4), gradient_rank.group_of(batch, 0, 4)
    each = plain_gradients(random_model, codec, batch, rows, group.mask.double())
    sides = [each[group.success == side].sum(0) for side in (1, 0)]
    credits = gradient_rank.controls(group, None, np.random.default_rng(0))
    credits["GRPO"] = group.advantage[:, None] * group.mask
    missed = {name: left_over(plain_gradients(random_model, codec, batch, rows, credit).sum(0), *sides)
              for name, credit in credits.items()}  # fmt: skip
    assert missed["GRPO"] < 1e-7
    assert missed["imitation: credit 1"] < 1e-7
    assert missed["random credit"] > 0.1


def test_a_group_is_the_first_responses_to_its_question(codec):
    """Guards against advantages over the whole group, and fields of other responses."""
    batch = replace(written(codec), ask=FakeQueries(hidden=torch.arange(8.0)[:, None, None]))
    group = gradient_rank.group_of(batch, 1, 3)
    assert group.text == list(TEXTS[4:7])
    assert group.success.tolist() == group.reward.tolist() == SUCCESS[4:7]
    assert group.advantage.tolist() == pytest.approx([-0.70696, -0.70696, 1.41391], abs=1e-4)
    assert (group.group.tolist(), group.numbers, group.target) == ([0, 0, 0], [(11, 2, 7, 9)], [30])
    assert group.ask.hidden.flatten().tolist() == [4, 5, 6]
    for name in ("tokens", "mask", "role", "format"):
        assert torch.equal(getattr(group, name), getattr(batch, name)[4:7])


def test_controls_by_hand(codec):
    """Guards against a shuffle within responses, or that moves nothing, and weights other than Exponential(1)."""
    batch = replace(written(codec), ask=FakeQueries(hidden=torch.zeros(8)))
    group, rng, firsts, weights = gradient_rank.group_of(batch, 0, 4), np.random.default_rng(0), [], []
    A, mask, truth = group.advantage[:, None], group.mask, torch.randn(batch.mask[:4].shape)
    for _ in range(300):
        found = gradient_rank.controls(group, truth, rng)
        firsts.append(tuple((found["shuffled advantages"][:, 0] > 0).tolist()))
        weights.append((found["random credit"] / A)[mask])
    counts = [firsts.count(x) for x in set(firsts)]  # 6 ways to choose two of four, 50 times each
    assert len(counts) == 6 and min(counts) > 25 and max(counts) < 80
    w = torch.cat(weights).double().sort().values
    distance = ((torch.arange(len(w)) + 0.5) / len(w) - (1 - (-w).exp())).abs().max()
    assert distance < 2 / len(w) ** 0.5  # Kolmogorov and Smirnov
    assert torch.equal(found["shuffled advantages"], found["shuffled advantages"][:, :1] * mask)
    assert torch.equal(found["random credit"] != 0, mask)
    assert torch.equal(found["imitation: credit 1"], mask.float())
    assert torch.equal(found["a reward for each calculation"], reward_decomposition(group, stepwise=True))
    assert torch.equal(found["A*"], truth)
    assert "A*" not in gradient_rank.controls(group, None, rng)


# ------------------------------------------------------------------------------------------ measures and tables


@given(st.lists(st.floats(0, 1e3).filter(lambda s: s == 0 or s > 1e-3), min_size=1, max_size=12), st.randoms())
@settings(max_examples=100, deadline=None)
def test_measures_of_rank_by_their_formulas(singular, random):
    """Guards against another logarithm, squares for values, values that are not sorted, and a share by one too few."""
    random.shuffle(singular)
    s = np.array(singular)
    if not s.any():
        assert math.isnan(gradient_rank.effective_rank(s))
        assert math.isnan(gradient_rank.stable_rank(s))
        return
    shares = [v / sum(singular) for v in singular if v > 0]
    assert gradient_rank.effective_rank(s) == pytest.approx(math.prod(p**-p for p in shares))
    assert gradient_rank.stable_rank(s) == pytest.approx(sum(v * v for v in singular) / max(singular) ** 2)
    for energy in (0.9, 0.95, 0.99):
        largest, wanted, k = sorted(singular, reverse=True), energy * sum(v * v for v in singular), 0
        while sum(v * v for v in largest[:k]) < wanted * (1 - 1e-9):
            k += 1
        assert gradient_rank.components(s, energy) == k


def test_components_where_rounding_decides():
    """Guards against a share that rounding pushes over the edge: 90% of 10 k equal values are 9 k."""
    for k, v in itertools.product(range(1, 20), (0.1, 0.3, 0.7)):
        assert gradient_rank.components(np.full(10 * k, v), 0.9) == 9 * k


def test_the_spectrum_of_a_gram_matrix():
    """Guards against eigenvalues for singular values, another order, and rounding that counts as rank."""
    rng, singular = np.random.default_rng(0), np.array([5.0, 3.0, 0.2, 1e-4])
    U, V = (np.linalg.qr(rng.normal(size=(n, 4)))[0] for n in (9, 30))
    X = U * singular @ V.T
    found = gradient_rank.gram_spectrum(X @ X.T)
    assert found[:4] == pytest.approx(singular, rel=1e-6)
    assert len(found) == 9
    assert not found[4:].any()
    assert not gradient_rank.gram_spectrum(np.zeros((3, 3))).any()
    assert gradient_rank.products(torch.tensor(X[:2]), torch.tensor(X)) == pytest.approx(X[:2] @ X.T)


def test_the_tables_of_ranks_by_hand(monkeypatch):
    """Guards against layers counted as puzzles, and means over all sizes, kinds of credit or matrices."""
    monkeypatch.setattr(gradient_rank, "SIZES", (2, 8))
    rng, found = np.random.default_rng(0), []
    for q, R, variant in itertools.product((0, 1, 2), (2, 8), ("GRPO", "imitation: credit 1")):
        for matrix in ("rollouts x parameters", "q_proj", "q_proj") if (q, R) != (1, 2) else ():  # that one: all alike
            numbers = dict(zip(("effective", "stable", "90%", "95%", "99%"), rng.exponential(size=5)))
            found.append({"puzzle": q, "R": R, "variant": variant, "matrix": matrix, **numbers})
    found[1]["effective"] = float("nan")
    by_size, by_measure, by_variant = gradient_rank.tables_rank(found)

    def expected(measure, matrix, variant, R):
        each = []
        for q in (0, 1, 2):
            chosen = [r for r in found if (r["puzzle"], r["matrix"], r["variant"], r["R"]) == (q, matrix, variant, R)]
            values = [r[measure] for r in chosen if not math.isnan(r[measure])]
            each += [sum(values) / len(values)] if values else []
        error = {2: 12.706, 3: 4.303}[len(each)] * np.std(each, ddof=1) / len(each) ** 0.5  # Student's t
        return f"{np.mean(each):.1f} ± {error:.1f}"

    for row in by_size.rows:
        assert row[1:] == [expected("effective", row[0], "GRPO", R) for R in (2, 8)]
    for row in by_measure.rows:
        assert row[1:] == [expected(name, row[0], "GRPO", 8) for name in ("effective", "stable", "90%", "95%", "99%")]
    for row in by_variant.rows:
        assert row[1:] == [expected("effective", m, row[0], 8) for m in by_variant.header[1:]]
    assert [row[0] for row in by_size.rows] == [row[0] for row in by_measure.rows] == by_variant.header[1:]
