"""Sampling: responses grow token by token on a KV cache, and training later reads the finished ones again.

How this differs from the usual `generate`:
1. A prompt is read (run through the model) once here and once, with gradient, in the update, however many responses it
   has. A prompt that is a prefix of another is not read separately.
2. All randomness comes in as uniform numbers, one row per response. So a response does not depend on the others in
   its batch.
3. Log-prob, entropy and logit gradient (see Samples) of each token are recorded while sampling, so that the credit log
   costs no extra forward pass.
4. Responses that have ended leave the batch.
5. New tokens are computed by a faster copy of the model, `Decoder` of plumbing/decoder.py.

Usually every row of a batch holds a prompt and one response. Here, wherever finished responses are read again, each
prompt is a row of its own, and the responses are rows that attend to it, so that a prompt with G responses is computed
once. PromptCache holds the prompts' rows; ResponseCache and the functions after `by_length` join the two.
tests/plain.py has the usual layout, in 40 lines, for comparison.

Alphabet: Q prompts, G responses to each, B = Q G responses, of which B' are still running, P prompt columns, T response
columns (while sampling: as many as a response may have), S response columns read at once, V vocabulary, D hidden size,
K key-value heads, d head size, N real tokens in a flat list.

Run it:  python train.py --steps 0        samples from the bundled model and grades the responses
"""
import copy
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from plumbing import vocabulary
from plumbing.decoder import Decoder, ReplayedDecoder
from qwen2_model import Qwen2, causal_bias, entropy_and_logit_grad, take, token_logprobs


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
        # Each layer calls self.extend with its keys and values (see Qwen2.hidden). A padding column sees itself
        # (causal_bias), so that no softmax is empty, and no other column sees it.
        hidden = model.hidden(tokens, positions.clamp(min=0), causal_bias(self.real), self)  # (Q, P, D)
        self.hidden = hidden  # (Q, P, D)
        self.last = hidden[:, -1]  # (Q, D) the state that predicts a response's first token

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values (Q, K, P, d), and return them: there are no earlier columns."""
        self.layers[layer] = keys, values
        return keys, values

    def prefixes(self, text_of: list[int], length: list[int]) -> "PromptCache":
        """A cache of Q' prompts, each the beginning of one in this cache: the first length[q] tokens of text_of[q].

        Its `hidden` is still that of the longer prompts.
        """
        part, device = copy.copy(self), self.real.device
        text = torch.tensor(text_of, device=device)  # (Q',)
        part.length = torch.tensor(length, device=device)  # (Q',)
        column = torch.arange(-max(length), 0, device=device)  # (P',) -1 is the last
        part.real = column >= -part.length[:, None]  # (Q', P') padded on the left, too
        # The new cache has P' columns, counted from its end: column c = -1 holds the last token, token length[q] + c.
        # In this cache a text of n tokens ends at column P - 1, so its token i stands in column P - n + i.
        source = self.real.shape[1] + (part.length - self.length[text])[:, None] + column  # (Q', P')
        source = source.clamp(min=0)  # in the padding; nobody sees what stands there
        # x (Q, K, P, d). Index tensors on both sides of a slice put their dimensions first: x[(Q', 1), :, (Q', P')] is
        # (Q', P', K, d).
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

    def tensors(self) -> list[Tensor]:
        """Everything that a response sees of its prompt."""
        found = [self.last]
        for keys, values in self.layers.values():
            found += [keys, values]
        return found

    def backward(self, leaf: "PromptCache") -> None:
        """Backpropagate the gradients accumulated in a detached copy through the prompts."""
        torch.autograd.backward(self.tensors(), [x.grad for x in leaf.tensors()])


def distinct_texts(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The prompts that are not a prefix of another, and for each prompt the index of one of these that extends it.

    Equal prompts count once, and a prompt extends itself.

    vineppo samples from many prefixes of the same response at once. Only the longest of them is read, which with --k 3
    is a third of the tokens.
    """
    texts, text_of = [], [0] * len(prompts)
    # In descending order, a prompt comes right after those that extend it: 1 2 3, 1 2, 1. If any does, texts[-1] does.
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
    if model.real_vocab > vocabulary.LARGE and excluded is None and not greedy:  # the same, in fewer passes
        return vocabulary.draw_with_facts(model.logits(hidden), uniform, model.temperature)
    log_probs = model.log_probs(hidden)  # (B, V) what is recorded
    allowed = log_probs  # (B, V) what is drawn from
    if excluded is not None:
        allowed = log_probs.scatter(1, excluded[:, None], float("-inf"))  # (B, V)
    token = allowed.argmax(-1) if greedy else draw(allowed, uniform)  # (B,)
    return token, torch.stack((take(log_probs, token), *entropy_and_logit_grad(log_probs, token)))


def generate(model: Qwen2, prompts: list[list[int]], uniforms: Tensor, end_tokens: list[int],
             limit: Tensor | None = None, excluded: Tensor | None = None, greedy: bool = False,
             watch: Callable[[float, int], object] | None = None) -> Samples:
    """Sample G responses to each of Q prompts, of at most T tokens each; response g to prompt q is row q * G + g.

    uniforms (B, T) float64 in [0, 1): the random number behind each token. A response stops at one of end_tokens, or
    after limit (B,) tokens. excluded (B,): for each response, a token that may not be its first. Log-prob, entropy and
    logit gradient are still those of the whole distribution, because PPO's ratio has to begin at 1 in the update.
    greedy: take the most probable token, whatever the random number. watch: is called after each column with the share
    of the work that is done, as if all running responses went on to T, and with the number of tokens so far.
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
    statistics = torch.zeros(3, B, T, device=device, dtype=at_least_float32)  # log-prob, entropy, logit gradient
    # A tenth faster than no_grad. But autograd can't use tensors made inside, so those that we return were made above.
    with torch.inference_mode():
        texts, text_of = distinct_texts(prompts)
        cache = PromptCache(model, texts).prefixes(text_of, [len(p) for p in prompts])
        # What model.hidden computes, faster.
        decoder = (ReplayedDecoder if device.type == "cuda" else Decoder)(model, cache.layers, cache.real, G, T)
        hidden = cache.last.repeat_interleave(G, 0)  # (B', D) the state that predicts the next token
        rows = torch.arange(B, device=device)  # (B',) the response that each running row writes
        sampled = 0  # tokens
        for t in range(T):
            forbidden = excluded.to(device) if t == 0 and excluded is not None else None  # (B',)
            token, facts = draw_with_facts(model, hidden, uniforms[rows, t], forbidden, greedy)  # (B',), (3, B')
            tokens[rows, t], mask[rows, t], statistics[:, rows, t] = token, True, facts
            running = (limit > t + 1) & ~is_end[token]  # (B',)
            count, sampled = int(running.sum()), sampled + len(rows)
            if watch:
                watch(1 - count / B * (1 - (t + 1) / T), sampled)
            if count == 0:
                break
            if count < len(rows):
                order = decoder.keep(running, count)  # (count,) the rows it kept, as they now follow in its cache
                rows, token, limit = rows[order], token[order], limit[order]
            hidden = decoder.step(token)  # (B', D)
    longest = t + 1
    ended = (is_end[tokens] & mask).any(1)  # (B,)
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
