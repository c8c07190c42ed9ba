"""analyze.py with other types of tokens; its files have the usual names.

    python -m lab.original.roles --types original runs/none-seed0      tags and the end token count as filler
    python -m lab.original.roles --types no_spaces runs/none-seed0     a single space has no type

The first is how the original work counted, whose patterns matched no tag. The second leaves out the spaces that some
tokenizers, such as Qwen's, write before a number. Several runs are compared.
"""
from pathlib import Path

import numpy as np

import analyze
from plumbing.flags import new_parser
from plumbing.tokenizer import Tokenizer
from tasks.text import FILLER, STRUCTURE


def tags_as_filler(log: dict[str, np.ndarray], run: Path) -> np.ndarray:
    """The role (N,) of each token of a run, where tags and the end token are filler."""
    return np.where(log["role"] == STRUCTURE, FILLER, log["role"])


def no_spaces(log: dict[str, np.ndarray], run: Path) -> np.ndarray:
    """The role (N,) of each token of a run, -1 for a single space."""
    spaces = [token for token, letters in enumerate(Tokenizer(run / "checkpoint").bytes) if letters == b" "]
    return np.where(np.isin(log["token"], spaces), -1, log["role"])


TYPES = {"original": tags_as_filler, "no_spaces": no_spaces}


def main() -> None:
    """analyze.py, which reads its logs by the function above."""
    parser = new_parser(description=__doc__, usage="python -m lab.original.roles --types TYPES RUN [RUN ...]")
    parser.add_argument("--types", choices=list(TYPES), required=True, help="see above")
    given, words = parser.parse_known_args()
    analyze.main(words, lambda run: (log := analyze.read_log(run)) | {"role": TYPES[given.types](log, run)})


if __name__ == "__main__":
    main()
