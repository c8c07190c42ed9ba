"""A picture of what every token did, and of the credit that a method gave it.

Run it:  python -m lab.truth.measure        writes truth.png: A*, and the credit of the first of --methods
         python -m lab.truth.score --mitigation entropy_ratio        the same with that method's credit
"""
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import colors, patches
from matplotlib.figure import Figure

from lab.statistics import by_response
from plumbing.report import MINUS, PLUS, WIDTH

SHADES = colors.LinearSegmentedColormap.from_list("credit", (MINUS, "white", PLUS))
FONT, LETTER = "DejaVu Sans Mono", 0.60205  # comes with matplotlib; width of each of its letters in parts of its size
LETTERS, LINE = 84, 0.2  # letters in a line of tokens, and its height in inches
FULL = 99  # percentile of the sizes that gets the full colour


def examples(truth: dict) -> list[np.ndarray]:
    """Where the tokens (L,) of a right and of a wrong response are: of those with some credit and a length that suits
    a picture, the ones with the largest |A*|."""
    ordered = sorted(by_response(truth), key=lambda rows: (  # False comes first
        not (40 <= len(rows) <= 80 and truth["advantage"][rows[0]]), -np.abs(truth["a_star"][rows]).max()))
    right = [truth["success"][rows[0]] > 0.5 for rows in ordered]
    return [ordered[right.index(which)] for which in (True, False)] if len({*right}) == 2 else ordered[:2]


def draw(truth: dict, file: Path, credit: np.ndarray, name: str) -> None:
    """Two responses, each twice: its tokens coloured by A*, then by a credit (N,). Each measure has its own scale."""
    measures = {"A*: how the token changed the probability of success": truth["a_star"], name: credit}
    pair, blocks = examples(truth), []
    for rows in pair:
        prompt = truth["prompts"][truth["response"][rows[0]]].replace("->", "→")
        verdict = "right" if truth["success"][rows[0]] > 0.5 else "wrong"
        for caption, values in measures.items():
            sizes = np.abs(values[np.concatenate(pair)])
            scale = np.percentile(sizes, FULL) or sizes.max() or 1.0  # the first that is not 0
            about = f"{prompt}, {verdict}. " * (values is truth["a_star"])  # once, above both
            heading = f"{about}{caption}, full colour at ±{scale:.2f}"
            blocks.append((textwrap.fill(heading, 120), truth["piece"][rows].tolist(), values[rows] / scale))
    lines = [place_tokens(texts)[-1][1] + 1 for _, texts, _ in blocks]
    figure = Figure(figsize=(WIDTH, LINE * sum(lines) + 0.6 * len(lines)))
    for axis, count, block in zip(figure.subplots(len(blocks), height_ratios=lines), lines, blocks):
        axis.set(xlim=(0, LETTERS), ylim=(count, 0))
        axis.axis("off")
        axis.set_title(block[0], loc="left", fontsize=10)
        draw_tokens(axis, *block[1:])
    figure.savefig(file)


def draw_tokens(axis, texts: list[str], shares: np.ndarray) -> None:
    """Tokens in lines, each on a patch coloured by its share (L,) of the scale."""
    size = 0.92 * WIDTH * 72 / LETTERS / LETTER  # points
    for (x, y, text), colour in zip(place_tokens(texts), SHADES(0.5 + np.asarray(shares) / 2)):
        axis.add_patch(patches.Rectangle((x, y + 0.03), len(text), 0.94, color=colour, lw=0, aa=False))
        axis.text(x, y + 0.5, text, va="center_baseline", family=FONT, fontsize=size, color="black")


def place_tokens(texts: list[str]) -> list[tuple[int, int, str]]:
    """Column, line and visible text of each token, wrapped at LETTERS."""
    x, y, placed = 0, 0, []
    for text in texts:
        shown = text.replace("\n", "↵") or "■"  # the end token has no text
        if x + len(shown) > LETTERS:
            x, y = 0, y + 1
        placed.append((x, y, shown))
        x, y = (0, y + 1) if "\n" in text else (x + len(shown), y)
    return placed
