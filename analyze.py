"""Where the credit went: tables, pictures and a page of one run, or of several runs compared. Runs no model.

    python analyze.py runs/none-seed0                       one run, into its analysis/
    python analyze.py runs/*                                methods compared over seeds, into comparison/ beside them
    python analyze.py --types original runs/none-seed0      tags count as filler, as in the original work

Two measures say what each of the N tokens of a run receives (a response has L of them):

    contribution = credit * log p           the original work's: a value, not a gradient; negative where it reinforces
    gradient     = credit * ||onehot - p||  the norm of d(credit * log p) / d logits (over the temperature), with the
                                            sign of the credit

Differences from the original work: intervals are clustered by puzzle, because responses to a puzzle are compared with
each other; tags and the end token are a type of their own, `structure`, unless --types says otherwise.
"""
import base64
import json
import re
from pathlib import Path

import numpy as np

from plumbing import report
from plumbing.comparison import Group, Run, comparison_warnings, group_runs, labels, run_method, shared_settings
from plumbing.flags import new_parser
from plumbing.progress import fail, follow, one_sentence
from plumbing.report import GREY, PALETTE, Estimate, Table, pm, ratio, t_estimate
from plumbing.runs import heldout, is_finished, read_config, read_credit, read_final, read_metrics
from plumbing.tokenizer import Tokenizer
from tasks.text import FILLER, REASONING, ROLES, STRUCTURE

MEASURES = ("contribution", "gradient")
CONTROLS = ("random", "inverted", "shuffled", "share")  # of methods/controls.py: there to compare with, not to use
TYPES = ("ours", "original", "no_spaces")  # see count_types
PAGE = Path(report.__file__).with_name("tokens.html")
PAGE_TOKENS = 2**20  # at most so many in tokens.html, 12 bytes each: of a longer run it has every second step, or third


def method_name(label: str) -> str:
    """What a picture calls a method: `RLOO lr=0.1` for the label `none advantage=rloo lr=0.1`."""
    method, *settings = label.split()
    if method != "none":
        return label + " (control)" * (method in CONTROLS)
    name = "RLOO" if "advantage=rloo" in settings else "GRPO"
    return " ".join([name, *(setting for setting in settings if setting != "advantage=rloo")])


# ------------------------------------------------------------------------------------------- the log of a run


def read_log(run: Path, metrics: dict, types: str = "ours") -> dict[str, np.ndarray]:
    """The credit log of a run: columns (N,), a row per token. ValueError where a step is missing or damaged."""
    steps, count = read_credit(run, metrics), 0  # responses so far
    for step in steps:
        if "reply_response" in step:  # as response_id, see with_measures; a reply's columns have a length of their own
            step["reply_response"] = step["reply_response"] + count
        count += 1 + int(step["response"].max())
    shared = set.intersection(*map(set, steps))  # older steps have no puzzle_text
    log = with_measures({name: np.concatenate([step[name] for step in steps]) for name in steps[0] if name in shared})
    return count_types(log, run / "checkpoint", types)


def with_measures(log: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns (N,) of a credit log, and those that follow from them."""
    log["response_id"] = np.cumsum(log["position"] == 0) - 1  # from 0 on through the run: each begins at position 0
    step_and_group = log["step"].astype(int) * 2**16 + log["group"]  # as one number: a group is below 2**16
    log["puzzle"] = np.unique(step_and_group, return_inverse=True)[1]  # from 0 on through the run, as puzzle_text
    length = np.bincount(log["response_id"])  # (responses,)
    log["relative"] = log["position"] / length[log["response_id"]]  # in [0, 1), 0 at the first token of a response
    log["contribution"] = log["credit"] * log["logprob"]
    log["gradient"] = log["credit"] * log["logit_grad"]
    return log


def count_types(log: dict, checkpoint: Path, types: str) -> dict[str, np.ndarray]:
    """The log with other types of tokens. `original`: tags and the end token are filler, as in the original work, whose
    patterns matched no tag. `no_spaces`: a single space, which some tokenizers write before a number, is of no type.
    """
    if types == "original":
        log["role"] = np.where(log["role"] == STRUCTURE, FILLER, log["role"])
    if types == "no_spaces":
        spaces = [token for token, letters in enumerate(Tokenizer(checkpoint).bytes) if letters == b" "]
        log["role"] = np.where(np.isin(log["token"], spaces), -1, log["role"])
    return log


def position_bins(log: dict, count: int) -> list[tuple[str, np.ndarray]]:
    """Name and tokens (N,) bool of each of `count` equal parts of a response."""
    part = (log["relative"] * count).astype(int)  # (N,)
    return [(f"{i * 100 // count}-{(i + 1) * 100 // count}%", part == i) for i in range(count)]


# --------------------------------------------------------------------------- one run: how it learned, where credit went

LEARNED = {"reward": 3, "success": 3, "format": 2, "length": 1, "entropy": 3, "grad_norm": 3, "zero_variance_groups": 0}
CREDITED = ("tokens", "share", *(f"abs({measure})" for measure in MEASURES), *MEASURES, "log p", "entropy",
            "contribution: deviation", "range")


def learning_table(metrics: dict) -> Table:
    """The start, steps 1, 10, 50 and 100, as the original work reports them, and the last step."""
    last = len(metrics["step"]) - 1
    rows = [[str(step), *(pm(metrics[name][step], np.nan, digits) for name, digits in LEARNED.items()),
             pm(metrics["heldout_success"][step], 1.96 * metrics["heldout_stderr"][step])]
            for step in sorted({0, 1, 10, 50, 100, last}) if step <= last]
    note = ("Means over a step's responses; held-out success after it, ± half of its 95% interval over puzzles. "
            "metrics.csv has every step.")
    return Table("How it learned", note, ["step", *LEARNED, "held-out success"], rows)


def mean_size(log: dict, chosen: np.ndarray, measure: str) -> tuple[float, float]:
    """The mean absolute value of a measure over some tokens (N,) bool, and half of its interval."""
    return report.clustered_mean(np.abs(log[measure][chosen]), log["puzzle"][chosen])


def filler_by_reasoning(log: dict, measure: str) -> float:
    """The size of a measure on filler as a multiple of that on reasoning."""
    return ratio(*(mean_size(log, log["role"] == role, measure)[0] for role in (FILLER, REASONING)))


def credit_row(name: str, log: dict, chosen: np.ndarray) -> list[str]:
    """Some tokens (N,) bool as a row under CREDITED."""
    if not chosen.any():
        return [name, "0", "0.0%", *[""] * (len(CREDITED) - 2)]
    contribution = log["contribution"][chosen]
    means = [pm(log[column][chosen].mean(), np.nan, 4) for column in (*MEASURES, "logprob", "entropy")]
    return [name, f"{chosen.sum():,}", f"{chosen.mean():.1%}", *(pm(*mean_size(log, chosen, m)) for m in MEASURES),
            *means, f"{contribution.std():.3f}", f"{contribution.min():.1f} to {contribution.max():.1f}"]


def credit_tables(log: dict, tokenizer: Tokenizer) -> list[Table]:
    """Where the credit went: to which types of tokens, responses, parts of a response, and tokens."""
    roles = [(name, log["role"] == role) for role, name in enumerate(ROLES)]
    signs = [(f"advantage {name} 0", chosen(log["advantage"], 0)) for name, chosen in (
        ("above", np.greater), ("below", np.less), ("of", np.equal))]
    fifths = [(f"{where}, {name}", part & chosen) for where, part in position_bins(log, 5) for name, chosen in roles]
    t = np.abs(report.t_statistics(log["contribution"], log["position"]))  # (positions,)
    note = "abs: mean absolute value ± half of its 95% interval, clustered by puzzle; the others are signed means."
    if np.isfinite(found := [filler_by_reasoning(log, measure) for measure in MEASURES]).all():
        note += " Filler / reasoning: {:.2f} by contribution, {:.2f} by gradient.".format(*found)
    if len(t):
        note += (f" t of the mean contribution at {len(t)} positions, those that {report.MIN_RESPONSES} responses reach, "
                 f"which count as independent: abs(t) is above 3 at {np.mean(t > 3):.1%}, below 1.5 at "
                 f"{np.mean(t < 1.5):.1%}, {t.mean():.2f} on average.")
    everything = [("all", log["role"] > -2), *roles, *signs, *position_bins(log, 10)]
    return [Table(title, note, ["", *CREDITED], [credit_row(name, log, chosen) for name, chosen in parts])
            for title, note, parts in (("Where credit went", note, everything),
                                       ("Types by position", "Each fifth of a response by type.", fifths),
                                       ("Tokens", "The most frequent of each type.", frequent_tokens(log, tokenizer)))]


def frequent_tokens(log: dict, tokenizer: Tokenizer, count: int = 8) -> list[tuple[str, np.ndarray]]:
    """Type and name, and rows (N,) bool, of the most frequent tokens of each type. A name is as Python would write it:
    bytes where the token is only a part of a letter."""
    found = []
    for role, type_name in enumerate(ROLES):
        tokens, counts = np.unique(log["token"][log["role"] == role], return_counts=True)
        for token in tokens[np.argsort(-counts, kind="stable")][:count].tolist():
            letters = tokenizer.bytes[token] or tokenizer.library.id_to_token(token).encode()  # an end token has none
            text = letters.decode("utf-8", "replace")
            name = report.code_span(repr(letters if "\ufffd" in text else text))
            found.append((f"{type_name} {name}", (log["role"] == role) & (log["token"] == token)))
    return found


def draw_learning(metrics: dict, method: str, file: Path) -> None:
    """Success and response length over the steps."""
    figure, (left, right) = report.new_figure(2, 3.4, sharex=True)
    steps, success, error = heldout(metrics)
    left.plot(metrics["step"], metrics["success"], ".-", color=GREY, lw=1, ms=3, alpha=0.6, label="training rollouts")
    left.errorbar(steps, success, 1.96 * error, color=PALETTE[0], marker="o", capsize=3,
                  label="held-out puzzles, 95% interval")
    left.set(xlabel="step", ylabel="success rate", ylim=(-0.02, 1.02))
    left.set_title(f"{method}: puzzles solved, and response length", loc="left")  # it may be wider than the axes
    left.legend()
    left.xaxis.get_major_locator().set_params(integer=True)
    right.plot(metrics["step"], metrics["length"], ".-", color=PALETTE[0], ms=3)
    right.set(xlabel="step", ylabel="tokens in a response", ylim=(0, 1.05 * np.nanmax(metrics["length"])))
    figure.savefig(file)


def draw_credit(log: dict, file: Path) -> None:
    """The size of both measures by type of token, in five parts of the response; no point for fewer than 100 tokens."""
    figure, axes = report.new_figure(2, 3.6)
    for axis, measure, formula in zip(axes, MEASURES, ("|credit · log p|", "|credit| · ‖onehot − p‖")):
        for role, (name, colour, marker) in enumerate(zip(ROLES, (PALETTE[1], PALETTE[0], PALETTE[2]), "os^")):
            parts = [part & (log["role"] == role) for _, part in position_bins(log, 5)]
            size, half = np.array([mean_size(log, part & (part.sum() >= 100), measure) for part in parts]).T  # (5,) each
            x = np.arange(0.1, 1, 0.2) + 0.02 * (role - 1)  # (5,) middles, moved so that intervals stay apart
            axis.errorbar(x, size, half, color=colour, marker=marker, capsize=3, label=name)
        axis.set(xlabel="position in the response", ylabel=f"mean {formula}", ylim=(0, None), xlim=(0, 1),
                 title=f"{measure.capitalize()} by position")
        axis.xaxis.set_major_formatter("{x:.0%}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(file)


# ------------------------------------------------------------------------------ one run: what the tokens looked like


def with_replies(log: dict) -> dict[str, np.ndarray]:
    """The columns of tokens.html with the tokens of replies where they came, whose other columns are NaN."""
    shown = {name: log[name] for name in ("token", "response_id", "credit", "logprob", "logit_grad", "entropy")}
    if "turn" not in log:
        return shown
    said = {"token": log["reply_token"], "response_id": log["reply_response"]}
    place = np.flatnonzero(log["position"] == 0)[log["reply_response"]] + log["reply_position"]  # the next token's row
    return {name: np.insert(column, place, said.get(name, np.nan)) for name, column in shown.items()}


def describe(log: dict, row: int) -> str:
    """The step, reward and puzzle of the response that begins in a row."""
    puzzle = log["puzzle_text"][log["puzzle"][row]] if "puzzle_text" in log else f"number {log['group'][row]}"
    return f"Step {log['step'][row]}, reward {log['reward'][row]:.2f}. Puzzle: {puzzle}"


def choose_pair(log: dict, step: int) -> list[int]:
    """The first rows of a reinforced and a discouraged response, short ones, to the puzzle of a step whose rewards
    differ most; none where no puzzle has both."""
    rows = np.flatnonzero((log["position"] == 0) & (log["step"] == step))
    rows = rows[np.argsort(np.bincount(log["response_id"])[log["response_id"][rows]], kind="stable")]
    groups = [rows[log["puzzle"][rows] == puzzle] for puzzle in np.unique(log["puzzle"][rows])]
    for group in sorted(groups, key=lambda group: -np.ptp(log["reward"][group])):
        signs = np.sign(log["advantage"][group]).tolist()
        if 1 in signs and -1 in signs:
            return [group[signs.index(1)], group[signs.index(-1)]]
    return []


def draw_responses(log: dict, tokenizer: Tokenizer, method: str, file: Path) -> None:
    """Two responses of the first step and two of the last, by gradient; their headings say what credit they have."""
    blocks, shown = [], with_replies(log)
    for row in [row for step in sorted({log["step"].min(), log["step"].max()}) for row in choose_pair(log, step)]:
        own = shown["response_id"] == log["response_id"][row]
        credit = log["credit"][log["response_id"] == log["response_id"][row]]
        ends = f"{credit.min():+.3g}", f"{credit.max():+.3g}"
        heading = f"Credit by {method}: {ends[0]} on every token" if len({*ends}) == 1 else f"Credit by {method}: {' to '.join(ends)}"
        blocks.append((f"{heading}. {describe(log, row)}", *report.whole_letters(
            [tokenizer.bytes[token] for token in shown["token"][own]], (shown["credit"] * shown["logit_grad"])[own])))
    empty = "No puzzle of the first or last step has both a reinforced and a discouraged response", [" "], np.zeros(1)
    legend = ("gradient, credit · ‖onehot − p‖: below 0 made less likely, above 0 more\n"
              "(↵ line break, ⇥ tab, ■ end token, □ other letter" + ", grey: replies" * ("turn" in log) + ")")
    report.draw_blocks(blocks or [empty], legend, file)


def write_page(log: dict, tokenizer: Tokenizer, title: str, file: Path) -> None:
    """tokens.html: every response, its tokens coloured by a measure. Of each token it has the text's number (uint32) and
    credit, log p, ||onehot - p|| and entropy (float16), column after column, as base64.
    """
    every = -(-len(log["token"]) // PAGE_TOKENS)
    shown, first = with_replies(log), np.flatnonzero(log["position"] == 0)  # (responses,)
    responses = np.flatnonzero((log["step"][first] - log["step"].min()) % every == 0)
    shown = {name: column[np.isin(shown["response_id"], responses)] for name, column in shown.items()}
    texts, number = np.unique(shown["token"], return_inverse=True)
    facts = [shown[name].astype(np.float16) for name in ("credit", "logprob", "logit_grad", "entropy")]
    data = base64.b64encode(b"".join(column.tobytes() for column in (number.astype(np.uint32), *facts))).decode()
    about = {"texts": [tokenizer.bytes[token].decode("latin-1") for token in texts], "tokens": len(number),
             "every": every, "lengths": np.unique(shown["response_id"], return_counts=True)[1].tolist(),
             "steps": log["step"][first[responses]].tolist(), "names": [describe(log, row) for row in first[responses]],
             "advantages": np.round(log["advantage"][first[responses]].astype(float), 3).tolist()}
    parts = {"TITLE": title.replace("&", "&amp;").replace("<", "&lt;"), "DATA": data,
             "ABOUT": json.dumps(about).replace("<", "\\u003c"), "PLUS": report.PLUS, "MINUS": report.MINUS}
    page = re.sub(rf"\b({'|'.join(parts)})\b", lambda match: parts[match[1]], PAGE.read_text(encoding="utf-8"))
    file.write_text(page, encoding="utf-8")


def analyze_run(run: Path, types: str) -> None:
    """Print the tables of a run; write them, the pictures and the page to its analysis/."""
    method, metrics = report.visible(method_name(run_method(read_config(run)))), read_metrics(run)
    tokenizer, log, out = Tokenizer(run / "checkpoint"), read_log(run, metrics, types), run / "analysis"
    if not 0 <= log["token"].min() <= log["token"].max() < tokenizer.size:
        raise ValueError(f"{run / 'credit'} has tokens that {run / 'checkpoint' / 'tokenizer.json'} lacks")
    text = "\n".join([f"# {run.name}\n", *map(str, [learning_table(metrics), *credit_tables(log, tokenizer)])])
    out.mkdir(exist_ok=True)
    draw_learning(metrics, method, out / "learning.png")
    draw_credit(log, out / "credit.png")
    draw_responses(log, tokenizer, method, out / "tokens.png")
    write_page(log, tokenizer, f"{run.name}: {method}", out / "tokens.html")
    (out / "tables.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out / 'tables.md'}, and beside it learning.png, credit.png, tokens.png and tokens.html")


# ------------------------------------------------------------------------------------- runs beside each other

CREDIT = ("end", *(f"{measure}, {part}" for measure in MEASURES for part in ("size on filler", "size on reasoning",
                                                                             "filler / reasoning")),
          "gradient norm", "its spread", "seconds a step")


def summarize(run: Path, types: str = "ours") -> dict[str, float | dict]:
    """The figures of one run that a comparison averages over seeds, and by step `curve`, held-out success, and `norms`,
    the gradient's."""
    metrics, final = read_metrics(run), read_final(run)  # final: empty until the run is finished
    log = read_log(run, metrics, types)
    steps, success, _ = heldout(metrics)
    curve, norms = dict(zip(steps, success)), dict(zip(metrics["step"][1:], metrics["grad_norm"][1:]))
    if final.get("step") in curve and final.get("heldout_success") != curve[final["step"]]:
        raise ValueError(f"{run / 'final.json'} is not of this run: metrics.csv has another success at that step")
    figures = {"steps": metrics["step"][-1], "curve": curve, "norms": norms, "start": success[0], "end": success[-1],
               "climb": success[-1] - success[0], "area": ratio(np.trapezoid(success, steps), np.ptp(steps))}
    figures |= {name: final[name] for name in final if re.fullmatch(r"pass@\d+", name)}  # not its standard error
    for measure in MEASURES:
        figures |= {f"{measure}, size on {ROLES[role]}": mean_size(log, log["role"] == role, measure)[0]
                    for role in (FILLER, REASONING)}
        figures[f"{measure}, filler / reasoning"] = filler_by_reasoning(log, measure)
    figures |= {name: np.nansum(metrics[name]) for name in ("tokens_sampled", "tokens_read", "tokens_updated")}
    return figures | {"gradient norm": np.mean([*norms.values()]), "its spread": np.std([*norms.values()]),
                      "seconds a step": np.median(metrics["seconds"][1:])}  # row 0 is the start model


def load_runs(folders: list[Path], types: str) -> list[Run]:
    """Read run folders for a comparison. A pass@k that only others measured is NaN."""
    configs = [read_config(folder) for folder in folders]
    figures = [summarize(folder, types) for folder in follow("reading runs", folders)]
    not_measured = {name: float("nan") for own in figures for name in own if name.startswith("pass@")}
    return [Run(str(folder), label, json.dumps(shared_settings(config)), run_method(config) == "none",
                config["settings"]["seed"], not_measured | own, config["inputs"], is_finished(folder))
            for folder, config, label, own in zip(folders, configs, labels(configs), figures)]


def estimate(group: Group, column: str) -> Estimate:
    """A figure of a method over its seeds; in a column such as `end - GRPO` minus that of its baseline, where it has one.
    Seeds are not paired: the results of two methods on the same puzzles are hardly correlated."""
    name, minus, _ = column.partition(" - GRPO")
    if not minus:
        return t_estimate(group.values(name))
    return t_estimate(group.values(name), group.baseline.values(name)) if group.baseline else Estimate(np.nan)


def comparison_tables(groups: list[Group], warning: str) -> tuple[list[Table], list[dict]]:
    """What each method learned, and where its credit went, a row per method; and the rows of table.csv."""
    passed = [name for name in next(iter(groups[0].rows.values())) if name.startswith("pass@")]
    learning = ["start", "end", "area", *passed, *(f"{name} - GRPO" for name in ("end", "area", *passed))]
    found = {group.label: {name: estimate(group, name) for name in dict.fromkeys((*learning, *CREDIT))} for group in groups}
    if min(len(group.rows) for group in groups) < 2:
        warning += " With one seed, nothing can be concluded."
    notes = {"Learning": "Held-out success, mean over seeds ± half of its 95% interval (Student's t), for these puzzles; "
             "area: the mean of its curve; minus GRPO: `none` with the same settings, Welch's interval.",
             "Credit": "Size: mean absolute value over the tokens of a type. Of the gradient's norm the mean and the "
             "standard deviation over steps."}
    tables = [Table(title, f"**{warning.strip()}** " * bool(warning) + note, ["method", "seeds", *columns], [
        [group.label, str(len(group.rows)), *(pm(e.value, e.high - e.value) for e in map(found[group.label].get, columns))]
        for group in groups]) for (title, note), columns in zip(notes.items(), (learning, CREDIT))]
    return tables, [{"method": label} | {name + end: f"{value:.6g}" for name, e in figures.items()
                                         for end, value in zip(("", " low", " high"), e) if not np.isnan(value)}
                    for label, figures in found.items()]


def draw_methods(groups: list[Group], file: Path) -> None:
    """Of each method held-out success and the gradient's norm by step, and the contribution's size on filler and on
    reasoning: means over seeds with their 95% intervals."""
    figure, axes = report.new_figure(3, 3.6 + 0.2 * len(groups))
    for i, group in enumerate(groups):
        colour, style = PALETTE[i % len(PALETTE)], ("-", "--", ":", "-.")[i // len(PALETTE) % 4]
        for axis, by_step, marker in zip(axes, ("curve", "norms"), ("os^D"[i % 4], None)):
            curves = [row[by_step] for row in group.rows.values()]
            steps = sorted(set.intersection(*map(set, curves)))  # that all seeds measured
            mean, low, high, _ = zip(*(t_estimate([curve[step] for curve in curves]) for step in steps))
            axis.plot(steps, mean, style, color=colour, marker=marker, ms=4, label=method_name(group.label))
            axis.fill_between(steps, low, high, color=colour, alpha=0.25 if len(groups) < 4 else 0.1, lw=0)
        mean, _, high, _ = zip(*(estimate(group, f"contribution, size on {role}") for role in ROLES[:2]))  # (2,) each
        axes[2].bar(np.arange(2) + 0.8 * (i + 0.5) / len(groups) - 0.4, mean, 0.7 / len(groups), color=colour, ls=style,
                    ec="black", yerr=np.subtract(high, mean))
    for axis, title in zip(axes, ("Held-out puzzles solved", "Norm of the gradient", "Size of the contribution")):
        axis.set(title=title, ylim=(0, None), xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[2].set(xlabel="mean |credit · log p|, by type")
    axes[2].set_xticks([0, 1], ROLES[:2])
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, [report.wrap_heading(name, 1) for name in names], title="means over seeds, 95% intervals",
                  loc="outside lower center")
    figure.savefig(file)


def compare_runs(folders: list[Path], types: str) -> None:
    """Print the comparison of runs; write it and a picture of the methods to comparison/ beside them."""
    runs, out = load_runs(folders, types), folders[0].parent / "comparison"
    groups, warning = group_runs(runs), " ".join(comparison_warnings(runs))
    tables, rows = comparison_tables(groups, warning)
    text = "\n".join(["# Comparison\n", *map(str, tables)])
    out.mkdir(exist_ok=True)
    draw_methods(groups, out / "methods.png")
    report.write_csv(rows, out / "table.csv")
    (out / "table.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {out / 'table.md'}, and beside it table.csv and methods.png" + f"\nwarning: {warning}" * bool(warning))


# ------------------------------------------------------------------------------------------------ command line


@one_sentence()
def main() -> None:
    """Analyze a single run, compare several; report what can't be read in one sentence."""
    parser = new_parser(usage="python analyze.py [--types original] RUN ...", description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--types", choices=TYPES, default="ours", help="how tags and lone spaces count (default ours)")
    given = parser.parse_args()
    if not given.runs:
        fail("name one or more run folders, such as: python analyze.py runs/none-seed0")
    named = list(dict.fromkeys(given.runs))  # each once
    runs = [path for path in named if (path / "metrics.csv").exists() or (path / "config.json").exists()] or named
    trained = [run for run in runs if len(read_metrics(run)["step"]) > 1]  # refuses what is no run
    for path in named:
        if path not in trained and path.name != "comparison":  # our own output, which runs/* matches
            print(f"left out: {path} {'has no step of training' if path in runs else 'is not a run folder'}")
    if not trained:
        fail("there is no run with a step of training to analyze; make one with: python train.py")
    analyze_run(trained[0], given.types) if len(trained) == 1 else compare_runs(trained, given.types)


if __name__ == "__main__":
    main()
