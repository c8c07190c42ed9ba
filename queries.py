"""What a credit function may ask about a step's responses: `batch.ask`, whose answers run the model again.

Nothing is computed until it is asked for. Several processes share the work, and each of them gets the whole answer.

Alphabet: Q puzzles, G responses to each, B = Q G responses, T tokens of the longest response, D hidden size. `s` is the
Settings.

Run it:  python train.py --mitigation vineppo
"""
from functools import partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbing.metrics import sampling_cost, tokens_in
from plumbing.policy import Policy, seed_of
from plumbing.processes import shared
from qwen2_model import Qwen2, probabilities, wide
from rollout import TokenBatch, decode_and_grade, responses, sample, tokens_of
from sampler import Part, Samples, part_logprobs, part_states, read_responses
from settings import Settings
from turns import replies, transcript

ROWS_AT_ONCE = 768  # continuations that are sampled together


class Queries:
    """The answers about one batch."""

    def __init__(self, policy: Policy, batch: TokenBatch, s: Settings, step: int):
        self.policy, self.batch, self.s, self.step = policy.for_step(s, step, "continuations"), batch, s, step
        self.computed: dict[str, Tensor] = {}  # the answers so far
        # What the step cost so far, for metrics.csv: tokens sampled, and tokens read without gradient.
        self.tokens_sampled, self.tokens_read = sampling_cost(batch.prompts, batch)

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """What is computed at the first call. Each call gets a copy, so nobody can change what others read."""
        if name not in self.computed:
            self.computed[name] = compute()
        return self.computed[name].clone()

    @property
    def hidden(self) -> Tensor:
        """The model's last hidden state (B, T, D) before it emits each token, in float32 or wider, as heads are."""
        return self.once("hidden", lambda: wide(self.read(part_states, self.policy.model)))

    @property
    def attention(self) -> Tensor:
        """Attention (B, T, T): [:, t, u] is how much the state that predicts token t attends to token u < t.

        Of the last layer, averaged over its heads.
        """
        return self.once("attention", lambda: self.read(attention_paid, self.policy.model, None, self.batch.mask))

    @torch.no_grad()
    def head(self, name: str) -> Tensor:
        """What a head of methods/heads.py says before each token (B, T), 0 on padding: "critic" the expected reward."""
        if name not in self.policy.heads:
            raise ValueError(f'no {name}: add needs=("{name}",) to the decorator of this credit function')
        return self.once(name, lambda: self.policy.heads[name].read(self.hidden, self.batch.mask))

    @property
    def reference_logprob(self) -> Tensor:
        """Log-prob (B, T) of each token under the reference model, 0 on padding."""
        if self.policy.reference is None:
            raise ValueError('no reference model: add needs=("reference",) to the decorator of this credit function')
        return self.once("reference", lambda: self.read(part_logprobs, self.policy.reference))

    def logprob_without(self, rows: Tensor, hide: Tensor) -> Tensor:
        """Log-probs (R, T) of the responses rows (R,), repeats allowed, when no later token can attend to those marked
        in hide (R, T)."""
        if not len(rows):
            return self.batch.logprob[:0]  # (0, T)
        return self.read(logprobs_without, self.policy.model, rows, hide, self.batch.mask[rows])

    def generator(self, name: str) -> torch.Generator:
        """A new generator, seeded by --seed, step and name: every call returns one in the same state.

        (On a CPU torch uses 32 bits of the seed: enough for a run's few thousand generators.)
        """
        return torch.Generator().manual_seed(seed_of(name, self.s.seed, self.step))

    @torch.no_grad()
    def read(self, reader: Callable, model: Qwen2, rows: Tensor | None = None, *per_row: Tensor) -> Tensor:
        """What a reader (see `read_responses` of sampler.py) finds, (R, T, ...), in the responses rows (R,), or in all.

        per_row: arguments with a row for each response.
        """
        batch, T = self.batch, self.batch.tokens.shape[1]
        rows = (torch.arange(len(batch.tokens)) if rows is None else rows).to(batch.tokens.device)
        self.tokens_read += tokens_in(batch, rows)

        def read_some(mine: list[int]) -> tuple[Tensor]:
            found = read_responses(reader, model, *responses(batch, rows[mine]), [x[mine] for x in per_row],
                                   self.s.micro_batch)  # (R, T, ...), or wider by replies
            return (found[:, :T],)

        (found,) = shared(read_some, list(range(len(rows))))  # (R, T, ...)
        return found.to(batch.tokens.device)

    def rollout_values(self, counts: Tensor, k: int = 1, other: bool = False) -> Tensor:
        """The mean reward (B, T) of k times counts (B, T) continuations of the text before each token (column 0: of the
        prompt alone), 0 where there are none.

        In float64, and the mean of equal rewards is that reward. A continuation has as many tokens as the limit
        still allows. other: it begins with any token but the actual one. Prefixes of similar length are sampled
        together, k continuations of one side by side.
        """
        counts = counts.cpu().long()  # (B, T)
        starts = counts.nonzero().repeat_interleave(counts[counts > 0], 0)  # (N, 2) response and position
        uniforms = torch.rand(len(starts), k, self.s.max_new_tokens, generator=self.generator("rollouts"),
                              dtype=torch.float64)  # (N, k, limit)
        rewards = torch.zeros(len(starts), k, dtype=torch.float64)  # (N, k)
        order = starts[:, 1].argsort(stable=True)  # (N,) shortest prefix first
        for chunk in order.split(max(1, ROWS_AT_ONCE // k)) if len(order) else ():  # (n,)
            rewards[chunk] = self.continue_from(starts[chunk], uniforms[chunk], other)  # (n, k)
        where, zero = tuple(starts.T), torch.zeros(counts.shape, dtype=torch.float64)
        first = zero.index_put(where, rewards[:, 0])  # (B, T) a reward of each prefix
        more = zero.index_put(where, (rewards - first[where][:, None]).sum(1), accumulate=True)
        return (first + more / (k * counts).clamp(min=1)).to(self.batch.tokens.device)

    def continue_from(self, starts: Tensor, uniforms: Tensor, other: bool) -> Tensor:
        """The rewards (n, k) of k continuations of each of n prefixes, with the random numbers uniforms (n, k, limit).

        starts (n, 2): a response, and the position of the first token that is sampled anew.
        """
        batch, k, (rows, positions) = self.batch, uniforms.shape[1], starts.T  # (n,) each
        asked, begun = [], []  # n each: see `sample`; and the length of the prefix with its replies
        for q, row, t in zip(batch.group[rows].tolist(), *starts.T.tolist()):
            puzzle, prefix = batch.puzzles[q], batch.tokens[row, :t].tolist()
            said = transcript(self.policy, puzzle, prefix)
            asked.append((puzzle, prefix, batch.prompts[q] + said))
            begun.append(len(said))
        left = self.s.max_new_tokens - torch.tensor(begun)  # (n,) of the limit, in which replies count, too
        excluded = batch.tokens[rows, positions].repeat_interleave(k) if other else None  # (n * k,)
        samples, grades = continue_and_grade(self.policy, asked, uniforms[..., : left.max()].flatten(0, 1),
                                             left.repeat_interleave(k), excluded)
        sampled, read = sampling_cost([text for *_, text in asked], samples)
        self.tokens_sampled += sampled
        self.tokens_read += read
        return torch.tensor([grade["reward"] for grade in grades], dtype=torch.float64).view(-1, k)


def continue_and_grade(policy: Policy, asked: list[tuple], uniforms: Tensor, limit: Tensor,
                       excluded: Tensor | None) -> tuple[Samples, list[dict[str, float]]]:
    """Continue each of Q responses B / Q times, and grade the B whole ones. asked: see `sample`.

    uniforms (B, T): the random number behind each new token. limit (B,): the most new tokens each may get, replies
    included. excluded (B,): a token that may not be the first new one. The samples have the new tokens alone.
    """
    samples, G = sample(policy, asked, uniforms, limit, excluded), len(uniforms) // len(asked)
    puzzles, prefixes, _ = map(list, zip(*asked))  # Q each
    heard = [*map(partial(replies, policy), puzzles, prefixes)]  # Q, before the new tokens
    tokens = [prefixes[i // G] + new for i, new in enumerate(tokens_of(samples))]  # B
    before = [heard[i // G] | {len(prefixes[i // G]) + t: said for t, said in new.items()}
              for i, new in enumerate(samples.before)]
    _, grades = decode_and_grade(policy, puzzles, tokens, before)
    return samples, grades


# ------------------------------------------------------------------------------------------- readers of one question


def attention_paid(model: Qwen2, part: Part, mask: Tensor) -> Tensor:
    """What the state before each sampled token pays to each token of its response, (n, T), in the last layer, averaged
    over its heads; mask (r, T). What is paid to the prompt and to replies is left out."""
    last, given = model.layers[-1], []
    with last.register_forward_pre_hook(lambda _, arguments: given.extend(arguments)):
        model.hidden(part.inputs, part.cache)
    x, rotation, seen, _ = given
    q, _, _ = last.heads(x, rotation)  # (r, H, S, d)
    paid = wide(probabilities(q, part.cache.keys[-1], seen).mean(1))  # (r, S, C)
    own = F.pad(paid[:, :, seen.shape[3] - x.shape[1] + 1 :], (0, 1))  # (r, S, S) from each state to each token
    found = own.new_zeros(*mask.shape, mask.shape[1])  # (r, T, T)
    found[mask[:, :, None] & mask[:, None]] = own[part.sampled[:, :, None] & part.sampled[:, None]]
    return found[mask]


def logprobs_without(model: Qwen2, part: Part, hide: Tensor, mask: Tensor) -> Tensor:
    """log pi (n,) where no later token sees those that are marked in hide (r, T); mask (r, T)."""
    marked = torch.zeros_like(part.sampled).masked_scatter(part.sampled, hide[mask])  # (r, S) what a state predicts
    marked = F.pad(marked, (1, -1))[:, None, None]  # (r, 1, 1, S) what a column holds: the token before
    others = ~torch.eye(marked.shape[3], dtype=torch.bool, device=marked.device)  # a hidden token still sees itself
    return model.logprob(model.hidden(part.inputs, part.cache, marked & others)[part.sampled], part.tokens)
