"""Scores along a run: the first puzzles of a truth, and the table.

Run it:  python -m pytest lab/truth/test_along.py
"""
import sys

import numpy as np
import pytest

import countdown_task
from lab.truth import along as truth_along
from lab.truth import score
from lab.truth.file import read_truth
from train import BUNDLED


@pytest.fixture(scope="module")
def truth():
    """The published truth."""
    return read_truth(score.TRUTH / "ground_truth.npz", score.READ)


def test_the_first_puzzles_are_a_truth_of_their_own(truth):
    """Guards against a column that keeps all rows, and puzzles of other responses."""
    part = truth_along.first_puzzles(truth, 3)
    n = int((truth["group"] < 3).sum())
    assert 0 < n < len(truth["group"]) / 5
    for name in score.READ:
        whole, kept = truth[name], part[name]
        if whole.shape[:1] == (len(truth["group"]),):
            assert np.array_equal(kept, whole[:n]), name
    assert np.array_equal(part["credits"], truth["credits"][:, :n])
    puzzles = score.recorded_puzzles(part, countdown_task)
    assert len(puzzles) == 3 and puzzles == score.recorded_puzzles(truth, countdown_task)[:3]


def test_the_command(truth, monkeypatch, tmp_path, capsys):
    """Guards against scores of another size or step in a column: on all puzzles they are the published ones."""
    monkeypatch.setattr(truth_along, "METHODS", ("token_type",))
    monkeypatch.setattr(truth_along, "STEP_PUZZLES", 2)
    monkeypatch.setattr(truth_along, "RESULTS", tmp_path)
    command = ["truth_along.py", "--name", "none", "--at", "0", str(BUNDLED), str(score.TRUTH)]
    monkeypatch.setattr(sys, "argv", command)
    truth_along.main()
    text = (tmp_path / "along-none.md").read_text()
    assert "2 puzzles, step 0" in text and "32 puzzles, step 0" in text
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| token_type")]
    published = score.SCORES.read_text()
    assert len(lines) == 2 and all(line[3].strip() in published for line in lines)
    assert text in capsys.readouterr().out
