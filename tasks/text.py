"""What every task says about the text of a response: the roles of its tokens, its sentences, and a hash.

A task is one file, such as countdown_task.py. Tokens do not respect the borders of sentences and tags: `)</` ends an
expression and begins a tag. So everything is found in the characters of the decoded text, and a token is what its
deciding character is. L is the number of tokens of a response; `spans` says from where to where each token stands in
the text.
"""
import hashlib
import re

import numpy as np

FILLER, REASONING, STRUCTURE = 0, 1, 2
ROLES = ("filler", "reasoning", "structure")  # the original work's words: reasoning is arithmetic, filler is prose
SENTENCE_END = re.compile(r"[.!?](?=[\s<])|\n(?!<)")  # not the dot in 2.5, not the line break before a tag


def anchors(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """The index (L,) of each token's deciding character: its first one that is not white space, or just its first."""
    return np.array([next((i for i in range(*span) if not text[i].isspace()), span[0]) for span in spans], int)


def sentence_starts(text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens (L,) bool begin a new sentence: after each sentence end, the next token that starts there or later.

    >>> sentence_starts("No! 1 + 2 = 3", [(0, 3), (3, 5), (5, 7), (7, 9), (9, 11), (11, 13)])
    array([False,  True, False, False, False, False])
    """
    starts = [start for start, _ in spans]
    ends = [m.end() for m in SENTENCE_END.finditer(text) if m.end() < len(text)]
    first = np.searchsorted(starts, ends)  # per sentence end, the first token at or after it
    return np.isin(np.arange(len(spans)), first)


def fingerprint(text: str) -> int:
    """A 64-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
