"""Rollout: puzzles -> prompts -> sampled tokens -> text -> grades, gathered in the batch that credit functions read.

`generate` of sampler.py samples tokens. Here they become graded responses: those of a training step (`rollout`, which
returns a TokenBatch), of an evaluation, and the continuations that VinePPO asks for (`generate_and_grade`). Queries is
what a credit function may ask the model about a step's responses.

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response, D hidden size. `s` is the
Settings. The task is a module such as countdown_task.py; the code here knows nothing of Countdown.

Run it:  python train.py --mitigation vineppo
"""
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbing.chat import chat_tokens
from plumbing.metrics import reply_length
from plumbing.processes import share_out
from plumbing.progress import Progress
from plumbing.task_file import check_grade, check_pieces, check_roles
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2, wide
from sampler import (Replies, Samples, distinct_texts, generate, response_attention, response_logprobs, response_states,
                     whole_groups)
from settings import Settings
from tasks.text import fingerprint

EVALUATION = "evaluation"  # stands for the step, where the random numbers of evaluation are drawn
ROWS_AT_ONCE = 768  # continuations that are sampled together


@dataclass
class TokenBatch:
    """Everything a credit function may look at: the B responses of one step, padded on the right to T tokens.

    Column t is the t-th token of the response; padding is 0 or False. Nothing carries a gradient. The batch is built
    once a step, before it is cut into micro-batches. The G responses to a puzzle are neighbours.

    `ask` runs the model again, and only the functions that use it pay for it: see Queries.
    """

    tokens: Tensor  # (B, T) int64 sampled tokens
    mask: Tensor  # (B, T) bool, True on sampled tokens (the end token included), False on padding
    logprob: Tensor  # (B, T) log pi(token), recorded while sampling
    entropy: Tensor  # (B, T) entropy of the sampling distribution, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    ended: Tensor  # (B,) bool, False where the token limit cut the response off
    before: Replies  # per response, by column t: the tokens of the environment's reply that stand before it
    reward: Tensor  # (B,) float64 "reward" of the task's `grade`, or a coin toss (--reward random)
    success: Tensor  # (B,) its "answer": 1 where that is right (or the coin shows heads), else 0
    format: Tensor  # (B,) its "format": how much of the requested layout it has, from 0 to 1
    grades: dict[str, Tensor]  # (B,) float64 each, its further numbers by their names, NaN where it returned none
    group: Tensor  # (B,) int64, index of the puzzle that the response answers
    puzzles: tuple  # Q, the task's
    task: ModuleType  # such as countdown_task
    role: Tensor  # (B, T) int8, of tasks/text.py: FILLER (prose, and padding), REASONING (arithmetic), STRUCTURE (tags)
    in_answer: Tensor  # (B, T) bool, whether the token belongs to the graded answer: in Countdown, from <answer> on
    text: tuple[str, ...]  # per response, decoded, end tokens removed, with the replies between its turns
    spans: tuple[tuple[tuple[int, int], ...], ...]  # per response, the character span of each token in the text
    normalize: str  # how `reweight` of mitigations.py rescales weights
    ask: "Queries"  # what a credit function may ask the model
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
        """The tokens of a puzzle's prompt. The task returns its text, or a tuple of pieces: the task's own words and
        foreign text, such as a question from a data file, by turns. A control token in foreign text, such as
        <|im_end|>, is encoded as plain characters.
        """
        found = self.task.prompt(puzzle, self.tokenizer.chat)
        if isinstance(found, list):  # messages
            return chat_tokens(self.tokenizer, found)
        return self.tokenizer.start + self.tokenizer.encode(*check_pieces(found, "prompt"))

    def reply(self, puzzle: Any, tokens: list[int]) -> list[int] | None:
        """What the task says after these tokens of a response, the last of which ended a turn; None where it is over.
        It is told the policy's own turns alone: a model that writes a reply itself forges nothing.
        """
        *_, turns = self.decode(tokens, {})
        said = self.task.reply(turns, puzzle, self.tokenizer.chat)
        if isinstance(said, list):
            return chat_tokens(self.tokenizer, said, self.conversation(puzzle, turns), tokens[-1])
        return None if said is None else self.tokenizer.encode(*check_pieces(said, "reply"))

    def conversation(self, puzzle: Any, turns: list[str]) -> list[dict]:
        """The messages up to the last of the policy's turns. What the task said in text is a user's message here."""
        said, messages = self.task.prompt(puzzle, self.tokenizer.chat), []
        for i, turn in enumerate(turns, 1):
            messages += said if isinstance(said, list) else [{"role": "user", "content": "".join(said)}]
            begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""  # a turn continues it
            messages.append({"role": "assistant", "content": begun + turn})
            said = self.task.reply(turns[:i], puzzle, self.tokenizer.chat) if i < len(turns) else None
        return messages

    def replies(self, puzzle: Any, tokens: list[int]) -> dict[int, list[int]]:
        """What was said before each column of a response that begins with these tokens, and goes on after them."""
        if not hasattr(self.task, "reply"):
            return {}
        ends = self.tokenizer.end_tokens
        return {t: self.reply(puzzle, tokens[:t]) for t, token in enumerate(tokens, 1) if token in ends}

    def context(self, puzzle: Any, tokens: list[int]) -> list[int]:
        """What the model reads before it continues these tokens of a response: the prompt, and all that was said."""
        before, text = self.replies(puzzle, tokens), [*self.prompt(puzzle)]
        for t in range(len(tokens) + 1):
            text += [*before.get(t, ()), *tokens[t : t + 1]]
        return text

    def decode(self, tokens: list[int], before: dict[int, list[int]]) -> tuple[str, list[tuple[int, int]], list[str]]:
        """The text of a response with its replies, the span of each of its tokens, and the texts of its own turns."""
        text, spans, turns = "", [], []
        stops = [t for t, token in enumerate(tokens, 1) if token in self.tokenizer.end_tokens]
        for a, b in pairwise(sorted({0, *stops, len(tokens)})):
            text += self.tokenizer.decode(before.get(a, ()))[0]
            turn, own = self.tokenizer.decode(tokens[a:b])
            spans += [(len(text) + start, len(text) + stop) for start, stop in own]
            text, turns = text + turn, [*turns, turn]
        return text, spans, turns


# ---------------------------------------------------------------------------------------------------- a step


def seed_of(purpose: str, *numbers: int | str) -> int:
    """The seed, of 63 bits as torch takes, of a generator of random numbers: from what it is for, such as "order",
    --seed, epoch.

    Every generator of a run has its seed from here, so no two share their numbers.
    """
    return fingerprint(f"{purpose} {numbers}") >> 1


def draw_puzzles(training: list, s: Settings, step: int) -> list:
    """The Q puzzles of a step. Every epoch shuffles the training puzzles anew; the order depends on the seed alone."""
    N, first = len(training), (step - 1) * s.questions
    drawn = range(first, first + s.questions)  # counted since the run began
    order = {epoch: np.random.default_rng(seed_of("order", s.seed, epoch)).permutation(N)
             for epoch in {i // N for i in drawn}}
    return [training[order[i // N][i % N]] for i in drawn]


def rollout(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Sample and grade the B responses of a step, G = --answers to each of Q puzzles."""
    uniforms = draw_uniforms(s.seed, step, len(puzzles), s.answers, s.max_new_tokens)  # (B, max_new_tokens)
    progress = Progress("sampling", len(uniforms), patience=5.0)  # seconds before it says anything
    samples = sample(policy, puzzles, uniforms, watch=progress.part(0, *uniforms.shape))
    return token_batch(policy, puzzles, samples, s, step)


def draw_uniforms(seed: int, step: int | str, Q: int, G: int, length: int) -> Tensor:
    """All random numbers for sampling in a step, (Q * G, length) float64 in [0, 1).

    Each puzzle has its own generator, so a response depends neither on the other puzzles nor on how many
    processes share the step.
    """
    rows = [np.random.default_rng(seed_of("sampling", seed, step, q)).random((G, length)) for q in range(Q)]
    return torch.from_numpy(np.concatenate(rows))


def token_batch(policy: Policy, puzzles: list, samples: Samples, s: Settings, step: int) -> TokenBatch:
    """Decode and grade the samples of a step. (`compare` of grpo.py adds the advantage.)"""
    (B, T), Q, device, task = samples.tokens.shape, len(puzzles), samples.tokens.device, policy.task
    grade = coin_toss(task, s.seed, step) if s.reward == "random" else task.grade
    decoded, grades = decode_and_grade(policy, puzzles, samples, None, grade)
    role, in_answer = np.zeros((B, T), np.int8), np.zeros((B, T), bool)  # (B, T) each
    for i, (text, spans) in enumerate(decoded):
        role[i, : len(spans)], in_answer[i, : len(spans)] = check_roles(task.roles(text, spans), len(spans))
    names = dict.fromkeys(name for found in grades for name in found)  # each once, in order
    # In float64, where 1e7 and 1e7 + 0.1 differ: float32 would make them equal rewards.
    graded = {name: torch.tensor([found.get(name, torch.nan) for found in grades], dtype=torch.float64, device=device)
              for name in names}  # (B,) each
    return TokenBatch(
        **samples._asdict(),  # tokens, mask, logprob, entropy, logit_grad, ended, before
        reward=graded.pop("reward"), success=graded.pop("answer").float(), format=graded.pop("format").float(),
        grades=graded,
        group=torch.arange(Q, device=device).repeat_interleave(B // Q), puzzles=tuple(puzzles), task=task,
        role=torch.from_numpy(role).to(device), in_answer=torch.from_numpy(in_answer).to(device),
        text=tuple(text for text, _ in decoded), spans=tuple(tuple(spans) for _, spans in decoded),
        normalize=s.normalize, ask=Queries(policy, tuple(puzzles), samples, s, step, grade))


# --------------------------------------------------------------------------------------------- graded responses


def sample(policy: Policy, puzzles: list, uniforms: Tensor, prefixes: list[list[int]] | None = None,
           limit: Tensor | None = None, excluded: Tensor | None = None, greedy: bool = False,
           watch: Callable | None = None) -> Samples:
    """`generate` of sampler.py, with what the task replies. Several processes share the puzzles, and each of them
    returns all samples. Arguments as of generate_and_grade.
    """
    G, prefixes = len(uniforms) // len(puzzles), prefixes or [[]] * len(puzzles)

    def sample_some(mine: list[int]) -> list[Samples]:
        """The samples of some puzzles, of G rows each."""
        reply = lambda row, tokens: policy.reply(puzzles[mine[row // G]], prefixes[mine[row // G]] + tokens)
        rows = torch.tensor([q * G + g for q in mine for g in range(G)])  # (M,)
        own_limit, own_excluded = (None if x is None else x[rows] for x in (limit, excluded))
        *found, before = generate(policy.model, [policy.context(puzzles[q], prefixes[q]) for q in mine], uniforms[rows],
                                  policy.tokenizer.end_tokens, own_limit, own_excluded, greedy, watch,
                                  reply if hasattr(policy.task, "reply") else None)
        # Clones, because a view that is sent to another process would carry the storage of the whole tensor.
        return [Samples(*(x[i : i + G].cpu().clone() for x in found), before[i : i + G])
                for i in range(0, len(rows), G)]

    samples = joined(share_out(list(range(len(puzzles))), sample_some), policy.model.output_weight.device)
    if not samples.logprob.isfinite().all():  # all processes hold the same samples, so all of them raise
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return samples


def joined(parts: list[Samples], device: torch.device) -> Samples:
    """Samples of several prompts as one, padded on the right to the longest response."""
    T = max(part.tokens.shape[1] for part in parts)
    padded = [[F.pad(x, (0, T - x.shape[1])) if x.dim() == 2 else x for x in part[:-1]] for part in parts]
    return Samples(*(torch.cat(field).to(device) for field in zip(*padded)),
                   tuple(replies for part in parts for replies in part.before))


def generate_and_grade(policy: Policy, puzzles: list, uniforms: Tensor, prefixes: list[list[int]] | None = None,
                       limit: Tensor | None = None, excluded: Tensor | None = None,
                       grade: Callable | None = None, greedy: bool = False,
                       watch: Callable | None = None) -> tuple[Samples, list[dict[str, float]]]:
    """Sample and grade B responses, one per row of uniforms (B, T), B / Q to each of Q puzzles.

    prefixes: for each puzzle, the sampled tokens that its responses begin with; replies follow from them. limit (B,):
    the most new tokens each may get, replies included. excluded (B,): a token that may not be the first new one. grade:
    replaces the task's. greedy, watch: see `generate`. Returns the samples (new tokens only) and the grades of each
    whole response.
    """
    samples = sample(policy, puzzles, uniforms, prefixes, limit, excluded, greedy, watch)
    return samples, decode_and_grade(policy, puzzles, samples, prefixes, grade or policy.task.grade)[1]


def decode_and_grade(policy: Policy, puzzles: list, samples: Samples, prefixes: list[list[int]] | None,
                     grade: Callable) -> tuple[list[tuple[str, list]], list[dict[str, float]]]:
    """Text with token spans, and grades, of each of B responses, its puzzle's prefix included."""
    lengths, G = samples.mask.sum(1).tolist(), len(samples.tokens) // len(puzzles)
    several_turns, decoded, grades = hasattr(policy.task, "reply"), [], []
    for i, (row, length, own) in enumerate(zip(samples.tokens.tolist(), lengths, samples.before)):
        puzzle, prefix = puzzles[i // G], prefixes[i // G] if prefixes else []
        tokens = prefix + row[:length]
        before = policy.replies(puzzle, prefix) | {len(prefix) + t: said for t, said in own.items()}
        text, spans, turns = policy.decode(tokens, before)
        decoded.append((text, spans))
        grades.append(check_grade(grade(text, puzzle, turns) if several_turns else grade(text, puzzle)))
    return decoded, grades


def coin_toss(task: ModuleType, seed: int, step: int) -> Callable[..., dict[str, float]]:
    """A stand-in for the task's `grade` that tosses a fair coin for each response, as a control: success must not rise.

    The format is graded as usual, but it is no part of the reward.
    """
    coin = np.random.default_rng(seed_of("coin", seed, step))

    def toss(*response: Any) -> dict[str, float]:
        answer = float(coin.integers(2))
        return check_grade(task.grade(*response)) | {"reward": answer, "answer": answer}

    return toss


# --------------------------------------------------------------------------------- what a credit function may ask


def once(compute: Callable) -> property:
    """A property that is computed at its first use. Each use gets a copy, so nobody can change what others read."""
    def get(ask: "Queries") -> Tensor:
        if compute.__name__ not in ask.computed:
            ask.computed[compute.__name__] = compute(ask)
        return ask.computed[compute.__name__].clone()
    return property(get, doc=compute.__doc__)


class Queries:
    """What a credit function may ask the model about the step's responses, such as `batch.ask.hidden`.

    Nothing is computed until it is asked for, and what is marked @once, and heads, only once. Several processes share
    the work, and each of them gets the whole result.
    """

    def __init__(self, policy: Policy, puzzles: tuple, samples: Samples, s: Settings, step: int, grade: Callable):
        """samples: B responses, B / Q to each of Q puzzles. grade: the task's, or a coin toss."""
        self.policy, self.puzzles, self.samples = policy, puzzles, samples
        self.s, self.step, self.grade = s, step, grade
        self.prompts = [policy.prompt(puzzle) for puzzle in puzzles]  # Q lists of tokens
        self.computed: dict[str, Tensor] = {}  # the answers so far
        # What the step cost so far, for metrics.csv: tokens sampled, and tokens read without gradient.
        self.tokens_sampled = int(samples.mask.sum())
        self.tokens_read = sum(map(len, self.prompts)) + reply_length(samples.before)

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
        """What a head of methods/heads.py says before each token (B, T), 0 on padding: "critic" the expected reward."""
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
        """Log-probs (R, T) of the responses rows (R,), repeats allowed, when no later token can attend to those marked
        in hide (R, T)."""
        if not len(rows):
            return self.samples.logprob[:0]  # (0, T)
        return self.read(response_logprobs, self.policy.model, rows, hide)

    def generator(self, name: str) -> torch.Generator:
        """A new generator, seeded by --seed, step and name: every call returns one in the same state.

        (On a CPU torch uses 32 bits of the seed: enough for a run's few thousand generators.)
        """
        return torch.Generator().manual_seed(seed_of(name, self.s.seed, self.step))

    @torch.no_grad()
    def read(self, reader: Callable, model: Qwen2, rows: Tensor | None = None, *per_row: Tensor) -> Tensor:
        """What a reader of sampler.py returns (R, T, ...) for the responses rows (R,), or for all.

        A reader is a function such as response_logprobs(model, prompts, prompt_of, tokens, mask, *per_row). It gets a
        few groups at a time. per_row: arguments with a row for each response.
        """
        tokens, mask, before = self.samples.tokens, self.samples.mask, self.samples.before  # (B, T) each, B
        rows = torch.arange(len(tokens), device=tokens.device) if rows is None else rows.to(tokens.device)
        group = rows // (len(tokens) // len(self.puzzles))  # (R,)
        chunks = whole_groups(group, self.s.micro_batch)  # of places in rows
        self.tokens_read += int(mask[rows].sum()) + reply_length([before[i] for i in rows.tolist()])
        self.tokens_read += sum(len(self.prompts[q]) for chunk in chunks for q in set(group[chunk].tolist()))

        def read_some(mine: list[Tensor]) -> list[Tensor]:
            return [reader(model, self.prompts, group[chunk], tokens[rows[chunk]], mask[rows[chunk]],
                           *(x[chunk] for x in per_row), before=[before[i] for i in rows[chunk].tolist()]).cpu()
                    for chunk in mine]

        return torch.cat(share_out(chunks, read_some)).to(tokens.device)

    def rollout_values(self, counts: Tensor, other: bool = False) -> Tensor:
        """The mean reward (B, T) of counts (B, T) continuations of the text before each token (column 0: of the prompt
        alone), 0 where there are none.

        In float64, and the mean of equal rewards is that reward. A continuation has as many tokens as the limit
        still allows. other: it begins with any token but the actual one. Prefixes of similar length are sampled
        together.
        """
        counts = counts.cpu().long()  # (B, T)
        # k, the greatest common divisor of the counts (VinePPO's --k): k continuations of a prefix are one group of
        # `generate`. As groups of their own they took a third longer.
        k = int(np.gcd.reduce(counts.flatten().numpy())) or 1
        starts = counts.nonzero().repeat_interleave(counts[counts > 0] // k, 0)  # (N, 2) response and position
        uniforms = torch.rand(len(starts), k, self.s.max_new_tokens, generator=self.generator("rollouts"),
                              dtype=torch.float64)  # (N, k, limit)
        rewards = torch.zeros(len(starts), k, dtype=torch.float64)  # (N, k)
        order = starts[:, 1].argsort(stable=True)  # (N,) shortest prefix first
        for chunk in order.split(max(1, ROWS_AT_ONCE // k)) if len(order) else ():  # (n,)
            rewards[chunk] = self.continue_from(starts[chunk], uniforms[chunk], other)  # (n, k)
        where, zero = tuple(starts.T), torch.zeros(counts.shape, dtype=torch.float64)
        one = zero.index_put(where, rewards[:, 0])  # (B, T) a reward of each prefix
        total = zero.index_put(where, (rewards - one[where][:, None]).sum(1), accumulate=True)
        return (one + total / counts.clamp(min=1)).to(self.samples.tokens.device)

    def continue_from(self, starts: Tensor, uniforms: Tensor, other: bool) -> Tensor:
        """The rewards (n, k) of k continuations of each of n prefixes, with the random numbers uniforms (n, k, limit).

        starts (n, 2): a response, and the position of the first token that is sampled anew.
        """
        tokens, k, (rows, positions) = self.samples.tokens, uniforms.shape[1], starts.T  # (n,) each
        asked = (rows // (len(tokens) // len(self.puzzles))).tolist()  # n, the puzzle of each prefix
        prefixes = [tokens[row, :t].tolist() for row, t in starts.tolist()]  # n
        texts = [self.policy.context(self.puzzles[q], prefix) for q, prefix in zip(asked, prefixes)]  # n
        left = torch.tensor([self.s.max_new_tokens - (len(text) - len(self.prompts[q]))
                             for q, text in zip(asked, texts)])  # (n,) of the limit, in which replies count, too
        excluded = tokens[rows, positions].repeat_interleave(k) if other else None  # (n * k,)
        samples, grades = generate_and_grade(
            self.policy, [self.puzzles[q] for q in asked], uniforms[..., : left.max()].flatten(0, 1), prefixes,
            left.repeat_interleave(k), excluded, self.grade)
        self.tokens_sampled += int(samples.mask.sum())
        # A text that begins another one is not read separately, so it doesn't count.
        self.tokens_read += sum(map(len, distinct_texts(texts)[0])) + reply_length(samples.before)
        return torch.tensor([grade["reward"] for grade in grades], dtype=torch.float64).view(-1, k)
