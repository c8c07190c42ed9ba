#!/usr/bin/env bash
# in short (graders): In gsm8k_multi_turn four wrong answers and then a right one earn 1.16, a right one at once 1.
# guessed: in gsm8k_multi_turn the rewards of an episode add up to the most where the first turn is right
# seen: a wrong number in the right layout earns 0.04 a turn and leaves the episode open, and a right one ends it with 1,
# whenever it comes. So four wrong answers and a right one add up to 1.16, and a right one at once to 1
# with: skyrl-gym 0.4.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q skyrl-gym==0.4.0
venv/bin/python -W ignore - <<'EOF'
import skyrl_gym


def rewards(answers):
    """The reward of each turn, until the episode ends."""
    env = skyrl_gym.make("gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": "72"}, "max_turns": 5})
    env.init([{"role": "user", "content": "How many?"}])
    found = []
    for answer in answers:
        step = env.step(f"So it is\n#### {answer}")
        found.append(step["reward"])
        if step["done"]:
            break
    return found


for answers in ((72,), (71, 71, 71, 71, 72), (71, 71, 71, 71, 71)):
    print(f"{answers}: {rewards(answers)}, in all {sum(rewards(answers)):.2f}")
assert rewards((72, 72)) == [1.0]
assert abs(sum(rewards((71, 71, 71, 71, 72))) - 1.16) < 1e-9
EOF
