"""Qwen2, Qwen3 and Llama from scratch: the transformer, its KV cache, the log-prob of a token,
checkpoints.

How this differs from the reports (Qwen2 2407.10671, Qwen3 2505.09388, Llama 2302.13971) and the
usual implementations:
1. One class implements all three. Qwen2 has a bias on q, k and v. Qwen3 has none, but an RMSNorm on
   each head's q and k. Llama has neither.
2. One forward pass serves sampling and training. It reads new tokens behind those in a cache: one
   token a row while sampling; a whole response, with gradient, when it is trained on.
3. Prompts are padded on the left, so that all rows of a cache write the same column. See Cache.
4. q, k and v are one matrix, in a checkpoint's order, and so are gate and up: one large product is
   faster than three.

Alphabet: R rows of S new tokens each, C columns that attention looks at (those of the cache, then
the S new ones), V vocabulary, D hidden size, H query heads, K key heads, d head size.

Run it:  python train.py --steps 0        loads the bundled model, samples and grades
"""
import math
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from plumbing.compute import linear, logprobs_in_memory, recomputed, run_attention
from plumbing.files import check_tensors, read_json, replace_file, write_json
from plumbing.model_folder import check_folder, config_values, read_weights, written_config


class Family(NamedTuple):
    """What tells one family of models from another, and what its config.json may leave out."""

    name: str  # of its class in transformers
    qkv_bias: bool = False  # q, k and v have a bias
    qk_norm: bool = False  # each head's q and k are normalized
    head_dim: int = 0  # by default; 0: hidden_size over the heads
    key_heads: int = 0  # by default; 0: as many as heads
    positions: int = 2048  # that it was trained for, by default
    further: tuple[str, ...] | None = ()  # fields of its config.json that Config lacks; None: all


ARCHITECTURES = {  # by model_type
    "qwen2": Family("Qwen2ForCausalLM", True, False, 0, 32, 32768, None),
    "qwen3": Family("Qwen3ForCausalLM", False, True, 128, 32, 32768, None),
    "llama": Family("LlamaForCausalLM", further=None)}


# -------------------------------------------------------------------------------- the configuration


@dataclass
class Config:
    """The architecture, from a Hugging Face config.json."""

    vocab_size: int  # V, rows of the embedding; a tokenizer may use fewer of them
    hidden_size: int  # D
    intermediate_size: int  # width of the MLP
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # K; each one is shared by H / K heads
    head_dim: int  # d
    rms_norm_eps: float
    rope: dict  # rope_theta, rope_type, and the numbers of the type llama3
    max_position_embeddings: int  # the longest sequence the model was trained for
    tie_word_embeddings: bool  # the output matrix is the embedding
    qkv_bias: bool  # see Family
    qk_norm: bool
    source: dict  # the whole config.json, which save_model writes back


# ---------------------------------------------------------------------------------- the transformer


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype where that is wider: for sums and exponentials, which
    bfloat16 would spoil."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; of bfloat16 in float32, too."""
    wide = at_least_float32(x)
    root = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()  # (..., 1)
    return (wide * root).to(x.dtype) * weight.to(x.dtype)


def rope_frequencies(c: Config) -> Tensor:
    """The angle (d / 2,), in radians, by which each step to the next position turns pair j of a
    head: theta^(-2j / d).

    Llama 3.1 stretches its context by the type llama3. A pair that turns often within the original
    context keeps its frequency; one that turns seldom has it divided by `factor`; in between, the
    frequency is interpolated linearly.
    """
    exponent = torch.arange(0, c.head_dim, 2).float() / c.head_dim  # (d / 2,)
    frequency = c.rope["rope_theta"] ** -exponent  # (d / 2,)
    if c.rope["rope_type"] == "default":
        return frequency
    seldom, often = c.rope["low_freq_factor"], c.rope["high_freq_factor"]
    turns = c.rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # (d / 2,)
    kept = ((turns - seldom) / (often - seldom)).clamp(0, 1)  # (d / 2,)
    return frequency * (kept + (1 - kept) / c.rope["factor"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (2104.09864): turn entries j and j + d / 2 of each head of x (R, heads, S, d) by its
    token's angles.

    The halves (a, b) become (a cos - b sin, b cos + a sin). So cos (S, d) has the angles twice, and
    sin (S, d) too, first with a minus; rolling x by half of it makes (b, a).
    """
    x_wide = at_least_float32(x)
    return (x_wide * cos + x_wide.roll(x.shape[3] // 2, dims=3) * sin).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask) v, (R, H, S, d).

    q (R, H, S, d), k and v (R, K, C, d). mask (R, 1, S, C) is 0 where a token sees a column, else
    -inf.
    """
    p = by_key_head(probabilities(q, k, mask), k.shape[1])  # (R, K, (H / K) S, C)
    return (p @ v).view(q.shape)


def probabilities(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask), (R, H, S, C); arguments as of `attention`."""
    scores = by_key_head(q * q.shape[3] ** -0.5, k.shape[1]) @ k.mT  # (R, K, (H / K) S, C)
    return (scores.view(*q.shape[:3], k.shape[2]) + mask).softmax(-1)


def by_key_head(x: Tensor, K: int) -> Tensor:
    """x (R, H, S, ...) as (R, K, (H / K) S, ...): the H / K query heads that share a key head are
    neighbours, so one product serves them all."""
    return x.unflatten(1, (K, -1)).flatten(2, 3)


def product(
    x: Tensor, w: Tensor, bias: Tensor | None = None, adapter: nn.Module | None = None
) -> Tensor:
    """x @ w.T + bias, (..., outputs), and what w's adapter, if it has one, adds: see
    extras/lora.py."""
    y = linear(x, w, bias)
    return adapter.add_to(y, x) if adapter else y


class Layer(nn.Module):
    """Attention, then an MLP. Each reads a normalized copy of the residual stream and adds its
    output to the stream.

    Attention is grouped-query (2305.13245): each of K key heads serves its group of H / K query
    heads. The MLP is SwiGLU (2002.05202): down(silu(gate(x)) * up(x)).
    """

    def __init__(self, c: Config):
        super().__init__()
        D, H, K, d = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.H, self.K, self.d = H, K, d
        self.eps = c.rms_norm_eps
        self.norm_1, self.norm_2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.qkv = nn.Parameter(torch.zeros((H + 2 * K) * d, D))  # rows of q, then of k, then of v
        self.qkv_bias = nn.Parameter(torch.zeros((H + 2 * K) * d)) if c.qkv_bias else None
        self.q_norm = nn.Parameter(torch.ones(d)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(d)) if c.qk_norm else None
        self.o = nn.Parameter(torch.zeros(D, H * d))
        self.gate_up = nn.Parameter(torch.zeros(2 * c.intermediate_size, D))
        self.down = nn.Parameter(torch.zeros(D, c.intermediate_size))
        # extras/lora.py may set them.
        self.qkv_adapter = self.o_adapter = self.gate_up_adapter = self.down_adapter = None

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, extend: Callable
    ) -> Tensor:
        """x (R, S, D) -> (R, S, D). rotation: the cos and sin of `rotate`; mask: see `attention`;
        extend(k, v): see Cache.extend."""
        q, k, v = self.heads(x, rotation)  # (R, H, S, d), (R, K, S, d), (R, K, S, d)
        k, v = extend(k, v)  # (R, K, C, d) each
        # The formula, for as many rows at a time as memory allows; on a GPU the same by a kernel.
        out = run_attention(attention, q, k, v, mask)  # (R, H, S, d)
        x = x + product(out.transpose(1, 2).flatten(2), self.o, adapter=self.o_adapter)
        x_2 = rms_norm(x, self.norm_2, self.eps)  # (R, S, D)
        gate, up = product(x_2, self.gate_up, adapter=self.gate_up_adapter).chunk(2, dim=-1)
        return x + product(F.silu(gate) * up, self.down, adapter=self.down_adapter)

    def heads(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q (R, H, S, d), k and v (R, K, S, d) of x (R, S, D). q and k are rotated."""
        x_1 = rms_norm(x, self.norm_1, self.eps)  # (R, S, D)
        qkv = product(x_1, self.qkv, self.qkv_bias, self.qkv_adapter)  # (R, S, (H + 2 K) d)
        qkv = qkv.unflatten(2, (-1, self.d)).transpose(1, 2)  # (R, H + 2 K, S, d)
        qk, v = qkv.split((self.H + self.K, self.K), dim=1)
        if self.q_norm is not None:
            q, k = qk.split((self.H, self.K), dim=1)
            qk = torch.cat((rms_norm(q, self.q_norm, self.eps),
                            rms_norm(k, self.k_norm, self.eps)), dim=1)
        q, k = rotate(qk, *rotation).split((self.H, self.K), dim=1)  # both in one rotation
        return q, k, v


class Qwen2(nn.Module):
    """The language model: Qwen2, Qwen3 or Llama, by its Config. It maps texts (R, S) to logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.real_vocab = config.vocab_size  # start.py: the tokenizer's size, without rows it lacks
        self.temperature = 1.0  # divides the logits, so the policy is softmax(logits / temperature)
        self.arithmetic = None  # the dtype of activations and products; None: that of the weights
        self.checkpoint_activations = False  # True: backward recomputes each layer, to save memory
        V, D = config.vocab_size, config.hidden_size
        self.embedding = nn.Parameter(torch.zeros(V, D))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(D))
        self.head = None if config.tie_word_embeddings else nn.Parameter(torch.zeros(V, D))

    def hidden(self, tokens: Tensor, cache: "Cache", hide: Tensor | None = None) -> Tensor:
        """Last hidden states (R, S, D) of new tokens (R, S), which follow what the cache's rows
        have read. hide: see `begin`."""
        x, rotation, mask = self.begin(tokens, cache, hide)
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers):
            compute = recomputed(layer) if recompute else layer
            x = compute(x, rotation, mask, partial(cache.extend, i))  # (R, S, D)
        cache.columns += tokens.shape[1]
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def begin(
        self, tokens: Tensor, cache: "Cache", hide: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """What the first layer gets: the new tokens' embeddings (R, S, D), the cos and sin of their
        columns (S, d), and the mask (R, 1, S, C). hide (R, S, S): where a new token may not see
        another one."""
        query, key = cache.place(tokens.shape[1])  # (S,), (C,) columns
        sees = cache.sees(query, key)  # (R, S, C)
        if hide is not None:
            sees[:, :, -len(query) :] &= ~hide
        mask = torch.zeros(sees.shape, dtype=self.dtype, device=sees.device)
        mask = mask.masked_fill(~sees, -math.inf)[:, None]  # (R, 1, S, C)
        rotation = self.rotation(query[:, None] * self.frequency)  # (S, d) each
        return F.embedding(tokens, self.embedding).to(self.dtype), rotation, mask

    def logits(self, states: Tensor) -> Tensor:
        """Logits (..., real_vocab) of the token that follows states (..., D), over the temperature,
        in float32 or wider: the policy is their softmax, for sampler, update, ratio, entropy and
        reference alike."""
        logits = at_least_float32(product(states, self.output_weight[: self.real_vocab]))
        return logits if self.temperature == 1 else logits / self.temperature

    def logprob(self, states: Tensor, tokens: Tensor) -> Tensor:
        """log pi (n,) of tokens (n,), with gradient; tokens[i] follows states[i], states (n, D)."""
        formula = lambda states, tokens: (  # for as many tokens at a time as memory allows
            self.logits(states).log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return logprobs_in_memory(formula, states, tokens, self.real_vocab)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits (R, S, V) after each token of texts (R, S), of all V rows, as in transformers."""
        empty = Cache(self, start=torch.zeros_like(texts[:, 0]))
        return product(self.hidden(texts, empty), self.output_weight)

    def rotation(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """The cos and sin (..., d) that `rotate` takes of angles (..., d / 2)."""
        cos, sin = angle.cos().to(self.wide_dtype), angle.sin().to(self.wide_dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @cached_property
    def frequency(self) -> Tensor:
        """RoPE's angles a column (d / 2,), in float64: times a late column they lose no digits."""
        return rope_frequencies(self.config).to(self.norm.device, torch.float64)

    @property
    def dtype(self) -> torch.dtype:
        """That of activations, products and the cache."""
        return self.arithmetic or self.norm.dtype

    @property
    def wide_dtype(self) -> torch.dtype:
        """That of sums and exponentials, which bfloat16 would spoil."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) that turns hidden states into logits."""
        return self.embedding if self.head is None else self.head


# ------------------------------------------------------------------------------------- the KV cache


class Cache:
    """The keys and values of what R rows have read, so that each token is computed once.

    A column holds one token of each row. Texts are padded on the left: row r begins at column
    start[r]. Here the texts a b c and d e have been read, and each row reads one more token:

        column     0   1   2   3     start
        row 0      a   b   c   f     0
        row 1          d   e   g     1

    A token's position, for RoPE, is its column: attention depends on differences of positions
    alone, so it does not matter where a text begins. This class reads prompts, once; `rows` makes
    those of the responses behind them, which are read once, too; sampler.Room reads on by columns.
    """

    def __init__(self, model: Qwen2, start: Tensor):
        """A cache of R rows that have read nothing, and begin at the columns start (R,)."""
        self.start = start
        self.columns = 0  # that the rows have read
        self.past = 0  # those of them that an earlier cache has read, see `rows`
        self.keys = [None] * len(model.layers)  # of each layer (R, K, columns, d)
        self.values = list(self.keys)

    def place(self, S: int) -> tuple[Tensor, Tensor]:
        """The columns of S new tokens (S,), and those of all that is there with them (C,)."""
        column = torch.arange(self.columns + S, device=self.start.device)
        return column[self.columns :], column

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the new tokens in columns query (S,) see what is in columns key (C,): (R, S, C).
        Padding sees itself, since a softmax over nothing would be NaN."""
        query = query[:, None]  # (S, 1)
        sees = key <= query  # (S, C)
        is_text = key >= self.start[:, None, None]  # (R, 1, C)
        return sees & (is_text | (key == query))

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that new tokens see in a layer: those of the past, then their own k
        and v (R, K, S, d).

        Those of prompts, which have no past, are kept, for the rows that go on after them. Those of
        responses are not: then a layer that is computed again, to save memory, finds the same past.
        """
        if self.past == 0:
            self.keys[layer], self.values[layer] = k, v
            return k, v
        return torch.cat((self.keys[layer], k), dim=2), torch.cat((self.values[layer], v), dim=2)

    def rows(self, index: Tensor) -> "Cache":
        """A cache of B rows that go on after what rows index (B,) of this one have read; with
        gradient."""
        new = copy(self)
        new.keys = [x.index_select(0, index) for x in self.keys]
        new.values = [x.index_select(0, index) for x in self.values]
        new.start, new.past = self.start[index], self.columns
        return new


# -------------------------------------------------------------------------------------- checkpoints


# For each of our weights, the weights of a checkpoint that it consists of, stacked in this order.
# (Those of a layer have layers.0. before their name, in a checkpoint model.layers.0.)
NAMES = {
    "embedding": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"],
    "head": ["lm_head.weight"], "norm_1": ["input_layernorm.weight"],
    "norm_2": ["post_attention_layernorm.weight"], "o": ["self_attn.o_proj.weight"],
    "qkv": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "qkv_bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "q_norm": ["self_attn.q_norm.weight"], "k_norm": ["self_attn.k_norm.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "down": ["mlp.down_proj.weight"]}


def parts_of(name: str, rows: int, c: Config) -> dict[str, int]:
    """The checkpoint's weights that make up one of ours, which has so many rows: the rows of each,
    by name, in order. For layers.0.qkv these are q_proj.weight, k_proj.weight, v_proj.weight."""
    layer, _, short_name = name.rpartition(".")
    names = [f"model.{layer}.{x}" if layer else x for x in NAMES[short_name]]
    shares = [1] * len(names)
    if len(names) == 3:  # q, k and v
        shares = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
    return {x: rows * share // sum(shares) for x, share in zip(names, shares)}


def to_checkpoint(tensors: dict[str, Tensor], c: Config) -> dict[str, Tensor]:
    """Weights, their gradients or moments: by our names -> the same by a checkpoint's names."""
    found = {}
    for name, x in tensors.items():
        parts = parts_of(name, len(x), c)
        found.update(zip(parts, x.split(list(parts.values()))))
    return found


def from_checkpoint(
    tensors: dict[str, Tensor], like: dict[str, Tensor], c: Config
) -> dict[str, Tensor]:
    """The inverse of to_checkpoint: tensors by our names, those of `like`, from a checkpoint's."""
    return {name: torch.cat([tensors[part] for part in parts_of(name, len(x), c)])
            for name, x in like.items()}


def parse_config(source: dict) -> Config:
    """Turn a parsed config.json, as transformers 4 or 5 writes it, into a Config.

    ValueError when a size is missing, when a value has the wrong type or is out of range, or when
    the file asks for something that is not implemented here.
    """
    types = {field.name: field.type for field in fields(Config)}
    return Config(**config_values(source, ARCHITECTURES, types))


def load_model(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Qwen2:
    """Read a Hugging Face folder: config.json and model.safetensors, or its shards and their index.

    FileNotFoundError or ValueError, in one sentence, when a file is missing or damaged, or when a
    tensor does not fit.
    """
    path = Path(path)
    check_folder(path)
    config = parse_config(read_json(path / "config.json"))
    found = read_weights(path, device, dtype, config.tie_word_embeddings, config.num_hidden_layers)
    with torch.device("meta"):  # without storage: load_state_dict brings the weights
        model = Qwen2(config).to(dtype)
    check_tensors(f"the checkpoint in {path}", to_checkpoint(model.state_dict(), config), found)
    model.load_state_dict(from_checkpoint(found, model.state_dict(), config), assign=True)
    return model


def save_model(model: Qwen2, path: str | Path) -> None:
    """Write config.json and model.safetensors, which load_model and transformers both read."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    c = model.config
    tensors = {name: x.contiguous() for name, x in to_checkpoint(model.state_dict(), c).items()}
    source = c.source | {"architectures": [ARCHITECTURES[c.source["model_type"]].name]}
    write_json(path / "config.json", written_config(source, c.rope, model.output_weight.dtype))
    replace_file(path / "model.safetensors",
                 lambda part: save_file(tensors, part, metadata={"format": "pt"}))
