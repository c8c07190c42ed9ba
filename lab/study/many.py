"""Is it a small learning rate that few steps with many responses lack? The table of section 4 of designs.md.

    python -m lab.study.run --parts main budget test many --levels easy && python -m lab.study.run --tables
"""
from analyze import RLOO
from lab.estimates import points
from lab.study.budget import at_equal_cost, cost_unit, spent
from lab.study.rows import minus, name_of, seeds_of
from lab.study.tuned import arm
from plumbing.report import Table, t_estimate
from plumbing.runs import Run, group_runs

LONGER = ("none steps=560 advantage=rloo", 2e-4)  # for about what 45 responses cost
PARTS = ("main", "budget", "test", "many")


def table_many(parts: dict[str, list[Run]]) -> Table | None:
    """RLOO with more than 8 responses to each puzzle at each rate: after as many steps, and for the same cost.

    None before the longer run is done.
    """
    groups = {arm(group.label): group for group in group_runs([r for part in PARTS for r in parts.get(part, [])])}
    if LONGER not in groups:
        return None
    unit, rows = cost_unit(group_runs(parts["main"])), []
    for (name, rate), group in sorted(groups.items()):
        if "answers=" in name and "advantage=rloo" in name:
            rloo, found = groups.get((RLOO, rate)), at_equal_cost(group, groups[LONGER])
            rows.append([name_of(name), f"{rate:.2g}", f"{len(group.rows)}", f"{spent(group)[-1] / unit:.2f}",
                         *(points(t_estimate(group.values(figure))) for figure in ("area", "end")),
                         minus(group, rloo), seeds_of(group, rloo), f"{found.cost / unit:.2f}",
                         points(found.area), points(found.end)])
    note = ("Minus RLOO with 8 responses at the same rate, after as many steps; and minus RLOO with 560 steps at the "
            "default rate, 2e-4, at the largest cost that both reached.")
    return Table("Many responses at higher rates, easy", note,
                 ["method", "rate", "seeds", "cost", "area", "end", "area - RLOO", "seeds of both", "at cost",
                  "area - 560 steps", "end - 560 steps"], rows)
