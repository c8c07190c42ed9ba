"""Texts that begin alike are read once: prefixes of a response that vineppo continues, or games in
several turns that begin with the same prompt.

Of the texts a b, a b c d and a b c only a b c d is read. The others are cut out of it, and moved to
the right, so that all end in the same column:

    column     0   1   2                column     0   1   2
    read       a   b   c                row 0              a      of a b, but for its last token
                                        row 1      a   b   c      of a b c d
                                        row 2          a   b      of a b c

A key was turned by the angle of its column (RoPE), so a key that moves is turned on, by as many
columns as it moves.

Run it:  python train.py --mitigation vineppo
"""
from copy import copy

import torch
from torch import Tensor

from plumbing.compute import distinct_texts
from qwen2_model import Cache, Qwen2, rotate
from sampler import read_prompts


def read_prefixes(model: Qwen2, prompts: list[list[int]]) -> tuple[Cache, Tensor]:
    """What `read_prompts` of sampler.py returns of Q prompts. A text that begins another one, or
    comes again, is not read by itself: that saves two thirds of the tokens of vineppo's prefixes.
    """
    (texts, text_of), device = distinct_texts(prompts), model.norm.device
    cache, _ = read_prompts(model, texts)
    row = torch.tensor(text_of, device=device)  # (Q,) of the longer text
    length = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)  # (Q,)
    return move(model, cache, row, length), torch.tensor([p[-1] for p in prompts], device=device)


def move(model: Qwen2, cache: Cache, row: Tensor, length: Tensor) -> Cache:
    """A cache of Q rows, each of which has read the first tokens, length (Q,) of them, of the text
    in row (Q,) of another cache."""
    moved, C = copy(cache), int(length.max())
    moved.columns = C
    before, moved.start = cache.start[row], C - length  # (Q,) where each begins
    shift = moved.start - before  # (Q,) columns to the right
    column = torch.arange(C, device=row.device) - shift[:, None]  # (Q, C) where each one stood
    at = row[:, None], slice(None), column.clamp(min=0)  # what stands in padding, nobody sees
    angle = shift[:, None, None, None] * model.frequency  # (Q, 1, 1, d / 2)
    rotation = model.rotation(angle)  # (Q, 1, 1, d) each
    moved.keys = [rotate(x[at].transpose(1, 2), *rotation) for x in cache.keys]  # (Q, K, C, d)
    moved.values = [x[at].transpose(1, 2) for x in cache.values]
    return moved
