"""The pictures that the documents' appendices are words about, for the toy: experiments 1 and 2, contribution over a
run of GRPO and its histogram, and the singular values of a gradient. As there, tags count as filler.

Run it:  python -m lab.original.pictures      from toy.csv and rank.csv (by rows.py of 53eb533) and lab/study/runs.csv
"""
import csv
from pathlib import Path

import numpy as np

from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import GREY, PALETTE, new_figure, t_estimate

ROOM = Path(__file__).parent
SUMS = ("tokens", "contribution", "squares", "size", "log p")  # columns of toy.csv: sums over some tokens
EDGES = np.arange(-10.25, 10.5, 0.5)  # of the histogram; the outermost bins hold all beyond
CREDITS = ("GRPO", "true credit, A*", "random, A · Exp(1)", "noise, no reward")
COLOURS = (GREY, *PALETTE)
EXPERIMENTS = {  # by title: their arms, by label
    "No discount's mean ends above GRPO's": {"GRPO, discount 1": "none",
                                             "discount 0.75": "outcome_conditional think_discount=0.75",
                                             "discount 0.5": "outcome_conditional",
                                             "discount 0.25": "outcome_conditional think_discount=0.25"},
    "With inverse log p, all runs end below the start": {"GRPO": "none",
                                                         "epsilon 0.5": "inverse_logprob epsilon=0.5",
                                                         "epsilon 0.1": "inverse_logprob",
                                                         "epsilon 0.01": "inverse_logprob epsilon=0.01"}}


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a .csv."""
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def draw_toy(sums: dict) -> None:
    """Contribution over training, and its histogram."""
    figure, (left, right) = new_figure(2, 3.6)
    for kind, colour in (("filler", PALETTE[1]), ("reasoning", PALETTE[0])):
        n, x, _, size, _ = np.stack([*sums["steps", kind].values()], 1)  # (steps,) each
        left.plot(np.arange(len(n)) + 1, size / n, color=colour, label=f"{kind}, mean size")
        left.plot(np.arange(len(n)) + 1, x / n, color=colour, linestyle=":", label=f"{kind}, mean")
        right.stairs([x[0] for x in sums["histogram", kind].values()], EDGES, color=colour, label=kind, linewidth=1.5)
    small = sums["histogram", "all"]["0.0"][0] / sum(x[0] for x in sums["histogram", "all"].values())
    left.set(xlabel="step", ylabel="contribution, credit · log p", ylim=(0, 0.55),
             title="Reasoning gets more, all along")
    right.set(xlabel="contribution, credit · log p", ylabel="tokens", yscale="log",
              title=f"The size is below 0.25 on {small:.0%} of tokens")
    right.set_xticks((-10, -5, 0, 5, 10), ("≤ −10", "−5", "0", "5", "≥ 10"))
    right.yaxis.set_major_formatter("{x:,.0f}")
    left.legend(ncols=2, loc="upper center", fontsize=9)
    right.legend()
    figure.savefig(ROOM / "toy.png")


def draw_rank(rows: list[dict[str, str]]) -> None:
    """Singular values of a group's gradients, responses x parameters, and of a step's gradient of down_proj."""
    figure, axes = new_figure(2, 3.6)
    for axis, matrix in zip(axes, ("responses x parameters", "down_proj")):
        for credit, colour in zip(CREDITS, COLOURS):
            own = [row["values"] for row in rows if (row["matrix"], row["credit"]) == (matrix, credit)]
            s = np.array([values.split() for values in own], float)  # (groups, n)
            share = s / s.sum(1, keepdims=True)  # (groups, n)
            rank = t_estimate(np.exp(-(share * np.log(np.where(share > 0, share, 1))).sum(1)))
            axis.plot(np.arange(s.shape[1]) + 1, (s / s[:, :1]).mean(0), "o-", markersize=3, color=colour,
                      label=f"{credit}: {rank.value:.2f}" + f" ± {rank.high - rank.value:.2f}" * (len(s) > 1))
        axis.set(xlabel="singular value, from the largest", ylabel="share of the largest", ylim=(0, 1.03))
        axis.legend(title="effective rank")
    axes[0].set_title("A group of 8: rank above 5 with each of these")
    axes[1].set(title="One step's down_proj: true credit has the least", xlim=(0, 40.5))
    figure.savefig(ROOM / "rank.png")


def draw_learning() -> None:
    """Held-out success by step of the documents' experiments 1 and 2."""
    rows = read_rows(ROOM.parent / "study" / "runs.csv")
    figure, axes = new_figure(2, 3.6, sharey=True)
    for axis, (title, arms) in zip(axes, EXPERIMENTS.items()):
        for (label, method), colour in zip(arms.items(), COLOURS):
            curves = np.array([[float(point.split(":")[1]) for point in row["curve"].split()] for row in rows if (
                row["version"], row["level"], row["setting"], row["method"]) == ("2", "easy", "", method)
                and int(row["seed"]) < 3])  # (3, 5)
            axis.plot(range(0, 101, 25), 100 * curves.mean(0), color=colour, label=label)
            axis.plot(range(0, 101, 25), 100 * curves.T, "o", color=colour, markersize=3, alpha=0.7)
        axis.set(xlabel="step", title=title)
        axis.legend()
    axes[0].set_ylabel("held-out success, %")
    figure.savefig(ROOM / "learning.png")


def read_toy() -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """The sums (5,) of toy.csv, by table and type, then by part."""
    found = {}
    for row in read_rows(ROOM / "toy.csv"):
        found.setdefault((row["table"], row["type"]), {})[row["part"]] = np.array([float(row[name]) for name in SUMS])
    return found


@one_sentence()
def main() -> None:
    """Draw the three."""
    new_parser(description=__doc__).parse_args()
    draw_toy(read_toy())
    draw_rank(read_rows(ROOM / "rank.csv"))
    draw_learning()
    print(f"wrote toy.png, rank.png and learning.png in {ROOM}")


if __name__ == "__main__":
    main()
