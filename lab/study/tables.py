"""The tables of the study, made of the rows of lab/study/runs.csv and written to tables.md beside it with the pictures.

    python -m lab.study.run --tables

Asterisks stand only where a question of the pages is answered, and each table says over what it corrects.
"""
from pathlib import Path

import numpy as np

from analyze import RLOO, figure_cell
from lab.estimates import cell, points
from lab.study.budget import cost_unit, draw_budget, spent, table_equal
from lab.study.correlations import FILES, SHOWN, Scores, draw_scores, read_scores, score_of, table_correlations
from lab.study.forest import JUDGED, by_area, draw_forest
from lab.study.leads import tables_leads
from lab.study.many import table_many
from lab.study.predicted import table_predictions
from lab.study.perfect import draw_perfect, table_perfect
from lab.study.process import table_process
from lab.study.rows import (FIRST, MORE_ANSWERS, RATIO, Levels, against_rloo, compared_groups, minus, name_of,
                            read_versions)
from lab.study.successes import draw_successes, table_faster, table_successes
from lab.study.tuned import draw_tuned, table_default, table_tested, table_tuning
from plumbing.report import Table, t_estimate, t_quantile
from plumbing.runs import Group, Run, group_runs

SETTINGS = {  # parts of a level whose tables compare settings, and their titles
    "forms": "Other forms", "sweeps": "Hyper-parameters", "updates": "Several updates a batch", "breaks": "What breaks",
    "rates": "Learning rates"}
OLD_SETTINGS = {"main": "Methods", "sweeps": "Hyper-parameters", "unscaled": "Weights as written, not rescaled"}
OLD_METHODS = ("none", "attention_credit", "causal_ablation", "entropy_masking", "entropy_weighted", "inverse_logprob",
               "inverted", "outcome_conditional", "reward_decomposition", "value_change")  # cited of version 1
LEGEND = """Success is that on held-out puzzles, in percent; differences are in points. ± is half of a 95% interval
over seeds: Student's t, or Welch's t of a difference. *Area* is success averaged over training, or over the cost,
linear between measurements; *end* is success at the last step, or at the named cost. RLOO is
`--mitigation none --advantage rloo`: GRPO without the division by the standard deviation. *Cost* is a run's weighted
tokens (sampled and read 1, updated on 3), in units of GRPO's default run. Two numbers of seeds: of the method, and of
what it is compared with. * is significant at 5% after Holm's correction over the column, or over a level's part of it.
"""


# ---------------------------------------------------------------------------------------------------- methods


def mean(group: Group, figure: str) -> str:
    """A cell: a share in percent."""
    return points(t_estimate(group.values(figure)))


def table_methods(level: str, groups: list[Group], costs: dict[str, float]) -> Table:
    """All methods of a level against GRPO and RLOO, in the order of their area."""
    by_label = {group.label: group for group in groups}
    none, rloo = by_label["none"], by_label.get(RLOO)
    usual = none.values("gradient norm").mean()
    rows = [[name_of(group.label), f"{len(group.rows)}", *(mean(group, name) for name in ("end", "area", "pass@16")),
             minus(group, none), minus(group, rloo), f"{group.values('gradient norm').mean() / usual:.1f}",
             f"{costs[group.label]:.2f}" if group.label in costs else ""] for group in by_area(groups)]
    note = (f"After {none.values('steps').max():.0f} steps, from {100 * none.values('start').mean():.1f} at the start. "
            "pass@16: puzzles solved by at least one of 16 responses. Gradient: its norm as a multiple of GRPO's. "
            f"Among so many rows one interval in twenty excludes 0 by chance. {power(groups)}")
    header = ["method", "seeds", "end", "area", "pass@16", "area - GRPO", "area - RLOO", "gradient", "cost"]
    return Table(f"Methods, {level}", note, header, rows)


def power(groups: list[Group]) -> str:
    """The smallest difference that this number of seeds detects with a probability of 80%, from the usual spread."""
    seeds = min(len(group.rows) for group in groups)
    improved = [group for group in groups if group.values("climb").mean() > 0]
    if seeds < 2 or not improved:
        return ""
    reach = t_quantile(2 * seeds - 2) + t_quantile(2 * seeds - 2, 0.4)  # 0.4: on both sides, so 20% on one
    seen = [100 * reach * np.sqrt(2 / seeds) * np.median([np.std(group.values(figure), ddof=1) for group in improved])
            for figure in JUDGED]
    return (f"With the median spread of the methods that end above the start, {seeds} seeds a side find a difference "
            f"of {seen[0]:.1f} points at the end, or {seen[1]:.1f} of area, four times in five, before any correction.")


def table_scores(level: str, groups: list[Group], scores: Scores) -> Table:
    """What is known of each method's credit before training, beside what it learned."""
    none = next(group for group in groups if group.label == "none")
    rows = [[name_of(group.label), *(cell(score_of(group.label, scores, score)) for score in SHOWN), minus(group, none)]
            for group in by_area(groups) if group.label != RLOO]
    note = (f"Scores on the start model and the easy puzzles, with default flags ({FILES[0]}): "
            f"{'; '.join(f'{score.name}: {score.meaning}' for score in SHOWN)}. Brackets: 95% intervals over puzzles.")
    return Table(f"What is known before, {level}", note, ["method", *(s.name for s in SHOWN), "area - GRPO"], rows)


def table_types(level: str, groups: list[Group]) -> Table:
    """Where the credit of each method went while it trained."""
    names = ("contribution, filler / reasoning", "gradient, filler / reasoning", "effective sample size",
             "varies within")
    rows = [[name_of(group.label), *(figure_cell(name, t_estimate(group.values(name))) for name in names)]
            for group in by_area(groups)]
    note = ("Filler / reasoning: the ratio of mean sizes over all tokens of a run. Effective sample size of a "
            "response's credit: 1 where all tokens receive the same. Varies within: the share of squared credit that "
            "remains after subtracting each response's mean.")
    return Table(f"Credit by token type, {level}", note, ["method", *names], rows)


# --------------------------------------------------------------------------------------- settings, fresh seeds


def table_settings(title: str, runs: list[Run], others: list[Run]) -> Table:
    """Other hyper-parameters of some methods, beside and against their defaults, on the seeds of any of them."""
    methods, seeds = {run.label.split()[0] for run in others}, {run.seed for run in others}
    groups = {group.label: group for group in group_runs([run for run in runs if run.seed in seeds] + others)}
    main, rows = {run.label for run in runs} & set(groups), []
    for label, group in sorted(groups.items()):
        if label.split()[0] in methods:
            shape = [f"{group.values(name).mean():.2f}" for name in ("gradient norm", "effective sample size",
                                                                     "varies within")]
            rows.append([name_of(label), f"{len(group.rows)}", mean(group, "end"), mean(group, "area"),
                         name_of(group.baseline.label) if group.compared else "", minus(group, group.baseline),
                         minus(group, groups.get(default_of(label, main))), *shape])
    note = ("All rows on the seeds of the changed settings. Area minus the baseline, GRPO or RLOO with the same "
            "settings but for the method's, and minus the default, the same method with fewer flags in the main table.")
    header = ["method", "seeds", "end", "area", "baseline", "area - baseline", "area - default", "gradient norm",
              "effective sample size", "varies within"]
    return Table(title, note, header, rows)


def default_of(label: str, labels: set[str]) -> str | None:
    """The label of the same method with fewer flags, if one of `labels` is that: a label names what is not a default.

    `none advantage=rloo lr=0.0004` has `none advantage=rloo`.
    """
    method, *flags = label.split()
    fewer = [other for other in labels if other.split()[0] == method and {*other.split()[1:]} < {*flags}]
    return max(fewer, key=len, default=None)


def table_fresh(level: str, groups: list[Group], fresh: list[Group]) -> Table:
    """Whether seeds that nobody had seen show the leads of the seeds by which the methods were chosen."""
    old, new = ({group.label: group for group in part} for part in (groups, fresh))
    rows = [[name_of(label), *(cell for by_label in (old, new) for cell in (
        f"{len(by_label[label].rows)}", minus(by_label[label], by_label.get(RLOO))))]
            for label in new if label in old and label != RLOO]
    note = "Area minus RLOO's, by the seeds of the tables above and by seeds that nobody had seen."
    return Table(f"Fresh seeds, {level}", note, ["method", "seeds", "- RLOO", "fresh seeds", "fresh - RLOO"], rows)


# ------------------------------------------------------------------------------------------------------ all of it


def write_study(file: Path) -> None:
    """The tables of the latest rows of a file in tables.md beside it, with pictures; of version 1 in tables-1.md."""
    versions, scores = read_versions(file), read_scores()
    levels = versions[max(versions)]
    tables = [table for level, parts in levels.items() for table in level_tables(level, parts, scores)]
    tables += [*tables_leads(levels), *tables_designed(levels)]
    write_tables("The study", tables, file.with_name("tables.md"))
    if min(versions) < max(versions):
        old = [table for level, parts in versions[min(versions)].items() for table in old_tables(level, parts)]
        write_tables(f"The study, version {min(versions)}", old, file.with_name(f"tables-{min(versions)}.md"))
    draw_study(levels, scores, file.parent)
    print(f"wrote {file.with_name('tables.md')}, and pictures beside it")


def write_tables(title: str, tables: list[Table], out: Path) -> None:
    """Write a file of tables, the legend first."""
    out.write_text(f"# {title}\n\n{LEGEND}\n" + "\n".join(map(str, tables)), encoding="utf-8")


def tables_designed(levels: Levels) -> list[Table]:
    """The tables of predictions.md and designs.md, as far as their runs are done."""
    first, found = levels[FIRST], [table_predictions(levels)]
    if "process" in first:
        found.append(table_process(first))
    if "tune" in first:
        found.append(table_tuning(first["tune"] + first.get("edge", [])))
    if "many" in first:
        found.append(table_many(first))
    small = levels.get("small", {})
    if "oracle" in small:
        found.append(table_perfect(small["oracle"], small["main"]))
    if "test" in first:
        found.append(table_tested(first["test"], first["main"]))
        found.append(table_default(first["test"], [run for part in ("main", "fresh", "tune")
                                                     for run in first.get(part, [])]))
    return [table for table in (*found, table_successes(levels), table_faster(levels)) if table]


def level_tables(level: str, parts: dict[str, list[Run]], scores: Scores) -> list[Table]:
    """The tables of a level."""
    groups, compared = group_runs(parts["main"]), compared_groups(parts)
    costs = {group.label: spent(group)[-1] / cost_unit(compared) for group in compared}
    tables = [table_methods(level, groups, costs), table_equal(level, compared)]
    if level == FIRST:
        tables += [table_scores(level, groups, scores), table_correlations(level, scored(groups), scores),
                   table_types(level, groups)]
    tables += [table_settings(f"{title}, {level}", parts["main"], parts[part]) for part, title in SETTINGS.items()
               if part in parts]
    if "fresh" in parts:
        tables.append(table_fresh(level, compared, group_runs(parts["fresh"])))
    return tables


def old_tables(level: str, parts: dict[str, list[Run]]) -> list[Table]:
    """What pages cite of version 1, whose runs did not record their cost: no later run has the same settings."""
    cited = {part: [run for run in runs if run.label.split()[0] in OLD_METHODS] for part, runs in parts.items()}
    return [table_settings(f"{title}, {level}", cited["main"] if part != "main" else [], cited[part])
            for part, title in OLD_SETTINGS.items() if part in cited]


def scored(groups: list[Group]) -> list[Group]:
    """The groups whose scores and areas are compared: not RLOO, whose credit is GRPO's in another size."""
    return [group for group in groups if group.label != RLOO and len(group.rows) > 2]


def draw_study(levels: Levels, scores: Scores, folder: Path) -> None:
    """The pictures: leads and scores of the methods with three or more seeds, and learning curves by cost."""
    groups, compared = group_runs(levels[FIRST]["main"]), compared_groups(levels[FIRST])
    shown = [group for group in groups if len(group.rows) > 2]
    more = [group for group in compared if group.label in (MORE_ANSWERS, RATIO) and len(group.rows) > 2]
    if shown:
        draw_forest(against_rloo(shown + more), folder / "forest.png")
        draw_scores(scored(groups), scores, folder / "scores.png")
    draw_budget(compared, folder / "budget.png")
    if test := levels[FIRST].get("test"):
        draw_tuned(levels[FIRST]["tune"] + levels[FIRST].get("edge", []), test, folder / "tuned.png")
    draw_successes(levels, folder / "successes.png")
    if perfect := levels.get("small", {}).get("oracle"):
        draw_perfect(perfect, folder / "perfect.png")
