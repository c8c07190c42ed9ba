"""Word problems: a question in words, an answer that is a number, such as GSM8K's (arXiv 2110.14168).

    Ann has 12 shells. Ann finds 9 more. Then Ann gives 5 to Ben. How many shells does Ann have?

Without --data it makes its own, with two to four steps and numbers below 100. --data reads GSM8K's own files, .jsonl or
.parquet, and any other with the fields `question` and `answer`, where the number stands after `####` or alone. A tenth
is held out by a hash: of the calculations of a problem made here, so that a held-out one is not a known one with other
names; of the question of a problem read from a file, whatever its white space.

The answer is graded as an exact number: 42, **$42.00** and "42 m" are the same. Two numbers are wrong, and so are words
or signs that make it another number, "42 squared" and "42 mln", or a bound, "less than 42".

Run it:  python train.py --task math
         python train.py --task math --data gsm8k.jsonl --model path/to/Qwen2.5-0.5B-Instruct --lr 1e-6
"""
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np

from tasks.arithmetic import CalculationSpan, calculate, find_calculations, is_true, read_calculation
from tasks.data import digits, read_rows
from tasks.text import format_reward, graded_answer, split, with_slashes, without_latex
from tasks.text import roles, sentence_starts  # noqa: F401

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "shells", "coins", "cards", "books", "pens", "stones", "cups", "keys", "stamps", "nuts", "eggs")
# A step: what it does to the number n that there is, and what it says of k. {a}: who has the things, {b}: another one.
STEPS = {"+": ("{a} finds {k} more.", "{a} buys {k} more.", "{b} brings {k}.", "{a} gets {k} from {b}."),
         "-": ("{a} gives {k} to {b}.", "{a} loses {k}.", "{b} takes {k}.", "{a} sells {k}."),
         "*": ("Now {a} makes it {k} times as many.", "{a} collects until there are {k} times as many."),
         "/": ("{a} keeps one of {k} equal parts.", "{a} divides them among {k} and keeps one share.")}
LARGEST = 60  # result
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
    rng, found = np.random.default_rng(0), {}
    while len(found) < (4096 if count is None else count):
        problem = make_problem(rng)
        if part in ("all", split(key(problem))):
            found[problem.id] = problem
    return list(found.values())


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
    """The prompt, which ends in `<think>`: ChatML for a chat model, the question alone for any other.

    In three pieces, so that `<|im_end|>` in a question, the second, stays characters.
    """
    before, after = (CHAT if chat else PLAIN).split("{question}")
    return before, problem.question, after


MAX_LENGTH = 100  # characters of an answer
LETTER = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024fµμΩ"  # Latin, and units: others may be numbers
CURRENCY = "$£¥¢\u20a0-\u20cf"
EMOJI = "✓✔✅☑⭐\ufe0f\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001faff"
# Words and marks that change nothing; the second line: 7-year-old, km/h, kg/m.
AROUND = rf"""(?:[{LETTER}{CURRENCY}{EMOJI}\s.,:;!?'"“”‘’«»()\[\]{{}}*_`#=%°…•~∼≈≃≅→⇒∴]
    |(?<=[0-9{LETTER}{CURRENCY}])[-/](?=[{LETTER}]{{2}}|[hs]\b)|(?<=[{LETTER}])/(?=[mlL]\b))*"""
UNIT = rf"""(?:[kcdmn]?m|[km]?g|[cdm]?[lL]|[mn]?s|min|sec|hr?s?|d|wks?|yrs?|ft|in|yds?|mi|lbs?|oz|[ap]\.?m|[AP]\.?M
    |mp[hg]|km?ph|kmh|rpm|[KkMGT]B|[kMG]?Hz|kWh|[kMG]?[WJNV]|dB|hp|[cptACF]|[pq]ts?|tb?sp|pcs?|sq|ppl|GBP|CHF|Rs|kr
    |[A-Z]{{2,3}}s)(?![{LETTER}])"""  # may follow without a space, but 5k and 7x are not 5 and 7
WHOLE = "(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}|[0-9]+)"  # 7, 1,234, 12,34,567
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"  # 7.5, .5
NUMBER = re.compile(rf"""{AROUND}(?<![0-9{LETTER}.,)])([-+]?)[{CURRENCY}]?(?P<digits>
    (?:({WHOLE})[ \u00a0](?=[0-9]+/[0-9]+(?![.,]?[0-9])))?({DECIMAL})(?:/([-+]?{DECIMAL}))?     # 1 1/2; 7, 3/4, 7/-2
    )(?:(?={UNIT})|(?![{LETTER}])){AROUND}""", re.VERBOSE)
# What makes it another number, a bound, or no answer: anywhere, right before the digits, or right after them.
PART = "third|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie)th"
ANYWHERE = re.compile(rf"""(?ix)\b(?:zero|one|(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)(?:e?s)?
    |[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ies)|dozens?|(?:hundred|thousand|[a-z]*illion)(?:th)?s?
    |half|halves|quarters?\s+(?:of|to|past)|(?:{PART})(?:s|\s+of)                                      # a part
    |twice|double|triple|negative|minus|plus|(?:divided|multiplied)\s+by                               # an operator
    |or|at\s+(?:least|most)|not|nor|never|neither|cannot
    |(?:(?:is|was)\s|[?!.,;:]+)\s*(?:wrong|incorrect|false|excluded|ruled\s+out))\b|n['’]t\b|!=|~~|[👎🚫]|[🔟💯]
    |[{CURRENCY}]\s?[0-9.,]+\s?m\b|[^\W_](?:\*\*?(?=[^\W_])|[ ]+\*\s)|\.[0-9]+\s?(?:\.\.|…)""")  # $3m, x*7, 0.3...
BEFORE = re.compile(rf"""(?ix)(?:\bthan\b[^.,:;=]*|[{LETTER}]\}}?(?:\(|_\{{?)                           # f(7), x_7
    |\b(?:over|under|above|below|beyond|exceed(?:s|ing)?|up\s+to|almost|nearly                         # a bound
    |no|except(?:\s+for)?|excluding|without|(?:all|nothing|anything)\s+but                             # denied
    |times|root|sqrt|log|ln|exp|sin|cos|tan|mod|(?:out|instead|short|shy|none|root|square|cube|log(?:arithm)?|factorial
        |reciprocal|inverse|opposite|multiple|factor|fraction|part|percent)\s+of(?:\s+[a-z]+){{0,2}}))
    [\s({{{CURRENCY}~≈+-]*\Z""")
# A scale in many languages. An abbreviation that is no UNIT, without a vowel, may be another one: it is refused, too.
SCALE = r"""(?:grand|lakhs?|lacs?|crores?|thou|tausend|mille|mila|ribu|juta|tys\w*|mi[oa]|(?:m|b|tr)ill?|basis\s+points?
    |(?:mil(?!liamp)|bil(?!liards?\b))(?:l?i[oa]|l?[oó]n|[jyh])\w*|pro\s*mille|per\s*mill?e?)"""
AFTER = re.compile(rf"""(?sx)[^{LETTER}]*(?i:(?:cub|[a-z]{{4,}})ed
    |factorial|pi|mod(?:ulo)?|choose|max(?:imum)?|minimum|and|exclusive|recurring|repeat(?:ing|ed)|periodic
    |(?:degrees?\s+)?below|to\s+the\s+(?:power|{PART})|(?:in\s+)?(?:debt|binary|octal|hex(?:adecimal)?)|in\s+base)\b
    |.*\b(?:and\s+an?|(?:than|times|over)\s+[b-zB-Z])\b                            # 7 feet and an inch, 7 more than x
    |[\s{{}}()*$_~{CURRENCY}-]*(?:[A-Z]{{3}}\s+)?(?:(?i:{SCALE})\b                       # 7 Mio, 7 EUR mln
    |(?!{UNIT}|[aI]\s)(?:[A-Za-z]|(?i:[b-df-hj-np-tv-xz]){{2,}})(?![{LETTER}'’]))""")  # 7 x, 5 k, but $7 a day
SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,\\!|[\u00a0\u2009\u202f'’])(?=[0-9]{3}(?![0-9]))")  # 1{,}234
MARKS = re.compile(r"\\(?:approx|sim(?:eq)?|therefore|Rightarrow|degree|pounds)(?![A-Za-z])|\^\{?\\circ\b\}?")  # ~, 90°
AREA = re.compile(r"(?<![A-Za-z])((?:[kcdm]?m|ft|in|yd|mi|s|[A-Za-z]{3,})\s?\}?)(?:[²³]|\^\{?-?[1-3]\}?|(?<=m)[23]\b)")


def number(text: str) -> Fraction | None:
    r"""The one number of a text, whatever words, marks and LaTeX are around it: `**$1,234.00**`, `\boxed{7}`, `x = 7`.

    None where there is no number or a second one, which may be a word (`seven or 8`); where words or signs make it
    another (`7 squared`, `a quarter of 7`, `7 Mio`, `7x`) or may (`7 zzz`, no known unit), a bound (`less than 7`) or
    none (`not 7`, `7 omitted`); and for operators (`3 + 4`), exponents, ordinals, letters that are not Latin, and more
    than 100 characters. `50%` is 50, as in GSM8K, `~7` and `7 m²` are 7, and `- 3` is -3.
    """
    text = plain(text) if len(text) <= MAX_LENGTH else ""
    found = NUMBER.fullmatch(text)
    if not found or ANYWHERE.search(text):
        return None
    if BEFORE.search(text[: found.start("digits")]) or AFTER.match(text[found.end("digits") :]):
        return None
    sign, _, *parts = found.groups()
    whole, above, below = (Fraction((part or default).replace(",", "")) for part, default in zip(parts, "011"))
    if below == 0 or whole and above >= below:  # 5 6/2 is no mixed number
        return None
    return (whole + above / below) * (-1 if sign == "-" else 1)


def plain(text: str) -> str:
    r"""A text without LaTeX, thousands separated by commas, fractions with a slash: `1\frac{1}{2}` becomes `1 1/2 `."""
    text = re.sub(r"(?<=[0-9])\s?(?=[¼-¾⅐-⅞]|\\[cdt]?frac)", " ", SEPARATOR.sub(",", text))
    text = re.sub("[¼-¾⅐-⅞]", lambda sign: normalize("NFKC", sign[0]) + " ", text).replace("\u2044", "/")
    text = MARKS.sub(" ", without_latex(with_slashes(text, "{}/{} "))).strip()
    text = re.sub(r"(?i)\b(?:minus|negative)\s", "- ", AREA.sub(r"\1", text))
    return re.sub(r"(^|[=:(\[{*_`$\"“/]) *([-+]) +", r"\1\2", text)  # - 3 is -3; x - 3 stays


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
