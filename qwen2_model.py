"""Qwen2 and Qwen3 by hand: the transformer, its safetensors in and out, a KV cache and a sampler.

Checkpoints are Hugging Face's, read and written. What differs from the reports (Qwen2 2407.10671, Qwen3 2505.09388)
and from the usual implementations:
1. One class serves both. Qwen2 has a bias on q, k, v; Qwen3 has none, but an RMSNorm on each head's q and k.
2. Matrices that apply to the same input (q, k, v; gate, up) are one matrix here, three or two in a checkpoint.
3. A prompt is read once for all answers to it (`Prompts`), by the sampler and, with gradient, by the update. The
   sampler lets rows that have ended leave the batch, and on a GPU replays a step as a CUDA graph.
4. All chance comes in from outside as uniform numbers, one row per answer, so an answer does not depend on which others
   share its batch. While sampling, log-prob, entropy and logit_grad of each token are recorded: the credit log costs
   no forward.
5. The log-probs of the update never hold all logits: they are computed in pieces, and again in the backward pass.

Alphabet: B rows, S columns of a forward, V vocabulary, D hidden size, H heads, K key-value heads, d head size,
Q questions, G answers to each, P prompt columns, T response columns.

Run it:  python train.py --steps 0        loads the bundled model, samples from it and grades the answers
"""
import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**24  # elements of a (tokens, V) tensor: more are computed in pieces
LOOK_EVERY, COLUMNS_AT_ONCE = 16, 128  # where shapes are static: tokens between looks at who has ended; growth
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
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, 1, S, d) by which a head is turned at each position (B, S), the first half of the sines with
    a minus; RoPE, 2104.09864."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)  # (d / 2,)
    angles = positions[:, None, :, None].float() * frequency  # (B, 1, S, d / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) of x (B, heads, S, d) by its angle: (x_i cos - x_j sin, x_j cos + x_i sin)."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (B, heads, S, d)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key-value heads (2305.13245)."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.layer, self.H, self.K, self.d = layer, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = nn.Linear(c.hidden_size, (self.H + 2 * self.K) * self.d, bias=c.qkv_bias)
        self.o_proj = nn.Linear(self.H * self.d, c.hidden_size, bias=False)
        self.qk_norm = c.qk_norm
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(self.d, c.rms_norm_eps), RMSNorm(self.d, c.rms_norm_eps)

    def heads(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, S, d), keys and values (B, K, S, d) of x (B, S, D)."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)  # (B, H + 2 K, S, d)
        qk, v = qkv.split((self.H + self.K, self.K), dim=1)  # (B, H + K, S, d), (B, K, S, d)
        if self.qk_norm:
            q, k = qk.split((self.H, self.K), dim=1)  # (B, H, S, d), (B, K, S, d)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)  # (B, H + K, S, d)
        if x.device.type == "cpu" and x.dtype.itemsize < 4:  # where attention in 16 bits is slower than in 32
            qk, v = qk.float(), v.float()
        return *rotate(qk, *angles).split((self.H, self.K), dim=1), v

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, past: "Past | None") -> Tensor:
        """x (B, S, D) -> (B, S, D). mask (B, 1, S, columns): which columns, those of the past first, a query sees."""
        B, S, _ = x.shape
        q, k, v = self.heads(x, angles)
        if past is not None:
            k, v = past.append(self.layer, k, v)  # (B, K, columns, d)
        if S == 1:  # the heads of a group are the queries of one product: no key is read twice
            grouped = q.reshape(B, self.K, -1, self.d)  # (B, K, H / K, d)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        else:
            if x.is_cuda:  # whose kernel for masks may know no groups
                k, v = (heads.repeat_interleave(self.H // self.K, dim=1) for heads in (k, v))  # (B, H, columns, d)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=not x.is_cuda)
        out = out.reshape(B, self.H, S, self.d).transpose(1, 2).reshape(B, S, -1)  # (B, S, H * d)
        return self.o_proj(out.to(x.dtype))

    def weights(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, past: "Past | None") -> Tensor:
        """How much each column looks at each one (B, S, columns), rows summing to 1, the mean over the heads."""
        q, k, v = self.heads(x, angles)
        if past is not None:
            k, _ = past.append(self.layer, k, v)  # (B, K, columns, d)
        k = k.repeat_interleave(self.H // self.K, dim=1)  # (B, H, columns, d)
        scores = (q @ k.transpose(2, 3)) / self.d**0.5  # (B, H, S, columns)
        kind = torch.promote_types(scores.dtype, torch.float32)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=kind).mean(1)


class MLP(nn.Module):
    """SwiGLU (2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention, then MLP, each normalized before and added to the residual stream."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, past: "Past | None") -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask, past)  # (B, S, D)
        return x + self.mlp(self.post_attention_layernorm(x))  # (B, S, D)


class Qwen2(nn.Module):
    """The language model. `model(tokens)` maps (B, S) to logits (B, S, V)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.real_vocab = config.vocab_size  # tokens that exist; train.py sets it to the tokenizer's size
        self.checkpoint_activations = False  # whether the backward pass computes each layer again, to save memory
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def enter(self, tokens: Tensor, pad: Tensor | None, past: "Past | None", hide: Tensor | None) -> tuple:
        """What a layer takes: x (B, S, D), the angles, and which columns each query sees (B, 1, S, columns)."""
        if isinstance(past, KVCache):  # one column; all that is to be known of it lies ready
            angles = past.cos[past.next][:, None, None], past.sin[past.next][:, None, None]
            return self.model["embed_tokens"](tokens), angles, past.bias[:, None, None, : past.end]
        column = torch.arange(tokens.shape[1], device=tokens.device)  # (S,)
        pad = tokens.new_zeros(len(tokens)) if pad is None else pad
        first = -pad if past is None else past.next  # (B,) the position of column 0
        positions = column + first[:, None]  # (B, S), below 0 in the padding
        real = positions >= 0 if hide is None else (positions >= 0) & ~hide  # (B, S)
        # A query sees the real columns up to its own; one in the padding sees itself, since nothing at all is NaN.
        mask = (column <= column[:, None]) & real[:, None] | (column == column[:, None])  # (B, S, S)
        mask = mask if past is None else past.visible(mask)  # (B, S, columns)
        angles = rope_angles(positions.clamp(min=0), self.config.head_dim, self.config.rope_theta)
        return self.model["embed_tokens"](tokens), angles, mask[:, None]

    def hidden(self, tokens: Tensor, pad: Tensor | None = None, past: "Past | None" = None,
               hide: Tensor | None = None) -> Tensor:
        """Last hidden states (B, S, D) of tokens (B, S).

        pad (B,): how many columns at the left of a row are padding; or past: what stands before these columns.
        hide (B, S) bool: columns at which no other column may look, as if nobody had read what stands there.
        """
        x, angles, mask = self.enter(tokens, pad, past, hide)
        for layer in self.model["layers"]:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, x, angles, mask, past, use_reentrant=False, preserve_rng_state=False)  # (B, S, D)
            else:
                x = layer(x, angles, mask, past)  # (B, S, D)
        return self.model["norm"](x)

    def attention(self, tokens: Tensor, pad: Tensor | None = None, past: "Past | None" = None) -> Tensor:
        """How much each column looks at each one, of the past too, in the last layer (B, S, columns), mean of heads."""
        x, angles, mask = self.enter(tokens, pad, past, None)
        *before, last = self.model["layers"]
        for layer in before:
            x = layer(x, angles, mask, past)  # (B, S, D)
        return last.self_attn.weights(last.input_layernorm(x), angles, mask, past)

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) from hidden states to logits."""
        return self.model["embed_tokens"].weight if self.config.tie_word_embeddings else self.lm_head.weight

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (..., real_vocab) in fp32 of the next token."""
        return log_softmax(hidden, self.output_weight[: self.real_vocab])

    def forward(self, tokens: Tensor, pad: Tensor | None = None) -> Tensor:
        return F.linear(self.hidden(tokens, pad), self.output_weight)


# ------------------------------------------------------------------------------------ from logits to facts


def log_softmax(hidden: Tensor, weight: Tensor) -> Tensor:
    """Log-probs (..., V), in fp32 at least, of the next token, of hidden (..., D) and the output matrix (V, D).

    Sampler and update both come here.
    """
    logits = F.linear(hidden, weight)  # (..., V)
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def take(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """The log-prob (...) of each token (...) among log_probs (..., V)."""
    return log_probs.gather(-1, tokens[..., None])[..., 0]


def entropy_and_logit_grad(log_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy, and ||onehot - p|| = sqrt((sum_{v != token} p_v)^2 + sum_{v != token} p_v^2), both (...).

    The taken token's p is set to 0 first: sqrt(1 - 2 p + sum p^2) returns 0 in fp32 for true values near 1e-4.
    """
    p = log_probs.exp()  # (..., V)
    entropy = -torch.linalg.vecdot(p, log_probs.clamp(min=-1e4))  # clamped, since 0 * -inf is NaN
    others = p.scatter_(-1, tokens[..., None], 0.0)  # (..., V), in place of p
    return entropy, (others.sum(-1).square() + torch.linalg.vecdot(others, others)).sqrt()


def draw(log_probs: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """The token (B,) at which the cumulative distribution of log_probs (B, V) passes uniform (B,) in [0, 1).

    temperature 0 takes the likeliest. The sum is in fp64, where it does not lose the tail of a large vocabulary.
    """
    if temperature == 0:
        return log_probs.argmax(-1)
    p = log_probs.exp() if temperature == 1 else (log_probs / temperature).softmax(-1)  # (B, V)
    cumulative = p.cumsum(-1, dtype=torch.float64)  # (B, V)
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return token.clamp(max=p.shape[-1] - 1)  # beyond it only where p is not finite


class TokenLogprobs(torch.autograd.Function):
    """log pi (N,) of tokens (N,) after hidden (N, D), without ever holding all of the logits (N, V).

    They are computed in pieces, thrown away, and computed again in the backward pass, where the gradient of log pi with
    respect to them is onehot - p. Of the output matrix, only the first `rows` are a vocabulary.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, rows: int, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, tokens)
        ctx.rows, ctx.size = rows, max(1, LOGITS_AT_ONCE // rows)  # tokens at once
        pieces = zip(hidden.split(ctx.size), tokens.split(ctx.size))
        return torch.cat([take(log_softmax(h, weight[:rows]), t) for h, t in pieces])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        """The loss's gradients to hidden and weight, from that to the log-probs (N,)."""
        hidden, weight, tokens = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        used, to_used = weight[: ctx.rows], to_weight[: ctx.rows]  # (V, D)
        for h, t, g, to_h in zip(*(x.split(ctx.size) for x in (hidden, tokens, gradient, to_hidden))):
            to_logits = log_softmax(h, used).exp_().mul_(-g[:, None])  # (n, V) -p, times what comes from above
            to_logits = to_logits.scatter_add_(1, t[:, None], g[:, None]).to(weight.dtype)  # + onehot
            torch.mm(to_logits, used, out=to_h)
            to_used.addmm_(to_logits.T, h)
        return to_hidden, to_weight, None, None


def token_logprobs(model: Qwen2, hidden: Tensor, tokens: Tensor) -> Tensor:
    """log pi (N,) of tokens (N,), each after hidden (N, D), with gradient."""
    return TokenLogprobs.apply(hidden, model.output_weight, model.real_vocab, tokens)


# ------------------------------------------------------------------------------------------------------ files


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Qwen2:
    """Read a Hugging Face folder: config.json and model.safetensors, or its shards and their index.

    FileNotFoundError or ValueError, in one sentence, when a file or tensor is missing, broken or of another shape.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is not a model folder: it has no config.json")
    model = empty_model(read_config(read_json(path / "config.json")))
    expected, found = {k: v.shape for k, v in split_fused(model.config, model.state_dict()).items()}, {}
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
    model.load_state_dict(fuse(found), assign=True)
    return model


def empty_model(config: Config) -> Qwen2:
    """A model without storage, to be filled by assignment: nobody waits for random numbers that are thrown away."""
    with torch.device("meta"):
        return Qwen2(config)


FUSED = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
         "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}  # ours: what a checkpoint has in its place


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """From the tensors of a checkpoint to ours: what is applied to the same input lies in one matrix, row under row."""
    fused = dict(tensors)
    for whole, parts in FUSED.items():
        for name in [name for name in tensors if parts[0] in name]:
            fused[name.replace(parts[0], whole)] = torch.cat([fused.pop(name.replace(parts[0], p)) for p in parts])
    return fused


def split_fused(c: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """From our tensors, or their gradients, to those of a checkpoint."""
    split = dict(tensors)
    kv = c.num_key_value_heads * c.head_dim
    sizes = {"self_attn.qkv_proj": [c.num_attention_heads * c.head_dim, kv, kv],
             "mlp.gate_up_proj": [c.intermediate_size] * 2}
    for whole, parts in FUSED.items():
        for name in [name for name in tensors if whole in name]:
            for part, tensor in zip(parts, split.pop(name).split(sizes[whole])):
                split[name.replace(whole, part)] = tensor
    return split


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
    tensors = {name: tensor.contiguous() for name, tensor in split_fused(model.config, model.state_dict()).items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    source = model.config.source | {"architectures": [ARCHITECTURES[model.config.source["model_type"]]]}
    source |= {"dtype": dtype, "torch_dtype": dtype}  # transformers 5, transformers 4
    text = json.dumps(source, indent=2) + "\n"
    replace_file(path / "config.json", lambda part: part.write_text(text, encoding="utf-8"))
    replace_file(path / "model.safetensors", lambda part: save_file(tensors, part, metadata={"format": "pt"}))
    (path / "model.safetensors.index.json").unlink(missing_ok=True)  # of shards that were here before


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, then rename it: a reader, or an interruption, never meets half of it."""
    part = file.with_name(file.name + ".part")  # a folder: safetensors has one more file beside that which it writes
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    write(part / file.name)
    (part / file.name).replace(file)
    part.rmdir()


# ------------------------------------------------------------------------------------------- what stands before


class Prompts:
    """Q prompts, read once for all answers to them: each layer's keys and values, with gradient where that is wanted."""

    def __init__(self, model: Qwen2, prompts: list[list[int]]):
        tokens, pad = left_pad(prompts, model.output_weight.device)  # (Q, P), (Q,)
        self.theta, self.layers = model.config.rope_theta, {}  # layer -> keys, values (Q, K, P, d)
        self.next = -pad  # (Q,) the position of the column that follows
        self.last = model.hidden(tokens, past=self)[:, -1]  # (Q, D) the state that predicts an answer's first token
        self.next = tokens.shape[1] - pad  # (Q,)
        self.real = torch.arange(tokens.shape[1], device=pad.device) >= pad[:, None]  # (Q, P)

    def detach(self) -> "Prompts":
        """The same, cut off from its graph: gradients gather here, to be sent on together."""
        twin = copy.copy(self)
        twin.last = self.last.detach().requires_grad_()
        twin.layers = {i: tuple(x.detach().requires_grad_() for x in both) for i, both in self.layers.items()}
        return twin

    def backward(self, twin: "Prompts") -> None:
        """Send the gradients gathered by a detached twin back through the prompts."""
        mine, its = ([p.last, *(x for both in p.layers.values() for x in both)] for p in (self, twin))
        reached = [(x, y.grad) for x, y in zip(mine, its) if y.grad is not None]
        torch.autograd.backward(*zip(*reached))

    def visible(self, mask: Tensor) -> Tensor:
        """A prompt sees nothing but itself (Q, P, P)."""
        return mask

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values."""
        self.layers[layer] = k, v
        return k, v


class Answers:
    """What stands before B answers: the prompts `which` (B,), of the Q that were read."""

    def __init__(self, prompts: Prompts, which: Tensor):
        self.prompts, self.which = prompts, which
        self.next, self.real = prompts.next[which], prompts.real[which]  # (B,), (B, P)

    def last(self) -> Tensor:
        """The state (B, D) that predicts the first token of each answer."""
        return self.prompts.last[self.which]

    def visible(self, mask: Tensor) -> Tensor:
        """Which columns, the prompt's first, the queries see (B, S, P + S), from those of their own (B, S, S)."""
        return torch.cat((self.real[:, None].expand(-1, mask.shape[1], -1), mask), dim=2)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The prompt's keys and values of a layer, and behind them the answers' own (B, K, P + S, d)."""
        keys, values = self.prompts.layers[layer]  # (Q, K, P, d)
        return torch.cat((keys[self.which], k), dim=2), torch.cat((values[self.which], v), dim=2)


class KVCache:
    """What stands before the next token of B running answers: room for all columns, and how many of them are filled.

    All that changes with every token is a tensor, so that a GPU can replay a step without Python; `end` says how many
    columns are looked at.
    """

    def __init__(self, prompts: Prompts, answers: int, more: int):
        """Each prompt `answers` times, in order, with room for `more` columns."""
        Q, P = prompts.real.shape
        first = prompts.layers[0][0]  # (Q, K, P, d)
        room = first.new_zeros(2, len(prompts.layers), Q, answers, first.shape[1], P + more, first.shape[3])
        for layer, both in prompts.layers.items():
            for i, x in enumerate(both):
                room[i, layer, :, :, :, :P] = x[:, None]
        self.keys, self.values = room.flatten(2, 3)  # (layers, B, K, columns, d)
        real = F.pad(prompts.real, (0, more)).repeat_interleave(answers, 0)  # (B, columns) holds a token
        self.bias = first.new_zeros(real.shape).masked_fill(~real, float("-inf"))  # (B, columns) added to the scores
        self.next = prompts.next.repeat_interleave(answers) - 1  # (B,) position of the token in `column`
        positions = torch.arange(P + more, device=first.device)[None]  # (1, columns)
        self.cos, self.sin = (x[0, 0] for x in rope_angles(positions, first.shape[3], prompts.theta))  # (columns, d)
        self.column = torch.tensor([P - 1], device=first.device)  # (1,) the last one filled
        self.end = P

    def open(self) -> None:
        """Begin the next column."""
        self.column += 1
        self.next += 1
        self.bias.index_fill_(1, self.column, 0.0)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, K, 1, d) of a layer into the open column; return all that are looked at (B, K, end, d)."""
        keys, values = self.keys[layer], self.values[layer]  # (B, K, columns, d)
        keys.index_copy_(2, self.column, k)
        values.index_copy_(2, self.column, v)
        return keys[:, :, : self.end], values[:, :, : self.end]

    def keep(self, alive: Tensor) -> Tensor:
        """Drop the rows where alive (B,) is False; return the old index (B',) of the row now in each place.

        Only the gaps are filled, from the end, so the cost is that of the rows that end and not of those that stay.
        """
        count = int(alive.sum())
        order = torch.arange(count, device=alive.device)  # (B',)
        gaps = (~alive[:count]).nonzero()[:, 0]
        order[gaps] = alive[count:].nonzero()[:, 0] + count
        for x in (self.keys, self.values):
            x[:, gaps, :, : self.end] = x[:, order[gaps], :, : self.end]
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]
        self.bias, self.next = self.bias[order], self.next[order]
        return order


Past = Prompts | Answers | KVCache


# ---------------------------------------------------------------------------------------------------- sampler


class Samples(NamedTuple):
    """B responses, padded on the right to the longest. Column t is the t-th token of the response."""

    tokens: Tensor  # (B, T) int64, 0 on padding
    mask: Tensor  # (B, T) bool, True on sampled tokens, the end token included
    logprob: Tensor  # (B, T) log pi(token), temperature 1, full softmax; 0 on padding, as the next two
    entropy: Tensor  # (B, T) entropy of the distribution the token came from, nats
    logit_grad: Tensor  # (B, T) ||onehot - p||, the size of the gradient of log pi in logit space
    ended: Tensor  # (B,) bool, False where the token limit cut the response off


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as tokens (Q, P), padded with 0 on the left, and how many columns of each are padding (Q,)."""
    P = max(map(len, prompts))
    tokens = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)
    return tokens, torch.tensor([P - len(p) for p in prompts], device=device)


class Decoder:
    """The answers still running, one token further with every step; finished ones leave when `drop` is called.

    static: a step reads and writes the same tensors as the one before, so that a GPU can replay it as a CUDA graph, one
    launch for its hundreds of kernels. Masks then hide columns not yet filled, and tokens drawn after an answer's end;
    rows leave only when half of them have ended.
    """

    def __init__(self, model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
                 temperature: float, limit: Tensor | None, static: bool, not_first: Tensor | None = None):
        device, (B, T) = model.output_weight.device, uniforms.shape
        read, G = Prompts(model, prompts), B // len(prompts)
        P, whole = read.real.shape[1], COLUMNS_AT_ONCE if static else 1  # static columns come in whole pieces
        self.cache = KVCache(read, G, -(-(P + T) // whole) * whole - P)
        self.model, self.temperature, self.static = model, temperature, static
        self.uniforms, self.ends = uniforms.to(device), torch.tensor(end_tokens, dtype=torch.long, device=device)
        self.limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)  # (B,)
        not_first = None if not_first is None else not_first.to(device)  # (B,)
        self.tokens = torch.zeros(B, T, dtype=torch.long, device=device)
        self.mask = torch.zeros(B, T, dtype=torch.bool, device=device)
        kind = torch.promote_types(read.last.dtype, torch.float32)
        self.facts = torch.zeros(3, B, T, device=device, dtype=kind)  # log-prob, entropy, logit_grad
        self.rows = torch.arange(B, device=device)  # (B',) which response each running row writes
        self.running = torch.ones(B, dtype=torch.bool, device=device)  # (B',)
        self.token = torch.zeros(B, dtype=torch.long, device=device)  # (B',) the last one drawn
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # (1,) how many were drawn; the CPU would read a ()
        self.graph, self.shape = None, None  # the last step as a CUDA graph, and its rows and columns
        self.draw(read.last.repeat_interleave(G, 0), not_first)

    def draw(self, hidden: Tensor, but: Tensor | None = None) -> None:
        """Draw, from all tokens but those of `but` (B',), and record the token that follows hidden (B', D)."""
        log_probs, where = self.model.log_probs(hidden), (self.rows, self.t)  # (B', V)
        allowed = log_probs if but is None else log_probs.scatter(1, but[:, None], float("-inf"))  # (B', V)
        self.token.copy_(draw(allowed, self.uniforms[where], self.temperature))
        self.tokens[where], self.mask[where] = self.token, self.running
        facts = take(log_probs, self.token), *entropy_and_logit_grad(log_probs, self.token)
        self.facts[:, self.rows, self.t] = torch.stack(facts)  # (3, B')
        self.t += 1
        self.running &= ~(self.token[:, None] == self.ends).any(1) & (self.limit[self.rows] > self.t)

    def step(self) -> None:
        """Read the last token of each running row, and draw the next."""
        self.cache.open()
        self.draw(self.model.hidden(self.token[:, None], past=self.cache)[:, 0])

    def replay(self) -> None:
        """`step` as a CUDA graph, captured when rows and columns are what they were at the last step."""
        shape = len(self.rows), self.cache.end
        if shape != self.shape:
            self.graph, self.shape = None, shape
            return self.step()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # records, and does nothing yet
                self.step()
        self.graph.replay()

    def advance(self, columns: int) -> None:
        """One more token, which will stand in the last of so many columns."""
        if self.static:
            columns = -(-columns // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE
        self.cache.end = columns
        self.replay() if self.static and self.token.is_cuda else self.step()

    def drop(self) -> None:
        """Let the rows that have ended leave the batch; where shapes are static, not before half of them have."""
        count = int(self.running.sum())
        if count == len(self.rows) or self.static and 2 * count > len(self.rows):
            return
        order = self.cache.keep(self.running)  # (B'',)
        self.rows, self.running, self.token = self.rows[order], self.running[order], self.token[order]


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             temperature: float = 1.0, limit: Tensor | None = None, not_first: Tensor | None = None,
             static: bool | None = None) -> Samples:
    """Sample G answers to each of Q prompts, of at most T tokens; answer g to question q is row q * G + g.

    uniforms (Q * G, T) float64 in [0, 1): the chance of every token. An answer stops at one of end_tokens, or is cut
    off after T tokens, or after those of limit (Q * G,), if given; it begins with any token but that of not_first
    (Q * G,), if given. What is recorded is the full softmax at temperature 1, whatever draws the tokens. static: see
    Decoder; unless given, on a GPU only.
    """
    with torch.inference_mode():
        static, P = model.output_weight.is_cuda if static is None else static, max(map(len, prompts))
        d = Decoder(model, prompts, uniforms, end_tokens, temperature, limit, static, not_first)
        for t in range(1, uniforms.shape[1]):
            if not static or t % LOOK_EVERY == 0:
                d.drop()
            if not len(d.rows):
                break
            d.advance(P + t)
    T = int(d.mask.any(0).sum())
    mask = d.mask[:, :T].clone()
    tokens, facts = d.tokens[:, :T] * mask, d.facts[..., :T].where(mask, 0.0)
    ended = ((tokens[..., None] == d.ends).any(-1) & mask).any(1)
    return Samples(tokens, mask, *facts, ended)
