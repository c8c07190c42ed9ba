"""Holm's correction by hand, and cells that are read back as they were written.

Run it:  python -m pytest lab/test_estimates.py
"""
import pytest

from lab.estimates import cell, read_cell
from lab.statistics import holm
from plumbing.report import Estimate, pm


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
