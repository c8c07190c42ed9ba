"""What would perfect credit buy? The table and the picture of section 2 of designs.md.

    python -m lab.study.run --parts oracle && python -m lab.study.run --tables
"""
from pathlib import Path

from analyze import RLOO
from lab.estimates import cell, draw_point, points, read_cell, read_table
from lab.study.budget import cost_unit, spent
from lab.study.rows import MORE_ANSWERS, minus, name_of, seeds_of
from lab.study.tuned import arm
from plumbing.report import GREY, PALETTE, Estimate, Table, interval, new_figure, pm, save_figure, t_estimate
from plumbing.runs import Run, group_runs

ACCURACY = Path(__file__).with_name("accuracy.md")
MEASURED = {RLOO: "RLOO", "vineppo": "vineppo", "oracle k=4": "oracle k=4", "oracle": "oracle k=16",
            "oracle k=64": "oracle k=64"}  # rows of accuracy.md


def read_accuracy() -> dict[str, Estimate]:
    """By label, how a credit correlates with the truth."""
    header, rows = read_table(ACCURACY, "Accuracy of the credit")
    found = {row[0]: read_cell(row[header.index("all")]) for row in rows}
    return {label: found[name] for label, name in MEASURED.items()}


def table_perfect(runs: list[Run], methods: list[Run]) -> Table:
    """Each arm minus RLOO at the same rate. methods: the main table's, whose GRPO is the unit of cost."""
    groups, accuracy = {arm(group.label): group for group in group_runs(runs)}, read_accuracy()
    unit = cost_unit(group_runs(methods))
    rows = []
    for (name, rate), group in sorted(groups.items(), key=lambda pair: -pair[1].values("area").mean()):
        rloo, many = groups.get((RLOO, rate)), groups.get((MORE_ANSWERS, rate))
        rows.append([name_of(name), f"{rate:.2g}", seeds_of(group, rloo),
                     cell(accuracy[name]) if name in accuracy else "", points(t_estimate(group.values("end"))),
                     points(t_estimate(group.values("area"))), minus(group, rloo), minus(group, many),
                     f"{spent(group)[-1] / unit:.1f}",
                     *(pm(*interval(group.values(name)), 3) for name in ("gradient norm", "step length"))])
    note = ("The small model; `oracle` has k = 16 where none is named. Accuracy: Pearson's correlation of the credit "
            "with A* of the reward (accuracy.md). Minus RLOO, and minus RLOO with 45 responses: of area, at the same "
            "rate. Cost: weighted tokens, in runs of GRPO.")
    return Table("Perfect credit, small", note,
                 ["method", "rate", "seeds", "accuracy", "end", "area", "area - RLOO", "area - 45", "cost",
                  "gradient norm", "step length"], rows)


def draw_perfect(runs: list[Run], file: Path) -> None:
    """Area by the accuracy of the credit, and RLOO with 45 responses as a line, of the arms with several seeds.

    Nothing before the line's runs are done.
    """
    groups = {arm(group.label): group for group in group_runs(runs) if len(group.rows) > 1}
    rate = min((rate for _, rate in groups), default=None)  # RLOO's; the other one is 1.4 times it
    if (MORE_ANSWERS, rate) not in groups:
        return
    figure, ((axis,),) = new_figure(1, 1, 4.2)
    for name, where in read_accuracy().items():
        if (name, rate) in groups:
            area = t_estimate(100 * groups[name, rate].values("area"))
            draw_point(axis, where, area, color=PALETTE[0])
            axis.annotate(MEASURED[name], (where.value, area.value), textcoords="offset points", xytext=(6, 6))
    many = t_estimate(100 * groups[MORE_ANSWERS, rate].values("area"))
    axis.axhspan(many.low, many.high, color=GREY, alpha=0.3, lw=0)
    axis.axhline(many.value, color=GREY, label="RLOO with 45 responses")
    axis.legend(loc="lower right")
    axis.set(xlabel="accuracy of the credit: Pearson's correlation with A* (identical: 1)", xlim=(0, 1),
             ylabel="area: success averaged over training, %")
    save_figure(figure, file)
