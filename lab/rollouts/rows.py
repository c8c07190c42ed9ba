"""Rows of other programs' rollouts: plain jsonl, TRL's completions, verl's dumps. Where they hold text alone, what was
assumed to make tokens of it is counted in `notes`.
"""
import re
from collections import Counter
from contextlib import suppress
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plumbing.chat import chatml, rendered
from plumbing.files import read_json
from plumbing.metrics import number
from plumbing.tokenizer import Tokenizer
from tasks.data import raw_rows

FIELDS = {"step": ("step",), "prompt": ("prompt", "input"), "completion": ("completion", "response", "output"),
          "advantage": ("advantage",), "group": ("group", "uid"),  # plain and TRL, verl
          "prompt_ids": ("prompt_ids",), "completion_ids": ("completion_ids", "response_ids"),
          "prompt_mask": ("prompt_mask",), "completion_mask": ("completion_mask", "response_mask")}
TAKEN = {name for names in FIELDS.values() for name in names}
TOTALS = ("reward", "score")  # the whole reward; another column may be a part of it
PART, EVALUATION = ("split", "mode", "phase"), re.compile("(?i)(eval|val|test|dev).*")  # rows that trained nothing,
FLAGS = ("is_eval", "eval", "evaluation", "is_validation", "validation")  # or where one of these is true
ROLE = re.compile(r"(?:\A|\n)(system|user|assistant)\n")  # what is left of ChatML without its special tokens
TRAJECTORY = re.compile(r"_[0-9]+_[0-9]+\Z")  # verl's uid is {prompt}_{response}_{output}
TURNS = "several turns can't be read"


class Rollout(NamedTuple):
    """One graded response."""

    step: int
    group: str | None  # its name in the file, if any
    prompt: list[int]
    tokens: list[int]  # of the response, its end token included
    end_assumed: bool  # whether the last token was not in the file, or may be padding
    advantage: float | None
    columns: dict[str, Any]  # its numbers, some of them rewards
    notes: Counter  # of what was assumed
    place: str = ""
    reward: float = 0.0
    success: bool = False


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a trainer's output folder by their steps, in order; none in a model's folder."""
    steps = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    return {int(step): steps[step] for step in sorted(filter(str.isdigit, steps), key=int)}


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


def evaluation_steps(file: Path) -> set[int]:
    """The steps after which TRL evaluated, by the checkpoints beside its completions/: the evaluation's rows replace
    the last ones of that step's file."""
    if file.suffix != ".parquet":
        return set()
    states = [path / "trainer_state.json" for path in checkpoints(file.absolute().parents[1]).values()]
    return {row["step"] for state in states for row in read_json(state, missing={}).get("log_history", [])
            if any(name.startswith("eval_") for name in row)}


def read_file(file: Path, read: "RowReader") -> tuple[dict[int, list[Rollout]], int]:
    """A file's rollouts by their steps, and the number of rows that are of an evaluation. ValueError, with the row, for
    what is no rollout."""
    steps, evaluated = {}, 0
    for place, parse in raw_rows(file):
        try:
            rollout = read(parse())
            if rollout and rollout.step < (latest := next(reversed(steps), rollout.step)):
                raise ValueError(f"step {rollout.step} comes after step {latest}: two runs in one file? Keep one")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, {place}: {error}") from None
        if rollout:
            steps.setdefault(rollout.step, []).append(rollout._replace(place=f"{file}, {place}"))
        evaluated += not rollout
    return steps, evaluated


def read_rollouts(files: list[Path], read: "RowReader") -> tuple[list[Rollout], Counter]:
    """The rollouts of all files, and how many were left out, by reason."""
    found, notes, seen, before = [], Counter(), set(), None
    for file in files:
        steps, evaluated = read_file(file, read)
        evaluations, notes["evaluation"] = evaluation_steps(file), notes["evaluation"] + evaluated
        for step, rollouts in steps.items():
            content = hash(str(sorted(str(rollout._replace(step=0, place="")) for rollout in rollouts)))  # in any order
            repeated = content == before or (step, content) in seen  # a step written twice, or a file read twice
            if repeated or step in evaluations:
                notes["repeated" if repeated else "evaluation"] += len(rollouts)
            else:
                found += rollouts
            before = content
            seen.add((step, content))
    if not found:
        raise ValueError(f"{files[0]} holds no rollout" + " of training" * bool(notes.total()))
    if len({rollout.advantage is None for rollout in found}) > 1:
        raise ValueError("some rows have an advantage and others none: write it in all of them, or in none")
    return found, notes


def in_groups(rollouts: list[Rollout], compared: bool, notes: Counter) -> tuple[list[Rollout], int]:
    """The rollouts, group by group in ascending steps, and the size G of the groups kept, the most frequent one. A
    group has one prompt. compared: whether rewards are, for which one response is not enough."""
    groups, found, ids = {}, [], Counter((r.step, r.group) for r in rollouts)
    single = len(ids) == len(rollouts)  # each names a response
    base = single and all(TRAJECTORY.search(r.group) for r in rollouts if r.group)
    for r in rollouts:
        name = r.group if r.group is None or not single else TRAJECTORY.sub("", r.group) if base else None
        groups.setdefault((r.step, name, tuple(r.prompt)), []).append(r)
    size = Counter(map(len, groups.values()))
    G = max(size, key=lambda n: (n > 1 or not compared, n * size[n]))
    prompts = Counter((step, name) for step, name, _ in groups if name is not None)
    notes.update({"several prompts": sum(n > 1 for n in prompts.values()), "size": G,
                  "single": single and len(groups) < len(rollouts)})
    for (_, name, _), group in groups.items():
        if fits := len(group) == G or name is None and len(group) % G == 0:  # a prompt may be asked in several groups
            found += group
        notes.update({"cut": fits and len(group) > G, "other size": 0 if fits else len(group)})
    return sorted(found, key=lambda rollout: rollout.step), G


def with_rewards(rollouts: list[Rollout], G: int, asked: str) -> tuple[list[Rollout], str]:
    """The rollouts with their rewards, and what was taken for them. asked: columns, as --rewards has them."""
    names = list(dict.fromkeys(name for rollout in rollouts for name in rollout.columns))
    fraction = lambda r, name: isinstance(r.columns.get(name), float | np.floating | Decimal)
    floats = [name for name in names if name in TOTALS or any(fraction(r, name) for r in rollouts)]
    weights = {}
    for name, _, weight in (word.partition("=") for word in asked.split()):
        weights[name] = number_of(weight or 1, f"weight of {name}")
        if name not in names:
            raise ValueError(f"--rewards names {name!r}; the columns with numbers are {', '.join(names)}")
    weights = weights or dict.fromkeys(reward_columns(rollouts, floats, G), 1.0)
    others = [name for name in floats if name not in weights]
    said = f"the reward is {' + '.join(f'{weight:g} x {name}' for name, weight in weights.items())}"
    said += f"; no part of it: {', '.join(others)} (--rewards NAME[=WEIGHT] ... takes others)" * bool(others)
    rewards = [reward_of(rollout, weights) for rollout in rollouts]
    middle = (min(rewards) + max(rewards)) / 2
    return ([r._replace(reward=reward, success=reward > middle) for r, reward in zip(rollouts, rewards)],
            f"{said}; a reward above {middle:g} counts as success")


def reward_columns(rollouts: list[Rollout], floats: list[str], G: int) -> list[str]:
    """The columns whose sum is the reward: those that agree with the advantages, else `reward` or `score`, or the only
    one. TRL writes the reward functions first, then whatever else was logged. ValueError where that leaves it open."""
    totals = [name for name in TOTALS if name in floats]
    if any({*TOTALS} <= r.columns.keys() and len({number_of(r.columns[n], n) for n in TOTALS}) > 1 for r in rollouts):
        raise ValueError("reward and score differ: name the one that was trained, such as --rewards score")
    known = [totals[:1]] if totals else [floats] * (len(floats) == 1)
    for names in known + [floats[:n] for n in range(1, len(floats) + 1)]:
        if agrees(rollouts, names, G):
            return names
    if not known:
        raise ValueError(f"which columns are the reward? Name them, such as --rewards {' '.join(floats) or 'NAME'}, "
                         "with =WEIGHT behind one that counts otherwise")
    return known[0]


def agrees(rollouts: list[Rollout], names: list[str], G: int) -> bool:
    """Whether the advantages, in groups of G, are the sum of these columns less its mean, but for a factor: each group
    may be divided by its own deviation."""
    if rollouts[0].advantage is None:
        return False
    total = [np.nansum([float(r.columns.get(name) or 0) for name in names]) for r in rollouts]
    x, a = (np.reshape(values, (-1, G)) for values in (total, [r.advantage for r in rollouts]))  # (groups, G)
    x, a = (values - values.mean(1, keepdims=True) for values in (x, a))
    slope = (x * a).sum(1, keepdims=True) / np.maximum((x * x).sum(1, keepdims=True), 1e-12)
    return bool((slope >= 0).all() and (np.abs(a - slope * x) <= 0.01).all())


def reward_of(rollout: Rollout, weights: dict[str, float]) -> float:
    """The weighted sum of a rollout's columns. A function that gave None counts as 0, as in TRL, unless all did."""
    values = {name: x for name in weights if (x := rollout.columns.get(name)) is not None}
    real = {name: x for name, x in values.items() if x == x} or values
    try:
        if not real:
            raise ValueError(f"it has no {' or '.join(weights)}")
        return number_of(sum(weights[name] * number_of(x, name) for name, x in real.items()), "reward")
    except ValueError as error:
        raise ValueError(f"{rollout.place}: {error}") from None


class RowReader:
    """Reads rows for the tokenizer of a folder, of at most `limit` tokens."""

    def __init__(self, folder: Path, limit: int):
        self.tokenizer, self.limit = Tokenizer(folder), limit
        named, padding = (self.tokenizer.library.token_to_id(self.tokenizer.named.get(f"{name}_token", ""))
                          for name in ("eos", "pad"))
        ends = self.tokenizer.end_tokens
        self.end = named if named in ends else ends[0]  # of a text without one
        self.filling = {*ends, padding} - {None}  # stands behind a response
        self.names = {self.tokenizer.library.id_to_token(token): token for token in self.filling}

    def __call__(self, row: Any) -> Rollout | None:
        """The rollout of a row, None where it is of an evaluation. ValueError for what is no rollout."""
        if not isinstance(row, dict):
            raise ValueError("it is no object")
        if (any(isinstance(row.get(name), str) and EVALUATION.fullmatch(row[name]) for name in PART)
                or any(row.get(name) is True for name in FLAGS)):
            return None
        given, notes = {field: x for field, names in FIELDS.items() if (x := agreed(row, names)) is not None}, Counter()
        lacking = [f for f in ("prompt", "completion") if f not in given and f"{f}_ids" not in given]
        columns = {name: x for name, x in row.items() if name not in TAKEN and x is not None
                   and (name in TOTALS or isinstance(x, int | float | np.number | Decimal))}
        if lacking or not columns:
            raise ValueError(f"it has no {[*lacking, 'reward'][0]}; its fields: {', '.join(map(repr, row))}"[:200])
        prompt, (tokens, assumed) = self.prompt(given, "input" in row, notes), self.response(given, notes)
        if not prompt or not tokens:
            raise ValueError("its prompt or completion has no token")
        if (length := len(prompt) + len(tokens)) > self.limit:
            raise ValueError(f"it has {length} tokens, and the model takes {self.limit}")
        if (step := number_of(given.get("step", 1), "step")) % 1:
            raise ValueError(f"its step must be a whole number, not {step:g}")
        advantage, group = given.get("advantage"), given.get("group")
        return Rollout(int(step), group if group is None else str(group), prompt, tokens, assumed,
                       advantage if advantage is None else number_of(advantage, "advantage"), columns, notes)

    def ids(self, given: dict, part: str, side: str) -> list[int] | None:
        """The tokens that a row has and its mask does not leave out, None without ids. ValueError where they
        are not the model's, and where the mask leaves out others than those on one side."""
        ids, mask, size = given.get(f"{part}_ids"), given.get(f"{part}_mask"), self.tokenizer.size
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids)):
            raise ValueError(f"its {part}_ids must be a list of tokens from 0 to {size - 1}, the last one of --model")
        if ids is None or mask is None:
            return ids
        if not isinstance(mask, list) or len(mask) != len(ids) or mask != sorted(mask, reverse=side == "right"):
            raise ValueError(f"its {part}_mask must be as long as its {part}_ids, and 0 on padding alone, on the "
                             f"{side}: {TURNS}")
        return [i for i, real in zip(ids, mask) if real]

    def prompt(self, given: dict, bare: bool, notes: Counter) -> list[int]:
        """The tokens of a prompt, without padding on their left."""
        ids, start = self.ids(given, "prompt", "left"), self.tokenizer.start[:1]
        if ids is None:
            ids = prompt_tokens(given["prompt"], bare, self.tokenizer, notes)
        first = 0 if "prompt_mask" in given else len([*takewhile(self.filling.__contains__, ids)])
        # The token that begins each text may be the padding, too: its last one stays.
        first = next((i for i in range(first) if ids[i : i + 1] == start != ids[i + 1 : i + 2]), first)
        notes["padding"] += first
        return ids[first:]

    def response(self, given: dict, notes: Counter) -> tuple[list[int], bool]:
        """The tokens of a response up to its end token, and whether that was assumed. ValueError where more follow."""
        ids, text = self.ids(given, "completion", "right"), None
        with suppress(*[ValueError] * (ids is not None)):  # several turns may stand beside ids
            text = text_of(given.get("completion"))
        found = self.cut(text) if ids is None else ids
        trailing = len([*takewhile(self.filling.__contains__, reversed(found))])
        stop = found.index(self.end) if self.end in found else len(found) - trailing
        behind = found[stop:]
        if not self.filling.issuperset(behind):
            raise ValueError(f"tokens stand behind the end token of its completion: {TURNS}")
        ended = [token for token in behind[:1] if token in self.tokenizer.end_tokens]
        # Where an end token fills up responses, too, the first one need not have been sampled.
        assumed = bool(ended) and "completion_mask" not in given and ended[0] == behind[-1] and (
            len(behind) > 1 or ended[0] != self.end)
        if ids is None:
            assumed, ended = assumed or not ended, ended or [self.end]
            notes.update({"lost": text.count("\ufffd"), "responses from text": 1, "tokens from text": stop + 1})
        elif ids and text is not None and self.letters(text) != self.letters(self.tokenizer.decode(ids[:stop])[0]):
            raise ValueError("its completion is not the text of its completion_ids: remove the wrong one")
        notes.update({"padding": max(len(behind) - len(ended), 0), "assumed": assumed})
        return found[:stop] + ended, assumed

    def cut(self, text: str) -> list[int]:
        """The tokens of a response's text, in which a special token's name stays characters, unless it is an end token
        or padding, with nothing else behind it."""
        text, *behind = re.split(f"({'|'.join(map(re.escape, self.names))})", text)
        if "".join(behind[1::2]).strip():
            raise ValueError(f"text stands behind {behind[0]} in its completion: {TURNS}")
        return [*self.tokenizer.encode("", text), *(self.names[name] for name in behind[::2])]

    def letters(self, text: str) -> str:
        """A text without what decoders treat differently: special tokens, white space and lost bytes."""
        return re.sub(r"[\s\ufffd]", "", self.tokenizer.names.sub("", text))


def agreed(row: dict, names: tuple[str, ...]) -> Any:
    """The value that a row has under one of the names, None for none; ValueError where it has several that differ."""
    given = [name for name in names if row.get(name) is not None]
    if any(row[name] != row[given[0]] for name in given):
        raise ValueError(f"its {' and its '.join(given)} differ: remove the wrong one")
    return row[given[0]] if given else None


def number_of(value: Any, name: str) -> float:
    """A finite number, which older versions of verl write as text."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9.]+(e[-+]?[0-9]+)?\s*", value):
        value = float(value)
    if not abs(value := number(value, f"its {name}")) <= 1e38:
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
    in a message: templates differ in what they make of a tool's call or of reasoning."""
    if isinstance(value, str):
        return []
    if not (isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str)
                                                      and isinstance(m.get("content"), str) for m in value)):
        raise ValueError(f"its {name} is neither text nor messages with role and content")
    if others := sorted({key for m in value for key, x in m.items() if x and key not in ("role", "content")}):
        raise ValueError(f"a message of its {name} has {others[0]}: that needs ids")
    return value


def text_of(completion: Any) -> str:
    """A response's text, or that of its only message."""
    messages = messages_of(completion, "completion")
    if len(messages) > 1:
        raise ValueError(f"its completion has {len(messages)} messages: several turns need ids")
    return messages[0]["content"] if messages else completion
