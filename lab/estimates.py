"""What the laboratory does with estimates: cells written and read back, and a dot with its interval."""
import math
import re
from pathlib import Path

import numpy as np

from plumbing.report import PALETTE, Estimate, plt, pm


def in_points(e: Estimate) -> Estimate:
    """A share in percent, or a difference of shares in points."""
    return Estimate(*(100 * x for x in e[:3]))


def points(e: Estimate) -> str:
    """A share in percent, or a difference in points, ± half of its interval."""
    return pm(100 * e.value, 100 * (e.high - e.value), 1)


def cell(e: Estimate, digits: int = 2) -> str:
    """An estimate as `value (low to high)`; empty where there is no value."""
    ends = f" ({e.low:.{digits}f} to {e.high:.{digits}f})" if np.isfinite(e.low) else ""
    return f"{e.value:.{digits}f}{ends}" if np.isfinite(e.value) else ""


def read_cell(text: str) -> Estimate:
    """The estimate that `cell` or `pm` wrote."""
    value, *ends = map(float, re.findall(r"-?\d+\.\d+", text) or ["nan"])
    return Estimate(value, value - ends[0], value + ends[0]) if "±" in text else Estimate(value, *ends)


def read_table(file: Path, title: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text, of the table under a heading of a Markdown file."""
    _, found, rest = file.read_text(encoding="utf-8").partition(f"## {title}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    if not found or not lines:
        raise ValueError(f"{file} has no table with the heading {title}")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return header, rows


def draw_point(axis: plt.Axes, x: Estimate, y: Estimate, **style) -> None:
    """A dot with the intervals of both of its coordinates; style: of matplotlib's errorbar."""
    across, up = ([[max(0.0, e.value - e.low)], [max(0.0, e.high - e.value)]] for e in (x, y))
    axis.errorbar(x.value, y.value, xerr=across, yerr=up, fmt="o", **style)


def draw_estimate(axis: plt.Axes, y: float, e: Estimate, hollow: bool = False, cut: float = -math.inf,
                  colour: str = PALETTE[0], marker: str = "o") -> None:
    """A dot on line y with its interval. What lies below the cut is an arrow at the cut, with the number beside it."""
    axis.plot(np.clip([e.low, e.high], cut, None), [y, y], color=colour, lw=2, alpha=0.6)
    if e.low < cut or e.value < cut:
        axis.plot(cut, y, "<", color=colour, clip_on=False)
    if e.value < cut:
        axis.annotate(pm(e.value, e.high - e.value, 1), (max(cut, e.high), y), (7, 0), textcoords="offset points",
                      va="center", fontsize=8)
    else:
        axis.plot(e.value, y, marker, color=colour, mfc="none" if hollow else colour)
