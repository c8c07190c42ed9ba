"""Where the credit went: tables and pictures of one run, or of several runs compared. Runs no model.

    python analyze.py runs/none-seed0      one run: tables and pictures, also written to its analysis/
    python analyze.py runs/*               methods compared over seeds, also written to comparison/ beside the runs

Two measures say what a token receives:

    contribution = credit * log p            the measure of the original work: a value, not a gradient. As log p <= 0, a
                                             reinforced token has a negative contribution.
    gradient     = credit * ||onehot - p||   the norm of the gradient of credit * log p with respect to the logits (over
                                             the temperature), with the sign of the credit.

Differences from the original work:
1. In the tables of one run, intervals of mean sizes are clustered by puzzle, because its responses are compared with
   each other.
2. Tags and the end token are a type of their own, `structure`.
3. Notes under tables explain how to read them. Every figure in them is computed from the run.
"""
import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np

from plumbing.comparison import Group, Run, comparison_warnings, group_runs, labels, run_method, shared_settings
from plumbing.progress import fail, follow, one_sentence
from plumbing.report import (GREY, MIN_RESPONSES, PALETTE, Axes, Estimate, Table, clustered_mean, code_span, csv_rows,
                             draw_blocks, new_figure, pm, ratio, t_estimate, t_statistics, visible, write_csv)
from plumbing.runs import heldout, is_finished, read_config, read_credit, read_final, read_metrics, sampled_puzzles
from plumbing.tokenizer import Tokenizer
from tasks.text import ANSWER, END_ANSWER, END_THINK, ROLES, TAGS, format_reward

MEASURES = ("contribution", "gradient")
COLOURS = dict(zip(("reasoning", "filler", "structure"), PALETTE))
CONTROLS = ("random", "inverted", "shuffled", "share")  # not methods to use: credit from noise, turned, moved, left out


def is_control(label: str) -> bool:
    """Whether a method is there for comparison only."""
    return label.split()[0] in CONTROLS


def method_name(label: str) -> str:
    """What a method is called in a picture: GRPO and RLOO with their further settings, others by their label."""
    method, *settings = label.split()
    if method != "none":
        return f"{label} (control)" if is_control(label) else label
    rloo = "advantage=rloo"  # GRPO without the division by std(r), up to a factor
    return " ".join(["RLOO" if rloo in settings else "GRPO", *(s for s in settings if s != rloo)])


# --------------------------------------------------------------------------------------------------- reading


def read_log(run: Path, metrics: dict) -> dict[str, np.ndarray]:
    """The credit log of a run as flat columns (N,), one row per token, with the columns that the tables derive from it.

    ValueError where a step of metrics.csv is missing or damaged.
    """
    steps = read_credit(run, metrics)
    return with_measures({name: np.concatenate([step[name] for step in steps]) for name in steps[0]})


def with_measures(log: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns (N,) of a credit log, and those that follow from them."""
    log["id"] = np.cumsum(log["position"] == 0) - 1  # (N,) number of the response within the run
    begins = [np.diff(log[name], prepend=log[name][:1]) != 0 for name in ("step", "group")]  # (N,) each
    log["puzzle"] = np.cumsum(begins[0] | begins[1])  # (N,) number of the group within the run
    log["relative"] = log["position"] / np.bincount(log["id"])[log["id"]]  # (N,) in [0, 1)
    log["contribution"] = log["credit"] * log["logprob"]
    log["gradient"] = log["credit"] * log["logit_grad"]
    return log


# ---------------------------------------------------------------------------------------- tables of one run

CLUSTERED = "Mean absolute value, ± half of its 95% interval, clustered by puzzle."
SIZE_HEADER = [f"size of {measure}" for measure in MEASURES]
ROLE_HEADER = [f"{measure}, {role}" for measure in MEASURES for role in ROLES]


def mean_size(log: dict, selected: np.ndarray, measure: str) -> tuple[float, float]:
    """Mean absolute value of a measure over the selected tokens (N,) bool, and half of its interval."""
    return clustered_mean(np.abs(log[measure][selected]), log["puzzle"][selected])


def size_cells(log: dict, *selections: np.ndarray) -> list[str]:
    """The mean size of both measures over each selection of tokens."""
    return [pm(*mean_size(log, selected, measure)) for measure in MEASURES for selected in selections]


def role_cells(log: dict, selected: np.ndarray) -> list[str]:
    """The mean size of both measures for each type of token, in the order of ROLE_HEADER."""
    return size_cells(log, *(selected & (log["role"] == role) for role in range(len(ROLES))))


def average(values: np.ndarray, form: str = ".3f") -> str:
    """The mean of values as a cell, empty when there are none."""
    return format(values.mean(), form) if len(values) else ""


def average_cells(log: dict, selected: np.ndarray, *columns: str) -> list[str]:
    """The signed means of some columns over the selected tokens."""
    return [average(log[column][selected]) for column in columns]


def position_bins(log: dict, count: int) -> list[tuple[str, np.ndarray]]:
    """Name and tokens (N,) bool of each of `count` equal parts of a response."""
    part = (log["relative"] * count).astype(int)  # (N,)
    return [(f"{i * 100 // count}-{(i + 1) * 100 // count}%", part == i) for i in range(count)]


def table_basics(log: dict, metrics: dict) -> Table:
    """What was trained, and the result."""
    steps, success, error = heldout(metrics)
    rows = [["steps, responses, tokens", f"{int(metrics['step'][-1])}, {log['id'][-1] + 1:,}, {len(log['id']):,}"],
            ["held-out success, start", pm(success[0], 1.96 * error[0])],
            [f"held-out success, step {int(steps[-1])}", pm(success[-1], 1.96 * error[-1])]]
    for name in ("success", "format", "length", "entropy", "grad_norm", "zero_variance_groups"):
        trained = metrics[name][1:]  # row 0 is the model before training
        rows.append([f"{name}, first and last ten steps", f"{trained[:10].mean():.3f}, {trained[-10:].mean():.3f}"])
    rows.append(["tokens whose credit is 0", f"{(log['credit'] == 0).mean():.1%}"])
    return Table("The run", "± is half of a 95% interval over puzzles.", ["", "value"], rows)


def table_statistics(log: dict) -> Table:
    """The spread of both measures."""
    statistics = {"mean": np.mean, "standard deviation": np.std, "mean size": lambda x: np.abs(x).mean(),
                  "minimum": np.min, "maximum": np.max}
    rows = [[name] + [f"{compute(log[measure]):.3f}" for measure in MEASURES] for name, compute in statistics.items()]
    note = "Over all tokens. The gradient is at most sqrt(2) times the credit; the contribution has no bound."
    return Table("Contribution statistics", note, ["", *MEASURES], rows)


def table_t(log: dict) -> Table:
    """How consistent the sign of both measures is at each position."""
    t = {measure: np.abs(t_statistics(log[measure], log["position"])) for measure in MEASURES}
    rows = [["share with abs(t) > 3"] + [average(t[m] > 3, ".1%") for m in MEASURES],
            ["share with abs(t) < 1.5"] + [average(t[m] < 1.5, ".1%") for m in MEASURES],
            ["mean abs(t)"] + [average(t[m], ".2f") for m in MEASURES],
            ["positions"] + [str(len(t[m])) for m in MEASURES]]
    note = (f"t of the mean at each position, counted from the start of a response, over all responses that reach it "
            f"(at least {MIN_RESPONSES}); responses are treated as independent.")
    return Table("t-statistics", note, ["", *MEASURES], rows)


def table_positions(log: dict) -> Table:
    """From the first to the last tenth of a response."""
    rows = [[name, f"{selected.sum():,}", *size_cells(log, selected),
             *average_cells(log, selected, "logprob", "entropy")] for name, selected in position_bins(log, 10)]
    return Table("Position in the response", CLUSTERED, ["position", "tokens", *SIZE_HEADER, "log p", "entropy"], rows)


def table_signs(log: dict) -> Table:
    """Responses with a positive, a negative and a zero advantage."""
    rows = []
    for name, sign in {"positive": 1, "negative": -1, "zero": 0}.items():
        selected = np.sign(log["advantage"]) == sign
        rows.append([name, f"{len(np.unique(log['id'][selected])):,}", f"{selected.sum():,}",
                     *average_cells(log, selected, *MEASURES), *size_cells(log, selected)])
    note = "Signed means, then mean sizes. A reinforced token has a negative contribution and a positive gradient."
    return Table("Sign of the advantage", note, ["advantage", "responses", "tokens", *MEASURES, *SIZE_HEADER], rows)


def table_roles(log: dict) -> Table:
    """Filler, reasoning and structure."""
    rows, sizes = [], []
    for i, role in enumerate(ROLES):
        selected = log["role"] == i
        rows.append([role, f"{selected.sum():,}", f"{selected.mean():.1%}", *size_cells(log, selected),
                     *average_cells(log, selected, *MEASURES, "logprob", "entropy")])
        sizes.append([mean_size(log, selected, measure)[0] for measure in MEASURES])
    filler, reasoning = sizes[:2]  # as ROLES begins
    by_contribution, by_gradient = ratio(filler[0], reasoning[0]), ratio(filler[1], reasoning[1])
    note = "Mean size ± half of its 95% interval, clustered by puzzle, then signed means."
    if np.isfinite([by_contribution, by_gradient]).all():
        note += f" Filler / reasoning: {by_contribution:.2f} by contribution, {by_gradient:.2f} by gradient."
    return Table("Token types", note, ["type", "tokens", "share", *SIZE_HEADER, *MEASURES, "log p", "entropy"], rows)


def table_roles_by_position(log: dict) -> Table:
    """Types of token at the same position in the response."""
    rows = [[name, *role_cells(log, selected)] for name, selected in position_bins(log, 5)]
    return Table("Token types by position", CLUSTERED, ["position", *ROLE_HEADER], rows)


def table_tokens(log: dict, tokenizer: Tokenizer, count: int = 8) -> Table:
    """The most frequent tokens of each type."""
    rows = []
    for i, role in enumerate(ROLES):
        tokens, counts = np.unique(log["token"][log["role"] == i], return_counts=True)
        for token in tokens[np.argsort(-counts, kind="stable")][:count]:
            selected = (log["role"] == i) & (log["token"] == token)
            rows.append([role, code_span(name_of(token, tokenizer)), f"{selected.sum():,}", *size_cells(log, selected),
                         *average_cells(log, selected, "logprob", "entropy")])
    header = ["type", "token", "count", *SIZE_HEADER, "log p", "entropy"]
    return Table("Top tokens of each type", f"The {count} most frequent. {CLUSTERED}", header, rows)


def name_of(token: int, tokenizer: Tokenizer) -> str:
    """A token as Python would write it: as text, or as bytes where it is only a part of a character."""
    letters = tokenizer.bytes[token] or tokenizer.library.id_to_token(int(token)).encode()  # an end token has no bytes
    text = letters.decode("utf-8", "replace")
    return repr(letters if "\ufffd" in text else text)


def training_parts(log: dict) -> list[tuple[str, np.ndarray]]:
    """Steps and tokens (N,) bool of each of up to ten parts of the run."""
    first, last = log["step"].min(), log["step"].max()
    part = ((log["step"] - first) / (last - first + 1) * 10).astype(int)  # (N,)
    steps = [(log["step"][part == i], part == i) for i in np.unique(part)]
    return [(f"{those.min()}-{those.max()}", selected) for those, selected in steps]


def table_training(log: dict) -> Table:
    """The size of credit, and both measures by type of token, in up to ten parts of the run."""
    rows = [[steps, average(np.abs(log["credit"][selected])), *role_cells(log, selected)]
            for steps, selected in training_parts(log)]
    return Table("Credit over training", CLUSTERED, ["steps", "size of credit", *ROLE_HEADER], rows)


LAYOUT = {  # header of a column: whether a response has that part of the layout, as format_reward asks
    f"`{END_THINK}`": lambda text: END_THINK in text,
    f"`{END_THINK}↵{ANSWER}`": lambda text: f"{END_THINK}\n{ANSWER}" in text,
    f"`{ANSWER}` closed": lambda text: END_ANSWER in text.partition(ANSWER)[2],
    f"one `{ANSWER}`": lambda text: text.count(ANSWER) == 1,
    f"`{END_ANSWER}` last": lambda text: text.endswith(END_ANSWER),
    "all of it": lambda text: format_reward(text) == 1}


def table_layout(log: dict, tokenizer: Tokenizer) -> list[Table]:
    """Which parts of the layout the responses have, in up to ten parts of the run; no table where they have no tag."""
    responses = np.split(log["token"], np.flatnonzero(np.diff(log["id"])) + 1)
    texts = [b"".join(tokenizer.bytes[token] for token in tokens).decode("utf-8", "replace") for tokens in responses]
    if not any(tag in text for text in texts for tag in TAGS):
        return []
    rows = []
    for steps, selected in training_parts(log):
        in_part = [texts[i] for i in np.unique(log["id"][selected])]
        others = Counter(tag for text in in_part for tag in {*re.findall(r"</[\w.:-]+>", text)}.difference(TAGS))
        wrong = ", ".join(f"{code_span(tag)} {count / len(in_part):.1%}" for tag, count in others.most_common(2))
        shares = (f"{sum(map(has, in_part)) / len(in_part):.1%}" for has in LAYOUT.values())
        rows.append([steps, f"{len(in_part):,}", *shares, wrong])
    note = "Shares of responses. All of it: with no further tag. Others: the two most frequent other closing tags."
    return [Table("Layout over training", note, ["steps", "responses", *LAYOUT, "others"], rows)]


# -------------------------------------------------------------------------------------- pictures of one run


def draw_learning(metrics: dict, method: str, file: Path) -> None:
    """Success and response length over the steps."""
    figure, (left, right) = new_figure(2, 3.4, sharex=True)
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
    right.set(xlabel="step", ylabel="tokens in a response", ylim=(0, None))
    figure.savefig(file)


FEW = 100  # tokens: a part with fewer has no mean in the picture


def draw_credit(log: dict, file: Path) -> None:
    """Both measures by type of token, in five parts of the response."""
    figure, axes = new_figure(2, 3.6)
    formulas = {"contribution": "|credit · log p|", "gradient": "|credit| · ‖onehot − p‖"}
    for axis, (measure, formula) in zip(axes, formulas.items()):
        for role in range(len(ROLES)):
            draw_role(axis, log, measure, role)
        axis.set(xlabel="position in the response", ylabel=f"mean {formula}", ylim=(0, None), xlim=(0, 1),
                 title=f"{measure.capitalize()} by position")
        axis.xaxis.set_major_formatter("{x:.0%}")
    axes[0].plot([], [], "x", color=GREY, label=f"fewer than {FEW} tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(file)


def draw_role(axis: Axes, log: dict, measure: str, role: int) -> None:
    """Mean size of a measure for one type of token in each of five parts; a cross where there are few tokens."""
    selections = [selected & (log["role"] == role) for _, selected in position_bins(log, 5)]
    few = np.array([selected.sum() < FEW for selected in selections])  # (5,)
    mean, half = np.array([mean_size(log, selected, measure) for selected in selections]).T  # (5,), (5,)
    x = np.arange(0.1, 1, 0.2) + 0.02 * (role - 1)  # shifted a little, so that intervals do not cover each other
    colour = COLOURS[ROLES[role]]
    axis.errorbar(x, np.where(few, np.nan, mean), half, color=colour, marker="os^"[role], capsize=3,
                  label=ROLES[role])
    axis.plot(x[few], np.full(few.sum(), 0.04), "x", color=colour, transform=axis.get_xaxis_transform())


def choose_responses(log: dict) -> list[np.ndarray]:
    """Rows of up to four responses: of the first and last step, one reinforced and one discouraged, to one puzzle. A
    puzzle that is solved by some and not by others comes first."""
    chosen = []
    for step in sorted({log["step"].min(), log["step"].max()}):  # a run may have one step
        rows = np.flatnonzero(log["step"] == step)
        responses = np.split(rows, np.flatnonzero(np.diff(log["id"][rows])) + 1)
        groups = [[r for r in responses if log["group"][r[0]] == group] for group in np.unique(log["group"][rows])]
        groups.sort(key=lambda group: np.ptp([log["reward"][r[0]] for r in group]) < 0.5)  # False first: answers differ
        for group in groups:
            better, worse = ([r for r in group if sign * log["advantage"][r[0]] > 0] for sign in (1, -1))
            if better and worse:
                chosen += [min(better, key=len), min(worse, key=len)]  # short ones fit the picture
                break
    return chosen


def draw_run_tokens(log: dict, tokenizer: Tokenizer, method: str, puzzles: dict, file: Path) -> None:
    """Each response twice: coloured by credit (a single number where all tokens have the same), and by gradient.

    puzzles: what is known of the puzzle of a (step, group), as text.
    """
    blocks = []  # heading, its weight, its greatest number of lines, texts, values
    for i, rows in enumerate(choose_responses(log)):
        step, group, reward = (log[name][rows[0]] for name in ("step", "group", "reward"))
        credit = log["credit"][rows]  # (L,)
        texts = [tokenizer.bytes[token].decode("utf-8", "replace") for token in log["token"][rows]]
        shown = ([f" {credit[0]:+.3g} on every token "], credit[:1]) if np.ptp(credit) < 1e-6 else (texts, credit)
        puzzle = f". Puzzle: {puzzles[step, group]}" if (step, group) in puzzles else ""
        heading = f"Step {step}, reward {reward:.2f}, credit by {method}{puzzle}"
        blocks.append((heading, "bold", 1 if i % 2 else 6, *shown))  # lines at most: 1 if it was just shown
        blocks.append(("Gradient in logit space, credit · ‖onehot − p‖", "normal", 1, texts, log["gradient"][rows]))
    empty = ("No puzzle of the first or last step has both a reinforced and a discouraged response", "bold", 1)
    draw_blocks(blocks or [(*empty, [" "], np.zeros(1))], "below 0: made less likely     above 0: made more likely     "
                "(↵ line break, ⇥ tab, ■ end token, □ other letter)", file)


def analyze_run(run: Path) -> None:
    """Print the tables of a run; write them and the pictures to its analysis/."""
    method, metrics = visible(method_name(run_method(read_config(run)))), read_metrics(run)
    tokenizer = Tokenizer(run / "checkpoint")
    log, puzzles = read_log(run, metrics), sampled_puzzles(run)
    if not 0 <= log["token"].min() <= log["token"].max() < tokenizer.size:
        raise ValueError(f"{run / 'credit'} has tokens that {run / 'checkpoint' / 'tokenizer.json'} lacks")
    tables = [table_basics(log, metrics), table_statistics(log), table_t(log), table_positions(log), table_signs(log),
              table_roles(log), table_roles_by_position(log), table_tokens(log, tokenizer), table_training(log),
              *table_layout(log, tokenizer)]
    out = run / "analysis"
    out.mkdir(exist_ok=True)
    text = f"# {run.name}\n\n" + "\n".join(map(str, tables))
    draw_learning(metrics, method, out / "learning.png")
    draw_credit(log, out / "credit.png")
    draw_run_tokens(log, tokenizer, method, puzzles, out / "tokens.png")
    (out / "tables.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {out / 'tables.md'}, learning.png, credit.png and tokens.png beside it")


# ---------------------------------------------------------------------------------------------- a comparison

LEARNING = ("start", "end", "climb", "area", "pass@16")
COMPARED = ("end", "area", "pass@16")
CREDIT = (*(f"{measure}, {part}" for measure in MEASURES for part in ("filler", "reasoning", "filler / reasoning")),
          "effective sample size", "varies within", "gradient norm", "its spread", "seconds a step")


def summarize(run: Path) -> dict[str, float | dict]:
    """The figures of one run that a comparison averages over seeds, and `curve`: held-out success by step."""
    metrics = read_metrics(run)
    log = read_log(run, metrics)
    steps, success, _ = heldout(metrics)
    final, curve = read_final(run), dict(zip(steps, success))
    if curve.get(final.get("step"), final.get("heldout_success")) != final.get("heldout_success"):
        raise ValueError(f"{run / 'final.json'} is not of this run: metrics.csv has another success at that step")
    grad_norm, seconds = (metrics[name][1:] for name in ("grad_norm", "seconds"))  # row 0 is the start model
    figures = {"steps": metrics["step"][-1], "curve": curve, "start": success[0], "end": success[-1],
               "climb": success[-1] - success[0], "area": ratio(np.trapezoid(success, steps), np.ptp(steps)),
               "pass@16": final.get("pass@16", float("nan"))}
    count = np.bincount(log["role"], minlength=3)  # (3,)
    for measure in MEASURES:
        total = np.bincount(log["role"], np.abs(log[measure]), 3)  # (3,)
        figures |= {f"{measure}, {role}": ratio(total[i], total.sum()) for i, role in enumerate(ROLES[:2])}
        figures[f"{measure}, filler / reasoning"] = ratio(total[0] * count[1], total[1] * count[0])  # of mean sizes
    tokens = {name: np.nansum(metrics[name]) for name in ("tokens_sampled", "tokens_read", "tokens_updated")}
    return figures | tokens | spread_within(log["credit"], log["id"]) | {
        "gradient norm": grad_norm.mean(), "its spread": grad_norm.std(), "seconds a step": np.median(seconds)}


def spread_within(credit: np.ndarray, response: np.ndarray) -> dict[str, float]:
    """How unequally credit (N,) is spread over the tokens of each response (N,).

    effective sample size: (sum w)^2 / (L sum w^2) with w = abs(credit), averaged over the responses with any credit:
    1 where all L tokens receive the same, 1 / L where one receives all.
    varies within: sum (credit - mean of its response)^2 / sum credit^2.
    """
    length = np.bincount(response)
    size, square, signed = (np.bincount(response, x) for x in (np.abs(credit), credit**2.0, credit))
    credited = square > 0
    effective = ratio((size[credited] ** 2 / (length[credited] * square[credited])).sum(), credited.sum())
    within = square.sum() - (signed**2 / np.maximum(length, 1)).sum()  # sum (c - mean)^2 = sum c^2 - (sum c)^2 / L
    return {"effective sample size": effective, "varies within": ratio(within, square.sum())}


def load_runs(folders: list[Path]) -> list[Run]:
    """Read run folders for a comparison."""
    configs = [read_config(folder) for folder in folders]
    return [Run(name=str(folder), label=label, setting=json.dumps(shared_settings(config)),
                is_baseline=run_method(config) == "none", seed=config["settings"]["seed"],
                figures=summarize(folder), inputs=config["inputs"], finished=is_finished(folder))
            for folder, config, label in follow("reading runs", [*zip(folders, configs, labels(configs))])]


def record(group: Group) -> dict[str, Estimate]:
    """All figures of a method, by their column in table.csv."""
    out = {"seeds": Estimate(len(group.rows)), "steps": Estimate(group.values("steps").max())}
    out |= {figure: t_estimate(group.values(figure)) for figure in (*LEARNING, *CREDIT)}
    out["start"] = Estimate(group.values("start").mean())  # the same for all seeds, so there is no spread to show
    out["least climb"] = Estimate(group.values("climb").min())
    if group.baseline:  # Seeds are not paired: two methods' results on the same puzzles are hardly correlated.
        out |= {f"{name} - GRPO": t_estimate(group.values(name), group.baseline.values(name)) for name in COMPARED}
    return out


def comparison_tables(records: dict[str, dict[str, Estimate]], warning: str = "") -> list[Table]:
    """What each method learned, its difference to the baseline, and where its credit went; a row per method."""
    single = min(r["seeds"].value for r in records.values()) < 2
    warnings = f"**{warning}** " * bool(warning) + "**With one seed, nothing can be concluded.** " * single
    means = "Mean over seeds ± half of its 95% interval (Student's t), for these held-out puzzles."
    tables = [
        ("Learning", f"{means} Held-out success at start and end; area: the mean of its curve.",
         ("seeds", "steps", *LEARNING, "least climb")),
        ("Against GRPO", "Difference of the means to GRPO (`none` with the same settings) ± half of its 95% interval "
         "(Welch's t).", ("seeds", *(f"{name} - GRPO" for name in COMPARED))),
        ("Gradient and credit", f"{means} Shares of the summed sizes of all tokens; filler / reasoning is the ratio of "
         "mean sizes. Effective sample size: 1 where all tokens of a response receive the same. Varies within: the "
         "share of squared credit that is not its response's mean.", ("seeds", *CREDIT))]
    return [Table(title, warnings + note, ["method", *names], [
        [label, *(figure_cell(name, r[name]) if name in r else "" for name in names)] for label, r in records.items()])
        for title, note, names in tables]


def figure_cell(name: str, e: Estimate) -> str:
    """A figure ± half of its interval, counts without decimals."""
    return pm(e.value, e.high - e.value, 0 if name in ("seeds", "steps") else 3)


def draw_curves(groups: list[Group], file: Path) -> None:
    """The learning curves of methods: the mean over seeds and its 95% interval; each seed where there is one method."""
    names = [textwrap.fill(method_name(group.label), 34) for group in groups]  # longer ones leave curves no room
    figure, (axis,) = new_figure(1, 3.6 + 0.12 * sum(1 + name.count("\n") for name in names))
    for i, group in enumerate(groups):
        curves, colour = [row["curve"] for row in group.rows.values()], PALETTE[i % len(PALETTE)]
        steps = sorted(set.intersection(*map(set, curves)))
        estimates = [t_estimate([curve[step] for curve in curves]) for step in steps]
        mean, low, high = np.array([(e.value, e.low, e.high) for e in estimates]).T  # (steps,) each
        style = ("-", "--", ":", "-.")[i // len(PALETTE) % 4]
        axis.plot(steps, mean, style, color=colour, marker="os^D"[i % 4],
                  label=f"{names[i]}, seeds: {len(curves)}")
        axis.fill_between(steps, low, high, color=colour, alpha=0.25 if len(groups) < 4 else 0.1, lw=0)
        for curve in curves if len(groups) == 1 else []:
            axis.plot(steps, [curve[step] for step in steps], color=colour, lw=0.6, alpha=0.6)
    title = method_name(groups[0].label) if len(groups) == 1 else "Held-out success"
    axis.set(xlabel="step", ylabel="held-out puzzles solved", ylim=(0, None), title=title)
    figure.legend(title="mean, 95% interval" + "; thin: each seed" * (len(groups) == 1), loc="outside right upper")
    figure.savefig(file)


# ------------------------------------------------------------------------------------------------ command line


def compare_runs(folders: list[Path]) -> None:
    """Print the comparison of runs; write it and a picture of the learning curves to comparison/ beside them."""
    runs = load_runs(folders)
    groups, out = group_runs(runs), folders[0].parent / "comparison"
    warning = " ".join(comparison_warnings(runs))
    records = {group.label: record(group) for group in groups}
    text = "# Comparison\n\n" + "\n".join(map(str, comparison_tables(records, warning)))
    out.mkdir(exist_ok=True)
    draw_curves(groups, out / "learning.png")
    write_csv(csv_rows(records), out / "table.csv")
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {out / 'table.md'}, table.csv and learning.png")
    if warning:
        print(f"warning: {warning}")


def analyze(paths: list[Path]) -> None:
    """Analyze a single run, compare several."""
    if any(path.suffix == ".csv" for path in paths):
        raise ValueError("analyze.py reads run folders; for lab/study/runs.csv run: python -m lab.study.run --tables")
    runs = [path for path in paths if (path / "metrics.csv").exists() or (path / "config.json").exists()]
    for path in paths:  # runs/* matches our own output, too
        if path not in runs and len(paths) > 1 and path.name != "comparison":
            print(f"left out: {path} is not a run folder")
    runs = runs or paths
    trained = [run for run in runs if len(read_metrics(run)["step"]) > 1]
    for run in runs:
        if run not in trained:
            print(f"left out: {run} has no step of training; what was measured is in its metrics.csv and final.json")
    if not trained:
        raise ValueError("there is no run with a step of training to analyze; make one with: python train.py")
    if len(trained) == 1:
        return analyze_run(trained[0])
    compare_runs(trained)


@one_sentence()
def main() -> None:
    """Read the command line; report what can't be read in one sentence."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        return print(__doc__)
    if not words or any(word.startswith("-") for word in words):
        fail("name one or more run folders and no flags, such as: python analyze.py runs/none-seed0")
    analyze(list(dict.fromkeys(map(Path, words))))


if __name__ == "__main__":
    main()
