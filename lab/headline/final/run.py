"""More responses and measured credit, each at its own rate. Stage two of lab/archive/headline-designs.md.

    python -m lab.headline.final.run             trains what has no row in lab/headline/final/runs.csv; resumes
    python -m lab.headline.final.run --tables    only adds to draws.csv and steps.csv what they lack, writes tables.md

Rates follow from the rows of stage one, by the design's rule.
"""
from dataclasses import replace
from pathlib import Path
from typing import Callable

import numpy as np

from lab.arms import (Experiment, Room, apart, difference, figures_of, main, make_table, read_groups, read_rows, spent,
                      write_rows)
from lab.headline.rates.run import ARMS
from lab.headline.rates.run import ROOM as RATES
from plumbing.comparison import Group
from plumbing.files import require
from plumbing.progress import follow
from plumbing.report import Estimate, t_estimate
from plumbing.runs import is_finished, read_config
from rollout import EVALUATION, draw_uniforms, generate_and_grade, prompted
from settings import Settings
from start import load_policy

OTHERS, DRAWS = 1024, 10  # puzzles of numbers that no run has seen; draws of evaluation's random numbers
LOGGED = ("reward", "success", "length", "entropy", "grad_norm", "zero_variance_groups", "tokens_sampled")
PRIMARY = ("oracle, k=4", "RLOO, 45 responses")


def rate_of(groups: dict[str, Group], arm: str) -> str:
    """The rate of an arm: the largest mean area, or of two within half a point of it the larger mean end. ValueError
    where the largest area is at an edge, so that the next rate outwards must be run first."""
    rates = ARMS[arm][1]
    area, end = ({rate: groups[f"{arm}, {rate}"].values(figure).mean() for rate in rates} for figure in ("area", "end"))
    second, first = sorted(rates, key=area.__getitem__)[-2:]
    require(first not in (rates[0], rates[-1]), f"{arm} has most area at {first}, the last of its rates: run the next")
    return max((first, second), key=end.__getitem__) if area[first] - area[second] < 0.005 else first


def room() -> Room:
    """The arms at their rates, with fresh seeds."""
    groups = read_groups(RATES)
    arms = {arm: f"{ARMS[arm][0]} --lr {rate_of(groups, arm)}" for arm in (PRIMARY[1], PRIMARY[0], "RLOO")}
    return Room(Path(__file__).parent, RATES.alike, range(110, 120), arms, least=10)


def success(e: Experiment) -> float:
    """The mean success of a final model on the other puzzles, over the draws."""
    s = replace(Settings(**read_config(e.folder)["settings"]), model=str(e.folder / "checkpoint"))
    policy, found = load_policy(s), []
    others = prompted(policy, policy.task.load("new_numbers", OTHERS))
    for draw in range(1, DRAWS + 1):  # training had draw 0
        uniforms = draw_uniforms(draw, EVALUATION, OTHERS, 1, s.max_new_tokens)  # (n, max_new_tokens)
        found += [grade["answer"] for grade in generate_and_grade(policy, others, uniforms)[1]]
    return float(np.mean(found))


def read_steps(room: Room) -> dict[str, np.ndarray]:
    """Tokens sampled up to each step (steps + 1,), by run. steps.csv has each step; runs that it lacks are added."""
    file = room.folder / "steps.csv"
    rows, counts = read_rows(file), {}
    known = {row["run"] for row in rows}
    for e in (e for e in room.runs() if e.folder.name not in known and is_finished(e.folder)):
        rows += [{"run": e.folder.name, "step": row["step"]} | {
            key: row[key] and f"{float(row[key]):.6g}" for key in LOGGED}
            for row in read_rows(e.folder / "metrics.csv") if row["success"]]
    rows.sort(key=lambda row: (row["run"], int(row["step"])))
    write_rows(rows, file)
    for row in rows:
        counts.setdefault(row["run"], [0.0]).append(float(row["tokens_sampled"]))
    return {name: np.cumsum(own) for name, own in counts.items()}


def at_equal(a: Group, b: Group, places: Callable[[Group], np.ndarray]) -> Estimate:
    """The success of a group minus another one's, where the one ends that reaches less far."""
    last = min(places(group)[-1] for group in (a, b))
    return t_estimate(*(np.array([np.interp(last, places(group), list(row["curve"].values()))
                                  for row in group.rows.values()]) for group in (a, b)))


def write(trained: Room) -> None:
    """draws.csv, steps.csv and tables.md."""
    groups, file = read_groups(trained), trained.folder / "draws.csv"
    rows = {row["run"]: row for row in read_rows(file)}
    kept = [e for e in trained.runs() if is_finished(e.folder)]
    for e in follow("final models", [e for e in kept if e.folder.name not in rows]):
        rows[e.folder.name] = {"run": e.folder.name, "success": f"{success(e):.6f}"}
        write_rows([*rows.values()], file)
    steps, sampled = read_steps(trained), {name: [] for name in groups}  # at the measured steps of each run
    finals = {name: Group(name, {}) for name in groups}
    for e in trained.runs():
        if e.folder.name in rows:
            finals[e.arm].rows[e.seed] = {"final": float(rows[e.folder.name]["success"])}
        if e.folder.name in steps:
            sampled[e.arm].append(steps[e.folder.name][[int(step) for step in groups[e.arm].rows[e.seed]["curve"]]])
    alone = lambda group: np.mean(sampled[group.label], 0)
    new = {(row["arm"], int(row["seed"])): figures_of(row) for row in read_rows(trained.folder / "again.csv")}
    again = lambda group: Group(group.label, {n: new.get((group.label, n), row) for n, row in group.rows.items()})
    oracle, many, few = groups[PRIMARY[0]], groups[PRIMARY[1]], groups["RLOO"]
    figures = {figure: {name: t_estimate(group.values(figure)) for name, group in groups.items()}
               for figure in ("area", "end")}
    note = ("Success in percent, ± half of a 95% interval over seeds: averaged over training (area), at the end, and "
            "the final model's. Cost: weighted tokens, RLOO's = 1; sampled: sampled tokens alone.")
    levels = make_table("The arms at their rates", note, {
        "flags": {name: trained.arms[name] for name in groups}, **figures,
        "final": {name: t_estimate(group.values("final")) for name, group in finals.items()},
        "models": {name: f"{len(group.rows)}" for name, group in finals.items()},
        "cost": {name: f"{spent(group)[-1] / spent(few)[-1]:.2f}" for name, group in groups.items()},
        "sampled": {name: f"{alone(group)[-1] / alone(few)[-1]:.2f}" for name, group in groups.items()}})
    final = lambda a, b: difference(finals[a.label], finals[b.label], "final")
    planned = {"area": difference(oracle, many), "final": final(oracle, many)}
    primary = make_table("Primary", "Measured credit minus 45 responses, in points, Welch's interval; * is significant "
                         "at 5% after Holm's correction over the two. Final: the mean of ten draws on 1,024 other "
                         "puzzles.", {"oracle - 45 responses": planned}, ("oracle - 45 responses",), "figure")
    others = {f"{name} - {other}": {"area": difference(a, b), "end": difference(a, b, "end"), "final": final(a, b)} | {
        "area, equal cost": apart(a, b, spent), "area, equally many sampled": apart(a, b, alone),
        "success, equal cost": at_equal(a, b, spent), "success, equally many sampled": at_equal(a, b, alone)} | {
            f"{figure}, trained again": difference(again(a), again(b), figure) for figure in ("area", "end")}
              for name, a, other, b in (("oracle", oracle, "RLOO", few), ("45 responses", many, "RLOO", few),
                                        ("oracle", oracle, "45 responses", many))}
    known = read_groups(RATES)
    for name, contrast in zip(others, ((PRIMARY[0], "RLOO"), (PRIMARY[1], "RLOO"), PRIMARY)):
        a, b = (known[f"{arm}, 2.8e-4"] for arm in contrast)
        others[name] |= {"area, stage one's runs at 2.8e-4": difference(a, b),
                         "area, equal cost, these": apart(a, b, spent)}
    secondary = make_table("Secondary", "Uncorrected, in points, Welch's interval. Up to RLOO's cost the oracle was "
                           "measured twice and 45 responses three times, so that areas there are rough.", others,
                           of="figure")
    (trained.folder / "tables.md").write_text("\n".join(map(str, (primary, levels, secondary))), encoding="utf-8")


if __name__ == "__main__":
    main(room(), __doc__, write)
