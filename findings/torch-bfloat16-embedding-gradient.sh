#!/usr/bin/env bash
# in short (engines): On a CPU, embedding sums gradients in bfloat16: 1,000 ones make 256. index_select sums them
# right.
# guessed: on a CPU all ways to look up rows of a bfloat16 matrix sum a row's gradients equally exactly
# seen: embedding and matrix[ids] sum in bfloat16: 1,000 gradients of 1 make 256; index_select and gather make 1,000;
# with random gradients a token that is half of 8,000 is a fifth off, the others 1%
# with: torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import torch
import torch.nn.functional as F

WAYS = {"embedding": F.embedding, "matrix[ids]": lambda ids, matrix: matrix[ids],
        "index_select": lambda ids, matrix: matrix.index_select(0, ids),
        "gather": lambda ids, matrix: matrix.gather(0, ids[:, None].expand(-1, matrix.shape[1]))}


def gradient(look_up, ids, above):
    """The gradient of a matrix of 50 rows, where `above` is that of the rows that were looked up."""
    matrix = torch.zeros(50, above.shape[1], dtype=torch.bfloat16, requires_grad=True)
    look_up(ids, matrix).backward(above)
    return matrix.grad.double()


generator = torch.Generator().manual_seed(0)
ids = torch.randint(2, 50, (8000,), generator=generator).where(torch.rand(8000, generator=generator) < 0.5, 1)
above = (torch.randn(8000, 32, generator=generator) + 0.2).bfloat16()
exact = torch.zeros(50, 32, dtype=torch.float64).index_add_(0, ids, above.double())
ones, off = {}, {}
for name, look_up in WAYS.items():
    ones[name] = gradient(look_up, torch.ones(1000, dtype=torch.long), torch.ones(1000, 32).bfloat16())[1, 0].item()
    off[name] = (gradient(look_up, ids, above) - exact).norm(dim=1) / exact.norm(dim=1)
    print(f"{name:12} 1,000 gradients of 1 make {ones[name]:.0f}; random ones are off by {off[name][1]:.2%} for the "
          f"frequent token, by {off[name][2:].mean():.2%} for the others")
for name in ("embedding", "matrix[ids]"):
    assert ones[name] == 256 and off[name][1] > 0.1 and off[name][2:].mean() > 0.005
for name in ("index_select", "gather"):
    assert ones[name] == 1000 and off[name][1] < 0.004 and off[name][2:].mean() < 0.004
EOF
