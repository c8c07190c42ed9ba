"""Statistics against slow computations; tables and layouts against ones written by hand."""
import math
import statistics

import numpy as np
import pytest

from plumbing import report


def test_clustered_mean_by_hand():
    """Guards against errors that treat the tokens of one response as independent: clusters (1, 3), (5), (7, 8)."""
    mean, half = report.clustered_mean(np.array([1.0, 3, 5, 7, 8]), np.array([0, 0, 1, 2, 2]))
    residuals = [4 - 2 * 4.8, 5 - 4.8, 15 - 2 * 4.8]
    assert mean == pytest.approx(4.8)
    assert half == pytest.approx(1.96 * math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 5)
    mean, half = report.clustered_mean(np.array([1.0, 3]), np.array([4, 4]))
    assert mean == 2 and math.isnan(half)  # a single cluster has no error
    assert all(map(math.isnan, report.clustered_mean(np.array([]), np.array([], int))))


@pytest.mark.parametrize("t", [0.0, 0.3, 2.5, 40.0])
def test_students_t_in_closed_form(t):
    """With 1, 2 and 4 degrees of freedom the distribution has a formula; the last line is from a table."""
    one, two, four = (np.interp(t, *report.student(freedom)) for freedom in (1, 2, 4))
    assert one == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-6)
    assert two == pytest.approx(1 - t / math.sqrt(2 + t**2), abs=1e-6)
    x = t**2 / (4 + t**2)
    assert four == pytest.approx(1 - math.sqrt(x) * (1 + (1 - x) / 2), abs=1e-6)
    assert np.interp(1.98397, *report.student(100)) == pytest.approx(0.05, abs=1e-6)


def test_means_and_their_differences_by_hand():
    """Guards against an interval of width 0 for a single value. x has mean 3 and variance 4, y mean 5 and variance 1:
    a = 4 / 3 and b = 1 / 4."""
    e = report.t_estimate(np.array([1.0, 3]))
    assert (e.value, e.low, e.high) == pytest.approx((2, 2 - 12.706, 2 + 12.706), abs=1e-3)
    x, y = np.array([1.0, 3, 5]), np.array([4.134, 4.134, 5.866, 5.866])
    a, b = 4 / 3, np.var(y, ddof=1) / 4
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 3)
    e, error = report.t_estimate(x, y), math.sqrt(a + b)
    assert e.value == pytest.approx(-2)
    assert np.interp((e.high - e.value) / error, *report.student(freedom)) == pytest.approx(0.05)
    assert e.p == pytest.approx(np.interp(2 / error, *report.student(freedom)))
    for single in (x[:1],), (x, y[:1]):
        assert math.isfinite(report.t_estimate(*single).value) and math.isnan(report.t_estimate(*single).high)
    assert all(math.isnan(report.t_estimate(*none).value) for none in ((x[:0],), (x, y[:0])))
    assert report.t_estimate(np.ones(3), np.zeros(2)).p == 0


def test_t_statistics_by_the_textbook():
    """Guards against the population variance, and positions that too few responses reach."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 9, 80)
    position = np.concatenate([np.arange(n) for n in lengths])
    values = rng.normal(0.3, 1, len(position))
    samples = [[float(v) for v in values[position == p]] for p in range(8)]
    expected = [statistics.mean(x) / (statistics.stdev(x) / math.sqrt(len(x))) for x in samples if len(x) >= 30]
    assert 2 < len(expected) < 8
    np.testing.assert_allclose(report.t_statistics(values, position), expected, rtol=1e-9)
