"""What a credit function may ask about a step's responses: `batch.ask`, whose answers run the model
again.

The model runs when it is asked, and not before.

Alphabet: Q puzzles, G responses to each, B = Q G responses, m of which are read, b at a time, with
n sampled tokens; T tokens of the longest response, S columns with replies; N continuations; D
hidden size. `s` is the Settings.

Run it:  python train.py --mitigation vineppo
"""
from functools import partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from extras.turns import Begun, respond
from grpo import group_mean
from plumbing.checks import per_token
from plumbing.metrics import sampling_cost, tokens_in
from qwen2_model import Cache, Qwen2, at_least_float32, probabilities
from rollout import Policy, TokenBatch, coin_of, seed_of
from sampler import Piece, Rules, logprobs_of, read_responses, states_of
from settings import Settings

ROWS_AT_ONCE = 768  # continuations that are sampled together


class Queries:
    """What can be asked about one batch."""

    def __init__(self, policy: Policy, batch: TokenBatch, s: Settings, step: int):
        # A coin grades continuations, too, where --reward random says so: another one.
        self.policy = policy._replace(coin=coin_of(s, step, "continuations"))
        self.batch = batch
        self.s = s
        self.step = step
        self.computed: dict[str, Tensor] = {}  # the answers so far
        # What the step cost so far, for metrics.csv: tokens sampled, and tokens read without
        # gradient.
        prompts = [batch.prompts[q] for q in batch.group.tolist()]  # B
        self.tokens_sampled, self.tokens_read = sampling_cost(prompts, batch)

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
        return self.once(
            "hidden", lambda: at_least_float32(self.read(states_of, self.policy.model)))

    @property
    def attention(self) -> Tensor:
        """Attention (B, T, T): [:, t, u] is how much the state that predicts token t attends to an
        earlier token u, in the last layer, averaged over its heads."""
        T = self.batch.tokens.shape[1]
        return self.once(
            "attention", lambda: self.read(partial(attention_paid, T=T), self.policy.model))

    @torch.no_grad()
    def head(self, name: str) -> Tensor:
        """What a head of methods/heads.py says before each token (B, T), 0 on padding: "critic" the
        expected reward."""
        if name not in self.policy.heads:
            raise ValueError(
                f'no {name}: add needs=("{name}",) to the decorator of this credit function')
        head = self.policy.heads[name]
        answer = lambda: per_token(head.read(self.hidden, self.batch.mask), self.batch,
                                   f"the head {name} must read numbers")
        return self.once(f"head {name}", answer)

    @property
    def reference_logprob(self) -> Tensor:
        """Log-prob (B, T) of each token under the reference model, 0 on padding."""
        if self.policy.reference is None:
            raise ValueError(
                'no reference model: add needs=("reference",) to the decorator of this credit '
                "function, or the name of a shaping that asks for it, as kl does, to load_policy "
                "in start.py")
        return self.once("reference", lambda: self.read(logprobs_of, self.policy.reference))

    def logprob_without(self, rows: Tensor, hide: Tensor) -> Tensor:
        """Log-probs (m, T) of the responses rows (m,) where no later state attends to the tokens
        marked in hide (m, T). The state of a hidden token still predicts the next token. A response
        may occur in rows several times."""
        if not len(rows):
            return self.batch.logprob[:0]  # (0, T)
        return self.read(logprobs_without, self.policy.model, rows, hide)

    def generator(self, name: str) -> torch.Generator:
        """A new generator, seeded by --seed, step and name: every call returns one in the same
        state.

        """
        return torch.Generator().manual_seed(seed_of(name, self.s.seed, self.step))

    @torch.no_grad()
    def read(
        self, reader: Callable, model: Qwen2, rows: Tensor | None = None, *given: Tensor
    ) -> Tensor:
        """What a reader finds, (m, T, ...), in the responses rows (m,), or in all: see
        `read_responses` of sampler.py."""
        batch = self.batch
        rows = (torch.arange(len(batch.tokens)) if rows is None else rows).to(batch.tokens.device)
        self.tokens_read += tokens_in(batch, rows)
        return read_responses(model, batch, rows, reader, given, self.s.micro_batch)

    def rollout_values(self, counts: Tensor, other: bool = False) -> Tensor:
        """The mean reward (B, T) of counts[i, t] continuations of response i from just before its
        token t (column 0: of the prompt alone), 0 where there are none.

        In float64, and the mean of equal rewards is that reward. A continuation has as many tokens
        as the limit still allows. other: it begins with any token but the actual one. Prefixes of
        like length are sampled together.
        """
        counts = counts.cpu().long()  # (B, T)
        places = counts.nonzero()  # (p, 2) response and position
        each = counts[counts > 0]  # (p,) continuations from each place
        starts = places.repeat_interleave(each, 0)  # (N, 2)
        uniforms = torch.rand(len(starts), self.s.max_new_tokens, dtype=torch.float64,
                              generator=self.generator("rollouts"))  # (N, limit)
        rewards = torch.zeros(len(starts), dtype=torch.float64)  # (N,)
        shortest_first = starts[:, 1].argsort(stable=True)  # (N,)
        for chunk in shortest_first.split(ROWS_AT_ONCE):  # (c,)
            if len(chunk):  # else nothing was asked for
                rewards[chunk] = self.continue_from(starts[chunk], uniforms[chunk], other)
        values = torch.zeros(counts.shape, dtype=torch.float64)  # (B, T)
        for (i, t), found in zip(places.tolist(), rewards.split(each.tolist())):
            values[i, t] = group_mean(found[None]).item()
        return values.to(self.batch.tokens.device)

    def continue_from(self, starts: Tensor, uniforms: Tensor, other: bool) -> Tensor:
        """The reward (c,) of a continuation from each of c places, with the random numbers uniforms
        (c, limit).

        starts (c, 2): a response, and the position of the first token that is sampled anew.
        """
        batch, begun = self.batch, []
        for i, t in starts.tolist():  # with the replies up to the one before position t
            before = {column: reply for column, reply in batch.before[i].items() if column <= t}
            begun.append(Begun(batch.tokens[i, :t].tolist(), before))
        asked = batch.group[starts[:, 0]].tolist()
        puzzles, prompts = [batch.puzzles[q] for q in asked], [batch.prompts[q] for q in asked]
        left = self.s.max_new_tokens - torch.tensor([len(b.text) for b in begun])  # (c,)
        excluded = batch.tokens[starts[:, 0], starts[:, 1]] if other else None  # (c,)
        rules, uniforms = Rules(limits=left, excluded=excluded), uniforms[:, : left.max()]
        found = respond(self.policy, puzzles, prompts, uniforms, rules, begun)
        texts = [prompt + b.text for prompt, b in zip(prompts, begun)]
        sampled, read = sampling_cost(texts, found.samples)
        self.tokens_sampled += sampled
        self.tokens_read += read
        return torch.tensor([grade["reward"] for grade in found.grades], dtype=torch.float64)


# -------------------------------------------------------------------------- readers of one question


def attention_paid(model: Qwen2, inputs: Tensor, cache: Cache, piece: Piece, T: int) -> Tensor:
    """What the state before each sampled token pays to each token of its response, (n, T), in the
    last layer, averaged over its heads. What is paid to the prompt and to replies is left out."""
    *layers, last = model.layers
    x, rotation, mask = model.begin(inputs, cache)
    for i, layer in enumerate(layers):
        x = layer(x, rotation, mask, partial(cache.extend, i))  # (b, S, D)
    q, k, v = last.heads(x, rotation)  # (b, H, S, d), (b, K, S, d), (b, K, S, d)
    keys, _ = cache.extend(len(layers), k, v)  # (b, K, C, d)
    S = x.shape[1]
    paid = at_least_float32(probabilities(q, keys, mask).mean(1))[..., -S:]  # (b, S, S) to inputs
    rows = []
    for pays, sampled in zip(paid, piece.sampled):  # (S, S), (S,) of a response
        state = sampled.nonzero()[:, 0]  # (L,) the state of token t is that of input state[t]
        token = state[:-1] + 1  # (L - 1,) and token t is the next input
        rows.append(F.pad(pays[state][:, token], (0, T + 1 - len(state))))  # (L, T)
    return torch.cat(rows)


def logprobs_without(
    model: Qwen2, inputs: Tensor, cache: Cache, piece: Piece, hide: Tensor
) -> Tensor:
    """log pi (n,) where no later state attends to the tokens marked in hide (n,)."""
    # Input s + 1 is the token that state s predicts.
    predicted = torch.zeros_like(piece.sampled).masked_scatter(piece.sampled, hide)  # (b, S)
    hidden = F.pad(predicted[:, :-1], (1, 0))[:, None]  # (b, 1, S) by input
    S = hidden.shape[2]
    itself = torch.eye(S, dtype=torch.bool, device=hide.device)  # (S, S), which still sees itself
    states = model.hidden(inputs, cache, hidden & ~itself)[piece.sampled]  # (n, D)
    return model.logprob(states, piece.text[piece.sampled])
