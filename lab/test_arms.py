"""The engine of the rooms: a small room that is trained, interrupted and resumed, and its tables by hand."""
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lab import arms
from lab.arms import Experiment, Room
from lab.statistics import read_table
from plumbing.comparison import Group
from plumbing.report import Estimate, t_estimate
from plumbing.runs import read_metrics
from tests.fixtures import refused

TRAIN = Path(arms.__file__).parents[1] / "train.py"
SMALL = ("--steps 2 --questions 2 --responses 2 --eval_every 0 --eval_problems 4 --max_new_tokens 24 --state_every 1 "
         "--pass_at 0")
HALF = "outcome_conditional --think_discount 0.25 --normalize none --lr 0.0001"


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A room of two arms and two seeds, in a folder of its own from which the programs of this tree run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arms, "LOOK", 0.02)
    (tmp_path / "room").mkdir()
    return Room(tmp_path / "room", SMALL, range(2), {"RLOO": "none --advantage rloo", "half": HALF}, program=str(TRAIN))


def rows_of(room, **others):
    """A made-up row for each run of a room, as text."""
    return [{"run": e.folder.name, "version": "3", "arm": e.arm, "command": e.command, "seconds": "100",
             "curve": "0:0.1 2:0.3", "spent": "0:0 2:50", "area": "0.2", "end": "0.3"} | others for e in room.runs()]


def write(room, rows):
    arms.write_rows(rows, room.folder / "runs.csv")


def test_what_is_left_is_trained_or_resumed_seeds_first(room, monkeypatch, capsys):
    """Guards against a run made again, seeds of one arm first, and a started run that begins anew."""
    started, runs = [], room.runs()
    assert [(e.seed, e.arm) for e in runs] == [(0, "RLOO"), (0, "half"), (1, "RLOO"), (1, "half")]
    write(room, rows_of(room)[:1])
    for e, final in ((runs[1], {"step": 2, "pass@16": 0.5}), (runs[2], None)):
        e.folder.mkdir(parents=True)
        settings = {"mitigation": "none", "seed": 0, "steps": 2, "pass_at": 16}
        config = {"command": e.command, "settings": settings, "method": {}, "inputs": {}}
        (e.folder / "config.json").write_text(json.dumps(config))
        if final:
            (e.folder / "final.json").write_text(json.dumps(final))
    popen = subprocess.Popen
    monkeypatch.setattr(arms.subprocess, "Popen", lambda words, **_: started.append(words[1:]) or popen(["true"]))
    monkeypatch.setattr(arms, "take_over", lambda e, code: "")
    arms.train(room, 1)
    assert started == [["-c", ""], [str(TRAIN), "--resume", str(runs[2].folder)], shlex.split(runs[3].command)[1:]]
    assert capsys.readouterr().out.splitlines()[0] == "1/4 runs done, ETA 6:00"  # 1.2 * 100 * 3 seconds


def test_runs_end_with_the_program(room, monkeypatch, interruptible):
    """Guards against runs that outlive a Ctrl-C, and more of them than asked."""
    counting = "import itertools, time\nfor i in itertools.count():\n    print(i, flush=True)\n    time.sleep(0.01)"
    monkeypatch.setattr(Experiment, "command", f"python -c {shlex.quote(counting)}")
    first, second, third, _ = room.runs()
    size, deadline = lambda e: len(e.log.read_text()) if e.log.is_file() else 0, time.monotonic() + 20

    def stop():
        """Stop the study once both runs write."""
        while not (size(first) and size(second)) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        arms.train(room, 2)
    ended = size(second)
    assert ended and not size(third)
    time.sleep(0.1)
    assert size(second) == ended


def test_a_run_that_is_stopped_keeps_its_row(room, monkeypatch):
    """Guards against a run that goes on after its end, a stop that looks twice at the same evaluation, and one that is
    trained again."""
    room, asked = room._replace(seeds=[0], arms={"half": HALF}), []
    (e,), (row,) = room.runs(), rows_of(room._replace(seeds=[0], arms={"half": HALF}))
    monkeypatch.setattr(Experiment, "command", "python -c 'import time; time.sleep(60)'")
    curves = iter(["0:0.1 1:0.2"] * 3 + ["0:0.1 1:0.2 2:0.3"] * 99)
    monkeypatch.setattr(arms, "row_so_far", lambda _: row | {"command": e.command, "curve": next(curves)})
    monkeypatch.setattr(arms, "make_row", lambda *_: pytest.fail("its row was made anew"))
    began = time.monotonic()
    arms.train(room, 1, lambda row: asked.append(row["curve"]) or len(asked) == 2)
    assert asked == ["0:0.1 1:0.2", "0:0.1 1:0.2 2:0.3"] and time.monotonic() - began < 30
    assert room.rows()[e.folder.name]["curve"] == asked[-1]
    arms.train(room, 1, lambda row: pytest.fail("it was trained again"))


# ----------------------------------------------------------------------------------------------------- tables


def group(*curves):
    """A group of runs given as (cost so far, success) pairs from one measurement to the next."""
    return Group("a", {seed: {"curve": {i: y for i, (_, y) in enumerate(curve)},
                              "spent": {i: float(x) for i, (x, _) in enumerate(curve)}}
                       for seed, curve in enumerate(curves)})


def test_both_curves_are_read_where_the_coarser_one_was_measured():
    """Guards against a concave curve that looks better the more often it was measured, and a mean over measurements
    instead of cost: until 300, the second group's mean is 0.45 by its own measurements."""
    coarse = group([(0, 0.2), (200, 0.6), (400, 0.6)], [(0, 0.2), (200, 0.8), (400, 0.8)])
    fine = group(*[[(0, 0.2), (100, 0.5), (200, y), (300, y)] for y in (0.5, 0.6)])
    expected = t_estimate(np.array([(0.4 * 2 + 0.6) / 3, (0.5 * 2 + 0.8) / 3]),
                          np.array([(0.35 * 2 + 0.5) / 3, (0.4 * 2 + 0.6) / 3]))
    assert arms.apart(coarse, fine, arms.spent) == pytest.approx(expected)
    assert arms.apart(fine, coarse, arms.spent).value == pytest.approx(-expected.value)


def test_areas_are_subtracted_over_the_same_steps():
    """Guards against a lead that comes from measuring more often, and a shorter run that is stretched."""
    a, longer = (Group("", dict(enumerate({"curve": curve} for curve in curves))) for curves in (
        [{0: 0.0, 10: 0.6, 20: 0.6}, {0: 0.0, 10: 0.4, 20: 0.6}], [{0: 0.0, 40: 0.5}]))
    assert arms.difference(a, longer).value == pytest.approx(0.3 - 0.125)  # both from 0 to 20


def test_asterisks_are_corrected_over_their_column():
    """Guards against an asterisk for p = 0.04 beside another difference, and columns that are joined."""
    a, b = (Estimate(0.02, 0.01, 0.03, p) for p in (0.04, 0.5))
    table = arms.make_table("T", "", {"x": {"m": a, "n": b}, "y": {"m": a}, "z": {"n": Estimate(0.02)}}, ("x", "y"))
    assert table.header == ["arm", "x", "y", "z"]
    assert table.rows == [["m", "2.0 ± 1.0", "2.0 ± 1.0 *", ""], ["n", "2.0 ± 1.0", "", "2.0"]]


def test_the_table_of_a_room_by_hand(room, monkeypatch):
    """Guards against points for percent, a difference of the wrong sign, seeds that lack an arm, and the cost of
    another arm. ± by hand: two runs a side, a point apart; t with one degree of freedom, Welch's with two."""
    rows = rows_of(room._replace(seeds=range(3)))[:-1]  # the last seed has the first arm alone
    for row, area in zip(rows, (0.20, 0.30, 0.21, 0.31, 0.90)):
        row |= {"area": f"{area}", "curve": f"0:{area} 2:{area}", "end": f"{area}"}
        row["spent"] = "0:0 2:100" if row["arm"] == "half" else row["spent"]
    write(room, rows)
    monkeypatch.setattr(sys, "argv", ["run.py", "--tables"])
    arms.main(room._replace(seeds=range(3)), "")
    header, rows = read_table(room.folder / "tables.md", "What the arms learned")
    assert header == ["arm", "seeds", "end", "area", "area - RLOO", "equal cost", "cost"]
    assert rows[0] == ["half", "2", "30.5 ± 6.4", "30.5 ± 6.4", "10.0 ± 3.0 *", "10.0 ± 3.0 *", "2.00"]
    assert rows[1] == ["RLOO", "2", "20.5 ± 6.4", "20.5 ± 6.4", "", "", "1.00"]


def test_what_cannot_be_compared_is_refused_in_one_sentence(room, monkeypatch):
    """Guards against a table of one seed, a contrast across versions, and a traceback, or a run with the figures of
    another one, after a merge conflict; and a room that trains no run at a time."""
    monkeypatch.setattr(sys, "argv", ["run.py", "--processes", "0"])
    assert "--processes must be" in refused(arms.main, room, "")
    rows = rows_of(room)
    write(room, rows[:3])
    with pytest.raises(ValueError, match="^1 seeds have all arms, and tables wait for 2[^\n]*$"):
        arms.read_groups(room)
    for changed in (rows[1::2], rows[2:]):  # an arm, or a seed
        write(room, [row | {"version": "2"} if row in changed else row for row in rows])
        with pytest.raises(ValueError, match=r"^[^\n]*several versions[^\n]*\(3\)[^\n]*$"):
            arms.read_groups(room)
    with pytest.raises(ValueError, match="^[^\n]*none-advantage-rloo-seed0 with other flags than this room's[^\n]*$"):
        room._replace(alike="--steps 3").rows()
    (room.folder / "runs.csv").write_text("run,version\n<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match="^[^\n]*merge[^\n]*$"):
        room.rows()


@pytest.mark.slow
def test_a_room_is_trained_and_its_rows_say_what_the_runs_gave(room, capsys):
    """Guards against figures under wrong names, a setting left out, large files that stay, a run that fails in silence
    or ends the room, one made by another command, a row lost or written twice, columns of older rows that vanish."""
    room = room._replace(seeds=(1,), arms={"broken": "vineppo --k 0", "half": HALF})
    old = rows_of(room._replace(seeds=(7,)), gone="one, two")[0]
    write(room, [old])
    assert "error: runs that failed: 1; see" in refused(arms.train, room, 1)
    begun, broken, done = capsys.readouterr().out.splitlines()
    assert begun == "0/2 runs done, ETA after the first run"
    assert "ended with code 1" in broken and "error: --k must be" in broken
    e = room.runs()[1]
    assert "1/2 runs done" in done and f"{e.folder.name}: done" in done
    first, row = room.rows().values()
    assert {name: first[name] for name in old} == old and row["gone"] == ""
    assert row["command"] == f"python {TRAIN} --mitigation {HALF} {SMALL} --seed 1 --out {e.folder}"
    assert (row["run"], row["arm"], row["seed"], row["version"]) == (e.folder.name, "half", "1", "3")
    metrics, figures = read_metrics(e.folder), arms.figures_of(row)
    cost = metrics["tokens_sampled"] + metrics["tokens_read"] + 3 * metrics["tokens_updated"]
    start, end = metrics["heldout_success"][[0, 2]]
    assert figures["curve"] == {0: start, 2: end} and figures["spent"] == {0: 0, 2: cost[1] + cost[2]}
    assert (figures["start"], figures["end"], figures["steps"]) == (start, end, 2)
    assert figures["area"] == pytest.approx((start + end) / 2)
    assert [float(x) for x in row["training"].split()] == pytest.approx(metrics["success"][1:].tolist(), abs=1e-4)
    assert figures["tokens_updated"] == np.nansum(metrics["tokens_updated"])
    assert figures["seconds"] == pytest.approx(np.nansum(metrics["seconds"]), rel=1e-6)
    assert not any((e.folder / name).exists() for name in ("credit", "state.pt"))
    assert (e.folder / "checkpoint" / "model.safetensors").is_file()
    assert arms.take_over(e, 0) == "" and [file.name for file in room.folder.iterdir()] == ["runs.csv"]
    assert len((room.folder / "runs.csv").read_text().splitlines()) == 3  # as if another process had been faster
    write(room, [old])
    config = e.folder / "config.json"
    config.write_text(config.read_text().replace("--steps 2", "--steps 3"))
    with pytest.raises(ValueError, match="made by another command"):
        arms.train(room, 1)
