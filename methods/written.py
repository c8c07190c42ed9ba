"""What credit functions find in a response's text: its calculations, and its reward without a part of it.

B responses of T tokens at most, in groups of G; S calculations in a response, L of its tokens.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from extras.turns import texts_without
from plumbing.task_file import graded
from rollout import TokenBatch
from tasks.arithmetic import CalculationSpan
from tasks.text import anchors


class Calculation(NamedTuple):
    """A calculation, `a operator b = result`, in a response."""

    tokens: Tensor  # (T,) bool, its tokens
    span: CalculationSpan  # the characters of its parts
    is_right: bool  # true, with numbers that were available


def written_calculations(batch: TokenBatch, i: int) -> list[Calculation]:
    """The calculations in response i."""
    # A token belongs where its first letter is, which `anchors` finds.
    letter = torch.from_numpy(anchors(batch.text[i], batch.spans[i])).to(batch.mask.device)  # (L,)
    found = []
    for span, is_right in batch.task.calculations(batch.text[i], batch.puzzles[batch.group[i]]):
        tokens = torch.zeros_like(batch.mask[i])  # (T,)
        tokens[: len(letter)] = (letter >= span.a[0]) & (letter < span.result[1])
        found.append(Calculation(tokens, span, is_right))
    return found


def calculation_advantage(batch: TokenBatch, written: list[list[Calculation]], verdicts: list[Tensor]) -> Tensor:
    """The verdict (0 or 1) on each calculation, z-scored over its group, on its tokens (B, T); 0 elsewhere. verdicts:
    of each response (S,)."""
    advantage = batch.advantage.new_zeros(batch.mask.shape)
    G = len(batch.text) // len(batch.puzzles)
    for i, verdict in enumerate(verdicts):
        if len(verdict):
            first = i // G * G
            group = torch.cat(verdicts[first : first + G])  # all calculations of the group
            z = (verdict - group.mean()) / (group.std(correction=0) + 1e-4)  # (S,)
            for calculation, value in zip(written[i], z.to(advantage.device)):
                advantage[i, calculation.tokens] = value
    return advantage


def reward_without(batch: TokenBatch, i: int, start: int, stop: int) -> float:
    """The reward of response i without its characters from start to stop; what was replied stays as it is."""
    text, puzzle = batch.text[i], batch.puzzles[batch.group[i]]
    turns = (texts_without(batch, i, start, stop),) if hasattr(batch.task, "reply") else ()
    return graded(batch.task.grade(text[:start] + text[stop:], puzzle, *turns), batch.parts)["reward"]
