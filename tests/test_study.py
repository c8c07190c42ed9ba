"""The study: its list, its rows, and whole small studies that are killed, locked and interrupted.

Run it:  python -m pytest tests/test_study.py
"""
import fcntl
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import analyze
from countdown_task import read_puzzles, split, universe
from experiments import study
from experiments.study_tables import ABOUT, read_rows, to_run
from mitigations import MITIGATIONS
from plumbing.report import write_csv
from plumbing.runs import read_metrics

SMALL = " --steps 2 --questions 2 --answers 2 --eval_every 0 --eval_problems 4 --max_new_tokens 24 --state_every 1"


def experiments(parts=study.PARTS, levels=study.LEVELS, methods=MITIGATIONS):
    """All experiments of some parts."""
    return study.list_experiments(list(parts), list(levels), list(methods))


# ------------------------------------------------------------------------------------------------------ the list


def test_every_command_is_accepted_and_names_a_folder_of_its_own():
    """Guards against a flag that a method does not take, found hours later, and two runs in one folder."""
    listed = experiments()
    for e in {(e.level, e.flags): e for e in listed}.values():  # one seed of each
        values = study.values_of(e.command.removeprefix("python train.py"))
        assert (values["mitigation"], values["seed"]) == (e.flags.split()[0], e.seed)
        assert values["out"] == str(study.RUNS / e.name)
    assert len({e.name for e in listed}) == len({e.command for e in listed}) == len(listed)


@pytest.mark.parametrize("level", study.LEVELS)
def test_the_main_part_is_every_method_on_five_seeds_in_rounds(level):
    """Guards against a method left out, and an order in which an interrupted study has seeds of a few methods only."""
    listed = experiments(["main"], [level])
    assert [(e.seed, e.flags.split()[0]) for e in listed] == list(itertools.product(range(5), MITIGATIONS))
    values = study.values_of(listed[0].command.removeprefix("python train.py"))
    assert bool(values["data"]) == (level == "hard")
    assert values["max_new_tokens"] == (240 if level == "hard" else study.values_of("")["max_new_tokens"])


def test_learning_rates_are_half_and_twice_the_default():
    """Guards against a new default beside which the old rates are something else."""
    rates = [float(e.flags.split(" --lr ")[1]) for e in experiments(["rates"]) if e.seed == 0]
    assert rates == [factor * study.values_of("")["lr"] for _ in MITIGATIONS for factor in (0.5, 2)]


def test_a_part_level_and_method_can_be_chosen():
    """Guards against runs that nobody asked for."""
    names = [e.name for e in experiments(["sweeps", "rloo"], ["easy"], ["none", "entropy_weighted"])]
    assert names == [f"easy/none-advantage-rloo-seed{seed}" for seed in range(5)] + [
        f"easy/entropy_weighted-entropy_temp-{temp}-seed{seed}" for seed in range(3) for temp in (0.5, 2.0)]


def ways(numbers, target):
    """Every way to combine the numbers to the target, by trying all pairs in both orders, each as one expression of
    their places, in which a commuting operator has its parts in order; results are whole and not below 0."""
    found = set()

    def combine(pool):
        if len(pool) == 1 and pool[0][1] == target:
            found.add(pool[0][0])
        for i, j in itertools.permutations(range(len(pool)), 2):
            (name, a), (other, b) = pool[i], pool[j]
            rest = [x for k, x in enumerate(pool) if k not in (i, j)]
            results = {"+": a + b, "*": a * b, "-": a - b if a >= b else None,
                       "/": a // b if b and a % b == 0 else None}
            for operator, result in results.items():
                if result is not None:
                    names = sorted((name, other)) if operator in "+*" else (name, other)
                    combine([*rest, (f"({names[0]}{operator}{names[1]})", result)])

    combine([(f"n{i}", n) for i, n in enumerate(numbers)])
    return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A study with a folder and a table of its own."""
    monkeypatch.setattr(study, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results" / "runs.csv")
    monkeypatch.setattr(study, "HARD", tmp_path / "runs" / "hard.jsonl")
    (tmp_path / "runs").mkdir()
    (tmp_path / "results").mkdir()
    return tmp_path


def test_hard_puzzles_have_a_single_solution(place):
    """Guards against a level that is not what it says: 240 puzzles against all ways to combine their numbers."""
    study.write_hard_puzzles()
    puzzles, before = read_puzzles(study.HARD), study.HARD.read_bytes()
    hard = {(tuple(sorted(p.numbers)), p.target) for p in puzzles}
    sample = random.Random(0).sample(universe(), 240)
    assert [(p.numbers, p.target) in hard for p in sample] == [len(ways(p.numbers, p.target)) == 1 for p in sample]
    assert sum(p.numbers != tuple(sorted(p.numbers)) for p in puzzles) > len(puzzles) / 2
    parts = [split(p) for p in puzzles]
    assert parts.count("heldout") >= 512 and parts.count("train") > 4096
    study.HARD.unlink()
    study.write_hard_puzzles()
    assert study.HARD.read_bytes() == before


# ---------------------------------------------------------------------------------------------------------- rows


def a_row(name, **others):
    """A row with the columns of every row."""
    about = dict.fromkeys(ABOUT, "") | {"run": name, "version": str(study.VERSION)}
    return about | {"seconds": "100", "curve": "0:0.1", "end": "0.5"} | others


def write(*rows):
    """The study's table, of these rows."""
    write_csv(list(rows), study.RESULTS)


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
    shutil.copytree(trained[0] / "easy", place / "runs" / "easy")
    return trained[1]


def test_a_row_says_what_the_run_was_and_gave(finished):
    """Guards against figures under wrong names, and a setting taken for the method's or left out."""
    row = study.make_row(finished)
    assert row["method"] == "outcome_conditional think_discount=0.25 normalize=none"
    settings = {"questions=2", "answers=2", "max_new_tokens=24", "lr=0.0001", "eval_problems=4"}
    assert set(row["setting"].split()) == settings
    assert (row["run"], row["part"], row["level"], row["seed"]) == (finished.name, "sweeps", "easy", 3)
    assert row["command"].startswith("python train.py --mitigation outcome_conditional")
    study.take_over(finished, True)
    run = to_run(read_rows(study.RESULTS)[0])
    expected = analyze.summarize(finished.folder) | {"seconds": sum(read_metrics(finished.folder)["seconds"][1:])}
    assert run.label == f"{row['method']} {row['setting']}" and run.setting == row["setting"] and not run.is_baseline
    assert run.figures.keys() == expected.keys() and list(run.figures["curve"]) == [0, 2]
    for name, value in expected.items():
        assert run.figures[name] == pytest.approx(value, rel=1e-5, abs=1e-12), name
    final = json.loads((finished.folder / "final.json").read_text())
    assert run.figures["pass@16"] == final["pass@16"] and run.figures["end"] == final["heldout_success"]


def test_rows_of_other_versions_are_kept_and_not_done(place, monkeypatch):
    """Guards against rows of another version that count as done, or that block the table with other columns."""
    old = a_row("a", version="0", method="one, two", gone="3")
    write(old, a_row("b"))
    monkeypatch.setattr(study, "make_row", lambda e: a_row(e.name, new="4"))
    e = study.Experiment("main", "easy", "none", 0)
    e.folder.mkdir(parents=True)
    study.take_over(e, False)
    rows = read_rows(study.RESULTS)
    assert [row["run"] for row in rows] == ["a", "b", e.name] and list(study.done_runs()) == ["b", e.name]
    assert {k: rows[0][k] for k in old} == old and rows[0]["new"] == "" and rows[2]["new"] == "4"
    assert [f.name for f in study.RESULTS.parent.iterdir()] == ["runs.csv"]


def test_several_studies_may_take_over_at_once(place):
    """Guards against a row that another process overwrites or adds again: four processes, ten runs, all theirs."""
    code = ("import os, time; from pathlib import Path; from experiments import study; from test_study import a_row\n"
            f"study.RUNS, study.RESULTS = Path({str(study.RUNS)!r}), Path({str(study.RESULTS)!r})\n"
            "study.make_row = lambda e: [time.sleep(0.01), a_row(e.name)][1]\n"
            "(study.RUNS / f'ready{os.getpid()}').touch()\n"
            "while len(list(study.RUNS.glob('ready*'))) < 4: time.sleep(0.001)\n"  # so that they meet
            "for i in range(10): study.take_over(study.Experiment('main', 'easy', 'none', i), False)")
    path = os.pathsep.join([str(study.ROOT), str(study.ROOT / "tests")])
    for i in range(10):
        (study.RUNS / f"easy/none-seed{i}").mkdir(parents=True)
    others = [subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}) for _ in range(4)]
    assert [process.wait() for process in others] == [0] * 4
    assert [row["run"] for row in read_rows(study.RESULTS)] == [f"easy/none-seed{i}" for i in range(10)]


@pytest.mark.parametrize("part, change, said", [("settings", {"steps": 1}, "another --steps"),
                                                ("method", {"think_discount": 0.5}, "another --think_discount")])
def test_a_run_with_other_settings_is_not_taken_over(finished, part, change, said):
    """Guards against a row of a command that somebody tried with fewer steps, or with another hyper-parameter."""
    config = json.loads((finished.folder / "config.json").read_text())
    with pytest.raises(ValueError, match=f"{said} .*move it away"):
        (finished.folder / "config.json").write_text(json.dumps(config | {part: config[part] | change}))
        study.make_row(finished)


@pytest.mark.parametrize("keep", [False, True])
def test_a_finished_run_is_taken_over_without_running_it_again(finished, keep):
    """Guards against a run repeated since the study was killed before its row was written, and a log that stays."""
    written = (finished.folder / "metrics.csv").stat().st_mtime_ns
    work = study.Study([finished], 1, 1, keep)
    work.work()
    assert list(study.done_runs()) == [finished.name] and not work.failed and not finished.log.exists()
    assert (finished.folder / "metrics.csv").stat().st_mtime_ns == written
    assert (finished.folder / "credit").exists() == keep
    assert study.Study([finished], 1, 1, keep).todo == []
    study.RESULTS.unlink()  # as by a checkout: the folder still knows its row, without the credit log
    work.settle(finished, 0)
    work.settle(finished, 0)  # as if another study had been faster
    assert [row["run"] for row in read_rows(study.RESULTS)] == [finished.name] and not work.failed


def test_a_run_of_an_older_version_fails_and_keeps_its_log(finished, monkeypatch):
    """Guards against an old row that is added again and again since none of the new version is there."""
    study.take_over(finished, True)
    monkeypatch.setattr(study, "VERSION", study.VERSION + 1)
    work = study.Study([finished], 1, 1, False)
    work.work()
    assert "version 1" in work.failed[finished] and len(read_rows(study.RESULTS)) == 1
    assert (finished.folder / "credit").exists()


def test_a_run_without_its_last_measurement_is_not_finished(finished):
    """Guards against a stopped run that counts as done, and one that was to take more steps."""
    final = json.loads((finished.folder / "final.json").read_text())
    assert finished.is_finished()
    for other in (final | {"step": 1}, {k: v for k, v in final.items() if k != "pass@16"}):
        (finished.folder / "final.json").write_text(json.dumps(other))
        assert not finished.is_finished()
    assert finished.next_command() == f"python train.py --resume {finished.folder}" != finished.command


# ----------------------------------------------------------------------------------------------------- processes


def test_a_run_that_another_study_finished_is_not_started(place, monkeypatch):
    """Guards against rows that arrive while the study works."""
    listed = [study.Experiment("main", "easy", flags, 0) for flags in ("none", "ppo")]
    work = study.Study(listed, 1, 1, False)
    write(*(a_row(e.name) for e in listed))
    monkeypatch.setattr(study.subprocess, "Popen", lambda *a, **k: pytest.fail("both are done"))
    work.done = study.done_runs()
    assert work.fill() == [] and work.todo == []


def test_a_run_that_another_process_has_is_left_to_it(place):
    """Guards against two processes in one run folder, as after a study that was killed while its runs continue."""
    e = study.Experiment("main", "easy", "none" + SMALL, 0)
    e.folder.parent.mkdir()
    with e.log.open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert study.launch(e, 1) is None
    for _ in range(2):  # the lock ends with its holder
        process = study.launch(e, 1)
        assert study.launch(e, 1) is None  # the run itself holds it
        process.kill()
        process.wait()


def driver(flags, parts):
    """Start a study of these parts as a process of its own group, as a terminal does."""
    code = ("import signal; from pathlib import Path; from experiments import study\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where tests run in the background
            f"study.RUNS, study.RESULTS = Path({str(study.RUNS)!r}), Path({str(study.RESULTS)!r})\n"
            f"study.PARTS = {parts!r}\n"
            "study.main()")
    return subprocess.Popen([sys.executable, "-c", code, *flags], cwd=study.ROOT, stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.STDOUT, start_new_session=True,
                            env=os.environ | {"PYTHONPATH": str(study.ROOT)})


@pytest.mark.parametrize("stop", ["kill the study", "kill everything", "Ctrl-C"])
def test_a_study_that_is_stopped_resumes_with_nothing_lost_or_repeated(place, stop):
    """Guards against rows that are lost or doubled, and runs that begin again. The study is killed and its runs
    continue, or all is killed as by a power cut, or Ctrl-C stops it, when one run has its row and two are under way."""
    long = SMALL.replace("--steps 2", "--steps 40")
    parts = {"main": [("easy", (f"none{SMALL}", f"random{long}", f"prefix_tree{long}"), [0])]}
    listed = [study.Experiment("main", "easy", flags, 0) for flags in parts["main"][0][1]]
    logs = [e.folder / "credit" / "step-000001.npz" for e in listed]
    first, start = driver(["--processes", "3", "--keep"], parts), time.monotonic()
    begun = [e.folder / "credit" / "step-000003.npz" for e in listed[1:]]
    while listed[0].name not in study.done_runs() or not all(log.exists() for log in begun):
        assert first.poll() is None and time.monotonic() - start < 300
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    first.send_signal(signal.SIGINT if stop == "Ctrl-C" else signal.SIGKILL)
    for child in children if stop == "kill everything" else ():
        os.kill(int(child), signal.SIGKILL)
    text = first.communicate(timeout=300)[0]
    assert first.returncode != 0 and ("error: stopped; the same command resumes" in text) == (stop == "Ctrl-C")
    made = [log.stat().st_mtime_ns for log in logs]
    second = driver(["--processes", "2", "--keep"], parts)
    text = second.communicate(timeout=500)[0]
    assert second.returncode == 0 and "3/3 runs done" in text, text
    assert sorted(row["run"] for row in read_rows(study.RESULTS)) == sorted(e.name for e in listed)
    assert [read_metrics(e.folder)["step"].tolist() for e in listed] == [list(range(n + 1)) for n in (2, 40, 40)]
    assert made == [log.stat().st_mtime_ns for log in logs]


def test_a_run_that_fails_is_named_and_the_others_continue(place):
    """Guards against a study that ends with its first broken run, or passes over it in silence."""
    process = driver(["--processes", "1"], {"main": [("easy", (f"vineppo --k 0{SMALL}", f"none{SMALL}"), [0])]})
    text = process.communicate(timeout=500)[0]
    assert process.returncode == 1 and len(study.done_runs()) == 1
    assert re.search(r"easy/vineppo-k-0\S* failed: ended with code 1, .* last line was: error: .*--k must be", text)
    assert "error: 1 runs failed" in text and "1/2 runs done" in text and "% solved" in text


# --------------------------------------------------------------------------------------- progress and command line


def test_the_eta_by_hand(place, monkeypatch):
    """Guards against methods, flags and levels that take as long as others did, and overdue runs that count below 0."""
    todo = [study.Experiment("main", "easy", flags, 3) for flags in ("none", "vineppo --k 3", "ppo")]
    assert study.Study(todo, 2, 1, False).progress() == "0/3 runs done, ETA after the first run"
    took = {"easy/none-seed0": 100, "easy/none-seed1": 140, "easy/vineppo-k-3-seed0": 600,
            "easy/vineppo-k-9-seed0": 1800, "hard/none-seed0": 300}
    write(*(a_row(name, level=name[:4], seconds=seconds) for name, seconds in took.items()))
    work = study.Study(todo, 2, 1, False)
    assert work.eta() == pytest.approx(1.2 * (120 + 600 + np.mean([100, 140, 600, 1800])) / 2)
    assert work.expected(todo[0]._replace(level="hard", flags="ppo")) == pytest.approx(1.2 * 300)
    work.todo, work.running, work.began = [], {todo[0]: None, todo[1]: None}, {todo[0]: 1000.0, todo[1]: 1000.0}
    monkeypatch.setattr(study.time, "monotonic", lambda: 1200.0)
    assert work.eta() == pytest.approx(1.2 * 600 - 200)  # the first is overdue; the second decides, and is alone
    assert work.progress() == "0/3 runs done, ETA 0 h 08 min"


def test_the_table_is_redrawn_and_fits_the_terminal(place, monkeypatch, capsys):
    """Guards against a table that can't be drawn over, and a sum that is cut off with the rest."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    listed = [study.Experiment("main", "easy", flags, 0) for flags in ("none", "ppo", "dpo")]
    listed.append(study.Experiment("rates", "easy", "none --lr 1", 0))
    write(a_row(listed[0].name))
    work = study.Study(listed, 2, 1, False)
    work.running, work.began, work.failed = {listed[1]: None}, {listed[1]: 0.0}, {listed[2]: "for a reason"}
    listed[1].log.parent.mkdir()
    listed[1].log.write_text("one\ntwo\n")
    assert study.draw(work, [], 0) == 6
    first = capsys.readouterr().out.splitlines()
    assert [line.split() for line in first[:3]] == [["part", "level", "runs", "done"], ["main", "easy", "3", "1"],
                                                    ["rates", "easy", "1", "0"]]
    assert first[3:5] == ["easy/ppo-seed0: two", "easy/dpo-seed0 failed: for a reason"]
    assert first[5] == work.progress() and first[5].startswith("1/4 runs done")
    monkeypatch.setattr(study.shutil, "get_terminal_size", lambda: os.terminal_size((20, 5)))
    assert study.draw(work, [], 6) == 3
    assert capsys.readouterr().out == "\x1b[6A\x1b[J" + "\n".join(line[:20] for line in (*first[:2], first[5])) + "\n"


def call(monkeypatch, *flags):
    """The command, in a process that must start no other."""
    monkeypatch.setattr(study.subprocess, "Popen", lambda *a, **k: pytest.fail("nothing may be started"))
    monkeypatch.setattr(sys, "argv", ["study", *flags])
    study.main()


def test_the_list_is_what_is_left(place, monkeypatch, capsys):
    """Guards against commands of runs that are done, and --list that starts something."""
    listed = experiments(["main"], ["easy"])
    write(a_row(listed[0].name))
    for e, final in ((listed[1], None), (listed[2], {"step": 100, "pass@16": 0.5})):
        e.folder.mkdir(parents=True)
        (e.folder / "config.json").write_text(json.dumps({"settings": {"steps": 100}}))
        if final:
            (e.folder / "final.json").write_text(json.dumps(final))
    call(monkeypatch, "--list", "--parts", "main", "--levels", "easy")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"python train.py --resume {listed[1].folder}"] + [e.command for e in listed[3:]]
    call(monkeypatch, "--list", "--parts", "main", "--levels", "hard", "--methods", "none")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("--data runs/study/hard.jsonl" in line for line in lines) and study.HARD.is_file()
    write(*(a_row(e.name) for e in listed))
    call(monkeypatch, "--list", "--parts", "main", "--levels", "easy")
    assert capsys.readouterr().out == ""  # and not an empty line, which would be a command


def test_collect_only_takes_over(finished, monkeypatch, capsys):
    """Guards against --collect that trains: one run is finished, the other never began."""
    monkeypatch.setattr(study, "PARTS", {"sweeps": [("easy", (finished.flags, "none"), [3])]})
    call(monkeypatch, "--collect", "--parts", "sweeps")
    assert list(study.done_runs()) == [finished.name] and "1/2 runs done" in capsys.readouterr().out


def test_tables_are_those_of_the_rows(place, monkeypatch):
    """Guards against --tables that reads another file, or trains."""
    read = []
    monkeypatch.setattr(study, "write_study", read.append)
    call(monkeypatch, "--tables")
    assert read == [study.RESULTS]


@pytest.mark.parametrize("flags", [["--parts", "nothing"], ["--processes", "0"], ["--unknown"], ["--methods", "grpo"]])
def test_bad_flags_are_refused_in_one_sentence(flags, monkeypatch):
    """Guards against a traceback, or a study of something else."""
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{flags[-1] if flags[-1] != '0' else flags[0]}[^\n]*$"):
        call(monkeypatch, *flags)


def test_the_tracked_rows_are_of_this_study():
    """Guards against rows that no command of the list made, and rows that are there twice."""
    known = {e.name: e for e in experiments()}
    rows = [row for row in read_rows(study.ROOT / "results" / "runs.csv") if row["version"] == str(study.VERSION)]
    assert len({row["run"] for row in rows}) == len(rows) > 0
    for row in rows:
        e = known[row["run"]]
        assert (row["part"], row["level"], row["seed"], row["command"]) == (e.part, e.level, str(e.seed), e.command)
        assert row["steps"] == "100" and row["method"].split()[0] == e.flags.split()[0]
