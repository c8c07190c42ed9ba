"""A forest plot: how much more each method learned than its baseline, with intervals and each seed. For the study."""
from pathlib import Path

import numpy as np

from analyze import is_control, method_name
from lab.estimates import draw_estimate, in_points
from plumbing.report import GREY, PALETTE, new_figure, plt, save_figure
from plumbing.runs import Group

JUDGED = {"end": "Success at the end", "area": "Mean success while training (area)"}
LOWEST = -15  # points: a lower mean would stretch the axis until the other methods could not be told apart


def by_area(groups: list[Group]) -> list[Group]:
    """Groups from the largest mean success while training to the smallest."""
    return sorted(groups, key=lambda group: -group.values("area").mean())


def draw_forest(groups: list[Group], file: Path) -> None:
    """Each method's difference to their common baseline: mean, 95% interval, and each seed as a small line."""
    compared = by_area([group for group in groups if group.compared])
    figure, axes = new_figure(2, 1, 1.0 + 0.21 * max(4, len(compared)), sharey=True)
    for axis, (name, title) in zip(axes.flat, reversed(JUDGED.items())):
        draw_differences(axis, dict(enumerate(compared)), name)
        axis.set(xlabel=f"points more than {method_name(compared[0].baseline.label)}", title=title)
    names = [f"{method_name(group.label)}, n = {len(group.rows)}" for group in compared]
    axes[0, 0].set_yticks(range(len(compared)), names)
    axes[0, 0].invert_yaxis()
    save_figure(figure, file)


def draw_differences(axis: plt.Axes, groups: dict[int, Group], figure: str) -> None:
    """On the line of each group its difference to the baseline, in points; the axis ends at LOWEST."""
    axis.axvline(0, color=GREY, lw=1)
    for y, group in groups.items():
        e = in_points(group.difference(figure))
        seeds = 100 * (group.values(figure) - group.baseline.values(figure).mean())  # (n,)
        control = is_control(group.label)
        draw_estimate(axis, y, e, control, LOWEST, GREY if control else PALETTE[0])
        seeds = seeds[seeds > LOWEST]
        axis.plot(seeds, np.full(len(seeds), y), "|", color=GREY, ms=6)
        if min(e.value, e.low) < LOWEST:
            axis.set_xlim(left=LOWEST)
