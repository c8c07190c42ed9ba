#!/usr/bin/env bash
# in short (trainers): DAPO's overlong penalty counts characters, not tokens, and has no floor.
# guessed: DAPOLearner's overlong penalty counts tokens, as its max_response_length does, and is at most 1 (2503.14476)
# seen: it counts the characters of the decoded text, and has no floor. At the defaults, and four characters a token, a
# response of 5,120 tokens loses the whole point that the paper takes at 20,480, and one of 12,000 tokens, where the
# paper takes nothing, loses 7.7, more than a right answer earns
# with: google-tunix 0.1.7, jax 0.10.2, flax 0.12.8
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
JAX_PLATFORMS=cpu venv/bin/python -W ignore - <<'EOF'
from tunix.rl.grpo.dapo_learner import DAPOConfig, reward_shaping

buffer = DAPOConfig().overlong_buffer
WORD = "one "  # a token of most tokenizers, four characters with its space


def penalty(tokens):
    """What a response of that many such tokens loses."""
    (found,) = reward_shaping([""], [WORD * tokens], mode=None, overlong_buffer=buffer)
    return found


print({name: x for name, x in buffer.items()})
for tokens in (4096, 5120, 12000):
    print(f"{tokens} tokens, {tokens * len(WORD)} characters: {penalty(tokens):.2f}")
assert buffer["max_response_length"] == 20480 and buffer["overlong_buffer_length"] == 4096
assert penalty(4096) == 0 and penalty(5120) == -1  # in the paper from 16,384 to 20,480 tokens
assert abs(penalty(12000) + 7.72) < 0.01
EOF
