"""Silent groups: all of their responses earned the same, so no token of them has credit, and none has a gradient.

A group of G independent rewards, 1 with probability p and else 0, is silent with probability p^G + (1 - p)^G: least at
p = 1/2. So silent groups multiply where training makes responses alike, and become fewer where it brings p near 1/2.

Run it:  python -m lab.gradients.silent        writes silent.md and silent.png beside this file, from published arrays
"""
from pathlib import Path

import numpy as np

from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import PALETTE, Table, new_figure
from plumbing.runs import read_metrics

ROOM = Path(__file__).parent
REAL = ROOM.parent / "real" / "data"
RUNS = {"GRPO, Countdown": (REAL / "original", 4), "RLOO, word problems, seed 0": (REAL / "learning" / "none-seed0", 4),
        "RLOO, word problems, seed 1": (REAL / "learning" / "none-seed1", 4),
        "RLOO, word problems, seed 2": (REAL / "learning" / "none-seed2", 4),
        "RLOO, SmolLM2 after a warm start": (REAL / "warm", 12)}  # and the groups of a step
MEAN = 5  # steps


def silent(run: Path, groups: int) -> dict[str, np.ndarray]:
    """By step (S,): success, the share of silent groups and, where the credit log is published, of silent tokens."""
    metrics, file = read_metrics(run), run / "credit.npz"
    found = {"success": metrics["success"][1:], "silent groups": metrics["zero_variance_groups"][1:] / groups}
    if file.is_file():
        log = dict(np.load(file))
        found["silent tokens"] = (np.bincount(log["step"], log["credit"] == 0) / np.bincount(log["step"]).clip(1))[1:]
    return found


def table(runs: dict[str, dict[str, np.ndarray]]) -> Table:
    """The first and the last ten steps of every run."""
    columns = ("success", "silent groups", "silent tokens")
    rows = [[name, f"{RUNS[name][1]}", *(f"{found[column][part].mean():.1%}" if column in found else ""
                                         for column in columns for part in (slice(10), slice(-10, None)))]
            for name, found in runs.items()]
    return Table("Silent groups", "Shares of the first ten steps, then of the last ten.", [
        "run", "groups a step", *(f"{column}, {when}" for column in columns for when in ("first", "last"))], rows)


def draw(runs: dict[str, dict[str, np.ndarray]], file: Path) -> None:
    """Silent groups and tokens by step, means of five steps."""
    figure, axes = new_figure(2, 3.4, sharey=True)
    for (name, found), colour in zip(runs.items(), (PALETTE[0], *[PALETTE[1]] * 3, PALETTE[2])):
        for axis, column in zip(axes, ("silent groups", "silent tokens")):
            if column in found:
                share = np.convolve(found[column], np.ones(MEAN) / MEAN, "valid")
                axis.plot(np.arange(len(share)) + 1 + MEAN // 2, 100 * share, color=colour, label=name,
                          linestyle={"1": "--", "2": ":"}.get(name[-1], "-"))
    for axis, what in zip(axes, ("Groups", "Tokens")):
        axis.set(xlabel="step", ylabel="% of the step", title=f"{what} without a gradient", ylim=(-2, 103))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file)


@one_sentence()
def main() -> None:
    """Write silent.md and silent.png."""
    new_parser(description=__doc__).parse_args()
    runs = {name: silent(*where) for name, where in RUNS.items()}
    (ROOM / "silent.md").write_text(str(table(runs)), encoding="utf-8")
    draw(runs, ROOM / "silent.png")
    print(f"wrote {ROOM / 'silent.md'} and silent.png")


if __name__ == "__main__":
    main()
