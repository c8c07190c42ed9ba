"""Calculations in a text, what is within reach, sentences and the hash, by hand and against brute force."""
import doctest
import re
import sys
from fractions import Fraction
from unicodedata import category

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import countdown_task
from tasks import arithmetic, math_task
from tasks import text as task_text
from tasks.arithmetic import (check_calculations, find_calculations, is_true, next_calculations, reachability,
                              read_calculation, results)
from tasks.text import sentence_starts
from tests.fixtures import spans_of
from tests.plain import expressions

TWO = [("5", "-", "3", "2"), ("4", "*", "2", "8")]


@pytest.mark.parametrize("text, calculations", [
    (" 5 - 3 = 2, 4 * 2 = 8.", TWO), ("1. 5\n -3 = 2", TWO[:1]), ("3 - 5 = -2", [("3", "-", "5", "-2")]),
    ("20 / 4 = 5 1 + 1 = 3", [("20", "/", "4", "5"), ("1", "+", "1", "3")]), ("1) 5 - 3 = 2, **4 * 2 = 8**", TWO),
    ("- 5 - 3 = 2\n* 4 * 2 = 8", TWO), ("4 - 3 - 2 = 1", []), ("4 -\n3 - 2 = 1", []), ("(5 - 3) * 4 = 8", []),
    ("(8)3 - 2 = 4", []), ("4 * (5 - 3) = 8", []), ("1.5 + 2 = 3", []), ("-5 + 2 = 3", []), ("5 / 2 = 2.5", []),
    ("1,200 + 300 = 1,500", []), ("2**5 - 3 = 2", []), ("5 - \u0663 = 2", []), ("5 - 3 == 2", []),
    ("2 / 3 * 4 = 9", []), ("3 \u00d7 4 = 13", [("3", "\u00d7", "4", "13")]), ("12 \u00f7 4 = 3", [("12", "\u00f7", "4", "3")]),
    ("7 \u2212 9 = \u22122", [("7", "\u2212", "9", "\u22122")]), ("3 x 4 = 12", [("3", "x", "4", "12")]),
    ("$3 \\times 4 = 13$", [("3", "\\times", "4", "13")]), ("3\u200b \u22c5\u2060 4 = 12", [("3", "\u22c5", "4", "12")]),
    ("8 \u2212 3 \u2212 2 = 3", []), ("2 \u00d7 3 \u00d7 4 = 24", []), ("4 \\times 3 \\div 2 = 6", []), ("box 4 = 4", [])])
def test_calculations_found_by_hand(text, calculations):
    assert [tuple(text[a:b] for a, b in spans) for spans in find_calculations(text)] == calculations


@pytest.mark.parametrize("text, right, numbers", [(*case, (3, 4, 5))[:3] for case in [
    ("5 - 3 = 2, 4 * 2 = 8", "TT"), ("5 * 3 = 8", "F"), ("3 - 5 = -2", "T"),
    # A number that is not available, or not twice.
    ("3 + 9 = 12", "F"), ("5 + 5 = 10", "F"), ("5 + 5 = 10, 10 - 3 = 7", "TT", (5, 5, 3)),
    # A wrong result counts once: later calculations may use what was claimed, and only that.
    ("5 - 3 = 1, 4 * 1 = 4", "FT"), ("5 - 3 = 1, 4 * 2 = 8", "FF"),
    # A finished attempt gives the numbers back and takes its result away.
    ("5 - 3 = 2, 4 * 2 = 8, 5 + 3 = 8, 8 - 4 = 4", "TTTT"), ("5 - 3 = 2, 4 * 2 = 8, 8 + 3 = 11", "TTF"),
    # So does an attempt given up at the end of a sentence; but it may also be continued there.
    ("5 + 3 = 8. 5 - 3 = 2, 4 * 2 = 8", "TTT"), ("5 + 3 = 8, 5 - 3 = 2", "TF"), ("5 + 3 = 8!</think> 5 - 3 = 2", "TT"),
    ("5 + 3 = 8. Well, 4 + 8 = 12", "TT"), ("5 + 3 = 8 or 8.0 and 5 - 3 = 2", "TF"),
    ("5 + 3 = 8. 5 - 3 = 2, 5 + 4 = 9", "TTF"), ("8 / 4 = 2", "T", (4, 8)), ("8 / 0 = 0", "F", (0, 8)),
    ("4 - 2 = 2, 2 * 3 = 6, 2 + 6 = 8", "TTT", (4, 2, 2, 3)), ("4 - 2 = 2, 2 * 3 = 6, 2 + 6 = 8", "TTF", (4, 2, 3)),
    # Which attempt it was may show only later; until then, a calculation may use what either reading offers.
    ("20 - 18 = 2, 2 + 19 = 21. 20 - 17 = 3, 20 * 3 = 60", "FFTT", (20, 20, 17)),
    # Signs as chat models write them, also mixed.
    ("5 \u2212 3 = 2, 4 \u00d7 2 = 8", "TT"), ("5 \u2013 3 = 2. 4 \\cdot 2 = 9", "TF"), ("12 \u00f7 4 = 3, 3 x 5 = 15", "TT", (4, 5, 12)),
    ("3 - 5 = \u22122", "T"), ("3 + 4 = 7. 5 + 6 = 11. 3 + 7 = 10", "TTF", (3, 4, 5, 6)), ("5 - 3 = 2. 4 + 3 = 7, 2 + 7 = 9", "TTF")]])
def test_calculations_graded_by_hand(text, right, numbers):
    assert "".join("FT"[v] for v in check_calculations(text, find_calculations(text), numbers)) == right


@pytest.mark.parametrize("text, right", [
    ("10 \u2013 3 \u2013 2 = 5", ""), ("4 x 2 + 3 = 11", ""), ("4x2 + 3 = 11", ""), ("\u20133 + 5 = 2", ""),
    (r"4\,\times\,2 + 3 = 11", ""), (r"5\,-\,3 = 3", "F"), ("3 - 5 = \u20132", "T"), ("2\u200b4 \u2212 2 = 22", ""),
    ("\u2066-\u20693 + 5 = 2", ""), ("- 5 \u2013 3 = 2", "T"), ("3 x 4 = 13. 5 x 3 = 15", "FT")])
def test_signs_and_gaps_of_others(text, right):
    """By hand. Guards against the tail of a longer calculation, and a number of which a part is hidden."""
    found = [is_true(read_calculation(text, span)) for span in find_calculations(text)]
    assert "".join("FT"[v] for v in found) == right


def test_what_nobody_sees_is_unicodes_list():
    """Category Cf of the standard library's data, but for the characters that enclose a number. Python 3.11's, Unicode
    14, lacks seven of them."""
    enclosing = {*map(chr, (*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD))}
    hidden = set(re.findall(f"[{task_text.INVISIBLE}]", "".join(map(chr, range(sys.maxunicode + 1)))))
    assert hidden >= {c for c in map(chr, range(sys.maxunicode + 1)) if category(c) == "Cf"} - enclosing
    assert not hidden & enclosing and {*map(category, hidden)} <= {"Cf", "Cn"}  # Cn: not assigned yet


@pytest.mark.parametrize("hidden", ["\u200b", "\u200d", "\ufeff", "\u202a", "\u00ad", "\u2066"])
@pytest.mark.parametrize("text", ["5-3+4", "(5 - 3) + 4", "5 \u2212 3 + 4"])
def test_what_nobody_sees_changes_no_grade(hidden, text):
    """Before, behind and inside numbers, in both graders; and a role is that of what is seen."""
    for i in range(len(text) + 1):
        response = f"</think>\n<answer>{text[:i]}{hidden}{text[i:]}</answer>"
        assert countdown_task.grade(response, countdown_task.Puzzle((3, 4, 5), 6)) == {"answer": 1, "format": 1}
    for number in ("1234", "-7/2", "0.5"):
        for i in range(len(number) + 1):
            problem = math_task.Problem("?", Fraction(number))
            assert math_task.grade(f"<answer>{number[:i]}{hidden}{number[i:]}</answer>", problem)["answer"] == 1


def test_signs_are_reasoning_wherever_the_grader_takes_them():
    """Guards against a sign that one reads and another one does not; and prose that has one by chance."""
    for sign in (*task_text.SIGNS, "+", "-", "*", "/"):
        text = f"12 {sign} 3 = 9"
        (found,) = find_calculations(text)
        kinds, _ = task_text.roles(text, spans_of(list(text)))
        assert text[slice(*found.operator)] == sign and (kinds[slice(*found.operator)] == task_text.REASONING).all()
        value = countdown_task.expression_value(countdown_task.without_notation(f"12 {sign} 3"))
        assert value == arithmetic.calculate(12, task_text.SIGNS.get(sign, sign), 3)
    kinds, _ = task_text.roles("an x\u2013ray, x x", spans_of(list("an x\u2013ray, x x")))
    assert not kinds.any()


@pytest.mark.parametrize("sign, end", [("-", ". "), ("-", ", "), ("+", ". ")])
def test_the_work_is_linear_in_the_text(sign, end):
    """Guards against attempts, or values that nobody uses, which pile up where the numbers are gone. (No clock: what is
    counted are calls.)"""
    def calls(n):
        text, seen = "".join(f"9 {sign} 9 = {i}{end}" for i in range(n)), []
        sys.setprofile(lambda frame, event, _: seen.append(event))
        try:
            verdicts = check_calculations(text, find_calculations(text), (3, 4, 5))
        finally:
            sys.setprofile(None)
        assert verdicts == [False] * n
        return len(seen)

    assert calls(400) < 2.2 * calls(200)


@pytest.mark.slow
@given(st.lists(st.integers(-3, 12), min_size=1, max_size=4).map(sorted).map(tuple), st.data())
@settings(max_examples=40, deadline=None)
def test_next_calculations_are_those_of_brute_force(values, data):
    """Guards against a value that is used twice, swapped operands of - and /, and results that are missed."""
    made = {value for _, value in expressions(values)}
    assert results(values) == made
    target = data.draw(st.sampled_from(sorted(v for v in made if v.denominator == 1)) | st.integers(-5, 60))
    solutions = [text for text, value in expressions(values) if value == target]
    found = {step for text in solutions for step in re.findall(r"\((-?\d+) ([-+*/]) (-?\d+)\)", text)}
    assert next_calculations(values, int(target)) == {(int(a), operator, int(b)) for a, operator, b in found}


@pytest.mark.parametrize("text, numbers, target, expected", [  # before a calculation, and after its a, sign, b, result
    ("5 - 3 = 3, 4 * 2 = 8", (3, 4, 5), 8, ["TTTTF", "FFFFF"]),  # a wrong result; the rest is dead
    ("7 - 3 = 4, 4 + 4 = 8", (3, 4, 5), 13, ["FFFFF", "FFFFF"]),  # or with 4, 4 and 5
    ("5 + 3 = 8. How about 5 - 3 = 2, 4 * 2 = 8", (3, 4, 5), 8, ["TTFFF", "TTTTT", "TTTTT"]),  # a new attempt
    ("5 + 3 = 8, 8 + 4 = 12, 5 - 3 = 2", (3, 4, 5), 8, ["TTFFF", "FFFFF", "TTTTT"]),  # one that is finished
    ("5 + 3 = 8, 5 - 3 = 2", (3, 4, 5), 12, ["TTTTT", "TFFFF"]),  # no new attempt: 5 and 3 are used up
    # it is open which attempt continues: {2, 8} makes 16, {2, 4, 8} makes 64
    ("4 / 2 = 2. 2 * 8 = 16", (2, 4, 8), 16, ["TTTTT", "TTTTT"]),
    ("4 / 2 = 2. 2 * 8 = 16", (2, 4, 8), 64, ["TTFFF", "TTTTT"]),
    ("1 / 5 = 0", (1, 5, 5, 5), 24, ["TTTTF"]),  # 5 * (5 - 1 / 5) needs a fraction
    (" Maybe it is 5 -", (3, 4, 5), 8, [])])
def test_reachability_of_worked_examples(text, numbers, target, expected):
    """Guards against a new attempt without the numbers, or none where one starts."""
    found = reachability(text, find_calculations(text), numbers, target)
    assert ["".join("FT"[verdict] for verdict in row) for row in found.tolist()] == expected
    assert found.shape == (len(expected), 5)


@pytest.mark.parametrize("pieces, places", [
    (["No", ".", " 1", " +", " 2"], [2]), (["No.", " 1"], [1]), ([" No", ". 1", " +"], [2]),  # merged with the end
    (["No", "!", " Or", "?", " Yes"], [2, 4]), (["Hm", ".", ".", ".", " No"], [4]), (["2", ".", "5", " is"], []),
    (["a", "\n", "b"], [2]), (["a", "\nb", " c"], [2]), (["e", ".g", "."], []),
    (["a", ">\n", "<", "answer"], []),  # the line break before <answer> ends no sentence
    (["works", "!</", "think", ">"], [2]), (["so.<", "answer", ">"], [1]), (["Done", "."], []),
    (["Done", "\n", ""], []), (["Done", ". "], []), (["Done", ".", " "], [2]), (["Do", ". b"], []),
    (["Do", ". b", ""], [2]), ([], [])])
def test_sentence_starts_by_hand(pieces, places):
    marked = sentence_starts("".join(pieces), spans_of(pieces))
    assert marked.tolist() == [i in places for i in range(len(pieces))]


def test_examples_in_the_docstrings():
    for module, examples in ((arithmetic, 4), (task_text, 2)):
        assert doctest.testmod(module) == (0, examples)  # failed, attempted
