"""The truth about each token: values against all continuations, the solver against all expressions, scores by hand.

Run it:  python -m pytest tests/test_ground_truth.py
"""

import functools
import io
import itertools
import json
import math
import re
import shutil
import sys
import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from conftest import make_written
from countdown_task import Problem, evaluate, find_steps, reward
from experiments import ground_truth as gt
from mitigations import MITIGATIONS
from qwen2_model import Qwen2, generate, read_config
from tests.plain import plain_logprobs
from train import BUNDLED

PIECES = ("", "<answer>1+2</answer>", "<answer>2-1</answer>", " hm", " so")  # the last answer decides
PUZZLES = [Problem((1, 2), 3), Problem((1, 2), 1)]


class Pieces:
    """A codec of five tokens, each a whole piece of text; 0 ends a response."""

    end_tokens, size = [0], len(PIECES)

    def prompt(self, problem):
        return [3, *problem.numbers, 4, problem.target]

    def decode(self, tokens):
        stops = list(itertools.accumulate((len(PIECES[t]) for t in tokens), initial=0))
        return "".join(PIECES[t] for t in tokens), list(zip(stops, stops[1:]))


def tiny_model(seed=0, std=0.5):
    """A one-layer Qwen2 with a vocabulary of five; the larger std, the surer it is."""
    torch.manual_seed(seed)
    size = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    model = Qwen2(
        read_config(dict(model_type="qwen2", vocab_size=5, num_hidden_layers=1, tie_word_embeddings=True) | size)
    )
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model


def policy(model, problem, prefixes):
    """The probability (n, 5) of every next token after prefixes of one length, by a plain forward in float64."""
    rows = torch.tensor([Pieces().prompt(problem) + list(prefix) for prefix in prefixes])
    with torch.no_grad():
        return model.double()(rows)[:, -1].softmax(-1).numpy()


def exact_values(model, problem, limit):
    """V of every prefix of at most `limit` tokens: all continuations with their probabilities, graded as they stand."""
    rows = [[prefix for prefix in itertools.product(range(1, 5), repeat=t)] for t in range(limit)]
    chances = {prefix: p for prefixes in rows for prefix, p in zip(prefixes, policy(model, problem, prefixes))}
    model.float()

    @functools.cache
    def value(prefix):
        if 0 in prefix or len(prefix) == limit:
            return reward(Pieces().decode(prefix)[0], *problem)["answer"]
        return sum(p * value((*prefix, token)) for token, p in enumerate(chances[prefix]))

    return value


def described(model, limit, answers, problems=PUZZLES, seed=0):
    """Responses of the tiny model and the columns of ground_truth.npz that they begin with."""
    uniforms = grpo.draw_uniforms(seed, 1, len(problems), answers, limit)
    batch = grpo.rollout(model, Pieces(), problems, uniforms)
    return batch, gt.describe(batch, {})


def sampled(model, truth, rollouts, limit, problems=PUZZLES, seed=0, save=lambda: None):
    """The same with rollouts and the values that follow from them."""
    gt.sample_truth(model, Pieces(), problems, truth, rollouts, seed, limit, save)
    gt.add_values(truth)
    return truth


def exact_columns(model, truth, limit, problems=PUZZLES):
    """The exact V and A* of each row of `truth`."""
    values = [exact_values(model, problem, limit) for problem in problems]
    V, A = [], []
    for where in gt.by_response(truth):
        tokens, value = truth["token"][where].tolist(), values[truth["group"][where.start]]
        path = [value(tuple(tokens[:t])) for t in range(len(tokens) + 1)]
        V, A = V + path[:-1], A + np.diff(path).tolist()
    return np.array(V), np.array(A)


def others(truth):
    """1 - p of each row."""
    return 1 - np.exp(truth["logprob"].astype(float))


# ------------------------------------------------------------------------- the backward form, by enumeration


def test_values_converge_to_those_of_all_continuations():
    """Guards against any bias: another token limit, a first token that may be the actual one, values of another token
    or puzzle, a response cut off that is not graded as it stands, 1 - p in place of p."""
    limit, model = 4, tiny_model(1)
    truth = sampled(model, described(model, limit, 10)[1], 500, limit)
    V, A = exact_columns(model, truth, limit)
    assert len(np.unique(V.round(6))) > 15 and set(truth["success"]) == {0, 1}
    lengths = np.bincount(truth["response"])
    assert lengths.max() == limit and lengths.min() < limit
    for got, error, exact in (("value", "value_error", V), ("a_star", "a_star_error", A)):
        z = (truth[got] - exact) / np.maximum(truth[error], 1e-9)
        assert np.abs(truth[got] - exact).max() < 0.12 and np.abs(z).max() < 4.5
        assert 0.7 < np.sqrt(np.mean(z[truth[error] > 1e-4] ** 2)) < 1.3


@pytest.mark.parametrize("rollouts", [24, 100])
def test_intervals_cover_the_exact_values(rollouts):
    """Guards against standard errors that are too small or too large: of V and A* on tokens with 1 - p > 0.01, 95%
    should lie within 1.96 of them."""
    inside, limit = [], 4
    for seed, std in enumerate((0.3, 0.5, 0.8)):
        model = tiny_model(seed, std)
        truth = sampled(model, described(model, limit, 48, seed=seed)[1], rollouts, limit, seed=seed)
        V, A = exact_columns(model, truth, limit)
        errors = truth["value_error"], truth["a_star_error"]
        off = np.abs(truth["value"] - V), np.abs(truth["a_star"] - A)
        inside += [np.stack([o <= 1.96 * e + 1e-9 for o, e in zip(off, errors)], 1)[others(truth) > 0.01]]
    coverage = np.concatenate(inside).mean(0)
    assert len(np.concatenate(inside)) > 500
    assert (coverage > 0.92).all() and (coverage < 0.98).all(), coverage


def test_sure_tokens_get_no_rollouts_and_others_their_share():
    """Guards against rollouts where they can't matter, none where they do, and a number that is not rollouts (1 - p)."""
    p = np.array([1.0, 0.9951, 0.9949, 0.9, 0.5, 0.04, 0.039, 1e-9])
    assert gt.packets_wanted(np.log(p), 100).tolist() == [0, 0, 1, 2, 7, 12, 13, 13]
    assert gt.packets_wanted(np.log(p), 1).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    model, limit = tiny_model(2, 2.0), 4
    truth = sampled(model, described(model, limit, 16)[1], 40, limit)
    sure = others(truth) <= gt.SURE
    assert 10 < sure.sum() < len(sure) - 10 and not truth["packets"][sure].any() and truth["packets"][~sure].all()
    assert not truth["a_star"][sure].any() and (truth["solved"] <= truth["packets"][:, None] * gt.PACKET // 2).all()
    _, A = exact_columns(model, truth, limit)
    assert (np.abs(A) <= others(truth) + 1e-6).all() and np.abs(A[sure]).max() <= gt.SURE


RESPONSE = st.lists(
    st.tuples(st.floats(1e-6, 1.0), st.integers(0, 12).flatmap(lambda k: st.tuples(st.integers(0, k), st.just(k)))),
    min_size=1,
    max_size=12,
)


def values_forwards(p, U, success):
    """V before each token and behind the last, from the front: go on along the response, or leave it at some token.

    p: the probability of staying on it, U: the value of having left it there.
    """
    V = []
    for t in range(len(p) + 1):
        stay, value = 1.0, 0.0
        for s in range(t, len(p)):
            value, stay = value + stay * (1 - p[s]) * U[s], stay * p[s]
        V.append(value + stay * success)
    return np.array(V)


@given(RESPONSE, st.booleans())
@settings(max_examples=150, deadline=None)
def test_backward_is_the_sum_over_places_to_leave_the_response(rows, success):
    """Guards against a wrong recursion, an A* beyond 1 - p, one that does not sum to the outcome, or wrong errors.

    The values are linear in the U's: with every U moved up or down by its error, over all signs, the mean square change
    is the variance.
    """
    p, counts = (np.array(column) for column in zip(*rows))
    solved, tried = counts.T
    V, V_error, A, A_error = gt.backward(np.log(p), solved, tried, success)
    U, rate = solved / np.maximum(tried, 1), (solved + 1) / (tried + 2)
    stays, error = np.where(tried > 0, p, 1.0), np.where(
        tried > 0, np.sqrt(rate * (1 - rate) / np.maximum(tried, 1)), 0
    )
    exact = values_forwards(stays, U, success)
    assert V == pytest.approx(exact[:-1], abs=1e-9) and A == pytest.approx(np.diff(exact), abs=1e-9)
    assert (np.abs(A) <= (1 - p) * (1 + 1e-9) + 1e-12).all() and A.sum() == pytest.approx(success - V[0], abs=1e-12)
    assert (V > -1e-12).all() and (V < 1 + 1e-12).all()
    moved = [values_forwards(stays, U + sign * error, success) - exact for sign in np.eye(len(p))]  # each U alone
    assert V_error**2 == pytest.approx(sum(m[:-1] ** 2 for m in moved), abs=1e-9)
    assert A_error[tried > 0] ** 2 == pytest.approx(sum(np.diff(m) ** 2 for m in moved)[tried > 0], abs=1e-9)
    assert A_error[tried == 0] == pytest.approx(1 - p[tried == 0], abs=1e-9)  # its bound


def test_errors_are_those_of_repeated_binomials():
    """Guards against variances that hold on paper only: estimates from 4,000 draws of the rollouts, and their spread."""
    rng, p, U, tried = np.random.default_rng(0), np.array([0.9, 0.3, 0.6, 0.05]), [0.2, 0.7, 0.4, 0.9], [16, 64, 40, 96]
    draws = np.array([gt.backward(np.log(p), s, np.array(tried), 1.0) for s in rng.binomial(tried, U, (4000, 4))])
    exact = values_forwards(p, U, 1.0)
    for got, error, truth in ((draws[:, 0], draws[:, 1], exact[:-1]), (draws[:, 2], draws[:, 3], np.diff(exact))):
        spread = got.std(0)
        assert (np.abs(got.mean(0) - truth) < 4 * spread / 4000**0.5).all()
        assert np.sqrt((error**2).mean(0)) == pytest.approx(spread, rel=0.06)


def test_the_halves_are_independent_and_average_to_the_whole():
    """Guards against halves that share rollouts, which would make the noise look smaller than it is."""
    model, limit = tiny_model(0), 4
    truth = sampled(model, described(model, limit, 40)[1], 100, limit)
    first, second = truth["a_star_halves"].T
    tried = truth["packets"] > 0
    assert (first + second) / 2 == pytest.approx(truth["a_star"], abs=1e-12)
    z = ((first - second) / 2 / truth["a_star_error"])[tried]
    assert tried.sum() > 150 and 0.88 < np.sqrt(np.mean(z**2)) < 1.12


# --------------------------------------------------------------------- rollouts: which, how many, whose chance


def counts(truth):
    """What the rollouts of a file came to."""
    return truth["packets"].tolist(), truth["solved"].tolist(), int(truth["sampled"])


def test_rollouts_added_later_are_those_made_at_once(monkeypatch):
    """Guards against rollouts that repeat or skip chance when a second call adds some, or when memory sets the chunks."""
    model, limit = tiny_model(3), 4
    fresh = described(model, limit, 6)[1]
    copies = [{k: v.copy() for k, v in fresh.items()} for _ in range(4)]
    sampled(model, copies[0], 60, limit)
    once = sum(copies[0]["packets"])
    for rollouts, expected in ((24, False), (60, True), (30, True)):
        sampled(model, copies[1], rollouts, limit)
        assert (counts(copies[1]) == counts(copies[0])) == expected
    monkeypatch.setattr(grpo, "ROWS_AT_ONCE", 40)
    sampled(model, copies[2], 60, limit)
    sampled(model, copies[3], 60, limit, seed=1)
    assert counts(copies[2]) == counts(copies[0]) and once > 100
    assert copies[3]["packets"].tolist() == copies[0]["packets"].tolist() and counts(copies[3]) != counts(copies[0])


def test_chance_does_not_depend_on_the_other_responses():
    """Guards against rollouts drawn from one stream, which another response, or a shorter limit, would shift."""
    model, limit = tiny_model(3), 4
    whole = described(model, limit, 6)[1]
    some = {
        k: v[np.isin(whole["response"], (2, 7))]
        for k, v in whole.items()
        if len(v.shape) and len(v) == len(whole["token"])
    }
    some["sampled"] = np.array(0)
    sampled(model, whole, 40, limit), sampled(model, some, 40, limit)
    rows = np.isin(whole["response"], (2, 7))
    assert whole["solved"][rows].tolist() == some["solved"].tolist() and some["solved"].any()
    chance = [gt.chance_of(*key) for key in itertools.product((0, 1), (0, 1), (0, 5), [range(2)], [6])]
    assert len(np.unique(chance)) == 8 * 2 * gt.PACKET * 6  # no number twice
    assert np.array_equal(chance[0][gt.PACKET :], gt.chance_of(0, 0, 0, range(1, 2), 6))


@pytest.mark.parametrize("where", ["respond", "save"])
def test_an_interruption_loses_nothing_that_was_saved(where, tmp_path, monkeypatch):
    """Guards against counts that are half written when a run is stopped, and against rollouts made twice or never."""
    model, limit, file, calls, respond = tiny_model(3), 4, tmp_path / "ground_truth.npz", [], grpo.respond
    fresh = described(model, limit, 6)[1]
    whole, first, second = ({k: v.copy() for k, v in fresh.items()} for _ in range(3))
    monkeypatch.setattr(grpo, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(gt, "SAVE_EVERY", 0.0)
    sampled(model, whole, 60, limit)

    def interrupted(name, work):
        def run(*args):
            calls.append(name)
            if name == where and calls.count(name) == 4:
                raise KeyboardInterrupt
            return work(*args)

        return run

    monkeypatch.setattr(grpo, "respond", interrupted("respond", respond))
    with pytest.raises(KeyboardInterrupt):
        sampled(model, first, 60, limit, save=interrupted("save", lambda: gt.save_truth(first, file)))
    saved, sizes = dict(np.load(file)), []
    assert 0 < saved["packets"].sum() < whole["packets"].sum() and list(tmp_path.iterdir()) == [file]
    monkeypatch.setattr(grpo, "respond", lambda *args: (sizes.append(len(args[3])), respond(*args))[1])
    gt.take_over(second, file)
    assert counts(second) == counts(saved)
    sampled(model, second, 60, limit)
    assert counts(second) == counts(whole)
    assert sum(sizes) == (whole["packets"].sum() - saved["packets"].sum()) * gt.PACKET


def test_rollouts_begin_with_another_token_and_keep_the_limit(monkeypatch):
    """Guards against fresh ends that repeat the actual token, start from another prefix, or outlive the response's limit."""
    model, limit, seen, make = tiny_model(2, 0.8), 5, [], grpo.generate

    def spy(model, prompts, uniforms, ends, limit, not_first):
        samples = make(model, prompts, uniforms, ends, limit=limit, not_first=not_first)
        rows = zip(samples.tokens.tolist(), samples.mask.sum(1).tolist())
        seen.extend((tuple(prompts[i // gt.PACKET]), tuple(row[:length])) for i, (row, length) in enumerate(rows))
        return samples

    truth = described(model, limit, 5)[1]
    monkeypatch.setattr(grpo, "generate", spy)
    sampled(model, truth, 60, limit)
    expected, begun = Counter(), set()
    for where in gt.by_response(truth):
        tokens, prompt = truth["token"][where].tolist(), Pieces().prompt(PUZZLES[truth["group"][where.start]])
        for t, packets in enumerate(truth["packets"][where].tolist()):
            expected[tuple(prompt + tokens[:t])] += packets * gt.PACKET
            begun |= {(tuple(prompt + tokens[:t]), token) for token in set(range(5)) - {tokens[t]}}
    assert +expected == Counter(prefix for prefix, _ in seen)
    assert all((prefix, end[0]) in begun for prefix, end in seen)  # of one that two responses share, either's others
    lengths = [len(prefix) - 5 + len(end) for prefix, end in seen]
    assert max(lengths) == limit and all(n == limit or end[-1] == 0 for n, (_, end) in zip(lengths, seen))
    assert sum(len(end) for _, end in seen) == truth["sampled"]


@pytest.mark.parametrize("static", [False, True])
def test_the_first_token_is_drawn_from_all_but_one(static):
    """Guards against a first token that is the excluded one, whose chance is not renormalised, or an exclusion that
    goes on: against the exact inverse distribution on a grid of uniforms, and plain sampling behind it."""
    model, n, limit = tiny_model(1, 0.4), 400, 4
    prompts = [Pieces().prompt(problem) for problem in PUZZLES]
    p = np.stack([policy(model, problem, [()])[0] for problem in PUZZLES])
    model.float()
    grid = (np.arange(n) + 0.5) / n
    chance = np.random.default_rng(0).random((2 * n, limit))
    chance[:, 0] = np.tile(grid, 2)
    chance, left = torch.from_numpy(chance), torch.arange(2 * n) % limit + 1
    for but in range(5):
        excluded = torch.full((2 * n,), but)
        excluded[::7] = (but + 1) % 5
        got = generate(model, prompts, chance, [0], limit=left, not_first=excluded, static=static)
        first = got.tokens[:, 0].numpy()
        for row in range(2 * n):
            rest = p[row // n].copy()
            rest[excluded[row]] = 0
            bounds = np.cumsum(rest) / rest.sum()
            if np.abs(bounds - grid[row % n]).min() > 1e-5:  # else rounding decides
                assert first[row] == np.searchsorted(bounds, grid[row % n])
        assert got.logprob[:, 0].exp().numpy() == pytest.approx(p.repeat(n, 0)[np.arange(2 * n), first], abs=1e-5)
        lengths = got.mask.sum(1)
        assert (lengths <= left).all() and (got.ended | (lengths == left)).all()
        for start in range(1, 5):
            for question in range(2):
                rows = torch.from_numpy(
                    np.flatnonzero((first == start) & (np.arange(2 * n) // n == question) & (left.numpy() > 1))
                )
                if not len(rows):
                    continue
                later = generate(model, [prompts[question] + [start]], chance[rows, 1:], [0], limit=left[rows] - 1)
                width = later.tokens.shape[1]
                assert torch.equal(got.tokens[rows, 1 : 1 + width], later.tokens)
        where = got.mask[:, 1:] & (excluded == but)[:, None]
        assert (got.tokens[:, 1:][where] == but).any()  # later it may be drawn


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 90)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_chunks_hold_every_token_once(rows):
    """Guards against tokens left out or sampled twice, and chunks larger than what is sampled at once."""
    todo, position = np.array(rows, int).reshape(-1, 2).T
    parts = gt.chunks(todo, position)
    assert sorted(i for part in parts for i in part) == np.flatnonzero(todo).tolist()
    for part in parts:
        assert (np.diff(position[part]) >= 0).all()
        assert todo[part][1:].sum() * gt.PACKET <= grpo.ROWS_AT_ONCE  # what is more began with one token too large


# ------------------------------------------------------------------------- the solver, by all expressions


@functools.cache
def expressions(values):
    """Every expression of all the values, each once, as (text, value); in parentheses but for a lone number."""
    if len(values) == 1:
        return [(str(values[0]), Fraction(values[0]))]
    found = []
    for chosen in range(1, 2 ** len(values) - 1):
        left, right = (tuple(v for i, v in enumerate(values) if (chosen >> i & 1) == side) for side in (1, 0))
        for (a, x), (b, y) in itertools.product(expressions(left), expressions(right)):
            results = {"+": x + y, "-": x - y, "*": x * y} | ({"/": x / y} if y else {})
            found += [(f"({a} {operator} {b})", result) for operator, result in results.items()]
    return found


@functools.cache
def beginnings(values, target):
    """What a solution may begin with: None where there is one, (a,), (a, operator), (a, operator, b)."""
    begun = set()
    for text, value in expressions(values):
        if value == target:
            begun.add(None)
            for a, operator, b in re.findall(r"\((-?\d+) ([-+*/]) (-?\d+)\)", text):
                begun |= {(int(a),), (int(a), operator), (int(a), operator, int(b))}
    return begun


NUMBERS = st.lists(st.integers(-3, 12), min_size=2, max_size=4).map(sorted).map(tuple)


def test_the_expressions_are_all_and_worth_what_they_say():
    """Guards against an oracle that misses expressions, or that this project's own parser would value otherwise."""
    for values in ((3, 4, 5), (0, 2, 2), (1, 5, 5)):
        for text, value in expressions(values):
            assert evaluate(text) == value and sorted(map(int, re.findall(r"\d+", text))) == sorted(values)
    assert len(expressions((3, 4, 5))) == 12 * 4**2 and len(expressions((3, 4, 5, 7))) > 5 * 24 * 4**3 - 100
    for text in ("((5 - 3) * 4)", "(4 * (5 - 3))", "((3 / 4) / 5)", "(5 - (4 - 3))"):
        assert text in dict(expressions((3, 4, 5)))


@given(NUMBERS)
@settings(max_examples=40, deadline=None)
def test_results_are_those_of_all_expressions(values):
    """Guards against results that are missed or can't be made: fractions, zero, duplicates, negative steps."""
    assert gt.results(values) == {value for _, value in expressions(values)}


@given(NUMBERS, st.data())
@settings(max_examples=60, deadline=None)
def test_reaches_is_true_where_an_expression_begins_so(values, data):
    """Guards against a solver that lets a value be used twice, or the operands of - and / change places."""
    made = sorted({int(value) for _, value in expressions(values) if value.denominator == 1})
    target = data.draw(st.sampled_from(made) | st.integers(-5, 60))
    pool, begun = Counter(values), beginnings(values, target)
    numbers = sorted({*values, 2, 99})
    assert gt.reaches(pool, target=target) == (None in begun)
    for a in numbers:
        assert gt.reaches(pool, a, target=target) == ((a,) in begun)
        for operator in "+-*/":
            assert gt.reaches(pool, a, operator, target=target) == ((a, operator) in begun)
            for b in numbers:
                assert gt.reaches(pool, a, operator, b, target=target) == ((a, operator, b) in begun)


def test_reaches_with_one_value_left():
    """Guards against an attempt that is finished and still goes on, or that is taken to have missed."""
    assert gt.reaches(Counter([8]), target=8) and not gt.reaches(Counter([8]), target=7)
    assert not gt.reaches(Counter([8]), 8, target=8) and not gt.reaches(Counter([8]), 8, "+", 8, target=16)


ALL, NONE = [True] * 5, [False] * 5


@pytest.mark.parametrize(
    "text, numbers, target, expected",
    [
        # solved, in one order and the other
        (" Maybe 5 - 3 = 2, 4 * 2 = 8. That works!", (3, 4, 5), 8, [ALL, ALL]),
        ("5 - 3 = 2, 2 * 4 = 8", (4, 3, 5), 8, [ALL, ALL]),
        # 5 may begin a solution, 5 + may not
        ("5 + 3 = 8, 8 - 4 = 4.", (3, 4, 5), 8, [[True, True, False, False, False], NONE]),
        # the operands in the wrong order: 3 begins no solution at all
        ("3 - 5 = -2", (3, 4, 5), 8, [[True, False, False, False, False]]),
        # lost at the last operator
        ("5 - 3 = 2, 4 + 2 = 6", (3, 4, 5), 8, [ALL, [True, True, False, False, False]]),
        # a wrong result; what follows is dead
        ("5 - 3 = 3, 4 * 3 = 12", (3, 4, 5), 8, [[True] * 4 + [False], NONE]),
        ("5 - 3 = 3, 4 * 2 = 8", (3, 4, 5), 8, [[True] * 4 + [False], NONE]),
        ("5 - 3 = 4, 4 + 4 = 8", (3, 4, 5), 8, [[True] * 4 + [False], NONE]),
        # a value that is not at hand: as b, as a, twice the same
        ("5 - 2 = 3", (3, 4, 5), 8, [[True, True, True, False, False]]),
        ("7 - 3 = 4", (3, 4, 5), 8, [[True] + [False] * 4]),
        ("5 + 5 = 10", (3, 4, 5), 17, [[True, True, False, False, False]]),
        ("5 + 5 = 10, 10 + 3 = 13", (3, 5, 5), 13, [ALL, ALL]),
        # a new attempt after a sentence, the old one finished or not
        ("5 + 3 = 8, 8 * 4 = 32. That is not 8. 5 - 3 = 2, 4 * 2 = 8", (3, 4, 5), 8,
         [[True, True, False, False, False], NONE, ALL, ALL]),
        ("5 + 3 = 8. How about 5 - 3 = 2, 4 * 2 = 8", (3, 4, 5), 8, [[True, True, False, False, False], ALL, ALL]),
        # the same without a sentence between: 5 and 3 are used up
        ("5 + 3 = 8, 5 - 3 = 2", (3, 4, 5), 12, [ALL, [True] + [False] * 4]),
        # an attempt that goes on behind a sentence
        ("5 - 3 = 2. 4 * 2 = 8", (3, 4, 5), 8, [ALL, ALL]),
        # numbers are handed back when an attempt is finished, also without a sentence
        ("5 + 3 = 8, 8 + 4 = 12, 5 - 3 = 2, 4 * 2 = 8", (3, 4, 5), 8,
         [[True, True, False, False, False], NONE, ALL, ALL]),
        # open which attempt goes on: 2 * 8 of {2, 8} makes 16, of {2, 4, 8} it leads to 64
        ("4 / 2 = 2. 2 * 8 = 16", (2, 4, 8), 16, [ALL, ALL]),
        ("4 / 2 = 2. 2 * 8 = 16", (2, 4, 8), 64, [[True, True, False, False, False], ALL]),
        # 5 * (5 - 1 / 5): by way of a fraction, which can't be written as a result
        ("1 / 5 = 0", (1, 5, 5, 5), 24, [[True] * 4 + [False]]),
        # hopeless from the start; nothing written
        ("1 + 1 = 2", (1, 1), 7, [NONE]),
        (" Maybe it is 5 -", (3, 4, 5), 8, []),
    ],
)  # fmt: skip
def test_reachability_of_worked_examples(text, numbers, target, expected):
    """Guards against labels that forget a wrong result, let numbers be used twice, or start no new attempt."""
    assert gt.reachability(text, find_steps(text), numbers, target).tolist() == expected
    assert gt.reachability(text, find_steps(text), numbers, target).shape == (len(expected), 5)


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_reachability_follows_one_attempt(numbers, data):
    """Guards against labels that differ from brute force along one attempt of two calculations, right or wrong."""
    pool, alive, written, expected = Counter(numbers), True, [], []
    target = data.draw(st.sampled_from(sorted({int(v) for _, v in expressions(tuple(numbers)) if v.denominator == 1})))
    for _ in range(2):
        a = data.draw(st.sampled_from(sorted({*numbers, *pool})))
        b = data.draw(st.sampled_from(sorted({*numbers, *pool})))
        a, b, operator = abs(a), abs(b), data.draw(st.sampled_from("+-*"))
        claimed = {"+": a + b, "-": a - b, "*": a * b}[operator] + data.draw(st.sampled_from((0, 0, 0, 1)))
        right = claimed == {"+": a + b, "-": a - b, "*": a * b}[operator]
        here = tuple(sorted(pool.elements()))
        begun = beginnings(here, target) if alive else set()
        row = [key in begun for key in (None, (a,), (a, operator), (a, operator, b))]
        alive = alive and right and Counter([a, b]) <= pool
        if alive:
            pool = pool - Counter([a, b]) + Counter([claimed])
            row.append(any(value == target for _, value in expressions(tuple(sorted(pool.elements())))))
        expected.append(row + [False] * (5 - len(row)))
        written.append(f"{a} {operator} {b} = {claimed}")
        if not alive or claimed < 0:  # a negative value can't be taken up again
            break
    text = ", ".join(written)
    assert gt.reachability(text, find_steps(text), tuple(numbers), target).tolist() == expected, text


WRITTEN = [  # (piece, kind, reachable before, after) for (3, 4, 12) -> 5, which is 12 - 4 - 3 in any order
    (" Maybe", "opening", -1, -1),
    (" ", "opening", -1, -1),
    ("1", "operand", 1, 1),
    ("2", "operand", -1, -1),
    (" -", "operator", 1, 1),
    (" 4", "operand", 1, 1),
    (" =", "= and commas", -1, -1),
    (" 8", "result", 1, 1),
    (",", "= and commas", -1, -1),
    (" 8", "operand", 1, 1),
    (" +", "operator", 1, 0),
    (" 3", "operand", 0, 0),
    (" =", "= and commas", -1, -1),
    (" 1", "result", 0, 0),
    ("1", "result", -1, -1),
    (".", "= and commas", -1, -1),
    (" That", "verdict", -1, -1),
    (" is", "verdict", -1, -1),
    (" not", "verdict", -1, -1),
    (" 5", "verdict", -1, -1),
    (".", "verdict", -1, -1),
    (" How", "opening", -1, -1),
    (" 12", "operand", 1, 1),
    (" -", "operator", 1, 1),
    (" 3", "operand", 1, 1),
    (" =", "= and commas", -1, -1),
    (" 9", "result", 1, 1),
    (",", "= and commas", -1, -1),
    (" 9", "operand", 1, 1),
    (" -", "operator", 1, 1),
    (" 4", "operand", 1, 1),
    (" =", "= and commas", -1, -1),
    (" 6", "result", 1, 0),
    (".", "= and commas", -1, -1),
]
TAIL = [
    (" Good", "verdict", -1, -1),
    ("</think>", "tag", -1, -1),
    ("\n", "verdict", -1, -1),
    ("<ans", "tag", -1, -1),
    ("wer>", "tag", -1, -1),
    ("1", "answer", -1, -1),
    ("2", "answer", -1, -1),
    (" -", "answer", -1, -1),
    (" 3", "answer", -1, -1),
    ("</answer>", "tag", -1, -1),
    ("", "tag", -1, -1),
]
CUT = [(" Let", "unfinished", -1, -1), (" 3", "unfinished", -1, -1), (" +", "unfinished", -1, -1)]
HALF = [
    ("\n", "verdict", -1, -1),  # a line of its own
    (" So", "opening", -1, -1),
    (" 3", "operand", 1, 1),
    ("*", "operator", 1, 0),
    ("4", "operand", 0, 0),
    ("=", "= and commas", -1, -1),
    ("12", "result", 0, 0),
    (" then", "= and commas", -1, -1),
]


@pytest.mark.parametrize("rows", [WRITTEN + TAIL, WRITTEN + CUT, WRITTEN + HALF])
def test_columns_of_responses_written_by_hand(rows):
    """Guards against labels on another token, on each piece of a number, or on words; and against kinds of a neighbour."""
    pieces, kinds, before, after = map(list, zip(*rows))
    batch = make_written([pieces], [0.0], numbers=[(3, 4, 12)], target=[5])
    L = len(pieces)
    got = gt.solver_columns(batch.text[0], batch.spans[0], (3, 4, 12), 5)
    assert [g.tolist() for g in got] == [before, after] and got[0].dtype == got[1].dtype == np.int8
    kind = gt.token_kinds(
        batch.text[0], batch.spans[0], batch.role[0, :L].numpy(), batch.in_answer[0, :L].numpy().astype(np.int8)
    )
    assert [gt.KINDS[k] for k in kind] == kinds
    truth = gt.describe(batch, {"a": 1})
    assert truth["kind"].tolist() == kind.tolist() and truth["piece"].tolist() == pieces
    assert truth["reachable_before"].tolist() == before and truth["reachable"].tolist() == after


# ------------------------------------------------------------------------------------------------- scores


def made_up(Q=12, G=4, L=20, seed=0):
    """Columns that `score` reads, with an A* that is nowhere exactly 0 where there were rollouts."""
    rng, N = np.random.default_rng(seed), Q * G * L
    response = np.repeat(np.arange(Q * G), L)
    tried = rng.random(N) < 0.5
    a_star = rng.normal(size=N) * np.exp(rng.normal(size=N)) * tried
    before = rng.integers(-1, 2, N).astype(np.int8)
    columns = dict(response=response, group=response // G, packets=tried * 3, a_star=a_star, reachable_before=before)
    return columns | {"reachable": rng.integers(0, 2, N).astype(np.int8), "position": np.tile(np.arange(L), Q * G)}


def planted(truth, x):
    """The score of credit x against A*."""
    return gt.score(x, truth["a_star"], truth, gt.Estimate(1.0))


def test_credit_equal_to_the_truth_scores_one_and_its_negative_minus_one():
    """Guards against scores of other tokens than the credit's, signs that are lost, and intervals that miss."""
    truth = made_up()
    y, tried = truth["a_star"], truth["packets"] > 0
    same, opposite, scaled = (planted(truth, x) for x in (y, -y, 3e-6 * y))
    top = np.abs(y) >= np.sort(np.abs(y))[-round(0.1 * len(y))]
    for name in ("pooled_spearman", "pooled_pearson", "within_spearman", "within_pearson"):
        for s, expected in ((same, 1), (opposite, -1), (scaled, 1)):
            assert list(getattr(s, name)) == pytest.approx([expected] * 3, abs=1e-9), name
    assert list(same.sign) == [1, 1, 1] and list(opposite.sign) == [0, 0, 0]
    assert same.top.value == pytest.approx(np.abs(y[top]).sum() / np.abs(y).sum()) and 0.3 < same.top.value < 0.9
    assert same.top.low < same.top.value < same.top.high
    pushed = np.where(tried, y, 100.0)  # what is not tried counts in no comparison within responses
    assert planted(truth, pushed).within_pearson.value == pytest.approx(1)
    assert planted(truth, pushed).sign == same.sign and planted(truth, pushed).pooled_pearson.value < 0.5


def test_credit_that_is_the_same_on_a_response_has_nothing_within():
    """Guards against scores made of rounding: `none` knows nothing within a response, and half of the signs at 0."""
    truth = made_up()
    outcome = np.repeat(np.random.default_rng(1).normal(size=48), 20).astype(np.float32)
    s = planted(truth, outcome * (1 + 1e-8))
    assert all(math.isnan(e.value) and gt.cell(e) == "" for e in (s.within_spearman, s.within_pearson, s.solver))
    assert np.isfinite(s.pooled_spearman.value) and abs(s.pooled_spearman.value) < 0.3
    assert list(planted(truth, 0 * outcome).sign) == [0.5] * 3 and math.isnan(planted(truth, 0 * outcome).top.value)


def test_the_top_share_and_the_sign_by_hand():
    """Guards against a share of another tenth of the tokens, or of signed credit; and signs of tokens without rollouts."""
    truth = dict(made_up(2, 1, 10), a_star=np.array([0.0] * 7 + [0.5, -0.9, 0.1] + [0.0] * 8 + [0.7, -0.6]))
    truth["packets"] = (truth["a_star"] != 0) * 1
    x = np.array([1.0] * 7 + [-1, -4, 2] + [0.5] * 8 + [3, 0])
    s = planted(truth, x)
    assert s.top.value == pytest.approx((4 + 3) / (7 + 7 + 4 + 3))  # 2 of 20 tokens: A* -0.9 and 0.7
    assert s.sign.value == pytest.approx((0 + 1 + 1 + 1 + 0.5) / 5)


def test_random_weights_know_nothing_within_a_response(monkeypatch):
    """Guards against a correlation that chance alone would give, and intervals that are too narrow: 0 should lie in
    about 95% of them."""
    monkeypatch.setattr(gt, "RESAMPLES", 400)
    rng, covered, values = np.random.default_rng(0), [], []
    for draw in range(150):
        truth = made_up(24, 4, 12, draw)
        A = np.repeat(rng.normal(size=96), 12)
        for rank in (True, False):
            tried, w = truth["packets"] > 0, rng.exponential(size=len(A))
            x, y = (gt.centred(v[tried], truth["response"][tried], rank) for v in (A * w, truth["a_star"] + A))
            e = gt.correlate(x, y, truth["group"][tried])
            covered.append(e.low <= 0 <= e.high)
            values.append(e.value)
    assert 0.90 < np.mean(covered) < 0.98 and abs(np.mean(values)) < 4 * np.std(values) / 300**0.5


def test_tokens_whose_truth_is_zero_have_no_sign_and_are_not_on_top():
    """Guards against a sign that counts as missed where there is none, and a tenth of the tokens that takes in all
    others, because fewer have an A*."""
    truth = made_up()
    y = truth["a_star"]
    y[np.flatnonzero(y)[::3]] = 0  # in half of the rollouts the same came of it
    assert planted(truth, y).sign.value == 1 and planted(truth, -y).sign.value == 0
    x = np.where(y == 0, 5.0, y)
    assert planted(truth, x).sign.value == 1
    y[np.flatnonzero(y)[20:]] = 0
    assert planted(truth, x).top.value == pytest.approx(np.abs(x[y != 0]).sum() / np.abs(x).sum())


@pytest.mark.parametrize("column, left", [("reachable_before", -1), ("packets", 0)])
def test_responses_without_calculations_or_choices_still_have_scores(column, left):
    """Guards against a crash, once all rollouts are made, where no token is an operand, or all of them were sure."""
    truth = made_up()
    truth[column][:] = left
    s = planted(truth, truth["a_star"] + 1)
    assert s.pooled_pearson.value == pytest.approx(1)
    assert math.isnan((s.solver if column == "reachable_before" else s.within_pearson).value)


def test_the_solver_score_by_hand():
    """Guards against labels of tokens before which all was lost, or that are no operand, operator or result."""
    truth = made_up(3, 2, 30)
    asked = truth["reachable_before"] == 1
    x = np.where(asked, truth["reachable"] * 2.0 - 5, np.random.default_rng(1).normal(size=len(asked)))
    assert planted(truth, x).solver.value == pytest.approx(1)
    flipped = np.where(truth["response"] == 0, -x, x)
    got, (left, right) = planted(truth, flipped).solver.value, ([], [])
    for r in range(6):
        here = asked & (truth["response"] == r)
        for values, column in ((left, flipped), (right, truth["reachable"])):
            own = [rank_by_counting(column[here], v) / here.sum() for v in column[here]]
            values += [v - sum(own) / len(own) for v in own]
    assert got == pytest.approx(np.corrcoef(left, right)[0, 1]) and got < 0.9


def rank_by_counting(column, value):
    """How many are smaller, and half of those that are equal."""
    return sum(v < value for v in column) + (sum(v == value for v in column) + 1) / 2


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_ranks_by_counting(values):
    """Guards against ranks whose ties are broken by place, or that begin at 0."""
    assert gt.ranks(np.array(values)).tolist() == [rank_by_counting(values, v) for v in values]
    assert gt.ranks(np.array([0.5, -1, 0.5, 9, 0.5])).tolist() == [3, 1, 3, 5, 3]


def test_correlation_is_numpys():
    """Guards against another formula than Pearson's r, a wrong sign, and a number where one side does not vary."""
    rng = np.random.default_rng(0)
    for n, scale in ((2, 1), (5, 1e-4), (400, 1e4)):
        x, y = rng.normal(size=(2, n)) * scale
        s = np.array([n, x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()])
        assert gt.correlation(s) == pytest.approx(np.corrcoef(x, y)[0, 1])
        assert gt.correlation(np.stack([s, s]))[1] == pytest.approx(np.corrcoef(x, y)[0, 1])
    x, flat = rng.normal(size=9), np.full(9, 0.1)
    assert math.isnan(gt.correlate(x, flat, np.arange(9)).value) and math.isnan(
        gt.correlate(flat, x, np.arange(9)).value
    )
    assert gt.sums(np.array([2, 0, 2, 0]), np.arange(4.0), np.ones(4)).tolist() == [[4, 2], [0, 0], [2, 2]]


def test_values_are_centred_in_their_response():
    """Guards against differences between responses that count as knowledge within one."""
    x = np.array([5.0, 7.0, 100.0, 3.0, 3.0, 9.0, 1e6, 1e6 * (1 + 1e-9)])
    response = np.array([0, 0, 4, 1, 1, 1, 2, 2])
    assert gt.centred(x, response, False).tolist() == pytest.approx([-1, 1, 0, -2, -2, 4, 0, 0])
    assert gt.centred(x, response, True).tolist() == pytest.approx([-0.25, 0.25, 0, -1 / 6, -1 / 6, 1 / 3, 0, 0])


def test_the_bootstrap_draws_whole_questions(monkeypatch):
    """Guards against intervals over tokens: against a loop that puts the tokens of the drawn questions together."""
    rng, Q = np.random.default_rng(0), 7
    question = np.repeat(np.arange(Q), rng.integers(3, 9, Q))
    x = rng.normal(size=len(question)) + question
    y = rng.normal(size=len(question)) + 0.5 * x
    drawn = gt.resampled(Q)
    assert drawn.shape == (gt.RESAMPLES, Q) and (drawn.sum(1) == Q).all()
    assert drawn.mean(0) == pytest.approx(1, abs=0.1) and drawn.var(0) == pytest.approx(1 - 1 / Q, abs=0.15)
    plain = {"r": [], "share": []}
    for row in drawn:
        tokens = np.concatenate([np.flatnonzero(question == q) for q in np.repeat(np.arange(Q), row)])
        plain["r"].append(np.corrcoef(x[tokens], y[tokens])[0, 1] if len(np.unique(tokens)) > 1 else np.nan)
        plain["share"].append(np.abs(x[tokens]).sum() / np.abs(y[tokens]).sum())
    whole = np.corrcoef(x, y)[0, 1], np.abs(x).sum() / np.abs(y).sum()
    got = gt.correlate(x, y, question), gt.bootstrap(gt.share, gt.sums(question, np.abs(x), np.abs(y)))
    for e, value, draws in zip(got, whole, plain.values()):
        assert list(e) == pytest.approx([value, *np.percentile(draws, (2.5, 97.5))])
    own = [rng.integers(0, Q, Q) for _ in range(4000)]  # other chance: the same interval, about
    means = [np.concatenate([x[question == q] for q in row]).mean() for row in own]
    e = gt.bootstrap(gt.share, gt.sums(question, x, np.ones(len(x))))
    assert [e.low, e.high] == pytest.approx(np.percentile(means, (2.5, 97.5)).tolist(), abs=0.1)


def test_the_cosine_is_of_summed_gradients():
    """Guards against a mean of the questions' cosines, and an interval that is not the jackknife's over questions."""
    rng, Q = np.random.default_rng(0), 5
    x = rng.normal(size=(Q, 9))
    y = x * rng.random((Q, 1)) + 0.4 * rng.normal(size=(Q, 9))

    def direct(left_out):
        a, b = (np.delete(g, left_out, 0).sum(0) for g in (x, y))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    whole, parts = direct([]), [direct([q]) for q in range(Q)]
    half = 1.96 * (Q - 1) * np.std(parts, ddof=1) / Q**0.5  # of the pseudo-values' mean
    e = gt.cosine_of(x, y)
    assert list(e) == pytest.approx([whole, max(whole - half, -1), min(whole + half, 1)])
    assert e.low < e.value < e.high <= 1 and list(gt.cosine_of(x, -2 * x)) == pytest.approx([-1, -1, -1])
    assert math.isnan(gt.cosine_of(x, 0 * x).value)


def test_credit_gradients_are_autograds(codec, random_model, exact):
    """Guards against gradients of another question, response or credit, or of padding: against the plain layout."""
    problems, each = [Problem((4, 3, 5), 8), Problem((7, 18, 2, 11), 36)], 3
    uniforms = grpo.draw_uniforms(0, 0, 2, each, 9)
    batch = grpo.rollout(random_model, codec, problems, uniforms)
    batch.mask[4, 3:] = False  # one that ends early
    credits = torch.randn(2, 2 * each, batch.mask.shape[1], generator=torch.Generator().manual_seed(0)) * batch.mask
    got = list(gt.credit_gradients(random_model, codec, problems, batch, credits, each))
    assert len(got) == 2
    for question, gradients in enumerate(got):
        rows = slice(question * each, (question + 1) * each)
        for credit, gradient in zip(credits, gradients):
            random_model.zero_grad()
            prompts = [codec.prompt(problems[question])] * each
            logprob = plain_logprobs(random_model, prompts, batch.tokens[rows], batch.mask[rows])
            (credit[rows] * logprob).sum().backward()
            expected = torch.cat([p.grad.flatten() for p in random_model.parameters()])
            assert torch.allclose(gradient, expected, atol=1e-8 * expected.abs().max()) and expected.norm() > 1


def test_all_scores_put_every_method_in_its_place():
    """Guards against gradients or scores of another method, and a ceiling that is not one half against the other."""
    model, limit = tiny_model(0), 4
    batch, truth = described(model, limit, 6)
    truth |= {"methods": np.array(["none"]), "credits": truth["advantage"][None]}
    sampled(model, truth, 60, limit)
    names = ["none", "same", "opposite"]
    credits = np.stack([truth["advantage"], truth["a_star"], -truth["a_star"]]).astype(np.float32)
    truth |= {"methods": np.array(names), "credits": credits}
    truth["reachable_before"][::2] = 1  # this text holds no calculation
    scores = gt.all_scores(model, Pieces(), PUZZLES, batch, truth)
    assert list(scores) == [*names, *gt.seed_measures(truth), "noise ceiling"]
    for name, sign in (("same", 1), ("opposite", -1)):
        s = scores[name]
        parts = s.pooled_spearman, s.pooled_pearson, s.within_spearman, s.within_pearson, s.cosine
        assert [e.value for e in parts] == pytest.approx([sign] * 5, abs=1e-5)
    assert all(math.isnan(e.value) for e in (scores["none"].within_pearson, scores["none"].within_spearman))
    first, second = truth["a_star_halves"].T
    assert scores["noise ceiling"].pooled_pearson.value == pytest.approx(np.corrcoef(first, second)[0, 1])
    measures = truth["advantage"] * -truth["logprob"], truth["advantage"] * truth["logit_grad"]
    for name, x in zip(gt.seed_measures(truth), measures):
        expected = np.corrcoef(x, truth["a_star"])[0, 1]
        assert scores[name].pooled_pearson.value == pytest.approx(expected, abs=1e-5), name
    updates = []
    for column in (truth["advantage"], truth["a_star"]):
        total, credit = 0, torch.zeros(batch.mask.shape).masked_scatter(batch.mask, torch.from_numpy(column).float())
        for question, problem in enumerate(PUZZLES):
            rows = slice(6 * question, 6 * question + 6)
            logprob = plain_logprobs(model, [Pieces().prompt(problem)] * 6, batch.tokens[rows], batch.mask[rows])
            total = total + (credit[rows] * logprob).sum()
        updates.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]))
    assert scores["none"].cosine.value == pytest.approx(torch.cosine_similarity(*updates, dim=0).item(), abs=1e-4)


# ------------------------------------------------------------------------------- tables, files, command line


def table_truth():
    """Eight tokens of two questions: what the tables read."""
    kinds = ["opening", "operand", "operator", "operand", "result", "verdict", "operand", "tag"]
    N, methods = 8, ["none"]
    return {
        "kind": np.array([gt.KINDS.index(k) for k in kinds], np.int8),
        "group": np.array([0, 0, 0, 0, 0, 1, 1, 1], np.uint16),
        "response": np.array([0, 0, 0, 1, 1, 2, 2, 2], np.uint16),
        "position": np.array([0, 1, 2, 0, 1, 0, 1, 2], np.uint16),
        "a_star": np.array([0.2, -0.3, 0.1, 0.4, 0.0, 0.0, -0.6, 0.0]),
        "a_star_error": np.full(N, 0.1),
        "value_error": np.full(N, 0.2),
        "packets": np.array([1, 2, 1, 1, 0, 0, 3, 0]),
        "sampled": np.array(1234),
        "success": np.array([0, 0, 0, 1, 1, 0, 0, 0], np.float32),
        "advantage": np.array([-1, -1, -1, 1, 1, 2, 2, 2], np.float32),
        "logprob": np.full(N, -0.5, np.float32),
        "logit_grad": np.full(N, 0.5, np.float32),
        "entropy": np.arange(N, dtype=np.float32),
        "reachable_before": np.array([-1, 1, 1, 1, 0, -1, 1, -1], np.int8),
        "reachable": np.array([-1, 0, 1, 1, 0, -1, 0, -1], np.int8),
        "methods": np.array(methods),
        "credits": np.array([[-1, -1, -1, 1, 1, 2, 2, 2]], np.float32),
    }


def test_tables_by_hand():
    """Guards against means over other tokens, a share of the wrong whole, and verdicts of tokens that were lost before."""
    truth = table_truth()
    rows = {row[0]: row[1:] for row in gt.table_solver(truth).rows}
    assert rows["operand"][:2] == ["3", "66.7%"] and rows["operand"][3].startswith("-0.450 ±")
    assert rows["operand"][2] == "0.400" and rows["operator"] == ["1", "0.0%", "0.100", ""]
    assert rows["result"] == ["0", "", "", ""]
    table = gt.table_kinds(truth)
    rows = {row[0]: dict(zip(table.header[1:], row[1:])) for row in table.rows}
    assert rows["tokens"]["decisions"] == "50.0%" and rows["tokens"]["operand"] == "37.5%"
    assert rows["A*"]["operand"].startswith(f"{(1.3 / 3) / (1.6 / 8):.2f}")
    assert rows["none"]["the rest"].startswith(f"{(1 + 1 + 2 + 2) / 4 / (11 / 8):.2f}")
    assert rows["mean A*"]["decisions"].startswith("-0.100") and rows["mean A*"]["unfinished"] == ""
    rows = {row[0]: row[1:] for row in gt.table_sizes(truth).rows}
    assert rows["abs(A)"][2].startswith("0.18 (") and rows["entropy"][2].startswith("0.21 (")  # 2 of 11, 6 of 28
    assert rows["1 - p"] == ["", "", "0.12 (0.00 to 0.33)"]
    facts = dict(gt.table_facts(truth).rows)
    assert facts["questions, responses, tokens"] == "2, 3, 8" and facts["success"].startswith("0.333")
    assert facts["rollouts, tokens sampled for them"] == "64, 1,234"
    assert facts["tokens with rollouts (1 - p above 0.005)"] == "62.5%"


def test_tables_are_markdown(first_run):
    """Guards against rows of more cells than their header, such as one whose name holds a |, and cells that say nan."""
    text = (first_run[0] / "scores.md").read_text(encoding="utf-8")
    blocks = [block.splitlines() for block in re.split(r"\n\n", text) if block.startswith("|")]
    assert len(blocks) == 6
    for lines in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, lines[0]
    assert not re.search(r"\bnan\b", text)


COLUMNS = {
    **{"step": "<i4", "token": "<i4", "response": "<u2", "group": "<u2", "position": "<u2"},
    **{name: "<f4" for name in ("logprob", "entropy", "logit_grad", "advantage", "reward", "success")},
    **{name: "|i1" for name in ("role", "in_answer", "kind", "reachable_before", "reachable")},
    **{"packets": "<i8", "solved": "<i8", "value": "<f8", "value_error": "<f8"},
    **{"a_star": "<f8", "a_star_error": "<f8", "a_star_halves": "<f8"},
}


def call(monkeypatch, *arguments):
    """Run the command in this process."""
    monkeypatch.setattr(sys, "argv", ["ground_truth.py", *map(str, arguments)])
    gt.main()


TINY = ("--questions", 2, "--answers", 2, "--critic_batches", 1, "--max_new_tokens", 40)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A folder of the smallest run, which the tests below copy, and the arrays in its file."""
    folder = tmp_path_factory.mktemp("truth") / "out"
    with pytest.MonkeyPatch.context() as patch:
        call(patch, *TINY, "--rollouts", 8, "--out", folder)
    return folder, dict(np.load(folder / "ground_truth.npz", allow_pickle=False))


@pytest.fixture
def folder(first_run, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(first_run[0], tmp_path / "copy")


def refusal(monkeypatch, *arguments):
    """The one sentence with which the command ends."""
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *arguments)
    sentence = stop.value.code
    assert isinstance(sentence, str) and sentence.startswith("error: ") and "\n" not in sentence, sentence
    return sentence


def test_the_files_of_a_run(first_run):
    """Guards against columns that are missing, of another length or kind, or pickled; and missing tables or picture."""
    folder, truth = first_run
    N = len(truth["token"])
    assert {p.name for p in folder.iterdir()} == {"ground_truth.npz", "critic.safetensors", "scores.md", "scores.png"}
    for name, kind in COLUMNS.items():
        assert truth[name].dtype == np.dtype(kind), name
        assert truth[name].shape == ((N, 2) if name in ("solved", "a_star_halves") else (N,)), name
    assert truth["methods"].tolist() == list(MITIGATIONS) and truth["kinds"].tolist() == list(gt.KINDS)
    assert truth["credits"].shape == (len(MITIGATIONS), N) and truth["credits"].dtype == np.float32
    assert truth["credits"][0] == pytest.approx(truth["advantage"]) and np.isfinite(truth["credits"]).all()
    assert truth["piece"].shape == (N,) and truth["prompts"].shape == (4,) and truth["sampled"].shape == ()
    assert all(re.fullmatch(r"\[\d+, \d+, \d+\] -> \d+", prompt) for prompt in truth["prompts"].tolist())
    assert json.loads(str(truth["settings"]))["questions"] == 2
    assert (
        set(truth) == {*COLUMNS, *"methods kinds credits piece prompts settings sampled complete".split()}
        and truth["complete"]
    )
    assert truth["packets"].tolist() == gt.packets_wanted(truth["logprob"], 8).tolist()
    values = {k: v.copy() for k, v in truth.items()}
    gt.add_values(values)
    assert all(np.array_equal(values[k], truth[k]) for k in ("value", "value_error", "a_star", "a_star_error"))
    text = (folder / "scores.md").read_text(encoding="utf-8")
    assert text.count("\n## ") == 5 and all(f"| {name} " in text for name in MITIGATIONS)
    assert (folder / "scores.png").read_bytes()[:4] == b"\x89PNG" and (folder / "scores.png").stat().st_size > 10_000


def test_no_file_names_a_folder_of_this_machine(first_run):
    """Guards against paths, which say who ran it and where, in what may be published."""
    folder, truth = first_run
    places = {str(BUNDLED.parent.parent), str(folder.parent), str(Path.home()), tempfile.gettempdir()}
    written = [file.read_bytes().decode("latin-1") for file in folder.iterdir()]
    written += [str(part) for name in ("settings", "prompts", "methods") for part in truth[name].ravel()]
    assert not [place for place in places for text in written if place in text]


def test_more_rollouts_are_added_to_those_there(folder, first_run, monkeypatch, capsys):
    """Guards against a second call that begins again, samples what it has, or fits another critic."""
    made, respond, before = [], grpo.respond, first_run[1]
    monkeypatch.setattr(gt, "fit", lambda *_: pytest.fail("the critic is there"))

    def counted(*args):
        made.append(len(args[3]) if len(args) > 6 else 0)
        return respond(*args)

    monkeypatch.setattr(grpo, "respond", counted)
    monkeypatch.setattr(gt, "RESAMPLES", 100)
    call(monkeypatch, *TINY, "--rollouts", 30, "--out", folder)
    after = dict(np.load(folder / "ground_truth.npz"))
    assert sum(made) == (after["packets"].sum() - before["packets"].sum()) * gt.PACKET > 0
    assert after["packets"].tolist() == gt.packets_wanted(before["logprob"], 30).tolist()
    assert (after["solved"] >= before["solved"]).all() and after["sampled"] > before["sampled"]
    assert all(np.array_equal(before[k], after[k]) for k in ("token", "success", "kind", "settings", "methods"))
    assert after["credits"] == pytest.approx(before["credits"], abs=1e-5)
    assert "rollouts" in capsys.readouterr().out
    made.clear()
    monkeypatch.setattr(gt, "all_scores", lambda *_: None)
    monkeypatch.setattr(gt, "report", lambda *_: None)
    call(monkeypatch, *TINY, "--rollouts", 8, "--out", folder)
    again = dict(np.load(folder / "ground_truth.npz"))
    assert not sum(made) and all(np.array_equal(again[k], after[k]) for k in ("packets", "solved", "a_star"))


@pytest.mark.parametrize("what", ["seed", "settings", "tokens", "cut", "text"])
def test_a_file_that_does_not_fit_is_refused_and_kept(what, folder, monkeypatch):
    """Guards against rollouts of other responses that are mixed in, or overwritten, and a traceback for a broken file."""
    file = folder / "ground_truth.npz"
    if what in ("settings", "tokens"):
        truth = dict(np.load(file))
        truth["token"][3] += what == "tokens"
        other = {"seed": 7} if what == "settings" else {}
        truth["settings"] = np.array(json.dumps(json.loads(str(truth["settings"])) | other))
        np.savez(file, **truth)
    if what in ("cut", "text"):
        file.write_bytes(file.read_bytes()[:5000] if what == "cut" else b"no zip")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    sentence = refusal(monkeypatch, *TINY, "--rollouts", 8, "--out", folder, *(("--seed", 1) if what == "seed" else ()))
    assert str(file) in sentence and ("can't be read" if what in ("cut", "text") else "of other responses") in sentence
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("--model", "no/such/model"), "no/such/model"),
        (("--data", "no/such.jsonl"), "no/such.jsonl"),
        (("--questions", 0), "--questions must be"),
        (("--rollouts", 0), "--rollouts must be"),
        (("--max_new_tokens", 0), "--max_new_tokens must be"),
        (("--critic_batches", 0), "--critic_batches must be"),
        (("--answers", 1), "--answers 1 leaves no group"),
        (("--rollouts", "many"), "--rollouts"),
        (("--roll", 8), "--roll"),
        (("--max_new_tokens", 10**6), "--max_new_tokens"),
        (("--seed", -1), "--seed"),
        (("--device", "foo"), "--device"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_sentence(arguments, word, tmp_path, monkeypatch):
    """Guards against a traceback, or an hour of sampling, before a flag is found to be wrong."""
    monkeypatch.setattr(gt, "fit", lambda *_: pytest.fail("it began to work"))
    assert word in refusal(monkeypatch, *TINY, "--out", tmp_path / "out", *arguments)
    assert not list(tmp_path.rglob("*.npz"))


def test_an_interruption_says_how_to_go_on(folder, monkeypatch):
    """Guards against a traceback on Ctrl-C, after which nobody knows whether anything was kept."""
    before, respond = (folder / "ground_truth.npz").read_bytes(), grpo.respond

    def stopped(*args):
        if len(args) > 6:  # a rollout
            raise KeyboardInterrupt
        return respond(*args)

    monkeypatch.setattr(grpo, "respond", stopped)
    sentence = refusal(monkeypatch, *TINY, "--rollouts", 30, "--out", folder)
    assert "interrupted" in sentence and str(folder) in sentence
    kept, truth = np.load(folder / "ground_truth.npz"), np.load(io.BytesIO(before))
    assert all(np.array_equal(kept[k], truth[k]) for k in ("packets", "solved", "a_star", "methods"))
