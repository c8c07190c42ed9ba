"""The laboratory's commands: each of its pages runs, and one that cannot work is refused in one sentence at once."""
import re
from pathlib import Path

import pytest

import analyze
from lab import heads, pages, redo
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
          "original.run", "survive.run", "truth.chance", "truth.measure", "truth.score"}  # here, or where they are


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
