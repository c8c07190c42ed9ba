"""Is learning from one's own right answers alone ahead of RLOO at equal cost? The table of section 7 of designs.md.

    python -m lab.study.run --parts main successes && python -m lab.study.run --tables
"""
from analyze import RLOO
from lab.estimates import points
from lab.study.budget import WEIGHTS, at_equal_cost, cost_unit, spent
from lab.study.rows import Levels, minus, seeds_of, with_asterisks
from lab.study.tuned import EXPERT
from plumbing.report import Table
from plumbing.runs import Group, Run, group_runs


def compared(parts: dict[str, list[Run]]) -> tuple[Group, Group]:
    """`expert_iteration` and RLOO in a setting: RLOO of the same part, or of the main table."""
    own = {group.label.split()[0]: group for group in group_runs(parts["successes"])}
    main = {group.label: group for group in group_runs(parts["main"])}
    return own[EXPERT], own.get("none", main[RLOO])


def table_successes(levels: Levels) -> Table | None:
    """A row for each setting; None before the first run."""
    pairs = {level: compared(parts) for level, parts in levels.items() if "successes" in parts}
    if not pairs:
        return None
    units = {level: cost_unit(group_runs(levels[level]["main"])) for level in pairs}
    equal = {level: at_equal_cost(*pair) for level, pair in pairs.items()}
    areas = with_asterisks({level: found.area for level, found in equal.items()})
    rows = [[level, seeds_of(a, b), ", ".join(f"{spent(group)[-1] / units[level]:.2f}" for group in (a, b)),
             minus(a, b) if a.values("steps")[0] == b.values("steps")[0] else "",
             f"{equal[level].cost / units[level]:.2f}", areas[level], points(equal[level].end),
             points(at_equal_cost(a, b, WEIGHTS["1:0:0"]).area), minus(a, b, "pass@16")]
            for level, (a, b) in pairs.items()]
    note = ("`expert_iteration` minus RLOO, at equal steps and at the largest cost that both reached. Cost: of both, "
            "in runs of GRPO in the setting. 1:0:0 counts sampled tokens alone. * is significant at 5% after Holm's "
            "correction over the settings.")
    return Table("Successes alone", note, ["setting", "seeds", "cost", "area, equal steps", "at cost",
                                           "area, equal cost", "end, equal cost", "area, 1:0:0", "pass@16"], rows)
