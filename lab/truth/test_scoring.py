"""Scores of credit against the truth: planted agreement, numpy, plain loops, and tables by hand."""
import math

import numpy as np
import pytest
import torch

import countdown_task
from countdown_task import Puzzle
from grpo import compare
from lab import statistics, updates
from lab.truth import scoring as ts
from lab.truth.solver import KINDS
from plumbing.metrics import log_columns
from rollout import Policy, rollout
from tests.plain import flat_gradient, plain_logprobs
from train import Settings


def made_up(Q=12, G=4, L=20, seed=0):
    """Columns that `score` reads; A* is nowhere exactly 0 where there were rollouts."""
    rng, N = np.random.default_rng(seed), Q * G * L
    response, tried = np.repeat(np.arange(Q * G), L), rng.random(N) < 0.5
    return dict(response=response, group=response // G, packets=tried * 3,
                a_star=rng.normal(size=N) * np.exp(rng.normal(size=N)) * tried,
                reachable_before=rng.integers(-1, 2, N).astype(np.int8),
                reachable=rng.integers(0, 2, N).astype(np.int8))


def planted(truth, x):
    """The score of credit x against A*."""
    return ts.score(x, truth["a_star"], truth, ts.Estimate(0.7))


def rank(x):
    """Ranks from 1 by counting, ties sharing their mean."""
    return np.array([(x < v).sum() + ((x == v).sum() + 1) / 2 for v in x])


def test_credit_equal_to_the_truth_scores_one_and_its_negative_minus_one():
    """Guards against scores of other tokens than the credit's, lost signs, and intervals that miss."""
    truth = made_up()
    y = truth["a_star"]
    for s, r in ((planted(truth, 3e-6 * y), 1), (planted(truth, -y), -1)):
        for found in (s.spearman, s.within_spearman, s.within_pearson):
            assert list(found[:3]) == pytest.approx([r] * 3, abs=1e-9)
        assert s.cosine.value == 0.7
    pushed = planted(truth, np.where(truth["packets"] > 0, y, 100.0))  # tokens without rollouts
    assert pushed.within_pearson.value == pytest.approx(1)
    assert pushed.spearman.value < 0.5


def test_credit_that_is_constant_on_a_response_knows_nothing_within():
    """Guards against scores made of rounding: plain GRPO has none within responses."""
    truth = made_up()
    A = np.repeat(np.random.default_rng(1).normal(size=48), 20).astype(np.float32)
    s = planted(truth, A * (1 + 1e-8))
    assert [ts.cell(e) for e in (s.within_spearman, s.within_pearson, s.solver)] == [""] * 3
    assert abs(s.spearman.value) < 0.3


def test_responses_without_calculations_or_choices_still_have_scores():
    """Guards against a crash, once all rollouts are made, where no token is an operand or all of them were certain."""
    truth = made_up()
    truth["reachable_before"][:], truth["packets"][:] = -1, 0
    s = planted(truth, truth["a_star"] + 1)
    assert s.spearman.value == pytest.approx(1)
    assert math.isnan(s.solver.value) and math.isnan(s.within_pearson.value)


def test_scores_within_responses_by_loops():
    """Guards against ranks or means over all tokens, and verdicts on tokens before which the target was lost."""
    truth = made_up(3, 2, 30)
    x = np.random.default_rng(1).normal(size=180) + 2 * truth["a_star"] + truth["reachable"]
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


def test_the_bootstrap_draws_whole_puzzles():
    """Guards against intervals over tokens: a loop puts together the tokens of the puzzles that were drawn."""
    rng, Q = np.random.default_rng(0), 7
    puzzle = np.repeat(np.arange(Q), rng.integers(3, 9, Q))
    x = rng.normal(size=len(puzzle)) + puzzle
    y = rng.normal(size=len(puzzle)) + 0.5 * x
    drawn, found = statistics.resampled(Q), []
    assert drawn.shape == (statistics.RESAMPLES, Q)
    assert (drawn.sum(1) == Q).all()
    assert drawn.var(0) == pytest.approx(1 - 1 / Q, abs=0.15)
    for row in drawn:
        tokens = np.concatenate([np.flatnonzero(puzzle == q) for q in np.repeat(np.arange(Q), row)])
        found.append((np.corrcoef(x[tokens], y[tokens])[0, 1], x[tokens].sum() / y[tokens].sum()))
    low, high = np.percentile(found, (2.5, 97.5), axis=0)
    e = statistics.correlate(x, y, puzzle)
    assert list(e[:3]) == pytest.approx([np.corrcoef(x, y)[0, 1], low[0], high[0]])
    for flat in (0 * x + 0.1, x), (x, 0 * x + 0.1):
        assert math.isnan(statistics.correlate(*flat, puzzle).value)
    e = statistics.bootstrap(statistics.share, statistics.sums(puzzle, x, y))
    assert list(e[:3]) == pytest.approx([x.sum() / y.sum(), low[1], high[1]])


def test_the_cosine_is_of_summed_gradients():
    """Guards against a mean of the puzzles' cosines, and limits beyond 1."""
    rng, Q = np.random.default_rng(0), 5
    x = rng.normal(size=(Q, 9))
    y = x * rng.random((Q, 1)) + 0.4 * rng.normal(size=(Q, 9))

    def direct(left_out):
        a, b = (np.delete(g, left_out, 0).sum(0) for g in (x, y))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    half = 1.96 * (Q - 1) * np.std([direct([q]) for q in range(Q)], ddof=1) / Q**0.5
    e = updates.cosine_of(x, y)
    assert list(e[:3]) == pytest.approx([direct([]), direct([]) - half, min(direct([]) + half, 1)])
    assert list(updates.cosine_of(x, -2 * x)[:3]) == pytest.approx([-1, -1, -1])
    assert updates.cosine_of(x, -x - y).low >= -1
    assert math.isnan(updates.cosine_of(x, 0 * x).value)


def test_all_scores_put_every_method_in_its_place(tokenizer, random_model, exact):
    """Guards against gradients or scores of another method, puzzle or response, and a ceiling without two halves."""
    puzzles, rng = [Puzzle((4, 3, 5), 8), Puzzle((7, 18, 2, 11), 36)], np.random.default_rng(0)
    policy = Policy(random_model, tokenizer, countdown_task)
    batch = rollout(policy, puzzles, Settings(answers=3, max_new_tokens=9), step=0)
    batch.advantage = compare(batch)
    batch.mask[4, 3:] = False
    logprob = plain_logprobs(random_model, [policy.prompt(puzzles[g]) for g in batch.group], batch.tokens, batch.mask)
    credits = torch.randn(3, *batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
    parts = torch.stack(list(updates.credit_gradients(batch, credits, 3)), dim=1)  # (3, 2, P)
    for credit, of_puzzles in zip(credits, parts, strict=True):
        for rows, gradient in zip((slice(3), slice(3, 6)), of_puzzles, strict=True):
            expected = flat_gradient(random_model, (credit[rows] * logprob[rows]).sum())
            assert torch.allclose(gradient, expected, atol=1e-8 * expected.abs().max())

    truth, N, credits = log_columns(0, batch, batch.logprob), int(batch.mask.sum()), credits[:, batch.mask].numpy()
    truth |= {"a_star": credits[2], "a_star_halves": rng.normal(size=(N, 2)), "packets": np.ones(N, int),
              "reachable_before": np.ones(N, int), "reachable": rng.integers(0, 2, N), "credits": credits,
              "methods": np.array(["one", "two", "exact"]), "advantage": rng.normal(size=N)}
    scores = ts.all_scores(batch, truth)
    ceiling, half = scores["half against half"], truth["a_star_halves"].T
    compared = {"one": credits[0], "two": credits[1], "exact": credits[2],
                "A·abs(log p)": -truth["advantage"] * truth["logprob"],
                "A·‖onehot - p‖": truth["advantage"] * truth["logit_grad"]}
    assert list(scores) == [*compared, "half against half"]
    for name, x in compared.items():
        assert scores[name].spearman.value == pytest.approx(np.corrcoef(rank(x), rank(credits[2]))[0, 1])
    for name, update in zip(truth["methods"].tolist(), parts.sum(1)):
        cosine = torch.cosine_similarity(update, parts.sum(1)[2], dim=0).item()
        assert scores[name].cosine.value == pytest.approx(cosine, abs=1e-6)
    assert ceiling.spearman.value == pytest.approx(np.corrcoef(*map(rank, half))[0, 1])
    assert ceiling.cosine.value < 0.99


@pytest.fixture
def tables():
    """Rows, by title and name, of the tables of three responses to two puzzles."""
    kinds = ["opening", "operand", "operator", "operand", "result", "verdict", "operand", "tag"]
    A = np.array([-1, -1, -1, 1, 1, 2, 2, 2.0])
    truth = dict(
        kind=np.array([KINDS.index(kind) for kind in kinds]), group=np.array([0, 0, 0, 0, 0, 1, 1, 1], np.uint16),
        response=np.array([0, 0, 0, 1, 1, 2, 2, 2], np.uint16), packets=np.array([1, 2, 1, 1, 0, 0, 3, 0]),
        a_star=np.array([0.2, -0.3, 0.1, 0.4, 0.0, 0.0, -0.6, 0.0]), advantage=A, logprob=np.full(8, -0.5),
        logit_grad=np.full(8, 0.5), entropy=np.arange(8.0), reachable_before=np.array([-1, 1, 1, 1, 0, -1, 1, -1]),
        reachable=np.array([-1, 0, 1, 1, 0, -1, 0, -1]), methods=np.array(["none"]), credits=A[None])
    scores = {name: ts.Score(*(ts.Estimate(value + i / 10) for i in range(5)))
              for name, value in (("none", 0.0), (ts.HALVES, 1.0))}
    return [{row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
            for table in ts.score_tables(scores, truth)]


def test_tables_by_hand(tables):
    """Guards against means over other tokens, a share of the wrong whole, and a figure in another column."""
    pooled, within, sizes, where, solver = tables
    assert pooled["none"] == {"method": "none", "Spearman": "0.00", "cosine of update": "0.10"}
    assert list(within["none"].values())[1:] == ["0.20", "0.30", "0.40", "1.00"]
    assert list(within[ts.HALVES].values())[1:] == ["1.20", "1.30", "1.40", ""]
    assert within["A*"]["Pearson"].startswith("1.00")
    assert list(solver["operand"].values())[1:4] == ["3", "66.7%", "0.400"]
    assert solver["operand"]["A*, lost"].startswith("-0.450 ±")
    assert list(solver["result"].values())[1:] == ["0", "", "", ""]  # its target was lost before
    assert where["tokens"]["decisions"] == "50.0%" and where["tokens"]["operand"] == "37.5%"
    assert where["A*"]["operand"].startswith(f"{(1.3 / 3) / (1.6 / 8):.2f}")
    assert where["none"]["operand"].startswith(f"{(1 + 1 + 2) / 3 / (11 / 8):.2f}")
    assert where["mean A*"]["decisions"].startswith("-0.100") and where["mean A*"]["answer"] == ""
    r = np.corrcoef(np.arange(8), rank(np.array([0.2, 0.3, 0.1, 0.4, 0, 0, 0.6, 0])))[0, 1]
    assert sizes["entropy"]["all tokens"].startswith(f"{r:.2f}") and sizes["1 - p"]["all tokens"] == ""


def test_the_picture_has_the_best_within_responses_on_top(tmp_path, figures):
    """Guards against a score in another row or panel, and A* or the half against half taken for a method."""
    file = tmp_path / "scores.md"
    file.write_text("## Credit against A*, all tokens\n\n| method | cosine of update |\n|---|---|\n| a | 0.90 |\n"
                    "| none | 0.80 |\n| random | -0.50 |\n| half against half | 0.28 |\n\n"
                    "## Credit against A* and the solver, within responses\n\n| method | Spearman |\n|---|---|\n"
                    "| a | -0.20 |\n| none | |\n| random | 0.30 |\n| half against half | 0.60 |\n| A* | 1.00 |\n")
    ts.draw_scores(file, tmp_path / "scores.png")
    assert figures[0].axes[0].yaxis_inverted()
    for axis, scores, halves in zip(figures[0].axes, ([0.3, math.nan, -0.2], [-0.5, 0.8, 0.9]), (0.6, 0.28)):
        dots = [line for line in axis.lines if line.get_marker() == "o"]  # of random, none and a
        assert [line.get_xdata()[0] for line in dots] == pytest.approx(scores, nan_ok=True)
        assert [line.get_ydata()[0] for line in dots] == [0, 1, 2]
        assert [line.get_markerfacecolor() == "none" for line in dots] == [True, False, False]
        assert axis.lines[-1].get_xdata()[0] == pytest.approx(math.sqrt(2 * halves / (1 + halves)))
