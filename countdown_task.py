"""The Countdown task: make the target from the numbers, using each exactly once.

This file holds the puzzles, the prompt, the exact reward, and what each token of a response is. It differs from
TinyZero and GRPO-Zero, from which the task comes, in three ways:
1. An answer is computed with exact fractions, from a syntax tree in which only + - * / are allowed. Nothing is eval'd.
2. A hash of the sorted numbers and the target decides to which of three splits a puzzle belongs: train; heldout, whose
   numbers may occur in training with another target; new_numbers, whose numbers do not. (GRPO-Zero tests on the last
   rows of Countdown-Tasks-3to4, which lists many puzzles twice, with the numbers in another order.)
3. What a token is (a part of a tag, of a calculation or of prose) is found by character offsets in the decoded text. A
   tag may be split over several tokens, or merged with its neighbours, and is still recognised.

Try it:  python countdown_task.py 3 7 8 --target 29
"""
import argparse
import ast
import codecs
import functools
import hashlib
import itertools
import json
import operator
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from plumbing.files import read_rows


# ------------------------------------------------------------------------------------------------- puzzles

class Puzzle(NamedTuple):
    """A puzzle: make `target` from `numbers`, each used exactly once, with + - * / and parentheses."""

    numbers: tuple[int, ...]
    target: int


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


def solutions(puzzle: Puzzle, whole: bool = False) -> list[tuple[Calculation, ...]]:
    """All derivations that reach the target."""
    return [derivation for result, derivation in derivations(puzzle.numbers, whole) if result == puzzle.target]


def is_solvable(puzzle: Puzzle) -> bool:
    """Whether some expression reaches the target. Whole numbers come first: they are fast and usually enough."""
    return any(r == puzzle.target for whole in (True, False) for r, _ in derivations(puzzle.numbers, whole))


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


@functools.cache
def reachable(numbers: tuple[int, ...], max_target: int) -> tuple[int, ...]:
    """The targets from 1 to max_target that can be reached from the sorted numbers with whole numbers alone."""
    return tuple(sorted({r for r, _ in derivations(numbers, whole=True) if 1 <= r <= max_target}))


def universe(count: int = 3, low: int = 1, high: int = 20, max_target: int = 100) -> list[Puzzle]:
    """Every puzzle of `count` sorted numbers from low to high whose target can be reached with whole numbers alone."""
    number_sets = itertools.combinations_with_replacement(range(low, high + 1), count)
    return [Puzzle(numbers, target) for numbers in number_sets for target in reachable(numbers, max_target)]


def puzzle_key(puzzle: Puzzle) -> str:
    """A puzzle's identity, `3,4,5=8`: the same for every order of the numbers."""
    return f"{','.join(map(str, sorted(puzzle.numbers)))}={puzzle.target}"


def fingerprint(text: str) -> int:
    """A 64-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split(puzzle: Puzzle) -> str:
    """`new_numbers` for a tenth of all number sets, with every target; else `heldout` for a tenth, else `train`."""
    key = puzzle_key(puzzle)
    if fingerprint(key.partition("=")[0]) % 10 == 0:
        return "new_numbers"
    return "heldout" if fingerprint(key) % 10 == 0 else "train"


def generate_puzzles(size: int, part: str, seed: int = 0, count: int = 3, low: int = 1, high: int = 20,
                     max_target: int = 100) -> list[Puzzle]:
    """`size` distinct solvable puzzles of one split, numbers in random order; ValueError if there are not that many."""
    rng = np.random.default_rng([seed, size])  # seeded by size too, so that a small set is no prefix of a larger one
    found, misses = {}, 0  # draws in a row without a new puzzle
    while len(found) < size:
        misses += 1
        numbers = tuple(int(n) for n in rng.integers(low, high + 1, count))
        targets = reachable(tuple(sorted(numbers)), max_target)
        puzzle = Puzzle(numbers, int(rng.choice(targets))) if targets else None
        if puzzle and split(puzzle) == part and puzzle_key(puzzle) not in found:
            found[puzzle_key(puzzle)], misses = puzzle, 0
        if misses == 20_000:
            raise ValueError(f"found only {len(found)} of {size} {part} puzzles with {count} numbers from {low} to "
                             f"{high} and targets up to {max_target}: ask for fewer or widen the ranges")
    return list(found.values())


def read_puzzles(path: str | Path) -> list[Puzzle]:
    """Read puzzles, fields `nums` and `target`, from .jsonl or .parquet; ValueError if a row is not a puzzle."""
    puzzles = []
    for line, row in enumerate(read_rows(Path(path), ["nums", "target"]), 1):
        try:
            fields = json.loads(row) if isinstance(row, str) else row
            numbers, target = tuple(fields["nums"]), fields["target"]
            if not numbers or not all(type(n) is int and n >= 0 for n in (*numbers, target)):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            expected = '{"nums": [whole numbers], "target": whole number}'
            raise ValueError(f"{path}, line {line}: expected {expected}") from None
        puzzles.append(Puzzle(numbers, target))
    if not puzzles:
        raise ValueError(f"{path} holds no puzzle")
    return puzzles


# ------------------------------------------------------------------------------------------------- the reward

MAX_LENGTH, MAX_DEPTH = 256, 32  # of an expression: characters, nested parentheses
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
ANSWER, END_ANSWER, END_THINK = "<answer>", "</answer>", "</think>"
TAGS = ("<think>", END_THINK, ANSWER, END_ANSWER)
FULL_FORMAT = re.compile(r"(?s)(.*)</think>\n<answer>(.*)</answer>")


def reward(response: str, numbers: Iterable[int], target: int) -> dict[str, float]:
    """{'reward': 0.1 * format + answer, 'format': 0..1, 'answer': 0 or 1} of a response, which begins inside <think>.

    format: 1 for `...</think>\\n<answer>...</answer>` and nothing after it. Otherwise 0.1 for a closed think plus 0.5
    for a closed answer, or 0 if there is more than one `<answer>`.
    answer: 1 if the expression in the last `<answer>` uses every number exactly once and equals the target.
    """
    layout = format_reward(response)
    answer = float(is_correct(graded_answer(response), numbers, target))
    return {"reward": 0.1 * layout + answer, "format": layout, "answer": answer}


def format_reward(response: str) -> float:
    """How much of the requested layout a response has, from 0 to 1; see `reward`."""
    if response.count(ANSWER) > 1:
        return 0.0
    match = FULL_FORMAT.fullmatch(response)
    if match and not any(tag in part for tag in TAGS for part in match.groups()):
        return 1.0
    closed_answer = END_ANSWER in response.partition(ANSWER)[2]
    return 0.1 * (END_THINK in response) + 0.5 * closed_answer


def coin_toss(seed: int, step: int) -> Callable[..., dict[str, float]]:
    """A stand-in for `reward` that tosses a fair coin for each response it is given: a control, nothing may climb.

    The format is graded as usual, but it is no part of the reward.
    """
    coin = np.random.default_rng([seed, step, 2**32 - 1])  # draw_uniforms of grpo.py has a puzzle's index there

    def toss(response: str, numbers: Iterable[int], target: int) -> dict[str, float]:
        answer = float(coin.integers(2))
        return {"reward": answer, "format": format_reward(response), "answer": answer}

    return toss


def graded_answer(response: str) -> str:
    """The text of the last `<answer>`; empty if there is none or it is not closed."""
    _, opened, rest = response.rpartition(ANSWER)
    inside, closed, _ = rest.partition(END_ANSWER)
    return inside if opened and closed else ""


def is_correct(text: str, numbers: Iterable[int], target: int) -> bool:
    """Whether an expression uses every number exactly once and equals the target."""
    try:
        return expression_value(text) == target and sorted(map(int, re.findall(r"[0-9]+", text))) == sorted(numbers)
    except ValueError:
        return False


def expression_value(text: str) -> Fraction:
    """The exact value of an expression of whole numbers, + - * / and parentheses; ValueError for any other text.

    No sign before a number, no leading zeros, at most 256 characters and 32 nested parentheses. The limits are checked
    before Python's parser sees the text, so that nothing a model writes can be too long or too deep for it.
    """
    if len(text) > MAX_LENGTH or not re.fullmatch(r"[0-9+\-*/() ]+", text) or re.search(r"\b0[0-9]", text):
        raise ValueError("not an arithmetic expression")
    if max(itertools.accumulate({"(": 1, ")": -1}.get(c, 0) for c in text)) > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} nested parentheses")
    try:
        return tree_value(ast.parse(text.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except SyntaxError:
        raise ValueError("not an arithmetic expression") from None


def tree_value(node: ast.expr) -> Fraction:
    """The value of a syntax tree. Whatever is not listed here, such as `**`, `//`, `-1` or `2(3)`, is a ValueError."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](tree_value(left), tree_value(right))
    raise ValueError("only + - * / with whole numbers are allowed")


# -------------------------------------------------------------------------------------- what each token is

# Credit functions treat digits, prose and tags differently, or look at sentences and calculations. Tokens do not
# respect these borders: `)</` ends an expression and begins a tag. So everything is found in the characters of the
# decoded text, and each token takes the role of one deciding character. L is the number of tokens of a response.

FILLER, REASONING, STRUCTURE = 0, 1, 2
ROLES = ("filler", "reasoning", "structure")  # the original work's words: reasoning is arithmetic, filler is prose
SENTENCE_END = re.compile(r"[.!?](?=[\s<])|\n(?!<)")  # not the dot in 2.5, not the line break before a tag
CALCULATION = re.compile(r"(?<![\d.])(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(-?\d+)(?!\.?\d)", re.ASCII)  # no part of a decimal


def annotate(text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Role (L,) int8 of each token, and whether it is in the answer (L,) bool, that is, from the last `<answer>` on.

    structure: inside a tag, or the end token. reasoning: a digit or one of + - * / = ( ). filler: everything else.

    >>> annotate("8!</think>", [(0, 1), (1, 4), (4, 10), (10, 10)])  # tokens 8, !</, think>, end
    (array([1, 0, 2, 2], dtype=int8), array([False, False, False, False]))
    """
    characters = [REASONING if c in "0123456789+-*/=()" else FILLER for c in text]
    roles = np.array(characters + [STRUCTURE], np.int8)  # one more: the end token lies behind the last character
    for tag in re.finditer("|".join(TAGS), text):
        roles[tag.start() : tag.end()] = STRUCTURE
    deciding, answer_start = anchors(text, spans), text.rfind(ANSWER)
    return roles[deciding], (deciding >= answer_start) & (answer_start >= 0)


def anchors(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """The index (L,) of each token's deciding character: its first one that is not white space, or just its first."""
    return np.array([next((i for i in range(*span) if not text[i].isspace()), span[0]) for span in spans], int)


def sentence_starts(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens (L,) bool begin a new sentence: after each sentence end, the next token that starts there or later.

    >>> sentence_starts("No! 1 + 2 = 3", [(0, 3), (3, 5), (5, 7), (7, 9), (9, 11), (11, 13)])
    array([False,  True, False, False, False, False])
    """
    starts = [start for start, _ in spans]
    ends = [m.end() for m in SENTENCE_END.finditer(text) if m.end() < len(text)]
    first = np.searchsorted(starts, ends)  # per sentence end, the first token at or after it
    return np.isin(np.arange(len(spans)), first)


class CalculationSpan(NamedTuple):
    """Character spans (start, stop) of one written calculation `a operator b = result`."""

    a: tuple[int, int]
    operator: tuple[int, int]
    b: tuple[int, int]
    result: tuple[int, int]


def find_calculations(text: str) -> list[CalculationSpan]:
    """The written calculations with exactly two numbers; the tail of a longer one, `4 - 3 - 2 = 1`, does not count.

    >>> find_calculations(" 5 - 3 = 2")
    [CalculationSpan(a=(1, 2), operator=(3, 4), b=(5, 6), result=(9, 10))]
    """
    before = tuple("+-*/)")  # a tuple: at the start of the text the character before is "", which is in every string
    matches = (m for m in CALCULATION.finditer(text) if text[: m.start()].rstrip()[-1:] not in before)
    return [CalculationSpan(*(m.span(i) for i in (1, 2, 3, 4))) for m in matches]


def check_calculations(text: str, spans: list[CalculationSpan], numbers: Iterable[int]) -> list[bool]:
    """Whether each written calculation is true and uses only values that are available.

    >>> text = "5 - 3 = 2, 4 * 2 = 8. 5 + 5 = 10"
    >>> check_calculations(text, find_calculations(text), (3, 4, 5))
    [True, True, False]
    """
    return [is_true(c) and any(Counter([c.a, c.b]) <= pool for pool, _ in attempts)
            for c, attempts in follow(text, spans, numbers)]


def follow(text: str, spans: list[CalculationSpan],
           numbers: Iterable[int]) -> Iterator[tuple[Calculation, list[tuple]]]:
    """Yield each written calculation with the attempts it may belong to: (values available before it, right so far).

    `right so far` is True until the attempt's first error; `reachability` uses it.

    With the numbers 1, 4, 4 and 5, what may `4 + 4 = 8` in "5 - 1 = 4. 4 + 4 = 8" use? The values 4, 4 and the 4 just
    made, if it continues the attempt, or all four numbers, if the writer started over. Both attempts are kept until a
    later calculation fits only one of them. A calculation replaces two values by the result it claims, right or wrong,
    so an error counts once. When one value is left the attempt is finished, and the next calculation starts a new one.
    """
    new = (Counter(numbers), True)
    current, position = [new], 0  # the attempts after the previous calculation, and where that stops in the text
    for span in spans:
        a, b, result = (int(text[slice(*part)]) for part in (span.a, span.b, span.result))
        calculation, operands = Calculation(a, text[slice(*span.operator)], b, result), Counter([a, b])
        possible = [(pool, right) if pool.total() > 1 else new for pool, right in current]  # new: it was finished
        if SENTENCE_END.search(text, position, span.a[0]) and new not in possible:
            possible.append(new)  # a new sentence may start over
        # Those that have both operands; if none has, the calculation is an error in each of them.
        attempts = [(pool, right) for pool, right in possible if operands <= pool] or possible
        yield calculation, attempts
        current = [(pool - operands + Counter([result]), right and operands <= pool and is_true(calculation))
                   for pool, right in attempts]  # `-` drops what is not there
        position = span.result[1]


def is_true(c: Calculation) -> bool:
    """Whether a calculation's result is right."""
    return calculate(c.a, c.operator, c.b) == c.result


def calculate(a: int | Fraction, sign: str, b: int | Fraction) -> int | Fraction | None:
    """The exact value of a sign b; None for a division by zero."""
    if sign == "/":
        return Fraction(a) / b if b else None
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


# ---------------------------------------------------------------------------------------- the exact solver

# Can the target still be reached? Unlike a value from rollouts, the verdict is exact and depends on no policy. It
# judges the attempt being written. Every number must be used, so an attempt is dead after a wrong result or a value
# that was not available; a new attempt starts afresh.


@functools.cache
def results(values: tuple) -> frozenset:
    """Everything that the values make when each is used once, by + - * / and exact fractions."""
    return frozenset(result for result, _ in derivations(values))


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
    for c, attempts in follow(text, spans, numbers):
        alive = [tuple(sorted(pool.elements())) for pool, all_right in attempts if all_right]
        possible = {calculation for values in alive for calculation in next_calculations(values, target)}
        written = c.a, c.operator, c.b
        parts = [any(calculation[:n] == written[:n] for calculation in possible) for n in (1, 2, 3)]
        rows.append([any(target in results(values) for values in alive), *parts, parts[2] and is_true(c)])
    return np.array(rows, bool).reshape(-1, 5)


# --------------------------------------------------------------------------------- between text and tokens

PLAIN = ("Using the numbers {numbers}, create an equation that equals {target}.\n"
         "Let me solve this step by step.\n<think>")
# The instruction of TinyZero and GRPO-Zero, word for word, so that results with a chat model can be compared.
SYSTEM = ("You are a helpful assistant. You first think about the reasoning process in your mind and then provide the "
          "user with the answer.")
USER = ("Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
        "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the "
        "final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.")
CHAT = (f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>")


class Codec:
    """A byte-level tokenizer.json: turns puzzles into prompt tokens, and response tokens into text with spans."""

    def __init__(self, folder: str | Path):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        self.size = self.tokenizer.get_vocab_size()  # a model's vocabulary may be padded beyond the real tokens
        self.chat = self.tokenizer.token_to_id("<|im_start|>") is not None
        candidates = (self.tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
        self.end_tokens = [token for token in candidates if token is not None]
        if not self.end_tokens:
            raise ValueError(f"{path} has neither <|im_end|> nor <|endoftext|>: no response could end")
        self.bytes = self.token_bytes()

    def prompt(self, puzzle: Puzzle) -> list[int]:
        """The prompt's tokens, which end in `<think>`: ChatML for a chat model, short and plain for any other."""
        template = CHAT if self.chat else PLAIN
        text = template.format(numbers=list(puzzle.numbers), target=puzzle.target)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the tokens, and the span (start, stop) of each in it; an end token's is empty, after the text.

        Tokens that share a character both have it in their span. Bytes that are not UTF-8 become U+FFFD. This is done
        by hand because the tokenizers library gives offsets for text it encodes, but not for tokens it decodes.
        """
        decoder, text, spans = codecs.getincrementaldecoder("utf-8")("replace"), "", []
        for token in tokens:
            letters, characters = self.bytes[token], []  # for each byte, the index of its character
            if letters.isascii() and not decoder.getstate()[0]:  # as nearly always; twice as fast as byte by byte
                characters = range(len(text), len(text) + len(letters))
                text, letters = text + letters.decode(), b""
            for byte in letters:
                text += decoder.decode(bytes([byte]))
                incomplete = decoder.getstate()[0] != b""  # then the character is yet to be appended to the text
                characters.append(len(text) if incomplete else len(text) - 1)
            spans.append((characters[0], characters[-1] + 1) if characters else None)
        text += decoder.decode(b"", final=True)
        return text, [span or (len(text), len(text)) for span in spans]

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token. An end token has none: it is not part of the text.

        Byte-level BPE writes a printable byte as the Unicode character of that number, any other as one from 256 up.
        """
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        added = self.tokenizer.get_added_tokens_decoder()
        names = [self.tokenizer.id_to_token(i) or "" for i in range(self.size)]
        try:
            table = [name.encode() if i in added else bytes(letters[c] for c in name) for i, name in enumerate(names)]
        except KeyError as error:
            raise ValueError(f"the tokenizer is not a byte-level one: a token contains {error}") from None
        for token in self.end_tokens:
            table[token] = b""
        return table


def main() -> None:
    """Print a puzzle's prompt, its split, and every solution."""
    parser = argparse.ArgumentParser(description="Solve a Countdown puzzle by brute force.")
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--target", type=int, required=True)
    args = parser.parse_args()
    if len(args.numbers) > 5:
        parser.exit(1, "error: more than 5 numbers have too many solutions to print\n")
    puzzle = Puzzle(tuple(args.numbers), args.target)
    print(f"{PLAIN.format(numbers=list(puzzle.numbers), target=puzzle.target)}\n\nsplit: {split(puzzle)}")
    print("\n".join(sorted({expression(puzzle.numbers, solution) for solution in solutions(puzzle)})) or "no solution")


if __name__ == "__main__":
    main()
