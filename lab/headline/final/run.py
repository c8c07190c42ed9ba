"""More responses and measured credit, each at its own rate. Stage two of lab/archive/headline-designs.md.

    python -m lab.headline.final.run             trains what has no row in lab/headline/final/runs.csv; resumes
    python -m lab.headline.final.run --tables    only scores final models that draws.csv lacks, and writes tables.md

Rates follow from the rows of stage one, by the design's rule.
"""
import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.arms import Experiment, Room, apart, difference, main, make_table, read_groups, spent, write_rows
from lab.headline.rates.run import ARMS
from lab.headline.rates.run import ROOM as RATES
from plumbing.comparison import Group
from plumbing.files import require
from plumbing.progress import follow
from plumbing.report import t_estimate
from plumbing.runs import read_config
from rollout import EVALUATION, draw_uniforms, generate_and_grade, prompted
from settings import Settings
from start import load_policy

OTHERS, DRAWS = 1024, 10  # puzzles of numbers that no run has seen; draws of evaluation's random numbers
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


def write(trained: Room) -> None:
    """draws.csv and tables.md."""
    file = trained.folder / "draws.csv"
    rows = {row["run"]: row for row in csv.DictReader(file.read_text().splitlines())} if file.is_file() else {}
    for e in follow("final models", [e for e in trained.runs() if e.folder.name not in rows]):
        rows[e.folder.name] = {"run": e.folder.name, "success": f"{success(e):.6f}"}
        write_rows([*rows.values()], file)
    groups = read_groups(trained)
    for e in trained.runs():
        groups[e.arm].rows[e.seed]["final"] = float(rows[e.folder.name]["success"])
    oracle, many, few = groups[PRIMARY[0]], groups[PRIMARY[1]], groups["RLOO"]
    figures = {figure: {name: t_estimate(group.values(figure)) for name, group in groups.items()}
               for figure in ("area", "end", "final")}
    note = ("Success in percent, ± half of a 95% interval over seeds: averaged over training (area), at the end, and "
            "the final model's. Cost: weighted tokens, RLOO's = 1.")
    levels = make_table("The arms at their rates", note, {
        "flags": {name: trained.arms[name] for name in groups}, **figures,
        "cost": {name: f"{spent(group)[-1] / spent(few)[-1]:.2f}" for name, group in groups.items()}})
    planned = {figure: difference(oracle, many, figure) for figure in ("area", "final")}
    primary = make_table("Primary", "Measured credit minus 45 responses, in points, Welch's interval; * is significant "
                         "at 5% after Holm's correction over the two. Final: the mean of ten draws on 1,024 other "
                         "puzzles.", {"oracle - 45 responses": planned}, ("oracle - 45 responses",), "figure")
    others = {name: {figure: difference(group, few, figure) for figure in ("area", "end", "final")} | {
        "area, equal cost": apart(group, few, spent)} for name, group in ((PRIMARY[0], oracle), (PRIMARY[1], many))}
    others["oracle - 45"] = {"end": difference(oracle, many, "end"), "area, equal cost": apart(oracle, many, spent)}
    secondary = make_table("Secondary", "Minus RLOO with 8 responses, or as the column says; uncorrected.", others,
                           of="figure")
    (trained.folder / "tables.md").write_text("\n".join(map(str, (primary, levels, secondary))), encoding="utf-8")


if __name__ == "__main__":
    main(room(), __doc__, write)
