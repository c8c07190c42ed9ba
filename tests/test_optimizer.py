"""AdamW with float32 master weights, against torch's AdamW on a float32 copy of the model."""

import pytest
import torch
from torch import nn

from plumbing.optimizer import Optimizer

OPTIONS = dict(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)


def small_model(dtype=torch.float32):
    """Two layers whose weights are between 0.005 and 0.02 in size, where bfloat16 has steps of at least 3e-5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)).to(dtype)
    for p in model.parameters():
        p.data = ((torch.rand(p.shape) * 0.015 + 0.005) * torch.randn(p.shape).sign()).to(dtype)
    return model


def give(model, gradients):
    """Add to each parameter's gradient (a number, or a tensor of its shape) by a backward pass."""
    sum((p * g).sum() for p, g in zip(model.parameters(), gradients)).backward()


@pytest.mark.parametrize("dtype, device, options, backwards", [
    (torch.float32, None, {"lr": 1e-2}, [False, True, True, False]),
    (torch.float32, "cpu", OPTIONS, [False, True, True, False]),
    (torch.float32, "cpu:0", OPTIONS, [False, True, True, False]),  # to torch another device than cpu
    (torch.bfloat16, None, OPTIONS | {"lr": 1e-6}, [True] * 50),  # steps that rounding would swallow one by one
], ids=["defaults", "same device", "masters elsewhere", "bfloat16"])
def test_a_model_learns_as_a_float32_copy_with_adamw(dtype, device, options, backwards):
    """Guards against an option that does not arrive, moments that do not decay without a gradient, old weights, steps
    or gradients of micro-batches that bfloat16 loses."""
    ours, start, theirs = small_model(dtype), small_model(dtype), small_model(dtype).float()
    optimizer = Optimizer(ours, device=device, **options)
    expected = torch.optim.AdamW(theirs.parameters(), **{"weight_decay": 0.0} | options)
    assert optimizer.separate == (dtype == torch.bfloat16 or device == "cpu:0")
    assert (optimizer.master["0.bias"] is ours[0].bias) != optimizer.separate
    directions = [torch.randn(p.shape).sign() for p in ours.parameters()]
    for any_backward in backwards:
        optimizer.zero_grad()
        for p in theirs.parameters():
            p.grad = torch.zeros_like(p)
        for scale in (1.0, 1 / 512) if any_backward else ():  # 1 + 1 / 512 is 1 in bfloat16
            gradients = [(scale * d * (1 + torch.rand(d.shape))).to(dtype) for d in directions]
            give(ours, gradients)
            assert not optimizer.separate or all(p.grad is None for p in ours.parameters())  # they take no memory
            for p, g in zip(theirs.parameters(), gradients):
                p.grad += g
        optimizer.step()
        expected.step()
        for w, master, wanted in zip(ours.parameters(), optimizer.master.values(), theirs.parameters()):
            torch.testing.assert_close(master, wanted, atol=5e-8, rtol=0)
            assert w.dtype == dtype and torch.equal(w, master.to(dtype))
    for w, old in zip(ours.parameters(), start.parameters()):
        assert (w != old).float().mean() > 0.2


def test_masters_live_on_the_device_asked_for():
    """Guards against masters beside the model, whose memory they should save. (Tensors on `meta` have no memory.)"""
    for dtype in (torch.float32, torch.bfloat16):
        masters = Optimizer(small_model(dtype), 1e-3, device="meta").master.values()
        assert {(w.device.type, w.dtype) for w in masters} == {("meta", torch.float32)}


def test_the_state_of_another_model_is_refused():
    """Guards against weights that are silently left as they were, or broadcast."""
    state = Optimizer(nn.Linear(6, 1), 1e-3).state_dict()
    for other in (nn.Linear(6, 8), nn.Sequential(nn.Linear(6, 1))):
        with pytest.raises((KeyError, ValueError, RuntimeError)):
            Optimizer(other, 1e-3).load_state_dict(state)
