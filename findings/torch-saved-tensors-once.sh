#!/usr/bin/env bash
# in short (engines): A backward of one's own that reads ctx.saved_tensors twice raises an error once activations are
# recomputed.
# guessed: a backward pass of one's own may read ctx.saved_tensors as often as it likes, also in a recomputed layer
# seen: the second reading raises CheckpointError under checkpoint(use_reentrant=False), and only there: a function
# that passes gradcheck fails in the first run that recomputes activations
# with: torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] + gradient * ctx.saved_tensors[0]


x = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(Square.apply, x)
checkpoint(Square.apply, x, use_reentrant=True).sum().backward()
print("use_reentrant=True:", x.grad.tolist())
assert x.grad.tolist() == [6.0, -2.0]
try:
    checkpoint(Square.apply, x, use_reentrant=False).sum().backward()
except CheckpointError as error:
    print("use_reentrant=False:", str(error).splitlines()[0])
else:
    raise AssertionError("the second reading was allowed")
EOF
