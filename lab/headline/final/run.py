"""More responses and measured credit, each at its own rate: the tables of stage two of lab/archive/headline-designs.md.

    python -m lab.headline.final.run --tables    writes tables.md from runs.csv, again.csv, draws.csv and steps.csv

lab/headline/final/run.py of commit ea729f6 trained the runs, and measured their final models (draws.csv).
"""
import csv
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np

from lab.arms import difference, figures_of, make_table, spent
from lab.statistics import cell
from plumbing.comparison import Group
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import Estimate, Table, t_estimate

ROOM = Path(__file__).parent
MANY, ORACLE, FEW = "RLOO, 45 responses", "oracle, k=4", "RLOO"
CONTRASTS = {"oracle - RLOO": (ORACLE, FEW), "45 responses - RLOO": (MANY, FEW),
             "oracle - 45 responses": (ORACLE, MANY)}


class Rows(NamedTuple):
    """What the files have, by arm."""

    runs: dict[str, Group]  # whose areas count
    again: dict[str, Group]  # trained again, for their final models
    first: dict[str, Group]  # of stage one, at 2.8e-4
    finals: dict[str, Group]  # figure `final`
    sampled: dict[str, np.ndarray]  # sampled tokens up to each measured step, means over the runs whose steps are kept


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of this room."""
    return list(csv.DictReader((ROOM / name).read_text(encoding="utf-8").splitlines()))


def read_all() -> Rows:
    """All rows, by arm and seed."""
    runs, again, first, finals = ({arm: Group(arm, {}) for arm in (MANY, ORACLE, FEW)} for _ in range(4))
    arms = {row["run"]: (row["arm"], int(row["seed"])) for row in read("runs.csv")}  # arm and seed of a run
    for name, groups in (("runs.csv", runs), ("again.csv", again), ("../rates/runs.csv", first)):
        for row in read(name):
            if (arm := row["arm"].removesuffix(", 2.8e-4")) in groups:
                groups[arm].rows[int(row["seed"])] = figures_of(row)
    for row in read("draws.csv"):
        arm, seed = arms[row["run"]]
        finals[arm].rows[seed] = {"final": float(row["success"])}
    tokens, sampled = {}, {arm: [] for arm in runs}
    for row in read("steps.csv"):
        tokens.setdefault(row["run"], [0.0]).append(float(row["tokens_sampled"]))
    for run, each in tokens.items():
        arm, seed = arms[run]
        sampled[arm].append(np.cumsum(each)[[int(step) for step in runs[arm].rows[seed]["curve"]]])
    return Rows(runs, again, first, finals, {arm: np.mean(each, 0) for arm, each in sampled.items()})


def counts(groups: dict[str, Group]) -> str:
    """How many runs of 45 responses, the oracle and RLOO there are."""
    return ", ".join(f"{len(groups[arm].rows)}" for arm in (MANY, ORACLE, FEW))


def by_figure(*arguments: object) -> Table:
    """A table whose rows are figures."""
    table = make_table(*arguments)
    return table._replace(header=["figure", *table.header[1:]])


def primary(rows: Rows) -> Table:
    """The two planned contrasts."""
    a, b = (rows.runs[arm] for arm in (ORACLE, MANY))
    finals = [rows.finals[arm] for arm in (ORACLE, MANY)]
    return by_figure("Primary", (
        "Measured credit minus 45 responses, in points, Welch's interval; * is significant at 5% after Holm's "
        "correction over the two. Final: the mean of ten draws on 1,024 other puzzles. Runs: of both."),
        {"oracle - 45 responses": {"area": difference(a, b), "final": difference(*finals, "final")},
         "runs": {"area": f"{len(a.rows)}, {len(b.rows)}", "final": ", ".join(f"{len(g.rows)}" for g in finals)}},
        ("oracle - 45 responses",))


def levels(rows: Rows) -> Table:
    """What each arm reached."""
    commands = {row["arm"]: row["command"].partition("--mitigation ")[2] for row in read("runs.csv")}
    figure = lambda groups, name: {arm: t_estimate(group.values(name)) for arm, group in groups.items()}
    count = lambda groups: {arm: f"{len(group.rows)}" for arm, group in groups.items()}
    return make_table("The arms at their rates", (
        "Success in percent, ± half of a 95% interval over seeds: averaged over training (area) and at the end, of so "
        "many runs; the final model's, of so many models. Cost: weighted tokens, RLOO's = 1; sampled: sampled tokens "
        "alone."), {
            "flags": {arm: commands[arm].partition(" --model")[0] for arm in rows.runs},
            "runs": count(rows.runs), "area": figure(rows.runs, "area"), "end": figure(rows.runs, "end"),
            "final": figure(rows.finals, "final"), "models": count(rows.finals),
            "cost": {arm: f"{spent(g)[-1] / spent(rows.runs[FEW])[-1]:.2f}" for arm, g in rows.runs.items()},
            "sampled": {arm: f"{x[-1] / rows.sampled[FEW][-1]:.2f}" for arm, x in rows.sampled.items()}})


def at_equal(a: Group, b: Group, places: Callable[[Group], np.ndarray]) -> Estimate:
    """The success of a group minus another one's, where the one ends that reaches less far."""
    last = min(places(group)[-1] for group in (a, b))
    return t_estimate(*(np.array([np.interp(last, places(group), list(row["curve"].values()))
                                  for row in group.rows.values()]) for group in (a, b)))


def secondary(rows: Rows) -> Table:
    """The other contrasts."""
    replaced = {arm: Group(arm, group.rows | rows.again[arm].rows) for arm, group in rows.runs.items()}
    columns = {}
    for name, (first, second) in CONTRASTS.items():
        a, b = rows.runs[first], rows.runs[second]
        columns[name] = {figure: difference(a, b, figure) for figure in ("area", "end")}
        columns[name] |= {"final": difference(rows.finals[first], rows.finals[second], "final"),
                          "success, equal cost": at_equal(a, b, spent),
                          "success, equally many sampled": at_equal(a, b, lambda group: rows.sampled[group.label])}
        columns[name] |= {f"{figure}, trained again": difference(replaced[first], replaced[second], figure)
                          for figure in ("area", "end")}
        columns[name]["area, stage one's runs at 2.8e-4"] = difference(rows.first[first], rows.first[second])
    known = dict.fromkeys(columns[name], counts(rows.runs)) | {
        "final": counts(rows.finals), "area, stage one's runs at 2.8e-4": counts(rows.first)}
    return by_figure("Secondary", (
        "Uncorrected, in points, Welch's interval. Up to RLOO's cost measured credit was measured twice, and 45 "
        "responses three times, too seldom for an area. Trained again: with the new runs in the places of the old. "
        "Runs: of 45 responses, the oracle, RLOO."), columns | {"runs": known})


def again(rows: Rows) -> Table:
    """Whether a run that is trained again ends where it did."""
    parts = {}
    for arm, group in rows.again.items():
        both = lambda figure: np.array([[x.rows[seed][figure] for x in (group, rows.runs[arm])] for seed in group.rows])
        parts[arm] = [both(figure) for figure in ("area", "end")]  # (n, 2) each
    rest = [np.concatenate([x - x.mean(0) for x in each]) for each in zip(*parts.values())]
    scored = sum(seed in rows.again[arm].rows for arm, group in rows.finals.items() for seed in group.rows)
    lost, models = (sum(len(group.rows) for group in groups.values()) for groups in (rows.again, rows.finals))
    return Table("Trained again", (
        f"The final models of {lost} runs were lost with their machine, and these were trained again: of {models} "
        f"scored models {scored} are not of the runs whose areas count. Correlation over seeds of both runs' area, and "
        "of their ends, with Fisher's 95% interval."), ["arm", "runs", "area", "end"],
        [[arm, f"{len(part[0])}", *(correlated(x, 1) for x in part)] for arm, part in parts.items()]
        + [["all, minus each arm's mean", f"{lost}", *(correlated(x, len(parts)) for x in rest)]])


def correlated(pairs: np.ndarray, means: int) -> str:
    """Pearson's correlation of pairs (n, 2), so many means taken off."""
    r, error = np.corrcoef(pairs.T)[0, 1], 1.96 / np.sqrt(len(pairs) - 2 - means)
    return cell(Estimate(r, *np.tanh(np.arctanh(r) + np.array([-error, error]))))


@one_sentence()
def main() -> None:
    """Write tables.md."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="all that it does")
    parser.parse_args()
    rows = read_all()
    tables = (primary(rows), levels(rows), secondary(rows), again(rows))
    (ROOM / "tables.md").write_text("\n".join(map(str, tables)), encoding="utf-8")


if __name__ == "__main__":
    main()
