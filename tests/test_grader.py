"""The grader against a second parser: any response, and 100,000 hostile strings."""
import itertools
import operator
import random
import re
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import countdown_task as task

CALM = settings(deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
                suppress_health_check=[HealthCheck.too_slow])  # a slow machine is not a bug
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: Fraction(a) / b}
EMOJI = "\U0001f642"  # four bytes
PIECES = ["</think>\n<answer>", "</think>\n<answer>", "</answer>", "</answer>", "<answer>", "</think>", "<think>", "\n",
          " ", ".", "4 * (5 - 3)", "(5-3)*4", "(-3+5)\n* 4", "8", " - ", "<", ">", "answer", "/", "\u00e9", "\u2003",
          "\u0663", EMOJI]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join) | st.text(max_size=40)


@settings(CALM, max_examples=1000)
@given(TEXTS, st.sampled_from((8, 8, 2, -1)))
def test_reward_of_any_response_equals_a_grade_by_counting_and_cutting(text, target):
    for response in (text, f"<answer>{text}</answer>"):
        count = [response.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")]
        halves, answers = response.split("</think>\n<answer>"), response.split("<answer>")[1:]
        layout = 0 if count[2] > 1 else 0.1 * bool(count[1]) + 0.5 * any("</answer>" in answer for answer in answers)
        if count == [0, 1, 1, 1] and len(halves) == 2 and halves[1].endswith("</answer>"):
            layout = 1
        inside = answers[-1].split("</answer>")[0] if answers and "</answer>" in answers[-1] else ""
        inside = re.sub(r"\s+", " ", inside).rstrip(" .")
        used = "".join(c if c in "0123456789" else " " for c in inside).split()
        right = oracle_value(inside) == target and sorted(map(int, used)) == [3, 4, 5]
        assert task.grade(response, task.Puzzle((5, 3, 4), target)) == {
            "reward": pytest.approx(0.1 * layout + right), "format": pytest.approx(layout), "answer": right}


def parse(tokens, levels=("+-", "*/")):
    """The value at the front of the tokens, which it consumes: a sum of products of signed numbers and parentheses."""
    if not levels:
        token = tokens.pop(0)
        if token in "+-":
            return parse(tokens, ()) * (-1 if token == "-" else 1)
        if token != "(":
            return Fraction(int(token))
        value = parse(tokens)
        if tokens.pop(0) != ")":
            raise ValueError
        return value
    value = parse(tokens, levels[1:])
    while tokens[0] in levels[0]:
        value = OPERATORS[tokens.pop(0)](value, parse(tokens, levels[1:]))
    return value


def oracle_value(text):
    """What `expression_value` must return, by a recursive-descent parser; None where it must raise ValueError."""
    depth = max(itertools.accumulate(({"(": 1, ")": -1}.get(c, 0) for c in text), initial=0))
    tokens = re.findall(r"0|[1-9][0-9]*|[^ ]", text) + ["end"]
    try:
        value = parse(tokens) if len(text) <= 256 and depth <= 32 and set(text) <= set("0123456789+-*/() ") else None
    except (ValueError, ZeroDivisionError):
        return None
    return value if tokens == ["end"] else None


def random_expression(rng, depth):
    if depth == 0 or rng.random() < 0.3:
        return str(rng.choice((0, 1, 2, 3, 10, rng.randrange(1000))))
    left, right = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    text = left + rng.choice(("", " ")) + rng.choice("+-*/") + rng.choice(("", " ")) + right
    return f"({text})" if rng.random() < 0.4 else text


def hostile_text(rng):
    """A random string, or an expression with up to three characters changed."""
    alphabet = rng.choice(["0123456789+-*/() ", "12+*()", "01()/- ", "9*/", "0123+-*/()._eExX\n\tab\u0663\u00b2\uff11"])
    if rng.random() < 0.3:
        return "".join(rng.choices(alphabet, k=rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 20))))
    text = list(random_expression(rng, rng.randrange(4)))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        text[at : at + rng.randrange(2)] = rng.choice(("", rng.choice(alphabet)))
    return "".join(text)


@pytest.mark.filterwarnings("error")
def test_values_agree_with_another_parser_on_100_000_hostile_strings():
    rng, accepted = random.Random(0), 0
    for text in (hostile_text(rng) for _ in range(100_000)):
        try:
            value = task.expression_value(text)
        except ValueError:
            value = None
        assert value == oracle_value(text), text
        accepted += value is not None
    assert 20_000 < accepted < 80_000
