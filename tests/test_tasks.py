"""The tasks of tasks/ against backtracking, a second parser and by hand."""
import gzip
import importlib
import itertools
import json
import re
import shutil
import sys
from fractions import Fraction
from hashlib import sha256

import numpy as np
import pytest

import train
from models import talk
from plumbing.launch import BUNDLED
from plumbing.task_file import load_puzzles, load_task
from tasks import latin_task, math_task
from tasks.math_task import Problem, number
from tests.fixtures import spans_of


@pytest.mark.slow
@pytest.mark.parametrize("name, content", [("latin", lambda puzzle: str(latin_task.solution(puzzle.id))),
                                           ("math", lambda problem: problem.steps)])
def test_splits_are_apart_and_demonstrations_right_or_not(name, content):
    """Guards against a held-out square with other open cells in training, and a held-out problem with other names. A
    demonstration with probability 1 is always right; with 0 it is well formed, and a matter of luck."""
    task, rng = load_task(name), np.random.default_rng(0)
    puzzles, heldout = (task.load(part, 250) for part in ("train", "heldout"))
    assert len(heldout) == 250 and task.load("train", 99) == puzzles[:99] and task.load("heldout", 9) == heldout[:9]
    assert not {*map(content, puzzles)} & {*map(content, heldout)}
    for puzzle in puzzles + heldout:
        held = int(sha256(task.key(puzzle).encode()).hexdigest()[:16], 16) % 10 == 0
        assert held == (puzzle in heldout)
    task.check(puzzles[0])
    right, guessed = ([task.grade(task.demonstrate(puzzle, rng, known), puzzle) for puzzle in puzzles[:100]]
                      for known in (1.0, 0.0))
    assert all(grade == {"answer": 1, "format": 1} for grade in right)
    assert all(grade["format"] == 1 for grade in guessed)
    assert np.mean([grade["answer"] for grade in guessed]) < 0.7


@pytest.mark.parametrize("name", ["math", "random", "types", "json", "my-task"])
def test_a_task_file_takes_no_module_s_place_and_finds_what_is_beside_it(name, tmp_path, monkeypatch):
    """Guards against a file math.py that everybody gets who imports math, from then on."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {**sys.modules}
    (tmp_path / f"{name}.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside\n"
        "from tests.reverse_task import *\n@dataclass\nclass Own:\n    x: int = beside.SEVEN\n")
    (tmp_path / "beside.py").write_text("import math\n\nSEVEN = math.floor(7.5)\n")
    task = load_task(str(tmp_path / f"{name}.py"))
    assert task.Own().x == 7 and sys.modules.pop("beside").__file__ == str(tmp_path / "beside.py")
    assert all(sys.modules[other] is module for other, module in before.items())
    assert importlib.import_module("math").log(1) == 0 and name in {*before, "my-task"}


SQUARE = "1234523451345124512351234"
OTHER = SQUARE.translate(str.maketrans("12", "21"))
FIRST = math_task.load("train", 1)[0].question


@pytest.mark.slow
@pytest.mark.parametrize("name, data, heldout, kept", [
    ("latin", f"_{SQUARE[1:]}\n_{OTHER[1:]}", f"{SQUARE[:-1]}_", [f"_{OTHER[1:]}"]),
    ("math", 'question,answer\n"Ann  has\n3?",3\nBen has 4?,4', "question,answer\nAnn has 3?,3", ["Ben has 4?"]),
    ("math", "", f"question,answer\n{FIRST.replace(' ', '  ')},3", None),
    ("countdown", '{"nums": [3, 7, 8], "target": 29}\n{"nums": [3, 7], "target": 21}',
     '{"nums": [8, 3, 7], "target": 29}', ["3,7=21"])])
def test_nothing_that_is_memorized_for_a_held_out_puzzle_is_trained_on(name, data, heldout, kept, tmp_path):
    """Guards against other open cells, another order, other white space, and a file of what the task makes itself."""
    end = {"math": "csv"}.get(name, "jsonl")
    for stem, text in (("data", data), ("heldout", heldout)):
        (tmp_path / f"{stem}.{end}").write_text(text)
    training, _ = load_puzzles(load_task(name), 9, data and str(tmp_path / f"data.{end}"), f"{tmp_path}/heldout.{end}")
    found = [puzzle.id for puzzle in training]
    assert found == kept if data else FIRST not in found and len(found) > 4000


# ------------------------------------------------------------------------------------------------- Latin squares


def completions(cells):
    """All ways to fill a square's cells, by backtracking."""
    if "_" not in cells:
        return [cells]
    i = cells.index("_")
    row, column = cells[i // 5 * 5 : i // 5 * 5 + 5], cells[i % 5 :: 5]
    return [done for digit in "12345" if digit not in row + column
            for done in completions(cells[:i] + digit + cells[i + 1 :])]


@pytest.mark.slow
def test_all_squares_are_there_and_a_puzzle_has_one_of_them():
    """161,280 is the published number of Latin squares of order 5 (OEIS A002860)."""
    squares = latin_task.squares().reshape(-1, 5, 5)
    assert len(np.unique(squares.reshape(-1, 25), axis=0)) == len(squares) == 161_280
    assert (np.sort(squares, 1) == np.arange(1, 6)[:, None]).all() and (np.sort(squares, 2) == np.arange(1, 6)).all()
    for puzzle in latin_task.load("train", 40):
        assert completions(puzzle.id) == ["".join(map(str, latin_task.solution(puzzle.id)))]


PUZZLE = latin_task.Puzzle("1234523451345124512_5_2__")  # 3; 1, 3 and 4 are open
GIVEN = "1 2 3 4 5\n2 3 4 5 1\n3 4 5 1 2\n4 5 1 2 "


@pytest.mark.parametrize("end, layout, answer", [
    ("3\n5 1 2 3 4", 1, 1), ("3 5 1 2 3 4", 1, 1), ("3\n5 1 2 3 5", 1, 0), ("3\n5 1 2 3", 0, 0),
    ("351234", 0, 0), ("3 5 1 2 3 6", 0, 0), ("3 5 1 2 3 \u0664", 0, 0), ("3 5 1 2 3 4 " * 100_000, 0, 0)])
def test_grades_by_hand(end, layout, answer):
    assert "".join(map(str, latin_task.solution(PUZZLE.id))) == SQUARE
    grade = latin_task.grade(GIVEN + end, PUZZLE)
    assert grade == {"format": layout, "answer": answer}


def test_tokens_of_a_square():
    """Guards against roles of a neighbour, and a square that is within reach after a wrong digit or a missing one."""
    pieces = [GIVEN, "3", "\n", "5", " 2", " 2", ""]
    role, in_answer = latin_task.roles("".join(pieces), spans_of(pieces))
    assert role.tolist() == [1, 1, 0, 1, 1, 1, 2] and in_answer.all()
    reach = latin_task.within_reach("".join(pieces), spans_of(pieces), PUZZLE)
    assert reach.tolist() == [True] * 4 + [False] * 3
    assert latin_task.within_reach("1 2", [(0, 1), (1, 3), (3, 3)], PUZZLE).tolist() == [True, True, False]


def test_a_file_of_squares(tmp_path):
    """Guards against a square that is not checked, because another program made it."""
    file, squares = tmp_path / "squares.txt", [latin_task.load(part, 3) for part in ("train", "heldout")]
    file.write_text("\n".join(puzzle.id for puzzle in squares[0] + squares[1]) + "\n")
    assert [latin_task.load(part, path=str(file)) for part in ("train", "heldout")] == squares
    for line, said in (("12345", "is not a square of 25 cells"), ("x" * 25, "is not a square of 25 cells"),
                       ("_" * 25, "161280 solutions"), ("11" + "_" * 23, "has no solutions")):
        file.write_text(line)
        with pytest.raises(ValueError, match=said):
            latin_task.load("train", path=str(file))


# ------------------------------------------------------------------------------------------------- word problems


def test_problems_say_what_their_steps_compute():
    """Guards against a sentence of another step: the numbers of the question are those of the steps, in their order."""
    words = {"+": "finds|buys|brings|gets", "-": "gives|loses|takes|sells", "*": "times as many", "/": "one of|share"}
    for problem in math_task.load("train", 300):
        assert 2 <= len(problem.steps) <= 4
        sentences = problem.question.split(".")
        n = problem.steps[0][0]
        assert str(n) in sentences[0]
        for (before, sign, k), sentence in zip(problem.steps, sentences[1:]):
            assert before == n and re.search(words[sign], sentence) and re.search(rf"\b{k}\b", sentence)
            n = {"+": n + k, "-": n - k, "*": n * k, "/": Fraction(n, k)}[sign]
            assert 0 < n <= 60 and n.denominator == 1
        assert problem.answer == n


def test_commas_separate_thousands_or_nothing():
    """All strings of ones and commas, against Python's own format and the Indian one, by pairs above the thousands."""
    for middle in itertools.chain(*(itertools.product("1,", repeat=n) for n in range(9))):
        text = f"1{''.join(middle)}1"
        digits = text.replace(",", "")
        indian = f"{','.join(re.findall('..?', digits[:-3][::-1]))[::-1]},{digits[-3:]}"
        right = text in (digits, f"{int(digits):,}", indian)
        assert number(text) == (int(digits) if right else None), text


@pytest.mark.parametrize("value, texts", [
    (7, ["+7", "**Answer:** 7", "7 km/h", "7-day", "14/2", "\\boxed{\\$7.00}", "\\approx 7", "7\u2705", "7 without Ben",
         "7 \\mathrm{~cm}^{2}", "7 m\u00b2", "7 feet^2", "\\text{Ann} \\Rightarrow 7", "7 mL of milk", "7 \\checkmark",
         "\\implies 7", "7 more than Ben", "\\textcolor{red}{7}", "$7 \\quad\\blacksquare$"]),
    (1234, ["**$1,234.00**", "1\\,234", "1,\\!234", "1\u202f234", "1\u2009234", "1\u00a0234"]),
    (1234567, ["\u20b912,34,567", "1'234'567"]), (Fraction(-7, 2), ["\\frac{7}{\u2212 2}"]),
    (-5, ["x = \u2212 5", "\\boxed{- 5}", "** - 5**", "negative 5"]), (Fraction(3, 2), ["1\\frac{1}{2}", "1{1 \\over 2}", "{{3}\\over{2}}", "\\frac{{3}}{2}", "1\u00bd"]),
    (Fraction(1000, 3), ["\\frac{1{,}000}{3}", "333 1/3"]),
    (None, ["seven", "seven or 8", "12 apples and 3 pears", "3 + 4 = 7", "1 234", "7^2", "1/0", "1 2/2",
            "1e999999999", "\\sqrt{4}", "1\u200b2", "\uff14\uff12", "7\u0338", "7 * \\square", "7" * 101,
            "0" * 10**6 + "42"]),
    # A part, a power, a function, a product or a multiple of 7; a bound; no answer.
    (None, ["half of 7", "a third of 7", "7 tenths", "7 squared", "f(7)", "x*7", "$7m", "7 million", "7 crore",
            "7 Mio", "7 bil", "7 milyon", "7 Milliarden", "0.3...", "0.3 \u2026", "at least 7", "up to \u20ac7",
            "7 max", "not 7", "~~7~~"])])
def test_a_number_in_the_dress_of_a_chat_model(value, texts):
    """Guards against right answers that are graded 0, a hedge that is paid (`7 or 8`), and digits that are read as
    another number than the eye sees."""
    assert {text: number(text) for text in texts} == dict.fromkeys(texts, value)


def test_dresses_go_together():
    """Each is accepted alone above. Guards against two that don't go together, and a second number in their shade."""
    dresses = ["**{}**", "`{}`", "${}$", "\\boxed{{{}}}", "\\({}\\)", "Answer: {}", "{} apples", "x = {}", "({})",
               '"{}"', "{}\n"]
    written = {"-1,234.25": Fraction(-4937, 4), "\u22127/3": Fraction(-7, 3), "\\frac{40}{7}": Fraction(40, 7), "0": 0}
    for first, second, (text, value) in itertools.product(dresses, dresses, written.items()):
        dressed = second.format(first.format(text)) if first != second else first.format(text)
        assert number(dressed) == value, dressed
        for between in (" or ", ", ", " and ", " + ", " = ", "-", "; ", "^", " ", "\u200b"):
            assert number(f"{dressed}{between}12") is None


def test_answers_and_calculations_of_a_text():
    """Guards against the number of another place, and a rounded division."""
    for inside, answer in (("It is **$42.0**\n", 1), ("42 or 43", 0), ("42</answer><answer>42", 1)):
        found = math_task.grade(f" 40 + 2 = 42.</think>\n<answer>{inside}</answer>", Problem("?", Fraction(42)))
        assert found["answer"] == answer and found["format"] == (inside.count("<") == 0)
    text = " Then 4 + 3 = 7. So 7 / 2 = 3. Now 6 / 0 = 1"
    found = math_task.calculations(text, None)
    assert [(text[spans.a[0] : spans.result[1]], right) for spans, right in found] == [
        ("4 + 3 = 7", True), ("7 / 2 = 3", False), ("6 / 0 = 1", False)]


def rows(*answers):
    return [{"question": f"Q{i}\n$\\frac{{1}}{{2}}$?", "answer": answer} for i, answer in enumerate(answers)]


def lines(*answers):
    return "\n".join(map(json.dumps, rows(*answers))).encode()


@pytest.mark.parametrize("name, content, answers", [
    ("a.jsonl", b"\xef\xbb\xbf" + lines("#### 7", "So 500.\n#### $500", "<<2*3=6>>6\n#### 1,234.50", "#### -3/4", "12",
                                       "####   8  ").replace(b"\n", b"\r\n"), [7, 500, 1234.5, -0.75, 12, 8]),
    ("a.jsonl", lines(7, 7.5, "$7", "7 apples", "\\boxed{7}", "7 #### 8", "#### 1 #### 2"), [7, 7.5, 7, 7, 7, 8, 2]),
    ("a.jsonl", b"\n" + lines("1") + b"\r\n \r\n", [1]), ("a.jsonl.gz", gzip.compress(lines("1", "2")), [1, 2]),
    ("a.json", f"\n{json.dumps(rows(1, '2'), indent=1)}".encode(), [1, 2]), ("a.json", lines(3, 4), [3, 4]),
    ("a.csv", b'\xef\xbb\xbfid,question,answer\r\n1,Q0,7\r\n2,"Q1","so\r\n#### 1,000"\r\n', [7, 1000]),
    ("a.jsonl", '{"question": "Q0\u2028?\\u0000", "answer": 1}'.encode(), [1]),
    ("a.jsonl", lines(1) + b"\n" + lines(1), [1]),
    ("a.jsonl", lines(1e16, 1e-5, 1e99, -2.5e3), [10**16, Fraction(1, 10**5), 10**99, -2500]),
    ("a.jsonl", b'{"question": "Q0", "answer": 12345678901234567.25}', [Fraction(49382715604938269, 4)]),
    ("a.CSV", b'\n \nquestion,answer,,\nQ0,"1,234",,\n\n,,,\n"6"" pipe",7,,\n', [1234, 7])])
def test_data_files_as_people_have_them(name, content, answers, tmp_path):
    """Guards against a format that is refused, and a line that is cut at U+2028, which JSON allows in a text."""
    (tmp_path / name).write_bytes(content)
    found, train, heldout = (math_task.load(part, path=str(tmp_path / name)) for part in ("all", "train", "heldout"))
    assert [problem.answer for problem in found] == answers
    assert found[0].question in (rows(1)[0]["question"], "Q0", "Q0\u2028?\0")
    assert sorted(train + heldout) == sorted(found)
    assert math_task.load("all", 1, str(tmp_path / name)) == found[:1]


BROKEN_LINES = [
    ('{"problem": "Q", "solution": "3"}', "it has no question; its fields: 'problem', 'solution'"),
    ('{"question": "Q", "id": 3}', "it has no answer; its fields: 'question', 'id'"), ("{}", "its fields: none"),
    ('{"question": "Q", "answer": 3, "answer": 4}', "'answer' stands twice in .*3.*4"),
    *((f'{{"question": "Q", "answer": {answer}}}', said) for answer, said in (
        ("[7]", r"its answer is \[7\], neither text nor a number"), ("true", "True, neither"),
        ("[" * 99999, "too large"), ("1e" + "9" * 20, "large"))),
    ("{", "Expecting property name"), ("[]", "it is no object"),
    ('{"question": 3, "answer": "3"}', "its question is no text"), ('{"question": " ", "answer": 3}', "is no text"),
    ('{"question": "a \\ud800", "answer": "3"}', "surrogates not allowed"),
    *((f'{{"question": "Q", "answer": {answer}}}', "has not one number after the last ####")
      for answer in ('"#### 3 or 4"', "NaN", '"#### 3 ####"', "1e100", "1e-99999999"))]


@pytest.mark.parametrize("name, content, said", [
    *(("a.jsonl", lines(1, 2) + f"\n{line}\n".encode() + lines(1), f"a.jsonl, line 3: expected .*{said}")
      for line, said in BROKEN_LINES),
    ("a.json", b"[1]", "row 1: expected .* no object"), ("a.json", b"[]", "holds no puzzle"),
    ("a.csv", b"question,answer\nQ\n", "row 1: .*cells is 1, the header's 2"),
    ("a.csv", b"question,answer\nQ,3\nAnn has 3, and 4,7\n", "row 2: .*cells is 3, the header's 2: quote a text"),
    ("a.csv", b"question,answer,answer\nQ,3,4\n", "row 1: .*'answer' stands twice"),
    ("a.csv", b'question,answer\n"so" he said,3\n', "not valid CSV: line 2"),
    ("a.csv", b'question,answer\n"Q,3\nR,4\n', "not valid CSV: line 3: unexpected end of data"),
    ("a.json", b'[{"question": "Q", "answer": 3, "answer": 4}]', "a.json is not valid JSON: 'answer' stands twice"),
    ("a.gz", b"text", "not a complete .gz"), ("a.gz", gzip.compress(lines(1))[:-9], "not a complete .gz"),
    ("a.jsonl", lines(1).decode().encode("utf-16"), "not a text file in UTF-8: convert it"),
    ("a.jsonl", lines(1) + b"\n" + lines(2), "two answers to 'Q0.*': remove one")], ids=lambda x: str(x)[:40])
def test_a_broken_file_is_refused_in_one_sentence(name, content, said, tmp_path):
    """Guards against a row that is dropped or read as another one, and a sentence that doesn't say how to mend it."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        math_task.load("all", path=str(tmp_path / name))
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="no data file .*, but a folder: name one of the files in it"):
        load_puzzles(math_task, 9, str(tmp_path))


@pytest.mark.slow
def test_weights_that_git_lfs_did_not_fetch_are_called_so(tmp_path, refusal):
    """The form of a pointer is that of git-lfs's specification."""
    folder = shutil.copytree(BUNDLED, tmp_path / "m")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    (folder / "model.safetensors").write_text(pointer)
    for program in (train, talk):
        assert "with `git lfs pull` where it was cloned" in refusal(program, "--model", folder)


@pytest.mark.parametrize("kind, values, read", [
    ("float32", [0.1, 7, 2.5], ["0.1", "7", "2.5"]), ("float16", [0.1, 2048], ["0.1", "2048"]),
    ("float64", [1e16, 1e-5, 0.1], ["1e16", "1e-5", "0.1"]), ("int8", [-7], ["-7"]), ("string", ["# 1,000"], ["1e3"]),
    ("float16", [1, 16384], "row 2: .*may have been rounded: store it"), ("float32", [123456789.0], "row 1: .*rounded"),
    ("float32", [1, None], "row 2: .*has not one number"), ("binary", [b"7"], "row 1: .*b'7', neither text")])
def test_answers_of_a_parquet_file(kind, values, read, tmp_path):
    """Guards against 0.1 as 0.10000000149."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    file, answers = tmp_path / "a.Parquet", pyarrow.array(values, getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"question": [f"Q{i}" for i in range(len(values))], "answer": answers}), file)
    if isinstance(read, list):
        assert [problem.answer for problem in math_task.load("all", path=file)] == [*map(Fraction, read)]
    else:
        with pytest.raises(ValueError, match=f"a.Parquet, {read}"):
            math_task.load("all", path=file)


def test_prompts():
    problem = Problem("How {many}?", Fraction(3))
    assert "".join(math_task.prompt(problem, chat=False)) == "How {many}?\n<think>"
    assert [math_task.prompt(problem, chat)[1] for chat in (True, False)] == ["How {many}?"] * 2
    chat = "".join(math_task.prompt(problem, chat=True))
    assert "user\nHow {many}? Show your work" in chat and chat.endswith("step by step.\n<think>")
    instruction = chat.rpartition("<|im_start|>assistant")[0]
    assert all(instruction.count(tag) == 1 for tag in ("<think> ... </think>\n<answer> ... </answer>", "<answer>"))
    assert math_task.show(problem) == "How {many}? -> 3"
