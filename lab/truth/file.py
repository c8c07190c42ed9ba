"""Reads ground_truth.npz, the file that lab/truth/measure.py writes."""
import json
from pathlib import Path

import numpy as np

from plumbing.files import check_fields, read_arrays

COLUMNS = ("position", "group", "logprob", "entropy", "logit_grad", "advantage", "reward", "success", "packets",
           "value", "value_error", "a_star", "a_star_error", "kind", "reachable", "piece", "credits", "methods",
           "kinds", "prompts", "settings", "complete")


def read_truth(file: Path, columns: tuple[str, ...] = COLUMNS) -> dict[str, np.ndarray]:
    """The arrays of a ground_truth.npz: columns (N,) with one row per token, credits (M, N), and names.

    ValueError in one sentence when the file is missing, damaged or unfinished, or lacks one of the `columns`.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist; lab/truth/measure.py writes it")
    truth = read_arrays(file, columns)
    N, names = truth["position"].size, {"methods", "kinds", "prompts", "settings", "complete", "sampled"}
    for name in truth.keys() - names:
        shape = (len(truth["methods"]), N) if name == "credits" else (N, *truth[name].shape[1:])
        kind, may_be_nan = truth[name].dtype.kind, name in ("credits", "a_star_error", "value_error")
        wrong = kind == "f" and (np.isinf(truth[name]) | (np.isnan(truth[name]) & (not may_be_nan))).any()
        if not N or truth[name].shape != shape or kind not in ("U" if name == "piece" else "biuf") or wrong:
            raise ValueError(f"{file}: {name} is not a column of finite numbers, one for each token")
    try:
        settings = json.loads(str(truth["settings"]))
    except ValueError:
        settings = None
    types = {"seed": int, "questions": int, "max_new_tokens": int, "model": str, "data": str}
    check_fields(settings, types, f"{file}: settings")
    begins = truth["position"] == 0  # (N,)
    counts = {"kinds": truth["kind"].max() + 1, "prompts": begins.sum()}
    if wrong := [name for name, count in counts.items() if len(truth[name]) < count]:
        raise ValueError(f"{file}: {wrong[0]} has fewer names than the columns speak of")
    if truth["kind"].min() < 0 or "response" in truth and (truth["response"] != begins.cumsum() - 1).any():
        raise ValueError(f"{file} is damaged: a kind below 0, or responses that are not counted from 0")
    if not truth["complete"] or truth["complete"].dtype != bool:
        raise ValueError(f"{file} lacks some rollouts: run the command that started it again")
    return truth
