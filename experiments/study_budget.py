"""What credit per token buys: success at equal cost in weighted tokens, not after equal steps.

Methods that sample more, such as `vineppo`, learn more in a step. So their opponents, GRPO and RLOO, may spend as much:
by more responses to each puzzle, or by more steps. A run's cost so far is its weighted tokens (see analyze.COSTS),
recorded with every measurement of held-out success. The unit here is the cost of GRPO's default run.

The table and the picture are part of the study: python -m experiments.study --tables
"""
from pathlib import Path

import numpy as np

from analyze import method_name
from plumbing.report import GREY, PALETTE, Table, mean_height, new_figure, points, save_figure, t_estimate, welch
from plumbing.runs import Group

BUDGETS = (0.5, 1.0, 2.0, 4.0)  # in units of GRPO's run
DRAWN = {"vineppo k=3": (PALETTE[0], "o-"), "ppo": (PALETTE[1], "s-"), "none": (GREY, "^-"),
         "none answers=38 advantage=rloo": (PALETTE[2], "D--"),
         "none steps=480 advantage=rloo": (PALETTE[3], "v:")}  # colour and line, by label


def name_of(label: str) -> str:
    """What a method is called in a table: GRPO and RLOO by name, others by their label, as code."""
    return method_name(label) if is_opponent(label) else f"`{label}`"


def is_opponent(label: str) -> bool:
    """Whether all tokens of a response get the same credit: GRPO or RLOO."""
    return label.split()[0] == "none"


def spent(group: Group) -> np.ndarray:
    """The mean weighted tokens (m,) that a group had spent at each measurement."""
    return np.mean([list(row["spent"].values()) for row in group.rows.values()], 0)


def cost_unit(groups: list[Group]) -> float:
    """The cost of GRPO's run."""
    (none,) = (group for group in groups if group.label == "none")
    return float(spent(none)[-1])


def at_costs(group: Group, costs: np.ndarray) -> np.ndarray:
    """Held-out success (seeds, n) of a group when it had spent costs (n,), linear between measurements.

    Without rows where the runs end before. An end within 5% counts: it depends on how long responses become.
    """
    own = spent(group)  # (m,)
    curves = [list(row["curve"].values()) for row in group.rows.values()]  # (m,) each
    reached = costs.max() <= 1.05 * own[-1]
    return np.array([np.interp(costs, own, curve) for curve in curves if reached]).reshape(-1, len(costs))


def table_budget(level: str, groups: list[Group]) -> Table:
    """Success of each group at several budgets, and each method against the best opponent that spent as much."""
    unit, rows = cost_unit(groups), []
    for group in groups:
        ends = [at_costs(group, np.array([budget * unit]))[:, 0] for budget in BUDGETS]
        cells = [points(t_estimate(values)) if len(values) else "" for values in ends]
        rows.append([name_of(group.label), f"{len(group.rows)}", f"{spent(group)[-1] / unit:.2f}", *cells,
                     *best_opponent(group, groups)])
    note = ("Held-out success in percent at equal cost, ± half of a 95% interval over seeds. The cost of a run is its "
            "weighted tokens (sampled and read 1, updated 3), in units of GRPO's default run; empty where the runs end "
            "before. The opponent of a method is GRPO or RLOO, with any number of steps and answers: the one that has "
            "the highest mean success on the way to the cost of the method's whole run. Then the method minus this "
            "opponent at that cost (end), and on the way there (area), in points with Welch's interval. The opponent "
            "is chosen by its outcome, which favours it.")
    header = ["method", "seeds", "cost", *(f"{budget:g}" for budget in BUDGETS), "opponent", "end", "area"]
    return Table(f"Equal cost, {level}", note, header, rows)


def best_opponent(group: Group, groups: list[Group]) -> tuple[str, str, str]:
    """The best opponent of a method, and the differences to it at the end and on the way; empty for an opponent itself.

    Both sides are read at the costs at which the method was measured, so that neither has the finer curve.
    """
    costs = spent(group)  # (n,)
    own = at_costs(group, costs)  # (seeds, n)
    found = {other.label: at_costs(other, costs) for other in groups if is_opponent(other.label)}
    reached = {label: values for label, values in found.items() if len(values) > 1}
    if is_opponent(group.label) or not reached or len(own) < 2:
        return "", "", ""
    best = max(reached, key=lambda other: mean_height(costs, reached[other].mean(0)))
    areas = [np.array([mean_height(costs, curve) for curve in curves]) for curves in (own, reached[best])]
    return name_of(best), points(welch(own[:, -1], reached[best][:, -1])), points(welch(*areas))


def draw_budget(groups: list[Group], file: Path) -> None:
    """Learning curves by cost (left) and by step (right): mean over seeds and its 95% interval."""
    unit, by_label = cost_unit(groups), {group.label: group for group in groups}
    figure, axes = new_figure(2, 1, 4.2, sharey=True)
    for label, (colour, line) in DRAWN.items():
        if label not in by_label:
            continue
        curves = [row["curve"] for row in by_label[label].rows.values()]
        mean, low, high = np.array([t_estimate(values)[:3] for values in zip(*(c.values() for c in curves))]).T  # (m,)
        for axis, x in zip(axes[0], (spent(by_label[label]) / unit, list(curves[0]))):
            axis.plot(x, mean, line, color=colour, ms=4, label=f"{method_name(label)}, seeds: {len(curves)}")
            axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    axes[0, 0].set(xlabel="weighted tokens, in units of GRPO's default run", ylabel="held-out puzzles solved",
                   title="By cost")
    axes[0, 1].set(xlabel="step", title="By step", xlim=(0, 100))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, file)
