"""Data files of puzzles, row by row: .jsonl, .json and .csv, each also as .gz, and .parquet."""
import csv
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any, Callable, Iterable


def read_text(file: Path) -> str:
    """The text of a file in UTF-8, of any system's line ends, or of a .gz; ValueError if it is none."""
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig") as text:
            return text.read()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a text file in UTF-8: convert it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{file} is not a complete .gz file: download it again") from None


def read_rows(file: Path, example: dict, make: Callable) -> list:
    """make(*values) of the fields that `example` has, for each row of a data file; blank lines don't count.

    A row is an object of .jsonl (an object a line) or .json (an array of them), a line of .csv under a header, each of
    them also as .gz, or a row of .parquet. ValueError, with the row, where `make` raises one or the row lacks a field.
    """
    found = []
    for place, row in raw_rows(file):
        try:
            fields = json.loads(row) if isinstance(row, str) else row
            if not isinstance(fields, dict):
                raise ValueError("it is no object")
            if not example.keys() <= fields.keys():
                raise ValueError(f"its fields are {', '.join(map(str, fields)) or 'none'}"[:200] + ": rename them")
            found.append(make(*(fields[name] for name in example)))
        except ValueError as error:
            raise ValueError(f"{file}, {place}: expected {json.dumps(example)}, but {error}") from None
    if not found:
        raise ValueError(f"{file} holds no puzzle")
    return found


def raw_rows(file: Path) -> list[tuple[str, Any]]:
    """Where each row of a data file stands, such as `line 3`, and what it is: fields, or a line of JSON."""
    if file.suffix == ".parquet":
        return numbered(read_parquet(file), "row")
    text, kind = read_text(file), Path(file.name.removesuffix(".gz")).suffix
    try:
        if kind == ".csv":
            return numbered(csv.DictReader(io.StringIO(text)), "row")
        if text.lstrip()[:1] == "[":
            return numbered(json.loads(text), "row")
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{file} is not valid {'CSV' if kind == '.csv' else 'JSON'}: {error}") from None
    # Not splitlines: it also cuts where JSON allows U+2028 inside a text.
    return [(place, line) for place, line in numbered(text.split("\n"), "line") if line.strip()]


def numbered(rows: Iterable, kind: str) -> list[tuple[str, Any]]:
    """Rows with their places, from `line 1` or `row 1` on."""
    return [(f"{kind} {number}", row) for number, row in enumerate(rows, 1)]


def read_parquet(file: Path) -> list[dict]:
    """The rows of a Parquet file; ValueError if that can't be done."""
    try:
        from pyarrow import parquet  # optional, so not in requirements.txt
        return parquet.read_table(file).to_pylist()
    except ImportError:
        raise ValueError(f"reading {file} needs `pip install pyarrow`; or convert it to .jsonl") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} can't be read as Parquet: {str(error).splitlines()[0]}") from None
