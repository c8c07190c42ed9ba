"""A task's file, found by its name or a path, and checks of what its functions return."""
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from plumbing.files import check_fields, require
from plumbing.metrics import number
from tasks.text import ROLES

REQUIRED = ("load", "check", "prompt", "grade", "roles", "show")  # what countdown_task.py says a task has


def load_task(name: str) -> ModuleType:
    """The module of a task: NAME_task.py beside train.py or in tasks/, or a file, where `name` ends in .py, which finds
    modules beside it. FileNotFoundError or ValueError where there is none, or it lacks a function that every task has.
    """
    dotted = [f"{name}_task", f"tasks.{name}_task"] if name.isidentifier() else []
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise FileNotFoundError(f"there is no task file {name}")
        spec = importlib.util.spec_from_file_location(f"the task {Path(name).stem}", name)  # nobody imports that name
        sys.path.append(str(Path(name).resolve().parent))  # last, so that math.py is nobody else's math
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
        spec.loader.exec_module(module)
    else:
        found = [*filter(importlib.util.find_spec, dotted)]
        require(found, f"there is no task {name}: --task takes the NAME of a file tasks/NAME_task.py, or a path that "
                "ends in .py")
        module = importlib.import_module(found[0])
    for function in REQUIRED:
        require(callable(getattr(module, function, None)),
                f"the task {name} has no function {function}, which every task has")
    parts = getattr(module, "PARTS", None)
    weights = isinstance(parts, dict) and parts and all(isinstance(weight, int | float) for weight in parts.values())
    require(parts is None or weights, f"the PARTS of the task {name} must be weights by name, such as "
            f"{{'answer': 1.0}}, not {parts!r:.50}")
    return module


def load_puzzles(task: ModuleType, count: int, path: str, eval_path: str = "") -> tuple[list, list]:
    """The training puzzles of a task, and `count` held-out ones. ValueError where one is no puzzle, or is in both.
    eval_path: a file of held-out puzzles. Then all others of the file `path` are trained on, not nine tenths."""
    check_data(path, eval_path)
    training = list(task.load("all" if path and eval_path else "train", path=path))
    heldout = load_heldout(task, count, path, eval_path)
    require(training and heldout, "the task has no puzzles to train on, or none held out")
    for puzzle in training + heldout:
        require(isinstance(getattr(puzzle, "id", None), str),
                f"the task's load returns puzzles without an id that is text, such as {puzzle!r:.50}")
    # What a model could memorize: the task's key, and the id, since its own puzzles and a file's may have other keys.
    key = getattr(task, "key", lambda puzzle: puzzle.id)
    known = {name for puzzle in heldout for name in (puzzle.id, key(puzzle))}
    if eval_path and len(heldout) > count:
        print(f"{count} of the {len(heldout)} puzzles in {eval_path} are measured: --eval_problems says how many")
        heldout = heldout[:count]
    require(len({puzzle.id for puzzle in heldout}) == len(heldout) <= count,
            f"the task's load returns more than the {count} held-out puzzles asked for, or one twice")
    both = {puzzle.id for puzzle in training if not known.isdisjoint((puzzle.id, key(puzzle)))}
    require(eval_path or not both, f"the task's puzzle {min(both, default='')} is held out, and trained on")
    apart = [puzzle for puzzle in training if puzzle.id not in both]
    require(apart, f"all puzzles to train on are in {eval_path}: name another file with --data or --eval_data")
    if both:
        print(f"{len(training) - len(apart)} of {len(training)} training puzzles are in {eval_path}: they are left out")
    return apart, heldout


def check_data(*paths: str) -> None:
    """FileNotFoundError or ValueError where a data file that is named is none, since a task's load may not look."""
    for file in map(Path, filter(None, paths)):
        if not file.is_file():
            folder = ", but a folder: name one of the files in it" if file.is_dir() else ""
            raise FileNotFoundError(f"there is no data file {file}{folder}")


def load_heldout(task: ModuleType, count: int, path: str, eval_path: str) -> list:
    """The held-out puzzles of a task: all of the file `eval_path`, else `count` of its own or of the file `path`."""
    check_data(path, eval_path)
    return list(task.load("all", path=eval_path) if eval_path else task.load("heldout", count, path))


def check_pieces(found: str | tuple, function: str) -> tuple[str, ...]:
    """The pieces of what a task's prompt or reply returned; ValueError unless that is text, or a tuple of texts.
    Only a reply may be empty."""
    pieces = (found,) if isinstance(found, str) else found
    texts = isinstance(pieces, tuple) and all(isinstance(piece, str) for piece in pieces)
    require(texts and (function != "prompt" or any(pieces)),
            f"the task's {function} must return text, not {found!r:.50}")
    return pieces


def read_weights(text: str) -> dict[str, float]:
    """The weights in `answer=1,format=0`; ValueError where that is none."""
    try:
        weights = {name: float(weight) for name, weight in (part.split("=") for part in text.split(",") if text)}
        require(all(map(math.isfinite, weights.values())), "")
    except ValueError:
        raise ValueError(f"--reward_weights {text} must be names and numbers, such as answer=1,format=0.1") from None
    return weights


def graded(grade: Any, weights: dict[str, float]) -> dict[str, float]:
    """What a task's `grade` returned, as floats, NaN for a further None, and the reward: the sum of weight * part.
    ValueError unless it has all that it should."""
    what = "what the task's grade returns"
    needed = dict.fromkeys((*weights, "answer", "format"), float)
    require(isinstance(grade, dict), f"{what} is {grade!r:.50}, but it must be an object with {', '.join(needed)}")
    for part in weights:
        require(part in grade, f"{what} has no {part}, of which the task's PARTS or --reward_weights make the reward "
                f"(a task without PARTS returns reward itself): it has {', '.join(grade)}")
    grade = {name: math.nan if value is None and name not in needed else number(value, f"{what}: {name}")
             for name, value in grade.items()}
    check_fields(grade, needed, what)
    require(0 <= grade["answer"] <= 1 and 0 <= grade["format"] <= 1,
            f"the task's grade returns {grade}: answer and format must be from 0 to 1")
    reward = sum(weight * grade[part] for part, weight in weights.items())
    require(abs(reward) <= 1e38, f"the task's grade returns {grade}: its reward is too large")  # for float32
    return grade | {"reward": reward}


def check_roles(found: tuple, length: int) -> tuple[np.ndarray, np.ndarray]:
    """What a task's roles returned; ValueError unless it is two arrays (L,), the roles and whether in the answer."""
    try:
        role, in_answer = found
        right = (role.shape == in_answer.shape == (length,) and role.dtype.kind in "iu" and in_answer.dtype == bool
                 and 0 <= role.min() and role.max() < len(ROLES))
    except (TypeError, ValueError, AttributeError):  # no two arrays
        right = False
    require(right, f"the task's roles must return two arrays with an entry for each of the {length} tokens: integers "
            f"from 0 to {len(ROLES) - 1}, and bools")
    return role, in_answer
