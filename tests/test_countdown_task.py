"""The Countdown task against independent oracles: brute force, a second parser, the tokenizers library, and by hand.

Run:  OMP_NUM_THREADS=1 python -m pytest tests/test_countdown_task.py -q
"""
import doctest
import hashlib
import itertools
import operator
import random
import re
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import countdown_task as task
from countdown_task import Puzzle
from tests.plain import expressions

CALM = settings(deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
                suppress_health_check=[HealthCheck.too_slow])  # a slow machine is not a bug
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: Fraction(a) / b}

# --------------------------------------------------------------------------------------------------- puzzles


def all_values(numbers, whole):
    """The values of all expressions that use every number."""
    return {value for _, value in expressions(tuple(sorted(numbers)), whole)}


@settings(CALM, max_examples=80)
@given(st.lists(st.integers(0, 13), min_size=1, max_size=3), st.integers(-10, 60))
@example([1, 2, 5, 7], 24)  # (a b) (c d): a grouping that needs four numbers
@example([2, 2, 4, 4], 4)  # equal numbers and equal results
@example([3, 3, 8, 8], 24)  # no way without fractions
def test_solver_finds_what_permutations_and_parentheses_find(numbers, target):
    puzzle = Puzzle(tuple(numbers), target)
    for options in ({}, {"whole": True}):
        values, solutions = all_values(numbers, bool(options)), task.solutions(puzzle, **options)
        assert {result for result, _ in task.derivations(puzzle.numbers, **options)} == values
        assert bool(solutions) == (target in values)
        for solution in solutions:
            text = task.expression(puzzle.numbers, solution)
            assert oracle_value(text) == target
            assert sorted(map(int, re.findall(r"\d+", text))) == sorted(numbers)
            assert not options or all(type(v) is int and v >= 0 for a, _, b, result in solution for v in (a, b, result))
    assert task.is_solvable(puzzle) == (target in all_values(numbers, whole=False))


DEFAULT_RANGES = (3, 1, 20, 100)  # how many numbers, from, to, the largest target


@pytest.mark.parametrize("ranges", [(), (2, 1, 6, 30), (3, 4, 7, 10), (2, 0, 3, 5), (4, 9, 10, 40), (1, 3, 9, 7)])
def test_universe_is_what_brute_force_finds(ranges):
    found, (count, low, high, most) = task.universe(*ranges), ranges or DEFAULT_RANGES
    sets = itertools.combinations_with_replacement(range(low, high + 1), count)
    expected = {(numbers, value) for numbers in sets for value in all_values(numbers, True) if 1 <= value <= most}
    assert len(found) == len(expected)
    assert set(found) == expected


def test_split_is_a_fixed_hash_and_ignores_the_order_of_the_numbers():
    """Guards against another hash, with which the bundled model would be tested on puzzles it was trained on."""
    assert task.fingerprint("abc") == 0xBA7816BF8F01CFEA  # the first 64 bits of SHA-256's published test vector
    for a, b, target in itertools.product(range(1, 21), range(1, 21), (10, 100)):
        low, middle, high = sorted((a, b, 7))
        keys = f"{low},{middle},{high}", f"{low},{middle},{high}={target}"
        new, heldout = (str(int(hashlib.sha256(key.encode()).hexdigest()[:16], 16)).endswith("0") for key in keys)
        assert task.split(Puzzle((a, b, 7), target)) == ("new_numbers" if new else "heldout" if heldout else "train")


@pytest.mark.parametrize("part, ranges", [("train", ()), ("heldout", ()), ("new_numbers", ()),
                                          ("train", (4, 5, 30, 40))])
def test_generated_puzzles_are_distinct_solvable_and_of_their_split(part, ranges):
    puzzles, (count, low, high, most) = task.generate_puzzles(100, part, 3, *ranges), ranges or DEFAULT_RANGES
    assert len(puzzles) == len({(tuple(sorted(p.numbers)), p.target) for p in puzzles}) == 100
    assert {task.split(p) for p in puzzles} == {part}
    for numbers, target in puzzles:
        assert len(numbers) == count and all(low <= n <= high for n in numbers)
        assert 1 <= target <= most and target in all_values(numbers, whole=True)
        assert all(type(n) is int for n in (*numbers, target))


def test_seed_decides_the_generated_puzzles_and_their_random_order():
    puzzles = task.generate_puzzles(400, "train")
    assert puzzles == task.generate_puzzles(400, "train", seed=0)
    assert puzzles != task.generate_puzzles(400, "train", seed=1)
    assert 20 < sum(list(p.numbers) == sorted(p.numbers) for p in puzzles) < 200  # about a sixth is in order


def test_generator_finds_every_puzzle_and_says_when_there_are_no_more():
    known = [p for p in task.universe(2, 1, 4) if task.split(p) == "train"]
    drawn = task.generate_puzzles(len(known), "train", count=2, high=4)
    assert {(tuple(sorted(p.numbers)), p.target) for p in drawn} == set(known)
    for ranges, found in (({"count": 2, "high": 4}, len(known)), ({"max_target": 0}, 0)):
        with pytest.raises(ValueError, match=f"found only {found} of 60 train puzzles"):
            task.generate_puzzles(60, "train", **ranges)


GOOD = '{"target": 98, "nums": [44, 19, 35]}'
MALFORMED = [
    "", "hello", "98", "[44, 19]", '{"nums": [1, 2]}', '{"target": 98}', '{"target": 98, "nums": [44, 19',
    *(f'{{"target": 3, "nums": {n}}}' for n in ("[]", "44", '"44"', '["44"]', "[-44]", "[44.0]", "[true]")),
    *(f'{{"nums": [3, 4], "target": {target}}}' for target in ('"98"', "-98", "true", "NaN", "[98]"))]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_reader_accepts_rows_of_countdown_tasks_3to4(tmp_path, end):
    path = tmp_path / "data.jsonl"
    path.write_bytes(f'{GOOD}\n{{"nums": [3, 3, 0], "target": 0, "id": "x"}}{end}'.encode())
    assert task.read_puzzles(path) == task.read_puzzles(str(path)) == [((44, 19, 35), 98), ((3, 3, 0), 0)]


@pytest.mark.parametrize("line", MALFORMED)
def test_reader_names_the_malformed_line(tmp_path, line):
    for before in ([], [GOOD, GOOD]):
        (tmp_path / "data.jsonl").write_text("\n".join([*before, line, GOOD]))
        with pytest.raises(ValueError, match=rf"data\.jsonl, line {len(before) + 1}: expected .*nums.*target"):
            task.read_puzzles(tmp_path / "data.jsonl")


def test_reader_refuses_missing_empty_and_binary_files(tmp_path):
    for content, sentence in ((b"", "holds no puzzle"), (b"\xff", "not a text file in UTF-8")):
        (tmp_path / "data.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=f"data.jsonl .*{sentence}"):
            task.read_puzzles(tmp_path / "data.jsonl")
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match="no data file"):
            task.read_puzzles(path)


def test_parquet_is_read_by_pyarrow_or_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    table = SimpleNamespace(to_pylist=lambda: [{"nums": [1, 2], "target": 3}])
    pyarrow = SimpleNamespace(parquet=SimpleNamespace(read_table=lambda path, columns: table))
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    assert task.read_puzzles(tmp_path / "train.parquet") == [((1, 2), 3)]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        task.read_puzzles(tmp_path / "train.parquet")


# ---------------------------------------------------------------------------------------------------- reward

RIGHT = "</think>\n<answer>(5 - 3) * 4</answer>"  # of the puzzle 3, 4, 5 = 8


@pytest.mark.parametrize("response, layout, answer", [
    (" a\nb" + RIGHT, 1, 1),
    ("</think>\n<answer>  4*(5-3) </answer>", 1, 1),
    ("</think>\n<answer>(5 - 4) * 3</answer>", 1, 0),  # wrong value
    ("</think>\n<answer>5 + 3</answer>", 1, 0),  # a number is missing
    ("</think>\n<answer>5 + 3 + 4 - 4</answer>", 1, 0),  # a number is used twice
    ("</think>\n<answer>(5 - 3) * 4 * 1</answer>", 1, 0),  # a number that the puzzle does not have
    ("</think>\n<answer>\n(5 - 3) * 4\n</answer>", 1, 0),  # white space other than spaces
    ("</think>\n<answer></answer>", 1, 0),
    (RIGHT + "\n", 0.6, 1),  # something after </answer>
    (RIGHT + "</answer>", 0.6, 1),
    ("</think><answer>(5 - 3) * 4</answer>", 0.6, 1),  # no newline between the tags
    (" a</think> b" + RIGHT, 0.6, 1),
    (" <think>a" + RIGHT, 0.6, 1),
    ("</think>\n<answer>(5 - 3) * 4</answer> 9</answer>", 0.6, 1),  # the answer stops at the first </answer>
    (" <answer>(5 - 3) * 4</answer></think>", 0.6, 1),  # the answer inside the think section
    (" think\n<answer>(5 - 3) * 4</answer>", 0.5, 1),  # think is not closed
    (" think</think>\n<answer>(5 - 3) * 4", 0.1, 0),  # answer is not closed
    (" think</think></answer>\n<answer>(5 - 3) * 4", 0.1, 0),  # closed before it is opened
    (" think</think>\n(5 - 3) * 4</answer>", 0.1, 0),  # never opened
    ("", 0, 0),
    ("</think>\n<answer>5 + 3</answer>\n<answer>(5 - 3) * 4</answer>", 0, 1),  # two answers: the last is graded
    (RIGHT + "\n<answer>5 + 3</answer>", 0, 0),
    (RIGHT + "\n<answer>", 0, 0),  # the last is not closed
])
def test_reward_of_responses_graded_by_hand(response, layout, answer):
    graded = task.reward(response, iter((5, 3, 4)), 8)  # numbers in any order, in any iterable
    assert graded == {"reward": pytest.approx(0.1 * layout + answer), "format": pytest.approx(layout), "answer": answer}


@pytest.mark.parametrize("expression, numbers, target, answer", [
    ("8/(3-8/3)", (3, 3, 8, 8), 24, 1), ("8/(3-8/3)", (3, 8, 8), 24, 0), ("7/2", (2, 7), 3, 0), ("3-5", (3, 5), -2, 1),
    ("1/3*3", (1, 3, 3), 1, 1), ("1/3*3", (1, 3, 3), 0.9999999999999999, 0), ("3 - 3", (3, 3), 0, 1), ("5", (5,), 5, 1),
    ("1 1", (1, 1), 11, 0), ("12 + 1", (1, 2, 1), 13, 0), ("1/(2-2)", (1, 2, 2), 0, 0), ("01 + 2", (1, 2), 3, 0)])
def test_answer_is_exact_and_uses_each_number_once(expression, numbers, target, answer):
    assert task.reward(f"<answer>{expression}</answer>", numbers, target)["answer"] == answer


EMOJI = "\U0001f642"  # four bytes
PIECES = ["</think>\n<answer>", "</think>\n<answer>", "</answer>", "</answer>", "<answer>", "</think>", "<think>", "\n",
          " ", "4 * (5 - 3)", "(5-3)*4", "8", " - ", "<", ">", "answer", "/", "\u00e9", "\u2003", "\u0663", EMOJI]
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
        used = "".join(c if c in "0123456789" else " " for c in inside).split()
        right = oracle_value(inside) == target and sorted(map(int, used)) == [3, 4, 5]
        assert task.reward(response, (3, 4, 5), target) == {
            "reward": pytest.approx(0.1 * layout + right), "format": pytest.approx(layout), "answer": right}


def parse(tokens, levels=("+-", "*/")):
    """The value at the front of the tokens, which it consumes: a sum of products of numbers and parentheses."""
    if not levels:
        token = tokens.pop(0)
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
    """What `evaluate` must return, by a recursive-descent parser; None where it must raise ValueError."""
    depth = max(itertools.accumulate(({"(": 1, ")": -1}.get(c, 0) for c in text), initial=0))
    tokens = re.findall(r"0|[1-9][0-9]*|[^ ]", text) + ["end"]
    try:
        value = parse(tokens) if len(text) <= 256 and depth <= 32 and set(text) <= set("0123456789+-*/() ") else None
    except (ValueError, ZeroDivisionError):
        return None
    return value if tokens == ["end"] else None


@pytest.mark.parametrize("text, value", [
    ("8 - 3 - 2", 3), ("8 - (3 - 2)", 7), ("16 / 4 / 2", 2), ("16 / (4 / 2)", 8), ("16 / 4 * 2", 8), ("0/5", 0),
    ("2 + 3 * 4", 14), ("(2 + 3) * 4", 20), ("20 - 6 / 2 + 1", 18), ("8/(3-8/3)", 24), ("1/3 + 1/6", Fraction(1, 2)),
    ("10-0", 10), ("3 - 8", -5), (" 1+2 ", 3), ("(" * 32 + "1" + ")" * 32, 1), ("(1)+" * 40 + "1", 41),
    ("1" + "+1" * 127 + " ", 128), ("100*" * 60 + "1", 100**60)])  # the first of these has 256 characters
def test_evaluate_by_hand(text, value):
    assert task.expression_value(text) == oracle_value(text) == value
    assert isinstance(task.expression_value(text), Fraction)


@pytest.mark.parametrize("sentence, texts", [
    ("division by zero", ["1/0", "0/0", "5/(2-1-1)"]),
    ("more than 32 nested", ["(" * 33 + "1" + ")" * 33, "(1+" * 33 + "1" + ")" * 33, "(1)+" * 9 + "(" * 33, "(" * 200]),
    ("only [+] - [*] /", ["95**96**97", "9//2", "-1", "3*-1", "(-1)+2", "--1", "()", "1(2)", "1(2)+3"]),
    ("not an arithmetic", [
        "", " ", "(1", "1)", ")(", "(1)2", "1+", "*1", "/", "1 0", "0 0", "00", "007", "1+01", "1_0", "0x1", "1e9",
        "1.0", "1j", "1\n", "\n1", "1\u00a0+ 1", "1\x00", "\u0663+1", "2\u00b2", "\uff11", "\ud800", "5 \u2212 3",
        "1,2", "[1]", "1%2", "1<<9", "~1", "'1'", "print(1)", "1 if 1 else 2", "1 + 1 #", "1" + "+1" * 128,
        "9" * 10_000, "(" * 257])])
def test_evaluate_refuses_powers_signs_code_foreign_digits_and_endless_input(sentence, texts):
    for text in texts:
        with pytest.raises(ValueError, match=sentence):
            task.expression_value(text)


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
def test_evaluate_agrees_with_another_parser_on_100_000_hostile_strings():
    rng, accepted = random.Random(0), 0
    for text in (hostile_text(rng) for _ in range(100_000)):
        try:
            value = task.expression_value(text)
        except ValueError:
            value = None
        assert value == oracle_value(text), text
        accepted += value is not None
    assert 20_000 < accepted < 80_000


# ------------------------------------------------------------------------------------ what each token is


def spans_of(pieces):
    """The spans of tokens given by their texts."""
    stops = list(itertools.accumulate(map(len, pieces)))
    return [(stop - len(piece), stop) for piece, stop in zip(pieces, stops)]


@pytest.mark.parametrize("pieces, roles, answer", [
    # tags are split over several tokens and merged with their neighbours; the answer begins with its own `<`
    ([" 5", " -", "3", "!</", "think", ">\n", "<", "answer", ">(", "5", ")</", "answer", "><", "answer", ">", "9", ""],
     "RRRFSSSSSRRSSSSRS", 13),
    (["!</", "think>", "\n<", "answer>", "  7", " +", ")</", "answer>", ""], "FSSSRRRSS", 2), (["<answer>"], "S", 0),
    (list("a1 +-*/=().,x"), "FRFRRRRRRRFFF", None), (list("<answer"), "FFFFFFF", None), ([""], "S", None),
    (list("</ think>"), "FRFFFFFFF", None), (list("<Answer>"), "FFFFFFFF", None), (["<", "<answer>", ">"], "FSF", 1),
    (["<answer>", "8", "<answer>"], "SRS", 2), (list("\u0663\u00b2\u00d7"), "FFF", None), ([" ", "\n\n"], "FF", None)])
def test_roles_and_answer_by_hand(pieces, roles, answer):
    """A token's first character that is not white space decides."""
    assert (task.ROLES, task.FILLER, task.REASONING, task.STRUCTURE) == (("filler", "reasoning", "structure"), 0, 1, 2)
    role, in_answer = task.annotate("".join(pieces), spans_of(pieces))
    assert "".join("FRS"[r] for r in role) == roles
    assert in_answer.tolist() == [answer is not None and i >= answer for i in range(len(pieces))]


@pytest.mark.parametrize("pieces, places", [
    (["No", ".", " 1", " +", " 2"], [2]), (["No.", " 1"], [1]), ([" No", ". 1", " +"], [2]),  # merged with the end
    (["No", "!", " Or", "?", " Yes"], [2, 4]), (["Hm", ".", ".", ".", " No"], [4]), (["Hm", "...", " No"], [2]),
    (["2", ".", "5", " is"], []), (["e", ".g", "."], []), (["a", "\n", "b"], [2]), (["a", "\nb", " c"], [2]),
    (["a", ">\n", "<", "answer"], []), (["a", "\n", "<"], []),  # the line break before <answer> ends no sentence
    (["works", "!</", "think", ">"], [2]), (["so.<", "answer", ">"], [1]), (["Done", "."], []), (["Done", ".", ""], []),
    (["Done", ". "], []), (["Done", ".", " "], [2]), (["Do", ". b"], []), (["Do", ". b", ""], [2]), ([], [])])
def test_sentence_starts_by_hand(pieces, places):
    marked = task.sentence_starts("".join(pieces), spans_of(pieces))
    assert marked.tolist() == [i in places for i in range(len(pieces))]


# -------------------------------------------------------------------------------------------- calculations

TWO = [("5", "-", "3", "2"), ("4", "*", "2", "8")]


@pytest.mark.parametrize("text, calculations", [
    (" 5 - 3 = 2, 4 * 2 = 8.", TWO), ("5-3=2\n4*2=8", TWO), ("5 - 3 = 2. 4 * 2 = 8.", TWO), ("1. 5\n -3 = 2", TWO[:1]),
    ("3 - 5 = -2", [("3", "-", "5", "-2")]), ("20 / 4 = 5 1 + 1 = 3", [("20", "/", "4", "5"), ("1", "+", "1", "3")]),
    ("4 - 3 - 2 = 1", []), ("14-13-12=1", []), ("4 -\n3 - 2 = 1", []), ("(5 - 3) * 4 = 8", []), ("(8)3 - 2 = 4", []),
    ("4 * (5 - 3) = 8", []), ("1.5 + 2 = 3", []), ("-5 + 2 = 3", []), ("5 / 2 = 2.5", []), ("5 - 3", []), ("5 = 5", []),
    ("5 - = 3", []), ("", []), ("5 - \u0663 = 2", []), ("5 ** 3 = 2", []), ("5 - 3 == 2", []), ("2 / 3 * 4 = 9", [])])
def test_calculations_found_by_hand(text, calculations):
    assert [tuple(text[a:b] for a, b in spans) for spans in task.find_calculations(text)] == calculations


def verdicts(text, numbers):
    """T or F for each calculation of a text."""
    return "".join("FT"[v] for v in task.check_calculations(text, task.find_calculations(text), numbers))


@pytest.mark.parametrize("text, right", [  # of the puzzle's numbers 3, 4, 5
    ("5 - 3 = 2, 4 * 2 = 8", "TT"), ("5 - 3 = 3", "F"), ("5 * 3 = 8", "F"), ("3 - 5 = -2", "T"),
    # A number that is not available, or not twice.
    ("3 + 9 = 12", "F"), ("5 + 5 = 10", "F"), ("5 - 3 = 2, 4 * 3 = 12", "TF"),
    # A wrong result counts once: later calculations may use what was claimed, and only that.
    ("5 - 3 = 1, 4 * 1 = 4", "FT"), ("5 - 3 = 1, 4 * 2 = 8", "FF"), ("9 - 3 = 6, 4 + 5 = 9, 6 + 9 = 15", "FTT"),
    # A finished attempt gives the numbers back and takes its result away.
    ("5 - 3 = 2, 4 * 2 = 8, 5 + 3 = 8, 8 - 4 = 4", "TTTT"), ("5 - 3 = 2, 4 * 2 = 8, 8 + 3 = 11", "TTF"),
    # So does an attempt given up at the end of a sentence; but it may also be continued there.
    ("5 + 3 = 8. 5 - 3 = 2, 4 * 2 = 8", "TTT"), ("5 + 3 = 8, 5 - 3 = 2", "TF"), ("5 + 3 = 8? No: 5 - 3 = 2", "TT"),
    ("5 + 3 = 8\n5 - 3 = 2", "TT"), ("5 + 3 = 8!</think> 5 - 3 = 2", "TT"), ("5 + 3 = 8. Well, 4 + 8 = 12", "TT"),
    ("5 + 3 = 8. 8 + 3 = 11", "TF"), ("5 + 3 = 8 or 8.0 and 5 - 3 = 2", "TF"), ("Hm. 5 + 3 = 8, 5 - 3 = 2", "TF"),
    ("5\n+ 3 = 8, 5 - 3 = 2", "TF"), ("5 + 3 = 8. 5 - 3 = 2, 5 + 4 = 9", "TTF")])
def test_calculations_graded_by_hand(text, right):
    assert verdicts(text, (3, 4, 5)) == right


@pytest.mark.parametrize("text, numbers, right", [
    ("5 + 5 = 10", (5,), "F"), ("5 + 5 = 10", (), "F"), ("0 / 8 = 0", (0, 8), "T"),
    ("8 / 4 = 2", (4, 8), "T"), ("7 / 2 = 3", (2, 7), "F"), ("8 / 0 = 0", (0, 8), "F"),  # exact, and not by zero
    ("5 + 5 = 10, 10 - 3 = 7", (5, 5, 3), "TT"), ("5 + 5 = 10, 10 + 5 = 15", (5, 5, 3), "TF"),
    ("4 - 2 = 2, 2 * 3 = 6, 2 + 6 = 8", (4, 2, 2, 3), "TTT"), ("4 - 2 = 2, 2 * 3 = 6, 2 + 6 = 8", (4, 2, 3), "TTF"),
    # Which attempt it was may show only later; until then, a calculation may use what either reading offers.
    ("20 - 18 = 2, 2 + 19 = 21. 20 - 17 = 3, 20 * 3 = 60", (20, 20, 17), "FFTT"),
    ("3 + 4 = 7. 5 + 6 = 11, 3 + 4 = 7, 7 + 11 = 18", (3, 4, 5, 6), "TTTT"),
    ("3 + 4 = 7. 5 + 6 = 11. 3 + 7 = 10", (3, 4, 5, 6), "TTF")])
def test_calculations_with_other_numbers_graded_by_hand(text, numbers, right):
    assert verdicts(text, numbers) == right


@pytest.mark.parametrize("text, attempts", [
    ("5 - 3 = 2, 4 * 2 = 8", [((2, 4), True)]), ("5 - 3 = 1, 4 * 1 = 4", [((1, 4), False)]),
    ("9 - 3 = 6, 4 * 6 = 24", [((4, 5, 6), False)]), ("5 - 4 = 1. 5 - 4 = 1", [((3, 4, 5), True)]),
    ("5 - 4 = 1. 1 + 3 = 4", [((1, 3), True)]), ("5 - 4 = 1. 7 + 7 = 14", [((1, 3), True), ((3, 4, 5), True)])])
def test_attempts_before_the_second_calculation_by_hand(text, attempts):
    """The values available, and whether all was right so far."""
    _, (_, found) = task.follow(text, task.find_calculations(text), (3, 4, 5))
    assert [(tuple(sorted(pool.elements())), right) for pool, right in found] == attempts


@pytest.mark.parametrize("numbers", [(3, 4, 5), (5, 5, 3), (0, 1, 7), (20, 6), (8, 4, 2, 2)])
def test_every_derivation_is_right_alone_and_after_another(numbers):
    ways = [calculations for _, calculations in task.derivations(numbers, whole=True)]
    for mark in (", ", ". ", "\n"):
        written = [mark.join("{0} {1} {2} = {3}".format(*c) for c in calculations) for calculations in ways]
        assert {verdicts(text, numbers) for text in written} == {"T" * (len(numbers) - 1)}
        assert set(verdicts(mark.join(written[:300]), numbers)) == {"T"}


# -------------------------------------------------------------------------------- between text and tokens

ENDS = ("<|im_end|>", "<|endoftext|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # a letter below 256 is its own byte; the others follow in order
PRINTABLE = [ord(letter) for letter in ALPHABET if ord(letter) < 256]
LETTERS = dict(zip(PRINTABLE + sorted(set(range(256)) - set(PRINTABLE)), ALPHABET))
WORDS = [b" -", b"</", b">\n", b" " + EMOJI.encode()[:1], EMOJI.encode()[:2], EMOJI.encode()[2:] + b"<"]
MERGES = dict.fromkeys((word[:i], word[i : i + 1]) for word in WORDS for i in range(1, len(word)))
TOKENS = [bytes([i]) for i in range(256)] + [a + b for a, b in MERGES]  # token i < 256 is byte i


def spell(data):
    """Bytes in the letters of byte-level BPE."""
    return "".join(LETTERS[byte] for byte in data)


def build(folder, special=(*ENDS, "<|im_start|>")):
    """Save a byte-level BPE of TOKENS and special tokens, which follow them."""
    vocabulary = {spell(token): i for i, token in enumerate(TOKENS)}
    bpe = models.BPE(vocab=vocabulary, merges=[(spell(a), spell(b)) for a, b in MERGES])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """The codec of the tokenizer with ChatML tokens."""
    return task.Codec(build(tmp_path_factory.mktemp("chat")))


def test_prompts_are_chatml_for_a_chat_model_and_plain_for_any_other(codec, tmp_path):
    puzzle, plain = Puzzle((44, 19, 35), 98), task.Codec(build(tmp_path, special=ENDS[1:]))
    assert plain.tokenizer.decode(plain.prompt(puzzle)) == (
        "Using the numbers [44, 19, 35], create an equation that equals 98.\nLet me solve this step by step.\n<think>")
    ids = codec.prompt(puzzle)
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful assistant. You first think about the reasoning process in your mind and "
        "then provide the user with the answer.<|im_end|>\n<|im_start|>user\nUsing the numbers [44, 19, 35], create "
        "an equation that equals 98. You can use basic arithmetic operations (+, -, *, /) and each number can only be "
        "used once. Show your work in <think> </think> tags. And return the final answer in <answer> </answer> tags, "
        "for example <answer> (1 + 2) / 3 </answer>.<|im_end|>\n<|im_start|>assistant\nLet me solve this step by step."
        "\n<think>")
    names = [codec.tokenizer.id_to_token(i) for i in ids]  # the markers are single tokens, not spelt out
    assert names.count("<|im_start|>") == 3 and names.count("<|im_end|>") == 2
    assert codec.end_tokens == [codec.tokenizer.token_to_id(name) for name in ENDS]  # a chat turn ends in <|im_end|>
    assert plain.end_tokens == [plain.tokenizer.token_to_id("<|endoftext|>")]


def test_codec_refuses_folders_without_a_byte_level_tokenizer_that_has_an_end_token(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        task.Codec(tmp_path)
    for text in ("", "{", '{"version": "1.0"}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer: ."):
            task.Codec(tmp_path)
    with pytest.raises(ValueError, match="neither .*im_end.* nor .*endoftext"):
        task.Codec(build(tmp_path, special=("<|im_start|>",)))
    sentencepiece = Tokenizer(models.BPE(vocab={"\u2581": 0, "a": 1, "\u2581a": 2}, merges=[("\u2581", "a")]))
    sentencepiece.add_special_tokens(["<|endoftext|>"])
    sentencepiece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="not a byte-level one"):
        task.Codec(tmp_path)


def test_half_characters_by_hand(codec):
    ids = codec.tokenizer.encode(f"\u00e9 {EMOJI}25").ids + codec.end_tokens[:1]
    #                C3      A9    20 F0     9F    99 82     2       5     end
    spans = [(0, 1), (0, 1), (1, 3), (2, 3), (2, 3), (3, 4), (4, 5), (5, 5)]
    assert codec.decode(ids) == (f"\u00e9 {EMOJI}25", spans)


@settings(CALM, max_examples=300)
@given(TEXTS)
def test_spans_of_valid_text_are_those_of_the_tokenizers_library(codec, text):
    encoding, end = codec.tokenizer.encode(text, add_special_tokens=False), (len(text), len(text))
    assert codec.decode(encoding.ids + codec.end_tokens) == (text, encoding.offsets + [end, end])


@settings(CALM, max_examples=700)
@given(st.lists(st.integers(0, len(TOKENS) + 2) | st.integers(128, 255) | st.sampled_from(b"\xe2\xf0\x9f\xc3"),
                max_size=12))
def test_spans_of_broken_utf8_are_those_of_each_byte(codec, tokens):
    """An untrained model writes any bytes. A byte belongs to the last character of the text that ends with it."""
    parts = [(TOKENS + [b"", b"", b"<|im_start|>"])[i] for i in tokens]  # an end token is no text
    data, stops = b"".join(parts), itertools.accumulate(map(len, parts))
    owner = [len(data[: i + 1].decode(errors="replace")) - 1 for i in range(len(data))]
    owners = [owner[stop - len(part) : stop] for part, stop in zip(parts, stops)]
    text, spans = codec.decode(tokens)
    assert text == data.decode(errors="replace")
    if not re.search(rb"\xed[\xa0-\xbf]", data):  # half a surrogate: the span may be that of another U+FFFD
        assert spans == [(o[0], o[-1] + 1) if o else (len(text), len(text)) for o in owners]


def test_command_line_prints_right_expressions_only(monkeypatch, capsys):
    def printed(*arguments):
        monkeypatch.setattr(sys, "argv", ["countdown_task.py", *arguments])
        task.main()
        return capsys.readouterr().out

    lines = printed("3", "7", "8", "--target", "29").split("split: train\n")[1].splitlines()
    assert lines and all(oracle_value(line) == 29 for line in lines)
    assert printed("1", "1", "--target", "29").endswith("no solution\n")
    with pytest.raises(SystemExit):
        printed("1", "2", "3", "4", "5", "6", "--target", "29")


def test_examples_in_the_docstrings():
    result = doctest.testmod(task)
    assert result.attempted >= 4
    assert result.failed == 0
