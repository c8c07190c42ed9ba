"""The table of credit functions in TRL: short runs, stopped and resumed, and its figures by hand."""
import csv
import json
import shutil

import pytest

import countdown_task
from bridges import compare as program
from lab.statistics import read_table
from plumbing.launch import BUNDLED
from plumbing.tokenizer import Tokenizer
from rollout import Policy


@pytest.mark.slow
def test_runs_are_trained_once_and_compared(tmp_path, run_program, monkeypatch, refusal):
    """Guards against a run made again, another seed or credit in its place, and prompts or puzzles of another row."""
    words = ("--model", BUNDLED, "--credit", "none", "entropy_ratio", "--seeds", 0, 1, "--steps", 2, "--questions", 2,
             "--responses", 2, "--max_new_tokens", 60, "--eval_problems", 8, "--micro_batch", 4, "--lr", 1e-4, "--out", tmp_path)
    made, make, asked = [], program.make, []
    monkeypatch.setattr(program, "make", lambda args, credit, seed, folder: made.append((credit, seed)) or make(
        args, credit, seed, folder))
    task = program.load_task("countdown")
    monkeypatch.setattr(program, "load_task", lambda name: task)
    grade = task.grade
    monkeypatch.setattr(task, "grade", lambda text, puzzle: asked.append((text, puzzle)) or grade(text, puzzle))
    stop = program.report
    monkeypatch.setattr(program, "trained", lambda args, credit, seed, folder, one=program.trained: (
        one(args, credit, seed, folder) if len(made) < 3 else pytest.fail("stopped")))
    with pytest.raises(BaseException, match="stopped"):
        run_program(program, *words)
    monkeypatch.undo()
    monkeypatch.setattr(program, "make", lambda args, credit, seed, folder: made.append((credit, seed)) or make(
        args, credit, seed, folder))
    run_program(program, *words)
    assert made == [("none", 0), ("entropy_ratio", 0), ("none", 1), ("entropy_ratio", 1)]
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [(row["credit"], row["seed"]) for row in rows] == [("none", "0"), ("entropy_ratio", "0"), ("none", "1"),
                                                              ("entropy_ratio", "1")]
    assert (tmp_path / "leads.png").stat().st_size > 5000 and not (tmp_path / "none-seed0").exists()
    # Nearly every attempt begins with the numbers of its own puzzle.
    assert sum(any(str(n) in text for n in puzzle.numbers) for text, puzzle in asked) > 0.9 * len(asked) > 30
    for row, x in zip(rows, (0.5, 0.75, 0.25, 0.5)):
        row["end"] = str(x)
    stop(rows, tmp_path)
    header, (first, second) = read_table(tmp_path / "tables.md", "Credit compared")
    half = 4.3027 * (312.5 / 2 + 312.5 / 2) ** 0.5  # Student's t for two degrees of freedom; both variances are 312.5
    assert second[header.index("end - none")] == f"25.0 ± {half:.1f}" and not first[header.index("end - none")]
    assert "several turns" in refusal(program, "--model", BUNDLED, "--task", "guess", "--out", tmp_path / "g")


def test_a_tokenizer_that_draws_is_stopped(tmp_path):
    """BPE's dropout in a folder's tokenizer.json, which would give each prompt other tokens."""
    folder = shutil.copytree(BUNDLED, tmp_path / "m")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["dropout"] = 0.5
    file.write_text(json.dumps(content), encoding="utf-8")
    puzzle = countdown_task.Puzzle((3, 4, 5), 8)
    policy = Policy(None, Tokenizer(folder), countdown_task)
    found = program.tokenizer_of(str(folder), policy, puzzle)
    text = policy.tokenizer.decode(policy.prompt(puzzle))[0]
    assert all(found(text)["input_ids"] == policy.prompt(puzzle) for _ in range(20))
