"""Countdown: make the target from the numbers, each used once. Problems, prompt, reward, and what each token is.

How it differs from the task of TinyZero and GRPO-Zero, on which it is modelled:
1. The answer is computed with exact fractions by a parser of a few lines: no eval, so no `**`, no `//`.
2. Train and held-out problems are told apart by a hash of sorted numbers and target. (The public 3-to-4 set lists
   many puzzles twice, with the numbers in another order; "the last rows" are no test set.)
3. Roles, sections and steps are found by character offsets in the decoded text. A tag may be several tokens, merged
   with its neighbours, and is still a tag.

Try it:  python countdown_task.py 3 7 8 --target 29
"""
import argparse
import codecs
import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

import numpy as np
from tokenizers import Tokenizer


# ------------------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    """Make `target` from `numbers`, all of them, each once, with + - * / and parentheses."""

    numbers: tuple[int, ...]
    target: int


class Step(NamedTuple):
    """One calculation a operator b = result."""

    a: int | Fraction
    operator: str
    b: int | Fraction
    result: int | Fraction


def combine(x: int | Fraction, y: int | Fraction, whole: bool) -> Iterator[Step]:
    """Every calculation with the two values, in both orders where that matters; whole: no fraction, none below 0."""
    yield Step(x, "+", y, x + y)
    yield Step(x, "*", y, x * y)
    for a, b in ((x, y), (y, x)):
        if not whole or a >= b:
            yield Step(a, "-", b, a - b)
        if b != 0 and (not whole or a % b == 0):
            yield Step(a, "/", b, a // b if whole else Fraction(a) / b)


def derivations(values: tuple, whole: bool = False) -> Iterator[tuple[int | Fraction, tuple[Step, ...]]]:
    """Brute force: yield (result, steps) for every way to combine all the values, two at a time."""
    if len(values) == 1:
        yield values[0], ()
    for i, j in itertools.combinations(range(len(values)), 2):
        rest = values[:i] + values[i + 1 : j] + values[j + 1 :]
        for step in combine(values[i], values[j], whole):
            for result, later in derivations(rest + (step.result,), whole):
                yield result, (step,) + later


def solutions(problem: Problem, whole: bool = False) -> list[tuple[Step, ...]]:
    """All derivations of the target; empty when there is none."""
    return [steps for result, steps in derivations(problem.numbers, whole) if result == problem.target]


def is_solvable(problem: Problem) -> bool:
    """Whether any expression reaches the target. Whole steps are tried first: they are quick and nearly always do."""
    return any(r == problem.target for whole in (True, False) for r, _ in derivations(problem.numbers, whole))


def expression(numbers: tuple[int, ...], steps: Iterable[Step]) -> str:
    """Write steps as one expression: (5 - 3 = 2, 4 * 2 = 8) is `4 * (5 - 3)`."""
    pool = [(n, str(n)) for n in numbers]
    for a, operator, b, result in steps:
        texts = []
        for value in (a, b):
            entry = next(e for e in pool if e[0] == value)
            pool.remove(entry)
            texts.append(f"({entry[1]})" if " " in entry[1] else entry[1])
        pool.append((result, f"{texts[0]} {operator} {texts[1]}"))
    return pool[-1][1]


@functools.lru_cache(maxsize=None)
def reachable(numbers: tuple[int, ...], max_target: int) -> tuple[int, ...]:
    """The targets 1..max_target that whole-number steps reach from the sorted numbers."""
    return tuple(sorted({r for r, _ in derivations(numbers, whole=True) if 1 <= r <= max_target}))


def universe(count: int = 3, low: int = 1, high: int = 20, max_target: int = 100) -> list[Problem]:
    """Every puzzle of `count` numbers from low..high that whole-number steps solve, numbers sorted."""
    sets = itertools.combinations_with_replacement(range(low, high + 1), count)
    return [Problem(numbers, target) for numbers in sets for target in reachable(numbers, max_target)]


def puzzle_key(problem: Problem) -> str:
    """What makes two puzzles the same: `3,4,5=8`, whatever the order of the numbers."""
    return f"{','.join(map(str, sorted(problem.numbers)))}={problem.target}"


def fingerprint(text: str) -> int:
    """A fixed 64-bit hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split(problem: Problem) -> str:
    """`train`, `heldout`, or `new_numbers`: a tenth of all number sets, held out with every target.

    By fingerprint of the sorted numbers (and the target), so that no seed, order or file changes it.
    """
    if fingerprint(puzzle_key(problem).partition("=")[0]) % 10 == 0:
        return "new_numbers"
    return "heldout" if fingerprint(puzzle_key(problem)) % 10 == 0 else "train"


def generate_problems(size: int, part: str, seed: int = 0, count: int = 3, low: int = 1, high: int = 20,
                      max_target: int = 100) -> list[Problem]:
    """Draw `size` distinct solvable puzzles of a split, numbers in random order.

    ValueError when that many are not found: 20,000 draws in a row bring no new one.
    """
    rng, found, idle = np.random.default_rng([seed, size]), {}, 0
    while idle < 20_000:
        idle += 1
        numbers = tuple(int(n) for n in rng.integers(low, high + 1, count))
        targets = reachable(tuple(sorted(numbers)), max_target)
        if targets:
            problem = Problem(numbers, int(rng.choice(targets)))
            if split(problem) == part and puzzle_key(problem) not in found:
                found[puzzle_key(problem)], idle = problem, 0
        if len(found) == size:
            return list(found.values())
    raise ValueError(f"found only {len(found)} of {size} {part} puzzles with {count} numbers from {low} to {high} "
                     f"and targets up to {max_target}: ask for fewer or widen the ranges")


def read_problems(path: str | Path) -> list[Problem]:
    """Read puzzles, fields `nums` and `target`, from .jsonl, or from .parquet where pyarrow is installed.

    FileNotFoundError, or ValueError with the line number when a row is not a puzzle.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no data file {path}")
    rows = read_parquet(path) if path.suffix == ".parquet" else read_lines(path)
    problems = []
    for line, row in enumerate(rows, 1):
        try:
            row = json.loads(row) if isinstance(row, str) else row
            numbers, target = list(row["nums"]), row["target"]
            if not numbers or not all(type(n) is int and n >= 0 for n in numbers + [target]):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            expected = '{"nums": [whole numbers], "target": whole number}'
            raise ValueError(f"{path}, line {line}: expected {expected}") from None
        problems.append(Problem(tuple(numbers), target))
    if not problems:
        raise ValueError(f"{path} holds no puzzle")
    return problems


def read_lines(path: Path) -> list[str]:
    """The lines of a text file."""
    try:
        with path.open(encoding="utf-8") as file:
            return list(file)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None


def read_parquet(path: Path) -> list[dict]:
    """The rows of a parquet file."""
    try:
        from pyarrow import parquet  # not among our requirements, used where it happens to be
    except ImportError:
        raise ValueError(f"reading {path} needs `pip install pyarrow`; or convert it to .jsonl") from None
    return parquet.read_table(path, columns=["nums", "target"]).to_pylist()


# ------------------------------------------------------------------------------------------------- the reward

MAX_LENGTH, MAX_DEPTH = 256, 32  # of an expression: characters, nested parentheses
ANSWER, END_ANSWER, END_THINK = "<answer>", "</answer>", "</think>"
TAGS = ("<think>", END_THINK, ANSWER, END_ANSWER)
FULL_FORMAT = re.compile(r"(?s)(.*)</think>\n<answer>(.*)</answer>")


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of whole numbers, + - * / and parentheses; ValueError for anything else.

    No unary minus, no leading zeros, ASCII digits and spaces only, at most 256 characters and 32 nested parentheses.
    """
    if len(expression) > MAX_LENGTH or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        raise ValueError("not an arithmetic expression")
    tokens = ["end"] + re.findall(r"0|[1-9][0-9]*|[-+*/()]", expression)[::-1]  # the next one is the last of the list
    value = parse_sum(tokens, 0)
    if tokens != ["end"]:
        raise ValueError(f"unexpected {tokens[-1]!r}")
    return value


def parse_sum(tokens: list[str], depth: int) -> Fraction:
    """sum = product, then any number of + product or - product. Takes its tokens off the list."""
    value = parse_product(tokens, depth)
    while tokens[-1] in ("+", "-"):
        value = value + parse_product(tokens, depth) if tokens.pop() == "+" else value - parse_product(tokens, depth)
    return value


def parse_product(tokens: list[str], depth: int) -> Fraction:
    """product = factor, then any number of * factor or / factor."""
    value = parse_factor(tokens, depth)
    while tokens[-1] in ("*", "/"):
        operator, factor = tokens.pop(), parse_factor(tokens, depth)
        if operator == "/" and factor == 0:
            raise ValueError("division by zero")
        value = value * factor if operator == "*" else value / factor
    return value


def parse_factor(tokens: list[str], depth: int) -> Fraction:
    """factor = a whole number, or ( sum )."""
    token = tokens.pop() if len(tokens) > 1 else "end"
    if token.isdigit():
        return Fraction(int(token))
    if token != "(" or depth == MAX_DEPTH:
        raise ValueError(f"unexpected {token!r}")
    value = parse_sum(tokens, depth + 1)
    if tokens.pop() != ")":
        raise ValueError("a parenthesis is not closed")
    return value


def reward(response: str, numbers: Iterable[int], target: int) -> dict[str, float]:
    """{'reward': 0.1 * format + answer, 'format': 0..1, 'answer': 0 or 1} of what follows the prompt's `<think>`.

    format: 1 for `...</think>\\n<answer>...</answer>` and nothing after; else 0.1 for a closed think and 0.5 for a
    closed answer; 0 with more than one `<answer>`. answer: 1 when the last `<answer>` uses every number exactly
    once and equals the target.
    """
    format = format_reward(response)
    answer = float(is_correct(graded_answer(response), numbers, target))
    return {"reward": 0.1 * format + answer, "format": format, "answer": answer}


def format_reward(response: str) -> float:
    """How much of the asked-for layout a response has, see `reward`."""
    if response.count(ANSWER) > 1:
        return 0.0
    match = FULL_FORMAT.fullmatch(response)
    if match and not any(tag in part for tag in TAGS for part in match.groups()):
        return 1.0
    closed_answer = ANSWER in response and END_ANSWER in response[response.find(ANSWER) :]
    return 0.1 * (END_THINK in response) + 0.5 * closed_answer


def graded_answer(response: str) -> str:
    """What stands in the last `<answer>`; empty when there is none, or it is not closed."""
    _, tag, rest = response.rpartition(ANSWER)
    inside, closed, _ = rest.partition(END_ANSWER)
    return inside if tag and closed else ""


def is_correct(text: str, numbers: Iterable[int], target: int) -> bool:
    """Whether the expression uses every number exactly once and equals the target."""
    try:
        return evaluate(text) == target and sorted(map(int, re.findall(r"[0-9]+", text))) == sorted(numbers)
    except ValueError:
        return False


# -------------------------------------------------------------------------------------- what each token is

FILLER, REASONING, STRUCTURE = 0, 1, 2
ROLES = ("filler", "reasoning", "structure")
SENTENCE_END = re.compile(r"[.!?](?=[\s<])|\n(?!<)")
STEP = re.compile(r"(?<![\d.])(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(-?\d+)(?!\.?\d)", re.ASCII)  # whole numbers


class StepSpan(NamedTuple):
    """Character spans (start, end) of one written calculation `a operator b = result`."""

    a: tuple[int, int]
    operator: tuple[int, int]
    b: tuple[int, int]
    result: tuple[int, int]


def find_steps(text: str) -> list[StepSpan]:
    """The calculations of two numbers written in a text; `4 - 3 - 2 = 1` is no such calculation.

    >>> find_steps(" 5 - 3 = 2")
    [StepSpan(a=(1, 2), operator=(3, 4), b=(5, 6), result=(9, 10))]
    """
    matches = (m for m in STEP.finditer(text) if text[: m.start()].rstrip()[-1:] not in tuple("+-*/)"))
    return [StepSpan(*(m.span(i) for i in (1, 2, 3, 4))) for m in matches]


def check_steps(text: str, steps: list[StepSpan], numbers: Iterable[int]) -> list[bool]:
    """Whether each written calculation is true and uses values that are at hand, each as often as it is there.

    >>> check_steps("5 - 3 = 2, 4 * 2 = 8. 5 + 5 = 10", find_steps("5 - 3 = 2, 4 * 2 = 8. 5 + 5 = 10"), (3, 4, 5))
    [True, True, False]
    """
    return [is_true(step) and any(Counter([step.a, step.b]) <= pool for pool, _ in attempts)
            for step, attempts in follow(text, steps, numbers)]


def follow(text: str, steps: list[StepSpan], numbers: Iterable[int]) -> Iterator[tuple[Step, list[tuple]]]:
    """Yield each written calculation, and the attempts it may belong to: (values at hand, all right so far).

    At hand are the puzzle's numbers; a calculation takes two and leaves the result it claims, so an error counts
    once. A finished attempt hands the numbers back. At the end of a sentence an attempt may go on or be given up:
    both readings are kept, until what is written fits only one.
    """
    fresh, before = (Counter(numbers), True), 0
    attempts = [fresh]
    for span in steps:
        a, b, result = (int(text[slice(*part)]) for part in (span.a, span.b, span.result))
        step, needed = Step(a, text[slice(*span.operator)], b, result), Counter([a, b])
        attempts = [attempt if attempt[0].total() > 1 else fresh for attempt in attempts]
        if SENTENCE_END.search(text, before, span.a[0]) and fresh not in attempts:
            attempts.append(fresh)
        attempts = [(pool, right) for pool, right in attempts if needed <= pool] or attempts
        yield step, attempts
        attempts = [(pool - needed + Counter([result]), right and needed <= pool and is_true(step))
                    for pool, right in attempts]
        before = span.result[1]


def is_true(step: Step) -> bool:
    """Whether a calculation's result is right."""
    return calculate(step.a, step.operator, step.b) == step.result


def calculate(a: int | Fraction, operator: str, b: int | Fraction) -> int | Fraction | None:
    """a operator b, exactly; None for a division by 0."""
    if operator == "/":
        return Fraction(a) / b if b else None
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def sentence_starts(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens (L,) bool are the first to start behind the end of a sentence, where more text follows.

    >>> sentence_starts("No. 1 + 2 = 3", [(0, 3), (3, 5), (5, 7), (7, 9), (9, 11), (11, 13)])
    array([False,  True, False, False, False, False])
    """
    starts = np.array(spans, int).reshape(-1, 2)[:, 0]
    ends = [m.end() for m in SENTENCE_END.finditer(text) if m.end() < len(text)]
    first = np.searchsorted(starts, ends)  # of each end, the first token that starts at or behind it
    return np.isin(np.arange(len(starts)), first)


def anchors(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """The character (L,) that decides what a token is: the first in its span that is no white space, else its first."""
    solid = np.array([len(text) if c.isspace() else i for i, c in enumerate(text)] + [len(text)])
    following = np.minimum.accumulate(solid[::-1])[::-1]  # the first solid character at or after each one
    starts, stops = np.array(spans, int).reshape(-1, 2).T
    return np.where(following[starts] < stops, following[starts], starts)


def character_roles(text: str) -> np.ndarray:
    """Role (len(text) + 1,) int8 of each character; behind the last one lies the end token.

    structure: inside a tag, or the end token. reasoning: a digit or one of + - * / = ( ). filler: everything else,
    white space included.
    """
    roles = np.array([REASONING if c in "0123456789+-*/=()" else FILLER for c in text] + [STRUCTURE], np.int8)
    for tag in re.finditer("|".join(TAGS), text):
        roles[tag.start() : tag.end()] = STRUCTURE
    return roles


def annotate(text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Role (L,) int8 of each token, and whether it lies in the answer (L,) bool: from the last `<answer>` on.

    >>> annotate("8!</think>", [(0, 1), (1, 4), (4, 10), (10, 10)])  # tokens 8, !</, think>, end
    (array([1, 0, 2, 2], dtype=int8), array([False, False, False, False]))
    """
    where, answer = anchors(text, spans), text.rfind(ANSWER)
    return character_roles(text)[where], (where >= answer) & (answer >= 0)


# --------------------------------------------------------------------------------- between text and tokens

PLAIN = ("Using the numbers {numbers}, create an equation that equals {target}.\n"
         "Let me solve this step by step.\n<think>")
# The instruction of TinyZero and GRPO-Zero, in their words, so that results with a chat model can be compared.
SYSTEM = ("You are a helpful assistant. You first think about the reasoning process in your mind and then provide the "
          "user with the answer.")
USER = ("Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
        "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the "
        "final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.")
CHAT = (f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>")


def byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: itself if printable, else one from 256 upwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Codec:
    """A byte-level tokenizer.json: puzzles to prompt tokens, response tokens to text with character spans."""

    def __init__(self, folder: str | Path):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        self.size = self.tokenizer.get_vocab_size()  # real tokens; a model's vocabulary may be padded beyond them
        self.chat = self.tokenizer.token_to_id("<|im_start|>") is not None
        ends = (self.tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
        self.end_tokens = [token for token in ends if token is not None]
        if not self.end_tokens:
            raise ValueError(f"{path} has neither <|im_end|> nor <|endoftext|>: no response could end")
        self.bytes = self.token_bytes()

    def token_bytes(self) -> list[bytes]:
        """The bytes that each token stands for; none for the end tokens, which are no part of the text."""
        alphabet = byte_alphabet()
        added = {i: t.content.encode() for i, t in self.tokenizer.get_added_tokens_decoder().items()}
        names = [self.tokenizer.id_to_token(i) or "" for i in range(self.size)]
        try:
            table = [added[i] if i in added else bytes(alphabet[c] for c in name) for i, name in enumerate(names)]
        except KeyError as error:
            raise ValueError(f"the tokenizer is not a byte-level one: a token holds {error}") from None
        for token in self.end_tokens:
            table[token] = b""
        return table

    def prompt(self, problem: Problem) -> list[int]:
        """The tokens of a puzzle's prompt, which ends in `<think>`: ChatML for a chat model, else short and plain."""
        template = CHAT if self.chat else PLAIN
        text = template.format(numbers=list(problem.numbers), target=problem.target)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> tuple[str, list[tuple[int, int]]]:
        """Text of the tokens, and the span of each in it; tokens that share a character both have it in their span.

        Bytes that are no UTF-8 become U+FFFD. An end token lies behind the last character.
        """
        decoder, text, spans = codecs.getincrementaldecoder("utf-8")("replace"), "", []
        for token in tokens:
            owners = []  # the character that each byte of the token belongs to
            for byte in self.bytes[token]:
                text += decoder.decode(bytes([byte]))
                owners.append(len(text) - (not decoder.getstate()[0]))  # still to come, or the last one
            spans.append((owners[0], owners[-1] + 1) if owners else None)
        text += decoder.decode(b"", final=True)
        return text, [span or (len(text), len(text)) for span in spans]


def main() -> None:
    """Print the puzzle's split and prompt, and every solution."""
    parser = argparse.ArgumentParser(description="Solve a Countdown puzzle by brute force.")
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--target", type=int, required=True)
    args = parser.parse_args()
    if len(args.numbers) > 5:
        parser.exit(1, "error: more than 5 numbers have too many solutions to print\n")
    problem = Problem(tuple(args.numbers), args.target)
    print(f"{PLAIN.format(numbers=list(problem.numbers), target=problem.target)}\n\nsplit: {split(problem)}")
    print("\n".join(sorted({expression(problem.numbers, steps) for steps in solutions(problem)})) or "no solution")


if __name__ == "__main__":
    main()
