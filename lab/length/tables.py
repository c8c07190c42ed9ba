"""Tables and picture of noise against length, from rows.csv: python -m lab.length.tables"""
import csv
from pathlib import Path

import numpy as np

from lab.statistics import RESAMPLES, cell
from plumbing.report import GREY, PALETTE, Estimate, Table, new_figure

ROOM = Path(__file__).parent
NOISES = {"exact": "exact", "K = 4": "K = 4", "K = 16": "K = 16", "45 responses": "rloo 45"}
PREDICTED = {60: "0.18 0.35 0.23 0.25 90", 120: "0.09 0.27 0.15 0.21 180", 240: "0.05 0.23 0.10 0.18 350"}

Draws = dict[str, np.ndarray]  # (1 + RESAMPLES,) means of columns over pairs: of all, then of resampled ones


def read() -> dict[int, Draws]:
    """The means by length. Lengths are resampled independently."""
    rows, found = list(csv.DictReader((ROOM / "rows.csv").read_text(encoding="utf-8").splitlines())), {}
    for length in dict.fromkeys(row["length"] for row in rows):
        x = np.array([[float(v) for v in row.values()] for row in rows if row["length"] == length])  # (n, columns)
        counts = np.random.default_rng(int(length)).multinomial(len(x), np.full(len(x), 1 / len(x)), RESAMPLES)
        means = np.vstack((np.ones(len(x), int), counts)) @ x / len(x)  # (1 + RESAMPLES, columns)
        found[int(length)] = derive({"pairs": np.full(len(means), len(x))} | dict(zip(rows[0], means.T)))
    return found


def derive(m: Draws) -> Draws:
    """Noise of a step of 8 responses, RLOO = 1; E / kappa at the logits, and by gradients, where it is 7 / 8 of RLOO's
    noise within puzzles over exact credit's: infinite where a resample's exact credit has none."""
    whole, part = m["rloo 8"], m["puzzles"]
    m["K = 16, gradients"] = m["exact, gradients"] + (m["K = 4, gradients"] - m["exact, gradients"]) / 4
    m |= {name: (part + (m[f"{name}, gradients"] - m["mean"]) / 8) / whole
          for name in ("exact", "K = 4", "K = 16", "uniform with measured")}
    within, kappa = np.maximum(m["exact"] * whole - part, 1e-9), m["exact, logits"] / m["A* squared"]
    m |= {"by gradients": 7 / 8 * (whole - part) / within, "kappa": kappa, "E / kappa": m["E"] / kappa}
    m |= {f"{K} - 45": m[f"K = {K}"] - m["rloo 45"] / whole for K in (4, 16)}
    return m | {"equal": 1 + 8 * m["by gradients"], "rloo 16": m["rloo 16"] / whole, "rloo 45": m["rloo 45"] / whole,
                "part": part / whole, "a token": m["entropy"] / m["tokens"], "check": m["A* squared"] / m["V(1-V)"],
                "uniform": m["uniform, logits"] / m["V(1-V)"] / m["E"]}


def show(x: np.ndarray, digits: int) -> str:
    """A figure with its interval."""
    low, high = np.percentile(x[1:], (2.5, 97.5))
    text = cell(Estimate(x[0], low, high), digits)
    return text if high < 1e6 else f"{text.rpartition(' ')[0]} infinity)"


def theory(m: Draws, E: np.ndarray) -> Draws:
    """Noise by E (n,), from what one length says: what is uniform or sampled grows with E, the rest stays."""
    at = lambda name: m[name][0]
    grown, part = E / at("E"), at("puzzles")
    whole = part + (at("rloo 8") - part) * grown
    exact, rollouts = at("exact") * at("rloo 8"), (at("K = 4") - at("exact")) * at("rloo 8") * grown
    return {"exact": exact / whole, "K = 4": (exact + rollouts) / whole, "K = 16": (exact + rollouts / 4) / whole,
            "45 responses": (part + (whole - part) * 7 / 44) / whole,
            "equal": 1 + 7 * (whole - part) / (exact - part)}


def table(title: str, note: str, found: dict[int, Draws], columns: dict[str, tuple[str, int]], extra=()) -> Table:
    """A row for each length; columns: what is shown under a heading, and its digits."""
    rows = [[f"{n}", *(show(m[name], digits) for name, digits in columns.values())] for n, m in found.items()]
    return Table(title, note, ["tokens", *columns], [*rows, *extra])


def tables(found: dict[int, Draws]) -> list[Table]:
    """All tables."""
    policies = {"V": ("V", 2), "length": ("tokens", 0), "entropy of a token": ("a token", 2), "cut off": ("cut", 3),
                "E": ("E", 1), "kappa": ("kappa", 2), "E / kappa": ("E / kappa", 1),
                "by gradients": ("by gradients", 1)}
    noises = {name: (key, 3) for name, key in NOISES.items()} | {"equal exact": ("equal", 0)}
    checks = {"A* squared / V(1-V)": ("check", 2), "uniform / V(1-V) E": ("uniform", 2), "puzzles' part": ("part", 2),
              "uniform with measured": ("uniform with measured", 3), "16 responses": ("rloo 16", 3),
              "K = 4 minus 45 responses": ("4 - 45", 3), "K = 16 minus 45 responses": ("16 - 45", 3)}
    others = []
    for n, m in found.items():
        law = theory(found[60], m["E"][:1])
        others += [[f"{n}, theory", *(f"{x[0]:.{3 if name != 'equal' else 0}f}" for name, x in law.items())],
                   [f"{n}, predicted", *PREDICTED[n].split()]]
    a, b = found[min(found)], found[max(found)]
    powers = [[name, show(np.log(b[name] / a[name]) / np.log(b["E"] / a["E"]), 2)]
              for name in ("E / kappa", "by gradients", "kappa", "tokens")]
    pairs = ", ".join(f"{m['pairs'][0]} of {n}" for n, m in found.items())
    return [
        table("Policies", f"Pairs of puzzles: {pairs} tokens, as searches were written. 95% intervals, bootstrap over "
              "pairs. By gradients: E / kappa from the noise within puzzles.", found, policies),
        table("Noise of a step", "tr Cov of a step of 8 responses to a puzzle, or 45, RLOO with 8 = 1. Equal exact: "
              "responses with which RLOO has exact credit's noise. Theory: from the first row, at the E of the others. "
              "Predicted: beforehand, by length alone.", found, noises, others),
        Table("Exponents", "Of E, from the shortest to the longest. Expected: 1 of E / kappa (primary) and by "
              "gradients, 0 of kappa.", ["of", "exponent"], powers),
        table("Checks", "By theory the first two are 1, and uniform with measured is the noise of exact credit.",
              found, checks)]


def draw(found: dict[int, Draws]) -> None:
    """Noise against E, measured and by theory."""
    figure, (axis,) = new_figure(1, 4.6)
    E = np.geomspace(0.85 * found[60]["E"][0], 1.25 * max(m["E"][0] for m in found.values()), 50)
    for i, (label, name) in enumerate(NOISES.items()):
        axis.plot(E, theory(found[60], E)[label], lw=0.8, color=PALETTE[i])
        x, y = (np.array([m[key][0] for m in found.values()]) for key in ("E", name))
        ends = np.array([np.percentile(m[name][1:], (2.5, 97.5)) for m in found.values()]).T  # (2, lengths)
        axis.errorbar(x * 1.025 ** (i - 1.5), y, np.abs(ends - y), fmt="osD^"[i], color=PALETTE[i], capsize=3,
                      label=label)
    axis.axhline(1, color=GREY, lw=0.8, ls="--")
    axis.set(xscale="log", yscale="log", ylim=(0.05, 1.25), xlabel="E, about the number of uncertain tokens of a "
             "response (logarithmic)", ylabel="noise, RLOO with 8 responses = 1 (logarithmic)",
             title="Noise of a step: measured with 95% intervals, and theory from the leftmost points (thin)")
    for m in found.values():
        axis.annotate(f"{m['tokens'][0]:.0f} tokens", (m["E"][0], 1), xytext=(0, 4), textcoords="offset points",
                      ha="center", color=GREY)
    axis.set_xticks(ticks := [10, 20, 30, 40], map(str, ticks))
    axis.set_yticks(ticks := [0.05, 0.1, 0.2, 0.3, 0.5, 1], map(str, ticks))
    axis.minorticks_off()
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(ROOM / "noise.png")


if __name__ == "__main__":
    everything = read()
    (ROOM / "tables.md").write_text("\n".join(map(str, tables(everything))), encoding="utf-8")
    draw(everything)
