"""A step of a model as large as Qwen2.5-0.5B on a GPU: its seconds and its memory. The weights are random.

What is timed: 64 responses of exactly 512 tokens to 8 prompts, sampled as one replayed graph and kernel by kernel, and
an update on them in float32 master weights.

Run it:  python -m lab.speed.gpu        writes gpu.md beside it; a minute of one H100
"""
import time
from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch

from grpo import update
from lab.speed.contestants import fixed_batch
from plumbing.decoder import Decoder, ReplayedDecoder
from plumbing.optimizer import Optimizer
from plumbing.report import Table
from qwen2_model import Qwen2, read_config
from rollout import Policy
from sampler import generate
from train import Settings

CONFIG = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
          "rope_theta": 1e6, "tie_word_embeddings": True, "num_key_value_heads": 2, "hidden_size": 896,
          "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
Q, G, P, T = 8, 8, 120, 512  # prompts, responses to each, tokens of a prompt and of a response


def row(name: str, work: Callable[[], object]) -> list[str]:
    """The table's row of a piece of work: seconds of the second time, tokens a second, and the most that it held."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    held = torch.cuda.max_memory_allocated() / 2**30  # GiB
    return ["0.5B", name, f"{seconds:.2f}", f"{Q * G * T / seconds:,.0f}", f"{held:.1f}"]


def measure() -> list[list[str]]:
    """Rows of the table."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2(read_config(CONFIG)).bfloat16()
    prompts = torch.randint(1000, 150000, (Q, P)).tolist()
    uniforms = torch.rand(Q * G, T, dtype=torch.float64)

    def sample(decoder: type) -> torch.Tensor:
        return generate(model, prompts, uniforms, [], cache_type=decoder).tokens  # (B, T)

    rows = [row("sample", lambda: sample(ReplayedDecoder)), row("sample, kernel by kernel", lambda: sample(Decoder))]
    batch = fixed_batch(prompts, sample(ReplayedDecoder).cpu())
    batch = replace(batch, **{name: x.to("cuda") for name, x in vars(batch).items() if isinstance(x, torch.Tensor)})
    policy, optimizer, credit = Policy(model, None, None), Optimizer(model, 0.0), torch.randn(Q * G, T, device="cuda")
    return [*rows, row("update", lambda: update(policy, optimizer, batch, credit, Settings(dtype="bfloat16")))]


def main() -> None:
    """Measure, and write the table."""
    note = f"{Q} x {G} responses of {T} tokens, bfloat16, random weights, one {torch.cuda.get_device_name()}."
    table = Table("A step on a GPU", note, ["model", "work", "seconds", "tokens a second", "peak GiB"], measure())
    Path(__file__).with_name("gpu.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
