"""The bounds by hand and on stored curves, and the screen on made-up rows."""
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab import arms
from lab.screen import __main__ as program
from lab.screen import bounds, calibrate, simulation
from lab.statistics import read_table
from plumbing.comparison import Group
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
    monkeypatch.setattr(program, "read_metrics", lambda folder: dict.fromkeys(
        ("grad_norm", "seconds", *arms.COSTS), [0, 2.0 if folder.name == "step" else 1.0]))

    def screen(means, costs=(1, 1), tasks="", *words):
        """The words, by task and axis, of a screen with these means and costs; and what was trained."""
        def train(room, processes, stop=None):
            """Rows instead of runs: success falls or rises by the same amount in every step."""
            rows, found = room.rows(), {}
            for e in room.runs():
                area = means.get(e.seed, means.get(room.arms[e.arm], 0.5)) + 0.003 * np.random.default_rng(e.seed).normal()
                cost = costs[e.arm.startswith(HALF)]
                for end in range(20, 101, 20) if e.folder.name not in rows else ():
                    steps = range(0, end + 1, 20)
                    row = {"run": e.folder.name, "version": 3, "arm": e.arm, "command": e.command, "seconds": 1,
                           "area": area, "curve": " ".join(f"{k}:{0.3 + (area - 0.3) * k / 50}" for k in steps),
                           "spent": " ".join(f"{k}:{k * cost}" for k in steps), "steps": end, "seed": e.seed}
                    found[e.folder.name] = row
                    if stop and stop(row):
                        break
            arms.write_rows(list((rows | found).values()), room.folder / "runs.csv")
        monkeypatch.setattr(arms, "train", train)
        run_program(program)
        run_program(program, *HALF.split(), "--processes", 2, "--tasks", tasks, *words)
        file = program.ROOM.folder / HALF.replace(" --", "-").replace(" ", "-") / "tables.md"
        rows = read_table(file, HALF)[1] if file.is_file() else []
        return {tuple(row[:2]): (row[2], float(row[3])) for row in rows}, program.ROOM.rows()
    return screen


@pytest.mark.slow
@pytest.mark.parametrize("mean, control, costs, steps, cost, controls", [
    (0.4, 0.4, (1, 1), ("kill", 0.4), ("kill", 0.4), 0), (0.4, 0.3, (3, 1), ("kill", 2), ("try", 2), 3),
    (0.505, 0.4, (1, 1), ("kill", 2), ("kill", 2), 0), (0.6, 0.4, (1, 1), ("try", 2), ("try", 2), 3),
    (0.6, 0.6, (1, 1), ("undecided", 2), ("undecided", 2), 3), (0.6, 0.4, (1, 5), ("try", 2), ("kill", 2), 3)])
def test_words(screened, capsys, mean, control, costs, steps, cost, controls):
    """Guards against a lead of more cost at equal cost, a run that is stopped though it is ahead by cost, a try without
    its control, and controls of what is killed."""
    found, rows = screened({HALF: mean, CONTROL: control}, costs)
    assert found == {("countdown", "equal steps"): steps, ("countdown", "equal cost"): cost}
    assert sum(row["arm"] == CONTROL for row in rows.values()) == controls
    stopped = [row["steps"] for row in rows.values() if row["arm"] == HALF]
    assert stopped == (["40"] if steps[1] < 1 else ["100", "100"])
    said = capsys.readouterr().out
    assert "step costs 2.00 of RLOO's; its gradient is 2.00 times as long" in said
    assert f"in all: {steps[0]} at equal steps, {cost[0]} at equal cost" in said and "clips: set it to 2.0" in said


def test_only_the_first_run_is_stopped(screened):
    """Guards against a later run that ends early, beside whole ones, though the page and the simulation know none."""
    found, rows = screened({HALF: 0.55, 21: 0.3, CONTROL: 0.4})
    assert found[("countdown", "equal steps")] == ("kill", 2)
    assert [row["steps"] for row in rows.values() if row["arm"] == HALF] == ["100", "100"]


def test_what_a_kill_excludes_is_said(screened, capsys):
    """By hand: two seeds a side of almost no deviation leave 0.01 sqrt(8 / 9 / 2 + 8 / 27 / 20), 0.0068, of which 1.83
    lie above by 95% with 9 degrees of freedom."""
    screened({HALF: 0.505})
    said = float(capsys.readouterr().out.partition("not ")[2].partition(" points better (95%)")[0])
    assert said == pytest.approx(0.5 + 0.68 * 1.833, abs=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("minutes, runs, word", [(4, 0, None), (5, 1, "too early"), (9, 2, "too early"), (20, 2, "try")])
def test_no_run_is_started_that_ends_too_late(screened, capsys, monkeypatch, minutes, runs, word):
    """Guards against a word that is missing without a reason, and hours for 20 minutes. A run is taken for 250 seconds,
    by its first step, and takes as long."""
    monkeypatch.setattr(program.time, "monotonic", lambda: 250.0 * len(program.ROOM.rows()))
    found, rows = screened({HALF: 0.6, CONTROL: 0.4}, (1, 1), "", "--minutes", minutes)
    assert sum(row["arm"] == HALF for row in rows.values()) == runs
    assert found.get(("countdown", "equal steps"), (None,))[0] == word
    said = {4: "the first run ends in about 4:10: --minutes 5 is enough", 5: "the next run ends in about 4:10: --minutes 9 is",
            9: "its control takes about 8:20: --minutes 17 is enough"}.get(minutes)
    text = capsys.readouterr().out
    assert f"too early: {said}" in text if said else "too early" not in text
    assert ("would take about 4:10: left out" in text) == (minutes < 13)


@pytest.mark.slow
@pytest.mark.parametrize("mean, on_math, found", [(0.6, 0.4, "kill"), (0.6, 0.7, "try"), (0.4, 0.7, None)])
def test_further_tasks(screened, capsys, mean, on_math, found):
    """Guards against another task's rows, work on what Countdown killed, and a task that kills without being named."""
    math = f"{HALF} --task math"
    words, rows = screened({HALF: mean, CONTROL: 0.4, math: on_math, f"{CONTROL} --task math": 0.4}, tasks="math")
    assert words.get(("math", "equal steps"), (None,))[0] == words.get(("math", "equal cost"), (None,))[0] == found
    assert sum(row["arm"] == math for row in rows.values()) == {"kill": 1, "try": 2, None: 0}[found]
    assert ("; kill on math\n" in capsys.readouterr().out) == (found == "kill")


def test_what_cannot_be_screened_is_refused_in_one_sentence(screened, run_program):
    """Guards against runs that differ in more than the function, and rows of a function that was changed since."""
    for words, said in (("surpise", "no credit function surpise"),
                        ("none --steps 3", "were trained with steps 100, and now it would be 3"),
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


@pytest.mark.slow
def test_the_words_of_the_calibration_follow_from_its_rows():
    """Guards against a word that was written by hand, or that the program would no longer say."""
    file = Path(program.__file__).with_name("calibration.md")
    assert file.read_text(encoding="utf-8") == f"{calibrate.table(calibrate.screened())}\n"


@pytest.mark.parametrize("arm, axis, word", [
    ("entropy_ratio --advantage rloo", "equal steps", "try, 6"), ("token_type", "equal cost", "kill, 4"),
    ("entropy_ratio --advantage rloo", "equal cost", "try, 7"), ("token_type", "equal steps", "undecided, 8"),
    ("ppo", "equal cost", "kill, 8"), ("vineppo", "equal steps", "open")])
def test_the_former_rule_says_what_it_said(arm, axis, word):
    """By its program, at 7bd0384d, on the same runs."""
    own = next(group for group in calibrate.screened() if group.label == arm)
    assert calibrate.before(own, axis) == word


def test_seeds_to_decide():
    """By a table of t: with 11 degrees of freedom 0.005 lie above 3.106. After four seeds a lead of 0.03 has the
    squared error 0.000195 + that of the box, 0.0008 / 27 / 20; of nine seeds the first part is 4 / 9 of that, and
    sqrt(0.0000882) is below 0.03 / 3.106, but sqrt(0.000099), of eight, is above."""
    box, e = np.full(20, 0.5), bounds.Leads(0.03, (0.000195 + 0.0008 / 27 / 20) ** 0.5, 11, 4)
    assert program.seeds_to_decide(e, 0.005 / bounds.LEVEL, box) == "a try after about 9 seeds, if its lead stays"
    assert program.seeds_to_decide(e._replace(value=0.001), 1, box) == "no try after 100 seeds"


def test_a_lead_by_hand():
    """Guards against a deviation that two seeds claim to know, and a one-sided p for a two-sided one. Variances:
    (8 + 2) / 9 and (8 + 1) / 11 of 0.0001; with 9 degrees of freedom 0.01 lie above 2.821, 0.005 above 3.250."""
    e = bounds.leads(np.array([0.52, 0.54]), np.array([0.50, 0.50, 0.51, 0.51]))
    error = 0.01 * (10 / 9 / 2 + 9 / 11 / 4) ** 0.5
    assert (float(e.value), float(e.error), e.freedom) == pytest.approx((0.025, error, 9)) and 2.821 < 0.025 / error < 3.25
    assert 0.005 < e.p < 0.01 and e.estimate.p == pytest.approx(2 * e.p)
    assert e.estimate.high == pytest.approx(0.025 + 2.262 * error, abs=1e-5)
    assert e.within(0.9) == pytest.approx(1.833 * error, abs=1e-5)


@pytest.mark.parametrize("value, error, tried, futile, behind", [
    (0.025, 0.005, True, False, False), (0.008, 0.003, False, True, False), (0.008, 0.005, False, False, False),
    (-0.001, 0.02, False, True, False), (-0.031, 0.01, False, True, True), (-0.029, 0.01, False, True, False)])
def test_bounds(value, error, tried, futile, behind):
    """By hand: 1.2 points less the error, or nothing; three errors; with 9 degrees of freedom p of 5 errors is 0.0004,
    below 0.0133 * 2 / 8, and of the sixth function below a sixth of that; of the tenth not."""
    e = bounds.Leads(np.array(value), np.array(error), 9, 2)
    assert (bounds.is_try(e), bounds.is_futile(e), bounds.is_behind(e)) == (tried, futile, behind)
    assert (bounds.is_try(e, 1 / 6), bounds.is_try(e, 1 / 10)) == (tried, False)


@pytest.mark.slow
@pytest.mark.parametrize("shape, lead", [("growing", -0.04), ("constant", 0.02), ("in the last half", 0)])
def test_what_is_simulated_is_what_the_screen_says(shape, lead):
    """Guards against a simulation of another rule: on the same curves, whose areas the screen computes by itself."""
    rng, box = np.random.default_rng(3), 0.4 + 0.02 * np.random.default_rng(4).normal(size=(41, 6))
    curves = 0.4 + 0.02 * rng.normal(size=(20, bounds.LAST, 6)) + lead * np.array(simulation.SHAPES[shape]) / 0.9
    rows = lambda some: {seed: {name: dict(zip(simulation.PLACES.tolist(), values))
                                for name, values in (("curve", curve), ("spent", simulation.PLACES * 2.0))}
                         for seed, curve in enumerate(some)}
    rloo = dict.fromkeys(program.AXES, Group("RLOO", rows(box)))
    words, runs = simulation.present(simulation.until(curves), np.broadcast_to(simulation.until(box), (20, 41, 5)))
    for own, word, took in zip(curves, words, runs):
        for e in program.judge("countdown", Group("", rows(own)), rloo):
            assert (e.word, e.decided) == (word, pytest.approx(took))


@pytest.mark.slow
def test_what_was_simulated_is_as_written():
    """And what the page promises of each shape: false kills and tries, power, and the time of a kill."""
    file = Path(simulation.__file__).with_name("simulation.md")
    assert file.read_text(encoding="utf-8") == f"{simulation.table()}\n"
    for lead, _, _, former_try, kill, tried, *_, ratio in read_table(file, "How often the screen ends in which word")[1]:
        kill, tried, former_try, ratio = map(float, (kill, tried, former_try, ratio))
        assert {"0": kill > 98 and tried < 2.5 and ratio < 0.5, "1.5": tried > former_try, "2.5": kill <= 1.1,
                "-4": kill > 99.9 and ratio <= 0.35}[lead]
