#!/usr/bin/env bash
# in short (compare): match(numeric=True) rounds to five significant digits: 123,456 counts as right where the target
# is 123457.
# guessed: match(numeric=True) of Inspect pays a response whose last number equals the target, written with or without
# commas, $ or a dot behind it
# seen: both numbers are rounded to five significant digits first, silently. Of whole numbers from 100,000 on the last
# digits don't count: 123,456 is right where the target is 123457, 1234599 where it is 1234567, and 100004 where it is
# 100000. Up to 99,999 every digit counts, and without numeric=True all do, but then the text must match
# with: inspect-ai 0.3.285, numpy 2.4.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q inspect-ai==0.3.285 numpy==2.4.6
venv/bin/python -W ignore - <<'EOF'
import asyncio

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, match
from inspect_ai.solver import TaskState

PAIRS = [("123,456", "123457"), ("1234599", "1234567"), ("100004", "100000"), ("100060", "100000"), ("12345", "12346"),
         ("99,998", "99999"), ("$123,457.", "123457")]


def graded(number, target, numeric):
    """C or I for a response that ends in the number."""
    output = ModelOutput.from_content("none", f"So the total is {number}")
    state = TaskState(model="none", sample_id=0, epoch=1, input="How many?", messages=[], output=output)
    return asyncio.run(match(numeric=numeric)(state, Target(target))).value


found = {}
for number, target in PAIRS:
    found[number] = graded(number, target, True)
    print(f"target {target:>8}, response {number:>9}: {found[number]}, without numeric {graded(number, target, False)}")
assert [found[number] for number, _ in PAIRS] == ["C", "C", "C", "I", "I", "I", "C"]
assert {graded(number, target, False) for number, target in PAIRS[:6]} == {"I"}
EOF
