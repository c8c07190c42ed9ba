"""What the rooms ask of a fixed model: responses, gradients, heads that some methods need, and the methods allowed."""
from pathlib import Path
from types import ModuleType
from typing import Iterable, Iterator

import torch
from torch import Tensor

from grpo import compare
from methods.registry import CREDIT_FUNCTIONS
from methods.credit_function import CreditFunction
from methods.heads import HEADS, Critic, Importance, load_head, save_head
from methods.queries import Queries
from plumbing.checks import required
from plumbing.launch import lacking
from plumbing.terminal import follow
from rollout import Policy, TokenBatch, rollout
from sampler import read_responses
from settings import Settings

SIZE, PUZZLES = 96, 100  # responses in a batch; batches after which the puzzles repeat
FITTED = ("critic", "importance")  # the heads that are fitted here
LIMIT = Settings.max_new_tokens


def sample(policy: Policy, puzzles: list, answers: int, key: tuple[int, int], advantage: str = "grpo") -> TokenBatch:
    """Responses to puzzles; key: seed and step. The policy is its own reference."""
    policy, (seed, step) = policy._replace(reference=policy.model), key
    s = Settings(seed=seed, responses=answers, max_new_tokens=LIMIT)
    batch = rollout(policy, puzzles, s, step)
    batch.ask = Queries(policy, batch, s, step)
    batch.advantage = compare(batch, advantage)
    return batch


def credit_gradients(batch: TokenBatch, credits: Tensor, size: int) -> Iterator[Tensor]:
    """For every `size` responses, which must answer one puzzle, the gradients (M, P) of sum credit * log pi in all P
    parameters, one for each of the credits (M, B, T)."""
    model = batch.ask.policy.model
    for rows in torch.arange(len(batch.text)).split(size):
        logprob = read_responses(model, batch, rows)  # (size, T)
        parts = [torch.autograd.grad(logprob, list(model.parameters()), credit[rows], retain_graph=True)
                 for credit in credits]
        yield torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])


def fitted_methods(task: ModuleType, heads: Iterable[str] = FITTED) -> dict[str, CreditFunction]:
    """The methods that a task and these heads allow; without `oracle`, which is the truth itself."""
    return {name: method for name, method in CREDIT_FUNCTIONS.items()
            if name != "oracle" and not lacking(required(method, {}), task, heads)}


def find_heads(folder: Path, policy: Policy, batches: int) -> dict[str, Critic | Importance]:
    """The heads FITTED in a folder, or new ones that learned from batches of a fixed model's responses, saved there."""
    if all((folder / f"{name}.safetensors").is_file() for name in FITTED):
        return {name: load_head(name, folder, policy.model) for name in FITTED}
    print(f"no critic in {folder}: fitting one to {batches} batches of responses", flush=True)
    size, device = policy.model.config.hidden_size, policy.model.output_weight.device
    heads = {name: HEADS[name](size).to(device) for name in FITTED}
    puzzles = policy.task.load("train", SIZE * PUZZLES)
    for i in follow("fitting the critic", range(batches)):
        batch = sample(policy, puzzles[i % PUZZLES :: PUZZLES], 1, (0, i + 1))
        for head in heads.values():
            head.learn(batch)
    for name, head in heads.items():
        save_head(name, head, folder)
    return heads
