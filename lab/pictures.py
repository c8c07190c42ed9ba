"""Five pictures of the laboratory, a message each, from its published rows and tables:  python -m lab.pictures"""
import csv
from pathlib import Path

import numpy as np

from lab.arms import figures_of, measured, spent
from lab.statistics import read_column, read_table
from plumbing.comparison import Group
from plumbing.report import GREY, PALETTE, Axes, Estimate, new_figure, t_estimate
from plumbing.runs import read_metrics

LAB = Path(__file__).parent
BLUE, ORANGE, GREEN, PINK = PALETTE
AREA = "success averaged over training, %"

Place = tuple[float, float, str]  # of a label beside its point: points right, points up, the side that is aligned
UPPER, LOWER = (9, 11, "left"), (-9, -11, "right")  # where a falling line is not


def groups(room: str, **wanted: str) -> dict[str, Group]:
    """The runs in a room's runs.csv whose columns are as wanted, by method and setting."""
    found = {}
    for row in csv.DictReader((LAB / room / "runs.csv").read_text(encoding="utf-8").splitlines()):
        label = f"{row['method']} {row['setting']}".strip()
        if all(row[name] == value for name, value in wanted.items()):
            found.setdefault(label, Group(label, {})).rows[int(row["seed"])] = figures_of(row)
    return found


def draw_curve(axis: Axes, x: np.ndarray, group: Group, line: str, colour: str) -> None:
    """Mean success over seeds in percent at places x, and its 95% interval as a band."""
    curves = zip(*(row["curve"].values() for row in group.rows.values()))  # the seeds at each measurement
    mean, low, high = 100 * np.array([t_estimate(values)[:3] for values in curves]).T  # (m,) each
    axis.plot(x, mean, line, color=colour, ms=4)
    axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)


def say(axis: Axes, text: str, at: tuple[float, float], colour: str, place: Place = (7, 0, "left")) -> None:
    """A text beside a point, instead of a legend."""
    x, y, side = place
    axis.annotate(text, at, (x, y), textcoords="offset points", color=colour, ha=side, va="center", fontsize=9,
                  annotation_clip=False)


def draw_point(axis: Axes, x: Estimate, y: Estimate, text: str, colour: str, mark: str, place: Place) -> None:
    """An estimate by another, with both intervals, and its name."""
    ends = ([[e.value - e.low], [e.high - e.value]] for e in (y, x))
    axis.errorbar(x.value, y.value, *ends, fmt=mark, color=colour)
    say(axis, text, (x.value, y.value), colour, place)


def log_axis(axis: Axes, ticks: list[float], label: str) -> None:
    """A logarithmic x axis with these ticks."""
    axis.set(xscale="log", xlabel=label)
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()


def study_noise() -> None:
    """Area by the noise of a step's gradient: RLOO with more and more responses, measured credit beside its line."""
    file, (figure, (axis,)) = LAB / "study" / "tables.md", new_figure(1, 4.2)
    area, quiet = (read_column(file, "Noise, or credit?", name) for name in ("area", "1 / noise"))
    rloo = {"RLOO": ("RLOO, 8 responses a puzzle", LOWER), "RLOO answers=16": ("16 responses", UPPER),
            "RLOO answers=45": ("45 responses", UPPER), "RLOO answers=90": ("90 responses", (-26, -16, "right")),
            "RLOO answers=180": ("180 responses", UPPER)}
    others = {"RLOO questions=68": ("68 puzzles instead of 12", GREY, "x", (9, 11, "left")),
              "`oracle k=4`": ("measured credit, K = 4", BLUE, "s", UPPER),
              "`oracle k=4 mix=0.25`": ("a quarter uniform", BLUE, "s", LOWER),
              "`oracle k=4 mix=0.5`": ("half uniform", BLUE, "s", LOWER),
              "`oracle k=4 mix=1.0`": ("all uniform", BLUE, "s", UPPER)}
    noise = {name: Estimate(1 / e.value, 1 / e.high, 1 / e.low) for name, e in quiet.items() if np.isfinite(e.value)}
    axis.plot([noise[name].value for name in rloo], [area[name].value for name in rloo], color=GREY)
    for name, (text, place) in rloo.items():
        draw_point(axis, noise[name], area[name], text, GREY, "o", place)
    for name, (text, colour, mark, place) in others.items():
        draw_point(axis, noise[name], area[name], text, colour, mark, place)
    log_axis(axis, [0.125, 0.25, 0.5, 1], "noise of a step's gradient, RLOO's with 8 responses = 1 (logarithmic)")
    axis.set(ylabel=AREA, xlim=(None, 1.35),
             title="Measured credit learns as much as RLOO whose gradients are as noisy")
    figure.savefig(LAB / "study" / "noise.png")


def study_budget() -> None:
    """Learning curves of vineppo and RLOO at the default rate: by step, and by cost, RLOO with more steps."""
    main, longer = (groups("study", version="2", level="easy", part=part) for part in ("main", "budget"))
    vine, rloo, more = main["vineppo"], main["none advantage=rloo"], longer["none steps=560 advantage=rloo"]
    figure, (left, right) = new_figure(2, 3.8, sharey=True)
    unit = spent(rloo)[-1]
    for axis, x, named in ((left, measured, {"RLOO": (rloo, GREY)}),
                           (right, lambda group: spent(group) / unit, {"RLOO, more steps": (more, GREY)})):
        for name, (group, colour) in {"VinePPO": (vine, GREEN), **named}.items():
            draw_curve(axis, x(group), group, "o-" if colour == GREEN else "^-", colour)
            end = axis.get_lines()[-1].get_xydata()[-1]
            say(axis, name, end, colour, (0, -22, "right") if axis is right and colour == GREEN else (7, 0, "left"))
    left.set(title="At equal steps VinePPO leads", xlabel="step", ylabel="held-out puzzles solved, %", xlim=(0, 130))
    right.set(title="At equal cost RLOO with more steps leads", xlabel="cost, RLOO's 100 steps = 1", xlim=(0, 7.5))
    left.set_xticks(range(0, 101, 25))
    right.set_xticks(range(6))
    figure.savefig(LAB / "study" / "budget.png")


def real_learning() -> None:
    """Held-out success of three runs of RLOO on a real model, and that of their own responses, thin."""
    figure, (axis,) = new_figure(1, 3.6)
    for seed, (colour, mark) in enumerate(zip((BLUE, ORANGE, GREEN), "os^")):
        m = read_metrics(LAB / "real" / "data" / "learning" / f"none-seed{seed}")
        own = np.convolve(m["success"][1:], np.ones(5) / 5, "valid")
        axis.plot(np.arange(len(own)) + 3, 100 * own, color=colour, lw=1, alpha=0.4)  # 3: the middle of the first five
        held = np.flatnonzero(np.isfinite(m["heldout_success"]))
        y, error = 100 * m["heldout_success"][held], 196 * m["heldout_stderr"][held]
        x = m["step"][held] + 0.4 * (seed - 1)
        axis.errorbar(x, y, error, fmt=f"{mark}-", color=colour, capsize=3)
        say(axis, f"seed {seed}: {y[-1]:.0f}%", (x[-1], y[-1]), colour)
    axis.set(xlabel="step", ylabel="word problems solved, %", xlim=(-1, 46), ylim=(0, 100),
             title="The same run with three seeds: all learn, and end far apart")
    figure.savefig(LAB / "real" / "learning.png")


def turns_learning() -> None:
    """Exact success by step of five arms; and area by noise, beside RLOO with more and more games."""
    found, noise = groups("turns"), read_column(LAB / "turns" / "noise.md", "Noise of a step", "all")
    figure, (left, right) = new_figure(2, 4.2)
    arms = {"exact_turns luck=false": ("exact, without luck", BLUE, "o", (8, -14, "right")),
            "exact_turns": ("exact", ORANGE, "s", UPPER)}
    rloo = "none advantage=rloo"
    shown = {**arms, "turn_vine": ("turn_vine", GREEN, "D", None), rloo: ("RLOO", GREY, "^", None)}
    for label, (name, colour, mark, _) in shown.items():
        draw_curve(left, measured(found[label]), found[label], f"{mark}-", colour)
        end = left.get_lines()[-1].get_xydata()[-1]
        say(left, name, end, colour)
    area = {label: t_estimate(100 * group.values("area")) for label, group in found.items()}
    games = {rloo: 12} | {f"none questions={n} advantage=rloo": n for n in (24, 72, 216)}
    right.plot([12 / n for n in games.values()], [area[label].value for label in games], color=GREY)
    for label, n in games.items():
        at = Estimate(12 / n, 12 / n, 12 / n)
        draw_point(right, at, area[label], f"RLOO, {n} games", GREY, "^", UPPER if n > 24 else LOWER)
    for label, (name, colour, mark, place) in arms.items():
        draw_point(right, noise[label], area[label], name, colour, mark, place)
    left.set(xlabel="step", ylabel="exact success, %", xlim=(0, 150), title="Exact credit without luck learns fastest")
    left.set_xticks(range(0, 101, 25))
    log_axis(right, [0.02, 0.05, 0.1, 0.2, 0.5, 1], "noise of a step's gradient, RLOO's = 1 (logarithmic)")
    right.set(ylabel=AREA, xlim=(0.012, 1.4), ylim=(None, 50), title="At equal noise RLOO is within two points")
    figure.savefig(LAB / "turns" / "learning.png")


def length_noise() -> None:
    """Noise of a step's gradient by the mean length of responses."""
    file, (figure, (axis,)) = LAB / "length" / "tables.md", new_figure(1, 4.2)
    header, rows = read_table(file, "Policies")
    length = [float(row[header.index("length")].split()[0]) for row in rows]
    series = {"K = 4": ("measured credit, K = 4", ORANGE, "s"), "45 responses": ("RLOO, 45 responses", PINK, "^"),
              "K = 16": ("measured credit, K = 16", GREEN, "D"), "exact": ("exact credit", BLUE, "o")}
    for i, (column, (name, colour, mark)) in enumerate(series.items()):
        y = np.array(list(read_column(file, "Noise of a step", column).values())[:3])[:, :3]  # measured rows come first
        x = np.array(length) * 1.02 ** (i - 1.5)
        axis.errorbar(x, y[:, 0], np.abs(y[:, 1:3] - y[:, :1]).T, fmt=f"{mark}-", color=colour, capsize=3)
        say(axis, name, (186, y[-1, 0]), colour)
    axis.set(ylabel="noise of a step's gradient,\nRLOO's with 8 responses = 1", ylim=(0, 0.5), xlim=(40, 240),
             xticks=range(50, 201, 25), xlabel="tokens in a response",
             title="K = 4 stays noisier than 45 responses, at each of three lengths")
    figure.savefig(LAB / "length" / "noise.png")


if __name__ == "__main__":
    for draw in (study_noise, study_budget, real_learning, turns_learning, length_noise):
        draw()
