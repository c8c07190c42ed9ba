"""Gradient anatomy: what experiments/gradients.py measures, against plain autograd, numpy's SVD, loops, known truths.

Run it:  python -m pytest tests/test_gradients.py
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_batch, make_written
from hypothesis import given, settings
from hypothesis import strategies as st

import critic
import grpo
import train
from analyze import interval
from countdown_task import Problem
from experiments import gradients, ground_truth
from mitigations import MITIGATIONS, reward_decomposition
from qwen2_model import save_model
from tests.plain import plain_logprobs, plain_rows, plain_update
from train import BUNDLED

ROOT = Path(__file__).parent.parent
ASKED = [Problem((3, 4, 5), 8), Problem((11, 2, 7, 9), 30)]  # prompts of unequal length
PIECE = re.compile(r"</?\w+>| ?\w+|\s|[^\w\s]")
FILLER, REASONING, STRUCTURE = range(3)  # as in the credit log
TEXTS = (
    " Maybe 5 - 3 = 2, 4 * 2 = 8. That works!</think>\n<answer>4 * (5 - 3)</answer>",
    " Try 5 + 3 = 9.",
    "",
    " How about 4 + 3 = 7, 7 - 5 = 2.</think>\n<answer>4 + 3 - 5</answer>",
    " No.",
    " Maybe 11 + 2 = 13, 7 + 9 = 16, 13 + 16 = 29. That is not 30.",
    " So 11 * 2 = 22, 7 + 22 = 30.</think>\n<answer>11 + 9 + 7</answer>",
    " 2 + 7 = 9",
)
SUCCESS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]  # the first two of the second question are alike


# ------------------------------------------------------------------------------------------------- what is asked


def written(codec, seed=0):
    """Two groups of four responses of very unequal length, 1 token to 37, and tokens drawn at random."""
    pieces = [[*PIECE.findall(text), ""] for text in TEXTS]
    batch = make_written(pieces, [0.0] * 8, [0] * 4 + [1] * 4)
    chance = torch.Generator().manual_seed(seed)
    batch.tokens = torch.randint(codec.size, batch.mask.shape, generator=chance) * batch.mask
    batch.logprob = -torch.rand(batch.mask.shape, generator=chance) * batch.mask
    batch.success = torch.tensor(SUCCESS)
    batch.numbers, batch.target = map(list, zip(*ASKED))
    return gradients.by_success(batch)


def prompts_of(codec, batch):
    """The prompt of each response."""
    return [codec.prompt(ASKED[g]) for g in batch.group.tolist()]


def flat_gradient(model, total):
    """d total / d all parameters (P,)."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


def plain_gradients(model, codec, batch, credit):
    """(B, P): the gradient of sum credit * log pi of each response on its own, in the plain layout."""
    prompts, rows = prompts_of(codec, batch), []
    for i, (prompt, length) in enumerate(zip(prompts, batch.mask.sum(1).tolist())):
        logprob = plain_logprobs(model, [prompt], batch.tokens[i : i + 1, :length], batch.mask[i : i + 1, :length])
        rows.append(flat_gradient(model, (logprob[0] * credit[i, :length]).sum()))
    return torch.stack(rows)


def plain_states(model, codec, batch):
    """The state (B, T, D) before each token, in the plain layout."""
    rows, pad, P = plain_rows(prompts_of(codec, batch), batch.tokens)
    with torch.no_grad():
        return model.hidden(rows, pad)[:, P - 1 : -1]


def number(text):
    """The figure at the beginning of a table's cell."""
    return float(re.match(r"-?[\d.]+", text)[0])


def close(found, expected, tolerance=1e-9):
    """Equal up to rounding."""
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def known_matrix(rng, singular, rows, columns):
    """U diag(s) V^T with orthonormal U and V."""
    U, V = (np.linalg.qr(rng.normal(size=(n, len(singular))))[0] for n in (rows, columns))
    return U * singular @ V.T


# -------------------------------------------------------------------------------------- 1. a token's gradient


def test_a_token_s_gradient_is_that_of_its_log_prob_alone(random_model, codec, exact):
    """Guards against another token's log-prob, a part of the parameters, gradients that add up over tokens, and tokens
    that do not exist."""
    random_model.real_vocab = 700
    prompt, tokens = codec.prompt(ASKED[0]), torch.tensor([5, 17, 333, 5, 690])
    whole, _, _ = gradients.token_gradients(random_model, prompt, tokens, [0, 3, 4])
    expected = []
    for t in (0, 3, 4):
        mask = torch.arange(5) == t
        expected.append(flat_gradient(random_model, plain_logprobs(random_model, [prompt], tokens[None], mask).sum()))
    close(whole, torch.stack(expected).norm(dim=1))
    assert all(w.grad is None for w in random_model.parameters())


def jacobian_by_differences(model, prompt, tokens, step=1e-5):
    """(L, L, D): how log pi of token t changes with the input embedding of token u, by central differences."""
    L, D, P = len(tokens), model.config.hidden_size, len(prompt)
    nudge = torch.zeros(2, L, D, P + L, D)
    for sign, u, d in itertools.product((0, 1), range(L), range(D)):
        nudge[sign, u, d, P + u, d] = (step, -step)[sign]
    hook = model.model["embed_tokens"].register_forward_hook(lambda module, args, out: out + nudge.flatten(0, 2))
    row = torch.cat((torch.tensor(prompt), tokens)).expand(2 * L * D, -1)
    with torch.no_grad():
        logprob = model(row)[:, P - 1 : -1].log_softmax(-1).gather(-1, row[:, P:, None])[..., 0]
    hook.remove()
    up, down = logprob.view(2, L, D, L)
    return ((up - down) / (2 * step)).permute(2, 0, 1)


def test_gradients_at_the_embeddings_are_finite_differences(random_model, codec, exact):
    """Guards against the embedding of the token itself, of which its log-prob knows nothing, of the one before the
    last, a single token's loss in phase 1, and a hook that stays."""
    prompt, tokens = codec.prompt(ASKED[0]), torch.tensor([5, 17, 333, 5, 690])
    _, before, phase1 = gradients.token_gradients(random_model, prompt, tokens, [0, 1, 2, 4])
    J = jacobian_by_differences(random_model, prompt, tokens)
    assert math.isnan(before[0]) and np.count_nonzero(np.isnan(before)) == 1
    close(before[1:], torch.stack([J[t, t - 1].norm() for t in (1, 2, 4)]), 1e-5)
    close(np.nan_to_num(phase1), J.sum(0).norm(dim=1), 1e-5)
    assert not np.nan_to_num(phase1[-1]) and (phase1[:-1] > 0).all()  # nothing is behind the last token
    assert not random_model.model["embed_tokens"]._forward_hooks


def test_each_number_stands_on_its_token(random_model, codec, exact, monkeypatch):
    """Guards against numbers that slip by a token or into the next response, another question's prompt, and a gradient
    at an embedding that stands on the token it came from."""
    monkeypatch.setattr(gradients, "EACH", 3)
    batch = written(codec)
    c = gradients.token_columns(random_model, codec, ASKED, batch, 0)
    lengths, first, measured = batch.mask.sum(1).tolist(), 0, 0
    assert min(lengths) == 1 and {len(c[k]) for k in ("whole", "before", "phase1", "relative")} == {sum(lengths)}
    for i, (prompt, L) in enumerate(zip(prompts_of(codec, batch), lengths)):
        here, tokens = slice(first, first + L), batch.tokens[i, :L]
        first += L
        chosen = np.flatnonzero(np.isfinite(c["whole"][here]))
        measured += len(chosen)
        assert np.flatnonzero(np.isfinite(c["before"][here])).tolist() == [t - 1 for t in chosen if t > 0]
        delta = torch.zeros(len(prompt) + L, 32, requires_grad=True)
        hook = random_model.model["embed_tokens"].register_forward_hook(lambda module, args, out: out + delta)
        logprob = plain_logprobs(random_model, [prompt], tokens[None], torch.ones(1, L, dtype=torch.bool))[0]
        hook.remove()
        at_inputs = torch.stack([torch.autograd.grad(x, delta, retain_graph=True)[0] for x in logprob])[
            :, len(prompt) :
        ]
        alone = {t: plain_logprobs(random_model, [prompt], tokens[None], (torch.arange(L) == t)[None]) for t in chosen}
        for t in chosen:
            close(c["whole"][here][t], flat_gradient(random_model, alone[t].sum()).norm().item())
            if t:
                close(c["before"][here][t - 1], at_inputs[t, t - 1].norm().item())
        close(np.nan_to_num(c["phase1"][here]), at_inputs.sum(0).norm(dim=1))
        close(c["relative"][here], torch.arange(L) / L)
    assert 8 <= measured <= 3 * 8


def test_every_token_is_as_likely_to_be_measured(codec, monkeypatch):
    """Guards against as many tokens of a short response as of a long one, whose mean is not that of all tokens (for
    the bundled model, 1.14 where filler / reasoning is 0.89), and against a choice that is always the same."""
    lengths, counts = [3, 4, 25, 8], np.zeros(40)
    batch = replace(make_batch(lengths, [1.0] * 4), numbers=[(3, 4, 5)])

    def measured(model, prompt, tokens, chosen):
        assert len(set(chosen)) == len(chosen)
        return np.ones(len(chosen)), np.ones(len(chosen)), np.ones(len(tokens))

    monkeypatch.setattr(gradients, "token_gradients", measured)
    columns = {"token": np.zeros(40), "position": np.concatenate([np.arange(n) for n in lengths])}
    monkeypatch.setattr(gradients, "describe", lambda batch, settings: dict(columns))
    monkeypatch.setattr(gradients, "EACH", 2)
    for seed in range(500):
        counts += np.isfinite(gradients.token_columns(None, codec, ASKED, batch, seed)["whole"])
    assert counts.sum() == 500 * 2 * 4  # two for each response on average
    assert 60 < counts.min() and counts.max() < 140  # 100 expected of each token


def test_the_last_token_s_phase_1_is_left_out(random_model, codec, exact):
    """Guards against the logarithm of 0: behind the last token there is no loss, and 192 such tokens were half of the
    variance that the type explained."""
    batch = written(codec)
    c = gradients.token_columns(random_model, codec, ASKED, batch, 0)
    lengths = batch.mask.sum(1).tolist()
    inner = np.concatenate([np.arange(n) < n - 1 for n in lengths])
    table = gradients.table_phase1(c)
    row = dict(zip(table.header, table.rows[0]))
    x = np.log(c["phase1"][inner])
    shares = [between_share(x, k[inner]) for k in ((c["relative"] * 10) // 1, c["role"])]
    assert [number(row[k]) for k in ("explained by position", "by type")] == pytest.approx(
        np.multiply(shares, 100), abs=0.51
    )


def made_columns(rng, questions=5, answers=4, length=30):
    """Columns of made-up tokens, the answers to a question of one length; one in five responses without advantage."""
    B, N = questions * answers, questions * answers * length
    c = {"response": np.repeat(np.arange(B), length).astype(np.uint16), "position": np.tile(np.arange(length), B)}
    c["group"] = (c["response"] // answers).astype(np.uint16)
    c["relative"] = c["position"] / length
    c["role"] = rng.choice(3, N, p=(0.4, 0.4, 0.2)).astype(np.int8)
    c["kind"] = rng.integers(0, len(gradients.KINDS), N).astype(np.int8)
    c["advantage"] = np.where(np.arange(B) % 5, rng.normal(size=B), 0.0)[c["response"]].astype(np.float32)
    c["logprob"] = -rng.exponential(size=N).astype(np.float32)
    c["logit_grad"] = rng.uniform(0, 1.4, N).astype(np.float32)
    c["whole"] = np.where(rng.random(N) < 0.4, rng.lognormal(size=N), np.nan)
    c["before"] = np.where(rng.random(N) < 0.4, rng.lognormal(size=N) * (1 + c["role"]), np.nan)
    c["phase1"] = rng.lognormal(size=N) * (length - c["position"])
    return c


def test_three_sizes_by_hand():
    """Guards against a sign, a missing advantage, or one measure in another's place."""
    c = {"advantage": [-2.0, 3.0], "logprob": [-0.5, -4.0], "logit_grad": [0.25, 1.0], "whole": [7.0, np.nan]}
    sizes = gradients.three_sizes({k: np.array(v) for k, v in c.items()})
    assert tuple(sizes) == gradients.MEASURES
    for found, expected in zip(sizes.values(), ([1, 12], [0.5, 3], [14, np.nan])):
        np.testing.assert_allclose(found, expected)


def ratio_by_loops(x, c, use, matched, questions):
    """Filler over reasoning, of the tokens of these questions, each as often as it is named."""
    tokens = [i for q in questions for i in np.flatnonzero(c["group"] == q) if use[i]]
    mean, weights = {FILLER: 0.0, REASONING: 0.0}, 0
    for tenth in range(10) if matched else [None]:
        place = {
            role: [x[i] for i in tokens if c["role"][i] == role and tenth in (None, int(c["relative"][i] * 10))]
            for role in mean
        }
        if all(place.values()):
            weight = len(place[REASONING])
            weights += weight
            for role in mean:
                mean[role] += weight * sum(place[role]) / len(place[role])
    return mean[FILLER] / mean[REASONING] if weights else np.nan


@pytest.mark.parametrize("matched", [False, True])
def test_type_ratio_is_what_loops_find(matched, monkeypatch):
    """Guards against weights of the wrong type, tokens outside `use`, tenths in which a type is missing, and intervals
    that resample tokens or responses where it should be questions."""
    monkeypatch.setattr(ground_truth, "RESAMPLES", 60)
    rng = np.random.default_rng(1)
    c = made_columns(rng, questions=4, answers=2, length=25)
    c["role"][(c["relative"] < 0.2) & (c["role"] == REASONING)] = STRUCTURE  # no reasoning there
    use = rng.random(len(c["role"])) < 0.6
    x = np.where(use, rng.lognormal(size=len(use)) * (1 + c["group"]), np.nan)
    found = gradients.type_ratio(x, c, use, matched)
    draws = [ratio_by_loops(x, c, use, matched, np.repeat(range(4), n)) for n in ground_truth.resampled(4)]
    expected = ratio_by_loops(x, c, use, matched, range(4)), *np.percentile(draws, (2.5, 97.5))
    np.testing.assert_allclose(found, expected)
    assert found.low < found.value < found.high


def test_matching_takes_away_what_position_explains():
    """Guards against a control for position that leaves some of it in: here size is 1 / (1 + position) and no more."""
    rng = np.random.default_rng(0)
    position = np.tile(np.arange(10), 40)
    role = np.where(rng.random(400) < 0.9 - 0.08 * position, FILLER, REASONING)  # filler comes early
    c = {"relative": position / 10, "role": role, "group": np.repeat(np.arange(4), 100)}
    plain, matched = (gradients.type_ratio(1 / (1 + position), c, role < 9, m) for m in (False, True))
    assert plain.low > 1.5
    np.testing.assert_allclose(matched, (1, 1, 1))
    on_top = gradients.type_ratio((1 + (role == FILLER)) / (1 + position), c, role < 9, True)
    np.testing.assert_allclose(on_top, (2, 2, 2))  # and one that takes away more


def test_mean_ratio_is_what_loops_find(monkeypatch):
    """Guards against sums for means, or a ratio of question means."""
    monkeypatch.setattr(ground_truth, "RESAMPLES", 60)
    rng = np.random.default_rng(2)
    x, over, under, q = rng.lognormal(size=300), rng.random(300) < 0.2, rng.random(300) < 0.5, np.arange(300) % 4
    found = gradients.mean_ratio(x, over, under, q)
    draws = []
    for n in (np.ones(4, int), *ground_truth.resampled(4)):
        tokens = np.repeat(np.arange(300), n[q])
        draws.append(x[tokens][over[tokens]].mean() / x[tokens][under[tokens]].mean())
    np.testing.assert_allclose(found, (draws[0], *np.percentile(draws[1:], (2.5, 97.5))))


def rank(x):
    """Ranks from 1 by counting, ties sharing their mean."""
    return np.array([(x < v).sum() + ((x == v).sum() + 1) / 2 for v in x])


def test_the_tables_of_tokens_by_hand():
    """Guards against responses without advantage or tokens without an exact gradient in a comparison, columns in each
    other's place, ranks over all tokens where they should be within responses, and a count that is not the count."""
    c = made_columns(np.random.default_rng(3))
    use = np.isfinite(c["whole"]) & (c["advantage"] != 0)
    A = np.abs(c["advantage"])[use]
    sizes = [A * -c["logprob"][use], A * c["logit_grad"][use], A * c["whole"][use]]
    correlations, types, kinds = gradients.tables_tokens(c)
    within = [np.zeros(use.sum()) for _ in sizes]
    for r in np.unique(c["response"][use]):
        here = c["response"][use] == r
        for x, out in zip(sizes, within):
            out[here] = (rank(x[here]) - rank(x[here]).mean()) / here.sum()
    for row, (a, b) in zip(correlations.rows, ((0, 1), (0, 2), (1, 2)), strict=True):
        assert row[:2] == [gradients.MEASURES[a], gradients.MEASURES[b]]
        assert number(row[2]) == pytest.approx(np.corrcoef(rank(sizes[a]), rank(sizes[b]))[0, 1], abs=6e-4)
        assert number(row[3]) == pytest.approx(np.corrcoef(within[a], within[b])[0, 1], abs=6e-4)
    role, kind = c["role"][use], c["kind"][use]
    names = list(ground_truth.KINDS)
    for name, x, (label, plain, matched, opening), row in zip(gradients.MEASURES, sizes, types.rows, kinds.rows):
        assert name == label == row[0]
        assert number(plain) == pytest.approx(x[role == FILLER].mean() / x[role == REASONING].mean(), abs=6e-3)
        everywhere = np.full(len(use), np.nan)
        everywhere[use] = x
        assert number(matched) == pytest.approx(ratio_by_loops(everywhere, c, use, True, range(5)), abs=6e-3)
        decides = (kind == names.index("operand")) | (kind == names.index("operator"))
        expected = x[kind == names.index("opening")].mean() / x[decides].mean()
        assert number(opening) == pytest.approx(expected, abs=6e-3)
        for k, shown in enumerate(row[1:]):
            assert float(shown) == pytest.approx(x[kind == k].mean() / x.mean(), abs=6e-3)
    assert kinds.header[1:] == names and all(f"{use.sum():,} tokens" in t.note for t in (correlations, types, kinds))
    assert "interval" not in kinds.note  # it shows none


def between_share(x, label):
    """1 - (what is left within labels) / (all), by loops."""
    left = sum(((x[label == k] - x[label == k].mean()) ** 2).sum() for k in set(label.tolist()))
    return 1 - left / ((x - x.mean()) ** 2).sum()


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 5)), min_size=2, max_size=40))
@settings(max_examples=100, deadline=None)
def test_the_explained_share_is_that_of_the_law_of_total_variance(pairs):
    """Guards against labels without a token, and a mean of means."""
    x, label = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    if x.std() > 1e-3:
        assert gradients.explained(x, label) == pytest.approx(between_share(x, label), abs=1e-6)


def test_phase_1_by_hand():
    """Guards against fifths, types, shares or t-statistics of another row, and tokens that were not measured."""
    rng = np.random.default_rng(4)
    c = made_columns(rng, questions=5, answers=16, length=20)  # 80 responses, about 32 of them measured at a position
    spread = np.where(c["position"] % 2, 4.0, 0.5)
    for name in ("whole", "before", "phase1"):
        c[name] = np.where(np.isnan(c[name]), np.nan, c[name] * np.exp(spread * rng.normal(size=len(spread))))
    table = gradients.table_phase1(c)
    for row, name in zip(table.rows, ("phase1", "before", "whole"), strict=True):
        row = dict(zip(table.header, row))
        some = np.isfinite(c[name])
        x, role, relative = c[name][some], c["role"][some], c["relative"][some]
        fifth, tenth = relative * 5 // 1, relative * 10 // 1
        expected = x[fifth == 0].mean() / x[fifth == 4].mean()
        assert number(row["first / last fifth"]) == pytest.approx(expected, rel=6e-3, abs=6e-3)
        expected = x[role == FILLER].mean() / x[role == REASONING].mean()
        assert number(row["filler / reasoning"]) == pytest.approx(expected, abs=6e-3)
        expected = ratio_by_loops(c[name], c, some, True, range(5))
        assert number(row["matched for position"]) == pytest.approx(expected, abs=6e-3)
        shares = [between_share(np.log(x), k) for k in (tenth, role, tenth * 3 + role)]
        for key, expected in zip(("explained by position", "by type", "by type, beyond position"),
                                 (shares[0], shares[1], shares[2] - shares[0])):  # fmt: skip
            assert number(row[key]) == pytest.approx(100 * expected, abs=0.51)
        at = [x[c["position"][some] == p] for p in range(20)]
        t = [v.mean() / (v.std(ddof=1) / len(v) ** 0.5) for v in at if len(v) >= 30]
        assert len(t) >= 8 and number(row["t > 3"]) == pytest.approx(100 * np.mean(np.array(t) > 3), abs=0.51)


# --------------------------------------------------------------------------------------- 2. how many directions


@given(st.lists(st.floats(0, 1e3).filter(lambda s: s == 0 or s > 1e-3), min_size=1, max_size=12), st.randoms())
@settings(max_examples=100, deadline=None)
def test_measures_of_rank_by_their_formulas(singular, random):
    """Guards against another logarithm, squares for values, values that are not sorted, and a share by one too few."""
    random.shuffle(singular)
    s = np.array(singular)
    if not s.any():
        assert math.isnan(gradients.effective_rank(s)) and math.isnan(gradients.stable_rank(s))
        return
    shares = [v / sum(singular) for v in singular if v > 0]
    assert gradients.effective_rank(s) == pytest.approx(math.prod(p**-p for p in shares))
    assert gradients.stable_rank(s) == pytest.approx(sum(v * v for v in singular) / max(singular) ** 2)
    for energy in (0.9, 0.95, 0.99):
        largest, wanted, k = sorted(singular, reverse=True), energy * sum(v * v for v in singular), 0
        while sum(v * v for v in largest[:k]) < wanted * (1 - 1e-9):
            k += 1
        assert gradients.components(s, energy) == k
    for measure in (gradients.effective_rank, gradients.stable_rank):
        assert measure(7.3 * s) == pytest.approx(measure(s))


def test_measures_of_rank_where_they_are_known():
    """Guards against a share that rounding pushes over the edge."""
    R = 10
    alike, single = np.ones(R), np.eye(1, R)[0]
    assert gradients.effective_rank(alike) == pytest.approx(R) == gradients.stable_rank(alike)
    assert [gradients.components(alike, e) for e in (0.9, 0.95, 0.99, 1.0)] == [9, 10, 10, 10]
    assert gradients.effective_rank(single) == pytest.approx(1) == gradients.stable_rank(single)
    assert [gradients.components(single, e) for e in (0.9, 0.99)] == [1, 1]
    assert all(gradients.components(np.full(10 * k, v), 0.9) == 9 * k for k in range(1, 20) for v in (0.1, 0.3, 0.7))
    two = np.array([3.0, 1.0])  # energies 0.9 and 0.1, shares 0.75 and 0.25
    assert gradients.effective_rank(two) == pytest.approx(4 / 3**0.75) and gradients.stable_rank(two) == 10 / 9
    assert gradients.components(two, 0.9) == 1 and gradients.components(two, 0.91) == 2


def test_the_spectrum_of_a_gram_matrix(exact):
    """Guards against eigenvalues for singular values, another order, rounding that counts as rank, a matrix of 0."""
    rng = np.random.default_rng(0)
    singular = np.array([5.0, 3.0, 0.2, 1e-4])
    X = known_matrix(rng, singular, 9, 30)
    found = gradients.gram_spectrum(X @ X.T)
    close(found[:4], singular, 1e-6)
    assert len(found) == 9 and not found[4:].any()
    close(gradients.gram_spectrum(gradients.products(torch.tensor(X), torch.tensor(X))), found)
    assert gradients.effective_rank(gradients.gram_spectrum(np.eye(7))) == pytest.approx(7)
    assert not gradients.gram_spectrum(np.zeros((3, 3))).any()
    close(gradients.products(torch.tensor(X[:2]), torch.tensor(X)), X[:2] @ X.T)


def test_weight_matrices_are_a_checkpoint_s(random_model, codec, exact):
    """Guards against queries, keys and values in each other's place, or matrices that no checkpoint has."""
    batch = written(codec)
    credit = torch.rand(batch.mask.shape) * batch.mask
    flat = plain_gradients(random_model, codec, batch, credit).sum(0)
    (plain_logprobs(random_model, prompts_of(codec, batch), batch.tokens, batch.mask) * credit).sum().backward()
    expected = {"model.embed_tokens.weight": random_model.output_weight.grad}
    for i, layer in enumerate(random_model.model["layers"]):
        qkv, up = layer.self_attn.qkv_proj.weight.grad, layer.mlp.gate_up_proj.weight.grad
        attention = {"q": qkv[:32], "k": qkv[32:48], "v": qkv[48:64], "o": layer.self_attn.o_proj.weight.grad}
        mlp = {"gate": up[:48], "up": up[48:], "down": layer.mlp.down_proj.weight.grad}
        expected |= {f"model.layers.{i}.self_attn.{k}_proj.weight": g for k, g in attention.items()}
        expected |= {f"model.layers.{i}.mlp.{k}_proj.weight": g for k, g in mlp.items()}
    found = gradients.weight_matrices(random_model, flat)
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        close(found[name], g)
    kinds = {"embed_tokens", *(f"{k}_proj" for k in ("q", "k", "v", "o", "gate", "up", "down"))}
    assert {gradients.short(name) for name in found} == kinds


def explicit_rows(model, batch, states, rows, credit):
    """credit * (onehot - p) outer hidden state of each token of some responses (N, V * D)."""
    out = []
    for i in range(len(batch.text))[rows]:
        for t in range(int(batch.mask[i].sum())):
            error = -(model.output_weight[: model.real_vocab] @ states[i, t]).softmax(0)
            error[batch.tokens[i, t]] += 1
            out.append((credit[i, t] * torch.outer(error, states[i, t])).flatten().detach())
    return torch.stack(out)


def with_states(model, codec, batch):
    """The batch, which knows its hidden states by the plain layout."""
    states = plain_states(model, codec, batch)
    return replace(batch, hidden=lambda: states)


def test_the_gram_matrix_of_tokens_is_that_of_explicit_rows(random_model, codec, exact):
    """Guards against p without onehot, a credit that counts once, other responses' rows, and tokens not in the
    vocabulary."""
    random_model.real_vocab = 700
    batch = written(codec)
    batch.tokens = batch.tokens % 700
    batch = with_states(random_model, codec, batch)
    for q, rows in ((0, slice(0, 3)), (1, slice(4, 7))):
        credit = torch.randn(batch.mask.shape)
        X = explicit_rows(random_model, batch, batch.hidden(), rows, credit)
        close(gradients.token_gram(random_model, gradients.group_of(batch, q, 3), credit[rows]), X @ X.T)
        assert len(X) == batch.mask[rows].sum()


def spectrum(X):
    """Singular values by numpy's SVD."""
    return np.linalg.svd(np.asarray(X), compute_uv=False)


def check_spectra(model, codec, batch, rows, credit, found):
    """All spectra of a group with credit (R, T) against SVDs of matrices made by plain autograd."""
    padded = torch.zeros(batch.mask.shape)
    padded[rows] = credit.to(padded)
    each = plain_gradients(model, codec, batch, padded)[rows]
    right = batch.success[rows] > 0
    expected = {
        "rollouts x parameters": [each],
        "right, wrong x parameters": [torch.stack((each[right].sum(0), each[~right].sum(0)))],
        "tokens x (vocabulary · hidden)": [explicit_rows(model, batch, batch.hidden(), rows, padded)],
    }
    for name, g in gradients.weight_matrices(model, each.sum(0)).items():
        expected.setdefault(name.split(".")[-2], []).append(g)
    assert set(found) == set(expected)
    for matrix, spectra in found.items():
        for s, X in zip(spectra, expected[matrix], strict=True):
            s, true = np.asarray(s), spectrum(X)
            size = min(len(s), len(true))
            np.testing.assert_allclose(s[:size], true[:size], rtol=1e-6, atol=3e-6 * true[0])
            assert max(s[size:], default=0) <= 3e-6 * true[0] and max(true[size:], default=0) <= 3e-6 * true[0]


def test_the_spectra_of_a_group(random_model, codec, exact):
    """Guards against a gradient of another matrix, layers that are summed, and rows that another credit made."""
    batch = with_states(random_model, codec, written(codec))
    rows, credit = slice(4, 8), torch.randn(batch.mask.shape) * batch.mask
    each = plain_gradients(random_model, codec, batch, credit)[rows]
    found = gradients.spectra(random_model, gradients.group_of(batch, 1, 4), credit[rows], each)
    check_spectra(random_model, codec, batch, rows, credit[rows], found)
    assert len(found["q_proj"]) == 2 and len(found["rollouts x parameters"][0]) == 4


CONTROLS = ["shuffled advantages", "random credit", "imitation: credit 1", "a reward for each calculation", "A*"]


def test_ranks_are_of_the_first_answers_to_each_question(random_model, codec, exact, monkeypatch):
    """Guards against another question's prompt or answers, a group size that takes other answers, groups that are all
    alike, credit of another kind, and measures that are not those of the spectrum beside them."""
    for name, value in {"SIZES": (2, 4), "CONTROLS_AT": 4, "TRUTH": (1, 8)}.items():
        monkeypatch.setattr(gradients, name, value)
    batch = with_states(random_model, codec, written(codec))
    truth = torch.randn(batch.mask.shape) * batch.mask
    made, original = [], gradients.controls

    def recorded(group, a_star, rng):  # in float64, as all that it is compared with
        made.append({name: credit.double() for name, credit in original(group, a_star, rng).items()})
        return made[-1]

    monkeypatch.setattr(gradients, "controls", recorded)
    found = gradients.rank_rows(random_model, codec, ASKED, batch, truth, 0)
    assert [list(credits) for credits in made] == [CONTROLS, CONTROLS[:-1]] and torch.equal(made[0]["A*"], truth[:4])
    alone = {(q, R): group_alone(batch, slice(4 * q, 4 * q + R)) for q, R in ((0, 2), (0, 4), (1, 4))}
    wanted = {
        (q, R, "GRPO"): group.advantage[:, None] * batch.mask[4 * q : 4 * q + R] for (q, R), group in alone.items()
    }
    wanted |= {(q, 4, name): credit for q, credits in enumerate(made) for name, credit in credits.items()}
    assert {(r["question"], r["R"], r["variant"]) for r in found} == set(wanted)  # (1, 2) are both wrong
    for (q, R, variant), credit in wanted.items():
        if variant not in ("shuffled advantages", "a reward for each calculation"):  # to save time
            here = [r for r in found if (r["question"], r["R"], r["variant"]) == (q, R, variant)]
            by_matrix = {m: [r["spectrum"] for r in here if r["matrix"] == m] for m in {r["matrix"] for r in here}}
            check_spectra(random_model, codec, batch, slice(4 * q, 4 * q + R), credit, by_matrix)
    monkeypatch.setattr(gradients, "TRUTH", (2, 8))
    monkeypatch.setattr(gradients, "spectra", lambda *args: {})
    assert gradients.rank_rows(random_model, codec, ASKED, batch, truth, 0) == []
    assert torch.equal(torch.cat([credits["A*"] for credits in made[2:]]), truth)
    for r in found:
        s = r["spectrum"]
        assert r["effective"] == pytest.approx(gradients.effective_rank(s), nan_ok=True)
        assert r["stable"] == pytest.approx(gradients.stable_rank(s), nan_ok=True)
        assert [r[f"{e}%"] for e in (90, 95, 99)] == [gradients.components(s, e / 100) for e in (90, 95, 99)]


def left_over(target, *directions):
    """How much of a vector its best combination of directions misses, as a share of its length."""
    A = torch.stack(directions, dim=1)
    return ((target - A @ torch.linalg.lstsq(A, target[:, None]).solution[:, 0]).norm() / target.norm()).item()


def test_with_right_or_wrong_a_group_s_gradient_is_made_of_two(random_model, codec, exact):
    """Guards against rewards of more levels where the algebra needs two: the gradient is A+ S+ + A- S-, even c times
    the difference of the means of right and wrong, since advantages sum to 0; that of random credit is not."""
    batch = written(codec)
    each = plain_gradients(random_model, codec, batch, batch.mask.double())
    for q in (0, 1):
        rows, group = slice(4 * q, 4 * q + 4), gradients.group_of(batch, q, 4)
        right = batch.success[rows] > 0
        sides = [each[rows][side].sum(0) for side in (right, ~right)]
        credits = gradients.controls(group, None, np.random.default_rng(0))
        total = {}
        for variant, credit in (credits | {"GRPO": group.advantage[:, None] * group.mask}).items():
            padded = torch.zeros(batch.mask.shape)
            padded[rows] = credit.double()
            total[variant] = plain_gradients(random_model, codec, batch, padded)[rows].sum(0)
        assert left_over(total["GRPO"], *sides) < 1e-7 and left_over(total["imitation: credit 1"], *sides) < 1e-7
        assert left_over(total["GRPO"], sides[0] / right.sum() - sides[1] / (~right).sum()) < 1e-7
        assert left_over(total["random credit"], *sides) > 0.1


def group_alone(batch, rows):
    """The responses of one group as a batch of their own, with the advantage of being right."""
    right = [SUCCESS[i] for i in range(8)[rows]]
    mean, n = sum(right) / len(right), len(right)
    std = (sum((r - mean) ** 2 for r in right) / n) ** 0.5
    advantages = [(r - mean) / (std + 1e-4) for r in right]
    alone = make_written([[*PIECE.findall(TEXTS[i]), ""] for i in range(8)[rows]], advantages)
    g = int(batch.group[rows][0])
    return replace(alone, success=torch.tensor(right), reward=torch.tensor(right), format=batch.format[rows],
                   numbers=batch.numbers[g : g + 1], target=batch.target[g : g + 1])  # fmt: skip


@pytest.mark.parametrize("q, R", [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3)])
def test_a_group_and_its_credit(q, R, codec):
    """Guards against advantages of the whole group where the first R are compared, what belongs to other responses, a
    reward for calculations that other groups' enter, and controls that are no controls."""
    batch = written(codec)
    batch.reward, batch.format = torch.rand(8), torch.linspace(0, 1, 8)
    batch = replace(batch, hidden=lambda: torch.arange(8.0)[:, None, None])
    rows = slice(4 * q, 4 * q + R)
    alone, group, mask = group_alone(batch, rows), gradients.group_of(batch, q, R), batch.mask[rows]
    L = alone.mask.shape[1]
    for name in ("text", "spans", "steps", "numbers", "target"):
        assert getattr(group, name) == getattr(alone, name)
    for name in ("mask", "role", "in_answer"):
        assert torch.equal(getattr(group, name)[:, :L], getattr(alone, name)) and not getattr(group, name)[:, L:].any()
    for name in ("reward", "success", "format", "group", "advantage"):
        torch.testing.assert_close(getattr(group, name), getattr(alone, name))
    for name in ("tokens", "logprob", "entropy", "logit_grad", "ended"):
        assert torch.equal(getattr(group, name), getattr(batch, name)[rows])
    assert group.hidden().flatten().tolist() == list(range(8))[rows] and len(batch.text) == 8
    truth, advantage = torch.randn(mask.shape), alone.advantage[:, None] * mask
    found = gradients.controls(group, truth, np.random.default_rng(0))
    assert list(found) == CONTROLS and torch.equal(found["A*"], truth)
    assert torch.equal(found["random credit"].sign(), advantage.sign())
    assert torch.equal(found["imitation: credit 1"], mask.float())
    expected = reward_decomposition(alone, stepwise=True)
    torch.testing.assert_close(found["a reward for each calculation"][:, :L], expected)
    assert not found["a reward for each calculation"][:, L:].any()
    assert (len(expected.unique()) > 3) == ((q, R) != (1, 2))  # not GRPO's, but where there is no answer at all
    shuffled = found["shuffled advantages"]
    assert torch.equal(shuffled, shuffled[:, :1] * mask)
    torch.testing.assert_close(shuffled[:, 0].sort().values, alone.advantage.sort().values)


def test_chance_in_the_controls():
    """Guards against a shuffle that moves nothing, or moves within responses, and weights other than Exponential(1)."""
    batch = make_written([[" No"] * 50] * 4, [0.0] * 4)
    batch.success = torch.tensor([1.0, 1.0, 0.0, 0.0])
    group, rng, firsts, weights = gradients.by_success(batch), np.random.default_rng(0), [], []
    for _ in range(300):
        found = gradients.controls(group, None, rng)
        firsts.append(tuple((found["shuffled advantages"][:, 0] > 0).tolist()))
        weights.append(found["random credit"] / group.advantage[:, None])
    counts = np.array([firsts.count(x) for x in set(firsts)])  # the 6 ways to choose two of four, 50 times each
    assert len(counts) == 6 and counts.min() > 25 and counts.max() < 80
    w = torch.stack(weights).flatten().double().sort().values  # 60,000
    assert w[0] > 0
    at = (torch.arange(len(w)) + 0.5) / len(w)
    assert (at - (1 - (-w).exp())).abs().max() < 2 / len(w) ** 0.5  # Kolmogorov and Smirnov
    assert np.corrcoef(weights[0].flatten(), weights[1].flatten())[0, 1] < 0.3


def test_success_is_the_only_reward(codec):
    """Guards against the format's part of the reward, with which right and wrong are not the only levels."""
    batch = written(codec)
    batch.reward = batch.success + 0.1 * torch.rand(8)
    found = gradients.by_success(batch)
    assert torch.equal(found.reward, batch.success)
    a, b = 0.5 / 0.5001, 0.25 / (3**0.5 / 4 + 1e-4)
    close(found.advantage, torch.tensor([a, -a, -a, a, -b, -b, 3 * b, -b]), 1e-5)


def rows_of_ranks():
    """Rows as rank_rows makes them: three questions, two sizes, two kinds of credit, two matrices, one with layers."""
    rng, rows = np.random.default_rng(0), []
    for q, R, variant in itertools.product((0, 1, 2), (2, 8), ("GRPO", "imitation: credit 1")):
        for matrix in ("rollouts x parameters", "q_proj", "q_proj"):
            if (q, R) != (1, 2):  # all alike
                s = rng.exponential(size=4)
                rows.append({"question": q, "R": R, "variant": variant, "matrix": matrix, "spectrum": s,
                             "effective": gradients.effective_rank(s), "stable": gradients.stable_rank(s),
                             **{f"{e}%": gradients.components(s, e / 100) for e in (90, 95, 99)}})  # fmt: skip
    rows[1]["effective"] = float("nan")
    return rows


def test_the_tables_of_ranks_by_hand(monkeypatch):
    """Guards against layers counted as questions, a mean over all sizes, credit or matrices, and errors of something
    else than questions."""
    monkeypatch.setattr(gradients, "SIZES", (2, 8))
    found = rows_of_ranks()
    by_size, by_measure, by_variant = gradients.tables_rank(found)

    def expected(measure, matrix, variant, R):
        each = []
        for q in (0, 1, 2):
            chosen = [r for r in found if (r["question"], r["matrix"], r["variant"], r["R"]) == (q, matrix, variant, R)]
            values = [r[measure] for r in chosen if not math.isnan(r[measure])]
            each += [sum(values) / len(values)] if values else []
        mean = sum(each) / len(each)
        t = {2: 12.706, 3: 4.303}[len(each)]
        error = t * (sum((x - mean) ** 2 for x in each) / (len(each) - 1) / len(each)) ** 0.5
        return f"{mean:.1f} ± {error:.1f}"

    for row in by_size.rows:
        assert row[1:] == [expected("effective", row[0], "GRPO", R) for R in (2, 8)]
    for row in by_measure.rows:
        names = ("effective", "stable", "90%", "95%", "99%")
        assert row[1:] == [expected(name, row[0], "GRPO", 8) for name in names]
    for row in by_variant.rows:
        assert row[1:] == [expected("effective", m, row[0], 8) for m in by_variant.header[1:]]
    assert [row[0] for row in by_size.rows] == [row[0] for row in by_measure.rows] == by_variant.header[1:]
    assert [row[0] for row in by_variant.rows] == ["GRPO", "imitation: credit 1"]
    means = [np.mean([r["stable"] for r in found if r["question"] == q and r["R"] == 2]) for q in (0, 2)]
    for r in found:
        r["effective"] = r["stable"]
    assert sorted(gradients.question_means(found, 2)) == pytest.approx(sorted(means))


# ------------------------------------------------------------------------------------------------ 3. the baseline


def baseline_by_loops(r, n, R, which):
    """Sum over questions of sum over the first R answers of (r - b)^2 |g|^2."""
    total = 0.0
    for reward, norm in zip(r.tolist(), n.tolist()):
        for i in range(R):
            others = [j for j in range(R) if j != i]
            b = {
                "none": 0.0,
                "others": sum(reward[j] for j in others) / (R - 1),
                "mean": sum(reward[:R]) / R,
                "best": sum(reward[j] * norm[j] for j in others) / sum(norm[j] for j in others),
            }[which]
            total += (reward[i] - b) ** 2 * norm[i]
    return total


def success_batch(r):
    """A batch that knows nothing but success (Q, G)."""
    return SimpleNamespace(success=torch.as_tensor(r, dtype=torch.float32).flatten(), numbers=[()] * len(r))


def table_of(r, n):
    """The table of baselines, by group size: no baseline, group mean, what theory says of that, optimum."""
    rows = gradients.table_baseline(success_batch(r), n).rows
    return {int(R): tuple(map(number, (none, mean, theory, best))) for R, none, _, mean, theory, best in rows}


def test_baselines_are_what_loops_find():
    """Guards against answers behind the first R, a baseline that sees the response, and norms that are not squared."""
    rng = np.random.default_rng(0)
    r, n = (rng.random((6, 8)) < 0.4).astype(float), rng.lognormal(size=(6, 8)) * 3
    found = table_of(r, n)
    assert list(found) == [2, 4, 8]  # groups of 16 are not there
    for R, (none, mean, theory, best) in found.items():
        whole = {k: baseline_by_loops(r, n, R, k) for k in ("none", "others", "mean", "best")}
        assert none == pytest.approx(whole["none"] / whole["others"], abs=6e-3)
        assert mean == theory == pytest.approx(((R - 1) / R) ** 2, abs=6e-3)
        assert whole["mean"] / whole["others"] == pytest.approx(((R - 1) / R) ** 2, abs=1e-12)
        assert best == pytest.approx(whole["best"] / whole["others"], abs=6e-3)
    assert found[2][3] == 1  # a single other: there is nothing to weigh


def test_baselines_on_problems_with_a_known_answer(monkeypatch):
    """Guards against an optimum that is not one: with |g|^2 = 1 for right and 9 for wrong answers, half of them right,
    it is E r |g|^2 / E |g|^2 = 0.1, and the noise 0.45 / 1.25 of the mean's; where |g|^2 says nothing of r it is the
    mean."""
    monkeypatch.setattr(gradients, "SIZES", (4, 64))
    monkeypatch.setattr(ground_truth, "RESAMPLES", 20)
    rng = np.random.default_rng(0)
    r = (rng.random((1000, 64)) < 0.5).astype(float)
    none, _, _, best = table_of(r, rng.choice([1.0, 9.0], r.shape))[64]
    assert none == pytest.approx(63 / 64 / 0.5, abs=0.03)  # E r^2 over var r, and others' mean errs by 1 / 63 of it
    assert best == pytest.approx((1 + 41 / 25 / 63) * 63 / 64, abs=0.015)  # E|g|^4 / (E|g|^2)^2 = 41 / 25
    none, _, _, best = table_of(r, np.where(r > 0, 1.0, 9.0))[64]
    assert best == pytest.approx(0.45 / 1.25, abs=0.02)
    assert none == pytest.approx(0.5 / 1.25, abs=0.02)  # a baseline of 0 is nearer to 0.1 than 0.5 is


def test_success_and_size_correlate_within_questions():
    """Guards against a correlation that questions make: hard ones have long answers."""
    rng = np.random.default_rng(0)
    r = (rng.random((50, 16)) < np.linspace(0.1, 0.9, 50)[:, None]).astype(float)
    n = rng.exponential(size=r.shape) + 30 * np.linspace(1, 0, 50)[:, None]
    text = gradients.correlation_text(r, n)
    x, y = (v - v.mean(1, keepdims=True) for v in (r, n))
    found = [float(v) for v in re.findall(r"-?\d\.\d+", text)]
    assert found[0] == pytest.approx((x * y).sum() / ((x**2).sum() * (y**2).sum()) ** 0.5, abs=6e-3)
    assert found[1] <= 0 <= found[2]
    assert number(gradients.correlation_text(r, n + 5 * r).split("by ")[1]) > 0.5


# ------------------------------------------------------------------------------------------- 4. bias and noise


def test_the_jackknife_of_a_mean_is_the_textbook_s():
    """Guards against a missing n - 1, and an interval of one standard error: of a mean it is s / sqrt(n)."""
    rng = np.random.default_rng(0)
    for n in (2, 5, 16):
        x = rng.normal(size=n)
        found = gradients.jackknife(lambda use: x[use].mean(), n)
        error = x.std(ddof=1) / n**0.5
        assert found.value == pytest.approx(x.mean())
        widths = (found.high - found.value) / error, (found.value - found.low) / error
        assert widths[0] == pytest.approx(widths[1])
        assert 1.959 < widths[0] <= {2: 12.71, 5: 2.777, 16: 2.132}[n]  # the normal's 1.96, or Student's t


def gaussian(rng, n, P, shift, spread=1.0):
    """n draws of a gradient (n, P) with a mean along the first direction."""
    x = rng.normal(size=(n, P)) * spread
    x[:, 0] += shift
    return x


def test_signal_and_noise_by_their_definitions():
    """Guards against pairs of a batch with itself, batches that were left out, and n for n - 1."""
    rng = np.random.default_rng(0)
    x, y = gaussian(rng, 7, 20, 2.0), gaussian(rng, 7, 20, 1.0)
    use = np.arange(7) != 3
    a, b = x[use], y[use]
    pairs = [a[i] @ b[j] for i in range(6) for j in range(6) if i != j]
    assert gradients.cross(x @ y.T, use) == pytest.approx(np.mean(pairs))
    S = a.var(0, ddof=1).sum()
    assert gradients.signal_to_noise(x @ x.T, use) == pytest.approx(((a.mean(0) ** 2).sum() - S / 6) / S)
    same, clean = gradients.cosines(x @ y.T, x @ x.T, y @ y.T, use)
    u, v = a.mean(0), b.mean(0)
    assert same == pytest.approx(u @ v / (u @ u * (v @ v)) ** 0.5)
    signals = [np.mean([s[i] @ s[j] for i in range(6) for j in range(6) if i != j]) for s in (a, b)]
    assert clean == pytest.approx(np.mean(pairs) / (signals[0] * signals[1]) ** 0.5)


def test_signal_and_noise_are_right_on_average():
    """Guards against an estimate with a floor: without correction |mean|^2 / S is never below about 1 / n."""
    rng, n, P = np.random.default_rng(0), 8, 50
    for shift in (0.0, 3.0):
        found = []
        for _ in range(800):
            x = gaussian(rng, n, P, shift)
            found.append(gradients.signal_to_noise(x @ x.T, np.ones(n, bool)))
        # E 1 / S is 1 / (P (n - 1) - 2) times n - 1 of it, independent of the mean
        true = shift**2 / P * (P * (n - 1)) / (P * (n - 1) - 2)
        assert np.mean(found) == pytest.approx(true, abs=4 * np.std(found) / len(found) ** 0.5)
        assert np.std(found) / len(found) ** 0.5 < 0.02 * (true + 1 / n)


def test_the_corrected_cosine_is_that_of_the_expectations():
    """Guards against a cosine that noise makes smaller, and noise that two methods share makes larger."""
    rng, n, P, found = np.random.default_rng(0), 16, 200, {True: [], False: []}
    one, other = np.zeros((2, P))
    one[0], other[:2] = 8.0, (4.8, 6.4)  # expectations at an angle whose cosine is 0.6
    for shared in [True, False] * 150:
        noise = rng.normal(size=(2, n, P))
        x, y = one + noise[0], other + noise[0 if shared else 1]
        found[shared].append(gradients.cosines(x @ y.T, x @ x.T, y @ y.T, np.ones(n, bool)))
    (with_shared, freed), (with_own, clean) = np.mean(found[True], axis=0), np.mean(found[False], axis=0)
    assert with_own < 0.54 and with_shared > 0.63
    assert clean == pytest.approx(0.6, abs=0.01) and freed == pytest.approx(0.6, abs=0.01)


def test_no_cosine_where_noise_hides_the_signal():
    """Guards against the root of a negative number, and two negative signals whose product is not."""
    x = np.array([[1.0, 0.1], [-1.0, 0.1]])  # pairs of different batches: -0.99
    y = np.array([[1.0, 0.0], [1.0, 0.0]])
    use = np.ones(2, bool)
    for a, b in ((x, y), (y, x), (x, x)):
        same, clean = gradients.cosines(a @ b.T, a @ a.T, b @ b.T, use)
        assert math.isnan(clean) and math.isfinite(same)


def test_the_cosine_of_halves():
    """Guards against halves that share a batch, or are of unequal size."""
    rng = np.random.default_rng(0)
    for n in (2, 4, 5):
        x, found = gaussian(rng, n, 6, 1.0), []
        for a in itertools.combinations(range(n), n // 2):
            for b in itertools.combinations([i for i in range(n) if i not in a], n // 2):
                u, v = x[list(a)].mean(0), x[list(b)].mean(0)
                found.append(u @ v / (u @ u * (v @ v)) ** 0.5)
        error = np.std(found) / 200**0.5
        assert gradients.halves_cosine(x @ x.T) == pytest.approx(np.mean(found), abs=4 * error + 1e-9)
    assert gradients.halves_cosine(np.ones((6, 6))) == pytest.approx(1)


def alternate(text, *problem):
    """A reward that varies whatever the model has learned."""
    answer = float(sum(map(ord, text)) % 3 == 0)
    return {"reward": answer + 0.05 * (len(text) % 3), "answer": answer, "format": 0.5 * (len(text) % 3)}


@pytest.fixture
def brief(monkeypatch):
    """All that makes the whole of it take long made small, and rewards that a start of 12 tokens can earn."""
    for name, value in {"LIMIT": 12, "EACH": 2, "SIZES": (2, 4), "CONTROLS_AT": 4, "TRUTH": (2, 8)}.items():
        monkeypatch.setattr(gradients, name, value)
    monkeypatch.setattr(critic, "SIZE", 4)
    monkeypatch.setattr(critic, "PUZZLES", 2)
    monkeypatch.setattr(grpo, "reward", alternate)
    few = {name: MITIGATIONS[name] for name in ("none", "ppo", "dpo", "random")}
    monkeypatch.setattr(gradients, "MITIGATIONS", few)


@pytest.fixture
def tiny(random_model, codec, tmp_path, monkeypatch):
    """The folder of a model of two layers and random weights: quick, and its responses end anywhere."""
    folder, model = tmp_path / "tiny", random_model.float()
    train.copy_tokenizer(BUNDLED, folder)
    with torch.no_grad():
        for w in model.parameters():
            w.mul_(0.5)
    save_model(model, folder)
    monkeypatch.setattr(codec, "end_tokens", list(range(0, codec.size, 8)))
    monkeypatch.setattr(gradients, "Codec", lambda folder: codec)
    return folder


def test_method_gradients_are_what_the_trainer_applies(codec, brief, tiny, monkeypatch):
    """Guards against another normalizer than the trainer's, a prompt of another question, batches that share chance or
    puzzles, and a policy gradient that is not the one of r - the others' mean."""
    asked, batches, keys, original = [], [], set(), gradients.sample_groups

    def recorded(model, codec, problems, answers, key, critic=None):
        batches.append(original(model, codec, problems, answers, key, critic))
        asked.append(problems)
        keys.add(key)
        return batches[-1]

    monkeypatch.setattr(gradients, "sample_groups", recorded)
    model = gradients.prepared(tiny)
    found = gradients.method_gradients(model, codec, critic.Critic(32), 2, 3, 0)
    assert found.shape == (5, 2, sum(w.numel() for w in model.parameters()))
    assert len(batches) == len(keys) == 2 and not set(asked[0]) & set(asked[1])
    for i, (problems, batch) in enumerate(zip(asked, batches)):
        prompts, own, twin = [codec.prompt(p) for p in problems], deepcopy(model), deepcopy(model)
        assert len(batch.text) == 24 and len(problems) == 3 and len(batch.mask.sum(1).unique()) > 4
        plain_update(own, prompts, batch, batch.advantage[:, None] * batch.mask, clip=(math.inf, math.inf))
        by_hand = -torch.cat([w.grad.flatten() for w in own.parameters()])
        torch.testing.assert_close(found[0, i], by_hand, rtol=1e-4, atol=1e-5 * by_hand.norm().item())
        for k, name in enumerate(gradients.MITIGATIONS):
            optimizer = grpo.Optimizer(twin, 0.0)
            with torch.no_grad():
                credit = MITIGATIONS[name](batch)
            grpo.update(twin, optimizer, prompts, batch, credit, max_new_tokens=12, max_grad_norm=math.inf)
            applied = -torch.cat([w.grad.flatten() for w in twin.parameters()])
            torch.testing.assert_close(found[k, i], applied, rtol=1e-4, atol=1e-5 * applied.norm().item())
        reward, weight = batch.reward.tolist(), torch.zeros(24)
        for j in range(24):
            others = [reward[m] for m in range(j // 8 * 8, j // 8 * 8 + 8) if m != j]
            weight[j] = (reward[j] - sum(others) / 7) / 24
        logprob = plain_logprobs(model, [prompts[g] for g in batch.group.tolist()], batch.tokens, batch.mask)
        policy = flat_gradient(model, (weight[:, None] * logprob).sum())
        torch.testing.assert_close(found[-1, i], policy, rtol=1e-4, atol=1e-5 * policy.norm().item())


def test_the_table_of_methods_by_hand(monkeypatch):
    """Guards against figures in another method's row, and against the first method as the reference."""
    monkeypatch.setattr(gradients, "MITIGATIONS", {"one": None, "two": None})
    rng, n = np.random.default_rng(0), 9
    x = torch.tensor(np.stack([gaussian(rng, n, 40, 5.0), gaussian(rng, n, 40, -4.0), gaussian(rng, n, 40, 6.0)]))
    x[1, :, 1] += 3
    table = gradients.table_methods(x.float())
    assert [row[0] for row in table.rows[:2]] == ["one", "two"] and len(table.rows) == 3
    for g, row in zip(x.numpy(), table.rows):
        S, mean, of_all = g.var(0, ddof=1).sum(), g.mean(0), x[-1].numpy().mean(0)
        assert number(row[1]) == pytest.approx((mean @ mean - S / n) / S, abs=6e-4)
        assert number(row[2]) == pytest.approx(mean @ of_all / (mean @ mean * (of_all @ of_all)) ** 0.5, abs=6e-3)
    assert number(table.rows[1][2]) < 0 < number(table.rows[0][2]) and "1.00" in table.rows[2][3]


def test_no_cosine_is_printed_without_an_interval(monkeypatch):
    """Guards against `2.17 (nan to nan)`: without one of the batches there is no signal, and so no cosine."""
    monkeypatch.setattr(gradients, "MITIGATIONS", {"weak": None})
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        x = np.stack([gaussian(rng, 4, 30, 0.8), gaussian(rng, 4, 30, 6.0)])
        grams = x[0] @ x[1].T, x[0] @ x[0].T, x[1] @ x[1].T
        *parts, whole = [math.isfinite(gradients.cosines(*grams, np.arange(4) != i)[1]) for i in range(5)]
        if whole and not all(parts):
            break
    else:
        pytest.fail("no such case was found")
    table = gradients.table_methods(torch.tensor(x))
    assert table.rows[0][3] == "" != table.rows[0][2] and "nan" not in str(table)


# ------------------------------------------------------------------------------------------------ over training


@given(st.lists(st.floats(-100, 100).filter(lambda v: v == 0 or abs(v) > 1e-3), min_size=2, max_size=30).filter(any))
@settings(max_examples=100, deadline=None)
def test_sparsity_by_its_definitions(values):
    """Guards against a Gini coefficient of values not sorted or with sign, and against Hoyer's of squares."""
    found = gradients.sparsity(np.array(values))
    size, n = [abs(v) for v in values], len(values)
    gini = sum(abs(a - b) for a in size for b in size) / n**2 / (2 * sum(size) / n)
    rms = (sum(v * v for v in size) / n) ** 0.5
    hoyer = (n**0.5 - sum(size) / sum(v * v for v in size) ** 0.5) / (n**0.5 - 1)
    assert found["Gini"] == pytest.approx(gini, abs=1e-9) and found["Hoyer"] == pytest.approx(hoyer, abs=1e-9)
    assert found["below rms / 100"] == pytest.approx(sum(v < 0.01 * rms for v in size) / n)


def test_sparsity_at_its_ends():
    """Guards against another scale: 0 where all are alike, 1 where one has all, in float32 as gradients are."""
    alike, single = np.full(10_000, -3e-5, np.float32), np.eye(1, 10_000, 77, dtype=np.float32)[0] * -1e-4
    assert [*gradients.sparsity(alike).values()] == pytest.approx([0, 0, 0], abs=1e-6)
    assert [*gradients.sparsity(single).values()] == pytest.approx([1, 1, 1], abs=2e-4)


def run_of(folder, start, models):
    """A run folder that began with the model of another folder and has these as checkpoints, by step."""
    for step, model in models.items():
        place = folder / "checkpoints" / f"step-{step:06d}"
        train.copy_tokenizer(BUNDLED, place)
        save_model(model, place)
    (folder / "config.json").write_text(json.dumps({"settings": {"model": str(start)}}))
    return folder


def test_over_training_by_hand(codec, brief, tiny, tmp_path):
    """Guards against other puzzles or chance at each checkpoint, checkpoints in the order of their names, the gradient
    of the whole batch or of a response where it is a question's, and figures in the wrong column."""
    start = gradients.prepared(tiny)
    other = deepcopy(start)
    with torch.no_grad():
        for w in other.parameters():
            w.mul_(1 + 0.1 * torch.rand(w.shape, generator=torch.Generator().manual_seed(0)))
    run = run_of(tmp_path / "run", tiny, {100: start, 5: other})
    (run / "checkpoints" / "step-000050.part").mkdir()  # left by a run that was killed
    problems = gradients.generate_problems(3, "train", seed=7)
    table = gradients.table_training(run, problems, 4, 3)
    assert [row[0] for row in table.rows] == ["0", "5", "100"] and table.rows[0][1:] == table.rows[2][1:]
    batch = gradients.by_success(gradients.sample_groups(start, codec, problems, 4, (3, 0)))
    prompts, each = [codec.prompt(p) for p in problems], []
    logprob = plain_logprobs(start, [prompts[g] for g in batch.group.tolist()], batch.tokens, batch.mask)
    for i in range(12):
        total = (batch.advantage[i] * logprob[i]).sum()
        each.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(total, list(start.parameters()), retain_graph=True)])
        )
    taught = [
        torch.stack(each[4 * q : 4 * q + 4]).numpy() for q in range(3) if batch.advantage[4 * q : 4 * q + 4].any()
    ]
    assert len(taught) >= 2
    sparse = [gradients.sparsity(g.sum(0)) for g in taught]
    shares = [spectrum(g) / spectrum(g).sum() for g in taught]
    ranks = [np.prod([p**-p for p in s if p > 0]) for s in shares]
    row, other_row = (dict(zip(table.header, row)) for row in table.rows[:2])
    assert float(row["success"]) == pytest.approx(batch.success.mean().item(), abs=6e-3)
    for name in ("Hoyer", "Gini", "below rms / 100"):
        mean, error = interval([s[name] for s in sparse])
        assert [float(v) for v in row[name].split(" ± ")] == pytest.approx([mean, error], abs=2e-3)
    assert number(row["effective rank"]) == pytest.approx(np.mean(ranks), abs=0.06)
    c = gradients.token_columns(start, codec, problems, batch, 3)
    use = np.isfinite(c["whole"]) & (c["advantage"] != 0)
    for name, x in gradients.three_sizes(c).items():
        expected = ratio_by_loops(x, c, use, False, range(3))
        assert (row[name] == "" and math.isnan(expected)) or number(row[name]) == pytest.approx(expected, abs=6e-3)
    assert row["Hoyer"] != other_row["Hoyer"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_checkpoint_that_solves_nothing_has_a_row(brief, tiny, monkeypatch, tmp_path):
    """Guards against a run that collapsed, whose groups are all alike: the table ended in a traceback."""
    monkeypatch.setattr(grpo, "reward", lambda text, *problem: {"reward": 0.0, "answer": 0.0, "format": 0.0})
    run = run_of(tmp_path / "run", tiny, {5: gradients.prepared(tiny)})
    table = gradients.table_training(run, gradients.generate_problems(3, "train", seed=7), 4, 3)
    assert [row[:2] for row in table.rows] == [["0", "0.00"], ["5", "0.00"]] and "nan" not in str(table)
    assert all(len(row) == len(table.header) for row in table.rows)


# ------------------------------------------------------------------------------------------------- the command


def test_a_star_of_the_first_answers(codec, brief, tiny, monkeypatch):
    """Guards against values on the wrong response, rollouts for responses that nobody asked about, and too few."""
    model = gradients.prepared(tiny)
    problems = gradients.generate_problems(3, "train", seed=0)
    batch = gradients.by_success(gradients.sample_groups(model, codec, problems, 5, (0, 0)))
    kept = {}

    def sampled(model, codec, problems, truth, rollouts, seed, limit, save):
        assert rollouts == 8 and limit == 12
        rng, kept["truth"] = np.random.default_rng(0), truth
        truth["packets"] = ground_truth.packets_wanted(truth["logprob"], rollouts)
        truth["solved"] = rng.binomial(truth["packets"][:, None] * 4, 0.3, size=(len(truth["token"]), 2))

    monkeypatch.setattr(gradients, "sample_truth", sampled)
    found = gradients.sampled_truth(model, codec, problems, batch, 0)
    truth, n = kept["truth"], 0
    for i, L in enumerate(batch.mask.sum(1).tolist()):
        asked = i % 5 < 4 and i // 5 < 2  # the first 4 of 5 answers to the first 2 of 3 questions
        V, expected = batch.success[i].item(), [0.0] * L
        for t in reversed(range(L)):
            p, packets = batch.logprob[i, t].exp().item(), truth["packets"][n + t]
            assert (packets > 0) == (asked and 1 - p > 0.005)
            if packets:
                U = truth["solved"][n + t].sum() / (8 * packets)
                expected[t] = (1 - p) * (V - U)
                V = p * V + (1 - p) * U
        n += L
        assert found[i, :L].tolist() == pytest.approx(expected, abs=1e-5) and not found[i, L:].any()


def call(monkeypatch, *flags):
    """The command, in this process."""
    monkeypatch.setattr(sys, "argv", ["gradients.py", *map(str, flags)])
    gradients.main()


TITLES = ["Three sizes of a token's gradient: rank correlation", "Filler against reasoning", "By kind of token",
          "Phase 1 of the original work: gradients at the input embeddings", "Effective rank by group size",
          "Measures of rank, R = 4", "Effective rank under other credit, R = 4", "Which baseline is best?",
          "Noise and bias of each method's gradient"]  # fmt: skip


def test_the_whole_command(brief, monkeypatch, tmp_path, capsys):
    """Guards against a table that is not written or written twice, numbers that are none, a picture that is empty, and
    a run's checkpoints that are left out."""
    flags = "--steps 2 --checkpoint_every 1 --questions 2 --answers 2 --max_new_tokens 24 --eval_problems 2"
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split(), "--out", str(tmp_path / "run")])
    train.main()
    capsys.readouterr()
    small = ("--questions", 4, "--batches", 4, "--critic_batches", 1, "--out", tmp_path / "out")
    call(monkeypatch, *small, "--run", tmp_path / "run")
    text, out = (tmp_path / "out" / "gradients.md").read_text(encoding="utf-8"), capsys.readouterr().out
    assert re.findall(r"^## (.*)", text, re.M) == [*TITLES, "Over training"]
    assert text in out and not re.search(r"\b(nan|inf)\b", text)
    tables = {block.split("\n", 1)[0]: block for block in text.split("## ")[1:]}
    assert re.findall(r"^\| (\d) +\|", tables["Over training"], re.M) == ["0", "1", "2"]
    assert all(f"\n| {name} " in tables[TITLES[-1]] for name in gradients.MITIGATIONS)
    picture = gradients.plt.imread(tmp_path / "out" / "gradients.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100  # colours
    assert (tmp_path / "out" / critic.FILE).is_file()


def test_the_same_command_gives_the_same_numbers(brief, tiny, monkeypatch, tmp_path):
    """Guards against chance that no seed fixes, --seed or --model without effect, another critic the second time."""
    texts, keys, original = [], [], gradients.sample_groups

    def recorded(model, codec, problems, answers, key, critic=None):
        keys[-1].add(key)
        return original(model, codec, problems, answers, key, critic)

    monkeypatch.setattr(gradients, "sample_groups", recorded)
    monkeypatch.setattr(gradients, "draw", lambda *args: None)
    for flags in ([], [], ["--seed", 1], ["--model", tmp_path / "other"]):
        if "--model" in flags:
            other = gradients.prepared(tiny)
            with torch.no_grad():
                other.model["norm"].weight.mul_(1.5)
            train.copy_tokenizer(BUNDLED, tmp_path / "other")
            save_model(other, tmp_path / "other")
        small = ("--model", tiny, "--questions", 4, "--batches", 4, "--critic_batches", 1, "--out", tmp_path / "out")
        keys.append(set())
        call(monkeypatch, *small, *flags)
        texts.append((tmp_path / "out" / "gradients.md").read_text(encoding="utf-8"))
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert [{seed for seed, _ in used} for used in keys] == [{0}, {0}, {1}, {0}] and all(
        len(used) == 5 for used in keys
    )


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--run", "RUN"], "checkpoints"),
        (["--run", "nowhere"], "checkpoints"),
        (["--run", "UNKNOWN"], "config.json"),
        (["--model", "nowhere"], "nowhere"),
        (["--colour", "red"], "--colour"),
        (["--quest", "12"], "--quest"),
        (["--questions", "3"], "--questions"),
        (["--questions", "many"], "--questions"),
        (["--batches", "3"], "--batches"),
        (["--critic_batches", "0"], "--critic_batches"),
    ],
)
def test_the_command_line_refuses_in_one_sentence(flags, named, monkeypatch, tmp_path):
    """Guards against a traceback, or minutes of work, before what the user got wrong is said."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "unknown" / "checkpoints" / "step-000001").mkdir(parents=True)  # no config.json
    monkeypatch.setattr(gradients, "the_critic", lambda *args: pytest.fail("went to work"))
    flags = [{"RUN": tmp_path / "run", "UNKNOWN": tmp_path / "unknown"}.get(flag, flag) for flag in flags]
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *flags, "--out", tmp_path / "out")
    message = str(stop.value.code)
    assert message.startswith("error: ") and named in message and "\n" not in message


def test_a_model_that_solves_nothing_is_refused_in_one_sentence(brief, tiny, monkeypatch, tmp_path):
    """Guards against an error that says nothing of the cause: `zero-size array to reduction operation maximum`."""
    monkeypatch.setattr(grpo, "reward", lambda text, *problem: {"reward": 0.0, "answer": 0.0, "format": 0.0})
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, "--model", tiny, "--questions", 4, "--critic_batches", 1, "--out", tmp_path / "out")
    message = str(stop.value.code)
    assert message.startswith("error: ") and "zero-size" not in message and "\n" not in message


def test_an_error_is_an_exit_status(tmp_path):
    """Guards against a failure that a script takes for success."""
    command = [sys.executable, "-m", "experiments.gradients", "--batches", "1", "--out", str(tmp_path / "out")]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode != 0 and result.stderr.startswith("error: ") and "Traceback" not in result.stderr
