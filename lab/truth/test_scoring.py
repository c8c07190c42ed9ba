"""Scores of credit against the truth by plain loops."""
import math

import numpy as np
import pytest

from lab.truth import scoring as ts


def made_up(Q, G, L):
    """Columns that `all_scores` reads; A* is nowhere exactly 0 where there were rollouts."""
    rng, N = np.random.default_rng(0), Q * G * L
    response, tried = np.repeat(np.arange(Q * G), L), rng.random(N) < 0.5
    return dict(response=response, group=response // G, packets=tried * 3, advantage=rng.normal(size=N),
                a_star=rng.normal(size=N) * np.exp(rng.normal(size=N)) * tried, a_star_halves=rng.normal(size=(N, 2)),
                reachable_before=rng.integers(-1, 2, N).astype(np.int8), methods=np.array(["one", "two", "three"]),
                reachable=rng.integers(0, 2, N).astype(np.int8), credits=rng.normal(size=(3, N)),
                position=np.tile(np.arange(L), Q * G), piece=np.tile(["so ", "</", "think> ", *["x"] * (L - 3)], Q * G))


def planted(truth, x):
    """The score of credit x against A*."""
    return ts.score(x, truth["a_star"], truth, ts.Estimate(0.7))


def rank(x):
    """Ranks from 1 by counting, ties sharing their mean."""
    return np.array([(x < v).sum() + ((x == v).sum() + 1) / 2 for v in x])


def test_what_says_nothing_within_a_response_has_no_score_there():
    """Guards against scores made of rounding, and a crash where no token is an operand or all tokens were certain."""
    truth = made_up(12, 4, 20)
    A = np.repeat(np.random.default_rng(1).normal(size=48), 20).astype(np.float32)
    assert [ts.cell(e) for e in planted(truth, A * (1 + 1e-8))[3:]] == [""] * 3
    truth["reachable_before"][:], truth["packets"][:] = -1, 0
    s = planted(truth, truth["a_star"] + 1)
    assert s.spearman.value == pytest.approx(1) and np.isnan([s.solver.value, s.within_pearson.value]).all()


def test_scores_by_loops():
    """Guards against lost signs, ranks or means over other tokens, and verdicts on tokens before which the target was
    lost."""
    truth = made_up(3, 2, 30)
    x = np.random.default_rng(1).normal(size=180) - 2 * truth["a_star"] + truth["reachable"]
    s, tried, asked = planted(truth, x), truth["packets"] > 0, truth["reachable_before"] == 1
    for found, y, use, by_rank in ((s.within_spearman, truth["a_star"], tried, True),
                                   (s.within_pearson, truth["a_star"], tried, False),
                                   (s.solver, truth["reachable"], asked, True)):
        left, right = [], []
        for inside in (use & (truth["response"] == r) for r in range(6)):
            for out, values in ((left, x[inside]), (right, y[inside])):
                values = rank(values) / inside.sum() if by_rank else values
                out.extend(values - values.mean())
        assert found.value == pytest.approx(np.corrcoef(left, right)[0, 1])
        assert found.low < found.value < found.high


def test_location_by_hand():
    """Guards against signed credit, noise in a square, a tenth that is rounded, and ties broken by their order."""
    halves = np.array([[-2.0, -4.0], [-1.0, 3.0], [5.0, 3.0], [2.0, 1.0]])  # the second token's A* is noise
    truth = made_up(2, 1, 2) | {"a_star_halves": halves}  # the squares are 8, -3, 15, 2: 22 in sum
    for credit, largest in (([1, 3, -5, 2], 15), ([9, 3, -5, 2], 8), ([5, 3, -5, 2], 23 / 2), ([2, -2, 2, 2], 22 / 4)):
        assert planted(truth, np.array(credit)).location.value == pytest.approx(0.4 * largest / 22)  # a tenth of four
    assert ts.top_tenth(np.array([7.0, 9, 7, 6] + [0] * 27)) == pytest.approx([1, 1, 1, 0.1] + [0] * 27)
    tied = planted(truth, np.array([5, 3, -5, 2])).location  # a fifth of 8 and of 15; the puzzles have 8 - 3, 15 + 2
    assert tied[:3] == pytest.approx((4.6 / 22, 3 / 17, 1.6 / 5))


def test_the_cosine_is_of_summed_gradients():
    """Guards against a mean of the puzzles' cosines, and limits beyond 1."""
    rng, Q = np.random.default_rng(0), 5
    x = rng.normal(size=(Q, 9))
    y = x * rng.random((Q, 1)) + 0.4 * rng.normal(size=(Q, 9))

    def direct(left_out):
        a, b = (np.delete(g, left_out, 0).sum(0) for g in (x, y))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    half = 1.96 * (Q - 1) * np.std([direct([q]) for q in range(Q)], ddof=1) / Q**0.5
    e = ts.cosine_of(x, y)
    assert list(e[:3]) == pytest.approx([direct([]), direct([]) - half, min(direct([]) + half, 1)])
    assert list(ts.cosine_of(x, -2 * x)[:3]) == pytest.approx([-1, math.nan, math.nan], nan_ok=True)  # none vary
    assert ts.cosine_of(x, -x - y).low >= -1
    assert math.isnan(ts.cosine_of(x, 0 * x).value)


def test_all_scores_put_every_method_in_its_place_and_column(monkeypatch):
    """Guards against ranks or an update of another method, a ceiling without two halves, and figures in another
    column."""
    truth = made_up(2, 3, 10)
    monkeypatch.setattr(ts, "updates_of", lambda credits, batch: np.reshape(credits, (-1, 2, 30)))
    scores, (first, second) = ts.all_scores(None, truth), truth["a_star_halves"].T
    compared = {name: (x, truth["a_star"]) for name, x in zip(truth["methods"], truth["credits"])}
    right_sizes = truth["advantage"] * np.abs(truth["a_star"])
    tag = np.tile([0, -1, -1, *[0] * 7], 6)
    compared |= {ts.TAG: (tag, truth["a_star"]), ts.RIGHT_SIZES: (right_sizes, truth["a_star"]),
                 ts.HALVES: (first, second)}
    assert list(scores) == list(compared)
    for name, (x, y) in compared.items():
        assert scores[name].spearman.value == pytest.approx(np.corrcoef(rank(x), rank(y))[0, 1])
        assert np.isnan(scores[name].location.value) == (name in (ts.RIGHT_SIZES, ts.HALVES))  # made of its noise
        x, y = (values.reshape(2, -1).sum(0) for values in (x, y))  # over both puzzles
        assert scores[name].cosine.value == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    pooled, within = ts.score_tables(scores)
    for name, (left, right) in zip(scores, zip(pooled.rows, within.rows, strict=True), strict=True):
        s = scores[name]._asdict()
        expected = ("spearman", "cosine", "location"), ("within_spearman", "within_pearson", "solver")
        assert [left, right] == [[name, *(ts.cell(s[column]) for column in columns)] for columns in expected]
    assert within.header[1:] == ["Spearman", "Pearson", "solver"]
    assert pooled.header[1:] == ["Spearman", "cosine of update", "location"]
