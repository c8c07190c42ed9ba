"""The tables of the study, made of the rows of results/runs.csv and written to study.md beside it with the pictures.

    python -m experiments.study --tables

A figure is percent, a difference is percentage points. ± is half of a 95% interval over seeds (Student's t).
"""
import csv
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Iterable

import numpy as np

from analyze import DIFFERENCES, JUDGED, draw_curves, draw_forest, figure_cell, record
from experiments.correlation import spearman, without_two
from experiments.study_scores import (MEASURED, SCORES, Scores, draw_truth, read_published, read_scores, score_of,
                                      table_truth)
from plumbing.report import Estimate, Table, cell, mean_height, pm, t_estimate
from plumbing.runs import Group, Run, group_runs

ABOUT = ("run", "version", "part", "level", "method", "setting", "seed", "command")  # columns of rows that hold text
COSTS = "benchmark.csv"  # of tests/benchmark.py: how long a step takes
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
    figures = {name: float(text or "nan") for name, text in row.items() if name not in (*ABOUT, "curve")}
    curve = dict(map(float, point.split(":")) for point in row["curve"].split())
    label = f"{row['method']} {row['setting']}".strip()
    return Run(row["run"], label, row["setting"], row["method"] == "none", int(row["seed"]), figures | {"curve": curve})


def read_costs(file: Path) -> dict[str, float]:
    """The time of a step of each method as a multiple of that of `none`, from the table of the benchmark."""
    rows = csv.DictReader(read_published(file).splitlines())
    return {row["what"].removeprefix("credit of "): 1 + float(row["value"]) / 100
            for row in rows if row["what"].startswith("credit of ")}


def points(e: Estimate) -> str:
    """A share in percent, or a difference in points, ± half of its interval."""
    return pm(100 * e.value, 100 * (e.high - e.value), 1)


def excludes_zero(e: Estimate) -> bool:
    """Whether the interval of an estimate lies on one side of 0. One of equal values says nothing: rounding to the six
    digits of runs.csv makes it up to 2e-5 wide, while a difference of one puzzle or response exceeds 1e-4."""
    return e.high - e.low > 5e-5 and not e.low <= 0 <= e.high


def is_below(e: Estimate) -> bool:
    """Whether the whole interval of a difference is below 0."""
    return excludes_zero(e) and e.value < 0


def starred(r: dict[str, Estimate], names: Iterable[str]) -> list[str]:
    """Differences in points, with * where the interval excludes 0; empty cells for those not in the record."""
    return [points(r[name]) + " *" * excludes_zero(r[name]) if name in r else "" for name in names]


def by_chance(records: Records, names: Iterable[str]) -> str:
    """How many differences exclude 0, and how many would be expected to if no method had any effect."""
    counts = []
    for name in names:
        known = [r[name] for r in records.values() if name in r and np.isfinite(r[name].low)]
        clear = sum(map(excludes_zero, known))
        counts.append(f"{clear} of {len(known)} for {name} ({0.05 * len(known):.1f} by chance)")
    return f"The interval excludes 0 in {', '.join(counts)}."


def compare(group: Group, other: Group, name: str) -> dict[str, Estimate]:
    """A method minus another one in both figures of JUDGED, on the seeds that both have."""
    pair = replace(group, baseline=other)
    return {f"{figure} - {name}": t_estimate(pair.differences(figure)) for figure in JUDGED}


# ------------------------------------------------------------------------------------------- the main table


def table_study(level: str, groups: list[Group], records: Records) -> Table:
    """All methods of a level against `none`."""
    none = records["none"]
    rows = [[f"`{label}`", f"{r['seeds'].value:.0f}", points(r["end"]), points(r["pass@16"]),
             *starred(r, DIFFERENCES), steps_and_seeds(r),
             f"{r['gradient norm'].value / none['gradient norm'].value:.1f}"] for label, r in records.items()]
    note = (f"Held-out success in percent after {none['steps'].value:.0f} steps, from {100 * none['start'].value:.1f} "
            "at the start; pass@16: puzzles solved by at least one of 16 responses; area: mean success while training, "
            "linear between measurements. Differences to `none` in points, on the same seeds. ± half of a 95% interval "
            "over seeds (Student's t); * where the interval of a difference excludes 0. "
            f"{by_chance(records, DIFFERENCES)} {pairing(groups)}Last two columns: steps to the mean end of `none`, "
            "with the number of seeds that reach it in brackets; gradient norm as a multiple of that of `none`. Rows "
            "can come from different machines, so times are compared by tests/benchmark.py only.")
    header = ["method", "seeds", "end", "pass@16", *DIFFERENCES, "steps to none's end", "gradient"]
    return Table(f"Methods, {level}", note, header, rows)


def pairing(groups: list[Group]) -> str:
    """How strongly methods correlate with `none` over seeds, which is what comparing on the same seeds gains."""
    medians = []
    for figure in JUDGED:
        pairs = [group.pairs(figure) for group in groups if group.compared]  # (2, n) each
        found = [np.corrcoef(pair)[0, 1] for pair in pairs if pair.shape[1] > 2 and np.ptp(pair, 1).all()]
        if not found:
            return ""
        medians.append(f"{np.median(found):.2f} for {figure}")
    return f"Over seeds, a method correlates with `none` by a median of {' and '.join(medians)}. "


def steps_and_seeds(r: dict[str, Estimate]) -> str:
    """`steps (seeds)` to the mean end of `none`; empty without runs of `none`."""
    if "seeds that get there" not in r:
        return ""
    steps, seeds = r["steps to none's end"].value, r["seeds that get there"].value
    return f"{steps:.0f} ({seeds:.0f})" if seeds else "(0)"


def table_scores(level: str, groups: list[Group], records: Records, scores: Scores) -> Table:
    """What is known of each method's credit before training, beside what it learned."""
    rows = [[f"`{group.label}`", *(cell(score_of(group.label, scores, score)) for score in MEASURED),
             *starred(records[group.label], LEARNED)] for group in groups]
    note = (f"Scores on the start model and the easy puzzles, with default flags (results/{SCORES[0]}, {SCORES[1]}): "
            f"{'; '.join(f'{score.name}: {score.meaning}' for score in MEASURED)}. "
            "95% intervals over puzzles or batches in brackets. Differences as in the table above.")
    header = ["method", *(score.name for score in MEASURED), *LEARNED]
    return Table(f"What is known before, {level}", note, header, rows)


def table_types(level: str, records: Records) -> Table:
    """Where the credit of each method went while it trained."""
    names = ("contribution, filler / reasoning", "gradient, filler / reasoning", "effective sample size",
             "varies within")
    rows = [[f"`{label}`", *(figure_cell(name, r[name]) for name in names)] for label, r in records.items()]
    note = ("Filler / reasoning: the ratio of mean sizes over all tokens of a run. Effective sample size of a "
            "response's credit: 1 where all tokens receive the same. Varies within: the share of squared credit that "
            "is not its response's mean. Mean over seeds ± half of its 95% interval.")
    return Table(f"Credit by token type, {level}", note, ["method", *names], rows)


def slowed(curve: dict[float, float], cost: float) -> dict[str, float]:
    """End and area of a learning curve, linear between measurements, that is cut off when `none` would be done.

    cost: the time of a step as a multiple of that of `none`.
    """
    steps, success = np.array(list(curve)), np.array(list(curve.values()))  # (n,) each
    last = steps[0] + (steps[-1] - steps[0]) / cost  # the step reached in that time
    end, before = np.interp(last, steps, success), steps < last
    return {"end": end, "area": mean_height(np.append(steps[before], last), np.append(success[before], end))}


def table_time(level: str, runs: list[Run], costs: dict[str, float]) -> Table:
    """Differences to `none` after as much time, beside those after as many steps."""
    rows = []
    for group in group_runs(runs):
        cost = costs.get(group.label, 1.0)  # no cost is known of flags that were not timed
        if group.compared and cost >= 1.05:
            cut = replace(group, rows={seed: slowed(row["curve"], cost) for seed, row in group.rows.items()})
            rows.append([f"`{group.label}`", f"{len(group.rows)}", f"{cost:.2f}",
                         *(text for g in (group, cut) for text in starred(compare(g, g.baseline, "none"), LEARNED))])
    unknown = sorted({run.label for run in runs} - set(costs))
    note = ("Methods whose step takes at least 5% longer than that of `none` (tests/benchmark.py: the start model on "
            "easy puzzles, two cores), with all their seeds including fresh ones: differences to `none` after as many "
            "steps, and after as much time; ± and * as above."
            + f" Not timed: {', '.join(f'`{label}`' for label in unknown)}." * bool(unknown))
    header = ["method", "seeds", "time of a step", *LEARNED, "end in time", "area in time"]
    return Table(f"In as much time, {level}", note, header, rows)


def table_rloo(title: str, runs: list[Run], rloo: list[Run]) -> Table:
    """Every method against `none`, and against `none` with the advantage of RLOO (2402.14740).

    That advantage is not divided by std(r). Neither is the credit of methods that start from rewards, so whatever they
    are ahead of `none` may come from this alone. (RLOO's is also G / (G - 1) times as large, which Adam divides out.)
    """
    groups = {group.label: group for group in group_runs(runs + rloo)}
    baselines, records = {"none": groups["none"], "rloo": groups[rloo[0].label]}, {label: {} for label in groups}
    for (label, group), (name, baseline) in itertools.product(groups.items(), baselines.items()):
        if group is not baseline:
            records[label] |= compare(group, baseline, name)
    names = [f"{figure} - {name}" for name in baselines for figure in JUDGED]
    rows = [[f"`{label}`", f"{len(group.rows)}", points(t_estimate(group.values("end"))),
             *starred(records[label], names)] for label, group in groups.items()]
    note = ("Differences in points to `none`, and to `none --advantage rloo`, whose advantage is not divided by the "
            f"standard deviation of the group's rewards, on the same seeds. {by_chance(records, names)}")
    return Table(title, note, ["method", "seeds", "end", *names], rows)


def table_settings(title: str, runs: list[Run], others: list[Run]) -> Table:
    """Other hyper-parameters of some methods, beside and against their defaults, on the same seeds."""
    methods, seeds = {run.label.split()[0] for run in others}, {run.seed for run in others}
    groups = {group.label: group for group in group_runs([run for run in runs if run.seed in seeds] + others)}
    records = {label: record(group) for label, group in sorted(groups.items()) if label.split()[0] in methods}
    for label, r in records.items():
        default = groups.get(label.split()[0])  # a label names the flags that are not the default
        if default not in (None, groups[label]):
            r |= compare(groups[label], default, "default")
    differences = (*LEARNED, "end - default", "area - default")
    shape = ("gradient norm", "effective sample size", "varies within")
    rows = [[f"`{label}`", f"{r['seeds'].value:.0f}", points(r["end"]), *starred(r, differences),
             points(r["least climb"]), *(f"{r[name].value:.2f}" for name in shape)] for label, r in records.items()]
    note = ("As above. A flag that is not named has its default; `- default` is the difference to the same method with "
            "all flags at their defaults. Least climb: of the worst seed, in points. Effective sample size and varies "
            f"within: see Credit by token type. {by_chance(records, differences)}")
    return Table(title, note, ["method", "seeds", "end", *differences, "least climb", *shape], rows)


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
    rows = [[f"`{method}`", f"{len(seeds[method])}",
             *(f"{x.mean():.1f} ({x.min():.1f} to {x.max():.1f})" for x in values[method]),
             f"{mean.max() - means['none'].max():+.1f}" if "none" in means else ""] for method, mean in means.items()]
    names = [f"lr {rate:g}" if rate else "default lr" for rate in rates]
    columns = {name: [mean[i] for mean in means.values()] for i, name in enumerate(names)}
    first = {method: groups[method][rates[0]] for method in means}
    spare = {method: sorted(set(group.rows) - seeds[method])[:len(seeds[method])] for method, group in first.items()}
    if all(spare.values()):
        columns[f"{names[0]} by as many other seeds"] = [
            np.mean([group.rows[seed][figure] for seed in spare[method]]) for method, group in first.items()]
    worse = np.array([is_below(t_estimate(group.differences(figure))) for group in first.values()], bool)
    note = (f"{JUDGED[figure]} in percent: mean over seeds (lowest to highest). Last column: how far a method's best "
            f"mean is above the best mean of `none`. {same_order(columns, worse)}")
    return Table(title, note, ["method", "seeds", *names, "best - none's best"], rows)


def same_order(columns: dict[str, list[float]], worse: np.ndarray) -> str:
    """How the order of methods by the first of columns (M,) agrees with that by each other column.

    Said again without the methods that are `worse` (M,) than `none`, whose low ranks agree in any case.
    """
    (first, x), *others = ((name, np.array(column)) for name, column in columns.items())
    subsets = {f"all {len(x)} methods": worse | True}
    if worse.any():
        subsets[f"the {(~worse).sum()} that all their seeds together do not show to be below `none`"] = ~worse
    return " ".join(f"Rank correlation with the order at the {first}, over {who}: " + ", ".join(
        f"{cell(spearman(x[subset], y[subset]))} at {name}" for name, y in others) + "."
        for who, subset in subsets.items())


def table_fresh(title: str, runs: list[Run], fresh: list[Run]) -> Table:
    """Whether new seeds of some methods fall inside the intervals of the main table."""
    old, new, both = ({group.label: group for group in group_runs(part)} for part in (runs, fresh, runs + fresh))
    shown = [(label, figure) for label in new if label in old for figure in (*JUDGED, "pass@16", *DIFFERENCES)
             if new[label].compared or " - " not in figure]
    rows, inside = [], []
    for label, figure in shown:
        before, after, pooled = (t_estimate(seed_values(groups[label], figure)) for groups in (old, new, both))
        inside.append(before.low <= after.value <= before.high)
        answer = ["no", "yes"][inside[-1]] if np.isfinite(before.low) else ""
        rows.append([f"`{label}`", figure, points(before), points(after), answer, points(pooled)])
    note = ("Percent and points ± half of a 95% interval, over the seeds of the main table, over fresh ones, and over "
            "all. Inside: the mean over fresh seeds lies in the interval of the main table. With five seeds each and "
            "no other change, 88% are expected to, not 95%, since both means vary.")
    counts, pools = {len(old[label].rows) for label, _ in shown}, [seed_values(both[m], figure) for m, figure in shown]
    if len(counts) == 1 and min(counts) > 1 and len(set(map(len, pools))) == 1:  # the same choices for all methods
        note += " " + other_choices(np.array(pools), counts.pop(), sum(inside))
    return Table(title, note, ["method", "figure", "main table", "fresh seeds", "inside", "all seeds"], rows)


def seed_values(group: Group, figure: str) -> np.ndarray:
    """A figure such as `end`, or a difference such as `end - none`, by seed (n,)."""
    name, _, baseline = figure.partition(" - ")
    return group.differences(name) if baseline else group.values(name)


def other_choices(pools: np.ndarray, n: int, found: int) -> str:
    """How often the mean of the remaining seeds lies inside the interval of n seeds, over every choice of n.

    pools (F, S): F figures of S seeds. found: of how many figures it does for the choice that was made.
    """
    inside = []  # for each choice, the number of figures
    for chosen in map(list, itertools.combinations(range(pools.shape[1]), n)):
        others = np.delete(pools, chosen, 1).mean(1)  # (F,)
        intervals = [t_estimate(x[chosen]) for x in pools]
        inside.append(sum(e.low <= other <= e.high for e, other in zip(intervals, others)))
    return (f"Over all choices of {n} of the {pools.shape[1]} seeds for the table, {np.mean(inside) / len(pools):.0%} "
            f"of the means of the other seeds are inside; of the {len(inside)} choices, "
            f"{np.mean(np.array(inside) <= found):.0%} have, like this one, at most {found} of {len(pools)} inside.")


def table_travel(first: str, second: str, records: dict[str, Records]) -> Table:
    """Whether what is so on one level is so on another."""
    rows = []
    for name in DIFFERENCES:
        pairs = {label: (r[name], records[second][label][name]) for label, r in records[first].items()
                 if name in r and name in records[second].get(label, {})}
        close = {label: pair for label, pair in pairs.items() if not any(map(is_below, pair))}
        x, x_close = (np.array([[e.value for e in pair] for pair in subset.values()]).reshape(-1, 2).T  # (2, M)
                      for subset in (pairs, close))
        same = {label for label, (a, b) in pairs.items() if a.value * b.value > 0}
        clear, clear_too = ({label for label, pair in pairs.items() if excludes_zero(pair[i])} for i in (0, 1))
        counts = map(len, (clear, clear & same, clear_too, clear_too & same, clear & clear_too & same,
                           clear & clear_too - same))
        rows.append([name, f"{len(pairs)}", cell(spearman(*x)), f"{len(close)}", cell(spearman(*x_close)),
                     without_two(list(close), *x_close), *map(str, counts)])
    note = ("Rank correlation, over methods, of the differences on one level with those on the other, with a 95% "
            "interval that takes the means as exact. The same for the methods whose interval is below 0 on neither "
            "level, since the others agree by being bad on both, and its lowest value after removing any two methods, "
            "named in brackets. Then the number of differences that exclude 0 on one level, and how many of them have "
            "the same sign on the other; last, how many exclude 0 on both with the same sign and with opposite signs.")
    header = ["difference", "methods", "rank correlation", "not below", "their correlation", "without two",
              f"exclude 0, {first}", f"same sign, {second}", f"exclude 0, {second}", f"same sign, {first}", "on both",
              "reversed"]
    return Table(f"Do conclusions travel, {first} and {second}", note, header, rows)


def write_study(file: Path) -> None:
    """All tables of a file of rows in study.md beside it, and the pictures."""
    rows = read_rows(file)
    newest = max((int(row["version"]) for row in rows), default=0)
    levels: dict[str, dict[str, list[Run]]] = {}  # by level and part
    for row in rows:
        if int(row["version"]) == newest:
            levels.setdefault(row["level"], {}).setdefault(row["part"], []).append(to_run(row))
    levels = {level: parts for level, parts in levels.items()
              if any(run.label == "none" for run in parts.get("main", []))}
    if not levels:
        raise ValueError(f"there is no run of none in {file}; make it with: python -m experiments.study --methods none")
    scores, costs = read_scores(file.parent), read_costs(file.parent / COSTS)
    tables, records = [], {}
    for level, parts in levels.items():
        groups = group_runs(parts["main"])
        records[level] = {group.label: record(group) for group in groups}
        tables += [table_study(level, groups, records[level]), table_scores(level, groups, records[level], scores),
                   table_truth(level, groups, scores), table_types(level, records[level]),
                   table_time(level, parts["main"] + parts.get("fresh", []), costs), *side_tables(level, parts)]
        draw_forest(groups, file.parent / f"{level}-forest.png", f", {level} puzzles")
        draw_curves(groups, file.parent / f"{level}-learning.png", f", {level} puzzles")
        draw_truth(level, groups, scores, file.parent / f"{level}-truth.png")
    tables += [table_travel(*pair, records) for pair in itertools.combinations(levels, 2)]
    text = "# The study\n\n" + "\n".join(map(str, tables))
    (file.parent / "study.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {file.parent / 'study.md'}, and pictures beside it")


def side_tables(level: str, parts: dict[str, list[Run]]) -> list[Table]:
    """Tables of the other parts of a level: RLOO, hyper-parameters, learning rates, fresh seeds."""
    main, tables = parts["main"], []
    if "rloo" in parts:
        tables.append(table_rloo(f"Against RLOO, {level}", main, parts["rloo"]))
    for title, part in (("Hyper-parameters", "sweeps"), ("Weights as written, not rescaled", "unscaled")):
        if part in parts:
            tables.append(table_settings(f"{title}, {level}", main, parts[part]))
    if "rates" in parts:
        tables += [table_rates(f"Learning rates by {figure}, {level}", main + parts["rates"], figure)
                   for figure in JUDGED]
    return tables + ([table_fresh(f"Fresh seeds, {level}", main, parts["fresh"])] if "fresh" in parts else [])
