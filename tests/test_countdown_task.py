"""The Countdown task against independent oracles: expressions, reward, solver, splits, files, roles, prompts.

Run:  OMP_NUM_THREADS=1 python -m pytest tests/test_countdown_task.py -q
"""
import ast
import contextlib
import doctest
import importlib.util
import itertools
import operator
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

import countdown_task as task
from countdown_task import Problem

CALM = settings(deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
                suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no bug

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: Fraction(a) / b}


@contextlib.contextmanager
def no_hang():
    """Break off what takes longer than two minutes, where the system can: `95**96**97` by eval would run for ever."""

    def give_up(*_):
        raise AssertionError("two minutes have passed")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --------------------------------------------------------------------- oracle: expressions by Python's own parser


def nesting(text):
    """The deepest nesting of parentheses, by counting."""
    depths = itertools.accumulate({"(": 1, ")": -1}.get(c, 0) for c in text)
    return max(depths, default=0)


def tree_value(node):
    """The value of a tree of Python's `ast`; TypeError for anything but + - * / on whole numbers."""
    signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in signs:
        return OPERATORS[signs[type(node.op)]](tree_value(node.left), tree_value(node.right))
    raise TypeError


def oracle_value(text):
    """What `evaluate` has to return, by Python's parser; None where it has to raise ValueError."""
    if len(text) > 256 or set(text) - set("0123456789+-*/() ") or nesting(text) > 32 or re.search(r"(?<!\d)0\d", text):
        return None
    try:
        return tree_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


def agree(text):
    """`evaluate` returns the oracle's value, as a Fraction, or raises ValueError where the oracle has none."""
    expected = oracle_value(text)
    try:
        value = task.evaluate(text)
    except ValueError:
        value = None
    assert value == expected and isinstance(value, (Fraction, type(None))), f"{text!r}: {value}, expected {expected}"


# -------------------------------------------------------------------------------------------------- evaluate

trees = st.recursive(st.integers(0, 120), lambda t: st.tuples(st.sampled_from("+-*/"), t, t), max_leaves=10)


def value_of(tree):
    """The value of a tree (operator, left, right), by Fraction arithmetic; ZeroDivisionError where there is none."""
    if isinstance(tree, int):
        return Fraction(tree)
    return OPERATORS[tree[0]](value_of(tree[1]), value_of(tree[2]))


def binds(tree):
    """How tightly a tree holds together: 1 a sum, 2 a product, 3 a number."""
    return 3 if isinstance(tree, int) else {"+": 1, "-": 1, "*": 2, "/": 2}[tree[0]]


def written(tree, rng):
    """A tree as text: the parentheses it needs, at times one more pair, and random spaces."""
    space = lambda: " " * rng.choice((0, 0, 1, 2))
    if isinstance(tree, int):
        text = str(tree)
    else:
        sign, left, right = tree[0], written(tree[1], rng), written(tree[2], rng)
        left = f"({left})" if binds(tree[1]) < binds(tree) else left
        right = f"({right})" if binds(tree[2]) <= binds(tree) else right
        text = f"{left}{space()}{sign}{space()}{right}"
    return f"({space()}{text}{space()})" if rng.random() < 0.15 else text


@settings(CALM, max_examples=1500)
@given(trees, st.integers(0, 2**32))
def test_evaluate_equals_fraction_arithmetic_on_random_trees(tree, seed):
    """Guards against wrong precedence, wrong association, rounding, and a division by zero that is no ValueError."""
    rng = random.Random(seed)
    text = " " * rng.randrange(2) + written(tree, rng) + " " * rng.randrange(2)
    assume(len(text) <= 256)
    try:
        expected = value_of(tree)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="zero"):
            task.evaluate(text)
    else:
        assert task.evaluate(text) == expected


def chain_value(numbers, signs):
    """A chain without parentheses by the rule of school: a sum of signed products, each from left to right."""
    total, product, sign = Fraction(0), Fraction(numbers[0]), 1
    for symbol, number in zip(signs, numbers[1:]):
        if symbol in "*/":
            product = product * number if symbol == "*" else product / number
        else:
            total, product, sign = total + sign * product, Fraction(number), 1 if symbol == "+" else -1
    return total + sign * product


@settings(CALM, max_examples=1000)
@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 99)), min_size=1, max_size=12))
def test_evaluate_works_from_left_to_right_in_a_chain(pairs):
    """Guards against `8 - 3 - 2` read as `8 - (3 - 2)` and `8 / 4 * 2` as `8 / (4 * 2)`."""
    signs, numbers = zip(*pairs)
    text = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs[1:], numbers[1:]))
    assert task.evaluate(text) == chain_value(numbers, signs[1:])


@pytest.mark.parametrize("text, value", [
    ("8 - 3 - 2", 3), ("8 - (3 - 2)", 7), ("16 / 4 / 2", 2), ("16 / (4 / 2)", 8), ("16 / 4 * 2", 8),
    ("2 + 3 * 4", 14), ("(2 + 3) * 4", 20), ("20 - 6 / 2 + 1", 18), ("8/(3-8/3)", 24), ("1/3 + 1/6", Fraction(1, 2)),
    ("0", 0), ("((7))", 7), ("10-0", 10), ("0/5", 0), ("3 - 8", -5), (" 1+2 ", 3), ("(" * 32 + "1" + ")" * 32, 1),
    ("1" + "+1" * 127, 128), ("100*" * 60 + "1", 100**60),
])
def test_evaluate_by_hand(text, value):
    """Guards against a parser and an oracle that are wrong in the same way: these values were worked out by hand."""
    assert task.evaluate(text) == value


HOSTILE = [
    "95**96**97", "9**9**9", "9//2", "5 // 1", "(" * 33 + "1" + ")" * 33, "(" * 200, "(" * 10_000, "1+" * 5_000 + "1",
    "9" * 10_000, "((((", "1_0", "\u0663+1", "\u00b2", "2\u00b2", "007", "00", "0 0", "1+01", "1e9", "1E9", "--1", "-1",
    "+1", "3*-1", "3-+1", "3--1", "(-1)+2", "1 2", "1 0", "", " ", "(", ")", "()", "())", ")(", "(1", "1)", "(1))",
    "((1)", "1(2)", "(1)(2)", "(1)2", "1/0", "1/(1-1)", "0/0", "5/(2-1-1)", "1+", "*1", "1*", "/", "0x1", "0b1",
    "\uff11", "1\n", "\n1", "1\t+1", "1+\n1", "1\u00a0+ 1", "1\x00", "1.0", ".5", "1.", "1,2", "[1]", "1%2", "1 if 1 else 2",
    "1;2", "1=1", "1==1", "1j", "a", "__import__('os')", "print(1)", "1<<9", "~1", "1&1", "'1'", "1 + 1 #", "\ud800", "∞",
    "1" + "+1" * 128, "1+1" + " " * 254, "5 \u2212 3", "5 \u00d7 3",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_evaluate_refuses_hostile_text(text):
    """Guards against code, powers, floor division, signs, foreign digits, endless input: all have to be ValueError."""
    with no_hang(), pytest.raises(ValueError):
        task.evaluate(text)


ALPHABETS = [
    "0123456789+-*/() ", "12+-*/()", "12+*( )", "01()/- ", "12345+-*/ ", "9*/", "()", "1()", "0 ", "01",
    "0123456789+-*/()._eExX\n\tab\u0663\u00b2\uff11\u00e9", "1+ \n", "1_+.", "-+1",
]
WELL_FORMED = ["(5 - 3) * 4", "8/(3-8/3)", "1 + 2 * 3 - 4 / 5", "((1+2)*(3+4))/5", "10 - 20", "100*7", "2-(1-(3-2))"]


def hostile_text(rng):
    """A random string of one of the alphabets, or an expression with up to three characters changed."""
    alphabet = rng.choice(ALPHABETS)
    if rng.random() < 0.6:
        return "".join(rng.choices(alphabet, k=rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 20, 40))))
    text = list(rng.choice(WELL_FORMED))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        text[at : at + rng.randrange(2)] = rng.choice(("", rng.choice(alphabet)))
    return "".join(text)


@settings(CALM, max_examples=100)
@given(st.integers(0, 2**64))
def test_evaluate_survives_100_000_hostile_strings(seed):
    """Guards against any exception but ValueError, a hang, a wrong value, or a value for text outside the grammar."""
    rng = random.Random(seed)
    with no_hang():
        for _ in range(1000):
            agree(hostile_text(rng))


@settings(CALM, max_examples=1000)
@given(st.one_of(st.text(max_size=30), st.text("0123456789+-*/() ", max_size=30), st.text("()1+", max_size=300)))
def test_evaluate_on_whatever_hypothesis_thinks_of(text):
    """Guards against characters that none of our own alphabets holds."""
    with no_hang():
        agree(text)


# ---------------------------------------------------------------------------------------------------- reward

RIGHT = " think</think>\n<answer>(5 - 3) * 4</answer>"  # numbers 3, 4, 5, target 8
GRADED = [  # response, format, answer
    (RIGHT, 1, 1),
    ("</think>\n<answer>4*(5-3)</answer>", 1, 1),
    (" a\nb\n</think>\n<answer>  4 * (5 - 3)  </answer>", 1, 1),
    (" think</think>\n<answer>(5 - 4) * 3</answer>", 1, 0),  # wrong value
    (" think</think>\n<answer>5 + 3</answer>", 1, 0),  # right value, a number missing
    (" think</think>\n<answer>5 + 3 + 4 - 4</answer>", 1, 0),  # used twice
    (" think</think>\n<answer>(5 - 3) * 4 * 1</answer>", 1, 0),  # a foreign number
    (" think</think>\n<answer>8</answer>", 1, 0),
    (" think</think>\n<answer>4 + 5 - 3 + 2</answer>", 1, 0),
    (" think</think>\n<answer>-(3 - 5) * 4</answer>", 1, 0),  # unary minus
    (" think</think>\n<answer>-3 * 4 + 5 * 4</answer>", 1, 0),
    (" think</think>\n<answer>(5 - 3) * 4 = 8</answer>", 1, 0),
    (" think</think>\n<answer>\n(5 - 3) * 4\n</answer>", 1, 0),  # spaces only
    (" think</think>\n<answer>the answer</answer>", 1, 0),
    (" think</think>\n<answer></answer>", 1, 0),
    (RIGHT + " ", 0.6, 1),  # something after </answer>
    (RIGHT + "\n", 0.6, 1),
    (RIGHT + "</answer>", 0.6, 1),
    (" think</think><answer>(5 - 3) * 4</answer>", 0.6, 1),  # no newline between the tags
    (" think</think>\n\n<answer>(5 - 3) * 4</answer>", 0.6, 1),
    (" think</think> \n<answer>(5 - 3) * 4</answer>", 0.6, 1),
    (" a</think> b</think>\n<answer>(5 - 3) * 4</answer>", 0.6, 1),
    (" <think>a</think>\n<answer>(5 - 3) * 4</answer>", 0.6, 1),
    (" think\n<answer>(5 - 3) * 4</answer>", 0.5, 1),  # think not closed
    ("<answer>(5 - 3) * 4</answer>", 0.5, 1),
    (" <answer>(5 - 3) * 4</answer></think>", 0.6, 1),  # <answer> inside think
    (" think</think>\n<answer>(5 - 3) * 4", 0.1, 0),  # answer not closed
    (" think</think>\n(5 - 3) * 4</answer>", 0.1, 0),  # answer not opened
    (" think</think></answer>\n<answer>(5 - 3) * 4", 0.1, 0),  # closed before it is opened
    (" think</think>\n<answer>(5 - 3) * 4</Answer>", 0.1, 0),
    (" think</think>", 0.1, 0),
    (" think", 0, 0),
    ("", 0, 0),
    (" think</think>\n<answer>5 + 3</answer>\n<answer>(5 - 3) * 4</answer>", 0, 1),  # two: the last is graded
    (" think</think>\n<answer>(5 - 3) * 4</answer>\n<answer>5 + 3</answer>", 0, 0),
    (" think</think>\n<answer>(5 - 3) * 4</answer>\n<answer>5 + 3", 0, 0),  # the last is not closed
    (" think</think>\n<answer>(5 - 3) * 4</answer>\n<answer>", 0, 0),
    ("<answer><answer>(5 - 3) * 4</answer></think>", 0, 1),
    (" think</think>\n<answer>(5 - 3) * 4</think></answer>", 0.6, 0),
    (" think</think>\n<answer>(5 - 3) * 4</answer> 9</answer>", 0.6, 1),  # ends at the first </answer>
]


@pytest.mark.parametrize("response, layout, answer", GRADED, ids=range(len(GRADED)))
def test_reward_of_responses_graded_by_hand(response, layout, answer):
    """Guards against a wrong grade: which answer counts, what layout is full, partial credit, how the two add up."""
    graded = task.reward(response, (3, 4, 5), 8)
    assert graded == {"reward": pytest.approx(0.1 * layout + answer), "format": pytest.approx(layout), "answer": answer}


@pytest.mark.parametrize("expression, numbers, target, answer", [
    ("8/(3-8/3)", (3, 3, 8, 8), 24, 1), ("8 / (3 - 8 / 3)", (8, 3, 8, 3), 24, 1), ("8/(3-8/3)", (3, 8, 8), 24, 0),
    ("8/(3-8/3)", (3, 3, 8), 24, 0), ("1/3*3", (1, 3, 3), 1, 1), ("(1+2)/2", (1, 2, 2), 1, 0), ("7/2", (2, 7), 3, 0),
    ("1 1", (1, 1), 11, 0), ("1 + 0", (1, 0), 1, 1), ("11 - 1", (1, 1, 1), 10, 0), ("12 + 1", (1, 2, 1), 13, 0),
    ("5", (5,), 5, 1), ("3 - 3", (3, 3), 0, 1), ("3-5", (3, 5), -2, 1), ("1/(2-2)", (1, 2, 2), 0, 0),
    ("1/3*3", (1, 3, 3), 0.9999999999999999, 0), ("01 + 2", (1, 2), 3, 0),
])
def test_answer_is_exact_and_uses_each_number_once(expression, numbers, target, answer):
    """Guards against rounding (8/(3-8/3) by floats, 7/2 = 3), sets instead of multisets, and digits glued together."""
    assert task.reward(f"</think>\n<answer>{expression}</answer>", numbers, target)["answer"] == answer


def test_reward_takes_the_numbers_in_any_order_and_as_any_iterable():
    """Guards against numbers compared in the order of the prompt, or an iterator that is used up too early."""
    for order in itertools.permutations((3, 4, 5)):
        assert task.reward(RIGHT, iter(order), 8)["answer"] == 1
    assert task.reward(RIGHT, np.array([3, 4, 5]), 8)["answer"] == 1


def oracle_grade(response, numbers, target):
    """format and answer by counting and cutting, no regular expression over the layout."""
    count = {tag: response.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")}
    halves = response.split("</think>\n<answer>")
    if count["<answer>"] > 1:
        layout = 0.0
    elif list(count.values()) == [0, 1, 1, 1] and len(halves) == 2 and halves[1].endswith("</answer>"):
        layout = 1.0
    else:
        layout = 0.1 * bool(count["</think>"]) + 0.5 * ("</answer>" in "".join(response.split("<answer>")[1:]))
    last = response.split("<answer>")[-1] if count["<answer>"] else ""
    text = last.split("</answer>")[0] if "</answer>" in last else ""
    used = Counter(int(word) for word in "".join(c if c in "0123456789" else " " for c in text).split())
    return layout, float(oracle_value(text) == target and used == Counter(numbers))


pieces = st.sampled_from([
    "</think>\n<answer>", "</think>\n<answer>", "</answer>", "</answer>", "<answer>", "</think>", "<think>", "\n", " ",
    "4 * (5 - 3)", "(5-3)*4", "4", "8", "5 + 3", "-", "<", ">", "answer", "/", "\u00e9", "</answer",
])


@settings(CALM, max_examples=2000)
@given(st.lists(pieces, max_size=9).map("".join))
def test_reward_equals_a_grade_by_counting_and_cutting(response):
    """Guards against layouts that the table of hand-graded responses does not hold."""
    layout, answer = oracle_grade(response, (3, 4, 5), 8)
    graded = task.reward(response, (3, 4, 5), 8)
    assert (graded["format"], graded["answer"]) == (pytest.approx(layout), answer)
    assert graded["reward"] == pytest.approx(0.1 * layout + answer)


@settings(CALM, max_examples=500)
@given(st.text(max_size=60), st.lists(st.integers(0, 30), max_size=4), st.integers(-5, 100))
def test_reward_never_raises(text, numbers, target):
    """Guards against a response that stops the whole run: whatever a model writes gets a grade."""
    for response in (text, f"<answer>{text}</answer>", f"{text}</think>\n<answer>{text}"):
        layout, answer = oracle_grade(response, numbers, target)
        with no_hang():
            graded = task.reward(response, numbers, target)
        assert (graded["format"], graded["answer"]) == (pytest.approx(layout), answer)


# ------------------------------------------------------------------------------------------------ the solver


def bracketings(values, whole):
    """The values of a row of numbers, order kept, under all operators and parentheses: cut it in two at each place."""
    if len(values) == 1:
        return {Fraction(values[0])}
    found = set()
    for cut in range(1, len(values)):
        for a, b in itertools.product(bracketings(values[:cut], whole), bracketings(values[cut:], whole)):
            results = [f(a, b) for sign, f in OPERATORS.items() if sign != "/" or b != 0]
            found |= {r for r in results if not whole or (r.denominator == 1 and r >= 0)}
    return found


def all_values(numbers, whole):
    """The values of all expressions of the numbers: every order, every bracketing."""
    return set().union(*(bracketings(order, whole) for order in set(itertools.permutations(numbers))))


numbers_lists = st.lists(st.integers(0, 13), min_size=1, max_size=3)


@settings(CALM, max_examples=150)
@given(numbers_lists, st.booleans())
def test_solver_reaches_the_same_values_as_permutations_and_parentheses(numbers, whole):
    """Guards against a missed order, operator or grouping, and against values that no expression has."""
    reached = {result for result, _ in task.derivations(tuple(numbers), whole)}
    assert reached == all_values(numbers, whole)


@pytest.mark.parametrize("numbers", [(3, 3, 8, 8), (1, 2, 5, 7), (0, 1, 4, 6), (2, 2, 2, 2)])
def test_solver_on_four_numbers(numbers):
    """Guards against a grouping that exists from four numbers on only, (a b)(c d), being missed."""
    for whole in (False, True):
        assert {result for result, _ in task.derivations(numbers, whole)} == all_values(numbers, whole)


def follow(numbers, steps, whole):
    """Do the steps one by one on a pool of numbers, and return what is left; each may take only what is there."""
    pool = Counter(map(Fraction, numbers))
    for a, sign, b, result in steps:
        assert OPERATORS[sign](a, b) == result
        assert not whole or all(isinstance(v, int) and v >= 0 for v in (a, b, result))
        pool.subtract([a, b])
        assert min(pool.values()) >= 0, f"{a} or {b} is not there"
        pool[Fraction(result)] += 1
    return list(pool.elements())


def check_solutions(problem, whole):
    """Every solution's steps lead to the target, and so does their expression, which uses each number once."""
    for steps in task.solutions(problem, whole):
        assert follow(problem.numbers, steps, whole) == [problem.target]
        text = task.expression(problem.numbers, steps)
        assert oracle_value(text) == problem.target
        assert sorted(map(int, re.findall(r"\d+", text))) == sorted(problem.numbers)


@settings(CALM, max_examples=100)
@given(numbers_lists, st.booleans(), st.data())
def test_every_solution_can_be_written_as_one_expression(numbers, whole, data):
    """Guards against lost parentheses, swapped operands, equal values mixed up, and steps that do not add up."""
    whole_values = sorted(v.numerator for v in all_values(numbers, whole) if v.denominator == 1)
    target = data.draw(st.sampled_from(whole_values))
    problem = Problem(tuple(numbers), target)
    assert task.solutions(problem, whole)
    check_solutions(problem, whole)


@pytest.mark.parametrize("numbers, target", [((3, 3, 8, 8), 24), ((2, 2, 4, 4), 4), ((1, 5, 5, 5), 24)])
def test_expressions_of_four_numbers(numbers, target):
    """Guards against the same in deeper expressions, with fractions and with equal intermediate results."""
    assert task.is_solvable(Problem(numbers, target))
    check_solutions(Problem(numbers, target), whole=False)


def test_3_3_8_8_needs_fractions():
    """Guards against a solver that knows whole steps only: 8 / (3 - 8 / 3) = 24 has no other way."""
    problem = Problem((3, 3, 8, 8), 24)
    assert task.solutions(problem, whole=True) == []
    assert task.is_solvable(problem)
    assert {task.expression(problem.numbers, s) for s in task.solutions(problem)} == {"8 / (3 - (8 / 3))"}


@settings(CALM, max_examples=100)
@given(numbers_lists, st.integers(-20, 120))
def test_is_solvable_exactly_when_some_expression_has_the_value(numbers, target):
    """Guards against solvable puzzles thrown away and unsolvable ones kept."""
    assert task.is_solvable(Problem(tuple(numbers), target)) == (target in all_values(numbers, whole=False))


def test_command_line_prints_right_expressions_only(monkeypatch, capsys):
    """Guards against a broken command line: every line after the prompt is an expression of 3, 7, 8 that is 29."""
    monkeypatch.setattr(sys, "argv", ["countdown_task.py", "3", "7", "8", "--target", "29"])
    task.main()
    lines = capsys.readouterr().out.split("split: ")[1].splitlines()[1:]
    assert lines and all(oracle_value(line) == 29 for line in lines)
    assert all(sorted(re.findall(r"\d+", line)) == ["3", "7", "8"] for line in lines)
    monkeypatch.setattr(sys, "argv", ["countdown_task.py", "1", "1", "--target", "29"])
    task.main()
    assert capsys.readouterr().out.endswith("no solution\n")


def test_examples_in_the_docstrings():
    """Guards against documentation that no longer says what the code does."""
    result = doctest.testmod(task)
    assert result.attempted >= 2 and result.failed == 0


# ------------------------------------------------------------------------------------- puzzles and their splits

PARTS = ("train", "heldout", "new_numbers")


def puzzle(problem):
    """What makes two problems the same puzzle."""
    return tuple(sorted(problem.numbers)), problem.target


@pytest.fixture(scope="module")
def everything():
    """All default puzzles."""
    return task.universe()


def test_universe_is_what_brute_force_finds(everything):
    """Guards against puzzles lost or invented: 16,292 sets and targets that whole steps reach, as brute force finds."""
    expected = {(numbers, int(value)) for numbers in itertools.combinations_with_replacement(range(1, 21), 3)
                for value in all_values(numbers, whole=True) if 1 <= value <= 100}
    assert len(everything) == len(expected) == 16_292
    assert {tuple(p) for p in everything} == expected


@pytest.mark.parametrize("count, low, high, most", [(2, 1, 6, 30), (3, 4, 7, 10), (2, 0, 3, 5), (4, 9, 10, 40), (1, 3, 9, 7)])
def test_universe_keeps_to_its_ranges(count, low, high, most):
    """Guards against arguments that are ignored or off by one at either end of a range."""
    sets = {tuple(sorted(s)) for s in itertools.product(range(low, high + 1), repeat=count)}
    expected = {(numbers, int(value)) for numbers in sets for value in all_values(numbers, True) if 1 <= value <= most}
    found = task.universe(count, low, high, most)
    assert len(found) == len(expected) and {tuple(p) for p in found} == expected


def test_new_numbers_are_new(everything):
    """Guards against a number set held out for new_numbers that training or heldout also shows, with another target."""
    sets = {part: {p.numbers for p in everything if task.split(p) == part} for part in PARTS}
    assert all(sets.values())
    assert not sets["new_numbers"] & (sets["train"] | sets["heldout"])


def test_splits_have_the_size_they_should_have(everything):
    """Guards against a lopsided hash: a tenth of the 1,540 sets, a tenth of the other puzzles, within five sigma."""
    sets = {p.numbers for p in everything}
    new = {p.numbers for p in everything if task.split(p) == "new_numbers"}
    others = [p for p in everything if p.numbers not in new]
    heldout = sum(task.split(p) == "heldout" for p in others)
    assert abs(len(new) - 0.1 * len(sets)) < 5 * (0.09 * len(sets)) ** 0.5
    assert abs(heldout - 0.1 * len(others)) < 5 * (0.09 * len(others)) ** 0.5
    assert {task.split(p) for p in everything} == set(PARTS)


@settings(CALM, max_examples=300)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.integers(0, 100))
def test_split_does_not_see_the_order_of_the_numbers(numbers, target):
    """Guards against the leak of the public set: the same puzzle in another order on the other side."""
    parts = {task.split(Problem(order, target)) for order in itertools.permutations(numbers)}
    assert len(parts) == 1 and parts <= set(PARTS)


def test_split_is_the_same_in_every_process():
    """Guards against a hash that Python seeds anew for each process: the held-out set would change with every run."""
    code = ("from countdown_task import Problem, split\n"
            "print([split(Problem((a, b, 7), a + b)) for a in range(1, 12) for b in range(1, 12)])")
    folder = Path(task.__file__).parent
    printed = [subprocess.run([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONHASHSEED": seed},
                              capture_output=True, text=True, check=True, timeout=120).stdout for seed in ("1", "2")]
    here = [task.split(Problem((a, b, 7), a + b)) for a in range(1, 12) for b in range(1, 12)]
    assert printed == [f"{here}\n"] * 2


@pytest.mark.parametrize("part", PARTS)
def test_generated_problems_are_distinct_solvable_and_of_their_split(part):
    """Guards against repeats, unsolvable puzzles, and puzzles of another split."""
    problems = task.generate_problems(150, part, seed=3)
    assert len(problems) == len({puzzle(p) for p in problems}) == 150
    for problem in problems:
        assert task.split(problem) == part
        assert len(problem.numbers) == 3 and all(1 <= n <= 20 for n in problem.numbers) and 1 <= problem.target <= 100
        assert problem.target in all_values(problem.numbers, whole=True)
        assert all(type(n) is int for n in (*problem.numbers, problem.target))


def test_generated_splits_share_no_puzzle():
    """Guards against a test puzzle that training has seen, in whatever order."""
    drawn = {part: {puzzle(p) for p in task.generate_problems(400, part)} for part in PARTS}
    assert not drawn["train"] & drawn["heldout"]
    sets = {part: {numbers for numbers, _ in drawn[part]} for part in PARTS}
    assert not sets["new_numbers"] & (sets["train"] | sets["heldout"])


def test_generated_numbers_come_in_random_order():
    """Guards against numbers always sorted: a model could learn the order; of 400, about a sixth should be sorted."""
    problems = task.generate_problems(400, "train")
    assert 20 < sum(list(p.numbers) == sorted(p.numbers) for p in problems) < 200


def test_seed_decides_the_problems():
    """Guards against a seed that is ignored, or a draw that cannot be repeated."""
    assert task.generate_problems(30, "train", seed=1) == task.generate_problems(30, "train", seed=1)
    assert task.generate_problems(30, "train", seed=1) != task.generate_problems(30, "train", seed=2)


def test_generator_takes_four_numbers_up_to_30():
    """Guards against fixed counts and ranges."""
    problems = task.generate_problems(12, "train", count=4, low=5, high=30, max_target=40)
    numbers = [n for p in problems for n in p.numbers]
    assert all(len(p.numbers) == 4 and p.target <= 40 for p in problems)
    assert min(numbers) >= 5 and 20 < max(numbers) <= 30
    assert all(p.target in all_values(p.numbers, whole=True) for p in problems)


def test_generator_finds_the_ends_of_its_ranges():
    """Guards against a range that leaves out its last number: all of 1 to 4 and targets 1 to 16 are to be found."""
    known = [p for p in task.universe(2, 1, 4, 100) if task.split(p) == "train"]
    drawn = task.generate_problems(len(known), "train", count=2, low=1, high=4)
    assert {puzzle(p) for p in drawn} == {puzzle(p) for p in known}


@pytest.mark.parametrize("part, ranges", [("train", {"count": 2, "high": 3}), ("new_numbers", {"max_target": 0}),
                                          ("heldout", {"count": 2, "low": 90, "high": 91, "max_target": 5})])
def test_more_problems_than_there_are(part, ranges):
    """Guards against an endless search, or a list shorter than asked for, when the puzzles run out."""
    with no_hang(), pytest.raises(ValueError, match="found only"):
        task.generate_problems(60, part, **ranges)


# ------------------------------------------------------------------------------------------- puzzles from files

GOOD = '{"target": 98, "nums": [44, 19, 35]}'


def data_file(folder, text):
    """A .jsonl file of that text."""
    path = folder / "data.jsonl"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_reader_reads_rows_as_in_countdown_tasks_3to4(tmp_path, end):
    """Guards against other field names, a changed order of numbers, and a last line with or without its newline."""
    text = GOOD + "\n" + '{"nums": [3, 3, 8, 8], "target": 24, "id": "x"}' + end
    assert task.read_problems(data_file(tmp_path, text)) == [((44, 19, 35), 98), ((3, 3, 8, 8), 24)]
    assert task.read_problems(str(tmp_path / "data.jsonl"))[0].numbers == (44, 19, 35)


MALFORMED = [
    '{"target": 98, "nums": [44, 19', "hello", '{"target": 98}', '{"nums": [1, 2]}', '{"target": "98", "nums": [44]}',
    '{"target": 98, "nums": ["44"]}', '{"target": 98, "nums": "44"}', '{"target": 98, "nums": [-44, 19]}',
    '{"target": -98, "nums": [44]}', '{"target": true, "nums": [1, 2]}', '{"target": 1, "nums": [true, 2]}',
    '{"target": 98, "nums": [44.0, 19]}', '{"target": 98.5, "nums": [44]}', '{"target": 98, "nums": []}',
    '{"target": 98, "nums": null}', '{"target": null, "nums": [1]}', '{"target": 98, "nums": 44}', "[44, 19, 35]", "[]",
    '"nums"', "98", "null", "", "   ", '{"target": 98, "nums": {"44": 1}}', '{"target": 98, "nums": [[44]]}',
    '{"target": NaN, "nums": [1]}', '{"target": [98], "nums": [44]}', GOOD + " " + GOOD,
]


@pytest.mark.parametrize("line", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("before", [0, 2])
def test_reader_names_the_malformed_line(tmp_path, line, before):
    """Guards against rows skipped in silence, a traceback from deep inside, and a line number that is off by one."""
    path = data_file(tmp_path, "".join(f"{row}\n" for row in [GOOD] * before + [line, GOOD]))
    with pytest.raises(ValueError, match=rf"data\.jsonl, line {before + 1}: expected .*nums.*target"):
        task.read_problems(path)


def test_reader_names_a_blank_line_at_the_end(tmp_path):
    """Guards against blank lines that are an error in the middle of a file and pass, or crash, at its end."""
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: expected"):
        task.read_problems(data_file(tmp_path, GOOD + "\n\n"))


def test_reader_refuses_an_empty_and_a_missing_file(tmp_path):
    """Guards against training on nothing, and against an error that does not say which file."""
    with pytest.raises(ValueError, match=r"data\.jsonl holds no puzzle"):
        task.read_problems(data_file(tmp_path, ""))
    with pytest.raises(FileNotFoundError, match="no data file .*nowhere.jsonl"):
        task.read_problems(tmp_path / "nowhere.jsonl")
    with pytest.raises(FileNotFoundError, match="no data file"):
        task.read_problems(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow_says_what_to_install(tmp_path):
    """Guards against a bare ModuleNotFoundError."""
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="pip install pyarrow"):
        task.read_problems(path)


# ----------------------------------------------------------------------- a tokenizer in the manner of Qwen's

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ENDS = ("<|endoftext|>", "<|im_end|>")


def byte_letters():
    """GPT-2's table from byte to letter, as published: printable bytes are themselves, the others count from 256."""
    letters, extra = {}, 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte:
            letters[byte] = chr(byte)
        else:
            letters[byte], extra = chr(extra), extra + 1
    return letters


LETTERS = byte_letters()
EMOJI = "\U0001f642"  # four bytes
WORDS = ["answer", "think", "</", ">\n", ">(", " -", " =", " *", " (", "\n\n", "\n<", "><", "! ", "  "]
WORDS = [word.encode() for word in WORDS] + [b" " + EMOJI.encode()[:1], EMOJI.encode()[:2], EMOJI.encode()[2:] + b"<"]
MERGES = dict.fromkeys([(w[:i], w[i : i + 1]) for w in WORDS for i in range(1, len(w))] + [(b")", b"</")])


def spell(data):
    """Bytes in GPT-2's letters."""
    return "".join(LETTERS[byte] for byte in data)


def build(folder, special=(*ENDS, "<|im_start|>"), words=()):
    """Save a byte-level BPE of the 256 bytes (token i is byte i) and MERGES; special, words: names of added tokens."""
    names = [spell([byte]) for byte in range(256)] + [spell(a + b) for a, b in MERGES]
    bpe = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[(spell(a), spell(b)) for a, b in MERGES])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in words])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """The codec of the tokenizer with ChatML tokens."""
    return task.Codec(build(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The codec of the tokenizer without <|im_start|>."""
    return task.Codec(build(tmp_path_factory.mktemp("plain"), special=("<|endoftext|>",)))


def ids_of(codec, text, end=""):
    """The tokens of a text, and those of the end token's name behind them."""
    ids = codec.tokenizer.encode(text, add_special_tokens=False).ids
    return ids + ([codec.tokenizer.token_to_id(end)] if end else [])


def token_bytes(codec, token):
    """The bytes of a token by GPT-2's table; none for the two end tokens."""
    name, table = codec.tokenizer.id_to_token(token), {letter: byte for byte, letter in LETTERS.items()}
    if name in ENDS:
        return b""
    return name.encode() if name.startswith("<|") else bytes(table[c] for c in name)


def first_character(data):
    """The first character of some bytes, U+FFFD where they are no UTF-8, and how many bytes it takes."""
    try:
        char = data.decode()[0]
    except UnicodeDecodeError as error:
        if error.start == 0:
            return "\ufffd", error.end
        char = data[: error.start].decode()[0]
    return char, len(char.encode())


def characters(data):
    """The text of some bytes, and for each byte the index of the character it belongs to."""
    text, owner = "", []
    while len(owner) < len(data):
        char, size = first_character(data[len(owner) :])
        text, owner = text + char, owner + [len(text)] * size
    return text, owner


def oracle_tokens(codec, ids):
    """Text, and for each token its span, role and whether it is in the answer: slowly, byte by byte."""
    parts = [token_bytes(codec, token) for token in ids]
    text, owner = characters(b"".join(parts))
    roles = oracle_roles(text)
    rows, at = [], 0
    for part in parts:
        mine, at = owner[at : at + len(part)], at + len(part)
        if not mine:  # an end token, behind everything
            rows.append(((len(text), len(text)), task.STRUCTURE, "<answer>" in text))
            continue
        anchor = next((i for i in mine if not text[i].isspace()), mine[0])
        rows.append(((mine[0], mine[-1] + 1), roles[anchor], "<answer>" in text and anchor >= text.rindex("<answer>")))
    return text, rows


def oracle_roles(text):
    """The role of each character: walk along; a tag is structure, a digit or sign reasoning, all else filler."""
    roles = []
    while len(roles) < len(text):
        tag = next((t for t in ("<think>", "</think>", "<answer>", "</answer>") if text.startswith(t, len(roles))), "")
        reasoning = text[len(roles)] in "0123456789+-*/=()"
        roles += [task.STRUCTURE] * len(tag) or [task.REASONING if reasoning else task.FILLER]
    return roles


def check_tokens(codec, ids):
    """decode and annotate give what the oracle gives."""
    text, rows = oracle_tokens(codec, ids)
    decoded, spans = codec.decode(ids)
    role, in_answer = task.annotate(decoded, spans)
    assert decoded == text
    assert list(zip(role.tolist(), in_answer.tolist())) == [row[1:] for row in rows]
    if not re.search(rb"\xed[\xa0-\xbf]", b"".join(token_bytes(codec, i) for i in ids)):  # surrogates: see below
        assert spans == [row[0] for row in rows]


def labelled(codec, ids):
    """(text, role's letter, in the answer) of each token, by the module."""
    text, spans = codec.decode(ids)
    role, in_answer = task.annotate(text, spans)
    return [(text[a:b], "FRS"[r], bool(inside)) for (a, b), r, inside in zip(spans, role, in_answer)]


# --------------------------------------------------------------------------------- roles, answer and spans


def test_role_numbers_and_names():
    """Guards against the letters F, R, S below (and the log's names) meaning another role."""
    assert (task.FILLER, task.REASONING, task.STRUCTURE) == (0, 1, 2)
    assert task.ROLES == ("filler", "reasoning", "structure")


def test_every_token_of_a_response_by_hand(codec):
    """Guards against tags counted as filler because they are several tokens or merge with their neighbours."""
    ids = ids_of(codec, " 5 - 3 = 2!</think>\n<answer>(5 - 3)</answer>", "<|im_end|>")
    assert labelled(codec, ids) == [
        (" ", "F", False), ("5", "R", False), (" -", "R", False), (" ", "F", False), ("3", "R", False),
        (" =", "R", False), (" ", "F", False), ("2", "R", False), ("!", "F", False),
        ("</", "S", False), ("think", "S", False), (">\n", "S", False),
        ("<", "S", True), ("answer", "S", True), (">(", "S", True), ("5", "R", True), (" -", "R", True),
        (" ", "F", True), ("3", "R", True), (")</", "R", True), ("answer", "S", True), (">", "S", True), ("", "S", True)]


def test_roles_of_merged_tokens_that_begin_with_white_space_or_another_character():
    """Guards against a role taken from a leading space, or from a tag that only the end of the token touches."""
    text = "!</think>\n<answer>  7 +</answer>"
    spans = [(0, 3), (3, 9), (9, 11), (11, 18), (18, 21), (21, 23), (23, 25), (25, len(text))]
    assert [text[a:b] for a, b in spans] == ["!</", "think>", "\n<", "answer>", "  7", " +", "</", "answer>"]
    role, in_answer = task.annotate(text, spans)
    assert [task.ROLES[r][0] for r in role] == ["f", "s", "s", "s", "r", "r", "s", "s"]
    assert in_answer.tolist() == [False, False, True, True, True, True, True, True]


@pytest.mark.parametrize("text, roles", [
    ("a1 +-*/=().,x", "FRFRRRRRRRFFF"), ("<think>", "S" * 7), ("</answer>", "S" * 9), ("<answer", "F" * 7),
    ("< answer>", "F" * 9), ("<Answer>", "F" * 8), ("</ think>", "FR" + "F" * 7), ("<<answer>>", "F" + "S" * 8 + "F"),
    ("\u0663\u00b2\u00d7\u2212", "FFFF"), ("<answer></answer>", "S" * 17), ("", ""),
])
def test_roles_of_single_characters_by_hand(text, roles):
    """Guards against near-tags taken for tags, foreign digits for digits, and `/` in half a tag for structure."""
    role, _ = task.annotate(text, [(i, i + 1) for i in range(len(text))])
    assert "".join("FRS"[r] for r in role) == roles


def test_the_answer_begins_with_its_tag_and_not_one_token_early(codec):
    """Guards against the original's off-by-one: the first token of the answer is `<`, not the `>\\n` before it."""
    ids = ids_of(codec, "</think>\n<answer>8</answer>", "<|im_end|>")
    rows = labelled(codec, ids)
    first = next(i for i, (_, _, inside) in enumerate(rows) if inside)
    assert [text for text, _, _ in rows[first - 1 : first + 2]] == [">\n", "<", "answer"]
    assert all(inside for _, _, inside in rows[first:])


def test_of_two_answers_the_last_is_the_graded_one(codec):
    """Guards against credit for an answer that the reward does not look at."""
    rows = labelled(codec, ids_of(codec, "<answer>8</answer> no <answer>9</answer>!"))
    begins = [i for i, (text, _, _) in enumerate(rows) if text == "<" or text == " <"]
    assert len(begins) == 2 and [inside for _, _, inside in rows] == [i >= begins[1] for i in range(len(rows))]


@pytest.mark.parametrize("response, inside", [(" 5</think>", False), ("<answer>5", True), ("<answer", False), ("", False)])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_token(codec, end, response, inside):
    """Guards against an end token that counts as text or filler, or as answer where no `<answer>` is."""
    text, spans = codec.decode(ids_of(codec, response, end))
    role, in_answer = task.annotate(text, spans)
    assert text == response and spans[-1] == (len(response), len(response))
    assert role[-1] == task.STRUCTURE and in_answer[-1] == inside


RESPONSE = (f" caf\u00e9 {EMOJI} \u4f60: 5 - 3 = 2\n\n4 * 2 = 8</think>\n<answer>(5 - 3) * 4{EMOJI}</answer>"
            "<answer>4 * (5 - 3)</answer>")


def test_a_response_cut_off_anywhere(codec):
    """Guards against a crash, or an answer that begins before its tag is whole, when the token limit cuts a response."""
    ids = ids_of(codec, RESPONSE)
    assert len(ids) > 60
    for size in range(len(ids) + 1):
        check_tokens(codec, ids[:size])


def test_a_response_that_is_all_white_space_or_nothing(codec):
    """Guards against a search for a first solid character that never ends, or falls off the end of the text."""
    for text in ("", " ", "\n\n", " \n \n  "):
        check_tokens(codec, ids_of(codec, text))
        check_tokens(codec, ids_of(codec, text, "<|im_end|>"))


def test_the_tokenizer_is_like_qwens(codec):
    """Guards against these tests losing their point: the tokens that made the original fail have to exist here."""
    split = lambda text: [token_bytes(codec, i) for i in ids_of(codec, text)]
    assert split("</think>\n<answer>(12)</answer>") == [
        b"</", b"think", b">\n", b"<", b"answer", b">(", b"1", b"2", b")</", b"answer", b">"]
    one, two, three, four = (EMOJI.encode()[i : i + 1] for i in range(4))
    assert split(EMOJI + "<answer>") == [one + two, three + four + b"<", b"answer", b">"]
    assert split(" " + EMOJI) == [b" " + one, two, three + four]
    assert split("\u00e9") == [b"\xc3", b"\xa9"]


def test_characters_split_over_tokens_by_hand(codec):
    """Guards against spans counted by the length of single decoded tokens, where half a character counts as one."""
    text, spans = codec.decode(ids_of(codec, f"\u00e9 {EMOJI}25", "<|im_end|>"))
    assert text == f"\u00e9 {EMOJI}25"
    #                  C3      A9    20 F0     9F    99 82     2       5     end
    assert spans == [(0, 1), (0, 1), (1, 3), (2, 3), (2, 3), (3, 4), (4, 5), (5, 5)]


def test_a_token_that_ends_a_character_and_begins_a_tag(codec):
    """Guards against a token counted as the tag's although its first character is another one."""
    assert labelled(codec, ids_of(codec, EMOJI + "<answer>9")) == [
        (EMOJI, "F", False), (EMOJI + "<", "F", False), ("answer", "S", True), (">", "S", True), ("9", "R", True)]


texts = st.one_of(
    st.text(max_size=25),
    st.lists(st.sampled_from(["<answer>", "</answer>", "<think>", "</think>", "\n", " ", "5", " - ", "(", ")", "\u00e9",
                              EMOJI, "\u4f60", "<", ">", "/", "answer", "=", "\u2003", "\u0663"]),
             max_size=14).map("".join))


@settings(CALM, max_examples=600)
@given(texts, st.sampled_from(("", *ENDS)), st.booleans())
def test_tokens_of_valid_text_are_labelled_as_their_characters(codec, text, end, single_bytes):
    """Guards against any shift between tokens and text: spans, roles and answer equal those found byte by byte."""
    ids = list(text.encode()) if single_bytes else ids_of(codec, text)  # token i is byte i
    ids += [codec.tokenizer.token_to_id(end)] if end else []
    assert b"".join(token_bytes(codec, i) for i in ids) == text.encode()
    check_tokens(codec, ids)


@settings(CALM, max_examples=300)
@given(texts)
def test_spans_tile_the_text(codec, text):
    """Guards against gaps between tokens, and overlaps other than a character that two tokens share."""
    ids = ids_of(codec, text)
    decoded, spans = codec.decode(ids)
    assert decoded == text
    assert [a for a, _ in spans] == sorted(a for a, _ in spans)
    assert all(b - 1 <= c <= b for (_, b), (c, _) in zip(spans, spans[1:]))
    assert (spans[0][0], spans[-1][1]) == (0, len(text)) if text else spans == []


def test_offsets_of_the_tokenizers_library(codec):
    """Guards against spans that differ from those of the library that cut the text."""
    encoding = codec.tokenizer.encode(RESPONSE, add_special_tokens=False)
    assert codec.decode(encoding.ids)[1] == encoding.offsets


token_lists = st.lists(st.one_of(st.integers(0, 400), st.integers(128, 255), st.sampled_from([0xE2, 0xF0, 0x9F, 0xC3])),
                       max_size=12)


@settings(CALM, max_examples=1500)
@given(token_lists, st.booleans())
def test_text_of_any_tokens_is_that_of_the_library(codec, tokens, ended):
    """Guards against another text than the library's for bytes that are no UTF-8, as an untrained model writes them."""
    ends = [codec.tokenizer.token_to_id(name) for name in ENDS]
    ids = [i % codec.size for i in tokens if i % codec.size not in ends]
    text, spans = codec.decode(ids + ends[:1] * ended)
    assert text == codec.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == b"".join(token_bytes(codec, i) for i in ids).decode("utf-8", errors="replace")
    assert len(spans) == len(ids) + ended and all(0 <= a <= b <= len(text) for a, b in spans)
    assert len(task.annotate(text, spans)[0]) == len(spans)


@settings(CALM, max_examples=1500)
@given(token_lists, st.booleans())
def test_any_tokens_are_labelled_as_their_own_characters(codec, tokens, ended):
    """Guards against a token that is given the U+FFFD of a character which the token before it broke off.

    Of two tokens that are the bytes of a surrogate, ED A0, the second may have the first one's U+FFFD for its span, as
    Python's incremental decoder waits for a third byte; its role is filler either way.
    """
    ends = [codec.tokenizer.token_to_id(name) for name in ENDS]
    check_tokens(codec, [i % codec.size for i in tokens if i % codec.size not in ends] + ends[:1] * ended)


def test_a_tag_after_half_a_character(codec):
    """Guards against `<` of `<answer>` counted as filler and outside, because half a character stands before it."""
    ids = [0xF0, 0x9F, *ids_of(codec, "<answer>5")]
    assert codec.decode(ids)[0] == "\ufffd<answer>5"
    roles, in_answer = task.annotate(*codec.decode(ids))
    assert ["FRS"[r] for r in roles] == ["F", "F", "S", "S", "S", "R"]
    assert in_answer.tolist() == [False, False, True, True, True, True]


def test_the_end_token_after_half_a_character(codec):
    """Guards against an end token that is filler, because half a character stands before it."""
    text, spans = codec.decode([*ids_of(codec, "8"), 0xF0, 0x9F, codec.tokenizer.token_to_id("<|im_end|>")])
    assert text == "8\ufffd" and spans[-1] == (2, 2)
    assert task.annotate(text, spans)[0].tolist() == [task.REASONING, task.FILLER, task.FILLER, task.STRUCTURE]


def test_tags_that_are_single_tokens_as_in_qwen3(tmp_path):
    """Guards against added tokens that lose their text: in Qwen3 `<think>` and `</think>` are one token each."""
    codec = task.Codec(build(tmp_path / "q3", words=("<think>", "</think>")))
    ids = ids_of(codec, "5</think>\n<answer>", "<|im_end|>")
    assert [codec.tokenizer.id_to_token(i) for i in ids[:2]] == ["5", "</think>"]
    assert labelled(codec, ids)[:4] == [("5", "R", False), ("</think>", "S", False), ("\n", "F", False), ("<", "S", True)]
    assert codec.prompt(Problem((1, 2, 3), 6))[-1] == codec.tokenizer.token_to_id("<think>")


# --------------------------------------------------------------------------------------------------- steps


def found(text):
    """The steps of a text as words."""
    return [tuple(text[a:b] for a, b in step) for step in task.find_steps(text)]


@pytest.mark.parametrize("text, steps", [
    (" 5 - 3 = 2", [("5", "-", "3", "2")]),
    (" 5 - 3 = 2, 4 * 2 = 8.", [("5", "-", "3", "2"), ("4", "*", "2", "8")]),
    ("5-3=2", [("5", "-", "3", "2")]),
    ("5-3=2\n4*2=8", [("5", "-", "3", "2"), ("4", "*", "2", "8")]),
    ("3 - 5 = -2", [("3", "-", "5", "-2")]),
    ("first 12 * 10 = 120.", [("12", "*", "10", "120")]),
    ("20 / 4 = 5 and 1 + 1 = 3", [("20", "/", "4", "5"), ("1", "+", "1", "3")]),
    ("we have 5\n - 3  =  2", [("5", "-", "3", "2")]),
    ("4 - 3 - 2 = 1", []), ("14-13-12=1", []), ("4 -\n3 - 2 = 1", []), ("(5 - 3) * 4 = 8", []), ("(8 - 6)3 - 2 = 4", []),
    ("4 * (5 - 3) = 8", []), ("2 / 3 * 4 = 9", []), ("1.5 + 2 = 3", []), ("-5 + 2 = 3", []), ("5 - 3", []),
    ("5 = 5", []), ("5 - = 3", []), ("a - 3 = 2", []), ("", []), ("5 - \u0663 = 2", []), ("5 ** 3 = 2", []), ("5 - 3 == 2", []),
])
def test_steps_by_hand(text, steps):
    """Guards against the tail of a longer calculation taken for a calculation, and against spans that are off by one."""
    assert found(text) == steps


def test_steps_in_sentences():
    """Guards against losing the calculation that begins a sentence or a list item, behind a full stop."""
    assert found("5 - 3 = 2. 4 * 2 = 8.") == [("5", "-", "3", "2"), ("4", "*", "2", "8")]
    assert found("1. 5 - 3 = 2") == [("5", "-", "3", "2")]


def test_steps_do_not_cut_a_decimal_in_two():
    """Guards against `5 / 2 = 2.5` taken for the (wrong) calculation 5 / 2 = 2."""
    assert found("5 / 2 = 2.5") == []


# ---------------------------------------------------------------------------------- which steps are right


def verdicts(text, numbers):
    """T or F for each step of a text."""
    return "".join("FT"[v] for v in task.check_steps(text, task.find_steps(text), numbers))


@pytest.mark.parametrize("text, numbers, right", [
    ("5 - 3 = 2, 4 * 2 = 8", (3, 4, 5), "TT"), ("5 - 3 = 3", (3, 4, 5), "F"), ("5 + 3 = 9", (3, 4, 5), "F"),
    ("5 * 3 = 8", (3, 4, 5), "F"), ("3 - 5 = -2", (3, 4, 5), "T"), ("3 - 5 = 2", (3, 4, 5), "F"), ("", (3, 4, 5), ""),
    ("no sum", (3, 4, 5), ""), ("5 + 4 + 3 = 12", (3, 4, 5), ""), ("5 + 5 = 10", (5,), "F"), ("5 + 5 = 10", (), "F"),
    # Division is exact, and not by zero.
    ("8 / 4 = 2", (4, 8), "T"), ("4 / 8 = 2", (4, 8), "F"), ("7 / 2 = 3", (2, 7), "F"), ("7 / 2 = 4", (2, 7), "F"),
    ("8 / 0 = 0", (0, 8), "F"), ("8 / 0 = 8", (0, 8), "F"), ("0 / 8 = 0", (0, 8), "T"), ("0 * 8 = 0", (0, 8), "T"),
    # A number that is not at hand, or not twice.
    ("9 - 3 = 6", (3, 4, 5), "F"), ("3 + 9 = 12", (3, 4, 5), "F"), ("5 + 5 = 10", (3, 4, 5), "F"),
    ("5 - 3 = 2, 4 * 3 = 12", (3, 4, 5), "TF"), ("5 - 3 = 2, 5 * 2 = 10", (3, 4, 5), "TF"),
    ("5 + 5 = 10", (5, 5, 3), "T"), ("5 + 5 = 10, 10 - 3 = 7", (5, 5, 3), "TT"),
    ("5 + 5 = 10, 10 + 5 = 15", (5, 5, 3), "TF"), ("5 - 3 = 2, 5 * 2 = 10", (5, 5, 3), "TT"),
    ("0 + 0 = 0, 0 + 5 = 5", (0, 0, 5), "TT"), ("4 - 2 = 2, 2 + 2 = 4", (4, 2, 2), "TT"),
    ("4 - 2 = 2, 2 * 3 = 6, 2 + 6 = 8", (4, 2, 2, 3), "TTT"), ("4 - 2 = 2, 2 * 3 = 6, 2 + 6 = 8", (4, 2, 3), "TTF"),
    # A wrong result counts once: what follows may use what was claimed, and only that.
    ("5 - 3 = 1, 4 * 1 = 4", (3, 4, 5), "FT"), ("5 - 3 = 1, 4 * 2 = 8", (3, 4, 5), "FF"),
    ("9 - 3 = 6, 4 + 5 = 9, 6 + 9 = 15", (3, 4, 5), "FTT"),
    # A finished attempt hands the numbers back, and takes its result away.
    ("5 - 3 = 2, 4 * 2 = 8, 5 + 3 = 8, 8 - 4 = 4", (3, 4, 5), "TTTT"),
    ("5 - 3 = 2, 4 * 2 = 8, 8 + 3 = 11", (3, 4, 5), "TTF"),
    # So does one that is given up at the end of a sentence; one that goes on behind it is not given up.
    ("5 + 3 = 8. 5 - 3 = 2, 4 * 2 = 8", (3, 4, 5), "TTT"), ("5 + 3 = 8, 5 - 3 = 2", (3, 4, 5), "TF"),
    ("5 + 3 = 8! 5 - 3 = 2", (3, 4, 5), "TT"), ("5 + 3 = 8? No: 5 - 3 = 2", (3, 4, 5), "TT"),
    ("5 + 3 = 8\n5 - 3 = 2", (3, 4, 5), "TT"), ("5 + 3 = 8!</think> 5 - 3 = 2", (3, 4, 5), "TT"),
    ("5 + 3 = 8. Well, 4 + 8 = 12", (3, 4, 5), "TT"), ("5 + 3 = 8. 8 + 3 = 11", (3, 4, 5), "TF"),
    ("5 + 3 = 8 or 8.0 and 5 - 3 = 2", (3, 4, 5), "TF"), ("Hm. 5 + 3 = 8, 5 - 3 = 2", (3, 4, 5), "TF"),
    # Whether it is given up can show later than in the next step, which may use only what both have.
    ("20 - 18 = 2, 2 + 19 = 21. 20 - 17 = 3, 20 * 3 = 60", (20, 20, 17), "FFTT"),
    ("3 + 4 = 7. 5 + 6 = 11, 3 + 4 = 7, 7 + 11 = 18", (3, 4, 5, 6), "TTTT"),
    ("3 + 4 = 7. 5 + 6 = 11, 7 + 11 = 18", (3, 4, 5, 6), "TTT"),
    ("3 + 4 = 7. 5 + 6 = 11. 3 + 7 = 10", (3, 4, 5, 6), "TTF"),
    ("5 + 3 = 8. 5 - 3 = 2, 5 + 4 = 9", (3, 4, 5), "TTF"), ("5\n+ 3 = 8, 5 - 3 = 2", (3, 4, 5), "TF"),
    ("5 + 3 = 8\n<b> 5 - 3 = 2", (3, 4, 5), "TF"),
])
def test_steps_graded_by_hand(text, numbers, right):
    """Guards against numbers used twice or made up, division with a rest, and an error that spoils what follows."""
    assert verdicts(text, numbers) == right


@pytest.mark.parametrize("numbers", [(3, 4, 5), (5, 5, 3), (0, 1, 7), (2, 2, 2), (20, 6), (8, 4, 2, 2), (12, 7, 1, 13)])
def test_every_derivation_is_right(numbers):
    """Guards against a right way that is counted wrong: all that brute force finds, each behind the one before it."""
    for mark in (", ", ". ", "\n"):
        ways = [steps for _, steps in task.derivations(numbers, whole=True)]
        written = [mark.join("{0} {1} {2} = {3}".format(*step) for step in steps) for steps in ways]
        assert {verdicts(text, numbers) for text in written} == {"T" * (len(numbers) - 1)}
        assert verdicts(mark.join(written[:300]), numbers) == "T" * (len(numbers) - 1) * min(300, len(ways))


@settings(CALM, max_examples=300)
@given(st.lists(st.integers(0, 13), min_size=2, max_size=5), st.integers(0, 2**32))
def test_errors_are_found_where_they_are(numbers, seed):
    """Guards against an error missed, or blamed on a later step: random attempts in one breath, some steps wrong."""
    rng, pool, texts, right = random.Random(seed), list(numbers), [], ""
    for _ in range(8):
        pool = pool if len(pool) > 1 else list(numbers)
        rng.shuffle(pool)
        (a, b), rest = pool[:2], pool[2:]
        fits = {"+": True, "*": True, "-": a >= b, "/": b != 0 and a % b == 0}
        sign, error, stranger = rng.choice([s for s in fits if fits[s]]), rng.random() < 0.2, rng.random() < 0.2
        if stranger:  # a number from nowhere in place of b, which stays
            b, sign, rest = max(pool) + 1, "+", [*rest, b]
        result = int(OPERATORS[sign](a, b)) + error
        texts.append(f"{a} {sign} {b} = {result}")
        pool, right = [*rest, result], right + "FT"[not error and not stranger]
    assert verdicts(", ".join(texts), numbers) == right


# ---------------------------------------------------------------------------------- where sentences begin


def begins(*pieces):
    """Which tokens, given by their texts, begin a sentence."""
    stops = list(itertools.accumulate(map(len, pieces)))
    marked = task.sentence_starts("".join(pieces), [(stop - len(p), stop) for p, stop in zip(pieces, stops)])
    assert marked.shape == (len(pieces),) and marked.dtype == bool
    return [i for i, mark in enumerate(marked) if mark]


@pytest.mark.parametrize("pieces, places", [
    (["No", ".", " 1", " +", " 2"], [2]), (["No.", " 1"], [1]), ([" No", ". 1", " +"], [2]),  # merged with the end
    (["No", "!", " Or", "?", " Yes"], [2, 4]), (["Hm", ".", ".", ".", " No"], [4]), (["Hm", "...", " No"], [2]),
    (["2", ".", "5", " is"], []), (["2.5", " is"], []), (["e", ".g", "."], []),
    (["a", "\n", "b"], [2]), (["a\n", "b"], [1]), (["a", "\nb", " c"], [2]), (["a", ".\n\n", "b"], [2]),
    (["a", ">\n", "<", "answer"], []), (["a", "\n", "<"], []),  # the line break before <answer> ends no sentence
    (["works", "!", "</", "think"], [2]), (["works", "!</", "think", ">"], [2]), (["so.<", "answer", ">"], [1]),
    (["Done", "."], []), (["Done", ".", ""], []), (["Done", "\n"], []), (["Done", "\n", ""], []),
    (["Done", ". "], []), (["A", "."] * 2, []), (["Done", ".", " "], [2]),
    (["Do", ". b"], []), (["Do", ". b", ""], [2]), ([], []), ([""], []), ([".", " a"], [1]),
])
def test_sentence_starts_by_hand(pieces, places):
    """Guards against decimals and tags cut in two, a token that begins before the end, and one behind all text."""
    assert begins(*pieces) == places


@settings(CALM, max_examples=400)
@given(st.lists(st.sampled_from(["a", " 5", ".", "!", "? ", " ", "\n", "<", "\n<", "</think>", EMOJI, "\u2003", "2.5"]),
                max_size=12).map("".join), st.booleans())
def test_sentence_starts_are_the_first_tokens_behind_an_end(codec, text, single_bytes):
    """Guards against any end missed or invented, whatever tokens the text is cut into: character by character."""
    ids = list(text.encode()) if single_bytes else ids_of(codec, text)
    spans = codec.decode([*ids, codec.end_tokens[0]])[1]
    starts, expected = [a for a, _ in spans], set()
    for i, (c, following) in enumerate(zip(text, text[1:])):  # an end with nothing behind it does not count
        if c in ".!?" and (following.isspace() or following == "<") or c == "\n" and following != "<":
            expected.add(next(j for j, start in enumerate(starts) if start > i))
    assert set(np.flatnonzero(task.sentence_starts(text, spans))) == expected


# -------------------------------------------------------------------------------------- prompts and bad files


def test_plain_prompt(plain):
    """Guards against a base model that is shown ChatML, or a prompt that does not end in `<think>`."""
    ids = plain.prompt(Problem((44, 19, 35), 98))
    assert plain.tokenizer.decode(ids) == (
        "Using the numbers [44, 19, 35], create an equation that equals 98.\nLet me solve this step by step.\n<think>")


def test_chat_prompt(codec):
    """Guards against changes to the instruction of TinyZero, and ChatML tokens that are spelt out as text."""
    ids = codec.prompt(Problem((44, 19, 35), 98))
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful assistant. You first think about the reasoning process in your mind and "
        "then provide the user with the answer.<|im_end|>\n<|im_start|>user\nUsing the numbers [44, 19, 35], create an "
        "equation that equals 98. You can use basic arithmetic operations (+, -, *, /) and each number can only be used "
        "once. Show your work in <think> </think> tags. And return the final answer in <answer> </answer> tags, for "
        "example <answer> (1 + 2) / 3 </answer>.<|im_end|>\n<|im_start|>assistant\nLet me solve this step by step.\n"
        "<think>")
    names = [codec.tokenizer.id_to_token(i) for i in ids]
    assert names[0] == "<|im_start|>" and names.count("<|im_start|>") == 3 and names.count("<|im_end|>") == 2


def test_end_tokens(codec, plain):
    """Guards against a response that runs on after <|im_end|>, or that can end in a token which does not exist."""
    assert sorted(codec.end_tokens) == sorted(codec.tokenizer.token_to_id(name) for name in ENDS)
    assert plain.end_tokens == [plain.tokenizer.token_to_id("<|endoftext|>")]
    assert codec.end_tokens[0] == codec.tokenizer.token_to_id("<|im_end|>")  # a chat turn ends in this one


def test_codec_refuses_a_folder_without_a_tokenizer(tmp_path):
    """Guards against an error that does not say which file is missing."""
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        task.Codec(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0"}'])
def test_codec_refuses_a_broken_file(tmp_path, text):
    """Guards against the library's bare Exception, which names no file."""
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer: ."):
        task.Codec(tmp_path)


def test_codec_refuses_a_tokenizer_without_an_end(tmp_path):
    """Guards against responses that can never end."""
    with pytest.raises(ValueError, match="neither .*im_end.* nor .*endoftext"):
        task.Codec(build(tmp_path / "endless", special=("<|im_start|>",)))


def test_codec_refuses_a_tokenizer_that_is_not_byte_level(tmp_path):
    """Guards against text silently wrong under a tokenizer of another kind, such as SentencePiece's."""
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581": 0, "a": 1, "\u2581a": 2}, merges=[("\u2581", "a")]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="not a byte-level one"):
        task.Codec(tmp_path)
