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
ANSWER, END_ANSWER, END_THINK = "<answer>", "</answer>", "</think>"
TAGS = ("<think>", END_THINK, ANSWER, END_ANSWER)
FULL_FORMAT = re.compile(r"(?s)(.*)</think>\n<answer>(.*)</answer>")
LATEX = re.compile(r"""(?x)\\(?:boxed|(?:[fmh]|frame)box|ensuremath|text|emph|em|underline|bold(?:symbol|math)?|bm|pmb
    |(?:text|math)?(?:rm|bf|it|sf|tt|sl|sc|up|md|normal)|(?:rm|sf|tt)family|(?:bf|md)series|(?:it|sl|sc|up)shape
    |normalfont|tiny|(?:script|footnote|normal)size|small|large|Large|LARGE|huge|Huge
    |(?:display|text|script|scriptscript)style|left|right|[bB]igg?[lrm]?|q?quad|(?:thin|med|thick|en)space|hfill
    |noindent|centering|(?:math)?strut|no(?:number|tag)|math(?:cal|bb))(?![A-Za-z])
    |\\(?:text)?color(?:box)?\s*\{[A-Za-z]+\}|\\hspace\*?\s*\{[^{}]*\}|\\\\(?:\[[0-9.a-z]*\])?(?![A-Za-z])
    |\\[()\[\],;:! ]|\\(?=[$%#&])|\\(?:begin|end)\s*\{(?:align|equation|gather|split|center|displaymath)(?:ed)?\*?\}""")
# The square at the end of a proof, not the gap in `7 + \square`.
CLOSING = re.compile(r"(?:(?<=[^\W_])|(?<=[.!)}\]$`])|(?<=[\w.)}$]\*\*))\s*"
                     r"(?:\\(?:qed|qedsymbol|square|blacksquare|Box)|[∎■□◻◼])(?=[\s.$)}\]*`]*\Z)")
FRACTION = re.compile(r"\\[cdt]?frac\s*(\{[^{}]*\}|[0-9])\s*(\{[^{}]*\}|[0-9])"  # \frac{1}{2}, \dfrac12
                      r"|\{([^{}]*?)\\over(?![A-Za-z])([^{}]*)\}")  # {1 \over 2}
# Braces that a fraction's parts need not have: {{1}\over{2}}, \frac{{1}}{2}.
BRACES = re.compile(r"\{([^{}]*)\}\s*(?=\\over(?![A-Za-z]))|(?<=\\over)\s*\{([^{}]*)\}|(?<=\{)\s*\{([^{}\\]*)\}\s*(?=\})")
# What is written for + - * / by graders' leave: all that read a text take the same.
SIGNS = {"\\times": "*", "\\cdot": "*", "\\ast": "*", "\\*": "*", "×": "*", "·": "*", "⋅": "*", "∗": "*",
         "\\div": "/", "÷": "/", "\u2212": "-", "\u2013": "-", "x": "*"}
SIGN = re.compile(r"[-+*/×·⋅∗÷\u2212]|\u2013(?=\s*[\d(])|\\(?:times|cdot|ast|div)(?![A-Za-z])|\\\*"
                  r"|(?<=[\d)]\s)x(?=\s[\d(])")
# Unicode 15's format characters (category Cf), in a regular expression's brackets: nobody sees them. Left out are those
# that enclose a number, as in Arabic.
INVISIBLE = ("\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
             "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f")
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


def roles(text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Role (L,) int8 of each token, and whether it is in the answer (L,) bool, that is, from the last `<answer>` on.

    structure: inside a tag, or the end token. reasoning: a digit or one of + - * / = ( ). filler: everything else, also
    a space before a number where that is a token of its own, as in Qwen's vocabulary.

    >>> roles("8!</think>", [(0, 1), (1, 4), (4, 10), (10, 10)])  # tokens 8, !</, think>, end
    (array([1, 0, 2, 2], dtype=int8), array([False, False, False, False]))
    """
    kinds = np.array([REASONING if c in "0123456789=()" else FILLER for c in text], np.int8)
    for sign in SIGN.finditer(text):
        kinds[sign.start() : sign.end()] = REASONING
    for tag in re.finditer("|".join(TAGS), text):
        kinds[tag.start() : tag.end()] = STRUCTURE
    deciding, answer_start = anchors(text, spans), text.rfind(ANSWER)  # (L,) characters; -1 without an answer
    return of_tokens(kinds, spans, deciding), (deciding >= answer_start) & (answer_start >= 0)


def digit_roles(text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """`roles` for a text that is all answer. reasoning: a digit; structure: the end token; filler: all else."""
    kinds = np.array([REASONING if c in "0123456789" else FILLER for c in text], np.int8)
    return of_tokens(kinds, spans, anchors(text, spans)), np.ones(len(spans), bool)


def of_tokens(kinds: np.ndarray, spans: list[tuple[int, int]], deciding: np.ndarray) -> np.ndarray:
    """The role (L,) of each token: that of its deciding character; of an end token, which has no text, structure."""
    return np.array([STRUCTURE if start == stop else kinds[i] for (start, stop), i in zip(spans, deciding)], np.int8)


def format_reward(response: str) -> float:
    """How much of the layout a response has, from 0 to 1. It begins inside <think>, which the prompt opens.

    1 for `...</think>\\n<answer>...</answer>`, with no other tag and nothing after it. Otherwise 0.1 for a closed think
    plus 0.5 for a closed answer, or 0 if there is more than one `<answer>`.
    """
    if response.count(ANSWER) > 1:
        return 0.0
    match = FULL_FORMAT.fullmatch(response)
    if match and not any(tag in part for tag in TAGS for part in match.groups()):
        return 1.0
    closed_answer = END_ANSWER in response.partition(ANSWER)[2]
    return 0.1 * (END_THINK in response) + 0.5 * closed_answer


def graded_answer(response: str) -> str:
    """The text of the last `<answer>`, without what nobody sees; empty if there is none or it is not closed."""
    _, opened, rest = response.rpartition(ANSWER)
    inside, closed, _ = rest.partition(END_ANSWER)
    return re.sub(f"[{INVISIBLE}]", "", inside) if opened and closed else ""


def without_latex(text: str) -> str:
    r"""A text without the LaTeX that only changes how it looks: `\boxed{7}` becomes ` {7}`; a dash becomes `-`."""
    text = CLOSING.sub("", LATEX.sub(lambda command: " " if len(command[0]) > 1 else "", text))
    return text.replace("\u2212", "-").replace("\u2013", "-")


def with_slashes(text: str, form: str) -> str:
    r"""A text whose LaTeX fractions, the innermost ones first, are written in another form, such as `{}/{} `."""
    while (bare := BRACES.sub(lambda m: next(f" {part} " for part in m.groups() if part is not None), text)) != text:
        text = bare
    while FRACTION.search(text):
        text = FRACTION.sub(lambda m: form.format(*(part.strip("{} ") for part in m.groups() if part is not None)), text)
    return text


def fingerprint(text: str) -> int:
    """A 64-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split(key: str) -> str:
    """`heldout` for a tenth of all keys, which say what a model could memorize of a puzzle, else `train`."""
    return "heldout" if fingerprint(key) % 10 == 0 else "train"
