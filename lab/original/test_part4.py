"""The document's Part 4: its arithmetic by hand, its own figures by each other, and the page against the arrays."""
import numpy as np
import pytest

from analyze import with_measures
from lab.original import part4


def test_a_run_by_hand():
    """Guards against sums for means, tags taken for reasoning, and sides that are split by the wrong sign."""
    columns = {"step": [1, 1, 1, 1], "group": [0, 0, 0, 0], "position": [0, 1, 0, 1], "credit": [2.0, 2, -1, -1],
               "logprob": [-1.0, -3, -0.5, -0.5], "logit_grad": [1.0, 1, 1, 1], "role": [0, 1, 2, 1]}
    log = with_measures({name: np.tile(column, 15) for name, column in columns.items()})  # 30 responses
    found = dict(zip(("mean", "spread", "size", "range"), part4.statistics(log)))
    assert found == {"mean": "-1.750", "spread": f"{np.std([-2, -6, 0.5, 0.5]):.3f}", "size": "2.250",
                     "range": "-6.0 to 0.5"}
    assert part4.statistics(log)[-2:] == ["-4.000", "0.500"]
    assert part4.by_type(log, log["step"] == 1) == ["1.250", "-0.750", "30", "3.250", "-1.750", "30"]


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
