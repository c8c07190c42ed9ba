"""One contestant of benchmark.py --model: a pretrained model in bfloat16, sampled from and updated.

    python lab/speed/pretrained.py KIND FOLDER        kinds: ours, transformers, products; started by benchmark.py

It reads cases from stdin and answers each with its tokens, its seconds and the peak of its memory, as contestants.py
does. All work on the same rows: word problems with ANSWERS responses each of exactly `limit` tokens, which are random
for an update. `products` only multiplies matrices of the model's shapes as often as sampling or an update has to. Run
from the folder of an older checkout, it measures that.
"""
import json
import re
import sys
import time
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor

from tasks import math_task

ANSWERS, MICRO_BATCH = 8, 16


def peak_gib() -> float:
    """The most memory that this process ever had (Linux)."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20


def random_rows(case: dict, vocabulary: int) -> Tensor:
    """Tokens (B, limit) of the responses of a case."""
    generator = torch.Generator().manual_seed(case["seed"])
    return torch.randint(1000, vocabulary - 1000, (case["puzzles"] * ANSWERS, case["limit"]), generator=generator)


def ours(folder: str) -> dict[str, Callable[[dict], None]]:
    """Our sampler and update."""
    from grpo import update
    from plumbing.optimizer import Optimizer
    from rollout import draw_uniforms, generate_shared
    from tests.fixtures import FakeQueries, make_batch
    from train import Settings, load_policy
    s = Settings(model=folder, task="math", dtype="bfloat16", answers=ANSWERS, micro_batch=MICRO_BATCH)
    policy = load_policy(s)
    policy.tokenizer.end_tokens = []
    optimizer = None

    def sample(case: dict) -> None:
        uniforms = draw_uniforms(case["seed"], 0, case["puzzles"], ANSWERS, case["limit"])  # (B, limit)
        generate_shared(policy, [policy.prompt(p) for p in math_task.load("train", case["puzzles"])], uniforms)

    def learn(case: dict) -> None:
        """An update on the rows of a case, with a random credit."""
        nonlocal optimizer
        optimizer = optimizer or Optimizer(policy.model, lr=0.0)
        tokens = random_rows(case, policy.tokenizer.size)  # (B, limit)
        B, prompts = len(tokens), [policy.prompt(p) for p in math_task.load("train", case["puzzles"])]
        batch = make_batch([case["limit"]] * B, [0.0] * B, [i // ANSWERS for i in range(B)], tokens=tokens)
        batch.ask = FakeQueries(prompts=prompts)
        update(policy, optimizer, batch, torch.randn(tokens.shape), s)

    return {"sampler": sample, "update": learn}


def theirs(folder: str) -> dict[str, Callable[[dict], None]]:
    """transformers' generate, and its model in a plain update: rows of prompt and response, AdamW on the weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = (kind.from_pretrained(folder, **more) for kind, more in (
        (AutoModelForCausalLM, {"dtype": torch.bfloat16}), (AutoTokenizer, {})))
    optimizer = None

    def prompt_rows(case: dict) -> tuple[Tensor, Tensor]:
        texts = [math_task.prompt(p, True) for p in math_task.load("train", case["puzzles"])]
        texts = ["".join(text) for text in texts for _ in range(ANSWERS)]
        read = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        return read["input_ids"], read["attention_mask"]  # (B, P) each

    def sample(case: dict) -> None:
        tokens, mask = prompt_rows(case)
        with torch.inference_mode():
            model.generate(tokens, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                           repetition_penalty=1.0, max_new_tokens=case["limit"], min_new_tokens=case["limit"])

    def learn(case: dict) -> None:
        """The same with autograd alone, in half as many rows at a time."""
        nonlocal optimizer
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.0, fused=True)
        prompts, mask = prompt_rows(case)  # (B, P) each
        rows = torch.cat((prompts, random_rows(case, len(tokenizer))), 1)  # (B, P + T)
        mask = torch.nn.functional.pad(mask, (0, case["limit"]), value=1)
        for some, visible in zip(rows.split(MICRO_BATCH // 2), mask.split(MICRO_BATCH // 2)):
            logits = model(some, attention_mask=visible, logits_to_keep=case["limit"] + 1).logits[:, :-1]
            taken = some[:, prompts.shape[1] :]  # (b, T)
            logprob = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), taken.flatten(), reduction="sum")
            logprob.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"sampler": sample, "update": learn}


def products(folder: str) -> dict[str, Callable[[dict], None]]:
    """The model's matrix products alone: each forward one once for a sampled token, three for an updated one."""
    from qwen2_model import load_model
    model = load_model(folder, dtype=torch.bfloat16)
    matrices = [w for name, w in model.named_parameters() if w.dim() == 2 and "embed_tokens" not in name]
    matrices.append(model.output_weight)

    @torch.inference_mode()
    def sample(case: dict) -> None:
        rows = {w.shape[1]: torch.randn(case["puzzles"] * ANSWERS, w.shape[1]).bfloat16() for w in matrices}
        for _ in range(case["limit"]):
            for w in matrices:
                rows[w.shape[1]] @ w.T

    @torch.inference_mode()
    def learn(case: dict) -> None:
        n = MICRO_BATCH * case["limit"]
        rows = {size: torch.randn(n, size).bfloat16() for w in matrices for size in w.shape}
        for _ in range(case["puzzles"] * ANSWERS // MICRO_BATCH):
            for w in matrices:
                rows[w.shape[1]] @ w.T, rows[w.shape[0]] @ w, rows[w.shape[0]].T @ rows[w.shape[1]]

    return {"sampler": sample, "update": learn}


if __name__ == "__main__":
    work = {"ours": ours, "transformers": theirs, "products": products}[sys.argv[1]](sys.argv[2])
    for line in sys.stdin:
        case, began = json.loads(line), time.perf_counter()
        work[case["work"]](case)
        print(json.dumps((case["puzzles"] * ANSWERS * case["limit"], time.perf_counter() - began, peak_gib())), flush=True)
