"""What credit per token buys: success at equal cost in weighted tokens, not after equal steps.

Methods that sample more, such as `vineppo`, learn more in a step. So GRPO and RLOO may spend as much: by more responses
to each puzzle, or by more steps. A run's cost so far is its weighted tokens (see analyze.COSTS), recorded with every
measurement of held-out success. The unit here is the cost of GRPO's default run.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analyze import COSTS, RLOO, method_name
from lab.estimates import points
from lab.study.rows import MORE_ANSWERS, is_uniform, name_of, seeds_of, with_asterisks
from plumbing.report import GREY, PALETTE, Estimate, Table, mean_height, new_figure, save_figure, t_estimate, welch
from plumbing.runs import Group

COSTLY = 1.15  # units; a cheaper method spends about what RLOO does, and is compared after as many steps
NEARLY = 0.75  # of a method's cost: the other must have spent as much, and have been measured before
WEIGHTS = {"1:1:3": COSTS, "1:1:6": COSTS | {"tokens_updated": 6},
           "1:0:0": COSTS | {"tokens_read": 0, "tokens_updated": 0}}  # of sampled, read and updated tokens
STEPS = 100  # of a default run
SHOWN_COSTS = (0.25, 0.5, 1, 2, 4)  # on the axis of the picture
DRAWN = {"vineppo": (PALETTE[0], "o-"), "ppo": (PALETTE[1], "s-"), MORE_ANSWERS: (PALETTE[2], "D--"),
         "none steps=560 advantage=rloo": (PALETTE[3], "v:"),
         RLOO: (GREY, "^-")}  # colour and line, by label; RLOO lies on its own longer run, so it comes last


def spent(group: Group, weights: dict[str, float] = COSTS) -> np.ndarray:
    """The mean cost (m,) of a group's runs up to each measurement.

    Rows record it with the weights of COSTS. Others change it by the same factor all along a run.
    """
    def total(row: dict, by_kind: dict[str, float]) -> float:
        return sum(weight * row[kind] for kind, weight in by_kind.items())

    return np.mean([np.array(list(row["spent"].values())) * (total(row, weights) / total(row, COSTS))
                    for row in group.rows.values()], 0)


def costs_of(group: Group, other: Group, unit: float) -> str:
    """A cell with what the runs of both sides cost, in units."""
    return ", ".join(f"{spent(g)[-1] / unit:.2f}" for g in (group, other))


def mean_curve(group: Group) -> np.ndarray:
    """Mean held-out success (m,) over seeds, and both ends of its 95% interval, as (3, m), in percent."""
    curves = zip(*(row["curve"].values() for row in group.rows.values()))  # the seeds at each measurement
    return 100 * np.array([t_estimate(values)[:3] for values in curves]).T


def cost_unit(groups: list[Group]) -> float:
    """The cost of GRPO's run."""
    (none,) = (group for group in groups if group.label == "none")
    return float(spent(none)[-1])


def success_at(group: Group, costs: np.ndarray, weights: dict[str, float] = COSTS) -> np.ndarray:
    """Held-out success (seeds, n) of each run when the group had spent each of the costs (n,); linear in between."""
    own = spent(group, weights)  # (m,)
    return np.array([np.interp(costs, own, list(row["curve"].values())) for row in group.rows.values()])


class EqualCost(NamedTuple):
    """A group minus another one at the largest cost that both reached."""

    cost: float
    end: Estimate  # success at that cost
    area: Estimate  # mean success over the cost up to there


def at_equal_cost(group: Group, other: Group, weights: dict[str, float] = COSTS) -> EqualCost:
    """Compare two groups at the largest cost that both reached, and on the way there.

    Learning curves are concave, so a straight line between two measurements lies below them, and further below where
    they are far apart. So both are read at the same costs: those of the group whose measurements are further apart.
    """
    cost = float(min(spent(g, weights)[-1] for g in (group, other)))
    coarser = max(spent(group, weights), spent(other, weights), key=lambda costs: costs[1])
    costs = np.append(coarser[coarser < cost * (1 - 1e-9)], cost)  # (n,)
    ours, theirs = (success_at(g, costs, weights) for g in (group, other))  # (seeds, n) each
    area = welch(*(np.array([mean_height(costs, curve) for curve in curves]) for curves in (ours, theirs)))
    return EqualCost(cost, welch(ours[:, -1], theirs[:, -1]), area)


def spent_enough(group: Group, other: Group, share: float = NEARLY) -> bool:
    """Whether another group spent that share of what a group did, and was measured before."""
    return bool(spent(other)[1] < share * spent(group)[-1] < spent(other)[-1])


def table_equal(level: str, groups: list[Group]) -> Table:
    """Each costly method minus each run of GRPO or RLOO that spent as much or nearly."""
    unit = cost_unit(groups)
    pairs = [(group, other) for group in groups if not is_uniform(group.label) and spent(group)[-1] > COSTLY * unit
             for other in groups if is_uniform(other.label) and spent_enough(group, other)]
    areas = {name: with_asterisks({i: at_equal_cost(*pair, weights).area for i, pair in enumerate(pairs)})
             for name, weights in WEIGHTS.items()}
    usual, *others = WEIGHTS
    rows = []
    for i, (group, other) in enumerate(pairs):
        found = at_equal_cost(group, other)
        rows.append([name_of(group.label), name_of(other.label), seeds_of(group, other), f"{found.cost / unit:.2f}",
                     areas[usual][i], points(found.end), *(areas[name][i] for name in others)])
    note = ("A method minus GRPO or RLOO, at the largest cost that both reached. Both are read at the costs of the one "
            "whose measurements are further apart. Last, the area with other weights of sampled, read and updated "
            f"tokens than {usual}. * by column.")
    header = ["method", "minus", "seeds", "at cost", "area", "end", *(f"area, {name}" for name in others)]
    return Table(f"Equal cost, {level}", note, header, rows)


def draw_budget(groups: list[Group], file: Path) -> None:
    """Learning curves by cost (left) and by step (right), there without longer runs: mean over seeds, 95% interval.

    Cheap methods have most of their points below a cost of 1, so that axis is logarithmic. It leaves out the start.
    """
    unit, by_label = cost_unit(groups), {group.label: group for group in groups}
    figure, axes = new_figure(2, 1, 4.2, sharey=True)
    for label, (colour, line) in DRAWN.items():
        if label not in by_label:
            continue
        curves = [row["curve"] for row in by_label[label].rows.values()]
        mean, low, high = mean_curve(by_label[label])
        costs, steps = spent(by_label[label]) / unit, np.array(list(curves[0]))
        costs[0] = np.nan  # a logarithmic axis has no 0
        for axis, x in zip(axes[0], (costs, steps) if steps[-1] == STEPS else (costs,)):
            axis.plot(x, mean, line, color=colour, ms=4, label=f"{method_name(label)}, seeds: {len(curves)}")
            axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    axes[0, 0].set(xlabel="weighted tokens, in units of GRPO's default run", ylabel="held-out puzzles solved, %",
                   title="By cost", xscale="log")
    axes[0, 0].set_xticks(SHOWN_COSTS, [f"{cost:g}" for cost in SHOWN_COSTS])
    axes[0, 0].minorticks_off()
    axes[0, 1].set(xlabel="step", title="By step", xlim=(0, STEPS))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, file)
