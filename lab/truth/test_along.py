"""Scores along a run: the table that the command writes."""
import sys

from lab.truth import along as truth_along
from lab.truth import score
from train import BUNDLED


def test_the_command(monkeypatch, tmp_path):
    """Guards against scores of another size, or under another step: those of the start model are the published ones."""
    monkeypatch.setattr(truth_along, "METHODS", ("token_type",))
    monkeypatch.setattr(truth_along, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["truth_along.py", "--name", "none", "--at", "0", str(BUNDLED), str(score.TRUTH)])
    truth_along.main()
    lines = [line.split("|") for line in (tmp_path / "along-none.md").read_text().splitlines()]
    cells = [line[2].strip() for line in lines if line[1:2] == [" token_type        "]]
    published = score.SCORES.read_text()
    assert len(cells) == 2 and all(cell in published for cell in cells)
