"""Small random checkpoints written by transformers, for the tests of the model, the sampler and real checkpoints."""
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM)

from qwen2_model import Qwen2, load_model

HF = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
      "llama": (LlamaConfig, LlamaForCausalLM)}
FAMILIES = pytest.mark.parametrize("family", HF)
V = 23  # vocabulary
SMALL = dict(vocab_size=V, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rope_theta=1e6)


@torch.no_grad()
def randomize(hf: torch.nn.Module) -> None:
    """Fill every parameter, norms and biases included, so that each one matters and logits have a size of 1 to 10."""
    for name, p in hf.named_parameters():
        if "norm" in name:
            p.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            p.normal_(std=0.5)
        else:
            p.normal_(std=(2.5 if "embed_tokens" in name or "lm_head" in name else 1) / math.sqrt(p.shape[1]))


def hf_model(family: str, seed: int = 0, **options) -> torch.nn.Module:
    """A small random model of transformers."""
    make_config, make_model = HF[family]
    torch.manual_seed(seed)
    hf = make_model(make_config.from_dict(SMALL | options)).eval()
    randomize(hf)
    return hf


def both(family: str, folder: Path, seed: int = 0, **options) -> tuple[torch.nn.Module, Qwen2]:
    """A small random model of transformers, and ours, loaded from what it saved in `folder`."""
    hf = hf_model(family, seed, **options)
    hf.save_pretrained(folder)
    return hf, load_model(folder)


def random_tokens(rows: int, columns: int, vocab: int = V) -> Tensor:
    """Random tokens (rows, columns), always the same."""
    return torch.randint(vocab, (rows, columns), generator=torch.Generator().manual_seed(1))


def assert_close(got: Tensor, expected: Tensor, atol: float) -> None:
    """Equal up to atol, whatever the dtype."""
    torch.testing.assert_close(got, expected, atol=atol, rtol=0, check_dtype=False)


@torch.no_grad()
def assert_same_logits(hf: torch.nn.Module, model: Qwen2, tokens: Tensor) -> None:
    """Logits agree within 1e-4, and are large enough for that to mean something."""
    expected, got = hf(tokens).logits, model(tokens)
    assert 1 < expected.std() < 10
    assert got.dtype == torch.float32
    assert_close(got, expected, 1e-4)
