"""Sampling: responses grow token by token on a KV cache, and training later reads the finished ones again.

How this differs from the usual `generate`:
1. A prompt is read (run through the model) once here and once, with gradient, in the update, however many responses it
   has. A prompt that is a prefix of another is not read separately.
2. All randomness comes in as uniform numbers, one row per response. So a response does not depend on the others in
   its batch.
3. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling, so that the credit log
   costs no extra forward pass.
4. Responses that have ended leave the batch.
5. New tokens are computed by `Decoder`, from merged copies of the weights: with half the kernels of the model itself.

Usually every row of a batch holds a prompt and one response. Here, wherever finished responses are read again, each
prompt is a row of its own, and the responses are rows that attend to it, so that a prompt with G responses is computed
once. In this file only ResponseCache and the functions that follow `by_length` know of this layout. tests/plain.py has
the usual one, in 40 lines, for comparison.

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, P prompt columns, T response
columns (while sampling: as many as a response may have), S response columns read at once, V vocabulary, D hidden size,
H heads, K key-value heads, d head size, N real tokens in a flat list.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen2_model import (Layer, Qwen2, RMSNorm, causal_bias, entropy_and_logit_grad, rope_angles, take,
                         token_logprobs)


class Samples(NamedTuple):
    """B responses, padded on the right to the longest. Column t is the t-th token of the response.

    Log-prob, entropy and logit gradient are those of the model's whole distribution pi, even where a token was excluded
    from the draw.
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
        self.hidden = hidden  # (Q, P, D)
        self.last = hidden[:, -1]  # (Q, D) the state that predicts a response's first token

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values (Q, K, P, d), and return them: there are no earlier columns."""
        self.layers[layer] = keys, values
        return keys, values

    def prefixes(self, text_of: list[int], length: list[int]) -> "PromptCache":
        """The cache of other prompts: prompt q is the first length[q] tokens of the one in row text_of[q] here.

        Its `hidden` is still that of the longer prompts.
        """
        part, device = copy.copy(self), self.real.device
        text, part.length = torch.tensor(text_of, device=device), torch.tensor(length, device=device)  # (Q',) each
        column = torch.arange(-max(length), 0, device=device)  # (P',)
        part.real = column >= -part.length[:, None]  # (Q', P') padded on the left, too
        source = self.real.shape[1] + (part.length - self.length[text])[:, None] + column  # (Q', P') the columns here
        source = source.clamp(min=0)  # in the padding; nobody sees what stands there
        # Index tensors on both sides of a slice put their dimensions first: (Q', P', K, d) before the transpose.
        part.layers = {i: tuple(x[text[:, None], :, source].transpose(1, 2) for x in pair)  # (Q', K, P', d) each
                       for i, pair in self.layers.items()}
        part.last = self.hidden[text, source[:, -1]]  # (Q', D)
        return part

    def detach(self) -> "PromptCache":
        """A copy cut off from the graph, whose tensors accumulate the gradients of all micro-batches."""
        leaf = copy.copy(self)
        leaf.last = self.last.detach().requires_grad_()
        leaf.layers = {i: tuple(x.detach().requires_grad_() for x in pair) for i, pair in self.layers.items()}
        return leaf

    def backward(self, leaf: "PromptCache") -> None:
        """Backpropagate the gradients accumulated in a detached copy through the prompts."""
        tensors, leaves = ([cache.last, *(x for pair in cache.layers.values() for x in pair)] for cache in (self, leaf))
        torch.autograd.backward(tensors, [x.grad for x in leaves])


def distinct_texts(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The prompts that are not a prefix of another, and for each prompt the index of one of these that extends it.

    Equal prompts count once, and a prompt extends itself.

    vineppo continues a response from several places, and each prefix begins the longer ones. With --k 3, reading only
    the longest of those that are sampled together is a third of that reading.
    """
    texts, text_of = [], [0] * len(prompts)
    # In descending order, the prompts that extend a prompt come right before it.
    for q in sorted(range(len(prompts)), key=prompts.__getitem__, reverse=True):
        if not texts or texts[-1][: len(prompts[q])] != prompts[q]:
            texts.append(prompts[q])
        text_of[q] = len(texts) - 1
    return texts, text_of


class ResponseCache:
    """What B finished responses attend to: their prompt's keys and values, then their own.

    prompt_of (B,): the index of each response's prompt in `prompts`.
    """

    def __init__(self, prompts: PromptCache, prompt_of: Tensor):
        self.prompts, self.prompt_of = prompts, prompt_of

    def last(self) -> Tensor:
        """The state (B, D) that predicts the first token of each response."""
        return self.prompts.last[self.prompt_of]

    def place(self, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (B, S) and bias (B, S, P + S) of S response columns.

        Each column sees its prompt, itself, and the visible response columns before it.
        """
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


# ------------------------------------------------------------------------------------------- one token at a time


class MergedLayer(NamedTuple):
    """A layer's weights in four matrices (input, output). Those that follow an RMSNorm have its weight multiplied in.

    In queries and keys, the two numbers that RoPE turns together are neighbours, so that they are a complex number.
    """

    qkv: Tensor  # (D, K (H / K + 2) d) for each key head: its H / K query heads, the key, the value
    bias: Tensor  # (K (H / K + 2) d,) of qkv; Qwen3 has none, so it is 0
    head_norm: Tensor | None  # (H / K + 1, d) Qwen3's RMSNorm weights of queries and key
    o: Tensor  # (H d, D)
    gate_up: Tensor  # (D, 2 * intermediate_size)
    down: Tensor  # (intermediate_size, D)


def merge(layer: Layer) -> MergedLayer:
    """Copy a layer's weights into the matrices that Decoder.step multiplies by."""
    attention, mlp, D = layer.self_attn, layer.mlp, len(layer.input_layernorm.weight)
    projections, shared = (attention.q_proj, attention.k_proj, attention.v_proj), attention.H // attention.K

    def by_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (H d, ...), k and v (K d, ...) -> (K (H / K + 2) d, ...)."""
        q, k, v = (x.unflatten(0, (attention.K, -1, attention.d)) for x in (q, k, v))
        return torch.cat((pairs(q, 2), pairs(k, 2), v), dim=1).flatten(0, 2)

    def after_norm(weight: Tensor, norm: RMSNorm) -> Tensor:
        return (weight * (norm.weight * D**0.5)).T.contiguous()  # sqrt(D): see Decoder.normalize

    qkv, head_norm = by_key_head(*(p.weight for p in projections)), None  # (K (H / K + 2) d, D)
    if attention.qk_norm:
        head_norm = pairs(torch.stack([attention.q_norm.weight] * shared + [attention.k_norm.weight]), 1)
    return MergedLayer(
        qkv=after_norm(qkv, layer.input_layernorm),
        bias=qkv.new_zeros(len(qkv)) if projections[0].bias is None else by_key_head(*(p.bias for p in projections)),
        head_norm=head_norm,
        o=attention.o_proj.weight.T.contiguous(),
        gate_up=after_norm(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), layer.post_attention_layernorm),
        down=mlp.down_proj.weight.T.contiguous())


def pairs(x: Tensor, dim: int) -> Tensor:
    """Reorder a dimension of x, of size d, so that i and i + d / 2 are neighbours: RoPE turns them together."""
    return x.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), skipped where it has nothing to do: that would still take 2% of a step with few rows."""
    return x if x.dtype == dtype else x.to(dtype)


class Decoder:
    """The model for one new token in each of B' running rows, and the keys and values of their earlier ones.

    `step` does what Qwen2.hidden does for S = 1, with half as many kernels. Where few rows run, each kernel takes a few
    microseconds whatever its size. So sampling is 1.45 times as fast with 64 rows, and 2.2 times with 4.
    """

    def __init__(self, model: Qwen2, prompts: PromptCache, G: int, new_columns: int):
        """Copy each prompt G times, in order, with room for `new_columns` more columns. The first `filled` are in use.

        Keys are stored transposed, (d, columns): that makes queries times keys twice as fast.
        """
        c, (Q, P), last = model.config, prompts.real.shape, prompts.last
        K, d, columns = c.num_key_value_heads, c.head_dim, P + new_columns
        self.model, self.layers, self.filled = model, [merge(layer) for layer in model.model["layers"]], P
        keys = last.new_empty(len(self.layers), Q, G, K, d, columns)
        values = last.new_empty(len(self.layers), Q, G, K, columns, d)
        for layer, (k, v) in prompts.layers.items():  # (Q, K, P, d) each
            keys[layer, ..., :P], values[layer, ..., :P, :] = pairs(k, 3).mT[:, None], v[:, None]
        self.keys, self.values = keys.flatten(1, 2), values.flatten(1, 2)  # (layers, B, ...), later B' rows
        padding = F.pad(~prompts.real, (0, new_columns)).repeat_interleave(G, 0)[:, None, None]  # (B, 1, 1, columns)
        self.bias = last.new_zeros(len(padding), K, 1, columns).masked_fill(padding, float("-inf"))  # later B' rows
        self.length = prompts.length.repeat_interleave(G)[:, None].repeat(1, K)  # (B, K) tokens so far, later B' rows
        # (columns, 1, 1, d) each
        cos, sin = rope_angles(torch.arange(columns, device=last.device)[:, None], d, c.rope_theta)
        self.turns = torch.complex(cos, sin)[:, 0, :, d // 2 :]  # (columns, 1, d / 2) e^(i angle) at each position
        self.norm_eps = torch.tensor((c.hidden_size * c.rms_norm_eps) ** 0.5, device=last.device)
        self.at_least_float32 = torch.promote_types(last.dtype, torch.float32)

    def step(self, token: Tensor) -> Tensor:
        """Append a token (B',) to each row; returns the last hidden state (B', D) of each, which predicts the next."""
        (_, B, K, d, _), n = self.keys.shape, self.filled + 1  # B is B' here
        turn = self.turns[self.length.flatten()]  # (B' K, 1, d / 2)
        bias = self.bias[..., :n].flatten(0, 1)  # (B' K, 1, n)
        self.length, self.filled = self.length + 1, n
        caches = (self.keys[..., n - 1], self.values[..., n - 1, :],  # (layers, B', K, d) each: the new column
                  self.keys[..., :n], self.values[..., :n, :])  # (layers, B', K, d, n), (layers, B', K, n, d)
        x = self.model.model["embed_tokens"].weight[token]  # (B', D)
        # All four are views. So copy_ below writes into the caches, and keys and values then hold the new column, too.
        # A layer's key and value are (B' K, d), its keys (B' K, d, n), its values (B' K, n, d): key heads become rows.
        for w, key, value, keys, values in zip(self.layers, *(cache.flatten(1, 2).unbind() for cache in caches)):
            heads = torch.addmm(w.bias, self.normalize(x), w.qkv).view(B * K, -1, d)  # (B' K, H / K + 2, d)
            qk = cast(heads[:, :-1], self.at_least_float32)  # (B' K, H / K + 1, d)
            if w.head_norm is not None:
                qk = F.rms_norm(qk, (d,), eps=self.model.config.rms_norm_eps) * w.head_norm
            torch.view_as_complex(qk.unflatten(2, (-1, 2))).mul_(turn)  # RoPE
            key.copy_(qk[:, -1])
            value.copy_(heads[:, -1])
            scores = torch.baddbmm(bias, cast(qk[:, :-1], x.dtype), keys, alpha=d**-0.5)  # (B' K, H / K, n)
            x.addmm_(torch.bmm(scores.softmax(-1), values).view(B, -1), w.o)
            gate, up = torch.mm(self.normalize(x), w.gate_up).chunk(2, dim=1)  # (B', intermediate_size) each
            x.addmm_(F.silu(gate).mul_(up), w.down)
        return self.model.model["norm"](x)

    def normalize(self, x: Tensor) -> Tensor:
        """x (B', D) / sqrt(|x|^2 + D eps): RMSNorm without its weight and a factor sqrt(D), which `merge` supplies."""
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=self.at_least_float32)  # (B', 1)
        return cast(x / norm.hypot(self.norm_eps), x.dtype)

    def keep(self, running: Tensor, count: int) -> Tensor:
        """Drop the rows where running (B',) is False, so that count stay. Returns the old index (count,) of each.

        Running rows from the end move into the gaps, so that few rows are copied. Running 1 0 1 1 0: row 3 moves into
        gap 1, and the order is 0 3 2.
        """
        order = torch.arange(count, device=running.device)  # (count,) the old index of the row in each place
        gaps = (~running[:count]).nonzero()[:, 0]
        order[gaps] = running[count:].nonzero()[:, 0] + count
        self.keys[:, gaps, ..., : self.filled] = self.keys[:, order[gaps], ..., : self.filled]
        self.values[:, gaps, :, : self.filled] = self.values[:, order[gaps], :, : self.filled]
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]
        self.bias, self.length = self.bias[order], self.length[order]
        return order


# ------------------------------------------------------------------------------------------------- sampling


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token (B,) where the cumulative probability first exceeds uniform (B,) times the total.

    log_probs (B, V) are -inf for a token that must not be drawn, so the total may be below 1. The sum is in fp64: fp32
    would lose the tail of a large vocabulary.
    """
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)  # (B, V)
    # right=True finds the first entry strictly above the number. A token of probability 0 adds nothing to the sum, so
    # it is never drawn.
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]  # (B,)
    return token.clamp(max=log_probs.shape[-1] - 1)  # NaN would give an index past the end


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             limit: Tensor | None = None, excluded: Tensor | None = None) -> Samples:
    """Sample G responses to each of Q prompts, of at most T tokens each; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one of end_tokens, or
    after limit (B,) tokens. excluded (B,): for each response, a token that may not be its first. Log-prob, entropy and
    logit gradient are those of the whole distribution all the same: the update computes the same, so that the ratio of
    PPO begins at 1.
    """
    device, (B, T), G = model.output_weight.device, uniforms.shape, len(uniforms) // len(prompts)
    uniforms, is_end = uniforms.to(device), torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
    is_end[end_tokens] = True
    limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)  # (B,), later (B',)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    mask = torch.zeros(B, T, dtype=torch.bool, device=device)
    at_least_float32 = torch.promote_types(model.output_weight.dtype, torch.float32)
    statistics = torch.zeros(3, B, T, device=device, dtype=at_least_float32)  # log-prob, entropy, logit gradient
    with torch.inference_mode():  # a tenth faster than no_grad; what we return is made outside, as autograd demands
        texts, text_of = distinct_texts(prompts)
        prompt_cache = PromptCache(model, texts).prefixes(text_of, [len(p) for p in prompts])
        decoder = Decoder(model, prompt_cache, G, T)
        hidden = prompt_cache.last.repeat_interleave(G, 0)  # (B', D) the state that predicts the next token
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        for t in range(T):
            log_probs = model.log_probs(hidden)  # (B', V) what is recorded
            allowed = log_probs  # (B', V) what is drawn from
            if t == 0 and excluded is not None:
                allowed = log_probs.scatter(1, excluded.to(device)[:, None], float("-inf"))  # (B', V)
            token = draw(allowed, uniforms[rows, t])  # (B',)
            tokens[rows, t], mask[rows, t] = token, True
            statistics[:, rows, t] = torch.stack((take(log_probs, token), *entropy_and_logit_grad(log_probs, token)))
            running = (limit > t + 1) & ~is_end[token]  # (B',)
            count = int(running.sum())
            if count == 0:
                break
            if count < len(rows):
                order = decoder.keep(running, count)
                rows, token, limit = rows[order], token[order], limit[order]
            hidden = decoder.step(token)  # (B', D)
    longest, ended = t + 1, (is_end[tokens] & mask).any(1)  # (B,)
    return Samples(tokens[:, :longest], mask[:, :longest], *statistics[..., :longest], ended)


# ----------------------------------------------------------------------------------- reading finished responses
# tokens and mask are (B, T), padded on the right. What is returned for padding means nothing; response_logprobs has 0.


def by_length(lengths: Tensor, size: int) -> list[tuple[Tensor, int]]:
    """Chunks of at most `size` responses, similar in length (M,): the indices (b,) and the longest length of each."""
    chunks = lengths.argsort(stable=True).split(size)  # a single empty one where there are no responses
    return [(chunk, max(lengths[chunk].tolist(), default=1)) for chunk in chunks]


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
    visible = mask if hide is None else mask & ~hide  # (B, T)
    # The last token is left out: its state would predict nothing.
    later = model.hidden(tokens[:, :-1], *cache.place(visible[:, :-1]), cache)  # (B, T - 1, D)
    return torch.cat((first, later), dim=1)


def response_attention(model: Qwen2, cache: ResponseCache, tokens: Tensor, mask: Tensor, columns: int) -> Tensor:
    """Attention (B, T, columns): [:, t, u] is how much the state that predicts token t attends to token u < columns.

    Of the last layer, averaged over its heads. columns >= T; those from T on are 0.
    """
    (B, T), P = tokens.shape, cache.prompts.real.shape[1]
    attention = torch.zeros(B, T, columns, device=tokens.device)
    # The state that predicts token 0 is the prompt's. No state of the response attends to token T - 1.
    attention[:, 1:, : T - 1] = model.attention(tokens[:, :-1], *cache.place(mask[:, :-1]), cache)[:, :, P:]
    return attention


def response_logprobs(model: Qwen2, cache: ResponseCache, tokens: Tensor, mask: Tensor,
                      hide: Tensor | None = None) -> Tensor:
    """log pi (B, T) of the responses' tokens, with gradient, 0 on padding; hide: see response_states."""
    states = response_states(model, cache, tokens, mask, hide)[mask]  # (N, D)
    logprob = token_logprobs(model, states, tokens[mask])  # (N,)
    return logprob.new_zeros(mask.shape).masked_scatter(mask, logprob)
