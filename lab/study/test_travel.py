"""Leads by place, by hand.

Run it:  python -m pytest lab/study/test_travel.py
"""
import numpy as np
import pytest

from lab.estimates import points
from lab.study import travel as study_travel
from plumbing.report import welch
from plumbing.runs import Run

RLOO, PPO, NONE = (0.40, 0.42, 0.44), (0.50, 0.52, 0.54), (0.41, 0.43, 0.46)
LONG = (0.60, 0.64, 0.62)


def runs(label, ends, setting="", cost=300.0):
    """A run per end. Success rises linearly from 0 over the cost, so its mean is half of the end."""
    label = f"{label} {setting}".strip()
    return [Run(f"{label}-{seed}", label, setting, label.startswith("none"), seed, {
        "area": x / 2, "end": x, "curve": {step: x * step / 100 for step in range(0, 101, 10)},
        "spent": {step: cost * step / 100 for step in range(0, 101, 10)},
        "tokens_sampled": 100.0, "tokens_read": 50.0, "tokens_updated": 50.0}) for seed, x in enumerate(ends)]


@pytest.fixture
def leads():
    """Easy puzzles, where RLOO also took four times the steps, with one and four updates, these at two learning rates;
    hard ones, where only RLOO and GRPO ran; `other` has no RLOO."""
    easy = runs("ppo", PPO, cost=390.0) + runs("none", RLOO, "advantage=rloo") + runs("none", NONE) + runs("mine", PPO)
    budget = [*runs("none", LONG, "steps=400 advantage=rloo", 1200.0),
              *runs("none", PPO, "answers=16 advantage=rloo", 1500.0)]
    more = [*runs("none", PPO, "advantage=rloo updates_per_batch=4", 900.0),
            *runs("ppo", RLOO, "updates_per_batch=4", 1500.0),
            *runs("none", NONE, "clip_high=0.28 updates_per_batch=4", 900.0),
            *runs("none", NONE, "advantage=rloo lr=5e-05 updates_per_batch=4", 900.0),
            *runs("ppo", PPO, "lr=5e-05 updates_per_batch=4", 2700.0)]  # fmt: skip
    hard = runs("none", PPO, "advantage=rloo") + runs("none", PPO)
    return study_travel.list_leads({"easy": {"main": easy, "budget": budget, "updates": more}, "hard": {"main": hard},
                                    "other": {"main": runs("none", NONE)}})


def half(values):
    """The areas of runs with these ends."""
    return np.array(values) / 2


def test_each_place_has_its_own_rloo(leads):
    """Guards against differences to RLOO on easy puzzles, RLOO against itself, a place without RLOO, a star for a
    difference that shows nothing, and a dagger for one that is not a change."""
    levels, updates = study_travel.tables_travel(leads)
    rows = {(row[0].strip("`"), row[1]): row for row in levels.rows + updates.rows}
    assert set(rows) == {("ppo", "easy"), ("GRPO", "easy"), ("GRPO", "hard"), ("RLOO", "4 updates"),
                         ("ppo", "4 updates"), ("RLOO", "4 updates, lr 5e-05"), ("ppo", "4 updates, lr 5e-05")}
    gain = welch(half(PPO), half(RLOO))
    assert rows["ppo", "easy"][2:6] == ["3, 3", "1.30", points(gain), points(welch(np.array(PPO), np.array(RLOO)))]
    assert rows["ppo", "4 updates"][4] == f"-{points(gain)} * †"
    assert rows["ppo", "4 updates, lr 5e-05"][4] == points(welch(half(PPO), half(NONE))) + " *"
    assert rows["GRPO", "hard"][4] == points(welch(half(PPO), half(PPO)))
    assert rows["RLOO", "4 updates"][4:6] == ["", ""]


def test_at_equal_cost_the_opponent_takes_one_update_and_more_steps_if_it_must(leads):
    """Guards against RLOO with several updates or more responses as the opponent, a longer run than is needed, a
    difference at another cost, and an opponent that did not spend half as much."""
    rows = {(row[0].strip("`"), row[1]): row[6:] for table in study_travel.tables_travel(leads) for row in table.rows}
    # At each place: the opponent, the cost, and the ends when both had spent so much. Curves are straight. Of the areas
    # with four updates p is 0.02 and 0.00006; the other table has no stars.
    for place, method, opponent, cost, ours, theirs, star in (
            ("easy", "ppo", "RLOO", "1.00", np.array(PPO) * 300 / 390, np.array(RLOO), ""),
            ("4 updates", "RLOO", "RLOO steps=400", "3.00", np.array(PPO), np.array(LONG) * 900 / 1200, " *"),
            ("4 updates", "ppo", "RLOO steps=400", "4.00", np.array(RLOO) * 1200 / 1500, np.array(LONG), " *")):
        area, end = (points(welch(x, y)) for x, y in ((ours / 2, theirs / 2), (ours, theirs)))
        assert rows[method, place] == [opponent, cost, area + star, end]
    assert rows["ppo", "4 updates, lr 5e-05"] == [""] * 4
    assert rows["GRPO", "hard"][:2] == ["RLOO", "1.00"]


def test_a_change_is_a_difference_of_differences(leads):
    """Guards against signs mixed up: PPO is 5 points of area ahead of RLOO with one update and 5 behind with four."""
    ppo = {lead.place: lead.group for lead in leads if lead.group.label == "ppo"}
    e = study_travel.change(ppo["4 updates"], ppo["easy"])
    assert e.value == pytest.approx(-0.1)
    assert e.high - e.value == pytest.approx(2.306 * 0.01 * np.sqrt(4 / 3), abs=1e-4)  # t of 8 degrees of freedom


def test_the_picture_has_a_line_per_place(leads, tmp_path, figures):
    """Guards against a place on another's line, swapped panels, and a missing opponent shown as 0."""
    study_travel.draw_travel(leads, tmp_path / "travel.png")
    steps, cost = figures[0].axes[:2]
    places = ["easy", "hard", "4 updates", "4 updates, lr 5e-05"]
    assert [text.get_text() for text in steps.get_yticklabels()] == places
    dots = [{round(line.get_ydata()[0]): line.get_xdata()[0] for line in axis.lines if line.get_marker() == "s"
             and len(line.get_xdata())} for axis in (steps, cost)]
    assert dots[0] == pytest.approx({0: 5, 2: -5, 3: 50 * (0.52 - 1.3 / 3)})
    assert dots[1] == pytest.approx({0: 50 * (0.52 * 300 / 390 - 0.42), 2: 50 * (0.42 * 0.8 - 0.62)})
    assert [text.get_text() for text in cost.texts] == ["no run of RLOO cost enough"]
