"""The solver's verdicts against brute force over all expressions, its columns against responses labelled by hand."""
import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from countdown_task import Puzzle
from lab.truth import solver
from lab.truth.measure import describe
from tasks.arithmetic import find_calculations, next_calculations, reachability, results
from tests.fixtures import make_written
from tests.plain import expressions


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=4).map(sorted).map(tuple), st.data())
@settings(max_examples=40, deadline=None)
def test_next_calculations_are_those_of_brute_force(values, data):
    """Guards against a value that is used twice, swapped operands of - and /, and results that are missed."""
    made = {value for _, value in expressions(values)}
    assert results(values) == made
    target = data.draw(st.sampled_from(sorted(v for v in made if v.denominator == 1)) | st.integers(-5, 60))
    solutions = [text for text, value in expressions(values) if value == target]
    found = {step for text in solutions for step in re.findall(r"\((-?\d+) ([-+*/]) (-?\d+)\)", text)}
    assert next_calculations(values, int(target)) == {(int(a), operator, int(b)) for a, operator, b in found}


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
    found = reachability(text, find_calculations(text), numbers, target)
    assert found.tolist() == expected
    assert found.shape == (len(expected), 5)


KINDS = {"n": "operand", "o": "operator", "r": "result", "=": "= and commas", "w": "opening", "v": "verdict",
         "t": "tag", "a": "answer", "u": "unfinished"}
WRITTEN = [  # for (3, 4, 12) -> 5, which is 12 - 4 - 3 in any order: pieces, kinds, reachable before and after each
    (" Maybe| |1|2| -| 4| =| 8|,", "wwnnon=r=", "..1.11.1.", "..1.11.1."),
    (" 8| +| 3| =| 1|1|.", "non=rr=", "110.0..", "100.0.."),
    (" That| is| not| 5|.", "vvvvv", ".....", "....."),
    (" How| 12| -| 3| =| 6|.", "wnon=r=", ".111.1.", ".111.0."),
]
RESPONSES = [
    [*WRITTEN, (" Good|</think>|\n|<ans|wer>|1|2| -| 3|</answer>|", "vtvttaaaatt", "." * 11, "." * 11)],
    [*WRITTEN, (" Let| 3| +", "uuu", "...", "...")],  # cut off
    [*WRITTEN, ("\n", "v", ".", "."), (" So| 3|*|4|=|12| then", "wnon=r=", ".110.0.", ".100.0.")],
    [(" Maybe| 4|*|2|=|8|.", "wnon=r=", ".111.1.", ".111.1.")],  # for (2, 4) -> 8
]


def test_columns_of_responses_labelled_by_hand():
    """Guards against labels on another token or response, on each piece of a number, or on words, and kinds of a
    neighbour."""
    pieces = [[piece for row in rows for piece in row[0].split("|")] for rows in RESPONSES]
    kinds, before, after = ("".join(column) for column in list(zip(*itertools.chain(*RESPONSES)))[1:])
    batch = make_written(pieces, [0.5] * 4, [0, 0, 0, 1], success=torch.tensor([1.0, 0, 0, 1]),
                         puzzles=[Puzzle((3, 4, 12), 5), Puzzle((2, 4), 8)])
    truth = describe(batch, {"seed": 3})
    for name, expected in (("reachable_before", before), ("reachable", after)):
        assert truth[name].tolist() == [-1 if verdict == "." else int(verdict) for verdict in expected]
    assert [solver.KINDS[k] for k in truth["kind"]] == [KINDS[letter] for letter in kinds]
    assert truth["piece"].tolist() == [*itertools.chain(*pieces)]
    assert truth["success"].tolist() == [float(i in (0, 3)) for i, row in enumerate(pieces) for _ in row]
    assert truth["prompts"].tolist() == ["[3, 4, 12] -> 5"] * 3 + ["[2, 4] -> 8"]
