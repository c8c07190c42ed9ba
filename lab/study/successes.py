"""Is learning from one's own right answers alone ahead of RLOO at equal cost? Sections 7 and 8 of designs.md.

    python -m lab.study.run --parts main successes faster && python -m lab.study.run --tables
"""
from pathlib import Path

from analyze import RLOO
from lab.estimates import points
from lab.study.budget import WEIGHTS, at_equal_cost, cost_unit, costs_of, mean_curve, spent
from lab.study.rows import Levels, minus, seeds_of, with_asterisks
from lab.study.tuned import EXPERT, arm, best_rate
from plumbing.report import GREY, PALETTE, Table, new_figure, save_figure, t_estimate
from plumbing.runs import Group, Run, group_runs


def paired_up(levels: Levels) -> dict[str, tuple[Group, Group]]:
    """By setting `expert_iteration` and RLOO of the same part or of the main table, where both were run."""
    pairs = {}
    for level, parts in levels.items():
        own = {group.label.split()[0]: group for group in group_runs(parts.get("successes", []))}
        main = {group.label: group for group in group_runs(parts["main"])}
        pairs[level] = own.get(EXPERT), own.get("none", main.get(RLOO))
    return {level: pair for level, pair in pairs.items() if None not in pair}


def table_successes(levels: Levels) -> Table | None:
    """A row for each setting; None before the first run."""
    pairs = paired_up(levels)
    if not pairs:
        return None
    units = {level: cost_unit(group_runs(levels[level]["main"])) for level in pairs}
    equal = {level: at_equal_cost(*pair) for level, pair in pairs.items()}
    areas = with_asterisks({level: found.area for level, found in equal.items()})
    rows = [[level, seeds_of(a, b), costs_of(a, b, units[level]),
             minus(a, b) if a.values("steps")[0] == b.values("steps")[0] else "",
             f"{equal[level].cost / units[level]:.2f}", areas[level], points(equal[level].end),
             points(at_equal_cost(a, b, WEIGHTS["1:0:0"]).area), minus(a, b, "pass@16")]
            for level, (a, b) in pairs.items()]
    note = ("`expert_iteration` minus RLOO, at equal steps and at the largest cost that both reached. Cost: of both, "
            "in runs of GRPO in the setting. 1:0:0 counts sampled tokens alone. * is significant at 5% after Holm's "
            "correction over the settings.")
    return Table("Successes alone", note, ["setting", "seeds", "cost", "area, equal steps", "at cost",
                                           "area, equal cost", "end, equal cost", "area, 1:0:0", "pass@16"], rows)


def table_faster(levels: Levels) -> Table | None:
    """Both at higher rates, where they were run: at the same rate, then each at its best."""
    rows = [row for level, parts in levels.items() if "faster" in parts for row in rates_of(level, parts)]
    note = ("`expert_iteration` minus RLOO at each learning rate. A last row has each at the rate where its mean area "
            "is largest, if these differ. The runs at 2e-4 are those of the tables above.")
    header = ["setting", "rate", "RLOO's rate", "seeds", "area", "RLOO's area", "area, equal steps", "area, equal cost"]
    return Table("Successes alone at higher rates", note, header, rows) if rows else None


def rates_of(level: str, parts: dict[str, list[Run]]) -> list[list[str]]:
    """The rows of a setting, on the seeds of its runs at higher rates."""
    seeds = {run.seed for run in parts["faster"]}
    runs = [run for part in ("main", "successes", "faster") for run in parts.get(part, []) if run.seed in seeds]
    groups = {arm(group.label): group for group in group_runs(runs)}
    same = sorted((rate, rate) for name, rate in groups if name == EXPERT and (RLOO, rate) in groups)
    best = [(best_rate(groups, EXPERT), best_rate(groups, RLOO))] if same else []
    return [compare_rates(level, groups, *pair) for pair in dict.fromkeys([*same, *best])]


def compare_rates(level: str, groups: dict[tuple[str, float], Group], own: float, other: float) -> list[str]:
    """A row: `expert_iteration` at its rate minus RLOO at its own."""
    a, b = groups[EXPERT, own], groups[RLOO, other]
    areas = [points(t_estimate(group.values("area"))) for group in (a, b)]
    return [level, f"{own:.2g}", f"{other:.2g}", seeds_of(a, b), *areas, minus(a, b), points(at_equal_cost(a, b).area)]


def draw_successes(levels: Levels, file: Path) -> None:
    """Held-out success by cost in each setting: means over seeds with their 95% intervals."""
    pairs = paired_up(levels)
    if not pairs:
        return
    figure, axes = new_figure(len(pairs), 1, 2.8)
    for axis, (level, pair) in zip(axes[0], pairs.items()):
        unit = cost_unit(group_runs(levels[level]["main"]))
        for group, colour, line in zip(pair, (PALETTE[1], GREY), ("o-", "s--")):
            costs, (mean, low, high) = spent(group) / unit, mean_curve(group)
            axis.plot(costs, mean, line, color=colour, ms=4, label=EXPERT if group is pair[0] else "RLOO")
            axis.fill_between(costs, low, high, color=colour, alpha=0.2, lw=0)
        axis.set(title=level, xlabel="cost")
    axes[0, 0].set_ylabel("held-out puzzles solved, %")
    axes[0, -1].legend(fontsize=7)
    save_figure(figure, file)
