"""The rates that are tried and chosen, by made-up rows; and the puzzles that judge."""
import json

import pytest

from countdown_task import load
from lab.arms import write_rows
from lab.survive import run as program


@pytest.fixture
def room(tmp_path, monkeypatch):
    """Where rows of an arm may be written, by rate: its ends."""
    monkeypatch.setattr(program, "SMALL", tmp_path)

    def write(**arms):
        rows = [{"run": f"{arm}{rate}{i}", "arm": f"{arm}, {rate:g}", "end": str(end), "command": ""}
                for arm, by_rate in arms.items() for rate, ends in by_rate.items() for i, end in enumerate(ends)]
        write_rows(rows, tmp_path / "runs.csv")
    return write


def test_rates_are_tried_outwards_while_the_best_is_at_an_edge(room):
    """By hand: inside, at the top, further, down to the end of the ladder, and before all seeds are there."""
    middle, top = {2.8e-4: [0.5, 0.5], 4e-4: [0.6, 0.6], 5.6e-4: [0.55, 0.5]}, {5.6e-4: [0.7, 0.7]}
    low = {2.8e-4: [0.9, 0.8]}
    for ends, places, best in ((middle, [2, 3, 4], 3), (middle | top, [2, 3, 4, 5], 4),
                               (middle | top | {8e-4: [0.6, 0.7]}, [2, 3, 4, 5], 4),
                               (middle | low | {2e-4: [0.9, 0.9], 1.4e-4: [1, 1]}, [0, 1, 2, 3, 4], 0),
                               (middle | {5.6e-4: [0.9]}, [2, 3, 4], 4)):
        room(ppo=ends)
        assert program.tried("ppo", range(2)) == places and program.best("ppo", places) == best
    room(ppo=middle, RLOO={2.8e-4: [0.1]})
    assert program.choosing({"ppo": "ppo"}, range(2)).arms == {
        "ppo, 0.00028": "ppo --lr 0.00028", "ppo, 0.0004": "ppo --lr 0.0004", "ppo, 0.00056": "ppo --lr 0.00056"}
    judged = program.judging({"ppo": "ppo"}, range(2), range(100, 124))
    assert judged.arms == {"ppo": "ppo --lr 0.0004"} and "--eval_problems 2048" in judged.alike


@pytest.mark.slow
def test_the_puzzles_that_judge_chose_no_rate(tmp_path, monkeypatch):
    """Guards against puzzles of stage one, of training, or twice."""
    monkeypatch.setattr(program, "PUZZLES", tmp_path / "puzzles.jsonl")
    program.write_puzzles()
    rows = [json.loads(line) for line in program.PUZZLES.read_text().splitlines()]
    judged = load("all", path=str(program.PUZZLES))
    assert len(rows) == len({puzzle.id for puzzle in judged}) == 2048
    assert not {puzzle.id for puzzle in judged} & {puzzle.id for puzzle in load("heldout", 512) + load("train", 4096)}


def test_both_stages_are_trained_the_cheap_arms_first(tmp_path, monkeypatch, room, run_program):
    """Guards against a stage that begins before its rates are chosen, and a rate that is never asked for."""
    seen, known = [], {}

    def train(asked, processes):
        seen.append([*asked.arms])
        for name in asked.arms:
            if ", " in name:  # a higher rate is better, up to 8e-4
                arm, rate = name.split(", ")
                known.setdefault(arm, {})[float(rate)] = [1 - abs(float(rate) - 8e-4)] * len(asked.seeds)
        room(**known)
    monkeypatch.setattr(program, "train", train)
    monkeypatch.setattr(program, "PUZZLES", tmp_path / "puzzles.jsonl")
    monkeypatch.setattr(program, "write_puzzles", lambda: None)
    monkeypatch.setattr(program, "CHEAP", {"RLOO": "none", "ppo": "ppo"})
    run_program(program)
    assert seen[0] == [f"{arm}, {rate}" for arm in ("RLOO", "ppo") for rate in ("0.00028", "0.0004", "0.00056")]
    judged = seen.index(["RLOO", "ppo"])
    assert "RLOO, 0.0011" in seen[judged - 1] and seen[judged + 1][0] == "vineppo, 0.00028" and seen[-1] == ["vineppo"]
