"""How far does it travel? What some methods learned more than RLOO, by level, size of the model and updates on a batch.

A *place* is a level of experiments/study.py, or a number of updates on each batch of easy puzzles, with the usual
learning rate or another. Each has its own runs of RLOO to compare with. The table and the picture are part of the
study: python -m experiments.study --tables
"""
from pathlib import Path

from analyze import RLOO, draw_differences, method_name
from experiments.study_rivals import MORE_ANSWERS, against_rloo, name_of
from plumbing.report import Estimate, Table, contrast, holm, new_figure, points, save_figure, t_estimate
from plumbing.runs import Group, Run, group_runs

SHOWN = (MORE_ANSWERS, "vineppo", "ppo", "optimal_baseline", "none", "entropy_weighted", "entropy_masking",
         "attention_credit")
FIRST = "easy"  # the place where all methods ran
FIGURE = "area"  # what is judged

Places = dict[str, list[Group]]


def by_place(levels: dict[str, dict[str, list[Run]]]) -> Places:
    """The groups of each place: all levels first, then easy puzzles with more updates, labelled as with one."""
    runs = {level: parts["main"] + parts.get("budget", []) for level, parts in levels.items()}
    for run in levels[FIRST].get("updates", []):
        flags = dict(word.split("=") for word in run.setting.split())
        place = f"{flags.pop('updates_per_batch')} updates" + (f", lr {flags.pop('lr')}" if "lr" in flags else "")
        setting = " ".join(f"{name}={value}" for name, value in flags.items())
        label = f"{run.label.removesuffix(run.setting).strip()} {setting}".strip()
        runs.setdefault(place, []).append(run._replace(label=label, setting=setting))
    return {place: group_runs(members) for place, members in runs.items()}


def gains(places: Places) -> dict[str, dict[str, Group]]:
    """For each place that has RLOO, the groups of SHOWN by label, with RLOO as their baseline."""
    found = {place: {group.label: group for group in against_rloo(groups) if group.label in SHOWN}
             for place, groups in places.items() if any(group.label == RLOO for group in groups)}
    return {place: groups for place, groups in found.items() if groups}


def change(here: Group, there: Group) -> Estimate:
    """What a method is ahead of RLOO in one place minus what it is in another."""
    signs = {1: (here, there.baseline), -1: (here.baseline, there)}
    return contrast(*((sign, group.values(FIGURE)) for sign, pair in signs.items() for group in pair))


def table_travel(places: Places) -> Table:
    """The difference to RLOO of each method, at each place."""
    found = gains(places)
    first = found.get(FIRST, {})
    changes = {(place, label): change(group, first[label]) for place, groups in found.items()
               for label, group in groups.items() if place != FIRST and label in first}
    marked = holm({key: e.p for key, e in changes.items()})
    rows = [["RLOO, area", *(f"{points(t_estimate(g.values(FIGURE)))}, n = {len(g.rows)}"
                              for groups in found.values() for g in [next(iter(groups.values())).baseline])]]
    for label in (label for label in SHOWN if any(label in groups for place, groups in found.items())):
        cells = [f"{points(groups[label].difference(FIGURE))}{' †' * ((place, label) in marked)}, "
                 f"n = {len(groups[label].rows)}" if label in groups else "" for place, groups in found.items()]
        rows.append([name_of(label), *cells])
    note = ("Mean success while training: that of RLOO in percent, then the differences to RLOO at the same place in "
            "points, ± half of a 95% interval, with n seeds. † differs from the same method's difference on easy "
            "puzzles, after Holm's correction over all cells but those of easy puzzles. Places: levels as in "
            "experiments/study.py, and numbers of updates on each batch of easy puzzles, lr 2e-4 where no "
            "other is named. Empty where no run was made.")
    return Table("How far it travels", note, ["method", *found], rows)


def draw_travel(places: Places, file: Path) -> None:
    """A panel per place: each method's difference to RLOO there, with its interval and each seed."""
    found = gains(places)
    shown = [label for label in SHOWN if any(label in groups for groups in found.values())]
    columns = max(1, min(3, len(found)))
    rows = max(1, -(-len(found) // columns))
    figure, axes = new_figure(columns, rows, 0.6 + rows * (0.7 + 0.21 * len(shown)), sharex=True, sharey=True)
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, (place, groups) in zip(axes.flat, found.items()):
        draw_differences(axis, {y: groups[label] for y, label in enumerate(shown) if label in groups}, FIGURE)
        axis.set_title(f"{place}, n = {seeds_of(groups)}")
        axis.tick_params(labelbottom=True)
        for y in (y for y, label in enumerate(shown) if label not in groups):
            axis.text(0.97, y, "not run", transform=axis.get_yaxis_transform(), ha="right", va="center", fontsize=8)
    axes[0, 0].set_yticks(range(len(shown)), [method_name(label) for label in shown])
    axes[0, 0].invert_yaxis()
    figure.supxlabel("mean success while training, points more than RLOO", fontsize=10)
    save_figure(figure, file)


def seeds_of(groups: dict[str, Group]) -> str:
    """How many seeds the groups of a place have, such as 5 or 3 to 10."""
    counts = sorted({len(group.rows) for group in groups.values()})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
