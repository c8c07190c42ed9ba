"""Rows of rollouts as other programs write them, for bridges/rollouts.py: tokens, masks, rewards, advantages.

Known are the names of docs/trl.md, and what others call the same. What was put right, and each column that was not
read, is told.
"""
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bridges import own_modules

with own_modules():
    from plumbing.files import require
    from plumbing.metrics import number
    from plumbing.terminal import follow
    from plumbing.tokenizer import Tokenizer
    from rollout import Policy
    from tasks.data import raw_rows

OTHERS = {"global_step": "step", "advantages": "advantage", "uid": "group", "prompts": "prompt_ids",
          "responses": "completion_ids", "response_ids": "completion_ids"}  # what others call ours
# 1 on each token that counts: all of them must say so. TRL has 1 on a tool's tokens in the first, and 0 in the second.
MASKS = ("completion_mask", "tool_mask", "loss_mask", "response_mask", "env_mask", "action_mask")
READ = {"run", "credit", "step", "prompt_ids", "prompt_mask", "completion_ids", "reward", "rewards", "group", "advantage",
        *MASKS}


DIFFER = "not read: advantages that differ between the tokens of a response"


def read_rollouts(files: list[Path], policy: Policy) -> tuple[list, list[str]]:
    """The rollouts of all files, and what a reader must know of them. ValueError, with the row, for what is no rollout,
    and for a step that comes again; and where there is none, or only some have an advantage."""
    found, told = [], Counter()
    for file in files:
        latest = -math.inf
        for place, parse in follow(f"reading {file}", raw_rows(file)):
            try:
                rollout = parse_row(parse(), policy.tokenizer, policy.model.config, told)
                require(rollout.step >= latest,
                        f"step {rollout.step} comes after {latest}: two runs in one file? Or one resumed?")
            except ValueError as error:
                raise ValueError(f"{file}, {place}: {error}") from None
            latest = rollout.step
            found += [rollout] if any(rollout.tool_mask) else []
    require(found, f"{files[0]} holds no rollout")
    if DIFFER in told:  # then it is nobody's: some may look alike, as of one token
        for rollout in found:
            rollout.advantage = None
    require(len({r.advantage is None for r in found if r.reward == r.reward}) < 2,
            "some rows have an advantage and others none: write it in all of them, or in none")
    return found, [f"{what} ({count:,} rows)" for what, count in told.items()]


def parse_row(row: Any, tokenizer: Tokenizer, c: Any, told: Counter) -> SimpleNamespace:
    """The rollout of a row; a reward, or a part of it, that there was not is NaN. c: the model's config. told: counts
    what was put right. ValueError for what is no rollout."""
    require(isinstance(row, dict), "it is no object")
    there = {name: x for name, x in row.items() if x is not None and x == x}  # NaN is how a table says null
    given = {ours: there[name] for name, ours in OTHERS.items() if name in there} | there
    r = SimpleNamespace(**{"run": "", "credit": "", "step": 1, "advantage": None, "rewards": {}, "reward": math.nan} | given)
    check_tokens(given, c.vocab_size)
    for name in ("reward", "group"):
        require(name in given or name == "reward" and name in row,
                f"it has no {name}; its fields: {', '.join(map(repr, row))}"[:200])
    r.tool_mask = mask_of(given)
    take_padding(r, given, tokenizer, told)
    length = len(r.prompt_ids) + len(r.completion_ids)
    require(length <= c.max_position_embeddings,
            f"it has {length} tokens, and the model takes {c.max_position_embeddings}")
    r.advantage = scalar(r.advantage, given, told)
    r.step, r.advantage, r.reward = (finite(getattr(r, name), name) for name in ("step", "advantage", "reward"))
    require(r.step % 1 == 0, f"its step must be a whole number, not {r.step:g}")
    require(isinstance(r.rewards, dict), "its rewards must be numbers by name")
    r.rewards = {f"rewards/{name}": math.nan if x is None else finite(x, name) for name, x in r.rewards.items()}
    r.step, r.group = int(r.step), str(r.group)
    others = {name for name, ours in OTHERS.items() if name in there and given[ours] is not there[name]}
    told.update(f"not read: the column {name}" for name in row.keys() - READ - OTHERS.keys() | others)
    told.update(["left out: no token of theirs was sampled"] * (not any(r.tool_mask)))
    return r


def check_tokens(given: dict, V: int) -> None:
    """ValueError where a row has no tokens."""
    for name in ("prompt_ids", "completion_ids"):
        require(name in given, f"it has no {name}, and texts don't tell which tokens were sampled: record tokens with "
                "bridges/recorder.py, see docs/trl.md")
        tokens = given[name]
        require(isinstance(tokens, list) and (tokens or name == "completion_ids")
                and all(type(token) is int and 0 <= token < V for token in tokens),
                f"its {name} must be a list of tokens from 0 to {V - 1}, the last one of --model")


def mask_of(given: dict) -> list[int]:
    """1 for each token of the completion that the policy sampled, by all masks that a row has; all, without one."""
    found = [1] * len(given["completion_ids"])
    for name in MASKS:
        mask = given.get(name, found)
        require(isinstance(mask, list) and len(mask) == len(found) and {*mask} <= {0, 1},
                f"its {name} must have 1 for each token that was sampled, and 0 for each other one of completion_ids")
        found = [a * int(b) for a, b in zip(found, mask)]
    return found


def take_padding(r: SimpleNamespace, given: dict, tokenizer: Tokenizer, told: Counter) -> None:
    """Take off what stands before a prompt, or behind the last sampled token, as padding."""
    number_of = lambda name: tokenizer.library.token_to_id(tokenizer.named.get(name, ""))
    pad, start, ends = number_of("pad_token"), number_of("bos_token"), {*tokenizer.end_tokens}
    prompt, completion = r.prompt_ids, r.completion_ids
    if "prompt_mask" in given:
        mask = given["prompt_mask"]
        require(isinstance(mask, list) and len(mask) == len(prompt) and {*mask} <= {0, 1},
                "its prompt_mask must have 1 for each token of prompt_ids that is no padding, and 0 for each other one")
        r.prompt_ids = [token for token, real in zip(prompt, mask) if real]
    else:
        before, behind = (next((i for i, token in enumerate(row) if token != pad), 0) for row in (prompt, prompt[::-1]))
        r.prompt_ids = prompt[max(0, before - (pad == start)) : len(prompt) - behind]  # it may begin with that token
    if not {*MASKS} & given.keys() and (stop := next((i + 1 for i, x in enumerate(completion) if x in ends), 0)):
        require({*completion[stop:]} <= {pad, *ends}, "tokens stand behind the end token of its completion_ids: another "
                "turn? Write a tool_mask")
        r.tool_mask[stop:] = [0] * (len(completion) - stop)
    stop = max((i + 1 for i, mine in enumerate(r.tool_mask) if mine), default=0)  # a reply that nothing answers
    begin = next((i for i, x in enumerate(completion[:stop]) if r.tool_mask[i] or x != pad), 0)
    r.completion_ids, r.tool_mask = completion[begin:stop], r.tool_mask[begin:stop]
    if len(r.prompt_ids) < len(prompt) or stop - begin < len(completion):
        told["padding, or a reply at the end, was taken off"] += 1


def scalar(advantage: Any, given: dict, told: Counter) -> Any:
    """A response's advantage, which may be written at each of its tokens; None where these differ."""
    if not isinstance(advantage, list):
        return advantage
    mask = mask_of(given)
    require(len(advantage) == len(mask), "its advantage must be a number, or one for each of completion_ids")
    found = {x for x, mine in zip(advantage, mask) if mine}
    told.update([DIFFER] * (len(found) > 1))
    return found.pop() if len(found) == 1 else None


def finite(value: Any, name: str) -> float | None:
    """A number that float32 can hold, None or NaN; ValueError for anything else."""
    if value is None or value != value:
        return value
    require(abs(value := number(value, f"its {name}")) <= 1e38, f"its {name} must be a finite number, not {value}")
    return value
