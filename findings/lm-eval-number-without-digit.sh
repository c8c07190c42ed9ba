#!/usr/bin/env bash
# in short (compare): gsm8k's flexible-extract takes trailing punctuation for a number: a right answer that ends
# `$\boxed{72}$.` is wrong.
# guessed: gsm8k's flexible-extract takes the last number of a response
# seen: it takes the last number, or the last two or more of $ . and , in a row, whatever comes last. So a right answer
# is wrong if it ends as models of mathematics often end, in $\boxed{72}$. or $$\boxed{72}$$, or if an ellipsis or
# "i.e.," stands behind it. $72$. and \(\boxed{72}\). are right
# with: lm-eval 0.4.13
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q lm-eval==0.4.13
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'EOF'
from pathlib import Path

import lm_eval
import yaml
from lm_eval.api.metrics import exact_match_fn
from lm_eval.filters.extraction import RegexFilter

task = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
(flexible,) = (each["filter"][0] for each in task["filter_list"] if each["name"] == "flexible-extract")
pick = RegexFilter(regex_pattern=flexible["regex_pattern"], group_select=flexible["group_select"])
(metric,) = task["metric_list"]
flags = {name: metric[name] for name in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}


def extract(response):
    """What is taken from a response, and its score against a gold answer of 72."""
    ((found,),) = pick.apply([[response]], [{}])
    return found, exact_match_fn(predictions=[found], references=["48 + 24 = 72\n#### 72"], **flags)["exact_match"]


RIGHT = (r"So she sold $72$.", r"The answer is \(\boxed{72}\).", "#### 72.", "She sold 72 clips.")
WRONG = {r"The answer is $\boxed{72}$.": "$.", r"$$\boxed{72}$$": "$$", "It is 72. I hope this helps...": "...",
         "She sold 72 clips, i.e., six dozen.": ".,"}
for response in (*RIGHT, *WRONG):
    found, score = extract(response)
    print(f"{response}   takes {found!r}, scores {score}")
    assert score == (response in RIGHT) and found == WRONG.get(response, found)
EOF
