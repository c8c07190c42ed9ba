#!/usr/bin/env bash
# in short (graders): Half of FifteenPuzzle-v0's starting positions can't be solved.
# guessed: FifteenPuzzle-v0 starts from a position that can be solved
# seen: it shuffles the tiles, and half of all orders can't be reached from the solved one. Of seeds 0 to 399 no policy
# can win 180: in a group of responses to such a seed all fail, whatever they do
# with: textarena 0.7.4
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q textarena==0.7.4
venv/bin/python -W ignore - <<'EOF'
import textarena


def odd(seed):
    """Whether a start can't be solved: pairs in the wrong order, plus the blank's steps home, are odd in number."""
    env = textarena.make("FifteenPuzzle-v0")
    env.reset(num_players=1, seed=seed)
    rows = env.state.game_state["board"]
    tiles = [tile or 16 for row in rows for tile in row]
    home = tiles.index(16)
    steps = 3 - home // 4 + 3 - home % 4
    pairs = sum(a > b for i, a in enumerate(tiles) for b in tiles[i + 1 :])
    return (pairs + steps) % 2


found = sum(odd(seed) for seed in range(400))
print(f"{found} of 400 starts can't be solved")
assert found == 180
EOF
