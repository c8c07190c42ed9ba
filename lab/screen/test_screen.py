"""Error rates of the bounds on draws that did not set them, and the screen on made-up rows."""
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lab import arms
from lab.screen import __main__ as program
from lab.screen import bounds
from lab.statistics import points, read_table
from plumbing.comparison import Group
from plumbing.report import Estimate, t_estimate
from settings import Settings
from tests.fixtures import refused

HALF = "outcome_conditional --think_discount 0.25 --advantage rloo"
CONTROL = "shuffled --of outcome_conditional:think_discount=0.25 --advantage rloo"


@pytest.fixture
def screened(tmp_path, monkeypatch, run_program):
    """A function that screens HALF, where each arm's mean and cost are made up; returns the rows of its table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "BOX", program.BOX._replace(folder=tmp_path))
    shutil.copy(Path(program.__file__).with_name("settings.json"), tmp_path)
    monkeypatch.setattr(program, "run", lambda *words: "score")
    monkeypatch.setattr(program, "measure", lambda words, folder: (folder / "noise.md").write_text("noise"))
    monkeypatch.setattr(bounds, "level", lambda error: error / 10)  # close to it, and seconds faster
    monkeypatch.setattr(program, "read_metrics", lambda folder: dict.fromkeys(
        ("grad_norm", "seconds", *arms.COSTS), [0, 2.0 if folder.name == "step" else 1.0]))

    def screen(means, costs=(1, 1), tasks=""):
        """The words, by task and axis, of a screen with these means and costs; and what was trained."""
        def train(room, processes):
            """Rows instead of runs."""
            rows = room.rows()
            for e in room.runs():
                area = means.get(room.arms[e.arm], 0.5) + 0.01 * np.random.default_rng(e.seed).normal()
                cost = 50 * costs[e.arm.startswith(HALF)]
                rows.setdefault(e.folder.name, {"run": e.folder.name, "version": 3, "arm": e.arm, "command": e.command,
                                "seconds": 1, "area": area, "curve": f"0:0.3 50:{area} 100:{2 * area - 0.3}",
                                "spent": f"0:0 50:{cost} 100:{2 * cost}"})
            arms.write_rows(list(rows.values()), room.folder / "runs.csv")
        monkeypatch.setattr(arms, "train", train)
        run_program(program)
        run_program(program, *HALF.split(), "--processes", 2, "--tasks", tasks)
        _, rows = read_table(program.ROOM.folder / HALF.replace(" --", "-").replace(" ", "-") / "tables.md", HALF)
        return {tuple(row[:2]): (row[2], int(row[3])) for row in rows}, program.ROOM.rows()
    return screen


@pytest.mark.parametrize("mean, control, costs, steps, cost, controls", [
    (0.45, 0.4, (1, 1), ("kill", 3), ("kill", 3), 0), (0.6, 0.4, (1, 1), ("try", 3), ("try", 3), 3),
    (0.6, 0.6, (1, 1), ("undecided", 3), ("undecided", 3), 3), (0.6, 0.4, (1, 5), ("try", 3), ("kill", 3), 3)])
def test_words(screened, capsys, mean, control, costs, steps, cost, controls):
    """Guards against a lead of more cost at equal cost, a try without its control, and controls of what is killed."""
    found, rows = screened({HALF: mean, CONTROL: control}, costs)
    assert found == {("countdown", "equal steps"): steps, ("countdown", "equal cost"): cost}
    assert sum(row["arm"] == CONTROL for row in rows.values()) == controls
    said = capsys.readouterr().out
    assert "step costs 2.00 of RLOO's; its gradient is 2.00 times as long" in said
    assert f"in all: {steps[0]} at equal steps, {cost[0]} at equal cost" in said and "clips: set it to 2.0" in said


@pytest.mark.parametrize("mean, on_math, found", [(0.6, 0.4, "kill"), (0.6, 0.7, "try"), (0.4, 0.7, None)])
def test_further_tasks(screened, capsys, mean, on_math, found):
    """Guards against another task's rows, work on what Countdown killed, and a task that kills without being named."""
    math = f"{HALF} --task math"
    words, rows = screened({HALF: mean, CONTROL: 0.4, math: on_math, f"{CONTROL} --task math": 0.4}, tasks="math")
    assert words.get(("math", "equal steps"), (None,))[0] == words.get(("math", "equal cost"), (None,))[0] == found
    assert sum(row["arm"] == math for row in rows.values()) == 3 * bool(found)
    assert ("; kill on math\n" in capsys.readouterr().out) == (found == "kill")


def test_what_cannot_be_screened_is_refused_in_one_sentence(screened, run_program):
    """Guards against runs that differ in more than the function, and rows of a function that was changed since."""
    for words, said in (("surpise", "no credit function surpise"), ("none --steps 3", "were trained with steps 100, and now it would be 3"),
                        ("none --tasks maths", "the box has countdown, math, latin")):
        assert said in refused(run_program, program, *words.split())
    screened({HALF: 0.4})
    next(program.ROOM.folder.glob("*/function.txt")).write_text("another")
    assert "outcome_conditional was changed since its runs" in refused(screened, {})


@pytest.mark.parametrize("name, value", [
    ("lr", 1e-3), ("temperature", 0.9), ("beta2", 0.99), ("clip_high", 0.28), ("eval_problems", 256)])
def test_a_default_that_changed_is_named_with_both_values(name, value, tmp_path, monkeypatch):
    """Guards against stored runs that are compared with runs of another default, in silence: by the screen, and in a
    room; but who gives the old value goes on."""
    before = getattr(Settings(), name)
    changed = lambda **given: replace(Settings(), **{name: value} | given)
    monkeypatch.setattr("start.Settings", changed)
    said = f"were trained with {name} {before}, and now it would be {value}"
    with pytest.raises(ValueError, match=said):
        program.check(["none", "--advantage", "rloo"], tmp_path / "f")
    if name not in program.FIXED:
        program.check(["none", "--advantage", "rloo", f"--{name}", str(before)], tmp_path / "f")
    room = arms.Room(tmp_path, "--steps 5", range(2), {"RLOO": "none --advantage rloo"})
    arms.write_json(tmp_path / "settings.json", {name: before, "steps": 100})
    monkeypatch.setattr(arms, "Settings", changed)
    with pytest.raises(ValueError, match=said):
        arms.train(room, 1)


def test_the_words_of_the_calibration_follow_from_its_rows():
    """Guards against a word that was written by hand, or that the program would no longer say."""
    folder = Path(program.__file__).parent
    rows = arms.Room(folder / "calibration", "", (), {}).rows()
    runs = lambda arm, first: Group(arm, {int(row["seed"]): arms.figures_of(row) for row in rows.values()
                                          if row["arm"] == arm and first <= int(row["seed"]) < first + 10})
    for name, first, axis, word, seeds, lead, cost, over in read_table(folder / "calibration.md", "Calibration")[1]:
        own = runs(name, int(first))
        control = arms.difference(own, runs(f"shuffled --of {name}", 20)) if over else None
        rloo = program.stored(name.partition(" --task ")[2] or "countdown")
        e, = (e for e in program.judge("", own, rloo, bounds.level(0.025), control) if e.axis == axis)
        assert (word, seeds, over) == (e.word, f"{e.decided}", points(control) if over else "")
        assert (lead, cost) == (points(e.looks[e.decided - bounds.FIRST]), f"{e.cost:.2f}")


@pytest.mark.parametrize("deviation, seeds", [(0, 8), (0.019372, 10)])
def test_seeds_to_decide(deviation, seeds):
    """By a table of t, of which 0.0025 lie above 4.029, 3.833 and 3.690 with 7, 8 and 9 degrees of freedom. After four
    seeds p = 0.05 is t = 3.182. 3.182 sqrt(8 / 4) is above 4.029, sqrt(7 / 4) below 4.317. Where half of the squared
    error is the box's, 3.182 sqrt(2 / (1 + 4 / 10)) is above 3.690, with 9 for 10 below 3.833."""
    rloo = Group("", {seed: {"area": 0.5 + deviation * (-1) ** seed} for seed in range(20)})
    found = program.seeds_to_decide(Estimate(0.02, 0, 0.04, 0.05), 4, 0.0025, rloo)
    assert found == f"a try after about {seeds} seeds, if its lead stays"
    assert program.seeds_to_decide(Estimate(0.001, -0.02, 0.02, 0.9), 4, 0.0025, rloo) == "no try after 100 seeds"


@pytest.mark.parametrize("runs", [bounds.BOX, 5])
def test_a_simulated_look_is_the_screens_test_of_the_seeds_so_far(runs):
    """Guards against a look that sees later seeds, and a function's deviation taken for the box's."""
    difference, p = bounds.simulate(1.0, 3.0, runs, draw=5, paths=4)
    rng = np.random.default_rng(5)
    box, seeds = rng.normal(0, 1, (4, runs)), rng.normal(1, 3, (4, bounds.LAST))
    for look, n in enumerate(range(bounds.FIRST, bounds.LAST + 1)):
        for i in range(4):
            e = t_estimate(seeds[i, :n], box[i], freedom=min(n, runs) - 1)
            assert difference[look, i] == pytest.approx(e.value)
            assert p[look, i] == pytest.approx(e.p / 2 if e.value > 0 else 0.5)


@pytest.mark.parametrize("deviation", [1, 3, 30])
def test_it_errs_as_often_as_it_says_where_an_unadjusted_t_errs_more(deviation):
    """Guards against looks that are not paid for, a level for other draws or deviations, and a try after a kill."""
    below = bounds.level(bounds.ERROR / 2)
    for of, runs, share in product((deviation, 0.1), (bounds.BOX, 5), (1, 12)):
        assert bounds.shares(0, of, bounds.level(0.025 / share), runs)[2] < 0.027 / share + 0.0003
    assert 0.08 < (bounds.simulate(0, deviation)[1] < 0.05).any(0).mean() < 0.15
    assert bounds.shares(3, 1, below)[2] > 0.8 and bounds.shares(-2 * deviation, deviation, below)[0] > 0.9
    seen, p = np.array([[1, 1, -1], [-1, 1, 1], [1, -1, 1]]), np.array([[0.3, 0.2, 0], [0.5, 0.1, 0], [0, 0, 0]])
    assert bounds.smallest(seen, p).tolist() == [0.3, 0.1, 1]


def test_the_table_is_as_written():
    assert f"{bounds.table()}\n" == Path(bounds.__file__).with_name("bounds.md").read_text(encoding="utf-8")
