"""tokens.html: every response of a run, its tokens coloured by credit or another number. analyze.py calls `write_page`.
"""
import base64
import json
import re
from pathlib import Path

import numpy as np

from plumbing.metrics import own_columns
from plumbing.report import MINUS, PLUS
from plumbing.tokenizer import Tokenizer

PAGE_TOKENS = 2**20  # about so many are in tokens.html, of 14 bytes or more: of a longer run every second step, ...
# What colours a token, the first one at first: the name on the page, and the column of the log.
MEASURES = {"gradient": "gradient", "credit": "credit", "contribution": "contribution", "entropy": "entropy",
            "log p": "logprob"}


def add_replies(log: dict) -> dict[str, np.ndarray]:
    """The columns of tokens.html with the tokens of replies where they came, whose other columns are NaN."""
    shown = {name: log[name] for name in ("token", "response_id", *MEASURES.values(), *own_columns(log))}
    if "turn" not in log:
        return shown
    said = {"token": log["reply_token"], "response_id": log["reply_response"]}
    place = np.flatnonzero(log["position"] == 0)[log["reply_response"]] + log["reply_position"]  # the next token's row
    return {name: np.insert(column, place, said.get(name, np.nan)) for name, column in shown.items()}


def heading(log: dict, row: int) -> str:
    """The response that begins in a row: its step, reward, credit and puzzle."""
    credit = log["credit"][row : row + log["length"][row]]
    ends = dict.fromkeys((f"{credit.min():+.3g}", f"{credit.max():+.3g}"))  # one where all tokens have the same
    puzzle, reward = log["puzzle_text"][log["puzzle"][row]], log["reward"][row]
    return f"Step {log['step'][row]}, reward {reward:.2f}, credit {' to '.join(ends)}. Puzzle: {puzzle}"


def kinds_of(log: dict, first: np.ndarray, tokenizer: Tokenizer) -> list[list[str]]:
    """What tokens.html can filter the R responses by, whose rows begin at first (R,): right or wrong, where the log
    says it; cut off within a turn; in a silent group, whose rewards are equal."""
    reward, puzzle = log["reward"][first], log["puzzle"][first]  # (R,) each
    differs = reward != reward[np.unique(puzzle, return_index=True)[1]][puzzle]  # (R,) from the first of its group
    silent = (np.bincount(puzzle, differs) == 0)[puzzle]  # (R,)
    cut = ~np.isin(log["token"][first + log["length"][first] - 1], tokenizer.end_tokens)  # (R,)
    success = log.get("response_success", np.full(len(first), np.nan))  # (R,) older runs have none
    facts = {"right": success > 0.5, "wrong": success <= 0.5, "cut off": cut, "silent group": silent}
    return [[name for name, holds in facts.items() if holds[i]] for i in range(len(first))]


def write_page(log: dict, tokenizer: Tokenizer, title: str, file: Path) -> None:
    """tokens.html: every response, to filter and search, its tokens coloured by a measure. It has of each token the
    number of its text (uint32) and, as parts of 2^-15 of their largest size (float16), MEASURES and what batch.log had,
    column after column, as base64."""
    every, first, shown = -(-len(log["token"]) // PAGE_TOKENS), np.flatnonzero(log["position"] == 0), add_replies(log)
    kept = np.flatnonzero((log["step"][first] - log["step"].min()) % every == 0)  # responses
    shown = {name: column[np.isin(shown["response_id"], kept)] for name, column in shown.items()}
    kinds = kinds_of(log, first, tokenizer)
    texts, number = np.unique(shown.pop("token"), return_inverse=True)
    lengths = np.unique(shown.pop("response_id"), return_counts=True)[1]
    units = [float(np.max(np.abs(x), where=np.isfinite(x), initial=0)) / 2**15 or 1.0 for x in shown.values()]
    columns = [(x.astype(float) / unit).astype("<f2") for x, unit in zip(shown.values(), units)]
    known = {"texts": [tokenizer.bytes[token].decode("latin-1") for token in texts], "lengths": lengths.tolist(),
             "units": units, "measures": [*MEASURES, *own_columns(log)],
             "steps": log["step"][first[kept]].tolist(), "kinds": [kinds[i] for i in kept],
             "names": [heading(log, row) for row in first[kept]],
             # Which have one puzzle: by its prompt, or, of an older log, by the text that was kept of it.
             "puzzles": np.unique(log.get("puzzle_key", log["puzzle_text"]), return_inverse=True)[1][
                 log["puzzle"][first[kept]]].tolist()}
    parts = {"TITLE": title.replace("&", "&amp;").replace("<", "&lt;"), "PLUS": PLUS, "MINUS": MINUS,
             "KNOWN": json.dumps(known).replace("<", "\\u003c"),  # so that no text can close the script element
             "DATA": base64.b64encode(b"".join(column.tobytes() for column in (number.astype("<u4"), *columns))).decode()}
    template = Path(__file__).with_name("tokens.html").read_text(encoding="utf-8")
    file.write_text(re.sub(rf"\b({'|'.join(parts)})\b", lambda match: parts[match[1]], template), encoding="utf-8")
