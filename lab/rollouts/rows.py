"""Rows of other programs' rollouts: plain jsonl, TRL's completions, verl's dumps; text becomes tokens where ids lack.

TRL's completions and verl's dumps hold text alone. What was assumed to make tokens of it is counted in `notes`.
"""
import math
import re
from collections import Counter
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np
import torch

from plumbing.chat import chatml, rendered
from plumbing.files import read_json
from plumbing.metrics import number
from plumbing.tokenizer import Tokenizer, name_of, read_settings
from tasks.data import raw_rows

FIELDS = {"step": ("step",), "prompt": ("prompt", "input"), "completion": ("completion", "response", "output"),
          "advantage": ("advantage",), "group": ("group", "uid"),  # plain and TRL, verl
          "prompt_ids": ("prompt_ids",), "completion_ids": ("completion_ids", "response_ids"),
          "prompt_mask": ("prompt_mask",), "completion_mask": ("completion_mask", "response_mask")}
TOTALS = ("reward", "score")  # the whole reward; in any other column a part of it, or something else
PART = ("split", "mode", "phase")  # says whether a row is of training
EVALUATION = re.compile("(?i)(eval|val|test|dev).*")
ROLE = re.compile(r"(?:\A|\n)(system|user|assistant)\n")  # what is left of ChatML without its special tokens
TRAJECTORY = re.compile(r"_[0-9]+_[0-9]+\Z")  # verl's uid is {prompt}_{response}_{output}


class Rollout(NamedTuple):
    """One graded response."""

    step: int
    group: str | None  # its name in the file, if any
    prompt: list[int]
    tokens: list[int]  # of the response, its end token included
    end_assumed: bool  # whether the last token was not in the file, or may be padding
    advantage: float | None
    columns: dict[str, Any]  # its numbers; some are rewards
    notes: Counter  # of what was assumed
    place: str = ""
    reward: float = math.nan


class Reader(NamedTuple):
    """A tokenizer, and what ends or pads its texts."""

    tokenizer: Tokenizer
    end: int  # the tokenizer's own end token if that ends a response
    filling: dict[str, int]  # end tokens and padding, by name

    def __call__(self, row: Any) -> Rollout | None:
        """The rollout of a row, None where it is of an evaluation. ValueError for what is no rollout."""
        if not isinstance(row, dict):
            raise ValueError("it is no object")
        if any(isinstance(row.get(name), str) and EVALUATION.fullmatch(row[name]) for name in PART):
            return None
        given, notes = {field: x for field, names in FIELDS.items() if (x := agreed(row, names)) is not None}, Counter()
        if lacking := [f for f in ("prompt", "completion") if f not in given and f"{f}_ids" not in given]:
            raise ValueError(f"it has no {lacking[0]}; its fields: {', '.join(map(repr, row))}"[:200])
        prompt, (tokens, end_assumed) = self.prompt(given, "input" in row, notes), self.response(given, notes)
        if not prompt or not tokens:
            raise ValueError("its prompt or completion has no token")
        taken = {name for names in FIELDS.values() for name in names}
        columns = {name: x for name, x in row.items() if name not in taken and x is not None
                   and (name in TOTALS or isinstance(x, int | float | np.number | Decimal))}
        if not columns:
            raise ValueError(f"it has no reward; its fields: {', '.join(map(repr, row))}"[:200])
        if (step := number_of(given.get("step", 1), "step")) % 1:
            raise ValueError(f"its step must be a whole number, not {step:g}")
        group = str(given["group"]) if "group" in given else None
        advantage = number_of(given["advantage"], "advantage") if "advantage" in given else None
        return Rollout(int(step), group, prompt, tokens, end_assumed, advantage, columns, notes)

    def ids(self, given: dict, part: str) -> list[int] | None:
        """The token ids that a row has and its mask does not leave out, None where it has none; ValueError where they
        are not those of the model, and where the mask has a hole."""
        ids, mask, size = given.get(f"{part}_ids"), given.get(f"{part}_mask"), self.tokenizer.size
        if ids is None:
            return None
        if not (isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids)):
            raise ValueError(f"its {part}_ids must be a list of tokens from 0 to {size - 1}, the last one of --model")
        if mask is None:
            return ids
        side = sorted(mask, reverse=part == "completion") if isinstance(mask, list) and set(mask) <= {0, 1} else None
        if mask != side or len(mask) != len(ids):
            raise ValueError(f"its {part}_mask must be 0 on padding alone, {'right' if part == 'completion' else 'left'}"
                             f" of the tokens, and as long as {part}_ids: several turns can't be read")
        return [i for i, real in zip(ids, mask) if real]

    def prompt(self, given: dict, bare: bool, notes: Counter) -> list[int]:
        """The tokens of a prompt, without padding on their left."""
        ids, start = self.ids(given, "prompt"), self.tokenizer.start[:1]
        ids = prompt_tokens(given["prompt"], bare, self.tokenizer, notes) if ids is None else ids
        first = next((i for i, token in enumerate(ids) if token not in self.filling.values()), len(ids))
        first -= first > 0 and ids[:1] == start  # one of them begins every text
        notes["padding"] += first
        return ids[first:]

    def response(self, given: dict, notes: Counter) -> tuple[list[int], bool]:
        """The tokens of a response up to its end token, and whether that was assumed. ValueError where more follow."""
        ids, text = self.ids(given, "completion"), given.get("completion")
        plain = text is None or text_of(text, strict=ids is None)
        found = self.text_ids(plain) if ids is None else ids
        stop = next((i for i, token in enumerate(found) if token in self.filling.values()), len(found))
        behind = found[stop:]
        if set(behind) - {*self.filling.values()}:
            raise ValueError("tokens stand behind the end token of its completion: several turns can't be read")
        ended = behind[:1] if behind[:1] and behind[0] in self.tokenizer.end_tokens else []
        # Where the padding is an end token, too, the first one need not have been sampled.
        padded = bool(ended) and given.get("completion_mask") is None and ended[0] == behind[-1] and (
            len(behind) > 1 or ended[0] != self.end)
        notes.update({"padding": len(behind) - len(ended), "assumed": padded or ids is None and not ended})
        if ids is None:
            ended, padded = ended or [self.end], padded or not ended
            notes.update({"lost": plain.count("\ufffd"), "responses from text": 1, "tokens from text": stop + 1})
        elif isinstance(plain, str) and self.letters(plain) != self.letters(self.tokenizer.decode(found[:stop])[0]):
            raise ValueError("its completion is not the text of its completion_ids: remove the wrong one")
        return found[:stop] + ended, padded

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a response's text, in which a special token's name stays characters, but for end tokens and
        padding behind it."""
        text, *behind = re.split(f"({'|'.join(map(re.escape, self.filling))})", text)
        if "".join(behind[1::2]).strip():
            raise ValueError(f"text stands behind {behind[0]} in its completion: several turns can't be read")
        return [*self.tokenizer.encode("", text), *(self.filling[name] for name in behind[::2])]

    def letters(self, text: str) -> str:
        """A text without what decoders treat differently: special tokens, white space and lost bytes."""
        return re.sub(r"[\s\ufffd]", "", self.tokenizer.names.sub("", text))


def reader(tokenizer: Tokenizer, folder: Path) -> Reader:
    """What reads rows for the tokenizer of a folder."""
    library, settings = tokenizer.library, read_settings(folder)
    named = library.token_to_id(str(tokenizer.named.get("eos_token")))
    padding = library.token_to_id(str(name_of(settings.get("pad_token"))))
    filling = dict.fromkeys([*tokenizer.end_tokens, *[padding] * (padding is not None)])
    return Reader(tokenizer, named if named in tokenizer.end_tokens else tokenizer.end_tokens[0],
                  {library.id_to_token(i): i for i in filling})


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


def read_rollouts(files: list[Path], read: Reader, limit: int) -> tuple[list[Rollout], Counter]:
    """The rollouts of all files, and how many were left out, by reason. ValueError, with the row, for what is no
    rollout, and for one of more tokens than the model's limit."""
    found, left_out, seen, before = [], Counter(), set(), None
    for file in files:
        rollouts, evaluated = [*read_file(file, read, limit, left_out)], evaluation_steps(file)
        for step, block in groupby(rollouts, key=lambda rollout: rollout.step):
            block = list(block)
            content = hash(str([rollout._replace(step=0, place="") for rollout in block]))
            if content == before or (step, content) in seen:  # a step that was written twice, or a file read twice
                left_out["repeated"] += len(block)
            elif step in evaluated:
                left_out["evaluation"] += len(block)
            else:
                found += block
            before = content
            seen.add((step, content))
    if not found:
        raise ValueError(f"{files[0]} holds no rollout" + " of training" * bool(left_out))
    if len({rollout.advantage is None for rollout in found}) > 1:
        raise ValueError("some rows have an advantage and others none: write it in all of them, or in none")
    return found, left_out


def read_file(file: Path, read: Reader, limit: int, left_out: Counter) -> Iterator[Rollout]:
    """The rollouts of a file, whose steps must ascend."""
    latest = -math.inf
    for place, parse in raw_rows(file):
        try:
            if (rollout := read(parse())) is None:
                left_out["evaluation"] += 1
                continue
            if rollout.step < latest:
                raise ValueError(f"step {rollout.step} comes after step {latest}: two runs in one file? Keep one of them")
            latest = rollout.step
            if (length := len(rollout.prompt) + len(rollout.tokens)) > limit:
                raise ValueError(f"it has {length} tokens, and the model takes {limit}")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, {place}: {error}") from None
        yield rollout._replace(place=f"{file}, {place}")


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a trainer's output folder by their steps, the first one first; none in a model's folder."""
    found = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()}
    return dict(sorted(found.items()))


def evaluation_steps(file: Path) -> set[int]:
    """The steps after which TRL evaluated, as its checkpoints beside a file of completions say: an evaluation replaces
    the last rows of that step's file by its own."""
    if file.suffix != ".parquet":
        return set()
    states = [path / "trainer_state.json" for path in (file.parents[1], *checkpoints(file.parents[1]).values())]
    return {row["step"] for state in states for row in read_json(state, missing={}).get("log_history", [])
            if any(name.startswith("eval_") for name in row)}


def by_step(rollouts: list[Rollout], compared: bool, left_out: Counter) -> tuple[dict[int, list[Rollout]], int, Counter]:
    """The rollouts of each step, group by group, and the size G of the groups that are kept, the most frequent one; a
    group has one prompt. compared: whether rewards are, for which one response is not enough."""
    groups, ids = {}, Counter((r.step, r.group) for r in rollouts if r.group is not None)
    single = len(ids) == len(rollouts) > 1
    base = all(TRAJECTORY.search(r.group) for r in rollouts) if single else False
    for r in rollouts:
        name = (TRAJECTORY.sub("", r.group) if base else None) if single else r.group
        groups.setdefault((r.step, name, tuple(r.prompt)), []).append(r)
    size = Counter(map(len, groups.values()))
    G = max(size, key=lambda n: (n > 1 or not compared, n * size[n]))
    steps, cut = {}, 0
    for (step, name, _), group in groups.items():
        if len(group) == G or name is None and len(group) % G == 0:  # a prompt that was asked in several groups
            cut += len(group) > G
            steps.setdefault(step, []).extend(group)
        else:
            left_out["other size"] += len(group)
    prompts = Counter((step, name) for step, name, _ in groups if name is not None)
    notes = Counter({"cut": cut, "several prompts": sum(n > 1 for n in prompts.values()),
                     "single": single and len(groups) < len(rollouts)})
    return dict(sorted(steps.items())), G, notes


# ------------------------------------------------------------------------------------------------------- rewards


def with_rewards(steps: dict[int, list[Rollout]], G: int, asked: str) -> tuple[dict[int, list[Rollout]], list[str]]:
    """The rollouts with their rewards, and what was taken for them. asked: columns, as --rewards has them."""
    every = [rollout for rollouts in steps.values() for rollout in rollouts]
    names = list(dict.fromkeys(name for rollout in every for name in rollout.columns))
    floats = [name for name in names if name in TOTALS or any(
        isinstance(rollout.columns.get(name), float | np.floating | Decimal) for rollout in every)]
    weights = asked_weights(asked, names) if asked else dict.fromkeys(reward_columns(every, floats, G), 1.0)
    steps = {step: [r._replace(reward=reward_of(r, weights)) for r in rollouts] for step, rollouts in steps.items()}
    said = [f"the reward is {' + '.join(f'{w:g} x {name}' for name, w in weights.items())}"] * (
        bool(asked) or not weights.keys() <= {*TOTALS})
    if others := [name for name in floats if name not in weights]:
        said.append(f"no part of the reward: {', '.join(others)} (--rewards NAME[=WEIGHT] ... takes others)")
    return steps, said


def asked_weights(asked: str, names: list[str]) -> dict[str, float]:
    """The weights of the columns that --rewards names; ValueError for one that is not among `names`."""
    weights = {}
    for word in asked.split():
        name, _, weight = word.partition("=")
        weights[name] = number_of(weight or 1, f"weight of {name} in --rewards")
        if name not in names:
            raise ValueError(f"--rewards names {name!r}; the columns with numbers are {', '.join(names)}")
    return weights


def reward_columns(rollouts: list[Rollout], floats: list[str], G: int) -> list[str]:
    """The columns whose sum is the reward: what agrees with the advantages, else `reward` or `score`, or the only one.
    TRL writes the reward functions first, and then whatever else was logged. ValueError where that leaves it open."""
    totals = [name for name in TOTALS if name in floats]
    if any(len({number_of(r.columns[name], name) for name in totals if name in r.columns}) > 1 for r in rollouts):
        raise ValueError("reward and score differ: name the one that was trained, such as --rewards score")
    known = [totals[:1]] if totals else [floats] if len(floats) == 1 else []
    for names in known + [floats[:n] for n in range(1, len(floats) + 1)]:
        if agrees([[r.columns.get(name) for name in names] for r in rollouts], [r.advantage for r in rollouts], G):
            return names
    if not known:
        raise ValueError(f"which columns are the reward? Name them, such as --rewards {' '.join(floats) or 'NAME'}, with "
                         "=WEIGHT behind one that counts otherwise")
    return known[0]


def agrees(rewards: list[list], advantages: list, G: int) -> bool:
    """Whether the advantages (B,), in groups of G, are what rewards (B, n) less a group's mean give, but for a factor:
    each group may be divided by its own deviation."""
    if None in advantages:
        return False
    total = np.nansum(np.array(rewards, dtype=float), 1)
    x, a = (torch.tensor(np.array(values, dtype=float)).view(-1, G) for values in (total, advantages))
    x, a = (values - values.mean(1, keepdim=True) for values in (x, a))
    slope = (x * a).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp(min=1e-12)
    return bool((slope >= 0).all() and ((a - slope * x).norm(dim=1) <= 0.01 + 0.001 * a.norm(dim=1)).all())


def reward_of(rollout: Rollout, weights: dict[str, float]) -> float:
    """The weighted sum of a rollout's columns; a reward function that gave None counts as 0, as in TRL."""
    values = {name: rollout.columns.get(name) for name in weights}
    try:
        real = {name: number_of(x, name) for name, x in values.items() if x is not None and (x == x or len(values) == 1)}
        if not real:
            raise ValueError(f"it has no {' or '.join(weights)}")
        return number_of(sum(weights[name] * x for name, x in real.items()), "reward")
    except ValueError as error:
        raise ValueError(f"{rollout.place}: {error}") from None


# ----------------------------------------------------------------------------------------------- values of a row


def agreed(row: dict, names: tuple[str, ...]) -> Any:
    """The value that a row has under one of the names, None for none; ValueError where it has several that differ."""
    values = {name: row[name] for name in names if row.get(name) is not None}
    if any(value != next(iter(values.values())) for value in values.values()):
        raise ValueError(f"its {' and its '.join(values)} differ: remove the wrong one")
    return next(iter(values.values()), None)


def number_of(value: Any, name: str) -> float:
    """A finite number, which older versions of verl write as text."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9.]+(e[-+]?[0-9]+)?\s*", value):
        value = float(value)
    value = number(value, f"its {name}")
    if not abs(value) <= 1e38:
        raise ValueError(f"its {name} must be a finite number, not {value}")
    return value


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
    """The messages of a conversation, none for a text; ValueError for anything else, and for more than role and content
    in one: templates differ in what they make of a tool's call or of reasoning."""
    if isinstance(value, str):
        return []
    if not (isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str)
                                                      and isinstance(m.get("content"), str) for m in value)):
        raise ValueError(f"its {name} is neither text nor messages with role and content")
    if others := sorted({key for m in value for key, x in m.items() if x and key not in ("role", "content")}):
        raise ValueError(f"a message of its {name} has {others[0]}: that needs ids")
    return value


def text_of(completion: Any, strict: bool) -> str | None:
    """A response's text, or that of its only message. If it is none: ValueError, or None where not strict."""
    try:
        messages = messages_of(completion, "completion")
        if len(messages) > 1:
            raise ValueError(f"its completion has {len(messages)} messages: several turns need ids")
        return messages[0]["content"] if messages else completion
    except ValueError:
        if strict:
            raise
    return None
