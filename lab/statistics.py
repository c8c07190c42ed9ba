"""What the rooms compute alike: correlations, intervals, Holm's correction; cells of tables, written and read back."""
import math
import re
from pathlib import Path
from typing import Callable

import numpy as np

from plumbing.files import require
from plumbing.report import Estimate, pm, varies

RESAMPLES = 2000  # of the bootstrap


def sums(puzzle: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """The sums (Q, k) of k columns (n,) over the tokens of each puzzle."""
    return np.stack([np.bincount(puzzle, column, puzzle.max(initial=-1) + 1) for column in columns], axis=1)


def resampled(Q: int) -> np.ndarray:
    """How often the bootstrap draws each of Q puzzles (RESAMPLES, Q); the same draws for everything compared."""
    return np.random.default_rng(0).multinomial(Q, np.full(Q, 1 / Q), size=RESAMPLES)


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], by_puzzle: np.ndarray) -> Estimate:
    """The statistic of the total of sums (Q, k), with the 95% percentile interval over resampled puzzles, if they
    vary."""
    if not len(by_puzzle):
        return Estimate(float("nan"))
    draws = resampled(len(by_puzzle)) @ by_puzzle  # (RESAMPLES, k)
    with np.errstate(invalid="ignore", divide="ignore"):
        (value,), found = statistic(by_puzzle.sum(0)[None]), statistic(draws)
    found = found[np.isfinite(found)]  # a resample may leave it undefined
    ends = np.percentile(found, (2.5, 97.5)) if varies(found) else ()
    return Estimate(float(value), *ends) if np.isfinite(value) else Estimate(float("nan"))


def jackknife(statistic: Callable[[np.ndarray], float], n: int) -> Estimate:
    """statistic(use (n,) bool) of all n puzzles or batches, ± 1.96 of its jackknife error, if they vary."""
    parts = np.array([statistic(np.arange(n) != i) for i in range(n)])
    value = statistic(np.ones(n, bool))
    error = np.sqrt((n - 1) / n * ((parts - parts.mean()) ** 2).sum()) if varies(parts) else np.nan
    return Estimate(value, value - 1.96 * error, value + 1.96 * error)


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks (n,) of values (n,), from 1; equal values share their mean rank."""
    _, index, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[index]


def correlation(s: np.ndarray) -> np.ndarray:
    """Pearson's r (...) from sums (..., 6) of 1, x, y, x^2, y^2, xy; NaN where either does not vary."""
    n, x, y, xx, yy, xy = np.moveaxis(s, -1, 0)
    squared = (n * xx - x**2) * (n * yy - y**2)
    varies = squared > 1e-9 * n**2 * xx * yy
    return np.where(varies, (n * xy - x * y) / np.sqrt(np.where(varies, squared, 1.0)), np.nan)


def correlate(x: np.ndarray, y: np.ndarray, puzzle: np.ndarray) -> Estimate:
    """Pearson's r of two columns (n,), with its interval."""
    return bootstrap(correlation, sums(puzzle, np.ones(len(x)), x, y, x * x, y * y, x * y))


def share(s: np.ndarray) -> np.ndarray:
    """The first sum over the second (...) of sums (..., 2)."""
    return s[..., 0] / s[..., 1]


def by_response(columns: dict) -> list[np.ndarray]:
    """The rows (L,) of each of the B responses."""
    return np.split(np.arange(len(columns["position"])), np.flatnonzero(columns["position"] == 0)[1:])


def centred(x: np.ndarray, response: np.ndarray, by_rank: bool) -> np.ndarray:
    """Values (n,), or their ranks as shares, minus the mean of their response; exactly 0 where it has but one value."""
    out = np.zeros(len(x))
    for r in np.unique(response):
        inside = response == r
        values = ranks(x[inside]) / inside.sum() if by_rank else x[inside].astype(float)
        if np.ptp(x[inside]) > 1e-6 * np.abs(x[inside]).max():
            out[inside] = values - values.mean()
    return out


def within(x: np.ndarray, y: np.ndarray, columns: dict, use: np.ndarray, by_rank: bool) -> Estimate:
    """Correlation of x and y (N,) within responses, among the tokens `use` (N,)."""
    x, y = (centred(values[use], columns["response"][use], by_rank) for values in (x, y))
    return correlate(x, y, columns["group"][use].astype(int))


def holm(p: dict[str, float]) -> set[str]:
    """The names whose differences are significant at 5% after Holm's correction for having looked at all of p."""
    known = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    failed = [i for i, (value, _) in enumerate(known) if value > 0.05 / (len(known) - i)]
    return {name for _, name in known[: min(failed, default=len(known))]}  # after the first failure none counts


def points(e: Estimate) -> str:
    """A share in percent, or a difference in points, ± half of its interval."""
    return pm(100 * e.value, 100 * (e.high - e.value), 1)


def cell(e: Estimate, digits: int = 2) -> str:
    """An estimate as `value (low to high)`; empty where there is no value."""
    ends = f" ({e.low:.{digits}f} to {e.high:.{digits}f})" if np.isfinite(e.low) else ""
    return f"{e.value:.{digits}f}{ends}" if np.isfinite(e.value) else ""


def read_cell(text: str) -> Estimate:
    """The estimate that `cell` wrote."""
    return Estimate(*map(float, re.findall(r"-?\d+\.\d+", text) or ["nan"]))


def read_table(file: Path, title: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text, of the table under a heading of a Markdown file."""
    _, found, rest = file.read_text(encoding="utf-8").partition(f"## {title}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    require(found and lines, f"{file} has no table with the heading {title}")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return header, rows


def read_column(file: Path, title: str, column: str) -> dict[str, Estimate]:
    """The estimates in a column of such a table, by the first cell of their row."""
    header, rows = read_table(file, title)
    require(column in header, f"the table {title} of {file} has no column {column}: an older version wrote it")
    return {row[0]: read_cell(row[header.index(column)]) for row in rows}
