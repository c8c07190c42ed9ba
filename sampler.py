"""Sampling: prompts are read once, responses grow token by token on a KV cache, and training reads them again.

How this differs from the usual `generate`:
1. A prompt is read (run through the model) once for all of its responses, both here and, with gradient, in the update.
2. All randomness comes in as uniform numbers, one row per response. So a response does not depend on the others in
   its batch.
3. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling, so that the credit log
   costs no extra forward pass.
4. Responses that have ended leave the batch.

Usually every row of a batch holds a prompt and one response. Here, wherever finished responses are read again, each
prompt is a row of its own, and the responses are rows that attend to it, so that a prompt with G responses is computed
once. Only ResponseCache and the three functions at the end know of this layout. tests/plain.py has the usual one, in 40
lines, for comparison.

Alphabet: Q prompts, G responses to each, B = Q G responses, P prompt columns, T response columns (while sampling: as
many as a response may have), V vocabulary, D
hidden size, K key-value heads, d head size, S response columns read at once, N real tokens in a flat list. B' <= B rows
are still running.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen2_model import Qwen2, causal_bias, entropy_and_logit_grad, take, token_logprobs


class Samples(NamedTuple):
    """B responses, padded on the right to the longest. Column t is the t-th token of the response.

    Log-prob, entropy and logit gradient are those of the model's whole distribution pi at temperature 1, even if the
    token was drawn from another one.
    """

    tokens: Tensor  # (B, T) int64, 0 on padding
    mask: Tensor  # (B, T) bool, True on sampled tokens, the end token included
    logprob: Tensor  # (B, T) log pi(token), 0 on padding
    entropy: Tensor  # (B, T) entropy of pi before the token, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||: how hard log pi of this token pulls on the logits (gradient norm)
    ended: Tensor  # (B,) bool, False where the token limit cut the response off


# ---------------------------------------------------------------------------------------------------- caches


class PromptCache:
    """Q prompts, read once for all their responses: each layer's keys and values, with gradient if autograd is on."""

    def __init__(self, model: Qwen2, prompts: list[list[int]]):
        P, device = max(map(len, prompts)), model.output_weight.device
        tokens = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)  # (Q, P) padded on the left
        self.length = torch.tensor([len(p) for p in prompts], device=device)  # (Q,)
        positions = torch.arange(P, device=device) - (P - self.length)[:, None]  # (Q, P) negative in the padding
        self.real = positions >= 0  # (Q, P)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values (Q, K, P, d)
        # The layers hand their keys and values to self.extend. A padding column sees itself (causal_bias), so that no
        # softmax is empty, and no other column sees it.
        hidden = model.hidden(tokens, positions.clamp(min=0), causal_bias(self.real), self)  # (Q, P, D)
        self.last = hidden[:, -1]  # (Q, D) the state that predicts a response's first token

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values (Q, K, P, d), and return them: there are no earlier columns."""
        self.layers[layer] = keys, values
        return keys, values

    def detach(self) -> "PromptCache":
        """A copy cut off from the graph, whose tensors accumulate the gradients of all micro-batches."""
        leaf = copy.copy(self)
        leaf.last = self.last.detach().requires_grad_()
        leaf.layers = {i: tuple(x.detach().requires_grad_() for x in pair) for i, pair in self.layers.items()}
        return leaf

    def backward(self, leaf: "PromptCache") -> None:
        """Backpropagate the gradients accumulated in a detached copy through the prompts."""
        pairs = [(self.last, leaf.last)]
        for layer, both in self.layers.items():
            pairs += zip(both, leaf.layers[layer])
        torch.autograd.backward([tensor for tensor, _ in pairs], [detached.grad for _, detached in pairs])


class ResponseCache:
    """The context of B finished responses. prompt_of (B,): the index of each one's prompt in a PromptCache."""

    def __init__(self, prompts: PromptCache, prompt_of: Tensor):
        self.prompts, self.prompt_of = prompts, prompt_of

    def last(self) -> Tensor:
        """The state (B, D) that predicts the first token of each response."""
        return self.prompts.last[self.prompt_of]

    def place(self, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (B, S) and bias (B, S, P + S) of S response columns: each sees itself, and earlier visible ones."""
        B, S = visible.shape
        positions = self.prompts.length[self.prompt_of, None] + torch.arange(S, device=visible.device)  # (B, S)
        padding = ~self.prompts.real[self.prompt_of, None].expand(-1, S, -1)  # (B, S, P)
        over_prompt = torch.zeros(padding.shape, device=padding.device).masked_fill(padding, float("-inf"))
        return positions, torch.cat((over_prompt, causal_bias(visible)), dim=2)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The prompt's keys and values, then the response's own: two of (B, K, P + S, d)."""
        prompt_keys, prompt_values = self.prompts.layers[layer]  # (Q, K, P, d) each
        return (torch.cat((prompt_keys[self.prompt_of], keys), dim=2),
                torch.cat((prompt_values[self.prompt_of], values), dim=2))


class DecodeCache:
    """Keys and values of B' running responses. There is room for all columns; the first `filled` hold a token."""

    def __init__(self, prompts: PromptCache, G: int, new_columns: int):
        """Copy each prompt G times, in order, and leave room for `new_columns` columns."""
        Q, P = prompts.real.shape
        _, K, _, d = prompts.layers[0][0].shape
        first = prompts.layers[0][0]
        room = first.new_zeros(2, len(prompts.layers), Q, G, K, P + new_columns, d)  # 2: keys and values
        for layer, pair in prompts.layers.items():
            for i, x in enumerate(pair):
                room[i, layer, :, :, :, :P] = x[:, None]
        self.keys, self.values = room.flatten(2, 3)  # two of (layers, B, K, P + new_columns, d), later B' rows
        padding = F.pad(~prompts.real, (0, new_columns)).repeat_interleave(G, 0)  # (B, P + new_columns)
        self.bias = first.new_zeros(padding.shape).masked_fill(padding, float("-inf"))  # the same, later B' rows
        self.length = prompts.length.repeat_interleave(G)  # (B,) tokens in each row so far, later (B',)
        self.filled = P

    def open_column(self) -> tuple[Tensor, Tensor]:
        """Begin the next column, and return its positions (B', 1) and bias (B', 1, filled)."""
        positions = self.length[:, None]  # (B', 1)
        self.length, self.filled = self.length + 1, self.filled + 1
        return positions, self.bias[:, None, : self.filled]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B', K, 1, d) into the open column; return all filled ones (B', K, filled, d)."""
        self.keys[layer, :, :, self.filled - 1] = keys[:, :, 0]
        self.values[layer, :, :, self.filled - 1] = values[:, :, 0]
        return self.keys[layer, :, :, : self.filled], self.values[layer, :, :, : self.filled]

    def keep(self, running: Tensor) -> Tensor:
        """Drop the rows where running is False, and return the old index of each row that stays.

        Running rows from the end move into the gaps, so that few rows are copied. Running 1 0 1 1 0: row 3 moves into
        gap 1, and the order is 0 3 2.
        """
        count = int(running.sum())
        order = torch.arange(count, device=running.device)  # (count,) the old index of the row in each place
        gaps = (~running[:count]).nonzero()[:, 0]
        order[gaps] = running[count:].nonzero()[:, 0] + count
        for cache in (self.keys, self.values):
            cache[:, gaps, :, : self.filled] = cache[:, order[gaps], :, : self.filled]
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]
        self.bias, self.length = self.bias[order], self.length[order]
        return order


# ------------------------------------------------------------------------------------------------- sampling


def draw(log_probs: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Inverse-CDF sampling: the token (B,) at which the cumulative sum of exp(log_probs) (B, V) passes uniform (B,).

    log_probs need not sum to 1, and are -inf for tokens that must not be drawn. At a temperature other than 1 the
    distribution is softmax(log_probs / temperature), at 0 the most likely token. The sum is in fp64: fp32 would lose
    the tail of a large vocabulary.
    """
    if temperature == 0:
        return log_probs.argmax(-1)
    p = log_probs.exp() if temperature == 1 else (log_probs / temperature).softmax(-1)  # (B, V)
    cumulative = p.cumsum(-1, dtype=torch.float64)  # (B, V)
    # Scaled by the total, which is below 1 where a token is excluded. right=True finds the first entry strictly above
    # the number, so that a token of probability 0, which adds nothing to the sum, is never drawn.
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]  # (B,)
    return token.clamp(max=p.shape[-1] - 1)  # NaN in p would give an index past the end


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int], temperature: float = 1.0,
             limit: Tensor | None = None, excluded: Tensor | None = None) -> Samples:
    """Sample G responses to each of Q prompts, of at most T tokens each; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one of end_tokens, or
    after limit (B,) tokens. excluded (B,): for each response, a token that may not be its first. Log-prob, entropy and
    logit gradient are those of the whole distribution at temperature 1, whatever the tokens were drawn from: the update
    computes the same, so that the ratio of PPO begins at 1.
    """
    device, (B, T), G = model.output_weight.device, uniforms.shape, len(uniforms) // len(prompts)
    uniforms, ends = uniforms.to(device), torch.tensor(end_tokens, dtype=torch.long, device=device)
    limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)  # (B,)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    mask = torch.zeros(B, T, dtype=torch.bool, device=device)
    at_least_float32 = torch.promote_types(model.output_weight.dtype, torch.float32)
    statistics = torch.zeros(3, B, T, device=device, dtype=at_least_float32)  # log-prob, entropy, logit gradient
    with torch.inference_mode():  # a tenth faster than no_grad; what we return is made outside, as autograd demands
        prompt_cache = PromptCache(model, prompts)
        cache = DecodeCache(prompt_cache, G, T)
        hidden = prompt_cache.last.repeat_interleave(G, 0)  # (B', D) the state that predicts the next token
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        for t in range(T):
            log_probs = model.log_probs(hidden)  # (B', V) what is recorded
            allowed = log_probs  # (B', V) what is drawn from
            if t == 0 and excluded is not None:
                allowed = log_probs.scatter(1, excluded.to(device)[:, None], float("-inf"))  # (B', V)
            token = draw(allowed, uniforms[rows, t], temperature)  # (B',)
            tokens[rows, t], mask[rows, t] = token, True
            statistics[:, rows, t] = torch.stack((take(log_probs, token), *entropy_and_logit_grad(log_probs, token)))
            running = ~(token[:, None] == ends).any(1) & (limit[rows] > t + 1)  # (B',)
            if not running.any():
                break
            if not running.all():
                order = cache.keep(running)
                rows, token = rows[order], token[order]
            hidden = model.hidden(token[:, None], *cache.open_column(), cache)[:, 0]  # (B', D)
    ended = ((tokens[..., None] == ends).any(-1) & mask).any(1)  # (B,)
    longest = t + 1
    return Samples(tokens[:, :longest], mask[:, :longest], *statistics[..., :longest], ended)


# ----------------------------------------------------------------------------------- reading finished responses
# tokens and mask are (B, T), padded on the right. The padding needs no bias, because it comes after every real token:
# the first two functions use the mask's shape alone. On padding they return meaningless numbers, response_logprobs 0.


def response_states(model: Qwen2, cache: ResponseCache, tokens: Tensor, mask: Tensor,
                    hide: Tensor | None = None) -> Tensor:
    """The last hidden state (B, T, D) that predicts each token of the responses (B, T) to the prompts in `cache`.

    A prompt is read once, in a row of its own. Each response is another row, which attends to its prompt. The state
    that predicts a token is one column before it:

        column      pad  the  sky  |  is    blue        P = 3, T = 2; left of the bar lies the prompt's row,
        predicts              is   |  blue              right of it the response's

    hide (B, T) bool: tokens that no later token can attend to.
    """
    first = cache.last()[:, None]  # (B, 1, D)
    visible = torch.ones_like(mask) if hide is None else ~hide  # (B, T)
    # The last token is left out: its state would predict nothing.
    later = model.hidden(tokens[:, :-1], *cache.place(visible[:, :-1]), cache)  # (B, T - 1, D)
    return torch.cat((first, later), dim=1)


def response_attention(model: Qwen2, cache: ResponseCache, tokens: Tensor, mask: Tensor) -> Tensor:
    """Attention (B, T, T): [:, t, u] is how much the state that predicts token t attends to token u.

    Of the last layer, averaged over its heads.
    """
    (B, T), P = tokens.shape, cache.prompts.real.shape[1]
    attention = torch.zeros(B, T, T, device=tokens.device)
    visible = torch.ones_like(mask)[:, :-1]  # (B, T - 1)
    # The state that predicts token 0 is the prompt's. No state of the response attends to token T - 1.
    attention[:, 1:, :-1] = model.attention(tokens[:, :-1], *cache.place(visible), cache)[:, :, P:]
    return attention


def response_logprobs(model: Qwen2, cache: ResponseCache, tokens: Tensor, mask: Tensor,
                      hide: Tensor | None = None) -> Tensor:
    """log pi (B, T) of the responses' tokens, with gradient, 0 on padding; hide: see response_states."""
    states = response_states(model, cache, tokens, mask, hide)[mask]  # (N, D)
    logprob = token_logprobs(model, states, tokens[mask])  # (N,)
    return logprob.new_zeros(mask.shape).masked_scatter(mask, logprob)
