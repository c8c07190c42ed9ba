"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, in the one batch that credit functions look at.

`generate` of sampler.py samples tokens. Here they become graded responses: those of a training step (`rollout`, which
returns a TokenBatch), of an evaluation, and the continuations that VinePPO asks for (`generate_and_grade`).

Read TokenBatch first. Its field `ask` is a Queries, the last class of this file: what a credit function may ask the
model about the step's responses, such as

    batch.ask.hidden                      (B, T, D) the state that predicts each token, for a critic
    batch.ask.rollout_values(counts)      (B, T) the mean reward of continuations from there, for VinePPO

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response, D hidden size. `s` is the
Settings of train.py. The task is a module such as countdown_task.py; the code here knows nothing of Countdown.

Run it:  python train.py --mitigation vineppo
"""
import copy
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbing.processes import gather, my_share, world
from plumbing.progress import Progress
from plumbing.task_file import check_grade, check_roles
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2
from sampler import (PromptCache, ResponseCache, Samples, by_length, distinct_texts, generate, response_attention,
                     response_logprobs, response_states)
from tasks.text import fingerprint

ROWS_AT_ONCE = 768  # continuations that are sampled together
PATIENCE = 5.0  # seconds that a step may sample before it says how far it is
EVALUATION = 2**32 - 1  # the step number for the random numbers of evaluation; no training step reaches it


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to T tokens.

    Column t is the t-th token of the response; padding is 0 or False. Nothing carries a gradient. The batch is built
    once a step, before it is cut into micro-batches. The G responses to a puzzle are neighbours.

    `ask` runs the model again. Only the functions that use it pay for it, and each answer is computed once a step:
    ask.hidden                       (B, T, D) last hidden state of the model, before it emits each token
    ask.attention                    (B, T, T) [:, t, u]: how much the state that predicts token t attends to u < t, in
                                     the last layer, mean over its heads
    ask.head(name)                   (B, T) what a head of methods/heads.py says before each token, 0 on padding, such
                                     as the expected reward of "critic"
    ask.reference_logprob            (B, T) log-probability of each token under the reference model
    ask.logprob_without(rows, hide)  (R, T) log-probabilities of the responses rows (R,), repeats allowed, when no later
                                     token can attend to those marked in hide (R, T)
    ask.rollout_values(counts)       (B, T) the mean reward of counts (B, T) continuations of the text before each
                                     token, column 0 too; 0 where there are none
    ask.generator(name)              torch.Generator on the CPU, seeded by --seed, step and name
    """

    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    reward: Tensor  # (B,) what the task's `grade` returns, or a coin toss (--reward random)
    success: Tensor  # (B,) 1 where the answer is right (or the coin shows heads), else 0
    format: Tensor  # (B,) how much of the requested layout it has, from 0 to 1
    group: Tensor  # (B,) int64, index of the puzzle that the response answers
    puzzles: tuple  # Q, the task's
    task: ModuleType  # such as countdown_task
    role: Tensor  # (B, T) int8, of tasks/text.py: FILLER (prose), REASONING (arithmetic) or STRUCTURE (tags, end token)
    in_answer: Tensor  # (B, T) bool, whether the token belongs to the graded answer: in Countdown, from <answer> on
    text: tuple[str, ...]  # per response, decoded, end token removed
    spans: tuple[tuple[tuple[int, int], ...], ...]  # per response, the character span of each token in the text
    normalize: str  # how `reweight` of mitigations.py rescales weights
    ask: Any  # the Queries below
    advantage: Tensor | None = None  # (B,) how each reward compares: set by `compare` of grpo.py


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G responses to each of Q puzzles."""
    return values.view(len(batch.puzzles), -1, *values.shape[1:])


def has_variance(rewards: Tensor) -> Tensor:
    """Which puzzles (Q, ...) have responses of unequal rewards (Q, G, ...): the others teach plain GRPO nothing."""
    return rewards.amax(1) > rewards.amin(1)


class Policy(NamedTuple):
    """The policy, RL's word for the model that acts and learns, and what belongs to it."""

    model: Qwen2
    tokenizer: Tokenizer
    task: ModuleType
    heads: dict[str, nn.Module] = {}  # those of methods/heads.py that the credit function needs, by name
    reference: Qwen2 | None = None  # a frozen copy of the start model, where the credit function or --kl needs it

    def prompt(self, puzzle: Any) -> list[int]:
        """The tokens of a puzzle's prompt."""
        return self.tokenizer.start + self.tokenizer.encode(*self.written_prompt(puzzle))

    def written_prompt(self, puzzle: Any) -> tuple[str, ...]:
        """The text of a puzzle's prompt, in pieces as the task cuts it: every second one is from somebody's data."""
        found = self.task.prompt(puzzle, self.tokenizer.chat)
        pieces = (found,) if isinstance(found, str) else found
        if not isinstance(pieces, tuple) or not all(isinstance(piece, str) for piece in pieces) or not "".join(pieces):
            raise ValueError(f"the task's prompt must return text, not {found!r:.50}")
        return pieces


# ---------------------------------------------------------------------------------------------------- a step


def draw_puzzles(training: list, s: Any, step: int) -> list:
    """The Q puzzles of a step. Every epoch shuffles the training puzzles anew; the order depends on the seed alone."""
    puzzles = []
    for i in range((step - 1) * s.questions, step * s.questions):  # i counts the puzzles since the run began
        epoch, place = divmod(i, len(training))
        if not puzzles or place == 0:  # the step begins, or an epoch does
            order = np.random.default_rng([s.seed, 0, epoch]).permutation(len(training))
        puzzles.append(training[order[place]])
    return puzzles


def rollout(policy: Policy, puzzles: list, s: Any, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --answers to each of Q puzzles."""
    # The random number behind each token is drawn here, so that no response depends on what is sampled beside it.
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.answers, s.max_new_tokens)  # (B, max_new_tokens)
    progress = Progress("sampling", len(uniforms), patience=PATIENCE)
    samples = generate_shared(policy, [policy.prompt(puzzle) for puzzle in puzzles], uniforms,
                              watch=progress.part(0, len(uniforms)))
    return token_batch(Queries(policy, tuple(puzzles), samples, s, step))  # which the batch keeps, as batch.ask


def draw_uniforms(seed: int, step: int, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1).

    Each puzzle has its own generator, so a response depends neither on the other puzzles nor on how many
    processes share the step.
    """
    rows = [np.random.default_rng([seed, step, q]).random((G, length)) for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


def token_batch(ask: "Queries") -> TokenBatch:
    """Decode and grade the responses that a Queries holds: a TokenBatch, which keeps it as `batch.ask`.

    (`compare` of grpo.py adds the advantage.)
    """
    samples, puzzles, task = ask.samples, ask.puzzles, ask.policy.task
    (B, T), Q, device = samples.tokens.shape, len(puzzles), samples.tokens.device
    decoded, grades = decode_and_grade(ask.policy, puzzles, samples, [[]] * Q, ask.grade)
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)  # (B, T) each
    for i, (text, spans) in enumerate(decoded):
        role[i, : len(spans)], in_answer[i, : len(spans)] = check_roles(task.roles(text, [*spans]), len(spans))
    graded = torch.tensor([[g["reward"], g["answer"], g["format"]] for g in grades], device=device)  # (B, 3)
    return TokenBatch(
        **samples._asdict(),  # tokens, mask, logprob, entropy, logit_grad, ended
        reward=graded[:, 0], success=graded[:, 1], format=graded[:, 2],
        group=torch.arange(Q, device=device).repeat_interleave(B // Q), puzzles=tuple(puzzles), task=task,
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=tuple(text for text, _ in decoded), spans=tuple(tuple(spans) for _, spans in decoded),
        normalize=ask.s.normalize, ask=ask)


# --------------------------------------------------------------------------------------------- graded responses


def generate_and_grade(policy: Policy, puzzles: list, uniforms: Tensor, prefixes: list[list[int]] | None = None,
                       limit: Tensor | None = None, excluded: Tensor | None = None,
                       grade: Callable | None = None, greedy: bool = False,
                       watch: Callable | None = None) -> tuple[Samples, list[dict[str, float]]]:
    """Sample and grade B responses, one per row of uniforms (B, T), B / Q to each of Q puzzles.

    prefixes: for each puzzle, the tokens that its responses begin with. limit (B,): the most new tokens each may get.
    excluded (B,): a token that may not be the first new one. grade: replaces the task's. greedy, watch: see `generate`.
    Returns the samples (new tokens only) and the grades of each whole response.
    """
    prefixes = prefixes or [[]] * len(puzzles)
    prompts = [policy.prompt(puzzle) + prefix for puzzle, prefix in zip(puzzles, prefixes)]
    samples = generate_shared(policy, prompts, uniforms, limit, excluded, greedy, watch)
    return samples, decode_and_grade(policy, puzzles, samples, prefixes, grade or policy.task.grade)[1]


def decode_and_grade(policy: Policy, puzzles: list, samples: Samples, prefixes: list[list[int]],
                     grade: Callable) -> tuple[list[tuple[str, list]], list[dict[str, float]]]:
    """Text with token spans, and grades, of each of B responses, its puzzle's prefix included."""
    lengths, G = samples.mask.sum(1).tolist(), len(samples.tokens) // len(puzzles)
    decoded, grades = [], []
    for i, (row, length) in enumerate(zip(samples.tokens.tolist(), lengths)):
        text, spans = policy.tokenizer.decode(prefixes[i // G] + row[:length])
        decoded.append((text, spans))
        grades.append(check_grade(grade(text, puzzles[i // G])))
    return decoded, grades


def coin_toss(task: ModuleType, seed: int, step: int) -> Callable[[str, Any], dict[str, float]]:
    """A stand-in for the task's `grade` that tosses a fair coin for each response: a control, nothing may climb.

    The format is graded as usual, but it is no part of the reward.
    """
    coin = np.random.default_rng([seed, step, 2**32 - 1])  # draw_uniforms has a puzzle's index in third place

    def toss(text: str, puzzle: Any) -> dict[str, float]:
        answer = float(coin.integers(2))
        return {"reward": answer, "format": check_grade(task.grade(text, puzzle))["format"], "answer": answer}

    return toss


def generate_shared(policy: Policy, prompts: list[list[int]], uniforms: Tensor, limit: Tensor | None = None,
                    excluded: Tensor | None = None, greedy: bool = False, watch: Callable | None = None) -> Samples:
    """`generate`, with the prompts shared among the processes. Every process returns the samples of all of them."""
    model, G = policy.model, len(uniforms) // len(prompts)
    mine = my_share(list(range(len(prompts))))  # of n processes, each has every n-th prompt
    rows = torch.tensor([q * G + g for q in mine for g in range(G)], dtype=torch.long)  # (M,) of this process
    samples = None  # a process without a prompt has none
    if mine:
        limit, excluded = (None if x is None else x[rows] for x in (limit, excluded))
        samples = generate(model, [prompts[q] for q in mine], uniforms[rows], policy.tokenizer.end_tokens, limit,
                           excluded, greedy, watch)
    if world()[1] > 1:
        samples = gather_samples(samples, G, model.output_weight.device)
    if not samples.logprob.isfinite().all():  # all processes hold the same samples, so all of them raise
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return samples


def gather_samples(samples: Samples | None, G: int, device: torch.device) -> Samples:
    """The samples of all processes, in the order of the prompts, padded on the right to the longest response."""
    own = []  # for each prompt of this process its six tensors, of G rows each
    if samples is not None:
        for group in zip(*(x.cpu().split(G) for x in samples)):  # six lists of chunks -> six chunks of each prompt
            own.append([x.clone() for x in group])  # a pickled view would carry the storage of the whole tensor
    groups = gather(own)  # in the order of the prompts: gather undoes my_share
    T = max(tokens.shape[1] for tokens, *_ in groups)
    fields = []
    for parts in zip(*groups):  # a field of each prompt: (G, t), or (G,) of `ended`
        padded = [F.pad(x, (0, T - x.shape[1])) if x.dim() == 2 else x for x in parts]
        fields.append(torch.cat(padded).to(device))
    return Samples(*fields)


# --------------------------------------------------------------------------------------------------- queries


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

    Nothing is computed until a credit function asks for it, and then once. Several processes share the work, and each
    of them gets the whole result.
    """

    policy: Policy
    puzzles: tuple  # Q
    samples: Samples  # B responses, B / Q to each puzzle
    s: Any  # the Settings
    step: int
    computed: dict = field(default_factory=dict)  # so far

    def __post_init__(self):
        """Choose what grades, and count the step's tokens so far: those sampled, and those read without gradient."""
        task, s = self.policy.task, self.s
        self.grade = coin_toss(task, s.seed, self.step) if s.reward == "random" else task.grade
        self.tokens_sampled = int(self.samples.mask.sum())
        self.tokens_read = sum(map(len, self.prompts))

    @once
    def prompts(self) -> list[list[int]]:
        """The tokens of each puzzle's prompt."""
        return [self.policy.prompt(puzzle) for puzzle in self.puzzles]

    @once
    def hidden(self) -> Tensor:
        """The model's last hidden state (B, T, D) before it emits each token."""
        return self.read(response_states, self.policy.model)

    @once
    def attention(self) -> Tensor:
        """Attention (B, T, T): [:, t, u] is how much the state that predicts token t attends to token u < t.

        Of the last layer, averaged over its heads.
        """
        columns = self.samples.tokens.shape[1]  # T, so that the chunks of `read` fit together
        return self.read(partial(response_attention, columns=columns), self.policy.model)

    @torch.no_grad()
    def head(self, name: str) -> Tensor:
        """What a head of methods/heads.py says before each token (B, T), 0 on padding."""
        if name not in self.policy.heads:
            raise ValueError(f'no {name}: add needs=("{name}",) to the decorator of this credit function')
        if name not in self.computed:
            self.computed[name] = self.policy.heads[name].read(self.hidden, self.samples.mask)
        if not self.computed[name].isfinite().all():
            raise FloatingPointError(f"the {name} says NaN or infinity: its weights are broken")
        return self.computed[name].clone()

    @once
    def reference_logprob(self) -> Tensor:
        """Log-prob (B, T) of each token under the reference model, 0 on padding."""
        if self.policy.reference is None:
            raise ValueError('no reference model: add needs=("reference",) to the decorator of this credit function')
        return self.read(response_logprobs, self.policy.reference)

    def logprob_without(self, rows: Tensor, hide: Tensor) -> Tensor:
        """Log-probs (R, T) of the responses rows (R,) when no later token can attend to those marked in hide (R, T)."""
        return self.read(response_logprobs, self.policy.model, rows, hide)

    def generator(self, name: str) -> torch.Generator:
        """A new generator, seeded by --seed, step and name: every call returns one in the same state."""
        key = (self.s.seed, self.step)
        return torch.Generator().manual_seed(fingerprint(f"{name} {key}") >> 1)  # a seed has 63 bits

    def rollout_values(self, counts: Tensor, other: bool = False) -> Tensor:
        """The mean reward (B, T) of counts (B, T) continuations of the text before each token, 0 where there are none.

        A continuation may use the tokens that are left of the limit. other: it begins with any token but the actual
        one. Prefixes of similar length are sampled together.
        """
        counts = counts.cpu().long()  # (B, T)
        # Every count is a multiple of k (for VinePPO its --k). `generate` continues a prefix k times at once, which is
        # 8% faster than a row of its own for each continuation.
        k = int(np.gcd.reduce(counts.flatten().numpy())) or 1
        where = counts.nonzero().repeat_interleave(counts[counts > 0] // k, 0)  # (N, 2) response and position
        uniforms = torch.rand(len(where), k, self.s.max_new_tokens, generator=self.generator("rollouts"),
                              dtype=torch.float64)  # (N, k, limit)
        total, order = torch.zeros(counts.shape), where[:, 1].argsort(stable=True)  # (N,) shortest prefix first
        for chunk in order.split(max(1, ROWS_AT_ONCE // k)) if len(order) else ():  # (n,)
            rewards = self.continue_from(where[chunk], uniforms[chunk], other)  # (n, k)
            total.index_put_(tuple(where[chunk].T), rewards.sum(1), accumulate=True)
        return (total / counts.clamp(min=1)).to(self.samples.tokens.device)

    def continue_from(self, where: Tensor, uniforms: Tensor, other: bool) -> Tensor:
        """The rewards (n, k) of k continuations of each of n prefixes, with the random numbers uniforms (n, k, limit).

        where (n, 2): a response, and the position of the first token that is sampled anew.
        """
        tokens, (rows, positions), k = self.samples.tokens, where.T, uniforms.shape[1]
        asked = (rows // (len(tokens) // len(self.puzzles))).tolist()  # n, the puzzle of each prefix
        prefixes = [tokens[row, :t].tolist() for row, t in where.tolist()]  # n
        left = self.s.max_new_tokens - positions  # (n,)
        excluded = tokens[rows, positions].repeat_interleave(k) if other else None  # (n * k,)
        samples, grades = generate_and_grade(
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
        """What a reader of sampler.py returns (R, T, ...) for R responses, chosen by their index rows (R,), or for all.

        A reader is a function such as response_logprobs(model, cache, tokens, mask, *per_row). It gets chunks of
        similar length; their results are put back in order. per_row: arguments with a row for each response.
        """
        tokens, mask = self.samples.tokens, self.samples.mask  # (B, T) each
        G, device = len(tokens) // len(self.puzzles), tokens.device
        rows = torch.arange(len(tokens), device=device) if rows is None else rows.to(device)
        prompts, lengths = PromptCache(model, self.prompts), mask[rows].sum(1)  # (R,)
        self.tokens_read += sum(map(len, self.prompts)) + int(lengths.sum())
        chunks, results = by_length(lengths, self.s.micro_batch), []
        for chunk, t in my_share(chunks):  # (b,) responses of up to t tokens
            response = rows[chunk]  # (b,)
            cache, others = ResponseCache(prompts, response // G), (x[chunk, :t] for x in per_row)
            results.append(reader(model, cache, tokens[response, :t], mask[response, :t], *others).cpu())
        results = gather(results)  # of all processes, in the order of the chunks: gather undoes my_share
        result = results[0].new_zeros(len(rows), tokens.shape[1], *results[0].shape[2:])  # (R, T, ...)
        for (chunk, t), part in zip(chunks, results):
            result[chunk.cpu(), :t] = part
        return result.to(device)
