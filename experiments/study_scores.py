"""Does credit closer to the truth learn more? Scores of each method before training, beside what it learned.

The scores are read from the tables that experiments/ground_truth.py and experiments/gradients.py wrote to results/. The
tables and the picture here are part of the study: python -m experiments.study --tables
"""
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import FixedLocator

from analyze import COLOURS, JUDGED
from experiments.correlation import spearman, with_errors, without_two
from plumbing.report import Estimate, Table, cell, new_figure, save_figure, t_estimate
from plumbing.runs import Group

SCORES = ("truth-scores.md", "gradients.md")


class Score(NamedTuple):
    """A measure of a method's credit that is known before training."""

    table: str  # title of its table in one of SCORES
    column: str  # its column there
    meaning: str
    name: str  # its column in the study's tables


COSINE, RANK, WITHIN, SOLVER, SIGNAL = MEASURED = (
    Score("Credit against A*, all tokens", "cosine of update", "cosine of its update with that of A*, 256 responses",
          "cosine with A*"),
    Score("Credit against A*, all tokens", "Spearman", "rank correlation with A*, all tokens", "rank, all tokens"),
    Score("Credit against A* and the solver, within responses", "Spearman", "rank correlation with A* within responses",
          "rank in response"),
    Score("Credit against A* and the solver, within responses", "solver", "rank correlation with the solver's verdict",
          "solver"),
    Score("Noise and bias of each method's gradient", "signal to noise",
          "signal to noise of its gradient, 16 batches of 48 responses", "signal to noise"))

Scores = dict[str, dict[Score, Estimate]]  # by method


def read_published(file: Path) -> str:
    """The text of a file in results/, beside the rows of the study."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: copy it there from results/")
    return file.read_text(encoding="utf-8")


def read_scores(folder: Path) -> Scores:
    """The scores of each method, from the tables of SCORES in a folder."""
    scores, columns, title = {}, [], ""
    for line in "\n".join(read_published(folder / name) for name in SCORES).splitlines():
        title = line[3:] if line.startswith("## ") else title
        cells = [text.strip() for text in line.strip("|").split("|")]
        if cells[0] == "method":
            columns = cells
        elif len(cells) == len(columns):
            for score in (score for score in MEASURED if score.table == title):
                numbers = re.findall(r"-?\d+\.\d+", cells[columns.index(score.column)])
                scores.setdefault(cells[0], {})[score] = Estimate(*map(float, numbers or ["nan"]))
    return scores


def score_of(label: str, scores: Scores, score: Score) -> Estimate:
    """A method's score, whatever flags its label names; NaN where it has none."""
    return scores.get(label.split()[0], {}).get(score, Estimate(float("nan")))


def scored_groups(groups: list[Group], scores: Scores, score: Score) -> list[tuple[int, Estimate]]:
    """Index and score of the groups that have this score."""
    estimates = [score_of(group.label, scores, score) for group in groups]
    return [(i, e) for i, e in enumerate(estimates) if not np.isnan(e.value)]


def table_truth(level: str, groups: list[Group], scores: Scores) -> Table:
    """Rank correlation of each score with what the methods learned, over all methods and over two subsets."""
    rows, least = [], score_of("none", scores, COSINE).low
    for score in MEASURED:
        scored = scored_groups(groups, scores, score)
        climbed = [(i, e) for i, e in scored if groups[i].values("climb").mean() > 0]
        close = [(i, e) for i, e in climbed if score_of(groups[i].label, scores, COSINE).value >= least]
        subsets = {"all": scored, "those that climbed": climbed, "of these, cosine not below GRPO's": close}
        for name, subset in subsets.items():
            if subset:
                rows.append([score.meaning, f"{name}, {len(subset)}", *correlations(groups, subset)])
    note = ("Rank correlation, over methods, of the scores above with the mean area of each method's runs. First as if "
            "scores and areas were exact, with an interval for the choice of methods alone (Bonett and Wright). Then "
            "with their errors: median and 95% interval of 4,000 draws, each of which redraws every score and area "
            "from its own error; noise lowers a correlation, so this is a cautious figure. Those that climbed are "
            "selected by the outcome. Cosine not below GRPO's: at least the lower end of the interval of GRPO's. Where "
            "a correlation vanishes in this subset, the data only show that bad scores go with bad learning. Last: the "
            f"lowest correlation after removing any two methods, named in brackets. {between_scores(groups, scores)}")
    header = ["score", "methods", "with area", "with errors", "without two"]
    return Table(f"Scores and learning, {level}", note, header, rows)


def correlations(groups: list[Group], subset: list[tuple[int, Estimate]]) -> list[str]:
    """The rank correlations of a score with the area of a subset of the groups, as cells."""
    areas = [t_estimate(groups[i].values("area")) for i, _ in subset]
    x, y = (np.array([e.value for e in estimates]) for estimates in ([e for _, e in subset], areas))  # (M,) each
    labels = [groups[i].label for i, _ in subset]
    return [cell(spearman(x, y)), cell(with_errors([e for _, e in subset], areas)), without_two(labels, x, y)]


def between_scores(groups: list[Group], scores: Scores) -> str:
    """How far the cosine and the signal to noise measure the same."""
    cosine, signal = (dict(scored_groups(groups, scores, score)) for score in (COSINE, SIGNAL))
    pairs = np.array([[cosine[i].value, signal[i].value] for i in cosine if i in signal]).reshape(-1, 2)  # (M, 2)
    return (f"Over all {len(pairs)} methods {COSINE.name} and {SIGNAL.name} correlate by {cell(spearman(*pairs.T))} "
            "with each other.")


def draw_truth(level: str, groups: list[Group], scores: Scores, file: Path) -> None:
    """Each method's scores against its difference to the baseline in mean success, both with their intervals."""
    figure, axes = new_figure(len(MEASURED), 1, 5.2, 6.4, sharey=True)
    for axis, score in zip(axes.flat, MEASURED):
        axis.axhline(0, color="black", lw=1)
        for i, truth in scored_groups(groups, scores, score):
            gain = Estimate(*(100 * x for x in groups[i].difference("area")))
            axis.plot([truth.low, truth.high], [gain.value] * 2, color="0.75", lw=1, zorder=1)
            axis.plot([truth.value] * 2, [gain.low, gain.high], color="0.75", lw=1, zorder=1)
            axis.plot(truth.value, gain.value, "o", color="white", mec=COLOURS["reasoning"], ms=14, zorder=2)
            axis.annotate(str(i), (truth.value, gain.value), ha="center", va="center", fontsize=8, zorder=3)
        axis.set_xlabel(score.meaning)
    axes[0, 0].set_yscale("symlog", linthresh=5, subs=(2, 3, 4, 6, 8))  # most are near 0, some far below
    axes[0, 0].yaxis.set_major_locator(FixedLocator((-20, -10, -5, -2.5, 0, 2.5, 5, 10, 20)))
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].set_ylabel("points of mean success while training more than GRPO")
    names = "\n".join(f"{i:>2}  {group.label}" for i, group in enumerate(groups))
    axes[0, -1].text(1.03, 0.5, names, transform=axes[0, -1].transAxes, va="center", linespacing=1.8, fontsize=9,
                     family="monospace")
    figure.suptitle(f"Does credit closer to the truth learn more? ({level} puzzles)\nEach number a method, lines its "
                    "95% intervals; right: closer to the truth, or less noise; up: learned more", fontsize=11)
    save_figure(figure, file)
