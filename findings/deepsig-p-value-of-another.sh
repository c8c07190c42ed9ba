#!/usr/bin/env bash
# in short (compare): bonferroni_correction returns p-values in a wrong order unless they come sorted: the comparison
# with 0.5 becomes significant, that with 0.001 doesn't.
# guessed: bonferroni_correction of deepsig, which its page offers for p-values of several comparisons, multiplies each
# by their number, to at most 1, and returns them in the order in which they were given
# seen: it sorts them, and puts the results back by the wrong permutation. So many orders give p-values to the wrong
# comparison, silently: of 0.2, 0.5 and 0.001 it makes 0.5, 0.003 and 0.4, so what has 0.5 is significant and what has
# 0.001 is not. Of all orders of three p-values 2 of 6 are wrong, of five 94 of 120; sorted ones are right. And the
# factor is not their number but Holm's, from n down to 1, so of two comparisons with 0.04 only one stays significant
# with: deepsig 1.2.8, numpy 2.4.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q deepsig==1.2.8 numpy==2.4.6
venv/bin/python - <<'EOF'
from itertools import permutations

import numpy as np
from deepsig import bonferroni_correction


def corrected(given):
    return bonferroni_correction(list(given)).round(6).tolist()


for given in ([0.001, 0.2, 0.5], [0.2, 0.5, 0.001], [0.04, 0.04]):
    print(f"p-values {given} become {corrected(given)}, by Bonferroni {np.minimum(np.array(given) * len(given), 1)}")
assert corrected([0.001, 0.2, 0.5]) == [0.003, 0.4, 0.5]  # sorted, so only the factors are others: 3, 2 and 1
assert corrected([0.2, 0.5, 0.001]) == [0.5, 0.003, 0.4]
assert corrected([0.04, 0.04]) == [0.08, 0.04]

counts = {}
for ascending in ([0.001, 0.2, 0.5], [0.001, 0.008, 0.03, 0.2, 0.5]):
    right = dict(zip(ascending, corrected(ascending)))
    orders = list(permutations(ascending))
    wrong = [order for order in orders if corrected(order) != [right[p] for p in order]]
    swapped = [order for order in wrong if corrected(order)[order.index(0.001)] > 0.05]  # the best one is lost
    print(f"of {len(orders)} orders of {ascending} {len(wrong)} come back wrong, in {len(swapped)} 0.001 is above 0.05")
    counts[len(ascending)] = len(wrong), len(swapped)
assert counts[3][0] == 2 and counts[5][0] == 94 and counts[5][1] > 10
EOF
