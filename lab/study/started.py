"""train.py, with the success of the start model taken from another run of its level, which has measured it already.

All runs of a level begin with the same model, and are measured on the same puzzles with the same random numbers, so
they have the same first row. For 0.5B parameters and 512 problems it costs five minutes of two cores.

    python -m lab.study.started runs/study-2/twenty/none-lr-5e-06-seed0 --mitigation ...       the flags of train.py
"""
import sys
from pathlib import Path

import train
from plumbing.runs import read_metrics


def main() -> None:
    """Train as the flags say."""
    metrics = read_metrics(Path(sys.argv[1]))
    row = {name: float(metrics[name][0]) for name in ("heldout_success", "heldout_stderr")}
    train.measure_start = lambda policy, heldout, s: {"step": 0} | row
    sys.argv[:2] = ["train.py"]
    train.main()


if __name__ == "__main__":
    main()
