"""Run folders read back: config.json, metrics.csv, credit/ and, of a finished run, final.json."""
import csv
from pathlib import Path

import numpy as np

from plumbing.files import check_fields, checksum, read_arrays, read_json, require
from plumbing.metrics import COLUMNS, CREDIT_LOG

OLD_NAMES = {"answers": "responses"}  # of settings, which older commands and runs have
ESSENTIAL = ("step", "loss", "grad_norm", "seconds", "credit_checksum", "heldout_success", "heldout_stderr")
GONE = ("reading",)  # settings that older runs have, and that no longer change anything
# Settings that a resumed run may change: they say when something is measured or kept, or change results by rounding.
FREE = ("steps", "eval_every", "pass_at", "state_every", "checkpoint_every", "micro_batch",
        "checkpoint_activations", "device", "optimizer_device")
PATHS = ("model", "adapter", "data", "eval_data", "task")  # what they name counts, not where it is


def read_metrics(run: Path, length: int | None = None) -> dict[str, np.ndarray]:
    """metrics.csv, or its first `length` bytes, as columns, NaN where nothing was measured; ValueError if damaged."""
    file = run / "metrics.csv"
    if not file.is_file():
        problem = "it has no metrics.csv" if run.is_dir() else "there is none (a changed flag is part of a run's name)"
        raise FileNotFoundError(f"{run} is not a run folder: {problem}")
    try:
        header, *rows = list(csv.reader(file.read_bytes()[:length].decode().splitlines())) or [[]]
        for line, row in enumerate(rows, 2):
            require(len(row) == len(header), f"line {line} is not as long as the header")
        table = np.array([[float(cell or "nan") for cell in row] for row in rows]).reshape(len(rows), len(header))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file} is no table of numbers ({error}): is it damaged?") from None
    metrics = dict(zip(header, table.T))
    for name in ESSENTIAL:
        require(name in header, f"{file} has no column {name}: was it written by train.py?")
    require(rows, f"{file} has no rows: the run was stopped before its first measurement")
    require(np.array_equal(metrics["step"], np.arange(len(rows))), f"{file} is damaged: its steps are not 0, 1, 2, ...")
    return {name: np.full(len(rows), np.nan) for name in COLUMNS} | metrics  # NaN: columns that older runs lack


def read_credit(run: Path, metrics: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The credit log of each step in metrics.csv; ValueError where one is missing, lacks a column of the first, or is
    not of this run. A number that all lack, as an older run may, is NaN, and said."""
    steps, needed = [], [name for name, kind in CREDIT_LOG.items() if kind != np.float32 or name == "credit"]
    for step, expected in enumerate(metrics["credit_checksum"][1:], 1):
        file = run / "credit" / f"step-{step:06d}.npz"
        require(file.is_file(), f"there is no {file}, but metrics.csv has that step")
        require(checksum(file) == expected,
                f"{file} is not the one of metrics.csv: was it changed, or is it another run's?")
        steps.append(read_arrays(file, steps[0] if steps else needed))
    if lacking := [name for name in CREDIT_LOG if steps and name not in steps[0]]:
        print(f"the credit log of {run} has no {', '.join(lacking)}: it is taken for NaN, as of an older version")
    return [{name: np.full(len(step["step"]), np.nan, np.float32) for name in lacking} | step for step in steps]


def heldout(metrics: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps at which held-out success was measured, the success, and its standard error."""
    measured = ~np.isnan(metrics["heldout_success"])
    return tuple(metrics[name][measured] for name in ("step", "heldout_success", "heldout_stderr"))


def renamed(settings: dict) -> dict:
    """Settings by their present names, without those that are gone."""
    return {OLD_NAMES.get(name, name): value for name, value in settings.items() if name not in GONE}


def read_config(run: Path) -> dict:
    """config.json of a run. ValueError where it is not what a run writes."""
    file = run / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no config.json")
    config = read_json(file)
    check_fields(config, {"settings": dict, "method": dict, "inputs": dict}, file)
    check_fields(config["settings"], {"mitigation": str, "seed": int, "steps": int}, file)
    config["settings"] = renamed(config["settings"])
    return config


def is_finished(run: Path) -> bool:
    """Whether a run took all its steps and was measured after them."""
    final = read_json(run / "final.json", missing={})
    s = read_config(run)["settings"] if final else {}
    return bool(final) and final["step"] == s["steps"] and (s["pass_at"] == 0 or f"pass@{s['pass_at']}" in final)
