"""Where the credit went: tables and pictures of one run, or runs against each other. Reads files only.

    python analyze.py runs/none-seed0      tables and pictures of a run, also written to its analysis/
    python analyze.py runs/*               methods against each other over seeds, written to comparison/ beside the runs
    python analyze.py results/runs.csv     the study: what experiments/study.py gathered, written beside the file

Two measures of what a token gets stand side by side in every table:

    contribution = credit * log p            what the original work tabulated: a value, not a gradient. log p <= 0, so a
                                             reinforced token has a negative contribution.
    gradient     = credit * ||onehot - p||   what the token does to the logits: the norm of the gradient of
                                             credit * log p in logit space, with the sign of the credit.

How it differs from the original: errors are clustered by response, since the tokens of one share its advantage; tags
are a type of their own; no sentence here is written before the numbers are known.
"""
import csv
import itertools
import json
import re
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

import matplotlib
import numpy as np

from countdown_task import ROLES, Codec

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402, after the choice of a backend that needs no screen
from matplotlib.ticker import FixedLocator  # noqa: E402

COLOURS = {"filler": "#E69F00", "reasoning": "#0072B2", "structure": "#009E73"}  # Okabe and Ito: for colour-blind eyes
MARKERS = {"filler": "o", "reasoning": "s", "structure": "^"}
MEASURES = ("contribution", "gradient")
# Student's t at 97.5 % for 1, 2, ... degrees of freedom
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
CLUSTERED = "Mean size, ± one standard error clustered by response."
SIZE_HEADER = [f"size of {measure}" for measure in MEASURES]
ROLE_HEADER = [f"{measure}, {role}" for measure in MEASURES for role in ROLES]
NO_DIFFERENCE = {"mitigation", "normalize", "seed", "out", "steps", "eval_every", "sample_every", "checkpoint_every",
                 "state_every", "micro_batch"}  # settings that belong to the method, or change no result
LEARNING = ("start", "end", "climb", "area", "pass@16")
AGAINST = ("seeds", "end - none", "end - none, bootstrap", "end, P(better), bootstrap", "area - none",
           "area - none, bootstrap", "area, P(better), bootstrap", "pass@16 - none", "steps to none's end",
           "seeds that get there")
CREDIT = (*(f"{m}, {x}" for m in MEASURES for x in ("filler", "reasoning", "filler / reasoning")),
          "effective sample size", "varies within", "gradient norm", "its spread", "seconds a step")
COUNTS = ("seeds", "steps", "steps to none's end", "seeds that get there")
JUDGED = {"end": "Success at the end", "area": "Mean success while training"}
DIFFERENCES = ("end - none", "area - none", "pass@16 - none")
LEARNED = DIFFERENCES[:2]
VARIED = (*LEARNED, "end - default", "area - default")
ABOUT = ("run", "version", "part", "level", "method", "setting", "seed", "command")  # columns of the study's rows
SCORES = ("truth-scores.md", "gradients.md")  # of the start model, by experiments/ground_truth.py and gradients.py
COSTS = "benchmark.csv"  # how long a step takes, by tests/benchmark.py
TYPES = ("contribution, filler / reasoning", "gradient, filler / reasoning", "effective sample size", "varies within")
SHAPE = ("gradient norm", "effective sample size", "varies within")
FRESH = (*JUDGED, "pass@16", *DIFFERENCES)
LOWEST = -25  # points: the forest shows a lower mean as an arrow there
MIN_TOKENS = 100  # a point of a picture needs that many
MIN_RESPONSES = 30  # a position's t-statistic needs that many responses to reach it


# --------------------------------------------------------------------------------------------------- reading


def read_log(run: Path) -> dict[str, np.ndarray]:
    """All credit logs of a run as flat columns (N,), one row a token, with what the tables need added."""
    files = sorted((run / "credit").glob("step-*.npz"))
    if not files:
        raise ValueError(f"{run} has no credit log: is it a run folder, with at least one step?")
    try:
        parts = [dict(np.load(file)) for file in files]
    except Exception as error:  # a cut-off zip shows itself in many ways
        raise ValueError(f"a file of {run / 'credit'} can't be read: {error}") from None
    log = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    log["id"] = np.cumsum(log["position"] == 0) - 1  # (N,) which response of the run
    log["relative"] = log["position"] / np.bincount(log["id"])[log["id"]]  # (N,) in [0, 1)
    log["contribution"] = log["credit"] * log["logprob"]
    log["gradient"] = log["credit"] * log["logit_grad"]
    return log


def read_metrics(run: Path) -> dict[str, np.ndarray]:
    """metrics.csv as columns, NaN where nothing was measured."""
    if not (run / "metrics.csv").is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no metrics.csv")
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{run / 'metrics.csv'} has no rows: the run was stopped before its first measurement")
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}


def heldout(metrics: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps at which held-out success was measured, the success, and its standard error."""
    measured = ~np.isnan(metrics["heldout_success"])
    return tuple(metrics[name][measured] for name in ("step", "heldout_success", "heldout_stderr"))


# ------------------------------------------------------------------------------------------------ statistics


def clustered_mean(values: np.ndarray, cluster: np.ndarray) -> tuple[float, float]:
    """Mean of values (N,) and its standard error when the values of one cluster (N,) move together.

    With s_c the sum and n_c the size of each of C clusters: mean = sum s / sum n,
    error = sqrt(C / (C - 1) * sum (s_c - mean n_c)^2) / sum n; NaN for a single cluster.
    """
    if not len(values):
        return float("nan"), float("nan")
    sums, sizes = np.bincount(cluster, values), np.bincount(cluster)
    mean, count = sums.sum() / sizes.sum(), (sizes > 0).sum()
    spread = ((sums - mean * sizes) ** 2).sum() * count / (count - 1) if count > 1 else float("nan")
    return float(mean), float(np.sqrt(spread) / sizes.sum())


def t_statistics(values: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Mean / standard error of values (N,) at each position across responses, where enough reach that position."""
    n = np.bincount(position)
    reached = n >= MIN_RESPONSES
    mean = np.bincount(position, values)[reached] / n[reached]
    variance = (np.bincount(position, values**2.0)[reached] / n[reached] - mean**2) * n[reached] / (n[reached] - 1)
    return mean / np.sqrt(np.maximum(variance, 1e-30) / n[reached])


def ratio(a: float, b: float) -> float:
    """a / b; NaN where no credit leaves nothing to divide by."""
    return a / b if b else float("nan")


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean of independent values, such as seeds, and the half-width of its 95% interval (Student's t)."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return float(values.mean()), float("nan")
    t = T975[min(len(values) - 2, len(T975) - 1)]  # a little too wide for more seeds than the table has
    return float(values.mean()), float(t * values.std(ddof=1) / np.sqrt(len(values)))


def bins(values: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` equal bins of [0, 1) each value is in."""
    return np.minimum((values * count).astype(int), count - 1)


# ---------------------------------------------------------------------------------------------------- tables


@dataclass
class Table:
    """A Markdown table with a sentence on how to read it."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        columns = [list(column) for column in zip(self.header, *self.rows)]
        for i, column in enumerate(columns):
            width = max(map(len, column))
            column[:] = [f" {cell:<{width}} " if i == 0 else f" {cell:>{width}} " for cell in column]
            column.insert(1, "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":")
        lines = "\n".join(f"|{'|'.join(row)}|" for row in zip(*columns))
        return f"## {self.title}\n{self.note}\n\n{lines}\n"


class Estimate(NamedTuple):
    """A figure and its 95% interval; NaN where there is none, as with a single seed."""

    value: float
    low: float = float("nan")
    high: float = float("nan")


def pm(mean: float, error: float, digits: int = 3) -> str:
    """mean ± error; without an error where there is none, empty where there is no mean."""
    text = f"{mean:.{digits}f}" if np.isfinite(mean) else ""
    return f"{text} ± {error:.{digits}f}" if np.isfinite(error) else text


def cell(e: Estimate, digits: int = 2) -> str:
    """An estimate and its interval, empty where there is none."""
    ends = f" ({e.low:.{digits}f} to {e.high:.{digits}f})" if np.isfinite(e.low) else ""
    return f"{e.value:.{digits}f}{ends}" if np.isfinite(e.value) else ""


def size(log: dict, where: np.ndarray, measure: str) -> tuple[float, float]:
    """Mean size of a measure over some tokens, and its standard error clustered by response."""
    return clustered_mean(np.abs(log[measure][where]), log["id"][where])


def sizes(log: dict, where: np.ndarray) -> list[str]:
    """The mean size of both measures over some tokens, as cells."""
    return [pm(*size(log, where, measure)) for measure in MEASURES]


def role_sizes(log: dict, where: np.ndarray) -> list[str]:
    """The mean size of both measures for each type of token, as cells under ROLE_HEADER."""
    return [pm(*size(log, where & (log["role"] == r), measure)) for measure in MEASURES for r in range(len(ROLES))]


def position_bins(log: dict, count: int) -> list[tuple[str, np.ndarray]]:
    """Name and tokens of each of `count` equal parts of a response."""
    where = bins(log["relative"], count)
    return [(f"{i * 100 // count}-{(i + 1) * 100 // count}%", where == i) for i in range(count)]


def average(values: np.ndarray, form: str = ".3f") -> str:
    """Plain mean of values as a cell, empty when there are none."""
    return format(values.mean(), form) if len(values) else ""


def averages(log: dict, where: np.ndarray, *names: str) -> list[str]:
    """Plain means of columns over some tokens, as cells."""
    return [average(log[name][where]) for name in names]


def table_basics(log: dict, metrics: dict) -> Table:
    """What was trained and what came of it."""
    steps, success, error = heldout(metrics)
    trained = {k: v[1:] for k, v in metrics.items()}
    rows = [["steps, responses, tokens", f"{int(metrics['step'][-1])}, {log['id'][-1] + 1:,}, {len(log['id']):,}"],
            ["held-out success, start", pm(success[0], error[0])],
            [f"held-out success, step {int(steps[-1])}", pm(success[-1], error[-1])]]
    for name in ("success", "format", "length", "entropy", "grad_norm", "zero_variance_groups"):
        first, last = trained[name][:10].mean(), trained[name][-10:].mean()
        rows.append([f"{name}, first and last ten steps", f"{first:.3f}, {last:.3f}"])
    rows.append(["tokens whose credit is 0", f"{(log['credit'] == 0).mean():.1%}"])
    return Table("The run", "± is one standard error over puzzles.", ["", "value"], rows)


def table_statistics(log: dict) -> Table:
    """The spread of both measures."""
    stats = {"mean": np.mean, "standard deviation": np.std, "mean size": lambda x: np.abs(x).mean(),
             "minimum": np.min, "maximum": np.max}
    rows = [[name] + [f"{f(log[m]):.3f}" for m in MEASURES] for name, f in stats.items()]
    note = "Over all tokens. The gradient is at most sqrt(2) times the credit; nothing bounds the contribution."
    return Table("Contribution statistics", note, ["", *MEASURES], rows)


def table_t(log: dict) -> Table:
    """How consistent the sign is at each position."""
    t = {m: np.abs(t_statistics(log[m], log["position"])) for m in MEASURES}
    rows = [["share with abs(t) > 3"] + [average(t[m] > 3, ".1%") for m in MEASURES],
            ["share with abs(t) < 1.5"] + [average(t[m] < 1.5, ".1%") for m in MEASURES],
            ["mean abs(t)"] + [average(t[m], ".2f") for m in MEASURES],
            ["positions"] + [str(len(t[m])) for m in MEASURES]]
    note = (f"Of the mean at each absolute position, across all responses of the run that reach it (at least "
            f"{MIN_RESPONSES}), taken as independent.")
    return Table("t-statistics", note, ["", *MEASURES], rows)


def table_positions(log: dict) -> Table:
    """From the first to the last tenth of a response."""
    rows = [[name, f"{where.sum():,}", *sizes(log, where), *averages(log, where, "logprob", "entropy")]
            for name, where in position_bins(log, 10)]
    return Table("Position in the response", CLUSTERED, ["position", "tokens", *MEASURES, "log p", "entropy"], rows)


def table_signs(log: dict) -> Table:
    """Reinforced against discouraged responses."""
    rows = []
    for name, sign in {"positive": 1, "negative": -1, "zero": 0}.items():
        where = np.sign(log["advantage"]) == sign
        responses = len(np.unique(log["id"][where]))
        rows.append([name, f"{responses:,}", f"{where.sum():,}", *averages(log, where, *MEASURES), *sizes(log, where)])
    note = "Signed means, then mean sizes. A reinforced token has a negative contribution and a positive gradient."
    return Table("Sign of the advantage", note, ["advantage", "responses", "tokens", *MEASURES, *SIZE_HEADER], rows)


def table_roles(log: dict) -> Table:
    """Filler, reasoning, structure."""
    rows = [[role, f"{(log['role'] == i).sum():,}", f"{(log['role'] == i).mean():.1%}", *sizes(log, log["role"] == i),
             *averages(log, log["role"] == i, *MEASURES, "logprob", "entropy")] for i, role in enumerate(ROLES)]
    filler, reasoning = ([size(log, log["role"] == i, m)[0] for m in MEASURES] for i in (0, 1))
    note = (f"Mean size ± one standard error clustered by response, then signed means. Filler / reasoning: "
            f"{ratio(filler[0], reasoning[0]):.2f} by contribution, {ratio(filler[1], reasoning[1]):.2f} by gradient.")
    return Table("Token types", note, ["type", "tokens", "share", *SIZE_HEADER, *MEASURES, "log p", "entropy"], rows)


def table_roles_by_position(log: dict) -> Table:
    """Types again, with position held fixed."""
    rows = [[name, *role_sizes(log, where)] for name, where in position_bins(log, 5)]
    return Table("Token types by position", CLUSTERED, ["position", *ROLE_HEADER], rows)


def table_tokens(log: dict, codec: Codec, count: int = 8) -> Table:
    """The most frequent tokens of each type."""
    rows = []
    for i, role in enumerate(ROLES):
        tokens, counts = np.unique(log["token"][log["role"] == i], return_counts=True)
        for token in tokens[np.argsort(-counts, kind="stable")][:count]:
            where = (log["role"] == i) & (log["token"] == token)
            text = codec.bytes[token].decode("utf-8", "replace") or codec.tokenizer.id_to_token(int(token))
            rows.append([role, f"`{text!r}`".replace("|", "\\|"), f"{where.sum():,}", *sizes(log, where),
                         *averages(log, where, "logprob", "entropy")])
    header = ["type", "token", "count", *MEASURES, "log p", "entropy"]
    return Table("Top tokens of each type", "The most frequent ones. " + CLUSTERED, header, rows)


def table_training(log: dict) -> Table:
    """How it changes while the model learns, in up to ten parts of the run."""
    part, rows = bins(training_time(log), 10), []
    for i in np.unique(part):
        steps, credit = log["step"][part == i], np.abs(log["credit"][part == i])
        rows.append([f"{steps.min()}-{steps.max()}", average(credit), *role_sizes(log, part == i)])
    return Table("Credit over training", CLUSTERED, ["steps", "size of credit", *ROLE_HEADER], rows)


def training_time(log: dict) -> np.ndarray:
    """When in the run each token was sampled (N,), in [0, 1)."""
    return (log["step"] - log["step"].min()) / (log["step"].max() - log["step"].min() + 1)


# -------------------------------------------------------------------------------------------------- pictures


def new_figure(columns: int, rows: int = 1, width: float = 5.6, height: float = 0.0,
               sharey: bool = False) -> tuple[plt.Figure, np.ndarray]:
    """A figure with a grid of axes, each of that width and height in inches."""
    size = width * columns, (height or 0.68 * width) * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharey=sharey)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def draw_learning(metrics: dict, title: str, file: Path) -> None:
    """Success and length over the steps."""
    figure, ((left, right),) = new_figure(2)
    steps, success, error = heldout(metrics)
    left.plot(metrics["step"], metrics["success"], color="0.65", lw=1, label="training rollouts")
    left.errorbar(steps, success, 1.96 * error, color=COLOURS["reasoning"], marker="o", capsize=3,
                  label="held-out puzzles, 95% interval")
    left.set(xlabel="step", ylabel="success rate", title=f"Puzzles solved, {title}", ylim=(0, 1))
    left.legend(frameon=False)
    right.plot(metrics["step"], metrics["length"], color=COLOURS["structure"])
    right.set(xlabel="step", ylabel="tokens in a response", title="Response length", ylim=(0, None))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_credit(log: dict, file: Path) -> None:
    """Both measures by token type: over the response, and over training."""
    figure, axes = new_figure(2, 2)
    along = {"position in the response (share of its length)": log["relative"], "share of training": training_time(log)}
    formulas = {"contribution": "|credit · log p|", "gradient": "|credit| · ‖onehot − p‖"}
    for column, measure in enumerate(MEASURES):
        for row, label in enumerate(along):
            axis, where = axes[row, column], bins(along[label], 5)
            for r, role in enumerate(ROLES):
                parts = [(where == i) & (log["role"] == r) for i in range(5)]
                points = [size(log, part, measure) if part.sum() >= MIN_TOKENS else (np.nan, np.nan) for part in parts]
                mean, error = np.array(points).T  # (5,), (5,)
                axis.errorbar(np.arange(0.1, 1, 0.2) + 0.012 * (r - 1), mean, 1.96 * error, color=COLOURS[role],
                              marker=MARKERS[role], capsize=3, label=role)
            axis.set(xlabel=label, ylabel=f"mean {formulas[measure]}", ylim=(0, None), xlim=(0, 1))
    axes[0, 0].set_title("Contribution (the original's measure)")
    axes[0, 1].set_title("Gradient in logit space")
    axes[0, 0].legend(frameon=False, title="mean, 95% interval")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def choose_responses(log: dict) -> list[np.ndarray]:
    """Rows of four responses: of first and last step, a reinforced and a discouraged one to the same question."""
    chosen = []
    for step in (log["step"].min(), log["step"].max()):
        here = np.flatnonzero(log["step"] == step)
        responses = np.split(here, np.flatnonzero(np.diff(log["id"][here])) + 1)
        for group in np.unique(log["group"][here]):
            members = [rows for rows in responses if log["group"][rows[0]] == group]
            better, worse = ([rows for rows in members if sign * log["advantage"][rows[0]] > 0] for sign in (1, -1))
            if better and worse:
                chosen += [min(better, key=len), min(worse, key=len)]  # short ones, for the picture's sake
                break
    return chosen


def draw_tokens(log: dict, codec: Codec, file: Path, columns: int = 112) -> None:
    """Responses with their tokens coloured by credit, and below it by the gradient that the credit causes."""
    blocks = []  # (heading, weight, measure, rows)
    for rows in choose_responses(log):
        step, reward, advantage = (log[name][rows[0]] for name in ("step", "reward", "advantage"))
        head = f"Step {step}, reward {reward:.2f}, advantage {advantage:+.2f}. Credit:"
        blocks.append((head, "bold", "credit", rows))
        blocks.append(("Gradient in logit space, credit · ‖onehot − p‖:", "normal", "gradient", rows))
    scale = max([np.abs(log[measure][rows]).max() for *_, measure, rows in blocks] + [1e-9])
    texts = [[codec.bytes[token].decode("utf-8", "replace") for token in log["token"][rows]] for *_, rows in blocks]
    layouts = [place_tokens(text, columns) for text in texts]
    heights = [layout[-1][1] + 2.8 for layout in layouts]  # in lines of text
    figure, axis = plt.subplots(figsize=(12, 0.22 * sum(heights) + 0.9), layout="constrained")
    axis.set(xlim=(0, columns), ylim=(sum(heights), 0))
    axis.axis("off")
    font = 12 * 72 * 0.985 / columns / 0.602  # points: a monospaced letter is 0.602 wide, and must fill its column
    for (head, weight, measure, rows), layout, top in zip(blocks, layouts, np.cumsum([0, *heights])):
        axis.text(0, top + 0.75, head, va="center", fontsize=10, weight=weight)
        for (x, y, text), value in zip(layout, log[measure][rows]):
            shade = plt.cm.PuOr_r(0.5 + 0.45 * value / scale)
            ink = "white" if np.dot(shade[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"  # by the shade's luminance
            axis.add_patch(plt.Rectangle((x, top + 1.4 + y), len(text), 0.92, color=shade, lw=0))
            axis.text(x, top + 1.9 + y, text, va="center", family="monospace", fontsize=font, color=ink,
                      parse_math=False)
    colours = plt.cm.ScalarMappable(plt.Normalize(-scale / 0.9, scale / 0.9), plt.cm.PuOr_r)
    bar = figure.colorbar(colours, ax=axis, location="bottom", fraction=0.03, pad=0.01, aspect=60)
    bar.set_label("below 0: made less likely        above 0: made more likely        (↵ line break, ■ end token)")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def place_tokens(texts: list[str], columns: int) -> list[tuple[int, int, str]]:
    """Column, line and visible text of each token, wrapped at `columns` characters; a line break shows as an arrow."""
    x, y, placed = 0, 0, []
    for text in texts:
        shown = text.replace("\n", "↵") or "■"  # the end token has no text
        if x + len(shown) > columns:
            x, y = 0, y + 1
        placed.append((x, y, shown))
        x += len(shown)
        if "\n" in text:
            x, y = 0, y + 1
    return placed


# ------------------------------------------------------------------------------------- one run, several runs


def analyze_run(run: Path) -> None:
    """Print the tables of a run; write them and the pictures to its analysis/."""
    metrics, log, codec = read_metrics(run), read_log(run), Codec(run / "checkpoint")
    tables = [table_basics(log, metrics), table_statistics(log), table_t(log), table_positions(log), table_signs(log),
              table_roles(log), table_roles_by_position(log), table_tokens(log, codec), table_training(log)]
    out = run / "analysis"
    out.mkdir(exist_ok=True)
    text = f"# {run.name}\n\n" + "\n".join(map(str, tables))
    (out / "tables.md").write_text(text, encoding="utf-8")
    draw_learning(metrics, run.name, out / "learning.png")
    draw_credit(log, out / "credit.png")
    draw_tokens(log, codec, out / "tokens.png")
    print(text)
    print(f"wrote {out / 'tables.md'}, learning.png, credit.png and tokens.png beside it")


def read_config(run: Path) -> dict:
    """config.json of a run."""
    if not (run / "config.json").is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no config.json")
    return json.loads((run / "config.json").read_text(encoding="utf-8"))


def read_final(run: Path) -> dict:
    """final.json of a run; empty where the run has not ended."""
    file = run / "final.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def labels(configs: list[dict]) -> list[str]:
    """A name for each run: its method, and what else of its settings differs among the runs. Equal names are seeds.

    --normalize and the method's own hyper-parameters count only where they differ among runs of the same method.
    """
    def differ(some: list[dict]) -> set[str]:
        return {key for one in some for key in one if len({json.dumps(o[key]) for o in some if key in o}) > 1}

    settings = [{k: v for k, v in c["settings"].items() if k not in NO_DIFFERENCE} for c in configs]
    own = [c["method"] | {"normalize": c["settings"].get("normalize")} for c in configs]
    methods, shared, names = [c["settings"]["mitigation"] for c in configs], differ(settings), []
    for method, s, m in zip(methods, settings, own):
        varied = differ([other for name, other in zip(methods, own) if name == method])
        shown = {k: s[k] for k in sorted(shared) if k in s} | {k: m[k] for k in sorted(varied) if k in m}
        names.append(" ".join([method] + [f"{k}={v}" for k, v in shown.items()]))
    return names


def mean_height(x: np.ndarray, y: np.ndarray) -> float:
    """The mean of a curve y (n,) over x (n,), straight between its points."""
    return np.trapezoid(y, x) / (x[-1] - x[0])


def summarize(run: Path) -> dict[str, float | dict]:
    """The figures of one run that the comparison averages over seeds, and `curve`: held-out success by step."""
    metrics, log = read_metrics(run), read_log(run)
    steps, success, _ = heldout(metrics)
    trained = {name: values[1:] for name, values in metrics.items()}
    row = {"steps": metrics["step"][-1], "curve": dict(zip(steps, success)), "start": success[0], "end": success[-1],
           "climb": success[-1] - success[0], "area": mean_height(steps, success),
           "pass@16": read_final(run).get("pass@16", float("nan"))}
    count = np.bincount(log["role"], minlength=3)  # (3,)
    for measure in MEASURES:
        sums = np.bincount(log["role"], np.abs(log[measure]), 3)  # (3,)
        row |= {f"{measure}, {role}": ratio(sums[r], sums.sum()) for r, role in enumerate(ROLES[:2])}
        row[f"{measure}, filler / reasoning"] = ratio(sums[0] * count[1], sums[1] * count[0])  # of their means
    return row | spread_within(log["credit"], log["id"]) | {
        "gradient norm": trained["grad_norm"].mean(), "its spread": trained["grad_norm"].std(),
        "seconds a step": np.median(trained["seconds"])}


def spread_within(credit: np.ndarray, response: np.ndarray) -> dict[str, float]:
    """How unequally credit (N,) is spread over the tokens of its response (N,).

    effective sample size: (sum w)^2 / (L sum w^2), w = abs(credit), mean over the responses with any credit: 1 where
    all tokens get the same, 1 / L where one gets all. varies within: sum (c - mean of its response)^2 / sum c^2.
    """
    length = np.bincount(response)
    size, square, signed = (np.bincount(response, x) for x in (np.abs(credit), credit**2.0, credit))
    some = square > 0
    effective = ratio((size[some] ** 2 / (length[some] * square[some])).sum(), some.sum())
    within = square.sum() - (signed**2 / np.maximum(length, 1)).sum()
    return {"effective sample size": effective, "varies within": ratio(within, square.sum())}


@dataclass
class Group:
    """The runs of one method with one set of settings, which differ in their seed."""

    label: str
    rows: dict[int, dict]  # by seed, what `summarize` says
    baseline: "Group | None" = None  # the runs of `none` with the same settings; itself where it is that

    @property
    def compared(self) -> bool:
        """Whether there are runs of `none` to compare with, other than these."""
        return self.baseline not in (None, self)

    def values(self, figure: str) -> np.ndarray:
        """A figure (n,) of each run."""
        return np.array([row[figure] for row in self.rows.values()], float)

    def differences(self, figure: str) -> np.ndarray:
        """This method minus the baseline (n,), on the seeds that both have."""
        return np.subtract(*self.pairs(figure))

    def pairs(self, figure: str) -> np.ndarray:
        """A figure of this method and of the baseline (2, n), on the seeds that both have."""
        both = [(row[figure], self.baseline.rows[seed][figure]) for seed, row in self.rows.items()
                if seed in self.baseline.rows]
        return np.array(both, float).reshape(-1, 2).T


class Run(NamedTuple):
    """What the comparison knows of a run."""

    name: str
    label: str  # of its method and settings: runs of one label differ in their seed
    setting: str  # equal for runs that share all settings but those of the method
    baseline: bool  # whether it is one of `none`
    seed: int
    figures: dict  # what `summarize` says


def load_runs(folders: list[Path]) -> list[Run]:
    """Read run folders for the comparison."""
    configs, runs, start = [read_config(folder) for folder in folders], [], time.monotonic()
    for folder, config, label in zip(folders, configs, labels(configs)):
        method, seed = config["settings"]["mitigation"], config["settings"]["seed"]
        runs.append(Run(str(folder), label, baseline_key(config), method == "none", seed, summarize(folder)))
        show_progress(len(runs), len(folders), start)
    return runs


def group_runs(runs: list[Run]) -> list[Group]:
    """Runs by method and settings: baselines first, the others by held-out success at the end."""
    groups, baselines = {}, {}
    for run in runs:
        group = groups.setdefault(run.label, Group(run.label, {}))
        if run.seed in group.rows:
            raise ValueError(f"{run.name} has the settings and the seed {run.seed} of another run: name one of them")
        group.rows[run.seed] = run.figures
        if run.baseline:
            baselines[run.setting] = group
    for run in runs:
        groups[run.label].baseline = baselines.get(run.setting)
    for group in groups.values():
        group.rows = dict(sorted(group.rows.items()))  # so that values of one place are of one seed
    return sorted(groups.values(), key=lambda g: (g.baseline is not g, -g.values("end").mean()))


def baseline_key(config: dict) -> str:
    """Equal for runs that share all settings but those of the method."""
    return json.dumps({k: v for k, v in config["settings"].items() if k not in NO_DIFFERENCE})


def show_progress(done: int, total: int, start: float) -> None:
    """How many runs were read, and how long the others will take, on a line that the next one overwrites."""
    if sys.stderr.isatty():
        eta, end = (time.monotonic() - start) / done * (total - done), "\n" if done == total else "\r"
        print(f"read {done}/{total} runs, ETA {eta:.0f} s ", end=end, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------- methods compared


def t_estimate(values: np.ndarray) -> Estimate:
    """The mean of independent values, with Student's interval."""
    if not len(values):
        return Estimate(float("nan"))
    mean, half = interval(values)
    return Estimate(mean, mean - half, mean + half)


def bootstrap(statistic: Callable, x: np.ndarray, y: np.ndarray, resamples: int = 10_000) -> Estimate:
    """statistic(x, y) of the runs of two methods (n,), (m,), with the percentile interval over resampled runs.

    Stratified as in 2108.13264: the runs of each method are resampled on their own.
    """
    value = float(statistic(x, y))
    if min(len(x), len(y)) < 2:
        return Estimate(value)
    rng = np.random.default_rng(0)
    x, y = (v[rng.integers(len(v), size=(resamples, len(v)))] for v in (x, y))  # (resamples, n), (resamples, m)
    return Estimate(value, *np.percentile(statistic(x, y), (2.5, 97.5)))


def mean_difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """mean x - mean y (...) of runs (..., n), (..., m)."""
    return x.mean(-1) - y.mean(-1)


def improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The chance (...) that a run of x (..., n) is better than one of y (..., m), ties counting half (2108.13264)."""
    x, y = x[..., :, None], y[..., None, :]
    return ((x > y) + 0.5 * (x == y)).mean((-1, -2))


def steps_to(goal: float, curve: dict[float, float]) -> float:
    """The step at which a learning curve, straight between measurements, first reaches the goal; NaN for never."""
    steps, success = list(curve), list(curve.values())
    for i, value in enumerate(success):
        if value >= goal:
            return float(np.interp(goal, success[i - 1 : i + 1], steps[i - 1 : i + 1])) if i else steps[0]
    return float("nan")


def record(group: Group) -> dict[str, Estimate]:
    """All that the comparison says of a method, by column of table.csv."""
    out = {"seeds": Estimate(len(group.rows)), "steps": Estimate(group.values("steps").max())}
    out |= {figure: t_estimate(group.values(figure)) for figure in (*LEARNING, *CREDIT)}
    out["least climb"] = Estimate(group.values("climb").min())
    if group.baseline is None:
        return out
    reached = np.array([steps_to(group.baseline.values("end").mean(), row["curve"]) for row in group.rows.values()])
    out["steps to none's end"] = t_estimate(reached[~np.isnan(reached)])
    out["seeds that get there"] = Estimate(int((~np.isnan(reached)).sum()))
    if group.baseline is not group:
        for figure in JUDGED:
            x, y = group.values(figure), group.baseline.values(figure)
            out[f"{figure} - none"] = t_estimate(group.differences(figure))
            out[f"{figure} - none, bootstrap"] = bootstrap(mean_difference, x, y)
            out[f"{figure}, P(better), bootstrap"] = bootstrap(improvement, x, y)
        out["pass@16 - none"] = t_estimate(group.differences("pass@16"))
    return out


def show(name: str, e: Estimate) -> str:
    """An estimate as a cell: counts alone, Student's interval as ±, the bootstrap's by its ends."""
    if np.isnan(e.value):
        return ""
    if name in COUNTS:
        return f"{e.value:.0f}" + (f" ± {e.high - e.value:.0f}" if np.isfinite(e.high) else "")
    if name.endswith("bootstrap"):
        return cell(e, 3)
    return pm(e.value, e.high - e.value)


def comparison_tables(records: dict[str, dict[str, Estimate]]) -> list[Table]:
    """What the methods learned, what they did against the baseline, and where their credit went; a line a method."""
    fewest = min(r["seeds"].value for r in records.values())
    warning = "**With one seed, nothing can be concluded.** " * (fewest < 2)
    means = warning + "Mean over seeds ± half of its 95% interval (Student's t)."
    columns = {
        ("Learning", f"{means} Held-out success at start and end; area: the mean of its curve."):
            ("seeds", "steps", *LEARNING, "least climb"),
        ("Against none", f"{warning}Differences on the same seeds ± half of the 95% interval of the paired t; in "
         "brackets the 95% interval of a bootstrap over runs, stratified by method; P(better): the chance that a run "
         "beats one of `none`. Fewer than five seeds make the bootstrap's intervals too narrow."): AGAINST,
        ("Gradient and credit", f"{means} Shares of all contribution and of all gradient; filler / reasoning is the "
         "ratio of means over tokens. Effective sample size: 1 where all tokens of a response get the same. Varies "
         "within: the share of squared credit that is not the response's mean."): ("seeds", *CREDIT),
    }
    tables = []
    for (title, note), names in columns.items():
        rows = [[label, *(show(n, r[n]) if n in r else "" for n in names)] for label, r in records.items()]
        tables.append(Table(title, note, ["method", *(n.removesuffix(", bootstrap") for n in names)], rows))
    return tables


def write_csv(records: dict[str, dict[str, Estimate]], file: Path) -> None:
    """One row a method; of each figure the value, and the ends of its 95% interval where it has one."""
    rows = [{"method": label} | {f"{name}{end}": f"{value:.6g}" for name, e in r.items()
                                 for end, value in zip(("", " low", " high"), e) if not np.isnan(value)}
            for label, r in records.items()]
    header = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, header)
        writer.writeheader()
        writer.writerows(rows)


def compare_runs(runs: list[Path]) -> None:
    """Print the comparison of runs; write it, learning curves and a forest plot to comparison/ beside them."""
    groups, out = group_runs(load_runs(runs)), runs[0].parent / "comparison"
    records = {group.label: record(group) for group in groups}
    text = "# Comparison\n\n" + "\n".join(map(str, comparison_tables(records)))
    out.mkdir(exist_ok=True)
    (out / "table.md").write_text(text, encoding="utf-8")
    write_csv(records, out / "table.csv")
    draw_curves(groups, out / "learning.png")
    draw_forest(groups, records, out / "forest.png")
    print(text)
    print(f"wrote {out / 'table.md'}, table.csv, learning.png and forest.png beside it")


def draw_curves(groups: list[Group], file: Path, where: str = "") -> None:
    """Held-out success over the steps, a panel a method, its baseline in grey: mean over seeds, 95% interval, seeds."""
    shown = [g for g in groups if g.baseline is not g] or groups
    columns = min(4, len(shown))
    figure, axes = new_figure(columns, -(-len(shown) // columns), 5.6 if len(shown) == 1 else 3.4, sharey=True)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, group in zip(axes.flat, shown):
        if group.compared:
            draw_curve(axis, group.baseline, "0.45", "--", "s")
        draw_curve(axis, group, COLOURS["reasoning"], "-", "o")
        axis.set(xlabel="step", title="\n".join(textwrap.wrap(f"{group.label} ({len(group.rows)})", 34)))
    for row in axes:
        row[0].set_ylabel("held-out puzzles solved")
    axes[0, 0].set_ylim(0, min(1, 1.05 * axes[0, 0].get_ylim()[1]))
    grey = "; dashed, grey squares: none (GRPO)" * any(g.compared for g in shown)
    figure.suptitle(f"Held-out success{where}: mean over seeds (their number in brackets), 95% interval, each seed a "
                    f"thin line.\nSolid, blue dots: the method{grey}.", fontsize=11)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_curve(axis: plt.Axes, group: Group, colour: str, style: str, marker: str) -> None:
    """The learning curves of a method's seeds, their mean and its interval."""
    curves = [row["curve"] for row in group.rows.values()]
    steps = sorted(set.intersection(*map(set, curves)))
    mean, half = np.array([interval([c[s] for c in curves]) for s in steps]).T
    axis.plot(steps, mean, style, color=colour, marker=marker, ms=4)
    axis.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.2, lw=0)
    for curve in curves:
        axis.plot(steps, [curve[s] for s in steps], style, color=colour, lw=0.6, alpha=0.5)


def draw_forest(groups: list[Group], records: dict[str, dict[str, Estimate]], file: Path, where: str = "") -> None:
    """Each method's difference to the baseline, on the same seeds: mean, 95% interval, and each seed as a cross.

    A method whose mean is below LOWEST is an arrow there with its number, or the others could not be told apart.
    """
    against = [g for g in groups if g.compared][::-1]  # the best on top
    figure, axes = new_figure(2, 1, 5.6, 1.2 + 0.32 * max(4, len(against)), sharey=True)
    for axis, (figure_name, title) in zip(axes.flat, JUDGED.items()):
        axis.axvline(0, color="black", lw=1)
        for y, group in enumerate(against):
            e, seeds = records[group.label][f"{figure_name} - none"], group.differences(figure_name)
            draw_difference(axis, y, Estimate(*(100 * x for x in e)), 100 * seeds)
        axis.set(xlabel="points more than none, on the same seeds", title=title)
    axes[0, 0].set_yticks(range(len(against)), [f"{g.label} ({len(g.differences('end'))})" for g in against])
    single = any(len(g.differences("end")) < 2 for g in against)
    figure.suptitle(f"Against none (GRPO){where}: mean, 95% interval (paired t), each seed a cross; in brackets their "
                    "number.\nRight of the line: better than none; an interval that crosses it shows no difference."
                    + "\nWith one seed, nothing can be concluded." * single, fontsize=11)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_difference(axis: plt.Axes, y: int, e: Estimate, seeds: np.ndarray) -> None:
    """One line of the forest, in points."""
    if e.value < LOWEST:
        axis.plot(LOWEST, y, "<", color=COLOURS["reasoning"])
        axis.annotate(pm(e.value, e.high - e.value, 1), (LOWEST, y), (6, 0), textcoords="offset points", va="center",
                      fontsize=8)
        return
    axis.plot([e.low, e.high], [y, y], color=COLOURS["reasoning"], lw=2)
    axis.plot(e.value, y, "o", color=COLOURS["reasoning"])
    axis.plot(seeds, np.full(len(seeds), y), "x", color="0.4", ms=5, mew=1)


# --------------------------------------------------------------------------------------------------- the study


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of results/runs.csv as text, of all versions."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}; make it with: python -m experiments.study")
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if rows and (missing := {*ABOUT, "curve"} - set(rows[0])):
        raise ValueError(f"{file} is no table of experiments.study: it has no column {sorted(missing)[0]}")
    if any(None in (*row, *row.values()) or not row["version"].isdigit() for row in rows):
        raise ValueError(f"{file} has a line that is no row: was a merge left unresolved?")
    return rows


def to_run(row: dict[str, str]) -> Run:
    """A row of results/runs.csv for the comparison."""
    figures = {name: float(text or "nan") for name, text in row.items() if name not in (*ABOUT, "curve")}
    curve = dict(map(float, point.split(":")) for point in row["curve"].split())
    label = f"{row['method']} {row['setting']}".strip()
    return Run(row["run"], label, row["setting"], row["method"] == "none", int(row["seed"]), figures | {"curve": curve})


def points(e: Estimate) -> str:
    """A share in percent, or a difference in points, ± half of its interval."""
    return pm(100 * e.value, 100 * (e.high - e.value), 1)


def starred(r: dict[str, Estimate], figures: Iterable[str]) -> list[str]:
    """Differences in points ± half of their intervals, * where these exclude 0; empty where there is none."""
    return [points(r[f]) + " *" * excludes_zero(r[f]) if f in r else "" for f in figures]


def excludes_zero(e: Estimate) -> bool:
    """Whether the interval of an estimate lies on one side of 0. One without width, of equal values, says nothing; it
    can be 2e-5 wide, since runs.csv has six digits, and by one puzzle or response it would be wider than 1e-4."""
    return e.high - e.low > 5e-5 and not e.low <= 0 <= e.high


def is_below(e: Estimate) -> bool:
    """Whether a difference is measurably below 0."""
    return excludes_zero(e) and e.value < 0


def table_study(level: str, groups: list[Group], records: dict[str, dict[str, Estimate]]) -> Table:
    """The main table of a level: all methods against `none`."""
    none = records["none"]
    rows = [[f"`{label}`", f"{r['seeds'].value:.0f}", points(r["end"]), points(r["pass@16"]),
             *starred(r, DIFFERENCES), steps_and_seeds(r),
             f"{r['gradient norm'].value / none['gradient norm'].value:.1f}"] for label, r in records.items()]
    note = (f"Held-out success in percent after {none['steps'].value:.0f} steps, from {100 * none['start'].value:.1f} "
            "at the start; pass@16: puzzles that one of 16 responses solves; differences to `none` in points, on the "
            "same seeds; area: mean success while training, by straight lines between measurements. ± half of a 95% "
            "interval over seeds (Student's t), * where that of a difference excludes 0. "
            f"{by_chance(records, DIFFERENCES)} {pairing(groups)}Last, the steps to the mean end of `none`, of the "
            "seeds in brackets, which got there; gradient norm as a multiple of that of `none`. Rows can come from "
            "several machines, so their times are not compared: see tests/benchmark.py.")
    header = ["method", "seeds", "end", "pass@16", *DIFFERENCES, "steps to none's end", "gradient"]
    return Table(f"Methods, {level}", note, header, rows)


def pairing(groups: list[Group]) -> str:
    """How far a seed that is lucky for `none` is so for the others: what comparing on the same seeds gains."""
    medians = []
    for figure in JUDGED:
        pairs = [g.pairs(figure) for g in groups if g.compared]  # (2, n) each
        found = [np.corrcoef(x)[0, 1] for x in pairs if x.shape[1] > 2 and np.ptp(x, 1).all()]
        medians.append(f"{np.median(found):.2f} for {figure}" if found else "")
    return f"Over seeds a method correlates with `none` by a median of {' and '.join(medians)}. " * all(medians)


def steps_and_seeds(r: dict[str, Estimate]) -> str:
    """Steps to the mean end of `none`, of the seeds that get there, and how many those are; empty without `none`."""
    steps, seeds = (r.get(name, Estimate(float("nan"))).value
                    for name in ("steps to none's end", "seeds that get there"))
    return f"{steps:.0f} ({seeds:.0f})" if seeds > 0 else "(0)" * (seeds == 0)


def by_chance(records: dict[str, dict[str, Estimate]], figures: Iterable[str]) -> str:
    """How many differences exclude 0, and how many would on average if no method did anything."""
    found = []
    for figure in figures:
        known = [r[figure] for r in records.values() if figure in r and np.isfinite(r[figure].low)]
        found.append(f"{sum(map(excludes_zero, known))} of {len(known)} for {figure} "
                     f"({0.05 * len(known):.1f} by chance)")
    return f"The interval excludes 0 in {', '.join(found)}."


def table_settings(title: str, runs: list[Run], varied: list[Run]) -> Table:
    """Other hyper-parameters of some methods beside their defaults, and against them, on the same seeds."""
    methods, seeds = {run.label.split()[0] for run in varied}, {run.seed for run in varied}
    groups = {g.label: g for g in group_runs([run for run in runs if run.seed in seeds] + varied)}
    records = {label: record(g) for label, g in sorted(groups.items()) if label.split()[0] in methods}
    for label, r in records.items():
        default = groups.get(label.split()[0])  # a label names the flags that are not the default
        if default not in (None, groups[label]):
            r |= compare(groups[label], default, "default")
    rows = [[f"`{label}`", f"{r['seeds'].value:.0f}", points(r["end"]), *starred(r, VARIED), points(r["least climb"]),
             *(f"{r[figure].value:.2f}" for figure in SHAPE)] for label, r in records.items()]
    note = ("As above; a flag that is not named has its default, and `- default` is the difference to the same method "
            "with all of them. Least climb: of the worst seed, in points. Effective sample size and share of the "
            f"credit that varies within a response as in a comparison of runs. {by_chance(records, VARIED)}")
    return Table(title, note, ["method", "seeds", "end", *VARIED, "least climb", *SHAPE], rows)


def compare(group: Group, other: Group, name: str) -> dict[str, Estimate]:
    """A method minus another one, by both figures to judge by, on the seeds that both have."""
    pair = replace(group, baseline=other)
    return {f"{figure} - {name}": t_estimate(pair.differences(figure)) for figure in JUDGED}


def table_rloo(title: str, runs: list[Run], rloo: list[Run]) -> Table:
    """Every method against `none`, and against `none` with the advantage of RLOO (2402.14740).

    That is not divided by std(r), and methods whose credit starts from rewards do not divide either: what they are
    ahead of `none` may be that alone. (It is also G / (G - 1) times as large, which Adam divides out.)
    """
    groups = {g.label: g for g in group_runs(runs + rloo)}
    others, records = {"none": groups["none"], "rloo": groups[rloo[0].label]}, {label: {} for label in groups}
    for (label, group), (name, other) in itertools.product(groups.items(), others.items()):
        if group is not other:
            records[label] |= compare(group, other, name)
    figures = [f"{figure} - {name}" for name in others for figure in JUDGED]
    rows = [[f"`{label}`", f"{len(g.rows)}", points(t_estimate(g.values("end"))), *starred(records[label], figures)]
            for label, g in groups.items()]
    note = ("Differences in points to `none` and to the same with `--advantage rloo`, whose advantage is not divided "
            f"by the standard deviation of the group's rewards, on the same seeds. {by_chance(records, figures)}")
    return Table(title, note, ["method", "seeds", "end", *figures], rows)


def table_rates(title: str, runs: list[Run], figure: str) -> Table:
    """Each method at several learning rates, on the seeds that it has at all of them, and whether their order stays.

    `figure` is the one of JUDGED to judge by.
    """
    at: dict[str, dict[float, Group]] = {}  # by method and learning rate, 0 for the default
    for group in group_runs(runs):
        method, _, rate = group.label.partition(" lr=")
        at.setdefault(method, {})[float(rate or 0)] = group
    rates = sorted({rate for some in at.values() for rate in some})
    seeds = {m: set.intersection(*(set(some[r].rows) if r in some else set() for r in rates)) for m, some in at.items()}
    values = {m: 100 * np.array([[at[m][rate].rows[s][figure] for s in seeds[m]] for rate in rates])
              for m in at if seeds[m]}  # (rates, seeds) each, in %
    mean = {m: x.mean(1) for m, x in sorted(values.items(), key=lambda item: -item[1][0].mean())}  # (rates,) each
    rows = [[f"`{m}`", f"{len(seeds[m])}", *(f"{x.mean():.1f} ({x.min():.1f} to {x.max():.1f})" for x in values[m]),
             f"{mean[m].max() - mean['none'].max():+.1f}" if "none" in mean else ""] for m in mean]
    names = [f"lr {rate:g}" if rate else "default lr" for rate in rates]
    columns = {name: [x[i] for x in mean.values()] for i, name in enumerate(names)}
    others = {m: sorted(set(at[m][rates[0]].rows) - seeds[m])[:len(seeds[m])] for m in mean}
    if all(others.values()):
        columns[f"{names[0]} by as many other seeds"] = [
            np.mean([at[m][rates[0]].rows[s][figure] for s in others[m]]) for m in mean]
    worse = np.array([is_below(t_estimate(at[m][rates[0]].differences(figure))) for m in mean], bool)
    note = (f"{JUDGED[figure]} in percent: mean over seeds, lowest and highest; then how much the best of a "
            f"method's means is above the best of `none`. {same_order(columns, worse)}")
    return Table(title, note, ["method", "seeds", *names, "best - none's best"], rows)


def same_order(columns: dict[str, list[float]], worse: np.ndarray) -> str:
    """How the order of methods by the first of columns (M,) agrees with that by each of the others; also without those
    that are `worse` (M,) than `none`, whose low rank agrees anyway."""
    (first, x), *others = ((name, np.array(column)) for name, column in columns.items())
    subsets = [(f"all {len(x)} methods", worse | True)]
    if worse.any():
        subsets.append((f"the {(~worse).sum()} that all their seeds together do not show to be below `none`", ~worse))
    return " ".join(f"Rank correlation with the order at the {first}, over {who}: " + ", ".join(
        f"{cell(spearman(x[some], y[some]))} at {name}" for name, y in others) + "." for who, some in subsets)


def spearman(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Rank correlation of independent pairs (n,), with its 95% interval by Fisher's z, whose variance is
    (1 + r^2 / 2) / (n - 3) for ranks (Bonett and Wright, 2000); NaN where either does not vary."""
    if min(len(set(x)), len(set(y))) < 2:
        return Estimate(float("nan"))
    r = float(np.corrcoef(ranks(x), ranks(y))[0, 1])
    if len(x) < 4 or abs(r) > 1 - 1e-12:
        return Estimate(r)
    z, half = np.arctanh(r), 1.96 * np.sqrt((1 + r ** 2 / 2) / (len(x) - 3))
    return Estimate(r, float(np.tanh(z - half)), float(np.tanh(z + half)))


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks (n,) of values (n,), from 1, ties sharing their mean."""
    _, index, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[index]


class Score(NamedTuple):
    """What is known of a method's credit before training, and set beside what it learned."""

    table: str  # its title in one of SCORES
    column: str
    meaning: str
    name: str  # as the head of a column


COSINE, WITHIN, SIGNAL = MEASURED = (
    Score("Credit against A*, all tokens", "cosine of update", "cosine of its update with that of A*",
          "cosine with A*"),
    Score("Credit against A* and the solver, within responses", "Spearman", "rank correlation with A* within responses",
          "rank in response"),
    Score("Noise and bias of each method's gradient", "signal to noise", "signal to noise of its gradient",
          "signal to noise"))


def read_published(file: Path) -> str:
    """The text of a table that lies in results/, beside the study's rows."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: copy it there from results/")
    return file.read_text(encoding="utf-8")


def read_scores(folder: Path) -> dict[str, dict[Score, Estimate]]:
    """The scores of each method, from the tables of SCORES."""
    scores, columns, score, known = {}, [], None, {score.table: score for score in MEASURED}
    for line in "\n".join(read_published(folder / name) for name in SCORES).splitlines():
        score = known.get(line[3:]) if line.startswith("## ") else score
        cells = [text.strip() for text in line.strip("|").split("|")]
        if cells[0] == "method":
            columns = cells
        elif score and len(cells) == len(columns):
            numbers = re.findall(r"-?\d+\.\d+", cells[columns.index(score.column)])
            scores.setdefault(cells[0], {})[score] = Estimate(*map(float, numbers or ["nan"]))
    return scores


def score_of(label: str, scores: dict[str, dict[Score, Estimate]], score: Score) -> Estimate:
    """A method's score, whatever flags its label names; NaN where it has none."""
    return scores.get(label.split()[0], {}).get(score, Estimate(float("nan")))


def with_scores(groups: list[Group], scores: dict[str, dict[Score, Estimate]],
                score: Score) -> list[tuple[int, Estimate]]:
    """Which methods have such a score, and runs of `none` beside theirs: their place among the groups, and it."""
    known = [score_of(g.label, scores, score) for g in groups]
    return [(i, e) for i, e in enumerate(known) if not np.isnan(e.value)
            and groups[i].baseline and len(groups[i].differences("end"))]


def table_scores(level: str, groups: list[Group], records: dict[str, dict[str, Estimate]],
                 scores: dict[str, dict[Score, Estimate]]) -> Table:
    """What is known of each method's credit before training, beside what it learned."""
    rows = [[f"`{g.label}`", *(cell(score_of(g.label, scores, score)) for score in MEASURED),
             *starred(records[g.label], LEARNED)] for g in groups]
    note = (f"Scores of the start model, on the easy puzzles, with default flags (results/{SCORES[0]}, {SCORES[1]}): "
            f"{'; '.join(f'{score.name}: {score.meaning}' for score in MEASURED)}; "
            "each with its 95% interval over puzzles or batches. Learning as in the table above.")
    header = ["method", *(score.name for score in MEASURED), *LEARNED]
    return Table(f"What is known before, {level}", note, header, rows)


def table_types(level: str, records: dict[str, dict[str, Estimate]]) -> Table:
    """Where the credit of each method went while it trained."""
    rows = [[f"`{label}`", *(show(figure, r[figure]) for figure in TYPES)]
            for label, r in records.items()]
    note = ("Filler / reasoning: the ratio of mean sizes over all tokens of a run. Effective sample size of a "
            "response's credit, 1 where all tokens get the same; share of squared credit that is not the response's "
            "mean. Mean over seeds ± half of its 95% interval.")
    return Table(f"Credit by token type, {level}", note, ["method", *TYPES], rows)


def table_truth(level: str, groups: list[Group], scores: dict[str, dict[Score, Estimate]]) -> Table:
    """Does credit closer to the truth learn faster?"""
    rows, least = [], score_of("none", scores, COSINE).low
    for score in MEASURED:
        pairs = with_scores(groups, scores, score)
        climbed = [(i, e) for i, e in pairs if groups[i].values("climb").mean() > 0]
        near = [(i, e) for i, e in climbed if score_of(groups[i].label, scores, COSINE).value >= least]
        shown = len(groups) + 1
        for name, some in (("all", pairs), ("those that climbed", climbed), ("of these, cosine not below none", near)):
            if 0 < len(some) < shown:  # else it is the row before once more
                shown = len(some)
                truth = np.array([e.value for _, e in some])  # (M,)
                gains = {f: np.array([groups[i].differences(f).mean() for i, _ in some]) for f in JUDGED}  # (M,) each
                rows.append([score.meaning, f"{name}, {len(some)}",
                             *(cell(spearman(truth, gain)) for gain in gains.values()),
                             without_two([groups[i].label for i, _ in some], truth, gains["area"])])
    note = ("Rank correlation, over methods, of the scores above with what they learned beyond `none`; in brackets its "
            "95% interval (Bonett and Wright's), for which each method is one independent observation without error. "
            "Those that climbed are chosen by the outcome. Not below none: the cosine no lower than the interval of "
            "that of `none`; where these do not correlate, it is bad scores that go with bad learning, and no more is "
            "said. Last, the least correlation with the area that is left when any two methods, those in brackets, are "
            f"taken away. {between_scores(groups, scores)}")
    header = ["score", "methods", "with end - none", "with area - none", "without two"]
    return Table(f"Scores and learning, {level}", note, header, rows)


def between_scores(groups: list[Group], scores: dict[str, dict[Score, Estimate]]) -> str:
    """How far the cosine and the signal to noise are one finding."""
    one, other = (dict(with_scores(groups, scores, score)) for score in (COSINE, SIGNAL))
    both = np.array([[one[i].value, other[i].value] for i in one if i in other]).reshape(-1, 2)
    return (f"Over all {len(both)} methods {COSINE.name} and {SIGNAL.name} correlate by {cell(spearman(*both.T))} with "
            "each other.")


def without_two(labels: list[str], x: np.ndarray, y: np.ndarray) -> str:
    """The least rank correlation of pairs (M,) when any two methods are taken away, and which; empty below five."""
    if len(x) < 5:
        return ""
    left = {two: spearman(np.delete(x, two), np.delete(y, two)).value
            for two in itertools.combinations(range(len(x)), 2)}
    two = min(left, key=left.get)
    return f"{left[two]:.2f} ({', '.join(labels[i].split()[0] for i in two)})"


def draw_truth(level: str, groups: list[Group], scores: dict[str, dict[Score, Estimate]], file: Path) -> None:
    """Each method's scores beside its difference to the baseline in mean success, both with their intervals."""
    figure, axes = new_figure(len(MEASURED), 1, 5.2, 6.4, sharey=True)
    for axis, score in zip(axes.flat, MEASURED):
        axis.axhline(0, color="black", lw=1)
        for i, truth in with_scores(groups, scores, score):
            draw_numbered(axis, i, truth, t_estimate(100 * groups[i].differences("area")))
        axis.set_xlabel(score.meaning)
    axes[0, 0].set_yscale("symlog", linthresh=5, subs=(2, 3, 4, 6, 8))  # most are near 0, some far below
    axes[0, 0].yaxis.set_major_locator(FixedLocator((-20, -10, -5, -2.5, 0, 2.5, 5, 10, 20)))
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].set_ylabel("points of mean success while training more than none")
    names = "\n".join(f"{i:>2}  {group.label}" for i, group in enumerate(groups))
    axes[0, -1].text(1.03, 0.5, names, transform=axes[0, -1].transAxes, va="center", linespacing=1.8, fontsize=9,
                     family="monospace")
    figure.suptitle(f"Does credit closer to the truth learn more? ({level} puzzles)\nEach number a method, lines its "
                    "95% intervals; right: closer to the truth, or less noise; up: learned more", fontsize=11)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_numbered(axis: plt.Axes, number: int, truth: Estimate, gain: Estimate) -> None:
    """A method as a number with the intervals of both figures."""
    axis.plot([truth.low, truth.high], [gain.value] * 2, color="0.75", lw=1, zorder=1)
    axis.plot([truth.value] * 2, [gain.low, gain.high], color="0.75", lw=1, zorder=1)
    axis.plot(truth.value, gain.value, "o", color="white", mec=COLOURS["reasoning"], ms=14, zorder=2)
    axis.annotate(str(number), (truth.value, gain.value), ha="center", va="center", fontsize=8, zorder=3)


def table_travel(here: str, there: str, records: dict[str, dict[str, dict[str, Estimate]]]) -> Table:
    """Whether what is so on one level is so on another."""
    rows = []
    for figure in DIFFERENCES:
        both = {label: (r[figure], records[there][label][figure]) for label, r in records[here].items()
                if figure in r and figure in records[there].get(label, {})}
        near = {label: pair for label, pair in both.items() if not any(map(is_below, pair))}
        every, some = (np.array([[e.value for e in pair] for pair in pairs.values()]).reshape(-1, 2).T  # (2, M)
                       for pairs in (both, near))
        same = {label for label, (a, b) in both.items() if a.value * b.value > 0}
        one, other = ({label for label, pair in both.items() if excludes_zero(pair[i])} for i in (0, 1))
        counts = map(len, (one, one & same, other, other & same, one & other & same, one & other - same))
        rows.append([figure, f"{len(both)}", cell(spearman(*every)), f"{len(near)}", cell(spearman(*some)),
                     without_two(list(near), *some), *map(str, counts)])
    note = ("Rank correlation, over methods, of the differences on one level with those on the other, with its 95% "
            "interval, which takes their means as exact; then that of the methods that are measurably below `none` on "
            "neither level, since the others agree by being bad on both, and the least that is left of it when any two "
            "methods, those in brackets, are taken away. Then how many differences exclude 0 on one level, and how "
            "many of these have the same sign on the other; last, how many exclude 0 on both, on the same side and on "
            "different ones.")
    header = ["difference", "methods", "rank correlation", "not below", "their correlation", "without two",
              f"exclude 0, {here}", f"same sign, {there}", f"exclude 0, {there}", f"same sign, {here}", "on both",
              "reversed"]
    return Table(f"Do conclusions travel, {here} and {there}", note, header, rows)


def read_costs(file: Path) -> dict[str, float]:
    """How many times as long as a step of `none` one of each method takes, from the benchmark's table."""
    rows = csv.DictReader(read_published(file).splitlines())
    return {row["what"].removeprefix("credit of "): 1 + float(row["value"]) / 100
            for row in rows if row["what"].startswith("credit of ")}


def slowed(curve: dict[float, float], cost: float) -> dict[str, float]:
    """The end and the area of a learning curve, straight between measurements, whose steps cost more than one of
    `none`, in the time that `none` takes for as many."""
    steps, success = np.array(list(curve)), np.array(list(curve.values()))
    last = steps[0] + (steps[-1] - steps[0]) / cost  # the step that it has reached by then
    end = np.interp(last, steps, success)
    x, y = np.append(steps[steps < last], last), np.append(success[steps < last], end)
    return {"end": end, "area": mean_height(x, y)}


def table_time(level: str, runs: list[Run], costs: dict[str, float]) -> Table:
    """What is left of the differences to `none` in as much time instead of as many steps."""
    rows = []
    for group in group_runs(runs):
        cost = costs.get(group.label)  # None for flags that were not timed
        if not group.compared or cost is None or cost < 1.05:
            continue
        late = replace(group, rows={s: slowed(row["curve"], cost) for s, row in group.rows.items()})
        rows.append([f"`{group.label}`", f"{len(group.rows)}", f"{cost:.2f}",
                     *(text for g in (group, late) for text in starred(compare(g, g.baseline, "none"), LEARNED))])
    unknown = {run.label for run in runs} - set(costs)
    note = ("Methods whose step takes longer than that of `none` by 5% or more (tests/benchmark.py, of the start "
            "model on easy puzzles, on two cores), with all their seeds, fresh ones too: differences to `none` after "
            "as many steps, and after as much time; ± and * as above."
            + f" Not timed: {', '.join(f'`{label}`' for label in sorted(unknown))}." * bool(unknown))
    header = ["method", "seeds", "time of a step", *LEARNED, "end in time", "area in time"]
    return Table(f"In as much time, {level}", note, header, rows)


def table_fresh(title: str, runs: list[Run], fresh: list[Run]) -> Table:
    """Whether other seeds of some methods fall inside the intervals of the main table."""
    old, new, both = ({g.label: g for g in group_runs(some)} for some in (runs, fresh, runs + fresh))
    shown = [(label, figure) for label in new if label in old for figure in FRESH
             if new[label].compared or " - " not in figure]
    rows, inside = [], []
    for label, figure in shown:
        before, after, all_seeds = (t_estimate(seed_values(g[label], figure)) for g in (old, new, both))
        inside.append(contains(before, after.value))
        says = ["no", "yes"][inside[-1]] if np.isfinite(before.low) else ""
        rows.append([f"`{label}`", figure, points(before), points(after), says, points(all_seeds)])
    note = ("Percent and points ± half of a 95% interval over the seeds of the main table, over fresh ones, and over "
            "all; inside: the second mean in the first interval. With five seeds each, and where nothing but the seeds "
            "differs, that is to be expected of 88%, not of 95%, since both means vary.")
    seeds, pools = {len(old[label].rows) for label, _ in shown}, [seed_values(both[m], figure) for m, figure in shown]
    if len(seeds) == 1 and min(seeds) > 1 and len(set(map(len, pools))) == 1:  # all methods have the same choices
        note += " " + other_choices(np.array(pools), seeds.pop(), sum(inside))
    return Table(title, note, ["method", "figure", "main table", "fresh seeds", "inside", "all seeds"], rows)


def seed_values(group: Group, figure: str) -> np.ndarray:
    """A figure such as `end`, or a difference such as `end - none`, by seed (n,)."""
    name, _, minus = figure.partition(" - ")
    return group.differences(name) if minus else group.values(name)


def other_choices(pools: np.ndarray, n: int, found: int) -> str:
    """How often the others' mean lies inside the interval of n seeds, whichever n of them are taken, and whether so few
    as `found` figures are unusual. pools (F, S): F figures of S seeds."""
    inside = []  # of each choice, how many figures
    for chosen in map(list, itertools.combinations(range(pools.shape[1]), n)):
        others = np.delete(pools, chosen, 1).mean(1)  # (F,)
        inside.append(sum(contains(t_estimate(x[chosen]), other) for x, other in zip(pools, others)))
    share = np.mean(inside) / len(pools)
    return (f"Whichever {n} of the {pools.shape[1]} seeds are taken for the table, {share:.0%} of the others' means "
            f"are inside; of the {len(inside)} choices {np.mean(np.array(inside) <= found):.0%} have "
            f"{found} of {len(pools)} inside, as this one has, or fewer.")


def contains(e: Estimate, value: float) -> bool:
    """Whether a value lies in the interval of an estimate."""
    return e.low <= value <= e.high


def study(file: Path) -> None:
    """All tables of results/runs.csv in study.md beside it, and its pictures."""
    rows = read_rows(file)
    newest = max((int(row["version"]) for row in rows), default=0)
    runs: dict[str, dict[str, list[Run]]] = {}  # by level and part
    for row in rows:
        if int(row["version"]) == newest:
            runs.setdefault(row["level"], {}).setdefault(row["part"], []).append(to_run(row))
    levels = {level: parts for level, parts in runs.items()
              if any(run.label == "none" for run in parts.get("main", []))}
    if not levels:
        raise ValueError(f"{file} has no run of none to compare with: python -m experiments.study --methods none")
    scores, costs = read_scores(file.parent), read_costs(file.parent / COSTS)
    tables, records = [], {}
    for level, parts in levels.items():
        groups = group_runs(parts["main"])
        records[level] = {g.label: record(g) for g in groups}
        tables += [table_study(level, groups, records[level]), table_scores(level, groups, records[level], scores),
                   table_truth(level, groups, scores), table_types(level, records[level]),
                   table_time(level, parts["main"] + parts.get("fresh", []), costs), *side_tables(level, parts)]
        draw_forest(groups, records[level], file.parent / f"{level}-forest.png", f", {level} puzzles")
        draw_curves(groups, file.parent / f"{level}-learning.png", f", {level} puzzles")
        draw_truth(level, groups, scores, file.parent / f"{level}-truth.png")
    tables += [table_travel(*pair, records) for pair in itertools.combinations(levels, 2)]
    text = "# The study\n\n" + "\n".join(map(str, tables))
    (file.parent / "study.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"wrote {file.parent / 'study.md'}, and pictures beside it")


def side_tables(level: str, parts: dict[str, list[Run]]) -> list[Table]:
    """What was run on a level beside the main table: RLOO, hyper-parameters, learning rates, other seeds."""
    main, tables = parts["main"], []
    if "rloo" in parts:
        tables.append(table_rloo(f"Against RLOO, {level}", main, parts["rloo"]))
    for title, part in (("Hyper-parameters", "sweeps"), ("Weights as written, not rescaled", "unscaled")):
        if part in parts:
            tables.append(table_settings(f"{title}, {level}", main, parts[part]))
    if "rates" in parts:
        tables += [table_rates(f"Learning rates by {x}, {level}", main + parts["rates"], x) for x in JUDGED]
    return tables + ([table_fresh(f"Fresh seeds, {level}", main, parts["fresh"])] if "fresh" in parts else [])


def main() -> None:
    """One run is analyzed, several are compared."""
    paths = [Path(p) for p in sys.argv[1:]]
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    if not paths or any(str(p).startswith("-") for p in paths):
        sys.exit("error: name one or more run folders and no flags, such as: python analyze.py runs/none-seed0")
    try:
        if len(paths) == 1 and paths[0].suffix == ".csv":
            return study(paths[0])
        runs = [p for p in dict.fromkeys(paths) if p.name != "comparison"]  # our own output, swept up by runs/*
        trained = [run for run in runs if len(read_metrics(run)["step"]) > 1]
        for run in runs:
            if run not in trained:
                print(f"left out: {run} has no step of training, only what is in its metrics.csv and final.json")
        if not trained:
            raise ValueError("there is no run with a step of training to analyze; make one with: python train.py")
        analyze_run(trained[0]) if len(trained) == 1 else compare_runs(trained)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
