"""Part 4 and Appendix A of the original's document, table by table: its figures beside those of two runs here.

The first run is the original's own experiment, GRPO on Countdown in a pretrained model, in which no response was right;
the second, RLOO on word problems, learns right answers. Both are read from the published arrays of lab/real/data. As in
the document, contribution is credit * log p, tags count as filler, and figures are pooled over all steps, without
intervals: those are in lab/real/tables.md.

Run it:  python -m lab.original.part4        writes part4.md beside this file
"""
from pathlib import Path

import numpy as np

from analyze import position_bins, with_measures
from lab.real.report import LEARNING
from plumbing.progress import one_sentence
from plumbing.report import Table, t_statistics
from plumbing.runs import read_metrics
from tasks.text import REASONING

FILE = Path(__file__).with_name("part4.md")
RUNS = {"GRPO, Countdown": LEARNING.parent / "original", "RLOO, word problems": LEARNING / "none-seed0"}
TYPES = ("filler", "reasoning")
# The document's figures, row by row.
STATISTICS = ("0.079", "1.168", "0.307", "-28.0 to 33.3", "20%", "", "39%", "1.92", "-0.560", "0.242", "")
POSITIONS = """0.087 1.214 0.347 -0.599 33,257; 0.093 1.299 0.367 -0.680 29,932; 0.073 1.215 0.329 -0.611 30,711;
0.078 1.148 0.303 -0.515 29,803; 0.068 1.241 0.318 -0.533 29,727; 0.079 1.182 0.306 -0.504 31,019;
0.079 1.160 0.305 -0.537 30,580; 0.065 1.106 0.301 -0.560 29,934; 0.063 1.083 0.270 -0.512 30,651;
0.102 0.980 0.213 -0.258 27,428"""
FIFTHS = """0.358 -0.666 56,173 0.346 -0.409 7,016; 0.366 -0.695 41,634 0.208 -0.274 18,880;
0.318 -0.528 44,111 0.298 -0.492 16,635; 0.389 -0.495 26,507 0.236 -0.591 34,007;
0.236 -0.307 36,985 0.257 -0.541 21,094; 0.333 -0.555 205,410 0.254 -0.489 97,632"""
STEPS = {1: "0.03 0.00 3.55 183", 10: "0.08 0.03 4.82 67", 50: "0.22 0.13 2.45 47", 100: "0.24 0.14 2.38 42"}
TOP = ("' ', '>', 'answer', ',', ' </', ' to', '>\\n'", "'1', '2', '3', '4', '5', '6', ' -'")
# The tokens of Qwen's vocabulary that are in the table of the most frequent ones.
PIECES = {11: ",", 16: "1", 17: "2", 18: "3", 19: "4", 20: "5", 21: "6", 23: "8", 29: ">", 220: " ", 284: " =",
          311: " to", 397: ">\n", 522: "</", 608: " /", 690: " </", 702: " has", 9217: "answer"}


def statistics(log: dict) -> list[str]:
    """A run's column of the first table; t is of the mean at each position that 30 responses reach."""
    x, credit = log["contribution"], log["credit"]
    t, with_credit_1 = (np.abs(t_statistics(values, log["position"])) for values in (x, log["logprob"]))
    return [f"{x.mean():.3f}", f"{x.std():.3f}", f"{np.abs(x).mean():.3f}", f"{x.min():.1f} to {x.max():.1f}",
            f"{(t > 3).mean():.0%}", f"{(with_credit_1 > 3).mean():.0%}", f"{(t < 1.5).mean():.0%}", f"{t.mean():.2f}",
            *(f"{x[side].mean():.3f}" for side in (credit > 0, credit <= 0, credit < 0))]


def table_statistics(logs: dict[str, dict]) -> Table:
    """The contribution, and its t-statistics."""
    names = ("mean contribution", "its standard deviation", "mean abs(contribution)", "range", "positions with t > 3",
             "the same, were all credit 1", "with t < 1.5", "mean t", "mean contribution, credit above 0",
             "credit 0 or below: their grouping", "credit below 0: ours")
    counts = ", ".join(f"{log['response_id'][-1] + 1:,}" for log in logs.values())
    return Table("Contribution", (
        "All tokens of a run. t: the absolute mean at a position over its standard error, which grows with the number "
        f"of responses: 6,400 there, {counts} here. The document's \"negative\" responses include the groups of equal "
        "rewards, whose credit is 0."),
        ["", "the original", *logs], [list(row) for row in zip(names, STATISTICS, *map(statistics, logs.values()))])


def table_positions(logs: dict[str, dict]) -> Table:
    """Ten parts of a response."""
    rows = [["the original", f"{10 * i}-{10 * i + 10}%", *line.split()] for i, line in enumerate(POSITIONS.split(";"))]
    for name, log in logs.items():
        for part, those in position_bins(log, 10):
            x = log["contribution"][those]
            rows.append([name, part, f"{x.mean():.3f}", f"{x.std():.3f}", f"{np.abs(x).mean():.3f}",
                         f"{log['logprob'][those].mean():.3f}", f"{len(x):,}"])
    return Table("By position", "Contribution by tenths of a response.", [
        "run", "position", "mean", "standard deviation", "mean of abs", "log p", "tokens"], rows)


def by_type(log: dict, those: np.ndarray) -> list[str]:
    """Mean abs(contribution), log p and number of the filler, then of the reasoning, among some tokens (N,) bool."""
    sides = [those & ((log["role"] == REASONING) == reasoning) for reasoning in (False, True)]
    return [text for use in sides for text in (f"{np.abs(log['contribution'][use]).mean():.3f}",
                                               f"{log['logprob'][use].mean():.3f}", f"{use.sum():,}")]


def table_types(logs: dict[str, dict]) -> Table:
    """Type by position, and over whole responses."""
    names = [f"{20 * i}-{20 * i + 20}%" for i in range(5)] + ["all"]
    rows = [["the original", name, *line.split()] for name, line in zip(names, FIFTHS.split(";"))]
    for name, log in logs.items():
        rows += [[name, part, *by_type(log, those)]
                 for part, those in [*position_bins(log, 5), ("all", np.ones(len(log["role"]), bool))]]
    columns = [f"{kind}, {what}" for kind in TYPES for what in ("abs(contribution)", "log p", "tokens")]
    return Table("By type and position", "Tags count as filler.", ["run", "position", *columns], rows)


def table_steps(runs: dict[str, dict]) -> Table:
    """Reward, success, gradient norm and length at single steps."""
    rows = [["the original", str(step), *line.split()] for step, line in STEPS.items()]
    for name, m in runs.items():
        rows += [[name, str(i), f"{m['reward'][i]:.2f}", f"{m['success'][i]:.2f}", f"{m['grad_norm'][i]:.2f}",
                  f"{m['length'][i]:.0f}"] for i in sorted({*STEPS, len(m["step"]) - 1}) if i < len(m["step"])]
    return Table("Single steps", "Means of a step's own responses.", [
        "run", "step", "reward", "success", "gradient norm", "tokens"], rows)


def table_top(logs: dict[str, dict]) -> Table:
    """The seven most frequent tokens of each type."""
    rows = [["the original", *TOP]]
    for name, log in logs.items():
        found = []
        for reasoning in (False, True):
            ids, counts = np.unique(log["token"][(log["role"] == REASONING) == reasoning], return_counts=True)
            found.append(", ".join(repr(PIECES[i]) for i in ids[np.argsort(-counts, kind="stable")[:7]].tolist()))
        rows.append([name, *found])
    return Table("The most frequent tokens", "Of each type, in order.", ["run", *TYPES], rows)


@one_sentence()
def main() -> None:
    """Write part4.md."""
    logs = {name: with_measures(dict(np.load(run / "credit.npz"))) for name, run in RUNS.items()}
    tables = [table_statistics(logs), table_positions(logs), table_types(logs),
              table_steps({name: read_metrics(run) for name, run in RUNS.items()}), table_top(logs)]
    FILE.write_text("\n".join(map(str, tables)), encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
