#!/usr/bin/env bash
# in short (graders): Countdown-v0 has one puzzle whatever the seed, and after two illegal moves its reward is a text.
# guessed: Countdown-v0 draws a puzzle from the seed of reset, and pays a number
# seen: it is one puzzle, 532 from 2, 3, 4, 6, 75 and 100, whatever the seed; so is Cryptarithm-v0. Two moves in a row
# that are not legal end the game with a text as the reward, the message, and the number where the message belongs. That
# number falls by a thousandth for each point of distance. So it is 0.568 before any move, 432 away, and 0.999 one away
# with: textarena 0.7.4
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q textarena==0.7.4
venv/bin/python -W ignore - <<'EOF'
import textarena


def start(name, seed):
    env = textarena.make(name)
    env.reset(num_players=1, seed=seed)
    return env


reasons = {}
for name in ("Countdown-v0", "Cryptarithm-v0"):
    games = [start(name, seed) for seed in range(5)]
    assert len({str(env.get_observation()) for env in games}) == 1
    env = games[0]
    assert not env.step(action="I pass")[0] and env.step(action="I pass")[0]
    rewards, info = env.close()
    print(f"{name}: reward {rewards[0]!r}, reason {info[0]['reason']!r}")
    assert isinstance(rewards[0], str)
    reasons[name] = info[0]["reason"]

assert "532" in str(start("Countdown-v0", 0).get_observation()[1])
assert reasons == {"Countdown-v0": f"Invalid Move: {1 - 432 / 1000}", "Cryptarithm-v0": "Invalid Move: 0.0"}
EOF
