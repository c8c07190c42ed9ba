"""The tasks of tasks/ against backtracking, a second parser and by hand."""
import itertools
import json
import random
import re
from fractions import Fraction

import numpy as np
import pytest

from grpo import compare
from methods import MITIGATIONS
from methods.heads import HEADS
from mitigations import required
from plumbing.task_file import load_puzzles, load_task
from rollout import rollout
from tasks import latin_task, math_task
from tasks.math_task import Problem, number
from tests.fixtures import spans_of
from train import Settings, lacking, load_policy

TASKS = ("latin", "math")


@pytest.mark.parametrize("name", TASKS)
def test_splits_are_apart_and_the_same_every_time(name):
    task = load_task(name)
    training, heldout = load_puzzles(task, 512, "")
    assert len(heldout) == 512 and len(training) >= 2048
    assert task.load("train") == training and task.load("heldout", 9) == heldout[:9]
    for puzzle in training[:200]:
        task.check(puzzle)


@pytest.mark.parametrize("name", TASKS)
def test_what_the_task_knows_is_right_and_what_it_guesses_is_often_wrong(name):
    """A demonstration with probability 1 is always right; with 0 it is well formed, and a matter of luck."""
    task, rng = load_task(name), np.random.default_rng(0)
    puzzles = task.load("train", 100)
    right, guessed = ([task.grade(task.demonstrate(puzzle, rng, known), puzzle) for puzzle in puzzles]
                      for known in (1.0, 0.0))
    assert all(grade == {"reward": 1.1, "answer": 1, "format": 1} for grade in right)
    assert all(grade["format"] == 1 for grade in guessed)
    assert np.mean([grade["answer"] for grade in guessed]) < 0.7


# ------------------------------------------------------------------------------------------------- Latin squares


def completions(cells):
    """All ways to fill a square's cells, by backtracking."""
    if "_" not in cells:
        return [cells]
    i = cells.index("_")
    row, column = cells[i // 5 * 5 : i // 5 * 5 + 5], cells[i % 5 :: 5]
    return [done for digit in "12345" if digit not in row + column
            for done in completions(cells[:i] + digit + cells[i + 1 :])]


def test_all_squares_are_there():
    """161,280 is the published number of Latin squares of order 5 (OEIS A002860)."""
    squares = latin_task.squares().reshape(-1, 5, 5)
    assert len(np.unique(squares.reshape(-1, 25), axis=0)) == len(squares) == 161_280
    assert (np.sort(squares, 1) == np.arange(1, 6)[:, None]).all() and (np.sort(squares, 2) == np.arange(1, 6)).all()


def test_a_puzzle_has_one_solution():
    """Guards against an open cell that could be another digit."""
    for puzzle in latin_task.load("train", 40):
        assert completions(puzzle.id) == ["".join(map(str, latin_task.solution(puzzle.id)))]


def test_no_held_out_square_is_trained_on_with_other_cells():
    solved = [{str(latin_task.solution(p.id)) for p in latin_task.load(part, 512)} for part in ("train", "heldout")]
    assert not solved[0] & solved[1]


PUZZLE = latin_task.Puzzle("1234523451345124512_5_2__")  # 3; 1, 3 and 4 are open
GIVEN = "1 2 3 4 5\n2 3 4 5 1\n3 4 5 1 2\n4 5 1 2 "


@pytest.mark.parametrize("end, layout, answer", [
    ("3\n5 1 2 3 4", 1, 1), ("3 5 1 2 3 4", 1, 1), ("3\n5 1 2 3 5", 1, 0), ("3\n5 1 2 3", 0, 0),
    ("3 5 1 2 3 4 4", 0, 0), ("", 0, 0), ("351234", 0, 0), ("3 5 1 2 3 6", 0, 0),
    ("3 5 1 2 3 \u0664", 0, 0), ("x3 5 1 2 3 4", 0, 0),
    ("3 5 1 2 3 4 " * 100_000, 0, 0)])
def test_grades_by_hand(end, layout, answer):
    assert "".join(map(str, latin_task.solution(PUZZLE.id))) == "1234523451345124512351234"
    grade = latin_task.grade(GIVEN + end, PUZZLE)
    assert grade == {"reward": pytest.approx(0.1 * layout + answer), "format": layout, "answer": answer}


def test_roles_of_a_square():
    role, in_answer = latin_task.roles("3\n1 3", spans_of(["3", "\n", "1", " 3", ""]))
    assert role.tolist() == [1, 0, 1, 1, 2] and in_answer.all()


@pytest.mark.parametrize("line, said", [("12345", "is not a square of 25 cells"), ("_" * 25, "161280 solutions"),
                                        ("11" + "_" * 23, "has no solutions")])
def test_a_file_of_squares(line, said, tmp_path):
    file = tmp_path / "squares.txt"
    file.write_text("\n".join(puzzle.id for part in ("train", "heldout") for puzzle in latin_task.load(part, 3)) + "\n")
    assert latin_task.load("heldout", path=str(file)) == latin_task.load("heldout", 3)
    file.write_text(line)
    with pytest.raises(ValueError, match=said):
        latin_task.load("train", path=str(file))


# ------------------------------------------------------------------------------------------------- word problems


def test_problems_say_what_their_steps_compute():
    """Guards against a sentence of another step: the numbers of the question are those of the steps, in their order."""
    signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda a, b: Fraction(a, b)}
    words = {"+": "finds|buys|brings|gets", "-": "gives|loses|takes|sells", "*": "times as many", "/": "one of|share"}
    for problem in math_task.load("train", 300):
        assert 2 <= len(problem.steps) <= 4
        sentences = problem.question.split(".")
        n = problem.steps[0][0]
        assert str(n) in sentences[0]
        for (before, sign, k), sentence in zip(problem.steps, sentences[1:], strict=False):
            assert before == n and re.search(words[sign], sentence) and re.search(rf"\b{k}\b", sentence)
            n = signs[sign](n, k)
            assert 0 < n <= 60 and n.denominator == 1
            n = int(n)
        assert problem.answer == n


def slow_number(text):
    """What `number` must return, character by character."""
    text = text.strip(" \t\r\n") if len(text) <= 64 else ""
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-")
    text = text.removeprefix("\\$") if text.startswith("\\$") else text.removeprefix("$")
    if not text or set(text) - set("0123456789,./"):
        return None
    whole, slash, below = text.partition("/")
    if slash:
        return sign * Fraction(int(whole), int(below)) if whole.isdigit() and below.isdigit() and int(below) else None
    whole, dot, rest = text.partition(".")
    first, *groups = whole.split(",")
    if not first or groups and (len(first) > 3 or any(len(group) != 3 for group in groups)) or "/" in rest or \
            dot and not rest.isdigit() or not "".join([first, *groups]).isdigit():
        return None
    return sign * Fraction(first + "".join(groups) + (f".{rest}" if dot else ""))


def test_numbers_agree_with_another_parser_on_100_000_hostile_strings():
    rng, accepted = random.Random(0), 0
    for _ in range(100_000):
        alphabet = rng.choice(["0123456789", "0123,", "12.0", "-1/20", "$1,02", "019.,-/$\\ eE+_\u0663\uff11x\n"])
        text = "".join(rng.choices(alphabet, k=rng.choice((1, 2, 3, 4, 5, 6, 9, 70))))
        assert number(text) == slow_number(text), text
        accepted += number(text) is not None
    assert 20_000 < accepted < 80_000


@pytest.mark.parametrize("inside, answer", [
    ("42", 1), (" 42.0\n", 1), ("$42", 1), ("84/2", 1), ("42 apples", 0), ("It is 42", 0), ("42 42", 0), ("", 0),
    ("\uff14\uff12", 0), ("4e1", 0), ("0" * 10**6 + "42", 0), ("40 + 2", 0), ("42</answer><answer>42", 1)])
def test_only_a_number_alone_is_an_answer(inside, answer):
    found = math_task.grade(f" 40 + 2 = 42.</think>\n<answer>{inside}</answer>", Problem("?", Fraction(42)))
    assert found["answer"] == answer and found["format"] == (inside.count("<") == 0)


def test_calculations_of_a_text():
    text = " Then 4 + 3 = 7. So 7 / 2 = 3. Now 6 / 0 = 1"
    found = math_task.calculations(text, None)
    assert [(text[spans.a[0] : spans.result[1]], right) for spans, right in found] == [
        ("4 + 3 = 7", True), ("7 / 2 = 3", False), ("6 / 0 = 1", False)]


QUESTIONS = [("How many?", "#### 7", 7), ("How much is $\\frac{1}{2}$ of $1{,}000$?", "So 500.\n#### $500", 500),
             ("A\nB?", "<<2*3=6>>6\n#### 1,234.50", Fraction(2469, 2)), ("Less?", "#### -3/4", Fraction(-3, 4)),
             ("Alone?", "12", 12), ("Spaces? ", "####   8  ", 8)]
LINES = [json.dumps({"question": f"{q} {i}", "answer": a}) for i, (q, a, _) in itertools.product(range(4), QUESTIONS)]


def test_a_file_as_gsm8k_has_it_is_read(tmp_path):
    """Guards against CRLF, a byte-order mark, LaTeX, thousands separators and empty lines."""
    file = tmp_path / "gsm8k.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(LINES + [""]).encode() + b"\r\n")
    found = {p.question: p.answer for part in ("train", "heldout") for p in math_task.load(part, path=str(file))}
    assert found == {f"{q} {i}": value for i, (q, _, value) in itertools.product(range(4), QUESTIONS)}


@pytest.mark.parametrize("line", [
    '{"question": "Q"}', '{"question": "Q", "answer": "#### \\\\frac{3}{4}"}', "{", "[]",
    '{"question": 3, "answer": "3"}',
    '{"question": "Q", "answer": 3}', '{"question": " ", "answer": "3"}', '{"question": "Q", "answer": "#### 3 or 4"}'])
def test_a_broken_line_is_named(line, tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text("\n".join([*LINES[:4], line, *LINES[4:]]))
    with pytest.raises(ValueError, match=r"gsm8k.jsonl, line 5: expected \{\"question\""):
        math_task.load("train", path=str(tmp_path / "gsm8k.jsonl"))


def test_prompts():
    problem = Problem("How {many}?", Fraction(3))
    assert math_task.prompt(problem, chat=False) == "How {many}?\n<think>"
    chat = math_task.prompt(problem, chat=True)
    assert "user\nHow {many}? Show your work" in chat and chat.endswith("<think>")
    assert math_task.show(problem) == "How {many}? -> 3"


def test_what_is_within_reach_after_each_token():
    spans = spans_of([GIVEN, "3", "\n", "5", " 2", " 2", ""])
    assert latin_task.within_reach(GIVEN + "3\n5 2 2", spans, PUZZLE).tolist() == [True] * 4 + [False] * 3


# -------------------------------------------------------------------------------------------------- both in training


WITHOUT_CALCULATIONS = {"first_error", "reward_decomposition", "causal_ablation", "regrade_ablation",
                        "process_reward", "ppo_process"}


@pytest.mark.parametrize("name, refused", [("latin", WITHOUT_CALCULATIONS), ("math", set())])
def test_every_credit_function_that_finds_what_it_needs_gives_credit(name, refused):
    """Guards against Countdown in a credit function, and one that is refused where nothing lacks."""
    s = Settings(task=name, answers=4, max_new_tokens=20)
    policy = load_policy(s, needs=(*HEADS, "reference"))
    batch = rollout(policy, policy.task.load("train", 2), s, step=1)
    batch.advantage = compare(batch, "rloo")
    assert refused == {method for method in MITIGATIONS if lacking(required(method, {}), policy.task)}
    for method in MITIGATIONS.keys() - refused:
        credit = MITIGATIONS[method](batch)
        assert credit.shape == batch.mask.shape and credit.isfinite().all(), method
    for method in refused:
        with pytest.raises(ValueError, match=f"--mitigation {method} needs .*, which the task {name} doesn't have"):
            load_policy(Settings(task=name, mitigation=method), needs=required(method, {}))
