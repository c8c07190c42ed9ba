#!/usr/bin/env bash
# in short (graders): diversity_reward pays one word 2.2, and no text of three words or more above 1.
# guessed: diversity_reward of eval-protocol is a weighted mean of the shares of distinct words, pairs and triples, with
# weights 0.2, 0.3 and 0.5, so it is at most 1, where nothing repeats
# seen: where a response is too short for a size of n-gram, that size counts 1 in place of its weight. So one word earns
# 2.2, two words 1.5, and any text of three words or more at most 1. A policy that answers with one word, or says it
# twice, is paid more than the most varied text, and beside a grader of right and wrong it is this reward that decides
# with: eval-protocol 0.3.33
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q eval-protocol==0.3.33
LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
from eval_protocol.models import Message
from eval_protocol.rewards.repetition import diversity_reward


def expected(text, sizes=(1, 2, 3), weights=(0.2, 0.3, 0.5)):
    """The weighted mean of the shares of distinct n-grams, over the sizes that the text is long enough for."""
    words = text.lower().split()
    grams = [[tuple(words[i:i + size]) for i in range(len(words) - size + 1)] for size in sizes]
    rows = [(weight, len(set(row)) / len(row)) for weight, row in zip(weights, grams) if row]
    return sum(weight * share for weight, share in rows) / sum(weight for weight, _ in rows)


def paid(text, **settings):
    return diversity_reward(messages=[Message(role="assistant", content=text)], **settings).score


texts = {
    "72": 2.2,
    "seventy two": 1.5,
    "no no": 1.4,
    "the answer is 72": 1.0,
    "half of 48 is 24 , and 48 plus 24 make 72": None,
}
for text, known in texts.items():
    print(f"{text!r}: paid {paid(text):.2f}, weighted mean {expected(text):.2f}")
    assert abs(paid(text) - (expected(text) if known is None else known)) < 1e-9 and expected(text) <= 1
long = [text for text in texts if len(text.split()) > 2]
assert all(abs(paid(text) - expected(text)) < 1e-9 for text in long)
assert min(paid("72"), paid("seventy two"), paid("no no")) > max(paid(text) for text in long)
assert abs(paid("72", ngram_sizes=[1, 2], weights=[0.5, 0.5]) - 1.5) < 1e-9  # with weights of one's own, too
EOF
