"""Where the credit went: tables, pictures and a page of one run, or of several runs compared. Runs no model.

    python analyze.py runs/none-seed0                       one run, into its analysis/
    python analyze.py runs/*                                methods compared over seeds, into comparison/ beside them

Two measures say what each of the N tokens of a run receives:
    contribution = credit * log p           the original work's: a value, not a gradient; negative where it reinforces
    gradient     = credit * ||onehot - p||  the norm of d(credit * log p) / d logits (over the temperature), with the
                                            sign of the credit
Unlike in the original work, intervals are clustered by puzzle, because responses to one are compared with each other.
"""
import base64
import json
import re
import textwrap
from pathlib import Path
from typing import Iterator

import numpy as np
from matplotlib.axes import Axes

from plumbing import report
from plumbing.comparison import NO_DIFFERENCE, Group, Run, comparison_warnings, group_runs, labels, run_method, unmoved
from plumbing.files import read_json
from plumbing.flags import new_parser
from plumbing.metrics import COLUMNS, own_columns, share_interval, share_text
from plumbing.progress import fail, follow, one_sentence
from plumbing.report import PALETTE, Estimate, Table, pm, ratio, t_estimate
from plumbing.runs import heldout, is_finished, read_config, read_credit, read_metrics
from plumbing.tokenizer import Tokenizer
from tasks.text import FILLER, REASONING, ROLES

MEASURES = ("contribution", "gradient")
LEARNED = {"reward": 3, "success": 3, "format": 2, "length": 1, "entropy": 3, "grad_norm": 3, "zero_variance_groups": 0}
CREDITED = ("tokens", "share", *(f"abs({measure})" for measure in MEASURES), *MEASURES, "log p", "entropy",
            "contribution: deviation", "range")  # columns; those of LEARNED with decimals
SIZES = [f"{measure}, {of}" for measure in MEASURES for of in ("filler size", "reasoning size", "filler / reasoning")]
CONTROLS = ("random", "inverted", "shuffled", "share")  # of methods/controls.py: there to compare with, not to use
PAGE_TOKENS = 2**20  # about so many are in tokens.html, of 12 bytes or more: of a longer run every second step, ...


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
    log["contribution"] = log["credit"] * log["logprob"]
    log["gradient"] = log["credit"] * log["logit_grad"]
    return log


def position_bins(log: dict, count: int) -> list[tuple[str, np.ndarray]]:
    """Name and tokens (N,) bool of each of `count` equal parts of a response."""
    part = (log["relative"] * count).astype(int)  # (N,)
    return [(f"{i * 100 // count}-{(i + 1) * 100 // count}%", part == i) for i in range(count)]


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


def credit_row(name: str, log: dict, chosen: np.ndarray) -> list[str]:
    """Some tokens (N,) bool as a row under CREDITED."""
    if not chosen.any():
        return [name, "0", "0.0%", *[""] * (len(CREDITED) - 2)]
    c = log["contribution"][chosen]
    return [name, f"{chosen.sum():,}", f"{chosen.mean():.1%}", *(pm(*mean_size(log, chosen, m)) for m in MEASURES),
            *(pm(log[column][chosen].mean(), np.nan, 4) for column in (*MEASURES, "logprob", "entropy")),
            pm(c.std(), np.nan), f"{pm(c.min(), np.nan, 1)} to {pm(c.max(), np.nan, 1)}"]


def credit_tables(log: dict, tokenizer: Tokenizer | None) -> list[Table]:
    """Where the credit went: to which types of tokens, responses, parts of a response and, with a tokenizer, tokens."""
    roles = [(name, log["role"] == role) for role, name in enumerate(ROLES)]
    types = [("all", log["length"] > 0), *roles]
    signs = [(f"advantage {name}", np.sign(log["advantage"]) == x) for name, x in (("> 0", 1), ("< 0", -1), ("0", 0))]
    fifths = [(f"{where}, {name}", part & chosen) for where, part in position_bins(log, 5) for name, chosen in roles]
    t = np.abs(report.t_statistics(log["contribution"], log["position"]))  # (positions,)
    early = report.early_over_late(log["advantage"] * log["logprob"], log["position"])  # without the method's weight
    note = f"{log['response_id'][-1] + 1:,} responses. abs: mean absolute value ± half of its 95% interval by puzzles."
    if np.isfinite(found := [sizes_by_type(log, measure)[2] for measure in MEASURES]).all():
        note += " Filler / reasoning: {:.2f} by contribution, {:.2f} by gradient.".format(*found)
    if np.isfinite(early):
        note += f" abs(advantage · log p), early / late by position as the original counted: {early:.2f}."
    if len(t):
        note += (f" t of the mean contribution at {len(t)} positions, with {report.MIN_RESPONSES} responses or more: "
                 f"beyond 3 at {np.mean(t > 3):.1%}, within 1.5 at {np.mean(t < 1.5):.1%}; mean abs(t) {t.mean():.2f}.")
    parts = {("Where credit went", note): [*types, *signs, *position_bins(log, 10)],
             ("Types by position", "Each fifth of a response by type."): fifths}
    if tokenizer:
        parts["Tokens", "Of each type those with the largest sum of abs(gradient)."] = top_tokens(log, tokenizer)
    tables = [Table(*about, ["", *CREDITED], [credit_row(name, log, chosen) for name, chosen in rows])
              for about, rows in parts.items()]
    own = [[name, *(own_cell(log, chosen, name) for _, chosen in types)] for name in own_columns(log)]
    note = "What the credit function put into batch.log: means ± half of their 95% intervals by puzzles."
    return tables + [Table("Your own numbers", note, ["", "all", *ROLES], own)] * bool(own)


def own_cell(log: dict, chosen: np.ndarray, name: str) -> str:
    """The mean of a number of batch.log over some tokens (N,) bool, of any size, and half of its interval."""
    found = report.clustered_mean(log[name][chosen], log["puzzle"][chosen])
    return " ± ".join(f"{x:.{digits}g}" for x, digits in zip(found, (3, 2)) if np.isfinite(x))


def top_tokens(log: dict, tokenizer: Tokenizer) -> list[tuple[str, np.ndarray]]:
    """Type and text, as Python would write it, and rows (N,) bool of eight tokens of each type: those that moved the
    most, by the sum of the gradient's size."""
    found = []
    for role, name in enumerate(ROLES):
        tokens, which = np.unique(log["token"][log["role"] == role], return_inverse=True)
        sizes = np.bincount(which, np.abs(log["gradient"][log["role"] == role]))
        for token in tokens[np.argsort(-sizes, kind="stable")][:8].tolist():
            letters = tokenizer.bytes[token] or tokenizer.library.id_to_token(token).encode()  # an end token has none
            text = repr(letters.decode("utf-8", "backslashreplace"))  # it may be a part of a letter
            fence = "`" + max(re.findall("`+", text), default="")  # of Markdown code, which no backquote in it ends
            code = f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"
            found.append((f"{name} {code}", (log["role"] == role) & (log["token"] == token)))
    return found


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


def add_replies(log: dict) -> dict[str, np.ndarray]:
    """The columns of tokens.html with the tokens of replies where they came, whose other columns are NaN."""
    facts = ("credit", "logprob", "logit_grad", "entropy", *own_columns(log))
    shown = {name: log[name] for name in ("token", "response_id", *facts)}
    if "turn" not in log:
        return shown
    said = {"token": log["reply_token"], "response_id": log["reply_response"]}
    place = np.flatnonzero(log["position"] == 0)[log["reply_response"]] + log["reply_position"]  # the next token's row
    return {name: np.insert(column, place, said.get(name, np.nan)) for name, column in shown.items()}


def describe(log: dict, row: int) -> str:
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
    number of its text (uint32) and, as parts of 2^-15 of their largest size (float16), credit, log p, ||onehot - p||,
    entropy and what batch.log had, column after column, as base64."""
    every, first, shown = -(-len(log["token"]) // PAGE_TOKENS), np.flatnonzero(log["position"] == 0), add_replies(log)
    kept = np.flatnonzero((log["step"][first] - log["step"].min()) % every == 0)  # responses
    shown = {name: column[np.isin(shown["response_id"], kept)] for name, column in shown.items()}
    kinds = kinds_of(log, first, tokenizer)
    texts, number = np.unique(shown.pop("token"), return_inverse=True)
    lengths = np.unique(shown.pop("response_id"), return_counts=True)[1]
    units = [float(np.max(np.abs(x), where=np.isfinite(x), initial=0)) / 2**15 or 1.0 for x in shown.values()]
    facts = [(x.astype(float) / unit).astype("<f2") for x, unit in zip(shown.values(), units)]
    known = {"texts": [tokenizer.bytes[token].decode("latin-1") for token in texts], "lengths": lengths.tolist(),
             "units": units, "own": own_columns(shown),
             "steps": log["step"][first[kept]].tolist(), "kinds": [kinds[i] for i in kept],
             "names": [describe(log, row) for row in first[kept]]}
    parts = {"TITLE": title.replace("&", "&amp;").replace("<", "&lt;"), "PLUS": report.PLUS, "MINUS": report.MINUS,
             "KNOWN": json.dumps(known).replace("<", "\\u003c"),  # so that no text can close the script element
             "DATA": base64.b64encode(b"".join(column.tobytes() for column in (number.astype("<u4"), *facts))).decode()}
    template = Path(report.__file__).with_name("tokens.html").read_text(encoding="utf-8")
    file.write_text(re.sub(rf"\b({'|'.join(parts)})\b", lambda match: parts[match[1]], template), encoding="utf-8")


def analyze_run(run: Path, log: dict) -> None:
    """Print three tables of a run; write all, the pictures and the page to its analysis/."""
    label, metrics, tokenizer = run_method(read_config(run)), read_metrics(run), Tokenizer(run / "checkpoint")
    method, out = method_name(label), run / "analysis"
    if not 0 <= log["token"].min() <= log["token"].max() < tokenizer.size:
        raise ValueError(f"{run / 'credit'} has tokens that {run / 'checkpoint' / 'tokenizer.json'} lacks")
    tables = [learning_table(metrics), *credit_tables(log, tokenizer)]
    out.mkdir(exist_ok=True)
    draw_methods([Group(label, {0: summarize(run, log)})], out / "learning.png")
    draw_credit(log, out / "credit.png")
    write_page(log, tokenizer, f"{run.name}: {method}", out / "tokens.html")
    (out / "tables.md").write_text("\n".join([f"# {run.name}\n", *map(str, tables)]), encoding="utf-8")
    print(*tables[:2], tables[-1], sep="\n")  # the last: your own numbers, or else the tokens
    print(f"wrote {out / 'tables.md'}, which has more, and beside it learning.png, credit.png and tokens.html")


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
            **dict(zip(SIZES, [figure for measure in MEASURES for figure in sizes_by_type(log, measure)])),
            **{f"`{name}`": np.nanmean(metrics[name]) for name in further_columns(metrics)},  # alone in backquotes
            "gradient norm": norm.mean(), "its spread": norm.std(), "seconds a step": np.median(seconds)}


def estimate(group: Group, column: str) -> Estimate:
    """A figure of a method over its seeds, which are not paired; in a column `end - baseline` minus the baseline's."""
    name, minus, _ = column.partition(" - baseline")
    others = [group.baseline.values(name) if group.baseline else []] if minus else []
    return t_estimate(group.values(name), *others)


def method_row(group: Group, columns: list[str]) -> list[str]:
    """The `estimate` of each column, as a row."""
    found = [estimate(group, column) for column in columns]
    return [group.label, str(len(group.rows)), *(pm(e.value, e.high - e.value) for e in found)]


def comparison_tables(groups: list[Group], warning: str) -> list[Table]:
    """What each method learned, and where its credit went, a row per method."""
    passed, names = ([name for name in next(iter(groups[0].rows.values())) if name.startswith(mark)]
                     for mark in ("pass@", "`"))
    warning += " With one seed, nothing can be concluded." * (min(len(group.rows) for group in groups) < 2)
    bold = f"**{warning.strip()}** " * bool(warning)
    learned = ("Held-out success: mean over seeds ± half of its 95% interval (Student's t), for these puzzles. Area: "
               "the mean of its curve. Baseline: GRPO, or else RLOO, with the same settings; Welch's interval.",
               ["start", "end", "area", *passed, *(f"{name} - baseline" for name in ("end", "area", *passed))])
    credited = ("Size: mean absolute value over the tokens of a type. Of the gradient's norm mean and standard "
                "deviation over steps.", ["end", *SIZES, "gradient norm", "its spread", "seconds a step"])
    further = "The reward, and what a grade, a loss or a head added to metrics.csv: means over steps.", names
    return [Table(title, bold + note, ["method", "seeds", *columns], [method_row(group, columns) for group in groups])
            for title, (note, columns) in zip(("Learning", "Credit", "Further columns"), (learned, credited, further))
            if columns]


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
    wide = 3 if further else len(curves) + 1  # axes in a line
    curves |= {name: textwrap.fill(name, 20, max_lines=2, placeholder=" …") for name in further}
    lines = -(-(len(curves) + 1) // wide)
    figure, found = report.new_figure(wide, 3 * lines + 0.2 * len(groups), lines=lines)
    *axes, bars = found[: len(curves) + 1]
    for axis in found[len(curves) + 1 :]:
        axis.remove()
    for i, group in enumerate(groups):
        look = {"color": PALETTE[i % len(PALETTE)], "linestyle": ("-", "--", ":", "-.")[i // len(PALETTE) % 4]}
        label = textwrap.fill(method_name(group.label), 100, max_lines=1, placeholder=" …")
        label = " " * label.startswith("_") + label  # matplotlib leaves out of a legend what begins with _
        for axis, name in zip(axes, curves):
            draw_curve(axis, group, name, 0.25 if len(groups) < 4 else 0.1, label=label, marker="os^D"[i % 4], **look)
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
    configs, out = unmoved([*map(read_config, folders)]), folders[0].parent / "comparison"
    figures = [*map(summarize, follow("reading runs", folders), logs)]
    every = {name: np.nan for own in figures for name in own}  # NaN where a run has not measured it
    shared = [{name: x for name, x in config["settings"].items() if name not in NO_DIFFERENCE} for config in configs]
    plain = min((method for method in map(run_method, configs) if method.split()[0] == "none"), default="",
                key=lambda method: (method != "none", method != "none advantage=rloo", method))
    runs = [Run(str(folder), label, json.dumps(setting), run_method(config) == plain, config["settings"]["seed"],
                every | own, config["inputs"], is_finished(folder))
            for folder, config, label, setting, own in zip(folders, configs, labels(configs), shared, figures)]
    groups, warning = group_runs(runs), " ".join(comparison_warnings(runs))
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
