"""What credit per token buys: success at equal cost in weighted tokens, not after equal steps.

Methods that sample more, such as `vineppo`, learn more in a step. So their opponents, GRPO and RLOO, may spend as much:
by more responses to each puzzle, or by more steps. A run's cost so far is its weighted tokens (see analyze.COSTS),
recorded with every measurement of held-out success. The unit here is the cost of GRPO's default run.

The table and the picture are part of the study: python -m experiments.study --tables
"""
from pathlib import Path

import numpy as np

from analyze import RLOO
from plumbing.report import GREY, PALETTE, Table, new_figure, points, save_figure, t_estimate, welch
from plumbing.runs import Group

BUDGETS = (0.5, 1.0, 2.0, 4.0)  # in units of GRPO's run
SHOWN = ("ppo", "vineppo k=3")  # what the picture compares with all opponents


def name_of(label: str) -> str:
    """What a method is called in a table: GRPO and RLOO by name, with their further settings; others by their label."""
    method, *settings = label.split()
    if method != "none":
        return f"`{label}`"
    rloo = RLOO.split()[1]
    return " ".join(["RLOO" if rloo in settings else "GRPO", *(s for s in settings if s != rloo)])


def total_cost(group: Group) -> float:
    """The mean cost of a group's whole runs, in weighted tokens."""
    return float(np.mean([list(row["spent"].values())[-1] for row in group.rows.values()]))


def unit_cost(groups: list[Group]) -> float:
    """The cost of GRPO's run."""
    (none,) = (group for group in groups if group.label == "none")
    return total_cost(none)


def success_at(row: dict, cost: float) -> float:
    """A run's held-out success when it had spent `cost`, linear between measurements; NaN if it never did.

    A run that ends within 3% of the cost counts: the cost of a run depends on how long its responses become.
    """
    spent, success = (np.array(list(row[name].values())) for name in ("spent", "curve"))  # (n,) each
    return float(np.interp(cost, spent, success)) if cost <= 1.03 * spent[-1] else float("nan")


def at_budget(group: Group, cost: float) -> np.ndarray:
    """The success (n,) of each seed at a cost; empty unless all of them reached it."""
    values = np.array([success_at(row, cost) for row in group.rows.values()])
    return values if np.isfinite(values).all() else np.empty(0)


def table_budget(level: str, groups: list[Group]) -> Table:
    """Success of each group at several budgets, and at its own end against the best opponent that spent as much."""
    unit, rows = unit_cost(groups), []
    for group in groups:
        cells = [cell_of(at_budget(group, budget * unit)) for budget in BUDGETS]
        cost = total_cost(group)
        rows.append([name_of(group.label), f"{len(group.rows)}", f"{cost / unit:.2f}", *cells,
                     *best_opponent(group, groups, cost)])
    note = ("Held-out success in percent at equal cost, ± half of a 95% interval over seeds. The cost of a run is its "
            "weighted tokens (sampled and read 1, updated 3), in units of GRPO's default run; empty where the runs end "
            "before. Last: success at the run's own end, minus that of the opponent, GRPO or RLOO with any number of "
            "steps and answers, that has the highest mean at the same cost, in points with Welch's interval. The "
            "opponent is chosen by its outcome, which favours it.")
    return Table(f"Equal cost, {level}", note,
                 ["method", "seeds", "cost", *(f"{budget:g}" for budget in BUDGETS), "opponent", "difference"], rows)


def best_opponent(group: Group, groups: list[Group], cost: float) -> tuple[str, str]:
    """The best opponent at a cost, and the difference to it in points; empty for an opponent itself."""
    if is_opponent(group):
        return "", ""
    found = {other.label: at_budget(other, cost) for other in groups if is_opponent(other)}
    reached = {label: values for label, values in found.items() if len(values) > 1}
    own = at_budget(group, cost)
    if not reached or len(own) < 2:
        return "", ""
    best = max(reached, key=lambda other: reached[other].mean())
    return name_of(best), points(welch(own, reached[best]))


def is_opponent(group: Group) -> bool:
    """Whether a group gives all tokens of a response the same credit: GRPO or RLOO."""
    return group.label.split()[0] == "none"


def cell_of(values: np.ndarray) -> str:
    """Mean success in percent ± half of its interval."""
    return points(t_estimate(values)) if len(values) else ""


def draw_budget(groups: list[Group], file: Path) -> None:
    """Learning curves by cost (left) and by step (right): mean over seeds and its 95% interval."""
    unit, drawn = unit_cost(groups), [g for g in groups if g.label in SHOWN or is_opponent(g)]
    figure, axes = new_figure(2, 1, 4.2, sharey=True)
    for i, group in enumerate(drawn):
        colour = GREY if group.label == "none" else PALETTE[i % len(PALETTE)]
        rows = list(group.rows.values())
        steps = sorted(set.intersection(*(set(row["curve"]) for row in rows)))
        mean, low, high = np.array([t_estimate([row["curve"][s] for row in rows])[:3] for s in steps]).T
        cost = np.array([np.mean([row["spent"][s] for row in rows]) for s in steps]) / unit
        for axis, x in zip(axes[0], (cost, steps)):
            axis.plot(x, mean, color=colour, marker="os^Dv"[i % 5], ms=4, label=name_of(group.label).strip("`"))
            axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    axes[0, 0].set(xlabel="weighted tokens, in units of GRPO's default run", ylabel="held-out puzzles solved",
                   title="By cost")
    axes[0, 1].set(xlabel="step", title="By step", xlim=(0, 100))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, file)
