"""Part 4 of the analysis that started this project, and its appendices, of any run: its tables, in its words.

    python analyze.py runs/none-seed0        writes them to analysis/part4.md; of several runs Appendix B's summary

Contribution is credit * log p, with the mitigation's weight, which the original's log left out. Tags and the end of a
response count as filler, as they did there; `without tags` they don't. A size is a mean absolute value, ± half of its
95% interval by puzzles.
"""
from typing import Iterable

import numpy as np

from plumbing import report
from plumbing.report import Table, pm, ratio
from plumbing.tokenizer import Tokenizer
from tasks.text import FILLER, REASONING

# The document's figures, row by row.
STATISTICS = "0.079", "1.168", "0.307", "-28.0 to 33.3"
T = "20%", "39%", "1.92", ""
REWARDS = "-0.560", "0.242", ""
TENTHS = "0.347", "0.367", "0.329", "0.303", "0.318", "0.306", "0.305", "0.301", "0.270", "0.213"
TYPES = {"filler": ("205,410", "67.8%", "0.333", "-0.555", "0.0786"), "without tags": ("",) * 5,
         "reasoning": ("97,632", "32.2%", "0.254", "-0.489", "0.0793")}
FIFTHS = (("0.358", "0.346", "-0.666", "-0.409"), ("0.366", "0.208", "-0.695", "-0.274"),
          ("0.318", "0.298", "-0.528", "-0.492"), ("0.389", "0.236", "-0.495", "-0.591"),
          ("0.236", "0.257", "-0.307", "-0.541"))
TOP = {"filler": "`' '`, `'>'`, `'answer'`, `','`, `' </'`, `' to'`, `'>\\n'`",
       "reasoning": "`'1'`, `'2'`, `'3'`, `'4'`, `'5'`, `'6'`, `' -'`"}
STEPS = {1: ("0.03", "0.00", "3.55", "183"), 10: ("0.08", "0.03", "4.82", "67"), 50: ("0.22", "0.13", "2.45", "47"),
         100: ("0.24", "0.14", "2.38", "42")}
APPENDIX_B = ("The document's: GRPO 15%, 0.333, 0.254, 1.31x; think_discount 0.5 12%; 0.75 12%, 0.348, 0.247, 1.41x; "
              "inverse log p 0% at step 60. ± half of the 95% interval over seeds.")
SUMMARY = "Filler |contrib|", "Reasoning |contrib|", "Ratio"
BOTH = "the document", "this run"


def of_type(log: dict, name: str) -> np.ndarray:
    """Tokens (N,) bool of a type: reasoning, filler, as it is counted there, or without tags."""
    role = log["role"]
    return {"filler": role != REASONING, "without tags": role == FILLER, "reasoning": role == REASONING}[name]


def size(log: dict, at: np.ndarray, measure: str = "contribution") -> str:
    """The mean absolute value over some tokens (N,) bool; nothing where there are none."""
    return pm(*report.clustered_mean(np.abs(log[measure][at]), log["puzzle"][at])) if at.any() else ""


def mean(x: np.ndarray, digits: int = 3) -> str:
    """A mean; nothing of nothing."""
    return pm(x.mean(), np.nan, digits) if len(x) else ""


def summary(log: dict) -> dict[str, float]:
    """A run's columns of Appendix B's summary."""
    filler, reasoning = (np.abs(log["contribution"][of_type(log, name)]).mean() if of_type(log, name).any() else np.nan
                         for name in ("filler", "reasoning"))
    return dict(zip(SUMMARY, (filler, reasoning, ratio(filler, reasoning))))


def statistics(log: dict) -> list[Table]:
    """The contribution of all tokens, its t-statistics by position, and its sign by reward."""
    x, credit, count = log["contribution"], log["credit"], log["response_id"][-1] + 1
    found = mean(x), pm(x.std(), np.nan), size(log, credit == credit), f"{x.min():.1f} to {x.max():.1f}"
    names = "Mean contribution", "Std contribution", "Mean |contribution|", "Range"
    note = f"{len(x):,} tokens of {count:,} responses, 303,042 of 6,400 there."
    rows = [*map(list, zip(names, STATISTICS, found))]
    tables = [Table("Part 4: Contribution Statistics", note, ["Metric", *BOTH], rows)]
    t, of_1 = (np.abs(report.t_statistics(values, log["position"])) for values in (x, log["logprob"]))
    if len(t):
        shares = f"{np.mean(t > 3):.0%}", f"{np.mean(t < 1.5):.0%}", f"{t.mean():.2f}", f"{np.mean(of_1 > 3):.0%}"
        names = "High t-stat (>3.0)", "Low t-stat (<1.5)", "Mean |t-stat|", "High t-stat, were all credit 1"
        note = (f"Of the mean at each of {len(t)} positions that {report.MIN_RESPONSES} responses reach. It grows with "
                "their number: compare runs of one size.")
        tables.append(Table("Part 4: T-Statistics", note, ["Metric", *BOTH], [*map(list, zip(names, T, shares))]))
    signs = credit > 0, credit <= 0, credit < 0
    names = "Positive", "Negative, or of a group of equal rewards: theirs", "Negative alone: ours"
    rows = [*map(list, zip(names, REWARDS, (mean(x[sign]) for sign in signs)))]
    note = "Mean contribution, by the sign of the credit: the opposite one by construction, as log p is below 0."
    return [*tables, Table("Part 4: Reward-Based Analysis", note, ["Episode Type", *BOTH], rows)]


def positions(log: dict) -> Table:
    """The tenths of a response."""
    x, sizes, part = log["contribution"], np.abs(log["contribution"]), (log["relative"] * 10).astype(int)  # (N,) each
    tenths = [part == i for i in range(10)]
    first, last = (sizes[at].mean() if at.any() else np.nan for at in (tenths[0], tenths[9]))
    by_place = report.early_over_late(log["advantage"] * log["logprob"], log["position"])
    said = [(ratio(first, last), "First tenth / last: {:.2f}, there 1.63."),
            (by_place, "As its script counts, |advantage · log p| of the first fifth of all tokens by absolute "
                       "position / the last: {:.2f}.")]
    rows = [[f"{i}", mean(x[at]), pm(x[at].std(), np.nan) if at.any() else "", size(log, at), TENTHS[i],
             mean(log["logprob"][at]), f"{at.sum():,}"] for i, at in enumerate(tenths)]
    return Table("Part 4: Position Analysis (Relative), Appendix A",
                 " ".join(text.format(value) for value, text in said if np.isfinite(value)),
                 ["Position Bin", "mean", "std", "Mean |Contribution|", "there", "Mean Log Prob", "count"], rows)


def beside(here: Iterable[str], there: Iterable[str]) -> list[str]:
    """Cells of a run, each with the document's behind it."""
    return [cell for pair in zip(here, there, strict=True) for cell in pair]


def types(log: dict) -> list[Table]:
    """Filler and reasoning: over whole responses, and by fifths."""
    rows, columns = [], ("Count", "%", "Mean |Contrib|", "Mean Log Prob", "Mean Contrib")
    for name, there in TYPES.items():
        at = of_type(log, name)
        here = (f"{at.sum():,}", f"{at.mean():.1%}", size(log, at), mean(log["logprob"][at]),
                mean(log["contribution"][at], 4))
        rows.append([name, *beside(here, there), size(log, at, "gradient")])
    over = summary(log)["Ratio"]
    note = f"Filler / reasoning: {over:.2f} by contribution, there 1.31." if np.isfinite(over) else ""
    overall = Table("Part 4: Token Type Analysis (The Key Finding)", note,
                    ["Type", *beside(columns, ["there"] * 5), "Mean |gradient|"], rows)
    rows, part = [], (log["relative"] * 5).astype(int)  # (N,)
    for i, there in enumerate(FIFTHS):
        filler, reasoning = (of_type(log, name) & (part == i) for name in ("filler", "reasoning"))
        here = (size(log, filler), size(log, reasoning), mean(log["logprob"][filler]), mean(log["logprob"][reasoning]))
        rows.append([f"{20 * i}-{20 * i + 20}%", *beside(here, there)])
    columns = "Filler |Contrib|", "Reasoning |Contrib|", "Filler log_prob", "Reasoning log_prob"
    return [overall, Table("Part 4: Position-Controlled Analysis", "By fifths of a response.",
                           ["Position", *beside(columns, ["there"] * 4)], rows)]


def tokens(log: dict, tokenizer: Tokenizer) -> Table:
    """Of each type the seven most frequent tokens, and the seven with most gradient."""
    rows = []
    for name, there in TOP.items():
        at = of_type(log, name)
        found, which = np.unique(log["token"][at], return_inverse=True)  # (n,)
        order = [np.argsort(-np.bincount(which, weight), kind="stable")[:7]
                 for weight in (None, np.abs(log["gradient"][at]))]
        rows.append([name, there, *(", ".join(map(tokenizer.as_code, found[first].tolist())) for first in order)])
    return Table("Part 4: Top Tokens by Type", "The most frequent ones, and those with the largest sum of |gradient|.",
                 ["Type", "most frequent, there", "most frequent", "most gradient"], rows)


def training(metrics: dict) -> Table:
    """Single steps."""
    names, last = ("reward", "success", "grad_norm", "length"), len(metrics["step"]) - 1
    held = metrics["heldout_success"][np.isfinite(metrics["heldout_success"])]
    note = (f"Eval: {held[-1]:.2f}, there 0.15. Else of" if len(held) else "Of") + (
        " a step's own responses. There the text says 16% at the end, where this table has 0.14.")
    rows = []
    for step in sorted({*STEPS, last}):
        here = [pm(metrics[name][step], np.nan, 0 if name == "length" else 2) if step <= last else "" for name in names]
        rows.append([f"{step}", *beside(here, STEPS.get(step, [""] * 4))])
    return Table("Appendix A: Training Metrics", note, ["Step", *beside(names, ["there"] * 4)], rows)


def tables(log: dict, metrics: dict, tokenizer: Tokenizer) -> list[Table]:
    """All of a run, in the document's order."""
    return [*statistics(log), positions(log), *types(log), tokens(log, tokenizer), training(metrics)]
