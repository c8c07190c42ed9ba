"""Shared prompts: each prompt is read once for all its responses, forward and backward. A first reading can skip it.

In the plain form, `response_logprobs` of sampler.py, a row holds a prompt and one response. Here each prompt is a row
of its own, to which the rows of its responses attend: an update is 2.78 times as fast. PromptCache holds the prompts'
rows; ResponseCache and the functions after it join the two. tests/test_sampler.py holds them to transformers, and
tests/test_grpo.py the update to its plain form.

Alphabet: Q prompts, G responses to each, B = Q G responses, P prompt columns, T response columns, S response columns
read at once, D hidden size, K key-value heads, d head size, N real tokens in a flat list.
"""
import copy
from typing import Any, Iterator

import torch
from torch import Tensor

from plumbing.processes import my_share, world
from qwen2_model import Qwen2, causal_bias, pad_left, positions_of, token_logprobs


class PromptCache:
    """Q prompts, read once for all their responses: each layer's keys and values, with gradient if autograd is on."""

    def __init__(self, model: Qwen2, prompts: list[list[int]]):
        tokens, self.real = pad_left(prompts, model.output_weight.device)  # (Q, P) each
        self.length = self.real.sum(1)  # (Q,)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values (Q, K, P, d)
        # Each layer calls self.extend with its keys and values (see Qwen2.hidden). A padding column sees itself
        # (causal_bias), so that no softmax is empty, and no other column sees it.
        self.hidden = model.hidden(tokens, positions_of(self.real), causal_bias(self.real), self)  # (Q, P, D)
        self.last = self.hidden[:, -1]  # (Q, D) the state that predicts a response's first token

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

    vineppo samples from many prefixes of the same response at once. Only the longest of them is read: by default a
    third of the tokens.
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


# ----------------------------------------------------------------------------------- reading finished responses
# tokens and mask are (B, T), padded on the right. What is returned for padding means nothing; shared_logprobs has 0.


def by_length(lengths: Tensor, size: int) -> list[tuple[Tensor, int]]:
    """Chunks of at most `size` responses, similar in length (M,): the indices (b,) and the longest length of each."""
    chunks = lengths.argsort(stable=True).split(size)  # a single empty one where there are no responses
    return [(chunk, max(lengths[chunk].tolist(), default=1)) for chunk in chunks]


def response_states(model: Qwen2, cache: ResponseCache, tokens: Tensor, mask: Tensor,
                    hide: Tensor | None = None) -> Tensor:
    """The last hidden state (B, T, D) that predicts each token of the responses (B, T) to the prompts in `cache`.

    The state that predicts a token is one column before it:

        column      pad  the  sky  |  is    blue        P = 3, T = 2; left of the bar lies the prompt's row,
        predicts              is   |  blue              right of it the response's

    hide (B, T) bool: tokens that no later token can attend to.
    """
    first = cache.prompts.last[cache.prompt_of][:, None]  # (B, 1, D) the prompts' last states
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


def shared_logprobs(model: Qwen2, cache: ResponseCache, tokens: Tensor, mask: Tensor,
                    hide: Tensor | None = None) -> Tensor:
    """log pi (B, T) of the responses' tokens, with gradient, 0 on padding; hide: see response_states."""
    states = response_states(model, cache, tokens, mask, hide)[mask]  # (N, D)
    logprob = token_logprobs(model, states, tokens[mask])  # (N,)
    return logprob.new_zeros(mask.shape).masked_scatter(mask, logprob)


# ------------------------------------------------------------------------------------------------- the update


def shared_prompts(model: Qwen2, batch: Any, credit: Tensor, s: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Read this process's responses with credit (B, T), or all of them with a KL penalty; each prompt only once.

    Yields as `padded_rows` of grpo.py, responses of similar length together. The caller must call backward() on each
    micro-batch. That adds up the gradients of the prompts' keys and values in `leaf`; after the last micro-batch,
    cache.backward takes them on through the prompts to the weights.
    """
    rank, processes = world()
    own = batch.group % processes == rank  # (B,) of n processes, each takes every n-th puzzle
    if s.kl == 0:
        own = own & (credit != 0).any(1)  # where all credit is 0, there is no gradient
    mine = own.nonzero()[:, 0]  # (M,)
    if not len(mine):
        return
    prompts = my_share(batch.ask.prompts)
    cache, prompt_tokens = PromptCache(model, prompts), sum(map(len, prompts))
    leaf = cache.detach()  # backward() of a micro-batch stops here and adds to its .grad
    for chunk, t in by_length(batch.mask.sum(1)[mine], s.micro_batch):
        rows = mine[chunk]  # (b,)
        responses = ResponseCache(leaf, batch.group[rows] // processes)  # prompt q is number q // n of this process
        yield rows, shared_logprobs(model, responses, batch.tokens[rows, :t], batch.mask[rows, :t]), prompt_tokens
        prompt_tokens = 0  # they were counted with the first micro-batch
    cache.backward(leaf)
