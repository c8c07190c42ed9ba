"""Does credit closer to the truth learn more? Scores of each method before training, beside what it learned.

The scores are read from the tables that lab/truth/measure.py and lab/gradients/measure.py wrote.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analyze import is_control, method_name
from lab.estimates import cell, draw_estimate, read_cell, read_table
from lab.statistics import spearman, with_errors
from lab.study.forest import by_area, draw_differences
from plumbing.report import GREY, PALETTE, Estimate, Table, new_figure, save_figure, t_estimate
from plumbing.runs import Group

FILES = ("lab/truth/scores.md", "lab/gradients/tables.md")
ROOT = Path(__file__).parents[2]


class Score(NamedTuple):
    """A measure of a method's credit that is known before training."""

    file: str  # one of FILES
    table: str  # title of its table there
    column: str  # its column there
    meaning: str
    name: str  # its column in the study's tables


TRUTH, GRADIENTS = FILES
ALL, INSIDE = "Credit against A*, all tokens", "Credit against A* and the solver, within responses"
COSINE, RANK, WITHIN, SOLVER, SIGNAL = SCORES = (
    Score(TRUTH, ALL, "cosine of update", "cosine of its update with that of A*, 256 responses", "cosine with A*"),
    Score(TRUTH, ALL, "Spearman", "rank correlation with A*, all tokens", "rank, all tokens"),
    Score(TRUTH, INSIDE, "Spearman", "rank correlation with A* within responses", "rank in response"),
    Score(TRUTH, INSIDE, "solver", "rank correlation with the solver's verdict", "solver"),
    Score(GRADIENTS, "Noise and bias of each method's gradient", "signal to noise",
          "signal to noise of its gradient, 16 batches of 48 responses", "signal to noise"))

SHOWN = (COSINE, WITHIN, SOLVER)  # in the table of scores
Scores = dict[str, dict[Score, Estimate]]  # by method


def read_scores(folder: Path = ROOT) -> Scores:
    """The scores of each method, from the tables of FILES in the repository."""
    scores: Scores = {}
    for score in SCORES:
        header, rows = read_table(folder / score.file, score.table)
        for row in rows:
            scores.setdefault(row[0], {})[score] = read_cell(row[header.index(score.column)])
    return scores


def score_of(label: str, scores: Scores, score: Score) -> Estimate:
    """A method's score, whatever flags its label names; NaN where it has none."""
    return scores.get(label.split()[0], {}).get(score, Estimate(float("nan")))


def scored_groups(groups: list[Group], scores: Scores, score: Score) -> list[tuple[int, Estimate]]:
    """Index and score of the groups that have this score."""
    estimates = [score_of(group.label, scores, score) for group in groups]
    return [(i, e) for i, e in enumerate(estimates) if not np.isnan(e.value)]


def table_correlations(level: str, groups: list[Group], scores: Scores) -> Table:
    """Rank correlation of each score with what the methods learned, over all methods and over two subsets."""
    rows, least = [], score_of("none", scores, COSINE).low
    for score in SCORES:
        scored = scored_groups(groups, scores, score)
        climbed = [(i, e) for i, e in scored if groups[i].values("climb").mean() > 0]
        close = [(i, e) for i, e in climbed if score_of(groups[i].label, scores, COSINE).value >= least]
        subsets = {"all": scored, "those that climbed": climbed, "of these, cosine not below GRPO's": close}
        for name, subset in subsets.items():
            if subset:
                areas = [t_estimate(groups[i].values("area")) for i, _ in subset]
                estimates = [e for _, e in subset]
                x, y = (np.array([e.value for e in column]) for column in (estimates, areas))  # (M,) each
                rows.append([score.meaning, f"{name}, {len(subset)}", cell(spearman(x, y)),
                             cell(with_errors(estimates, areas))])
    note = ("Rank correlation, over methods, of scores before training with the mean area of each method's runs. First "
            "as if scores and areas were exact, with an interval for the choice of methods alone (Bonett and Wright). "
            "Then with their errors: median and 95% interval of 4,000 draws, each of which redraws every score and "
            "area from a normal law with its interval; noise lowers a correlation, so this is a cautious figure. Those "
            "that climbed ended above the start: they are selected by the outcome. Cosine not below GRPO's: at least "
            "the lower end of the interval of GRPO's. Where a correlation vanishes in this subset, the data only show "
            "that bad scores go with bad learning.")
    return Table(f"Scores and learning, {level}", note, ["score", "methods", "with area", "with errors"], rows)


def draw_scores(groups: list[Group], scores: Scores, file: Path) -> None:
    """What each method learned more than GRPO beside three of its scores, in the order of what is judged."""
    groups = by_area(groups)
    compared = [group for group in groups if group.compared]
    figure, axes = new_figure(4, 1, 1.0 + 0.21 * len(groups), sharey=True, width_ratios=(1.4, 1, 1, 1))
    draw_differences(axes[0, 0], {groups.index(group): group for group in compared}, "area")
    axes[0, 0].set(xlabel="points more than GRPO", title="area")
    for axis, score in zip(axes[0, 1:], (COSINE, WITHIN, SIGNAL)):
        scored = scored_groups(groups, scores, score)
        axis.axvline(0, color=GREY, lw=1)
        for y, e in scored:
            control = is_control(groups[y].label)
            draw_estimate(axis, y, e, control, colour=GREY if control else PALETTE[1])
        x = [e.value for _, e in scored], [groups[y].values("area").mean() for y, _ in scored]
        axis.set(title=score.name, xlabel=f"rank corr. {spearman(*map(np.array, x)).value:.2f}")
    axes[0, 0].set_yticks(range(len(groups)), [method_name(group.label) for group in groups])
    axes[0, 0].invert_yaxis()
    save_figure(figure, file)
