"""What the laboratory does with estimates: cells written and read back."""
import re
from pathlib import Path

import numpy as np

from plumbing.report import Estimate, pm


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


def read_column(file: Path, title: str, column: str) -> dict[str, Estimate]:
    """The estimates in a column of such a table, by the first cell of their row."""
    header, rows = read_table(file, title)
    if column not in header:
        raise ValueError(f"the table {title} of {file} has no column {column}: an older version wrote it")
    return {row[0]: read_cell(row[header.index(column)]) for row in rows}
