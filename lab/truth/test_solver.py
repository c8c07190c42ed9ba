"""The solver's columns against responses labelled by hand. (tests/test_arithmetic.py tests its verdicts.)"""
import itertools

import torch

from countdown_task import Puzzle
from lab.truth import solver
from lab.truth.measure import describe
from tests.fixtures import make_written

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
