"""The run folder: what a run writes, and what it resumes from.

    config.json metrics.csv credit/ samples.txt checkpoint/ checkpoints/ final.json state.pt

checkpoint/ and state.pt are written every --state_every steps. A run that was killed or interrupted resumes from the
step of its state.pt: the logs are cut back to it, and the rest of the run is the same as without the interruption.
"""
import csv
import os
import platform
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from plumbing.files import read_json, replace_file, write_json
from plumbing.metrics import COLUMNS
from plumbing.processes import leads, wait_for_all
from plumbing.runs import read_final

STATE, LOGS = "state.pt", ("metrics.csv", "samples.txt")
UNNAMED = {"mitigation", "model", "data", "out", "seed", "steps", "device"}  # not among the flags in a folder's name


def default_folder(mitigation: str, seed: int, changed: dict) -> Path:
    """runs/<mitigation>[-<flag><value> for each flag that was changed]-seed<seed>."""
    shown = changed | ({"task": Path(changed["task"]).stem} if "task" in changed else {})  # it may be a path
    flags = [f"{name}{value}" for name, value in shown.items() if name not in UNNAMED]
    return Path("runs") / "-".join([mitigation, *flags, f"seed{seed}"])


def open_run(run: Path, settings: Any, hyper_parameters: dict, learners: dict, resume: bool) -> int:
    """Create the run folder, or load the state of a run to resume. Returns how many steps are done.

    learners: everything that changes from step to step, by name; each has state_dict() and load_state_dict().
    ValueError when the folder of a new run exists, and when there is nothing to resume.
    """
    if not resume:
        start_run(run, asdict(settings), hyper_parameters, Path(settings.model))
        return 0
    state = load_state(run)
    check_unfinished(run, state["step"], settings.steps)
    if state["step"] > 0:
        restore(run, state, learners)
    reopen_run(run, state, settings.steps)
    return state["step"]


def start_run(run: Path, settings: dict, hyper_parameters: dict, model_folder: Path) -> None:
    """Create the folder with config.json, an empty metrics.csv and the checkpoint's tokenizer, all of it or nothing."""
    if run.exists():
        raise ValueError(f"{run} exists: continue it with --resume {run}, remove it, or choose another --out or --seed")
    wait_for_all()  # every process must have looked before the first one creates it
    if not leads():
        return
    part = run.with_name(run.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "credit").mkdir(parents=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    write_json(part / "config.json", {"settings": settings, "method": hyper_parameters, "versions": versions,
                                      "command": shlex.join(["python"] + sys.argv)})
    append_row(part, None)
    copy_tokenizer(model_folder, part / "checkpoint")
    part.rename(run)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, so that a checkpoint is a complete model folder."""
    target.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / file).is_file():
            shutil.copy(source / file, target / file)


# ------------------------------------------------------------------------------------------------------ logs


def append_row(run: Path, row: dict | None) -> None:
    """Add a row to metrics.csv; None writes the header. A column that was not measured stays empty."""
    with (run / "metrics.csv").open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader() if row is None else writer.writerow(row)


def write_samples(run: Path, step: int, batch) -> None:
    """Append the first response to each of three puzzles, and its reward, to samples.txt."""
    G = len(batch.text) // len(batch.puzzles)
    with (run / "samples.txt").open("a", encoding="utf-8") as file:
        for q, puzzle in enumerate(batch.puzzles[:3]):
            i = q * G
            file.write(f"=== step {step}  {batch.task.show(puzzle)}  "
                       f"reward {batch.reward[i]:.2f}  advantage {batch.advantage[i]:+.2f}\n{batch.text[i]}\n\n")


# ----------------------------------------------------------------------------------------------------- state


def save(run: Path, step: int, settings: Any, write_weights: Callable[[Path], object], learners: dict) -> None:
    """Write the checkpoints and the state that are due at this step. write_weights fills a model folder."""
    if settings.checkpoint_every and step % settings.checkpoint_every == 0:
        folder = run / "checkpoints" / f"step-{step:06d}"
        copy_tokenizer(run / "checkpoint", folder)
        write_weights(folder)
    if step == settings.steps or settings.state_every and step % settings.state_every == 0:
        write_weights(run / "checkpoint")
        save_state(run, step, learners)


def save_state(run: Path, step: int, learners: dict) -> None:
    """Write the state of all learners, and how long the logs are, to one file."""
    lengths = {name: (run / name).stat().st_size for name in LOGS if (run / name).is_file()}
    states = {name: learner.state_dict() for name, learner in learners.items()}
    replace_file(run / STATE, lambda part: torch.save({"step": step, "lengths": lengths, "learners": states}, part))


def load_state(run: Path) -> dict:
    """Read what save_state wrote. Step 0 where the run has no state yet; ValueError for a broken or foreign file."""
    if not (run / STATE).is_file():
        return {"step": 0, "lengths": {}, "learners": {}}
    try:
        state = torch.load(run / STATE, map_location="cpu", weights_only=True)
        return {"step": int(state["step"]), "lengths": dict(state["lengths"]), "learners": dict(state["learners"])}
    except Exception:  # a torn, foreign or unsafe file shows itself in many ways
        raise ValueError(f"{run / STATE} is broken or was not written by train.py: remove it to resume from the start "
                         "of the run") from None


def check_unfinished(run: Path, done: int, steps: int) -> None:
    """ValueError when a run has nothing left to do."""
    if done > steps:
        raise ValueError(f"{run} already has {done} steps, more than --steps {steps}")
    if read_final(run).get("step") == steps:
        raise ValueError(f"{run} has finished its {steps} steps: pass a larger --steps to continue it")


def restore(run: Path, state: dict, learners: dict) -> None:
    """Load the state of each learner. ValueError when the file belongs to another model."""
    try:
        for name, learner in learners.items():
            learner.load_state_dict(state["learners"][name])
    except (KeyError, TypeError, RuntimeError, ValueError):
        raise ValueError(f"{run / STATE} does not fit this run's model: put back the one that it wrote") from None


def reopen_run(run: Path, state: dict, steps: int) -> None:
    """Cut the logs of a run back to its state, and record how many steps are wanted now."""
    wait_for_all()  # every process must have read the folder before the first one changes it
    if not leads():
        return
    (run / "final.json").unlink(missing_ok=True)
    config = read_json(run / "config.json")
    config["settings"]["steps"] = steps
    write_json(run / "config.json", config)
    for path in (*(run / "credit").glob("step-*.npz"), *(run / "checkpoints").glob("step-*")):
        if int(path.stem.removeprefix("step-")) > state["step"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in LOGS:
        if (run / name).is_file():
            os.truncate(run / name, state["lengths"].get(name, 0))
    if state["step"] == 0:
        append_row(run, None)
