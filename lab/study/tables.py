"""The tables of the study, made of the rows of lab/study/runs.csv and written to tables.md beside it with the pictures.

    python -m lab.study.run --tables

A figure is percent, a difference is percentage points. ± is half of a 95% interval over seeds: Student's t of a
figure, Welch's t of a difference. Stars stand only where a question of lab/study/README.md is answered, in the tables
*Against RLOO* and *Equal cost*; daggers, for leads that change, in *How far it travels*.
"""
import csv
from pathlib import Path

import numpy as np

from analyze import RLOO, figure_cell, record
from lab.estimates import cell, points
from lab.study.budget import cost_unit, draw_budget, spent, table_budget, table_equal
from lab.study.forest import JUDGED, draw_forest
from lab.study.rivals import MORE_ANSWERS, RATIO, against_rloo, contenders, name_of, table_rivals
from lab.study.scores import FILES, MEASURED, Scores, draw_truth, read_scores, score_of, table_truth
from lab.study.travel import FIRST, draw_travel, list_leads, tables_travel
from plumbing.report import Estimate, Table, t_quantile, welch
from plumbing.runs import Group, Run, group_runs

ABOUT = ("run", "version", "part", "level", "method", "setting", "seed", "command")  # columns of rows that hold text
BY_STEP = ("curve", "spent")  # held-out success, and weighted tokens so far, as `step:value` pairs
SETTINGS = {  # parts of a level whose tables compare settings, and their titles
    "forms": "Other forms", "sweeps": "Hyper-parameters", "updates": "Several updates a batch", "breaks": "What breaks",
    "trial": "One seed each", "rates": "Learning rates", "unscaled": "Weights as written, not rescaled"}

Records = dict[str, dict[str, Estimate]]  # the `record` of each group, by its label


# --------------------------------------------------------------------------------------------------- reading


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of lab/study/runs.csv as text, of all versions; none where there is no such file yet."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if rows and (missing := {*ABOUT, "curve"} - set(rows[0])):
        raise ValueError(f"{file} was not written by lab.study.run: it has no column {sorted(missing)[0]}")
    if any(None in (*row, *row.values()) or not row["version"].isdigit() for row in rows):
        raise ValueError(f"{file} has a line that is not a row: was a merge conflict left in it?")
    return rows


def to_run(row: dict[str, str]) -> Run:
    """A row of lab/study/runs.csv as a run to compare."""
    figures = {name: float(text or "nan") for name, text in row.items() if name not in (*ABOUT, *BY_STEP)}
    by_step = {name: dict(map(float, point.split(":")) for point in (row.get(name) or "").split()) for name in BY_STEP}
    label = f"{row['method']} {row['setting']}".strip()
    return Run(row["run"], label, row["setting"], row["method"] == "none", int(row["seed"]), figures | by_step)


def read_records(groups: list[Group]) -> Records:
    """What each method learned, and how much more than GRPO and than RLOO."""
    opponents = {name_of(group.label): group for group in groups if group.label in ("none", RLOO)}
    return {group.label: record(group) | {name: e for opponent, other in opponents.items()
                                          for name, e in compare(group, other, opponent).items()} for group in groups}


def compare(group: Group, other: Group, name: str) -> dict[str, Estimate]:
    """A method minus another one in both figures of JUDGED; empty for a group against itself."""
    return {f"{figure} - {name}": welch(group.values(figure), other.values(figure)) for figure in JUDGED
            if group is not other}


# ------------------------------------------------------------------------------------------- the main table


def table_study(level: str, groups: list[Group], records: Records, costs: dict[str, float]) -> Table:
    """All methods of a level against GRPO and RLOO, in the order of their area."""
    none = records["none"]
    names = ("end - GRPO", "area - GRPO", "end - RLOO", "area - RLOO")
    rows = [[name_of(label), f"{r['seeds'].value:.0f}", *(points(r[name]) for name in ("end", "area", "pass@16")),
             *difference_cells(r, names), f"{r['gradient norm'].value / none['gradient norm'].value:.1f}",
             f"{costs[label]:.2f}" if label in costs else ""] for label, r in ranked(records)]
    note = (f"Held-out success in percent after {none['steps'].value:.0f} steps, from {100 * none['start'].value:.1f} "
            "at the start; area: mean success while training, linear between measurements; pass@16: puzzles solved by "
            "at least one of 16 responses. Differences in points. RLOO is `--mitigation none --advantage rloo`: GRPO "
            "without the division by the standard deviation. ± half of a 95% interval over seeds; among so many rows "
            f"one interval in twenty excludes 0 by chance. {power(groups)}Gradient: its norm, cost: a run's weighted "
            "tokens (sampled and read 1, updated on 3), both as multiples of GRPO's.")
    header = ["method", "seeds", "end", "area", "pass@16", *names, "gradient", "cost"]
    return Table(f"Methods, {level}", note, header, rows)


def difference_cells(r: dict[str, Estimate], names: tuple[str, ...]) -> list[str]:
    """Differences of a record in points, empty for those that it does not have."""
    return [points(r[name]) if name in r else "" for name in names]


def ranked(records: Records) -> list[tuple[str, dict[str, Estimate]]]:
    """The records from the largest area to the smallest."""
    return sorted(records.items(), key=lambda item: -item[1]["area"].value)


def power(groups: list[Group]) -> str:
    """The smallest difference that this number of seeds detects with a probability of 80%, from the usual spread."""
    seeds = min(len(group.rows) for group in groups)
    climbed = [group for group in groups if group.values("climb").mean() > 0]
    if seeds < 2 or not climbed:
        return ""
    reach = t_quantile(2 * seeds - 2) + t_quantile(2 * seeds - 2, 0.4)  # 0.4: on both sides, so 20% on one
    seen = [100 * reach * np.sqrt(2 / seeds) * np.median([np.std(group.values(figure), ddof=1) for group in climbed])
            for figure in JUDGED]
    return (f"With the median spread of the methods that climb, {seeds} seeds a side find a difference of "
            f"{seen[0]:.1f} points at the end, or {seen[1]:.1f} of area, four times in five, before any correction: "
            "smaller ones are too small to see here. ")


def table_scores(level: str, records: Records, scores: Scores) -> Table:
    """What is known of each method's credit before training, beside what it learned."""
    rows = [[name_of(label), *(cell(score_of(label, scores, score)) for score in MEASURED),
             *difference_cells(r, ("area - GRPO",))] for label, r in ranked(records) if label != RLOO]
    note = (f"Scores on the start model and the easy puzzles, with default flags ({FILES[0]}, {FILES[1]}): "
            f"{'; '.join(f'{score.name}: {score.meaning}' for score in MEASURED)}. "
            "95% intervals over puzzles or batches in brackets. Differences as in the table above.")
    return Table(f"What is known before, {level}", note, ["method", *(s.name for s in MEASURED), "area - GRPO"], rows)


def table_types(level: str, records: Records) -> Table:
    """Where the credit of each method went while it trained."""
    names = ("contribution, filler / reasoning", "gradient, filler / reasoning", "effective sample size",
             "varies within")
    rows = [[name_of(label), *(figure_cell(name, r[name]) for name in names)] for label, r in ranked(records)]
    note = ("Filler / reasoning: the ratio of mean sizes over all tokens of a run. Effective sample size of a "
            "response's credit: 1 where all tokens receive the same. Varies within: the share of squared credit that "
            "remains after subtracting each response's mean. Mean over seeds ± half of its 95% interval.")
    return Table(f"Credit by token type, {level}", note, ["method", *names], rows)


def table_settings(title: str, runs: list[Run], others: list[Run]) -> Table:
    """Other hyper-parameters of some methods, beside and against their defaults, on the seeds of any of them."""
    methods, seeds = {run.label.split()[0] for run in others}, {run.seed for run in others}
    groups = {group.label: group for group in group_runs([run for run in runs if run.seed in seeds] + others)}
    records = {label: record(group) for label, group in sorted(groups.items()) if label.split()[0] in methods}
    for label, r in records.items():
        if default := default_of(label, {run.label for run in runs} & set(groups)):
            r |= compare(groups[label], groups[default], "default")
        r |= compare(groups[label], groups[label].baseline or groups[label], "baseline")
    differences = ("end - baseline", "area - baseline", "end - default", "area - default")
    shape = ("gradient norm", "effective sample size", "varies within")
    rows = [[name_of(label), f"{r['seeds'].value:.0f}", points(r["end"]), points(r["area"]), baseline_of(groups[label]),
             *difference_cells(r, differences), points(r["least climb"]), *(f"{r[name].value:.2f}" for name in shape)]
            for label, r in records.items()]
    note = ("As above; rows of the main table are here on fewer seeds. A flag that is not named has its default; `- "
            "default` is the difference to the same method with fewer flags in the main table, `- baseline` that to "
            "GRPO or RLOO with the same settings but for the method's. Least climb: of the worst seed, in points. "
            "Effective sample size and varies within: see Credit by token type.")
    header = ["method", "seeds", "end", "area", "baseline", *differences, "least climb", *shape]
    return Table(title, note, header, rows)


def baseline_of(group: Group) -> str:
    """The name of what a group is compared with, empty where there is nothing else."""
    return name_of(group.baseline.label) if group.compared else ""


def default_of(label: str, labels: set[str]) -> str | None:
    """The label of the same method with fewer flags, if one of `labels` is that: a label names what is not a default.

    `none advantage=rloo lr=0.0004` has `none advantage=rloo`.
    """
    method, *flags = label.split()
    fewer = [other for other in labels if other.split()[0] == method and {*other.split()[1:]} < {*flags}]
    return max(fewer, key=len, default=None)


def table_fresh(level: str, groups: list[Group], fresh: list[Group]) -> Table:
    """Whether seeds that nobody had seen fall where the seeds of the same methods say that a single one should."""
    old, new = ({group.label: group.values("area") for group in part} for part in (groups, fresh))
    rows, inside, total = [], 0, 0
    for label in (label for label in new if label in old):
        low, high = prediction(old[label])
        hits = int(((low <= new[label]) & (new[label] <= high)).sum())
        inside, total = inside + hits, total + len(new[label])
        gains = [points(welch(by[label], by[RLOO])) if RLOO in by and label != RLOO else "" for by in (old, new)]
        rows.append([name_of(label), f"{len(old[label])}", f"{100 * low:.1f} to {100 * high:.1f}",
                     " ".join(f"{100 * x:.1f}" for x in new[label]), f"{hits} of {len(new[label])}", *gains])
    note = (f"Where the area of a single seed should fall, by the seeds of the tables above: mean ± t s sqrt(1 + 1/n), "
            f"in percent. Fresh seeds are other ones: {inside} of {total} lie inside; 95% are expected to. Last, the "
            "difference to RLOO in points, by either seeds.")
    return Table(f"Fresh seeds, {level}", note, ["method", "seeds", "95% of single seeds", "fresh seeds", "inside",
                                                 "- RLOO", "fresh - RLOO"], rows)


def prediction(values: np.ndarray) -> tuple[float, float]:
    """The interval that holds the next of independent normal values (n,) with a probability of 95%; NaN for n = 1."""
    n = len(values)
    half = np.nan if n < 2 else t_quantile(n - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / n)
    return float(values.mean() - half), float(values.mean() + half)


def read_versions(file: Path) -> dict[int, dict[str, dict[str, list[Run]]]]:
    """The runs of a file by version of the results, level and part, where the level has a run of GRPO; oldest first."""
    rows, versions = read_rows(file), {}
    for row in sorted(rows, key=lambda row: int(row["version"])):  # which keeps the order of equals
        levels = versions.setdefault(int(row["version"]), {})
        levels.setdefault(row["level"], {}).setdefault(row["part"], []).append(to_run(row))
    versions = {version: {level: parts for level, parts in levels.items()
                          if any(run.label == "none" for run in parts.get("main", []))}
                for version, levels in versions.items()}
    versions = {version: levels for version, levels in versions.items() if FIRST in levels}
    if not versions:
        raise ValueError(f"there is no run of none on {FIRST} puzzles in {file}; make it with: python -m "
                         f"lab.study.run --parts main --levels {FIRST} --methods none")
    return versions


def write_study(file: Path) -> None:
    """The tables of the latest rows of a file in tables.md beside it, with pictures; of older rows in tables-N.md."""
    versions, scores = read_versions(file), read_scores()
    for version, levels in versions.items():
        latest = version == max(versions)
        out = file.parent / ("tables.md" if latest else f"tables-{version}.md")
        text = study_text("The study", levels, scores) if latest else first_edition(version, levels, scores)
        out.write_text(text, encoding="utf-8")
    draw_study(levels, scores, out)
    draw_travel(list_leads(levels), file.parent / "travel.png")
    draw_budget(contenders(levels[FIRST]), file.parent / "budget.png")
    print(text)
    print(f"wrote {out}, and pictures beside it")


def draw_study(levels: dict[str, dict[str, list[Run]]], scores: Scores, out: Path) -> None:
    """Pictures of a version beside its tables: what methods with three or more seeds learned, and their scores."""
    groups = [group for group in group_runs(levels[FIRST]["main"]) if len(group.rows) > 2]
    more = [group for group in contenders(levels[FIRST])
            if group.label in (MORE_ANSWERS, RATIO) and len(group.rows) > 2]
    if groups:
        draw_forest(against_rloo(groups + more), out.with_name("forest.png"))
        draw_truth([group for group in groups if group.label != RLOO], scores, out.with_name("scores.png"))


def study_text(title: str, levels: dict[str, dict[str, list[Run]]], scores: Scores) -> str:
    """All tables of a version."""
    tables = [table for level, parts in levels.items() for table in level_tables(level, parts, scores)]
    leads = tables_travel(list_leads(levels)) if is_recorded(levels[FIRST]["main"]) else []
    return f"# {title}\n\n" + "\n".join(map(str, tables + leads))


def first_edition(version: int, levels: dict[str, dict[str, list[Run]]], scores: Scores) -> str:
    """The tables of an older version that pages cite: no later run has the same settings."""
    tables = [table for level, parts in levels.items() for table in level_tables(level, parts, scores)
              if table.title.rpartition(",")[0] in ("Methods", *(SETTINGS[part] for part in ("sweeps", "unscaled")))]
    return f"# The study, version {version}\n\n" + "\n".join(map(str, tables))


def is_recorded(runs: list[Run]) -> bool:
    """Whether it is known what the runs had spent."""
    return all(run.figures["spent"] for run in runs)


def level_tables(level: str, parts: dict[str, list[Run]], scores: Scores) -> list[Table]:
    """The tables of a level. Runs of version 1 did not record what they had spent."""
    groups, spenders = group_runs(parts["main"]), contenders(parts)
    records = read_records(groups)
    recorded = is_recorded(parts["main"])
    costs = {group.label: spent(group)[-1] / cost_unit(spenders) for group in spenders if recorded}
    tables = [table_study(level, groups, records, costs)]
    if recorded:
        tables += [table_rivals(level, spenders, costs), table_budget(level, spenders), table_equal(level, spenders)]
    if level == FIRST:  # which was scored, though not RLOO, whose credit is GRPO's in another size
        scored = [group for group in groups if group.label != RLOO and len(group.rows) > 2]
        tables += [table_scores(level, records, scores), table_truth(level, scored, scores)]
    tables.append(table_types(level, records))
    tables += [table_settings(f"{title}, {level}", parts["main"], parts[part]) for part, title in SETTINGS.items()
               if part in parts]
    if "fresh" in parts:
        tables.append(table_fresh(level, spenders, group_runs(parts["fresh"])))
    return tables
