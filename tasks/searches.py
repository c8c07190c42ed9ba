"""Written searches for a Countdown solution: what models/warm_start.py shows to a model that knows nothing.

     Maybe 5 - 3 = 2, 4 + 2 = 6. That is not 8. How about 5 - 3 = 2, 4 * 2 = 8. That works!</think>
    <answer>4 * (5 - 3)</answer>

By construction, opening words are filler: uncertain, but without consequence. Operands, operators and giving up are
decisions. Results, verdicts, tags and the copied answer follow from the tokens before them.
"""
import functools
from typing import Any

import numpy as np

from tasks.arithmetic import Calculation, combine, derivations, expression

KNOWN = (0.5, 0.15)  # probability that an attempt is a known solution: in the first part of the warm start, in the last
OPENINGS = ("Maybe", "How about", "Let me try", "What about", "Perhaps", "I could try", "Let us see", "Next")
ATTEMPTS = 6  # at most
GIVE_UP = 0.2  # probability of stopping after a failed attempt, and answering with it
LARGEST = 100  # largest result in a random attempt: fewer facts of arithmetic to learn, and each is seen more often


def demonstrate(puzzle: Any, rng: np.random.Generator, known: float) -> str:
    """A response: attempts, each a known solution with probability `known`, until a hit or giving up."""
    text = ""
    for _ in range(ATTEMPTS):
        if rng.random() < known and (options := known_solutions(tuple(sorted(puzzle.numbers)), puzzle.target)):
            calculations = options[rng.integers(len(options))]
        else:
            calculations = random_attempt(rng, puzzle.numbers)
        text += f" {OPENINGS[rng.integers(len(OPENINGS))]} "
        text += ", ".join(f"{a} {operator} {b} = {result}" for a, operator, b, result in calculations)
        if calculations[-1].result == puzzle.target:
            text += ". That works!"
            break
        text += f". That is not {puzzle.target}."
        if rng.random() < GIVE_UP:
            break
    return f"{text}</think>\n<answer>{expression(puzzle.numbers, calculations)}</answer>"


def random_attempt(rng: np.random.Generator, numbers: tuple[int, ...]) -> list[Calculation]:
    """Combine two numbers at random until one is left, with whole results up to LARGEST where there are any."""
    values, calculations = list(numbers), []
    while len(values) > 1:
        i, j = rng.choice(len(values), 2, replace=False)
        every = [*combine(values[i], values[j], whole=True)]
        options = [s for s in every if 0 < s.result <= LARGEST] or every
        calculations.append(options[rng.integers(len(options))])
        values = [v for k, v in enumerate(values) if k not in (i, j)] + [calculations[-1].result]
    return calculations


@functools.lru_cache(maxsize=None)
def known_solutions(numbers: tuple[int, ...], target: int) -> list[tuple[Calculation, ...]]:
    """All whole-number solutions of a puzzle, or only those with results up to LARGEST if there are any."""
    found = [calculations for result, calculations in derivations(numbers, whole=True) if result == target]
    return [solution for solution in found if max(c.result for c in solution) <= LARGEST] or found
