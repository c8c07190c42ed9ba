"""Do rewards for true calculations help, added to the outcome? The table of section 3 of designs.md.

    python -m lab.study.run --parts process && python -m lab.study.run --tables
"""
from analyze import RLOO
from lab.estimates import points
from lab.study.rows import name_of, with_asterisks
from plumbing.report import Table, interval, pm, t_estimate, welch
from plumbing.runs import Group, Run, group_runs
from train import Settings

GROUP_FORM, PPO_FORM = "process_reward", "ppo_process"
CONTRASTS = ((f"{GROUP_FORM} advantage=rloo", RLOO), (f"{GROUP_FORM} process=0.5 advantage=rloo", RLOO),
             (PPO_FORM, "ppo"), (f"{PPO_FORM} process=0.5", "ppo"), ("first_error solver=True", RLOO),
             ("reward_decomposition stepwise=True advantage=rloo", RLOO),
             ("regrade_ablation tokens=True advantage=rloo", RLOO))


def length(group: Group) -> str:
    """A cell: the tokens of a response, averaged over a run."""
    responses = group.values("steps") * Settings.questions * Settings.answers
    return pm(*interval(group.values("tokens_sampled") / responses), 1)


def table_process(parts: dict[str, list[Run]]) -> Table:
    """Process rewards against what they are added to, on the seeds of the process rewards."""
    seeds = {run.seed for run in parts["process"]}
    runs = [run for name in ("main", "forms", "process") for run in parts.get(name, []) if run.seed in seeds]
    groups = {group.label: group for group in group_runs(runs)}
    pairs = [pair for pair in CONTRASTS if {*pair} <= groups.keys()]
    area = with_asterisks({(a, b): welch(groups[a].values("area"), groups[b].values("area")) for a, b in pairs})
    rows = [[name_of(a), name_of(b), f"{len(groups[a].rows)}", points(t_estimate(groups[a].values("end"))), area[a, b],
             points(welch(groups[a].values("end"), groups[b].values("end"))), length(groups[a]), length(groups[b])]
            for a, b in pairs]
    note = ("Differences of area and of the end. * after Holm's correction over the column. Length: tokens in a "
            "response.")
    return Table("Process rewards, easy", note,
                 ["method", "minus", "seeds", "end", "area", "end, difference", "length", "its length"], rows)
