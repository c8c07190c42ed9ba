#!/usr/bin/env bash
# in short (compare): maj@k of gsm8k_cot_self_consistency counts "no answer found" as a candidate, which can outvote
# the right answer.
# guessed: maj@64 and maj@8 of lm-eval's gsm8k_cot_self_consistency are the vote of self-consistency: among the answers
# of the responses that have one (2203.11171), where 1,000 and 1000 are one number, as they are for the task's score
# seen: a response that regex finds no answer in votes for "[invalid]", as one candidate. Five responses that say
# "The answer is: 72", or were cut off, outvote three that say "The answer is 72.", and the problem counts as wrong. And
# the vote is over texts: two for 1,000 and two for 1000, each of which scores 1 alone, lose to three for 9
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
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import exact_match_fn
from lm_eval.filters import build_filter_ensemble

FOLDER = Path(lm_eval.__file__).parent / "tasks" / "gsm8k"
base, task = (yaml.safe_load((FOLDER / name).read_text()) for name in (
    "gsm8k-cot.yaml", "gsm8k-cot-self-consistency.yaml"))
metric, = base["metric_list"]
metric = {name: metric[name] for name in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
steps = {entry["name"]: [[step.pop("function"), step] for step in entry["filter"]] for entry in task["filter_list"]}


def vote(gold, *answers):
    """The task's maj@64 of some responses, given as their last sentences, and its score."""
    instance = Instance(request_type="generate_until", doc={}, arguments=("", {}), idx=0)
    instance.resps = [f"So we add them up. {answer}" for answer in answers]
    build_filter_ensemble("maj@64", steps["maj@64"]).apply([instance])
    elected = instance.filtered_resps["maj@64"]
    return elected, exact_match_fn(predictions=[elected], references=[gold], **metric)["exact_match"]


found = {
    "three right, five without": vote("72", *["The answer is 72."] * 3, *["The answer is: 72"] * 5),
    "three right, two without": vote("72", *["The answer is 72."] * 3, *["The answer is: 72"] * 2),
    "four right in two spellings": vote("1000", *["The answer is 1,000.", "The answer is 1000."] * 2,
                                        *["The answer is 9."] * 3),
    "1,000 alone": vote("1000", "The answer is 1,000."), "1000 alone": vote("1000", "The answer is 1000.")}
for name, (elected, score) in found.items():
    print(f"{name}: {elected}, score {score:g}")
assert [score for _, score in found.values()] == [0, 1, 0, 1, 1]
assert [elected for elected, _ in found.values()][::2] == ["[invalid]", "9", "1000"]
EOF
