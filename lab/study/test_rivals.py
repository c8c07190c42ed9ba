"""Methods against RLOO, by hand.

Run it:  python -m pytest lab/study/test_rivals.py
"""
import numpy as np
import pytest

from analyze import RLOO
from lab.estimates import points
from lab.study import rivals as study_rivals
from plumbing.report import Estimate, welch
from plumbing.runs import Group, Run

AREAS = {RLOO: (0.40, 0.41, 0.42, 0.44), "ppo": (0.50, 0.51, 0.53, 0.54), "none": (0.40, 0.42, 0.41, 0.43),
         "mine": (0.9, 0.9, 0.9, 0.9)}  # of seeds 3 to 6


@pytest.fixture
def groups():
    """Three methods with four seeds each, and one that is not compared."""
    return [Group(label, {seed: {"area": x, "end": 2 * x, "pass@16": x / 2} for seed, x in enumerate(areas, 3)})
            for label, areas in AREAS.items()]


@pytest.mark.parametrize("label, name", [
    ("none", "GRPO"), ("none advantage=rloo", "RLOO"), ("none answers=38 advantage=rloo", "RLOO answers=38"),
    ("none steps=480", "GRPO steps=480"), ("vineppo k=3", "`vineppo k=3`")])  # fmt: skip
def test_names(label, name):
    assert study_rivals.name_of(label) == name


@pytest.mark.parametrize("low, value, high, p, said", [
    (0.01, 0.02, 0.03, 0.001, "ahead"), (-0.03, -0.02, -0.01, 0.001, "behind"), (-0.014, 0.0, 0.014, 0.9, "tie"),
    (0.001, 0.01, 0.019, 0.04, "open"), (-0.016, 0.0, 0.014, 0.9, "open"), (-0.014, 0.0, 0.016, 0.9, "open"),
    (np.nan, 0.0, np.nan, np.nan, "open")])  # fmt: skip
def test_a_result_needs_a_star_or_an_interval_within_the_margin(low, value, high, p, said):
    """Guards against a tie for what is only not significant, and a star for p = 0.04 beside another difference."""
    found = study_rivals.results({"a": Estimate(value, low, high, p), "b": Estimate(0.0, -1.0, 1.0, 0.5)})
    assert found["a"] == (points(Estimate(value, low, high)) + " *" * (said in ("ahead", "behind")), said)


def test_the_table_by_hand(groups):
    """Guards against a method against itself, seeds that are early and late, figures under each other's name, and
    percent for points."""
    table = study_rivals.table_rivals("easy", groups, {"ppo": 1.25, "none": 1.0, RLOO: 1.03})
    rows = {row[0].strip("`"): dict(zip(table.header[1:], row[1:])) for row in table.rows}
    assert set(rows) == {"ppo", "GRPO"}
    ppo, rloo = (np.array(AREAS[label]) for label in ("ppo", RLOO))
    assert rows["ppo"] == {
        "seeds": "4, 4", "area": f"{points(welch(ppo, rloo))} *", "result": "ahead",
        "seeds 0 to 4": points(welch(ppo[:2], rloo[:2])), "later seeds": points(welch(ppo[2:], rloo[2:])),
        "end": points(welch(2 * ppo, 2 * rloo)), "pass@16": points(welch(ppo / 2, rloo / 2)), "cost": "1.25"}
    assert rows["GRPO"]["result"] == "open"


def test_pictures_compare_with_rloo(groups):
    """Guards against RLOO drawn beside itself, and a method that loses its own baseline where there is no RLOO."""
    for group in groups:
        group.baseline = groups[2]
    assert {group.label: group.baseline for group in study_rivals.against_rloo(groups)} == dict.fromkeys(
        ("ppo", "none", "mine"), groups[0])
    assert all(group.baseline is groups[2] for group in study_rivals.against_rloo(groups[1:]))


def test_two_forms_are_compared_beside_the_main_table():
    """Guards against all other forms among the methods, and a level without forms or opponents."""
    def run(label):
        return Run(label, label, "", label == "none", 0, {"end": 0.5})

    forms = [run(label) for label in (study_rivals.CHEAPER, study_rivals.RATIO, "ppo gamma=0.99")]
    found = study_rivals.contenders({"main": [run("none")], "forms": forms, "budget": [run("none steps=400")]})
    assert {group.label for group in found} == {"none", "none steps=400", study_rivals.CHEAPER, study_rivals.RATIO}
    assert [group.label for group in study_rivals.contenders({"main": [run("none")]})] == ["none"]
