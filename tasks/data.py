"""Data files of puzzles, row by row: .jsonl, .json and .csv, each also as .gz, and .parquet."""
import csv
import gzip
import io
import json
import sys
import time
import zlib
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable

import numpy as np


def draw_distinct(count: int, draw: Callable[[], Any], what: str) -> list:
    """`count` puzzles with different ids, in the order in which `draw` makes them; it may also return None. ValueError
    where 20,000 draws in a row bring no new one. Over two seconds there is a line with an ETA."""
    found, misses, began, lines = {}, 0, time.monotonic(), 0
    while len(found) < count:
        puzzle, misses = draw(), misses + 1
        if puzzle is not None and puzzle.id not in found:
            found[puzzle.id], misses = puzzle, 0
        if misses == 20_000:
            raise ValueError(f"found only {len(found)} of {count} {what}: ask for fewer")
        if (took := time.monotonic() - began) > 2 * (lines + 1):
            lines += 1
            left = took / max(len(found), 1) * (count - len(found))
            print(f"making {what}: {len(found):,}/{count:,}  ETA {left:.0f} s", file=sys.stderr, flush=True)
    return list(found.values())


def read_text(file: Path) -> str:
    """The text of a file in UTF-8, of any system's line ends, or of a .gz; ValueError if it is none."""
    try:
        with (gzip.open if file.suffix.lower() == ".gz" else open)(file, "rt", encoding="utf-8-sig") as text:
            return text.read()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a text file in UTF-8: convert it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{file} is not a complete .gz file: download it again") from None


def read_rows(file: Path, example: dict, make: Callable) -> list:
    """make(*values) of the fields that `example` has, for each row of a data file; blank lines don't count.

    A row is an object of .jsonl (an object a line) or .json (an array of them), a line of .csv under a header, each of
    them also as .gz, or a row of .parquet. ValueError, with the row, where `make` raises one, the row lacks a field, or
    it could be read in two ways: a name that stands twice, or more cells than names.
    """
    found = []
    for place, parse in raw_rows(file):
        try:
            fields = parse()
            if not isinstance(fields, dict):
                raise ValueError("it is no object")
            if lacking := [name for name in example if name not in fields]:
                raise ValueError(f"it has no {lacking[0]}; its fields: {', '.join(map(repr, fields)) or 'none'}"[:200])
            found.append(make(*(fields[name] for name in example)))
        except ValueError as error:
            raise ValueError(f"{file}, {place}: expected {json.dumps(example)}, but {error}") from error
    if not found:
        raise ValueError(f"{file} holds no puzzle")
    return found


def raw_rows(file: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Where each row of a data file stands, such as `line 3`, and what parses it."""
    kind = Path(file.name.lower().removesuffix(".gz")).suffix
    if kind == ".parquet":
        return numbered(read_parquet(file), dict)
    text = read_text(file)
    try:
        if kind == ".csv":
            header, *rows = read_csv(text) or [[]]
            return numbered(rows, partial(label, header))
        if text.lstrip()[:1] == "[":
            return numbered(parse_json(text), lambda row: row)
    except ValueError as error:
        raise ValueError(f"{file} is not valid {'CSV' if kind == '.csv' else 'JSON'}: {error}") from None
    # Not splitlines: it also cuts where JSON allows U+2028 inside a text.
    return [(f"line {n}", partial(parse_json, line)) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def numbered(rows: Iterable, parse: Callable) -> list[tuple[str, Callable[[], Any]]]:
    """Rows with their places, from `row 1` on, each with what parses it."""
    return [(f"row {number}", partial(parse, row)) for number, row in enumerate(rows, 1)]


def parse_json(text: str) -> Any:
    """A value of JSON, fractions as exact Decimals; ValueError where a name stands twice in an object, too."""
    try:
        return json.loads(text, parse_float=Decimal, object_pairs_hook=unique)
    except (RecursionError, ArithmeticError):
        raise ValueError("its nesting or a number in it is too large") from None


def unique(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """A row's fields by name; ValueError where a name, other than an empty one, stands twice."""
    names = [name for name, _ in fields if name.strip()]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r} stands twice in {str(fields):.100}")
    return dict(fields)


def read_csv(text: str) -> list[list[str]]:
    """The cells of the header and of each row that is not blank; ValueError where a quotation mark is out of place."""
    reader = csv.reader(io.StringIO(text), strict=True)  # otherwise a quotation mark too few swallows rows
    try:
        return [cells for cells in reader if "".join(cells).strip()]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None


def label(header: list[str], cells: list[str]) -> dict[str, str]:
    """The fields of a row of .csv; ValueError unless the header has a name for each cell."""
    if len(cells) != len(header):
        raise ValueError(f"its number of cells is {len(cells)}, the header's {len(header)}: quote a text with commas")
    return unique(list(zip(header, cells)))


def read_parquet(file: Path) -> list[dict]:
    """The rows of a Parquet file, floats in numpy's type of their precision; ValueError if that can't be done."""
    try:
        from pyarrow import parquet, types  # optional, so not in requirements.txt
        table = parquet.read_table(file)
        # In a Python list a float32 of 0.1 would be 0.10000000149.
        columns = [column.to_numpy() if types.is_floating(column.type) else column.to_pylist() for column in table]
        return [dict(zip(table.column_names, cells)) for cells in zip(*columns)]
    except ImportError:
        raise ValueError(f"reading {file} needs `pip install pyarrow`; or convert it to .jsonl") from None
    except (ValueError, OSError, NotImplementedError, OverflowError) as error:
        raise ValueError(f"{file} can't be read as Parquet: {str(error).splitlines()[0]}") from None


def digits(value: object, name: str) -> str:
    """A text as it is, a number in digits alone: `0.00001`, not `1e-05`. ValueError, with the field's name, otherwise.

    A float is the shortest decimal that gives it at its precision: 0.1 is 0.1 in float32, too. A whole number with
    more digits than its type holds is refused: it was rounded.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | np.floating):
        raise ValueError(f"its {name} is {value!r:.40}, neither text nor a number")
    exact = Decimal(str(value))
    if isinstance(value, float | np.floating) and value % 1 == 0 and exact != Decimal(float(value)):
        raise ValueError(f"its {name}, {value}, may have been rounded: store it as text or as an integer")
    return format(exact, "f") if exact.is_finite() and abs(exact.adjusted()) < 1000 else str(exact)
