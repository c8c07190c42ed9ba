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

import qwen2_model
from qwen2_model import (attention, attention_on_gpu, load_model, parse_config, save_model, to_checkpoint,
                         token_logprobs)
from sampler import describe
from tests.random_checkpoints import FAMILIES, HF, V, assert_close, assert_same_logits, both, random_tokens

TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@FAMILIES
@TIED
@pytest.mark.parametrize("checkpointed, options", [
    (False, {}), (True, {}), (False, {"head_dim": 16}), (False, {"num_key_value_heads": 6}),
    (False, {"num_key_value_heads": 1}), (False, {"rms_norm_eps": 0.01})], ids=str)
def test_logits_and_gradients_equal_transformers(family, tied, checkpointed, options, tmp_path):
    """Guards against any error of the forward: a lost bias or norm, wrong RoPE, mask, head order or output matrix.

    And against a parameter that does not train, a gradient under another name, and a layer that is recomputed
    differently, or not at all.
    """
    hf, model = both(family, tmp_path, tie_word_embeddings=tied, **options)
    model.checkpoint_activations, runs = checkpointed, []
    model.layers[1].register_forward_pre_hook(lambda *_: runs.append(1))
    assert_same_logits(hf, model, random_tokens(3, 40))
    for logits in (model(random_tokens(5, 12)), hf(random_tokens(5, 12)).logits):
        logits.log_softmax(-1).square().mean().backward()
    assert len(runs) == 2 + checkpointed
    ours = to_checkpoint({name: p.grad for name, p in model.named_parameters()}, model.config)
    theirs = {name: p.grad for name, p in hf.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name], 1e-4 * theirs[name].abs().max().item())


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
       "num_key_value_heads": [0, 3], "head_dim": [7], "rms_norm_eps": [0, math.nan], "rope_theta": [10**400],
       "tie_word_embeddings": ["no"], "rope_scaling": [{"type": "yarn"}, {"type": "llama3", "factor": 8.0}], "layer_types": [5, ["sliding_attention"]],
       "rope_parameters": [{"rope_theta": "x"}, {"rope_type": "yarn", "rope_theta": 1e6}, {"factor": 4.0},
                           {"partial_rotary_factor": 0.5}, {"full": {"rope_theta": 1.0}}, 5, {"rope_type": "llama3"},
                           {"rope_type": ["llama3"]}, {"rope_theta": -1.0}],
       "model_type": ["qwen2_moe", ["qwen2"]], "hidden_act": ["gelu"], "use_sliding_window": [True], "mlp_bias": [True],
       "pretraining_tp": [2], "quantization_config": [{"quant_method": "fp8"}]}
CONTRADICTIONS = [({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
                  ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
                  ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}}, r"rope_theta, \[1000000.0, 500000.0\]")]


@pytest.mark.parametrize("changes, said", CONTRADICTIONS + [
    ({name: value}, "rope_|rotary|_freq_factor|has no factor" if name.startswith("rope_") else name) for name in BAD for value in BAD[name]])
def test_a_value_that_cannot_be_is_refused_in_one_sentence(changes, said):
    """Guards against a traceback from deep in the model, "no" taken for true, biases that are lost, and two thetas, of
    which each version of transformers would read its own."""
    assert parse_config(GOOD | {"attention_bias": True}).head_dim == 8  # which Qwen2 always has
    with pytest.raises(ValueError, match=said) as error:
        parse_config(GOOD | changes)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def read_config(folder: Path) -> dict:
    """A parsed config.json."""
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, **changes) -> None:
    """Set keys of config.json."""
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of model.safetensors in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_copies_and_constants_in_a_checkpoint_are_ignored(tmp_path):
    """Guards against refusing a published checkpoint for its copy of the tied embedding, or for RoPE's frequencies."""
    hf, _ = both("qwen3", tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone(),
                                               "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_same_logits(hf, load_model(tmp_path), random_tokens(3, 20))


@FAMILIES
@TIED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_reads_what_we_save(family, tied, dtype, tmp_path):
    """Guards against a name, shape, configuration or dtype that transformers does not find, and against rounding."""
    both(family, tmp_path, tie_word_embeddings=tied, head_dim=16)
    edit_config(tmp_path, architectures=["SomethingElse"])
    model, folder = load_model(tmp_path, dtype=dtype), tmp_path / "a new" / "folder"
    for _ in range(2):  # the second time over the first
        save_model(model, folder)
    hf, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert type(hf) is HF[family][1]
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert hf.config.architectures == [HF[family][1].__name__]
    saved = read_config(folder)
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == hf.config.rope_parameters["rope_theta"]
    assert [saved["dtype"], saved["torch_dtype"]] == [str(dtype).removeprefix("torch.")] * 2
    theirs, ours = dict(hf.named_parameters()), to_checkpoint(dict(model.named_parameters()), model.config)
    assert theirs.keys() == ours.keys()
    for name, p in ours.items():
        assert theirs[name].dtype == p.dtype == dtype and torch.equal(theirs[name], p), name


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
DAMAGES = [  # what to do to a good Qwen2 folder, and what is said about it; more in test_plumbing.py
    (lambda f: (f / "config.json").unlink(), FileNotFoundError, "checkpoint is .* config.json"),
    (shutil.rmtree, FileNotFoundError, "checkpoint: .*hf download"),
    (lambda f: (f / "adapter_config.json").touch(), ValueError, "checkpoint .*pass it to --adapter"),
    (lambda f: (f / "model.safetensors").rename(f / "q4.gguf"), ValueError, "a GGUF file: after"),
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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype, computed", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)], ids=str)
def test_log_probs_are_a_softmax_over_the_real_vocabulary(dtype, computed, temperature, tmp_path):
    """Guards against probability for rows that stand for no token, a temperature that multiplies or divides the
    log-probs, and a division or softmax in half precision."""
    _, model = both("qwen2", tmp_path)
    model, hidden = model.to(dtype), torch.randn(3, 2, 48, dtype=dtype, generator=torch.Generator().manual_seed(0))
    model.real_vocab = 17
    logits = (hidden @ model.output_weight[:17].T).double() / temperature
    model.temperature = temperature
    got = model.logits(hidden).log_softmax(-1)
    assert got.dtype == computed
    assert_close(got, logits - logits.exp().sum(-1, keepdim=True).log(), 1e-5)


def test_logit_grad_is_the_norm_of_the_gradient():
    """Guards against cancellation in 1 - p, too: in fp32 the textbook formula returns 0 for true values near 1e-4."""
    random = torch.randn(20, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    certain = [torch.tensor([1 - miss] + [miss / 49] * 49, dtype=torch.float64).log().repeat(20, 1)
               for miss in (1e-2, 1e-4, 1e-6)]  # the probability of all tokens but the first
    for logits in (random / 10, 3 * random, *certain):
        tokens, logits = torch.arange(20), logits.clone().requires_grad_()
        logits.log_softmax(-1)[torch.arange(20), tokens].sum().backward()
        log_probs = logits.detach().float().log_softmax(-1)
        _, entropy, logit_grad = describe(log_probs, log_probs.exp(), tokens[:, None])
        torch.testing.assert_close(logit_grad.double(), logits.grad.norm(dim=-1), atol=0, rtol=1e-4)
        assert_close(entropy, torch.distributions.Categorical(logits=logits.detach()).entropy(), 1e-5)


@TIED
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bytes_kept, kept", [(0, 0), (2 * 17 * 8, 0), (2**29, 1)])
def test_token_logprobs_are_autograds(tied, temperature, bytes_kept, kept, tmp_path, monkeypatch):
    """Guards against a piece lost or taken twice, rows that stand for no token, a gradient that misses a factor or that
    a frozen matrix gets, and logits that are kept, or kept twice."""
    both("qwen2", tmp_path, tie_word_embeddings=tied)
    model = load_model(tmp_path, dtype=torch.float64)
    model.real_vocab, model.temperature = 17, temperature
    hidden = torch.randn(11, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens, weight = random_tokens(1, 11, 17)[0], torch.linspace(-1, 1, 11)
    logits = hidden @ model.output_weight[:17].T / temperature
    expected = logits.log_softmax(-1)[torch.arange(11), tokens]  # (11,)

    saved = []
    monkeypatch.setattr(qwen2_model, "LOGITS_KEPT", bytes_kept)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        got = token_logprobs(model, hidden, tokens)
    assert len({x.data_ptr() for x in saved if x.shape == (11, 17)}) == kept
    assert_close(got, expected, 1e-12)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), (hidden, model.output_weight)) for x in (got, expected))
    for gradient, reference in zip(ours, theirs):
        assert reference.abs().max() > 0.1
        assert_close(gradient, reference, 1e-12)
    got = token_logprobs(model.requires_grad_(False), hidden, tokens)
    (gradient,) = torch.autograd.grad((got * weight).sum(), hidden)
    assert_close(gradient, theirs[0], 1e-12)


@pytest.mark.parametrize("at_once, kept", [(2**24, 2**25), (6 * 5 * 8, 2**25), (1, 2**25), (2**24, 1), (1, 1)])
def test_attention_is_torchs_own(at_once, kept, monkeypatch):
    """Guards against key heads that go to other query heads than theirs, on a GPU, too, a lost scale or bias, and rows
    that are lost where they are computed in pieces, or again."""
    monkeypatch.setattr(qwen2_model, "SCORES_AT_ONCE", at_once)
    monkeypatch.setattr(qwen2_model, "PROBABILITIES_KEPT", kept)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 4, dtype=torch.float64, generator=generator, requires_grad=True)
               for shape in ((3, 6, 5), (3, 2, 8), (3, 2, 8)))
    bias = torch.zeros(3, 1, 5, 8, dtype=torch.float64)
    bias[1, :, :, 2:5] = float("-inf")
    upstream = torch.randn(3, 6, 5, 4, dtype=torch.float64, generator=generator)
    usual = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    expected = torch.autograd.grad(usual, (q, k, v), upstream)
    for function in (attention, attention_on_gpu):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
            found = function(q, k, v, bias)
        probabilities = [x for x in saved if x.shape[-1] == 8 and x.numel() >= 6 * 5 * 8]
        assert function is attention_on_gpu or bool(probabilities) == (kept > 1)
        torch.testing.assert_close(found, usual)
        torch.testing.assert_close(torch.autograd.grad(found, (q, k, v), upstream), expected)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


@pytest.mark.parametrize("family, version", [("llama", 4), ("llama", 5), ("qwen3", 5)])
def test_llama_3s_rope_is_that_of_transformers(family, version, tmp_path):
    """Guards against a frequency that is scaled too much or not at all, and a checkpoint that loses the scaling. Of the
    8 pairs of a head some keep their frequency, some have an eighth of it, and some lie between."""
    hf, _ = both(family, tmp_path, head_dim=16, rope_parameters=LLAMA3)
    if version == 4:
        numbers = {name: x for name, x in LLAMA3.items() if name != "rope_theta"}
        edit_config(tmp_path, rope_parameters=None, rope_scaling=numbers, rope_theta=500.0)
    model, plain = load_model(tmp_path), 500.0 ** -(torch.arange(8) / 8)
    share = qwen2_model.rope_frequencies(model.config) / plain
    torch.testing.assert_close(share.unique()[[0, -1]], torch.tensor([0.125, 1.0]))
    assert 4 <= len(share.unique()) < 8
    assert_same_logits(hf, model, random_tokens(3, 200))
    save_model(model, tmp_path / "again")
    assert_same_logits(hf, load_model(tmp_path / "again"), random_tokens(3, 200))
    again, saved = AutoModelForCausalLM.from_pretrained(tmp_path / "again"), read_config(tmp_path / "again")
    assert_same_logits(again, model, random_tokens(3, 200))
    assert saved["rope_parameters"] == LLAMA3 == saved["rope_scaling"] | {"rope_theta": saved["rope_theta"]}
