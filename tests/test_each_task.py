"""What every task must do: Countdown, each of tasks/, and one of yours, before there is a model that fits it.

    python -m pytest tests/test_each_task.py --task path/to/my_task.py
"""
import re
import signal
from functools import cache
from time import process_time

import numpy as np
import pytest

from plumbing.chat import prompt_tokens
from plumbing.task_file import check_roles, graded, load_puzzles, load_task

HOSTILE = ("", " ", "\0", "7" * 10**5, "(" * 10**5, "1+" * 50_000, "9**9**9**9**9", "1/0", "\u0664\u200b" * 10**4,
           "<answer>" * 20_000, "</think>\n<answer>" + "(1+2)*" * 20_000, "\\frac{" * 20_000, "3 = 3 = " * 20_000,
           "a\n" * 50_000, "b" * 10**5, "ab " * 30_000, "q" * 60 + "!", "<answer>" + "1,000," * 20_000 + "</answer>", "$\\boxed{" * 10_000)
CONTROL = re.compile(r"<\|im_(?:start|end)\|>")
SECONDS = 10.0  # for a text of 200,000 characters, of processor time: a step reads hundreds of texts
HANGS = 100  # seconds after which a test is ended


@pytest.fixture
def task(task_name):
    return load_task(task_name)


@pytest.fixture(autouse=True)
def ended():
    """Ends a test that hangs, as in a regular expression."""
    def stop(*_):
        raise TimeoutError(f"it took over {HANGS} seconds: does the grader, roles or reply hang on some text?")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@cache
def twelve(name):
    """Training puzzles and held-out ones, twelve each, as train.py takes them: checked, and apart."""
    training, heldout = load_puzzles(load_task(name), 12, "")
    return training[:12] + heldout


@pytest.fixture
def puzzles(task_name):
    return twelve(task_name)


def grade_of(task, turns, puzzle):
    """The checked grade of a response, or of one that consists of several turns."""
    turns = [turns] if isinstance(turns, str) else turns
    return graded(task.grade("".join(turns), puzzle, *[turns] * hasattr(task, "reply")),
                  getattr(task, "PARTS", {"reward": 1.0}))


def demonstrated(task, puzzles, known):
    """Responses to the puzzles, whose decisions are right with probability `known`; none, where the task has no
    `demonstrate`, which a start model needs."""
    rng = np.random.default_rng(0)
    return [task.demonstrate(puzzle, rng, known) for puzzle in puzzles] if hasattr(task, "demonstrate") else []


def test_puzzles_are_always_the_same(task, puzzles):
    """Guards against a resumed run, or a second one with another seed, that trains on other puzzles."""
    for part in ("train", "heldout"):
        first, again = ([puzzle.id for puzzle in task.load(part, 5)] for _ in range(2))
        assert first == again and 0 < len({*first}) == len(first) <= 5
    for puzzle in puzzles:
        task.check(puzzle)
        assert isinstance(task.show(puzzle), str)


def test_prompts_encode(task, puzzles, tokenizer):
    """Guards against a prompt that changes, and one that the tokenizer loses a part of, but for control tokens."""
    for chat in (False, True):
        for puzzle in puzzles:
            found = task.prompt(puzzle, chat)
            assert found == task.prompt(puzzle, chat)
            if not isinstance(found, list):  # messages are for a chat template
                text = tokenizer.decode(prompt_tokens(tokenizer, found))[0]
                assert CONTROL.sub("", text) == CONTROL.sub("", "".join(found))


def test_a_demonstration_is_right(task, puzzles):
    """Which shows, too, that each puzzle can be solved, and that the grader finds it."""
    if not hasattr(task, "demonstrate"):
        pytest.skip("the task has no demonstrate, which a start model needs")
    for puzzle, response in zip(puzzles, demonstrated(task, puzzles, 1.0)):
        assert grade_of(task, response, puzzle)["answer"] == 1, puzzle


def test_grades_are_pure_and_in_range(task, puzzles):
    """Guards against a grade that depends on what was graded before, or on chance."""
    texts = [*demonstrated(task, puzzles, 0.5), *HOSTILE[:3], "7", "(1 + 2) * 3</think>\n<answer>9</answer>"]
    pairs = [(text, puzzle) for text in texts for puzzle in puzzles]
    first = [str(grade_of(task, *pair)) for pair in pairs]  # as text, since a NaN does not equal itself
    again = [str(grade_of(task, *pair)) for pair in pairs[::-1]][::-1]
    for pair, one, other in zip(pairs, first, again):
        assert one == other, f"grade gave two answers to {pair}: it depends on chance, or on what it graded before"


def test_roles_cover_a_response(task, puzzles, tokenizer):
    """Guards against a token without a role, at the borders of tags, of a turn and of the text."""
    for response in [*demonstrated(task, puzzles, 0.5), "7", "<think>7 + 1 = 8</think>\n<answer>8</answer>", "so"]:
        for turn in [response] if isinstance(response, str) else response:
            tokens = tokenizer.encode(turn) + tokenizer.end_tokens[:1]
            text, spans = tokenizer.decode(tokens)
            check_roles(task.roles(text, spans), len(tokens))


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_text_ends_in_time(task, puzzles, text, tokenizer):
    """Guards against a grader that a model can hang: it samples whatever it likes, and is paid for what passes."""
    began = process_time()
    assert grade_of(task, text, puzzles[0])["answer"] == 0
    tokens = tokenizer.encode_text(text[:20_000]) or tokenizer.end_tokens[:1]
    decoded, spans = tokenizer.decode(tokens)
    check_roles(task.roles(decoded, spans), len(tokens))
    for puzzle in [puzzles[0]] * hasattr(task, "reply"):
        task.reply([text], puzzle, False)
    took = process_time() - began
    assert took < SECONDS, f"grade, roles or reply took {took:.0f} seconds for {text[:20]!r} ..."
