"""Tests of models/talk.py: what is typed, what is shaded, and a conversation."""
import builtins
import re
from unittest import mock

import pytest

import countdown_task
from models import talk
from tasks import latin_task


def test_a_token_is_the_darker_the_less_sure():
    """Guards against a shade on sure tokens, and limits that are turned around."""
    assert talk.shade("a", 0.95) == "a"
    colours = [re.search(r"48;5;(\d+)m", talk.shade("a", p)).group(1) for p in (0.9, 0.5, 0.1, 0.0)]
    assert colours == ["223", "215", "208", "208"]


def test_a_puzzle_is_typed_as_it_is_shown_or_stored_and_a_wrong_one_is_a_sentence():
    """Guards against numbers in another order, Countdown's form asked of another task, and no solution."""
    for line in ("3 5 7 22", "[3, 5, 7] -> 22", '{"nums": [3, 5, 7], "target": 22}'):
        assert countdown_task.show(talk.read_puzzle(countdown_task, line)) == "[3, 5, 7] -> 22"
    puzzle = latin_task.load("heldout", 1)[0]
    assert talk.read_puzzle(latin_task, puzzle.id) == puzzle
    for line, said in (("1 1 1 500", r"\[1, 1, 1\] can't make 500"), ("-3 5 2", "expected .* whole numbers from 0 on"),
                       ("[3, 5] -> -8", "whole numbers from 0 on"), ("3 - 5 2", "from 0 on"),
                       ("1.5 2 3", "from 0 on"), ("3", "it is no object"), ("3 5 8.", "that is no JSON"),
                       ("hello", "expected .*29}, but that is no JSON")):
        with pytest.raises(ValueError, match=f"^(?!.*column).*{said}") as error:
            talk.read_puzzle(countdown_task, line)
        assert "typed.jsonl" not in str(error.value)


def test_a_conversation(run_program, monkeypatch, capsys):
    """Guards against an end at the first bad line, a puzzle that is asked twice, and colours that change the text."""
    typed = mock.Mock(side_effect=["3 5 7 22", "nonsense", "", "", EOFError])
    monkeypatch.setattr(builtins, "input", typed)
    run_program(talk, "--max_new_tokens", 100)
    shown = capsys.readouterr().out
    plain = re.sub(r"\033\[[\d;]+m", "", shown)
    assert plain.count("reward") == 3 and "expected" in plain and "[3, 5, 7] -> 22" in plain
    asked = re.findall(r"^\[.+\] -> \d+$", plain, re.MULTILINE)
    assert len({*asked}) == 3 and len(shown) > len(plain)
    assert re.search(r"<answer>[\d ()+*/-]+</answer>\n(right|wrong), reward", plain)
