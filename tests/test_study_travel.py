"""Differences by place, by hand.

Run it:  python -m pytest tests/test_study_travel.py
"""
import numpy as np
import pytest

from experiments import study_travel
from plumbing.report import points, welch
from plumbing.runs import Run

NONE, PPO, RLOO = (0.40, 0.42, 0.44), (0.50, 0.52, 0.54), (0.41, 0.43, 0.46)


def runs(label, areas, setting=""):
    """A run per area."""
    label = f"{label} {setting}".strip()
    return [Run(f"{label}-{seed}", label, setting, label.startswith("none"), seed, {"area": x, "end": x})
            for seed, x in enumerate(areas)]


@pytest.fixture
def places():
    """Easy puzzles with one and two updates, and hard ones; four updates with another clip are no place."""
    more = [run for label, areas in (("none", PPO), ("ppo", NONE)) for run in runs(label, areas, "updates_per_batch=2")]
    clipped = runs("none", NONE, "clip_high=0.28 updates_per_batch=4")
    easy = runs("none", NONE) + runs("ppo", PPO) + runs("none", RLOO, "advantage=rloo") + runs("mine", PPO)
    hard = runs("none", PPO)
    return study_travel.by_place({"easy": {"main": easy, "updates": more + clipped}, "hard": {"main": hard}})


def test_each_place_has_its_own_grpo(places):
    """Guards against differences to GRPO on easy puzzles, RLOO against itself, and an empty cell that becomes 0."""
    table = study_travel.table_travel(places)
    assert table.header == ["method", "easy", "hard", "2 updates"]
    rows = {row[0].strip("`"): row[1:] for row in table.rows}
    gain = points(welch(np.array(PPO), np.array(NONE)))
    assert rows["ppo"] == [f"{gain} *", "", f"-{gain} *"]
    assert rows["RLOO"] == [points(welch(np.array(RLOO), np.array(NONE))), "", ""]
    assert [text.partition(" ")[0] for text in rows["GRPO itself"]] == ["42.0", "52.0", "52.0"]
    assert "mine" not in rows and rows["vineppo k=3"] == [""] * 3


def test_the_picture_has_a_panel_per_place(places, tmp_path, figures):
    """Guards against a method on another's line, and places in each other's panel."""
    study_travel.draw_travel(places, tmp_path / "travel.png")
    line = study_travel.SHOWN.index("ppo")
    for axis, gain in zip(figures[0].axes, (10, None, -10)):
        dots = [x.get_xdata()[0] for x in axis.lines if x.get_marker() == "o" and x.get_ydata()[0] == line]
        assert dots == ([pytest.approx(gain)] if gain else [])
    assert [axis.get_title() for axis in figures[0].axes] == ["easy", "hard", "2 updates"]
