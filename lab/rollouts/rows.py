"""Rows of other programs' rollouts: plain jsonl, TRL's completions, verl's dumps; text becomes tokens where ids lack.

TRL's completions and verl's dumps hold text alone. What was assumed to make tokens of it is counted in `notes`.
"""
import math
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plumbing.chat import chatml, rendered
from plumbing.metrics import number
from plumbing.tokenizer import Tokenizer
from tasks.data import raw_rows

FIELDS = {"step": ("step",), "prompt": ("prompt", "input"), "completion": ("completion", "response", "output"),
          "reward": ("reward", "score"), "advantage": ("advantage",), "group": ("group", "uid"),
          "prompt_ids": ("prompt_ids",), "completion_ids": ("completion_ids", "response_ids")}  # plain and TRL, verl
ROLE = re.compile(r"(?:\A|\n)(system|user|assistant)\n")  # what is left of ChatML without its special tokens


class Rollout(NamedTuple):
    """One graded response."""

    step: int
    group: str  # equal within a step for those that answer the same prompt
    prompt: list[int]
    tokens: list[int]  # of the response, its end token included
    reward: float
    advantage: float | None
    end_assumed: bool  # whether text lacked the last token


def find_files(paths: list[Path]) -> list[Path]:
    """The files named, and of a folder, or else its completions/, all with rollouts, by the numbers in their names."""
    files = []
    for path in paths:
        inside = [file for file in path.glob("*") if {".jsonl", ".parquet"} & set(file.suffixes)]
        inside = inside or [*path.glob("completions/*.parquet")]
        files += sorted(inside, key=lambda file: [int(n) for n in re.findall("[0-9]+", file.name)]) or [path]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"there is no .jsonl or .parquet in {file} or its completions/" if file.is_dir()
                                    else f"there is no file {file}")
    return files


def read_rollouts(files: list[Path], tokenizer: Tokenizer, limit: int) -> tuple[list[Rollout], Counter]:
    """The rollouts of all files, and counts of what was assumed. ValueError, with the row, for what is no rollout, and
    for one of more tokens than the model's limit."""
    found, notes = [], Counter()
    for file in files:
        latest = -math.inf  # step of this file
        for place, parse in raw_rows(file):
            try:
                found.append(read_row(parse(), tokenizer, notes))
                if (step := found[-1].step) < latest:
                    raise ValueError(f"step {step} comes after step {latest}: two runs in one file? Keep one of them")
                latest = step
                if (length := len(found[-1].prompt) + len(found[-1].tokens)) > limit:
                    raise ValueError(f"it has {length} tokens, and the model takes {limit}")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, {place}: {error}") from None
    if not found:
        raise ValueError(f"{files[0]} holds no rollout")
    if len({rollout.advantage is None for rollout in found}) > 1:
        raise ValueError("some rows have an advantage and others none: write it in all of them, or in none")
    return found, notes


def read_row(row: Any, tokenizer: Tokenizer, notes: Counter) -> Rollout:
    """The rollout of a row; counts in notes what was assumed."""
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    given = {field: row[name] for field, names in FIELDS.items() for name in names if row.get(name) is not None}
    if lacking := [f for f in ("prompt", "completion") if f not in given and f"{f}_ids" not in given]:
        raise ValueError(f"it has no {lacking[0]}; its fields: {', '.join(map(repr, row))}"[:200])
    prompt, tokens = (ids_of(given, f"{part}_ids", tokenizer) for part in ("prompt", "completion"))
    if prompt is None:
        prompt = prompt_tokens(given["prompt"], "input" in row, tokenizer, notes)
    if tokens is None:
        tokens = text_tokens(given["completion"], tokenizer, notes)
    if not prompt or not tokens:
        raise ValueError("its prompt or completion has no token")
    reward = number_of(given["reward"], "reward") if "reward" in given else summed_reward(row, notes)
    advantage = number_of(given["advantage"], "advantage") if "advantage" in given else None
    group = str(given.get("group", prompt))
    group = group.rsplit("_", 2)[0] if "input" in row else group  # verl's uid is {prompt}_{response}_{output}
    return Rollout(int(number_of(given.get("step", 1), "step")), group, prompt, tokens, reward, advantage,
                   "completion_ids" not in given)


def ids_of(given: dict, name: str, tokenizer: Tokenizer) -> list[int] | None:
    """The token ids that a row has, None where it has none; ValueError where they are not those of the model."""
    ids = given.get(name)
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < tokenizer.size for i in ids)):
        raise ValueError(f"its {name} must be a list of tokens from 0 to {tokenizer.size - 1}, the last one of --model")
    return ids


def number_of(value: Any, name: str) -> float:
    """A finite number, which older versions of verl write as text."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9.]+(e[-+]?[0-9]+)?\s*", value):
        value = float(value)
    value = number(value, f"its {name}")
    if not abs(value) <= 1e38:
        raise ValueError(f"its {name} must be a finite number, not {value}")
    return value


def summed_reward(row: dict, notes: Counter) -> float:
    """The sum of the reward functions' columns, as TRL has it with weights of 1: its completions have no total."""
    columns = {name: float(x) for name, x in row.items() if name not in ("step", "advantage")
               and isinstance(x, float | np.floating | Decimal) and not math.isnan(x)}
    if not columns:
        raise ValueError(f"it has no reward; its fields: {', '.join(map(repr, row))}"[:200])
    notes.update({f"reward {name}": 1 for name in columns})
    return number_of(sum(columns.values()), "reward")


def prompt_tokens(prompt: Any, bare: bool, tokenizer: Tokenizer, notes: Counter) -> list[int]:
    """The tokens of a prompt: messages by the model's template, any other text as it stands. bare: verl's, which is
    without special tokens; those of ChatML are put back."""
    if messages_of(prompt, "prompt"):
        notes["rendered"] += 1
        prompt = rendered(tokenizer, prompt) if tokenizer.template else chatml(prompt)
    elif bare and tokenizer.chat and ROLE.match(prompt):  # role, text, role, text, ..., "assistant", ""
        notes["ChatML"] += 1
        _, *parts = ROLE.split(prompt + "\n" * prompt.endswith("\nassistant"))
        turns = [{"role": role, "content": text} for role, text in zip(parts[::2], parts[1::2])]
        prompt = chatml(turns[:-1]) + turns[-1]["content"]
    else:
        notes["as text"] += 1
    tokens = tokenizer.encode(prompt)
    return tokens if tokens[: len(tokenizer.start)] == tokenizer.start else tokenizer.start + tokens


def messages_of(value: Any, name: str) -> list[dict]:
    """The messages of a conversation, none for a text; ValueError for anything else."""
    if isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str)
                                                 and isinstance(m.get("content"), str) for m in value):
        return value
    if not isinstance(value, str):
        raise ValueError(f"its {name} is neither text nor messages with role and content")
    return []


def text_tokens(completion: Any, tokenizer: Tokenizer, notes: Counter) -> list[int]:
    """The tokens of a response's text, in which a special token's name stays characters, for none was in the text; and
    an end token, the tokenizer's own if that ends a response."""
    if messages := messages_of(completion, "completion"):
        if len(messages) > 1:
            raise ValueError(f"its completion has {len(messages)} messages: several turns need ids")
        completion = messages[0]["content"]
    named = tokenizer.library.token_to_id(str(tokenizer.named.get("eos_token")))
    end = named if named in tokenizer.end_tokens else tokenizer.end_tokens[0]
    tokens = [*tokenizer.encode("", completion), end]
    notes.update({"lost": completion.count("\ufffd"), "responses from text": 1, "tokens from text": len(tokens)})
    return tokens
