#!/usr/bin/env bash
# in short (graders): word_ladder and four other data sets also depend on PYTHONHASHSEED: two processes with one seed
# have different items.
# guessed: a data set is fixed by its name, its config and its seed
# seen: word_ladder, isomorphic_strings, ransom_note, polynomial_multiplication and knight_swap also depend on
# PYTHONHASHSEED, which Python draws anew for each process, so two processes with one seed have different items;
# countdown does not
# with: reasoning-gym 0.1.25
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q reasoning-gym==0.1.25
venv/bin/python -W ignore - <<'EOF'
import json
import os
import subprocess
import sys

NAMES = ["word_ladder", "isomorphic_strings", "ransom_note", "polynomial_multiplication", "knight_swap", "countdown"]
PROGRAM = """
import json
import sys

import reasoning_gym

print(json.dumps({name: [(item["question"], item["answer"]) for item in reasoning_gym.create_dataset(
    name, seed=7, size=8)] for name in sys.argv[1:]}))
"""


def items(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, *NAMES], env=environment, capture_output=True,
                         text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


zero, again, one = items("0"), items("0"), items("1")
for name in NAMES:
    other = sum(a != b for a, b in zip(zero[name], one[name]))
    print(f"{name:26} {other} of 8 items differ between PYTHONHASHSEED 0 and 1")
assert zero == again and zero["countdown"] == one["countdown"]
assert all(zero[name] != one[name] for name in NAMES[:-1])
EOF
