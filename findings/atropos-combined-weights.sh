#!/usr/bin/env bash
# in short (graders): CombinedReward ignores its rewards' weights: one of weight 0.1 counts as much as one of weight
# 1.
# guessed: in a CombinedReward of Atropos a reward counts as much as its weight says
# seen: the weights are ignored: a reward of weight 0.1 counts as much as one of weight 1. normalization "sum" divides
# by them all the same, so it scales the whole and never one part of it. Called alone, a reward is weighted
# with: atroposlib 0.4.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
PIP_NO_DEPS=1 venv/bin/pip install -q atroposlib==0.4.0
venv/bin/python -W ignore - <<'EOF'
import importlib.util  # noqa: F401  atroposlib 0.4.0 uses it without importing it

from atroposlib.envs.reward_fns import registry

TEXTS = ["<think>7 + 2</think><answer>9</answer>",  # the layout is right, and there is no list of steps
         "1. I add.\n2. I check.\n3. It is 9."]  # the other way round
found = {}
for small in (1.0, 0.1):
    parts = [{"type": "format", "weight": 1.0}, {"type": "reasoning_steps", "weight": small}]
    alone = [registry.create(part)(TEXTS) for part in parts]
    for kind in ("none", "sum"):
        whole = registry.create({"type": "combined", "rewards": parts, "normalization": kind})(TEXTS)
        found[small, kind] = whole
        print(f"weights 1 and {small}, normalization {kind}: alone {alone}, combined {whole}")
assert found[1.0, "none"] == found[0.1, "none"]
for small in (1.0, 0.1):
    assert all(abs(a - b / (1 + small)) < 1e-9 for a, b in zip(found[small, "sum"], found[small, "none"]))
assert alone[1][1] < 0.1 and found[0.1, "none"][1] >= 0.5
EOF
