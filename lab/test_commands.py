"""What every program says about a command line that cannot work: one sentence, before any work is done."""
import pytest

import analyze
from lab import heads
from lab.gradients import measure as gradients
from lab.playground import __main__ as playground
from lab.study import run as study
from lab.truth import measure as ground_truth

REFUSED = {
    analyze: [("", "required: RUN"), ("--steps 3", "--steps"),
              ("nowhere", "nowhere is not a run folder"), ("--types mine here", "--types")],
    gradients: [("--model no/such/model", "no/such/model")],
    ground_truth: [("--model no/such/model", "no/such/model"), ("--data no/such.jsonl", "no/such.jsonl"),
                   ("--questions 1", "--questions must be"), ("--rollouts 0", "--rollouts must be"),
                   ("--answers 1", "--answers 1 leaves no group"), ("--roll 8", "--roll"),
                   ("--max_new_tokens 1000000", "--max_new"), ("--device foo", "--device")],
    playground: [("--truth nowhere", "nowhere"), ("--tru", "--tru"),
                 (f"--model {playground.MODEL.with_name('math-tiny')}", "the truth is about another model")],
    study: [("--processes 0", "--processes"), ("--methods grpo", "--methods")],
}


@pytest.mark.parametrize("program, words, said", [
    pytest.param(program, words, said, id=f"{program.__name__.split('.')[-1]} {words}")
    for program, cases in REFUSED.items() for words, said in cases])
def test_a_wrong_command_is_refused_in_one_sentence(program, words, said, refusal, tmp_path, monkeypatch):
    """Guards against a traceback, or minutes of work, before the user learns what is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heads, "fit", lambda *_: pytest.fail("it began to work"))
    monkeypatch.setattr(study.subprocess, "Popen", lambda *_, **__: pytest.fail("it began to work"))
    assert said in refusal(program, *words.split())
