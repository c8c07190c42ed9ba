"""The Countdown task: make the target from the numbers, using each exactly once.

A task is a file like this one, chosen by `train.py --task` (a name, here or in tasks/, or a path).
Every task has these functions:

    load(part, count, path)   the puzzles of a split, made here or from a file; each has an `id`
    check(puzzle)             ValueError, in one sentence, for a puzzle that can't be used
    prompt(puzzle, chat)      the text that the model continues (pieces, messages: docs/extend.md)
    grade(response, puzzle)   {"answer", "format"} of a response; PARTS: their weights in the reward
    roles(response, spans)    what each token is, filler, reasoning (digits, operators) or structure
                              (a tag), and whether it is in the graded answer: see tasks/text.py
    show(puzzle)              the puzzle in a few characters, for samples.txt and the pictures

Others are optional (docs/extend.md): calculations, reachable and sentence_starts, for some credit
functions; KNOWN and demonstrate, for models/warm_start.py; `key(puzzle)`, what a model could
memorize of it, if not the id; `reply`, for several turns.

How this task differs from that of TinyZero and GRPO-Zero, from which it comes:
1. An answer is computed with exact fractions, from a syntax tree in which only + - * / are allowed.
   Nothing is eval'd.
2. A hash decides where a puzzle belongs, so no puzzle is trained on and held out. A tenth of all
   sets of numbers is kept apart, for a stricter test: `new_numbers`. Of the other puzzles a tenth
   is held out; training may see their numbers with another target. (GRPO-Zero tests on the last
   rows of Countdown-Tasks-3to4, which lists many puzzles twice, in another order of numbers.)
3. What a token is (a part of a tag, of a calculation or of prose) is found by character offsets in
   the decoded text. A tag may be split over several tokens, or merged with its neighbours, and is
   still recognised.
4. An answer may be in a chat model's notation, `$4 \\times [5 − 3]$`, with any white space inside
   and a dot at its end. (As in both, it may have a sign, `-2 + 5`. As in GRPO-Zero, one that ends
   in `= 8` or writes 4 as `4.0` is wrong.)

Try it:  python countdown_task.py 3 7 8 --target 29
"""
import argparse
import ast
import functools
import itertools
import operator
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plumbing.terminal import one_sentence
from tasks.arithmetic import (CalculationSpan, can_make, check_calculations, derivations,
                              expression, find_calculations, reachability)
from tasks.data import draw_distinct, read_rows
from tasks.text import (SIGN, SIGNS, fingerprint, format_reward, graded_answer, with_slashes,
                        without_latex)
# These are functions of this task, too, as some credit functions and models/warm_start.py ask.
from tasks.searches import KNOWN, demonstrate  # noqa: F401, I001
from tasks.text import roles, sentence_starts  # noqa: F401


# ------------------------------------------------------------------------------------------ puzzles

class Puzzle(NamedTuple):
    """A puzzle: make `target` from `numbers`, each exactly once, with + - * / and parentheses."""

    numbers: tuple[int, ...]
    target: int

    @property
    def id(self) -> str:
        """A puzzle's identity, `3,4,5=8`: the same for every order of the numbers."""
        return f"{','.join(map(str, sorted(self.numbers)))}={self.target}"


def load(part: str, count: int | None = None, path: str = "") -> list[Puzzle]:
    """At most `count` puzzles of a part: `train`, `heldout`, `new_numbers` (see split), or `all` of
    a file. They have three numbers from 1 to 20, or are those of a file.

    Without a count: 4,096, or all that the file has. ValueError where it has none.
    """
    if not path:
        return generate_puzzles(4096 if count is None else count, part)
    rows = read_rows(Path(path), {"nums": [3, 7, 8], "target": 29}, read_puzzle)
    distinct = {puzzle.id: puzzle for puzzle in rows}  # Countdown-Tasks-3to4 has many twice
    # In the order of a hash, so that the first ones are a fair sample, however rows are ordered.
    by_hash = [distinct[name] for name in sorted(distinct, key=fingerprint)]
    chosen = [puzzle for puzzle in by_hash if part in ("all", split(puzzle))]
    if not chosen:
        name = "held-out" if part == "heldout" else part
        raise ValueError(f"{path} has no {name} puzzle among its {len(distinct)}: "
                         "it needs more rows")
    return chosen[:count]


def check(puzzle: Puzzle) -> None:
    """ValueError for a puzzle without a solution, or with too many numbers to search for one."""
    if len(puzzle.numbers) > 6:
        raise ValueError(f"{list(puzzle.numbers)} has too many numbers; at most 6 are supported")
    if not can_make(puzzle.numbers, puzzle.target):
        raise ValueError(f"{list(puzzle.numbers)} can't make {puzzle.target}; remove that row")


def show(puzzle: Puzzle) -> str:
    """A puzzle in a few characters: `[3, 4, 5] -> 8`."""
    return f"{list(puzzle.numbers)} -> {puzzle.target}"


@functools.cache
def targets(numbers: tuple[int, ...], max_target: int) -> tuple[int, ...]:
    """The targets from 1 to max_target that the sorted numbers make, without using fractions."""
    results = {result for result, _ in derivations(numbers, whole=True)}
    return tuple(sorted(result for result in results if 1 <= result <= max_target))


def split(puzzle: Puzzle) -> str:
    """`new_numbers` for a tenth of all number sets, with every target; else `heldout` for a tenth,
    else `train`."""
    numbers = puzzle.id.partition("=")[0]
    if fingerprint(numbers) % 10 == 0:
        return "new_numbers"
    return "heldout" if fingerprint(puzzle.id) % 10 == 0 else "train"


def generate_puzzles(
    size: int, part: str, seed: int = 0, count: int = 3,
    low: int = 1, high: int = 20, max_target: int = 100
) -> list[Puzzle]:
    """`size` distinct solvable puzzles of one split, numbers in random order, or a ValueError."""
    rng = np.random.default_rng([seed, size])

    def draw() -> Puzzle | None:
        numbers = tuple(int(n) for n in rng.integers(low, high + 1, count))
        within_reach = targets(tuple(sorted(numbers)), max_target)
        puzzle = Puzzle(numbers, int(rng.choice(within_reach))) if within_reach else None
        return puzzle if puzzle and split(puzzle) == part else None

    return draw_distinct(size, draw, f"{part} puzzles with {count} numbers from {low} to {high} "
                                     f"and targets up to {max_target}")


def read_puzzle(nums: object, target: object) -> Puzzle:
    """The puzzle of a row; ValueError where the fields are no whole numbers."""
    is_list = isinstance(nums, list) and len(nums) > 0
    if not is_list or not all(type(n) is int and n >= 0 for n in [*nums, target]):
        raise ValueError("nums must be a list of whole numbers from 0 on, and target such a number")
    return Puzzle(tuple(nums), target)


# --------------------------------------------------------------------------------------- the prompt

PLAIN = ("Using the numbers {numbers}, create an equation that equals {target}.\n"
         "Let me solve this step by step.\n<think>")
# The instruction of TinyZero and GRPO-Zero, word for word, so that chat models can be compared.
SYSTEM = ("You are a helpful assistant. You first think about the reasoning process in your mind "
          "and then provide the user with the answer.")
USER = ("Using the numbers {numbers}, create an equation that equals {target}. You can use basic "
        "arithmetic operations (+, -, *, /) and each number can only be used once. Show your work "
        "in <think> </think> tags. And return the final answer in <answer> </answer> tags, for "
        "example <answer> (1 + 2) / 3 </answer>.")
CHAT = (f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>")


def prompt(puzzle: Puzzle, chat: bool) -> str:
    """The prompt, which ends in `<think>`: ChatML for a chat model, short and plain for others."""
    return (CHAT if chat else PLAIN).format(numbers=list(puzzle.numbers), target=puzzle.target)


# --------------------------------------------------------------------------------------- the reward

MAX_LENGTH, MAX_DEPTH = 256, 32  # of an expression: characters, nested parentheses
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.UAdd: operator.pos, ast.USub: operator.neg}  # the signs

QUOTES = " $`"  # characters that a chat model puts around an expression
PARTS = {"answer": 1.0, "format": 0.1}  # the reward: the sum of weight * part, see --reward_weights


def grade(response: str, puzzle: Puzzle) -> dict[str, float]:
    """{'answer': 0 or 1, 'format': 0..1} of a response, which begins inside <think>.

    format, by `format_reward` of tasks/text.py: 1 for exactly `...</think>\\n<answer>...</answer>`;
    else 0.1 for a closed think, plus 0.5 for a closed answer; 0 where there is a second <answer>.
    answer: 1 if the expression in the last `<answer>` uses every number exactly once and equals the
    target.
    """
    answer = float(is_correct(graded_answer(response), puzzle))
    return {"answer": answer, "format": format_reward(response)}


def is_correct(text: str, puzzle: Puzzle) -> bool:
    """Whether an expression, cleaned by `without_notation`, uses every number exactly once and
    equals the target."""
    if len(text) > MAX_LENGTH:  # `without_notation` takes quadratic time
        return False
    text = without_notation(text)
    used = sorted(map(int, re.findall(r"[0-9]+", text)))
    return expression_value(text) == puzzle.target and used == sorted(puzzle.numbers)


def without_notation(text: str) -> str:
    r"""An expression without a chat model's notation: `$4 \times [5 − 3]$` becomes `4 * (5 - 3)`.

    Numbers, + - * / and parentheses stay. `**` around the whole is Markdown, and dropped.
    """
    text = " ".join(without_latex(text).split())
    text = SIGN.sub(lambda sign: SIGNS.get(sign[0], sign[0]), text)
    text = with_slashes(text, form="(({})/({}))")  # \\frac{1}{2} becomes ((1)/(2))
    text = text.lstrip(QUOTES).rstrip(QUOTES + ".")
    if text.startswith("**") and text.endswith("**"):
        text = text[2:-2].lstrip(QUOTES).rstrip(QUOTES + ".")
    return text.translate(str.maketrans("[]{}", "()()"))


def expression_value(text: str) -> Fraction | None:
    """The exact value of an expression of whole numbers, + - * / and parentheses; else None.

    No leading zeros, at most 256 characters and 32 nested parentheses: checked before Python's
    parser sees the text, so that nothing a model writes can be too long or too deep for it.
    """
    if (len(text) > MAX_LENGTH or not re.fullmatch(r"[0-9+\-*/() ]+", text)
            or re.search(r"\b0[0-9]", text)):
        return None
    opened = itertools.accumulate({"(": 1, ")": -1}.get(c, 0) for c in text)  # after each c
    if max(opened) > MAX_DEPTH:
        return None
    try:
        return tree_value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


def tree_value(node: ast.expr) -> Fraction:
    """The value of a syntax tree. Whatever is not listed here, such as `**`, `//`, `~1` or `2(3)`,
    is a ValueError."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](tree_value(left), tree_value(right))
        case ast.UnaryOp(sign, operand) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](tree_value(operand))
    raise ValueError("only + - * / with whole numbers are allowed")


# ----------------------------------------------------------------- the calculations of a response


def calculations(response: str, puzzle: Puzzle) -> list[tuple[CalculationSpan, bool]]:
    """Where each `a operator b = result` is, and whether it is true and a and b were available."""
    spans = find_calculations(response)
    return list(zip(spans, check_calculations(response, spans, puzzle.numbers)))


def reachable(response: str, puzzle: Puzzle) -> np.ndarray:
    """Whether the target can still be reached, (S, 5) bool: of each of S calculations `a + b = c`
    before it, after its a, after its operator, after its b and after its result."""
    return reachability(response, find_calculations(response), puzzle.numbers, puzzle.target)


@one_sentence()
def main() -> None:
    """Print a puzzle's prompt, its split, and every solution."""
    parser = argparse.ArgumentParser(description="Solve a Countdown puzzle by brute force.")
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--target", type=int, required=True)
    args = parser.parse_args()
    if len(args.numbers) > 5:
        parser.exit(1, "error: more than 5 numbers have too many solutions to print\n")
    puzzle = Puzzle(tuple(args.numbers), args.target)
    print(f"{prompt(puzzle, chat=False)}\n\nsplit: {split(puzzle)}")
    found = {expression(puzzle.numbers, steps)
             for value, steps in derivations(puzzle.numbers) if value == args.target}
    print("\n".join(sorted(found)) or "no solution")


if __name__ == "__main__":
    main()
