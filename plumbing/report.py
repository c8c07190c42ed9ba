"""Estimates with their intervals, and the Markdown tables and figures that show them."""
import csv
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

os.environ["MPLBACKEND"] = "Agg"  # before matplotlib is imported: this backend needs no screen
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402


class Estimate(NamedTuple):
    """A figure and its 95% interval; the ends are NaN where there is no interval, as for a single seed."""

    value: float
    low: float = float("nan")
    high: float = float("nan")
    p: float = float("nan")  # of a difference: the two-sided p-value of no difference


# ------------------------------------------------------------------------------------------------ statistics


def ratio(a: float, b: float) -> float:
    """a / b, or NaN where b is 0, as when no token received credit."""
    return a / b if b else float("nan")


def clustered_mean(values: np.ndarray, cluster: np.ndarray) -> tuple[float, float]:
    """Mean of values (N,) and half of its 95% interval, where values of the same cluster (N,) are correlated.

    With sums s_c and sizes n_c of C clusters: mean = sum s / sum n,
    half = 1.96 sqrt(C / (C - 1) * sum (s_c - mean n_c)^2) / sum n. Both are NaN without values, half also for C = 1.
    """
    if not len(values):
        return float("nan"), float("nan")
    sums, sizes = np.bincount(cluster, values), np.bincount(cluster)  # (C,) each
    mean, count = sums.sum() / sizes.sum(), (sizes > 0).sum()
    spread = ((sums - mean * sizes) ** 2).sum() * count / (count - 1) if count > 1 else float("nan")
    return float(mean), float(1.96 * np.sqrt(spread) / sizes.sum())


def t_probability(t: float, freedom: float) -> float:
    """The probability that Student's t with so many degrees of freedom lies further from 0 than t.

    With x = sqrt(freedom) tan(a), the density of t becomes proportional to cos(a)^(freedom - 1), which is integrated
    from |t| and from 0 to infinity, that is, to a = pi / 2.
    """
    from_t, from_0 = (np.linspace(start, math.pi / 2, 4001) for start in (math.atan(abs(t) / math.sqrt(freedom)), 0.0))
    tail, half = (np.trapezoid(np.cos(a) ** (freedom - 1), a) for a in (from_t, from_0))
    return float(tail / half)


@functools.cache
def t_quantile(freedom: float, probability: float = 0.05) -> float:
    """The t beyond which Student's distribution lies, on both sides together, with this probability; by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) > probability else (low, middle)
    return low


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean of independent values (n,), such as one per seed, and half the width of its 95% interval (Student's t)."""
    samples = np.asarray(values, float)
    if len(samples) < 2:
        return float(samples.mean()), float("nan")
    return float(samples.mean()), float(t_quantile(len(samples) - 1) * samples.std(ddof=1) / np.sqrt(len(samples)))


def t_estimate(values: np.ndarray) -> Estimate:
    """Mean of independent values (n,) with Student's 95% interval; NaN without values."""
    if not len(values):
        return Estimate(float("nan"))
    mean, half = interval(values)
    return Estimate(mean, mean - half, mean + half)


def welch(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Mean of x (n,) minus mean of y (m,), with its interval and p-value; see `contrast`."""
    return contrast((1, x), (-1, y))


def contrast(*terms: tuple[int, np.ndarray], outside: float = 0.05) -> Estimate:
    """A sum of means with signs, of independent samples (n,) of unequal variance, with its interval and p-value.

    outside: the probability of what lies outside of the interval.

    With v = var / n of each sample: t = sum / sqrt(sum of v), which has about (sum v)^2 / sum(v^2 / (n - 1)) degrees
    of freedom (Welch, 1947).
    """
    counts = [len(x) for _, x in terms]
    value = float(sum(sign * np.mean(x) for sign, x in terms)) if all(counts) else float("nan")
    if min(counts) < 2:
        return Estimate(value)
    v = [np.var(x, ddof=1) / len(x) for _, x in terms]
    if sum(v) == 0:
        return Estimate(value, value, value, float(value == 0))
    freedom = sum(v) ** 2 / sum(part**2 / (n - 1) for part, n in zip(v, counts))
    error = math.sqrt(sum(v))
    half = t_quantile(freedom, outside) * error
    return Estimate(value, value - half, value + half, t_probability(value / error, freedom))


def mean_height(x: np.ndarray, y: np.ndarray) -> float:
    """The mean over x (n,) of the curve that joins the points y (n,) by straight lines; NaN for a single point."""
    return ratio(np.trapezoid(y, x), x[-1] - x[0])


def bins(values: np.ndarray, count: int) -> np.ndarray:
    """For each value in [0, 1), the index of its bin among `count` equal ones."""
    return np.minimum((values * count).astype(int), count - 1)


MIN_RESPONSES = 30  # a position needs this many responses for a t-statistic


def t_statistics(values: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Mean / standard error of values (N,) over responses, at each position that at least MIN_RESPONSES reach."""
    count = np.bincount(position)
    reached = count >= MIN_RESPONSES
    n = count[reached]
    mean = np.bincount(position, values)[reached] / n
    variance = (np.bincount(position, values**2.0)[reached] / n - mean**2) * n / (n - 1)
    return mean / np.sqrt(np.maximum(variance, 1e-30) / n)


# ---------------------------------------------------------------------------------------------------- tables


@dataclass
class Table:
    """A Markdown table with a note on how to read it; str() renders it."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]  # | ends a cell
        columns = [list(column) for column in zip(*rows)]
        for i, column in enumerate(columns):
            width = max(map(len, column))
            column[:] = [f" {text:<{width}} " if i == 0 else f" {text:>{width}} " for text in column]
            column.insert(1, "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":")
        lines = "\n".join(f"|{'|'.join(row)}|" for row in zip(*columns))
        return f"## {self.title}\n{self.note}\n\n{lines}\n"


def pm(mean: float, error: float, digits: int = 3) -> str:
    """mean ± error; without an error the mean alone, without a mean an empty cell."""
    text = f"{round(mean, digits) + 0.0:.{digits}f}" if np.isfinite(mean) else ""  # + 0.0: no sign before a 0
    return f"{text} ± {error:.{digits}f}" if np.isfinite(error) else text


def write_csv(rows: list[dict], file: Path) -> None:
    """A CSV file with the columns of all rows; a row may lack some."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# --------------------------------------------------------------------------------------------------- figures


WIDTH = 9.0  # inches of every figure, at 200 dots an inch
PALETTE = ("#1a7fc1", "#d55e00", "#009e73", "#c26a9b")  # safe for colour blindness, readable on white and on black
GREY = "#797979"  # of text and axes: equal contrast to white and to the dark background of GitHub
PLUS, MINUS = "#f1a340", "#a794d0"  # of tokens above and below 0: black text is readable on both
SHADES = LinearSegmentedColormap.from_list("credit", (MINUS, "white", PLUS))
LETTERS = 84  # in a line of coloured tokens

plt.rcParams.update(
    dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY)
    | dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    | dict.fromkeys(("axes.grid", "axes.axisbelow", "savefig.transparent", "figure.constrained_layout.use"), True)
    | {"text.parse_math": False, "savefig.dpi": 200, "grid.alpha": 0.25, "axes.titlesize": 11,
       "axes.prop_cycle": plt.cycler(color=PALETTE)})


def new_figure(columns: int, rows: int, height: float, **options) -> tuple[plt.Figure, np.ndarray]:
    """A figure of the width that all have, `height` inches high, with a grid of axes (rows, columns)."""
    return plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **options)


def save_figure(figure: plt.Figure, file: Path) -> None:
    """Write a figure as PNG and free its memory."""
    figure.savefig(file)
    plt.close(figure)


def draw_tokens(axis: plt.Axes, texts: list[str], shares: np.ndarray, top: float = 0.0) -> None:
    """Tokens in lines of LETTERS from line `top` down, each on a patch coloured by its share (L,) of the scale."""
    size = 0.92 * WIDTH * 72 / LETTERS / 0.602  # points: axes are 0.92 of the width, a letter 0.602 of its size
    for (x, y, text), share in zip(place_tokens(texts, LETTERS), shares):
        patch = plt.Rectangle((x, top + y + 0.03), len(text), 0.94, color=SHADES(0.5 + share / 2), lw=0, aa=False)
        axis.add_patch(patch)
        axis.text(x, top + y + 0.5, text, va="center_baseline", family="monospace", fontsize=size, color="black",
                  parse_math=False)


def place_tokens(texts: list[str], columns: int) -> list[tuple[int, int, str]]:
    """Column, line and visible text of each token, wrapped at `columns` characters; a line break shows as an arrow."""
    x, y, placed = 0, 0, []
    for text in texts:
        shown = text.replace("\n", "↵") or "■"  # the end token has no text
        if x + len(shown) > columns:
            x, y = 0, y + 1
        placed.append((x, y, shown))
        x += len(shown)
        if "\n" in text:
            x, y = 0, y + 1
    return placed
