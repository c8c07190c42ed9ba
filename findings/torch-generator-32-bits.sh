#!/usr/bin/env bash
# in short (engines): On a CPU manual_seed uses the low 32 bits alone: seeds 5 and 2^32 + 5 are one stream.
# guessed: manual_seed takes 64 bits, so seeds 5 and 2^32 + 5 give two streams
# seen: on a CPU only the low 32 bits count, for a torch.Generator and for the global one, though initial_seed()
# repeats the whole seed: among 100,000 streams seeded by 64-bit hashes, one pair is expected to be equal; numpy uses
# every bit
# with: torch 2.13.0, numpy 2.4.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 numpy==2.4.6
venv/bin/python -W ignore - <<'EOF'
import numpy as np
import torch

seeds = [5, 2**32 + 5, 2**63 + 5, 6]
own = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
shared = []
for seed in seeds:
    torch.manual_seed(seed)
    shared.append(torch.randperm(100))
numpy = [np.random.default_rng(seed).random(4) for seed in seeds]
for seed, numbers, other in zip(seeds, own, numpy):
    print(f"{seed:>20}  torch {[round(x, 4) for x in numbers.tolist()]}  numpy {other.round(4).tolist()}")
print("initial_seed", torch.Generator().manual_seed(2**32 + 5).initial_seed())
assert torch.Generator().manual_seed(2**32 + 5).initial_seed() == 2**32 + 5
for draws in (own, shared):
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[3])
assert len({row.tobytes() for row in numpy}) == 4
EOF
