#!/usr/bin/env bash
# in short (compare): The bootstrap draws runs anew at each step, so intervals of areas and gains over a curve are
# false. random_state changes nothing.
# guessed: get_interval_estimates of rliable resamples whole runs, also where scores are runs x tasks x steps, for
# evaluations at multiple points during training; and it draws from random_state, which its page says ensures
# reproducibility
# seen: every step draws its runs anew, so a resampled learning curve is made of pieces of many runs. What joins steps
# gets a false interval, silently: where ten runs differ by the same at all 50 steps, that of the area under the curve
# is 7 times too narrow, and a gain of 3 from the first step to the last, the same in every run, gets 2.4 to 3.6. Single
# steps are right. random_state changes nothing: one state gives two intervals; np.random.seed decides. For a pair of
# algorithms task_bootstrap is ignored
# with: rliable 1.2.0, arch 7.2.0, numpy 2.4.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q scipy==1.17.1 pandas==2.3.3 absl-py==2.5.1
venv/bin/pip install -q rliable==1.2.0 arch==7.2.0 numpy==2.4.6
venv/bin/python -W ignore - <<'EOF'
import numpy as np
from rliable.library import get_interval_estimates
from rliable.metrics import aggregate_iqm, probability_of_improvement

random = np.random.default_rng(0)
level = random.normal(size=(10, 1, 1))  # of ten runs of one task: each is better or worse throughout
curves = level + np.linspace(0, 3, 50)  # runs x tasks x steps: all gain 3


def interval(scores, function, seed=0, **settings):
    """The 95% interval, lower and upper end."""
    np.random.seed(seed)
    return get_interval_estimates({"it": scores}, function, reps=4000, **settings)[1]["it"].ravel()


area = interval(curves, lambda scores: np.array([scores.mean()]))
whole = interval(curves.mean(-1), lambda scores: np.array([scores.mean()]))  # the same areas, as runs x tasks
gain = interval(curves, lambda scores: np.array([scores[..., -1].mean() - scores[..., 0].mean()]))
one = interval(curves, lambda scores: np.array([scores[..., 7].mean()])) - np.linspace(0, 3, 50)[7] + 1.5
print(f"area under the curve {area.round(2)}; of the same areas, each computed before {whole.round(2)}; "
      f"of step 8 alone, moved to the same mean {one.round(2)}")
print(f"gain, 3 in every run: {gain.round(2)}")
assert 6 < np.ptp(whole) / np.ptp(area) < 8 and abs(one - whole).max() < 0.1
assert gain[0] < 2.5 < 3.5 < gain[1]

scores = random.normal(size=(10, 3))
stated = [interval(scores, lambda table: np.array([aggregate_iqm(table)]), seed, random_state=np.random.RandomState(1))
          for seed in (0, 1, 0)]
print("one random_state, np.random.seed 0, 1, 0:", *stated)
assert (stated[0] != stated[1]).all() and (stated[0] == stated[2]).all()

pair = [scores, scores + random.normal(size=(10, 3))]
tasks = [interval(pair, lambda x, y: np.array([probability_of_improvement(x, y)]), task_bootstrap=drawn)
         for drawn in (False, True)]
print("probability of improvement without and with task_bootstrap:", *tasks)
assert (tasks[0] == tasks[1]).all()
EOF
