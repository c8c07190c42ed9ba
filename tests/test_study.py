"""The study: its list against the issue it answers, and whole small studies that are killed, locked and interrupted.

Run it:  python -m pytest tests/test_study.py
"""

import csv
import fcntl
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import analyze
import train
from analyze import read_rows
from countdown_task import read_problems, split, universe
from experiments import study
from mitigations import MITIGATIONS

SMALL = " --steps 2 --questions 2 --answers 2 --eval_every 0 --eval_problems 4 --max_new_tokens 24 --state_every 1"


def everything(parts=study.PARTS, levels=study.LEVELS, methods=MITIGATIONS):
    """All experiments of some parts."""
    return study.list_experiments(list(parts), list(levels), list(methods))


# ------------------------------------------------------------------------------------------------------ the list


def test_every_command_is_accepted_and_names_a_folder_of_its_own():
    """Guards against a flag that a method does not take, found hours later, and two runs in one folder."""
    runs = everything()
    for e in runs:
        s, own, resumed = train.parse(e.command.split()[2:])
        train.check(s)
        assert (s.mitigation, s.seed, s.out, resumed) == (e.flags.split()[0], e.seed, str(study.RUNS / e.name), None)
    assert len({e.name for e in runs}) == len({e.command for e in runs}) == len(runs)


@pytest.mark.parametrize("level", study.LEVELS)
def test_the_main_part_is_every_method_on_five_seeds_in_rounds(level):
    """Guards against a method left out, and an order in which an interrupted study has seeds of a few methods only."""
    runs = everything(["main"], [level])
    assert [(e.seed, e.flags.split()[0]) for e in runs] == list(itertools.product(range(5), MITIGATIONS))
    for e in runs:
        s, own, _ = train.parse(e.command.split()[2:])
        assert (s.lr, s.steps, s.normalize) == (train.Settings().lr, 100, "response")
        assert bool(s.data) == (level == "hard") and s.max_new_tokens == (240 if level == "hard" else 140)


def values(part, method, flag):
    """The values that a part of the study gives a flag of a method, with how many seeds each."""
    found = {}
    for e in everything([part], methods=[method]):
        words = e.flags.split()
        value = words[words.index(f"--{flag}") + 1] if f"--{flag}" in words else None
        found.setdefault((value, "false" in words), set()).add(e.seed)
    return {key: len(seeds) for key, seeds in found.items()}


def test_the_sweeps_are_those_that_were_asked_for():
    """Guards against a value of the original's sweeps that nobody runs; the defaults are in the main part."""
    assert values("sweeps", "outcome_conditional", "think_discount") == {(x, False): 3 for x in ("0.25", "0.75", "1.0")}
    epsilons = {("0.01", False): 3, ("0.5", False): 3} | {(x, True): 3 for x in ("0.01", "0.1", "0.5")}
    assert values("sweeps", "inverse_logprob", "epsilon") == epsilons
    for method, flag in (
        ("attention_credit", "credit_scale"),
        ("entropy_weighted", "entropy_temp"),
        ("entropy_masking", "mask_percentile"),
    ):
        assert len(values("sweeps", method, flag)) >= 2
    assert all("--normalize none" in e.flags for e in everything(["unscaled"]))
    assert {e.flags.split()[0] for e in everything(["unscaled"])} >= {
        "outcome_conditional",
        "inverse_logprob",
        "attention_credit",
        "entropy_weighted",
        "entropy_masking",
    }
    assert values("rloo", "none", "advantage") == {("rloo", False): 5}
    for method in MITIGATIONS:
        assert values("rates", method, "lr") == {("0.0001", False): 2, ("0.0004", False): 2}
    assert all(e.seed >= 5 for e in everything(["fresh"])) and len(everything(["fresh"])) == 15


def ways(numbers, target):
    """Every way to combine the numbers to the target, by trying all pairs in both orders, each as one expression of
    their places, in which a commuting operator has its parts in order; results are whole and not below 0."""
    found = set()

    def go(pool):
        if len(pool) == 1 and pool[0][1] == target:
            found.add(pool[0][0])
        for i, j in itertools.permutations(range(len(pool)), 2):
            (name, a), (other, b) = pool[i], pool[j]
            rest = [x for k, x in enumerate(pool) if k not in (i, j)]
            results = {
                "+": a + b,
                "*": a * b,
                "-": a - b if a >= b else None,
                "/": a // b if b and a % b == 0 else None,
            }
            for operator, result in results.items():
                if result is not None:
                    names = sorted((name, other)) if operator in "+*" else (name, other)
                    go([*rest, (f"({names[0]}{operator}{names[1]})", result)])

    go([(f"n{i}", n) for i, n in enumerate(numbers)])
    return found


# ---------------------------------------------------------------------------------------------------------- rows


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A study of its own folder and table."""
    monkeypatch.setattr(study, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results" / "runs.csv")
    monkeypatch.setattr(study, "HARD", tmp_path / "runs" / "hard.jsonl")
    (tmp_path / "runs").mkdir()
    return tmp_path


def test_hard_puzzles_have_a_single_solution(place):
    """Guards against a level that is not what it says: 120 puzzles of either kind against all ways to combine them."""
    study.write_hard_puzzles()
    hard = {(tuple(sorted(p.numbers)), p.target) for p in read_problems(study.HARD)}
    assert 5000 < len(hard) < len(universe()) / 2
    sample = random.Random(0).sample(universe(), 240)
    judged = [((p.numbers, p.target) in hard, len(ways(p.numbers, p.target)) == 1) for p in sample]
    assert sum(a for a, _ in judged) > 60 and all(a == b for a, b in judged)
    before = study.HARD.read_bytes()
    study.HARD.unlink()
    study.write_hard_puzzles()
    assert study.HARD.read_bytes() == before
    parts = [split(p) for p in read_problems(study.HARD)]
    assert parts.count("heldout") >= train.Settings().eval_problems and parts.count("train") > 4096


def a_row(name, version=study.VERSION, **others):
    """A row with what every row has."""
    return (
        dict.fromkeys(analyze.ABOUT, "")
        | {"run": name, "version": str(version), "seconds": "100", "curve": "0:0.1"}
        | others
    )


def write(*rows):
    """A table of these rows."""
    study.RESULTS.parent.mkdir(exist_ok=True)
    study.write_rows(list(rows), study.RESULTS)


def test_rows_of_other_versions_are_kept_and_not_done(place, monkeypatch):
    """Guards against rows of another version that count as done, or that block the table with other columns."""
    old, other = a_row("a", version=study.VERSION - 1, method="one, two", gone="3"), a_row("b")
    write(old, other)
    assert list(study.done_runs()) == ["b"]
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
    code = (
        "import os, time; from pathlib import Path; from experiments import study; from test_study import a_row\n"
        f"study.RUNS, study.RESULTS = Path({str(study.RUNS)!r}), Path({str(study.RESULTS)!r})\n"
        "study.make_row = lambda e: [time.sleep(0.01), a_row(e.name)][1]\n"
        "(study.RUNS / f'ready{os.getpid()}').touch()\n"
        "while len(list(study.RUNS.glob('ready*'))) < 4: time.sleep(0.001)\n"  # so that they meet
        "for i in range(10): study.take_over(study.Experiment('main', 'easy', 'none', i), False)"
    )
    path = os.pathsep.join([str(study.ROOT), str(study.ROOT / "tests")])
    for i in range(10):
        (study.RUNS / f"easy/none-seed{i}" / "credit").mkdir(parents=True)
    others = [subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}) for _ in range(4)]
    assert [p.wait() for p in others] == [0] * 4
    assert [r["run"] for r in read_rows(study.RESULTS)] == [f"easy/none-seed{i}" for i in range(10)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a small finished run, and the experiment that it is one of."""
    folder = tmp_path_factory.mktemp("study")
    flags = "outcome_conditional --think_discount 0.25 --normalize none --lr 0.0001" + SMALL
    e = study.Experiment("sweeps", "easy", flags, 3)
    command = e.command.replace(str(study.RUNS), str(folder)).split()[1:]
    subprocess.run([sys.executable, *command], cwd=study.ROOT, check=True, capture_output=True)
    return folder, e


def take(finished, place):
    """The finished run, copied into a study's place."""
    folder, e = finished
    subprocess.run(["cp", "-r", f"{folder}/easy", place / "runs"], check=True)
    return e


def test_a_row_says_what_the_run_was_and_gave(finished, place):
    """Guards against figures under wrong names, and a setting taken for the method's or left out."""
    e = take(finished, place)
    row = study.make_row(e)
    assert row["method"] == "outcome_conditional think_discount=0.25 normalize=none"
    assert row["setting"].split() == ["questions=2", "answers=2", "max_new_tokens=24", "lr=0.0001", "eval_problems=4"]
    assert row["seed"] == 3 and row["run"] == e.name and row["command"].startswith("python train.py --mitigation outc")
    study.take_over(e, True)
    run, (text,) = analyze.to_run(read_rows(study.RESULTS)[0]), read_rows(study.RESULTS)
    expected = analyze.summarize(e.folder) | {"seconds": sum(analyze.read_metrics(e.folder)["seconds"][1:])}
    assert run.label == f"{row['method']} {row['setting']}" and run.setting == row["setting"] and not run.baseline
    assert run.figures.keys() == expected.keys() and text["curve"].count(":") == 2
    for name, value in expected.items():
        assert run.figures[name] == pytest.approx(value, rel=1e-5, abs=0.5 if name == "seconds" else 1e-12), name
    final = json.loads((e.folder / "final.json").read_text())
    assert run.figures["pass@16"] == final["pass@16"] and run.figures["end"] == final["heldout_success"]


def test_a_run_with_other_settings_is_no_run_of_the_study(finished, place):
    """Guards against a row of a command that somebody tried with fewer steps, or with another hyper-parameter."""
    e = take(finished, place)
    path = e.folder / "config.json"
    config = json.loads(path.read_text())
    work = study.Study([e], 1, 1, False)
    for part, change, named in (("settings", {"steps": 1}, "--steps"), ("method", {"think_discount": 0.5}, "--think")):
        path.write_text(json.dumps(config | {part: config[part] | change}))
        with pytest.raises(ValueError, match=f"another {named}.*move it away"):
            study.make_row(e)
    work.work()
    assert "--think_discount" in work.failed[e] and not study.done_runs() and (e.folder / "credit").exists()


def test_a_run_of_older_results_is_not_taken_for_one_of_today(finished, place, monkeypatch):
    """Guards against an old row that is added again and again since none of the new version is there."""
    e = take(finished, place)
    study.take_over(e, False)
    monkeypatch.setattr(study, "VERSION", study.VERSION + 1)
    work = study.Study([e], 1, 1, False)
    work.work()
    assert "version 1" in work.failed[e] and len(read_rows(study.RESULTS)) == 1


def test_a_run_that_got_its_row_elsewhere_is_not_trained_again(place, monkeypatch):
    """Guards against rows that arrive while the study works: the run that ends brings the news of the other."""
    runs = [study.Experiment("main", "easy", flags, 0) for flags in ("none", "ppo")]
    work = study.Study(runs, 1, 1, False)
    write(*(a_row(e.name) for e in runs))
    monkeypatch.setattr(study.subprocess, "Popen", lambda *a, **k: pytest.fail("both are done"))
    work.done = study.done_runs()
    assert work.fill() == [] and work.todo == []


@pytest.mark.parametrize("keep", [False, True])
def test_a_finished_run_is_taken_over_without_running_it_again(finished, place, keep):
    """Guards against a run repeated since the study was killed before its row was written, and a log that stays."""
    e = take(finished, place)
    written = (e.folder / "metrics.csv").stat().st_mtime_ns
    work = study.Study([e], 1, 1, keep)
    work.work()
    assert list(study.done_runs()) == [e.name] and not work.failed and not e.log.exists()
    assert (e.folder / "metrics.csv").stat().st_mtime_ns == written and (e.folder / "credit").exists() == keep
    assert study.Study([e], 1, 1, keep).todo == []
    study.RESULTS.unlink()  # as by a checkout: the folder still knows its row, without the credit log
    late = study.Study([e], 1, 1, keep)
    work.settle(e, 0)
    late.settle(e, 0)  # another study was faster
    assert [row["run"] for row in read_rows(study.RESULTS)] == [e.name] and not late.failed


def test_a_run_without_its_last_measurement_is_not_finished(finished, place):
    """Guards against a stopped run that counts as done, and one that was to take more steps."""
    e = take(finished, place)
    final = json.loads((e.folder / "final.json").read_text())
    assert study.is_finished(e.folder)
    for change in ({"step": 1}, {"pass@16": None}):
        (e.folder / "final.json").write_text(json.dumps({k: v for k, v in (final | change).items() if v is not None}))
        assert not study.is_finished(e.folder)
    assert e.next_command() == f"python train.py --resume {e.folder}" != e.command


# ----------------------------------------------------------------------------------------------------- processes


def test_a_run_that_another_process_has_is_left_to_it(place):
    """Guards against two processes in one run folder, as after a study that was killed while its runs went on."""
    e = study.Experiment("main", "easy", "none" + SMALL, 0)
    e.folder.parent.mkdir()
    with e.log.open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert study.launch(e, 1) is None
    process = study.launch(e, 1)
    assert study.launch(e, 1) is None  # the run itself holds it now
    process.kill()
    process.wait()
    study.hold(e).close()  # and nobody any more


def driver(place, flags, parts):
    """Start a study of these parts as a process of its own group, as a terminal does."""
    code = (
        "import signal; from pathlib import Path; from experiments import study\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        f"study.RUNS, study.RESULTS = Path({str(study.RUNS)!r}), Path({str(study.RESULTS)!r})\n"
        f"study.HARD, study.PARTS = Path({str(study.HARD)!r}), {parts!r}\n"
        "study.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *flags],
        cwd=study.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(study.ROOT)},
    )


def wait_for(condition, process, seconds=120):
    """Wait until something is so, while a process works."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds and process.poll() is None, process.stdout.read()
        time.sleep(0.05)


def steps_of(e):
    """The steps in the run's metrics.csv."""
    with (e.folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("blow", ["the study", "all", "Ctrl-C"])
def test_a_study_that_is_killed_goes_on_with_nothing_lost_or_repeated(place, blow):
    """Guards against rows that are lost or doubled, and runs that begin again: the study is killed and its runs go on,
    or all is killed as by a power cut, or Ctrl-C stops it, when one run has its row and two are under way."""
    long = SMALL.replace("--steps 2", "--steps 40")
    parts = {"main": [("easy", (f"none{SMALL}", f"random{long}", f"prefix_tree{long}"), [0])]}
    runs = [study.Experiment("main", "easy", flags, 0) for flags in parts["main"][0][1]]
    first = driver(place, ["--processes", "3", "--keep"], parts)
    begun = lambda: all((e.folder / "state.safetensors").exists() for e in runs)
    wait_for(lambda: runs[0].name in study.done_runs() and begun(), first)
    if blow == "all":
        subprocess.run(["pkill", "-KILL", "-f", str(study.RUNS)])
    else:
        first.send_signal(signal.SIGINT if blow == "Ctrl-C" else signal.SIGKILL)
    text = first.communicate(timeout=120)[0]
    assert first.returncode != 0 and ("error: stopped; the same command goes on" in text) == (blow == "Ctrl-C")
    made = [(e.folder / "credit" / "step-000001.npz").stat().st_mtime_ns for e in runs]
    second = driver(place, ["--processes", "2", "--keep"], parts)
    text = second.communicate(timeout=240)[0]
    assert second.returncode == 0 and "3/3 runs done" in text, text
    assert sorted(row["run"] for row in read_rows(study.RESULTS)) == sorted(e.name for e in runs)
    assert [steps_of(e) for e in runs] == [list(range(n + 1)) for n in (2, 40, 40)]
    assert made == [(e.folder / "credit" / "step-000001.npz").stat().st_mtime_ns for e in runs]


def test_a_run_that_fails_is_named_and_the_others_go_on(place):
    """Guards against a study that ends with its first broken run, or passes over it in silence."""
    parts = {"main": [("easy", (f"vineppo --k 0{SMALL}", f"none{SMALL}"), [0])]}
    process = driver(place, ["--processes", "1"], parts)
    text = process.communicate(timeout=240)[0]
    assert process.returncode == 1 and len(study.done_runs()) == 1
    assert re.search(r"easy/vineppo-k-0\S*:? failed: ended with code 1, and last said: error: .*--k must be", text)
    assert text.rstrip().endswith("*.log") and "error: 1 runs failed" in text
    assert "1/2 runs done" in text and "% solved" in text


def test_the_list_is_what_is_left(place, monkeypatch, capsys):
    """Guards against commands of runs that are done, and --list that starts something."""
    runs = everything(["main"], ["easy"])
    write(a_row(runs[0].name))
    for e, final in ((runs[1], None), (runs[2], {"step": 100, "pass@16": 0.5})):
        e.folder.mkdir(parents=True)
        (e.folder / "config.json").write_text(json.dumps({"settings": {"steps": 100}}))
        if final:
            (e.folder / "final.json").write_text(json.dumps(final))
    monkeypatch.setattr(study.subprocess, "Popen", lambda *a, **k: pytest.fail("--list starts nothing"))
    monkeypatch.setattr(sys, "argv", ["study", "--list", "--parts", "main", "--levels", "easy"])
    study.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"python train.py --resume {runs[1].folder}"] + [e.command for e in runs[3:]]
    write(*(a_row(e.name) for e in runs))
    study.main()
    assert capsys.readouterr().out == ""  # and not an empty line, which would be a command


def test_the_list_of_hard_runs_brings_their_puzzles(place, monkeypatch, capsys):
    """Guards against commands that name a file which nobody wrote."""
    monkeypatch.setattr(sys, "argv", ["study", "--list", "--parts", "main", "--levels", "hard", "--methods", "none"])
    study.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("--data runs/study/hard.jsonl" in line for line in lines) and study.HARD.is_file()


def test_collect_only_takes_over(finished, place, monkeypatch, capsys):
    """Guards against --collect that trains: one run is finished, the other never began."""
    e = take(finished, place)
    parts = {"sweeps": [("easy", (e.flags, "none"), [3])]}
    monkeypatch.setattr(study, "PARTS", parts)
    monkeypatch.setattr(study.subprocess, "Popen", lambda *a, **k: pytest.fail("--collect starts nothing"))
    monkeypatch.setattr(sys, "argv", ["study", "--collect", "--parts", "sweeps"])
    study.main()
    assert list(study.done_runs()) == [e.name] and "1/2 runs done" in capsys.readouterr().out


def test_the_eta_by_hand(place, monkeypatch):
    """Guards against methods, flags and levels that take as long as others did, and an ETA that stands still."""
    todo = [study.Experiment("main", "easy", flags, 3) for flags in ("none", "vineppo --k 3", "ppo")]
    assert np.isnan(study.Study(todo, 2, 1, False).eta())
    assert study.Study(todo, 2, 1, False).progress() == "0/3 runs done, ETA after the first run"
    took = {
        "easy/none-seed0": 100,
        "easy/none-seed1": 140,
        "easy/vineppo-k-3-seed0": 600,
        "easy/vineppo-k-9-seed0": 1800,
        "hard/none-seed0": 300,
    }
    write(*(a_row(name, level=name[:4], seconds=seconds) for name, seconds in took.items()))
    work = study.Study(todo, 2, 1, False)
    expected = {"none": 120, "vineppo --k 3": 600, "ppo": (100 + 140 + 600 + 1800) / 4}
    assert work.eta() == pytest.approx(1.2 * sum(expected.values()) / 2)
    assert work.expected(todo[0]._replace(level="hard", flags="ppo")) == pytest.approx(1.2 * 300)
    work.todo, work.running, work.began = [], {todo[0]: None, todo[1]: None}, {todo[0]: 1000.0, todo[1]: 1000.0}
    monkeypatch.setattr(study.time, "monotonic", lambda: 1200.0)
    assert work.eta() == pytest.approx(1.2 * 600 - 200)  # the first is overdue; the second decides, and is alone
    assert work.progress() == "0/3 runs done, ETA 0 h 08 min"


def test_the_eta_believes_runs_that_say_it(place, monkeypatch):
    """Guards against a method slower than all before it whose runs are expected to take as long as those."""
    write(a_row("easy/none-seed0", seconds=100))
    slow = [study.Experiment("main", "easy", "vineppo --k 3", seed) for seed in range(3)]
    work = study.Study(slow, 2, 1, False)
    work.todo, work.running, work.began = slow[1:], {slow[0]: None}, {slow[0]: 1000.0}
    monkeypatch.setattr(study.time, "monotonic", lambda: 1060.0)
    slow[0].log.parent.mkdir(parents=True)
    slow[0].log.write_text("measuring the start model\n")
    assert work.eta() == pytest.approx((60 + 120 + 120) / 2)  # as long as `none`, a fifth added
    slow[0].log.write_text("step    2/100  reward 0.4     262 tok/s  ETA 49:30\n")
    left = 49 * 60 + 30
    assert work.eta() == pytest.approx((left + 2 * left / 0.98) / 2)
    slow[0].log.write_text("step   90/100  reward 0.4     262 tok/s  ETA 4:00\n")  # resumed a minute ago
    assert work.eta() == pytest.approx((240 + 2 * 2400) / 2)
    slow[0].log.write_text("step  100/100  reward 0.4     262 tok/s  ETA 0:00\n")  # and now it is being measured
    assert work.eta() == pytest.approx((0 + 2 * 120) / 2)


def test_a_table_taller_than_the_terminal_is_cut(place, monkeypatch, capsys):
    """Guards against a table that can't be drawn over, and a sum that is cut off with the rest."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(study.shutil, "get_terminal_size", lambda: os.terminal_size((30, 10)))
    runs = everything(["main"], ["easy"])
    work = study.Study(runs, 64, 1, False)
    work.running = dict.fromkeys(runs[:64])
    work.began = dict.fromkeys(runs[:64], 0.0)
    height = study.draw(work, [], 0)
    lines = capsys.readouterr().out.splitlines()
    assert height == len(lines) < 10 and lines[-1] == work.progress()[:30] and max(map(len, lines)) <= 30
    study.draw(work, [], height)
    assert capsys.readouterr().out.startswith(f"\x1b[{height}A\x1b[J")


def test_the_table_counts_every_run_once(place):
    """Guards against a run in no column or in two."""
    runs = [study.Experiment("main", "easy", flags, 0) for flags in ("none", "ppo", "dpo")]
    runs += [study.Experiment("rates", "easy", f"{flags} --lr 1", 0) for flags in ("none", "ppo")]
    write(a_row(runs[0].name))
    work = study.Study(runs, 2, 1, False)
    work.running, work.began, work.failed = {runs[1]: None}, {runs[1]: 0.0}, {runs[2]: "for a reason"}
    lines = list(study.table(work))
    assert [line.split() for line in lines[1:3]] == [
        ["main", "easy", "3", "1", "1", "1"],
        ["rates", "easy", "2", "0", "0", "0"],
    ]
    assert lines[3] == "easy/ppo-seed0: nothing" and lines[4] == "easy/dpo-seed0 failed: for a reason"


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--parts", "nothing"], "nothing"),
        (["--processes", "0"], "--processes"),
        (["--unknown"], "--unknown"),
        (["--methods", "grpo"], "grpo"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(flags, named, monkeypatch):
    """Guards against a traceback, or a study of something else."""
    monkeypatch.setattr(sys, "argv", ["study", *flags])
    with pytest.raises(SystemExit) as stop:
        study.main()
    assert (
        str(stop.value.code).startswith("error: ")
        and named in str(stop.value.code)
        and "\n" not in str(stop.value.code)
    )


def test_the_tracked_rows_are_of_this_study():
    """Guards against rows that no command of the list made: each is in the list, with its command, part and seed."""
    known = {e.name: e for e in everything()}
    rows = [row for row in read_rows(study.ROOT / "results" / "runs.csv") if row["version"] == str(study.VERSION)]
    assert len({row["run"] for row in rows}) == len(rows) > 0
    for row in rows:
        e = known[row["run"]]
        assert (row["part"], row["level"], row["seed"]) == (e.part, e.level, str(e.seed))
        assert row["command"] == e.command and row["steps"] == "100" and row["method"].split()[0] == e.flags.split()[0]
