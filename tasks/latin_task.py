"""Latin squares: fill the open cells of a 5 x 5 square, so that each row and each column holds 1 to 5.

    1 _ _ 4 5        The response is the open cells in reading order, a line for each row: ` 2 3`, ...
    _ 3 4 _ _        It is written in one pass, with no room for a second try: one wrong digit and the square is lost.
    ...

A small task to copy for one of your own: countdown_task.py says what each function is for, docs/extend.md in which
order to write them. There are 161,280 squares, so everything is found by looking through all of them. A tenth of them,
by a hash of the completed square, is held out: training never asks for such a square, whichever cells are given.

Run it:  python train.py --task latin
"""
import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plumbing.files import read_rows
from tasks.text import FILLER, REASONING, STRUCTURE, anchors, fingerprint, sentence_starts  # noqa: F401

INSTRUCTION = ("Fill the open cells _ so that each row and each column holds the digits 1 to 5. Answer with the digits "
               "of the open cells in reading order, and nothing else.")


class Puzzle(NamedTuple):
    """A square of 25 cells in reading order, `_` where one is open, such as `1__45...`. It has one solution."""

    cells: str

    @property
    def id(self) -> str:
        """A puzzle's identity."""
        return self.cells


@functools.cache
def squares() -> np.ndarray:
    """All Latin squares (161280, 25), int8, row by row."""
    rows = np.array(list(itertools.permutations(range(1, 6))), np.int8)  # (120, 5)
    found = rows[:, None]  # (n, rows so far, 5)
    for _ in range(3):
        clash = np.any([(found[:, r, None] == rows).any(2) for r in range(found.shape[1])], axis=0)  # (n, 120)
        old, new = np.nonzero(~clash)
        found = np.concatenate((found[old], rows[new][:, None]), 1)
    return np.concatenate((found, 15 - found.sum(1, keepdims=True, dtype=np.int8)), 1).reshape(-1, 25)


@functools.cache
def solution(puzzle: Puzzle) -> np.ndarray:
    """The one square (25,) that has the puzzle's cells; ValueError where there is none, or more than one."""
    found = squares()
    for cell, digit in enumerate(puzzle.cells):
        found = found if digit == "_" else found[found[:, cell] == int(digit)]
    if len(found) != 1:
        raise ValueError(f"{puzzle.cells} has {len(found) or 'no'} solutions, but it must have one")
    return found[0]


def is_heldout(square: np.ndarray) -> bool:
    """Whether a completed square (25,) belongs to the tenth that training never asks for."""
    return fingerprint("".join(map(str, square))) % 10 == 0


def load(part: str, count: int | None = None, path: str = "") -> list[Puzzle]:
    """At most `count` puzzles of a split, `train` or `heldout`: made here, or those of a file, one on each line."""
    if path:
        found = [Puzzle(line.strip()) for line in read_rows(Path(path), []) if line.strip()]
        for line, puzzle in enumerate(found, 1):
            if len(puzzle.cells) != 25 or not set(puzzle.cells) <= set("12345_"):
                raise ValueError(f"{path}, puzzle {line}: expected 25 characters, the digits 1 to 5 or _")
        return [puzzle for puzzle in found if is_heldout(solution(puzzle)) == (part == "heldout")][:count]
    rng, found = np.random.default_rng(0), {}
    while len(found) < (2048 if count is None else count):
        square = squares()[rng.integers(len(squares()))]
        if is_heldout(square) == (part == "heldout"):
            puzzle = Puzzle(hide(square, rng))
            found[puzzle.id] = puzzle
    return list(found.values())


def hide(square: np.ndarray, rng: np.random.Generator) -> str:
    """The cells of a square (25,), given one by one in random order until no other square has them; the rest open."""
    cells, left = ["_"] * 25, squares()
    for cell in rng.permutation(25):
        cells[cell], left = str(square[cell]), left[left[:, cell] == square[cell]]
        if len(left) == 1:
            return "".join(cells)


def check(puzzle: Puzzle) -> None:
    """ValueError for a puzzle that has no solution, or several."""
    solution(puzzle)


def show(puzzle: Puzzle) -> str:
    """A puzzle in a few characters: its rows."""
    return " ".join(puzzle.cells[i : i + 5] for i in range(0, 25, 5))


def prompt(puzzle: Puzzle, chat: bool) -> str:
    """The rows of the square; for a chat model, after an instruction."""
    square = "\n".join(" ".join(row) for row in show(puzzle).split())
    return f"<|im_start|>user\n{INSTRUCTION}\n{square}<|im_end|>\n<|im_start|>assistant\n" if chat else f"{square}\n\n"


def grade(response: str, puzzle: Puzzle) -> dict[str, float]:
    """answer: 1 if the digits are those of the solution; format: 1 if there are as many as open cells, and no more."""
    digits, wanted = response.split(), [str(d) for d, c in zip(solution(puzzle), puzzle.cells) if c == "_"]
    layout = float(len(digits) == len(wanted) and set(digits) <= set("12345"))
    answer = float(digits == wanted)
    return {"reward": 0.1 * layout + answer, "answer": answer, "format": layout}


def roles(response: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """reasoning: a digit; structure: the end token; filler: everything else. All of it is the answer."""
    kinds = np.array([REASONING if c in "12345" else FILLER for c in response] + [STRUCTURE], np.int8)
    return kinds[anchors(response, spans)], np.ones(len(spans), bool)


KNOWN = (1.0, 0.7)


def demonstrate(puzzle: Puzzle, rng: np.random.Generator, known: float) -> str:
    """A response for the warm start: each cell is the solution's with probability `known`, else one without a clash."""
    square, right, rows = [int(c) if c != "_" else 0 for c in puzzle.cells], solution(puzzle), [[] for _ in range(5)]
    for i in (i for i in range(25) if not square[i]):
        row, column = square[i // 5 * 5 : i // 5 * 5 + 5], square[i % 5 :: 5]
        free = [digit for digit in range(1, 6) if digit not in row + column] or [int(right[i])]
        square[i] = int(right[i]) if rng.random() < known else int(rng.choice(free))
        rows[i // 5].append(str(square[i]))
    return "\n".join(" ".join(row) for row in rows if row)
