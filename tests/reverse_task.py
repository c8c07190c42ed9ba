"""A task without numbers, for the tests of the seam: write three letters backwards. `abc` asks for `cba`."""
import itertools
from typing import NamedTuple

import numpy as np

from tasks.text import FILLER, REASONING, fingerprint


class Word(NamedTuple):
    id: str


def load(part, count=None, path=""):
    words = (Word("".join(letters)) for letters in itertools.product("abcdefgh", repeat=3))
    return [word for word in words if (fingerprint(word.id) % 10 == 0) == (part == "heldout")][:count]


def check(word):
    if not word.id.isalpha():
        raise ValueError(f"{word.id} is no word")


def prompt(word, chat):
    return f"Write {word.id} backwards:"


def grade(text, word):
    share = float(np.mean([a == b for a, b in zip(word.id[::-1], text.strip().ljust(3))]))
    return {"reward": share, "answer": float(share == 1), "format": float(text.strip().isalpha())}


def roles(text, spans):
    letters = np.array([REASONING if text[start:stop].strip().isalpha() else FILLER for start, stop in spans], np.int8)
    return letters, letters == REASONING


def show(word):
    return word.id


KNOWN = (1.0, 0.5)


def demonstrate(word, rng, known):
    return "".join(letter if rng.random() < known else rng.choice(list("abcdefgh")) for letter in word.id[::-1])
