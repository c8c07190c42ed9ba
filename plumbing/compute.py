"""How formulas are computed: in parts of a size that fits into memory, in a dtype that the processor is quick at, by a
kernel of the GPU, and without reading a text twice. The formulas stand in qwen2_model.py and sampler.py.

A first reading can skip it.
"""
import math
from functools import partial
from itertools import repeat
from typing import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

BLOCK = 2**21  # numbers of a matrix that are converted at once: they stay in the processor's cache

# Numbers that are computed at a time, at most; and that are kept for the backward pass, which computes more again.
SCORES_AT_ONCE, SCORES_KEPT = 2**24, 2**23  # of a layer's attention
LOGITS_AT_ONCE = LOGITS_KEPT = 2**26


def recomputed(function: Callable) -> Callable:
    """The function with activation checkpointing: nothing in it is kept, and the backward pass computes it again."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def in_parts(function: Callable, *rows: Tensor | None, row_size: int, at_once: int,
             kept: float = math.inf) -> Tensor | tuple[Tensor, ...]:
    """function(*rows): a tensor, or a tuple of tensors, with a row for each row of its arguments, which may be None.

    It makes row_size numbers a row: at most at_once of them at a time, and again for the backward pass where that would
    keep more than `kept`.
    """
    if torch.is_grad_enabled() and len(rows[0]) * row_size > kept:
        function = recomputed(function)
    size = max(1, at_once // max(1, row_size))
    if len(rows[0]) <= size:
        return function(*rows)
    found = [function(*part) for part in zip(*(repeat(None) if x is None else x.split(size) for x in rows))]
    return tuple(map(torch.cat, zip(*found))) if isinstance(found[0], tuple) else torch.cat(found)


def logprobs_in_memory(formula: Callable, states: Tensor, tokens: Tensor, V: int) -> Tensor:
    """formula(states, tokens), (n,), of states (n, D) and tokens (n,), which makes V numbers for each token."""
    return in_parts(formula, states, tokens, row_size=V, at_once=LOGITS_AT_ONCE, kept=LOGITS_KEPT)


# ------------------------------------------------------------------------------------------------- attention


def run_attention(formula: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The formula of attention, of q (R, H, S, d), k and v (R, K, C, d) and mask (R, 1, S, C), for as many rows at a
    time as memory allows; or by a GPU's kernel, which for one new token a row is not worth its copies of k and v."""
    if q.is_cuda and q.shape[2] > 1:
        return attention_on_gpu(q, k, v, mask)
    scores = q.shape[1] * mask[0].numel()  # of a row
    return in_parts(formula, q, k, v, mask, row_size=scores, at_once=SCORES_AT_ONCE, kept=SCORES_KEPT)


def attention_on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same by a kernel that keeps no probabilities.

    torch would choose cuDNN, whose backward pass gave NaN on an H100 for Qwen2.5 wherever C was 64 more than a multiple
    of 128 (torch 2.11 and 2.13, https://github.com/pytorch/pytorch/issues/196678). The kernel taken instead wants a key
    head for each query head.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # (R, H, C, d) each
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, mask)


# ------------------------------------------------------------------------------------------------- products


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w.T + bias, (..., outputs), in the dtype of x."""
    if w.dtype == x.dtype:
        return F.linear(x, w, bias)
    y = Converted.apply(x.flatten(0, -2), w).view(*x.shape[:-1], len(w))
    return y if bias is None else y + bias.to(y.dtype)


class Converted(torch.autograd.Function):
    """x @ w.T, (n, outputs), where w is stored in another dtype: in bfloat16, on a processor that multiplies float32.

    Each block of w is converted when it is used, forward and backward: a copy that waits for the backward pass would
    take as much memory as a model in float32.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        """The product (n, outputs) of x (n, inputs) and w (outputs, inputs)."""
        ctx.save_for_backward(x, w)
        ctx.rows = max(1, BLOCK // w.shape[1])  # of w in a block
        if len(w) <= ctx.rows:
            return x @ w.to(x.dtype).T
        y = x.new_empty(len(x), len(w))
        for part, block in zip(y.split(ctx.rows, dim=1), w.split(ctx.rows)):
            part.copy_((block.to(x.dtype) @ x.T).T)  # a tenth faster, for many x, than x @ block.T
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x (n, inputs) and w (outputs, inputs); None for one that needs none."""
        x, w = ctx.saved_tensors  # once: with --checkpoint_activations they are computed again when they are asked for
        to_x, to_w = (torch.zeros_like(z) if asked else None for z, asked in zip((x, w), ctx.needs_input_grad))
        for i in range(0, len(w), ctx.rows):
            part, block = gradient[:, i : i + ctx.rows], w[i : i + ctx.rows]
            if to_x is not None:
                to_x.addmm_(part, block.to(x.dtype))
            if to_w is not None:
                to_w[i : i + ctx.rows] = part.T @ x
        return to_x, to_w


# ------------------------------------------------------------------------------------------------- texts


def distinct_texts(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The prompts that are not a prefix of another, and for each prompt the index of one of these that extends it.

    Of the prompts 1, 1 2 and 1 2 3 the last serves all three. Equal prompts count once. vineppo samples from many
    prefixes of the same response at once; the longest ones have a third of the tokens of all.
    """
    texts, text_of = [], [0] * len(prompts)
    # In descending order, the prompts that begin with q stand together, q last: 1 2 4, 1 2 3, 1 2. So if any text
    # extends q, the latest one, texts[-1], does.
    for q in sorted(range(len(prompts)), key=prompts.__getitem__, reverse=True):
        if not texts or texts[-1][: len(prompts[q])] != prompts[q]:
            texts.append(prompts[q])
        text_of[q] = len(texts) - 1
    return texts, text_of


def interleave(tokens: list, before: dict[int, list]) -> list:
    """The tokens of a response with the replies before each, and behind the last."""
    if not before:
        return tokens
    return [x for t in range(len(tokens) + 1) for x in (*before.get(t, ()), *tokens[t : t + 1])]


def with_replies(tokens: Tensor, mask: Tensor, before: Sequence[dict[int, list]]) -> tuple[Tensor, Tensor]:
    """Responses (m, T) with the replies that were read between their tokens: all tokens (m, S), and which of these were
    sampled (m, S). S is at least T. mask (m, T): False on padding. In a single turn they are tokens and mask."""
    if not any(before):
        return tokens, mask
    texts, sampled = [], []  # m each
    for row, real, replies in zip(tokens.tolist(), mask.tolist(), before):
        texts.append(torch.tensor(interleave(row, replies)))
        not_sampled = {t: [False] * len(words) for t, words in replies.items()}
        sampled.append(torch.tensor(interleave(real, not_sampled)))
    return tuple(pad_sequence(x, batch_first=True).to(mask.device) for x in (texts, sampled))
