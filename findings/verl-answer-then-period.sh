#!/usr/bin/env bash
# in short (graders): A period behind the right answer decides: gsm8k pays "#### 72" 1 and "#### 72." 0.
# guessed: a period behind a right final number is nothing to a grader of word problems
# seen: it decides. gsm8k pays 1 for "#### 72" and 0 for "#### 72."; its flexible way, the last number of a text, pays 0
# for "The answer is 72."; math_dapo says 1 to "Answer: 72" and -1 to "Answer: 72.". So do "#### 72.00", "#### $72",
# "Answer: 72.0" and "Answer: 72 clips". In a group of right answers GRPO then pays or blames the punctuation alone
# with: verl 0.9.1
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
export PIP_NO_DEPS=1  # its graders need none
venv/bin/pip install -q verl==0.9.1
venv/bin/python - <<'EOF'
import importlib.util
import site
from pathlib import Path


def grader(name):
    """A grader by its file, since verl itself needs a hundred other packages to be imported."""
    file = Path(site.getsitepackages()[0]) / "verl" / "utils" / "reward_score" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


gsm8k, dapo = grader("gsm8k"), grader("math_dapo")
score = {
    "gsm8k": {text: gsm8k(f"So it is 72.\n{text}", "72") for text in ("#### 72", "#### 72.", "#### 72.00", "#### $72")},
    "gsm8k, flexible": {text: gsm8k(text, "72", method="flexible") for text in (
        "The answer is 72", "The answer is 72.", "72 clips.")},
    "math_dapo": {text: dapo(text, "72")["score"] for text in (
        "Answer: 72", "Answer: 72.", "Answer: $72$.", "Answer: 72.0", "Answer: 72 clips")}}
for name, texts in score.items():
    print(f"{name:16}", ", ".join(f"{text!r} {paid:g}" for text, paid in texts.items()))
assert [*score["gsm8k"].values()] == [1, 0, 0, 0]
assert [*score["gsm8k, flexible"].values()] == [1, 0, 1]
assert [*score["math_dapo"].values()] == [1, -1, 1, -1, -1]
EOF
