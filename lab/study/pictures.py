"""The pictures of the study: what accurate credit and less noise buy, leads at tuned rates, and learning by cost.

Run it:  python -m lab.study.run --tables
"""
from pathlib import Path

import numpy as np

from analyze import method_name
from lab.estimates import points
from lab.study import decided, tables
from lab.study.engine import (EXPERT, FIRST, MORE_ANSWERS, RLOO, Levels, at_equal_cost, at_rates, cost_unit, difference,
                              measured, select, spent)
from plumbing.comparison import Group, Run
from plumbing.report import GREY, MINUS, PALETTE, PLUS, Axes, Estimate, new_figure, t_estimate
from settings import Settings

PLACES = {"oracle k=4": (-5, 5, "right"), "answers=90": (-5, 5, "right"), "answers=16": (-5, 5, "right"),
          "mix=1.0": (6, 12, "left"), "RLOO": (8, -14, "left"), "answers=180": (-8, 8, "right"),
          "answers=45": (5, -14, "left"), "mix=0.5": (5, -16, "left")}
LONGER = "RLOO, more steps"
COLOURS = {"vineppo": PALETTE[2], "entropy_ratio": PALETTE[1], "ppo": PALETTE[0], "expert_iteration": PALETTE[3],
           "none": GREY, "shuffled": MINUS, "share": MINUS, "positives": PLUS}  # one meaning in all pictures, by method


def colour_of(label: str) -> str:
    """The colour of a method, whatever its settings."""
    return COLOURS[label.split()[0]]


def short(label: str) -> str:
    """The name of an arm in a picture, which has no room for the advantage."""
    return method_name(label).replace(" advantage=rloo", "")


def draw_curve(axis: Axes, x: np.ndarray, group: Group, line: str, label: str, colour: str = "") -> None:
    """Mean held-out success over seeds in percent, and its 95% interval, at places x. colour: else the method's own."""
    curves = zip(*(row["curve"].values() for row in group.rows.values()))  # the seeds at each measurement
    mean, low, high = 100 * np.array([t_estimate(values)[:3] for values in curves]).T  # (m,) each
    colour = colour or colour_of(group.label)
    axis.plot(x, mean, line, color=colour, ms=4, label=label)
    axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)


def name_ends(axis: Axes, gap: float, down: float, names: dict[str, str]) -> None:
    """Write the name of each line of a panel right of its end, in its colour, at least `gap` apart, and `down` below
    it where there is room. names: by label."""
    lines = [line for line in axis.get_lines() if line.get_label() in names]
    below = -np.inf
    for line in sorted(lines, key=lambda line: line.get_ydata()[-1]):
        below = max(line.get_ydata()[-1] - down, below + gap)
        axis.annotate(names[line.get_label()], (line.get_xdata()[-1], below), xytext=(6, 0), va="center", fontsize=9,
                      textcoords="offset points", color=line.get_color(), annotation_clip=False)


def draw_budget(parts: dict[str, list[Run]], file: Path) -> None:
    """Learning curves of stage two, each method at its own rate, by cost (left; logarithmic, without the start) and by
    step (right). The longer run of RLOO, on the left alone, is at the default rate."""
    groups, longer = tables.stage_two(parts), tables.compared(parts)[tables.LONGER]
    unit = spent(groups[RLOO])[-1]
    figure, (left, right) = new_figure(2, 4.2, sharey=True)
    for label, line in {"vineppo": "o-", "ppo": "s-", "entropy_ratio advantage=rloo": "D-", "expert_iteration": "v-",
                        RLOO: "^-"}.items():
        costs, steps = spent(groups[label]) / unit, measured(groups[label])
        costs[0] = np.nan  # a logarithmic axis has no 0
        for axis, x in ((left, costs), (right, steps)):
            draw_curve(axis, x, groups[label], line, short(label))
    costs = spent(longer) / unit
    costs[0] = np.nan
    draw_curve(left, costs, longer, "^:", LONGER)
    left.set(xlabel="weighted tokens; 1: RLOO's 100 steps", ylabel="held-out puzzles solved, %",
             title="By cost expert_iteration leads RLOO", xscale="log", xlim=(None, 9))
    left.set_xticks([0.06, 0.25, 1, 4], ["0.06", "0.25", "1", "4"])
    left.minorticks_off()
    right.set(xlabel="step", title="By step vineppo leads", xlim=(0, 1.35 * Settings.steps))
    right.set_xticks(range(0, 101, 25))
    name_ends(left, 1.9, 0, {"vineppo": "vineppo", LONGER: LONGER})
    name_ends(right, 1.9, 1.9, {label: label for label in (short(name) for name in groups)})
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file)


def draw_difference(axis: Axes, y: float, e: Estimate, colour: str, **style) -> None:
    """A difference in points on line y, with its interval; style: of matplotlib's plot."""
    axis.plot([100 * e.low, 100 * e.high], [y, y], color=colour, lw=2, alpha=0.6)
    axis.plot(100 * e.value, y, color=colour, **style)


def draw_tuned(first: dict[str, list[Run]], file: Path) -> None:
    """Left, area by learning rate; right, differences of stage two, at equal steps (dots) and cost (squares)."""
    groups, rates = tables.stage_two(first), at_rates(select(first, "tune", "edge"))
    figure, (left, right) = new_figure(2, 3.6)
    for name in dict.fromkeys(name for pair in tables.CONTRASTS for name in pair):
        at = sorted(rate for label, rate in rates if label == name)
        found = [t_estimate(100 * rates[name, rate].values("area")) for rate in at]
        left.errorbar(at, [e.value for e in found], [e.high - e.value for e in found], color=colour_of(name),
                      marker="o", ms=4, label=short(name), alpha=0.8)
    left.set(xscale="log", xlabel="learning rate", ylabel="area: success averaged over training, %",
             title="All have most area at 2.8e-4")
    left.set_xticks([1.4e-4, 2e-4, 2.8e-4, 4e-4], ["1.4e-4", "2e-4", "2.8e-4", "4e-4"])
    left.minorticks_off()
    left.legend(labelspacing=0.2)
    right.axvline(0, color=GREY, lw=1)
    for y, (a, b) in enumerate(tables.CONTRASTS):
        draw_difference(right, y - 0.15, difference(groups[a], groups[b]), colour_of(a), marker="o")
        at_cost = at_equal_cost(groups[a], groups[b])["area"]
        draw_difference(right, y + 0.15, at_cost, colour_of(a), marker="s", mfc="none")
    right.plot([], [], "o", color=GREY, label="equal steps")
    right.plot([], [], "s", color=GREY, mfc="none", label="equal cost")
    right.legend(loc="center right", bbox_to_anchor=(1, 0.4))
    right.set_yticks(range(len(tables.CONTRASTS)), [f"{short(a)} - {short(b)}" for a, b in tables.CONTRASTS])
    right.invert_yaxis()
    right.set(xlabel="points of area", title="There three lead RLOO by step")
    figure.savefig(file)


def draw_successes(levels: Levels, file: Path) -> None:
    """Held-out success by cost in each setting."""
    pairs = tables.successes(levels)
    figure, axes = new_figure(len(pairs), 3.4)
    for axis, pair in zip(axes, pairs):
        for group, line, label in ((pair.a, "o-", EXPERT), (pair.b, "s--", "RLOO")):
            draw_curve(axis, spent(group) / pair.unit, group, line, label)
        axis.set(title=pair.setting, xlabel="cost, in GRPO's runs" if axis is axes[len(pairs) // 2] else "")
    axes[0].set_ylabel("held-out puzzles solved, %")
    figure.suptitle("By cost, own right answers only learn faster in all settings")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(file)


def draw_perfect(small: dict[str, list[Run]], file: Path) -> None:
    """Area by the accuracy of the credit, of arms with several seeds."""
    groups = {name: group for (name, _), group in at_rates(select(small, "oracle")).items()}  # they share their rate
    figure, (axis,) = new_figure(1, 4.2)
    for name, where in tables.read_accuracy().items():
        area = t_estimate(100 * groups[name].values("area"))
        across, up = ([[e.value - e.low], [e.high - e.value]] for e in (where, area))
        axis.errorbar(where.value, area.value, xerr=across, yerr=up, fmt="o", color=PALETTE[0])
        axis.annotate(tables.MEASURED[name], (where.value, area.value), textcoords="offset points", xytext=(6, 6))
    many = t_estimate(100 * groups[MORE_ANSWERS].values("area"))
    axis.axhspan(many.low, many.high, color=GREY, alpha=0.3, lw=0)
    axis.axhline(many.value, color=GREY, label="RLOO with 45 responses")
    axis.legend(loc="lower right")
    axis.set(xlabel="accuracy of the credit: Pearson's correlation with A* (identical: 1)", xlim=(0, 1),
             ylabel="area: success averaged over training, %",
             title="More accurate credit learns more, and so do more responses")
    figure.savefig(file)


def draw_noise(groups: dict[str, Group], quiet: dict[str, Estimate], file: Path) -> None:
    """Area by 1 / the noise of a step, a point an arm, and the line between RLOO's arms."""
    figure, (axis,) = new_figure(1, 4.2)
    area = {name: t_estimate(100 * group.values("area")) for name, group in groups.items() if name in quiet}
    d = decided.d_of(groups, quiet)
    for name, up in area.items():
        exact = name.startswith("oracle")
        style = {"fmt": "s", "color": PALETTE[0]} if exact else {"fmt": "o", "color": GREY}
        across, above = ([[e.value - e.low], [e.high - e.value]] for e in (quiet[name], up))
        axis.errorbar(quiet[name].value, up.value, above, across, **style)
        text = short(name).removeprefix("oracle k=4 ").removeprefix("RLOO ")
        x, y, side = PLACES.get(text, (5, -12, "left"))  # where no other point's text or bar is
        axis.annotate(text, (quiet[name].value, up.value), textcoords="offset points", color=style["color"],
                      xytext=(x, y), ha=side)
    axis.plot(*zip(*((quiet[name].value, area[name].value) for name in decided.LINE)), "o-", color=GREY,
              label="RLOO, 12 puzzles of 8 responses but for the number named")
    axis.plot([], [], "s", color=PALETTE[0], label="oracle k=4: A* from 4 rollouts; mix: with so much of r - V₀")
    axis.set(xscale="log", xlabel="1 / noise of a step's gradient, that of RLOO = 1 (logarithmic)",
             ylabel="area: success averaged over training, %",
             title=f"Exact credit minus RLOO whose updates are as noisy: {points(d)} points of area")
    axis.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axis.minorticks_off()
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center")
    figure.savefig(file)


def draw_negatives(groups: dict[str, Group], unit: float, file: Path) -> None:
    """The learning curves of section 10, by step and by cost."""
    figure, axes = new_figure(2, 4.2, sharey=True)
    for name, line in {RLOO: "^-", EXPERT: "o-", decided.SHARE: "s:", decided.POSITIVES: "D--"}.items():
        group = groups[name]
        for axis, x in zip(axes, (measured(group), spent(group) / unit)):
            draw_curve(axis, x, group, line, short(name))
    axes[0].set(xlabel="step", ylabel="held-out puzzles solved, %", title="By step only share ends lower")
    axes[1].set(xlabel="weighted tokens, in units of GRPO's default run",
                title="At the same cost RLOO ends above expert_iteration")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(file)


def write_study(file: Path) -> None:
    """The tables and pictures of a file of rows, beside it."""
    levels = tables.write_tables(file)
    draw_budget(levels[FIRST], file.with_name("budget.png"))
    draw_tuned(levels[FIRST], file.with_name("tuned.png"))
    draw_successes(levels, file.with_name("successes.png"))
    draw_perfect(levels["small"], file.with_name("perfect.png"))
    draw_noise(decided.section_9(levels["small"]), decided.read_noise(), file.with_name("noise.png"))
    unit = cost_unit(select(levels[FIRST], "main"))
    draw_negatives(decided.section_10(levels[FIRST]), unit, file.with_name("negatives.png"))
    print(f"wrote {file.with_name('tables.md')}, and pictures beside it")
