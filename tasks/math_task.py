"""Word problems: a question in words, an answer that is a number, such as GSM8K's (arXiv 2110.14168).

    Ann has 12 shells. Ann finds 9 more. Ann gives 5 to Ben. How many shells does Ann have now?

Without --data it makes its own, with two to four steps and numbers up to 60. --data reads GSM8K's own files, .jsonl or
.parquet, and any other with the fields `question` and `answer`, where the number stands after `####` or alone. A tenth
is held out by a hash: of the calculations of a problem made here, so that a held-out one is not a known one with other
names; of the question of a problem read from a file, whatever its white space.

An answer is read by tasks/number.py, and is right if it is the exact number: 42, **$42.00** and "42 m" are the same.

Run it:  python train.py --task math
         python train.py --task math --data gsm8k.jsonl --model path/to/Qwen2.5-0.5B-Instruct --lr 1e-6
"""
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tasks.arithmetic import CalculationSpan, calculate, find_calculations, is_true, read_calculation
from tasks.data import digits, draw_distinct, read_rows
from tasks.number import MAX_LENGTH, number
from tasks.text import format_reward, graded_answer, roles, sentence_starts, split  # noqa: F401

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "shells", "coins", "cards", "books", "pens", "stones", "cups", "keys", "stamps", "nuts", "eggs")
# A step: what it does to the number n that there is, and what it says of k. {a}: who has the things, {b}: another one.
STEPS = {"+": ("{a} finds {k} more.", "{a} buys {k} more.", "{b} brings {k}.", "{a} gets {k} from {b}."),
         "-": ("{a} gives {k} to {b}.", "{a} loses {k}.", "{b} takes {k}.", "{a} sells {k}."),
         "*": ("Now {a} makes it {k} times as many.", "{a} collects until there are {k} times as many."),
         "/": ("{a} keeps one of {k} equal parts.", "{a} divides them among {k} and keeps one share.")}
LARGEST = 60  # the largest result of a step
PARTS = {"answer": 1.0, "format": 0.1}  # of the reward, with their weights


class Problem(NamedTuple):
    """A word problem. steps: how it is solved, such as ((12, "+", 9), (21, "-", 5)); empty for one from a file."""

    question: str
    answer: Fraction
    steps: tuple = ()

    @property
    def id(self) -> str:
        """A problem's identity."""
        return self.question


def load(part: str, count: int | None = None, path: str = "") -> list[Problem]:
    """At most `count` problems of `train` or `heldout`: made here, 4,096 without a count, or those of a file.

    `all`: those of both, and of a file in its order.
    """
    if path:
        return [problem for problem in read_problems(path) if part in ("all", split(key(problem)))][:count]
    rng = np.random.default_rng(0)

    def draw() -> Problem | None:
        problem = make_problem(rng)
        return problem if part in ("all", split(key(problem))) else None
    return draw_distinct(4096 if count is None else count, draw, f"{part} problems")


def key(problem: Problem) -> str:
    """What a model could memorize: the calculations of a problem made here, else the words of the question."""
    return str(problem.steps) if problem.steps else " ".join(problem.question.split())


def make_problem(rng: np.random.Generator) -> Problem:
    """A random problem of two to four steps, with results from 1 to LARGEST."""
    n = int(rng.integers(2, 31))
    (a, b), thing = rng.choice(NAMES, 2, replace=False), rng.choice(THINGS)
    sentences, steps = [f"{a} has {n} {thing}."], []
    while len(steps) < 2 or len(steps) < 4 and rng.random() < 0.4:
        sign, k = rng.choice(list("++--*/")), int(rng.integers(2, 21))
        k = k if sign in "+-" else int(rng.integers(2, 5))
        result = calculate(n, sign, k)
        if is_plain(result):
            steps.append((n, str(sign), k))
            sentences.append(rng.choice(STEPS[sign]).format(a=a, b=b, k=k))
            n = int(result)
    question = f"{' '.join(sentences)} How many {thing} does {a} have now?"
    return Problem(question, Fraction(n), tuple(steps))


def read_problems(path: str) -> list[Problem]:
    """The problems of a file, each once; ValueError where a row holds none, or two rows answer a question differently.
    """
    found = {}
    for problem in read_rows(Path(path), {"question": "...", "answer": "... #### 42"}, read_problem):
        if found.setdefault(key(problem), problem).answer != problem.answer:
            raise ValueError(f"{path} has two answers to {problem.question!r:.80}: remove one of them")
    return list(found.values())


def read_problem(question: object, answer: object) -> Problem:
    """The problem of a row, whose answer is a number or a text that ends in `#### number`; ValueError if it is none."""
    if not isinstance(question, str) or not question.strip():
        raise ValueError("its question is no text")
    question.encode()  # UnicodeEncodeError, which is a ValueError, for half of a character
    text = digits(answer, "answer")
    exact = number(text.rpartition("####")[2])
    if exact is None:
        raise ValueError(f"its answer, {text[-40:]!r}, has not one number after the last ####, such as -1,234.5, in at "
                         f"most {MAX_LENGTH} characters")
    return Problem(question.strip(), exact)


def check(problem: Problem) -> None:
    """Every problem that can be read can be used."""


def show(problem: Problem) -> str:
    """The question in a line, and its answer."""
    return f"{' '.join(problem.question.split())} -> {problem.answer}"


SYSTEM = "You are a helpful assistant. You think first, and then give the answer."
USER = ("{question} Show your work, and then give the final answer, a number alone, in this layout:\n"
        "<think> ... </think>\n<answer> ... </answer>")
CHAT = (f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{USER}<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>")
PLAIN = "{question}\n<think>"


def prompt(problem: Problem, chat: bool) -> tuple[str, str, str]:
    """The prompt, which ends in `<think>`: ChatML for a chat model, the question alone for any other. In three pieces,
    so that `<|im_end|>` in a question, the second, stays characters."""
    before, after = (CHAT if chat else PLAIN).split("{question}")
    return before, problem.question, after


def grade(response: str, problem: Problem) -> dict[str, float]:
    """answer: 1 if the last `<answer>` has the right `number`; format: see `format_reward`."""
    answer = float(number(graded_answer(response)) == problem.answer)
    return {"answer": answer, "format": format_reward(response)}


def calculations(response: str, problem: Problem) -> list[tuple[CalculationSpan, bool]]:
    """Where each written calculation `a operator b = result` stands, and whether it is true."""
    return [(span, is_true(read_calculation(response, span))) for span in find_calculations(response)]


# ------------------------------------------------------------------------------------------- what a model imitates

KNOWN = (0.95, 0.5)
NOTICED = 0.5  # of the wrong calculations
OPENINGS = (" First", " Then", " Next", " Now", " So", " After that")


def demonstrate(problem: Problem, rng: np.random.Generator, known: float) -> str:
    """A response: each step is right with probability `known`, else any other calculation with the problem's numbers.

    Half of the wrong ones are noticed, and the step is written once more.
    """
    if not problem.steps:
        raise ValueError("problems of a file don't say how they are solved, so nobody can imitate it: leave out --data")
    text, n, todo = "", problem.steps[0][0], [step[1:] for step in problem.steps]
    numbers = sorted({k for _, k in todo})
    while todo:
        possible = [(sign, k) for sign in "+-*/" for k in numbers if is_plain(calculate(n, sign, k))]
        others = [step for step in possible if step != todo[0]]
        right = todo[0] in possible and (rng.random() < known or not others)
        sign, k = todo[0] if right else others[rng.integers(len(others))]
        result = calculate(n, sign, k)
        text += f"{OPENINGS[rng.integers(len(OPENINGS))]} {n} {sign} {k} = {result}."
        if not right and rng.random() < NOTICED:
            text += " No, that is wrong."
        else:
            n, todo = result, todo[1:]
    return f"{text}</think>\n<answer>{n}</answer>"


def is_plain(result: Fraction) -> bool:
    """Whether a number may occur in a problem: a whole one from 1 to LARGEST."""
    return 0 < result <= LARGEST and result.denominator == 1
