#!/usr/bin/env bash
# in short (graders): MathRewardFunction gives wrong answers the ideal length: right answers that are not 200 words long
# gain nothing, or less than wrong ones.
# guessed: MathRewardFunction of multireward-grpo counts length only where the answer is correct, as its
# contamination_gamma of 0 says. So with its own weights and mode "na" a right answer has more advantage than a wrong
# one of the same length and layout
# seen: the length reward reaches from -1 to 0, and a wrong answer gets 0, which a right one gets at 200 words alone.
# So wrong answers have the ideal length, and "na" makes that gap as large as the one in correctness. In a group whose
# answers are all of 100 words, or all of 400, the two cancel: every advantage is 0, and nothing is learned. Where one
# right answer has 200 words and three have 100, each of the three has less than a wrong one. Mode "an" is right
# with: multireward-grpo 0.1.1, numpy 2.4.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q multireward-grpo==0.1.1 numpy==2.4.6
venv/bin/python - <<'EOF'
import numpy as np
from multireward_grpo import compute_advantage
from multireward_grpo.rewards import MathRewardFunction, RewardConfig

reward, weights = MathRewardFunction(), RewardConfig().weights  # correctness, length, layout: 1, 1, 0.5


def group(name, right, wrong):
    """Advantages of right and wrong answers of so many words, all of one layout, in the modes na and an."""
    texts = [("so " * (words - 2) + "#### " + answer) for answer, lengths in {"72": right, "71": wrong}.items()
             for words in lengths]
    rewards = np.array([reward(text, {"gold": "72"}) for text in texts])
    print(f"{name}: correctness {rewards[:, 0]}, length {rewards[:, 1].round(2)}, layout {rewards[:, 2]}")
    found = {mode: compute_advantage(rewards, weights, mode=mode) for mode in ("na", "an")}
    for mode, advantages in found.items():
        print(f"  {mode}: {(advantages.round(2) + 0.0).tolist()}")
    n = len(right)
    return found["na"][:n], found["na"][n:], found["an"][:n], found["an"][n:]


for words in (100, 400):
    right, wrong, right_an, wrong_an = group(f"4 right and 4 wrong of {words} words", [words] * 4, [words] * 4)
    assert abs(np.r_[right, wrong]).max() < 1e-6 and right_an.min() > wrong_an.max()
right, wrong, right_an, wrong_an = group("1 right and 7 wrong of 100 words", [100], [100] * 7)
assert abs(np.r_[right, wrong]).max() < 1e-6 and right_an.min() > wrong_an.max()
right, wrong, right_an, wrong_an = group("4 right and 4 wrong, one of 200 words", [200, 100, 100, 100], [100] * 4)
assert right[0] > wrong.max() > right[1:].max() and right_an.min() > wrong_an.max()
ungated = MathRewardFunction(RewardConfig(contamination_gamma=1.0))  # length counts for all
rewards = np.array([ungated("so " * 98 + f"#### {answer}", {"gold": "72"}) for answer in [72] * 4 + [71] * 4])
assert compute_advantage(rewards, weights)[:4].min() > 0.9  # and then a right answer does win
EOF
