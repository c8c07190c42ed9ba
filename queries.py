"""Graded samples, and what a credit function may ask the model about them.

Every response of the project is sampled and graded here: those of a training step, of an evaluation, and the
continuations that VinePPO draws. `Queries` is the `ask` of a TokenBatch; mitigations.py lists what it answers, such as

    batch.ask.hidden                      (B, T, D) the state that predicts each token, for a critic
    batch.ask.rollout_values(cuts, k)     (B, T) the mean reward of k continuations, for VinePPO

Run it:  python train.py --mitigation vineppo
"""
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from countdown_task import Codec, Puzzle, fingerprint, reward
from critic import Critic, Importance
from plumbing.processes import gather, my_share, world
from qwen2_model import Qwen2
from sampler import (PromptCache, ResponseCache, Samples, by_length, distinct_texts, generate, response_attention,
                     response_logprobs, response_states)

ROWS_AT_ONCE = 768  # continuations that are sampled together


# --------------------------------------------------------------------------------------------- graded samples


def respond(model: Qwen2, codec: Codec, puzzles: list[Puzzle], uniforms: Tensor,
            prefixes: list[list[int]] | None = None, limit: Tensor | None = None,
            excluded: Tensor | None = None,
            grade: Callable | None = None) -> tuple[Samples, list[dict[str, float]]]:
    """Sample and grade B responses, one per row of uniforms (B, T), B / Q to each of Q puzzles.

    prefixes: for each puzzle, the tokens that its responses begin with. limit (B,): the most new tokens each may get.
    excluded (B,): a token that may not be the first new one. Returns the samples (new tokens only) and the grades of
    each whole response.
    """
    prefixes = prefixes or [[]] * len(puzzles)
    prompts = [codec.prompt(puzzle) + prefix for puzzle, prefix in zip(puzzles, prefixes)]
    samples = sample(model, prompts, uniforms, codec.end_tokens, limit, excluded)
    return samples, decode_and_grade(codec, puzzles, samples, prefixes, grade)[1]


def decode_and_grade(codec: Codec, puzzles: list[Puzzle], samples: Samples, prefixes: list[list[int]],
                     grade: Callable | None) -> tuple[list[tuple[str, list]], list[dict[str, float]]]:
    """Text with token spans, and grades, of each of B responses, its puzzle's prefix included."""
    lengths, G = samples.mask.sum(1).tolist(), len(samples.tokens) // len(puzzles)
    tokens = [row[:length] for row, length in zip(samples.tokens.tolist(), lengths)]
    decoded = [codec.decode(prefixes[i // G] + row) for i, row in enumerate(tokens)]
    return decoded, [(grade or reward)(text, *puzzles[i // G]) for i, (text, _) in enumerate(decoded)]


def sample(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
           limit: Tensor | None = None, excluded: Tensor | None = None) -> Samples:
    """`generate`, with the prompts shared among the processes. Every process returns the samples of all of them."""
    G, mine = len(uniforms) // len(prompts), my_share(list(range(len(prompts))))
    rows = torch.tensor([q * G + g for q in mine for g in range(G)], dtype=torch.long)  # (M,) of this process
    limit, excluded = (None if x is None else x[rows] for x in (limit, excluded))
    samples = None  # a process without a prompt has none
    if mine:
        samples = generate(model, [prompts[q] for q in mine], uniforms[rows], end_tokens, limit, excluded)
    if world()[1] > 1:
        samples = gather_samples(samples, G, model.output_weight.device)
    if not samples.logprob.isfinite().all():  # all processes hold the same samples, so all of them raise
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return samples


def gather_samples(samples: Samples | None, G: int, device: torch.device) -> Samples:
    """The samples of all processes, in the order of the prompts, padded on the right to the longest response."""
    # For each prompt of this process its six tensors, of G rows each. Cloned, because a pickled view carries the
    # storage of the whole tensor with it.
    own = [[x.clone() for x in group] for group in zip(*(field.cpu().split(G) for field in samples or ()))]
    groups = gather(own)  # in the order of the prompts: gather undoes my_share
    T = max(tokens.shape[1] for tokens, *_ in groups)

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, T - x.shape[1])) if x.dim() == 2 else x

    return Samples(*(torch.cat([padded(x) for x in field]).to(device) for field in zip(*groups)))


# --------------------------------------------------------------------------------------------------- queries


@dataclass
class Queries:
    """What a credit function may ask the model about the step's responses, such as `batch.ask.hidden`.

    Nothing is computed until a credit function asks for it, and each attribute is computed at most once. Several
    processes share the work, and each of them gets the whole result.
    """

    model: Qwen2
    codec: Codec
    puzzles: list[Puzzle]  # Q
    samples: Samples  # B responses, B / Q to each puzzle
    limit: int  # the most tokens a response may have
    key: tuple[int, int]  # seed and step
    reference: Qwen2 | None = None  # a frozen copy of the start model
    critic: Critic | None = None
    importance: Importance | None = None
    micro_batch: int = 16  # responses in one forward pass
    grade: Callable | None = None  # replaces countdown_task.reward, for continuations too

    def __post_init__(self):
        """Count the step's tokens so far: those sampled, and those run through the model without gradient."""
        self.tokens_sampled, self.tokens_read = int(self.samples.mask.sum()), sum(map(len, self.prompts))

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The tokens of each puzzle's prompt."""
        return [self.codec.prompt(puzzle) for puzzle in self.puzzles]

    @cached_property
    def hidden(self) -> Tensor:
        """The model's last hidden state (B, T, D) before it emits each token."""
        return self.read(response_states, self.model)

    @cached_property
    def attention(self) -> Tensor:
        """Attention (B, T, T): [:, t, u] is how much the state that predicts token t attends to token u < t.

        Of the last layer, averaged over its heads.
        """
        columns = self.samples.tokens.shape[1]  # T, also where a micro-batch is shorter
        return self.read(partial(response_attention, columns=columns), self.model)

    @cached_property
    def values(self) -> Tensor:
        """The critic's estimate (B, T) of the reward before each token, 0 on padding."""
        if self.critic is None:
            raise ValueError('no critic: add needs=("critic",) to the decorator of this credit function')
        return self.critic.values(self.hidden, self.samples.mask)

    @cached_property
    @torch.no_grad()
    def importance_weights(self) -> Tensor:
        """How much the importance head looks at each token (B, T); sums to 1 over each response."""
        if self.importance is None:
            raise ValueError('no importance head: add needs=("importance",) to the decorator of this function')
        return self.importance.weights(self.hidden, self.samples.mask)

    @cached_property
    def reference_logprob(self) -> Tensor:
        """Log-prob (B, T) of each token under the reference model, 0 on padding."""
        if self.reference is None:
            raise ValueError('no reference model: add needs=("reference",) to the decorator of this function')
        return self.read(response_logprobs, self.reference)

    def logprob_without(self, rows: Tensor, hide: Tensor) -> Tensor:
        """Log-probs (R, T) of the responses rows (R,) when no later token can attend to those marked in hide (R, T)."""
        return self.read(response_logprobs, self.model, rows, hide)

    def generator(self, name: str) -> torch.Generator:
        """A new generator, seeded by --seed, step and name: every call returns one in the same state."""
        return torch.Generator().manual_seed(fingerprint(f"{name} {self.key}") >> 1)

    def rollout_values(self, cuts: Tensor, k: int) -> Tensor:
        """For each token where cuts (B, T) is True, the mean reward of k continuations of the text before it, else 0.

        A continuation may use the tokens that are left of the limit. Prefixes of similar length are sampled together.
        """
        value, where = torch.zeros(cuts.shape), cuts.cpu().nonzero()  # (B, T), (C, 2)
        uniforms = torch.rand(len(where), k, self.limit, generator=self.generator("rollouts"), dtype=torch.float64)
        if not len(where):
            return value.to(cuts.device)
        G, order = len(self.samples.tokens) // len(self.puzzles), where[:, 1].argsort()  # (C,) shortest prefix first
        for chunk in order.split(max(1, ROWS_AT_ONCE // k)):  # chunk: (c,)
            rows, positions = where[chunk].T  # (c,), (c,)
            asked = (rows // G).tolist()  # c, the puzzle of each prefix
            prefixes = [self.samples.tokens[row, :t].tolist() for row, t in where[chunk].tolist()]  # c
            left = self.limit - positions  # (c,)
            own = uniforms[chunk, :, : left.max()].flatten(0, 1)  # (c * k, left.max())
            samples, grades = respond(self.model, self.codec, [self.puzzles[q] for q in asked], own, prefixes,
                                         left.repeat_interleave(k), grade=self.grade)
            value[rows, positions] = torch.tensor([grade["reward"] for grade in grades]).view(-1, k).mean(1)
            self.tokens_sampled += int(samples.mask.sum())
            texts, _ = distinct_texts([self.prompts[q] + prefix for q, prefix in zip(asked, prefixes)])
            self.tokens_read += sum(map(len, texts))
        return value.to(cuts.device)

    @torch.no_grad()
    def read(self, reader: Callable, model: Qwen2, rows: Tensor | None = None, *per_row: Tensor) -> Tensor:
        """What a reader of sampler.py returns (R, T, ...) for R responses, chosen by their index rows (R,), or for all.

        per_row: further arguments of the reader, with a row for each response.
        """
        tokens, mask = self.samples.tokens, self.samples.mask  # (B, T) each
        G, device = len(tokens) // len(self.puzzles), tokens.device
        rows = torch.arange(len(tokens), device=device) if rows is None else rows.to(device)
        prompts, lengths = PromptCache(model, self.prompts), mask[rows].sum(1)  # (R,)
        self.tokens_read += sum(map(len, self.prompts)) + int(lengths.sum())
        chunks, results = by_length(lengths, self.micro_batch), []
        for chunk, T in my_share(chunks):  # chunk: (b,)
            response = rows[chunk]  # (b,)
            cache, others = ResponseCache(prompts, response // G), (x[chunk, :T] for x in per_row)
            results.append(reader(model, cache, tokens[response, :T], mask[response, :T], *others).cpu())
        results = gather(results)  # of all processes, in the order of the chunks: gather undoes my_share
        result = results[0].new_zeros(len(rows), *tokens.shape[1:], *results[0].shape[2:])  # (R, T, ...)
        for (chunk, T), part in zip(chunks, results):
            result[chunk.cpu(), :T] = part
        return result.to(device)
