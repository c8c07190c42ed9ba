"""Differences by place, by hand.

Run it:  python -m pytest tests/test_study_travel.py
"""
import numpy as np
import pytest

from experiments import study_travel
from plumbing.report import points, welch
from plumbing.runs import Run

RLOO, PPO, NONE = (0.40, 0.42, 0.44), (0.50, 0.52, 0.54), (0.41, 0.43, 0.46)


def runs(label, areas, setting=""):
    """A run per area."""
    label = f"{label} {setting}".strip()
    return [Run(f"{label}-{seed}", label, setting, label.startswith("none"), seed, {"area": x, "end": x})
            for seed, x in enumerate(areas)]


@pytest.fixture
def places():
    """Easy puzzles with one and four updates, these at two learning rates, and hard ones, where only RLOO and GRPO ran;
    `other` has no RLOO."""
    easy = runs("ppo", PPO) + runs("none", RLOO, "advantage=rloo") + runs("none", NONE) + runs("mine", PPO)
    more = [*runs("none", PPO, "advantage=rloo updates_per_batch=4"), *runs("ppo", RLOO, "updates_per_batch=4"),
            *runs("none", NONE, "clip_high=0.28 updates_per_batch=4"),
            *runs("none", NONE, "advantage=rloo lr=5e-05 updates_per_batch=4"),
            *runs("ppo", PPO, "lr=5e-05 updates_per_batch=4")]  # fmt: skip
    hard = runs("none", PPO, "advantage=rloo") + runs("none", PPO)
    return study_travel.by_place({"easy": {"main": easy, "updates": more}, "hard": {"main": hard},
                                  "other": {"main": runs("none", NONE)}})


def test_each_place_has_its_own_rloo(places):
    """Guards against differences to RLOO on easy puzzles, RLOO against itself, an empty cell that becomes 0, and a
    dagger for a difference that is not a change."""
    table = study_travel.table_travel(places)
    assert table.header == ["method", "easy", "hard", "4 updates", "4 updates, lr 5e-05"]
    rows = {row[0].strip("`"): row[1:] for row in table.rows}
    gain = points(welch(np.array(PPO), np.array(RLOO)))
    slower = points(welch(np.array(PPO), np.array(NONE)))
    assert rows["ppo"] == [f"{gain}, n = 3", "", f"-{gain} †, n = 3", f"{slower}, n = 3"]
    easy = points(welch(np.array(NONE), np.array(RLOO)))
    assert rows["GRPO"] == [f"{easy}, n = 3", f"{points(welch(np.array(PPO), np.array(PPO)))}, n = 3", "", ""]
    assert [text.partition(" ")[0] for text in rows["RLOO, area"]] == ["42.0", "52.0", "52.0", "43.3"]
    assert set(rows) == {"RLOO, area", "ppo", "GRPO"}


def test_a_change_is_a_difference_of_differences(places):
    """Guards against signs mixed up: PPO is 10 points ahead of RLOO with one update and 10 behind with four."""
    found = study_travel.gains(places)
    e = study_travel.change(found["4 updates"]["ppo"], found["easy"]["ppo"])
    assert e.value == pytest.approx(-0.2)
    assert e.high - e.value == pytest.approx(2.306 * 0.02 * np.sqrt(4 / 3), abs=1e-4)  # t of 8 degrees of freedom


def test_the_picture_has_a_panel_per_place(places, tmp_path, figures):
    """Guards against a method on another's line, and places in each other's panel."""
    study_travel.draw_travel(places, tmp_path / "travel.png")
    assert [text.get_text() for text in figures[0].axes[0].get_yticklabels()] == ["ppo", "GRPO"]
    for axis, gain in zip(figures[0].axes, (10, None, -10, 26 / 3)):
        dots = [x.get_xdata()[0] for x in axis.lines if x.get_marker() == "o" and x.get_ydata()[0] == 0]
        assert dots == ([pytest.approx(gain)] if gain else [])
    titles = ["easy, n = 3", "hard, n = 3", "4 updates, n = 3", "4 updates, lr 5e-05, n = 3"]
    assert [axis.get_title() for axis in figures[0].axes] == titles
