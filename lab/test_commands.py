"""The laboratory's commands: each of its pages runs, and one that cannot work is refused in one sentence at once."""
import re
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import analyze
from lab import arms, heads, pages, redo, statistics
from lab.gradients import measure as gradients
from lab.original import roles
from lab.speed import benchmark
from lab.truth import checks, measure as ground_truth
from lab.turns import values
from tasks import guess_task
from tests.test_pages import ROOT

REFUSED = {
    analyze: [("", "required: RUN"), ("--steps 3", "--steps"), ("nowhere", "nowhere is not a run folder")],
    redo: [("nowhere", "nowhere")],
    roles: [("--types mine here", "--types"), ("here", "--types"), ("--types original", "RUN")],
    gradients: [("--model no/such/model", "no/such/model")],
    ground_truth: [("--model no/such/model", "no/such/model"), ("--data no/such.jsonl", "no/such.jsonl"),
                   ("--questions 1", "--questions must be"), ("--rollouts 0", "--rollouts must be"),
                   ("--answers 1", "--answers 1 leaves no group"), ("--roll 8", "--roll"),
                   ("--max_new_tokens 1000000", "--max_new"), ("--device foo", "--device")],
}


@pytest.mark.parametrize("program, words, said", [
    pytest.param(program, words, said, id=f"{program.__name__.split('.')[-1]} {words}")
    for program, cases in REFUSED.items() for words, said in cases])
def test_a_wrong_command_is_refused_in_one_sentence(program, words, said, refusal, tmp_path, monkeypatch):
    """Guards against a traceback, or minutes of work, before the user learns what is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heads, "sample", lambda *_: pytest.fail("it began to work"))
    monkeypatch.setattr(arms.subprocess, "Popen", lambda *_, **__: pytest.fail("it began to work"))
    assert said in refusal(program, *words.split())


TESTED = {"gradients.measure", "original.roles", "original.undetached", "real.weights", "redo", "rollouts",
          "rollouts.trl", "truth.measure", "truth.score"}  # where their own tests call them
SMALL = {  # the other commands, with their words, and what makes them cheap
    pages: ("", {}), values: ("", {}),
    benchmark: ("--out {}/out.md", {"WARM_UPS": 0, "ROUNDS": 1, "CASES": {"4 tokens": (4, True), "real": (6, False)},
                                    "rate": lambda work, *case: work(*case)}),
    checks: ("", {"SPLITS": 1, "FILES": {"toy": checks.FILES["countdown-tiny"]}})}


@pytest.mark.parametrize("program", SMALL, ids=lambda program: program.__name__.removeprefix("lab."))
def test_a_command_of_the_pages_runs(program, tmp_path, monkeypatch, capsys):
    """Guards against a program that dies on what the book has become."""
    words, smaller = SMALL[program]
    written = {}
    monkeypatch.setattr(Path, "write_text", lambda file, text, **_: written.update({file: text}) or len(text))
    monkeypatch.setattr(Figure, "savefig", lambda *_: None)
    monkeypatch.setattr(guess_task, "GUESSES", 2)
    monkeypatch.setattr(statistics, "RESAMPLES", 100 if program is checks else statistics.RESAMPLES)
    for name, value in smaller.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(sys, "argv", ["program.py", *words.format(tmp_path).split()])
    program.main()
    if program is pages:
        assert written and all(file.read_text(encoding="utf-8") == text for file, text in written.items())
    elif program is benchmark:
        assert re.search(r"4 tokens \| +384 \| +384 \| +1.00 ", written[tmp_path / "out.md"])  # of 12 x 8 responses
    else:
        assert written or program is values and "V(prompt)" in capsys.readouterr().out


def test_every_command_of_the_pages_is_run():
    named = {name for page in ROOT.rglob("*.md")
             for name in re.findall(r"python -m lab\.([a-z_.0-9]*[a-z0-9])", page.read_text(encoding="utf-8"))}
    assert named <= TESTED | {program.__name__.removeprefix("lab.").removesuffix(".__main__") for program in SMALL}
