#!/usr/bin/env bash
# in short (engines): On a CPU many draws from a large vocabulary never give the rare tokens behind a likely one.
# guessed: multinomial(p, n, replacement=True) draws each token as often as p says
# seen: on a CPU many draws from a vocabulary of 151,936 in float32 lose what stands behind a likely token: of a tail of
# 1e-3, spread evenly behind a token of 0.999, 2,000,000 draws have nothing, where 2,000 are right; in front of it the
# tail is drawn, as in float64. Categorical.sample((n,)) has the same fault
# with: torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import torch

V, N, TAIL = 151_936, 2_000_000, 1e-3


def tail(where, dtype=torch.float32):
    """Probabilities (V,) whose likely token is the first or the last, and which token that is."""
    likely = 0 if where == "first" else V - 1
    p = torch.full((V,), TAIL / (V - 1), dtype=dtype)
    p[likely] = 1 - TAIL
    return p, likely


torch.manual_seed(0)
found = {}
for name, where, dtype, draw in (
        ("many draws", "first", torch.float32, lambda p: torch.multinomial(p, N, replacement=True)),
        ("Categorical.sample", "first", torch.float32, lambda p: torch.distributions.Categorical(p).sample((N,))),
        ("likely token last", "last", torch.float32, lambda p: torch.multinomial(p, N, replacement=True)),
        ("in float64", "first", torch.float64, lambda p: torch.multinomial(p, N, replacement=True))):
    p, likely = tail(where, dtype)
    drawn = draw(p)
    found[name] = (drawn != likely).double().mean().item() / TAIL
    print(f"{name}: {(drawn != likely).sum()} of {len(drawn)} draws from the tail, {TAIL * len(drawn):.0f} expected")
assert found["many draws"] == found["Categorical.sample"] == 0
assert all(0.9 < found[name] < 1.1 for name in ("likely token last", "in float64"))

# A more usual row: a token of 0.9 in front of logits that spread by 2.
p = torch.cat([torch.tensor([0.9]), 0.1 * (2 * torch.randn(V)).softmax(-1)])
drawn, rare = torch.bincount(torch.multinomial(p, N, replacement=True), minlength=V + 1), p < 3e-8
share = (drawn[rare].sum() / (N * p[rare].double().sum())).item()
print(f"0.9 in front of normal logits: the {rare.sum()} rarest tokens are drawn {share:.2f} times as often as is right")
assert share < 0.1
EOF
