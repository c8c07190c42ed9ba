"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, gathered in the batch that
credit functions read.

`generate` of sampler.py samples tokens. `respond` makes graded responses of them, in training and
in evaluation. `rollout` is a training step's: it returns a TokenBatch.

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response. `s`
is the Settings. The task is a module such as countdown_task.py; the code here knows nothing of
Countdown. It knows a response of one turn. A task that replies is played by extras/turns.py.

Run it:  python train.py --mitigation none
"""
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from plumbing.chat import prompt_tokens
from plumbing.task_file import check_roles, graded
from plumbing.terminal import Progress
from plumbing.tokenizer import Tokenizer
from sampler import Replies, Rules, Samples, generate
from settings import Settings
from tasks.text import fingerprint


def seed_of(purpose: str, *numbers: int | str) -> int:
    """The seed of a generator of random numbers, from its purpose, such as "order", and numbers,
    such as --seed and the epoch: another purpose or number draws others."""
    return fingerprint(f"{purpose} {numbers}") // 2  # 63 bits, which numpy and torch both take


def coin_of(s: Settings, *purpose: int | str) -> np.random.Generator | None:
    """The coin that decides rewards where --reward random asks for one, as a control. Each step has
    its own."""
    if s.reward != "random":
        return None
    return np.random.default_rng(seed_of("coin", s.seed, *purpose))


class Policy(NamedTuple):
    """The model that acts and learns, RL's *policy*, with how it is asked and graded."""

    model: nn.Module  # the Qwen2 of qwen2_model.py
    tokenizer: Tokenizer
    task: ModuleType
    heads: dict[str, nn.Module] = {}  # those of methods/heads.py that the credit function needs
    reference: nn.Module | None = None  # a frozen copy of the start model, where something needs it
    reward_weights: dict[str, float] = {}  # of parts of the reward, instead of those in task.PARTS
    coin: np.random.Generator | None = None  # decides rewards, see `coin_of`; None: the grade does
    play: Callable | None = None  # a task that replies has extras/turns.py's `respond` here

    @property
    def parts(self) -> dict[str, float]:
        """Weights by part: the reward is the sum of weight * grade[part]. (A task without PARTS
        grades the reward itself.)"""
        return getattr(self.task, "PARTS", {"reward": 1.0}) | self.reward_weights

    def prompt(self, puzzle: Any) -> list[int]:
        """The tokens of a puzzle's prompt."""
        return prompt_tokens(self.tokenizer, self.task.prompt(puzzle, self.tokenizer.chat))

    def with_reward(self, grade: dict[str, Any]) -> dict[str, float]:
        """What the task's `grade` returned of a response, checked, and the reward."""
        grade = graded(grade, self.parts)
        if self.coin:
            grade["reward"] = grade["answer"] = float(self.coin.integers(2))
        return grade


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
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of log pi's gradient at the logits
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # B dicts {t: reply read before column t}, empty in a single turn
    # How it was graded.
    grades: dict[str, Tensor]  # (B,) float64 each: the reward, and what the task's `grade` returned
    parts: dict[str, float]  # weights: the reward is the sum of weight * grade over these names
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
    in_answer: Tensor  # (B, T) bool, from the task's `roles`: in Countdown, from <answer> on
    text: tuple[str, ...]  # B, decoded, without end tokens
    spans: tuple[tuple[tuple[int, int], ...], ...]  # B, the characters of each token in the text
    # What credit is made with.
    normalize: str  # --normalize: how mitigations.py rescales weights
    ask: Any = None  # train.py sets it: the Queries of methods/queries.py, which run the model
    advantage: Tensor | None = None  # (B,) train.py sets it, by `compare` of grpo.py
    # (B, T) each: what a credit function wants to see in the credit log, by name
    log: dict[str, Tensor] = field(default_factory=dict, init=False)


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G responses to each of Q puzzles."""
    return values.view(len(batch.puzzles), -1, *values.shape[1:])


# ------------------------------------------------------------------------------------------ a step


def draw_puzzles(training: list, s: Settings, step: int) -> list:
    """The Q puzzles of a step. Every epoch has each of the N training puzzles once, in an order
    that depends on the seed and the epoch alone."""
    N = len(training)
    first = (step - 1) * s.questions  # earlier steps had so many puzzles
    puzzles = []
    for i in range(first, first + s.questions):  # puzzle i of the run is number i % N of its epoch
        order = np.random.default_rng(seed_of("order", s.seed, i // N)).permutation(N)
        puzzles.append(training[order[i % N]])
    return puzzles


def rollout(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --responses to each of Q puzzles."""
    limit = s.max_new_tokens
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.responses, limit)  # (B, limit)
    prompts = [policy.prompt(puzzle) for puzzle in puzzles]  # Q
    progress = Progress("sampling", len(uniforms))
    rules = Rules(watch=progress.part(done=0, size=len(uniforms), limit=limit))
    policy = policy._replace(coin=coin_of(s, step))
    responses = respond(policy, puzzles, prompts, uniforms, rules)
    return token_batch(policy, puzzles, prompts, responses, s)


def draw_uniforms(seed: int, step: int | str, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1). step: its
    number, or "evaluation".

    Each puzzle has its own generator, so these numbers do not depend on the other puzzles. (A
    response may: products in another batch round differently, which can flip a near tie.)
    """
    rows = [np.random.default_rng(seed_of("sampling", seed, step, q)).random((G, length))
            for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


class Graded(NamedTuple):
    """B responses with their texts and grades."""

    samples: Samples
    texts: tuple[str, ...]  # B
    spans: tuple[tuple[tuple[int, int], ...], ...]  # B, the characters of each token in the text
    grades: tuple[dict[str, float], ...]  # B, the reward and the task's own


def respond(
    policy: Policy, puzzles: list, prompts: list[list[int]], uniforms: Tensor,
    rules: Rules = Rules()
) -> Graded:
    """Sample and grade B responses, B / Q to each of Q puzzles with their prompts, with a row of
    random numbers (B, limit) for each."""
    if policy.play:  # in several turns
        return policy.play(policy, puzzles, prompts, uniforms, rules)
    samples = generate(policy.model, prompts, uniforms, policy.tokenizer.end_tokens, rules)
    return decode_and_grade(policy, puzzles, samples)


def decode_and_grade(policy: Policy, puzzles: list, samples: Samples) -> Graded:
    """B samples of one turn, B / Q to each of Q puzzles, with texts and grades."""
    check_samples(samples)
    G = len(samples.tokens) // len(puzzles)
    decoded = [policy.tokenizer.decode(tokens[mask].tolist())
               for tokens, mask in zip(samples.tokens, samples.mask)]  # B pairs of text, spans
    grades = [policy.with_reward(policy.task.grade(text, puzzles[i // G]))
              for i, (text, _) in enumerate(decoded)]
    texts, spans = zip(*decoded)
    return Graded(samples, texts, tuple(map(tuple, spans)), tuple(grades))


def check_samples(samples: Samples) -> None:
    """FloatingPointError where the model gives no probabilities."""
    if not samples.logprob.isfinite().all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights are broken, or --lr is too high")


def token_batch(
    policy: Policy, puzzles: list, prompts: list, responses: Graded, s: Settings
) -> TokenBatch:
    """The batch of a step. (train.py adds `ask` and the advantage.)"""
    B, T = responses.samples.tokens.shape
    device = responses.samples.tokens.device
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)  # (B, T) each
    for i, (text, spans) in enumerate(zip(responses.texts, responses.spans)):
        L = len(spans)
        role[i, :L], in_answer[i, :L] = check_roles(policy.task.roles(text, spans), L)
    grades = {}  # (B,) each, by name; NaN where a response has no such grade
    for name in [name for grade in responses.grades for name in grade]:
        if name in grades:
            continue
        values = [grade.get(name, torch.nan) for grade in responses.grades]
        # In float64, where 1e7 and 1e7 + 0.1 differ: float32 would make them equal rewards.
        grades[name] = torch.tensor(values, dtype=torch.float64, device=device)
    return TokenBatch(
        **responses.samples._asdict(),  # tokens, mask, logprob, entropy, logit_grad, ended, before
        grades=grades, parts=policy.parts, reward=grades["reward"],
        success=grades["answer"].float(), format=grades["format"].float(),
        group=torch.arange(len(puzzles), device=device).repeat_interleave(B // len(puzzles)),
        puzzles=tuple(puzzles), prompts=tuple(prompts), task=policy.task,
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=responses.texts, spans=responses.spans, normalize=s.normalize)
