"""Does credit closer to the truth learn more? Scores of each method before training, beside what it learned.

The scores are read from the tables that lab/truth/measure.py and lab/gradients/measure.py wrote.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analyze import is_control, method_name
from lab.estimates import cell, draw_point, read_cell, read_table
from lab.statistics import spearman, with_errors
from plumbing.report import GREY, PALETTE, Estimate, Table, new_figure, plt, save_figure, t_estimate
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

NAMED = ("vineppo", "ppo", "token_type", "learned_importance", "inverse_logprob", "reward_decomposition")
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
        subsets = {"all": scored, "those that climbed": climbed, "of these, cosine as GRPO's or above": close}
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
            "that climbed ended above the start: they are selected by the outcome. As GRPO's or above: at least "
            "the lower end of the interval of GRPO's. Where a correlation vanishes in this subset, the data only show "
            "that bad scores go with bad learning.")
    return Table(f"Scores and learning, {level}", note, ["score", "methods", "with area", "with errors"], rows)


def draw_scores(groups: list[Group], scores: Scores, file: Path) -> None:
    """What each method learned by three of its scores, with both intervals; controls are hollow."""
    figure, axes = new_figure(3, 1, 4.2, sharey=True)
    for axis, score in zip(axes.flat, (COSINE, WITHIN, SIGNAL)):
        axis.axvline(0, color=GREY, lw=1)
        scored = [(groups[i], e) for i, e in scored_groups(groups, scores, score)]
        for group, e in scored:
            draw_scored(axis, group, e)
        x = [e.value for _, e in scored], [group.values("area").mean() for group, _ in scored]
        axis.set(xlabel=score.name, title=f"rank correlation {spearman(*map(np.array, x)).value:.2f}")
    axes[0, 0].set(ylabel="area: success over training, %")
    save_figure(figure, file)


def draw_scored(axis: plt.Axes, group: Group, score: Estimate) -> None:
    """One method's area by its score; those of NAMED by name."""
    area, control = t_estimate(100 * group.values("area")), is_control(group.label)
    colour = GREY if control else PALETTE[group.label in NAMED]
    draw_point(axis, score, area, color=colour, ms=4, lw=0.8, mfc="none" if control else colour)
    if group.label in NAMED:
        late = score.value > 0.3  # near the right edge of the panel of cosines
        axis.annotate(method_name(group.label), (score.value, area.value), textcoords="offset points",
                      xytext=(-4 if late else 4, 5), ha="right" if late else "left", fontsize=8, color=colour)
