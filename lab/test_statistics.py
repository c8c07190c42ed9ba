"""Correlations and their intervals against the textbook, loops and simulations, Holm's correction, cells read back."""
import math
import statistics

import numpy as np
import pytest

from lab.estimates import cell, read_cell
from lab.statistics import (RESAMPLES, bootstrap, correlate, holm, mean_ratio, resampled, share, spearman,
                            spread_within, sums, with_errors)
from plumbing.report import Estimate, pm


def test_spearman_by_the_textbook():
    """Guards against ranks of ties by place, and an interval of Pearson's or of what does not vary."""
    x, y = np.array([3.0, 1, 2, 10, 5, 4]), np.array([0.1, 0.3, 0.2, 0.9, 0.5, 0.05])
    d = np.array([3, 1, 2, 6, 5, 4]) - [2, 4, 3, 6, 5, 1]  # without ties it is 1 - 6 sum d^2 / (n^3 - n)
    e = spearman(x, y)
    assert e.value == pytest.approx(1 - 6 * sum(d**2) / (6**3 - 6))
    width = 1.96 * math.sqrt((1 + e.value**2 / 2) / 3)
    assert np.arctanh(e[1:3]) - np.arctanh(e.value) == pytest.approx([-width, width])
    tied = spearman(np.array([1.0, 1, 2, 3]), np.array([5.0, 6, 7, 7]))
    assert tied.value == pytest.approx(statistics.correlation([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5]))
    assert math.isnan(spearman(np.ones(5), x[:5]).value) and math.isnan(spearman(x[:5], np.ones(5)).value)
    assert math.isnan(spearman(x, x).low) and math.isnan(spearman(x[:3], y[:3]).low)
    assert math.isfinite(spearman(x[:4], y[:4]).low)


def test_a_ratio_of_means_matched_by_hand():
    """Guards against weights of the wrong side, and a stratum that only one side has."""
    x, stratum = np.array([1.0, 2, 3, 4, 10, 20, 90]), np.array([0, 0, 0, 0, 1, 1, 2])
    over = np.array([1, 1, 1, 0, 1, 0, 1], bool)  # 1, 2, 3 | 10 | 90 over 4 | 20 | nothing
    assert mean_ratio(x, over, ~over, np.zeros(7, int)).value == pytest.approx((106 / 5) / 12)
    assert mean_ratio(x, over, ~over, np.zeros(7, int), stratum).value == pytest.approx((2 + 10) / (4 + 20))
    assert mean_ratio(x, ~over, over, np.zeros(7, int), stratum).value == pytest.approx((3 * 4 + 20) / (6 + 10))


@pytest.mark.parametrize("errors", [(0.0, 0.0), (1.0, 0.5)])
def test_errors_shrink_a_correlation_by_as_much_as_they_should(errors):
    """Guards against errors twice or half as large: of a normal pair of correlation r, each redrawn with its error e,
    the correlation is r / sqrt((1 + e_x^2) (1 + e_y^2)), here with that of ranks; without, it is Spearman's."""
    rng, r = np.random.default_rng(3), 0.8
    x, noise = rng.normal(size=(2, 3000))
    columns = [[Estimate(v, v - 1.96 * e, v + 1.96 * e) for v in values]
               for values, e in zip((x, r * x + math.sqrt(1 - r**2) * noise), errors)]
    shrunk = r / math.sqrt(math.prod(1 + e**2 for e in errors))
    found = with_errors(*columns, draws=100)
    assert found.value == pytest.approx(6 / math.pi * math.asin(shrunk / 2), abs=0.03)
    few = [column[:12] for column in columns]
    if errors == (0.0, 0.0):
        expected = spearman(*(np.array([e.value for e in column]) for column in few))
        assert list(with_errors(*few)[:3]) == pytest.approx(expected[:3], abs=0.03)
    assert math.isnan(with_errors(*(column[:3] for column in columns)).value)


def test_the_bootstrap_draws_whole_puzzles():
    """Guards against intervals over tokens: a loop puts together the tokens of the puzzles that were drawn."""
    rng, Q = np.random.default_rng(0), 7
    puzzle = np.repeat(np.arange(Q), rng.integers(3, 9, Q))
    x = rng.normal(size=len(puzzle)) + puzzle
    y = rng.normal(size=len(puzzle)) + 0.5 * x
    drawn, found = resampled(Q), []
    assert drawn.shape == (RESAMPLES, Q) and (drawn.sum(1) == Q).all()
    assert drawn.var(0) == pytest.approx(1 - 1 / Q, abs=0.15)
    for row in drawn:
        tokens = np.concatenate([np.flatnonzero(puzzle == q) for q in np.repeat(np.arange(Q), row)])
        found.append((np.corrcoef(x[tokens], y[tokens])[0, 1], x[tokens].sum() / y[tokens].sum()))
    (low_r, low), (high_r, high) = np.percentile(found, (2.5, 97.5), axis=0)
    assert list(correlate(x, y, puzzle)[:3]) == pytest.approx([np.corrcoef(x, y)[0, 1], low_r, high_r])
    assert list(bootstrap(share, sums(puzzle, x, y))[:3]) == pytest.approx([x.sum() / y.sum(), low, high])
    for flat in (0 * x + 0.1, x), (x, 0 * x + 0.1):
        assert math.isnan(correlate(*flat, puzzle).value)


def test_holm_by_hand():
    """Of four the smallest must be below 0.05 / 4, the next below 0.05 / 3, and after the first miss none counts."""
    assert holm({"a": 0.016, "b": 0.012, "c": 0.03, "d": 0.04, "e": float("nan")}) == {"a", "b"}
    assert holm({"a": 0.013, "b": 0.014, "c": 0.001, "d": 0.9}) == {"a", "b", "c"}
    assert holm({"a": 0.03, "b": 0.03}) == holm({}) == set()


def test_cells_are_read_back():
    """Guards against the text nan in a table."""
    estimates = [Estimate(1, 0.5, 1.5), Estimate(1), Estimate(float("nan"))]
    assert [cell(e) for e in estimates] == ["1.00 (0.50 to 1.50)", "1.00", ""]
    assert [read_cell(cell(e)) for e in estimates] == [pytest.approx(e, nan_ok=True) for e in estimates]
    assert read_cell(pm(-1, 0.25))[:3] == (-1, -1.25, -0.75)


def test_spread_within_by_loops():
    """Guards against shares over the whole run, signs that cancel, and responses without credit that count."""
    responses = [[1.0, 1, 1], [0.5, -0.5], [0.0, 0], [3.0, 0, 0, 1]]
    credit = np.concatenate(responses)
    spread = spread_within(credit, np.repeat(np.arange(4), [len(r) for r in responses]))
    effective = [sum(map(abs, r)) ** 2 / (len(r) * sum(x * x for x in r)) for r in responses if any(r)]
    within = sum((x - statistics.mean(r)) ** 2 for r in responses for x in r)
    assert spread["effective sample size"] == pytest.approx(statistics.mean(effective))
    assert spread["varies within"] == pytest.approx(within / sum(x * x for x in credit))
    assert math.isnan(spread_within(np.zeros(2), np.array([0, 1]))["effective sample size"])
