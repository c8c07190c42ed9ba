"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, gathered in the batch that credit functions read.

`generate` of sampler.py samples tokens. Here they become graded responses: those of a training step (`rollout`, which
returns a TokenBatch), and those of an evaluation (`generate_and_grade`).

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response. `s` is the Settings. The
task is a module such as countdown_task.py; the code here knows nothing of Countdown.

Run it:  python train.py --mitigation none
"""
import functools
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from plumbing.policy import Policy, seed_of
from plumbing.processes import shared
from plumbing.progress import Progress
from plumbing.task_file import check_roles
from sampler import Replies, Samples, generate
from settings import Settings
from turns import decode, listener, play, with_replies

EVALUATION = "evaluation"  # instead of a step, for the random numbers of an evaluation


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to T tokens. What was
    sampled (tokens to before), how it was graded (grades to format), what had been asked (group to task), and what each
    token is (role to spans).

    Column t is the t-th token of the response; padding is 0 or False. Nothing carries a gradient. The batch is built
    once a step, before it is cut into micro-batches. The G responses to a puzzle are neighbours.

    `ask` runs the model again, and only the functions that use it pay for it.
    """

    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space, which is logged
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # B dicts, {} in a single turn: before[i][t] are the tokens of the reply before column t
    grades: dict[str, Tensor]  # (B,) float64 each: what the task's `grade` returned, by name; NaN where it lacked one
    weights: dict[str, float]  # the reward is the sum of weight * grade over these names
    reward: Tensor  # (B,) float64 this sum, or a coin toss (--reward random)
    success: Tensor  # (B,) the grade "answer": 1 where that is right (or the coin shows heads), else 0
    format: Tensor  # (B,) the grade "format": how much of the requested layout it has, from 0 to 1
    group: Tensor  # (B,) int64, index of the puzzle that the response answers
    puzzles: tuple  # Q, the task's
    prompts: tuple[list[int], ...]  # Q, their tokens
    task: ModuleType  # such as countdown_task
    role: Tensor  # (B, T) int8, of tasks/text.py: FILLER (prose, and padding), REASONING (arithmetic), STRUCTURE (tags)
    in_answer: Tensor  # (B, T) bool, whether the token belongs to the graded answer: in Countdown, from <answer> on
    text: tuple[str, ...]  # per response, decoded, end tokens removed, with the replies between its turns
    spans: tuple[tuple[tuple[int, int], ...], ...]  # per response, the character span of each token in the text
    normalize: str  # how `reweight` of mitigations.py rescales weights
    ask: Any = None  # what a credit function may ask the model: the Queries of queries.py, set by the step
    advantage: Tensor | None = None  # (B,) how each reward compares: set by `compare` of grpo.py
    # (B, T) each, by name: what a credit function puts here is written beside the credit. A copy begins without any.
    log: dict[str, Tensor] = field(default_factory=dict, init=False)


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G responses to each of Q puzzles."""
    return values.view(len(batch.puzzles), -1, *values.shape[1:])


def group_mean(values: Tensor) -> Tensor:
    """The mean (Q, 1, ...) of values (Q, G, ...) over each group, in float64; exactly their value where all are equal.

    So values - mean is exactly 0 there, and an update leaves out responses without credit. Rounding would leave some.
    """
    first = values[:, :1].double()
    return first + (values - first).mean(1, keepdim=True)


def responses(batch: TokenBatch, rows: Tensor) -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """What the model reads of the responses rows (b,): their prompts, each once; which of these each answers (b,); what
    follows it (b, S), and whether that was sampled (b, S). In a single turn these are tokens and mask, and S = T."""
    asked, prompt_of = batch.group[rows].unique(return_inverse=True)  # (prompts,), (b,)
    before = [batch.before[i] for i in rows.tolist()]
    return [batch.prompts[q] for q in asked.tolist()], prompt_of, *with_replies(
        batch.tokens[rows], batch.mask[rows], before)


# ---------------------------------------------------------------------------------------------------- a step


def draw_puzzles(training: list, s: Settings, step: int) -> list:
    """The Q puzzles of a step: puzzle i of the run is number i % N of epoch i // N. Every epoch shuffles the N training
    puzzles anew, in an order that depends on the seed alone."""
    N, first = len(training), (step - 1) * s.questions
    order = functools.cache(lambda epoch: np.random.default_rng(seed_of("order", s.seed, epoch)).permutation(N))
    return [training[order(i // N)[i % N]] for i in range(first, first + s.questions)]  # counted since the run began


def rollout(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --answers to each of Q puzzles."""
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.answers, s.max_new_tokens)  # (B, max_new_tokens)
    watch = Progress("sampling", len(uniforms)).part(0, *uniforms.shape)
    samples = sample(policy, unanswered(policy, puzzles), uniforms, watch=watch)
    return token_batch(policy, puzzles, samples, s, step)


def draw_uniforms(seed: int, step: int | str, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1).

    Each puzzle has its own generator, so a response depends neither on the other puzzles nor on how many
    processes share the step.
    """
    rows = [np.random.default_rng(seed_of("sampling", seed, step, q)).random((G, length)) for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


def token_batch(policy: Policy, puzzles: list, samples: Samples, s: Settings, step: int) -> TokenBatch:
    """Decode and grade the samples of a step. (`compare` of grpo.py adds the advantage, the step adds `ask`.)"""
    (B, T), Q, device, task = samples.tokens.shape, len(puzzles), samples.tokens.device, policy.task
    decoded, grades = decode_and_grade(policy.for_step(s, step), puzzles, tokens_of(samples), samples.before)
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)  # (B, T) each
    for i, (text, spans, _) in enumerate(decoded):
        role[i, : len(spans)], in_answer[i, : len(spans)] = check_roles(task.roles(text, spans), len(spans))
    names = dict.fromkeys(name for own in grades for name in own)  # each once, in order
    # In float64, where 1e7 and 1e7 + 0.1 differ: float32 would make them equal rewards.
    found = {name: torch.tensor([own.get(name, torch.nan) for own in grades], dtype=torch.float64, device=device)
             for name in names}  # (B,) each
    return TokenBatch(
        **samples._asdict(),  # tokens, mask, logprob, entropy, logit_grad, ended, before
        grades=found, weights=policy.parts,
        reward=found["reward"], success=found["answer"].float(), format=found["format"].float(),
        group=torch.arange(Q, device=device).repeat_interleave(B // Q), puzzles=tuple(puzzles),
        prompts=tuple(map(policy.prompt, puzzles)), task=task,
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=tuple(text for text, *_ in decoded), spans=tuple(tuple(spans) for _, spans, _ in decoded),
        normalize=s.normalize)


# --------------------------------------------------------------------------------------------- graded responses


def generate_and_grade(policy: Policy, puzzles: list, uniforms: Tensor, greedy: bool = False,
                       watch: Callable | None = None) -> tuple[Samples, list[dict[str, float]]]:
    """Sample B responses to Q puzzles, see `sample`, and let the task grade them."""
    samples = sample(policy, unanswered(policy, puzzles), uniforms, greedy=greedy, watch=watch)
    _, grades = decode_and_grade(policy, puzzles, tokens_of(samples), samples.before)
    return samples, grades


def unanswered(policy: Policy, puzzles: list) -> list[tuple]:
    """What `sample` is asked where responses begin: each puzzle, no token of a response yet, and the prompt."""
    return [(puzzle, [], policy.prompt(puzzle)) for puzzle in puzzles]


def sample(policy: Policy, asked: list[tuple], uniforms: Tensor, limit: Tensor | None = None,
           excluded: Tensor | None = None, greedy: bool = False, watch: Callable | None = None) -> Samples:
    """Sample B responses, one for each row of random numbers (B, T), B / Q to each of Q that are asked: a puzzle, the
    tokens that its responses begin with, which are no part of the samples, and the whole text so far.

    The other arguments: see `generate` of sampler.py. Several processes share what is asked, and each of them returns
    all samples, so that all raise where these are broken.
    """
    def sample_some(asked: list[tuple], uniforms: Tensor, limit: Tensor | None, excluded: Tensor | None) -> Samples:
        texts, G = [text for *_, text in asked], len(uniforms) // len(asked)
        given = (policy.model, texts, uniforms, policy.tokenizer.end_tokens, limit, excluded, greedy, watch)
        if hasattr(policy.task, "reply"):  # several turns
            return play(*given, listener(policy, asked, G))
        return generate(*given)

    found = shared(sample_some, asked, uniforms=uniforms, limit=limit, excluded=excluded)
    device = policy.model.norm.device
    samples = Samples(*(x.to(device) if isinstance(x, Tensor) else x for x in found))
    if not samples.logprob.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return samples


def tokens_of(samples: Samples) -> list[list[int]]:
    """The tokens of each of B responses, without padding."""
    return [row[:length] for row, length in zip(samples.tokens.tolist(), samples.mask.sum(1).tolist())]


def decode_and_grade(policy: Policy, puzzles: list, tokens: list[list[int]],
                     before: Replies) -> tuple[list[tuple[str, list, list]], list[dict[str, float]]]:
    """Text, token spans and turns, and the grades, of each of B responses: its tokens, and the replies before these."""
    G = len(tokens) // len(puzzles)
    decoded = [decode(policy, own, replies) for own, replies in zip(tokens, before)]
    grades = [policy.grade(text, puzzles[i // G], turns) for i, (text, _, turns) in enumerate(decoded)]
    return decoded, grades
