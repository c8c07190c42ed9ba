"""The policy, RL's word for the model that acts and learns, with what belongs to it: how it is asked and graded.

A first reading can skip it: `prompt` gives a puzzle's tokens, `grade` a response's reward.
"""
from types import ModuleType
from typing import Any, NamedTuple, Self

import numpy as np
from torch import nn

from plumbing.chat import chat_tokens
from plumbing.task_file import check_pieces, graded
from plumbing.tokenizer import Tokenizer
from settings import Settings
from tasks.text import fingerprint


def seed_of(purpose: str, *numbers: int | str) -> int:
    """The seed of a generator of random numbers, from its purpose, such as "order", and numbers, such as --seed and the
    epoch: another purpose or number draws others. (The first weights of all heads are those of seed 0.)"""
    return fingerprint(f"{purpose} {numbers}") >> 1  # 63 of its 64 bits, which torch takes


class Policy(NamedTuple):
    """What every part of a step is handed: it samples, grades, reads and learns."""

    model: nn.Module  # the Qwen2 of qwen2_model.py
    tokenizer: Tokenizer
    task: ModuleType
    heads: dict[str, nn.Module] = {}  # those of methods/heads.py that the credit function needs, by name
    reference: nn.Module | None = None  # a frozen copy of the start model, where the credit function or --kl needs it
    weights: dict[str, float] = {}  # --reward_weights: of parts of the reward, instead of the task's PARTS
    coin: np.random.Generator | None = None  # --reward random: tossed for each response, instead of its grade

    @property
    def parts(self) -> dict[str, float]:
        """The weight of each part of the reward, by the name that it has in the task's grade. A task without PARTS
        returns the reward itself."""
        return getattr(self.task, "PARTS", {"reward": 1.0}) | self.weights

    def grade(self, text: str, puzzle: Any, turns: list[str]) -> dict[str, float]:
        """The reward and the task's grades of a response. turns: the texts of its turns, for a task that replies."""
        several = (turns,) if hasattr(self.task, "reply") else ()
        found = graded(self.task, self.parts, text, puzzle, *several)
        return found | dict.fromkeys(("reward", "answer"), float(self.coin.integers(2))) if self.coin else found

    def for_step(self, s: Settings, step: int, *purpose: str) -> Self:
        """The policy, which grades a step's responses by a fair coin of its own if --reward random says so: success
        must not rise then. The format is graded as usual, but it is no part of the reward."""
        if s.reward != "random":
            return self
        return self._replace(coin=np.random.default_rng(seed_of("coin", s.seed, step, *purpose)))

    def prompt(self, puzzle: Any) -> list[int]:
        """The tokens of a puzzle's prompt. The task returns messages, or text, or a tuple of pieces: the first, third,
        ... are its own words, the others foreign text, such as a question from a data file. A control token in these,
        such as <|im_end|>, is encoded as plain characters.
        """
        found = self.task.prompt(puzzle, self.tokenizer.chat)
        if isinstance(found, list):  # messages
            return chat_tokens(self.tokenizer, found)
        return self.tokenizer.start + self.tokenizer.encode(*check_pieces(found, "prompt"))
