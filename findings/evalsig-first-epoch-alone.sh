#!/usr/bin/env bash
# in short (compare): Of several responses an item, stored as epochs, compare and gate read epoch 0 alone, and don't say
# so: a worse model is significantly better.
# guessed: compare and gate of evalsig use all scores of a run: where an item was answered several times, which
# ItemResult has a field `epoch` for, its mean counts, or its epochs are a cluster, or they refuse, or a note says what
# was left out
# seen: every score of an epoch other than 0 is dropped, without an error or a note. Of four epochs whose mean falls by
# 0.15, and of which the first alone rises, they report a significant gain of 0.3, and gate says ALLOW. The result is
# the same to the last digit whatever the other epochs hold
# with: evalsig 0.1.2, numpy 2.4.6, scipy 1.17.1
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q evalsig==0.1.2 numpy==2.4.6 scipy==1.17.1
venv/bin/python - <<'EOF'
from evalsig.compare.compare import compare
from evalsig.compare.gate import gate
from evalsig.types import ItemResult, RunFrame

ITEMS, EPOCHS, CHANGED = 40, 4, 12  # in each epoch the two models differ on 12 of 40 items


def run(name, scores):
    """Scores by epoch and item as a run."""
    return RunFrame(run_id=name, model_id=name, task_id="puzzles", metric_name="accuracy", items=[
        ItemResult(item_id=f"puzzle {i}", score=float(score), epoch=epoch)
        for epoch, row in enumerate(scores) for i, score in enumerate(row)])


def mean(run):
    return sum(item.score for item in run.items) / len(run.items)


right, wrong = [1] * CHANGED + [1, 0] * 14, [0] * CHANGED + [1, 0] * 14
old = run("old", [wrong] + [right] * (EPOCHS - 1))  # worse in epoch 0, better in the three others
new = run("new", [right] + [wrong] * (EPOCHS - 1))
equal = [run(name, [first] + [right] * (EPOCHS - 1)) for name, first in (("old", wrong), ("new", right))]

assert len(old.items) == len(new.items) == ITEMS * EPOCHS
found, verdict = compare(old, new), gate(old, new, min_delta=0.1)
print(f"over {EPOCHS} epochs the mean goes from {mean(old):.3f} to {mean(new):.3f}")
print(f"compare: {found.delta:+.3f}, p {found.p_value:.4f}, {found.n_pairs} pairs, significant: {found.significant}, "
      f"notes: {list(found.notes)}; gate: {verdict.verdict.value}")
assert abs(mean(new) - mean(old) + 0.15) < 1e-9
assert abs(found.delta - 0.3) < 1e-9 and found.significant and found.p_value < 0.001
assert found.n_pairs == ITEMS and not found.notes and verdict.verdict.value == "ALLOW"
other = compare(*equal)
print(f"where the other epochs are equal, the mean goes from {mean(equal[0]):.3f} to {mean(equal[1]):.3f}; "
      f"compare is the same: {other == found}")
assert other == found and abs(mean(equal[1]) - mean(equal[0]) - 0.075) < 1e-9
EOF
