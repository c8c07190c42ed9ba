"""The forest plot by what it draws."""
import math

import pytest

from lab.study import forest
from tests.test_analyze import group


def test_the_forest_shows_differences_with_the_best_on_top(tmp_path, figures):
    """Guards against a wrong order or unit, seeds left out, and an axis that a collapse stretches until nothing else
    can be read."""
    base, ends = group("none", {0: 0.53, 1: 0.57}), {"fallen": 0.15, "random": 0.50, "best": 0.60}
    found = [group(name, {0: end - 0.02, 1: end + 0.02}, base) for name, end in ends.items()]
    half = 100 * 4.3027 * math.sqrt(2) * 0.02  # of Welch's interval of a difference, with 2 degrees of freedom
    forest.draw_forest([base, *found, group("alone", {0: 0.9})], tmp_path / "a.png")
    areas, ends = figures[0].axes
    names = ["best, n = 2", "random (control), n = 2", "fallen, n = 2"]
    assert [text.get_text() for text in areas.get_yticklabels()] == names
    assert ends.get_xlabel() == "points more than GRPO"
    for y, *expected in ((0, [5 - half, 5 + half], [5], [], [3, 7]),  # interval, mean, arrow, seeds
                         (1, [-15, -5 + half], [-5], [-15], [-7, -3]), (2, [-15, -15], [], [-15], [])):
        for marker, values in zip(("None", "o", "<", "|"), expected):
            lines = [line for line in ends.lines if line.get_marker() == marker and set(line.get_ydata()) == {y}]
            assert [x for line in lines for x in line.get_xdata()] == pytest.approx(values, abs=1e-2)
    dots = [(line.get_xdata()[0], line.get_markerfacecolor() == "none") for line in areas.lines
            if line.get_marker() == "o"]
    assert dots == [(pytest.approx(2.5), False), (pytest.approx(-2.5), True)]  # half of what it is at the end
    assert [text.get_text() for text in ends.texts] == [f"-40.0 ± {half:.1f}"]
    assert areas.yaxis_inverted() and ends.get_xlim()[0] == -15
