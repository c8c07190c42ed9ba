"""The Countdown task against brute force and by hand: puzzles, prompts, rewards, and what each token is."""
import hashlib
import itertools
import json
import re
import sys
import time
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import countdown_task as task
from countdown_task import Puzzle, can_make, derivations, expression
from tests.fixtures import spans_of
from tests.plain import expressions


def all_values(numbers, whole):
    """The values of all expressions that use every number."""
    return {value for _, value in expressions(tuple(sorted(numbers)), whole)}


@pytest.mark.parametrize("numbers", [(5,), (3, 4), (0, 3), (1, 1), (2, 7, 9), (0, 0, 5), (1, 2, 5, 7), (2, 2, 4, 4),
                                     (3, 3, 8, 8), (0, 2, 3, 9)])
def test_solutions_are_the_expressions_of_brute_force(numbers):
    """(1, 2, 5, 7) make 24 as (a b) (c d) alone, (3, 3, 8, 8) by a fraction. Guards against a part that divides by 0 or
    is subtracted the other way, and a result asked of other numbers."""
    reached, whole_ones = (all_values(numbers, whole) for whole in (False, True))
    fractions = sorted(value for value in reached if value.denominator > 1)[::97]
    for target in (*range(-5, 100), *fractions):
        assert can_make(numbers, target) == (target in reached), target
    for target, whole in itertools.product((-1, 0, 4, 5, 7, 24), (False, True)):
        solutions = [steps for value, steps in derivations(numbers, whole) if value == target]
        assert bool(solutions) == (target in (whole_ones if whole else reached))
        for solution in solutions[::9]:
            text = expression(numbers, solution)
            assert task.expression_value(text) == target
            assert sorted(map(int, re.findall(r"\d+", text))) == sorted(numbers)
            assert not whole or all(type(v) is int and v >= 0 for a, _, b, result in solution for v in (a, b, result))


@pytest.mark.slow
def test_six_numbers_are_solved_or_refused_in_seconds():
    """Guards against the two and a half minutes that every way to combine them takes."""
    began = time.process_time()
    with pytest.raises(ValueError, match="can't make 997; remove that row"):
        task.check(Puzzle((1, 1, 2, 2, 3, 3), 997))
    task.check(Puzzle((1, 2, 3, 4, 5, 6), 130))
    assert time.process_time() - began < 30


def universe(count=3, low=1, high=20, max_target=100):
    """Every puzzle of `count` sorted numbers from low to high whose target can be reached with whole numbers alone."""
    sets = itertools.combinations_with_replacement(range(low, high + 1), count)
    return {(numbers, int(v)) for numbers in sets for v in all_values(numbers, True) if 1 <= v <= max_target}


def test_split_is_a_fixed_hash_and_ignores_the_order_of_the_numbers():
    for a, b, target in itertools.product(range(1, 21), range(1, 21), (10, 100)):
        low, middle, high = sorted((a, b, 7))
        keys = f"{low},{middle},{high}", f"{low},{middle},{high}={target}"
        new, heldout = (str(int(hashlib.sha256(key.encode()).hexdigest()[:16], 16)).endswith("0") for key in keys)
        assert task.split(Puzzle((a, b, 7), target)) == ("new_numbers" if new else "heldout" if heldout else "train")


@pytest.mark.slow
def test_generated_puzzles_are_distinct_ones_of_their_split_in_an_order_that_the_seed_decides():
    """Guards against numbers of NumPy's types, too, which JSON can't hold."""
    for part in ("train", "heldout", "new_numbers"):
        puzzles = task.generate_puzzles(200, part)
        assert len(puzzles) == len({p.id for p in puzzles}) == 200 and {task.split(p) for p in puzzles} == {part}
        for numbers, target in puzzles:
            assert all(type(n) is int and 1 <= n <= 20 for n in numbers) and type(target) is int and target <= 100
            assert target in task.targets(tuple(sorted(numbers)), 100)
        assert 10 < sum(list(p.numbers) == sorted(p.numbers) for p in puzzles) < 100  # about a sixth is in order
        assert puzzles == task.load(part, 200) != task.generate_puzzles(200, part, seed=1)


@pytest.mark.slow
def test_generator_finds_every_puzzle_of_its_ranges_and_says_when_there_are_no_more():
    known = [p for p in itertools.starmap(Puzzle, sorted(universe(2, 2, 5, 12))) if task.split(p) == "train"]
    drawn = task.generate_puzzles(len(known), "train", 0, 2, 2, 5, 12)
    assert sorted((tuple(sorted(p.numbers)), p.target) for p in drawn) == known
    for ranges, found in (((2, 2, 5, 12), len(known)), ((3, 1, 20, 0), 0)):
        with pytest.raises(ValueError, match=f"found only {found} of 60 train puzzles"):
            task.generate_puzzles(60, "train", 0, *ranges)


def test_reader_accepts_rows_of_countdown_tasks_3to4_and_says_what_is_wrong(tmp_path, monkeypatch):
    """Guards against a row that is read as another puzzle, as [True, 44.0] can be."""
    path, good = tmp_path / "data.jsonl", '{"target": 98, "nums": [44, 19, 35]}'
    path.write_bytes(f'{good}\r\n{{"nums": [3, 3, 0], "target": 0, "id": "x"}}'.encode())
    assert sorted(task.load("all", path=str(path))) == [((3, 3, 0), 0), ((44, 19, 35), 98)]
    malformed = [f'{{"target": 3, "nums": {nums}}}' for nums in ("[]", '"44"', "[-44]", "[44.0]", "[true]")]
    for line in ("98", '{"nums": [1, 2]}', '{"nums": [3, 4], "target": "98"}', *malformed):
        path.write_text("\n".join([good, good, line, good]))
        with pytest.raises(ValueError, match=r"data\.jsonl, line 3: expected .*nums.*target"):
            task.load("all", path=str(path))
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        task.load("all", path=str(tmp_path / "train.parquet"))


def test_a_split_of_a_file_does_not_depend_on_its_rows(tmp_path):
    """Guards against a puzzle that counts twice, and first rows that are no fair sample."""
    puzzles = [*itertools.starmap(Puzzle, sorted(universe(2, 1, 9)))]
    rows = [json.dumps({"nums": nums, "target": p.target}) for p in puzzles for nums in (p.numbers, p.numbers[::-1])]
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("\n".join(rows))
    b.write_text("\n".join(sorted(rows)))
    whole = [p.id for p in task.load("all", path=a)]
    assert sorted(whole) == sorted(p.id for p in puzzles)
    for part in ("train", "heldout"):
        ids = [p.id for p in task.load(part, path=a)]
        members = {p.id for p in puzzles if task.split(p) == part}
        assert ids == [name for name in whole if name in members] != sorted(ids)
        assert [p.id for p in task.load(part, 3, str(b))] == ids[:3]
    a.write_text('{"nums": [1, 2], "target": 3}')
    with pytest.raises(ValueError, match=r"a.jsonl has no held-out puzzle among its 1: it needs more rows"):
        task.load("heldout", path=a)


def test_prompts_are_chatml_for_a_chat_model_and_plain_for_any_other():
    puzzle = Puzzle((44, 19, 35), 98)
    assert task.prompt(puzzle, chat=False) == (
        "Using the numbers [44, 19, 35], create an equation that equals 98.\nLet me solve this step by step.\n<think>")
    chat = task.prompt(puzzle, chat=True)
    assert chat.startswith("<|im_start|>system\nYou are a helpful assistant.") and chat.count("<|im_end|>\n") == 2
    assert "<|im_start|>user\nUsing the numbers [44, 19, 35], create an equation that equals 98. You" in chat
    assert chat.endswith("<|im_end|>\n<|im_start|>assistant\nLet me solve this step by step.\n<think>")
    assert task.show(puzzle) == "[44, 19, 35] -> 98"
    with pytest.raises(ValueError, match="too many numbers; at most 6"):
        task.check(Puzzle((1,) * 7, 7))


@pytest.mark.parametrize("text, answer, numbers, target", [(*case, (3, 4, 5), 8)[:4] for case in [
    ("8/(3-8/3)", 1, (3, 3, 8, 8), 24), ("8/(3-8/3)", 0, (3, 8, 8), 24), ("1/3*3", 0, (1, 3, 3), 0.9999999999999999),
    (r"12 / \frac{6}{2}", 1, (2, 6, 12), 4), (r"\frac{12}{\frac{6}{2}}", 1, (2, 6, 12), 4),
    (r"\dfrac{12}{6 - 2} \div 3", 1, (2, 3, 6, 12), 1), (r"\frac62 \cdot \frac{1}2", 1, (1, 2, 2, 6), Fraction(3, 2)),
    (r"\(4 \times \left(5-3\right)\)", 1), ("4 \u00d7 (5 \u2212 3)", 1), ("4 x (5 - 3)", 1), ("(5-3)\u00b74", 1),
    ("4\u22c5(5-3)", 1), ("[5 - 3] * 4", 1), ("**4*(5-3)**", 1), ("`4*(5-3)`", 1), (r"$\boxed{4*(5-3)}$", 1),
    ("4 *\r\n(5\u00a0- 3)", 1), ("4*(5-3).", 1), ("**4*(5-3).**", 1), ("4 * (5 \u2013 3)", 1),
    (r"\large \boldsymbol{4\,*\,\big(5-3\big)} \qed", 1), (r"$\textnormal{4*(5-3)} \quad \square$", 1),
    (r"4*(5-3)*\square", 0), (r"4*(5-3) - \Box", 0), (r"4*(5\large 3)", 0),
    (r"\fbox{4\,*\,(5-3)}", 1), ("(-3+5)*4", 1), ("4.0*(5-3)", 0), ("4*(5-3) = 8", 0), ("**4*(5-3)", 0),
    ("**4*(5-3)/1", 0), ("4x(5-3)", 0), (r"4\boxed{}*(5-3)", 0), ("\uff14*(5-3)", 0), ("4*(5-3)" + " " * 250, 0)]])
def test_an_expression_in_the_notation_of_a_chat_model(text, answer, numbers, target):
    r"""Exact, with each number once in any order. Guards against right answers that are graded 0, a notation that hides
    a number or an operator, and 12 / \frac{6}{2} = 12 / 6 / 2. Below is a second grader for any response."""
    graded = task.grade(f"</think>\n<answer>{text}</answer>", Puzzle(numbers[::-1], target))
    assert graded == {"format": 1, "answer": answer}


CALM = settings(deadline=None, database=None, phases=(Phase.explicit, Phase.generate, Phase.shrink), derandomize=True,
                suppress_health_check=[HealthCheck.too_slow])  # a slow machine is not a bug
EMOJI = "\U0001f642"  # four bytes
PIECES = ["</think>\n<answer>", "</think>\n<answer>", "</answer>", "</answer>", "<answer>", "</think>", "<think>", "\n",
          " ", ".", "4 * (5 - 3)", "(5-3)*4", "(-3+5)\n* 4", "8", " - ", "<", ">", "answer", "/", "\u00e9", "\u2003",
          "\u0663", EMOJI]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join) | st.text(max_size=40)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("pieces, roles, answer", [
    # tags are split over several tokens and merged with their neighbours; the answer begins with its own `<`
    ([" 5", " -", "3", "!</", "think", ">\n", "<", "answer", ">(", "5", ")</", "answer", "><", "answer", ">", "9", ""],
     "RRRFSSSSSRRSSSSRS", 13),
    (["!</", "think>", "\n<", "answer>", "  7", " +", ")</", "answer>", ""], "FSSSRRRSS", 2), (["<answer>"], "S", 0),
    ([" 2", "", "a", ""], "RSFS", None),  # an end token between two turns
    (list("a1 +-*/=().,x"), "FRFRRRRRRRFFF", None), (list("<answer"), "FFFFFFF", None), ([""], "S", None),
    (list("</ think>"), "FRFFFFFFF", None), (list("<Answer>"), "FFFFFFFF", None), (["<", "<answer>", ">"], "FSF", 1),
    (["<answer>", "8", "<answer>"], "SRS", 2), (list("\u0663\u00b2\u00d7"), "FFR", None), ([" ", "\n\n"], "FF", None)])
def test_roles_and_answer_by_hand(pieces, roles, answer):
    """A token's first character that is not white space decides."""
    role, in_answer = task.roles("".join(pieces), spans_of(pieces))
    assert "".join("FRS"[r] for r in role) == roles
    assert in_answer.tolist() == [answer is not None and i >= answer for i in range(len(pieces))]


def test_command_line_prints_right_expressions_only(run_program, capsys):
    def printed(*arguments):
        run_program(task, *arguments)
        return capsys.readouterr().out

    lines = printed("3", "7", "8", "--target", "29").split("split: train\n")[1].splitlines()
    assert lines and all(task.expression_value(line) == 29 for line in lines)
    assert re.fullmatch(r"Using the [^|]*no solution\n", printed("1", "1", "--target", "29"))
    with pytest.raises(SystemExit):
        printed("1", "2", "3", "4", "5", "6", "--target", "29")
