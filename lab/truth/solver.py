"""The exact solver's verdict on each token: can the target still be reached, before it and after it?

In `5 - 3 = 2` the operands, the operator and the result each decide something. For each of them the solver
(`reachability` of tasks/arithmetic.py) says whether some solution continues that way. Where the verdict turns from yes
to no, that token lost the target.

Run it:  python -m lab.truth.measure        writes the verdicts as columns reachable_before and reachable
"""
from types import ModuleType
from typing import Any

import numpy as np

from tasks.arithmetic import find_calculations
from tasks.text import SENTENCE_END, STRUCTURE, anchors

KINDS = ("operand", "operator", "result", "= and commas", "opening", "verdict", "tag", "answer", "unfinished")
DECISIONS = KINDS[:2]


def solver_columns(text: str, spans: list[tuple[int, int]], puzzle: Any,
                   task: ModuleType) -> tuple[np.ndarray, np.ndarray]:
    """Whether success is within reach before and after each token of a response (L,) int8: 1 yes, 0 no, -1 unknown.

    A task says so after each token (`within_reach`) or after each part of a calculation (`reachable`): then all other
    tokens have -1, and a number of several tokens is judged as a whole, at its first token.
    """
    before, after = np.full((2, len(spans)), -1, np.int8)
    if hasattr(task, "within_reach"):
        after[:] = task.within_reach(text, spans, puzzle)
        return np.append(np.int8(1), after[:-1]), after
    if not hasattr(task, "reachable"):
        return before, after
    written, where = find_calculations(text), anchors(text, spans)
    for verdicts, parts in zip(task.reachable(text, puzzle), written):
        for i, (start, end) in enumerate(parts):
            first = np.flatnonzero((where >= start) & (where < end))[:1]  # none where a token covers several parts
            before[first], after[first] = verdicts[i], verdicts[i + 1]
    return before, after


def token_kinds(text: str, spans: list[tuple[int, int]], role: np.ndarray, in_answer: np.ndarray) -> np.ndarray:
    """Index in KINDS of each token (L,): its part in the search.

    opening: the words of a sentence before its first calculation. verdict: a sentence without a calculation.
    unfinished: the last sentence, if it has neither a calculation nor an end.
    """
    where, written = anchors(text, spans), find_calculations(text)
    ends = [m.end() for m in SENTENCE_END.finditer(text)] + [len(text) + 1]
    sentence = np.searchsorted(ends, where, side="right")  # (L,)
    starts = np.array([parts.a[0] for parts in written], int)  # (S,)
    sentence_of_start = np.searchsorted(ends, starts, side="right")  # (S,)
    kinds = np.full(len(where), KINDS.index("= and commas"))
    for i in np.unique(sentence):
        inside, begun = sentence == i, starts[sentence_of_start == i]
        finished = i + 1 < len(ends) or (role[inside] == STRUCTURE).any()
        if len(begun):
            kinds[inside & (where < begun[0])] = KINDS.index("opening")
        else:
            kinds[inside] = KINDS.index("verdict" if finished else "unfinished")
    for parts in written:
        for name, (start, end) in zip(("operand", "operator", "operand", "result"), parts):
            kinds[(where >= start) & (where < end)] = KINDS.index(name)
    kinds[in_answer > 0] = KINDS.index("answer")
    kinds[role == STRUCTURE] = KINDS.index("tag")
    return kinds.astype(np.int8)
