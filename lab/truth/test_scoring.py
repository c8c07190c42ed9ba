"""Scores of credit against the truth by plain loops, and tables by hand."""
import math

import numpy as np
import pytest

from lab.truth import scoring as ts
from lab.truth.solver import KINDS


def made_up(Q, G, L):
    """Columns that `score` reads; A* is nowhere exactly 0 where there were rollouts."""
    rng, N = np.random.default_rng(0), Q * G * L
    response, tried = np.repeat(np.arange(Q * G), L), rng.random(N) < 0.5
    return dict(response=response, group=response // G, packets=tried * 3,
                a_star=rng.normal(size=N) * np.exp(rng.normal(size=N)) * tried, a_star_halves=rng.normal(size=(N, 2)),
                reachable_before=rng.integers(-1, 2, N).astype(np.int8),
                reachable=rng.integers(0, 2, N).astype(np.int8))


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
    s = planted(truth, A * (1 + 1e-8))
    assert [ts.cell(e) for e in (s.within_spearman, s.within_pearson, s.solver)] == [""] * 3
    assert abs(s.spearman.value) < 0.3
    truth["reachable_before"][:], truth["packets"][:] = -1, 0
    s = planted(truth, truth["a_star"] + 1)
    assert s.spearman.value == pytest.approx(1)
    assert math.isnan(s.solver.value) and math.isnan(s.within_pearson.value)


def test_scores_by_loops():
    """Guards against lost signs, ranks or means over other tokens, and verdicts on tokens before which the target was
    lost."""
    truth = made_up(3, 2, 30)
    x = np.random.default_rng(1).normal(size=180) - 2 * truth["a_star"] + truth["reachable"]
    s, tried, asked = planted(truth, x), truth["packets"] > 0, truth["reachable_before"] == 1
    assert s.spearman.value == pytest.approx(np.corrcoef(rank(x), rank(truth["a_star"]))[0, 1])
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
        found = ts.score(np.array(credit), truth["a_star"], truth, ts.Estimate(0.7)).location
        assert found.value == pytest.approx(0.4 * largest / 22)  # a tenth of four tokens is 0.4 of one
    assert ts.top_tenth(np.array([7.0, 9, 7, 6] + [0] * 27)) == pytest.approx([1, 1, 1, 0.1] + [0] * 27)
    found = ts.share_of(truth, np.array([True, False, True, False]), ts.squares(truth))  # puzzles have 8 - 3, 15 + 2
    assert found[:3] == pytest.approx((23 / 22, 15 / 17, 8 / 5))


def test_all_scores_put_every_method_in_its_place(monkeypatch):
    """Guards against ranks or an update of another method, and a ceiling without two halves."""
    rng, N = np.random.default_rng(0), 60
    credits, half, A, logprob, size = rng.normal(size=(3, N)), rng.normal(size=(2, N)), *rng.normal(size=(3, N))
    truth = made_up(2, 3, 10) | {"a_star_halves": half.T, "advantage": A, "logprob": logprob, "logit_grad": size,
                                 "methods": np.array(["one", "two", "three"]), "credits": credits}
    monkeypatch.setattr(ts, "updates_of", lambda credits, batch: np.reshape(credits, (-1, 2, N // 2)))
    scores = ts.all_scores(None, truth)
    compared = {name: (x, truth["a_star"]) for name, x in
                (*zip(truth["methods"], credits), ("A·abs(log p)", -A * logprob), ("A·‖onehot - p‖", A * size),
                 ("A·abs(A*)", A * np.abs(truth["a_star"])))}
    assert list(scores) == [*compared, ts.HALVES]
    for name, (x, y) in (compared | {ts.HALVES: half}).items():
        assert scores[name].spearman.value == pytest.approx(np.corrcoef(rank(x), rank(y))[0, 1])
        assert np.isnan(scores[name].location.value) == (name in (ts.RIGHT_SIZES, ts.HALVES))  # made of its noise
        x, y = (values.reshape(2, -1).sum(0) for values in (x, y))  # over both puzzles
        assert scores[name].cosine.value == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def test_tables_by_hand():
    """Guards against means over other tokens, a share of the wrong whole, and a figure in another column."""
    kinds = ["opening", "operand", "operator", "operand", "result", "verdict", "operand", "tag"]
    A = np.array([-1, -1, -1, 1, 1, 2, 2, 2.0])
    truth = dict(  # three responses to two puzzles
        kind=np.array([KINDS.index(kind) for kind in kinds]), group=np.array([0, 0, 0, 0, 0, 1, 1, 1], np.uint16),
        response=np.array([0, 0, 0, 1, 1, 2, 2, 2], np.uint16), packets=np.array([1, 2, 1, 1, 0, 0, 3, 0]),
        a_star=np.array([0.2, -0.3, 0.1, 0.4, 0.0, 0.0, -0.6, 0.0]), advantage=A, logprob=np.full(8, -0.5),
        logit_grad=np.full(8, 0.5), entropy=np.arange(8.0), reachable_before=np.array([-1, 1, 1, 1, 0, -1, 1, -1]),
        reachable=np.array([-1, 0, 1, 1, 0, -1, 0, -1]), methods=np.array(["none"]), credits=A[None])
    scores = {name: ts.Score(*(ts.Estimate(value + i / 10) for i in range(6)))
              for name, value in (("none", 0.0), (ts.HALVES, 1.0))}
    pooled, within, sizes, where, solver = (
        {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
        for table in ts.score_tables(scores, truth))
    assert pooled["none"] == {"method": "none", "Spearman": "0.00", "cosine of update": "0.10", "location": "0.20"}
    assert list(within["none"].values())[1:] == ["0.30", "0.40", "0.50"]
    assert list(within[ts.HALVES].values())[1:] == ["1.30", "1.40", "1.50"]
    assert list(solver["operand"].values())[1:4] == ["3", "66.7%", "0.400"]
    assert solver["operand"]["A*, lost"].startswith("-0.450 ±")
    assert list(solver["result"].values())[1:] == ["0", "", "", ""]  # its target was lost before
    assert where["tokens"]["operand"] == "37.5%"
    assert where["A*"]["operand"].startswith(f"{(1.3 / 3) / (1.6 / 8):.2f}")
    assert where["none"]["operand"].startswith(f"{(1 + 1 + 2) / 3 / (11 / 8):.2f}")
    assert where["mean A*"]["operand"].startswith("-0.167") and where["mean A*"]["answer"] == ""
    r = np.corrcoef(np.arange(8), rank(np.array([0.2, 0.3, 0.1, 0.4, 0, 0, 0.6, 0])))[0, 1]
    assert sizes["entropy"]["all tokens"].startswith(f"{r:.2f}") and sizes["1 - p"]["all tokens"] == ""
