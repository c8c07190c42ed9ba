"""What a credit function may ask the model about a step's responses: the class behind batch.ask.

A first reading can skip it. The list of questions is in the docstring of TokenBatch, in rollout.py.
"""
import copy
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from plumbing.processes import gather, my_share
from qwen2_model import Qwen2, wide
from sampler import (Samples, distinct_texts, response_attention, response_logprobs, response_states, whole_groups)
from settings import Settings
from tasks.text import fingerprint

ROWS_AT_ONCE = 768  # continuations that are sampled together


def once(compute: Callable) -> property:
    """A property that is computed at its first use. Each use gets a copy, so nobody can change what others read."""
    def get(ask: "Queries") -> Any:
        if compute not in ask.computed:
            ask.computed[compute] = compute(ask)
        return copy.deepcopy(ask.computed[compute])
    return property(get, doc=compute.__doc__)


@dataclass
class Queries:
    """What a credit function may ask the model about the step's responses, such as `batch.ask.hidden`.

    Nothing is computed until a credit function asks for it; what is marked @once, and heads, are computed once. Several
    processes share the work, and each of them gets the whole result.
    """

    policy: Any
    puzzles: tuple  # Q
    samples: Samples  # B responses, B / Q to each puzzle
    s: Settings
    step: int
    continue_and_grade: Callable  # generate_and_grade of rollout.py, which imports this file
    grade: Callable  # the task's, or a coin toss
    computed: dict = field(default_factory=dict)  # so far

    def __post_init__(self):
        """Count the step's tokens so far: those sampled, and those read without gradient."""
        self.tokens_sampled = int(self.samples.mask.sum())
        self.tokens_read = sum(map(len, self.prompts))

    @once
    def prompts(self) -> list[list[int]]:
        """The tokens of each puzzle's prompt."""
        return [self.policy.prompt(puzzle) for puzzle in self.puzzles]

    @once
    def hidden(self) -> Tensor:
        """The model's last hidden state (B, T, D) before it emits each token, in float32 or wider, as heads are."""
        return wide(self.read(response_states, self.policy.model))

    @once
    def attention(self) -> Tensor:
        """Attention (B, T, T): [:, t, u] is how much the state that predicts token t attends to token u < t.

        Of the last layer, averaged over its heads.
        """
        return self.read(response_attention, self.policy.model)

    @torch.no_grad()
    def head(self, name: str) -> Tensor:
        """What a head of methods/heads.py says before each token (B, T), 0 on padding."""
        if name not in self.policy.heads:
            raise ValueError(f'no {name}: add needs=("{name}",) to the decorator of this credit function')
        if name not in self.computed:
            self.computed[name] = self.policy.heads[name].read(self.hidden, self.samples.mask)
        return self.computed[name].clone()

    @once
    def reference_logprob(self) -> Tensor:
        """Log-prob (B, T) of each token under the reference model, 0 on padding."""
        if self.policy.reference is None:
            raise ValueError('no reference model: add needs=("reference",) to the decorator of this credit function')
        return self.read(response_logprobs, self.policy.reference)

    def logprob_without(self, rows: Tensor, hide: Tensor) -> Tensor:
        """Log-probs (R, T) of the responses rows (R,) when no later token can attend to those marked in hide (R, T)."""
        if not len(rows):
            return self.samples.logprob[rows]  # (0, T)
        return self.read(response_logprobs, self.policy.model, rows, hide)

    def generator(self, name: str) -> torch.Generator:
        """A new generator, seeded by --seed, step and name: every call returns one in the same state."""
        seed = fingerprint(f"{name} {(self.s.seed, self.step)}") >> 1  # 63 bits, of which torch uses 32 on a CPU
        return torch.Generator().manual_seed(seed)

    def rollout_values(self, counts: Tensor, other: bool = False) -> Tensor:
        """The mean reward (B, T) of counts (B, T) continuations of the text before each token, 0 where there are none.

        In float64, so that the mean of equal rewards is that reward. A continuation may use the tokens that are left of
        the limit. other: it begins with any token but the actual one. Prefixes of similar length are sampled together.
        """
        counts = counts.cpu().long()  # (B, T)
        # k, the greatest common divisor of the counts (VinePPO's --k): `generate` samples k continuations of a prefix
        # as one group, which is 8% faster than each as its own.
        k = int(np.gcd.reduce(counts.flatten().numpy())) or 1
        starts = counts.nonzero().repeat_interleave(counts[counts > 0] // k, 0)  # (N, 2) response and position
        uniforms = torch.rand(len(starts), k, self.s.max_new_tokens, generator=self.generator("rollouts"),
                              dtype=torch.float64)  # (N, k, limit)
        total = torch.zeros(counts.shape, dtype=torch.float64)  # (B, T)
        order = starts[:, 1].argsort(stable=True)  # (N,) shortest prefix first
        for chunk in order.split(max(1, ROWS_AT_ONCE // k)) if len(order) else ():  # (n,)
            rewards = self.continue_from(starts[chunk], uniforms[chunk], other)  # (n, k)
            total.index_put_(tuple(starts[chunk].T), rewards.double().sum(1), accumulate=True)
        return (total / counts.clamp(min=1)).to(self.samples.tokens.device)

    def continue_from(self, starts: Tensor, uniforms: Tensor, other: bool) -> Tensor:
        """The rewards (n, k) of k continuations of each of n prefixes, with the random numbers uniforms (n, k, limit).

        starts (n, 2): a response, and the position of the first token that is sampled anew.
        """
        tokens, k = self.samples.tokens, uniforms.shape[1]
        rows, positions = starts.T  # (n,) each
        asked = (rows // (len(tokens) // len(self.puzzles))).tolist()  # n, the puzzle of each prefix
        prefixes = [tokens[row, :t].tolist() for row, t in starts.tolist()]  # n
        left = self.s.max_new_tokens - positions  # (n,)
        excluded = tokens[rows, positions].repeat_interleave(k) if other else None  # (n * k,)
        samples, grades = self.continue_and_grade(
            self.policy, [self.puzzles[q] for q in asked], uniforms[..., : left.max()].flatten(0, 1), prefixes,
            left.repeat_interleave(k), excluded, self.grade)
        self.tokens_sampled += int(samples.mask.sum())
        prompts = self.prompts
        # A text that begins another one is not read separately, so it doesn't count.
        texts, _ = distinct_texts([prompts[q] + prefix for q, prefix in zip(asked, prefixes)])
        self.tokens_read += sum(map(len, texts))
        return torch.tensor([grade["reward"] for grade in grades]).view(-1, k)

    @torch.no_grad()
    def read(self, reader: Callable, model: Qwen2, rows: Tensor | None = None, *per_row: Tensor) -> Tensor:
        """What a reader of sampler.py returns (R, T, ...) for the responses rows (R,), or for all.

        A reader is a function such as response_logprobs(model, prompts, prompt_of, tokens, mask, *per_row). It gets a
        few groups at a time; their results are put together again. per_row: arguments with a row for each response.
        """
        tokens, mask = self.samples.tokens, self.samples.mask  # (B, T) each
        G, device = len(tokens) // len(self.puzzles), tokens.device
        rows = torch.arange(len(tokens), device=device) if rows is None else rows.to(device)
        prompts = self.prompts  # a copy, so it is taken once
        chunks = whole_groups(rows // G, self.s.micro_batch)
        self.tokens_read += int(mask[rows].sum())
        for chunk in chunks:
            self.tokens_read += sum(len(prompts[q]) for q in (rows[chunk] // G).unique().tolist())
        results = []
        for chunk in my_share(chunks):  # (b,) places in rows
            response = rows[chunk]  # (b,)
            results.append(reader(model, prompts, response // G, tokens[response], mask[response],
                                  *(x[chunk] for x in per_row)).cpu())
        return torch.cat(gather(results)).to(device)  # gather undoes my_share, and chunks are of neighbours
