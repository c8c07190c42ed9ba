#!/usr/bin/env bash
# in short (compare): Two agents that don't differ are told apart twice as often as alpha says: at alpha=0.1, in one of
# five comparisons of five seeds each.
# guessed: MultipleAgentsComparator, a sequential two-sided test for reinforcement learning with few seeds, calls equal
# agents different in at most a share alpha of all comparisons, whatever the scores' law
# seen: the difference of the means is taken without its sign, but its threshold comes from the differences of the
# permuted scores with their sign, so each side has the whole alpha. Over all ways to share ten scores out to two agents
# the share of "larger" and "smaller" is 50 of 252 at alpha=0.1, and 24 of 252 at 0.05; with two stages of three seeds
# each it is 160 of 400 at 0.2. A two-sided permutation test of the same ten scores stays below alpha
# with: adastop 0.1.3, numpy 2.4.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q adastop==0.1.3 numpy==2.4.6
MPLCONFIGDIR=$work OMP_NUM_THREADS=1 venv/bin/python -W ignore - <<'EOF'
from itertools import combinations
from math import comb

import numpy as np
from adastop import MultipleAgentsComparator

scores = 2.0 ** np.arange(12)  # no two ways to share them out have one difference of means


def shares(scores, n):
    """All ways to share 2n scores out to two agents, each as likely as the others where the agents don't differ."""
    for chosen in map(list, combinations(range(2 * n), n)):
        yield scores[chosen], np.delete(scores, chosen)


def decision(stages, alpha):
    """What the comparator says after the stages, each the scores of both agents."""
    comparator = MultipleAgentsComparator(n=len(stages[0][0]), K=len(stages), alpha=alpha, seed=0)
    for k in range(len(stages)):
        first, second = (np.concatenate([stage[agent] for stage in stages[:k + 1]]) for agent in (0, 1))
        comparator.partial_compare({"first": first, "second": second}, verbose=False)
        if comparator.is_finished:
            break
    return comparator.decisions["[0 1]"]


def report(what, decisions, alpha):
    """How many of the decisions tell the agents apart."""
    told = sum(d != "equal" for d in decisions)
    print(f"{what}, alpha {alpha}: {told} of {len(decisions)} told apart, {told / len(decisions):.3f}")
    return told


assert "level of the test" in MultipleAgentsComparator.__doc__ and "two-sided" in MultipleAgentsComparator.__doc__
for alpha, expected in (0.1, 50), (0.05, 24):
    told = report("five seeds each", [decision([stage], alpha) for stage in shares(scores[:10], 5)], alpha)
    differences = np.abs([a.mean() - b.mean() for a, b in shares(scores[:10], 5)])
    ours = sum(np.mean(differences >= d) <= alpha for d in differences)
    print(f"  by a permutation test: {ours} of {comb(10, 5)}")
    assert told == expected and ours <= alpha * comb(10, 5)
stages = [(a, b) for a in shares(scores[::2], 3) for b in shares(scores[1::2], 3)]
assert report("two stages of three seeds", [decision(stage, 0.2) for stage in stages], 0.2) == 160
EOF
