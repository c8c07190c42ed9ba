"""The bounds of the screen: Welch's p by the project's own t, and error rates on draws that did not set the level."""
import numpy as np
import pytest

from lab.screen import bounds
from plumbing.report import student, t_estimate


def test_the_tail_is_students():
    """Guards against a two-sided p, and freedom that is off by one."""
    for freedom in (2.0, 3.7, 25.0):
        t, further = student(freedom)
        at = np.array([-1.0, 0.5, 6.0])
        two_sided = np.interp(abs(at), t, further)
        expected = np.where(at > 0, two_sided / 2, 1 - two_sided / 2)
        assert bounds.tail(at, np.full(3, freedom)) == pytest.approx(expected, rel=2e-3)


def test_a_simulated_look_is_welchs_test_of_the_seeds_so_far():
    """Guards against a look that sees later seeds, and a function's deviation taken for the box's."""
    difference, p = bounds.simulate(1.0, 3.0, draw=5, paths=4)
    rng = np.random.default_rng(5)
    box, seeds = rng.normal(0, 1, (4, bounds.BOX)), rng.normal(1, 3, (4, bounds.LAST))
    for look, n in enumerate(range(bounds.FIRST, bounds.LAST + 1)):
        for i in range(4):
            e = t_estimate(seeds[i, :n], box[i])
            assert difference[i, look] == pytest.approx(e.value)
            assert p[i, look] == pytest.approx(e.p / 2 if e.value > 0 else 1 - e.p / 2, rel=1e-2)


def test_a_kill_is_for_good():
    """Guards against a try after a look at which the function was not ahead."""
    difference, p = np.array([[1, -1, 1], [1, 1, -1], [-1, 1, 1]]), np.array([[0.3, 0.5, 0], [0.2, 0.1, 0], [0, 0, 0]])
    assert bounds.smallest(difference, p).tolist() == [0.3, 0.1, 1]


@pytest.mark.parametrize("deviation", [0.7, 1, 3])
def test_it_errs_as_often_as_it_says_where_an_unadjusted_t_errs_more(deviation):
    """Guards against looks that are not paid for, and a level that only suits the draws or deviations that set it."""
    below = bounds.level(bounds.ERROR / 2)
    assert bounds.shares(0, deviation, below)[2] < 0.025 + 0.003
    unadjusted = (bounds.simulate(0, deviation)[1] < 0.05).any(1).mean()
    assert 0.11 < unadjusted < 0.15
    assert bounds.shares(3, 1, below)[2] > 0.8 and bounds.shares(-2, deviation, below)[0] > 0.9
