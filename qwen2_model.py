"""Qwen2, Qwen3 and Llama from scratch: the transformer, the log-prob of a token, and Hugging Face checkpoints.

How this differs from the reports (Qwen2 2407.10671, Qwen3 2505.09388, Llama 2302.13971) and the usual implementations:
1. One class implements all three. Qwen2 has a bias on q, k and v. Qwen3 has none, but an RMSNorm on each head's q and
   k. Llama has neither.
2. The model reads a flat list of tokens, whoever they belong to: it knows no rows, no padding and no prompt. Who sees
   whom is the business of `attend`, a function that its caller supplies (sampler.py has two).
3. Weights are stored as they are multiplied: q, k and v in one matrix, gate and up in another. `merge` makes them from
   a checkpoint's, and `split` turns them, or their gradients, into a checkpoint's again.
4. log pi of a token is one autograd function, whose backward pass is the formula onehot - p.

Alphabet: N tokens in a flat list, V vocabulary, D hidden size, H query heads, K key heads (each with its value), d head
size.

Run it:  python train.py --steps 0        loads the bundled model, samples from it and grades the responses
"""
import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plumbing.files import check_fields, check_tensors, read_json, replace_file, write_json
from plumbing.model_folder import check_folder, read_weights, rope_theta

LOGITS_KEPT = 2**29  # bytes of logits that are kept for the backward pass; those of a longer list are computed again
LOGITS_AT_ONCE = 2**22  # the number of logits that are in float32 at once
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # see Qwen2.hidden


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


def wide(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype where that is wider: for sums and exponentials, which bfloat16 would spoil."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # computed in float32, also for bfloat16


def rope_turns(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """RoPE (2104.09864): e^(i angle), complex (N, 1, 1, d / 2), for positions (N,). Pair j of a head turns by
    position * theta^(-2j / d)."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)  # (d / 2,)
    angle = positions[:, None, None, None].float() * frequency  # (N, 1, 1, d / 2)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of neighbours in x (..., d), taken as a complex number, by turns (..., d / 2)."""
    pairs = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)))  # (..., d / 2)
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention: each of K key heads serves H / K query heads, its group (2305.13245)."""

    def __init__(self, c: Config):
        super().__init__()
        self.K, self.d = c.num_key_value_heads, c.head_dim
        # The rows of the matrix, for each key head: its group's queries, its key, its value.
        self.qkv_proj = nn.Linear(c.hidden_size, (c.num_attention_heads + 2 * self.K) * self.d, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * self.d, c.hidden_size, bias=False)
        self.qk_norm = c.qk_norm
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(self.d, c.rms_norm_eps), RMSNorm(self.d, c.rms_norm_eps)

    def forward(self, x: Tensor, normed: Tensor, turns: Tensor, attend: Callable) -> Tensor:
        """The residual stream x (N, D), with attention added that was computed from `normed` (N, D)."""
        heads = self.qkv_proj(normed).view(len(x), self.K, -1, self.d)  # (N, K, H / K + 2, d)
        qk = heads[:, :, :-1]  # (N, K, H / K + 1, d)
        if self.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, :, :-1]), self.k_norm(qk[:, :, -1:])), dim=2)
        qk = rotate(qk, turns)
        out = attend(qk[:, :, :-1], qk[:, :, -1], heads[:, :, -1])  # (N, K, H / K, d)
        return torch.addmm(x, out.flatten(1), self.o_proj.weight.T)  # one pass less than x + o_proj(out)


class MLP(nn.Module):
    """SwiGLU (2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """The residual stream x (N, D), with the MLP's output added that was computed from `normed` (N, D)."""
        gate, up = self.gate_up_proj(normed).chunk(2, dim=-1)  # (N, intermediate_size) each
        return torch.addmm(x, F.silu(gate) * up, self.down_proj.weight.T)


class Layer(nn.Module):
    """Attention, then MLP. Each reads a normalized copy of the residual stream and adds its output to the stream."""

    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, turns: Tensor, attend: Callable) -> Tensor:
        x = self.self_attn(x, self.input_layernorm(x), turns, attend)  # (N, D)
        return self.mlp(x, self.post_attention_layernorm(x))  # (N, D)


class Qwen2(nn.Module):
    """The language model, of the family of its Config."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.real_vocab = config.vocab_size  # train.py sets it to the tokenizer's size: rows above are never sampled
        self.temperature = 1.0  # divides the logits, so the policy is softmax(logits / temperature)
        self.checkpoint_activations = False  # True: the backward pass recomputes each layer, to save memory
        self.model = nn.ModuleDict({  # so that most names in state_dict() are those of a Hugging Face checkpoint
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (N, D) of tokens (N,) at positions (N,), each in its own text.

        attend(layer, q (N, K, H / K, d), k (N, K, d), v (N, K, d)) returns what each query gets, (N, K, H / K, d):
        softmax(q k^T / sqrt(d)) v over the keys that it sees. With checkpoint_activations the backward pass calls it
        again, so it must return the same again.
        """
        x = self.model["embed_tokens"](tokens)  # (N, D)
        turns = rope_turns(positions, self.config.head_dim, self.config.rope_theta)  # (N, 1, 1, d / 2)
        for i, layer in enumerate(self.model["layers"]):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, x, turns, partial(attend, i), use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, turns, partial(attend, i))  # (N, D)
        return self.model["norm"](x)

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) that turns hidden states into logits."""
        return self.model["embed_tokens"].weight if self.config.tie_word_embeddings else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., real_vocab), before the temperature, of the token that follows hidden (..., D)."""
        return F.linear(hidden, self.output_weight[: self.real_vocab])




# ----------------------------------------------------------------------------------------- the log-prob of a token


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) over the temperature, in float32 or wider: the policy is their softmax.

    Only this divides by the temperature, so sampler, update, ratio, entropy and the reference agree.
    """
    return wide(logits) if temperature == 1 else wide(logits) / temperature  # which is a pass over all of them


class TokenLogprobs(torch.autograd.Function):
    """log pi (N,) of tokens (N,) after states (N, D): the log-softmax of states @ matrix.T / temperature.

    With p the softmax, d log pi(token) / d logits = (onehot - p) / temperature. Autograd would find the same, but keep
    the log-softmax in float32 beside the logits, and pass over both several times: SLOWER.
    Rows of the matrix (V', D) from V on stand for no token.
    """

    @staticmethod
    def forward(ctx, states: Tensor, matrix: Tensor, tokens: Tensor, V: int, temperature: float) -> Tensor:
        logits = states @ matrix[:V].T  # (N, V)
        total = [scaled(x, temperature).logsumexp(1) for x in logits.split(rows_at_once(V))]
        total = torch.cat(total)  # (N,)
        ctx.save_for_backward(states, matrix, tokens, logits, total)
        ctx.temperature = temperature
        return scaled(logits.gather(1, tokens[:, None])[:, 0], temperature) - total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, matrix, tokens, logits, total = ctx.saved_tensors
        V, parts = logits.shape[1], []
        for x, token, log_sum, g in zip(*(y.split(rows_at_once(V)) for y in (logits, tokens, total, gradient))):
            d = (scaled(x, ctx.temperature) - log_sum[:, None]).exp().mul_(-g[:, None])  # (n, V) -p, times g
            d.scatter_add_(1, token[:, None], g[:, None])  # onehot - p
            parts.append(d.div_(ctx.temperature).to(states.dtype))
        of_logits, of_matrix = torch.cat(parts), None  # (N, V)
        if ctx.needs_input_grad[1]:  # once for all N tokens: for each piece it would be (V', D) zeros and a sum
            of_matrix = torch.zeros_like(matrix)
            torch.mm(of_logits.T, states, out=of_matrix[:V])
        return of_logits @ matrix[:V], of_matrix, None, None, None


def rows_at_once(V: int) -> int:
    """How many rows of V logits to work on at once."""
    return max(1, LOGITS_AT_ONCE // V)


def token_logprobs(model: Qwen2, hidden: Tensor, tokens: Tensor) -> Tensor:
    """log pi (N,) of tokens (N,), with gradient; tokens[n] follows the state hidden[n] of hidden (N, D).

    A list whose logits would exceed LOGITS_KEPT bytes is split, and the backward pass computes each part's again.
    """
    def logprobs(hidden: Tensor, tokens: Tensor) -> Tensor:
        return TokenLogprobs.apply(hidden, model.output_weight, tokens, model.real_vocab, model.temperature)

    size = max(1, LOGITS_KEPT // (model.real_vocab * hidden.itemsize))  # tokens
    if len(tokens) <= size:
        return logprobs(hidden, tokens)
    return torch.cat([checkpoint(logprobs, h, t, use_reentrant=False, preserve_rng_state=False)
                      for h, t in zip(hidden.split(size), tokens.split(size))])


# ---------------------------------------------------------------------------------------------- checkpoints


def pairs(x: Tensor) -> Tensor:
    """Rows i and i + d / 2 of each head in x (heads, d, ...) as neighbours, which `rotate` turns together."""
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def halves(x: Tensor) -> Tensor:
    """The inverse of `pairs`."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def merge(tensors: dict[str, Tensor], c: Config) -> dict[str, Tensor]:
    """A checkpoint's tensors under its names -> those of Qwen2.state_dict(), bit for bit."""
    merged = {}
    for name, x in tensors.items():
        if name.endswith("q_norm.weight") or name.endswith("k_norm.weight"):
            merged[name] = pairs(x[None])[0]
        elif ".q_proj." in name:
            names = [name.replace("q_proj", f"{letter}_proj") for letter in "qkv"]
            q, k, v = (tensors[n].unflatten(0, (-1, c.head_dim)) for n in names)  # (H or K, d, ...) each
            groups = [y.unflatten(0, (c.num_key_value_heads, -1)) for y in (pairs(q), pairs(k), v)]  # (K, n, d, ...)
            merged[name.replace("q_proj", "qkv_proj")] = torch.cat(groups, dim=1).flatten(0, 2)
        elif ".gate_proj." in name:
            merged[name.replace("gate_proj", "gate_up_proj")] = torch.cat((x, tensors[name.replace("gate", "up")]))
        elif not re.search(r"\.(k|v|up)_proj\.", name):
            merged[name] = x
    return merged


def split(tensors: dict[str, Tensor], c: Config) -> dict[str, Tensor]:
    """The inverse of `merge`, for weights, their gradients or their moments: these under a checkpoint's names."""
    found = {}
    for name, x in tensors.items():
        if name.endswith("q_norm.weight") or name.endswith("k_norm.weight"):
            found[name] = halves(x[None])[0]
        elif ".qkv_proj." in name:
            groups = x.unflatten(0, (c.num_key_value_heads, -1, c.head_dim))  # (K, H / K + 2, d, ...)
            q, k, v = (groups[:, part].flatten(0, 1) for part in (slice(-2), slice(-2, -1), slice(-1, None)))
            for letter, y in zip("qkv", (halves(q), halves(k), v)):  # (H or K, d, ...) each
                found[name.replace("qkv_proj", f"{letter}_proj")] = y.flatten(0, 1)
        elif ".gate_up_proj." in name:
            found[name.replace("gate_up", "gate")], found[name.replace("gate_up", "up")] = x.chunk(2)
        else:
            found[name] = x
    return found


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
        "layer_types": type(layers) is not list or any(layer != "full_attention" for layer in layers),
        "attention_bias": family != "qwen2" and given.get("attention_bias", False),
        "mlp_bias": given.get("mlp_bias", False),
        "pretraining_tp": given.get("pretraining_tp", 1) != 1,
        "quantization_config": given.get("quantization_config", False),
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, asked in unsupported.items() if asked)
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
    types = {field.name: field.type for field in fields(Config)}
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
    check_tensors(f"the checkpoint in {path}", split(model.state_dict(), config), found)
    model.load_state_dict(merge(found, config), assign=True)
    return model


def save_model(model: Qwen2, path: str | Path) -> None:
    """Write config.json and model.safetensors, which load_model and transformers both read."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in split(model.state_dict(), model.config).items()}
    config, dtype = model.config, str(model.output_weight.dtype).removeprefix("torch.")
    write_json(path / "config.json", config.source | {
        "architectures": [ARCHITECTURES[config.source["model_type"]]],
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}, "dtype": dtype,  # transformers 5
        "rope_theta": config.rope_theta, "torch_dtype": dtype})  # transformers 4
    replace_file(path / "model.safetensors", lambda part: save_file(tensors, part, metadata={"format": "pt"}))
