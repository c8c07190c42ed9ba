"""Estimates with their intervals, and the Markdown tables and figures that show them."""
import csv
import functools
import math
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

os.environ["MPLBACKEND"] = "Agg"  # before matplotlib is imported: this backend needs no screen
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import font_manager  # noqa: E402
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


def spread_within(credit: np.ndarray, response: np.ndarray) -> dict[str, float]:
    """How unequally credit (N,) is spread over the tokens of each response (N,).

    effective sample size: (sum w)^2 / (L sum w^2) with w = abs(credit), averaged over the responses with any credit:
    1 where all L tokens receive the same, 1 / L where one receives all.
    varies within: sum (credit - mean of its response)^2 / sum credit^2.
    """
    length = np.bincount(response)
    size, square, signed = (np.bincount(response, x) for x in (np.abs(credit), credit**2.0, credit))
    credited = square > 0
    effective = ratio((size[credited] ** 2 / (length[credited] * square[credited])).sum(), credited.sum())
    # Sum over a response of (c - mean)^2 = sum of c^2 - (sum of c)^2 / L.
    within = square.sum() - (signed**2 / np.maximum(length, 1)).sum()
    return {"effective sample size": effective, "varies within": ratio(within, square.sum())}


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
    """The t that Student's distribution exceeds in absolute value with this probability; by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) > probability else (low, middle)
    return low


def t_estimate(values: np.ndarray) -> Estimate:
    """Mean of independent values (n,), such as one per seed, with Student's 95% interval; NaN without values."""
    x = np.asarray(values, float)
    mean = float(x.mean()) if len(x) else float("nan")
    half = float(t_quantile(len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")
    return Estimate(mean, mean - half, mean + half)


def welch(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Mean of x (n,) minus mean of y (m,), with its interval and p-value; see `contrast`."""
    return contrast((1, x), (-1, y))


def contrast(*terms: tuple[float, np.ndarray], outside: float = 0.05) -> Estimate:
    """A weighted sum of the means of independent samples (n,) of unequal variance, with its interval and p-value.

    outside: the probability of what lies outside of the interval.

    With v = weight^2 var / n of each sample: t = sum / sqrt(sum of v), which has about (sum v)^2 / sum(v^2 / (n - 1))
    degrees of freedom (Welch, 1947).
    """
    counts = [len(x) for _, x in terms]
    value = float(sum(weight * np.mean(x) for weight, x in terms)) if all(counts) else float("nan")
    if min(counts) < 2:
        return Estimate(value)
    v = [weight**2 * np.var(x, ddof=1) / len(x) for weight, x in terms]
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
    return (values * count).astype(int)


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


def code_span(text: str, most: int = 40) -> str:
    """A text of one line as Markdown code, cut after `most` letters; whatever backquotes it has end nothing."""
    shown = text if len(text) <= most else text[: most - 1] + "…"
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence, gap = "`" * (longest + 1), " " * (longest > 0)
    return f"{fence}{gap}{shown}{gap}{fence}"


def pm(mean: float, error: float, digits: int = 3) -> str:
    """mean ± error; without an error the mean alone, without a mean an empty cell."""
    text = f"{round(mean, digits) + 0.0:.{digits}f}" if np.isfinite(mean) else ""  # + 0.0: no sign before a 0
    return f"{text} ± {error:.{digits}f}" if np.isfinite(error) else text


def csv_rows(records: dict[str, dict[str, Estimate]]) -> list[dict]:
    """A row per method for table.csv: each figure, and the ends of its 95% interval where it has one."""
    rows = []
    for label, r in records.items():
        row = {"method": label}
        for name, e in r.items():
            columns = {name: e.value, f"{name} low": e.low, f"{name} high": e.high}
            row |= {column: f"{value:.6g}" for column, value in columns.items() if not np.isnan(value)}
        rows.append(row)
    return rows


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
FONT, LETTER = "DejaVu Sans Mono", 0.60205  # comes with matplotlib; width of each of its letters in parts of its size
# Of coloured tokens: letters in a line, its height in inches, size of a heading in points.
LETTERS, LINE, HEADING = 84, 0.21, 10

plt.rcParams.update(
    dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY)
    | dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    | dict.fromkeys(("axes.grid", "axes.axisbelow", "savefig.transparent", "figure.constrained_layout.use"), True)
    | {"text.parse_math": False, "savefig.dpi": 200, "grid.alpha": 0.25, "axes.titlesize": 11,
       "axes.prop_cycle": plt.cycler(color=PALETTE)})


def new_figure(columns: int, height: float, **options) -> tuple[plt.Figure, np.ndarray]:
    """A figure of the width that all have, `height` inches high, with axes (columns,) side by side."""
    figure, axes = plt.subplots(1, columns, figsize=(WIDTH, height), squeeze=False, **options)
    return figure, axes[0]


def save_figure(figure: plt.Figure, file: Path) -> None:
    """Write a figure as PNG and free its memory."""
    figure.savefig(file)
    plt.close(figure)


def draw_blocks(blocks: list[tuple[str, str, int, list[str], np.ndarray]], label: str, file: Path) -> None:
    """Texts one below the other, their tokens coloured by a value on one scale, which stands below them.

    Each block is a heading, its font weight and greatest number of lines, and the texts and values (L,) of tokens. The
    axes have a fixed place: a layout engine would shrink them until the letters overlap.
    """
    shown = [(wrap_heading(heading, most), weight, *leave_out_middle(texts, values))
             for heading, weight, most, texts, values in blocks]
    scale = max(np.abs(values).max() for *_, values in shown) or 1
    heights = [0.85 * len(lines) + place_tokens(texts, LETTERS)[-1][1] + 1.75 for lines, _, texts, _ in shown]
    inches = LINE * sum(heights) + 0.65
    figure = plt.figure(figsize=(WIDTH, inches), layout="none")
    axis = figure.add_axes((0.01, 0.65 / inches, 0.98, 1 - 0.65 / inches), xlim=(0, LETTERS), ylim=(sum(heights), 0))
    axis.axis("off")
    for (lines, weight, texts, values), top in zip(shown, np.cumsum([0, *heights])):
        for line in lines:
            axis.text(0, top + 0.6, line, va="center", weight=weight, family=FONT, fontsize=HEADING)
            top += 0.85
        draw_tokens(axis, texts, values / scale, top + 0.35, 0.98)
    bar = figure.add_axes((0.04, 0.48 / inches, 0.92, 0.12 / inches))
    figure.colorbar(plt.cm.ScalarMappable(plt.Normalize(-scale, scale), SHADES), bar, orientation="horizontal",
                    label=label)
    save_figure(figure, file)


def wrap_heading(text: str, most: int) -> list[str]:
    """The lines of a heading, at most `most`."""
    width = int(0.98 * WIDTH * 72 / (HEADING * LETTER))
    return textwrap.wrap(visible(text), width, max_lines=most, placeholder=" …")


def leave_out_middle(texts: list[str], values: np.ndarray, head: int = 7, tail: int = 3) -> tuple[list, np.ndarray]:
    """Tokens and their values (L,). Of a text of more than head + tail + 1 lines only the first and last remain, and
    between them a line, with the value 0, that counts the tokens left out.
    """
    line = np.array([y for _, y, _ in place_tokens(texts, LETTERS)])  # (L,)
    start, stop = np.searchsorted(line, (head, line[-1] + 1 - tail))
    if line[-1] < head + tail + 1:
        return texts, values
    note = f"… {stop - start} more tokens".ljust(LETTERS)  # fills its line
    return [*texts[:start], note, *texts[stop:]], np.concatenate([values[:start], [0], values[stop:]])


def draw_tokens(axis: plt.Axes, texts: list[str], shares: np.ndarray, top: float = 0.0, width: float = 0.92) -> None:
    """Tokens in lines of LETTERS from line `top` down, each on a patch coloured by its share (L,) of the scale.

    width: of the axes, as a share of the figure's.
    """
    size = width * WIDTH * 72 / LETTERS / LETTER  # points
    for (x, y, text), share in zip(place_tokens(texts, LETTERS), shares):
        patch = plt.Rectangle((x, top + y + 0.03), len(text), 0.94, color=SHADES(0.5 + share / 2), lw=0, aa=False)
        axis.add_patch(patch)
        axis.text(x, top + y + 0.5, text, va="center_baseline", family=FONT, fontsize=size, color="black")


def place_tokens(texts: list[str], columns: int) -> list[tuple[int, int, str]]:
    """Column, line and visible text of each token, wrapped at `columns` characters; a line break shows as an arrow.

    A token longer than a line is cut.
    """
    x, y, placed = 0, 0, []
    for text in texts:
        shown = visible(text) or "■"  # the end token has no text
        if len(shown) > columns:
            shown = shown[: columns - 1] + "…"
        if x + len(shown) > columns:
            x, y = 0, y + 1
        placed.append((x, y, shown))
        x += len(shown)
        if "\n" in text:
            x, y = 0, y + 1
    return placed


def visible(text: str) -> str:
    """The text, one letter of equal width for each: ↵ and ⇥ for line break and tab, □ for what the font lacks."""
    marks = {"\n": "↵", "\t": "⇥"}
    return "".join(marks.get(c) or (c if ord(c) in letters_of_font() and c.isprintable() else "□") for c in text)


@functools.cache
def letters_of_font() -> set[int]:
    """What FONT has, normal and bold, but for U+FFFD: that stands for a part of a letter."""
    faces = (font_manager.FontProperties(family=FONT, weight=weight) for weight in ("normal", "bold"))
    charmaps = (font_manager.get_font(font_manager.findfont(face)).get_charmap() for face in faces)
    return set.intersection(*map(set, charmaps)) - {0xFFFD}
