"""How far does it travel? What methods learned more than RLOO at several places, at equal steps and at equal cost.

A *place* is a level of lab/study/run.py, or easy puzzles with several updates on each batch, at the usual learning
rate or another. At equal steps, a method is compared with RLOO at the same place; at equal cost, with RLOO at its
best: one update on each batch, at the usual rate, and more steps if the method costs much more.

The table and the picture are part of the study: python -m lab.study.run --tables
"""
from pathlib import Path
from typing import Callable, NamedTuple

from analyze import RLOO
from lab.estimates import draw_estimate, points
from lab.statistics import holm
from lab.study.budget import at_equal_cost, common_cost, cost_unit, spent, spent_enough
from lab.study.rivals import MORE_ANSWERS, RATIO, contenders, name_of, results
from plumbing.report import GREY, PALETTE, Estimate, Table, contrast, new_figure, save_figure
from plumbing.runs import Group, Run, group_runs

SHOWN = (RLOO, MORE_ANSWERS, "vineppo", "ppo", RATIO, "optimal_baseline", "none")
DRAWN = {"vineppo": (PALETTE[0], "o"), "ppo": (PALETTE[1], "s"), RATIO: (PALETTE[2], "D")}  # colour and marker
HALF = 0.5  # of a method's cost: RLOO must have spent as much, since nothing else costs what several updates do
FIRST = "easy"  # the level where all methods ran, and those with several updates


class Lead(NamedTuple):
    """A method at a place. Its group has RLOO at the same place as its baseline."""

    place: str
    group: Group
    cost: float  # of its run, in units of GRPO's at this level
    opponent: Group | None  # the shortest runs of RLOO, one update on each batch, that spent enough; None without any
    at_cost: float  # the largest cost that the group and the opponent reached, NaN where there is none
    gains: tuple[Estimate, Estimate] | None  # over the opponent at that cost: success, and its mean on the way

    @property
    def key(self) -> tuple[str, str]:
        """The label of the method, and the place."""
        return self.group.label, self.place


def list_leads(levels: dict[str, dict[str, list[Run]]]) -> list[Lead]:
    """SHOWN at each place: all levels first, then easy puzzles with more updates."""
    plain = {level: contenders(parts) for level, parts in levels.items()}
    places = plain | by_updates(levels[FIRST].get("updates", []))
    return [lead for place, groups in places.items()
            for lead in leads_at(place, groups, plain.get(place, plain[FIRST]))]


def by_updates(runs: list[Run]) -> dict[str, list[Group]]:
    """Runs with several updates on each batch, by their number and the learning rate; labelled as with one update."""
    places: dict[str, list[Run]] = {}
    for run in runs:
        flags = dict(word.split("=") for word in run.setting.split())
        place = f"{flags.pop('updates_per_batch')} updates" + (f", lr {flags.pop('lr')}" if "lr" in flags else "")
        setting = " ".join(f"{name}={value}" for name, value in flags.items())
        label = f"{run.label.removesuffix(run.setting).strip()} {setting}".strip()
        places.setdefault(place, []).append(run._replace(label=label, setting=setting))
    return {place: group_runs(members) for place, members in places.items()}


def leads_at(place: str, groups: list[Group], plain: list[Group]) -> list[Lead]:
    """SHOWN at a place that has RLOO; `plain` are the groups of its level, with one update on each batch."""
    by_label, unit, found = {group.label: group for group in groups}, cost_unit(plain), []
    for label in SHOWN if RLOO in by_label else ():
        if label not in by_label or (label == RLOO and groups is plain):
            continue
        group = Group(label, by_label[label].rows, by_label[RLOO])
        enough = [other for other in plain if is_rloo(other.label) and spent_enough(group, other, HALF)]
        opponent = min(enough, key=lambda other: spent(other)[-1], default=None)
        at_cost, gains = float("nan"), None
        if opponent:
            at_cost, gains = common_cost(group, opponent) / unit, at_equal_cost(group, opponent)
        found.append(Lead(place, group, float(spent(group)[-1]) / unit, opponent, at_cost, gains))
    return found


def is_rloo(label: str) -> bool:
    """Whether this is RLOO with its usual number of responses, however many steps it takes."""
    return {"none", "advantage=rloo"} <= {*label.split()} and "answers=" not in label


def change(here: Group, there: Group) -> Estimate:
    """By how much more area a method is ahead of RLOO in one place than in another."""
    signs = {1: (here, there.baseline), -1: (here.baseline, there)}
    return contrast(*((sign, group.values("area")) for sign, pair in signs.items() for group in pair))


def changed(leads: list[Lead]) -> set[tuple[str, str]]:
    """Labels and places where the lead at equal steps differs from that on easy puzzles, after Holm's correction."""
    first = {lead.group.label: lead.group for lead in leads if lead.place == FIRST}
    changes = {lead.key: change(lead.group, first[lead.group.label]) for lead in leads
               if lead.place != FIRST and lead.group.label in first}
    return holm({key: e.p for key, e in changes.items()})


def tables_travel(leads: list[Lead]) -> list[Table]:
    """The leads at the levels, and those with several updates."""
    marked = changed(leads)
    note = ("Differences in points, ± half of a 95% interval: first to RLOO at the same place at equal steps, then "
            "to the opponent at equal cost, the largest that both reached. Area: mean success over the steps, or over "
            "the cost up to there. The opponent is RLOO with one update on each batch, at the usual learning rate: its "
            "shortest run that spent half as much; empty where none did. Seeds of the method and of RLOO at the place; "
            "cost in units of GRPO's run at the level. † the lead differs from the same method's on easy puzzles, "
            "after Holm's correction over all such differences in both tables of leads. ")
    starred = "* significant at 5% after Holm's correction over the column."
    levels = "Stars are in the tables of the levels, *Against RLOO* and *Equal cost*."
    header = ["method", "place", "seeds", "cost", "area - RLOO", "end - RLOO", "opponent", "at cost",
              "area - opponent", "end - opponent"]
    plain, updates = ([lead for lead in leads if ("updates" in lead.place) == several] for several in (False, True))
    tables = [Table("How far it travels", note + levels, header, rows_of(plain, marked, uncorrected)),
              Table("Leads with several updates", note + starred, header, rows_of(updates, marked, results))]
    return [table for table in tables if table.rows]


def uncorrected(differences: dict[tuple[str, str], Estimate]) -> dict[tuple[str, str], tuple[str, str]]:
    """As `results`, without stars and results: where other tables have them, corrected for their own rows."""
    return {key: (points(e), "") for key, e in differences.items()}


def rows_of(leads: list[Lead], marked: set[tuple[str, str]], cells: Callable) -> list[list[str]]:
    """The rows of a table, method by method; marked: those with a dagger; cells: `results` or `uncorrected`."""
    leads = sorted(leads, key=lambda lead: SHOWN.index(lead.group.label))  # which keeps the order of places
    steps = cells({lead.key: lead.group.difference("area") for lead in leads if lead.group.label != RLOO})
    equal = cells({lead.key: lead.gains[1] for lead in leads if lead.gains})
    rows = []
    for lead in leads:
        group, in_steps, at_cost = lead.group, [""] * 2, [""] * 4
        if lead.key in steps:
            in_steps = [steps[lead.key][0] + " †" * (lead.key in marked), points(group.difference("end"))]
        if lead.key in equal:
            at_cost = [name_of(lead.opponent.label), f"{lead.at_cost:.2f}", equal[lead.key][0], points(lead.gains[0])]
        seeds = f"{len(group.rows)}, {len(group.baseline.rows)}"
        rows.append([name_of(group.label), lead.place, seeds, f"{lead.cost:.2f}", *in_steps, *at_cost])
    return rows


def draw_travel(leads: list[Lead], file: Path) -> None:
    """The area that DRAWN are ahead of RLOO, a line per place: at equal steps (left) and at equal cost (right)."""
    places = list(dict.fromkeys(lead.place for lead in leads))
    figure, axes = new_figure(2, 1, 1.5 + 0.5 * len(places), sharey=True)
    for lead in (lead for lead in leads if lead.group.label in DRAWN):
        colour, marker = DRAWN[lead.group.label]
        y = places.index(lead.place) + 0.25 * (list(DRAWN).index(lead.group.label) - 1)
        for axis, e in zip(axes[0], (lead.group.difference("area"), lead.gains and lead.gains[1])):
            if e:
                draw_estimate(axis, y, Estimate(*(100 * x for x in e[:3])), len(lead.group.rows) < 2, colour=colour,
                              marker=marker)
            else:
                axis.text(0.5, y, "no run of RLOO cost enough", transform=axis.get_yaxis_transform(), ha="center",
                          va="center", fontsize=8, color=colour)
    for axis, title in zip(axes[0], ("At equal steps", "At equal cost, against RLOO with one update")):
        axis.axvline(0, color=GREY, lw=1)
        axis.set(title=title, xlabel="mean success, points more than RLOO")
    axes[0, 0].set_yticks(range(len(places)), places)
    axes[0, 0].set_ylim(len(places) - 0.5, -0.5)
    handles = [axes[0, 0].plot([], [], marker, color=colour, label=label)[0]
               for label, (colour, marker) in DRAWN.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(DRAWN))
    save_figure(figure, file)
