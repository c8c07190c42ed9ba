"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, gathered in the batch that credit functions read.

`generate` of sampler.py samples tokens. Here they become graded responses: those of a training step (`rollout`, which
returns a TokenBatch), of an evaluation, and further continuations of a response (both `generate_and_grade`).

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response. `s` is the Settings. The
task is a module such as countdown_task.py; the code here knows nothing of Countdown.

Run it:  python train.py --mitigation none
"""
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any, Callable, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from extras.turns import Prefix, decode, play, reply, with_replies
from plumbing.chat import chat_tokens
from plumbing.progress import Progress
from plumbing.task_file import check_pieces, check_roles, graded
from plumbing.tokenizer import Tokenizer
from sampler import Replies, Samples, generate
from settings import Settings
from tasks.text import fingerprint

EVALUATION = "evaluation"  # stands for the step in the seed of an evaluation's random numbers


def seed_of(purpose: str, *numbers: int | str) -> int:
    """The seed of a generator of random numbers, from its purpose, such as "order", and numbers, such as --seed and the
    epoch: another purpose or number draws others. (The first weights of all heads are those of seed 0.)"""
    return fingerprint(f"{purpose} {numbers}") >> 1  # 63 of its 64 bits, which torch takes


class Policy(NamedTuple):
    """What every part of a step is handed: it samples, grades, reads and learns."""

    model: nn.Module  # the Qwen2 of qwen2_model.py
    tokenizer: Tokenizer
    task: ModuleType
    heads: dict[str, nn.Module] = {}  # those of methods/heads.py that the credit function needs, by name
    reference: nn.Module | None = None  # a frozen copy of the start model, where the credit function or --kl needs it
    weights: dict[str, float] = {}  # --reward_weights: of parts of the reward, instead of the task's PARTS
    coin: np.random.Generator | None = None  # --reward random: tossed for each response, instead of its grade

    @property
    def parts(self) -> dict[str, float]:
        """The weight of each part of the reward, by the name that it has in the task's grade. A task without PARTS
        returns the reward itself."""
        return getattr(self.task, "PARTS", {"reward": 1.0}) | self.weights

    def grade(self, text: str, puzzle: Any, turns: list[str]) -> dict[str, float]:
        """The reward and the task's grades of a response. turns: the texts of its turns, for a task that replies."""
        several = (turns,) if hasattr(self.task, "reply") else ()
        found = graded(self.task, self.parts, text, puzzle, *several)
        return found | dict.fromkeys(("reward", "answer"), float(self.coin.integers(2))) if self.coin else found

    def for_step(self, s: Settings, step: int, *purpose: str) -> Self:
        """The policy, which grades a step's responses by a fair coin of its own if --reward random says so: success
        must not rise then. The format is graded as usual, but it is no part of the reward."""
        if s.reward != "random":
            return self
        return self._replace(coin=np.random.default_rng(seed_of("coin", s.seed, step, *purpose)))

    def prompt(self, puzzle: Any) -> list[int]:
        """The tokens of a puzzle's prompt. The task returns messages, or text, or a tuple of pieces: the first, third,
        ... are its own words, the others foreign text, such as a question from a data file. A control token in these,
        such as <|im_end|>, is encoded as plain characters.
        """
        found = self.task.prompt(puzzle, self.tokenizer.chat)
        if isinstance(found, list):  # messages
            return chat_tokens(self.tokenizer, found)
        return self.tokenizer.start + self.tokenizer.encode(*check_pieces(found, "prompt"))


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to T tokens.

    Column t is the t-th token of the response; padding is 0 or False. Nothing carries a gradient. The batch is built
    once a step, before it is cut into micro-batches. The G responses to a puzzle are neighbours.
    """

    # What was sampled: the fields of Samples in sampler.py.
    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space, which is logged
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # per response, {t: what the environment said before token t, as tokens}; {} in a single turn
    # How it was graded.
    grades: dict[str, Tensor]  # (B,) float64 each, by name: the reward, and what the task's `grade` returned, or NaN
    weights: dict[str, float]  # the reward is the sum of weight * grade over these names
    reward: Tensor  # (B,) float64 this sum, or a coin toss (--reward random)
    success: Tensor  # (B,) the grade "answer", 0 to 1: 1 where that is right (or the coin shows heads)
    format: Tensor  # (B,) the grade "format": how much of the requested layout it has, from 0 to 1
    # What had been asked.
    group: Tensor  # (B,) int64, index of the puzzle that the response answers
    puzzles: tuple  # Q, the task's
    prompts: tuple[list[int], ...]  # Q, their tokens
    task: ModuleType  # such as countdown_task
    # What each token is, for credit functions and the log. GRPO itself reads none of it.
    role: Tensor  # (B, T) int8, of tasks/text.py: FILLER (prose, and padding), REASONING (arithmetic), STRUCTURE (tags)
    in_answer: Tensor  # (B, T) bool, whether the token belongs to the graded answer: in Countdown, from <answer> on
    text: tuple[str, ...]  # per response, decoded, end tokens removed, with the replies between its turns
    spans: tuple[tuple[tuple[int, int], ...], ...]  # per response, the character span of each token in the text
    # What credit is made with.
    normalize: str  # how `reweight` of mitigations.py rescales weights
    ask: Any = None  # the Queries of methods/queries.py, set by the step: they run the model again for what they are asked
    advantage: Tensor | None = None  # (B,) how each reward compares: set by `compare` of grpo.py
    log: dict[str, Tensor] = field(default_factory=dict, init=False)  # (B, T) each: a credit function's own columns


def by_group(batch: TokenBatch, values: Tensor) -> Tensor:
    """Values (B, ...) of the responses as (Q, G, ...): G responses to each of Q puzzles."""
    return values.view(len(batch.puzzles), -1, *values.shape[1:])


def group_mean(values: Tensor) -> Tensor:
    """The mean (Q, 1, ...) of values (Q, G, ...) over each group, in float64; exactly their value where all are equal.

    So values - mean is exactly 0 there, and an update leaves out responses without credit. Rounding would leave some.
    """
    first = values[:, :1].double()
    return first + (values - first).mean(1, keepdim=True)


def z_score(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean) / (std + 1e-4) of values x (..., n, T), over the last two dimensions and mask; 0 outside mask.

    In double, where the mean of equal float32 values is that value exactly, and their z-score 0.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = mask.sum((-2, -1), keepdim=True).clamp(min=1)  # (..., 1, 1)
    mean = torch.where(mask, values.double(), 0.0).sum((-2, -1), keepdim=True) / count  # (..., 1, 1)
    deviation = torch.where(mask, values - mean, 0.0)  # (..., n, T)
    std = ((deviation**2).sum((-2, -1), keepdim=True) / count).sqrt()  # (..., 1, 1)
    return (deviation / (std + 1e-4)).to(values)


def responses(batch: TokenBatch, rows: Tensor) -> tuple[list[list[int]], Tensor, Tensor, Tensor, Tensor]:
    """What `read_responses` of sampler.py takes of the responses rows (m,): their prompts, each once; which of these
    each answers (m,); the tokens behind it (m, S); which of them were sampled (m, S); and the mask (m, T). In a single
    turn the last two are the same."""
    groups, prompt_of = batch.group[rows].unique(return_inverse=True)  # those that occur; (m,)
    prompts, before = [batch.prompts[q] for q in groups.tolist()], [batch.before[i] for i in rows.tolist()]
    tokens, mask = batch.tokens[rows], batch.mask[rows]  # (m, T) each
    return prompts, prompt_of, *with_replies(tokens, mask, before), mask


# ---------------------------------------------------------------------------------------------------- a step


def draw_puzzles(training: list, s: Settings, step: int) -> list:
    """The Q puzzles of a step: puzzle i of the run is number i % N of epoch i // N. Every epoch shuffles the N training
    puzzles anew, in an order that depends on the seed alone."""
    N, first = len(training), (step - 1) * s.questions  # how many puzzles earlier steps had
    epochs = range(first // N, (first + s.questions) // N + 1)  # those that the step may touch: usually one
    order = np.concatenate([np.random.default_rng(seed_of("order", s.seed, e)).permutation(N) for e in epochs])
    return [training[i] for i in order[first % N :][: s.questions]]


def rollout(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --answers to each of Q puzzles."""
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.answers, s.max_new_tokens)  # (B, max_new_tokens)
    watch = Progress("sampling", len(uniforms)).part(done=0, size=len(uniforms), limit=s.max_new_tokens)
    prefixes = prompted(policy, puzzles)  # Q
    return token_batch(policy, prefixes, sample(policy, prefixes, uniforms, watch=watch), s, step)


def draw_uniforms(seed: int, step: int | str, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1).

    Each puzzle has its own generator, so these numbers do not depend on the other puzzles. (A response may: products in
    another batch round differently, which can flip a near tie.)
    """
    rows = [np.random.default_rng(seed_of("sampling", seed, step, q)).random((G, length)) for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


def token_batch(policy: Policy, prefixes: list[Prefix], samples: Samples, s: Settings, step: int) -> TokenBatch:
    """Decode and grade the samples of a step. (`compare` of grpo.py adds the advantage, the step adds `ask`.)"""
    (B, T), Q, device, task = samples.tokens.shape, len(prefixes), samples.tokens.device, policy.task
    texts, spans, grades = zip(*decode_and_grade(policy.for_step(s, step), prefixes, samples))  # B each
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)  # (B, T) each
    for i, (text, places) in enumerate(zip(texts, spans)):
        role[i, : len(places)], in_answer[i, : len(places)] = check_roles(task.roles(text, places), len(places))
    names = dict.fromkeys(name for grade in grades for name in grade)  # each once, in order
    # In float64, where 1e7 and 1e7 + 0.1 differ: float32 would make them equal rewards.
    found = {name: torch.tensor([grade.get(name, torch.nan) for grade in grades], dtype=torch.float64, device=device)
             for name in names}  # (B,) each
    return TokenBatch(
        **samples._asdict(),  # tokens, mask, logprob, entropy, logit_grad, ended, before
        grades=found, weights=policy.parts,
        reward=found["reward"], success=found["answer"].float(), format=found["format"].float(),
        group=torch.arange(Q, device=device).repeat_interleave(B // Q), task=task,
        puzzles=tuple(prefix.puzzle for prefix in prefixes), prompts=tuple(prefix.prompt for prefix in prefixes),
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=texts, spans=tuple(map(tuple, spans)),
        normalize=s.normalize)


# --------------------------------------------------------------------------------------------- graded responses


def prompted(policy: Policy, puzzles: list) -> list[Prefix]:
    """What the responses to puzzles begin with: the prompts alone."""
    return [Prefix(puzzle, policy.prompt(puzzle)) for puzzle in puzzles]


def generate_and_grade(policy: Policy, prefixes: list[Prefix], uniforms: Tensor, limit: Tensor | None = None,
                       excluded: Tensor | None = None, greedy: bool = False,
                       watch: Callable | None = None) -> tuple[Samples, list[dict[str, float]]]:
    """What `sample` samples, and the grades of the B whole responses: each prefix with what follows it."""
    samples = sample(policy, prefixes, uniforms, limit, excluded, greedy, watch)
    return samples, [grades for *_, grades in decode_and_grade(policy, prefixes, samples)]


def sample(policy: Policy, prefixes: list[Prefix], uniforms: Tensor, limit: Tensor | None = None,
           excluded: Tensor | None = None, greedy: bool = False, watch: Callable | None = None) -> Samples:
    """Sample B responses, one for each row of random numbers (B, T), B / Q behind each of Q prefixes, which are no part
    of the samples. The other arguments: see `generate` of sampler.py."""
    texts, G = [prefix.prompt + prefix.response for prefix in prefixes], len(uniforms) // len(prefixes)
    arguments = (policy.model, texts, uniforms, policy.tokenizer.end_tokens, limit, excluded, greedy, watch)
    if hasattr(policy.task, "reply"):
        begun = [prefix for prefix in prefixes for _ in range(G)]  # B
        samples = play(*arguments, lambda i, new: reply(policy, begun[i].puzzle, begun[i].tokens + new))
    else:
        samples = generate(*arguments)
    if not samples.logprob.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return samples


def decode_and_grade(policy: Policy, prefixes: list[Prefix], samples: Samples) -> list[tuple[str, list, dict]]:
    """Text, token spans and grades of each of B whole responses: a prefix, and the sampled tokens behind it."""
    found, G = [], len(samples.tokens) // len(prefixes)
    for i, (row, length) in enumerate(zip(samples.tokens.tolist(), samples.mask.sum(1).tolist())):
        prefix = prefixes[i // G]
        later = {len(prefix.tokens) + t: said for t, said in samples.before[i].items()}
        text, spans, turns = decode(policy, prefix.tokens + row[:length], prefix.before | later)
        found.append((text, spans, policy.grade(text, prefix.puzzle, turns)))
    return found


def graded_without(batch: TokenBatch, i: int, start: int, stop: int) -> float:
    """The reward of response i without its characters from start to stop; what was replied stays as it is."""
    text, spans, turns = batch.text[i], batch.spans[i], []
    if hasattr(batch.task, "reply"):
        ends = [(spans[a][0], spans[b - 1][1]) for a, b in pairwise([0, *batch.before[i], len(spans)])]  # of each turn
        turns = [[text[a : max(a, min(b, start))] + text[min(b, max(a, stop)) : b] for a, b in ends]]
    puzzle, cut = batch.puzzles[batch.group[i]], text[:start] + text[stop:]
    return graded(batch.task, batch.weights, cut, puzzle, *turns)["reward"]
