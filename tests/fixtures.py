"""Shared by the tests: the bundled tokenizer, a small random model, batches made by hand."""
import itertools
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

import countdown_task
from countdown_task import Puzzle
from plumbing.launch import BUNDLED
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2, load_model, parse_config
from rollout import Policy, TokenBatch

ROOT = Path(countdown_task.__file__).parent
ANSWERS = ("hidden", "attention", "head", "reference_logprob", "logprob_without", "rollout_values", "generator")


def pytest_addoption(parser):
    """`--task path/to/my_task.py`: the task that tests/test_each_task.py tries, in place of all of tasks/."""
    parser.addoption("--task", action="append", default=[], help="a task for tests/test_each_task.py")


def pytest_generate_tests(metafunc):
    """Each test that asks for `task_name` runs with every task."""
    if "task_name" in metafunc.fixturenames:
        files = [*ROOT.glob("*_task.py"), *(ROOT / "tasks").glob("*_task.py")]
        every = sorted(file.stem.removesuffix("_task") for file in files)
        metafunc.parametrize("task_name", metafunc.config.getoption("--task") or [*every, "tests/reverse_task.py"])


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of the bundled model."""
    return Tokenizer(BUNDLED)


@pytest.fixture
def policy(tokenizer):
    """The bundled model, for Countdown."""
    model = load_model(BUNDLED)
    model.real_vocab = tokenizer.size
    return Policy(model, tokenizer, countdown_task)


@pytest.fixture
def interruptible():
    """Signals end a program or raise KeyboardInterrupt, also in a job in a shell's background, which ignores some."""
    kinds = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    before = {name: signal.signal(getattr(signal, name), handler) for name, handler in kinds.items()}
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


@pytest.fixture
def random_model(tokenizer):
    """A two-layer Qwen2 with large random weights, in float64, so that gradients can be compared to rounding."""
    torch.manual_seed(0)
    config = dict(model_type="qwen2", vocab_size=tokenizer.size, hidden_size=32, intermediate_size=48,
                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = Qwen2(parse_config(config)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def exact():
    """Compute in float64, so that two ways to the same result agree to 1e-10."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def passes(monkeypatch):
    """A list to which every forward pass adds its model and the number of its tokens."""
    found, begin = [], Qwen2.begin
    monkeypatch.setattr(Qwen2, "begin", lambda model, tokens, *others: (
        found.append((model, tokens.numel())), begin(model, tokens, *others))[1])
    return found


@pytest.fixture
def quick(monkeypatch):
    """No time for evaluation: no puzzle is ever solved."""
    monkeypatch.setattr("train.evaluate", lambda policy, puzzles, k, s: np.zeros((len(puzzles), k)))


@pytest.fixture
def figures(monkeypatch):
    """The figures that a test draws."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: (save(figure, file), drawn.append(figure)))
    return drawn


def check_texts(figure) -> None:
    """Fails unless all texts of a figure can be read at 600 pixels of width, inside of it and apart from each other."""
    figure.set_layout_engine("none")  # leave everything where it was when the figure was saved
    with mock.patch.object(Text, "draw", autospec=True, side_effect=Text.draw) as drawn:
        figure.draw_without_rendering()
    texts = [call.args[0] for call in drawn.mock_calls]
    texts = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = np.array([text.get_window_extent().extents for text in texts])  # (n, 4) x0, y0, x1, y1 in dots
    assert (boxes[:, :2] >= -1).all() and (boxes[:, 2:] <= np.array(figure.bbox.size) + 1).all()
    overlap = np.minimum(boxes[:, None, 2:], boxes[:, 2:]) - np.maximum(boxes[:, None, :2], boxes[:, :2])  # (n, n, 2)
    pairs = np.argwhere(np.triu((overlap > 2).all(2), 1))  # two dots: letters stand on whole ones
    assert not len(pairs), [[texts[i].get_text() for i in pair] for pair in pairs[:3]]
    assert min(text.get_fontsize() for text in texts) * 600 / figure.get_figwidth() / 72 > 9


def refused(action, *arguments) -> str:
    """The one sentence with which an action ends the program."""
    with pytest.raises(SystemExit, match=r"\Aerror: [^\n]+\Z") as stop:
        action(*arguments)
    return stop.value.code


@pytest.fixture
def run_program(monkeypatch):
    """Runs the `main` of a program with these words on its command line."""
    def run(program, *words):
        monkeypatch.setattr(sys, "argv", ["program.py", *map(str, words)])
        program.main()
    return run


@pytest.fixture
def refusal(run_program):
    """The one sentence with which a program refuses these words."""
    return lambda *words: refused(run_program, *words)


def make_batch(lengths, advantages, groups=None, **fields) -> TokenBatch:
    """A TokenBatch with responses of the given lengths and a neutral value for each field that a test does not name.

    Answers of the model (ANSWERS) are given in the same way: make_batch(..., hidden=torch.zeros(2, 3, 4)); what a head
    says, by its name: make_batch(..., critic=torch.zeros(2, 3)).
    """
    B, T, Q = len(lengths), max(lengths), 1 + max(groups or [0])
    mask = (torch.arange(T + 1) < torch.tensor(lengths)[:, None])[:, :T]  # not contiguous, as the sampler's isn't
    neutral = dict(
        tokens=torch.zeros(B, T, dtype=torch.long),
        mask=mask,
        logprob=-torch.ones(B, T) * mask,
        entropy=torch.ones(B, T) * mask,
        logit_grad=torch.ones(B, T) * mask,
        reward=fields.pop("reward", torch.zeros(B)).double(),
        success=torch.zeros(B),
        format=torch.ones(B),
        grades={},
        parts={"answer": 1.0, "format": 0.1},
        ended=torch.ones(B, dtype=torch.bool),
        before=({},) * B,
        group=torch.tensor(groups or [0] * B),
        puzzles=(Puzzle((1, 2, 3), 6),) * Q,
        prompts=([0],) * Q,
        task=countdown_task,
        advantage=torch.tensor(advantages),
        role=torch.zeros(B, T, dtype=torch.int8),
        in_answer=torch.zeros(B, T, dtype=torch.bool),
        text=("",) * B,
        spans=tuple([(0, 0)] * n for n in lengths),
        normalize="response",
    )
    answers = {"generator": lambda name: torch.Generator().manual_seed(0)}
    answers |= {name: fields.pop(name) for name in ANSWERS if name in fields}
    heads = {name: fields.pop(name) for name in ("critic", "process_critic", "importance") if name in fields}
    if heads:
        answers["head"] = heads.__getitem__
    return TokenBatch(**neutral | fields, ask=SimpleNamespace(**answers))


def spans_of(pieces):
    """The spans of tokens given by their texts."""
    stops = list(itertools.accumulate(map(len, pieces)))
    return [(stop - len(piece), stop) for piece, stop in zip(pieces, stops)]


class Pieces:
    """A tokenizer whose tokens are whole pieces of text; token 0 ends a response. Of a prompt it reads the digits."""

    end_tokens, chat, start = [0], False, []

    def __init__(self, pieces):
        self.pieces, self.size = pieces, len(pieces)

    def encode(self, text):
        return [int(digit) for digit in re.findall(r"\d", text)]

    def decode(self, tokens):
        pieces = [self.pieces[token] for token in tokens]
        return "".join(pieces), spans_of(pieces)


def make_written(pieces, advantages, groups=None, **fields) -> TokenBatch:
    """make_batch of responses given as the text of each of their tokens; a last piece "" is the end token."""
    texts, lengths, spans = ["".join(row) for row in pieces], [len(row) for row in pieces], list(map(spans_of, pieces))
    B, T = len(lengths), max(lengths)
    roles, in_answers = torch.zeros(B, T, dtype=torch.int8), torch.zeros(B, T, dtype=torch.bool)
    for i, length in enumerate(lengths):
        role, in_answer = countdown_task.roles(texts[i], spans[i])
        roles[i, :length], in_answers[i, :length] = torch.from_numpy(role), torch.from_numpy(in_answer)
    ended = torch.tensor([row[-1] == "" for row in pieces])
    written = dict(text=tuple(texts), spans=tuple(spans), role=roles, in_answer=in_answers, ended=ended)
    return make_batch(lengths, advantages, groups, **written | fields)
