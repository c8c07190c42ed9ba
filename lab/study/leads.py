"""Does it hold elsewhere? Each method minus RLOO, at every level and with several updates on each batch.

At equal steps, a method is compared with RLOO in the same setting. At equal cost, it is compared with RLOO at its best:
one update on each batch, at the usual learning rate, and more steps if the method costs much more.
"""
from typing import Callable, NamedTuple

from analyze import RLOO
from lab.estimates import points
from lab.statistics import holm
from lab.study.budget import EqualCost, at_equal_cost, cost_unit, spent, spent_enough
from lab.study.rows import FIRST, MORE_ANSWERS, RATIO, Levels, compared_groups, name_of, seeds_of, with_asterisks
from plumbing.report import Estimate, Table, contrast
from plumbing.runs import Group, Run, group_runs

SHOWN = (RLOO, MORE_ANSWERS, "none answers=64 advantage=rloo", "vineppo", "ppo", RATIO, "optimal_baseline", "none")
HALF = 0.5  # of a method's cost: RLOO must have spent as much, since nothing else costs what several updates do


class Lead(NamedTuple):
    """A method in one setting. Its group has RLOO in the same setting as its baseline."""

    where: str  # a level, or the number of updates on each batch and the learning rate
    group: Group
    unit: float  # the cost of GRPO's run at this level
    rloo: Group | None  # RLOO's shortest run, one update on each batch, that spent enough; None without any
    at_cost: EqualCost | None  # the group minus that run

    @property
    def key(self) -> tuple[str, str]:
        """The label of the method, and the setting."""
        return self.group.label, self.where


def leads_by_level(levels: Levels) -> dict[str, list[Lead]]:
    """The leads of SHOWN at each level."""
    plain = {level: compared_groups(parts) for level, parts in levels.items()}
    return {level: list_leads(level, groups, groups) for level, groups in plain.items()}


def leads_with_updates(levels: Levels) -> list[Lead]:
    """The leads of SHOWN on easy puzzles with several updates on each batch."""
    plain = compared_groups(levels[FIRST])
    return [lead for where, groups in group_by_updates(levels[FIRST].get("updates", [])).items()
            for lead in list_leads(where, groups, plain)]


def group_by_updates(runs: list[Run]) -> dict[str, list[Group]]:
    """Runs with several updates on each batch, by their number and the learning rate; labelled as with one update."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        flags = dict(word.split("=") for word in run.setting.split())
        where = f"{flags.pop('updates_per_batch')} updates" + (f", lr {flags.pop('lr')}" if "lr" in flags else "")
        setting = " ".join(f"{name}={value}" for name, value in flags.items())
        label = f"{run.label.removesuffix(run.setting).strip()} {setting}".strip()
        settings.setdefault(where, []).append(run._replace(label=label, setting=setting))
    return {where: group_runs(members) for where, members in settings.items()}


def list_leads(where: str, groups: list[Group], plain: list[Group]) -> list[Lead]:
    """SHOWN in a setting that has RLOO; `plain` are the groups of its level, with one update on each batch."""
    by_label, unit, found = {group.label: group for group in groups}, cost_unit(plain), []
    for label in SHOWN if RLOO in by_label else ():
        if label not in by_label or (label == RLOO and groups is plain):
            continue
        group = Group(label, by_label[label].rows, by_label[RLOO])
        enough = [other for other in plain if is_rloo(other.label) and spent_enough(group, other, HALF)]
        rloo = min(enough, key=lambda other: spent(other)[-1], default=None)
        found.append(Lead(where, group, unit, rloo, at_equal_cost(group, rloo) if rloo else None))
    return found


def is_rloo(label: str) -> bool:
    """Whether this is RLOO with its usual number of responses, however many steps it takes."""
    return {"none", "advantage=rloo"} <= {*label.split()} and "answers=" not in label


def change(here: Group, there: Group) -> Estimate:
    """By how much more area a method is ahead of RLOO in one setting than in another."""
    signs = {1: (here, there.baseline), -1: (here.baseline, there)}
    return contrast(*((sign, group.values("area")) for sign, pair in signs.items() for group in pair))


def changed(leads: list[Lead]) -> set[tuple[str, str]]:
    """Keys of the leads at equal steps that differ from those on easy puzzles, after Holm's correction."""
    first = {lead.group.label: lead.group for lead in leads if lead.where == FIRST}
    changes = {lead.key: change(lead.group, first[lead.group.label]) for lead in leads
               if lead.where != FIRST and lead.group.label in first}
    return holm({key: e.p for key, e in changes.items()})


def tables_leads(levels: Levels) -> list[Table]:
    """The leads at the levels, and those with several updates."""
    by_level, updates = leads_by_level(levels), leads_with_updates(levels)
    everywhere = sum(by_level.values(), [])
    steps = {}
    for family in (*by_level.values(), updates):
        steps |= keyed([lead for lead in family if lead.group.label != RLOO], lambda lead: lead.group.difference("area"))
    for key in changed(everywhere + updates):
        steps[key] += " †"
    cost = {lead.key: points(lead.at_cost.area) for lead in everywhere if lead.at_cost}
    cost |= keyed([lead for lead in updates if lead.at_cost], lambda lead: lead.at_cost.area)

    note = ("Minus RLOO in the same setting after as many steps; then, at the largest cost that both reached, minus the "
            "shortest run of RLOO, one update on each batch, that spent half as much, if there is one. † differs from "
            "the same method's lead on easy puzzles, after Holm's correction over both tables of leads. ")
    stars = {"Leads over RLOO": "* at equal steps, by level; at equal cost see *Equal cost*.",
             "Leads over RLOO with several updates": "* by column."}
    header = ["method", "setting", "seeds", "cost", "area, equal steps", "end, equal steps", "RLOO run", "at cost",
              "area, equal cost", "end, equal cost"]
    return [Table(title, note + star, header, lead_rows(leads, steps, cost))
            for (title, star), leads in zip(stars.items(), (everywhere, updates)) if leads]


def keyed(leads: list[Lead], area: Callable[[Lead], Estimate]) -> dict[tuple[str, str], str]:
    """A cell for the area of each lead, by key, with asterisks."""
    return dict(zip((lead.key for lead in leads), with_asterisks([area(lead) for lead in leads])))


def lead_rows(leads: list[Lead], steps: dict, cost: dict) -> list[list[str]]:
    """The rows of a table, method by method. steps, cost: the cells of both areas by key."""
    rows = []
    for lead in sorted(leads, key=lambda lead: SHOWN.index(lead.group.label)):  # which keeps the order of settings
        label, where, group, found = *lead.key, lead.group, lead.at_cost
        at_steps = [steps[lead.key], points(group.difference("end"))] if lead.key in steps else [""] * 2
        at_cost = [name_of(lead.rloo.label), f"{found.cost / lead.unit:.2f}", cost[lead.key],
                   points(found.end)] if found else [""] * 4
        rows.append([name_of(label), where, seeds_of(group, group.baseline), f"{spent(group)[-1] / lead.unit:.2f}",
                     *at_steps, *at_cost])
    return rows
