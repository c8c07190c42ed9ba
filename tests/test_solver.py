"""The solver's verdicts against brute force over all expressions, and its columns against responses labelled by hand.

Run it:  python -m pytest tests/test_solver.py
"""

import functools
import itertools
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from conftest import make_written
from hypothesis import given, settings
from hypothesis import strategies as st

from countdown_task import find_calculations
from experiments import solver

# ------------------------------------------------------------------------------------------------- brute force


@functools.cache
def expressions(values):
    """Every expression that uses each of the values once, as (text, value)."""
    if len(values) == 1:
        return [(str(values[0]), Fraction(values[0]))]
    found = []
    for chosen in range(1, 2 ** len(values) - 1):
        left, right = (tuple(v for i, v in enumerate(values) if (chosen >> i & 1) == side) for side in (1, 0))
        for (a, x), (b, y) in itertools.product(expressions(left), expressions(right)):
            made = {"+": x + y, "-": x - y, "*": x * y} | ({"/": x / y} if y else {})
            found += [(f"({a} {operator} {b})", value) for operator, value in made.items()]
    return found


@functools.cache
def beginnings(values, target):
    """What a solution can begin with: () if there is one, (a,), (a, operator) and (a, operator, b)."""
    steps = [
        (int(a), operator, int(b))
        for text, value in expressions(values)
        if value == target
        for a, operator, b in re.findall(r"\((-?\d+) ([-+*/]) (-?\d+)\)", text)
    ]
    solvable = any(value == target for _, value in expressions(values))
    return {step[:n] for step in steps for n in (1, 2, 3)} | ({()} if solvable else set())


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=4).map(sorted).map(tuple), st.data())
@settings(max_examples=40, deadline=None)
def test_next_calculations_are_those_of_brute_force(values, data):
    """Guards against a value that is used twice, swapped operands of - and /, and results that are missed."""
    made = {value for _, value in expressions(values)}
    assert solver.results(values) == made
    target = data.draw(st.sampled_from(sorted(v for v in made if v.denominator == 1)) | st.integers(-5, 60))
    expected = {start for start in beginnings(values, int(target)) if len(start) == 3}
    assert solver.next_calculations(values, int(target)) == expected


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_reachability_is_that_of_brute_force_along_one_attempt(numbers, data):
    """Guards against verdicts that ignore a wrong result, or a value that is not at hand."""
    pool, alive, written, expected = Counter(numbers), True, [], []
    target = data.draw(st.sampled_from(sorted({int(v) for _, v in expressions(tuple(numbers)) if v.denominator == 1})))
    for _ in range(2):
        a, b = (abs(data.draw(st.sampled_from(sorted({*numbers, *pool})))) for _ in "ab")
        operator = data.draw(st.sampled_from("+-*"))
        true = {"+": a + b, "-": a - b, "*": a * b}[operator]
        claimed = true + data.draw(st.sampled_from((0, 0, 0, 1)))
        begun = beginnings(tuple(sorted(pool.elements())), target) if alive else set()
        row = [key in begun for key in ((), (a,), (a, operator), (a, operator, b))]
        alive = alive and claimed == true and Counter([a, b]) <= pool
        pool = pool - Counter([a, b]) + Counter([claimed]) if alive else pool
        expected.append([*row, alive and () in beginnings(tuple(sorted(pool.elements())), target)])
        written.append(f"{a} {operator} {b} = {claimed}")
        if not alive or claimed < 0:  # a negative value can't be written as an operand
            break
    text = ", ".join(written)
    assert solver.reachability(text, find_calculations(text), tuple(numbers), target).tolist() == expected, text


# --------------------------------------------------------------------------------------------- worked examples

ALL, NONE, LOST_BY_OPERATOR = [True] * 5, [False] * 5, [True, True, False, False, False]


@pytest.mark.parametrize(
    "text, numbers, target, expected",
    [
        ("5 - 3 = 3, 4 * 2 = 8", (3, 4, 5), 8, [[True] * 4 + [False], NONE]),  # a wrong result; the rest is dead
        ("7 - 3 = 4", (3, 4, 5), 8, [[True] + [False] * 4]),  # a value that is not at hand
        ("5 + 5 = 10, 10 + 3 = 13", (3, 5, 5), 13, [ALL, ALL]),  # a value that is there twice
        ("5 + 3 = 8. How about 5 - 3 = 2, 4 * 2 = 8", (3, 4, 5), 8, [LOST_BY_OPERATOR, ALL, ALL]),  # a new attempt
        ("5 + 3 = 8, 5 - 3 = 2", (3, 4, 5), 12, [ALL, [True] + [False] * 4]),  # no new attempt: 5 and 3 are used up
        ("5 - 3 = 2. 4 * 2 = 8", (3, 4, 5), 8, [ALL, ALL]),  # an attempt that continues after a sentence
        ("5 + 3 = 8, 8 + 4 = 12, 5 - 3 = 2", (3, 4, 5), 8, [LOST_BY_OPERATOR, NONE, ALL]),  # a finished attempt
        # it is open which attempt continues: {2, 8} makes 16, {2, 4, 8} makes 64
        ("4 / 2 = 2. 2 * 8 = 16", (2, 4, 8), 16, [ALL, ALL]),
        ("4 / 2 = 2. 2 * 8 = 16", (2, 4, 8), 64, [LOST_BY_OPERATOR, ALL]),
        ("1 / 5 = 0", (1, 5, 5, 5), 24, [[True] * 4 + [False]]),  # 5 * (5 - 1 / 5) needs a fraction
        ("1 + 1 = 2", (1, 1), 7, [NONE]),
        (" Maybe it is 5 -", (3, 4, 5), 8, []),
    ],
)
def test_reachability_of_worked_examples(text, numbers, target, expected):
    """Guards against a new attempt without the numbers, or none where one starts."""
    found = solver.reachability(text, find_calculations(text), numbers, target)
    assert found.tolist() == expected
    assert found.shape == (len(expected), 5)


def labelled(kind, pieces, before=-1, after=-1):
    """Rows (piece, kind, reachable before, after) of pieces separated by |, all labelled alike."""
    return [(piece, kind, before, after) for piece in pieces.split("|")]


WRITTEN = [  # for (3, 4, 12) -> 5, which is 12 - 4 - 3 in any order
    *labelled("opening", " Maybe| "),
    ("1", "operand", 1, 1),
    ("2", "operand", -1, -1),
    (" -", "operator", 1, 1),
    (" 4", "operand", 1, 1),
    (" =", "= and commas", -1, -1),
    (" 8", "result", 1, 1),
    (",", "= and commas", -1, -1),
    (" 8", "operand", 1, 1),
    (" +", "operator", 1, 0),
    (" 3", "operand", 0, 0),
    (" =", "= and commas", -1, -1),
    (" 1", "result", 0, 0),
    ("1", "result", -1, -1),
    (".", "= and commas", -1, -1),
    *labelled("verdict", " That| is| not| 5|."),
    *labelled("opening", " How"),
    (" 12", "operand", 1, 1),
    (" -", "operator", 1, 1),
    (" 3", "operand", 1, 1),
    (" =", "= and commas", -1, -1),
    (" 6", "result", 1, 0),
    (".", "= and commas", -1, -1),
]
TAIL = [
    *labelled("verdict", " Good"),
    *labelled("tag", "</think>"),
    *labelled("verdict", "\n"),
    *labelled("tag", "<ans|wer>"),
    *labelled("answer", "1|2| -| 3"),
    *labelled("tag", "</answer>|"),
]
CUT = labelled("unfinished", " Let| 3| +")
HALF = [
    *labelled("verdict", "\n"),
    *labelled("opening", " So"),
    (" 3", "operand", 1, 1),
    ("*", "operator", 1, 0),
    ("4", "operand", 0, 0),
    ("=", "= and commas", -1, -1),
    ("12", "result", 0, 0),
    *labelled("= and commas", " then"),
]


@pytest.mark.parametrize("rows", [WRITTEN + TAIL, WRITTEN + CUT, WRITTEN + HALF])
def test_columns_of_responses_labelled_by_hand(rows):
    """Guards against labels on another token, on each piece of a number, or on words, and kinds of a neighbour."""
    pieces, kinds, before, after = map(list, zip(*rows))
    batch = make_written([pieces], [0.0])
    columns = solver.solver_columns(batch.text[0], batch.spans[0], (3, 4, 12), 5)
    assert [column.tolist() for column in columns] == [before, after]
    assert columns[0].dtype == columns[1].dtype == np.int8
    kind = solver.token_kinds(batch.text[0], batch.spans[0], batch.role[0].numpy(), batch.in_answer[0].numpy())
    assert [solver.KINDS[k] for k in kind] == kinds
