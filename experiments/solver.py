"""The exact solver: can the target still be reached, asked before and after every part of a written calculation?

In `5 - 3 = 2` the operands, the operator and the result each decide something. For each of them the solver says whether
some solution continues that way. Where the verdict turns from yes to no, that token lost the target. Unlike a value
from rollouts, the verdict is exact and depends on no policy.

It judges the attempt being written; a new attempt starts afresh. An attempt is dead once a result is wrong or a value
was not at hand, because every number must be used.

Run it:  python -m experiments.ground_truth        writes the verdicts as columns reachable_before and reachable
"""
import functools
import itertools

import numpy as np

from countdown_task import (SENTENCE_END, STRUCTURE, CalculationSpan, anchors, calculate, derivations,
                            find_calculations, follow, is_true)

KINDS = ("operand", "operator", "result", "= and commas", "opening", "verdict", "tag", "answer", "unfinished")
DECISIONS = KINDS[:2]


@functools.cache
def results(values: tuple) -> frozenset:
    """Everything that the values make when each is used once, by + - * / and exact fractions."""
    return frozenset(result for result, _ in derivations(values))


@functools.cache
def next_calculations(values: tuple, target: int) -> frozenset:
    """All (a, operator, b) with which a solution can continue from the values at hand."""
    found = set()
    for (i, a), (j, b) in itertools.permutations(enumerate(values), 2):
        rest = [value for k, value in enumerate(values) if k not in (i, j)]
        for operator in "+-*/":
            made = calculate(a, operator, b)
            if made is not None and target in results(tuple(sorted((*rest, made)))):
                found.add((a, operator, b))
    return frozenset(found)


def reachability(text: str, spans: list[CalculationSpan], numbers: tuple[int, ...], target: int) -> np.ndarray:
    """Whether the target is within reach before a calculation, and after its a, operator, b and result (S, 5) bool.

    Where the text leaves open which attempt continues, it is enough that one of them can reach the target.

    >>> reachability("5 - 3 = 2, 4 + 2 = 6", find_calculations("5 - 3 = 2, 4 + 2 = 6"), (3, 4, 5), 8).tolist()
    [[True, True, True, True, True], [True, True, False, False, False]]
    """
    rows = []
    for c, attempts in follow(text, spans, numbers):
        alive = [tuple(sorted(pool.elements())) for pool, all_right in attempts if all_right]
        possible = {calculation for values in alive for calculation in next_calculations(values, target)}
        written = c.a, c.operator, c.b
        parts = [any(calculation[:n] == written[:n] for calculation in possible) for n in (1, 2, 3)]
        rows.append([any(target in results(values) for values in alive), *parts, parts[2] and is_true(c)])
    return np.array(rows, bool).reshape(-1, 5)


def solver_columns(text: str, spans: list[tuple[int, int]], numbers: tuple[int, ...],
                   target: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether the target is within reach before and after each token of a response (L,) int8.

    1 yes, 0 no, -1 where the token is no operand, operator or result. A number of several tokens is judged as a whole,
    at its first token.
    """
    written, where = find_calculations(text), anchors(text, spans)
    before, after = np.full((2, len(where)), -1, np.int8)
    for verdicts, parts in zip(reachability(text, written, numbers, target), written):
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
