"""Sampling: responses grow token by token on a KV cache, and training later reads the finished ones again.

How this differs from the usual `generate`:
1. All randomness comes in as uniform numbers, one row per response. So a response does not depend on the others in
   its batch.
2. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling: the ratio's pi_old,
   most credit functions and the credit log need no extra forward pass.
3. Responses that have ended leave the batch.

KVCache and `response_logprobs` are plain forms; by default plumbing/decoder.py and plumbing/shared_prompts.py run.
tests/test_sampler.py holds each pair to the same numbers.

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, P prompt columns, T response
columns (while sampling: as many as a response may have), C columns so far, of which S are new, V vocabulary, D hidden
size, K key-value heads, d head size, N real tokens in a flat list.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from plumbing import vocabulary
from plumbing.decoder import fast_cache
from qwen2_model import Qwen2, causal_bias, entropy_and_logit_grad, pad_left, positions_of, take, token_logprobs


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


# ------------------------------------------------------------------------------------------------- the KV cache


class KVCache:
    """The keys and values of all tokens so far, which later tokens attend to: so each token is computed once."""

    def __init__(self, model: Qwen2, prompts: list[list[int]], G: int, room: int = 0):
        """Read each of Q prompts in G rows, padded on the left. (room: for the twin, which reserves T columns.)"""
        tokens, real = pad_left([prompt for prompt in prompts for _ in range(G)], model.output_weight.device)
        self.model = model
        self.layers = {}  # layer -> keys, values (B', K, C, d)
        self.real = real.new_zeros(len(real), 0)  # (B', C) bool, False on padding; C is 0 so far
        self.last = self.read(tokens, real)[:, -1]  # (B, D) the state that predicts each response's first token

    def read(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Append columns of tokens (B', S), where real (B', S); returns their last hidden states (B', S, D)."""
        S = tokens.shape[1]
        self.real = torch.cat((self.real, real), dim=1)  # (B', C)
        # Positions and bias of all C columns, to keep the last S: simple, and what the faster twin avoids.
        return self.model.hidden(tokens, positions_of(self.real)[:, -S:], causal_bias(self.real)[:, -S:], self)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Each layer calls this with its new keys and values (B', K, S, d), and gets those of all columns."""
        if layer in self.layers:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self.layers[layer], (keys, values)))
        self.layers[layer] = keys, values  # (B', K, C, d) each
        return keys, values

    def step(self, token: Tensor) -> Tensor:
        """Append a token (B',) to each row; returns the state (B', D) that predicts the next one."""
        return self.read(token[:, None], torch.ones_like(token[:, None], dtype=torch.bool))[:, 0]

    def keep(self, running: Tensor) -> Tensor:
        """Drop the rows where running (B',) is False. Returns the old index (n,) of each of the n rows that stay."""
        order = running.nonzero()[:, 0]  # (n,)
        self.real = self.real[order]
        self.layers = {layer: (keys[order], values[order]) for layer, (keys, values) in self.layers.items()}
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


def draw_with_facts(model: Qwen2, hidden: Tensor, uniform: Tensor, excluded: Tensor | None,
                    greedy: bool) -> tuple[Tensor, Tensor]:
    """The token (B,) that follows each state hidden (B, D), and its log-prob, entropy and logit gradient (3, B)."""
    if model.real_vocab > vocabulary.LARGE and excluded is None and not greedy:  # a twin: the same, in fewer passes
        return vocabulary.draw_with_facts(model.logits(hidden), uniform, model.temperature)
    log_probs = model.log_probs(hidden)  # (B, V) what is recorded
    allowed = log_probs  # (B, V) what is drawn from
    if excluded is not None:
        allowed = log_probs.scatter(1, excluded[:, None], float("-inf"))  # (B, V)
    token = allowed.argmax(-1) if greedy else draw(allowed, uniform)  # (B,)
    return token, torch.stack((take(log_probs, token), *entropy_and_logit_grad(log_probs, token)))


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             limit: Tensor | None = None, excluded: Tensor | None = None, greedy: bool = False,
             watch: Callable[[float, int], object] | None = None, cache_type: Callable = fast_cache) -> Samples:
    """Sample G responses to each of Q prompts, of at most T tokens each; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one of end_tokens, or
    after limit (B,) tokens. excluded (B,): for each response, a token that may not be its first, so that it goes
    another way than a known one (methods/oracle.py wants that). greedy: take the most probable token, whatever the
    random number. watch(done, tokens): called after each column; done, a share of the work, assumes that
    running responses go on to T. cache_type: KVCache is the plain one.
    """
    (B, T), G = uniforms.shape, len(uniforms) // len(prompts)
    device = model.output_weight.device
    uniforms = uniforms.to(device)
    is_end = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)  # (V,)
    is_end[end_tokens] = True
    limit = torch.full((B,), T, device=device) if limit is None else limit.to(device)  # (B,), later (B',)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    mask = torch.zeros(B, T, dtype=torch.bool, device=device)
    at_least_float32 = torch.promote_types(model.output_weight.dtype, torch.float32)
    facts = torch.zeros(3, B, T, device=device, dtype=at_least_float32)  # log-prob, entropy, logit gradient
    # A tenth faster than no_grad. But autograd can't use tensors made inside, so those that we return were made above.
    with torch.inference_mode():
        cache = cache_type(model, prompts, G, T)
        hidden = cache.last  # (B', D) the state that predicts the next token
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        for t in range(T):
            forbidden = excluded.to(device) if t == 0 and excluded is not None else None  # (B',)
            token, found = draw_with_facts(model, hidden, uniforms[rows, t], forbidden, greedy)  # (B',), (3, B')
            tokens[rows, t], mask[rows, t], facts[:, rows, t] = token, True, found
            running = (limit > t + 1) & ~is_end[token]  # (B',)
            count = int(running.sum())
            if watch:
                watch(1 - count / B * (T - t - 1) / T, int(mask.sum()))
            if count == 0:
                break
            if count < len(rows):
                order = cache.keep(running)  # (count,) old row in each place; a cache may reorder the rows
                rows, token, limit = rows[order], token[order], limit[order]
            hidden = cache.step(token)  # (B', D)
    ended = (is_end[tokens] & mask).any(1)  # (B,)
    longest = t + 1  # (this is the T of a batch)
    logprob, entropy, logit_grad = facts[..., :longest]  # (B, longest) each
    return Samples(tokens[:, :longest], mask[:, :longest], logprob, entropy, logit_grad, ended)


# ----------------------------------------------------------------------------------- reading finished responses


def response_logprobs(model: Qwen2, prompts: list[list[int]], tokens: Tensor, mask: Tensor) -> Tensor:
    """log pi (B, T) of the tokens (B, T) of B responses to B prompts, with gradient, 0 where mask (B, T) is False.

    A row holds a prompt, padded on the left, and its response, padded on the right. The state that predicts a token is
    one column before it:

        column      pad  the  sky  |  is    blue        P = 3, T = 2
        predicts              is   |  blue
    """
    prompt, prompt_real = pad_left(prompts, tokens.device)  # (B, P) each
    whole, real = torch.cat((prompt, tokens), 1), torch.cat((prompt_real, mask), 1)  # (B, P + T) each
    hidden = model.hidden(whole, positions_of(real), causal_bias(real))[:, prompt.shape[1] - 1 : -1]  # (B, T, D)
    logprob = token_logprobs(model, hidden[mask], tokens[mask])  # (N,)
    return logprob.new_zeros(mask.shape).masked_scatter(mask, logprob)
