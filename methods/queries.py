"""What a credit function may ask about a step's responses: `batch.ask`, whose answers run the model
again.

The model runs when it is asked, and not before.

Alphabet: Q puzzles, G responses to each, B = Q G responses, m of which are read, b at a time; T
tokens of the longest response, S columns with replies, n sampled tokens, or continuations; D hidden
size. `s` is the Settings.

Run it:  python train.py --mitigation vineppo
"""
from functools import partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbing.checks import per_token
from plumbing.metrics import sampling_cost, tokens_in
from plumbing.shared_prompts import (MicroBatch, logprobs, predicting_states, read_responses,
                                     responses)
from qwen2_model import Qwen2, probabilities, wide
from rollout import Begun, Policy, TokenBatch, group_mean, respond, seed_of
from sampler import Rules
from settings import Settings

ROWS_AT_ONCE = 768  # continuations that are sampled together


class Queries:
    """What can be asked about one batch."""

    def __init__(self, policy: Policy, batch: TokenBatch, s: Settings, step: int):
        self.policy = policy.for_step(s, step, "continuations")
        self.batch = batch
        self.s = s
        self.step = step
        self.computed: dict[str, Tensor] = {}  # the answers so far
        # What the step cost so far, for metrics.csv: tokens sampled, and tokens read without
        # gradient.
        self.tokens_sampled, self.tokens_read = sampling_cost(batch.prompts, batch)

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """What is computed at the first call. Each call gets a copy, so nobody can change what
        others read."""
        if name not in self.computed:
            self.computed[name] = compute()
        return self.computed[name].clone()

    @property
    def hidden(self) -> Tensor:
        """The model's last hidden state (B, T, D) before it emits each token, in float32 or
        wider."""
        return self.once("hidden", lambda: wide(self.read(predicting_states, self.policy.model)))

    @property
    def attention(self) -> Tensor:
        """Attention (B, T, T): [:, t, u] is how much the state that predicts token t attends to
        token u < t.

        Of the last layer, averaged over its heads.
        """
        reader = partial(attention_paid, self.batch.tokens.shape[1])
        return self.once("attention", lambda: self.read(reader, self.policy.model))

    @torch.no_grad()
    def head(self, name: str) -> Tensor:
        """What a head of methods/heads.py says before each token (B, T), 0 on padding: "critic" the
        expected reward."""
        if name not in self.policy.heads:
            raise ValueError(
                f'no {name}: add needs=("{name}",) to the decorator of this credit function')
        head = self.policy.heads[name]
        said = lambda: head.read(self.hidden, self.batch.mask)
        duty = f"the head {name} must read numbers"
        return self.once(f"head {name}", lambda: per_token(said(), self.batch, duty))

    @property
    def reference_logprob(self) -> Tensor:
        """Log-prob (B, T) of each token under the reference model, 0 on padding."""
        if self.policy.reference is None:
            raise ValueError(
                'no reference model: add needs=("reference",) to the decorator of this credit '
                "function, or the name of a shaping that asks for it, as kl does, to load_policy "
                "in start.py")
        return self.once("reference", lambda: self.read(logprobs, self.policy.reference))

    def logprob_without(self, rows: Tensor, hide: Tensor) -> Tensor:
        """Log-probs (m, T) of the responses rows (m,) where no state attends to earlier tokens
        marked in hide (m, T). The token right behind such a one is still predicted by its state. A
        response may be asked for several times."""
        if not len(rows):
            return self.batch.logprob[:0]  # (0, T)
        return self.read(logprobs_without, self.policy.model, rows, hide)

    def generator(self, name: str) -> torch.Generator:
        """A new generator, seeded by --seed, step and name: every call returns one in the same
        state.

        (On a CPU torch uses 32 bits of the seed: enough for a run's few thousand generators.)
        """
        return torch.Generator().manual_seed(seed_of(name, self.s.seed, self.step))

    @torch.no_grad()
    def read(
        self, reader: Callable, model: Qwen2, rows: Tensor | None = None, *given: Tensor
    ) -> Tensor:
        """What a reader finds, (m, T, ...), in the responses rows (m,), or in all. given (m, T,
        ...): what it is told of each token. See `read_responses` of plumbing/shared_prompts.py."""
        batch = self.batch
        rows = (torch.arange(len(batch.tokens)) if rows is None else rows).to(batch.tokens.device)
        self.tokens_read += tokens_in(batch, rows)
        return read_responses(reader, model, *responses(batch, rows), given, self.s.micro_batch)

    def rollout_values(self, counts: Tensor, other: bool = False) -> Tensor:
        """The mean reward (B, T) of counts[i, t] continuations of response i from just before its
        token t (column 0: of the prompt alone), 0 where there are none.

        In float64, and the mean of equal rewards is that reward. A continuation has as many tokens
        as the limit still allows. other: it begins with any token but the actual one. Prefixes of
        like length are sampled together.
        """
        counts = counts.cpu().long()  # (B, T)
        each = counts[counts > 0]  # (p,) how many continuations start at each of p places
        starts = counts.nonzero().repeat_interleave(each, 0)  # (n, 2) of each: response, position
        uniforms = torch.rand(len(starts), self.s.max_new_tokens, dtype=torch.float64,
                              generator=self.generator("rollouts"))  # (n, limit)
        rewards = torch.zeros(len(starts), dtype=torch.float64)  # (n,)
        order = starts[:, 1].argsort(stable=True)  # (n,) the shortest prefix first
        for chunk in filter(len, order.split(ROWS_AT_ONCE)):  # (c,)
            rewards[chunk] = self.continue_from(starts[chunk], uniforms[chunk], other)
        values = torch.zeros(counts.shape, dtype=torch.float64)  # (B, T)
        means = [group_mean(found[None]).item() for found in rewards.split(each.tolist())]  # p
        values[counts > 0] = torch.tensor(means, dtype=torch.float64)
        return values.to(self.batch.tokens.device)

    def continue_from(self, starts: Tensor, uniforms: Tensor, other: bool) -> Tensor:
        """The reward (n,) of a continuation from each of n places, with the random numbers uniforms
        (n, limit).

        starts (n, 2): a response, and the position of the first token that is sampled anew.
        """
        batch = self.batch
        places = starts.tolist()  # n
        asked = batch.group[starts[:, 0]].tolist()
        puzzles = [batch.puzzles[q] for q in asked]
        prompts = [batch.prompts[q] for q in asked]
        begun = [Begun(batch.tokens[i, :t].tolist(),
                       {c: said for c, said in batch.before[i].items() if c <= t})
                 for i, t in places]  # n
        left = self.s.max_new_tokens - torch.tensor([len(own.read) for own in begun])  # (n,)
        excluded = batch.tokens[starts[:, 0], starts[:, 1]] if other else None  # (n,)
        rules = Rules(limit=left, excluded=excluded)
        found = respond(self.policy, puzzles, prompts, uniforms[:, : left.max()], rules, begun)
        texts = [prompt + own.read for prompt, own in zip(prompts, begun)]
        sampled, read = sampling_cost(texts, found.samples)
        self.tokens_sampled += sampled
        self.tokens_read += read
        return torch.tensor([grade["reward"] for grade in found.grades], dtype=torch.float64)


# -------------------------------------------------------------------------- readers of one question


def attention_paid(T: int, model: Qwen2, micro: MicroBatch) -> Tensor:
    """What the state before each sampled token pays to each token of its response, (n, T), in the
    last layer, averaged over its heads. What is paid to the prompt and to replies is left out."""
    last, given = model.layers[-1], []
    with last.register_forward_pre_hook(lambda _, arguments: given.extend(arguments)):
        model.hidden(micro.inputs, micro.cache)
    x, rotation, mask, _ = given  # the arguments of Layer.forward
    q, _, _ = last.heads(x, rotation)  # (b, H, S, d)
    paid = wide(probabilities(q, micro.cache.keys[-1], mask).mean(1))  # (b, S, C)
    paid = paid[..., -x.shape[1] :]  # (b, S, S) to each input
    states = [row.nonzero()[:, 0] for row in micro.sampled]  # b, (k,) each
    own = [p[s][:, s[:-1] + 1] for p, s in zip(paid, states)]  # (k, k - 1): s predicts input s + 1
    return torch.cat([F.pad(x, (0, T - x.shape[1])) for x in own])  # (n, T)


def logprobs_without(model: Qwen2, micro: MicroBatch, hide: Tensor) -> Tensor:
    """log pi (n,) where no state attends to earlier tokens that are marked in hide (n,): see
    logprob_without."""
    # (b, S) which of the predicted tokens are hidden, and (b, 1, 1, S) which of the inputs: input s
    # is what state s - 1 predicts.
    predicted = torch.zeros_like(micro.sampled).masked_scatter(micro.sampled, hide)
    inputs = F.pad(predicted[:, :-1], (1, 0))[:, None, None]
    others = ~torch.eye(inputs.shape[3], dtype=torch.bool, device=inputs.device)  # not from itself
    states = model.hidden(micro.inputs, micro.cache, inputs & others)[micro.sampled]  # (n, D)
    return model.logprob(states, micro.tokens)
