"""The laboratory's commands: each of its pages runs, and one that cannot work is refused in one sentence at once."""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import analyze
from lab import heads, pages, redo, versions
from lab.gradients import measure as gradients
from lab.truth import measure as ground_truth
from methods.registry import CREDIT_FUNCTIONS, ORDER
from tests.test_pages import ROOT

REFUSED = {
    analyze: [("", "required: RUN"), ("--steps 3", "--steps"), ("nowhere", "nowhere is not a run folder")],
    redo: [("nowhere", "nowhere")],
    gradients: [("--model no/such/model", "no/such/model")],
    ground_truth: [("--model no/such/model", "no/such/model"), ("--data no/such.jsonl", "no/such.jsonl"),
                   ("--questions 1", "--questions must be"), ("--rollouts 0", "--rollouts must be"),
                   ("--responses 1", "--responses 1 leaves no group"), ("--roll 8", "--roll"),
                   ("--max_new_tokens 1000000", "--max_new"), ("--device foo", "--device")],
}


@pytest.mark.parametrize("program, words, said", [
    pytest.param(program, words, said, id=f"{program.__name__.split('.')[-1]} {words}")
    for program, cases in REFUSED.items() for words, said in cases])
def test_a_wrong_command_is_refused_in_one_sentence(program, words, said, refusal, tmp_path, monkeypatch):
    """Guards against a traceback, or minutes of work, before the user learns what is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heads, "sample", lambda *_: pytest.fail("it began to work"))
    assert said in refusal(program, *words.split())


TESTED = {"gradients.measure", "pages", "real.weights", "redo", "screen", "screen.calibrate", "screen.simulation",
          "original.run", "survive.run", "truth.chance", "truth.measure", "truth.score", "versions"}  # here, or where they are


def test_the_pages_are_as_written(run_program, monkeypatch):
    """Guards against a table edited by hand, or older than its file, and a section of methods.md older than its
    docstring, but not where a reader added a function, which is not in ORDER."""
    written = {}
    monkeypatch.setattr(pages, "CREDIT_FUNCTIONS", {name: CREDIT_FUNCTIONS[name] for name in ORDER})
    monkeypatch.setattr(Path, "write_text", lambda file, text, **_: written.update({file: text}))
    run_program(pages)
    stale = [str(file) for file, text in written.items() if file.read_text(encoding="utf-8") != text]
    assert written and not stale, "run python -m lab.pages"


def test_every_command_of_the_pages_is_run():
    named = {name for page in ROOT.rglob("*.md")
             for name in re.findall(r"python -m lab\.([a-z_.0-9]*[a-z0-9])", page.read_text(encoding="utf-8"))}
    assert named <= TESTED


def test_the_newest_versions_are_tried_without_pins(run_program, refusal, monkeypatch, capsys):
    """Guards against a pin that stays, a package that is left out, and a failure that nobody hears of."""
    said, code = [], [0]
    answer = SimpleNamespace(stdout="torch==9\nother==1\n")
    monkeypatch.setattr(versions.subprocess, "run", lambda words, **_: said.append([*map(str, words)]) or SimpleNamespace(
        **vars(answer), returncode=code[0] * ("pytest" in words)))
    run_program(versions, "--python", "python9")
    assert said[0][:3] == ["python9", "-m", "venv"] and said[-1][-2:] == ["-m", "not slow"]
    assert said[1][5:] == versions.names() and {"torch", "transformers", "trl", "peft", "numpy"} < {*versions.names()}
    assert "torch==9" in capsys.readouterr().out.splitlines()
    code[0] = 1
    assert "don't pass" in refusal(versions)
