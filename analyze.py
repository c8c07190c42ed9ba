"""Where the credit went: tables, pictures and a page of one run, or of several runs compared. Runs no model.

    python analyze.py runs/none-seed0                       one run, into its analysis/
    python analyze.py runs/*                                methods compared over seeds, into comparison/ beside them

Two measures, by the functions of these names in grpo.py, say what each of the N tokens of a run received:
    contribution = credit * log p           the original work's: a value, not a gradient; negative where it reinforces
    gradient     = credit * ||onehot - p||  the size of its gradient in the logits, with the sign of the credit
Unlike in the original work, intervals are clustered by puzzle, because responses to one are compared with each other.
"""
import math
import re
import textwrap
from pathlib import Path
from typing import Iterator

import numpy as np
from matplotlib.axes import Axes

from grpo import contribution, gradient
from plumbing import part4, report
from plumbing.comparison import Group, Run, comparison_warnings, group_runs, run_method
from plumbing.files import read_json
from plumbing.flags import new_parser
from plumbing.metrics import COLUMNS, own_columns, share_interval, share_text
from plumbing.terminal import fail, follow, one_sentence
from plumbing.report import PALETTE, Estimate, Table, pm, ratio, t_estimate
from plumbing.runs import heldout, read_config, read_credit, read_metrics
from plumbing.tokenizer import Tokenizer
from plumbing.tokens_page import write_page
from tasks.text import FILLER, REASONING, ROLES

MEASURES = ("contribution", "gradient")
LEARNED = {"reward": 3, "success": 3, "format": 2, "length": 1, "entropy": 3, "grad_norm": 3, "zero_variance_groups": 0}
SIZES = [f"{measure}, {of}" for measure in MEASURES for of in ("filler size", "reasoning size", "filler / reasoning")]
CONTROLS = ("random", "inverted", "shuffled", "share")  # of methods/controls.py: there to compare with, not to use


def method_name(label: str) -> str:
    """What a picture calls a method: `RLOO lr=0.1` for the label `none advantage=rloo lr=0.1`."""
    method, *flags = label.split()
    if method != "none":
        return label + " (control)" * (method in CONTROLS)
    return " ".join(["RLOO" if "advantage=rloo" in flags else "GRPO", *(x for x in flags if x != "advantage=rloo")])


def read_log(run: Path) -> dict[str, np.ndarray]:
    """The credit log of a run: columns (N,), a row per token. ValueError where a step is missing or damaged."""
    steps, count = read_credit(run, read_metrics(run)), 0  # responses so far
    for step in steps:
        if "reply_response" in step:  # as response_id, see with_measures; a reply's columns have a length of their own
            step["reply_response"] = step["reply_response"].astype(int) + count
        count += 1 + int(step["response"].max())
    return with_measures({name: np.concatenate([step[name] for step in steps]) for name in steps[0]})


def with_measures(log: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns (N,) of a credit log, and those that follow from them."""
    log["response_id"] = np.cumsum(log["position"] == 0) - 1  # from 0 on through the run: each begins at position 0
    step_and_group = log["step"].astype(int) * 2**16 + log["group"]  # as one number: a group is below 2**16
    log["puzzle"] = np.unique(step_and_group, return_inverse=True)[1]  # from 0 on through the run, as puzzle_text
    log["length"] = np.bincount(log["response_id"])[log["response_id"]]  # (N,) of the response
    log["relative"] = log["position"] / log["length"]  # in [0, 1), 0 at the first token of a response
    log["contribution"] = contribution(log["credit"], log["logprob"])
    log["gradient"] = gradient(log["credit"], log["logit_grad"])
    return log


def position_bins(log: dict, count: int) -> list[tuple[str, np.ndarray]]:
    """Name and tokens (N,) bool of each of `count` equal parts of a response."""
    part = (log["relative"] * count).astype(int)  # (N,)
    return [(f"{i * 100 // count}-{(i + 1) * 100 // count}%", part == i) for i in range(count)]


# ------------------------------------------------------------------------------------------------------ tables of a run


def learning_table(metrics: dict) -> Table:
    """A row per step if there are at most ten, else for 0, 1, 10, 50, 100 (the original's) and the last."""
    success, error = metrics["heldout_success"], metrics["heldout_stderr"]
    last, first = len(success) - 1, int(np.isnan(success[0]))  # all that step 0 has
    steps = [step for step in range(first, last + 1) if last <= 10 or step in (0, 1, 10, 50, 100, last)]
    columns = {"step": [*map(str, steps)],
               **{name: [pm(metrics[name][i], np.nan, digits) for i in steps] for name, digits in LEARNED.items()},
               **{name: [f"{x:.4g}" * bool(np.isfinite(x)) for x in metrics[name][steps]]
                  for name in further_columns(metrics) if name not in LEARNED},
               "held-out success": [share_text(success[i], error[i], ".3f") for i in steps]}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    return Table("How it learned", "Means over a step's responses; held-out success after it, with its 95% "
                 "interval over puzzles. metrics.csv has every step.", [*columns], [*map(list, zip(*columns.values()))])


def further_columns(metrics: dict) -> list[str]:
    """The columns of the reward, and those that the task's grade, a loss or a head added, with a number somewhere."""
    return [name for name, values in metrics.items()
            if (name in ("reward", "format") or name not in COLUMNS) and np.isfinite(values).any()]


def mean_size(log: dict, chosen: np.ndarray, measure: str) -> tuple[float, float]:
    """The mean absolute value of a measure over some tokens (N,) bool, and half of its interval."""
    return report.clustered_mean(np.abs(log[measure][chosen]), log["puzzle"][chosen])


def sizes_by_type(log: dict, measure: str) -> tuple[float, float, float]:
    """The size of a measure on filler and on reasoning, and their ratio."""
    filler, reasoning = (mean_size(log, log["role"] == role, measure)[0] for role in (FILLER, REASONING))
    return filler, reasoning, ratio(filler, reasoning)


CREDITED = {  # a column's heading, and its cell for the tokens `at` (N,) bool of a log
    "abs(contribution)": lambda log, at: pm(*mean_size(log, at, "contribution")),
    "abs(gradient)": lambda log, at: pm(*mean_size(log, at, "gradient")),
    "contribution": lambda log, at: pm(log["contribution"][at].mean(), np.nan, 4),
    "gradient": lambda log, at: pm(log["gradient"][at].mean(), np.nan, 4),
    "log p": lambda log, at: pm(log["logprob"][at].mean(), np.nan, 4),
    "entropy": lambda log, at: pm(log["entropy"][at].mean(), np.nan, 4)}


def credit_tables(log: dict, tokenizer: Tokenizer) -> list[Table]:
    """Where the credit went: to which types of tokens, responses, parts of a response, and tokens."""
    roles = [(name, log["role"] == role) for role, name in enumerate(ROLES)]
    types = [("all", log["length"] > 0), *roles]
    signs = [(f"advantage {name}", np.sign(log["advantage"]) == x) for name, x in (("> 0", 1), ("< 0", -1), ("0", 0))]
    fifths = [(f"{where}, {name}", part & chosen) for where, part in position_bins(log, 5) for name, chosen in roles]
    tables = [("Where credit went", credit_note(log), [*types, *signs, *position_bins(log, 10)]),
              ("Types by position", "Each fifth of a response by type.", fifths),
              ("Tokens", "Of each type those with the largest sum of abs(gradient).", top_tokens(log, tokenizer))]
    cells = lambda at: [cell(log, at) if at.any() else "" for cell in CREDITED.values()]
    found = [Table(title, note, ["", "tokens", "share", *CREDITED],
                   [[name, f"{at.sum():,}", f"{at.mean():.1%}", *cells(at)] for name, at in rows])
             for title, note, rows in tables]
    own = [[name, *(own_cell(log, at, name) for _, at in types)] for name in own_columns(log)]
    note = "What the credit function put into batch.log: means ± half of their 95% intervals by puzzles."
    return found + [Table("Your own numbers", note, ["", "all", *ROLES], own)] * bool(own)


def credit_note(log: dict) -> str:
    """What stands above the table of where credit went."""
    note = f"{log['response_id'][-1] + 1:,} responses. abs: mean absolute value ± half of its 95% interval by puzzles."
    if np.isfinite(found := [sizes_by_type(log, measure)[2] for measure in MEASURES]).all():
        note += " Filler / reasoning: {:.2f} by contribution, {:.2f} by gradient.".format(*found)
    return note


def own_cell(log: dict, at: np.ndarray, name: str) -> str:
    """The mean of a number of batch.log over some tokens (N,) bool, of any size, and half of its interval."""
    found = report.clustered_mean(log[name][at], log["puzzle"][at])
    return " ± ".join(f"{x:.{digits}g}" for x, digits in zip(found, (3, 2)) if np.isfinite(x))


def top_tokens(log: dict, tokenizer: Tokenizer) -> list[tuple[str, np.ndarray]]:
    """Type and text, as Python would write it, and rows (N,) bool of eight tokens of each type: those that moved the
    most, by the sum of the gradient's size."""
    found = []
    for role, name in enumerate(ROLES):
        tokens, which = np.unique(log["token"][log["role"] == role], return_inverse=True)
        sizes = np.bincount(which, np.abs(log["gradient"][log["role"] == role]))
        for token in tokens[np.argsort(-sizes, kind="stable")][:8].tolist():
            chosen = (log["role"] == role) & (log["token"] == token)
            found.append((f"{name} {tokenizer.as_code(token)}", chosen))
    return found


# ------------------------------------------------------------------------------------------------ its picture and files


def draw_credit(log: dict, file: Path) -> None:
    """The size of both measures by type of token, in five parts of the response; no point for fewer than 100 tokens."""
    figure, axes = report.new_figure(2, 3.6)
    for axis, measure, formula in zip(axes, MEASURES, ("|credit · log p|", "|credit| · ‖onehot − p‖")):
        for role, (name, colour, marker) in enumerate(zip(ROLES, (PALETTE[1], PALETTE[0], PALETTE[2]), "os^")):
            parts = [part & (log["role"] == role) for _, part in position_bins(log, 5)]
            sizes = [mean_size(log, part, measure) if part.sum() >= 100 else (np.nan, np.nan) for part in parts]
            x = np.arange(0.1, 1, 0.2) + 0.02 * (role - 1)  # (5,) middles, moved so that intervals stay apart
            if np.isfinite(sizes).any():  # else it is not in the legend
                axis.errorbar(x, *np.array(sizes).T, color=colour, marker=marker, capsize=3, label=name)
        axis.set(xlabel="position in the response", ylabel=f"mean {formula}", ylim=(0, None), xlim=(0, 1),
                 title=f"{measure.capitalize()} by position")
        axis.xaxis.set_major_formatter("{x:.0%}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(file)


def analyze_run(run: Path, log: dict) -> None:
    """Print three tables of a run; write all, the pictures and the page to its analysis/."""
    label, metrics, tokenizer = run_method(read_config(run)), read_metrics(run), Tokenizer(run / "checkpoint")
    method, out = method_name(label), run / "analysis"
    tables = [learning_table(metrics), *credit_tables(log, tokenizer)]
    out.mkdir(exist_ok=True)
    draw_methods([Group(label, {0: summarize(run, log)})], out / "learning.png")
    draw_credit(log, out / "credit.png")
    write_page(log, tokenizer, f"{run.name}: {method}", out / "tokens.html")
    for name, found in (("tables.md", tables), ("part4.md", part4.tables(log, metrics, tokenizer))):
        (out / name).write_text("\n".join([f"# {run.name}\n", *map(str, found)]), encoding="utf-8")
    print(*tables[:2], tables[-1], sep="\n")  # the last: your own numbers, or else the tokens
    print(f"wrote {out / 'tables.md'}, which has more, and beside it part4.md, learning.png, credit.png and tokens.html")


def summarize(run: Path, log: dict) -> dict[str, float | dict]:
    """What a comparison averages of a run, its metrics, and `curve`: success by step."""
    metrics, final = read_metrics(run), read_json(run / "final.json", missing={})  # of a run that is not finished
    steps, success, _ = heldout(metrics)
    curve, (start, end) = dict(zip(steps, success)), success[[0, -1]] if len(success) else (np.nan, np.nan)
    if final.get("step") in curve and final.get("heldout_success") != curve[final["step"]]:
        raise ValueError(f"{run / 'final.json'} is not of this run: metrics.csv has another success at that step")
    passed = {name: final[name] for name in final if re.fullmatch(r"pass@\d+", name)}  # not its standard error
    norm, seconds = metrics["grad_norm"][1:], metrics["seconds"][1:]  # row 0 is the start model
    return {"steps": metrics["step"][-1], "metrics": metrics, "curve": curve, "start": start, "end": end,
            "area": ratio(np.trapezoid(success, steps), steps.max(initial=0)), **passed,
            **part4.summary(log), **dict(zip(SIZES, [figure for measure in MEASURES for figure in sizes_by_type(log, measure)])),
            **{f"`{name}`": np.nanmean(metrics[name]) for name in further_columns(metrics)},  # alone in backquotes
            "gradient norm": norm.mean(), "its spread": norm.std(), "seconds a step": np.median(seconds)}


# ----------------------------------------------------------------------------------------------------- methods compared


def estimate(group: Group, name: str, minus: bool = False) -> Estimate:
    """A figure of a method over its seeds, which are not paired; or that minus the baseline's."""
    others = [group.baseline.values(name) if group.baseline else []] if minus else []
    return t_estimate(group.values(name), *others)


def comparison_tables(groups: list[Group], warning: str) -> list[Table]:
    """What each method learned, and where its credit went, a row per method."""
    passed, further = ([name for name in next(iter(groups[0].rows.values())) if name.startswith(mark)]
                       for mark in ("pass@", "`"))
    tables = [
        ("Learning", "Held-out success: mean over seeds ± half of its 95% interval (Student's t), for these puzzles. "
         "Area: the mean of its curve. Baseline: GRPO, or else RLOO, with the same settings; Welch's interval.",
         ["start", "end", "area", *passed], ["end", "area", *passed]),
        ("Credit", "Size: mean absolute value over the tokens of a type. Of the gradient's norm mean and standard "
         "deviation over steps.", ["end", *SIZES, "gradient norm", "its spread", "seconds a step"], []),
        ("Appendix B: Summary Table", part4.APPENDIX_B, ["end", *part4.SUMMARY], []),
        ("Further columns", "The reward, and what a grade, a loss or a head added to metrics.csv: means over steps.",
         further, [])]
    warning += " With one seed, nothing can be concluded." * (min(len(group.rows) for group in groups) < 2)
    bold = f"**{warning.strip()}** " * bool(warning)
    cells = lambda group, names, minus: [pm(e.value, e.high - e.value) for e in (
        estimate(group, name, minus) for name in names)]
    return [Table(title, bold + note, ["method", "seeds", *names, *(f"{name} - baseline" for name in against)],
                  [[group.label, str(len(group.rows)), *cells(group, names, False), *cells(group, against, True)]
                   for group in groups]) for title, note, names, against in tables if names]


def draw_curve(axis: Axes, group: Group, name: str, alpha: float, color: str, **look) -> None:
    """A column of metrics.csv by step, where all runs of a method have it: its mean over them, and its interval."""
    runs = [dict(zip(row["metrics"]["step"], row["metrics"].get(name, []))) for row in group.rows.values()]
    steps = [step for step in runs[0] if all(np.isfinite(run.get(step, np.nan)) for run in runs)]
    mean, low, high, _ = np.reshape([t_estimate([run[step] for run in runs]) for step in steps], (-1, 4)).T
    axis.plot(steps, mean, ms=3, lw=1, color=color, **look)
    axis.fill_between(steps, low, high, color=color, alpha=alpha, lw=0)


def draw_methods(groups: list[Group], file: Path) -> None:
    """Of each method, by step, held-out success, length and gradient norm, of imported rollouts reward and length; the
    reward, and what was added to it; and the contribution's size by type: means over seeds with 95% intervals, of a
    single run that over puzzles."""
    rows = [row for group in groups for row in group.rows.values()]
    curves = {"heldout_success": "Held-out success", "length": "Tokens a response", "grad_norm": "Gradient norm"}
    curves = curves if any(row["curve"] for row in rows) else {"reward": "Reward", "length": "Tokens a response"}
    further = dict.fromkeys(name for row in rows for name in further_columns(row["metrics"]) if name not in curves)
    curves |= {name: textwrap.fill(name, 20, max_lines=2, placeholder=" …") for name in further}
    lines = math.ceil((len(curves) + 1) / 3)
    figure, found = report.new_figure(3, 3 * lines + 0.2 * len(groups), lines=lines)
    *axes, bars = found[: len(curves) + 1]
    for axis in found[len(curves) + 1 :]:
        axis.remove()
    for i, group in enumerate(groups):
        look = {"color": PALETTE[i % 4], "linestyle": ("-", "--", ":", "-.")[i // 4 % 4]}  # 16, each with four markers
        label = textwrap.fill(method_name(group.label), 100, max_lines=1, placeholder=" …")
        for axis, name in zip(axes, curves):
            draw_curve(axis, group, name, 0.25 if len(groups) < 4 else 0.1, label=label, marker="os^D"[(i + i // 16) % 4], **look)
        mean, _, high, _ = zip(*(estimate(group, name) for name in SIZES[:2]))  # (2,) each
        bars.bar(np.arange(2) + 0.8 * (i + 0.5) / len(groups) - 0.4, mean, 0.7 / len(groups), ec="black",
                 yerr=np.subtract(high, mean), **look)
    if single := len(rows) == 1 and "heldout_success" in curves:
        steps, success, error = heldout(rows[0]["metrics"])
        ends = np.array([*map(share_interval, success, error)])  # (n, 2)
        axes[0].errorbar(steps, success, np.abs(ends.T - success), fmt="none", color=PALETTE[0], capsize=3)
    for axis, title in zip((*axes, bars), (*curves.values(), "Contribution")):
        axis.set(title=title, xlabel="step", ylim=(min(0, axis.dataLim.ymin), 1.05 * max(0, axis.dataLim.ymax) or 1))
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    bars.set(xlabel="mean |credit · log p|", xticks=[0, 1], xticklabels=ROLES[:2])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center",
                  title="95% interval over puzzles" if single else "mean over seeds, 95% interval" * (len(rows) > 1))
    figure.savefig(file)


def compare_runs(folders: list[Path], logs: Iterator[dict]) -> None:
    """Print the comparison of runs; write it and a picture of the methods to comparison/ beside them."""
    runs = [Run(folder, read_config(folder), summarize(folder, log))
            for folder, log in zip(follow("reading runs", folders), logs)]
    groups, warning, out = group_runs(runs), " ".join(comparison_warnings(runs)), folders[0].parent / "comparison"
    text = "\n".join(["# Comparison\n", *map(str, comparison_tables(groups, warning))])
    out.mkdir(exist_ok=True)
    draw_methods(groups, out / "learning.png")
    (out / "table.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out / 'table.md'} and learning.png" + f"\nwarning: {warning}" * bool(warning))


@one_sentence()
def main() -> None:
    """Analyze a single run, compare several; report what can't be read in one sentence."""
    parser = new_parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    given = parser.parse_args()
    runs = [path for path in given.runs if (path / "metrics.csv").exists() or (path / "config.json").exists()]
    trained = [run for run in dict.fromkeys(runs or given.runs) if len(read_metrics(run)["step"]) > 1]  # each once
    for path in given.runs:
        if path not in trained and path.name != "comparison":  # our own output, which runs/* matches
            print(f"left out: {path} has no step of training")
    if not trained:
        fail("there is no run with a step of training to analyze; make one with: python train.py")
    logs = map(read_log, trained)  # one at a time: they are large
    analyze_run(trained[0], next(logs)) if len(trained) == 1 else compare_runs(trained, logs)


if __name__ == "__main__":
    main()
