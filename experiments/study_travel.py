"""How far does it travel? What some methods learned more than GRPO, by level, size of the model and updates on a batch.

A *place* is a level of experiments/study.py, or a number of updates on each batch on easy puzzles. Each has its own
runs of GRPO to compare with. The table and the picture are part of the study: python -m experiments.study --tables
"""
import re
from pathlib import Path

import numpy as np

from analyze import RLOO, draw_differences, method_name
from experiments.study_budget import name_of
from plumbing.report import Table, holm, new_figure, points, save_figure, t_estimate
from plumbing.runs import Group, Run, group_runs

SHOWN = ("vineppo k=3", "ppo", "optimal_baseline", RLOO, "entropy_weighted", "entropy_masking", "attention_credit",
         "outcome_conditional")
FIGURE = "area"  # what is judged

Places = dict[str, list[Group]]


def by_place(levels: dict[str, dict[str, list[Run]]]) -> Places:
    """The groups of each place, with GRPO there as their baseline: all levels first, then easy with more updates."""
    runs = {level: parts["main"] for level, parts in levels.items()}
    for run in levels["easy"].get("updates", []):
        if more := re.fullmatch(r"updates_per_batch=(\d+)", run.setting):
            plain = run._replace(label=run.label.removesuffix(f" {run.setting}"))
            runs.setdefault(f"{more[1]} updates", []).append(plain)
    places = {place: group_runs(members) for place, members in runs.items()}
    for groups in places.values():
        for group in groups:
            group.baseline = next(g for g in groups if g.label == "none")  # also of RLOO, though its settings differ
    return places


def table_travel(places: Places) -> Table:
    """The difference to GRPO of each method, at each place."""
    columns = [{group.label: group for group in groups} for groups in places.values()]
    rows = [["GRPO itself", *(points(t_estimate(column["none"].values(FIGURE))) for column in columns)]]
    stars = [holm({label: column[label].difference(FIGURE).p for label in SHOWN if label in column})
             for column in columns]
    for label in SHOWN:
        cells = [points(column[label].difference(FIGURE)) + " *" * (label in star) if label in column else ""
                 for column, star in zip(columns, stars)]
        rows.append([name_of(label), *cells])
    note = ("Mean success while training: that of GRPO in percent, then the differences to GRPO at the same place in "
            "points, ± half of a 95% interval over seeds, * significant after Holm's correction over the methods of a "
            "column. Levels as in experiments/study.py; updates: so many on each batch, on easy puzzles. Empty where "
            "no run was made.")
    return Table("How far it travels", note, ["method", *places], rows)


def draw_travel(places: Places, file: Path) -> None:
    """A panel per place: each method's difference to GRPO there, with its interval and each seed."""
    columns = min(3, len(places))
    rows = -(-len(places) // columns)
    figure, axes = new_figure(columns, rows, 0.6 + rows * (0.7 + 0.21 * len(SHOWN)), sharex=True, sharey=True)
    for axis in axes.flat[len(places) :]:
        axis.remove()
    for axis, (place, groups) in zip(axes.flat, places.items()):
        by_label = {group.label: group for group in groups}
        draw_differences(axis, {y: by_label[label] for y, label in enumerate(SHOWN) if label in by_label}, FIGURE)
        axis.set_title(place)
    axes[0, 0].set_yticks(np.arange(len(SHOWN)), [method_name(label) for label in SHOWN])
    axes[0, 0].invert_yaxis()
    figure.supxlabel("mean success while training, points more than GRPO", fontsize=10)
    save_figure(figure, file)
