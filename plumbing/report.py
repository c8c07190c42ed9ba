"""Estimates with their intervals, and the Markdown tables and pictures that show them."""
import math
import os
import re
import textwrap
import unicodedata
from pathlib import Path
from typing import NamedTuple

import numpy as np

os.environ["MPLBACKEND"] = "Agg"  # before matplotlib is imported: a notebook's may not be installed here
from matplotlib import cm, colors, cycler, font_manager, patches, rcParams  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402  (without pyplot its memory is freed with it)

MIN_RESPONSES = 30  # a position needs this many responses for a t-statistic
WIDTH = 9.0  # inches of every figure, at 200 dots an inch
PALETTE = ("#1a7fc1", "#d55e00", "#009e73", "#c26a9b")  # safe for colour blindness, readable on white and on black
GREY = "#797979"  # of text and axes: equal contrast to white and to the dark background of GitHub
PLUS, MINUS = "#f1a340", "#a794d0"  # of tokens above and below 0: black text is readable on both
SHADES = colors.LinearSegmentedColormap.from_list("credit", (MINUS, "white", PLUS)).with_extremes(bad="#cccccc")
FONT, LETTER = "DejaVu Sans Mono", 0.60205  # comes with matplotlib; width of each of its letters in parts of its size
FACES = [font_manager.get_font(font_manager.findfont(FONT + weight)) for weight in ("", ":bold")]
IN_FONT = set.intersection(*(set(face.get_charmap()) for face in FACES)) - {0xFFFD}  # that stands for parts of letters
LETTERS, LINE, HEADING = 84, 0.21, 10  # coloured tokens: letters in a line, its height in inches, points of a heading

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


def clustered_mean(values: np.ndarray, cluster: np.ndarray) -> tuple[float, float]:
    """Mean of values (N,) and half of its 95% interval, where values of the same cluster (N,) are correlated. With sums
    s_c and sizes n_c of C clusters: mean = sum s / sum n, half = 1.96 sqrt(C / (C - 1) * sum (s_c - mean n_c)^2)
    / sum n. Both are NaN without values, half also for C = 1."""
    sums, sizes = np.bincount(cluster, values), np.bincount(cluster)  # (C,) each
    n, count = sizes.sum(), (sizes > 0).sum()
    mean = ratio(sums.sum(), n)
    spread = ratio(((sums - mean * sizes) ** 2).sum() * count, count - 1)
    return float(mean), float(ratio(1.96 * np.sqrt(spread), n))


def student(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Values (n,) of t from 0 on, and the probability (n,) that Student's t with these degrees of freedom lies further
    from 0. With t = sqrt(freedom) tan(a), its density is proportional to cos(a)^(freedom - 1), up to a = pi / 2."""
    a = np.linspace(0, math.pi / 2, 20_001)
    below = np.append(0, np.cumsum(np.cos((a[1:] + a[:-1]) / 2) ** (freedom - 1)))
    return math.sqrt(freedom) * np.tan(a), 1 - below / below[-1]


def t_estimate(*samples: np.ndarray, weights: tuple[float, ...] = (1, -1), outside: float = 0.05) -> Estimate:
    """The mean of a sample (n,) of independent values, such as one per seed; of two, the first's minus the second's; in
    general the sum of weights * means; with its interval, `outside` of which lies that probability, and its p. With v =
    weight^2 var / n of each sample, t = sum / sqrt(sum v) has about (sum v)^2 / sum(v^2 / (n - 1)) degrees of freedom:
    Welch (1947), for samples that differ in variance."""
    counts = [len(x) for x in samples]
    value = float(sum(weight * np.mean(x) for weight, x in zip(weights, samples))) if all(counts) else float("nan")
    if min(counts) < 2:
        return Estimate(value)
    v = [weight**2 * np.var(x, ddof=1) / len(x) for weight, x in zip(weights, samples)]
    if sum(v) == 0:
        return Estimate(value, value, value, float(value == 0))
    freedom, error = sum(v) ** 2 / sum(part**2 / (n - 1) for part, n in zip(v, counts)), math.sqrt(sum(v))
    t, further = student(freedom)
    half = float(np.interp(-outside, -further, t)) * error
    return Estimate(value, value - half, value + half, float(np.interp(abs(value) / error, t, further)))


def t_statistics(values: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Mean / standard error of values (N,) over responses, at each position that at least MIN_RESPONSES reach."""
    count, total, square = (np.bincount(position, x) for x in (None, values, values**2.0))  # (P,) each
    count, total, square = (x[count >= MIN_RESPONSES] for x in (count, total, square))
    mean = total / count
    return mean / np.sqrt(np.maximum(square / count - mean**2, 1e-30) / (count - 1))


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


def code_span(text: str) -> str:
    """A text of one line as Markdown code; whatever backquotes it has end nothing."""
    fence = "`" + max(re.findall("`+", text), default="")
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def pm(mean: float, error: float, digits: int = 3) -> str:
    """mean ± error; without an error the mean alone, without a mean an empty cell."""
    text = f"{round(mean, digits) + 0.0:.{digits}f}" if np.isfinite(mean) else ""  # + 0.0: no sign before a 0
    return f"{text} ± {error:.{digits}f}" if np.isfinite(error) else text


def new_figure(columns: int, height: float, lines: int = 1, **options) -> tuple[Figure, np.ndarray]:
    """A figure of the width that all have, `height` inches high, with axes (lines * columns,), so many side by side."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots(lines, columns, squeeze=False, **options).ravel()


def draw_blocks(blocks: list[tuple[str, list[str], np.ndarray]], label: str, file: Path) -> None:
    """Texts one below the other, each a heading, and the texts and values (L,) of its tokens, coloured on one scale.
    The axes have a fixed place: a layout engine would shrink them until the letters overlap."""
    blocks = [(wrap_heading(heading, 6), texts, values) for heading, texts, values in blocks]
    scale = max(np.nanmax(np.abs(values)) for *_, values in blocks) or 1
    heights = [2.6 + 0.85 * heading.count("\n") + place_tokens(texts)[-1][1] for heading, texts, _ in blocks]  # lines
    inches = LINE * sum(heights) + 0.85
    figure = Figure(figsize=(WIDTH, inches), layout="none")
    axis = figure.add_axes((0.01, 0.85 / inches, 0.98, 1 - 0.85 / inches), xlim=(0, LETTERS), ylim=(sum(heights), 0))
    axis.axis("off")
    for (heading, texts, values), top in zip(blocks, np.cumsum([0, *heights])):
        axis.text(0, top + 0.18, heading, va="top", weight="bold", family=FONT, fontsize=HEADING, linespacing=1.28)
        draw_tokens(axis, texts, values / scale, top + 1.2 + 0.85 * heading.count("\n"), 0.98)
    bar, colours = figure.add_axes((0.04, 0.68 / inches, 0.92, 0.12 / inches)), colors.Normalize(-scale, scale)
    figure.colorbar(cm.ScalarMappable(colours, SHADES), bar, orientation="horizontal", label=label)
    figure.savefig(file)


def wrap_heading(text: str, most: int) -> str:
    """A heading in at most so many lines. A letter takes whole dots, of which there are 200 in an inch."""
    width = int(0.98 * WIDTH * 200 / math.ceil(HEADING * LETTER * 200 / 72))
    return textwrap.fill(visible(text), width, max_lines=most, placeholder=" …")


def whole_letters(parts: list[bytes], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Texts and values of tokens, given as bytes. Those that share a letter become one, with the value that is larger
    in size: UTF-8 marks the further bytes of a letter."""
    begins = [i for i, part in enumerate(parts) if i == 0 or not 0x80 <= part[:1].ljust(1)[0] < 0xC0]
    pieces = [slice(*ends) for ends in zip(begins, [*begins[1:], len(parts)])]
    return ([b"".join(parts[piece]).decode("utf-8", "replace") for piece in pieces],
            np.array([max(values[piece], key=abs) for piece in pieces]))


def draw_tokens(axis: Axes, texts: list[str], shares: np.ndarray, top: float = 0.0, width: float = 0.92) -> None:
    """Tokens in lines of LETTERS from line `top` down, each on a patch coloured by its share (L,) of the scale.
    width: of the axes, as a share of the figure's."""
    size = width * WIDTH * 72 / LETTERS / LETTER  # points
    for (x, y, text), colour in zip(place_tokens(texts), SHADES(0.5 + np.asarray(shares) / 2)):
        axis.add_patch(patches.Rectangle((x, top + y + 0.03), len(text), 0.94, color=colour, lw=0, aa=False))
        axis.text(x, top + y + 0.5, text, va="center_baseline", family=FONT, fontsize=size, color="black")


def place_tokens(texts: list[str], columns: int = LETTERS) -> list[tuple[int, int, str]]:
    """Column, line and visible text of each token, wrapped at `columns` characters, where a longer one is cut."""
    x, y, placed = 0, 0, []
    for text in texts:
        shown = visible(text) or "■"  # the end token has no text
        shown = shown if len(shown) <= columns else shown[: columns - 1] + "…"
        if x + len(shown) > columns:
            x, y = 0, y + 1
        placed.append((x, y, shown))
        x, y = (0, y + 1) if "\n" in text else (x + len(shown), y)
    return placed


def visible(text: str) -> str:
    """The text, one letter of equal width for each: ↵ and ⇥ for line break and tab, □ for what the font lacks, and for
    an accent without a letter, which would leave its cell."""
    fits = lambda c: ord(c) in IN_FONT and c.isprintable() and unicodedata.category(c)[0] != "M"
    return "".join(c if fits(c) else {"\n": "↵", "\t": "⇥"}.get(c, "□") for c in unicodedata.normalize("NFC", text))
