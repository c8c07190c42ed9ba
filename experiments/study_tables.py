"""The tables of the study, made of the rows of results/runs.csv and written to study.md beside it with the pictures.

    python -m experiments.study --tables

A figure is percent, a difference is percentage points. ± is half of a 95% interval over seeds: Student's t of a
figure, Welch's t of a difference. A star: significant at 5% after Holm's correction for all methods of the table.
"""
import csv
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Iterable

import numpy as np

from analyze import COSTS, DIFFERENCES, JUDGED, NAMES, RLOO, draw_curves, draw_forest, figure_cell, record
from experiments.correlation import spearman, without_two
from experiments.study_budget import draw_budget, name_of, table_budget, total_cost, unit_cost
from experiments.study_scores import (MEASURED, SCORES, Scores, draw_truth, read_published, read_scores, score_of,
                                      table_truth)
from plumbing.report import Estimate, Table, cell, holm, mean_height, points, t_estimate, t_quantile, welch
from plumbing.runs import Group, Run, group_runs

ABOUT = ("run", "version", "part", "level", "method", "setting", "seed", "command")  # columns of rows that hold text
BY_STEP = ("curve", "spent")  # held-out success, and weighted tokens so far, as `step:value` pairs
TOKENS, TIMES = "costs.csv", "benchmark.csv"  # of experiments/costs.py and tests/benchmark.py: what a step costs
LEARNED = DIFFERENCES[:2]

Records = dict[str, dict[str, Estimate]]  # the `record` of each group, by its label


# --------------------------------------------------------------------------------------------------- reading


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of results/runs.csv as text, of all versions; none where there is no such file yet."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if rows and (missing := {*ABOUT, "curve"} - set(rows[0])):
        raise ValueError(f"{file} was not written by experiments.study: it has no column {sorted(missing)[0]}")
    if any(None in (*row, *row.values()) or not row["version"].isdigit() for row in rows):
        raise ValueError(f"{file} has a line that is not a row: was a merge conflict left in it?")
    return rows


def to_run(row: dict[str, str]) -> Run:
    """A row of results/runs.csv as a run to compare."""
    figures = {name: float(text or "nan") for name, text in row.items() if name not in (*ABOUT, *BY_STEP)}
    by_step = {name: dict(map(float, point.split(":")) for point in (row.get(name) or "").split()) for name in BY_STEP}
    label = f"{row['method']} {row['setting']}".strip()
    return Run(row["run"], label, row["setting"], row["method"] == "none", int(row["seed"]), figures | by_step)


def read_times(file: Path) -> dict[str, float]:
    """The time of a step of each method as a multiple of GRPO's, from the table of the benchmark."""
    rows = csv.DictReader(read_published(file).splitlines())
    return {row["what"].removeprefix("credit of "): 1 + float(row["value"]) / 100
            for row in rows if row["what"].startswith("credit of ")}


def read_costs(file: Path) -> dict[str, dict[str, float]]:
    """The cost of a step as a multiple of GRPO's, by level and method: weighted tokens, mean of first and last step."""
    tokens: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(read_published(file).splitlines()):
        by_method = tokens.setdefault(row["level"], {})
        by_method[row["method"]] = by_method.get(row["method"], 0) + sum(w * float(row[n]) for n, w in COSTS.items())
    return {level: {method: n / by_method["none"] for method, n in by_method.items()}
            for level, by_method in tokens.items()}


def is_below(e: Estimate) -> bool:
    """Whether the whole interval of a difference is below 0."""
    return e.high < 0


def starred(records: Records, names: Iterable[str]) -> dict[str, list[str]]:
    """For each label the differences in points, with * after Holm's correction over the labels; empty where none is."""
    names = list(names)
    significant = {name: holm({label: r[name].p for label, r in records.items() if name in r}) for name in names}
    return {label: [points(r[name]) + " *" * (label in significant[name]) if name in r else "" for name in names]
            for label, r in records.items()}


def compare(group: Group, other: Group, name: str) -> dict[str, Estimate]:
    """A method minus another one in both figures of JUDGED; empty for a group against itself."""
    return {f"{figure} - {name}": welch(group.values(figure), other.values(figure)) for figure in JUDGED
            if group is not other}


# ------------------------------------------------------------------------------------------- the main table


def table_study(level: str, groups: list[Group], records: Records, costs: dict[str, float]) -> Table:
    """All methods of a level against GRPO and RLOO, in the order of their area."""
    by_label, none = {group.label: group for group in groups}, records["none"]
    if RLOO in by_label:
        records = {label: r | compare(by_label[label], by_label[RLOO], "RLOO") for label, r in records.items()}
    names = (*LEARNED, "end - RLOO", "area - RLOO", DIFFERENCES[2])
    stars = starred(records, names)
    rows = [[name_of(label), f"{r['seeds'].value:.0f}", *(points(r[name]) for name in ("end", "area", "pass@16")),
             *stars[label], steps_and_seeds(r), f"{r['gradient norm'].value / none['gradient norm'].value:.1f}",
             f"{costs[label]:.2f}" if label in costs else ""] for label, r in by_area(records)]
    note = (f"Held-out success in percent after {none['steps'].value:.0f} steps, from {100 * none['start'].value:.1f} "
            "at the start; area: mean success while training, linear between measurements; pass@16: puzzles solved by "
            "at least one of 16 responses. Differences in points. RLOO is `--mitigation none --advantage rloo`: GRPO "
            f"without the division by the standard deviation. ± half of a 95% interval over seeds. {power(groups)}"
            "Steps to GRPO's end: to its mean success after the last step, with the number of seeds that reach it in "
            "brackets. Gradient: its norm, cost: a step's weighted tokens (sampled and read 1, updated on 3), both as "
            "multiples of GRPO's.")
    header = ["method", "seeds", "end", "area", "pass@16", *names, "steps to GRPO's end", "gradient", "cost"]
    return Table(f"Methods, {level}", note, header, rows)


def by_area(records: Records) -> list[tuple[str, dict[str, Estimate]]]:
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


def steps_and_seeds(r: dict[str, Estimate]) -> str:
    """`steps (seeds)` to GRPO's mean end; empty without runs of `none`."""
    if "seeds that get there" not in r:
        return ""
    steps, seeds = r["steps to GRPO's end"].value, r["seeds that get there"].value
    return f"{steps:.0f} ({seeds:.0f})" if seeds else "(0)"


def table_scores(level: str, records: Records, scores: Scores) -> Table:
    """What is known of each method's credit before training, beside what it learned."""
    stars = starred(records, LEARNED[1:])
    rows = [[name_of(label), *(cell(score_of(label, scores, score)) for score in MEASURED), *stars[label]]
            for label, _ in by_area(records) if label != RLOO]
    note = (f"Scores on the start model and the easy puzzles, with default flags (results/{SCORES[0]}, {SCORES[1]}): "
            f"{'; '.join(f'{score.name}: {score.meaning}' for score in MEASURED)}. "
            "95% intervals over puzzles or batches in brackets. Differences as in the table above.")
    return Table(f"What is known before, {level}", note, ["method", *(s.name for s in MEASURED), LEARNED[1]], rows)


def table_types(level: str, records: Records) -> Table:
    """Where the credit of each method went while it trained."""
    names = ("contribution, filler / reasoning", "gradient, filler / reasoning", "effective sample size",
             "varies within")
    rows = [[name_of(label), *(figure_cell(name, r[name]) for name in names)] for label, r in by_area(records)]
    note = ("Filler / reasoning: the ratio of mean sizes over all tokens of a run. Effective sample size of a "
            "response's credit: 1 where all tokens receive the same. Varies within: the share of squared credit that "
            "remains after subtracting each response's mean. Mean over seeds ± half of its 95% interval.")
    return Table(f"Credit by token type, {level}", note, ["method", *names], rows)


def slowed(curve: dict[float, float], cost: float) -> dict[str, float]:
    """End and area of a learning curve, linear between measurements, that is cut off when GRPO's budget is spent.

    cost: that of a step as a multiple of GRPO's.
    """
    steps, success = np.array(list(curve)), np.array(list(curve.values()))  # (n,) each
    last = steps[0] + (steps[-1] - steps[0]) / cost  # the step reached with that budget
    end, before = np.interp(last, steps, success), steps < last
    return {"end": end, "area": mean_height(np.append(steps[before], last), np.append(success[before], end))}


def table_cost(level: str, groups: list[Group], costs: dict[str, float], times: dict[str, float]) -> Table:
    """Differences to GRPO and RLOO after as many weighted tokens, for the methods that need more of them a step."""
    by_label, records = {group.label: group for group in groups}, {}
    for group in groups:
        if costs.get(group.label, 0) >= 1.05:
            rows = {seed: slowed(row["curve"], costs[group.label]) for seed, row in group.rows.items()}
            cut = replace(group, rows=rows)
            records[group.label] = {name: e for label in NAMES if label in by_label
                                    for name, e in compare(cut, by_label[label], NAMES[label]).items()}
    names = [f"{figure} - {name}" for name in NAMES.values() for figure in JUDGED]
    stars = starred(records, names)
    rows = [[name_of(label), f"{len(by_label[label].rows)}", f"{costs[label]:.2f}",
             f"{times[label]:.2f}" if label in times else "", f"{100 / costs[label]:.0f}", *stars[label]]
            for label in sorted(records, key=costs.get)]
    note = ("Methods whose step costs at least 5% more than GRPO's, after as many weighted tokens as GRPO's run had "
            f"(results/{TOKENS}): cost and time of a step as multiples of GRPO's (results/{TIMES}), percent of the "
            "steps that the budget pays for, and differences to whole runs of GRPO and RLOO. ± and * as above.")
    return Table(f"At equal cost, {level}", note, ["method", "seeds", "cost", "time", "% of the steps", *names], rows)


def table_settings(title: str, runs: list[Run], others: list[Run]) -> Table:
    """Other hyper-parameters of some methods, beside and against their defaults, on the same seeds."""
    methods, seeds = {run.label.split()[0] for run in others}, {run.seed for run in others}
    groups = {group.label: group for group in group_runs([run for run in runs if run.seed in seeds] + others)}
    records = {label: record(group) for label, group in sorted(groups.items()) if label.split()[0] in methods}
    for label, r in records.items():
        if default := default_of(label, {run.label for run in runs}):
            r |= compare(groups[label], groups[default], "default")
    differences = (*LEARNED, "end - default", "area - default")
    shape, stars = ("gradient norm", "effective sample size", "varies within"), starred(records, differences)
    rows = [[name_of(label), f"{r['seeds'].value:.0f}", points(r["end"]), points(r["area"]), *stars[label],
             points(r["least climb"]), *(f"{r[name].value:.2f}" for name in shape)] for label, r in records.items()]
    note = ("As above. A flag that is not named has its default; `- default` is the difference to the same method with "
            "fewer flags in the main table, `- GRPO` to GRPO with the same settings but for the method's. Least "
            "climb: of the worst seed, in points. Effective sample size and varies within: see Credit by token type.")
    return Table(title, note, ["method", "seeds", "end", "area", *differences, "least climb", *shape], rows)


def default_of(label: str, labels: set[str]) -> str | None:
    """The label of the same method with fewer flags, if one of `labels` is that: a label names what is not a default.

    `vineppo k=3 cuts=uncertain` has `vineppo k=3`, since the main table has no `vineppo` without a flag.
    """
    method, *flags = label.split()
    fewer = [other for other in labels if other.split()[0] == method and {*other.split()[1:]} < {*flags}]
    return max(fewer, key=len, default=None)


def table_rates(title: str, runs: list[Run], figure: str) -> Table:
    """A figure of JUDGED of each method at several learning rates, on the seeds it has at all of them."""
    groups: dict[str, dict[float, Group]] = {}  # by method and learning rate, 0 for the default
    for group in group_runs(runs):
        method, _, rate = group.label.partition(" lr=")
        groups.setdefault(method, {})[float(rate or 0)] = group
    rates = sorted({rate for by_rate in groups.values() for rate in by_rate})
    seeds = {method: set.intersection(*(set(by_rate[rate].rows) if rate in by_rate else set() for rate in rates))
             for method, by_rate in groups.items()}
    values = {method: 100 * np.array([[groups[method][rate].rows[seed][figure] for seed in seeds[method]]
                                      for rate in rates]) for method in groups if seeds[method]}  # (rates, seeds) each
    means = {method: x.mean(1) for method, x in sorted(values.items(), key=lambda item: -item[1][0].mean())}
    rows = [[name_of(method), f"{len(seeds[method])}",
             *(f"{x.mean():.1f} ({x.min():.1f} to {x.max():.1f})" for x in values[method]),
             f"{mean.max() - means['none'].max():+.1f}" if "none" in means else ""] for method, mean in means.items()]
    names = [f"lr {rate:g}" if rate else "default lr" for rate in rates]
    columns = {name: [mean[i] for mean in means.values()] for i, name in enumerate(names)}
    first = {method: groups[method][rates[0]] for method in means}
    spare = {method: sorted(set(group.rows) - seeds[method])[:len(seeds[method])] for method, group in first.items()}
    if all(spare.values()):
        columns[f"{names[0]} by as many other seeds"] = [
            np.mean([group.rows[seed][figure] for seed in spare[method]]) for method, group in first.items()]
    worse = np.array([group.compared and is_below(group.difference(figure)) for group in first.values()], bool)
    note = (f"{JUDGED[figure]} in percent: mean over seeds (lowest to highest). Last column: how far a method's best "
            f"mean is above the best mean of GRPO. {same_order(columns, worse)}")
    return Table(title, note, ["method", "seeds", *names, "best - GRPO's best"], rows)


def same_order(columns: dict[str, list[float]], worse: np.ndarray) -> str:
    """How the order of methods by the first of columns (M,) agrees with that by each other column.

    Said again without the methods that are `worse` (M,) than `none`, whose low ranks agree in any case.
    """
    (first, x), *others = ((name, np.array(column)) for name, column in columns.items())
    subsets = {f"all {len(x)} methods": worse | True}
    if worse.any():
        subsets[f"the {(~worse).sum()} that all their seeds together do not show to be below GRPO"] = ~worse
    return " ".join(f"Rank correlation with the order at the {first}, over {who}: " + ", ".join(
        f"{cell(spearman(x[subset], y[subset]))} at {name}" for name, y in others) + "."
        for who, subset in subsets.items())


def table_fresh(title: str, runs: list[Run], fresh: list[Run]) -> Table:
    """Whether new seeds of some methods fall inside the intervals of the main table."""
    old, new, both = ({group.label: group for group in group_runs(part)} for part in (runs, fresh, runs + fresh))
    rows = []
    both_have = [label for label in new if label in old]
    for label, figure in itertools.product(both_have, (*JUDGED, "pass@16", *DIFFERENCES)):
        if new[label].compared or " - " not in figure:
            before, after, pooled = (figure_of(groups[label], figure) for groups in (old, new, both))
            inside = ["no", "yes"][before.low <= after.value <= before.high] if np.isfinite(before.low) else ""
            rows.append([name_of(label), figure, points(before), points(after), inside, points(pooled)])
    note = ("Percent and points ± half of a 95% interval, over the seeds of the main table, over fresh ones, and over "
            "all. Inside: the mean over fresh seeds lies in the interval of the main table. With five seeds each and "
            "no other change, 88% of the figures without a difference are expected to, not 95%, since both means vary.")
    return Table(title, note, ["method", "figure", "main table", "fresh seeds", "inside", "all seeds"], rows)


def figure_of(group: Group, figure: str) -> Estimate:
    """A figure such as `end`, or a difference such as `end - GRPO`, with its interval."""
    name, _, baseline = figure.partition(" - ")
    return group.difference(name) if baseline else t_estimate(group.values(name))


def table_travel(first: str, second: str, records: dict[str, Records]) -> Table:
    """Whether what is so on one level is so on another."""
    rows = []
    for name in DIFFERENCES:
        pairs = {label: (r[name], records[second][label][name]) for label, r in records[first].items()
                 if name in r and name in records[second].get(label, {})}
        close = {label: pair for label, pair in pairs.items() if not any(map(is_below, pair))}
        x, x_close = (np.array([[e.value for e in pair] for pair in subset.values()]).reshape(-1, 2).T  # (2, M)
                      for subset in (pairs, close))
        clear = {label: pair for label, pair in pairs.items() if all(e.low > 0 or e.high < 0 for e in pair)}
        same = sum(a.value * b.value > 0 for a, b in clear.values())
        rows.append([name, f"{len(pairs)}", cell(spearman(*x)), f"{len(close)}", cell(spearman(*x_close)),
                     without_two(list(close), *x_close), f"{same}", f"{len(clear) - same}"])
    note = ("Rank correlation, over methods, of the differences on one level with those on the other, with a 95% "
            "interval that takes the means as exact. The same for the methods whose interval is below 0 on neither "
            "level, since the others agree by being bad on both, and its lowest value after removing any two methods, "
            "named in brackets. Last, how many intervals exclude 0 on both levels with the same sign and with "
            "opposite signs.")
    header = ["difference", "methods", "rank correlation", "not below", "their correlation", "without two", "same sign",
              "opposite"]
    return Table(f"Do conclusions travel, {first} and {second}", note, header, rows)


def write_study(file: Path) -> None:
    """All tables of a file of rows in study.md beside it, and the pictures."""
    rows = read_rows(file)
    count = Counter(int(row["version"]) for row in rows)
    shown = max(count, key=lambda version: (count[version], version), default=0)  # a new edition once it has most runs
    levels: dict[str, dict[str, list[Run]]] = {}  # by level and part
    for row in rows:
        if int(row["version"]) == shown:
            levels.setdefault(row["level"], {}).setdefault(row["part"], []).append(to_run(row))
    levels = {level: parts for level, parts in levels.items()
              if any(run.label == "none" for run in parts.get("main", []))}
    if not levels:
        raise ValueError(f"there is no run of none in {file}; make it with: python -m experiments.study --methods none")
    scores, times = read_scores(file.parent), read_times(file.parent / TIMES)
    costs = read_costs(file.parent / TOKENS)
    tables, records = [], {}
    for level, parts in levels.items():
        groups = group_runs(parts["main"] + parts.get("rloo", []))
        for group in groups:
            group.baseline = next(g for g in groups if g.label == "none")  # also of RLOO, though its settings differ
        records[level] = {group.label: record(group) for group in groups}
        scored = [group for group in groups if group.label != RLOO]  # its credit, undivided, was not scored
        recorded = all(row["spent"] for group in groups for row in group.rows.values())  # version 1 did not
        cost = {g.label: total_cost(g) / unit_cost(groups) for g in groups} if recorded else costs.get(level, {})
        tables += [table_study(level, groups, records[level], cost),
                   table_cost(level, groups, cost, times if level == "easy" else {}),
                   table_scores(level, records[level], scores), table_truth(level, scored, scores),
                   table_types(level, records[level]), *side_tables(level, parts)]
        if "fresh" in parts:
            again = {run.label for run in parts["fresh"]}
            both = group_runs([run for run in parts["main"] if run.label in again] + parts["fresh"])
            tables.append(table_cost(f"{level}, with fresh seeds", both, cost, times))
        if recorded:
            spending = group_runs(parts["main"] + parts.get("budget", []))
            tables.append(table_budget(level, spending))
            draw_budget(spending, file.parent / f"{level}-budget.png")
        draw_forest(groups, file.parent / f"{level}-forest.png", f", {level} puzzles")
        draw_curves(groups, file.parent / f"{level}-learning.png", f", {level} puzzles")
        draw_truth(scored, scores, file.parent / f"{level}-truth.png")
    tables += [table_travel(*pair, records) for pair in itertools.combinations(levels, 2)]
    text = "# The study\n\n" + "\n".join(map(str, tables))
    (file.parent / "study.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {file.parent / 'study.md'}, and pictures beside it")


def side_tables(level: str, parts: dict[str, list[Run]]) -> list[Table]:
    """Tables of the other parts of a level: hyper-parameters, other forms, learning rates, fresh seeds."""
    main, tables = parts["main"], []
    for title, part in (("Hyper-parameters", "sweeps"), ("Weights as written, not rescaled", "unscaled"),
                        ("Other forms", "forms"), ("Weights of three rewards", "process"),
                        ("Several updates a batch", "updates")):
        if part in parts:
            tables.append(table_settings(f"{title}, {level}", main, parts[part]))
    if "fresh" in parts:
        tables.append(table_fresh(f"Fresh seeds, {level}", main, parts["fresh"]))
    if "rates" in parts:
        tables += [table_rates(f"Learning rates by {figure}, {level}", main + parts["rates"], figure)
                   for figure in JUDGED]
    return tables
