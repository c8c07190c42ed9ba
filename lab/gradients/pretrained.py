"""Rank, sparsity and phase 1 in a pretrained model, SmolLM2 (designs.md).

Run it:  python -m lab.gradients.pretrained                             pretrained.md, from data/
         python -m lab.gradients.pretrained --measure math              into data/: half an hour of one core, 5 GB
         python -m lab.gradients.pretrained --measure math --step 20 --model runs/smollm2-math/checkpoint    sparsity
"""
import csv
import dataclasses
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from grpo import compare
from lab.gradients.rank import CONTROLS_AT, controls, group_spectra, rank_rows, responses_of
from lab.updates import credit_gradients
from plumbing.flags import new_parser
from plumbing.progress import follow, one_sentence
from plumbing.report import write_csv
from rollout import TokenBatch, by_group, rollout
from sampler import response_logprobs
from settings import Settings
from train import load_policy

DATA = Path(__file__).parent / "data"
LIMITS = {"math": 128, "countdown": 200}  # tokens of a response
PROBLEMS, ANSWERS, GROUPS, READ = 24, 8, 8, 12  # sampled; to each; of those that differ; for phase 1
LAYER, SINGLE = "layers.15.", 3  # whose weights are decomposed; tokens of a response whose own loss is looked at


def sample(model: str, task: str) -> TokenBatch:
    """ANSWERS responses to each of PROBLEMS training problems."""
    s = Settings(model=model, task=task, answers=ANSWERS, max_new_tokens=LIMITS[task])
    policy = load_policy(s)
    batch = rollout(policy, policy.task.load("train", PROBLEMS), s, 0)
    return dataclasses.replace(batch, advantage=compare(batch))


def differing(batch: TokenBatch) -> dict[int, list[int]]:
    """By problem, its responses if their rewards differ: the first one and the first that differs from it lead."""
    found = {}
    for q, rewards in enumerate(by_group(batch, batch.reward).tolist()):
        others = sorted(range(1, len(rewards)), key=lambda i: rewards[i] == rewards[0])  # stable
        if len(set(rewards)) > 1:
            found[q] = [q * len(rewards) + i for i in (0, others[0], *sorted(others[1:]))]
    return found


def credits_of(group: TokenBatch, rng: np.random.Generator) -> dict[str, Tensor]:
    """By name, the credit (R, T) of a group: by its rewards, by every other response as right, and controls."""
    label = torch.arange(len(group.text)) % 2 == 0  # (R,)
    binary = compare(dataclasses.replace(group, reward=label.float()))
    found = {name: A[:, None] * group.mask for name, A in (("GRPO", group.advantage), ("GRPO, binary", binary))}
    return found | controls(group, rng) if len(label) == CONTROLS_AT else found


def sparsity(x: np.ndarray) -> dict[str, float]:
    """Of |x| (P,), Hoyer's measure and the Gini coefficient, 0 where all are equal and 1 where one has all; and the
    share below a hundredth of the root mean square."""
    x, n = np.sort(np.abs(x)), len(x)
    total, rms = x.sum(dtype=np.float64), np.sqrt(np.mean(x**2, dtype=np.float64))
    return {"Hoyer": (np.sqrt(n) - total / rms / np.sqrt(n)) / (np.sqrt(n) - 1),
            "Gini": 2 * np.dot(np.arange(1.0, n + 1), x) / n / total - (n + 1) / n,
            "share below 0.01 rms": np.searchsorted(x, 0.01 * rms) / n}


def sparsity_rows(batch: TokenBatch, chosen: dict[int, list[int]]) -> Iterator[dict]:
    """The sparsity of each group's gradient, as trained, over all parameters."""
    for q, rows in follow("sparsity", chosen.items()):
        group = responses_of(batch, rows)
        for (gradient,) in credit_gradients(group, (group.advantage[:, None] * group.mask)[None], len(rows)):
            yield {"puzzle": q, "levels": len(group.reward.unique()), "right": int(group.success.sum()),
                   **sparsity(gradient.numpy())}


def embedding_gradients(batch: TokenBatch, i: int, single: list[int]) -> tuple[Tensor, Tensor]:
    """Gradients at the input embeddings of response i: of the sum of its log-probs, at all its L tokens but the last
    (L - 1, D); of the next token's log-prob alone, at the tokens `single` (n, D)."""
    inputs, L = [], int(batch.mask[i].sum())
    hook = batch.ask.policy.model.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    logprob = response_logprobs(batch.ask.policy.model, batch.ask.prompts, batch.group[[i]], batch.tokens[[i]],
                                batch.mask[[i]])[0]  # (T,)
    hook.remove()

    def gradient(total: Tensor) -> Tensor:
        return torch.autograd.grad(total, inputs, retain_graph=True)[0][1 - L :]  # behind the prompt

    return gradient(logprob.sum()), torch.stack([gradient(logprob[t + 1])[t] for t in single])


def phase1_columns(batch: TokenBatch) -> dict[str, np.ndarray]:
    """Columns, a value per token that has a loss behind it: puzzle, position, relative (its position over the
    response's length), role; norm and mean of the gradient's components; next, the norm of the next loss's, or NaN."""
    found, rng = [], np.random.default_rng(0)
    for i in follow("phase 1", range(len(batch.text))):
        L = int(batch.mask[i].sum())
        if L > 1:
            single = rng.choice(L - 1, min(SINGLE, L - 1), replace=False)
            whole, alone = embedding_gradients(batch, i, single.tolist())
            following = torch.full((L - 1,), torch.nan).index_put((torch.from_numpy(single),), alone.norm(dim=1))
            t = torch.arange(L - 1)
            found.append((batch.group[i].expand(L - 1), t, t / L, batch.role[i, : L - 1], whole.norm(dim=1),
                          whole.mean(1), following))
    names = "puzzle", "position", "relative", "role", "norm", "mean", "next"
    return {name: torch.cat(x).numpy() for name, x in zip(names, zip(*found))}


def measure(model: str, task: str, step: int) -> None:
    """Write a task's files into data/; after training only the sparsity's."""
    batch = sample(model, task)
    differ = differing(batch)
    chosen = dict(list(differ.items())[:GROUPS])
    print(f"the rewards of {len(differ)} of {PROBLEMS} groups differ; {int(batch.success.sum())} responses are right")
    DATA.mkdir(exist_ok=True)
    write_csv(list(sparsity_rows(batch, chosen)), DATA / f"sparsity-{task}-{step}.csv")
    if step == 0:
        rows = rank_rows(group_spectra(responses_of(batch, sum(chosen.values(), [])), credits_of, LAYER,
                                       torch.bfloat16))
        write_csv([{name: f"{x:.5g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows],
                  DATA / f"ranks-{task}.csv")
        np.savez_compressed(DATA / f"phase1-{task}.npz",
                            **phase1_columns(responses_of(batch, [*range(READ * ANSWERS)])))


@one_sentence()
def main() -> None:
    """Measure, or write the tables."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--measure", choices=LIMITS, help="the task that is measured; without it the tables are written")
    parser.add_argument("--model", default="weights/smollm2", help="a model folder (default weights/smollm2)")
    parser.add_argument("--step", type=int, default=0, help="steps that it has been trained: above 0 sparsity alone")
    args = parser.parse_args()
    if args.measure:
        measure(args.model, args.measure, args.step)


if __name__ == "__main__":
    main()
