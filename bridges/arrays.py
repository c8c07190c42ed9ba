"""Credit of a function of mitigations.py or methods/ for arrays, from any trainer or process.

    from bridges import credit
    paid = credit(tokens, mask, logprob, entropy, reward, group, "entropy_ratio", advantage="rloo")

docs/trl.md has recipes for the trainers that it was tried with.
"""
import inspect
import math
from functools import partial
from typing import Any, Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bridges import own_modules
from bridges.foreign import (TASK, Asked, ForeignBatch, Layout, assign_credit, at_least_0, find_credit, layout,
                             read_tokenizer)

with own_modules():
    from grpo import ADVANTAGES
    from methods.registry import CREDIT_FUNCTIONS
    from mitigations import NORMALIZATIONS
    from plumbing.files import require
    from plumbing.tokenizer import Tokenizer

Array = np.ndarray | Tensor | Sequence


def credit(tokens: Array, mask: Array, logprob: Array | None, entropy: Array | None, reward: Array, group: Sequence,
           name: str | Callable = "none", *, lengths: Array | None = None, normalize: str = "response",
           advantage: str | Array = "grpo", success: float | Array = 0.5, seed: int = 0, tokenizer: Any = None,
           prompts: Sequence[list[int]] | None = None, **hyper_parameters: Any) -> np.ndarray | Tensor | list:
    """The credit (B, C) of B responses' tokens in C columns, 0 where mask is; a tensor for tensors, else an array. Or
    everything (B, C) is a list of B rows of any length, of arrays or tensors, and so is the credit.

    tokens (B, C) int: sampled tokens and, between them, what the environment said; before them perhaps the prompt.
    mask (B, C): 1 on sampled ones. logprob, entropy (B, C): of sampled tokens, in nats; None where the function looks
    at neither. reward (B,): NaN or None where there is none; such a response is left out. group (B,): names; equal ones
    are compared, and answer one prompt. lengths (B,): columns that are no padding; by default those of a row, or up to
    the last sampled token. advantage: a name of --advantage, or the trainer's own, (B,). success: (B,), or above which
    reward it is one. tokenizer: of transformers, or a model's folder, for functions that read texts. prompts: B, their
    tokens; by default what stands before the first sampled one. hyper_parameters: the function's.
    ValueError, in a sentence, for what does not fit, and for what the function asks for and was not given.
    """
    own, begins, rows = columns_of(tokens, mask, lengths)
    B, begins = len(rows), begins if prompts is None else [*map(list, prompts)]
    method = CREDIT_FUNCTIONS.get(name, name) if isinstance(name, str) else name
    found = find_credit(partial(method, **hyper_parameters) if hyper_parameters and callable(method) else method, TASK,
                        set(), "bridges.credit", inspect.signature(credit).parameters)
    told = {field: own.compact(rectangle(x, field, tokens).float())
            for field, x in (("logprob", logprob), ("entropy", entropy)) if x is not None}
    told |= {"entropy": at_least_0(told["entropy"])} if "entropy" in told else {}
    reward, theirs = vector(reward, B, "reward"), not isinstance(advantage, str)
    require(normalize in NORMALIZATIONS, f"normalize={normalize!r} is none of {', '.join(NORMALIZATIONS)}")
    require(theirs or advantage in ADVANTAGES, f"advantage={advantage!r} is none of {', '.join(ADVANTAGES)}")
    require(len(group) == len(begins) == B, f"group and prompts must have {B} entries")
    differ = [x for x, prompt in zip(group, begins) if prompt != begins[[*group].index(x)]]
    require(not differ, f"the prompts of group {differ[:1]} differ: give them as prompts=, or name groups by them")
    if tokenizer is not None:
        told["tokenizer"] = read_tokenizer(tokenizer) if hasattr(tokenizer, "save_pretrained") else Tokenizer(tokenizer)
        ends = torch.tensor(told["tokenizer"].end_tokens)
        told["ended"] = torch.tensor([bool(row[mine].numel() and torch.isin(row[mine][-1], ends))
                                      for row, mine in zip(own.tokens, own.mask)])  # (B,)

    def read(field: str) -> dict[str, Any]:
        wanted = "tokenizer" if field == "ended" else field
        require(field in told, f"it looks at {field}" + (
            f": give {wanted} to bridges.credit" if wanted != "logit_grad" else ", which bridges.credit can't be given"))
        return told
    batch = ForeignBatch(
        own, read, {"reward": reward}, vector(success, B, "success") if np.ndim(success) else reward > float(success),
        [str(x) for x in group], puzzles=[*group], prompts=begins, normalize=normalize,
        asks=lambda part, rows: Asked(seed, 0, rows))
    if theirs:
        batch.advantage = vector(advantage, B, "advantage").float()
        require(batch.advantage.isfinite().all(), "each advantage must be a finite number")
    paid = own.spread(assign_credit(batch, found, 0, "theirs" if theirs else advantage))  # (B, C)
    if isinstance(tokens, Tensor | np.ndarray):
        return paid if isinstance(tokens, Tensor) else paid.numpy()
    return [row[:n] if isinstance(tokens[0], Tensor) else row[:n].numpy() for row, n in zip(paid, rows)]


def columns_of(tokens: Array, mask: Array, lengths: Array | None) -> tuple[Layout, list[list[int]], list[int]]:
    """The layout of B rows, what stands before the first sampled token of each, and their lengths."""
    require(len(tokens), "there is no response")
    ragged = not isinstance(tokens, Tensor | np.ndarray)
    lengths = [len(row) for row in tokens] if ragged and lengths is None else lengths
    mask = rectangle(mask, "mask", tokens).bool()
    tokens = rectangle(tokens, "tokens", tokens).long()
    require(mask.any(), "mask has no 1: no token was sampled")
    B, C = tokens.shape
    last = (mask * torch.arange(1, C + 1)).amax(1)  # (B,)
    ends = (last if lengths is None else vector(lengths, B, "lengths").long()).tolist()
    require(all(most <= n for most, n in zip(last.tolist(), ends)), "mask has a 1 behind the end of a response")
    rows, marks = ([row[:n] for row, n in zip(x, ends)] for x in (tokens.tolist(), mask.int().tolist()))
    own = layout(rows, marks, C)
    return own, [said.pop(0, []) for said in own.before], ends


def rectangle(x: Array, name: str, tokens: Array) -> Tensor:
    """Numbers for each column of the tokens, (B, C); rows of a list are filled up."""
    require([len(row) for row in x] == [len(row) for row in tokens],
            f"{name} must have B rows, each with a number for each of its tokens")
    if not isinstance(x, Tensor | np.ndarray):
        x = pad_sequence([torch.as_tensor([math.nan if v is None else v for v in row] if isinstance(row, list) else row)
                          for row in x], batch_first=True)
    require(x.ndim == 2, f"{name} must be of shape (B, C), not {tuple(x.shape)}")
    return torch.as_tensor(x).cpu()


def vector(x: Array, B: int, name: str) -> Tensor:
    """A number for each response, (B,); None is NaN."""
    x = [math.nan if v is None else v for v in x] if isinstance(x, list | tuple) else x
    found = torch.as_tensor(x).double().cpu()
    require(found.shape == (B,), f"{name} must be of shape ({B},), not {tuple(found.shape)}")
    require(not found.isinf().any(), f"each {name} must be a finite number")
    return found
