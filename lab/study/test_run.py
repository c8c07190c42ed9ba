"""The study: its list, its rows, and a small study that is interrupted and resumed."""
import functools
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import analyze
from countdown_task import load, read_puzzles, split, universe
from lab import quiet
from lab.real import twenty
from lab.statistics import spread_within
from lab.study import plan
from lab.study import run as study
from lab.study.engine import ABOUT, in_order, read_rows, to_run, write_rows
from methods import MITIGATIONS
from plumbing.runs import read_metrics
from tests.plain import expressions

SMALL = " --steps 2 --questions 2 --answers 2 --eval_every 0 --eval_problems 4 --max_new_tokens 24 --state_every 1"


def experiments(parts=study.PARTS, levels=study.LEVELS, methods=MITIGATIONS):
    """All experiments of some parts."""
    return study.list_experiments(list(parts), list(levels), list(methods), "cpu")


def test_every_command_is_accepted_and_names_a_folder_of_its_own():
    """Guards against a flag that a method does not take, found hours later, and two runs in one folder."""
    listed = experiments()
    for e in {(e.level, e.flags): e for e in listed}.values():  # one seed of each
        values = study.values_of(e.command[e.command.index("--mitigation") :])
        name = "inverse_undetached" if e.flags.startswith(plan.THEIR_INVERSE) else e.flags.split()[0]
        assert (values["mitigation"], values["seed"]) == (name, e.seed)
        assert values["out"] == str(study.RUNS / e.name)
        assert bool(values["data"]) == (e.level in ("hard", "original", "first-countdown"))
        assert (e.table == study.REAL) == (values["dtype"] == "bfloat16")
    assert len({e.name for e in listed}) == len({e.command for e in listed}) == len(listed)


def test_the_list_has_every_method_in_rounds_and_only_what_is_asked_for():
    """Guards against a method left out, seeds of a few methods first, and runs that nobody asked for."""
    tested = [name for name in MITIGATIONS if name not in plan.APART]
    listed = [(e.seed, e.flags.split()[0]) for e in experiments(["main"], ["easy"]) if e.flags != plan.RLOO_FLAGS]
    assert listed[: 5 * len(tested)] == list(itertools.product(range(5), tested))
    names = [e.name for e in experiments(["sweeps", "forms"], ["easy"], ["outcome_conditional", "first_error"])]
    assert names == [f"easy/first_error-solver-true-seed{seed}" for seed in range(5)] + [
        f"easy/outcome_conditional-think_discount-{x}-seed{seed}" for seed in range(3) for x in (0.25, 0.75, 1.0)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A study with a folder and a table of its own."""
    monkeypatch.setattr(study, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results" / "runs.csv")
    monkeypatch.setattr(study, "REAL", tmp_path / "results" / "real.csv")
    monkeypatch.setattr(study, "HARD", tmp_path / "runs" / "hard.jsonl")
    monkeypatch.setattr(quiet, "LOCK", tmp_path / "lock")  # whoever measures on this machine does not stop the tests
    (tmp_path / "runs").mkdir()
    (tmp_path / "results").mkdir()
    return tmp_path


def test_hard_puzzles_have_a_single_solution(place):
    """Guards against a level that is not what it says: 240 puzzles against brute force, where a + b is b + a."""
    study.write_hard_puzzles()
    puzzles = read_puzzles(study.HARD)
    hard = {(tuple(sorted(p.numbers)), p.target) for p in puzzles}
    for p in random.Random(0).sample(universe(), 240):
        found = [text for text, value in expressions(p.numbers, True) if value == p.target]
        ways = sum(0.5 ** (text.count("+") + text.count("*")) for text in found)
        assert ((p.numbers, p.target) in hard) == (ways == 1)
    assert sum(p.numbers != tuple(sorted(p.numbers)) for p in puzzles) > len(puzzles) / 2
    parts = [split(p) for p in puzzles]
    assert parts.count("heldout") >= 512 and parts.count("train") > 4096


@pytest.fixture
def call(monkeypatch):
    """The command, in a process that must start no other."""
    def run(flags):
        monkeypatch.setattr(sys, "argv", ["study", *flags.split()])
        study.main()

    monkeypatch.setattr(study.subprocess, "Popen", lambda *a, **k: pytest.fail("nothing may be started"))
    return run


def a_row(name, **others):
    """A row with the columns of every row."""
    about = dict.fromkeys(ABOUT, "") | {"run": name, "version": str(study.VERSION)}
    return about | {"seconds": "100", "curve": "0:0.1", "end": "0.5"} | others


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a small finished run, and its experiment."""
    folder = tmp_path_factory.mktemp("study")
    flags = "outcome_conditional --think_discount 0.25 --normalize none --lr 0.0001" + SMALL
    e = study.Experiment("sweeps", "easy", flags, 3)
    command = e.command.replace(str(study.RUNS), str(folder)).split()[1:]
    subprocess.run([sys.executable, *command], cwd=study.ROOT, check=True, capture_output=True)
    return folder, e


@pytest.fixture
def finished(trained, place):
    """The finished run, copied into a study of its own."""
    folder, e = trained
    shutil.copytree(folder / "easy", place / "runs" / "easy")
    config = e.folder / "config.json"
    config.write_text(config.read_text().replace(str(folder), str(study.RUNS)))
    return e


def test_a_row_says_what_the_run_was_and_gave(finished):
    """Guards against figures under wrong names, and a setting taken for the method's or left out."""
    study.take_over(finished, True)
    (row,) = read_rows(study.RESULTS)
    assert row["method"] == "outcome_conditional think_discount=0.25 normalize=none"
    settings = {"steps=2", "questions=2", "answers=2", "max_new_tokens=24", "lr=0.0001", "eval_problems=4"}
    assert set(row["setting"].split()) == settings
    assert (row["run"], row["part"], row["level"], row["seed"]) == (finished.name, "sweeps", "easy", "3")
    assert row["command"].startswith("python train.py --mitigation outcome_conditional")
    run, final = to_run(row), json.loads((finished.folder / "final.json").read_text())
    metrics = read_metrics(finished.folder)
    cost = metrics["tokens_sampled"] + metrics["tokens_read"] + 3 * metrics["tokens_updated"]
    log = analyze.read_log(finished.folder)
    expected = analyze.summarize(finished.folder, log) | spread_within(log["credit"], log["response_id"]) | {
        "spent": {0: 0, 2: cost[1] + cost[2]}, "version": study.VERSION, "seconds": sum(metrics["seconds"][1:]),
        "pass@16": final["pass@16"], "end": final["heldout_success"]}
    del expected["metrics"]
    assert (run.label, run.setting, run.seed) == (f"{row['method']} {row['setting']}", row["setting"], 3)
    assert not run.is_baseline and run.figures["curve"].keys() == {0, 2}
    assert run.figures == {name: pytest.approx(value, rel=1e-5, abs=1e-12) for name, value in expected.items()}


def test_a_run_of_the_undetached_weights_is_named_as_older_ones(finished):
    """Guards against a command or an arm that no longer goes with the rows of lab/real."""
    e = study.Experiment("mitigations", "easy", plan.THEIR_INVERSE + " --lr 5e-06", 3)
    assert e.command == ("python -m lab.original.undetached --mitigation inverse_undetached --epsilon 0.1 "
                         f"--normalize none --lr 5e-06 --seed 3 --out {e.folder}")
    written = json.loads((finished.folder / "config.json").read_text())
    written["settings"]["mitigation"] = "inverse_undetached"
    written |= {"method": {"epsilon": 0.1}, "command": e.command.replace("-m lab.", "a/lab/")}  # as Python tells it
    shutil.copytree(finished.folder, e.folder)
    assert e.next_command() == f"python -m lab.original.undetached --resume {e.folder}"
    (e.folder / "config.json").write_text(json.dumps(written))
    assert study.make_row(e)["method"] == twenty.INVERSE


def test_what_is_told_of_answers_by_hand():
    """Guards against early steps among the last ten, tokens counted as responses, and the layout taken for success."""
    rows = [(1, 0, 0, 1.1, 1.0, 9.0), (1, 1, 1, 1.1, 1.0, 2.0),
            (2, 0, 0, 1.1, 0.2, 9.0), (2, 1, 1, 1.1, 0.4, 2.0), (11, 0, 1, 0.1, 0.6, 9.0), (11, 0, 0, 1.0, 0.8, 1.0)]
    log = dict(zip(("step", "position", "in_answer", "reward", "entropy", "contribution"), map(np.array, zip(*rows))))
    log["relative"] = log["position"] * 0.9
    log["relative"][-1] = 0.5
    found = study.answers(log)
    assert found.pop("contribution, first / last") == pytest.approx(9 / 2) and found.pop("entropy") == pytest.approx(0.5)
    assert found == {"answered": 2 / 3, "right of answered": 1 / 2}


def test_the_other_puzzles_are_512_that_the_run_never_measured(finished, monkeypatch):
    """Guards against a check on puzzles that were measured all along, and more asked for than the task has; and ten
    draws that begin with another than the run's own, or are all the same."""
    asked, drawn = [], []
    monkeypatch.setattr(study, "generate_and_grade", lambda policy, puzzles, uniforms: drawn.append(uniforms)
                        or asked.extend(puzzles) or (None, [{"answer": i % 4 == 0} for i in range(len(puzzles))]))
    config = finished.folder / "config.json"
    config.write_text(config.read_text().replace('"eval_problems": 4', '"eval_problems": 512'))
    assert study.success_on("others", finished.folder, "easy") == 0.25
    measured = {puzzle.id for puzzle in load("heldout", 512)}
    assert len({puzzle.id for puzzle in asked}) == 512 and not measured & {puzzle.id for puzzle in asked}
    asked.clear()
    study.score_draws([finished.folder])
    usual, others = read_rows(study.RESULTS.with_name("draws.csv"))
    assert (usual["puzzles"], others["puzzles"], usual["success"]) == ("usual", "others", " ".join(["0.25"] * 10))
    assert {puzzle.id for puzzle in asked[:5120]} == measured and len(asked) == 10240
    assert drawn[1].equal(study.draw_uniforms(0, "evaluation", 512, 1, 24))
    assert len({x.sum().item() for x in drawn}) == 10


def test_rows_of_other_versions_are_kept_and_not_done(place, monkeypatch):
    """Guards against rows of another version that are done, those since the last that are not, and other columns."""
    old = a_row("a", version="0", method="one, two", gone="3")
    write_rows([old, a_row("b", version="2")], study.RESULTS)
    monkeypatch.setattr(study, "make_row", lambda e: a_row(e.name, new="4"))
    e = study.Experiment("main", "easy", "none", 0)
    e.folder.mkdir(parents=True)
    study.take_over(e, False)
    first, _, last = read_rows(study.RESULTS)
    assert list(study.done_runs()) == ["b", e.name]
    assert {name: first[name] for name in old} == old
    assert (first["new"], last["new"]) == ("", "4")
    assert [f.name for f in study.RESULTS.parent.iterdir()] == ["runs.csv"]


def test_rows_older_than_the_order_of_settings_are_the_same_arm():
    """Guards against an arm that falls apart where Settings was sorted anew between its runs."""
    assert in_order("x=1 answers=16 lr=0.1 advantage=rloo") == in_order("x=1 advantage=rloo answers=16 lr=0.1")
    assert in_order("x=1 lr=0.1 steps=2") == "x=1 steps=2 lr=0.1"


def test_a_run_with_other_settings_is_not_taken_over(finished):
    """Guards against a row of a command that somebody tried with fewer steps."""
    config = finished.folder / "config.json"
    config.write_text(config.read_text().replace("--steps 2", "--steps 3"))
    assert "made by another command" in study.settle(finished, 0, False)


@pytest.mark.parametrize("keep", [False, True])
def test_a_finished_run_is_taken_over_without_running_it_again(finished, call, keep, monkeypatch, capsys):
    """Guards against a finished run made again, --collect that trains, a credit log that stays, a row lost or twice."""
    monkeypatch.setattr(study, "PARTS", {"sweeps": [("easy", (finished.flags, "none"), [3])]})
    call("--collect --parts sweeps" + " --keep" * keep)
    assert list(study.done_runs()) == [finished.name] and "1/2 runs done" in capsys.readouterr().out
    assert [(finished.folder / name).exists() for name in ("credit", "state.pt")] == [keep, keep]
    study.RESULTS.unlink()  # as by a checkout: the folder still knows its row, without the credit log
    for _ in range(2):  # as if another study had been faster
        assert study.settle(finished, 0, keep) == ""
    assert [row["run"] for row in read_rows(study.RESULTS)] == [finished.name]


def test_a_pretrained_run_leaves_its_metrics_beside_its_row(finished, monkeypatch):
    """Guards against figures of single steps that nobody can compute again once the folder is gone."""
    monkeypatch.setattr(study, "PRETRAINED", ("easy",))
    assert study.settle(finished, 0, False) == "" and len(read_rows(study.REAL)) == 1
    kept = study.REAL.parent / "data" / f"{finished.name}.csv"
    assert kept.read_bytes() == (finished.folder / "metrics.csv").read_bytes()


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also in a job in a shell's background, which would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_runs_pause_for_quiet_and_end_with_the_study(place, monkeypatch, interruptible):
    """Guards against runs that disturb a measurement, stay paused, or outlive a Ctrl-C."""
    monkeypatch.setattr(quiet, "LOOK", 0.02)
    counting = "import itertools, time\nfor i in itertools.count():\n    print(i, flush=True)\n    time.sleep(0.01)"
    monkeypatch.setattr(study.Experiment, "next_command", lambda e: f"python -c {shlex.quote(counting)}")
    e = study.Experiment("main", "easy", "none", 0)
    size, found, deadline = lambda: len(e.log.read_text()) if e.log.is_file() else 0, [], time.monotonic() + 20

    def measure():
        """Ask for quiet once the run writes, look twice how much it has written, and stop the study once it goes on."""
        while size() == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        with quiet.quiet():
            found.append(size())
            time.sleep(0.2)
            found.append(size())
        while size() == found[1] and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=measure, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        list(study.train_all([e], 1, 1))
    ended = size()
    assert found[0] == found[1] < ended
    time.sleep(0.1)
    assert size() == ended


def test_a_run_that_fails_is_named_and_the_others_continue(finished, monkeypatch, capsys):
    """Guards against a study that ends with its first broken run, or passes over it in silence."""
    monkeypatch.setattr(study, "PARTS", {"sweeps": [("easy", (f"vineppo --k 0{SMALL}", finished.flags), [3])]})
    monkeypatch.setattr(sys, "argv", ["study", "--processes", "1"])
    with pytest.raises(SystemExit, match="error: runs that failed: 1; see"):
        study.main()
    begun, *ended = capsys.readouterr().out.splitlines()
    done, broken = sorted(ended, key=lambda line: "vineppo" in line)
    assert begun == "0/2 runs done, ETA after the first run"
    assert "ended with code 1" in broken and "error: --k must be" in broken
    assert "1/2 runs done" in done and f"{finished.name}: done" in done


def test_the_eta_by_hand(place):
    """Guards against methods, flags and levels that take as long as others did."""
    todo = [study.Experiment("main", "easy", flags, 3) for flags in ("none", "vineppo", "ppo")]
    took = {"easy/none-seed0": 100, "easy/none-seed1": 140, "easy/vineppo-seed0": 600,
            "easy/vineppo-k-9-seed0": 7160, "hard/none-seed0": 300}
    write_rows([a_row(name, level=name[:4], seconds=seconds) for name, seconds in took.items()], study.RESULTS)
    # 1.2 * (120 + 600 + the mean of easy, 2000) / 2 = 1632 seconds
    assert study.progress(todo, 2) == "0/3 runs done, ETA 0 h 27 min"
    rows = list(study.done_runs().values())
    assert study.seconds(todo[0]._replace(level="hard", flags="ppo"), rows) == pytest.approx(1.2 * 300)


def test_the_list_is_what_is_left(place, call, capsys):
    """Guards against commands of runs that are done, and --list that starts something."""
    listed = experiments(["main"], ["easy"])
    write_rows([a_row(listed[0].name)], study.RESULTS)
    for e, final in ((listed[1], None), (listed[2], {"step": 100, "pass@16": 0.5})):
        e.folder.mkdir(parents=True)
        settings = {"mitigation": "none", "seed": 0, "steps": 100, "pass_at": 16}
        (e.folder / "config.json").write_text(json.dumps({"settings": settings, "method": {}, "inputs": {}}))
        if final:
            (e.folder / "final.json").write_text(json.dumps(final))
    call("--list --parts main --levels easy")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"python train.py --resume {listed[1].folder}"] + [e.command for e in listed[3:]]
    call("--list --parts main --levels hard --methods optimal_baseline")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all("--data runs/study-2/hard.jsonl" in line for line in lines) and study.HARD.is_file()
    write_rows([a_row(e.name) for e in listed], study.RESULTS)
    call("--list --parts main --levels easy")
    assert capsys.readouterr().out == ""  # and not an empty line, which would be a command


def test_the_tracked_rows_are_of_this_study():
    """Guards against rows that no command of the list made, and rows that are there twice."""
    known = {e.name: e for e in experiments()}
    rows = [row for row in read_rows(study.ROOT / study.RESULTS) if int(row["version"]) in plan.COUNTED]
    assert len({row["run"] for row in rows}) == len(rows) > 0
    values_of = functools.cache(study.values_of)  # of one seed and device of each
    for row in rows:
        e = known[row["run"]]._replace(device="cuda" if "--device cuda" in row["command"] else "cpu")
        command = plan.today(row["command"])  # without flags that are gone
        assert (row["part"], row["level"], row["seed"], command) == (e.part, e.level, str(e.seed), e.command)
        command = e._replace(seed=0, device="cpu").command
        values = values_of(command[command.index("--mitigation") :])
        named = row["method"].replace("inverse_logprob detach=False", "inverse_undetached").split()[0]
        assert (float(row["steps"]), named) == (values["steps"], values["mitigation"])
