"""Latin squares: fill the open cells of a 5 x 5 square, so that each row and each column holds 1 to 5.

    1 _ _ 4 5        The response is the whole square, row by row: 1 2 3 4 5, then 2 3 4 5 1, ...
    _ 3 4 _ _        It is written in one pass: after one wrong digit the square is lost.

A task to copy for one of your own, see docs/extend.md. There are 161,280 squares, and everything is found by looking
through all of them. A tenth, by a hash of the completed square, is held out, whichever cells are given.

Run it:  python train.py --task latin
"""
import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tasks.data import draw_distinct, read_text
from tasks.text import digit_roles as roles, sentence_starts, split  # noqa: F401

INSTRUCTION = "Each row and column must hold 1 to 5. Answer with the whole square, row by row, and nothing else."
PARTS = {"answer": 1.0, "format": 0.1}  # of the reward, with their weights
MORE = 2  # cells given beyond those that make the solution unique
KNOWN = (1.0, 0.6)  # probability that a digit is copied from the solution, in the warm start's first and last part


class Puzzle(NamedTuple):
    """A square with one solution: `id` is its 25 cells in reading order, `_` where one is open, such as `1__45...`."""

    id: str


@functools.cache
def squares() -> np.ndarray:
    """All Latin squares (161280, 25), int8, row by row."""
    rows = np.array(list(itertools.permutations(range(1, 6))), np.int8)  # (120, 5)
    found = rows[:, None]  # (n, rows so far, 5)
    for _ in range(3):
        clash = np.any([(found[:, r, None] == rows).any(2) for r in range(found.shape[1])], axis=0)  # (n, 120)
        old, new = np.nonzero(~clash)
        found = np.concatenate((found[old], rows[new][:, None]), 1)
    found = np.concatenate((found, 15 - found.sum(1, keepdims=True, dtype=np.int8)), 1).reshape(-1, 25)
    return np.asfortranarray(found)  # cell by cell, as they are looked at


@functools.cache
def solution(cells: str) -> np.ndarray:
    """The one square (25,) that has these cells; ValueError where there is none or several."""
    if len(cells) != 25 or not set(cells) <= set("12345_"):
        raise ValueError(f"{cells[:30]!r} is not a square of 25 cells, each of them 1 to 5 or _")
    found = np.arange(len(squares()))
    for cell, digit in zip(squares().T, cells):  # (161280,) each
        found = found if digit == "_" else found[cell[found] == int(digit)]
    if len(found) != 1:
        raise ValueError(f"{cells} has {len(found) or 'no'} solutions, but it must have one")
    return squares()[found[0]]


def key(puzzle: Puzzle) -> str:
    """What a model could memorize, whichever cells are given: the 25 digits of the completed square."""
    return "".join(digits_of(puzzle))


def load(part: str, count: int | None = None, path: str = "") -> list[Puzzle]:
    """At most `count` puzzles of `train` or `heldout`: made here, 2,048 without a count, or the lines of a file. `all`:
    those of both, and of a file in its order."""
    if path:
        found = dict.fromkeys(Puzzle(line.strip()) for line in read_text(Path(path)).split("\n") if line.strip())
        return [puzzle for puzzle in found if part in ("all", split(key(puzzle)))][:count]
    rng = np.random.default_rng(0)

    def draw() -> Puzzle | None:
        square = squares()[rng.integers(len(squares()))]
        return Puzzle(hide(square, rng)) if part in ("all", split("".join(map(str, square)))) else None
    return draw_distinct(2048 if count is None else count, draw, f"{part} squares")


def hide(square: np.ndarray, rng: np.random.Generator) -> str:
    """The cells of a square (25,), given in random order until no other square has them, and MORE; the rest open."""
    cells, left, order = ["_"] * 25, np.arange(len(squares())), iter(rng.permutation(25))
    while len(left) > 1:
        i = next(order)
        cells[i], left = str(square[i]), left[squares().T[i][left] == square[i]]
    for i in itertools.islice(order, MORE):
        cells[i] = str(square[i])
    return "".join(cells)


def check(puzzle: Puzzle) -> None:
    """ValueError for a puzzle that has no solution, or several."""
    solution(puzzle.id)


def show(puzzle: Puzzle) -> str:
    """A puzzle in a few characters: its rows."""
    return " ".join(puzzle.id[i : i + 5] for i in range(0, 25, 5))


def prompt(puzzle: Puzzle, chat: bool) -> str:
    """The rows of the square; for a chat model, after an instruction."""
    square = "\n".join(" ".join(row) for row in show(puzzle).split())
    return f"<|im_start|>user\n{INSTRUCTION}\n{square}<|im_end|>\n<|im_start|>assistant\n" if chat else f"{square}\n\n"


def digits_of(puzzle: Puzzle) -> list[str]:
    """The 25 digits of the solution."""
    return [str(digit) for digit in solution(puzzle.id)]


def grade(response: str, puzzle: Puzzle) -> dict[str, float]:
    """answer: 1 if the digits are those of the solution; format: 1 if there are 25 of them, and nothing else."""
    digits, wanted = response.split(), digits_of(puzzle)
    layout, answer = float(len(digits) == len(wanted) and set(digits) <= set("12345")), float(digits == wanted)
    return {"answer": answer, "format": layout}


def within_reach(response: str, spans: list[tuple[int, int]], puzzle: Puzzle) -> np.ndarray:
    """Whether the answer can still become right after each token (L,) bool: an exact solver, for lab/truth."""
    wanted, reach, digits = digits_of(puzzle), np.zeros(len(spans), bool), []
    for i, (start, stop) in enumerate(spans):
        if not response[start:stop].isspace():  # which adds no digit
            digits = response[:stop].split()
        reach[i] = digits == (wanted if start == stop else wanted[: len(digits)])  # the end token adds nothing
        if start < stop and not reach[i]:  # what is wrong stays so, and a model may write on and on
            break
    return reach


def demonstrate(puzzle: Puzzle, rng: np.random.Generator, known: float) -> str:
    """A response for the warm start: an open cell gets the solution's digit with probability `known`, else any digit
    without a clash, if there is one. (In about 87% of cells that is the solution's, too.)"""
    square, right = [int(cell) if cell != "_" else 0 for cell in puzzle.id], solution(puzzle.id)
    for i in (i for i in range(25) if not square[i]):
        near = square[i // 5 * 5 : i // 5 * 5 + 5] + square[i % 5 :: 5]  # its row and its column
        free = [digit for digit in range(1, 6) if digit not in near] or [right[i]]
        square[i] = int(right[i] if rng.random() < known else rng.choice(free))
    return "\n".join(" ".join(map(str, square[r : r + 5])) for r in range(0, 25, 5))
