"""The whole command, and a model that it refuses."""
import re
import sys

import pytest

import countdown_task
import start
from lab import heads, statistics
from lab.gradients import measure, noise
from methods import MITIGATIONS
from plumbing.run_folder import copy_tokenizer
from qwen2_model import save_model
from tests.fixtures import BUNDLED


@pytest.fixture
def small(tokenizer, random_model, tmp_path, monkeypatch):
    """The folder of a small model; responses have at most 12 tokens, end anywhere and may earn something."""
    for name, value in {"LIMIT": 12, "SIZE": 4, "RESAMPLES": 40, "BATCHES": 4, "CRITIC_BATCHES": 1,
                        "METHODS": {name: MITIGATIONS[name] for name in ("none", "ppo")}}.items():
        for module in (heads, measure, noise, statistics):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(countdown_task, "grade", lambda text, puzzle: {
        "reward": len(text) % 3, "answer": float(sum(map(ord, text)) % 3 == 0), "format": 0.5 * (len(text) % 3)})
    monkeypatch.setattr(tokenizer, "end_tokens", list(range(0, tokenizer.size, 8)))
    monkeypatch.setattr(start, "Tokenizer", lambda folder: tokenizer)
    copy_tokenizer(BUNDLED, tmp_path)
    save_model(random_model.float(), tmp_path)
    return tmp_path


def test_the_whole_command(small, monkeypatch):
    """Guards against batches that share puzzles or random numbers, a table that is not written, and a second call
    that gives other numbers."""
    calls, texts, sample = [], [], measure.sample
    monkeypatch.setattr(measure, "sample", lambda *arguments: calls.append(arguments) or sample(*arguments))
    monkeypatch.setattr(sys, "argv", f"measure.py --model {small} --out {small / 'out'}".split())
    for _ in range(2):
        measure.main()
        texts.append((small / "out" / "noise.md").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert texts[0].count("\n| ") == 4 and not re.search(r"\b(nan|inf)\b", texts[0])
    assert [key for *_, key in calls[:4]] == [(0, 1000 + i) for i in range(4)]
    assert len({puzzle for _, puzzles, *_ in calls[:4] for puzzle in puzzles}) == 4 * 6


def test_a_model_that_solves_nothing_is_refused_in_one_sentence(small, refusal, monkeypatch):
    """Guards against a traceback where no group has a gradient."""
    monkeypatch.setattr(countdown_task, "grade", lambda *_: dict.fromkeys(("reward", "answer", "format"), 0.0))
    assert "--model that solves some" in refusal(measure, "--out", small)
