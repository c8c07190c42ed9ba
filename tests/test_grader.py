"""The grader against a grade by counting and cutting, for any response, and against Python's own eval."""
import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import countdown_task as task

CALM = settings(deadline=None, database=None, phases=(Phase.explicit, Phase.generate, Phase.shrink), derandomize=True,
                suppress_health_check=[HealthCheck.too_slow])  # a slow machine is not a bug
EMOJI = "\U0001f642"  # four bytes
PIECES = ["</think>\n<answer>", "</think>\n<answer>", "</answer>", "</answer>", "<answer>", "</think>", "<think>", "\n",
          " ", ".", "4 * (5 - 3)", "(5-3)*4", "(-3+5)\n* 4", "8", " - ", "<", ">", "answer", "/", "\u00e9", "\u2003",
          "\u0663", EMOJI]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join) | st.text(max_size=40)


@settings(CALM, max_examples=300)
@given(TEXTS, st.sampled_from((8, 8, 2, -1)))
def test_reward_of_any_response_equals_a_grade_by_counting_and_cutting(text, target):
    for response in (text, f"<answer>{text}", f"<answer>{text}</answer>", f"so</think>\n<answer>{text}</answer>"):
        count = [response.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")]
        halves, answers = response.split("</think>\n<answer>"), response.split("<answer>")[1:]
        layout = 0 if count[2] > 1 else 0.1 * bool(count[1]) + 0.5 * any("</answer>" in answer for answer in answers)
        if count == [0, 1, 1, 1] and len(halves) == 2 and halves[1].endswith("</answer>"):
            layout = 1
        inside = answers[-1].split("</answer>")[0] if answers and "</answer>" in answers[-1] else ""
        inside = re.sub(r"\s+", " ", inside).rstrip(" .")
        used = "".join(c if c in "0123456789" else " " for c in inside).split()
        right = value_by_eval(inside) == target and sorted(map(int, used)) == [3, 4, 5]
        found = task.grade(response, task.Puzzle((5, 3, 4), target))
        assert found == {"format": pytest.approx(layout), "answer": right}


def value_by_eval(text):
    """What `expression_value` must return: by Python, with a Fraction for each number. None for any other text."""
    depth = max(itertools.accumulate({"(": 1, ")": -1}.get(c, 0) for c in f"0{text}"))
    foreign = set(text) - set("0123456789+-*/() ") or re.search(r"\b0[0-9]|\*\*|//", text)
    if foreign or len(text) > 256 or depth > 32:
        return None
    try:
        value = eval(re.sub("([0-9]+)", r"Fraction(\1)", text).strip(), {"Fraction": Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None
    return value if isinstance(value, Fraction) else None  # not ()


EXPRESSIONS = st.recursive(st.integers(0, 999).map(str) | st.sampled_from("0123"), lambda inner: (
    st.builds("{}{}{}".format, inner, st.sampled_from(["+", "-", "*", "/", " + ", " -", "* ", " / "]), inner)
    | inner.map("({})".format) | st.builds("{}{}".format, st.sampled_from("+-"), inner)), max_leaves=8)
HOSTILE = st.sampled_from("0123456789+-*/() ._eExX\n\t\u0663\u00b2\uff11") | st.just("")
EDITED = st.builds(lambda text, at, new: text[: at % len(text)] + new + text[at % len(text) + 1 :], EXPRESSIONS,
                   st.integers(0, 99), HOSTILE)


@pytest.mark.filterwarnings("error")
@settings(CALM, max_examples=1000)
@given(EXPRESSIONS | EDITED | st.text("0123+-*/() ", max_size=8))
@example("(" * 32 + "1" + ")" * 32)
@example("(" * 33 + "1" + ")" * 33)
@example("1" + "+1" * 127 + " ")  # 256 characters
@example("1" + "+1" * 128)
@example("100*" * 60 + "1")
@example("-" * 255 + "1")
def test_values_agree_with_python(text):
    value = task.expression_value(text)
    assert value == value_by_eval(text) and isinstance(value, Fraction | None)
