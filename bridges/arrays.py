"""Credit of a function of mitigations.py or methods/ for arrays, from any trainer or process.

    from bridges import credit
    paid = credit(tokens, mask, logprob, entropy, reward, group, "entropy_ratio", advantage="rloo")

docs/trl.md has recipes for the trainers that it was tried with.
"""
from functools import partial
from typing import Any, Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bridges import own_modules
from bridges.foreign import TASK, Asked, ForeignBatch, Layout, assign_credit, find_credit, layout, read_tokenizer

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
    at neither. reward (B,): NaN where there is none; such a response is left out. group (B,): names; equal ones are
    compared. lengths (B,): columns that are no padding; by default those of a row, or up to the last sampled token.
    advantage: a name of --advantage, or the trainer's own, (B,). success: (B,), or above which reward it is one.
    tokenizer: of transformers, or a model's folder, for functions that read texts. prompts: B, their tokens.
    ValueError, in a sentence, for what does not fit, and for what the function asks for and was not given.
    """
    own, begins, ends = columns_of(tokens, mask, lengths)
    B, shape = own.columns.shape
    found = find_credit(partial(CREDIT_FUNCTIONS[name], **hyper_parameters) if name in CREDIT_FUNCTIONS else name, TASK,
                        set(), "bridges.credit")
    told = {field: own.compact(rectangle(x, field, (B, shape)).float())
            for field, x in (("logprob", logprob), ("entropy", entropy)) if x is not None}
    reward, theirs = vector(reward, B, "reward"), not isinstance(advantage, str)
    require(normalize in NORMALIZATIONS, f"normalize={normalize!r} is none of {', '.join(NORMALIZATIONS)}")
    require(theirs or advantage in ADVANTAGES, f"advantage={advantage!r} is none of {', '.join(ADVANTAGES)}")
    require(len(group) == B and (prompts is None or len(prompts) == B), f"group and prompts must have {B} entries")
    if tokenizer is not None:
        told["tokenizer"] = read_tokenizer(tokenizer) if hasattr(tokenizer, "save_pretrained") else Tokenizer(tokenizer)
        last = own.tokens.gather(1, (own.mask.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]  # (B,)
        told["ended"] = torch.isin(last, torch.tensor(told["tokenizer"].end_tokens))

    def read(field: str) -> dict[str, Any]:
        wanted = "tokenizer" if field == "ended" else field
        require(field in told, f"it looks at {field}" + (
            f": give {wanted} to bridges.credit" if wanted != "logit_grad" else ", which bridges.credit can't be given"))
        return told
    batch = ForeignBatch(
        own, read, {"reward": reward}, vector(success, B, "success") if np.ndim(success) else reward > success,
        [str(x) for x in group], puzzles=[*group], prompts=prompts or begins, normalize=normalize,
        asks=lambda part, rows: Asked(seed, 0, rows))
    if theirs:
        batch.advantage = vector(advantage, B, "advantage").float()
    paid = own.spread(assign_credit(batch, found, 0, "theirs" if theirs else advantage))  # (B, C)
    if isinstance(tokens, Tensor | np.ndarray):
        return paid if isinstance(tokens, Tensor) else paid.numpy()
    return [row[:n] if isinstance(tokens[0], Tensor) else row[:n].numpy() for row, n in zip(paid, ends)]


def columns_of(tokens: Array, mask: Array, lengths: Array | None) -> tuple[Layout, list[list[int]], list[int]]:
    """The layout of B rows, what stands before the first sampled token of each, and their lengths."""
    ragged = not isinstance(tokens, Tensor | np.ndarray)
    lengths = [len(row) for row in tokens] if ragged and lengths is None else lengths
    tokens = rectangle(tokens, "tokens").long()
    mask = rectangle(mask, "mask", tokens.shape).bool()
    B, C = tokens.shape
    last = (mask * torch.arange(1, C + 1)).amax(1)  # (B,)
    ends = (last if lengths is None else vector(lengths, B, "lengths").long()).tolist()
    require(all(most <= n for most, n in zip(last.tolist(), ends)), "mask has a 1 behind the end of a response")
    rows, marks = ([row[:n] for row, n in zip(x, ends)] for x in (tokens.tolist(), mask.int().tolist()))
    own = layout(rows, marks, C)
    return own, [said.pop(0, []) for said in own.before], ends


def rectangle(x: Array, name: str, shape: tuple = ()) -> Tensor:
    """Numbers for each column, (B, C); rows of a list are filled up."""
    if not isinstance(x, Tensor | np.ndarray):
        x = pad_sequence([torch.as_tensor(row) for row in x], batch_first=True)
    found = torch.as_tensor(x).cpu()
    require(found.dim() == 2 and tuple(shape) in ((), tuple(found.shape)),
            f"{name} must be of shape {tuple(shape) or '(B, C)'}, not {tuple(found.shape)}")
    return found


def vector(x: Array, B: int, name: str) -> Tensor:
    """A number for each response, (B,)."""
    found = torch.as_tensor(x).double().cpu()
    require(found.shape == (B,), f"{name} must be of shape ({B},), not {tuple(found.shape)}")
    return found
