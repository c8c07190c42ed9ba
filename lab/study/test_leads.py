"""Leads over RLOO by setting, by hand."""
import numpy as np
import pytest

from lab.estimates import points
from lab.study import leads as study_leads
from lab.study.test_tables import study_run
from plumbing.report import welch

RLOO, PPO, NONE = (0.40, 0.42, 0.44), (0.50, 0.52, 0.54), (0.41, 0.43, 0.46)
LONG = (0.60, 0.64, 0.62)


def runs(label, ends, setting="", cost=300.0):
    """A run per end. Success rises linearly from 0 over the cost, so its mean is half of the end."""
    return [study_run(label, seed, x, setting, curve={step: x * step / 100 for step in range(0, 101, 10)},
                      spent={step: cost * step / 100 for step in range(0, 101, 10)}) for seed, x in enumerate(ends)]


@pytest.fixture
def levels():
    """Easy puzzles, where RLOO also took four times the steps, with one and four updates, these at two learning rates;
    hard ones, where only RLOO and GRPO ran; `other` has no RLOO."""
    easy = runs("ppo", PPO, cost=390.0) + runs("none", RLOO, "advantage=rloo") + runs("none", NONE) + runs("mine", PPO)
    budget = [*runs("none", LONG, "steps=400 advantage=rloo", 1200.0),
              *runs("none", PPO, "answers=16 advantage=rloo", 1500.0)]
    more = [*runs("none", PPO, "advantage=rloo updates_per_batch=4", 900.0),
            *runs("ppo", RLOO, "updates_per_batch=4", 1500.0),
            *runs("none", NONE, "clip_high=0.28 updates_per_batch=4", 900.0),
            *runs("none", NONE, "advantage=rloo lr=5e-05 updates_per_batch=4", 900.0),
            *runs("ppo", PPO, "lr=5e-05 updates_per_batch=4", 2700.0)]
    hard = runs("none", PPO, "advantage=rloo") + runs("none", PPO)
    return {"easy": {"main": easy, "budget": budget, "updates": more}, "hard": {"main": hard},
            "other": {"main": runs("none", NONE)}}


def half(values):
    """The areas of runs with these ends."""
    return np.array(values) / 2


@pytest.fixture
def rows(levels):
    """The rows of both tables by method and setting."""
    return {(row[0].strip("`"), row[1]): row[2:] for table in study_leads.tables_leads(levels) for row in table.rows}


def test_each_setting_has_its_own_rloo(rows):
    """Guards against differences to RLOO on easy puzzles, RLOO against itself, a setting without RLOO, an asterisk for
    a difference that shows nothing, and a dagger for one that is not a change."""
    assert set(rows) == {("ppo", "easy"), ("GRPO", "easy"), ("GRPO", "hard"), ("RLOO", "4 updates"),
                         ("ppo", "4 updates"), ("RLOO", "4 updates, lr 5e-05"), ("ppo", "4 updates, lr 5e-05")}
    gain, end = points(welch(half(PPO), half(RLOO))), points(welch(np.array(PPO), np.array(RLOO)))
    assert rows["ppo", "easy"][:4] == ["3, 3", "1.30", f"{gain} *", end]
    assert rows["ppo", "4 updates"][2] == f"-{gain} * †"
    assert rows["ppo", "4 updates, lr 5e-05"][2] == points(welch(half(PPO), half(NONE))) + " *"
    assert rows["GRPO", "hard"][2] == points(welch(half(PPO), half(PPO)))
    assert rows["RLOO", "4 updates"][2:4] == ["", ""]


def test_at_equal_cost_rloo_takes_one_update_and_more_steps_if_it_must(rows):
    """Guards against RLOO with several updates or more responses, a longer run than is needed, a difference at another
    cost, and a run that did not spend half as much."""
    # At each setting: the run of RLOO, the cost, and the ends when both had spent so much. Curves are straight. Of the
    # areas with four updates p is 0.02 and 0.00006; at the levels, asterisks are in another table.
    for where, method, rloo, cost, ours, theirs, asterisk in (
            ("easy", "ppo", "RLOO", "1.00", np.array(PPO) * 300 / 390, np.array(RLOO), ""),
            ("4 updates", "RLOO", "RLOO steps=400", "3.00", np.array(PPO), np.array(LONG) * 900 / 1200, " *"),
            ("4 updates", "ppo", "RLOO steps=400", "4.00", np.array(RLOO) * 1200 / 1500, np.array(LONG), " *")):
        area, end = (points(welch(x, y)) for x, y in ((ours / 2, theirs / 2), (ours, theirs)))
        assert rows[method, where][4:] == [rloo, cost, area + asterisk, end]
    assert rows["ppo", "4 updates, lr 5e-05"][4:] == [""] * 4
    assert rows["GRPO", "hard"][4:6] == ["RLOO", "1.00"]


def test_a_change_is_a_difference_of_differences(levels):
    """Guards against signs mixed up: PPO is 5 points of area ahead of RLOO with one update and 5 behind with four."""
    leads = study_leads.leads_by_level(levels)[0] | study_leads.leads_with_updates(levels)
    ppo = {setting: lead.group for (label, setting), lead in leads.items() if label == "ppo"}
    e = study_leads.change(ppo["4 updates"], ppo["easy"])
    assert e.value == pytest.approx(-0.1)
    assert e.high - e.value == pytest.approx(2.306 * 0.01 * np.sqrt(4 / 3), abs=1e-4)  # t of 8 degrees of freedom
