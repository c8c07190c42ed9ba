"""Does a lead survive when each method has its own learning rate? The tables of section 1 of designs.md.

    python -m lab.study.run --parts tune test && python -m lab.study.run --tables

Stage one finds each method's rate. Stage two compares the methods at their rates, on seeds that chose nothing. Its
table is made only when all of its runs are there: nobody looks before.
"""
from pathlib import Path

import numpy as np

from analyze import RLOO, method_name
from lab.estimates import draw_estimate, in_points, points
from lab.study.budget import WEIGHTS, at_equal_cost, cost_unit, costs_of
from lab.study.rows import RATIO, minus, name_of, seeds_of, with_asterisks
from plumbing.report import (GREY, PALETTE, Estimate, Table, contrast, interval, new_figure, plt, pm, save_figure,
                             t_estimate, welch)
from plumbing.runs import Group, Run, group_runs
from train import Settings

SHUFFLED, EXPERT = "shuffled advantage=rloo", "expert_iteration"
PRIMARY = ((RATIO, RLOO), (RATIO, SHUFFLED), ("ppo", RLOO), ("vineppo", RLOO))  # exactly these four are corrected
CONTRASTS = (*PRIMARY, (EXPERT, RLOO))
STYLES = {"vineppo": (PALETTE[2], "-"), RATIO: (PALETTE[1], "-"), "ppo": (PALETTE[0], "-"), EXPERT: (PALETTE[3], "-"),
          RLOO: (GREY, "-"), SHUFFLED: (PALETTE[1], ":")}  # of their lines, in the order of the legend
SEEDS = {"vineppo": 10}  # runs of stage two, where they are not 20


def arm(label: str) -> tuple[str, float]:
    """A label without its learning rate, and the rate."""
    words = label.split()
    rates = [float(word[3:]) for word in words if word.startswith("lr=")]
    return " ".join(word for word in words if not word.startswith("lr=")), rates[0] if rates else Settings.lr


def table_tuning(runs: list[Run]) -> Table:
    """Stage one: area at each rate, and how far an optimizer step moves the weights. The best rate is in bold."""
    groups = {arm(group.label): group for group in group_runs(runs)}
    rows = []
    for (name, rate), group in sorted(groups.items()):
        shown = f"**{rate:.2g}**" if rate == best_rate(groups, name) else f"{rate:.2g}"
        measured = [pm(*interval(group.values(figure))) for figure in ("step length", "step cosine")]
        rows.append([name_of(name), shown, f"{len(group.rows)}", *(points(t_estimate(group.values(figure)))
                                                                   for figure in ("area", "end")), *measured])
    note = ("Step: the norm of the change of all weights in an optimizer step, and its cosine with the change before "
            "it, means over a run. Bold: the rate with the largest mean area.")
    return Table("Learning rates, stage one", note,
                 ["method", "rate", "seeds", "area", "end", "step length", "step cosine"], rows)


def best_rate(groups: dict[tuple[str, float], Group], name: str) -> float:
    """The learning rate at which a method has the largest mean area."""
    return max((rate for label, rate in groups if label == name),
               key=lambda rate: groups[name, rate].values("area").mean())


def stage_two(runs: list[Run]) -> dict[str, Group]:
    """The arms of stage two; none before its last run."""
    groups = {arm(group.label)[0]: group for group in group_runs(runs)}
    complete = all(name in groups and len(groups[name].rows) == SEEDS.get(name, 20)
                   for pair in CONTRASTS for name in pair)
    return groups if complete else {}


def table_tested(runs: list[Run], methods: list[Run]) -> Table | None:
    """Stage two: the contrasts that designs.md names; None before its last run. methods: with GRPO, the cost's unit."""
    groups, unit = stage_two(runs), cost_unit(group_runs(methods))
    if not groups:
        return None
    area = {pair: difference(groups, pair) for pair in CONTRASTS}
    cells = with_asterisks({pair: area[pair] for pair in PRIMARY}) | {(EXPERT, RLOO): points(area[EXPERT, RLOO])}
    equal, sampled = (with_asterisks({(a, b): at_equal_cost(groups[a], groups[b], WEIGHTS[name]).area
                                      for a, b in CONTRASTS}) for name in ("1:1:3", "1:0:0"))
    rows = [[f"{name_of(a)} - {name_of(b)}", seeds_of(groups[a], groups[b]), cells[a, b],
             points(paired(groups[a], groups[b])), "yes" if equivalent(groups[a], groups[b]) else "no",
             minus(groups[a], groups[b], "end"), minus(groups[a], groups[b], "others"),
             f"{100 * (middle_half(groups[a]) - middle_half(groups[b])):.1f}", f"{beats(groups[a], groups[b]):.2f}",
             costs_of(groups[a], groups[b], unit), equal[a, b], sampled[a, b]]
            for a, b in CONTRASTS]
    note = ("Each method at its own rate. * is significant at 5% after Holm's correction over the first four rows. "
            "Paired: by seed. Equivalent: the 90% interval lies within one point of 0. Others: 512 puzzles that were "
            "not measured while training, with other random numbers, at the end. Middle half: the difference of "
            "interquartile means of area. Beats: how often a run of the first has more area than one of the second. "
            "Equal cost: at the largest cost that both reached; 1:0:0 counts sampled tokens alone. Both were added "
            "when the rest was known, with * by column.")
    return Table("Tuned, then tested", note, ["contrast", "seeds", "area", "area, paired", "equivalent", "end",
                                              "end, others", "area, middle half", "beats", "cost",
                                              "area, equal cost", "area, 1:0:0"], rows)


def table_default(tested: list[Run], others: list[Run]) -> Table | None:
    """Stage two against RLOO at the default rate, all of its seeds; others: the parts where these are."""
    groups, default = stage_two(tested), group_runs([run for run in others if run.label == RLOO])
    if not groups or not default:
        return None
    rows = [[name_of(name), seeds_of(group, default[0]), *(minus(group, default[0], figure)
                                                            for figure in ("area", "end", "pass@16"))]
            for name, group in groups.items()]
    note = ("Each method at its own rate, minus RLOO at the default rate, 2e-4. Not in the design, without correction: "
            "does a rate chosen by area cost RLOO something else?")
    return Table("Tuned, against RLOO at the default rate", note, ["method", "seeds", "area", "end", "pass@16"], rows)


def draw_tuned(tuning: list[Run], tested: list[Run], file: Path) -> None:
    """Left, area by learning rate; right, stage two's differences, at equal steps above and at equal cost below.

    Hollow are those that the design doesn't test. Nothing before the last run.
    """
    groups = stage_two(tested)
    if not groups:
        return
    figure, ((left, right),) = new_figure(2, 1, 3.4)
    draw_rates(left, {arm(group.label): group for group in group_runs(tuning)})
    names = [f"{short(a)} - {short(b)}" for a, b in CONTRASTS]
    right.axvline(0, color=GREY, lw=1)
    for y, pair in enumerate(CONTRASTS):
        steps, cost = difference(groups, pair), at_equal_cost(*(groups[name] for name in pair)).area
        draw_estimate(right, y - 0.15, in_points(steps), hollow=pair not in PRIMARY)
        draw_estimate(right, y + 0.15, in_points(cost), hollow=True, colour=PALETTE[1], marker="s")
    right.plot([], [], "o", color=PALETTE[0], label="equal steps")
    right.plot([], [], "s", color=PALETTE[1], mfc="none", label="equal cost")
    right.legend(loc="lower right", fontsize=7)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set(xlabel="points of area", title="Stage two, each at its own rate")
    save_figure(figure, file)


def short(label: str) -> str:
    """The name of an arm in the picture, which has no room for the advantage."""
    return method_name(label).replace(" advantage=rloo", "")


def draw_rates(axis: plt.Axes, groups: dict[tuple[str, float], Group]) -> None:
    """Each method's area by its learning rate, with 95% intervals."""
    for i, (name, (colour, line)) in enumerate(STYLES.items()):
        rates = sorted(rate for label, rate in groups if label == name)
        found = [t_estimate(100 * groups[name, rate].values("area")) for rate in rates]
        half = [e.high - e.value for e in found]
        beside = [rate * 1.012 ** (i - 2.5) for rate in rates]  # so that intervals don't hide each other
        axis.errorbar(beside, [e.value for e in found], half, color=colour, ls=line, marker="o", ms=4,
                      label=short(name))
    axis.set_xscale("log")
    axis.set_xticks([1.4e-4, 2e-4, 2.8e-4, 4e-4], ["1.4e-4", "2e-4", "2.8e-4", "4e-4"])
    axis.minorticks_off()
    axis.set(xlabel="learning rate", ylabel="area, %", title="Stage one")
    axis.legend(fontsize=7)


def difference(groups: dict[str, Group], pair: tuple[str, str]) -> Estimate:
    """Welch's difference of two methods in area."""
    return welch(*(groups[name].values("area") for name in pair))


def paired(a: Group, b: Group) -> Estimate:
    """The mean difference of area by seed, on the seeds that both have."""
    seeds = sorted(a.rows.keys() & b.rows.keys())
    return t_estimate(np.array([a.rows[seed]["area"] - b.rows[seed]["area"] for seed in seeds]))


def equivalent(a: Group, b: Group, margin: float = 0.01) -> bool:
    """Whether the 90% interval of the difference of area (Welch) lies within the margin on both sides of 0."""
    e = contrast((1, a.values("area")), (-1, b.values("area")), outside=0.10)
    return max(e.high, -e.low) < margin


def middle_half(group: Group) -> float:
    """The interquartile mean of area: the mean of its middle half, with the runs at the edges counted in part."""
    area = np.sort(group.values("area"))
    sums, n = np.concatenate(([0.0], area.cumsum())), len(area)
    low, high = np.interp([n / 4, 3 * n / 4], np.arange(n + 1), sums)
    return float((high - low) / (n / 2))


def beats(a: Group, b: Group) -> float:
    """The probability that a run of one group has more area than a run of the other, ties counting half."""
    d = a.values("area")[:, None] - b.values("area")
    return float((d > 0).mean() + (d == 0).mean() / 2)
