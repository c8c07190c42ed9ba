"""The tables of the study: most are a list of pairs of groups and a list of columns, made by lab/study/engine.py.

    python -m lab.study.run --tables        writes tables.md and tables-1.md beside runs.csv, and the pictures

Asterisks stand only where a question of the pages is answered, and each table says over what it corrects. Section
numbers are those of designs.md.
"""
import re
from pathlib import Path

import numpy as np

from lab.estimates import cell, mean_cell, points, read_column
from lab.statistics import holm, jackknife, spearman, t_quantile, with_errors
from lab.study.decided import read_noise, read_signal, section_9, section_10, table_negatives, table_noise
from lab.study.engine import (BOTH, COST, COSTS_OF_BOTH, EXPERT, FIRST, METHOD, MINUS, MORE_ANSWERS, RLOO, SEEDS,
                              Column, Levels, Pair, arm, at_rates, cost_unit, difference, equal, is_uniform,
                              make_table, mean, minus, name_of, plain, read_levels, read_rows, select, spent,
                              spent_enough, together)
from lab.study.plan import COUNTED
from plumbing.comparison import Group, Run
from plumbing.report import Estimate, Table, t_estimate
from settings import Settings

RATIO, SHUFFLED = "entropy_ratio advantage=rloo", "shuffled advantage=rloo"
LONGER = "none steps=560 advantage=rloo"  # the same by more steps
CHEAPER = "vineppo cuts=uncertain"  # a form of vineppo for two thirds of its cost
SETTINGS = {"forms": "Other forms", "sweeps": "Hyper-parameters", "updates": "Several updates a batch",
            "breaks": "What breaks"}  # parts that compare settings
OLD_SETTINGS = {"main": "Methods", "sweeps": "Hyper-parameters", "unscaled": "Weights as written, not rescaled"}
OLD_METHODS = ("none", "attention_credit", "causal_ablation", "entropy_masking", "entropy_weighted", "inverse_logprob",
               "inverted", "outcome_conditional", "reward_decomposition", "value_change")  # cited of version 1
LEADING = (RLOO, MORE_ANSWERS, "none answers=64 advantage=rloo", "vineppo", "ppo", RATIO, "optimal_baseline", "none")
PRIMARY = ((RATIO, RLOO), (RATIO, SHUFFLED), ("ppo", RLOO), ("vineppo", RLOO))  # section 1: these four are corrected
CONTRASTS = (*PRIMARY, (EXPERT, RLOO))
REWARDS = (("process_reward advantage=rloo", RLOO), ("process_reward process=0.5 advantage=rloo", RLOO),
           ("ppo_process", "ppo"), ("ppo_process process=0.5", "ppo"), ("first_error solver=True", RLOO),
           ("reward_decomposition stepwise=True advantage=rloo", RLOO),
           ("regrade_ablation tokens=True advantage=rloo", RLOO))  # section 3
# Rows of accuracy.md:
MEASURED = {RLOO: "RLOO", "vineppo": "vineppo", "oracle k=4": "oracle k=4", "oracle": "oracle k=16"}
TRUTH, GRADIENTS = "lab/truth/scores.md", "lab/gradients/tables.md"
ALL, INSIDE = "Credit against A*, all tokens", "Credit against A* and the solver, within responses"
SCORES = {  # what is known of a method before training: the table and column that has it, and what it means
    "cosine with A*": (TRUTH, ALL, "cosine of update", "cosine of its update with that of A*, 256 responses"),
    "rank, all tokens": (TRUTH, ALL, "Spearman", "rank correlation with A*, all tokens"),
    "rank in response": (TRUTH, INSIDE, "Spearman", "rank correlation with A* within responses"),
    "solver": (TRUTH, INSIDE, "solver", "rank correlation with the solver's verdict"),
    "signal to noise": (GRADIENTS, "Noise and bias of each method's gradient", "signal to noise",
                        "signal to noise of its gradient, 16 batches of 48 responses")}
ROOT = Path(__file__).parents[2]
LEGEND = """Success is that on held-out puzzles, in percent; differences are in points. ± is half of a 95% interval
over seeds: Student's t, or Welch's t of a difference. *Area* is success averaged over training, or over the cost,
linear between measurements; where one side was measured more often, both are read at the other's steps. *End* is
success at the last step, or at the named cost. RLOO is `--mitigation none --advantage rloo`: GRPO without the division
by the standard deviation. *Cost* is a run's weighted tokens (sampled and read 1, updated on 3), in units of GRPO's
default run. Two numbers of seeds: of the method, and of what it is compared with. * is significant at 5% after Holm's
correction over the column, or over a level's part of it.
"""


# ------------------------------------------------------------------------------------------------- each level


def compared(parts: dict[str, list[Run]]) -> dict[str, Group]:
    """The groups of a level that its comparisons name: the main table's, two forms, and longer or larger runs."""
    forms = [run for run in parts.get("forms", []) if run.label in (CHEAPER, RATIO)]
    return select(parts | {"two forms": forms}, "main", "two forms", "budget")


def by_area(groups: dict[str, Group]) -> list[Group]:
    """Groups from the largest mean success while training to the smallest."""
    return sorted(groups.values(), key=lambda group: -group.values("area").mean())


def table_methods(level: str, parts: dict[str, list[Run]]) -> Table:
    """All methods of a level against GRPO and RLOO, in the order of their area."""
    groups = select(parts, "main")
    none = groups["none"]
    usual = none.values("gradient norm").mean()
    note = (f"After {none.values('steps').max():.0f} steps, from {100 * none.values('start').mean():.1f} at the start. "
            "pass@16: puzzles solved by at least one of 16 responses. Gradient: its norm as a multiple of GRPO's. "
            f"Among so many rows one interval in twenty excludes 0 by chance. {power(groups)}")
    pairs = [Pair(group, none, groups.get(RLOO), cost_unit(groups)) for group in by_area(groups)]
    return make_table(f"Methods, {level}", note, pairs, [
        METHOD, SEEDS, mean("end"), mean("area"), mean("pass@16"), minus("area - GRPO"),
        minus("area - RLOO", second=True),
        Column("gradient", lambda pair: f"{pair.a.values('gradient norm').mean() / usual:.1f}"), COST])


def power(groups: dict[str, Group]) -> str:
    """The smallest difference that this number of seeds detects with a probability of 80%, from the usual spread."""
    seeds = min(len(group.rows) for group in groups.values())
    improved = [group for group in groups.values() if group.values("climb").mean() > 0]
    if seeds < 2 or not improved:
        return ""
    reach = t_quantile(2 * seeds - 2) + t_quantile(2 * seeds - 2, 0.4)  # 0.4: on both sides, so 20% on one
    seen = [100 * reach * np.sqrt(2 / seeds) * np.median([np.std(group.values(figure), ddof=1) for group in improved])
            for figure in ("end", "area")]
    return (f"With the median spread of the methods that end above the start, {seeds} seeds a side find a difference "
            f"of {seen[0]:.1f} points at the end, or {seen[1]:.1f} of area, four times in five, before any correction.")


def table_equal(level: str, parts: dict[str, list[Run]]) -> Table:
    """Each method that costs 1.15 times a run of GRPO minus each run of GRPO or RLOO that spent 0.75 of what it did."""
    groups = compared(parts)
    unit = cost_unit(groups)
    pairs = [Pair(group, other, unit=unit) for group in groups.values()
             if not is_uniform(group.label) and spent(group)[-1] > 1.15 * unit
             for other in groups.values() if is_uniform(other.label) and spent_enough(group, other, 0.75)]
    note = ("A method minus GRPO or RLOO, at the largest cost that both reached. Both are read at the costs of the one "
            "whose measurements are further apart. Last, the area with other weights of sampled, read and updated "
            "tokens than 1:1:3. * by column.")
    return make_table(f"Equal cost, {level}", note, pairs, [
        METHOD, MINUS, BOTH, equal("at cost", "cost"), equal("area", family=together), equal("end", "end"),
        *(equal(f"area, {name}", weights=name, family=together) for name in ("1:1:6", "1:0:0"))])


def table_scores(parts: dict[str, list[Run]], scores: dict[str, dict[str, Estimate]]) -> Table:
    """What is known of each method's credit before training, beside what it learned."""
    groups, shown = select(parts, "main"), ("cosine with A*", "rank in response", "solver")
    pairs = [Pair(group, groups["none"]) for group in by_area(groups) if group.label != RLOO]
    note = (f"Scores on the start model and the easy puzzles, with default flags ({TRUTH}): "
            f"{'; '.join(f'{name}: {SCORES[name][3]}' for name in shown)}. Brackets: 95% intervals over puzzles.")
    return make_table(f"What is known before, {FIRST}", note, pairs, [
        METHOD, *(Column(name, lambda pair, name=name: cell(score_of(pair.a, scores, name))) for name in shown),
        minus("area - GRPO"), minus("end - GRPO", "end")])


def score_of(group: Group, scores: dict[str, dict[str, Estimate]], name: str) -> Estimate:
    """A method's score, whatever flags its label names; NaN where it has none."""
    return scores[name].get(group.label.split()[0], Estimate(float("nan")))


def table_correlations(parts: dict[str, list[Run]], scores: dict[str, dict[str, Estimate]]) -> Table:
    """Rank correlation of each score with what the methods learned, over all methods and over two subsets."""
    # Not RLOO, whose credit is GRPO's in another size.
    groups = [group for group in select(parts, "main").values() if group.label != RLOO and len(group.rows) > 2]
    rows, least = [], scores["cosine with A*"]["none"].low
    for name, (_, _, _, meaning) in SCORES.items():
        scored = [group for group in groups if not np.isnan(score_of(group, scores, name).value)]
        climbed = [group for group in scored if group.values("climb").mean() > 0]
        close = [group for group in climbed if score_of(group, scores, "cosine with A*").value >= least]
        for which, some in {"all": scored, "those that climbed": climbed,
                            "of these, cosine as GRPO's or above": close}.items():
            found, areas = ([score_of(g, scores, name) for g in some], [t_estimate(g.values("area")) for g in some])
            x, y = (np.array([e.value for e in column]) for column in (found, areas))  # (M,) each
            rows.append([meaning, f"{which}, {len(some)}", cell(spearman(x, y)), cell(with_errors(found, areas))])
    note = ("Rank correlation, over methods, of scores before training with the mean area of each method's runs. First "
            "as if scores and areas were exact, with an interval for the choice of methods alone (Bonett and Wright). "
            "Then with their errors: median and 95% interval of 4,000 draws, each of which redraws every score and "
            "area from a normal law with its interval; noise lowers a correlation, so this is a cautious figure. Those "
            "that climbed ended above the start: they are selected by the outcome. As GRPO's or above: at least "
            "the lower end of the interval of GRPO's. Where a correlation vanishes in this subset, the data only show "
            "that bad scores go with bad learning.")
    return Table(f"Scores and learning, {FIRST}", note, ["score", "methods", "with area", "with errors"], rows)


def table_types(parts: dict[str, list[Run]]) -> Table:
    """Where the credit of each method went while it trained."""
    note = ("Filler / reasoning: the ratio of mean sizes over all tokens of a run. Effective sample size of a "
            "response's credit: 1 where all tokens receive the same. Varies within: the share of squared credit that "
            "remains after subtracting each response's mean.")
    pairs = [Pair(group) for group in by_area(select(parts, "main"))]
    return make_table(f"Credit by token type, {FIRST}", note, pairs, [
        METHOD, *map(plain, ("contribution, filler / reasoning", "gradient, filler / reasoning",
                             "effective sample size", "varies within"))])


def table_settings(title: str, runs: list[Run], others: list[Run]) -> Table:
    """Other hyper-parameters of some methods, beside and against their defaults, on the seeds of any of them."""
    methods = {run.label.split()[0] for run in others}
    groups = select({"runs": runs, "others": others}, "runs", "others", seeds={run.seed for run in others})
    main = {run.label for run in runs} & set(groups)
    pairs = [Pair(group, group.baseline, groups.get(default_of(label, main)))
             for label, group in sorted(groups.items()) if label.split()[0] in methods]
    note = ("On the seeds that any of the changed settings has. Area minus the baseline, GRPO or RLOO with the same "
            "settings but for the method's, and minus the default, the same method with fewer flags in the main table.")
    return make_table(title, note, pairs, [
        METHOD, SEEDS, mean("end"), mean("area"), Column("baseline", lambda pair: pair.b and name_of(pair.b.label)),
        minus("area - baseline"), minus("area - default", second=True),
        Column("gradient norm", lambda pair: f"{pair.a.values('gradient norm').mean():.2f}")])


def default_of(label: str, labels: set[str]) -> str | None:
    """The one of `labels` that is the same method with fewer flags: `none advantage=rloo` of that with lr=0.0004."""
    method, *flags = label.split()
    fewer = [other for other in labels if other.split()[0] == method and {*other.split()[1:]} < {*flags}]
    return max(fewer, key=len, default=None)


# ------------------------------------------------------------------------------------------ leads over RLOO


def leads(setting: str, groups: dict[str, Group], usual: dict[str, Group]) -> list[Pair]:
    """LEADING in a setting that has RLOO, each against that and against the shortest run of RLOO with one update on
    each batch that spent half as much (of `usual`, the groups of the level with one update)."""
    found, rloo = [], [group for label, group in usual.items()  # however many steps it takes
                       if {"none", "advantage=rloo"} <= {*label.split()} and "answers=" not in label]
    for label in LEADING if RLOO in groups else ():
        if label in groups and not (label == RLOO and groups is usual):
            enough = [other for other in rloo if spent_enough(groups[label], other, 0.5)]
            cheapest = min(enough, key=lambda other: spent(other)[-1], default=None)
            found.append(Pair(groups[label], groups[RLOO], cheapest, cost_unit(usual), setting))
    return found


def by_updates(runs: list[Run]) -> dict[str, dict[str, Group]]:
    """Runs with several updates on each batch, by their number and the learning rate; labelled as with one update."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        flags = dict(word.split("=") for word in run.setting.split())
        name = f"{flags['updates_per_batch']} updates" + (f", lr {flags['lr']}" if "lr" in flags else "")
        label, setting = (re.sub(r" ?(updates_per_batch|lr)=\S+", "", text).strip()
                          for text in (run.label, run.setting))
        settings.setdefault(name, []).append(run._replace(label=label, setting=setting))
    return {name: select({"": members}, "") for name, members in settings.items()}


def changed(pairs: list[Pair]) -> set[tuple[str, str]]:
    """The leads, by label and setting, that differ from the same method's on easy puzzles, after Holm's correction."""
    first, changes = {pair.a.label: pair for pair in pairs if pair.setting == FIRST}, {}
    for pair in pairs:
        if pair.setting != FIRST and (there := first.get(pair.a.label)):
            areas = (group.values("area") for group in (pair.a, pair.b, there.a, there.b))
            changes[pair.a.label, pair.setting] = t_estimate(*areas, weights=(1, -1, -1, 1)).p
    return holm(changes)


def tables_leads(levels: Levels) -> list[Table]:
    """The leads at the levels, and those with several updates."""
    usual = {level: compared(parts) for level, parts in levels.items()}
    everywhere = [pair for level, groups in usual.items() for pair in leads(level, groups, groups)]
    updated = [pair for setting, groups in by_updates(levels[FIRST]["updates"]).items()
               for pair in leads(setting, groups, usual[FIRST])]
    note = ("Minus RLOO in the same setting after as many steps; then, at the largest cost that both reached, minus "
            "the shortest run of RLOO, one update on each batch, that spent half as much, if there is one. † differs "
            "from the same method's lead on easy puzzles, after Holm's correction over both tables of leads. ")
    differ, tables = changed(everywhere + updated), []
    for title, pairs, family, over in (
            ("Leads over RLOO", everywhere, lambda pair: pair.setting, "* by level and column."),
            ("Leads over RLOO with several updates", updated, together, "* by column.")):
        pairs = sorted(pairs, key=lambda pair: LEADING.index(pair.a.label))
        table = make_table(title, note + over, pairs, [
            METHOD, Column("setting", lambda pair: pair.setting), BOTH, COST,
            minus("area, equal steps", family=family), minus("end, equal steps", "end"),
            Column("RLOO run", lambda pair: pair.c and name_of(pair.c.label)), equal("at cost", "cost", second=True),
            equal("area, equal cost", second=True, family=family), equal("end, equal cost", "end", second=True)])
        for row, pair in zip(table.rows, pairs):
            row[4] += " †" * ((pair.a.label, pair.setting) in differ)
        tables.append(table)
    return tables


# --------------------------------------------------------------------------------- what a design has decided


RATE = Column("rate", lambda pair: f"{arm(pair.a.label)[1]:.2g}")
PLAIN_METHOD = Column("method", lambda pair: name_of(arm(pair.a.label)[0]))


def best_rate(groups: dict[tuple[str, float], Group], name: str) -> float:
    """The learning rate at which a method has the largest mean area."""
    return max((rate for label, rate in groups if label == name),
               key=lambda rate: groups[name, rate].values("area").mean())


def table_tuning(first: dict[str, list[Run]]) -> Table:
    """Section 1, stage one: area at each rate, and how far an optimizer step moves the weights."""
    groups = at_rates(select(first, "tune", "edge"))
    pairs = [Pair(group) for _, group in sorted(groups.items())]
    note = ("Step: the norm of the change of all weights in an optimizer step, and its cosine with the change before "
            "it, means over a run. Bold: the rate with the largest mean area.")

    def rate(pair: Pair) -> str:
        name, own = arm(pair.a.label)
        return f"**{own:.2g}**" if own == best_rate(groups, name) else f"{own:.2g}"

    return make_table("Learning rates, stage one", note, pairs, [
        PLAIN_METHOD, Column("rate", rate), SEEDS, mean("area"), mean("end"), plain("step length"),
        plain("step cosine")])


def stage_two(first: dict[str, list[Run]]) -> dict[str, Group]:
    """Section 1, stage two: its arms by method."""
    return {arm(label)[0]: group for label, group in select(first, "test").items()}


def table_tested(first: dict[str, list[Run]]) -> Table:
    """Stage two: the contrasts that designs.md names."""
    groups, unit = stage_two(first), cost_unit(select(first, "main"))
    planned = {a for a, _ in PRIMARY}
    pairs = [Pair(groups[a], groups[b], unit=unit) for a, b in CONTRASTS]
    note = ("Each method at its own rate. * is significant at 5% after Holm's correction over the first four rows. "
            "Others: 512 puzzles that were not measured while training, with other random numbers, at the end. Equal "
            "cost: at the largest cost that both reached; 1:0:0 counts sampled tokens alone. Both were added when the "
            "rest was known, with * by column.")
    return make_table("Tuned, then tested", note, pairs, [
        Column("contrast", lambda pair: " - ".join(name_of(arm(group.label)[0]) for group in pair[:2])), BOTH,
        minus("area", family=lambda pair: "" if arm(pair.a.label)[0] in planned else None),
        minus("end", "end"), minus("end, others", "others"), COSTS_OF_BOTH,
        equal("area, equal cost", family=together), equal("area, 1:0:0", weights="1:0:0", family=together)])


def table_default(first: dict[str, list[Run]]) -> Table:
    """Stage two against RLOO at the default rate, all of its seeds."""
    default = select(first, "main", "fresh", "tune")[RLOO]
    pairs = [Pair(group, default) for group in stage_two(first).values()]
    note = ("Each method at its own rate, minus RLOO at the default rate, 2e-4. Not in the design, without correction: "
            "does a rate chosen by area cost RLOO something else?")
    return make_table("Tuned, against RLOO at the default rate", note, pairs, [
        PLAIN_METHOD, BOTH, minus("area"), minus("end", "end"), minus("pass@16", "pass@16")])


def table_all_seeds(first: dict[str, list[Run]]) -> Table:
    """The methods of stage two at the default rate, on all seeds of every part that has them."""
    groups = select(first, "main", "forms", "fresh", "tune")
    pairs = [Pair(groups[name], groups[RLOO]) for name in (RATIO, "ppo", "vineppo")]
    note = ("Minus RLOO, both at 2e-4, on the seeds of the parts main, forms, fresh and tune together. Looked at "
            "afterwards, without correction: the equal cost of easy puzzles above has the first ten.")
    return make_table("At the default rate, all seeds", note, pairs, [
        PLAIN_METHOD, BOTH, minus("area"), minus("end", "end"), equal("area, equal cost", "area"),
        equal("end, equal cost", "end")])


def read_accuracy() -> dict[str, Estimate]:
    """By label, how a credit correlates with the truth."""
    found = read_column(Path(__file__).with_name("accuracy.md"), "Accuracy of the credit", "all")
    return {label: found[name] for label, name in MEASURED.items()}


def table_perfect(small: dict[str, list[Run]]) -> Table:
    """Section 2: each arm minus RLOO, and minus RLOO with 45 responses, at the same rate."""
    groups, accuracy, unit = at_rates(select(small, "oracle")), read_accuracy(), cost_unit(select(small, "main"))
    pairs = [Pair(group, groups.get((RLOO, rate)), groups.get((MORE_ANSWERS, rate)), unit)
             for (_, rate), group in sorted(groups.items(), key=lambda pair: -pair[1].values("area").mean())]
    note = ("The small model; `oracle` has k = 16 where none is named. Accuracy: Pearson's correlation of the credit "
            "with A* of the reward (accuracy.md). Minus RLOO, and minus RLOO with 45 responses: of area, at the same "
            "rate. Cost: weighted tokens, in runs of GRPO.")
    return make_table("Perfect credit, small", note, pairs, [
        PLAIN_METHOD, RATE, BOTH,
        Column("accuracy", lambda pair: cell(accuracy.get(arm(pair.a.label)[0], Estimate(float("nan"))))), mean("end"),
        mean("area"), minus("area - RLOO"), minus("area - 45", second=True),
        Column("cost", lambda pair: f"{spent(pair.a)[-1] / unit:.1f}"), plain("gradient norm"), plain("step length")])


def table_process(first: dict[str, list[Run]]) -> Table:
    """Section 3: process rewards against what they are added to, on the seeds of the process rewards."""
    groups = select(first, "main", "forms", "process", seeds={run.seed for run in first["process"]})
    pairs = [Pair(groups[a], groups[b]) for a, b in REWARDS]
    note = ("Differences of area and of the end. * after Holm's correction over the column. Length: tokens in a "
            "response.")

    def length(group: Group) -> str:
        responses = group.values("steps") * Settings.questions * Settings.answers
        return mean_cell(group.values("tokens_sampled") / responses, 1)

    return make_table("Process rewards, easy", note, pairs, [
        METHOD, MINUS, SEEDS, mean("end"), minus("area", family=together), minus("end, difference", "end"),
        Column("length", lambda pair: length(pair.a)), Column("its length", lambda pair: length(pair.b))])


def table_many(first: dict[str, list[Run]]) -> Table:
    """Section 4: RLOO with more than 8 responses to each puzzle at each rate."""
    groups = at_rates(select(first, "main", "budget", "test", "many"))
    pairs = [Pair(group, groups.get((RLOO, rate)), groups[LONGER, Settings.lr], cost_unit(select(first, "main")))
             for (name, rate), group in sorted(groups.items()) if "answers=" in name and "advantage=rloo" in name]
    note = ("Minus RLOO with 8 responses at the same rate, after as many steps; and minus RLOO with 560 steps at the "
            "default rate, 2e-4, at the largest cost that both reached.")
    return make_table("Many responses at higher rates, easy", note, pairs, [
        PLAIN_METHOD, RATE, SEEDS, COST, mean("area"), mean("end"), minus("area - RLOO"),
        BOTH._replace(header="seeds of both"), equal("at cost", "cost", second=True),
        equal("area - 560 steps", second=True), equal("end - 560 steps", "end", second=True)])


def successes(levels: Levels) -> list[Pair]:
    """Section 7: in each setting `expert_iteration` and RLOO of the same part or of the main table, where both ran."""
    pairs = []
    for level, parts in levels.items():
        own = {label.split()[0]: group for label, group in select(parts, "successes").items()}
        main = select(parts, "main")
        pairs.append(Pair(own.get(EXPERT), own.get("none", main.get(RLOO)), None, cost_unit(main), level))
    return [pair for pair in pairs if None not in pair[:2]]


def table_successes(levels: Levels) -> Table:
    """A row for each setting."""
    note = ("`expert_iteration` minus RLOO, at equal steps and at the largest cost that both reached. Cost: of both, "
            "in runs of GRPO in the setting. 1:0:0 counts sampled tokens alone. * is significant at 5% after Holm's "
            "correction over the settings.")
    return make_table("Own right answers only", note, successes(levels), [
        Column("setting", lambda pair: pair.setting), BOTH, COSTS_OF_BOTH,
        Column("area, equal steps", lambda pair: difference(*pair[:2]) if pair.a.values("steps")[0] ==
               pair.b.values("steps")[0] else None),
        equal("at cost", "cost"), equal("area, equal cost", family=together), equal("end, equal cost", "end"),
        equal("area, 1:0:0", weights="1:0:0"), minus("pass@16", "pass@16")])


def table_faster(levels: Levels) -> Table:
    """Section 8: both at higher rates, where they were run: at the same rate, then each at its best."""
    pairs = []
    for level, parts in levels.items():
        runs = {run.seed for run in parts.get("faster", [])}
        groups = at_rates(select(parts, "main", "successes", "faster", seeds=runs))
        same = sorted((rate, rate) for name, rate in groups if name == EXPERT and (RLOO, rate) in groups)
        best = [(best_rate(groups, EXPERT), best_rate(groups, RLOO))] if same else []
        pairs += [Pair(groups[EXPERT, own], groups[RLOO, other], setting=level)
                  for own, other in dict.fromkeys([*same, *best])]
    note = ("`expert_iteration` minus RLOO at each learning rate. A last row has each at the rate where its mean area "
            "is largest, if these differ. The runs at 2e-4 are those of the tables above.")
    return make_table("Own right answers only, at higher rates", note, pairs, [
        Column("setting", lambda pair: pair.setting), RATE,
        Column("RLOO's rate", lambda pair: f"{arm(pair.b.label)[1]:.2g}"), BOTH, mean("area"),
        Column("RLOO's area", lambda pair: t_estimate(pair.b.values("area"))), minus("area, equal steps"),
        equal("area, equal cost"), equal("end, equal cost", "end")])


def table_lambda(parts: dict[str, list[Run]]) -> Table:
    """Section 12: PPO by the lambda of its GAE, on the same seeds."""
    groups = select(parts, "lambda")
    pairs = [Pair(group, groups["ppo"]) for group in by_area(groups)]
    return make_table("PPO by lambda", "`ppo` has lambda 0.95. Area was planned as primary. Version 3.", pairs, [
        METHOD, SEEDS, mean("end"), mean("area"), minus("area - `ppo`"), minus("end - `ppo`", "end"),
        plain("gradient norm")])


def table_draws(rows: list[dict[str, str]], level: Estimate) -> Table:
    """What a level owes to the draw of evaluation's random numbers, from rows of draws.csv. level: GRPO's end."""
    success = np.array([row["success"].split() for row in rows], float)  # (2 R, draws): each run's usual, its others
    by_kind = success.reshape(-1, 2, success.shape[1])  # (R, 2, draws)
    one, all_runs = (jackknife(lambda some, x=x: np.sqrt(x[:, some].var(1, ddof=1).mean()), x.shape[1])
                     for x in (success, by_kind.mean(0)))
    easier = t_estimate(-np.diff(by_kind.mean(2))[:, 0])
    half = np.hypot((level.high - level.low) / 2, 1.96 * all_runs.value)
    note = ("Final models of GRPO's default run under ten draws; all seeds of a version share draw 0. Others: 512 "
            f"puzzles that no run measures; the usual ones are easier by {points(easier)}. "
            f"Standard deviation between draws: {points(one)} of a run, {points(all_runs)} of the mean over runs, by "
            "jackknife over draws. 1.96 times the latter and half of the interval over seeds add in quadrature: GRPO's "
            f"{points(level)} is {points(Estimate(level.value, level.value - half, level.value + half))} as a level.")
    return Table("Levels under ten draws", note, ["run", "puzzles", "draw 0", "mean", "standard deviation"], [
        [row["run"], row["puzzles"], *(f"{100 * x:.1f}" for x in (own[0], own.mean(), own.std(ddof=1)))]
        for row, own in zip(rows, success)])


# ---------------------------------------------------------------------------------------------------- all of it


def level_tables(level: str, parts: dict[str, list[Run]]) -> list[Table]:
    """The tables of a level."""
    tables = [table_methods(level, parts), table_equal(level, parts)]
    if level == FIRST:
        scores = {name: read_column(ROOT / file, table, column) for name, (file, table, column, _) in SCORES.items()}
        tables += [table_scores(parts, scores), table_correlations(parts, scores), table_types(parts)]
    return tables + [table_settings(f"{title}, {level}", parts["main"], parts[part]) for part, title in SETTINGS.items()
                     if part in parts and len({run.label for run in parts[part]}) > 1]  # one alone is among the leads


def tables_designed(levels: Levels) -> list[Table]:
    """The tables of designs.md."""
    first, small = levels[FIRST], levels["small"]
    tested, grpo = stage_two(first), t_estimate(select(first, "main")["none"].values("end"))
    others = [*successes(levels), Pair(tested[EXPERT], tested[RLOO])]
    return [table_process(first), table_tuning(first), table_many(first), table_perfect(small), table_tested(first),
            table_default(first), table_all_seeds(first), table_noise(section_9(small), read_signal(), read_noise()),
            table_negatives(section_10(first), cost_unit(select(first, "main")), others),
            table_successes(levels), table_faster(levels), table_lambda(first),
            table_draws(read_rows(Path(__file__).with_name("draws.csv")), grpo)]


def old_tables(level: str, parts: dict[str, list[Run]]) -> list[Table]:
    """What pages cite of version 1, whose runs did not record their cost: no later run has the same settings."""
    cited = {part: [run for run in runs if run.label.split()[0] in OLD_METHODS] for part, runs in parts.items()}
    return [table_settings(f"{title}, {level}", cited["main"] if part != "main" else [], cited[part])
            for part, title in OLD_SETTINGS.items() if part in cited]


def write_tables(file: Path) -> Levels:
    """Write the tables of the rows of a file that count to tables.md beside it, those of version 1 to tables-1.md."""
    first, levels = read_levels(file, 1), read_levels(file, *COUNTED)
    tables = [table for level, parts in levels.items() for table in level_tables(level, parts)]
    write_file("The study", [*tables, *tables_leads(levels), *tables_designed(levels)], file.with_name("tables.md"))
    old = [table for level, parts in first.items() for table in old_tables(level, parts)]
    write_file("The study, version 1", old, file.with_name("tables-1.md"))
    return levels


def write_file(title: str, tables: list[Table], out: Path) -> None:
    """Write a file of tables, the legend first."""
    out.write_text(f"# {title}\n\n{LEGEND}\n" + "\n".join(map(str, tables)), encoding="utf-8")
