"""Qwen2, Qwen3 and Llama from scratch: the transformer, the log-prob of a token, and Hugging Face checkpoints.

How this differs from the reports (Qwen2 2407.10671, Qwen3 2505.09388, Llama 2302.13971) and the usual implementations:
1. One class implements all three. Qwen2 has a bias on q, k and v. Qwen3 has none, but an RMSNorm on each head's q and
   k. Llama has neither.
2. `Qwen2.hidden` knows nothing about padding or prompts. It takes positions, and a bias that says which columns each
   query sees. Its callers build both: sampler.py, plumbing/shared_prompts.py, and `Qwen2.forward` for a plain pass.
3. A token's log-prob, entropy and logit gradient are computed in one place, so that sampler and update agree. (Large
   vocabularies have a twin, plumbing/vocabulary.py.) Where the logits of all tokens would exceed LOGITS_AT_ONCE, the
   update recomputes them piece by piece in the backward pass.

To change the transformer, change plumbing/decoder.py as well, which computes the same for one token, or run --plain.

Alphabet: B rows, S new columns (tokens) of each row in a forward pass, C columns that a query may see (those in the
cache, then the S new ones), V vocabulary, D hidden size, H heads, K key-value heads, d head size, N tokens in a flat
list.

Run it:  python train.py --steps 0        loads the bundled model, samples from it and grades the responses
"""
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plumbing import vocabulary
from plumbing.attention import attend
from plumbing.files import check_fields, check_tensors, read_json, replace_file, write_json
from plumbing.model_folder import INERT, check_folder, read_weights, rope_theta

LOGITS_AT_ONCE = 2**24  # the largest tensor of logits (N, V), in elements (64 MiB); longer lists of tokens are split
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


# ------------------------------------------------------------------------------------------- the configuration


@dataclass
class Config:
    """The architecture, from a Hugging Face config.json."""

    vocab_size: int  # V, rows of the embedding; a tokenizer may use fewer of them
    hidden_size: int  # D
    intermediate_size: int  # width of the SwiGLU layer
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # K; each one is shared by H / K heads
    head_dim: int  # d
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # the longest sequence the model was trained for
    tie_word_embeddings: bool  # the output matrix is the embedding
    qkv_bias: bool  # q, k and v have a bias: Qwen2 alone
    qk_norm: bool  # each head's q and k are normalized: Qwen3 alone
    source: dict  # the whole config.json, which save_model writes back


# ----------------------------------------------------------------------------------------------- the transformer


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; for bfloat16 torch computes it in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, 1, S, d) of RoPE's angles (2104.09864) at positions (B, S), as `rotate` needs them: both
    halves of d hold the same d / 2 angles, and the first half of the sine is negated."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)  # (d / 2,)
    angles = positions[:, None, :, None].float() * frequency  # (B, 1, S, d / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_j), j = i + d/2, of x (B, heads, S, d) to (x_i cos - x_j sin, x_j cos + x_i sin).

    The usual `rotate_half`, with its minus sign moved into `sin`.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (B, heads, S, d); the first half of sin is negated already
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (B, P) of B prompts, padded on the left, and a mask (B, P) bool of the real ones."""
    P = max(map(len, prompts))
    tokens = torch.tensor([[0] * (P - len(p)) + p for p in prompts], device=device)  # (B, P)
    length = torch.tensor([len(p) for p in prompts], device=device)  # (B,)
    return tokens, torch.arange(P, device=device) >= P - length[:, None]


def positions_of(real: Tensor) -> Tensor:
    """The position (B, C) of each column, counted from the first real one. real (B, C): False on padding."""
    return (real.cumsum(1) - 1).clamp(min=0)  # 0 in the padding on the left, where nobody looks


def causal_bias(real: Tensor) -> Tensor:
    """The bias (B, C, C) added to attention scores: 0 where a query sees a column, -inf where it does not.

    real (B, C): False on padding. A query sees itself and the real columns before it. A query in the padding sees at
    least itself, because the softmax of a row without any visible column is NaN.
    """
    C = real.shape[1]
    visible = real[:, None].expand(-1, C, -1).tril() | torch.eye(C, dtype=torch.bool, device=real.device)  # (B, C, C)
    return torch.zeros(visible.shape, device=real.device).masked_fill(~visible, float("-inf"))


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key-value heads (2305.13245)."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.layer, self.H, self.K, self.d = layer, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.H * self.d, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.K * self.d, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.K * self.d, bias=c.qkv_bias)
        self.o_proj = nn.Linear(self.H * self.d, c.hidden_size, bias=False)
        self.qk_norm = c.qk_norm
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(self.d, c.rms_norm_eps), RMSNorm(self.d, c.rms_norm_eps)

    def qkv(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, S, d), keys and values (B, K, S, d) of x (B, S, D)."""
        q = self.q_proj(x).unflatten(-1, (self.H, self.d)).transpose(1, 2)  # (B, H, S, d)
        k = self.k_proj(x).unflatten(-1, (self.K, self.d)).transpose(1, 2)  # (B, K, S, d)
        v = self.v_proj(x).unflatten(-1, (self.K, self.d)).transpose(1, 2)  # (B, K, S, d)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        turned = rotate(torch.cat((q, k), dim=1), *angles)  # (B, H + K, S, d)
        return *turned.split((self.H, self.K), dim=1), v

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], bias: Tensor, cache) -> Tensor:
        """x (B, S, D) -> (B, S, D). bias: (B, 1, S, C); cache: see Qwen2.hidden."""
        q, k, v = self.qkv(x, angles)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # (B, K, C, d)
        out = attend(q, k, v, bias)  # (B, H, S, d) softmax(q k^T / sqrt(d) + bias) v; query heads share key heads
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def probabilities(self, x: Tensor, angles: tuple[Tensor, Tensor], bias: Tensor, cache) -> Tensor:
        """Attention probabilities (B, S, C) averaged over the heads; each row sums to 1."""
        q, k, v = self.qkv(x, angles)
        if cache is not None:
            k, _ = cache.extend(self.layer, k, v)  # (B, K, C, d)
        k = k.repeat_interleave(self.H // self.K, dim=1)  # (B, H, C, d)
        scores = (q @ k.transpose(2, 3)) / self.d**0.5 + bias  # (B, H, S, C)
        return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).mean(1)


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
    """Attention, then MLP. Each reads a normalized copy of the residual stream and adds its output to the stream."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], bias: Tensor, cache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, bias, cache)  # (B, S, D)
        return x + self.mlp(self.post_attention_layernorm(x))  # (B, S, D)


class Qwen2(nn.Module):
    """The language model, of the family of its Config. `model(tokens)` maps tokens (B, S) to logits (B, S, V)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.real_vocab = config.vocab_size  # train.py sets it to the tokenizer's size: rows above are never sampled
        self.temperature = 1.0  # divides the logits in log_probs, so the policy is softmax(logits / temperature)
        self.checkpoint_activations = False  # True: the backward pass recomputes each layer, to save memory
        self.model = nn.ModuleDict({  # so that the names in state_dict() are those of a Hugging Face checkpoint
            "embed_tokens": vocabulary.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        """Logits (B, S, V). real (B, S): False on padding, if there is any."""
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        hidden = self.hidden(tokens, positions_of(real), causal_bias(real))  # (B, S, D)
        return F.linear(hidden, self.output_weight)

    def hidden(self, tokens: Tensor, positions: Tensor, bias: Tensor, cache=None) -> Tensor:
        """Last hidden states (B, S, D) of tokens (B, S) at positions (B, S).

        bias (B, S, C): 0 where a query sees a column, else -inf. cache: such as KVCache of sampler.py; its
        extend(layer, keys, values) takes the new keys and values (B, K, S, d) and returns those of all columns. With
        checkpoint_activations the backward pass repeats this call: the caches of shared_prompts.py return the same
        again, while KVCache would append twice.
        """
        x, angles, head_bias = self.embed(tokens, positions, bias)
        for layer in self.model["layers"]:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, x, angles, head_bias, cache, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, angles, head_bias, cache)  # (B, S, D)
        return self.model["norm"](x)

    def attention(self, tokens: Tensor, positions: Tensor, bias: Tensor, cache=None) -> Tensor:
        """The last layer's attention probabilities (B, S, C), averaged over heads; arguments as in `hidden`."""
        x, angles, head_bias = self.embed(tokens, positions, bias)
        *earlier, last = self.model["layers"]
        for layer in earlier:
            x = layer(x, angles, head_bias, cache)  # (B, S, D)
        return last.self_attn.probabilities(last.input_layernorm(x), angles, head_bias, cache)

    def embed(self, tokens: Tensor, positions: Tensor, bias: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """The first layer's input: embeddings (B, S, D), RoPE's angles, and the bias as (B, 1, S, C)."""
        x = self.model["embed_tokens"](tokens)  # (B, S, D)
        return x, rope_angles(positions, self.config.head_dim, self.config.rope_theta), bias[:, None].to(x.dtype)

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) that turns hidden states into logits."""
        return self.model["embed_tokens"].weight if self.config.tie_word_embeddings else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., real_vocab), before the temperature, of the token that follows hidden (..., D)."""
        return F.linear(hidden, self.output_weight[: self.real_vocab])

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probs (..., real_vocab), in fp32 or wider, of the token that follows hidden (..., D).

        They are those of softmax(logits / temperature). Only this and its twins in vocabulary.py divide by it, so
        sampler, update, ratio, entropy and the reference agree.
        """
        logits = self.logits(hidden)  # (..., real_vocab)
        at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
        if self.temperature != 1:  # a pass over all logits, which the default does without
            logits = logits.to(at_least_float32) / self.temperature
        return logits.log_softmax(-1, dtype=at_least_float32)


# ----------------------------------------------------------------------------- log-prob, entropy, logit gradient


def take(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """The log-prob (...) of each token (...) from log_probs (..., V)."""
    return log_probs.gather(-1, tokens[..., None])[..., 0]


def entropy_and_logit_grad(log_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy (...) in nats, and ||onehot - p|| (...), the norm of d log pi(token) / d (logits / temperature).

    ||onehot - p|| = sqrt((sum_{v != token} p_v)^2 + sum_{v != token} p_v^2): the token's own entry is 1 - p_token, the
    sum of the others. The shorter form sqrt(1 - 2 p_token + sum_v p_v^2) loses all digits where p_token is near 1: in
    fp32 it returns 0 for true values near 1e-4.
    """
    p = log_probs.exp()  # (..., V)
    entropy = -torch.linalg.vecdot(p, log_probs.clamp(min=-1e4))  # where a token is impossible, 0 * -inf would be NaN
    others = p.scatter_(-1, tokens[..., None], 0.0)  # (..., V), overwrites p
    return entropy, (others.sum(-1).square() + torch.linalg.vecdot(others, others)).sqrt()


def token_logprobs(model: Qwen2, hidden: Tensor, tokens: Tensor) -> Tensor:
    """log pi (N,) of tokens (N,), with gradient; tokens[n] follows the state hidden[n] of hidden (N, D).

    Long lists are split. The logits of a piece are discarded and recomputed in the backward pass, because the logits
    of 64 x 512 tokens and a vocabulary of 32,000 would take 3.9 GiB.
    """
    if vocabulary.adds_in_place(model.output_weight):  # above 32,768, in training: this twin needs fewer passes
        return vocabulary.TokenLogprobs.apply(hidden, model.output_weight, tokens, model.real_vocab, model.temperature)

    def logprob(hidden: Tensor, tokens: Tensor) -> Tensor:
        return take(model.log_probs(hidden), tokens)

    size = max(1, LOGITS_AT_ONCE // model.real_vocab)  # tokens in a piece
    if len(tokens) <= size:
        return logprob(hidden, tokens)
    pieces = []
    for h, t in zip(hidden.split(size), tokens.split(size)):  # (size, D), (size,)
        pieces.append(checkpoint(logprob, h, t, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(pieces)


# ---------------------------------------------------------------------------------------------- checkpoints


def parse_config(source: dict) -> Config:
    """Turn a parsed config.json, as transformers 4 or 5 writes it, into a Config.

    ValueError when a size is missing, when a value has the wrong type or is out of range, or when the file asks for
    something that is not implemented here.
    """
    given = {name: value for name, value in source.items() if value is not None}
    family = given.get("model_type")
    if family not in list(ARCHITECTURES):  # a list, because it may be of any type
        raise ValueError(f"model_type {family!r:.50} is not supported, only {', '.join(ARCHITECTURES)}")
    layers = given.get("layer_types", [])
    unsupported = {
        "hidden_act": given.get("hidden_act", "silu") != "silu",
        "use_sliding_window": given.get("use_sliding_window", False),
        "is_causal": not given.get("is_causal", True),
        "layer_types": type(layers) is not list or any(layer != "full_attention" for layer in layers),
        "attention_bias": family != "qwen2" and given.get("attention_bias", False),
        "mlp_bias": given.get("mlp_bias", False),
        "pretraining_tp": given.get("pretraining_tp", 1) != 1,
        "quantization_config": given.get("quantization_config", False),
    }
    types = {field.name: field.type for field in fields(Config)}
    if family not in ("qwen2", "qwen3", "llama"):  # take it that another one obeys all its fields, as Granite does
        unsupported |= {name: given[name] is not False for name in given.keys() - {*types, *unsupported, *INERT}}
    if any(unsupported.values()):
        names = ", ".join(name for name, asked in sorted(unsupported.items()) if asked)
        raise ValueError(f"config.json sets {names} to a value that is not supported: take a checkpoint without it")
    check_fields(given, {"hidden_size": int, "num_attention_heads": int}, "config.json")
    D, H = given["hidden_size"], given["num_attention_heads"]
    defaults = {  # as in transformers: Qwen has 32 key-value heads if the file says nothing, H if it says null
        "num_key_value_heads": H if family == "llama" or "num_key_value_heads" in source else 32,
        "head_dim": 128 if family == "qwen3" else D // max(H, 1), "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 2048 if family == "llama" else 32768}
    derived = {"rope_theta": rope_theta(given), "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3",
               "source": source}
    values = defaults | given | derived
    check_fields(values, types, "config.json")
    for name, field_type in types.items():
        if (field_type is int and not 1 <= values[name] < 2**24) or (field_type is float and values[name] <= 0):
            raise ValueError(f"config.json: {name} can't be {values[name]}")
    if H % values["num_key_value_heads"] or values["head_dim"] % 2:
        raise ValueError("config.json: num_attention_heads must be a multiple of num_key_value_heads, head_dim even")
    return Config(**{name: values[name] for name in types})


def load_model(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Qwen2:
    """Read a Hugging Face folder: config.json and model.safetensors, or its shards and their index.

    Raises FileNotFoundError or ValueError, with a message of one sentence, when a file is missing or damaged, or when
    a tensor does not fit.
    """
    path = Path(path)
    check_folder(path)
    config = parse_config(read_json(path / "config.json"))
    found = read_weights(path, device, dtype, config.tie_word_embeddings)
    if config.num_hidden_layers > len(found):  # a layer has several tensors; do not build a million layers first
        raise ValueError(f"config.json asks for {config.num_hidden_layers} layers, the checkpoint in {path} has fewer")
    with torch.device("meta"):  # no storage and no random initialization; load_state_dict assigns the weights
        model = Qwen2(config).to(dtype)
    check_tensors(f"the checkpoint in {path}", model.state_dict(), found)
    model.load_state_dict(found, assign=True)
    return model


def save_model(model: Qwen2, path: str | Path) -> None:
    """Write config.json and model.safetensors, which load_model and transformers both read."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    config, dtype = model.config, str(model.output_weight.dtype).removeprefix("torch.")
    write_json(path / "config.json", config.source | {
        "architectures": [ARCHITECTURES[config.source["model_type"]]],
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}, "dtype": dtype,  # transformers 5
        "rope_theta": config.rope_theta, "torch_dtype": dtype})  # transformers 4
    replace_file(path / "model.safetensors", lambda part: save_file(tensors, part, metadata={"format": "pt"}))
