"""Tests of weights stored in bfloat16 and multiplied in float32. The oracle is float64 with the same weights."""
from dataclasses import replace

import pytest
import torch

from extras.lora import adapters
from plumbing import compute, launch
from plumbing.compute import Converted
from plumbing.files import read_json
from qwen2_model import Cache, load_model
from settings import Settings
from start import load_policy, parse_flags
from tests.random_checkpoints import FAMILIES, assert_close, both, random_tokens
from tests.test_train import TINY, run

BFLOAT16 = Settings(dtype="bfloat16")


@FAMILIES
def test_logits_and_gradients_are_nearer_to_float64_than_those_of_bfloat16(family, tmp_path, monkeypatch):
    """For every tensor. Guards against a product, a norm or a cache that was left in bfloat16, and a gradient of
    which blocks are lost: they have 6 rows here, and the last of most matrices has fewer."""
    monkeypatch.setattr(compute, "BLOCK", 300)
    both(family, tmp_path)

    def measured(computed, arithmetic=None):
        model = load_model(tmp_path, dtype=torch.bfloat16).to(computed)
        model.arithmetic = arithmetic
        logits = model(random_tokens(3, 12))
        logits.double().log_softmax(-1).square().mean().backward()
        return logits, {name: p.grad.double() for name, p in model.named_parameters()}

    (logits, exact), (_, rounded), (got, nearer) = (
        measured(*dtypes) for dtypes in ((torch.float64,), (torch.bfloat16,), (torch.bfloat16, torch.float32)))
    model = load_model(tmp_path)
    model.arithmetic = torch.bfloat16
    assert model.hidden(random_tokens(3, 12), Cache(model, torch.zeros(3))).dtype == torch.bfloat16  # a bias leaves it so, too
    assert_close(got, logits, 1e-4)
    for name, gradient in exact.items():
        assert (nearer[name] - gradient).norm() < (rounded[name] - gradient).norm(), name
        assert (nearer[name] - gradient).norm() < 2**-7 * gradient.norm(), name


@pytest.mark.parametrize("outputs", [3, 50, 51])
def test_a_converted_product_is_that_of_the_converted_matrix(outputs, monkeypatch):
    """And so are its gradients; no copy of the matrix waits for the backward pass."""
    monkeypatch.setattr(compute, "BLOCK", 400)  # 10 rows
    x, w = torch.randn(7, 40, requires_grad=True), torch.randn(outputs, 40).bfloat16().requires_grad_()
    wide = w.detach().float().requires_grad_()
    y, expected = Converted.apply(x, w), x @ wide.T
    kept = y.grad_fn.saved_tensors
    assert [(z.dtype, z.shape) for z in kept] == [(torch.float32, x.shape), (torch.bfloat16, w.shape)]
    got, wanted = (torch.autograd.grad(z.square().sum(), (x, weight)) for z, weight in ((y, w), (expected, wide)))
    assert_close(y, expected, 1e-5)
    assert_close(got[0], wanted[0], 1e-3)
    torch.testing.assert_close(got[1], wanted[1].bfloat16(), atol=0, rtol=2**-7)


def test_arithmetic_is_that_of_the_processor_and_can_be_asked_for(monkeypatch, tmp_path):
    """Guards against bfloat16 at an eighth of the speed, in silence; and float32 where bfloat16 is fast."""
    for seconds, found in ((7.0, "float32"), (1.2, "bfloat16"), (0.4, "bfloat16")):
        monkeypatch.setattr(launch, "product_seconds", lambda dtype: seconds if dtype == torch.bfloat16 else 1.0)
        assert launch.arithmetic_for("bfloat16", "cpu") == found
        assert launch.arithmetic_for("bfloat16", "cuda") == "bfloat16"
        assert launch.arithmetic_for("float32", "cpu") == "float32"
    (tmp_path / "config.json").write_text('{"settings": {"arithmetic": "float32", "lr": 0.5}, "method": {}}')
    s = parse_flags(["--config", str(tmp_path)])[0]  # of a run on another machine
    assert (s.arithmetic, s.lr) == ("", 0.5)


def test_adapters_are_in_the_dtype_of_the_arithmetic():
    """Float32 ones need no masters."""
    for arithmetic in ("float32", "bfloat16"):
        model = load_policy(replace(BFLOAT16, arithmetic=arithmetic, lora_rank=2)).model
        dtype = getattr(torch, arithmetic)
        assert {p.dtype for adapter in adapters(model).values() for p in adapter.parameters()} == {dtype}
        assert {w.dtype for w in model.parameters() if not w.requires_grad} == {torch.bfloat16}


@pytest.mark.slow
def test_a_run_keeps_its_arithmetic(tmp_path, monkeypatch, capsys):
    """Also when it is resumed where bfloat16 is fast."""
    monkeypatch.setattr(launch, "product_seconds", lambda dtype: 7.0 if dtype == torch.bfloat16 else 1.0)
    run(*TINY, "--dtype", "bfloat16", "--steps", 1, "--pass_at", 0, "--out", tmp_path / "r")
    assert "dtype=bfloat16, arithmetic=float32\n" in capsys.readouterr().out
    monkeypatch.setattr(launch, "product_seconds", lambda dtype: 1.0)
    run("--resume", tmp_path / "r", "--steps", 2)
    assert read_json(tmp_path / "r" / "config.json")["settings"]["arithmetic"] == "float32"
    assert "arithmetic=float32\n" in capsys.readouterr().out
