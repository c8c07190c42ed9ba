"""Does exact credit of turns learn faster than GRPO and RLOO? The runs of designs.md, their tables and their picture.

    python -m lab.turns.run             trains what has no row in lab/turns/runs.csv, one run at a time; resumes
    python -m lab.turns.run --tables    only writes lab/turns/tables.md and learning.png

Success is exact: V(prompt) of values.py at every tenth step, from the run's checkpoints.
"""
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab import arms
from lab.arms import Room, difference, make_table, measured, read_groups, spent
from lab.estimates import read_column
from lab.turns.values import grow
from plumbing.comparison import Group
from plumbing.report import GREY, PALETTE, Axes, Estimate, new_figure, t_estimate
from plumbing.runs import read_config
from settings import Settings
from start import load_policy

EVERY = 10  # steps between two checkpoints
GAMES = {f"RLOO questions={Q}": Q for Q in (24, 72, 216)}  # RLOO with more games a step
LINE = ("RLOO", *GAMES)  # its area by its noise
MIXED = "A2 mix=0.74"  # as noisy as A1
MARGIN = 0.02  # of area, the smallest effect of interest


def exact_success(run: Path) -> dict[float, float]:
    """V(prompt) of the start model and of each checkpoint of a run, by step."""
    s = Settings(**read_config(run)["settings"])
    weights = {0: s.model} | {step: f"{run}/checkpoints/step-{step:06d}" for step in range(EVERY, s.steps, EVERY)}
    weights[s.steps] = f"{run}/checkpoint"
    return {step: float(grow(load_policy(replace(s, model=model))).V[0].mean()) for step, model in weights.items()}


ROOM = Room(
    Path(__file__).parent,
    f"--task guess --max_new_tokens 24 --steps 100 --checkpoint_every {EVERY} --eval_every 0 --pass_at 0", range(10),
    {"GRPO": "none", "RLOO": "none --advantage rloo",
     **{name: f"none --questions {Q} --advantage rloo" for name, Q in GAMES.items()},
     "A1": "exact_turns", "A2": "exact_turns --luck false", MIXED: "exact_turns --luck false --mix 0.74",
     "turn_vine": "turn_vine", "turn_baseline": "turn_baseline"},
    version=2,  # charges a text that is read again for each turn; 1, of all rows so far, kept it in a cache
    least=6,  # designs.md lets nobody look before
    program="-m lab.turns.credit", measure=exact_success)


# --------------------------------------------------------------------------------------------- by how noisy a step is


def read_noise(file: Path) -> dict[str, Estimate]:
    """1 / the noise of each arm's step, RLOO's = 1: its signal to noise, but for a factor that all arms share. With Q
    games instead of 12, which are independent, it is Q / 12."""
    found = read_column(file, "Noise of a step", "all")
    labels = {arm: re.sub(r" --(\w+) (\S+)", r" \1=\2", flags) for arm, flags in ROOM.arms.items()}
    known = {arm: found[label] for arm, label in labels.items() if label in found}
    return {arm: Estimate(1 / e.value, 1 / e.high, 1 / e.low) for arm, e in known.items()} | {
        arm: Estimate(Q / 12, Q / 12, Q / 12) for arm, Q in GAMES.items()}


def on_line(place: float, line: list[float]) -> np.ndarray:
    """The weights (n,) of the areas of n arms, whose signals to noise are `line`, in the area between them by log
    signal; beyond either end, that end has all of it."""
    order = np.argsort(line)
    return np.array([np.interp(np.log(place), np.log(line)[order], own[order]) for own in np.eye(len(line))])


def above_line(groups: dict[str, Group], places: dict[str, Estimate], arm: str, place: float | None = None) -> Estimate:
    """The area of an arm minus that of RLOO where it is as noisy, with Welch's interval. place: instead of its own."""
    weights = on_line(place or places[arm].value, [places[name].value for name in LINE])  # (n,)
    return t_estimate(*(groups[name].values("area") for name in (arm, *LINE)), weights=(1, *-weights))


# ---------------------------------------------------------------------------------------------- tables and picture


def write_tables(room: Room) -> None:
    """tables.md and learning.png."""
    groups, quiet = read_groups(room), read_noise(room.folder / "noise.md")
    ordered = dict(sorted(groups.items(), key=lambda item: -item[1].values("area").mean()))
    beside = [arm for arm in ordered if arm in quiet and arm not in LINE]
    ends = {arm: sorted(above_line(groups, quiet, arm, end).value for end in quiet[arm][1:3]) for arm in beside}
    note = ("±: half of a 95% interval over seeds; end and area in percent, exact. Quiet: 1 / noise of a step "
            "(noise.md). Above the line: area minus RLOO's as noisy at RLOO's policies, noise taken as known; by "
            "noise: the same with the arm's noise at either end of its interval. Beyond 18 the line stays at its end. "
            "Cost: weighted tokens, GRPO = 1.")
    learned = make_table("Learning", note, {
        "seeds": {arm: f"{len(g.rows)}" for arm, g in ordered.items()},
        **{figure: {arm: t_estimate(g.values(figure)) for arm, g in ordered.items()} for figure in ("end", "area")},
        "area - RLOO": {arm: difference(g, groups["RLOO"]) for arm, g in ordered.items() if arm != "RLOO"},
        "quiet": {arm: f"{e.value:.2f}" for arm, e in quiet.items()},
        "above the line": {arm: above_line(groups, quiet, arm) for arm in beside},
        "by noise": {arm: f"{100 * low:.1f} to {100 * high:.1f}" for arm, (low, high) in ends.items()},
        "cost": {arm: f"{spent(g)[-1] / spent(groups['GRPO'])[-1]:.1f}" for arm, g in ordered.items()}})
    found = {f"{a} - {b}": difference(groups[a], groups[b]) for a in ("A1", "A2") for b in ("RLOO", "GRPO")}
    found |= {f"{arm} - RLOO as noisy": above_line(groups, quiet, arm) for arm in ("A1", "A2")}
    found["A2 as noisy as A1 - A1"] = difference(groups[MIXED], groups["A1"])
    primary = make_table("Primary contrasts", (
        "Of area, in points. * is significant at 5% after Holm's correction over the rows. "
        f"Margin: {100 * MARGIN:.0f} points."),
        {"area": found, "interval": {name: verdict(e) for name, e in found.items()}}, ("area",), of="contrast")
    others = {f"{a} - {b}": difference(groups[a], groups[b])
              for a, b in (("A2", "A1"), ("turn_vine", "RLOO"), ("turn_baseline", "RLOO"))}
    others |= {f"{arm} - RLOO, end": difference(groups[arm], groups["RLOO"], "end") for arm in ("A1", "A2")}
    secondary = make_table("Secondary contrasts", "Uncorrected. Of area, in points, where it does not say the end.",
                           {"difference": others}, of="contrast")
    (room.folder / "tables.md").write_text(f"{learned}\n{primary}\n{secondary}", encoding="utf-8")
    draw(groups, quiet, room.folder / "learning.png")


def verdict(e: Estimate) -> str:
    """Where the 95% interval lies, if it says more than that it is wide."""
    inside, beyond = max(-e.low, e.high) < MARGIN, max(e.low, -e.high) > MARGIN
    return "within the margin" if inside else "beyond the margin" if beyond else ""


def draw_curve(axis: Axes, group: Group, line: str, colour: str) -> None:
    """Mean success over seeds in percent, and its 95% interval, by step."""
    curves = zip(*(row["curve"].values() for row in group.rows.values()))  # the seeds at each measurement
    mean, low, high = 100 * np.array([t_estimate(values)[:3] for values in curves]).T  # (m,) each
    axis.plot(measured(group), mean, line, color=colour, ms=4, label=group.label)
    axis.fill_between(measured(group), low, high, color=colour, alpha=0.2, lw=0)


def draw(groups: dict[str, Group], quiet: dict[str, Estimate], file: Path) -> None:
    """Exact success by step, and area by how quiet an update is."""
    figure, (left, right) = new_figure(2, 4.2)
    styles = {"A2": ("o-", PALETTE[0]), "A1": ("s-", PALETTE[1]), "turn_vine": ("D--", PALETTE[2]),
              "turn_baseline": ("v--", PALETTE[3]), "RLOO": ("^-", GREY), "GRPO": ("x:", GREY)}
    for arm, style in styles.items():
        draw_curve(left, groups[arm], *style)
    area = {arm: t_estimate(100 * groups[arm].values("area")) for arm in groups if arm in quiet}
    right.plot([quiet[arm].value for arm in LINE], [area[arm].value for arm in LINE], color=GREY)
    for arm, up in area.items():
        colour = GREY if arm in LINE else PALETTE[0] if arm.startswith("A2") else PALETTE[1]
        across, upright = ([[e.value - e.low], [e.high - e.value]] for e in (quiet[arm], up))
        right.errorbar(quiet[arm].value, up.value, upright, across, "^" if arm in LINE else "o", color=colour)
        if arm not in LINE:
            x, y, side = {"A1": (-4, 7, "right"), "A2": (0, -20, "center")}.get(arm, (6, -16, "left"))
            right.annotate(arm, (quiet[arm].value, up.value), xytext=(x, y), ha=side, color=colour,
                           textcoords="offset points")
    left.set(xlabel="step", ylabel="exact success V(prompt), %", title="Equal responses")
    right.set(xlabel="1 / noise of a step, RLOO = 1 (logarithmic)", ylabel="area, %", xscale="log",
              title="By noise (line: RLOO, 12 to 216 games)")
    right.set_xticks([1, 2, 6, 18], ["1", "2", "6", "18"])
    right.minorticks_off()
    lines, names = left.get_legend_handles_labels()
    told = {"A1": "A1: exact, knows the secret", "A2": "A2: A1 without its luck"}
    figure.legend(lines, [told.get(name, name) for name in names], loc="outside lower center", ncols=3)
    figure.savefig(file)


def main() -> None:
    """Train, or only write the tables."""
    arms.main(ROOM, __doc__, write_tables)


if __name__ == "__main__":
    main()
