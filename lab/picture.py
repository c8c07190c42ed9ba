"""A picture of what every token did, and of the credit that a method gave it.

Run it:  python -m lab.truth.measure        writes truth.png: A* above, GRPO's credit below
         python -m lab.truth.score --mitigation entropy_ratio        the same with that method's credit
"""
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import cm, colors, patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.truth.file import by_response
from plumbing.report import MINUS, PALETTE, PLUS, WIDTH

SHADES = colors.LinearSegmentedColormap.from_list("credit", (MINUS, "white", PLUS))
FONT, LETTER = "DejaVu Sans Mono", 0.60205  # comes with matplotlib; width of each of its letters in parts of its size
LETTERS = 84  # in a line of coloured tokens
CURVE = PALETTE[0]
FULL = 99  # percentile of the sizes that gets the full colour
LINE = 0.2  # inches, height of a line of text
CAPTIONS = {"a_star": "A*: how the token changed the probability of success", "advantage": "GRPO's credit"}


def scale_of(values: np.ndarray) -> float:
    """The size that gets the full colour: a percentile of |values|; their maximum, or 1, where that is 0."""
    return float(np.percentile(np.abs(values), FULL) or np.abs(values).max() or 1)


def verdict(truth: dict, rows: np.ndarray) -> str:
    """Whether a response is right."""
    return "right" if truth["success"][rows[0]] > 0.5 else "wrong"


def examples(truth: dict) -> list[np.ndarray]:
    """Where the tokens (L,) of a right and of a wrong response are: of those with some credit and a length that suits
    a picture, the ones with the largest |A*|."""
    ordered = sorted(by_response(truth), key=lambda rows: (  # False comes first
        not (40 <= len(rows) <= 80 and truth["advantage"][rows[0]]), -np.abs(truth["a_star"][rows]).max()))
    verdicts = [verdict(truth, rows) for rows in ordered]
    return [ordered[verdicts.index(which)] for which in ("right", "wrong")] if len({*verdicts}) == 2 else ordered[:2]


def draw(truth: dict, file: Path, captions: dict[str, str] = CAPTIONS) -> None:
    """Two responses, each with its tokens coloured by A*, the same by a credit (captions: column and name), and V."""
    pair = examples(truth)
    drawn = np.concatenate(pair)
    scales = {name: scale_of(truth[name][drawn]) for name in captions}
    pieces = [truth["piece"][rows].tolist() for rows in pair]
    lines = [place_tokens(texts)[-1][1] + 1 for texts in pieces]
    heights = [height for count in lines for height in (LINE * count, LINE * count, 1.2)]  # 3 per response
    above, below = captions.values()
    heads = [textwrap.fill(f"{heading(truth, rows)}. {above}", 103) for rows in pair]
    inches = sum(heights) + 0.45 * len(heights) + 1.1 + 0.17 * sum(head.count("\n") for head in heads)
    figure = Figure(figsize=(WIDTH, inches))
    axes = figure.subplots(len(heights), height_ratios=heights)
    for rows, texts, count, head, (*blocks, bottom) in zip(pair, pieces, lines, heads, axes.reshape(-1, 3)):
        for axis, name, title in zip(blocks, captions, (head, below)):
            axis.set(xlim=(0, LETTERS), ylim=(count, 0))
            axis.axis("off")
            axis.set_title(title, loc="left", fontsize=10, parse_math=False)
            draw_tokens(axis, texts, truth[name][rows] / scales[name])
        draw_curve(bottom, truth, rows)
    for name, label in zip(reversed(captions), (f"{below} (↵ line break, ■ end token)", "A*")):  # from the bottom up
        colours = cm.ScalarMappable(colors.Normalize(-scales[name], scales[name]), SHADES)
        meaning = f"{label}; full colour at ±{scales[name]:.2f}, the {FULL}th percentile of these tokens"
        figure.colorbar(colours, ax=axes, location="bottom", extend="both", aspect=90, pad=0.01,
                        label=textwrap.fill(meaning, 110))
    figure.savefig(file)


def draw_tokens(axis: Axes, texts: list[str], shares: np.ndarray) -> None:
    """Tokens in lines of LETTERS, each on a patch coloured by its share (L,) of the scale."""
    size = 0.92 * WIDTH * 72 / LETTERS / LETTER  # points
    for (x, y, text), colour in zip(place_tokens(texts), SHADES(0.5 + np.asarray(shares) / 2)):
        axis.add_patch(patches.Rectangle((x, y + 0.03), len(text), 0.94, color=colour, lw=0, aa=False))
        axis.text(x, y + 0.5, text, va="center_baseline", family=FONT, fontsize=size, color="black")


def place_tokens(texts: list[str], columns: int = LETTERS) -> list[tuple[int, int, str]]:
    """Column, line and visible text of each token, wrapped at `columns` characters."""
    x, y, placed = 0, 0, []
    for text in texts:
        shown = text.replace("\n", "↵") or "■"  # the end token has no text
        if x + len(shown) > columns:
            x, y = 0, y + 1
        placed.append((x, y, shown))
        x, y = (0, y + 1) if "\n" in text else (x + len(shown), y)
    return placed


def heading(truth: dict, rows: np.ndarray) -> str:
    """The puzzle of a response, whether it is right, and its reward."""
    prompt = truth["prompts"][truth["response"][rows[0]]].replace("->", "→")
    return f"{prompt}: {verdict(truth, rows)}, reward {truth['reward'][rows[0]]:.2f}"


def draw_curve(axes: Axes, truth: dict, rows: np.ndarray) -> None:
    """V after each number of tokens, its 95% interval, and the text of the tokens that changed it most."""
    outcome = truth["value"][rows[-1]] + truth["a_star"][rows[-1]]
    V = np.append(truth["value"][rows], outcome)  # (L + 1,) before each of L tokens and after the last
    error = np.append(truth["value_error"][rows], 0)  # (L + 1,) its standard error; the outcome's is 0
    low, high = np.maximum(V - 1.96 * error, 0), np.minimum(V + 1.96 * error, 1)  # (L + 1,), (L + 1,)
    axes.fill_between(np.arange(len(V)), low, high, step="mid", color=CURVE, alpha=0.3, lw=0)
    axes.step(np.arange(len(V)), V, where="mid", color=CURVE, lw=1.8)
    axes.set(xlim=(-0.5, len(rows) + 0.5), ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    axes.set(xlabel="tokens written (shaded: 95% interval of V)", ylabel="P(success) V")
    for t in landmarks(truth["a_star"][rows]):
        text = f"“{truth['piece'][rows[t]].strip() or '↵'}” {truth['a_star'][rows[t]]:+.2f}".replace("-", "−")
        late = t > 0.85 * len(rows)  # too near the right edge for text on the right
        large = abs(V[t + 1] - V[t]) > 0.3  # text fits beside the jump; otherwise it goes above the curve
        room = max(1, len(rows) // 7)  # tokens, the width of a text
        y = V[t : t + 2].mean() if large else high[t : t + room].max() + 0.08
        if large and late:  # under the curve before the jump, where there is room
            y = max(low[t - room : t + 1].min() - 0.1, 0.05)
        axes.text(t + (0.1 if late else 0.9), y, text, va="center", ha="right" if late else "left",
                  parse_math=False)


def landmarks(a_star: np.ndarray) -> list[int]:
    """Up to four tokens of large |A*| (L,), far enough apart for their texts."""
    found = []
    for t in np.argsort(-np.abs(a_star), kind="stable"):
        if len(found) < 4 and abs(a_star[t]) >= 0.1 and all(abs(t - other) > len(a_star) / 7 for other in found):
            found.append(int(t))
    return found
