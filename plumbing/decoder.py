"""The model for one new token at a time, with half the kernels of the model itself. A first reading can skip it.

`Decoder.step` computes what `Qwen2.hidden` does for S = 1, from merged copies of the weights. Where few rows run, each
kernel takes a few microseconds whatever its size. So sampling is 1.45 times as fast with 64 rows, and 2.2 times with 4.
KVCache of sampler.py is its plain form; tests/test_sampler.py holds both to transformers.

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, P prompt columns, D hidden
size, H heads, K key-value heads, d head size.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plumbing.shared_prompts import PromptCache, distinct_texts
from qwen2_model import Layer, Qwen2, RMSNorm, rope_angles


class MergedLayer(NamedTuple):
    """A layer's weights in four matrices (input, output).

    Those that follow an RMSNorm have its weight multiplied in, in float32. In bfloat16 that would be one more rounding,
    which the update doesn't have, and copies of large matrices take longer than they save: so `norms` stay apart.
    In queries and keys, the two numbers that RoPE turns together are neighbours, so that they are a complex number.
    """

    qkv: Tensor  # (D, K (H / K + 2) d) for each key head: its H / K query heads, the key, the value
    bias: Tensor  # (K (H / K + 2) d,) of qkv; Qwen3 and Llama have none, so it is 0
    head_norm: Tensor | None  # (H / K + 1, d) Qwen3's RMSNorm weights of queries and key
    o: Tensor  # (H d, D)
    gate_up: Tensor  # (D, 2 * intermediate_size)
    down: Tensor  # (intermediate_size, D)
    norms: tuple[RMSNorm, RMSNorm] | None  # before qkv and before gate_up, unless multiplied in


def merge(layer: Layer) -> MergedLayer:
    """Copy a layer's weights into the matrices that Decoder.step multiplies by."""
    attention, mlp, D = layer.self_attn, layer.mlp, len(layer.input_layernorm.weight)
    projections, shared = (attention.q_proj, attention.k_proj, attention.v_proj), attention.H // attention.K
    norms = layer.input_layernorm, layer.post_attention_layernorm
    multiplied_in = attention.o_proj.weight.itemsize >= 4

    def by_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (H d, ...), k and v (K d, ...) -> (K (H / K + 2) d, ...)."""
        q, k, v = (x.unflatten(0, (attention.K, -1, attention.d)) for x in (q, k, v))
        return torch.cat((pairs(q, 2), pairs(k, 2), v), dim=1).flatten(0, 2)

    def transposed(weight: Tensor, norm: RMSNorm | None = None) -> Tensor:
        if not multiplied_in:
            return weight.T
        return (weight if norm is None else weight * (norm.weight * D**0.5)).T.contiguous()  # sqrt(D): see normalize

    qkv, head_norm = by_key_head(*(p.weight for p in projections)), None  # (K (H / K + 2) d, D)
    if attention.qk_norm:
        head_norm = pairs(torch.stack([attention.q_norm.weight] * shared + [attention.k_norm.weight]), 1)
    return MergedLayer(
        qkv=transposed(qkv, norms[0]),
        bias=qkv.new_zeros(len(qkv)) if projections[0].bias is None else by_key_head(*(p.bias for p in projections)),
        head_norm=head_norm,
        o=transposed(attention.o_proj.weight),
        gate_up=transposed(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), norms[1]),
        down=transposed(mlp.down_proj.weight),
        norms=None if multiplied_in else norms)


def pairs(x: Tensor, dim: int) -> Tensor:
    """Reorder a dimension of x, of size d, so that i and i + d / 2 are neighbours: RoPE turns them together."""
    return x.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), skipped where it has nothing to do: that would still take 2% of a step with few rows."""
    return x if x.dtype == dtype else x.to(dtype)


def product(x: Tensor, w: Tensor) -> Tensor:
    """x @ w. In bfloat16 w is the transpose of a matrix as it lies in memory: this is that matrix @ x.T, transposed.

    So the MLP of 32 rows takes 14% less time on a CPU.
    """
    return torch.mm(x, w) if x.itemsize > 2 else torch.mm(w.T, x.T).T


def add_product(x: Tensor, y: Tensor, w: Tensor) -> None:
    """x += y @ w; in bfloat16 the product is rounded first, as in the update."""
    if x.itemsize > 2:
        x.addmm_(y, w)
    else:
        x.add_(product(y, w))


class Decoder:
    """The model for one new token in each of B' running rows, and the keys and values of their earlier ones."""

    def __init__(self, model: Qwen2, prompts: list[list[int]], G: int, room: int):
        """Read Q prompts, and copy each G times, in order, with room for as many more columns.

        Keys are stored transposed, (d, columns): that makes queries times keys twice as fast.
        """
        texts, text_of = distinct_texts(prompts)
        cache = PromptCache(model, texts).prefixes(text_of, [len(prompt) for prompt in prompts])
        self.last = cache.last.repeat_interleave(G, 0)  # (B, D) the state that predicts each response's first token
        real, c, weight = cache.real, model.config, model.output_weight
        Q, P = real.shape
        K, d, columns = c.num_key_value_heads, c.head_dim, P + room
        self.model, self.layers = model, [merge(layer) for layer in model.model["layers"]]
        self.filled = P  # columns in use
        keys = weight.new_empty(len(self.layers), Q, G, K, d, columns)
        values = weight.new_empty(len(self.layers), Q, G, K, columns, d)
        for layer, (k, v) in cache.layers.items():  # (Q, K, P, d) each
            keys[layer, ..., :P], values[layer, ..., :P, :] = pairs(k, 3).mT[:, None], v[:, None]
        self.keys, self.values = keys.flatten(1, 2), values.flatten(1, 2)  # (layers, B, ...), later B' rows
        padding = F.pad(~real, (0, room)).repeat_interleave(G, 0)[:, None, None]  # (B, 1, 1, columns)
        self.bias = weight.new_zeros(len(padding), K, 1, columns).masked_fill(padding, float("-inf"))  # later B' rows
        self.length = real.sum(1).repeat_interleave(G)[:, None].repeat(1, K)  # (B, K) tokens so far, later B' rows
        positions = torch.arange(columns, device=weight.device)[:, None]  # (columns, 1)
        cos, sin = rope_angles(positions, d, c.rope_theta)  # (columns, 1, 1, d) each
        self.turns = torch.complex(cos, sin)[:, 0, :, d // 2 :]  # (columns, 1, d / 2) e^(i angle) at each position
        self.norm_eps = torch.tensor((c.hidden_size * c.rms_norm_eps) ** 0.5, device=weight.device)
        self.at_least_float32 = torch.promote_types(weight.dtype, torch.float32)

    def step(self, token: Tensor) -> Tensor:
        """Append a token (B',) to each row; returns the last hidden state (B', D) of each, which predicts the next."""
        n = self.filled + 1
        turn = self.turns[self.length.flatten()]  # (B' K, 1, d / 2)
        bias = self.bias[..., :n].flatten(0, 1)  # (B' K, 1, n)
        self.length, self.filled = self.length + 1, n
        # All four are views. So copy_ in `hidden` writes into the caches, and keys and values then hold the new column.
        return self.hidden(token, turn, bias, (
            self.keys[..., n - 1], self.values[..., n - 1, :],  # (layers, B', K, d) each: the new column
            self.keys[..., :n], self.values[..., :n, :]))  # (layers, B', K, d, n), (layers, B', K, n, d)

    def hidden(self, token: Tensor, turn: Tensor, bias: Tensor, caches: tuple[Tensor, ...]) -> Tensor:
        """The last hidden state (B', D) of each new token (B'), whose key and value go into their column."""
        _, B, K, d = caches[0].shape  # B is B' here
        x = self.model.model["embed_tokens"].weight[token]  # (B', D)
        # A layer's key and value are (B' K, d), its keys (B' K, d, n), its values (B' K, n, d): key heads become rows.
        for w, key, value, keys, values in zip(self.layers, *(cache.flatten(1, 2).unbind() for cache in caches)):
            norm_qkv, norm_mlp = w.norms or (self.normalize, self.normalize)
            heads = torch.addmm(w.bias, norm_qkv(x), w.qkv).view(B * K, -1, d)  # (B' K, H / K + 2, d)
            qk = cast(heads[:, :-1], self.at_least_float32)  # (B' K, H / K + 1, d)
            if w.head_norm is not None:
                qk = F.rms_norm(qk, (d,), eps=self.model.config.rms_norm_eps) * w.head_norm
            torch.view_as_complex(qk.unflatten(2, (-1, 2))).mul_(turn)  # RoPE
            key.copy_(qk[:, -1])
            value.copy_(heads[:, -1])
            scores = torch.baddbmm(bias, cast(qk[:, :-1], x.dtype), keys, alpha=d**-0.5)  # (B' K, H / K, n)
            add_product(x, torch.bmm(scores.softmax(-1), values).view(B, -1), w.o)
            gate, up = product(norm_mlp(x), w.gate_up).chunk(2, dim=1)  # (B', intermediate_size) each
            add_product(x, F.silu(gate).mul_(up), w.down)
        return self.model.model["norm"](x)

    def normalize(self, x: Tensor) -> Tensor:
        """x (B', D) / sqrt(|x|^2 + D eps): RMSNorm without its weight and a factor sqrt(D), which `merge` supplies."""
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=self.at_least_float32)  # (B', 1)
        return cast(x / norm.hypot(self.norm_eps), x.dtype)

    def keep(self, running: Tensor) -> Tensor:
        """Drop the rows where running (B',) is False. Returns the old index (count,) of each that stays.

        Running rows from the end move into the gaps, so that few rows are copied. Running 1 0 1 1 0: row 3 moves into
        gap 1, and the order is 0 3 2.
        """
        count = int(running.sum())
        order = torch.arange(count, device=running.device)  # (count,) the old index of the row in each place
        gaps = (~running[:count]).nonzero()[:, 0]
        order[gaps] = running[count:].nonzero()[:, 0] + count
        self.keys[:, gaps, ..., : self.filled] = self.keys[:, order[gaps], ..., : self.filled]
        self.values[:, gaps, :, : self.filled] = self.values[:, order[gaps], :, : self.filled]
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]
        self.bias, self.length = self.bias[order], self.length[order]
        return order


class ReplayedDecoder:
    """Decoder on a CUDA device: the kernels of a step are recorded once and replayed together, as a CUDA graph.

    A replay has the same shapes each time. So it computes all B rows, those that have ended, too, and attention looks
    at all columns, of which `bias` hides the unused ones. A token's key and value are computed in the last column, and
    move to their own at the end of the step.
    """

    def __init__(self, model: Qwen2, prompts: list[list[int]], G: int, room: int):
        """Arguments as of Decoder."""
        P = max(map(len, prompts))
        # One to eight more columns: the last is the new token's; a multiple of 8 aligns rows to 16 bytes in bfloat16.
        self.decoder = Decoder(model, prompts, G, room + 8 - (P + room) % 8)
        self.last = self.decoder.last  # (B, D)
        self.decoder.bias[..., P:-1] = float("-inf")
        for cache in (self.decoder.keys, self.decoder.values.mT):  # hidden columns must be finite, too: 0 * NaN is NaN
            cache[..., P:] = 0
        self.rows = torch.arange(len(self.last), device=self.last.device)  # (B',) the running ones of all B
        self.token, self.column = torch.zeros_like(self.rows), self.rows.new_tensor([P])  # (B,), (1,)
        self.graph = self.record() if self.last.is_cuda else None

    def record(self) -> "torch.cuda.CUDAGraph":
        """Record `compute`, after a first call that lets libraries set themselves up."""
        d, graph, aside = self.decoder, torch.cuda.CUDAGraph(), torch.cuda.Stream()
        before = [x.clone() for x in (d.bias, d.length, self.column)]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.compute()
        torch.cuda.current_stream().wait_stream(aside)
        for x, old in zip((d.bias, d.length, self.column), before):
            x.copy_(old)
        with torch.cuda.graph(graph):
            self.output = self.compute()  # (B, D) where each replay leaves its result
        return graph

    def compute(self) -> Tensor:
        """The hidden states (B, D) of self.token (B,), and everything set for the next column."""
        d = self.decoder
        out = d.hidden(self.token, d.turns[d.length.flatten()], d.bias.flatten(0, 1),
                       (d.keys[..., -1], d.values[..., -1, :], d.keys, d.values))  # (B, D)
        d.keys.index_copy_(4, self.column, d.keys[..., -1:])
        d.values.index_copy_(3, self.column, d.values[..., -1:, :])
        d.bias.index_fill_(3, self.column, 0.0)
        d.length += 1
        self.column += 1
        return out

    def step(self, token: Tensor) -> Tensor:
        """As Decoder.step."""
        self.token[self.rows] = token
        if self.graph is None:  # without a CUDA device nothing is recorded: for tests
            return self.compute()[self.rows]
        self.graph.replay()
        return self.output[self.rows]

    def keep(self, running: Tensor) -> Tensor:
        """As Decoder.keep. The other rows stay where they are, and are no longer looked at."""
        order = running.nonzero()[:, 0]  # (count,)
        self.rows = self.rows[order]
        return order


def fast_cache(model: Qwen2, prompts: list[list[int]], G: int, room: int) -> Decoder | ReplayedDecoder:
    """What `generate` samples with: the plain form is KVCache of sampler.py."""
    return (ReplayedDecoder if model.output_weight.is_cuda else Decoder)(model, prompts, G, room)
