"""The document's Part 4: its arithmetic by hand, its own figures by each other, and the page against the arrays."""
import numpy as np
import pytest

from analyze import with_measures
from lab.estimates import read_table
from lab.original import part4


def test_a_run_by_hand():
    """Guards against sums for means, tags taken for reasoning, and tokens without credit on the wrong side."""
    columns = {"step": [1] * 6, "group": [0, 0, 0, 0, 1, 1], "position": [0, 1] * 3, "credit": [2.0, 2, -1, -1, 0, 0],
               "logprob": [-1.0, -3, -0.5, -0.5, -1, -1], "logit_grad": [1.0] * 6, "role": [0, 1, 2, 1, 0, 0]}
    log = with_measures({name: np.tile(column, 10) for name, column in columns.items()})  # 30 responses
    assert part4.statistics(log)[:4] == ["-1.167", f"{np.std([-2, -6, 0.5, 0.5, 0, 0]):.3f}", "1.500", "-6.0 to 0.5"]
    assert part4.statistics(log)[-3:] == ["-4.000", "0.250", "0.500"]  # credit above 0, 0 or below, below
    assert part4.by_type(log, log["credit"] != 0) == ["1.250", "-0.750", "20", "3.250", "-1.750", "20"]


def test_the_documents_figures_fit_each_other():
    """Guards against a figure that was copied wrong: its tables are of the same 303,042 tokens."""
    rows = [[float(x.replace(",", "")) for x in line.split()] for line in part4.POSITIONS.split(";")]
    mean, _, size, logp, n = np.array(rows).T
    assert n.sum() == 303_042
    for column, pooled in ((mean, 0.079), (size, 0.307), (logp, -0.534)):
        assert column @ n / n.sum() == pytest.approx(pooled, abs=6e-4)
    *parts, total = [[float(x.replace(",", "")) for x in line.split()] for line in part4.FIFTHS.split(";")]
    for first in (0, 3):  # filler, reasoning
        size, logp, n = np.array(parts).T[first : first + 3]
        assert n.sum() == total[first + 2]
        assert (size @ n / n.sum(), logp @ n / n.sum()) == pytest.approx(total[first : first + 2], abs=1e-3)


def test_the_page_is_that_of_the_published_arrays(tmp_path, monkeypatch):
    """Guards against a table that its arrays no longer give."""
    tracked = part4.FILE.read_text(encoding="utf-8")
    monkeypatch.setattr(part4, "FILE", tmp_path / "part4.md")
    part4.main()
    assert (tmp_path / "part4.md").read_text(encoding="utf-8") == tracked and "nan" not in tracked
    found = read_table(part4.FILE, "Contribution")[1][-3:]
    for run, cells in zip(part4.RUNS.values(), list(zip(*found))[2:]):
        credit, logprob = (np.load(run / "credit.npz")[name] for name in ("credit", "logprob"))
        sides = [credit > 0, credit <= 0, credit < 0]
        assert list(cells) == [f"{(credit[side] * logprob[side]).mean():.3f}" for side in sides]
