"""A step of a model as large as Qwen2.5 on a GPU: seconds, memory, and where the time goes. Its weights are random.

What is timed: 64 responses of exactly 512 tokens to 8 prompts, sampled with the decoder that runs and with the plain
one, and an update on them in float32 master weights.

Run it:  python -m lab.speed.gpu 0.5B 1.5B        writes gpu.md beside it; two minutes of one H100
"""
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch
from torch.profiler import ProfilerActivity, profile

import sampler
from grpo import update
from plumbing.decoder import Decoder
from plumbing.optimizer import Optimizer
from plumbing.report import Table
from qwen2_model import Qwen2, read_config
from rollout import Policy, TokenBatch
from tests.fixtures import FakeQueries, make_batch
from train import Settings

CONFIG = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
          "rope_theta": 1e6, "tie_word_embeddings": True, "num_key_value_heads": 2}
SIZES = {"0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
         "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}}
Q, G, P, T = 8, 8, 120, 512  # prompts, responses to each, tokens of a prompt and of a response


def random_policy(size: str, device: str) -> Policy:
    """A model with random bfloat16 weights."""
    with torch.device(device):
        model = Qwen2(read_config(CONFIG | SIZES[size])).bfloat16()
    return Policy(model, None, None, {}, None)


def batch_on(device: str, tokens: torch.Tensor, prompts: list) -> TokenBatch:
    """The sampled responses (B, T) with a credit-free batch around them."""
    batch = make_batch([T] * len(tokens), [0.0] * len(tokens), [i // G for i in range(len(tokens))], tokens=tokens)
    moved = {name: x.to(device) for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    return replace(batch, **moved, ask=FakeQueries(prompts=prompts))


def timed(device: str, work: Callable[[], object]) -> float:
    """Seconds of a piece of work, the second time."""
    for _ in range(2):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
    return time.perf_counter() - began


def kernels(device: str, work: Callable[[], object], count: int = 6) -> str:
    """The kernels that take most of the GPU's time, with their shares, and how much of the seconds it was busy."""
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    shares = "; ".join(f"{e.key[:60]} {e.self_device_time_total / total:.0%}" for e in events[:count])
    return f"busy {total / 1e6 / seconds:.0%} of {seconds:.2f} s: {shares}"


def measure(size: str, device: str = "cuda", limit: int = T) -> list[list[str]]:
    """Rows of the table for one size."""
    torch.manual_seed(0)
    policy, rows = random_policy(size, device), []
    prompts = torch.randint(1000, 150000, (Q, P)).tolist()
    uniforms = torch.rand(Q * G, limit, dtype=torch.float64)

    def sample() -> torch.Tensor:
        return sampler.generate(policy.model, prompts, uniforms, []).tokens

    fast, tokens = sampler.ReplayedDecoder, sample()
    for name, decoder in (("sample", fast), ("sample, kernel by kernel", Decoder)):
        sampler.ReplayedDecoder = decoder
        seconds = timed(device, sample)
        rows.append([size, name, f"{seconds:.2f}", f"{uniforms.numel() / seconds:,.0f}", peak(device)])
        print(rows[-1], flush=True)
    sampler.ReplayedDecoder = fast
    s = Settings(micro_batch=16, dtype="bfloat16")
    batch, optimizer = batch_on(device, tokens, prompts), Optimizer(policy.model, 0.0)
    credit = torch.randn(batch.mask.shape, device=device)

    def learn() -> dict:
        return update(policy, optimizer, batch, credit, s)

    seconds = timed(device, learn)
    rows.append([size, "update", f"{seconds:.2f}", f"{uniforms.numel() / seconds:,.0f}", peak(device)])
    print(rows[-1], flush=True)
    for work in (sample, learn):
        print(f"{size} {work.__name__}: {kernels(device, work)}", flush=True)
    return rows


def peak(device: str) -> str:
    """GiB that the GPU held at most since the last call."""
    gib = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"{gib:.1f}"


def main() -> None:
    """Measure the sizes of the command line and write the table."""
    rows = []
    for size in sys.argv[1:]:
        rows += measure(size)
        torch.cuda.empty_cache()
    note = f"{Q} x {G} responses of {T} tokens, bfloat16, random weights, one {torch.cuda.get_device_name()}."
    table = Table("A step on a GPU", note, ["model", "work", "seconds", "tokens a second", "peak GiB"], rows)
    Path(__file__).with_name("gpu.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
