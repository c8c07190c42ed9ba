"""Which rule should I use? The methods with most seeds, each against RLOO after as many steps.

RLOO gives all tokens of a response the same credit and costs what GRPO costs, so whatever gives credit token by token
has to be ahead of it. The table is part of the study: python -m lab.study.run --tables
"""
from analyze import RLOO, method_name
from lab.estimates import points
from lab.statistics import holm
from plumbing.report import Estimate, Table
from plumbing.runs import Group, Run, group_runs

MORE_ANSWERS = "none answers=45 advantage=rloo"  # RLOO for what vineppo costs on easy puzzles
CHEAPER = "vineppo cuts=uncertain"  # a form of vineppo for two thirds of its cost
RATIO = "entropy_ratio advantage=rloo"  # the reweighting furthest ahead of GRPO, here of RLOO's advantage
RIVALS = (MORE_ANSWERS, "none answers=64 advantage=rloo",  # and on hard ones
          "vineppo", "ppo", RATIO, "optimal_baseline", "none")
CHOSEN = range(5)  # seeds by which version 1 of the study chose them
MARGIN = 0.015  # of area: a smaller difference is a tie; a convention, set when most of the runs were known
RESULT = (f"Result: ahead or behind with a star, tie where the interval lies within {100 * MARGIN:g} points of 0, open "
          "otherwise.")


def name_of(label: str) -> str:
    """What a method is called in a table: GRPO and RLOO by name, others by their label, as code."""
    return method_name(label) if is_opponent(label) else f"`{label}`"


def is_opponent(label: str) -> bool:
    """Whether all tokens of a response get the same credit: GRPO or RLOO."""
    return label.split()[0] == "none"


def contenders(parts: dict[str, list[Run]]) -> list[Group]:
    """The groups of a level that are compared with RLOO: the main table's, two forms, and opponents that spend more."""
    forms = [run for run in parts.get("forms", []) if run.label in (CHEAPER, RATIO)]
    return group_runs(parts["main"] + forms + parts.get("budget", []))


def against_rloo(groups: list[Group]) -> list[Group]:
    """The same groups with RLOO as their baseline, for pictures; with the one they have where RLOO is missing."""
    rloo = {group.label: group for group in groups}.get(RLOO)
    return [Group(group.label, group.rows, rloo or group.baseline) for group in groups if group is not rloo]


def results(differences: dict[str, Estimate]) -> dict[str, tuple[str, str]]:
    """For each difference a cell in points, with * after Holm's correction over all of them, and its result."""
    stars = holm({label: e.p for label, e in differences.items()})
    return {label: (points(e) + " *" * (label in stars), result(e, label in stars))
            for label, e in differences.items()}


def result(e: Estimate, star: bool) -> str:
    """What a difference of areas says: ahead, behind, tie or open."""
    if star:
        return "ahead" if e.value > 0 else "behind"
    return "tie" if -MARGIN <= e.low and e.high <= MARGIN else "open"


def table_rivals(level: str, groups: list[Group], costs: dict[str, float]) -> Table:
    """RIVALS minus RLOO after as many steps, with a result for each."""
    rivals = {group.label: group for group in against_rloo(groups) if group.compared and group.baseline.label == RLOO}
    areas, rows = {label: rivals[label].difference("area") for label in RIVALS if label in rivals}, []
    for label, (area, said) in results(areas).items():
        rival = rivals[label]
        parts = [of_seeds(rival, chosen).difference("area") for chosen in (True, False)]
        rest = [rival.difference(figure) for figure in ("end", "pass@16")]
        rows.append([name_of(label), f"{len(rival.rows)}, {len(rival.baseline.rows)}", area, said,
                     *map(points, parts + rest), f"{costs[label]:.2f}"])
    note = ("Each method minus RLOO after as many steps, in points, ± half of Welch's 95% interval; seeds of the "
            "method, of RLOO. Judged by area, mean success while training: * significant at 5% after Holm's correction "
            f"over these rows. {RESULT} The first edition chose the methods by seeds 0 to 4; later seeds are a test. "
            "Cost: weighted tokens of a run (sampled and read 1, updated 3), in units of GRPO's.")
    header = ["method", "seeds", "area", "result", "seeds 0 to 4", "later seeds", "end", "pass@16", "cost"]
    return Table(f"Against RLOO, {level}", note, header, rows)


def of_seeds(group: Group, chosen: bool) -> Group:
    """A group and its baseline with their seeds in CHOSEN alone, or with their other ones."""
    rows, of_baseline = ({seed: row for seed, row in g.rows.items() if (seed in CHOSEN) == chosen}
                         for g in (group, group.baseline))
    return Group(group.label, rows, Group(group.baseline.label, of_baseline))
