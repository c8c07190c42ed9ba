"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, gathered in the batch that credit functions read.

`generate` of sampler.py samples tokens. Here they become graded responses: those of a training step (`rollout`, which
returns a TokenBatch), and those of an evaluation (`generate_and_grade`).

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response. `s` is the Settings. The
task is a module such as countdown_task.py; the code here knows nothing of Countdown.

Run it:  python train.py --mitigation none
"""
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from plumbing.chat import chat_tokens
from plumbing.processes import shared
from plumbing.progress import Progress
from plumbing.task_file import check_pieces, check_roles, graded
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2
from sampler import Replies, Samples
from settings import Settings
from tasks.text import fingerprint
from turns import decode, respond, with_replies

EVALUATION = "evaluation"  # instead of a step, for the random numbers of an evaluation


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to T tokens.

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


class Policy(NamedTuple):
    """The policy, RL's word for the model that acts and learns, and what belongs to it."""

    model: Qwen2
    tokenizer: Tokenizer
    task: ModuleType
    heads: dict[str, nn.Module] = {}  # those of methods/heads.py that the credit function needs, by name
    reference: Qwen2 | None = None  # a frozen copy of the start model, where the credit function or --kl needs it
    weights: dict[str, float] = {}  # --reward_weights: of parts of the reward, instead of the task's PARTS
    coin: np.random.Generator | None = None  # --reward random: tossed for each response, instead of its grade

    @property
    def parts(self) -> dict[str, float]:
        """The weight of each part of the reward, by the name that it has in the task's grade."""
        return getattr(self.task, "PARTS", {"reward": 1.0}) | self.weights  # its grade's own "reward" without PARTS

    def grade(self, text: str, puzzle: Any, turns: list[str]) -> dict[str, float]:
        """The reward and the task's grades of a response, which in several turns depend on its turns alone."""
        several = (turns,) if hasattr(self.task, "reply") else ()
        found = graded(self.task, self.parts, text, puzzle, *several)
        return found | dict.fromkeys(("reward", "answer"), float(self.coin.integers(2))) if self.coin else found

    def for_step(self, s: Settings, step: int, *purpose: str) -> "Policy":
        """The policy, which grades a step's responses by a fair coin of its own if --reward random says so: success
        must not rise then. The format is graded as usual, but it is no part of the reward."""
        coin = np.random.default_rng(seed_of("coin", s.seed, step, *purpose))
        return self._replace(coin=coin) if s.reward == "random" else self

    def prompt(self, puzzle: Any) -> list[int]:
        """The tokens of a puzzle's prompt. The task returns messages, or text, or a tuple of pieces: the first, third,
        ... are its own words, the others foreign text, such as a question from a data file. A control token in these,
        such as <|im_end|>, is encoded as plain characters.
        """
        found = self.task.prompt(puzzle, self.tokenizer.chat)
        if isinstance(found, list):  # messages
            return chat_tokens(self.tokenizer, found)
        return self.tokenizer.start + self.tokenizer.encode(*check_pieces(found, "prompt"))


# ---------------------------------------------------------------------------------------------------- a step


def seed_of(purpose: str, *numbers: int | str) -> int:
    """The seed of a generator of random numbers, from its purpose, such as "order", and numbers, such as --seed and the
    epoch. All generators of a run have theirs from here, so no two draw the same."""
    return fingerprint(f"{purpose} {numbers}") >> 1  # of 64 bits; torch takes 63


def draw_puzzles(training: list, s: Settings, step: int) -> list:
    """The Q puzzles of a step: puzzle i of the run is number i % N of epoch i // N. Every epoch shuffles the N training
    puzzles anew, in an order that depends on the seed alone."""
    N, first = len(training), (step - 1) * s.questions
    order = cache(lambda epoch: np.random.default_rng(seed_of("order", s.seed, epoch)).permutation(N))
    return [training[order(i // N)[i % N]] for i in range(first, first + s.questions)]  # counted since the run began


def rollout(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --answers to each of Q puzzles."""
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.answers, s.max_new_tokens)  # (B, max_new_tokens)
    watch = Progress("sampling", len(uniforms)).part(0, *uniforms.shape)
    samples = sample(policy, puzzles, uniforms, watch=watch)
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
    samples = sample(policy, puzzles, uniforms, greedy, watch)
    return samples, decode_and_grade(policy, puzzles, tokens_of(samples), samples.before)[1]


def sample(policy: Policy, puzzles: list, uniforms: Tensor, greedy: bool = False,
           watch: Callable | None = None) -> Samples:
    """Sample B responses, one for each row of random numbers (B, limit), B / Q to each of Q puzzles.

    greedy, watch: see `generate` of sampler.py.
    """
    asked = [(puzzle, [], policy.prompt(puzzle)) for puzzle in puzzles]  # Q
    return continued(policy, asked, uniforms, greedy=greedy, watch=watch)


def continued(policy: Policy, asked: list[tuple], uniforms: Tensor, limit: Tensor | None = None,
              excluded: Tensor | None = None, **how: Any) -> Samples:
    """What `respond` of turns.py samples: by `generate`, turn by turn if the task has turns.

    Several processes share the puzzles, and each of them returns all samples. (So if they are broken, all raise.)
    """
    found = shared(partial(respond, policy, **how), asked, uniforms=uniforms, limit=limit, excluded=excluded)
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
    decoded, G = [decode(policy, *response) for response in zip(tokens, before)], len(tokens) // len(puzzles)
    return decoded, [policy.grade(text, puzzles[i // G], turns) for i, (text, _, turns) in enumerate(decoded)]
