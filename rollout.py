"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, gathered in the batch that
credit functions read.

`generate` of sampler.py samples tokens. `respond` makes graded responses of them: those of a
training step (`rollout`, which returns a TokenBatch), of an evaluation, and further continuations
of a response.

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response, S of
the longest text, prompt and response. `s` is the Settings. The task is a module such as
countdown_task.py; the code here knows nothing of Countdown.

Run it:  python train.py --mitigation none
"""
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Iterator, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from extras import turns
from plumbing.chat import chat_tokens
from plumbing.compute import by_length
from plumbing.progress import Progress
from plumbing.task_file import check_pieces, check_roles, graded
from plumbing.tokenizer import Tokenizer
from sampler import Replies, Rules, Samples, generate
from settings import Settings
from tasks.text import fingerprint

EVALUATION = "evaluation"  # stands for the step in the seed of an evaluation's random numbers


def seed_of(purpose: str, *numbers: int | str) -> int:
    """The seed of a generator of random numbers, from its purpose, such as "order", and numbers,
    such as --seed and the epoch: another purpose or number draws others."""
    return fingerprint(f"{purpose} {numbers}") >> 1  # numpy and torch take these 63 bits


class Policy(NamedTuple):
    """What every part of a step is handed: the model that acts and learns, RL's *policy*, with how
    it is asked and graded."""

    model: nn.Module  # the Qwen2 of qwen2_model.py
    tokenizer: Tokenizer
    task: ModuleType
    heads: dict[str, nn.Module] = {}  # those of methods/heads.py that the credit function needs
    reference: nn.Module | None = None  # a frozen copy of the start model, where something needs it
    reward_weights: dict[str, float] = {}  # by part of the reward, instead of the task's PARTS
    coin: np.random.Generator | None = None  # --reward random: tossed for the reward

    @property
    def parts(self) -> dict[str, float]:
        """The weight of each part of the reward, by the name that it has in the task's grade. A
        task without PARTS returns the reward itself."""
        return getattr(self.task, "PARTS", {"reward": 1.0}) | self.reward_weights

    def prompt(self, puzzle: Any) -> list[int]:
        """The tokens of a puzzle's prompt.

        The task returns messages, or text, or a tuple of pieces: the first, third, ... are its own
        words, the others foreign text, such as a question from a data file. A control token in
        these, such as <|im_end|>, is encoded as plain characters.
        """
        found = self.task.prompt(puzzle, self.tokenizer.chat)
        if isinstance(found, list):  # messages
            return chat_tokens(self.tokenizer, found)
        return self.tokenizer.start + self.tokenizer.encode(*check_pieces(found, "prompt"))

    def grade(self, text: str, puzzle: Any, *by_turn: list[str]) -> dict[str, float]:
        """The reward and the task's grades of a response. A task that replies wants the texts of
        its turns, too."""
        found = graded(self.task, self.parts, text, puzzle, *by_turn)
        if self.coin:
            found["reward"] = found["answer"] = float(self.coin.integers(2))
        return found

    def for_step(self, s: Settings, step: int, *purpose: str) -> Self:
        """The policy, which grades a step's responses by a fair coin of its own if --reward random
        says so: in expectation nothing is learned then. The format is graded as usual, but it is no
        part of the reward."""
        if s.reward != "random":
            return self
        coin = np.random.default_rng(seed_of("coin", s.seed, step, *purpose))
        return self._replace(coin=coin)


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to
    T tokens.

    Column t is the t-th token of the response; padding is 0 or False. Nothing carries a gradient.
    The batch is built once a step, before it is cut into micro-batches. The G responses to a puzzle
    are neighbours.
    """

    # What was sampled: the fields of Samples in sampler.py.
    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of log pi's gradient in logits
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # B, {t: what was said before token t, as tokens}; {} in a single turn
    # How it was graded.
    grades: dict[str, Tensor]  # (B,) float64 each: the reward, and what the task's `grade` returned
    parts: dict[str, float]  # the reward is the sum of weight * grade over these names
    reward: Tensor  # (B,) float64 this sum, or a coin toss (--reward random)
    success: Tensor  # (B,) the grade "answer", 0 to 1: 1 where that is right (or heads)
    format: Tensor  # (B,) the grade "format", 0 to 1: how much of the requested layout it has
    # What had been asked.
    group: Tensor  # (B,) int64, index of the puzzle that the response answers
    puzzles: tuple  # Q, the task's
    prompts: tuple[list[int], ...]  # Q, their tokens
    task: ModuleType  # such as countdown_task
    # What each token is, for credit functions and the log. GRPO itself reads none of it.
    role: Tensor  # (B, T) int8, of tasks/text.py: FILLER (and padding), REASONING, STRUCTURE
    in_answer: Tensor  # (B, T) bool, in the graded answer: in Countdown, from <answer> on
    text: tuple[str, ...]  # B, decoded, end tokens removed, with the replies between its turns
    spans: tuple[tuple[tuple[int, int], ...], ...]  # B, the characters of each token in the text
    # What credit is made with.
    normalize: str  # how `reweight` of mitigations.py rescales weights
    ask: Any = None  # the Queries of methods/queries.py: they run the model for what they are asked
    advantage: Tensor | None = None  # (B,) how each reward compares: by `compare` of grpo.py
    # (B, T) each: a credit function's own columns of the credit log
    log: dict[str, Tensor] = field(default_factory=dict, init=False)


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G responses to each of Q puzzles."""
    return values.view(len(batch.puzzles), -1, *values.shape[1:])


def group_mean(values: Tensor) -> Tensor:
    """The mean (Q, 1, ...) of values (Q, G, ...) over each group, in float64; exactly their value
    where all are equal.

    So values - mean is exactly 0 there, and an update leaves out responses without credit. Rounding
    would leave some.
    """
    first = values[:, :1].double()
    return first + (values - first).mean(1, keepdim=True)


def z_score(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean) / (std + 1e-4) of values x (..., n, T), over the last two dimensions and mask; 0
    outside mask.

    In double, where the mean of equal float32 values is that value exactly, and their z-score 0.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = mask.sum((-2, -1), keepdim=True).clamp(min=1)  # (..., 1, 1)
    total = torch.where(mask, values.double(), 0.0).sum((-2, -1), keepdim=True)  # (..., 1, 1)
    mean = total / count
    deviation = torch.where(mask, values - mean, 0.0)  # (..., n, T)
    std = ((deviation**2).sum((-2, -1), keepdim=True) / count).sqrt()  # (..., 1, 1)
    return (deviation / (std + 1e-4)).to(values)


# ------------------------------------------------------------------------------------------ a step


def draw_puzzles(training: list, s: Settings, step: int) -> list:
    """The Q puzzles of a step: puzzle i of the run is number i % N of epoch i // N. Every epoch
    shuffles the N training puzzles anew, in an order that depends on the seed alone."""
    N = len(training)
    first = (step - 1) * s.questions  # how many puzzles earlier steps had
    epochs = range(first // N, (first + s.questions) // N + 1)  # that the step may touch
    order = np.concatenate(
        [np.random.default_rng(seed_of("order", s.seed, e)).permutation(N) for e in epochs])
    return [training[i] for i in order[first % N :][: s.questions]]


def rollout(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --responses to each of Q puzzles."""
    limit = s.max_new_tokens
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.responses, limit)  # (B, limit)
    prompts = [policy.prompt(puzzle) for puzzle in puzzles]  # Q
    progress = Progress("sampling", len(uniforms))
    rules = Rules(watch=progress.part(done=0, size=len(uniforms), limit=limit))
    graded = respond(policy.for_step(s, step), puzzles, prompts, uniforms, rules)
    return token_batch(policy, puzzles, prompts, graded, s)


def draw_uniforms(seed: int, step: int | str, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1).

    Each puzzle has its own generator, so these numbers do not depend on the other puzzles. (A
    response may: products in another batch round differently, which can flip a near tie.)
    """
    rows = [np.random.default_rng(seed_of("sampling", seed, step, q)).random((G, length))
            for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


class Begun(NamedTuple):
    """What a response begins with, if it is continued."""

    tokens: list[int] = []  # sampled before
    before: dict[int, list[int]] = {}  # the replies among them, as in Samples

    @property
    def read(self) -> list[int]:
        """All that stands behind the prompt: in a single turn the tokens."""
        return turns.interleave(self.tokens, self.before)


class Graded(NamedTuple):
    """B responses with their texts and grades, which are of the whole response where it was begun
    before."""

    samples: Samples
    texts: tuple[str, ...]  # B
    spans: tuple[list[tuple[int, int]], ...]  # B, the characters of each token in the text
    grades: tuple[dict[str, float], ...]  # B, the reward and the task's own


def respond(
    policy: Policy,
    puzzles: list,
    prompts: list[list[int]],
    uniforms: Tensor,
    rules: Rules = Rules(),
    begun: list[Begun] | None = None,
) -> Graded:
    """Sample and grade B responses, one for each row of random numbers (B, T), B / Q to each of Q
    puzzles with their prompts.

    begun: what the responses to each puzzle begin with, if anything; it is no part of the samples.
    """
    begun = begun or [Begun()] * len(puzzles)
    texts = [prompt + own.read for prompt, own in zip(prompts, begun)]  # Q
    if hasattr(policy.task, "reply"):  # several turns
        samples = turns.respond(policy, puzzles, texts, uniforms, rules, begun)
    else:
        samples = generate(policy.model, texts, uniforms, policy.tokenizer.end_tokens, rules)
    if not samples.logprob.isfinite().all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights are broken, or --lr is too high")
    return decode_and_grade(policy, puzzles, samples, begun)


def decode_and_grade(
    policy: Policy, puzzles: list, samples: Samples, begun: list[Begun] | None = None
) -> Graded:
    """B samples, B / Q to each of Q puzzles, with texts and grades. begun: see `respond`."""
    begun = begun or [Begun()] * len(puzzles)
    G = len(samples.tokens) // len(puzzles)
    texts, spans, grades = [], [], []
    for i, length in enumerate(samples.mask.sum(1).tolist()):
        own, new = begun[i // G], samples.tokens[i, :length].tolist()
        if hasattr(policy.task, "reply"):
            text, places, *by_turn = turns.decode_on(policy, own, new, samples.before[i])
        else:
            text, places, *by_turn = policy.tokenizer.decode(own.tokens + new)
        texts.append(text)
        spans.append(tuple(places))
        grades.append(policy.grade(text, puzzles[i // G], *by_turn))
    return Graded(samples, tuple(texts), tuple(spans), tuple(grades))


def token_batch(
    policy: Policy, puzzles: list, prompts: list, graded: Graded, s: Settings
) -> TokenBatch:
    """The batch of a step. (`compare` of grpo.py adds the advantage, the step adds `ask`.)"""
    Q = len(puzzles)
    B, T = graded.samples.tokens.shape
    device = graded.samples.tokens.device
    role = np.zeros((B, T), np.int8)  # (B, T)
    in_answer = np.zeros((B, T), bool)  # (B, T)
    for i, (text, places) in enumerate(zip(graded.texts, graded.spans)):
        L = len(places)
        role[i, :L], in_answer[i, :L] = check_roles(policy.task.roles(text, places), L)
    grades = {}  # (B,) each, by name
    for name in dict.fromkeys(name for grade in graded.grades for name in grade):  # each once
        values = [grade.get(name, torch.nan) for grade in graded.grades]
        # In float64, where 1e7 and 1e7 + 0.1 differ: float32 would make them equal rewards.
        grades[name] = torch.tensor(values, dtype=torch.float64, device=device)
    return TokenBatch(
        **graded.samples._asdict(),  # tokens, mask, logprob, entropy, logit_grad, ended, before
        grades=grades, parts=policy.parts, reward=grades["reward"],
        success=grades["answer"].float(), format=grades["format"].float(),
        group=torch.arange(Q, device=device).repeat_interleave(B // Q),
        puzzles=tuple(puzzles), prompts=tuple(prompts), task=policy.task,
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=graded.texts, spans=graded.spans, normalize=s.normalize)


# ----------------------------------------------------------------------------- responses read again


def whole_texts(
    batch: TokenBatch, rows: Tensor, at_once: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The responses rows (m,) as the model reads them, b of like length at a time: their rows in
    the batch (b,); the texts (b, S), each response behind its own prompt, padded on the right; and
    which of these tokens the policy sampled (b, S)."""
    if not len(rows):
        return
    before = [batch.before[i] for i in rows.tolist()]  # {} each, in a single turn
    said, own = turns.with_replies(batch.tokens[rows], batch.mask[rows], before)
    prompts = [torch.tensor(batch.prompts[q]).to(said) for q in batch.group[rows].tolist()]
    pad = partial(pad_sequence, batch_first=True)
    texts = pad([torch.cat(pair) for pair in zip(prompts, said)])  # (m, S)
    sampled = pad([F.pad(x, (len(prompt), 0)) for prompt, x in zip(prompts, own)])  # (m, S)
    for some, S in by_length(sampled, at_once):
        yield rows[some], texts[some, :S], sampled[some, :S]


def graded_without(batch: TokenBatch, i: int, start: int, stop: int) -> float:
    """The reward of response i without its characters from start to stop; what was replied stays as
    it is."""
    response = [batch.text[i][:start] + batch.text[i][stop:], batch.puzzles[batch.group[i]]]
    if hasattr(batch.task, "reply"):
        response.append(turns.texts_without(batch, i, start, stop))
    return graded(batch.task, batch.parts, *response)["reward"]
