"""What credit per token buys: success at equal cost in weighted tokens, not after equal steps.

Methods that sample more, such as `vineppo`, learn more in a step. So their opponents, GRPO and RLOO, may spend as much:
by more responses to each puzzle, or by more steps. A run's cost so far is its weighted tokens (see analyze.COSTS),
recorded with every measurement of held-out success. The unit here is the cost of GRPO's default run.

The table and the picture are part of the study: python -m lab.study.run --tables
"""
from pathlib import Path

import numpy as np

from analyze import COSTS, RLOO, method_name
from lab.estimates import points
from lab.study.rivals import MORE_ANSWERS, RESULT, is_opponent, name_of, results
from plumbing.report import GREY, PALETTE, Estimate, Table, mean_height, new_figure, save_figure, t_estimate, welch
from plumbing.runs import Group

BUDGETS = (1.0, 2.0, 4.0)  # in units of GRPO's run
COSTLY = 1.15  # units; a cheaper method spends about what RLOO does, and is compared after as many steps
NEARLY = 0.75  # of a method's cost: an opponent must have spent as much, and have been measured before
WEIGHTS = {"1:1:3": COSTS, "1:1:6": COSTS | {"tokens_updated": 6}, "3:1:3": COSTS | {"tokens_sampled": 3},
           "1:1:1": COSTS | {"tokens_updated": 1},
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


def cost_unit(groups: list[Group], weights: dict[str, float] = COSTS) -> float:
    """The cost of GRPO's run."""
    (none,) = (group for group in groups if group.label == "none")
    return float(spent(none, weights)[-1])


def measured(group: Group, cost: float, weights: dict[str, float] = COSTS) -> np.ndarray:
    """What a group had spent when it was measured (n,), as far as `cost`, and that cost at the end."""
    own = spent(group, weights)  # (m,)
    return np.append(own[own < cost * (1 - 1e-9)], cost)


def success_at(group: Group, costs: np.ndarray, weights: dict[str, float] = COSTS) -> np.ndarray:
    """Held-out success (seeds, n) of each run when the group had spent each of the costs (n,); linear in between."""
    own = spent(group, weights)  # (m,)
    return np.array([np.interp(costs, own, list(row["curve"].values())) for row in group.rows.values()])


def table_budget(level: str, groups: list[Group]) -> Table:
    """Success at several budgets, of GRPO and RLOO and of the methods that spend more a step."""
    unit, rows = cost_unit(groups), []
    for group in groups:
        _, first, *_, cost = spent(group) / unit
        if is_opponent(group.label) or cost > COSTLY:
            success = success_at(group, unit * np.array(BUDGETS)).T  # (budgets, seeds)
            rows.append([name_of(group.label), f"{len(group.rows)}", f"{cost:.2f}",
                         *(points(t_estimate(values)) if first < budget <= cost * (1 + 1e-9) else ""
                           for budget, values in zip(BUDGETS, success)), points(t_estimate(group.values("end")))])
    note = ("Held-out success in percent, ± half of a 95% interval over seeds, when so much was spent, and at the end. "
            "The cost of a run is its weighted tokens (sampled and read 1, updated 3), in units of GRPO's default run. "
            "Linear between measurements; empty before the first one and beyond the end. Methods that spend about "
            "as much as GRPO and RLOO are in the table above.")
    return Table(f"Success by cost, {level}", note,
                 ["method", "seeds", "cost", *(f"{budget:g}" for budget in BUDGETS), "end"], rows)


def table_equal(level: str, groups: list[Group]) -> Table:
    """Each costly method against each opponent that spent as much or nearly, at the largest cost that both reached."""
    unit, rows = cost_unit(groups), []
    pairs = {(group.label, other.label): (group, other) for group in groups for other in groups
             if is_opponent(other.label) and not is_opponent(group.label) and spent(group)[-1] > COSTLY * unit
             and spent_enough(group, other)}
    usual, *others = WEIGHTS
    compared = {name: {names: at_equal_cost(*pair, weights) for names, pair in pairs.items()}
                for name, weights in WEIGHTS.items()}
    areas = {name: results({names: area for names, (_, area) in found.items()}) for name, found in compared.items()}
    for names, (group, other) in pairs.items():
        cost, (end, _) = common_cost(group, other) / unit, compared[usual][names]
        rows.append([*map(name_of, names), f"{len(group.rows)}, {len(other.rows)}", f"{cost:.2f}",
                     *areas[usual][names], points(end), *(areas[name][names][0] for name in others)])
    note = ("The method minus the opponent, GRPO or RLOO, with more steps or more answers where it says so, in points "
            "± half of Welch's 95% interval, at the largest cost that both reached: that of the method's whole run, or "
            "of the opponent's where it is less. Area: mean success over the cost up to there, * significant at 5% "
            f"after Holm's correction over the column. {RESULT} End: success at that cost. Both are read at the costs "
            "of the one whose measurements are further apart, linear in between; a group's cost is the mean of its "
            f"runs. Last, the area with other weights of sampled, read and updated tokens than {usual}, "
            "at the largest cost that both reached by these.")
    return Table(f"Equal cost, {level}", note, ["method", "opponent", "seeds", "at cost", "area", "result", "end",
                                                *(f"area, {name}" for name in others)], rows)


def spent_enough(group: Group, other: Group, share: float = NEARLY) -> bool:
    """Whether another group spent that share of what a group did, and was measured before."""
    return bool(spent(other)[1] < share * spent(group)[-1] < spent(other)[-1])


def common_cost(group: Group, other: Group, weights: dict[str, float] = COSTS) -> float:
    """The largest cost that both groups reached."""
    return float(min(spent(group, weights)[-1], spent(other, weights)[-1]))


def at_equal_cost(group: Group, other: Group, weights: dict[str, float] = COSTS) -> tuple[Estimate, Estimate]:
    """Success of a group minus that of another at the largest cost that both reached, and the same on the way there.

    Learning curves are concave, so a straight line between two measurements lies below them, and further below where
    they are far apart. So both are read at the same costs: those of the group whose measurements are further apart.
    """
    cost, coarser = common_cost(group, other, weights), max(group, other, key=lambda g: spent(g, weights)[1])
    costs = measured(coarser, cost, weights)  # (n,)
    curves = [success_at(g, costs, weights) for g in (group, other)]  # (seeds, n) each
    areas = [np.array([mean_height(costs, curve) for curve in of_group]) for of_group in curves]
    return welch(*(of_group[:, -1] for of_group in curves)), welch(*areas)


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
        band = [t_estimate(values)[:3] for values in zip(*(c.values() for c in curves))]
        mean, low, high = 100 * np.array(band).T  # (m,) each, in percent
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
