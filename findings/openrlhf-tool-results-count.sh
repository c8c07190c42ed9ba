#!/usr/bin/env bash
# in short (trainers): GAE below lambda 1 decays over tool results and values them at 0. The overlong penalty counts
# their tokens, too.
# guessed: in OpenRLHF a tool result counts for nothing but as context: GAE runs over the tokens of the model, and the
# overlong penalty counts those
# seen: GAE takes the value of a tool result as 0 and decays by lambda over each of its tokens. With lambda 0.95 a
# result of 40 tokens leaves 0.13 of what comes after it, so the token that ends the call has almost minus its value
# as its advantage. At lambda 1, the default, advantages are right. The response_length of the overlong penalty
# reaches from the first to the last token of the model, with all results between: a long result costs up to the whole
# penalty
# with: openrlhf 0.11.2, ray 2.60.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 transformers==5.23.0 ray==2.60.0 sympy==1.14.0 pylatexenc==2.10 tqdm \
    wheel ninja setuptools
export PIP_NO_DEPS=1
venv/bin/pip install -q --no-build-isolation openrlhf==0.11.2  # building it needs torch
venv/bin/pip install -q openrlhf==0.11.2 ray==2.60.0 transformers==5.23.0 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import importlib.util
import os
import sys
from types import ModuleType
from types import SimpleNamespace as Space
from unittest.mock import MagicMock

import torch

for name in ("deepspeed", "vllm", "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher",
             "openrlhf.trainer.ray.vllm_engine"):
    sys.modules[name] = MagicMock()  # what starts processes on GPUs; nothing below calls it
models = sys.modules["openrlhf.models"] = ModuleType("openrlhf.models")  # without its imports of the above
models.__path__ = [os.path.join(os.path.dirname(importlib.util.find_spec("openrlhf").origin), "models")]

from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402

VALUE, PROMPT, TURN = 0.5, 3, 4  # what a critic says at every token; tokens of the prompt and of each of two turns


def run(result, lambd, buffer=None):
    """Reward, and advantages of the model's tokens, of prompt, turn, tool result and turn, which earned 1."""
    second = PROMPT + TURN + result
    response = dict(observation_tokens=list(range(second + TURN)), rollout_log_probs=None, prompt="", label="",
                    reward=1.0, action_ranges=[(PROMPT, PROMPT + TURN), (second, second + TURN)])
    sample = SamplesGenerator._process_response_into_experience(None, response, max_len=1000)
    sample.index = [0]
    sample.kl = torch.zeros(sample.action_mask.shape)
    sample.values = torch.full(sample.action_mask.shape, VALUE)
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    maker.advantage_estimator, maker.kl_ctl = "gae", Space(value=0.0)
    maker.strategy = Space(args=Space(
        rollout=Space(n_samples_per_prompt=1, max_new_tokens=50),
        reward=Space(clip_range=None, overlong_buffer_len=buffer, overlong_penalty_factor=1.0),
        algo=Space(advantage=Space(estimator="gae", gamma=1.0, lambd=lambd, no_std_norm=False))))
    maker.compute_advantages_and_returns([sample])
    own = sample.action_mask[0].bool()
    return sample.rewards.item(), (sample.returns - VALUE)[0, own]  # advantages before they are normalized


def gae(lambd):
    """Over the model's own tokens alone."""
    last, out = 0.0, []
    for t in reversed(range(2 * TURN)):
        last = (1.0 if t == 2 * TURN - 1 else VALUE) - VALUE + lambd * last
        out.append(last)
    return torch.tensor(out[::-1])


for lambd in (1.0, 0.95):
    print(f"lambda {lambd}, no tool result: {[round(x, 3) for x in gae(lambd).tolist()]}")
    for result in (1, 40):
        _, found = run(result, lambd)
        print(f"lambda {lambd}, a tool result of {result} tokens: {[round(x, 3) for x in found.tolist()]}")
        assert torch.allclose(found[TURN:], gae(lambd)[TURN:], atol=1e-5)
        if lambd == 1:
            assert torch.allclose(found, gae(lambd), atol=1e-5)
        else:  # the result's first token has the value 0, and its last one that of the next turn
            after = lambd ** (result + 1) * gae(lambd)[TURN] + lambd ** result * VALUE
            assert abs(found[TURN - 1] - (after - VALUE)) < 1e-5

for result in (1, 32, 42):
    reward, _ = run(result, 1.0, buffer=10)
    print(f"overlong penalty above 40 of 50 tokens, 8 of the model and {result} of a tool: reward {reward:.2f}")
    assert abs(reward - (1 - min(max(2 * TURN + result - 40, 0), 10) / 10)) < 1e-6
EOF
