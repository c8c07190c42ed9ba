"""Scores of credit against the truth: planted agreement, numpy, plain loops, and tables by hand.

Run it:  python -m pytest tests/test_truth_scores.py
"""

import math

import numpy as np
import pytest
import torch
from tests.plain import plain_logprobs

import grpo
from countdown_task import Puzzle
from experiments import truth_scores as ts
from experiments.solver import KINDS
from plumbing.report import plt


def made_up(Q=12, G=4, L=20, seed=0):
    """Columns that `score` reads; A* is nowhere exactly 0 where there were rollouts."""
    rng, N = np.random.default_rng(seed), Q * G * L
    response, tried = np.repeat(np.arange(Q * G), L), rng.random(N) < 0.5
    return dict(response=response, group=response // G, packets=tried * 3,
                a_star=rng.normal(size=N) * np.exp(rng.normal(size=N)) * tried,
                reachable_before=rng.integers(-1, 2, N).astype(np.int8),
                reachable=rng.integers(0, 2, N).astype(np.int8))  # fmt: skip


def planted(truth, x):
    """The score of credit x against A*."""
    return ts.score(x, truth["a_star"], truth, ts.Estimate(0.7))


def rank(x):
    """Ranks from 1 by counting, ties sharing their mean."""
    return np.array([(x < v).sum() + ((x == v).sum() + 1) / 2 for v in x])


# -------------------------------------------------------------------------------------------------- scores


def test_credit_equal_to_the_truth_scores_one_and_its_negative_minus_one():
    """Guards against scores of other tokens than the credit's, lost signs, and intervals that miss."""
    truth = made_up()
    y = truth["a_star"]
    same, opposite = planted(truth, 3e-6 * y), planted(truth, -y)
    for name in ("pooled_spearman", "pooled_pearson", "within_spearman", "within_pearson"):
        assert list(getattr(same, name)) == pytest.approx([1] * 3, abs=1e-9), name
        assert list(getattr(opposite, name)) == pytest.approx([-1] * 3, abs=1e-9), name
    assert (list(same.sign), list(opposite.sign)) == ([1] * 3, [0] * 3)
    assert same.cosine.value == 0.7
    pushed = planted(truth, np.where(truth["packets"] > 0, y, 100.0))  # tokens without rollouts
    assert pushed.within_pearson.value == pytest.approx(1)
    assert pushed.sign.value == 1
    assert pushed.pooled_pearson.value < 0.5


def test_credit_that_is_constant_on_a_response_knows_nothing_within():
    """Guards against scores made of rounding: plain GRPO has none within responses."""
    truth = made_up()
    A = np.repeat(np.random.default_rng(1).normal(size=48), 20).astype(np.float32)
    s = planted(truth, A * (1 + 1e-8))
    assert [ts.cell(e) for e in (s.within_spearman, s.within_pearson, s.solver)] == [""] * 3
    assert abs(s.pooled_spearman.value) < 0.3
    assert list(planted(truth, 0 * A).sign) == [0.5] * 3
    assert math.isnan(planted(truth, 0 * A).top.value)


def test_top_share_and_sign_by_hand():
    """Guards against another tenth of the tokens, a share of signed credit, and signs where A* is 0 or not measured."""
    a_star = np.array([0.0] * 7 + [0.5, -0.9, 0.1] + [0.0] * 8 + [0.7, -0.6])
    truth = dict(made_up(2, 1, 10), a_star=a_star, packets=np.where(np.arange(20) > 5, 1, 0))
    s = planted(truth, np.array([1.0] * 7 + [-1, -4, 2] + [0.5] * 8 + [3, 0]))
    assert s.top.value == pytest.approx((4 + 3) / (7 + 7 + 4 + 3))  # 2 of 20 tokens: A* -0.9 and 0.7
    assert s.sign.value == pytest.approx((0 + 1 + 1 + 1 + 0.5) / 5)
    assert ts.on_top(np.array([0, 0, 1.0] + [0] * 30)).sum() == 1  # three would be the tenth, but they are 0


def test_scores_within_responses_by_loops():
    """Guards against ranks or means over all tokens, and verdicts on tokens before which the target was lost."""
    truth = made_up(3, 2, 30)
    x = np.random.default_rng(1).normal(size=180) + 2 * truth["a_star"] + truth["reachable"]
    s = planted(truth, x)
    tried, asked = truth["packets"] > 0, truth["reachable_before"] == 1
    for found, y, use, by_rank in ((s.within_spearman, truth["a_star"], tried, True),
                                   (s.within_pearson, truth["a_star"], tried, False),
                                   (s.solver, truth["reachable"], asked, True)):  # fmt: skip
        left, right = [], []
        for r in range(6):
            inside = use & (truth["response"] == r)
            for out, values in ((left, x[inside]), (right, y[inside])):
                values = rank(values) / inside.sum() if by_rank else values
                out.extend(values - values.mean())
        assert found.value == pytest.approx(np.corrcoef(left, right)[0, 1])
    assert 0.1 < s.solver.value < 0.9


@pytest.mark.parametrize("column, left, field", [("reachable_before", -1, "solver"), ("packets", 0, "within_pearson")])
def test_responses_without_calculations_or_choices_still_have_scores(column, left, field):
    """Guards against a crash, once all rollouts are made, where no token is an operand or all of them were certain."""
    truth = made_up()
    truth[column][:] = left
    s = planted(truth, truth["a_star"] + 1)
    assert s.pooled_pearson.value == pytest.approx(1)
    assert math.isnan(getattr(s, field).value)


def test_correlation_is_numpys():
    """Guards against another formula than Pearson's r, and a number where one side does not vary."""
    rng = np.random.default_rng(0)
    for n, scale in ((2, 1), (5, 1e-4), (400, 1e4)):
        x, y = rng.normal(size=(2, n)) * scale
        s = np.array([n, x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()])
        assert ts.correlation(np.stack([s, s])) == pytest.approx([np.corrcoef(x, y)[0, 1]] * 2)
    x, flat = rng.normal(size=9), np.full(9, 0.1)
    assert math.isnan(ts.correlate(x, flat, np.arange(9)).value)
    assert math.isnan(ts.correlate(flat, x, np.arange(9)).value)
    assert ts.sums(np.array([2, 0, 2, 0]), np.arange(4.0), np.ones(4)).tolist() == [[4, 2], [0, 0], [2, 2]]


def test_values_are_centred_in_their_response():
    """Guards against differences between responses, and against rounding, that count as knowledge within one."""
    x = np.array([5.0, 7.0, 100.0, 3.0, 3.0, 9.0, 1e6, 1e6 * (1 + 1e-9)])
    response = np.array([0, 0, 4, 1, 1, 1, 2, 2])
    assert ts.centred(x, response, False).tolist() == pytest.approx([-1, 1, 0, -2, -2, 4, 0, 0])
    assert ts.centred(x, response, True).tolist() == pytest.approx([-0.25, 0.25, 0, -1 / 6, -1 / 6, 1 / 3, 0, 0])


def test_the_bootstrap_draws_whole_questions():
    """Guards against intervals over tokens: a loop puts together the tokens of the puzzles that were drawn."""
    rng, Q = np.random.default_rng(0), 7
    puzzle = np.repeat(np.arange(Q), rng.integers(3, 9, Q))
    x = rng.normal(size=len(puzzle)) + puzzle
    y = rng.normal(size=len(puzzle)) + 0.5 * x
    drawn, found = ts.resampled(Q), []
    assert drawn.shape == (ts.RESAMPLES, Q)
    assert (drawn.sum(1) == Q).all()
    assert drawn.var(0) == pytest.approx(1 - 1 / Q, abs=0.15)
    for row in drawn:
        tokens = np.concatenate([np.flatnonzero(puzzle == q) for q in np.repeat(np.arange(Q), row)])
        found.append((np.corrcoef(x[tokens], y[tokens])[0, 1], x[tokens].sum() / y[tokens].sum()))
    low, high = np.percentile(found, (2.5, 97.5), axis=0)
    e = ts.correlate(x, y, puzzle)
    assert list(e) == pytest.approx([np.corrcoef(x, y)[0, 1], low[0], high[0]])
    e = ts.bootstrap(ts.share, ts.sums(puzzle, x, y))
    assert list(e) == pytest.approx([x.sum() / y.sum(), low[1], high[1]])


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
    assert list(e) == pytest.approx([direct([]), direct([]) - half, min(direct([]) + half, 1)])
    assert list(ts.cosine_of(x, -2 * x)) == pytest.approx([-1, -1, -1])
    assert min(ts.cosine_of(x, -x - y)[1:]) >= -1
    assert math.isnan(ts.cosine_of(x, 0 * x).value)


# -------------------------------------------------------------------------------- gradients, every method, tables

PUZZLES = [Puzzle((4, 3, 5), 8), Puzzle((7, 18, 2, 11), 36)]


@pytest.fixture
def responses(codec, random_model, exact):
    """Three responses to each of two puzzles, one of them short, and their log-probs in the plain layout."""
    batch = grpo.rollout(random_model, codec, PUZZLES, grpo.draw_uniforms(0, 0, 2, 3, 9))
    batch.mask[4, 3:] = False
    prompts = [codec.prompt(PUZZLES[g]) for g in batch.group.tolist()]
    return batch, plain_logprobs(random_model, prompts, batch.tokens, batch.mask)


def plain_gradient(model, total):
    """d total / d all parameters (P,)."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()), retain_graph=True)])


def test_credit_gradients_are_autograds(codec, random_model, responses):
    """Guards against gradients of another puzzle, response or credit, or of padding."""
    batch, logprob = responses
    credits = torch.randn(2, *batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
    found = list(ts.credit_gradients(random_model, codec, PUZZLES, batch, credits, 3))
    assert len(found) == 2
    for q, gradients in enumerate(found):
        rows = slice(3 * q, 3 * q + 3)
        for credit, gradient in zip(credits, gradients, strict=True):
            expected = plain_gradient(random_model, (credit[rows] * logprob[rows]).sum())
            assert torch.allclose(gradient, expected, atol=1e-8 * expected.abs().max())


def test_all_scores_put_every_method_in_its_place(codec, random_model, responses):
    """Guards against gradients or scores of another method, and a ceiling that is not half against half."""
    batch, logprob = responses
    truth, N, rng = grpo.log_columns(0, batch, batch.logprob), int(batch.mask.sum()), np.random.default_rng(0)
    credits = rng.normal(size=(3, N))
    truth |= {"a_star": credits[2], "a_star_halves": rng.normal(size=(N, 2)), "packets": np.ones(N, int),
              "reachable_before": np.ones(N, int), "reachable": rng.integers(0, 2, N), "credits": credits,
              "methods": np.array(["one", "two", "exact"]), "advantage": rng.normal(size=N)}  # fmt: skip
    scores = ts.all_scores(random_model, codec, PUZZLES, batch, truth)
    assert list(scores) == ["one", "two", "exact", "A·abs(log p)", "A·‖onehot - p‖", "noise ceiling"]
    updates = [plain_gradient(random_model, (torch.zeros(batch.mask.shape).masked_scatter(
        batch.mask, torch.from_numpy(credit)) * logprob).sum()) for credit in credits]  # fmt: skip
    for name, credit, update in zip(truth["methods"].tolist(), credits, updates):
        assert scores[name].pooled_pearson.value == pytest.approx(np.corrcoef(credit, credits[2])[0, 1])
        cosine = torch.cosine_similarity(update, updates[2], dim=0).item()
        assert scores[name].cosine.value == pytest.approx(cosine, abs=1e-6)
    halves = np.corrcoef(*truth["a_star_halves"].T)[0, 1]
    assert scores["noise ceiling"].pooled_pearson.value == pytest.approx(halves)
    assert scores["noise ceiling"].cosine.value < 0.99
    for name, x in (("A·abs(log p)", -truth["advantage"] * truth["logprob"]),
                    ("A·‖onehot - p‖", truth["advantage"] * truth["logit_grad"])):  # fmt: skip
        assert scores[name].pooled_pearson.value == pytest.approx(np.corrcoef(x, credits[2])[0, 1], abs=1e-5)


def table_truth():
    """Eight tokens of two puzzles: what the tables read."""
    kinds = ["opening", "operand", "operator", "operand", "result", "verdict", "operand", "tag"]
    A = np.array([-1, -1, -1, 1, 1, 2, 2, 2.0])
    return dict(
        kind=np.array([KINDS.index(kind) for kind in kinds]), group=np.array([0, 0, 0, 0, 0, 1, 1, 1], np.uint16),
        response=np.array([0, 0, 0, 1, 1, 2, 2, 2], np.uint16), packets=np.array([1, 2, 1, 1, 0, 0, 3, 0]),
        a_star=np.array([0.2, -0.3, 0.1, 0.4, 0.0, 0.0, -0.6, 0.0]), advantage=A, logprob=np.full(8, -0.5),
        logit_grad=np.full(8, 0.5), entropy=np.arange(8.0), reachable_before=np.array([-1, 1, 1, 1, 0, -1, 1, -1]),
        reachable=np.array([-1, 0, 1, 1, 0, -1, 0, -1]), methods=np.array(["none"]), credits=A[None])  # fmt: skip


def test_tables_by_hand():
    """Guards against means over other tokens, a share of the wrong whole, and verdicts where all was lost before."""
    truth = table_truth()
    rows = {row[0]: row[1:] for row in ts.table_solver(truth).rows}
    assert rows["operand"][:3] == ["3", "66.7%", "0.400"]
    assert rows["operand"][3].startswith("-0.450 ±")
    assert rows["operator"] == ["1", "0.0%", "0.100", ""]
    assert rows["result"] == ["0", "", "", ""]
    table = ts.table_kinds(truth)
    rows = {row[0]: dict(zip(table.header[1:], row[1:], strict=True)) for row in table.rows}
    assert rows["tokens"]["decisions"] == "50.0%"
    assert rows["tokens"]["operand"] == "37.5%"
    assert rows["A*"]["operand"].startswith(f"{(1.3 / 3) / (1.6 / 8):.2f}")
    assert rows["none"]["the rest"].startswith(f"{(1 + 1 + 2 + 2) / 4 / (11 / 8):.2f}")
    assert rows["mean A*"]["decisions"].startswith("-0.100")
    assert rows["mean A*"]["unfinished"] == ""
    rows = {row[0]: row[1:] for row in ts.table_sizes(truth).rows}
    assert rows["abs(A)"][2].startswith("0.18 (")  # 2 of 11
    assert rows["entropy"][2].startswith("0.21 (")  # 6 of 28
    assert rows["entropy"][0].startswith(f"{np.corrcoef(rank(truth['entropy']), rank(abs(truth['a_star'])))[0, 1]:.2f}")
    assert rows["1 - p"] == ["", "", "0.12 (0.00 to 0.33)"]


def test_tables_of_scores_by_hand(tmp_path):
    """Guards against a figure in another column, and a method without its effective sample size."""
    truth = table_truth()
    scores = {name: ts.Score(*(ts.Estimate(value + i / 10) for i in range(8)))
              for name, value in (("none", 0.0), (ts.CEILING, 1.0))}  # fmt: skip
    pooled, within, *rest = ts.score_tables(scores, truth)
    assert pooled.rows[0] == ["none", "0.00", "0.10", "0.20", "0.50", "0.60"]
    assert pooled.rows[1] == [ts.CEILING, "1.00", "1.10", "1.20", "1.50", "1.60"]
    assert within.rows[0] == ["none", "0.30", "0.40", "0.70", "1.00", "0.00"]
    assert within.rows[1][4:] == ["", ""]
    assert within.rows[2][0] == "A*"
    assert within.rows[2][2].startswith("1.00")
    assert len(rest) == 3
    ts.draw_scores(scores, tmp_path / "scores.png")
    assert len(np.unique(plt.imread(tmp_path / "scores.png").reshape(-1, 4), axis=0)) > 50
