"""Qwen2, Qwen3 and Llama from scratch: the transformer, the log-prob of a token, and Hugging Face checkpoints.

How this differs from the reports (Qwen2 2407.10671, Qwen3 2505.09388, Llama 2302.13971) and the usual implementations:
1. One class implements all three. Qwen2 has a bias on q, k and v. Qwen3 has none, but an RMSNorm on each head's q and
   k. Llama has neither.
2. The model reads a flat list of tokens, whoever they belong to: it knows no rows, no padding and no prompt. Who sees
   whom is the business of `attend`, a function that its caller supplies (see Qwen2.hidden, and sampler.py).
3. Weights are stored as they are multiplied: q, k and v in one matrix, gate and up in another. In each head of q and k
   row i + d / 2 comes right after row i, because RoPE turns these two numbers together. `merge` makes all this from a
   checkpoint's weights, and `split` turns them, or their gradients, into a checkpoint's again.
4. log pi of a token is one autograd function, whose backward pass is the formula onehot - p.

Alphabet: N tokens in a flat list, V vocabulary, D hidden size, H query heads, K key heads, d head size. In attention, R
rows of S queries, each of which sees some of C columns.

Run it:  python train.py --steps 0        loads the bundled model, samples from it and grades the responses
"""
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Callable, Iterable

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from plumbing.files import check_fields, check_tensors, read_json, replace_file, write_json
from plumbing.model_folder import check_folder, check_supported, read_weights, rope_theta

LOGITS_KEPT = 2**29  # bytes of logits that are kept for the backward pass; those of a longer list are computed again
LOGITS_AT_ONCE = 2**18  # logits in float32 at once on a CPU; 2**22 exceed its cache: an update takes 4% longer
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; torch computes it in float32 for bfloat16, too."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rope_turns(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """RoPE (2104.09864): e^(i angle), complex (N, 1, 1, d / 2), for positions (N,). Pair j of a head turns by
    position * theta^(-2j / d)."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)  # (d / 2,)
    angle = positions[:, None, None, None].float() * frequency  # (N, 1, 1, d / 2)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of neighbours in x (..., d), taken as a complex number, by turns (..., d / 2).

    A checkpoint has the two d / 2 apart: see `pairs`.
    """
    complex_x = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)))  # (..., d / 2)
    return torch.view_as_real(complex_x * turns).flatten(-2).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v: (R, K, H / K, S, d).

    q (R, K, H / K, S, d), k and v (R, K, C, d). bias (R, S, C) is 0 where a query sees a column, else -inf.
    """
    if q.is_cuda and q.numel():
        return attention_on_gpu(q, k, v, bias)
    return (probabilities(q, k, bias).flatten(2, 3) @ v).view_as(q)


def probabilities(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias), (R, K, H / K, S, C); arguments as of `attention`."""
    scores = (q.flatten(2, 3) * q.shape[-1] ** -0.5) @ k.mT  # (R, K, (H / K) S, C)
    return (scores.unflatten(2, q.shape[2:4]) + bias[:, None, None]).softmax(-1)


def attention_on_gpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same by a kernel that keeps no probabilities.

    torch would choose cuDNN, whose backward pass gave NaN on an H100 for Qwen2.5 wherever C was 64 more than a multiple
    of 128 (torch 2.11 and 2.13, https://github.com/pytorch/pytorch/issues/196678). The kernel taken instead wants a key
    head for each query head.
    """
    k, v = (x.repeat_interleave(q.shape[2], dim=1) for x in (k, v))  # (R, H, C, d) each
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q.flatten(1, 2), k, v, bias[:, None]).view_as(q)


def bias_of(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias (...): 0 where visible (...) is True, else -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))


def product(x: Tensor, w: Tensor, bias: Tensor | None, adapter: nn.Module | None) -> Tensor:
    """x @ w.T + bias, (N, outputs), and what the adapter of the matrix adds, if it has one: see lora.py."""
    y = F.linear(x, w, bias)
    return adapter.add(x, y) if adapter else y


def product_in_mlp(x: Tensor, w: Tensor, adapter: nn.Module | None) -> Tensor:
    """The same in the MLP. In bfloat16, as (w @ x.T).T, it takes 20% less time for 32 tokens on a CPU.

    (q, k, v and o gain nothing, because what follows them would copy the transposed result.)
    """
    if x.dtype != torch.bfloat16:
        return product(x, w, None, adapter)
    y = w @ x.mT  # (outputs, N)
    return (adapter.add(x, y, transposed=True) if adapter else y).mT


class Layer(nn.Module):
    """Attention, then an MLP. Each reads a normalized copy of the residual stream and adds its output to the stream.

    Attention is grouped-query (2305.13245): each of K key heads serves its group of H / K query heads. The MLP is
    SwiGLU (2002.05202): down(silu(gate(x)) * up(x)).
    """

    def __init__(self, c: Config):
        super().__init__()
        D, H, K, d = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.K, self.shared_by, self.d, self.eps = K, H // K, d, c.rms_norm_eps
        self.norm_1, self.norm_2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        # Rows of qkv, for each key head: its group's queries, its key, its value.
        self.qkv = nn.Parameter(torch.zeros((H + 2 * K) * d, D))
        self.qkv_bias = nn.Parameter(torch.zeros((H + 2 * K) * d)) if c.qkv_bias else None
        self.q_norm = nn.Parameter(torch.ones(d)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(d)) if c.qk_norm else None
        self.o = nn.Parameter(torch.zeros(D, H * d))
        self.gate_up = nn.Parameter(torch.zeros(2 * c.intermediate_size, D))
        self.down = nn.Parameter(torch.zeros(D, c.intermediate_size))
        self.qkv_adapter = self.o_adapter = self.gate_up_adapter = self.down_adapter = None  # lora.py may set them

    def forward(self, x: Tensor, turns: Tensor, attend: Callable) -> Tensor:
        """x (N, D) -> (N, D). turns: of `rope_turns`; attend: see Qwen2.hidden, without its first argument."""
        x_1 = rms_norm(x, self.norm_1, self.eps)  # (N, D)
        qkv = product(x_1, self.qkv, self.qkv_bias, self.qkv_adapter)  # (N, (H + 2 K) d)
        heads = qkv.view(len(x), self.K, -1, self.d)  # (N, K, H / K + 2, d)
        qk, v = heads.split((self.shared_by + 1, 1), dim=2)  # (N, K, H / K + 1, d), (N, K, 1, d)
        if self.q_norm is not None:
            q, k = qk.split((self.shared_by, 1), dim=2)
            qk = torch.cat((rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)), dim=2)
        q, k = rotate(qk, turns).split((self.shared_by, 1), dim=2)  # (N, K, H / K, d), (N, K, 1, d)
        out = attend(q, k.squeeze(2), v.squeeze(2))  # (N, K, H / K, d)
        x = x + product(out.flatten(1), self.o, None, self.o_adapter)
        x_2 = rms_norm(x, self.norm_2, self.eps)  # (N, D)
        gate, up = product_in_mlp(x_2, self.gate_up, self.gate_up_adapter).chunk(2, dim=1)
        return x + product_in_mlp(F.silu(gate) * up, self.down, self.down_adapter)


class Qwen2(nn.Module):
    """The language model: Qwen2, Qwen3 or Llama, as its Config says. `model(rows)` maps texts (R, C) to logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.real_vocab = config.vocab_size  # train.py sets it to the tokenizer's size: rows above are never sampled
        self.temperature = 1.0  # divides the logits, so the policy is softmax(logits / temperature)
        self.checkpoint_activations = False  # True: the backward pass recomputes each layer, to save memory
        V, D = config.vocab_size, config.hidden_size
        self.embedding = nn.Parameter(torch.zeros(V, D))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(D))
        self.head = None if config.tie_word_embeddings else nn.Parameter(torch.zeros(V, D))

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (N, D) of tokens (N,) at positions (N,), each in its own text.

        attend(layer, q (N, K, H / K, d), k (N, K, d), v (N, K, d)) returns what each query gets, (N, K, H / K, d):
        softmax(q k^T / sqrt(d)) v over the keys that it sees. With checkpoint_activations the backward pass calls it
        again, so it must return the same again.
        """
        x = F.embedding(tokens, self.embedding)  # (N, D)
        turns = rope_turns(positions, self.config.head_dim, self.config.rope_theta)  # (N, 1, 1, d / 2)
        for i, layer in enumerate(self.layers):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, x, turns, partial(attend, i), use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, turns, partial(attend, i))  # (N, D)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits (R, C, V) after each token of R texts (R, C), each of which sees itself alone.

        For the warm start and for tests, which want all V rows, as a checkpoint has them.
        """
        R, C = rows.shape
        positions = torch.arange(C, device=rows.device).repeat(R)  # (R C,)
        causal = torch.ones(1, C, C, dtype=torch.bool, device=rows.device).tril()
        bias = bias_of(causal, self.output_weight.dtype)  # (1, C, C)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q.unflatten(0, (R, C)).permute(0, 2, 3, 1, 4)  # (R, K, H / K, C, d)
            k, v = (x.unflatten(0, (R, C)).transpose(1, 2) for x in (k, v))  # (R, K, C, d) each
            return attention(q, k, v, bias).permute(0, 3, 1, 2, 4).flatten(0, 1)  # (R C, K, H / K, d)

        return F.linear(self.hidden(rows.flatten(), positions, attend), self.output_weight).view(R, C, -1)

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) that turns hidden states into logits."""
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., real_vocab), before the temperature, of the token that follows hidden (..., D)."""
        return F.linear(hidden, self.output_weight[: self.real_vocab])


# ----------------------------------------------------------------------------------------- the log-prob of a token


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) over the temperature, in float32 or wider: the policy is their softmax.

    Only this divides by the temperature, so sampler, update, ratio, entropy and the reference agree.
    """
    return wide(logits) if temperature == 1 else wide(logits) / temperature


class TokenLogprobs(torch.autograd.Function):
    """log pi (N,) of tokens (N,) after states (N, D): the log-softmax of states @ matrix.T / temperature.

    With p the softmax, d log pi(token) / d logits = (onehot - p) / temperature. Autograd would find the same, but keep
    the log-softmax in float32 beside the logits, and an update of SmolLM2 would take about 5% longer. The matrix is
    (V', D); its rows from V on stand for no token.
    """

    @staticmethod
    def forward(ctx, states: Tensor, matrix: Tensor, tokens: Tensor, V: int, temperature: float) -> Tensor:
        logits = states @ matrix[:V].T  # (N, V)
        size = rows_at_once(logits)
        logprob = torch.cat([scaled(x, temperature).log_softmax(1).gather(1, token[:, None])[:, 0]
                             for x, token in zip(logits.split(size), tokens.split(size))])  # (N,)
        ctx.save_for_backward(states, matrix, tokens, logits)
        ctx.temperature = temperature
        return logprob

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, matrix, tokens, logits = ctx.saved_tensors
        V, size, logits_grad, matrix_grad = logits.shape[1], rows_at_once(logits), torch.empty_like(logits), None
        pieces = (y.split(size) for y in (logits_grad, logits, tokens[:, None], gradient[:, None]))
        for piece, x, token, g in zip(*pieces):
            direction = -scaled(x, ctx.temperature).softmax(1)  # (n, V)
            direction.scatter_add_(1, token, torch.ones_like(direction[:, :1]))  # (n, V) onehot - p
            piece.copy_(direction.mul_(g / ctx.temperature))
        if ctx.needs_input_grad[1]:  # for all N tokens at once: each piece would pass over (V', D) once more
            matrix_grad = torch.zeros_like(matrix)
            torch.mm(logits_grad.T, states, out=matrix_grad[:V])
        return logits_grad @ matrix[:V], matrix_grad, None, None, None


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits (N, V) to have in float32 at once: on a CPU those that stay in its cache."""
    return max(1, (2**26 if logits.is_cuda else LOGITS_AT_ONCE) // logits.shape[1])


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


# Our names of weights, and a checkpoint's. (Those of a layer come after layers.0. and model.layers.0.; `split` and
# `merge` say what becomes of the others.)
NAMES = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
         "norm_1": "input_layernorm.weight", "norm_2": "post_attention_layernorm.weight",
         "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight", "o": "self_attn.o_proj.weight",
         "down": "mlp.down_proj.weight"}
QKV = {"qkv": "weight", "qkv_bias": "bias"}


def split(tensors: dict[str, Tensor], c: Config) -> dict[str, Tensor]:
    """Weights under our names, their gradients or their moments -> the same under a checkpoint's names, bit for bit."""
    found = {}
    for name, x in tensors.items():
        prefix, own = prefix_of(name)
        if own in QKV:
            groups = x.unflatten(0, (c.num_key_value_heads, -1, c.head_dim))  # (K, H / K + 2, d, ...)
            parts = halves(groups[:, :-2], 2), halves(groups[:, -2:-1], 2), groups[:, -1:]  # q, k, v (K, n, d, ...)
            found |= {f"{prefix}self_attn.{letter}_proj.{QKV[own]}": y.flatten(0, 2) for letter, y in zip("qkv", parts)}
        elif own == "gate_up":
            found[prefix + "mlp.gate_proj.weight"], found[prefix + "mlp.up_proj.weight"] = x.chunk(2)
        else:
            found[prefix + NAMES[own]] = halves(x, 0) if own in ("q_norm", "k_norm") else x
    return found


def merge(tensors: dict[str, Tensor], names: Iterable[str], c: Config) -> dict[str, Tensor]:
    """The inverse of `split`: our tensors of these names, from a checkpoint's."""
    merged = {}
    for name in names:
        prefix, own = prefix_of(name)
        if own in QKV:
            parts = [tensors[f"{prefix}self_attn.{letter}_proj.{QKV[own]}"] for letter in "qkv"]
            q, k, v = (x.unflatten(0, (c.num_key_value_heads, -1, c.head_dim)) for x in parts)  # (K, n, d, ...) each
            merged[name] = torch.cat((pairs(q, 2), pairs(k, 2), v), dim=1).flatten(0, 2)
        elif own == "gate_up":
            merged[name] = torch.cat([tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        else:
            x = tensors[prefix + NAMES[own]]
            merged[name] = pairs(x, 0) if own in ("q_norm", "k_norm") else x
    return merged


def prefix_of(name: str) -> tuple[str, str]:
    """One of our names as the beginning of the checkpoint's and the rest: layers.0.qkv -> model.layers.0. and qkv."""
    layer, _, own = name.rpartition(".")
    return f"model.{layer}." if layer else "", own


def pairs(x: Tensor, dim: int) -> Tensor:
    """x with entries i and i + d / 2 of its dimension `dim`, d long, as neighbours: `rotate` turns them together."""
    return x.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def halves(x: Tensor, dim: int) -> Tensor:
    """The inverse of `pairs`."""
    return x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def parse_config(source: dict) -> Config:
    """Turn a parsed config.json, as transformers 4 or 5 writes it, into a Config.

    ValueError when a size is missing, when a value has the wrong type or is out of range, or when the file asks for
    something that is not implemented here.
    """
    given = {name: value for name, value in source.items() if value is not None}
    family = given.get("model_type")
    if family not in list(ARCHITECTURES):
        raise ValueError(f"model_type {family!r:.50} is not supported, only {', '.join(ARCHITECTURES)}")
    check_supported(given, family, {field.name for field in fields(Config)})
    check_fields(given, {"hidden_size": int, "num_attention_heads": int}, "config.json")
    D, H = given["hidden_size"], given["num_attention_heads"]
    defaults = {  # as in transformers. (`given` lacks what is null in `source`.)
        "num_key_value_heads": H if family == "llama" or "num_key_value_heads" in source else 32,
        "head_dim": 128 if family == "qwen3" else D // max(H, 1), "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 2048 if family == "llama" else 32768}
    derived = {"rope_theta": rope_theta(given), "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3",
               "source": source}
    values, types = defaults | given | derived, {field.name: field.type for field in fields(Config)}
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
    model.load_state_dict(merge(found, model.state_dict(), config), assign=True)
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
