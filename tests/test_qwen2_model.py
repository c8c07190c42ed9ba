"""Tests of qwen2_model.py: the transformer, config.json, checkpoints read and written, and the log-probs of tokens.

The oracles are random models of transformers, direct formulas in float64, and autograd.
"""
import json
import math
import shutil
from pathlib import Path
from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from plumbing import compute
from plumbing.compute import attention_on_gpu, run_attention
from qwen2_model import attention, load_model, parse_config, save_model, to_checkpoint
from tests.random_checkpoints import FAMILIES, HF, V, assert_close, assert_same_logits, both, random_tokens

# Of the 8 pairs of a head, one keeps its frequency, five have an eighth of it, and two lie between.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
SCALED = {"head_dim": 16, "rope_parameters": LLAMA3}


def edit_config(folder: Path, **changes) -> None:
    """Set keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of model.safetensors in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("family, tied, options", [
    ("qwen2", True, {}), ("qwen2", False, {"num_key_value_heads": 1, "head_dim": 16}),
    ("qwen3", True, {"rms_norm_eps": 0.01}), ("qwen3", False, SCALED),
    ("llama", True, SCALED), ("llama", False, {"num_key_value_heads": 6})])
def test_logits_gradients_and_checkpoints_are_those_of_transformers(family, tied, options, tmp_path):
    """Guards against any error of the forward; a parameter that does not train, a layer that is recomputed differently,
    or not at all; a name, shape, configuration or dtype that transformers 5, or 4, does not find in what we save; bfloat16
    further off than theirs; and against refusing a published checkpoint for its copy of the tied embedding, or for
    RoPE's frequencies."""
    hf, model = both(family, tmp_path, tie_word_embeddings=tied, **options)
    tokens, runs = random_tokens(3, 200 if options is SCALED else 40), []
    assert_same_logits(hf, model, tokens)
    exact = hf(tokens).logits
    exact.log_softmax(-1).square().mean().backward()
    theirs = {name: p.grad for name, p in hf.named_parameters()}
    model.layers[1].register_forward_pre_hook(lambda *_: runs.append(1))
    for model.checkpoint_activations in (False, True):
        model.zero_grad()
        runs.clear()
        model(tokens).log_softmax(-1).square().mean().backward()
        assert len(runs) == 1 + model.checkpoint_activations
        ours = to_checkpoint({name: p.grad for name, p in model.named_parameters()}, model.config)
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            assert_close(gradient, theirs[name], 1e-4 * theirs[name].abs().max().item())

    edit_config(tmp_path, architectures=["SomethingElse"])
    folder = tmp_path / "a new" / "folder"
    for dtype in (torch.bfloat16, torch.float32):  # the second time over the first
        model = load_model(tmp_path, dtype=dtype)
        save_model(model, folder)
        hf, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert type(hf) is HF[family][1] and hf.config.architectures == [HF[family][1].__name__]
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        theirs, ours = dict(hf.named_parameters()), to_checkpoint(dict(model.named_parameters()), model.config)
        assert theirs.keys() == ours.keys()
        for name, p in ours.items():
            assert theirs[name].dtype == p.dtype == dtype and torch.equal(theirs[name], p), name
        errors = [(logits - exact).square().mean() for logits in (model(tokens), hf(tokens).logits)]
        assert errors[0] < 1.5**2 * errors[1] + 1e-9  # of bfloat16 no more than transformers'
        saved = json.loads((folder / "config.json").read_text())
        assert [saved["dtype"], saved["torch_dtype"]] == [str(dtype).removeprefix("torch.")] * 2
        scaling = saved.get("rope_scaling") or {"rope_type": "default"}
        assert scaling | {"rope_theta": saved["rope_theta"]} == saved["rope_parameters"] == hf.config.rope_parameters
    assert_same_logits(hf, load_model(folder), tokens)
    edit_config(folder, rope_parameters=None)  # as transformers 4 writes it
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)} | (
        {"lm_head.weight": t["model.embed_tokens.weight"].clone()} if tied else {})))
    assert_same_logits(hf, load_model(folder), tokens)
    if tied:  # safetensors' save_model keeps one of two names, perhaps this one
        edit_tensors(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
        assert_same_logits(hf, load_model(folder), tokens)


@FAMILIES
@pytest.mark.parametrize("optional", [{}, dict(rms_norm_eps=0.01, rope_theta=50.0, tie_word_embeddings=True, head_dim=6,
                                               num_key_value_heads=4, max_position_embeddings=99)],
                         ids=["absent", "present"])
def test_a_key_means_what_it_means_to_transformers_also_when_it_is_absent(family, optional):
    """Guards against a default of our own for a key that config.json leaves out, and a null taken for an absent key."""
    source = dict(model_type=family, vocab_size=V, hidden_size=128, intermediate_size=40, num_hidden_layers=2,
                  num_attention_heads=64, **optional)
    hf, ours = HF[family][0].from_dict(source), parse_config(source)
    assert ours.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert ours.rope == hf.rope_parameters
    for name in ("rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(hf, name), name
    assert parse_config(source | {"num_key_value_heads": None}).num_key_value_heads == 64  # one for each head
    source.pop("rope_theta", None)
    for spelling in ({"rope_theta": 50.0, "rope_scaling": None},
                     {"rope_theta": 50.0, "rope_scaling": {"type": "default"}},  # both as transformers 4 writes them
                     {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}):  # transformers 5
        assert parse_config(source | spelling).rope == {"rope_theta": 50.0, "rope_type": "default"}


GOOD = dict(model_type="qwen2", vocab_size=V, hidden_size=64, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=2)
BAD = {"vocab_size": [None, 0, 2.0, True, 2**40], "hidden_size": ["wide"], "num_attention_heads": [0, "8", 5],
       "num_key_value_heads": [0, 3], "head_dim": [7], "rms_norm_eps": [0, math.nan, True], "rope_theta": [10**400],
       "tie_word_embeddings": ["no"], "layer_types": [5, ["sliding_attention"]],
       "rope_scaling": [{"type": "yarn"}, {"type": "llama3", "factor": 8.0}, LLAMA3 | {"high_freq_factor": 1.0}],
       "rope_parameters": [{"rope_theta": "x"}, {"rope_type": "yarn", "rope_theta": 1e6}, {"factor": 4.0},
                           {"partial_rotary_factor": 0.5}, {"full": {"rope_theta": 1.0}}, 5, {"rope_type": "llama3"},
                           {"rope_type": ["llama3"]}, {"rope_theta": -1.0}],
       "model_type": ["qwen2_moe", ["qwen2"]], "hidden_act": ["gelu"], "use_sliding_window": [True], "mlp_bias": [True],
       "pretraining_tp": [2], "quantization_config": [{"quant_method": "fp8"}]}
CONTRADICTIONS = [  # two thetas, of which each version of transformers would read its own
    *(({"model_type": family, "attention_bias": True}, "attention_bias") for family in ("qwen3", "llama")),
    ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}}, r"rope_theta, \[1000000.0, 500000.0\]")]


def test_a_value_that_cannot_be_is_refused_in_one_sentence():
    """Guards against a traceback from deep in the model, "no" taken for true, and biases that are lost."""
    assert parse_config(GOOD | {"attention_bias": True}).head_dim == 8  # which Qwen2 always has
    rope = "rope_|rotary|_freq_factor|has no factor"
    refused = [({name: value}, rope if name.startswith("rope_") else name) for name in BAD for value in BAD[name]]
    for changes, said in refused + CONTRADICTIONS:
        with pytest.raises(ValueError, match=said) as error:
            parse_config(GOOD | changes)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
DAMAGES = [  # what to do to a good Qwen2 folder, and what is said about it; more in test_plumbing.py
    (lambda f: (f / "config.json").unlink(), FileNotFoundError, "checkpoint is .* config.json"),
    (shutil.rmtree, FileNotFoundError, "checkpoint: .*hf download"),
    (lambda f: (f / "adapter_config.json").touch(), ValueError, "checkpoint .*pass it to --adapter"),
    (lambda f: (f / "model.safetensors").rename(f / "q4.gguf"), ValueError, "a GGUF file: .* config.json and"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model-00001-of-00002.bin"), ValueError,
     "checkpoint .*safetensors with save_pretrained"),
    (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), ValueError, f"checkpoint lacks .*{NORM}"),
    (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.ones(1))), ValueError, "checkpoint has unknown .*extra"),
    (lambda f: edit_tensors(f, lambda t: t.update({Q: t[Q][1:].clone()})), ValueError, f"checkpoint .* shape .*{Q}"),
    (lambda f: edit_config(f, num_hidden_layers=10**6), ValueError, "asks for 1000000 layers, .* fewer"),
    (lambda f: edit_config(f, tie_word_embeddings=True), ValueError,
     "checkpoint .*lm_head.weight .*tie_word_embeddings to false"),
    (lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")), ValueError,
     "checkpoint lacks lm_head.weight: .*tie_word_embeddings to true")]


@pytest.mark.parametrize("damage, error, said", DAMAGES, ids=[said for _, _, said in DAMAGES])
def test_a_broken_checkpoint_is_refused_in_one_sentence(damage, error, said, tmp_path):
    """Guards against a traceback that names neither the file nor the tensor, and against wrong weights in silence."""
    both("qwen2", tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")
    with pytest.raises(error, match=rf"\A[^\n]*{said}[^\n]*\Z"):
        load_model(tmp_path / "checkpoint")


@pytest.mark.parametrize("tied, temperature, logits_kept, kept", [
    (True, 1.0, 0, 0), (False, 0.7, 2 * 17, 0), (True, 0.7, 2**29, 1), (False, 1.0, 2**29, 1)])
def test_log_probs_and_their_gradients_are_autograds(tied, temperature, logits_kept, kept, tmp_path, monkeypatch):
    """Guards against probability for rows that stand for no token, a softmax in half precision, a piece lost or taken
    twice, a gradient that a frozen matrix gets, and logits that are kept, or kept twice."""
    both("qwen2", tmp_path, tie_word_embeddings=tied)
    model = load_model(tmp_path, dtype=torch.float64)
    model.real_vocab, model.temperature = 17, temperature
    hidden = torch.randn(11, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens, weight = random_tokens(1, 11, 17)[0], torch.linspace(-1, 1, 11)
    logits = hidden @ model.output_weight[:17].T / temperature
    expected = logits.log_softmax(-1)[torch.arange(11), tokens]  # (11,)

    saved = []
    monkeypatch.setattr(compute, "LOGITS_KEPT", logits_kept)
    monkeypatch.setattr(compute, "LOGITS_AT_ONCE", logits_kept)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        got = model.logprob(hidden, tokens)
    assert len({x.data_ptr() for x in saved if x.shape == (11, 17)}) == kept
    assert_close(got, expected, 1e-12)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), (hidden, model.output_weight)) for x in (got, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    assert min(gradient.abs().max() for gradient in theirs) > 0.1
    got = model.requires_grad_(False).logprob(hidden, tokens)
    (gradient,) = torch.autograd.grad((got * weight).sum(), hidden)
    assert_close(gradient, theirs[0], 1e-12)

    half, model = hidden.bfloat16(), model.bfloat16()
    product = (half @ model.output_weight[:17].T).double() / temperature
    assert_close(model.logits(half).log_softmax(-1), product - product.exp().sum(-1, keepdim=True).log(), 1e-5)


@pytest.mark.parametrize("at_once, kept", [(2**24, 2**25), (6 * 5 * 8, 2**25), (1, 2**25), (2**24, 1), (1, 1)])
def test_attention_is_torchs_own(at_once, kept, monkeypatch):
    """Guards against key heads that go to other query heads than theirs, on a GPU, too, a lost scale or bias, and rows
    that are lost where they are computed in pieces, or again."""
    monkeypatch.setattr(compute, "SCORES_AT_ONCE", at_once)
    monkeypatch.setattr(compute, "SCORES_KEPT", kept)
    parted = lambda *given: run_attention(attention, *given)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 4, dtype=torch.float64, generator=generator, requires_grad=True)
               for shape in ((3, 6, 5), (3, 2, 8), (3, 2, 8)))
    bias = torch.zeros(3, 1, 5, 8, dtype=torch.float64)
    bias[1, :, :, 2:5] = float("-inf")
    upstream = torch.randn(3, 6, 5, 4, dtype=torch.float64, generator=generator)
    usual = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    expected = torch.autograd.grad(usual, (q, k, v), upstream)
    for function in (parted, attention_on_gpu):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
            found = function(q, k, v, bias)
        probabilities = [x for x in saved if x.shape[-1] == 8 and x.numel() >= 6 * 5 * 8]
        assert function is attention_on_gpu or bool(probabilities) == (kept > 1)
        torch.testing.assert_close(found, usual)
        torch.testing.assert_close(torch.autograd.grad(found, (q, k, v), upstream), expected)
