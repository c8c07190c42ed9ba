"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, gathered in the batch that credit functions read.

`generate` of sampler.py samples tokens. (`generate_in_processes` of plumbing calls it, in one process or several.) Here
they become graded responses: those of a training step (`rollout`, which returns a TokenBatch), of an evaluation, and
the continuations that VinePPO asks for (`generate_and_grade`).

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response, D hidden size. `s` is the
Settings. The task is a module such as countdown_task.py; the code here knows nothing of Countdown.

Run it:  python train.py --mitigation vineppo
"""
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from plumbing.progress import Progress
from plumbing.queries import Queries
from plumbing.shared_sampling import generate_in_processes
from plumbing.task_file import check_grade, check_roles
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2
from sampler import Samples
from settings import Settings

EVALUATION = 2**32 - 1  # the step number for the random numbers of evaluation; no training step reaches it


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to T tokens.

    Column t is the t-th token of the response; padding is 0 or False. Nothing carries a gradient. The batch is built
    once a step, before it is cut into micro-batches. The G responses to a puzzle are neighbours.

    `ask` (plumbing/queries.py) runs the model again, and only the functions that use it pay for it. The first four are
    computed once a step:
    ask.hidden                       (B, T, D) last hidden state of the model, before it emits each token, in float32
    ask.attention                    (B, T, T) [:, t, u]: how much the state that predicts token t attends to u < t, in
                                     the last layer, mean over its heads
    ask.head(name)                   (B, T) what a head of methods/heads.py says before each token, 0 on padding, such
                                     as the expected reward of "critic"
    ask.reference_logprob            (B, T) log-probability of each token under the reference model
    ask.logprob_without(rows, hide)  (R, T) log-probabilities of the responses rows (R,), repeats allowed, when no later
                                     token can attend to those marked in hide (R, T)
    ask.rollout_values(counts)       (B, T) the mean reward of counts (B, T) continuations of the text before each
                                     token (column 0: of the prompt alone), in float64; 0 where there are none.
                                     other=True: of those that begin with another token
    ask.prompts                      Q lists of the prompts' tokens
    ask.generator(name)              torch.Generator on the CPU, seeded by --seed, step and name
    """

    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    reward: Tensor  # (B,) "reward" of the task's `grade`, or a coin toss (--reward random)
    success: Tensor  # (B,) its "answer": 1 where that is right (or the coin shows heads), else 0
    format: Tensor  # (B,) its "format": how much of the requested layout it has, from 0 to 1
    grades: dict[str, Tensor]  # (B,) each, its further numbers by their names, NaN where it returned none
    group: Tensor  # (B,) int64, index of the puzzle that the response answers
    puzzles: tuple  # Q, the task's
    task: ModuleType  # such as countdown_task
    role: Tensor  # (B, T) int8, of tasks/text.py: FILLER (prose, and padding), REASONING (arithmetic), STRUCTURE (tags)
    in_answer: Tensor  # (B, T) bool, whether the token belongs to the graded answer: in Countdown, from <answer> on
    text: tuple[str, ...]  # per response, decoded, end token removed
    spans: tuple[tuple[tuple[int, int], ...], ...]  # per response, the character span of each token in the text
    normalize: str  # how `reweight` of mitigations.py rescales weights
    ask: Any = None  # see above: what a credit function may ask the model
    advantage: Tensor | None = None  # (B,) how each reward compares: set by `compare` of grpo.py


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G responses to each of Q puzzles."""
    return values.view(len(batch.puzzles), -1, *values.shape[1:])


def group_mean(values: Tensor) -> Tensor:
    """The mean (Q, 1, ...) of values (Q, G, ...) over each group, in float64; exactly their value where all are equal.

    So values - mean is exactly 0 there. Rounding would leave about 1e-8 of credit, which Adam blows up.
    """
    first = values[:, :1].double()
    return first + (values - first).mean(1, keepdim=True)


class Policy(NamedTuple):
    """The policy, RL's word for the model that acts and learns, and what belongs to it."""

    model: Qwen2
    tokenizer: Tokenizer
    task: ModuleType
    heads: dict[str, nn.Module] = {}  # those of methods/heads.py that the credit function needs, by name
    reference: Qwen2 | None = None  # a frozen copy of the start model, where the credit function or --kl needs it

    def prompt(self, puzzle: Any) -> list[int]:
        """The tokens of a puzzle's prompt. The task returns its text, or a tuple of pieces.

        Of these every second one is foreign text, such as a question from a data file: a control token in it, such as
        <|im_end|>, is encoded as plain characters.
        """
        found = self.task.prompt(puzzle, self.tokenizer.chat)
        pieces = (found,) if isinstance(found, str) else found
        if not isinstance(pieces, tuple) or not all(isinstance(piece, str) for piece in pieces) or not "".join(pieces):
            raise ValueError(f"the task's prompt must return text, not {found!r:.50}")
        return self.tokenizer.start + self.tokenizer.encode(*pieces)


# ---------------------------------------------------------------------------------------------------- a step


def draw_puzzles(training: list, s: Settings, step: int) -> list:
    """The Q puzzles of a step. Every epoch shuffles the training puzzles anew; the order depends on the seed alone."""
    puzzles, first = [], (step - 1) * s.questions
    for i in range(first, first + s.questions):  # i counts the puzzles since the run began
        epoch, place = divmod(i, len(training))
        if i == first or place == 0:  # a new step, or a new epoch
            # 0 where draw_uniforms has the step: 1 or more in training. (train.py's trial step, 0, is thrown away.)
            order = np.random.default_rng([s.seed, 0, epoch]).permutation(len(training))
        puzzles.append(training[order[place]])
    return puzzles


def rollout(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --answers to each of Q puzzles."""
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.answers, s.max_new_tokens)  # (B, max_new_tokens)
    progress = Progress("sampling", len(uniforms), patience=5.0)  # seconds before it says anything
    samples = generate_in_processes(policy, [policy.prompt(puzzle) for puzzle in puzzles], uniforms,
                                    watch=progress.part(0, *uniforms.shape))
    return token_batch(policy, puzzles, samples, s, step)


def draw_uniforms(seed: int, step: int, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1).

    Each puzzle has its own generator, so a response depends neither on the other puzzles nor on how many
    processes share the step.
    """
    rows = [np.random.default_rng([seed, step, q]).random((G, length)) for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


def token_batch(policy: Policy, puzzles: list, samples: Samples, s: Settings, step: int) -> TokenBatch:
    """Decode and grade the samples of a step. (`compare` of grpo.py adds the advantage.)"""
    (B, T), Q, device, task = samples.tokens.shape, len(puzzles), samples.tokens.device, policy.task
    grade = coin_toss(task, s.seed, step) if s.reward == "random" else task.grade
    decoded, grades = decode_and_grade(policy, puzzles, samples, [[]] * Q, grade)
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)  # (B, T) each
    for i, (text, spans) in enumerate(decoded):
        role[i, : len(spans)], in_answer[i, : len(spans)] = check_roles(task.roles(text, spans), len(spans))
    graded = {name: torch.tensor([grade.get(name, torch.nan) for grade in grades], dtype=torch.float32, device=device)
              for name in dict.fromkeys(name for grade in grades for name in grade)}  # (B,) each
    return TokenBatch(
        **samples._asdict(),  # tokens, mask, logprob, entropy, logit_grad, ended
        reward=graded.pop("reward"), success=graded.pop("answer"), format=graded.pop("format"), grades=graded,
        group=torch.arange(Q, device=device).repeat_interleave(B // Q), puzzles=tuple(puzzles), task=task,
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=tuple(text for text, _ in decoded), spans=tuple(tuple(spans) for _, spans in decoded),
        normalize=s.normalize, ask=Queries(policy, tuple(puzzles), samples, s, step, generate_and_grade, grade))


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
    samples = generate_in_processes(policy, prompts, uniforms, limit, excluded, greedy, watch)
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
    """A stand-in for the task's `grade` that tosses a fair coin for each response, as a control: success must not rise.

    The format is graded as usual, but it is no part of the reward.
    """
    coin = np.random.default_rng([seed, step, 2**32 - 1])  # draw_uniforms has a puzzle's index in third place

    def toss(text: str, puzzle: Any) -> dict[str, float]:
        answer = float(coin.integers(2))
        return check_grade(task.grade(text, puzzle)) | {"reward": answer, "answer": answer}

    return toss
