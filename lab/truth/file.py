"""Reads ground_truth.npz, the file that lab/truth/measure.py writes."""
from pathlib import Path

import numpy as np

from plumbing.files import read_arrays

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
    N, names = len(np.atleast_1d(truth["position"])), {"methods", "kinds", "prompts", "settings", "complete", "sampled"}
    for name in truth.keys() - names:
        per_token = truth[name].shape[-1:] if name == "credits" else truth[name].shape[:1]
        typed = truth[name].dtype.kind in ("U" if name == "piece" else "biuf")
        if per_token != (N,) or not typed or truth[name].dtype.kind == "f" and np.isinf(truth[name]).any():
            raise ValueError(f"{file}: {name} is not a column of finite numbers, one for each token")
    counts = {"kinds": truth["kind"].max() + 1, "methods": len(truth["credits"]),
              "prompts": (truth["position"] == 0).sum()}
    if wrong := [name for name, count in counts.items() if len(truth[name]) < count]:
        raise ValueError(f"{file}: {wrong[0]} has fewer names than the columns speak of")
    if not truth["complete"] or truth["complete"].dtype != bool:
        raise ValueError(f"{file} lacks some rollouts: run the command that started it again")
    return truth
