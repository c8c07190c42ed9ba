"""The speed of our sampler beside that of transformers' generate, with the bundled model, as ratios.

Shared machines are noisy. So the two take turns, each round gives a ratio, and the table has the median, the smallest
and the largest of these. Rates are in sampled tokens per second, end tokens included.

Run it:  python -m lab.speed.benchmark      a few minutes on two idle cores; pip install -r tests/requirements.txt
"""
import os
import statistics
import time
from pathlib import Path
from typing import Callable

import torch
from torch.nn.utils.rnn import pad_sequence

import countdown_task
from plumbing.flags import new_parser
from plumbing.launch import BUNDLED
from plumbing.progress import follow
from plumbing.report import Table
from rollout import Policy, draw_uniforms
from sampler import generate
from settings import Settings
from start import load_policy

Q, G, WARM_UPS, ROUNDS = 12, 8, 2, 7
CASES = {"64 tokens": (64, True), "real lengths": (Settings.max_new_tokens, False)}  # the limit; whether all reach it
NOTE = (f"Written by `python -m lab.speed.benchmark`: {Q} puzzles, {G} responses each. Tokens per second, medians of "
        f"{ROUNDS} rounds, in which the two took turns; the median, the smallest and the largest of their ratios.")


def ours(policy: Policy, puzzles: list, limit: int, fixed: bool, seed: int) -> int:
    """Sample with our sampler; returns how many tokens the responses have."""
    prompts, ends = [policy.prompt(puzzle) for puzzle in puzzles], [] if fixed else policy.tokenizer.end_tokens
    return int(generate(policy.model, prompts, draw_uniforms(seed, 0, Q, G, limit), ends).mask.sum())


def theirs(network: torch.nn.Module, policy: Policy, puzzles: list, limit: int, fixed: bool, seed: int) -> int:
    """The same with transformers' generate."""
    torch.manual_seed(seed)
    stop, prompts = policy.tokenizer.end_tokens, [torch.tensor(policy.prompt(p)) for p in puzzles for _ in range(G)]
    rows, real = (pad_sequence(some, True, padding_side="left")  # (B, P)
                  for some in (prompts, [torch.ones_like(prompt) for prompt in prompts]))
    ends = {"min_new_tokens": limit} if fixed else {"eos_token_id": stop}
    sampled = network.generate(rows, attention_mask=real, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                               repetition_penalty=1.0, max_new_tokens=limit, pad_token_id=0, **ends)
    is_end = torch.isin(sampled[:, rows.shape[1] :], torch.tensor(stop)) & (not fixed)  # (B, T)
    return int((is_end.cumsum(1) - is_end.long() == 0).sum())  # tokens with no end before them


def rate(work: Callable[..., int], *case) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    return work(*case) / (time.perf_counter() - began)


def row(case: str, pairs: list[tuple[float, float]]) -> list[str]:
    """A line of the table, from our rate and theirs in each round."""
    ratios, medians = [a / b for a, b in pairs], [f"{statistics.median(rates):,.0f}" for rates in zip(*pairs)]
    return [case, *medians, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]


def main() -> None:
    """Measure both cases, and write the table."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/speed.md"), help="file to write (default runs/speed.md)")
    out = parser.parse_args().out
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    from transformers import AutoModelForCausalLM  # after the flags were read: it takes seconds
    network, policy = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32), load_policy(Settings())
    puzzles, rows = countdown_task.load("train", Q), []
    for name, case in CASES.items():
        pairs = [(rate(ours, policy, puzzles, *case, i), rate(theirs, network, policy, puzzles, *case, i))
                 for i in follow(name, range(WARM_UPS + ROUNDS))]
        rows.append(row(name, pairs[WARM_UPS:]))
    text = str(Table("Speed", NOTE, ["case", "ours", "generate", "ratio", "min to max"], rows))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out}")


if __name__ == "__main__":
    main()
