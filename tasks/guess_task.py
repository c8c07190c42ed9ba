"""Guess the number, a task in several turns: the policy names one, and is told whether the secret is higher or lower.

    Guess a number from 1 to 15. You have 4 guesses.
    7
    higher
    11
    lower
    9

A turn is a number in decimal digits and nothing else; any other turn ends the game, which is lost then. The prompt
never shows the secret, so a model can memorize nothing: it can only learn to guess well. Halving what is left always
finds one of 15 numbers in 4 guesses.

`reply` makes this a task in several turns, see docs/extend.md: it says what the environment answers to a turn.

Run it:  python train.py --task guess
"""
import itertools
import re
from typing import NamedTuple

import numpy as np

from tasks.text import digit_roles as roles  # noqa: F401

N, GUESSES = 15, 4
PARTS = {"answer": 1.0, "format": 0.1}  # of the reward, with their weights
KNOWN = (0.6, 0.05)  # probability that a guess halves what is left, for the first and the last part of the warm start
FORGOTTEN = 0.7  # probability that a demonstrated guess which does not halve ignores the replies, too


class Puzzle(NamedTuple):
    """A game: the secret is one of 1 to n. serial tells games with the same secret apart."""

    n: int
    secret: int
    serial: int

    @property
    def id(self) -> str:
        """A game's identity, such as `15-7-3`."""
        return f"{self.n}-{self.secret}-{self.serial}"


def load(part: str, count: int | None = None, path: str = "") -> list[Puzzle]:
    """`count` games, 1,500 without one: every secret equally often, each round of n games with a serial of its own.

    Every tenth round is held out.
    """
    if path:
        raise ValueError("the task guess makes its own games: leave out --data and --eval_data")
    rounds = (serial for serial in itertools.count() if part == "all" or (serial % 10 == 0) == (part == "heldout"))
    games = (Puzzle(N, secret, serial) for serial in rounds for secret in range(1, N + 1))
    return list(itertools.islice(games, 1500 if count is None else count))


def check(puzzle: Puzzle) -> None:
    """Every game that `load` makes can be played."""


def show(puzzle: Puzzle) -> str:
    """A game in a few characters, with its secret."""
    return f"1 to {puzzle.n} -> {puzzle.secret}"


def prompt(puzzle: Puzzle, chat: bool) -> str:
    """The rules, without the secret."""
    rules = f"Guess a number from 1 to {puzzle.n}. You have {GUESSES} guesses."
    if chat:
        rules += " After each you are told whether the number is higher or lower. Write a number and nothing else."
    return f"<|im_start|>user\n{rules}<|im_end|>\n<|im_start|>assistant\n" if chat else f"{rules}\n"


def number(turn: str, puzzle: Puzzle) -> int | None:
    """The number that a turn names, None where it is no turn of the game."""
    return int(turn) if re.fullmatch("[1-9][0-9]{,8}", turn) and int(turn) <= puzzle.n else None


def reply(turns: list[str], puzzle: Puzzle, chat: bool) -> str | None:
    """`higher` or `lower` after a guess; None where it is right, is the last one, or is no number of the game."""
    guess = number(turns[-1], puzzle)
    if guess in (None, puzzle.secret) or len(turns) == GUESSES:
        return None
    said = "higher" if puzzle.secret > guess else "lower"
    return f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n" if chat else f"\n{said}\n"


def grade(text: str, puzzle: Puzzle, turns: list[str]) -> dict[str, float]:
    """answer: 1 if the number was found; format: 1 if every turn was a number from 1 to n; guesses: how many."""
    guesses = [number(turn, puzzle) for turn in turns]
    answer, layout = float(puzzle.secret in guesses), float(None not in guesses)
    return {"answer": answer, "format": layout, "guesses": len(turns)}


def sentence_starts(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens (L,) bool begin a turn but the first: those after an end token, for `vineppo`."""
    ended = np.array([start == stop for start, stop in spans])
    return np.append(False, ended[:-1])


def demonstrate(puzzle: Puzzle, rng: np.random.Generator, known: float) -> list[str]:
    """The turns of a game. With probability `known` a guess halves what is left; else it is any of these numbers, or,
    where it ignores what was said, of all.
    """
    low, high, turns = 1, puzzle.n, []
    while not turns or reply(turns, puzzle, False) is not None:
        first, last = (1, puzzle.n) if rng.random() < FORGOTTEN else (low, high)
        guess = (low + high) // 2 if rng.random() < known else int(rng.integers(first, last + 1))
        low, high = (max(low, guess + 1), high) if puzzle.secret > guess else (low, min(high, guess - 1))
        turns.append(str(guess))
    return turns
