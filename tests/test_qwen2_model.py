"""Tests of qwen2_model.py: the forward, the files, the KV cache and the sampler.

The oracles are transformers (random checkpoints, every parameter randomized), plain loops, and fp64. The naive sampler
below knows no cache, no padding and no batch: every token is a new forward of transformers on one whole sequence.

Run it:  python -m pytest tests/test_qwen2_model.py
"""
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import grpo
import qwen2_model
from qwen2_model import (Decoder, KVCache, Prompts, Qwen2, Samples, draw, empty_model, entropy_and_logit_grad, fuse,
                         generate, load_model, read_config, save_model, split_fused, token_logprobs)

HF = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
KINDS = pytest.mark.parametrize("kind", HF)
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
V = 23  # vocabulary of the small models
SMALL = dict(vocab_size=V, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rope_theta=1e6)
PROMPTS = [[5, 1, 8, 2, 2, 9, 4], [7], [3, 12, 6], [20, 1, 1, 15, 2]]  # of unequal length
ENDS = [3, 11, 17]
# config.json of the published checkpoints, in the old spelling that they use.
PUBLISHED = dict(
    attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645, hidden_act="silu", initializer_range=0.02,
    rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True,
    use_sliding_window=False, vocab_size=151936)
QWEN25_05B = PUBLISHED | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896, intermediate_size=4864,
    num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
    max_window_layers=21, sliding_window=32768, transformers_version="4.43.1")
QWEN3_06B = PUBLISHED | dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, intermediate_size=3072,
    num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    max_window_layers=28, sliding_window=None, rope_scaling=None, attention_bias=False, rope_theta=1000000,
    transformers_version="4.51.0")


# ------------------------------------------------------------------------------------------------- helpers


def randomize(hf: torch.nn.Module) -> None:
    """Fill every parameter, norms and biases too, so that none is invisible and the logits have a size of 1 to 10."""
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                p.normal_(std=0.5)
            elif "embed_tokens" in name or "lm_head" in name:
                p.normal_(std=2.5 / math.sqrt(p.shape[1]))
            else:
                p.normal_(std=1 / math.sqrt(p.shape[1]))


def hf_model(kind: str, seed: int = 0, **options) -> torch.nn.Module:
    """A small random model of transformers."""
    config, model = HF[kind]
    torch.manual_seed(seed)
    hf = model(config.from_dict({**SMALL, **options})).eval()
    randomize(hf)
    return hf


def both(kind: str, folder: Path, seed: int = 0, **options) -> tuple[torch.nn.Module, Qwen2]:
    """A random model of transformers, and ours, read from what it saved in `folder`."""
    hf = hf_model(kind, seed, **options)
    hf.save_pretrained(folder)
    return hf, load_model(folder)


def save(hf: torch.nn.Module, folder: Path) -> Path:
    """Save a model of transformers, and give its folder back."""
    hf.save_pretrained(folder)
    return folder


def random_tokens(rows: int, columns: int, vocab: int = V) -> Tensor:
    """Tokens (rows, columns) from a generator of their own."""
    return torch.randint(vocab, (rows, columns), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same_logits(hf: torch.nn.Module, model: Qwen2, tokens: Tensor) -> None:
    """Logits agree within 1e-4 and are large enough for that to mean something."""
    expected, got = hf(tokens).logits, model(tokens)
    assert 1 < expected.std() < 10
    assert got.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes) -> None:
    """Change config.json by hand."""
    file = folder / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in drop}
    file.write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of model.safetensors by hand."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def uniforms(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random numbers (rows, columns), float64 in [0, 1)."""
    return torch.from_numpy(np.random.default_rng(seed).random((rows, columns)))


def walk(logits: list[float], u: float, temperature: float) -> int:
    """The token at which the cumulative softmax(logits / temperature) passes u; the likeliest at temperature 0."""
    if temperature == 0:
        return logits.index(max(logits))
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    total, cumulative = math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight / total
        if cumulative > u:
            return token
    raise AssertionError("u is not below 1")


@torch.no_grad()
def next_logits(hf: torch.nn.Module, tokens: list[int], vocab: int = V) -> Tensor:
    """Logits (vocab,) in fp64 of the token after `tokens`, by a plain forward of transformers."""
    return hf(torch.tensor([tokens])).logits[0, -1, :vocab].double()


def naive_sample(hf: torch.nn.Module, prompt: list[int], chance: list[float], temperature: float = 1.0,
                 vocab: int = V) -> tuple[list[int], Tensor]:
    """One response, and its log-prob, entropy and logit_grad (3, length) at temperature 1, each from its definition."""
    answer, facts = [], []
    for u in chance:
        logits = next_logits(hf, prompt + answer, vocab)
        token = walk(logits.tolist(), u, temperature)
        p, onehot = logits.softmax(-1), torch.zeros(vocab, dtype=torch.float64)
        onehot[token] = 1
        facts.append([p[token].log(), -(p * p.log()).sum(), (onehot - p).norm()])
        answer.append(token)
        if token in ENDS:
            break
    return answer, torch.tensor(facts, dtype=torch.float64).T


def answers(s: Samples) -> list[list[int]]:
    """The tokens of each response, without padding."""
    return [tokens[mask].tolist() for tokens, mask in zip(s.tokens, s.mask)]


# ------------------------------------------------------------------------------------ 1. logits of checkpoints


@KINDS
@TIED
@pytest.mark.parametrize("options", [{}, {"head_dim": 16}, {"num_key_value_heads": 6}, {"num_key_value_heads": 1},
                                     {"rms_norm_eps": 0.01}], ids=str)
@pytest.mark.parametrize("columns", [1, 40])
def test_logits_equal_transformers(kind, tied, options, columns, tmp_path):
    """Guards against any error of the forward: a lost bias or norm, wrong RoPE, mask, head order or output matrix."""
    hf, model = both(kind, tmp_path, tie_word_embeddings=tied, **options)
    assert_same_logits(hf, model, random_tokens(3, columns))


@KINDS
@TIED
def test_sharded_checkpoint(kind, tied, tmp_path):
    """Guards against reading only one shard, or not the index."""
    hf = hf_model(kind, tie_word_embeddings=tied)
    hf.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists() and len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(hf, load_model(tmp_path), random_tokens(3, 20))


@pytest.mark.parametrize("config", [QWEN25_05B, QWEN3_06B], ids=["Qwen2.5-0.5B", "Qwen3-0.6B"])
def test_published_configuration_with_two_layers(config, tmp_path):
    """Guards against an error that shows only at the published sizes, in bf16 files or with their config.json."""
    config = config | {"num_hidden_layers": 2, "max_window_layers": 2}
    make_config, make_model = HF[config["model_type"]]
    torch.manual_seed(0)
    hf = make_model(make_config.from_dict(config)).to(torch.bfloat16)
    randomize(hf)
    hf.save_pretrained(tmp_path)
    try:
        hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert_same_logits(hf, load_model(tmp_path), random_tokens(2, 12, 151665))
    finally:
        (tmp_path / "model.safetensors").unlink()  # 0.3 GB, which pytest would keep for three runs


@pytest.mark.parametrize("config, parameters, tensors", [(QWEN25_05B, 494_032_768, 290), (QWEN3_06B, 596_049_920, 310)],
                         ids=["Qwen2.5-0.5B", "Qwen3-0.6B"])
def test_published_size(config, parameters, tensors):
    """Guards against a parameter too many or too few in the full depth, where the published count is known."""
    model = empty_model(read_config(config))
    shapes = [p.numel() for p in split_fused(model.config, dict(model.named_parameters())).values()]
    assert (sum(shapes), len(shapes)) == (parameters, tensors)
    assert sum(p.numel() for p in model.parameters()) == parameters


@KINDS
def test_left_padding_is_invisible(kind, tmp_path):
    """Guards against attention to the padding, and against masking one real token too many."""
    hf, model = both(kind, tmp_path)
    tokens, pad = random_tokens(5, 12), torch.tensor([0, 3, 11, 7, 1])
    with torch.no_grad():
        got = model(tokens, pad)
        for i, n in enumerate(pad.tolist()):
            torch.testing.assert_close(got[i, n:], hf(tokens[i : i + 1, n:]).logits[0], atol=1e-4, rtol=0)
    assert got.isfinite().all()


@KINDS
@TIED
def test_gradients_equal_transformers(kind, tied, tmp_path):
    """Guards against a parameter that a loaded model does not train, and against padding that leaks into gradients."""
    hf, model = both(kind, tmp_path, tie_word_embeddings=tied)
    tokens, pad = random_tokens(3, 8), torch.tensor([0, 5, 2])
    logits = model(tokens, pad)
    for i, n in enumerate(pad.tolist()):
        logits[i, n:].log_softmax(-1).square().mean().backward(retain_graph=True)
        hf(tokens[i : i + 1, n:]).logits.log_softmax(-1).square().mean().backward()
    theirs = {name: p.grad for name, p in hf.named_parameters()}
    ours = split_fused(model.config, {name: p.grad for name, p in model.named_parameters()})
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-4 * theirs[name].abs().max().item(), rtol=0)


@KINDS
@pytest.mark.parametrize("spelling", [
    {"rope_theta": 50.0, "torch_dtype": "float32"},
    {"rope_theta": 50.0, "torch_dtype": "float32", "rope_scaling": None},
    {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}, "dtype": "float32"},
], ids=["old", "old with null", "new"])
def test_both_spellings_of_config_json(kind, spelling, tmp_path):
    """Guards against taking the default rope_theta because the file spells it the other way."""
    hf = hf_model(kind, rope_theta=50.0)
    hf.save_pretrained(tmp_path)
    edit_config(tmp_path, drop=("rope_theta", "rope_parameters", "torch_dtype", "dtype"), **spelling)
    assert_same_logits(hf, load_model(tmp_path), random_tokens(3, 40))


@KINDS
@pytest.mark.parametrize("absent", ["rms_norm_eps", "rope_theta", "tie_word_embeddings", "head_dim",
                                    "num_key_value_heads", "max_position_embeddings"])
def test_an_absent_key_means_what_it_means_to_transformers(kind, absent):
    """Guards against a default of our own for a key that config.json leaves out."""
    source = {k: v for k, v in SMALL.items() if k != absent} | {"model_type": kind}
    source |= {"num_attention_heads": 16, "hidden_size": 64}
    hf, ours = HF[kind][0].from_dict(source), read_config(source)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads  # as in its Attention
    expected = [head_dim, hf.rope_parameters["rope_theta"], hf.rms_norm_eps, hf.tie_word_embeddings,
                hf.num_key_value_heads, hf.max_position_embeddings]
    assert [ours.head_dim, ours.rope_theta, ours.rms_norm_eps, ours.tie_word_embeddings, ours.num_key_value_heads,
            ours.max_position_embeddings] == expected


def test_constants_that_published_files_carry(tmp_path):
    """Guards against refusing a tied checkpoint for its copy of the embedding (Qwen3-0.6B) or its RoPE constants."""
    hf = hf_model("qwen3", tie_word_embeddings=True)
    hf.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone(),
                                               "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_same_logits(hf, load_model(tmp_path), random_tokens(3, 20))


# ---------------------------------------------------------------------------------------------- 2. save_model


@KINDS
@TIED
def test_transformers_reads_what_we_save(kind, tied, tmp_path):
    """Guards against a saved name, shape or configuration that transformers does not know or lacks."""
    _, model = both(kind, tmp_path / "theirs", tie_word_embeddings=tied, head_dim=16)
    save_model(model, tmp_path / "ours")
    hf, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(hf) is HF[kind][1] and hf.dtype == torch.float32
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(hf, model, random_tokens(3, 20))


@KINDS
def test_bf16_survives_a_save(kind, tmp_path):
    """Guards against a save that widens, rounds or mislabels bf16 weights."""
    _, model = both(kind, tmp_path / "theirs")
    model = model.to(torch.bfloat16)
    save_model(model, tmp_path / "ours")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    theirs, ours = dict(hf.named_parameters()), split_fused(model.config, dict(model.named_parameters()))
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].dtype == torch.bfloat16 and torch.equal(theirs[name], ours[name]) for name in ours)


@KINDS
@TIED
def test_fused_matrices_hold_the_tensors_of_the_checkpoint(kind, tied, tmp_path):
    """Guards against parts in another order or of another size, which equal shapes of k and v, or gate and up, hide."""
    hf, model = both(kind, tmp_path, tie_word_embeddings=tied, head_dim=16)
    ours = model.state_dict()
    split, theirs, saved = split_fused(model.config, ours), hf.state_dict(), load_file(tmp_path / "model.safetensors")
    assert split.keys() == saved.keys() == theirs.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(split[name], theirs[name]) for name in split)
    again = fuse(split)
    assert again.keys() == ours.keys() and all(torch.equal(again[name], ours[name]) for name in ours)
    assert len(ours) == len(split) - 2 * (5 if kind == "qwen2" else 3)  # of two layers: q, k, v (and biases), gate, up


def test_save_over_a_sharded_checkpoint(tmp_path):
    """Guards against reading the old shards again after a save into the folder that they came from."""
    hf_model("qwen2", seed=0).save_pretrained(tmp_path, max_shard_size="10KB")
    _, new = both("qwen2", tmp_path / "new", seed=1)
    model = load_model(tmp_path)
    model.load_state_dict(new.state_dict())
    save_model(model, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_logits(hf, new, random_tokens(3, 20))
    assert_same_logits(hf, load_model(tmp_path), random_tokens(3, 20))


# ------------------------------------------------------------------------------------- 3. the cached sampler


STATIC = pytest.mark.parametrize("static", [False, True], ids=["", "static"])


@pytest.fixture
def in_small_steps(monkeypatch):
    """Where shapes are static, look more often and grow in smaller steps than short responses would make it."""
    monkeypatch.setattr(qwen2_model, "COLUMNS_AT_ONCE", 3)
    monkeypatch.setattr(qwen2_model, "LOOK_EVERY", 2)


@KINDS
@STATIC
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.0])
def test_sampler_equals_the_naive_one(kind, static, temperature, tmp_path, in_small_steps):
    """Guards against an error of cache, padding, dropped rows, or facts recorded at another temperature than 1."""
    G, T = 3, 9
    hf, model = both(kind, tmp_path, tie_word_embeddings=False)
    chance = uniforms(len(PROMPTS) * G, T)
    s = generate(model, PROMPTS, chance, ENDS, temperature, static=static)
    expected = [naive_sample(hf, PROMPTS[i // G], chance[i].tolist(), temperature) for i in range(len(chance))]
    assert answers(s) == [answer for answer, _ in expected]
    assert s.ended.tolist() == [answer[-1] in ENDS for answer, _ in expected]
    for i, (answer, facts) in enumerate(expected):
        got = torch.stack((s.logprob[i], s.entropy[i], s.logit_grad[i])).double()  # (3, T)
        torch.testing.assert_close(got[:, : len(answer)], facts, atol=1e-4, rtol=0)
        assert not got[:, len(answer) :].any() and not s.tokens[i, len(answer) :].any()
        assert s.mask[i].tolist() == [t < len(answer) for t in range(s.mask.shape[1])]
    if temperature > 0:  # the case is a hard one: rows leave at different times, and some never
        assert len({len(answer) for answer, _ in expected}) >= 4 and 0 < s.ended.sum() < len(s.ended)


@STATIC
def test_sampler_stops_with_its_last_row(static, tmp_path):
    """Guards against columns beyond the longest response, and against an end at the very limit counted as cut off."""
    hf, model = both("qwen2", tmp_path)
    first = walk(next_logits(hf, PROMPTS[0]).tolist(), 0.5, 1.0)
    for limit in (1, 6):
        s = generate(model, PROMPTS[:1], torch.full((2, limit), 0.5, dtype=torch.float64), [first], static=static)
        assert s.tokens.tolist() == [[first], [first]] and s.ended.all() and s.mask.all()


def test_tokens_above_the_real_vocabulary_do_not_exist(tmp_path):
    """Guards against sampling an embedding row that no token has, or giving it a share of the probability."""
    hf = hf_model("qwen2", tie_word_embeddings=False)
    real = V - 6
    with torch.no_grad():
        hf.lm_head.weight[real:] *= 3  # without the limit they would be the likeliest
    hf.save_pretrained(tmp_path)
    model, chance = load_model(tmp_path), uniforms(8, 6)
    assert (generate(model, PROMPTS, chance, ENDS).tokens >= real).any()
    model.real_vocab = real
    for temperature in (0.0, 1.0):
        s = generate(model, PROMPTS, chance, ENDS, temperature)
        assert s.tokens.max() < real
        for i in range(8):
            answer, facts = naive_sample(hf, PROMPTS[i // 2], chance[i].tolist(), temperature, real)
            assert answers(s)[i] == answer
            torch.testing.assert_close(s.logprob[i, : len(answer)].double(), facts[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_logit_grad_is_the_norm_of_the_gradient(scale):
    """Guards against a formula that is not the gradient: autograd in fp64 computes it."""
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    tokens = random_tokens(20, 1, 50)[:, 0]
    logits.requires_grad_()
    logits.log_softmax(-1)[torch.arange(20), tokens].sum().backward()
    entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()
    got = entropy_and_logit_grad(logits.detach().float().log_softmax(-1), tokens)
    expected = torch.stack((entropy, logits.grad.norm(dim=-1)))
    torch.testing.assert_close(torch.stack(got).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("miss", [1e-2, 1e-4, 1e-6])
def test_logit_grad_of_a_sure_token(miss):
    """Guards against cancellation in 1 - p: in fp32 the textbook formula returns 0 for true values near 1e-4."""
    p = torch.tensor([[1 - miss] + [miss / 300] * 300], dtype=torch.float64)
    onehot = torch.zeros_like(p)
    onehot[0, 0] = 1
    log_probs = p.log().float().log_softmax(-1)
    entropy, logit_grad = entropy_and_logit_grad(log_probs, torch.tensor([0]))
    assert logit_grad.dtype == torch.float32
    torch.testing.assert_close(logit_grad.double(), (onehot - p).norm(dim=-1), atol=0, rtol=1e-4)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), atol=1e-6, rtol=0)


def test_entropy_with_impossible_tokens():
    """Guards against 0 * -inf = NaN in the entropy."""
    log_probs = torch.tensor([[0.5, 0.0, 0.25, 0.25]]).log()
    entropy, logit_grad = entropy_and_logit_grad(log_probs, torch.tensor([2]))
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)
    assert logit_grad.item() == pytest.approx(math.sqrt(0.75**2 + 0.5**2 + 0.25**2), abs=1e-6)


# ------------------------------------------------------------------------------------------ 4. the distribution


def joint(hf: torch.nn.Module, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The exact probability of every response of at most two tokens, by brute force."""
    outcomes = {}
    for a, p in enumerate(next_logits(hf, prompt).softmax(-1).tolist()):
        if a in ENDS:
            outcomes[a,] = p
        else:
            outcomes |= {(a, b): p * q for b, q in enumerate(next_logits(hf, prompt + [a]).softmax(-1).tolist())}
    return outcomes


def chi_square(counts: Counter, probabilities: dict[tuple[int, ...], float], n: int) -> tuple[float, int]:
    """Pearson's statistic and its number of cells; outcomes expected less than 20 times share one, or none."""
    common = [k for k, p in probabilities.items() if n * p >= 20]
    cells = [(counts[k], n * probabilities[k]) for k in common]
    rest = n - sum(count for count, _ in cells), n - sum(expected for _, expected in cells)
    cells += [rest] if rest[1] >= 20 else []
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells)


@KINDS
def test_frequencies_follow_the_exact_distribution(kind, tmp_path):
    """Guards against a bias of the sampler: chi-square of all two-token responses, at 1e-6 false alarms over all seeds.

    Laurent and Massart (2000): chi-square with k degrees exceeds k + 2 sqrt(k x) + 2 x with probability at most e^-x.
    """
    n, x = 30_000, math.log(2 * 1e6)  # two prompts
    hf, model = both(kind, tmp_path)
    prompts = PROMPTS[:2]
    found = answers(generate(model, prompts, uniforms(2 * n, 2), ENDS))
    for i, prompt in enumerate(prompts):
        probabilities = joint(hf, prompt)
        assert sum(probabilities.values()) == pytest.approx(1)
        counts = Counter(map(tuple, found[i * n : (i + 1) * n]))
        assert counts.keys() <= probabilities.keys()
        statistic, k = chi_square(counts, probabilities, n)
        assert k >= 20 and statistic < k + 2 * math.sqrt(k * x) + 2 * x


@pytest.mark.parametrize("vocab, rows", [(3, 200), (60, 200), (151_936, 6)])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_draw_is_the_inverse_distribution_function(vocab, rows, temperature):
    """Guards against an off-by-one of the search and a wrong temperature: a loop over the same numbers."""
    logits = 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    chance = uniforms(rows, 1, seed=vocab)[:, 0]
    log_probs = logits.log_softmax(-1)
    expected = [walk(row, u, temperature) for row, u in zip(log_probs.tolist(), chance.tolist())]
    assert draw(log_probs, chance, temperature).tolist() == expected


def test_draw_keeps_the_tail_of_a_large_vocabulary():
    """Guards against sums in fp32, whose spacing below 1 is that of nine tokens of this tail."""
    logits = torch.zeros(6, 151_936)
    logits[:, 0] = math.log(999 * 151_935)  # p = 0.999
    log_probs, chance = logits.log_softmax(-1), 0.9991 + 0.0008 * uniforms(6, 1)[:, 0]
    assert draw(log_probs, chance, 1.0).tolist() == [walk(log_probs[0].tolist(), u, 1.0) for u in chance.tolist()]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draw_never_returns_an_impossible_token(temperature):
    """Guards against a token of probability 0 at u = 0 and at the u nearest to 1, or an index past the last token."""
    log_probs = torch.randn(500, 37, generator=torch.Generator().manual_seed(0))
    possible = torch.rand(500, 37, generator=torch.Generator().manual_seed(1)) < 0.5
    possible[:, 18] = True
    log_probs = log_probs.where(possible, -torch.inf).log_softmax(-1)
    first = [row.index(True) for row in possible.tolist()]
    last = [36 - row[::-1].index(True) for row in possible.tolist()]
    for u, expected in ((0.0, first), (np.nextafter(1.0, 0.0), last)):
        assert draw(log_probs, torch.full((500,), u, dtype=torch.float64), temperature).tolist() == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draw_follows_the_tempered_softmax(temperature):
    """Guards against a temperature that multiplies or is ignored: n evenly spaced numbers give a token n p, +- 1."""
    n, logits = 10_000, torch.tensor([1.0, -2.0, 0.3, 2.5, 0.0])
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens = draw(logits.log_softmax(-1).expand(n, 5), grid, temperature)
    hits = torch.bincount(tokens, minlength=5)
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    for token in range(5):
        assert abs(hits[token].item() - n * weights[token] / sum(weights)) <= 1


# ----------------------------------------------------------------------------------------- 5. batch independence


@KINDS
def test_a_response_does_not_depend_on_its_batch(kind, tmp_path):
    """Guards against neighbours, their order, or their early end changing a response."""
    G, T = 4, 12
    _, model = both(kind, tmp_path, seed=3)
    chance = uniforms(len(PROMPTS) * G, T).view(len(PROMPTS), G, T)
    together = generate(model, PROMPTS, chance.flatten(0, 1), ENDS)
    lengths = together.mask.sum(1)
    assert len(set(lengths.tolist())) >= 4 and not together.ended.all()  # some outlive others
    everyone = answers(together)
    backwards = generate(model, PROMPTS[::-1], chance.flip(0).flatten(0, 1), ENDS)
    for q, prompt in enumerate(PROMPTS):
        mine = everyone[q * G : (q + 1) * G]
        r = len(PROMPTS) - 1 - q
        assert answers(backwards)[r * G : (r + 1) * G] == mine
        assert answers(generate(model, [prompt], chance[q], ENDS)) == mine
        assert [answers(generate(model, [prompt], chance[q, g : g + 1], ENDS))[0] for g in range(G)] == mine


# -------------------------------------------------------------------------------------------------- 6. KVCache


READER = Qwen2(read_config(SMALL | dict(model_type="qwen2", num_attention_heads=3, num_key_value_heads=3, head_dim=2)))


@torch.no_grad()
def some_prompts(keys: Tensor, filled: int, pad: list[int]) -> Prompts:
    """Prompts of `filled` columns with these keys (layers, Q, K, columns, d), and values with the other sign."""
    read = Prompts(READER, [[1] * (filled - n) for n in pad])
    assert read.layers.keys() == {0, 1} and read.layers[0][0].shape[1:] == (3, max(filled - n for n in pad), 2)
    read.layers = {i: (k[:, :, :filled], -k[:, :, :filled]) for i, k in enumerate(keys)}
    return read


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_keep_equals_plain_indexing(data):
    """Guards against a surviving row losing its keys, values, positions, padding or place in `order` over several drops
    and appends, and against answers that get another prompt."""
    questions, answers, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), 5
    prompt_keys = torch.arange(2 * questions * 3 * columns * 2.0).view(2, questions, 3, columns, 2)  # all different
    pad = [0] + data.draw(st.lists(st.integers(0, 1), min_size=questions - 1, max_size=questions - 1))
    cache = KVCache(some_prompts(prompt_keys, 2, pad), answers, columns - 2)
    prompt = torch.tensor([q for q in range(questions) for _ in range(answers)])  # of each row
    keys = prompt_keys[:, prompt] + 1000 * torch.arange(len(prompt)).view(-1, 1, 1, 1) * (torch.arange(5) > 1)[:, None]
    ids = torch.arange(len(prompt))
    for length in range(2, columns):
        alive = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), dtype=torch.bool)
        survivors = sorted(ids[alive].tolist())
        ids = ids[cache.keep(alive)]
        assert sorted(ids.tolist()) == survivors
        cache.open()
        cache.end = min(length + 1 + data.draw(st.integers(0, 1)), columns)  # static shapes look further than is filled
        new = keys[:, ids, :, length, None]  # (2, rows left, 3, 1, 2)
        for layer in range(2):
            all_keys, all_values = cache.append(layer, new[layer], -new[layer])
            assert all_keys.shape[2] == all_values.shape[2] == cache.end
            assert torch.equal(all_keys[:, :, : length + 1], keys[layer, ids, :, : length + 1])
            assert torch.equal(all_values[:, :, : length + 1], -keys[layer, ids, :, : length + 1])
        real = [[pad[prompt[i]] <= column <= length for column in range(columns)] for i in ids]
        assert (cache.bias == 0).tolist() == real and cache.next.tolist() == [length - pad[prompt[i]] for i in ids]


@KINDS
@pytest.mark.parametrize("limited", [False, True], ids=["", "limited"])
@pytest.mark.parametrize("columns, look", [(3, 2), (8, 5), (128, 16)])
def test_static_shapes_give_the_same_samples(kind, limited, columns, look, tmp_path, monkeypatch):
    """Guards against a column looked at before it is filled, tokens after an end, a row lost where rows leave late, and
    shapes that are not static after all: neither shrink before half has ended, nor grow with every token."""
    monkeypatch.setattr(qwen2_model, "COLUMNS_AT_ONCE", columns)
    monkeypatch.setattr(qwen2_model, "LOOK_EVERY", look)
    _, model = both(kind, tmp_path)
    chance = uniforms(24, 30)
    limit = 7 * torch.arange(24) % 29 + 1 if limited else None
    eager, seen, hidden = generate(model, PROMPTS, chance, ENDS[:2], 3.0, limit, static=False), [], Qwen2.hidden

    def spy(model, tokens, pad=None, past=None, hide=None):
        if isinstance(past, KVCache):
            seen.append((len(tokens), past.end))
        return hidden(model, tokens, pad, past, hide)

    monkeypatch.setattr(Qwen2, "hidden", spy)
    static = generate(model, PROMPTS, chance, ENDS[:2], 3.0, limit, static=True)
    for name in ("tokens", "mask", "ended"):
        assert torch.equal(getattr(static, name), getattr(eager, name)), name
    for name in ("logprob", "entropy", "logit_grad"):
        torch.testing.assert_close(getattr(static, name), getattr(eager, name), atol=1e-5, rtol=0)
    lengths = eager.mask.sum(1)
    assert lengths.unique().numel() > 9 and 4 < eager.ended.sum()  # a hard case
    heights, widths = ([shape[i] for shape in seen] for i in (0, 1))
    assert len(set(widths)) == len({-(-(7 + t) // columns) for t in range(1, len(seen) + 1)})
    assert all(width >= 7 + t for t, width in enumerate(widths, 1)) and heights[0] == 24
    for t, (before, after) in enumerate(zip(heights, heights[1:]), 2):  # of t tokens, one look
        left = int((lengths > t).sum())
        assert after == (left if t % look == 0 and 2 * left <= before else before)
    assert look == 16 or min(len(set(heights)), len(set(widths))) > 1  # rows were dropped, columns added


@STATIC
def test_a_step_of_static_shapes_uses_the_same_memory(static, tmp_path):
    """Guards against a tensor made anew by a step: a CUDA graph would go on reading and writing the old one."""
    _, model = both("qwen2", tmp_path)
    with torch.inference_mode():
        decoder = Decoder(model, PROMPTS, uniforms(8, 20), ENDS, 1.0, None, static)
        places = []
        for columns in range(8, 14):
            decoder.advance(columns)
            held = vars(decoder) | {f"cache.{name}": x for name, x in vars(decoder.cache).items()}
            places.append({name: x.data_ptr() for name, x in held.items() if isinstance(x, Tensor)})
    assert len(places[0]) >= 14 and all(place == places[0] for place in places)
    assert (decoder.t, decoder.cache.column) == (7, 12) and decoder.cache.end == (128 if static else 13)


# ------------------------------------------------------------------------- log-probs without all of the logits


def head(weight: Tensor, vocabulary: int) -> SimpleNamespace:
    """Stands for a model of which only the output matrix is asked."""
    return SimpleNamespace(output_weight=weight, real_vocab=vocabulary)


@TIED
@pytest.mark.parametrize("at_once", [1, 2 * (V - 6) + 1, 2**24], ids=["one", "two", "all"])
def test_token_logprobs_equal_autograd(tied, at_once, tmp_path, exact, monkeypatch):
    """Guards against a piece lost or taken twice, a gradient that is that of the loss's other sign, and one that misses
    the output matrix, its rows without tokens, or the states."""
    monkeypatch.setattr(qwen2_model, "LOGITS_AT_ONCE", at_once)
    model = load_model(save(hf_model("qwen2", tie_word_embeddings=tied), tmp_path), dtype=torch.float64)
    model.real_vocab = V - 6
    hidden, tokens, weight = torch.randn(11, 48, requires_grad=True), random_tokens(1, 11, V - 6)[0], torch.randn(11)
    inputs = [hidden, model.output_weight]
    logits = hidden @ model.output_weight[: V - 6].T
    expected = logits.log_softmax(-1)[torch.arange(11), tokens]
    got = token_logprobs(model, hidden, tokens)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    for ours, theirs in zip(*(torch.autograd.grad((x * weight).sum(), inputs) for x in (got, expected))):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    small = [torch.randn(11, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)]
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(head(w, V - 6), h, tokens), small)


def test_token_logprobs_never_hold_all_of_the_logits(exact, monkeypatch):
    """Guards against pieces that are all kept for the backward pass: they were made so that memory does not suffice."""
    monkeypatch.setattr(qwen2_model, "LOGITS_AT_ONCE", 30)
    held, sizes, log_softmax = [], [], qwen2_model.log_softmax
    monkeypatch.setattr(qwen2_model, "log_softmax", lambda h, w: (sizes.append(len(h)), log_softmax(h, w))[1])
    hidden, weight = torch.randn(20, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (held.append(x.numel()), x)[1], lambda x: x):
        logprob = token_logprobs(head(weight, 10), hidden, torch.arange(20) % 10)
    logprob.sum().backward()
    assert max(held) == 80 and sizes == 2 * [3, 3, 3, 3, 3, 3, 2]


# ------------------------------------------------------------- 7. attention, hidden columns, a limit for each row

PADDED = random_tokens(5, 12), torch.tensor([0, 3, 11, 7, 1])  # tokens, and how many columns of each row are padding
GROUPED = pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 6}, {"num_key_value_heads": 1},
                                              {"num_hidden_layers": 1, "head_dim": 16}], ids=str)


@KINDS
@GROUPED
def test_attention_equals_transformers(kind, options, tmp_path):
    """Guards against another layer, raw scores, a wrong scale, heads with others' keys, and looks at padding."""
    hf, model = both(kind, tmp_path, **options)
    hf.set_attn_implementation("eager")
    tokens, pad = PADDED
    with torch.no_grad():
        got = model.attention(tokens, pad)
        for i, n in enumerate(pad.tolist()):
            expected = hf(tokens[i : i + 1, n:], output_attentions=True).attentions[-1][0].mean(0)  # over the heads
            torch.testing.assert_close(got[i, n:, n:], expected, atol=1e-5, rtol=0)
            assert not got[i, n:, :n].any()
    torch.testing.assert_close(got.sum(-1), torch.ones(5, 12))


def unseeing(hf: torch.nn.Module, tokens: Tensor, hide: Tensor) -> Tensor:
    """transformers' last hidden states (S, D) of one sequence (S,), where only a hidden column itself sees it."""
    S = len(tokens)
    blocked = [[k > q or k < q and bool(hide[k]) for k in range(S)] for q in range(S)]
    mask = torch.zeros(1, 1, S, S).masked_fill(torch.tensor(blocked), torch.finfo(torch.float32).min)
    return hf.model(tokens[None], attention_mask=mask, position_ids=torch.arange(S)[None]).last_hidden_state[0]


@KINDS
@GROUPED
def test_hidden_columns_equal_a_mask_of_transformers(kind, options, tmp_path):
    """Guards against hiding in the first layer only, rows or queries in place of keys, and positions that close up."""
    hf, model = both(kind, tmp_path, **options)
    tokens, pad = PADDED
    hide = torch.rand(5, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    hide[0, 0] = hide[3, 7] = True  # the first real column, which is all that the next one could see
    with torch.no_grad():
        got, open_eyed = model.hidden(tokens, pad, hide=hide), model.hidden(tokens, pad)
        for i, n in enumerate(pad.tolist()):
            torch.testing.assert_close(got[i, n:], unseeing(hf, tokens[i, n:], hide[i, n:]), atol=1e-4, rtol=0)
            expected = hf.model(tokens[i : i + 1, n:]).last_hidden_state[0]
            torch.testing.assert_close(open_eyed[i, n:], expected, atol=1e-4, rtol=0)
        assert (got - open_eyed).abs().max() > 0.1
        assert torch.equal(model.hidden(tokens, pad, hide=torch.zeros_like(hide)), open_eyed)


@KINDS
def test_nobody_reads_a_hidden_column(kind, tmp_path):
    """Guards against a hidden token that speaks through its neighbours or the residual stream."""
    _, model = both(kind, tmp_path)
    (tokens, pad), hide = PADDED, torch.zeros(5, 12, dtype=torch.bool)
    hide[:, [4, 5, 8]] = True
    other = torch.where(hide, (tokens + 1) % V, tokens)
    with torch.no_grad():
        unseen = model.hidden(tokens, pad, hide=hide) - model.hidden(other, pad, hide=hide)
        seen = model.hidden(tokens, pad) - model.hidden(other, pad)
    real = torch.arange(12) >= pad[:, None]
    assert unseen[~hide].abs().max() < 1e-5 and (unseen[hide & real].abs().amax(-1) > 0.1).all()
    assert (seen[:2, 6:8].abs().amax(-1) > 0.1).all()


@KINDS
@STATIC
def test_a_limit_cuts_its_own_response_and_nothing_else(kind, static, tmp_path, in_small_steps):
    """Guards against a limit off by one, or mixed up where rows leave the batch, and a cut counted as an end."""
    _, model = both(kind, tmp_path)
    chance, T = uniforms(24, 9), 9
    whole = generate(model, PROMPTS, chance, ENDS)
    lengths = whole.mask.sum(1)
    limits = [torch.arange(24) % T + 1, T - torch.arange(24) % T, lengths, torch.full((24,), 3)]
    for limit in limits:
        cut = generate(model, PROMPTS, chance, ENDS, limit=limit, static=static)
        shorter = torch.minimum(lengths, limit)
        assert answers(cut) == [answer[:n] for answer, n in zip(answers(whole), limit.tolist())]
        assert torch.equal(cut.mask.sum(1), shorter) and cut.tokens.shape[1] == shorter.max()
        assert torch.equal(cut.ended, whole.ended & (lengths <= limit))
        for got, expected in zip(cut[2:5], whole[2:5]):  # logprob, entropy, logit_grad
            torch.testing.assert_close(got, expected[:, : shorter.max()] * cut.mask, atol=1e-4, rtol=0)
    for limit in limits[:2]:  # they are hard ones: some end before, some at their limit
        assert 4 <= (whole.ended & (lengths <= limit)).sum() < whole.ended.sum() and (lengths == limit).any()


# --------------------------------------------------------------------------------------------------- 8. errors


@STATIC
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken, name", [(math.nan, "norm"), (math.nan, "layers.1.mlp.down_proj"),
                                          (math.inf, "embed_tokens")])  # fmt: skip
def test_broken_weights_are_named(static, temperature, broken, name, tmp_path):
    """Guards against tokens drawn from NaN: training would go on with them."""
    _, model = both("qwen2", tmp_path)
    with torch.no_grad():
        model.get_parameter(f"model.{name}.weight").view(-1)[7] = broken
    s = generate(model, PROMPTS, uniforms(8, 5), ENDS, temperature, static=static)
    assert not s.logprob.isfinite().all() and (0 <= s.tokens).all() and (s.tokens < V).all()
    with pytest.raises(FloatingPointError, match="not finite.*--lr"):
        grpo.sample(model, PROMPTS, uniforms(8, 5), ENDS, None)


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the CPU wait for a GPU, and what a CUDA graph can't hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"), func
        return func(*args, **(kwargs or {}))


@KINDS
def test_a_step_never_waits_for_the_device(kind, tmp_path):
    """Guards against a number that Python reads in the middle of a step: on a GPU, no graph could be captured of it."""
    _, model = both(kind, tmp_path)
    with torch.no_grad():  # in inference mode, the dispatch log is empty
        decoder = Decoder(model, PROMPTS, uniforms(8, 5), ENDS, 1.0, None, static=True)
        decoder.cache.end += 1
        with NoWaiting():
            decoder.step()
        with pytest.raises(AssertionError), NoWaiting():  # it would notice
            decoder.drop()


def truncate(folder: Path, size: int) -> None:
    """Cut model.safetensors to `size` bytes; negative: by so many."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


def shard_missing(folder: Path) -> None:
    """Shard the checkpoint and lose the second shard."""
    (folder / "model.safetensors").unlink()
    hf_model("qwen2").save_pretrained(folder, max_shard_size="10KB")
    sorted(folder.glob("model-00002-*"))[0].unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    """A damage that overwrites a file of the folder."""
    return lambda folder: (folder / name).write_text(text)


INDEX, NORM, Q = "model.safetensors.index.json", "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {  # name: (what to do to a good Qwen2 folder, the error, words that the message must have)
    "no folder": (shutil.rmtree, FileNotFoundError, ["checkpoint", "config.json"]),
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, ["checkpoint", "config.json"]),
    "config is no JSON": (write("config.json", "{'model_type':"), ValueError, ["config.json", "JSON"]),
    "config is no object": (write("config.json", "[1, 2]"), ValueError, ["config.json"]),
    "config is not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), ValueError, ["config.json"]),
    "config lacks a size": (lambda f: edit_config(f, drop=("hidden_size",)),
                            ValueError, ["config.json", "hidden_size"]),
    "llama": (lambda f: edit_config(f, model_type="llama"), ValueError, ["model_type", "llama"]),
    "no model_type": (lambda f: edit_config(f, drop=("model_type",)), ValueError, ["model_type"]),
    "yarn, new": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
                  ValueError, ["config.json", "rope_type"]),
    "yarn, old": (lambda f: edit_config(f, drop=("rope_parameters",), rope_theta=1e6, rope_scaling={"type": "yarn"}),
                  ValueError, ["config.json", "rope_type"]),
    "sliding window": (lambda f: edit_config(f, use_sliding_window=True),
                       ValueError, ["config.json", "use_sliding_window"]),
    "gelu": (lambda f: edit_config(f, hidden_act="gelu"), ValueError, ["config.json", "hidden_act"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(),
                   FileNotFoundError, ["checkpoint", "model.safetensors"]),
    "no shard": (shard_missing, FileNotFoundError, ["checkpoint", "model-00002-of-"]),
    "index is no JSON": (lambda f: (truncate(f, 0), write(INDEX, "{")(f)), ValueError, [INDEX]),
    "index has no map": (lambda f: (shard_missing(f), write(INDEX, "{}")(f)), ValueError, [INDEX, "weight_map"]),
    "index maps to a number": (lambda f: (shard_missing(f), write(INDEX, '{"weight_map": {"a": 1}}')(f)), ValueError,
                               [INDEX, "weight_map"]),
    "empty file": (lambda f: truncate(f, 0), ValueError, ["model.safetensors"]),
    "cut in the header": (lambda f: truncate(f, 100), ValueError, ["model.safetensors"]),
    "cut in the data": (lambda f: truncate(f, -1000), ValueError, ["model.safetensors"]),
    "text as weights": (write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
                        ValueError, ["model.safetensors"]),
    "tensor missing": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), ValueError, ["checkpoint", NORM]),
    "tensor unknown": (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.ones(1))),
                       ValueError, ["checkpoint", "extra"]),
    "wrong shape": (lambda f: edit_tensors(f, lambda t: t.update({Q: t[Q][1:].clone()})),
                    ValueError, ["checkpoint", Q]),
}


def assert_error_names(folder: Path, error: type[Exception], words: list[str]) -> None:
    """Loading raises exactly this error, and its one-sentence message has all the words."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_model(folder)
    assert caught.type is error and all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage, error, words", DAMAGES.values(), ids=DAMAGES)
def test_a_broken_checkpoint_is_named(damage, error, words, tmp_path):
    """Guards against a bare traceback, or silence, where a file or tensor of a checkpoint is not as it should be."""
    folder = tmp_path / "checkpoint"
    both("qwen2", folder)  # loads as it is
    damage(folder)
    assert_error_names(folder, error, words)


@pytest.mark.parametrize("weights, claimed, tensor", [("qwen3", "qwen2", "proj.bias"),
                                                      ("qwen2", "qwen3", "k_norm.weight")])
def test_weights_of_the_other_architecture(weights, claimed, tensor, tmp_path):
    """Guards against running Qwen3 weights as a Qwen2 without biases, or the other way about."""
    hf_model(weights).save_pretrained(tmp_path)
    edit_config(tmp_path, model_type=claimed)
    assert_error_names(tmp_path, ValueError, [str(tmp_path), tensor])


def test_qwen3_with_attention_bias_is_refused(tmp_path):
    """Guards against a Qwen3 whose biases would be dropped in silence."""
    hf_model("qwen3", attention_bias=True).save_pretrained(tmp_path)
    assert_error_names(tmp_path, ValueError, ["config.json", "attention_bias"])
