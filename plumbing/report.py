"""Estimates with their intervals, the Markdown tables that show them, and the look of pictures."""
import math
import os
from typing import NamedTuple

import numpy as np

os.environ["MPLBACKEND"] = "Agg"  # before matplotlib is imported: a notebook's may not be installed here
from matplotlib import cycler, rcParams  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402  (without pyplot its memory is freed with it)

MIN_RESPONSES = 30  # a position needs this many responses for a t-statistic
WIDTH = 9.0  # inches of every figure, at 200 dots an inch
PALETTE = ("#1a7fc1", "#d55e00", "#009e73", "#c26a9b")  # safe for colour blindness, readable on white and on black
GREY = "#797979"  # of text and axes: equal contrast to white and to the dark background of GitHub
PLUS, MINUS = "#f1a340", "#a794d0"  # of tokens above and below 0: black text is readable on both

rcParams.update(
    dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY)
    | dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    | dict.fromkeys(("axes.grid", "axes.axisbelow", "savefig.transparent", "figure.constrained_layout.use"), True)
    | {"text.parse_math": False, "savefig.dpi": 200, "grid.alpha": 0.25, "axes.titlesize": 11,
       "axes.prop_cycle": cycler(color=PALETTE)})


class Estimate(NamedTuple):
    """A figure and its 95% interval; the ends are NaN where there is no interval, as for a single seed."""

    value: float
    low: float = float("nan")
    high: float = float("nan")
    p: float = float("nan")  # the two-sided p-value of a true value of 0


def ratio(a: float, b: float) -> float:
    """a / b, or NaN where b is 0, as when no token received credit."""
    return a / b if b else float("nan")


def varies(values: np.ndarray) -> bool:
    """Whether values (n,) differ by more than rounding. Those that don't, tell nothing of an error: no interval."""
    return len(values) > 0 and bool(np.ptp(values) > 1e-12 * np.abs(values).max())


def clustered_mean(values: np.ndarray, cluster: np.ndarray) -> tuple[float, float]:
    """Mean of values (N,) and half of its 95% interval, where values of the same cluster (N,) are correlated. With sums
    s_c and sizes n_c of C clusters: mean = sum s / sum n, half = 1.96 sqrt(C / (C - 1) * sum (s_c - mean n_c)^2)
    / sum n. Both are NaN without values, half also where clusters have the same mean, as for C = 1."""
    sums, sizes = np.bincount(cluster, values), np.bincount(cluster)  # (C,) each
    n, count = sizes.sum(), (sizes > 0).sum()
    mean = ratio(sums.sum(), n)
    if not varies(sums[sizes > 0] / sizes[sizes > 0]):
        return float(mean), float("nan")
    spread = ((sums - mean * sizes) ** 2).sum() * count / (count - 1)
    return float(mean), float(1.96 * np.sqrt(spread) / n)


def student(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Values (n,) of t from 0 on, and the probability (n,) that Student's t with these degrees of freedom lies further
    from 0. With t = sqrt(freedom) tan(a), its density is proportional to cos(a)^(freedom - 1), up to a = pi / 2."""
    a = np.linspace(0, math.pi / 2, 20_001)
    below = np.append(0, np.cumsum(np.cos((a[1:] + a[:-1]) / 2) ** (freedom - 1)))
    return math.sqrt(freedom) * np.tan(a), 1 - below / below[-1]


def t_estimate(*samples: np.ndarray) -> Estimate:
    """The mean of a sample (n,) of independent values, such as one per seed, or that minus the mean of a second one;
    with its 95% interval and its p, if values vary. With v = var / n of each, t = value / sqrt(sum v) has about (sum
    v)^2 / sum(v^2 / (n - 1)) degrees of freedom: Welch (1947), for samples that differ in variance."""
    counts = [len(x) for x in samples]
    value = float(np.subtract.reduce([np.mean(x) for x in samples])) if all(counts) else float("nan")
    if min(counts) < 2 or not any(map(varies, samples)):
        return Estimate(value)
    v = [np.var(x, ddof=1) / len(x) for x in samples]
    error = math.sqrt(sum(v))
    t, further = student(sum(v) ** 2 / sum(part**2 / (n - 1) for part, n in zip(v, counts)))
    half = float(np.interp(-0.05, -further, t)) * error
    return Estimate(value, value - half, value + half, float(np.interp(abs(value) / error, t, further)))


def t_statistics(values: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Mean / standard error of values (N,) over responses, at each position that at least MIN_RESPONSES reach."""
    count, total, square = (np.bincount(position, x) for x in (None, values, values**2.0))  # (P,) each
    count, total, square = (x[count >= MIN_RESPONSES] for x in (count, total, square))
    mean = total / count
    return mean / np.sqrt(np.maximum(square / count - mean**2, 1e-30) / (count - 1))


def early_over_late(values: np.ndarray, position: np.ndarray) -> float:
    """The mean size of values (N,) before the 20% quantile of the tokens' positions (N,), over that after the 80% one:
    the original work's measure. Late are the ends of long responses alone. NaN where either side has no token."""
    sizes, (early, late) = np.abs(values), np.quantile(position, (0.2, 0.8))
    first, last = sizes[position < early], sizes[position > late]
    return ratio(first.mean(), last.mean()) if len(first) and len(last) else float("nan")


class Table(NamedTuple):
    """A Markdown table with a note on how to read it; str() renders it."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]  # | ends a cell
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = [[f" {text:{'>' if i else '<'}{widths[i]}} " for i, text in enumerate(row)] for row in cells]
        lines.insert(1, ["-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)])
        return f"## {self.title}\n{self.note}\n\n" + "".join(f"|{'|'.join(line)}|\n" for line in lines)


def pm(mean: float, error: float, digits: int = 3) -> str:
    """mean ± error; without an error the mean alone, without a mean an empty cell."""
    text = f"{round(mean, digits) + 0.0:.{digits}f}" if np.isfinite(mean) else ""  # + 0.0: no sign before a 0
    return f"{text} ± {error:.{digits}f}" if np.isfinite(error) else text


def new_figure(columns: int, height: float, lines: int = 1, **options) -> tuple[Figure, list[Axes]]:
    """A figure of the width that all have, `height` inches high, with lines * columns axes, so many side by side."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, [*figure.subplots(lines, columns, squeeze=False, **options).flat]
