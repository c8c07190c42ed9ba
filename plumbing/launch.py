"""Checks before the first step of a run: what can't work is refused in one sentence.

A first reading can skip it. `s` is the Settings.
"""
import os
import random
import timeit
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator

import numpy as np
import torch

from plumbing.files import require
from plumbing.flags import check_range
from plumbing.terminal import follow
from plumbing.runs import PATHS
from plumbing.task_file import load_task
from settings import Settings

MODELS = Path(__file__).parents[1] / "models"  # the bundled ones, NAME-tiny for the task NAME
BUNDLED = MODELS / "countdown-tiny"


def check(s: Settings) -> None:
    """ValueError for settings that can't work."""
    size = os.environ.get("WORLD_SIZE", "1")  # which torchrun and accelerate set
    require(size == "1", f"train.py trains in one process, but WORLD_SIZE is {size}: start it with WORLD_SIZE=1 "
            "python, or take your function to TRL or verl, which train in several, see docs/trl.md")
    check_range(s, ("questions", "responses", "max_new_tokens", "updates_per_batch", "micro_batch", "eval_problems"),
                lowest=1)
    check_range(s, ("steps", "seed", "lr", "weight_decay", "kl", "shaping_beta", "clip_high", "eval_every",
                    "checkpoint_every", "state_every", "warmup_steps", "pass_at", "lora_rank"), lowest=0)
    check_range(s, ("beta1", "beta2", "clip_low"), lowest=0, below=1)
    check_range(s, ("max_grad_norm", "temperature", "lora_alpha"), lowest=1e-6)
    require(s.warmup_steps <= s.steps or not s.steps,
            f"--warmup_steps {s.warmup_steps} must be at most --steps {s.steps}")
    require(max(s.questions * s.responses, s.max_new_tokens) <= 2**16,  # the credit log numbers them with 16 bits
            "--questions times --responses, and --max_new_tokens, must be at most 65,536")
    require(s.shaping == "none" or s.advantage not in ("maxrl", "gdpo"), f"--advantage {s.advantage} compares "
            f"{'success alone' if s.advantage == 'maxrl' else 'the parts of the reward'}: it takes no --shaping")
    require(s.reward == "graded" or s.advantage != "gdpo", "--advantage gdpo compares parts, which a coin has not")
    require(s.responses > 1 or not s.steps, "--responses 1 leaves no group to compare with: ask for 2 or more")


def with_model(s: Settings) -> Settings:
    """The settings with the folder of a model: where --model names none, of the one in models/ made for the task."""
    folder = MODELS / f"{s.task}-tiny"
    if not s.model and not folder.is_dir():
        load_task(s.task)  # which says so if there is no such task
        raise ValueError(f"the task {s.task} has no model in models/: name one with --model, or make one "
                         f"with python -m models.warm_start --task {s.task} --out "
                         f"{'models/mine, and name that' if s.task.endswith('.py') else f'models/{folder.name}'}")
    return replace(s, model=s.model or str(folder))


def check_there(s: Settings, run: Path) -> None:
    """ValueError where a file of a run to resume has moved. (Whether it is the same, the run's checksums say.)"""
    for name in [name for name in PATHS if name != "task" or s.task.endswith(".py")]:
        path = getattr(s, name)
        require(Path(path).exists(), f"{run} began with {path}, which is not there: say where it is now with --{name}")


def arithmetic_for(dtype: str, device: str) -> str:
    """The dtype of products of weights in `dtype`: the same, but float32 on a processor that is slow in bfloat16.

    One that has no arithmetic for bfloat16 takes 4 to 8 times as long.
    """
    if dtype != "bfloat16" or device != "cpu":
        return dtype
    return "float32" if product_seconds(torch.bfloat16) > 1.5 * product_seconds(torch.float32) else dtype


def product_seconds(dtype: torch.dtype) -> float:
    """The seconds of a small product, the shortest of three."""
    x, w = torch.ones(32, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    return min(timeit.repeat(lambda: x @ w.T, number=1, repeat=4)[1:])  # the first one also prepares


def announce(weights: Iterable[torch.Tensor], parts: dict[str, float], training: int, heldout: int, run: Path,
             differences: dict, resumed_after: int | None) -> None:
    """Print what a run is. parts: weights of the reward's. training, heldout: numbers of puzzles. differences: the
    settings without their defaults."""
    print(f"{sum(w.numel() for w in weights):,} parameters, {training} puzzles to train on, into {run}")
    print("reward:", " + ".join(f"{weight:g} {part}" for part, weight in parts.items()))
    print("settings:", ", ".join(f"{name}={value}" for name, value in differences.items()) or "all at their defaults")
    points = 100 * 1.96 * (2 * 0.25 / heldout) ** 0.5  # half of the interval of a difference of two rates near 50%
    if points > 10:
        print(f"with {heldout} held-out puzzles two measurements differ by up to {points:.0f} points by chance: ten "
              "would not show. --eval_problems asks for more puzzles, where there are more")
    if resumed_after is not None:
        print(f"resuming after step {resumed_after}{'' if resumed_after else ', for no state was written yet'}")
    print(end="", flush=True)


@contextmanager
def as_if_nothing_was_drawn(device: torch.device) -> Iterator[None]:
    """Afterwards the generators of random, numpy and torch are what they were before."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def check_memory(s: Settings, first: Any, second: Any, ask: Callable[[Any], dict[str, torch.Tensor]]) -> None:
    """ValueError where one of the run's functions, asked about one batch, about another, and about the first again with
    the same random numbers, does not answer as before: it remembers something. ask: returns what they make of a batch,
    by flag. Rewards are drawn, for short responses seldom earn any; the second batch has the highest and lowest."""
    said = []
    for batch in (first, second, second, first):  # the second twice, so that a mean of all does not come back
        reward = torch.rand(len(batch.reward), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        reward = torch.tensor([1, 0, 0.5] * 2) if batch is second else 0.25 + reward / 2  # (B,) of two groups of three
        drawn = replace(batch, reward=reward.to(batch.reward), success=(reward > reward.median()).to(batch.success))
        drawn.grades = batch.grades | {"reward": drawn.reward, "answer": drawn.success.double()}
        with as_if_nothing_was_drawn(batch.reward.device):
            said.append({flag: found.clone() for flag, found in ask(drawn).items()})
    for flag, before in said[0].items():
        require(torch.allclose(before, said[-1][flag], rtol=1e-5, atol=1e-8, equal_nan=True),
                f"--{flag} {getattr(s, flag)} gives another answer to the same question: what it remembers, or a "
                "generator of its own, would be lost on --resume. A head keeps it: see docs/extend.md")


def lacking(needs: tuple[str, ...], task: ModuleType, heads: Iterable[str]) -> list[str]:
    """What a credit function needs that is neither a head, nor the reference, nor a function of the task."""
    return [need for need in needs if need not in heads and need != "reference" and not hasattr(task, need)]


def check_puzzles(policy: Any, drawn: list, heldout: list, s: Settings) -> None:
    """ValueError when a puzzle that a run will ask, in training or held out, can't be used or doesn't fit the model."""
    asked = [(s.data, puzzle) for puzzle in drawn] + [(s.eval_data or s.data, puzzle) for puzzle in heldout]
    for file, puzzle in follow("checking puzzles", [pair for pair in asked if pair[0]]):  # a task's own are valid
        try:
            policy.task.check(puzzle)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    check_lengths(policy, drawn + heldout, s)


def check_lengths(policy: Any, puzzles: list, s: Settings) -> None:
    """ValueError when prompt and response don't fit the model, or the tokenizer doesn't fit its vocabulary."""
    size, c = policy.tokenizer.size, policy.model.config
    require(size <= c.vocab_size, f"the tokenizer in {s.model} has {size} tokens, the model {c.vocab_size}: add the "
            "others with resize_token_embeddings of transformers")
    longest, limit = max(len(policy.prompt(puzzle)) for puzzle in puzzles), c.max_position_embeddings
    require(longest + s.max_new_tokens <= limit, f"a prompt of {longest} tokens and --max_new_tokens "
            f"{s.max_new_tokens} exceed the model's limit of {limit} tokens: lower --max_new_tokens")
