"""Arithmetic: every result that numbers can make, and the calculations that a text contains.

countdown_task.py makes its puzzles with the first part. Credit functions, such as `first_error`, use the other
two: which calculations a response contains, which of them are right, and whether the target can still be reached.
"""
import functools
import itertools
import re
from collections import Counter
from fractions import Fraction
from typing import Iterable, Iterator, NamedTuple

import numpy as np

from tasks.text import INVISIBLE, SENTENCE_END, SIGN, SIGNS

# ---------------------------------------------------------------------------------------------- brute force


class Calculation(NamedTuple):
    """One calculation a operator b = result."""

    a: int | Fraction
    operator: str
    b: int | Fraction
    result: int | Fraction


def combine(x: int | Fraction, y: int | Fraction, whole: bool) -> Iterator[Calculation]:
    """Yield every calculation with two values; with `whole`, only those whose result is an integer and not negative."""
    yield Calculation(x, "+", y, x + y)
    yield Calculation(x, "*", y, x * y)
    for a, b in ((x, y), (y, x)):
        if not whole or a >= b:
            yield Calculation(a, "-", b, a - b)
        if b != 0 and (not whole or a % b == 0):
            yield Calculation(a, "/", b, a // b if whole else Fraction(a) / b)


def derivations(values: tuple, whole: bool = False) -> Iterator[tuple[int | Fraction, tuple[Calculation, ...]]]:
    """Brute force: yield (result, calculations) for every way to combine all the values, two at a time."""
    if len(values) == 1:
        yield values[0], ()
    for i, j in itertools.combinations(range(len(values)), 2):
        rest = values[:i] + values[i + 1 : j] + values[j + 1 :]
        for first in combine(values[i], values[j], whole):
            for result, later in derivations(rest + (first.result,), whole):
                yield result, (first,) + later


@functools.cache
def results(values: tuple) -> frozenset:
    """Everything that the values make when each is used once, by + - * / and exact fractions."""
    return frozenset(result for result, _ in derivations(values))


def can_make(values: tuple, target: int | Fraction) -> bool:
    """Whether the values, each used once, make the target. The last calculation joins two parts of them: each result of
    the smaller part asks for one of the other. So six values take a second; every way to combine them, minutes."""
    if len(values) <= 3:
        return target in results(values)
    for n in range(1, len(values) // 2 + 1):
        for chosen in itertools.combinations(range(len(values)), n):
            rest = tuple(value for i, value in enumerate(values) if i not in chosen)
            for a in results(tuple(values[i] for i in chosen)):
                wanted = {target - a, target + a, a - target} | ({target * a, Fraction(target) / a} if a else set())
                wanted |= {Fraction(a) / target} if a and target else set()
                if any(can_make(rest, b) for b in wanted):
                    return True
    return False


def calculate(a: int | Fraction, sign: str, b: int | Fraction) -> int | Fraction | None:
    """The exact value of a sign b; None for a division by zero."""
    if sign == "/":
        return Fraction(a) / b if b else None
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def is_true(c: Calculation) -> bool:
    """Whether a calculation's result is right."""
    return calculate(c.a, c.operator, c.b) == c.result


def expression(numbers: tuple[int, ...], calculations: Iterable[Calculation]) -> str:
    """Write calculations as one expression: 5 - 3 = 2, 4 * 2 = 8 becomes `4 * (5 - 3)`."""
    pool = [(n, str(n)) for n in numbers]  # each value with the text that computes it
    for a, sign, b, result in calculations:
        texts = []
        for value in (a, b):
            entry = next(e for e in pool if e[0] == value)
            pool.remove(entry)
            texts.append(f"({entry[1]})" if " " in entry[1] else entry[1])
        pool.append((result, f"{texts[0]} {sign} {texts[1]}"))
    return pool[-1][1]


# --------------------------------------------------------------------------------------- calculations in a text

NUMBER = r"\d{1,1000}"  # Python refuses to convert numbers of more than 4,300 digits
GAP = rf"(?:[\s{INVISIBLE}]|\\[,;:!])*"  # also LaTeX's
CALCULATION = re.compile(rf"(?<![\d.])(?<!\d[{INVISIBLE}])(?!(?<=\d,)\d{{3}}(?!\d))({NUMBER}){GAP}({SIGN.pattern}){GAP}({NUMBER}){GAP}={GAP}"
                         rf"([-\u2212\u2013]?{NUMBER})(?!\.?\d|,\d{{3}}(?!\d)|/\d)", re.ASCII)  # no part of 1,200, 2.5 or 8/3
ATTEMPTS = 32  # unfinished attempts of a text that a calculation may belong to
# Stands before the tail of a longer one. What follows a sign is not seen here.
BEFORE = r"[-+*/×·⋅∗÷\u2212\u2013]|\\(?:times|cdot|ast|div)|\\\*|(?<=\d)x|(?<=[\d)]\s)x"
LONGER = re.compile(rf"[\w)](?:[ \t{INVISIBLE}]|\\[,;:!])*(?:{BEFORE}){GAP}\Z|[\d)]\*\*\Z|[-+\u2212\u2013)][{INVISIBLE}]*\Z")


class CalculationSpan(NamedTuple):
    """Character spans (start, stop) of one written calculation `a operator b = result`."""

    a: tuple[int, int]
    operator: tuple[int, int]
    b: tuple[int, int]
    result: tuple[int, int]


def find_calculations(text: str) -> list[CalculationSpan]:
    """The written calculations with exactly two numbers, without signs of their own; the tail of a longer one, `4 - 3 -
    2 = 1`, does not count, and an item of a list, `- 5 - 3 = 2`, does.

    >>> find_calculations(" 5 - 3 = 2")
    [CalculationSpan(a=(1, 2), operator=(3, 4), b=(5, 6), result=(9, 10))]
    """
    found, start = [], 0
    for m in CALCULATION.finditer(text):
        if not LONGER.search(text, start, m.start()):
            found.append(CalculationSpan(*(m.span(i) for i in (1, 2, 3, 4))))
        start = m.end() - 1  # the next one is told from a tail from the last digit on, so that no text is read twice
    return found


def read_calculation(text: str, span: CalculationSpan) -> Calculation:
    """The calculation that stands at a span."""
    a, b, result = (int(text[slice(*part)].replace("\u2212", "-").replace("\u2013", "-")) for part in (span.a, span.b, span.result))
    sign = text[slice(*span.operator)]
    return Calculation(a, SIGNS.get(sign, sign), b, result)


def check_calculations(text: str, spans: list[CalculationSpan], numbers: Iterable[int]) -> list[bool]:
    """Whether each written calculation is true and uses only values that are available.

    >>> text = "5 - 3 = 2, 4 * 2 = 8. 5 + 5 = 10"
    >>> check_calculations(text, find_calculations(text), (3, 4, 5))
    [True, True, False]
    """
    return [is_true(c) and available for c, available, _ in with_attempts(text, spans, numbers)]


def with_attempts(text: str, spans: list[CalculationSpan],
                  numbers: Iterable[int]) -> Iterator[tuple[Calculation, bool, list[tuple]]]:
    """Yield each written calculation, whether a and b were available, and the attempts that it may belong to: (values
    available before it, right so far). The next calculation changes these.

    `right so far` is True until the attempt's first error; `reachability` uses it.

    With the numbers 1, 4, 4 and 5, what may `4 + 4 = 8` in "5 - 1 = 4. 4 + 4 = 8" use? The values 4, 4 and the 4 just
    made, if it continues the attempt, or all four numbers, if the writer started over. Both attempts are kept until a
    later calculation fits only one of them. A calculation replaces two values by the result it claims, right or wrong,
    so an error counts once. When one value is left the attempt is finished, and the next calculation starts a new one.
    Only the latest ATTEMPTS are kept, so that the time is linear in the text, whatever a model writes.
    """
    numbers = Counter(numbers)
    current, position = [(numbers.copy(), True)], 0  # the attempts after the previous calculation; where it stops
    for span in spans:
        calculation = read_calculation(text, span)
        a, _, b, result = calculation
        possible = [(pool, right) for pool, right in current if len(pool) > 1 or pool.total() > 1]  # unfinished
        over = len(possible) < len(current) or SENTENCE_END.search(text, position, span.a[0])  # may start over
        if over and (numbers, True) not in possible:
            possible = [*possible[1 - ATTEMPTS :], (numbers.copy(), True)]
        # Those that have both operands; if none has, the calculation is an error in each of them.
        fitting = [(pool, right) for pool, right in possible if pool[a] > (a == b) and pool[b]]
        yield calculation, bool(fitting), fitting or possible
        current = [(pool, right and bool(fitting) and is_true(calculation)) for pool, right in fitting or possible]
        for pool, _ in current:  # in place: values that are left over may be many
            for value in (a, b):
                pool[value] -= 1
                if pool[value] <= 0:  # a Counter also says -1
                    del pool[value]
            pool[result] += 1
        position = span.result[1]


# ---------------------------------------------------------------------------------------- the exact solver

# Can the target still be reached? Unlike a value from rollouts, the verdict is exact and depends on no policy. It
# judges the attempt being written. Every number must be used, so an attempt is dead after a wrong result or a value
# that was not available; a new attempt starts afresh.


@functools.cache
def next_calculations(values: tuple, target: int) -> frozenset:
    """All (a, sign, b) with which a solution can continue from the values at hand."""
    found = set()
    for (i, a), (j, b) in itertools.permutations(enumerate(values), 2):
        rest = [value for k, value in enumerate(values) if k not in (i, j)]
        for sign in "+-*/":
            made = calculate(a, sign, b)
            if made is not None and target in results(tuple(sorted((*rest, made)))):
                found.add((a, sign, b))
    return frozenset(found)


def reachability(text: str, spans: list[CalculationSpan], numbers: tuple[int, ...], target: int) -> np.ndarray:
    """Whether the target is within reach before a calculation, and after its a, operator, b and result (S, 5) bool.

    Where the text leaves open which attempt continues, it is enough that one of them can reach the target.

    >>> reachability("5 - 3 = 2, 4 + 2 = 6", find_calculations("5 - 3 = 2, 4 + 2 = 6"), (3, 4, 5), 8).tolist()
    [[True, True, True, True, True], [True, True, False, False, False]]
    """
    rows = []
    for c, _, attempts in with_attempts(text, spans, numbers):
        alive = [tuple(sorted(pool.elements())) for pool, all_right in attempts if all_right]
        possible = {calculation for values in alive for calculation in next_calculations(values, target)}
        written = c.a, c.operator, c.b
        parts = [any(calculation[:n] == written[:n] for calculation in possible) for n in (1, 2, 3)]
        rows.append([any(target in results(values) for values in alive), *parts, parts[2] and is_true(c)])
    return np.array(rows, bool).reshape(-1, 5)
