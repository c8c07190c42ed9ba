"""Reads ground_truth.npz, the file that lab/truth/measure.py writes."""
from pathlib import Path

import numpy as np

from plumbing.files import read_arrays


def read_truth(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a ground_truth.npz: columns (N,) with one row per token, credits (M, N), and names. ValueError in
    one sentence when the file is missing, damaged or unfinished."""
    truth = read_arrays(file, ("complete",))
    if not truth["complete"]:
        raise ValueError(f"{file} lacks some rollouts: run the command that started it again")
    return truth


def by_response(truth: dict) -> list[np.ndarray]:
    """The rows (L,) of each of the B responses."""
    return np.split(np.arange(len(truth["position"])), np.flatnonzero(truth["position"] == 0)[1:])
