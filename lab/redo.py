"""What is frozen is redone by its commit: a room's table maker, as it was when its tables were final, on its own rows.

    python -m lab.redo            lists the rooms of lab/frozen.csv
    python -m lab.redo study      makes a room's files anew, at its commit, and compares them with today's

A picture may differ in some pixels, where a library draws letters otherwise: redo says in how many.
"""
import csv
import io
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from plumbing.flags import new_parser
from plumbing.terminal import fail, one_sentence

ROOT = Path(__file__).parents[1]
ALIKE = 0.02  # share of a picture's pixels that may differ


def rooms() -> dict[str, list[dict[str, str]]]:
    """The lines of frozen.csv, one a file, by room."""
    found = {}
    for row in csv.DictReader((ROOT / "lab" / "frozen.csv").read_text(encoding="utf-8").splitlines()):
        found.setdefault(row["room"], []).append(row)
    return found


def make(rows: list[dict[str, str]], folder: str) -> None:
    """Unpack a room's commit of this repository, and run its command there without the files that it is to write."""
    commit, command = rows[0]["commit"], rows[0]["command"]
    try:
        packed = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"commit {commit[:7]} is not here: clone the repository with its whole history") from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    for row in rows:
        Path(folder, row["file"]).unlink(missing_ok=True)
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{command} failed: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}")


def verdict(made: Path, today: Path) -> str:
    """How a file that was made anew compares with today's."""
    if not made.is_file():
        return "is not made"
    if made.read_bytes() == today.read_bytes():
        return "equal"
    if today.suffix == ".png" and (pixels := imread(made)).shape == (others := imread(today)).shape:
        share = (np.abs(pixels - others) > 0.5).any(-1).mean()
        return f"equal but for {share:.2%} of its pixels" if share < ALIKE else "differs"
    return "differs"


@one_sentence()
def main() -> None:
    """Redo a room, or list them."""
    parser, frozen = new_parser(description=__doc__), rooms()
    parser.add_argument("room", nargs="?", choices=frozen, help="a room of lab/frozen.csv")
    if not (room := parser.parse_args().room):
        return print("\n".join(f"{name}: {rows[0]['command']}" for name, rows in frozen.items()))
    with tempfile.TemporaryDirectory() as folder:
        make(frozen[room], folder)
        said = [verdict(Path(folder, row["file"]), ROOT / row["file"]) for row in frozen[room]]
    print("\n".join(f"{row['file']}: {words}" for row, words in zip(frozen[room], said)), flush=True)
    if not all(words.startswith("equal") for words in said):
        fail(f"not all of {room} came out again")


if __name__ == "__main__":
    main()
