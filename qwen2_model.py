"""Qwen2 and Qwen3 by hand: the transformer, its safetensors in and out, a KV cache and a sampler.

The parameters carry the names of a Hugging Face checkpoint, so loading and saving are a copy. What differs
from the reports (Qwen2 2407.10671, Qwen3 2505.09388) and from the usual implementations:
1. One class serves both. Qwen2 has a bias on q, k, v; Qwen3 has none, but an RMSNorm on each head's q and k.
2. The sampler computes a prompt once per question and shares it among the G answers; rows that have ended
   leave the batch; and all chance comes in from outside as uniform numbers, one row per answer, so an answer
   does not depend on which others share its batch.
3. While sampling it records log-prob, entropy and logit_grad of each token: the credit log costs no forward.

Alphabet: B rows, S columns of a forward, V vocabulary, D hidden size, H heads, K key-value heads, d head size,
Q questions, G answers to each, P prompt columns, T response columns.

Run it:  python train.py --steps 0        loads the bundled model, samples from it and grades the answers
"""
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


# ------------------------------------------------------------------------------------------- the configuration


@dataclass
class Config:
    """What the architecture needs of a Hugging Face config.json, which stays in `source` to be written back."""

    vocab_size: int  # V, rows of the embedding; a tokenizer may use fewer of them
    hidden_size: int  # D
    intermediate_size: int  # width of the SwiGLU layer
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # K, each serves H / K heads
    head_dim: int  # d
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # the longest sequence it was made for
    tie_word_embeddings: bool  # the output matrix is the embedding
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    source: dict


def read_config(source: dict) -> Config:
    """Turn a parsed config.json, in its old or its new spelling, into a Config.

    ValueError when the architecture, or an option of it, is not one that this file implements.
    """
    kind = source.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not supported: this file implements {', '.join(ARCHITECTURES)}")
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}  # transformers 5, or transformers 4
    unsupported = {
        "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
        "hidden_act": source.get("hidden_act", "silu") != "silu",
        "use_sliding_window": source.get("use_sliding_window", False),
        "attention_bias": kind == "qwen3" and source.get("attention_bias", False),
    }
    if any(unsupported.values()):
        raise ValueError(f"config.json asks for {[k for k, bad in unsupported.items() if bad]}, not implemented here")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if bad := [name for name in required if type(source.get(name)) is not int or source[name] < 1]:
        raise ValueError(f"config.json has no {bad[0]} that is a whole number above 0")
    heads = source["num_attention_heads"]
    return Config(
        **{name: source[name] for name in required},
        num_key_value_heads=source.get("num_key_value_heads", 32) or heads,  # absent: as transformers; null: one per head
        head_dim=source.get("head_dim") or (128 if kind == "qwen3" else source["hidden_size"] // heads),
        rms_norm_eps=source.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", source.get("rope_theta", 10000.0)),
        max_position_embeddings=source.get("max_position_embeddings", 32768),
        tie_word_embeddings=source.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        source=source,
    )


# ----------------------------------------------------------------------------------------------- the transformer


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension, in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


def rope_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, 1, S, d) by which a head is turned at each position (B, S); RoPE, 2104.09864."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)  # (d / 2,)
    angles = positions[:, None, :, None].float() * frequency  # (B, 1, S, d / 2)
    angles = torch.cat((angles, angles), dim=-1)  # (B, 1, S, d)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) of x (B, heads, S, d) by its angle."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key-value heads (2305.13245)."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.layer, self.kv_heads, self.head_dim = layer, c.num_key_value_heads, c.head_dim
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, queries, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, keys, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, keys, bias=c.qkv_bias)
        self.o_proj = nn.Linear(queries, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def heads(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, S, d), keys and values (B, K, S, d) of x (B, S, D)."""
        B, S, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, S, -1, self.head_dim)).transpose(1, 2)  # (B, H, S, d)
        k = self.k_norm(self.k_proj(x).view(B, S, -1, self.head_dim)).transpose(1, 2)  # (B, K, S, d)
        v = self.v_proj(x).view(B, S, -1, self.head_dim).transpose(1, 2)  # (B, K, S, d)
        return rotate(q, *angles), rotate(k, *angles), v

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: "KVCache | None") -> Tensor:
        """x (B, S, D) -> (B, S, D). mask (B, 1, S, columns): which columns, those of the cache first, a query sees."""
        B, S, _ = x.shape
        q, k, v = self.heads(x, angles)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, K, past + S, d)
        if S == 1:  # the heads of a group are the queries of one product: no key is read twice
            grouped = q.view(B, self.kv_heads, -1, self.head_dim)  # (B, K, H / K, d)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.reshape(B, -1, S, self.head_dim).transpose(1, 2).reshape(B, S, -1))

    def weights(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """How much each column looks at each other one (B, S, S), rows summing to 1, the mean over the heads."""
        q, k, _ = self.heads(x, angles)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, d)
        scores = (q @ k.transpose(2, 3)).float() / self.head_dim**0.5  # (B, H, S, S)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1).mean(1)


class MLP(nn.Module):
    """SwiGLU (2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention, then MLP, each normalized before and added to the residual stream."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: "KVCache | None") -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask, cache)  # (B, S, D)
        return x + self.mlp(self.post_attention_layernorm(x))  # (B, S, D)


class Qwen2(nn.Module):
    """The language model. `model(tokens)` maps (B, S) to logits (B, S, V)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.real_vocab = config.vocab_size  # tokens that exist; train.py sets it to the tokenizer's size
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def enter(self, tokens: Tensor, pad: Tensor | None, past: int, hide: Tensor | None) -> tuple[Tensor, tuple, Tensor]:
        """What a layer takes: x (B, S, D), the angles, and which columns each query sees (B, 1, S, past + S)."""
        S = tokens.shape[1]
        pad = tokens.new_zeros(len(tokens)) if pad is None else pad
        query = torch.arange(past, past + S, device=tokens.device)  # (S,)
        key = torch.arange(past + S, device=tokens.device)  # (past + S,)
        real = key >= pad[:, None]  # (B, past + S)
        real = real if hide is None else real & ~hide
        # A query sees the real columns up to its own; one in the padding sees itself, since nothing at all is NaN.
        mask = (key <= query[:, None]) & real[:, None] | (key == query[:, None])  # (B, S, past + S)
        positions = (query - pad[:, None]).clamp(min=0)  # (B, S)
        angles = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        return self.model["embed_tokens"](tokens), angles, mask[:, None]

    def hidden(self, tokens: Tensor, pad: Tensor | None = None, cache: "KVCache | None" = None,
               hide: Tensor | None = None) -> Tensor:
        """Last hidden states (B, S, D) of tokens (B, S).

        pad (B,): how many columns at the left of a row are padding. cache: holds the columns before these. hide (B, S)
        bool, without a cache: columns at which no other column may look, as if nobody had read what stands there.
        """
        x, angles, mask = self.enter(tokens, pad, cache.length if cache is not None else 0, hide)
        for layer in self.model["layers"]:
            x = layer(x, angles, mask, cache)  # (B, S, D)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.model["norm"](x)

    def attention(self, tokens: Tensor, pad: Tensor | None = None) -> Tensor:
        """How much each column looks at each other one in the last layer (B, S, S), the mean over the heads."""
        x, angles, mask = self.enter(tokens, pad, 0, None)
        *before, last = self.model["layers"]
        for layer in before:
            x = layer(x, angles, mask, None)  # (B, S, D)
        return last.self_attn.weights(last.input_layernorm(x), angles, mask)

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) from hidden states to logits."""
        return self.model["embed_tokens"].weight if self.config.tie_word_embeddings else self.lm_head.weight

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., real_vocab) in fp32 of the next token. Sampler and update both come here."""
        return F.linear(hidden, self.output_weight[: self.real_vocab]).float().log_softmax(-1)

    def forward(self, tokens: Tensor, pad: Tensor | None = None) -> Tensor:
        return F.linear(self.hidden(tokens, pad), self.output_weight)


# ------------------------------------------------------------------------------------------------------ files


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Qwen2:
    """Read a Hugging Face folder: config.json and model.safetensors, or its shards and their index.

    FileNotFoundError or ValueError, in one sentence, when a file or tensor is missing, broken or of another shape.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is not a model folder: it has no config.json")
    model = empty_model(read_config(read_json(path / "config.json")))
    expected, found = {k: v.shape for k, v in model.state_dict().items()}, {}
    for file in weight_files(path):
        found |= read_tensors(file, device, dtype)
    found = {k: v for k, v in found.items() if not k.endswith("rotary_emb.inv_freq")}  # old files store this constant
    if model.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # a second copy of the embedding
    for problem, names in {
        "lacks": expected.keys() - found.keys(),
        "has unknown": found.keys() - expected.keys(),
        "has the wrong shape for": {k for k in expected.keys() & found.keys() if found[k].shape != expected[k]},
    }.items():
        if names:
            raise ValueError(f"the checkpoint in {path} {problem} {len(names)} tensor(s), such as {min(names)}")
    model.load_state_dict(found, assign=True)
    return model


def empty_model(config: Config) -> Qwen2:
    """A model without storage, to be filled by assignment: nobody waits for random numbers that are thrown away."""
    with torch.device("meta"):
        return Qwen2(config)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder."""
    index = path / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index} has no weight_map from tensors to files")
        names = set(shards.values())
    for name in sorted(names):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path / name} is missing")
    return [path / name for name in sorted(names)]


def read_json(file: Path) -> dict:
    """Parse a JSON file, with its name in the error."""
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} holds no JSON object")
    return parsed


def read_tensors(file: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of one safetensors file; ValueError when it is cut short or something else."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            return {name: tensors.get_tensor(name).to(dtype) for name in tensors.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); fetch it again") from None


def save_model(model: Qwen2, path: str | Path) -> None:
    """Write config.json and model.safetensors so that load_model and transformers read them unchanged."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    source = model.config.source | {"architectures": [ARCHITECTURES[model.config.source["model_type"]]]}
    source |= {"dtype": dtype, "torch_dtype": dtype}  # transformers 5, transformers 4
    (path / "config.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors.index.json").unlink(missing_ok=True)  # of shards that were here before


# ------------------------------------------------------------------------------------------ cache and sampler


class KVCache:
    """Keys and values of the columns computed so far, for the rows still running."""

    def __init__(self, keys: Tensor, values: Tensor, length: int = 0):
        self.keys, self.values = keys, values  # (layers, B, K, columns, d), filled up to `length` columns
        self.length = length

    @classmethod
    def empty(cls, model: Qwen2, rows: int, columns: int) -> "KVCache":
        """Room for `rows` sequences of `columns` tokens, in the dtype that the model computes in."""
        c, weight = model.config, model.output_weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        shape = (2, c.num_hidden_layers, rows, c.num_key_value_heads, columns, c.head_dim)
        return cls(*torch.empty(shape, device=weight.device, dtype=dtype))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, K, S, d) behind the filled columns of a layer; return all of its columns."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def repeat(self, G: int, more: int) -> "KVCache":
        """Every row G times, in order, with room for `more` columns: the prompt of G answers."""
        def grow(x: Tensor) -> Tensor:
            layers, rows, K, _, d = x.shape
            grown = x.new_empty(layers, rows, G, K, self.length + more, d)
            grown[..., : self.length, :] = x[:, :, None, :, : self.length]
            return grown.view(layers, rows * G, K, self.length + more, d)
        return KVCache(grow(self.keys), grow(self.values), self.length)

    def keep(self, alive: Tensor) -> Tensor:
        """Drop the rows where alive (B,) is False; return the old index (B',) of the row now in each place.

        Only the gaps are filled, from the end, so the cost is that of the rows that end and not of those that stay.
        """
        count = int(alive.sum())
        order = torch.arange(count, device=alive.device)  # (B',)
        gaps = (~alive[:count]).nonzero()[:, 0]
        order[gaps] = alive[count:].nonzero()[:, 0] + count
        for x in (self.keys, self.values):
            x[:, gaps, :, : self.length] = x[:, order[gaps], :, : self.length]
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]
        return order


class Samples(NamedTuple):
    """B responses, padded on the right to the longest. Column t is the t-th token of the response."""

    tokens: Tensor  # (B, T) int64, 0 on padding
    mask: Tensor  # (B, T) bool, True on sampled tokens, the end token included
    logprob: Tensor  # (B, T) log pi(token), temperature 1, full softmax; 0 on padding, as the next two
    entropy: Tensor  # (B, T) entropy of the distribution the token came from, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    ended: Tensor  # (B,) bool, False where the token limit cut the response off


def take(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """The log-prob (...) of each token (...) among log_probs (..., V)."""
    return log_probs.gather(-1, tokens[..., None])[..., 0]


def entropy_and_logit_grad(log_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy, and ||onehot - p|| = sqrt((sum_{v != token} p_v)^2 + sum_{v != token} p_v^2), both (...).

    The taken token's p is set to 0 first: sqrt(1 - 2 p + sum p^2) returns 0 in fp32 for true values near 1e-4.
    """
    p = log_probs.exp()  # (..., V)
    entropy = -(p * log_probs.clamp(min=-1e4)).sum(-1)  # clamped, since 0 * -inf is NaN
    others = p.scatter(-1, tokens[..., None], 0.0)  # (..., V)
    return entropy, (others.sum(-1).square() + others.square().sum(-1)).sqrt()


def draw(log_probs: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """The token (B,) at which the cumulative distribution of log_probs (B, V) passes uniform (B,) in [0, 1).

    temperature 0 takes the likeliest. In fp64, since the sum over a large vocabulary would lose the tail in fp32.
    """
    if temperature == 0:
        return log_probs.argmax(-1)
    cumulative = (log_probs.double() / temperature).softmax(-1).cumsum(-1)  # (B, V)
    if cumulative[:, -1].isnan().any():
        raise FloatingPointError("the model's logits are not finite: its weights are broken, or --lr is too high")
    return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as tokens (Q, P), padded with 0 on the left, and how many columns of each are padding (Q,)."""
    P = max(map(len, prompts))
    tokens = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)
    return tokens, torch.tensor([P - len(p) for p in prompts], device=device)


@torch.no_grad()
def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             temperature: float = 1.0, limit: Tensor | None = None) -> Samples:
    """Sample G answers to each of Q prompts, of at most T tokens; answer g to question q is row q * G + g.

    uniforms (Q * G, T) float64 in [0, 1): the chance of every token. An answer stops at one of end_tokens, or is cut
    off after T tokens, or after those of limit (Q * G,), if given. What is recorded is at temperature 1 whatever
    `temperature` draws the tokens.
    """
    device, (B, T) = model.output_weight.device, uniforms.shape
    G = B // len(prompts)
    uniforms, ends = uniforms.to(device), torch.tensor(end_tokens, device=device)
    limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)
    prompt_tokens, pad = left_pad(prompts, device)  # (Q, P), (Q,)
    prompt_cache = KVCache.empty(model, *prompt_tokens.shape)
    hidden = model.hidden(prompt_tokens, pad, prompt_cache)[:, -1].repeat_interleave(G, 0)  # (B, D)
    cache, pad = prompt_cache.repeat(G, T), pad.repeat_interleave(G)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    mask, ended = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(B, dtype=torch.bool, device=device)
    logprob, entropy, logit_grad = torch.zeros(3, B, T, device=device)
    rows = torch.arange(B, device=device)  # (B',) which response each running row writes
    for t in range(T):
        log_probs = model.log_probs(hidden)  # (B', V)
        token = draw(log_probs, uniforms[rows, t], temperature)  # (B',)
        tokens[rows, t], mask[rows, t], logprob[rows, t] = token, True, take(log_probs, token)
        entropy[rows, t], logit_grad[rows, t] = entropy_and_logit_grad(log_probs, token)
        stopped = torch.isin(token, ends)  # (B',)
        ended[rows[stopped]] = True
        stopped |= limit[rows] <= t + 1
        if stopped.all():
            break
        if stopped.any():
            order = cache.keep(~stopped)
            rows, pad, token = rows[order], pad[order], token[order]
        hidden = model.hidden(token[:, None], pad, cache)[:, 0]  # (B', D)
    return Samples(*(x[:, : t + 1] for x in (tokens, mask, logprob, entropy, logit_grad)), ended)
