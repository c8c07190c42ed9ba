"""Where the credit went: tables and pictures of one run, or of several runs compared. Runs no model.

    python analyze.py runs/none-seed0      one run: tables and pictures, also written to its analysis/
    python analyze.py runs/*               methods compared over seeds, also written to comparison/ beside the runs

Two measures say what each of the N tokens of a run receives (a response has L of them):

    contribution = credit * log p           the original work's: a value, not a gradient; negative where it reinforces
    gradient     = credit * ||onehot - p||  the norm of d(credit * log p) / d logits (over the temperature), with the
                                            sign of the credit

Differences from the original work:
1. Intervals of the mean sizes of one run are clustered by puzzle, because its responses are compared with each other.
2. Tags and the end token are a type of their own, `structure`.
3. Notes under tables say how to read them. Every figure in them is computed from the run.
"""
import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plumbing import report
from plumbing.comparison import Group, Run, comparison_warnings, group_runs, labels, run_method, shared_settings
from plumbing.progress import fail, follow, one_sentence
from plumbing.report import GREY, PALETTE, Estimate, Table, pm, ratio, t_estimate
from plumbing.runs import heldout, is_finished, read_config, read_credit, read_final, read_metrics, sampled_puzzles
from plumbing.tokenizer import Tokenizer
from tasks.text import ANSWER, END_ANSWER, END_THINK, FILLER, REASONING, ROLES, TAGS, format_reward

MEASURES = ("contribution", "gradient")
CONTROLS = ("random", "inverted", "shuffled", "share")  # of methods/controls.py: there to compare with, not to use


def method_name(label: str) -> str:
    """What a picture calls a method: `RLOO lr=0.1` for the label `none advantage=rloo lr=0.1`."""
    method, *settings = label.split()
    if method != "none":
        return label + " (control)" * (method in CONTROLS)
    name = "RLOO" if "advantage=rloo" in settings else "GRPO"
    return " ".join([name, *(setting for setting in settings if setting != "advantage=rloo")])


# ------------------------------------------------------------------------------------------- the log of a run


def read_log(run: Path, metrics: dict) -> dict[str, np.ndarray]:
    """The credit log of a run: columns (N,), a row per token. ValueError where a step is missing or damaged."""
    steps, count = read_credit(run, metrics), 0  # responses so far
    for step in steps:
        if "reply_response" in step:  # as response_id, see with_measures; a reply's columns have a length of their own
            step["reply_response"] = step["reply_response"] + count
        count += 1 + int(step["response"].max())
    return with_measures({name: np.concatenate([step[name] for step in steps]) for name in steps[0]})


def with_measures(log: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns (N,) of a credit log, and those that follow from them."""
    log["response_id"] = np.cumsum(log["position"] == 0) - 1  # from 0 on through the run: each begins at position 0
    step_and_group = log["step"].astype(int) * 2**16 + log["group"]  # as one number: a group is below 2**16
    log["puzzle"] = np.unique(step_and_group, return_inverse=True)[1]  # from 0 on through the run
    length = np.bincount(log["response_id"])  # (responses,)
    log["relative"] = log["position"] / length[log["response_id"]]  # in [0, 1), 0 at the first token of a response
    log["contribution"] = log["credit"] * log["logprob"]
    log["gradient"] = log["credit"] * log["logit_grad"]
    return log


def position_bins(log: dict, count: int) -> list[tuple[str, np.ndarray]]:
    """Name and tokens (N,) bool of each of `count` equal parts of a response."""
    part = (log["relative"] * count).astype(int)  # (N,)
    return [(f"{i * 100 // count}-{(i + 1) * 100 // count}%", part == i) for i in range(count)]


def training_parts(log: dict) -> list[tuple[str, np.ndarray]]:
    """Steps and tokens (N,) bool of each of up to ten parts of the run."""
    elapsed = (log["step"] - log["step"].min()) / (np.ptp(log["step"]) + 1)  # (N,) in [0, 1)
    part = (elapsed * 10).astype(int)  # (N,)
    selections = [part == i for i in np.unique(part)]
    return [(f"{log['step'][those].min()}-{log['step'][those].max()}", those) for those in selections]


# ---------------------------------------------------------------------------------- one run: where did credit go?

# Columns by their header. A size is a mean absolute value and has an interval; an average keeps the signs.
SIZES = {f"size of {measure}": measure for measure in MEASURES}
SIZES_BY_ROLE = {f"{measure}, {name}": (measure, role) for measure in MEASURES for role, name in enumerate(ROLES)}
AVERAGES = {"contribution": "contribution", "gradient": "gradient", "log p": "logprob", "entropy": "entropy"}
SIZE_NOTE = "Mean absolute value, ± half of its 95% interval, clustered by puzzle."


def cell(log: dict, selected: np.ndarray, column: str) -> str:
    """What a column of a table shows of the selected tokens (N,) bool."""
    if column in SIZES:
        return pm(*mean_size(log, selected, SIZES[column]))
    if column in SIZES_BY_ROLE:
        measure, role = SIZES_BY_ROLE[column]
        return pm(*mean_size(log, selected & (log["role"] == role), measure))
    if column in AVERAGES:
        return average(log[AVERAGES[column]][selected])
    if column == "size of credit":
        return average(np.abs(log["credit"][selected]))
    if column == "responses":
        return f"{len(np.unique(log['response_id'][selected])):,}"
    if column == "share":
        return f"{selected.mean():.1%}"
    return f"{selected.sum():,}"  # tokens, count


def mean_size(log: dict, selected: np.ndarray, measure: str) -> tuple[float, float]:
    """The size of a measure over the selected tokens (N,) bool, and half of its interval."""
    return report.clustered_mean(np.abs(log[measure][selected]), log["puzzle"][selected])


def average(values: np.ndarray, form: str = ".3f") -> str:
    """The mean of values as a cell, empty when there are none."""
    return format(values.mean(), form) if len(values) else ""


def filler_by_reasoning(log: dict, measure: str) -> float:
    """The size of a measure on filler as a multiple of that on reasoning."""
    (filler, _), (reasoning, _) = (mean_size(log, log["role"] == role, measure) for role in (FILLER, REASONING))
    return ratio(filler, reasoning)


def credit_tables(log: dict, tokenizer: Tokenizer) -> list[Table]:
    """Where the credit went: to which positions, responses and tokens, and when."""
    def table(title: str, note: str, first: str, parts: list[tuple[str, np.ndarray]], *columns: str) -> Table:
        rows = [[name, *(cell(log, selected, column) for column in columns)] for name, selected in parts]
        return Table(title, note, [first, *columns], rows)

    signs = [("positive", log["advantage"] > 0), ("negative", log["advantage"] < 0), ("zero", log["advantage"] == 0)]
    sign_note = "Signed means, then mean sizes. A reinforced token has a negative contribution and a positive gradient."
    roles = [(name, log["role"] == role) for role, name in enumerate(ROLES)]
    role_note = "Mean size ± half of its 95% interval, clustered by puzzle, then signed means."
    contribution, gradient = (filler_by_reasoning(log, measure) for measure in MEASURES)
    if np.isfinite([contribution, gradient]).all():
        role_note += f" Filler / reasoning: {contribution:.2f} by contribution, {gradient:.2f} by gradient."
    return [
        table_statistics(log), table_t(log),
        table("Position in the response", SIZE_NOTE, "position", position_bins(log, 10),
              "tokens", *SIZES, "log p", "entropy"),
        table("Sign of the advantage", sign_note, "advantage", signs, "responses", "tokens", *MEASURES, *SIZES),
        table("Token types", role_note, "type", roles, "tokens", "share", *SIZES, *MEASURES, "log p", "entropy"),
        table("Token types by position", SIZE_NOTE, "position", position_bins(log, 5), *SIZES_BY_ROLE),
        table_tokens(log, tokenizer),
        table("Credit over training", SIZE_NOTE, "steps", training_parts(log), "size of credit", *SIZES_BY_ROLE)]


def table_statistics(log: dict) -> Table:
    """The spread of both measures."""
    statistics = {"mean": np.mean, "standard deviation": np.std, "mean size": lambda x: np.abs(x).mean(),
                  "minimum": np.min, "maximum": np.max}
    rows = [[name, *(f"{compute(log[measure]):.3f}" for measure in MEASURES)] for name, compute in statistics.items()]
    note = "Over all tokens. The gradient is at most sqrt(2) times the credit; the contribution has no bound."
    return Table("Contribution statistics", note, ["", *MEASURES], rows)


def table_t(log: dict) -> Table:
    """How consistent the sign of both measures is at each position."""
    both = [np.abs(report.t_statistics(log[measure], log["position"])) for measure in MEASURES]  # (positions,) each
    rows = [["share with abs(t) > 3", *(average(t > 3, ".1%") for t in both)],  # 3 and 1.5 are the original work's
            ["share with abs(t) < 1.5", *(average(t < 1.5, ".1%") for t in both)],  # limits: to compare with its table
            ["mean abs(t)", *(average(t, ".2f") for t in both)], ["positions", *(str(len(t)) for t in both)]]
    note = (f"t of the mean at each position, counted from the start of a response, over all responses that reach it "
            f"(at least {report.MIN_RESPONSES}); responses are treated as independent.")
    return Table("t-statistics", note, ["", *MEASURES], rows)


FEW = 100  # tokens: a part with fewer has no mean in the picture
STYLES = {"filler": (PALETTE[1], "o"), "reasoning": (PALETTE[0], "s"), "structure": (PALETTE[2], "^")}  # colour, marker


def draw_credit(log: dict, file: Path) -> None:
    """The size of both measures by type of token, in five parts of the response; a cross where there are few tokens."""
    figure, axes = report.new_figure(2, 3.6)
    for axis, measure, formula in zip(axes, MEASURES, ("|credit · log p|", "|credit| · ‖onehot − p‖")):
        for role, name in enumerate(ROLES):
            colour, marker = STYLES[name]
            parts = [selected & (log["role"] == role) for _, selected in position_bins(log, 5)]
            few = np.array([part.sum() < FEW for part in parts])  # (5,)
            size, half = np.array([mean_size(log, part, measure) for part in parts]).T  # (5,), (5,)
            x = np.arange(0.1, 1, 0.2) + 0.02 * (role - 1)  # (5,) middles, moved so that intervals stay apart
            axis.errorbar(x, np.where(few, np.nan, size), half, color=colour, marker=marker, capsize=3, label=name)
            low = np.full(few.sum(), 0.04)  # of the height of the axes
            axis.plot(x[few], low, "x", color=colour, transform=axis.get_xaxis_transform())
        axis.set(xlabel="position in the response", ylabel=f"mean {formula}", ylim=(0, None), xlim=(0, 1),
                 title=f"{measure.capitalize()} by position")
        axis.xaxis.set_major_formatter("{x:.0%}")
    axes[0].plot([], [], "x", color=GREY, label=f"fewer than {FEW} tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(file)


# ----------------------------------------------------------------------------------- one run: how did it learn?


def table_basics(log: dict, metrics: dict) -> Table:
    """What was trained, and the result."""
    steps, success, error = heldout(metrics)
    responses, tokens = log["response_id"][-1] + 1, len(log["response_id"])
    rows = [["steps, responses, tokens", f"{int(metrics['step'][-1])}, {responses:,}, {tokens:,}"],
            ["held-out success, start", pm(success[0], 1.96 * error[0])],
            [f"held-out success, step {int(steps[-1])}", pm(success[-1], 1.96 * error[-1])]]
    for name in ("success", "format", "length", "entropy", "grad_norm", "zero_variance_groups"):
        trained = metrics[name][1:]  # row 0 is the model before training
        rows.append([f"{name}, first and last ten steps", f"{trained[:10].mean():.3f}, {trained[-10:].mean():.3f}"])
    rows.append(["tokens whose credit is 0", f"{(log['credit'] == 0).mean():.1%}"])
    return Table("The run", "± is half of a 95% interval over puzzles.", ["", "value"], rows)


LAYOUT = {  # format_reward says how much of the layout a response has; these columns say which part is missing
    f"`{END_THINK}`": lambda text: END_THINK in text,
    f"`{END_THINK}↵{ANSWER}`": lambda text: f"{END_THINK}\n{ANSWER}" in text,
    f"`{ANSWER}` closed": lambda text: END_ANSWER in text.partition(ANSWER)[2],
    f"one `{ANSWER}`": lambda text: text.count(ANSWER) == 1,
    f"`{END_ANSWER}` last": lambda text: text.endswith(END_ANSWER),
    "all of it": lambda text: format_reward(text) == 1}


def table_layout(log: dict, tokenizer: Tokenizer) -> list[Table]:
    """Which parts of the layout the responses have, in up to ten parts of the run; no table where they have no tag."""
    responses = np.split(log["token"], np.flatnonzero(log["position"] == 0)[1:])
    texts = [b"".join(tokenizer.bytes[token] for token in tokens).decode("utf-8", "replace") for tokens in responses]
    if not any(tag in text for text in texts for tag in TAGS):
        return []
    rows = []
    for steps, selected in training_parts(log):
        written, others = [texts[i] for i in np.unique(log["response_id"][selected])], Counter()
        for text in written:
            closing_tags = set(re.findall(r"</[\w.:-]+>", text))  # each once, however often the response has it
            others.update(sorted(closing_tags.difference(TAGS)))  # sorted: of equally frequent ones always the same
        shares = [f"{np.mean([has_part(text) for text in written]):.1%}" for has_part in LAYOUT.values()]
        most = [f"{report.code_span(tag)} {count / len(written):.1%}" for tag, count in others.most_common(2)]
        rows.append([steps, f"{len(written):,}", *shares, ", ".join(most)])
    note = "Shares of responses. All of it: with no further tag. Others: the two most frequent other closing tags."
    return [Table("Layout over training", note, ["steps", "responses", *LAYOUT, "others"], rows)]


def draw_learning(metrics: dict, method: str, file: Path) -> None:
    """Success and response length over the steps."""
    figure, (left, right) = report.new_figure(2, 3.4, sharex=True)
    steps, success, error = heldout(metrics)
    dots = {"marker": "."} if len(metrics["step"]) < 20 else {}  # a line through one point is not seen
    left.plot(metrics["step"], metrics["success"], color=GREY, lw=1, alpha=0.6, label="training rollouts", **dots)
    left.errorbar(steps, success, 1.96 * error, color=PALETTE[0], marker="o", capsize=3,
                  label="held-out puzzles, 95% interval")
    left.set(xlabel="step", ylabel="success rate", ylim=(-0.02, 1.02))
    left.set_title(f"{method}: puzzles solved, and response length", loc="left")  # it may be wider than the axes
    left.legend()
    left.xaxis.get_major_locator().set_params(integer=True)
    right.plot(metrics["step"], metrics["length"], color=PALETTE[0], **dots)
    right.set(xlabel="step", ylabel="tokens in a response", ylim=(0, 1.05 * np.nanmax(metrics["length"])))
    figure.savefig(file)


# ------------------------------------------------------------------------ one run: what did the tokens look like?


def table_tokens(log: dict, tokenizer: Tokenizer, count: int = 8) -> Table:
    """The most frequent tokens of each type."""
    rows, columns = [], ("count", *SIZES, "log p", "entropy")
    for role, name in enumerate(ROLES):
        tokens, counts = np.unique(log["token"][log["role"] == role], return_counts=True)
        for token in tokens[np.argsort(-counts, kind="stable")][:count]:
            selected = (log["role"] == role) & (log["token"] == token)
            shown = report.code_span(name_of(token, tokenizer))
            rows.append([name, shown, *(cell(log, selected, column) for column in columns)])
    header, note = ["type", "token", *columns], f"The {count} most frequent. {SIZE_NOTE}"
    return Table("Top tokens of each type", note, header, rows)


def name_of(token: int, tokenizer: Tokenizer) -> str:
    """A token as Python would write it: as text, or as bytes where it is only a part of a character."""
    letters = tokenizer.bytes[token] or tokenizer.library.id_to_token(int(token)).encode()  # an end token has no bytes
    text = letters.decode("utf-8", "replace")
    return repr(letters if "\ufffd" in text else text)


class Block(NamedTuple):
    """Tokens under a heading, as report.draw_blocks takes them."""

    heading: str
    weight: str  # of the heading's font
    most_lines: int  # of the heading
    texts: list[str]
    values: np.ndarray  # (L,) what colours the tokens


def choose_pairs(log: dict) -> list[tuple[np.ndarray, np.ndarray]]:
    """A reinforced and a discouraged response to a puzzle of the first step, and two of the last: their rows (L,)."""
    pairs = []
    for step in sorted({log["step"].min(), log["step"].max()}):  # a run may have one step
        answers_differ, others = [], []
        for puzzle in np.unique(log["puzzle"][log["step"] == step]):
            rows = np.flatnonzero(log["puzzle"] == puzzle)
            responses = np.split(rows, np.flatnonzero(log["position"][rows] == 0)[1:])  # the rows of each
            responses.sort(key=len)  # short ones fit the picture
            signs = [np.sign(log["advantage"][response[0]]) for response in responses]
            if 1 in signs and -1 in signs:
                solved_by_some = np.ptp(log["reward"][rows]) >= 0.5  # the answer is worth 1, the layout at most 0.1
                pair = responses[signs.index(1)], responses[signs.index(-1)]
                (answers_differ if solved_by_some else others).append(pair)
        pairs += (answers_differ + others)[:1]
    return pairs


def with_replies(log: dict, rows: np.ndarray, name: str) -> np.ndarray:
    """A column of the log in the rows (L,) of a response, with its replies: their tokens, else NaN."""
    if "turn" not in log:
        return log[name][rows]
    own = log["reply_response"] == log["response_id"][rows[0]]
    said = log["reply_token"][own] if name == "token" else np.nan
    return np.insert(log[name][rows].astype(float), log["reply_position"][own].astype(int), said)


def draw_responses(log: dict, tokenizer: Tokenizer, method: str, puzzles: dict, file: Path) -> None:
    """Each response twice: by credit, one number where all tokens have the same, and by gradient.

    puzzles: what is known of the puzzle of a (step, group), as text.
    """
    blocks = []
    for pair in choose_pairs(log):
        for rows, most_lines in zip(pair, (6, 1)):  # of the heading: the second one's repeats the puzzle
            step, group, reward = (log[name][rows[0]] for name in ("step", "group", "reward"))
            puzzle = f". Puzzle: {puzzles[step, group]}" if (step, group) in puzzles else ""
            heading = f"Step {step}, reward {reward:.2f}, credit by {method}{puzzle}"
            tokens, credit, gradient = (with_replies(log, rows, name) for name in ("token", "credit", "gradient"))
            texts = [tokenizer.bytes[int(token)].decode("utf-8", "replace") for token in tokens]
            shown = texts  # (L,)
            if np.ptp(log["credit"][rows]) < 1e-6:  # equal but for rounding
                credit, shown = credit[:1], [f" {credit[0]:+.3g} on every token "]
            blocks.append(Block(heading, "bold", most_lines, shown, credit))
            below = "Gradient in logit space, credit · ‖onehot − p‖"
            blocks.append(Block(below, "normal", 1, texts, gradient))
    empty = "No puzzle of the first or last step has both a reinforced and a discouraged response"
    legend = ("below 0: made less likely     above 0: made more likely     "
              "(↵ line break, ⇥ tab, ■ end token, □ other letter)" + "     grey: replies" * ("turn" in log))
    report.draw_blocks(blocks or [Block(empty, "bold", 1, [" "], np.zeros(1))], legend, file)


def analyze_run(run: Path) -> None:
    """Print the tables of a run; write them and the pictures to its analysis/."""
    method, metrics = report.visible(method_name(run_method(read_config(run)))), read_metrics(run)
    tokenizer = Tokenizer(run / "checkpoint")
    log, puzzles = read_log(run, metrics), sampled_puzzles(run)
    if not 0 <= log["token"].min() <= log["token"].max() < tokenizer.size:
        raise ValueError(f"{run / 'credit'} has tokens that {run / 'checkpoint' / 'tokenizer.json'} lacks")
    tables = [table_basics(log, metrics), *credit_tables(log, tokenizer), *table_layout(log, tokenizer)]
    out = run / "analysis"
    out.mkdir(exist_ok=True)
    text = f"# {run.name}\n\n" + "\n".join(map(str, tables))
    draw_learning(metrics, method, out / "learning.png")
    draw_credit(log, out / "credit.png")
    draw_responses(log, tokenizer, method, puzzles, out / "tokens.png")
    (out / "tables.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out / 'tables.md'}, learning.png, credit.png and tokens.png beside it")


# ------------------------------------------------------------------------------------- runs beside each other

# The figures of a run that a comparison shows, beside pass@k for each k that a run measured (--pass_at).
LEARNING = ("start", "end", "climb", "area")
CREDIT = (*(f"{measure}, {part}" for measure in MEASURES for part in ("filler", "reasoning", "filler / reasoning")),
          "effective sample size", "varies within",  # by spread_within
          "gradient norm", "its spread", "seconds a step")


def summarize(run: Path) -> dict[str, float | dict]:
    """The figures of one run that a comparison averages over seeds, and `curve`: held-out success by step."""
    metrics, final = read_metrics(run), read_final(run)  # final: empty until the run is finished
    log = read_log(run, metrics)
    steps, success, _ = heldout(metrics)
    curve = dict(zip(steps, success))
    if final.get("step") in curve and final.get("heldout_success") != curve[final["step"]]:
        raise ValueError(f"{run / 'final.json'} is not of this run: metrics.csv has another success at that step")
    figures = {"steps": metrics["step"][-1], "curve": curve, "start": success[0], "end": success[-1],
               "climb": success[-1] - success[0], "area": ratio(np.trapezoid(success, steps), np.ptp(steps))}
    figures |= {name: final[name] for name in final if re.fullmatch(r"pass@\d+", name)}  # not its standard error
    for measure in MEASURES:
        total = np.bincount(log["role"], np.abs(log[measure]), len(ROLES))  # (roles,)
        figures |= {f"{measure}, {ROLES[role]}": ratio(total[role], total.sum()) for role in (FILLER, REASONING)}
        figures[f"{measure}, filler / reasoning"] = filler_by_reasoning(log, measure)
    figures |= {name: np.nansum(metrics[name]) for name in ("tokens_sampled", "tokens_read", "tokens_updated")}
    grad_norm, seconds = (metrics[name][1:] for name in ("grad_norm", "seconds"))  # row 0 is the start model
    return figures | spread_within(log["credit"], log["response_id"]) | {
        "gradient norm": grad_norm.mean(), "its spread": grad_norm.std(), "seconds a step": np.median(seconds)}


def spread_within(credit: np.ndarray, response: np.ndarray) -> dict[str, float]:
    """How unequally credit (N,) is spread over the tokens of each response (N,).

    effective sample size: (sum w)^2 / (L sum w^2) with w = abs(credit), averaged over the responses with any credit:
    1 where all L tokens receive the same, 1 / L where one receives all.
    varies within: sum (credit - mean of its response)^2 / sum credit^2.
    """
    length = np.bincount(response)  # (responses,), as all below
    size, square, signed = (np.bincount(response, x) for x in (np.abs(credit), credit**2.0, credit))
    credited = square > 0
    effective = ratio((size[credited] ** 2 / (length[credited] * square[credited])).sum(), credited.sum())
    within = square.sum() - (signed**2 / np.maximum(length, 1)).sum()  # sum (c - mean)^2 = sum c^2 - (sum c)^2 / L
    return {"effective sample size": effective, "varies within": ratio(within, square.sum())}


def load_runs(folders: list[Path]) -> list[Run]:
    """Read run folders for a comparison. A pass@k that only others measured is NaN."""
    configs = [read_config(folder) for folder in folders]
    figures = [summarize(folder) for folder in follow("reading runs", folders)]
    not_measured = {name: float("nan") for own in figures for name in own if name.startswith("pass@")}
    return [Run(name=str(folder), label=label, setting=json.dumps(shared_settings(config)),
                is_baseline=run_method(config) == "none", seed=config["settings"]["seed"],
                figures=not_measured | own, inputs=config["inputs"], finished=is_finished(folder))
            for folder, config, label, own in zip(folders, configs, labels(configs), figures)]


def record(group: Group, passed: list[str]) -> dict[str, Estimate]:
    """All figures of a method, by their column in table.csv. passed: the names of those that are a pass@k."""
    out = {"seeds": Estimate(len(group.rows)), "steps": Estimate(group.values("steps").max())}
    out |= {name: t_estimate(group.values(name)) for name in (*LEARNING, *passed, *CREDIT)}
    out["start"] = Estimate(group.values("start").mean())  # the same for all seeds, so there is no spread to show
    out["least climb"] = Estimate(group.values("climb").min())
    if group.baseline:  # Seeds are not paired: two methods' results on the same puzzles are hardly correlated.
        out |= {f"{name} - GRPO": t_estimate(group.values(name), group.baseline.values(name))
                for name in ("end", "area", *passed)}
    return out


def comparison_tables(records: dict[str, dict[str, Estimate]], passed: list[str], warning: str) -> list[Table]:
    """What each method learned, its difference to the baseline, and where its credit went; a row per method."""
    def table(title: str, note: str, *columns: str) -> Table:
        rows = [[label, *(figure_cell(name, r[name]) if name in r else "" for name in columns)]
                for label, r in records.items()]
        return Table(title, warnings + note, ["method", *columns], rows)

    single = min(r["seeds"].value for r in records.values()) < 2
    warnings = f"**{warning}** " * bool(warning) + "**With one seed, nothing can be concluded.** " * single
    means = "Mean over seeds ± half of its 95% interval (Student's t), for these held-out puzzles."
    return [
        table("Learning", f"{means} Held-out success at start and end; area: the mean of its curve.",
              "seeds", "steps", *LEARNING, *passed, "least climb"),
        table("Against GRPO", "Difference of the means to GRPO (`none` with the same settings) ± half of its 95% "
              "interval (Welch's t).", "seeds", *(f"{name} - GRPO" for name in ("end", "area", *passed))),
        table("Gradient and credit", f"{means} Shares of the summed sizes of all tokens; filler / reasoning is the "
              "ratio of mean sizes. Effective sample size: 1 where all tokens of a response receive the same. Varies "
              "within: the share of squared credit that is not its response's mean.", "seeds", *CREDIT)]


def figure_cell(name: str, e: Estimate) -> str:
    """A figure ± half of its interval, counts without decimals."""
    return pm(e.value, e.high - e.value, 0 if name in ("seeds", "steps") else 3)


def draw_curves(groups: list[Group], file: Path) -> None:
    """The learning curves of methods: the mean over seeds and its 95% interval; each seed where there is one method."""
    names = [textwrap.fill(method_name(group.label), 34) for group in groups]  # longer ones leave curves no room
    lines = sum(1 + name.count("\n") for name in names)  # of the legend, which needs 0.12 inches for each
    figure, (axis,) = report.new_figure(1, 3.6 + 0.12 * lines)
    alone = len(groups) == 1
    for i, (group, name) in enumerate(zip(groups, names)):
        curves = [figures["curve"] for figures in group.rows.values()]
        steps = sorted(set.intersection(*map(set, curves)))  # that all seeds measured
        estimates = [t_estimate([curve[step] for curve in curves]) for step in steps]
        colour, style = PALETTE[i % len(PALETTE)], ("-", "--", ":", "-.")[i // len(PALETTE) % 4]
        mean, low, high, _ = zip(*estimates)  # (steps,) each
        axis.plot(steps, mean, style, color=colour, marker="os^D"[i % 4], label=f"{name}, seeds: {len(curves)}")
        axis.fill_between(steps, low, high, color=colour, alpha=0.25 if len(groups) < 4 else 0.1, lw=0)
        for curve in curves if alone else []:
            axis.plot(steps, [curve[step] for step in steps], color=colour, lw=0.6, alpha=0.6)
    axis.set(xlabel="step", ylabel="held-out puzzles solved", ylim=(0, None),
             title=method_name(groups[0].label) if alone else "Held-out success")
    figure.legend(title="mean, 95% interval" + "; thin: each seed" * alone, loc="outside right upper")
    figure.savefig(file)


def compare_runs(folders: list[Path]) -> None:
    """Print the comparison of runs; write it and a picture of the learning curves to comparison/ beside them."""
    runs = load_runs(folders)
    groups, out = group_runs(runs), folders[0].parent / "comparison"
    warning = " ".join(comparison_warnings(runs))
    passed = [name for name in runs[0].figures if name.startswith("pass@")]
    records = {group.label: record(group, passed) for group in groups}
    text = "# Comparison\n\n" + "\n".join(map(str, comparison_tables(records, passed, warning)))
    out.mkdir(exist_ok=True)
    draw_curves(groups, out / "learning.png")
    report.write_csv(report.csv_rows(records), out / "table.csv")
    (out / "table.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out / 'table.md'}, table.csv and learning.png")
    if warning:
        print(f"warning: {warning}")


# ------------------------------------------------------------------------------------------------ command line


def trained_runs(paths: list[Path]) -> list[Path]:
    """Those of the named folders that can be analyzed; says which ones are left out."""
    runs = [path for path in paths if (path / "metrics.csv").exists() or (path / "config.json").exists()]
    for path in paths:
        if path not in runs and len(paths) > 1 and path.name != "comparison":  # our own output, which runs/* matches
            print(f"left out: {path} is not a run folder")
    runs = runs or paths  # which read_metrics refuses
    trained = [run for run in runs if len(read_metrics(run)["step"]) > 1]
    for run in runs:
        if run not in trained:
            print(f"left out: {run} has no step of training; what was measured is in its metrics.csv and final.json")
    return trained


@one_sentence()
def main() -> None:
    """Analyze a single run, compare several; report what can't be read in one sentence."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        return print(__doc__)
    if not words or any(word.startswith("-") for word in words):
        fail("name one or more run folders and no flags, such as: python analyze.py runs/none-seed0")
    if any(word.endswith(".csv") for word in words):
        fail("analyze.py reads run folders; for lab/study/runs.csv run: python -m lab.study.run --tables")
    runs = trained_runs(list(dict.fromkeys(map(Path, words))))  # each once
    if not runs:
        fail("there is no run with a step of training to analyze; make one with: python train.py")
    if len(runs) == 1:
        return analyze_run(runs[0])
    compare_runs(runs)


if __name__ == "__main__":
    main()
