"""Does it hold elsewhere? Each method minus RLOO, at every level and with several updates on each batch.

At equal steps, a method is compared with RLOO in the same setting. At equal cost, it is compared with RLOO at its best:
one update on each batch, at the usual learning rate, and more steps if the method costs much more.
"""
import re
from typing import NamedTuple

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
    """A method in one setting: a level, or a number of updates on each batch and a learning rate."""

    group: Group  # its baseline is RLOO in the same setting
    cost: float  # of its run, in units of GRPO's at this level
    rloo: Group | None  # RLOO's shortest run, one update on each batch, that spent enough; None without any
    minus_rloo: EqualCost | None  # the group minus that, its cost in the same units


Leads = dict[tuple[str, str], Lead]  # by label of the method and setting


def leads_by_level(levels: Levels) -> list[Leads]:
    """The leads of SHOWN at each level."""
    plain = {level: compared_groups(parts) for level, parts in levels.items()}
    return [list_leads(level, groups, groups) for level, groups in plain.items()]


def leads_with_updates(levels: Levels) -> Leads:
    """The leads of SHOWN on easy puzzles with several updates on each batch."""
    plain, leads = compared_groups(levels[FIRST]), {}
    for setting, groups in group_by_updates(levels[FIRST].get("updates", [])).items():
        leads |= list_leads(setting, groups, plain)
    return leads


def group_by_updates(runs: list[Run]) -> dict[str, list[Group]]:
    """Runs with several updates on each batch, by their number and the learning rate; labelled as with one update."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        flags = dict(word.split("=") for word in run.setting.split())
        name = f"{flags['updates_per_batch']} updates" + (f", lr {flags['lr']}" if "lr" in flags else "")
        label, setting = (re.sub(r" ?(updates_per_batch|lr)=\S+", "", text).strip()
                          for text in (run.label, run.setting))
        settings.setdefault(name, []).append(run._replace(label=label, setting=setting))
    return {name: group_runs(members) for name, members in settings.items()}


def list_leads(setting: str, groups: list[Group], plain: list[Group]) -> Leads:
    """SHOWN in a setting that has RLOO; `plain` are the groups of its level, with one update on each batch."""
    by_label, unit, leads = {group.label: group for group in groups}, cost_unit(plain), {}
    for label in SHOWN if RLOO in by_label else ():
        if label in by_label and not (label == RLOO and groups is plain):
            group = Group(label, by_label[label].rows, by_label[RLOO])
            enough = [other for other in plain if is_rloo(other.label) and spent_enough(group, other, HALF)]
            rloo, found = min(enough, key=lambda other: spent(other)[-1], default=None), None
            if rloo:
                found = at_equal_cost(group, rloo)
                found = found._replace(cost=found.cost / unit)
            leads[label, setting] = Lead(group, spent(group)[-1] / unit, rloo, found)
    return leads


def is_rloo(label: str) -> bool:
    """Whether this is RLOO with its usual number of responses, however many steps it takes."""
    return {"none", "advantage=rloo"} <= {*label.split()} and "answers=" not in label


def change(here: Group, there: Group) -> Estimate:
    """By how much more area a method is ahead of RLOO in one setting than in another."""
    signs = {1: (here, there.baseline), -1: (here.baseline, there)}
    return contrast(*((sign, group.values("area")) for sign, pair in signs.items() for group in pair))


def changed(leads: Leads) -> set[tuple[str, str]]:
    """Keys of the leads at equal steps that differ from those on easy puzzles, after Holm's correction."""
    changes = {(label, setting): change(lead.group, leads[label, FIRST].group)
               for (label, setting), lead in leads.items() if setting != FIRST and (label, FIRST) in leads}
    return holm({key: e.p for key, e in changes.items()})


def tables_leads(levels: Levels) -> list[Table]:
    """The leads at the levels, and those with several updates."""
    by_level, updates, everywhere, steps, cost = leads_by_level(levels), leads_with_updates(levels), {}, {}, {}
    for leads in by_level:
        everywhere |= leads
    for leads in (*by_level, updates):
        steps |= with_asterisks({key: lead.group.difference("area") for key, lead in leads.items() if key[0] != RLOO})
        cost |= with_asterisks({key: lead.minus_rloo.area for key, lead in leads.items() if lead.rloo})
    for key in changed(everywhere | updates):
        steps[key] += " †"
    note = ("Minus RLOO in the same setting after as many steps; then, at the largest cost that both reached, minus "
            "the shortest run of RLOO, one update on each batch, that spent half as much, if there is one. † differs "
            "from the same method's lead on easy puzzles, after Holm's correction over both tables of leads. ")
    header = ["method", "setting", "seeds", "cost", "area, equal steps", "end, equal steps", "RLOO run", "at cost",
              "area, equal cost", "end, equal cost"]
    tables = [Table("Leads over RLOO", note + "* by level and column.", header, lead_rows(everywhere, steps, cost)),
              Table("Leads over RLOO with several updates", note + "* by column.", header,
                    lead_rows(updates, steps, cost))]
    return [table for table in tables if table.rows]


def lead_rows(leads: Leads, steps: dict, cost: dict) -> list[list[str]]:
    """The rows of a table, method by method. steps, cost: the cells of both areas by key."""
    rows = []
    for label, setting in sorted(leads, key=lambda key: SHOWN.index(key[0])):  # which keeps the order of settings
        key = label, setting
        group, own_cost, rloo, found = leads[key]
        at_steps = [steps[key], points(group.difference("end"))] if key in steps else [""] * 2
        at_cost = [name_of(rloo.label), f"{found.cost:.2f}", cost[key], points(found.end)] if rloo else [""] * 4
        rows.append([name_of(label), setting, seeds_of(group, group.baseline), f"{own_cost:.2f}", *at_steps, *at_cost])
    return rows
