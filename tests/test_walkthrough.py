"""docs/walkthrough.py, which uses nothing of this repository, has the numbers of the code that trains."""
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import countdown_task
from grpo import LOSS_NORMS, LOSSES, compare, update
from methods.registry import CREDIT_FUNCTIONS
from plumbing.optimizer import Optimizer
from qwen2_model import Qwen2, from_checkpoint, parse_config, to_checkpoint
from rollout import Policy, decode_and_grade, token_batch
from sampler import generate
from settings import Settings
from tests.fixtures import Pieces
from tests.plain import plain_logprobs

FILE = Path(countdown_task.__file__).parent / "docs" / "walkthrough.py"
SPEC = importlib.util.spec_from_file_location("walkthrough", FILE)
SPEC.loader.exec_module(by_hand := importlib.util.module_from_spec(SPEC))
NUMBERS = list(by_hand.walk())
WALKED = {name: value for name, _, value in NUMBERS}
SETTINGS = Settings(responses=2, max_new_tokens=8, clip_low=by_hand.CLIP, clip_high=by_hand.CLIP)
CONFIG = parse_config({"model_type": "qwen2", "vocab_size": by_hand.V, "hidden_size": by_hand.D,
                       "intermediate_size": by_hand.WIDTH, "num_hidden_layers": 1, "num_attention_heads": 1,
                       "num_key_value_heads": 1, "tie_word_embeddings": True})


def flat(value):
    """A number, several, or all weights by name (both sides have them in the same order), as a new array."""
    if isinstance(value, dict):
        return np.concatenate([flat(x).ravel() for x in value.values()])
    return value.detach().numpy().copy() if isinstance(value, torch.Tensor) else np.array(value)


def by_code(weights):
    """Yield (name, value) of every number of the walkthrough, for a model with its weights."""
    model, puzzle = Qwen2(CONFIG).double(), countdown_task.Puzzle((1, 2), 3)
    given = dict(zip(to_checkpoint(model.state_dict(), CONFIG), (torch.from_numpy(x) for x in weights.values())))
    model.load_state_dict(from_checkpoint(given, model.state_dict(), CONFIG))
    policy = Policy(model, Pieces(by_hand.VOCABULARY), countdown_task)  # in which a digit is its own token
    optimizer = Optimizer(model, by_hand.LR)
    uniforms, prompt = torch.from_numpy(by_hand.UNIFORMS), policy.prompt(puzzle)
    samples = generate(model, [prompt], uniforms, [0])
    batch = token_batch(policy, [puzzle], [prompt], decode_and_grade(policy, [puzzle], samples), SETTINGS)
    batch.advantage = compare(batch, "grpo")
    credit, share = CREDIT_FUNCTIONS["none"](batch), LOSS_NORMS["token"](batch.mask, SETTINGS)  # (B, T) each
    p = model(torch.tensor([prompt]))[0, -1].softmax(0)  # (V,)
    yield from {"weights": to_checkpoint(model.state_dict(), CONFIG), "prompt": prompt, "first token: p": p,
                "first token: cumulative p": p.cumsum(0), "random numbers": uniforms, "tokens": batch.tokens,
                "logprob": batch.logprob, "text": batch.text, "reward": batch.reward, "advantage": batch.advantage,
                "credit by outcome_conditional": CREDIT_FUNCTIONS["outcome_conditional"](batch), "credit": credit,
                "share": share}.items()
    times, logprob = [], plain_logprobs(model, [prompt] * 2, batch.tokens, batch.mask)  # (B, T)
    for k in (1, 2):
        gain, stopped = LOSSES["ppo"](logprob, batch.logprob, credit, batch.mask, SETTINGS)  # (B, T) each
        slope, = torch.autograd.grad(-(gain * share).sum(), logprob)  # (B, T)
        p = model(torch.tensor([prompt]))[0, -1].softmax(0)  # (V,)
        row = update(policy, optimizer, batch, credit, SETTINGS)
        assert row["clip_fraction"] == stopped[batch.mask].double().mean()
        assert row["ratio_error"] == pytest.approx((logprob - batch.logprob)[batch.mask].abs().mean().item(), abs=2e-6)
        found = {"ratio": (logprob - batch.logprob).exp(), "clipped": stopped, "loss": row["loss"],
                 "d loss / d log pi": slope, "gradient norm": row["grad_norm"], "new weights": model.state_dict(),
                 "d log pi / d logits, first token": torch.eye(by_hand.V)[batch.tokens[0, 0]] - p,
                 "gradient": {name: x.grad for name, x in model.named_parameters()}}
        yield from ((f"update {k}: {name}", to_checkpoint(value, CONFIG) if isinstance(value, dict) else value)
                    for name, value in found.items())
        logprob = plain_logprobs(model, [prompt] * 2, batch.tokens, batch.mask)  # (B, T)
        times.append((logprob - batch.logprob).sum(1).exp())
    yield "times as probable", torch.stack(times)


def test_every_number_is_that_of_the_code():
    """The second update is off-policy and clipped: against a walkthrough in which nothing happens."""
    found = {name: flat(value) for name, value in by_code(WALKED["weights"])}
    assert found.keys() == WALKED.keys() and found.pop("text").tolist() == WALKED["text"]
    for name, value in found.items():
        np.testing.assert_allclose(flat(WALKED[name]), value, rtol=0, atol=2e-6, err_msg=name)
    assert (WALKED["update 1: ratio"] == 1).all() and not WALKED["update 1: clipped"].any()
    assert 0 < WALKED["update 2: clipped"].sum() < 12
    first = flat(WALKED["update 1: new weights"]) - flat(WALKED["weights"])  # moved by about the learning rate
    assert by_hand.LR * 0.99 < abs(first).min() and abs(first).max() <= by_hand.LR * (1 + 1e-9)
    right, wrong = WALKED["times as probable"].T
    assert 1 < right[0] < right[1] and 1 > wrong[0] > wrong[1]


@pytest.mark.slow
def test_it_runs_alone_and_says_what_each_number_is(tmp_path):
    imports = re.findall(r"^\s*(?:import|from) (\w+)", FILE.read_text(encoding="utf-8"), re.M)
    assert {*imports} - sys.stdlib_module_names == {"numpy"}
    run = subprocess.run([sys.executable, "-I", FILE], cwd=tmp_path, capture_output=True, text=True, check=True)
    for name, sentence, _ in NUMBERS:
        assert sentence.endswith(".") and f"{name} {' '.join(sentence.split())}" in " ".join(run.stdout.split())
