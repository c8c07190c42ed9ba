#!/usr/bin/env bash
# in short (graders): Seeds 1 and 2 share 99 of 100 items, and small data sets repeat at distant seeds: held-out items
# were trained on.
# guessed: two seeds give independent items
# seen: item i is made from seed + i, so countdown's seeds 1 and 2 share 99 of 100 items; distant seeds repeat what is
# small: of 200 items, all of tower_of_hanoi, 99% of string_splitting, 97.5% of coin_flip, 62% of prime_factorization
# and 51.5% of self_reference were among 1,000 of seed 1
# with: reasoning-gym 0.1.25
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q reasoning-gym==0.1.25
venv/bin/python -W ignore - <<'EOF'
import reasoning_gym


def questions(name, seed, size):
    return [item["question"] for item in reasoning_gym.create_dataset(name, seed=seed, size=size)]


share = {}
for name in ("tower_of_hanoi", "string_splitting", "coin_flip", "prime_factorization", "self_reference"):
    training = questions(name, 1, 1000)
    share[name] = sum(question in set(training) for question in questions(name, 10**6, 200)) / 200
    print(f"{name:20} {len(set(training)):4} distinct of 1,000; seen before: {share[name]:.1%} of 200")
next_seed = len(set(questions("countdown", 1, 100)) & set(questions("countdown", 2, 100)))
print("countdown, seeds 1 and 2:", next_seed, "of 100 items in common")
assert share["tower_of_hanoi"] == 1 and min(share["string_splitting"], share["coin_flip"]) > 0.95
assert min(share["prime_factorization"], share["self_reference"]) > 0.4
assert next_seed == 99
EOF
