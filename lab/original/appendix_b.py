"""Appendix B and experiments 1 and 2 of the original work: what the discount of `outcome_conditional` and the epsilon
of `inverse_logprob` do to learning and to credit.

    git clone . ../appendix && cd ../appendix && rm lab/study/runs.csv      # since no run is made twice
    python -m lab.study.run --parts main sweeps --levels easy --keep \\
        --methods none outcome_conditional inverse_logprob
    python -m lab.original.appendix_b \\
        runs/study-2/easy/{none,outcome_conditional{,-think_discount-*[0-9]},inverse_logprob{,-epsilon-*[0-9]}}-seed[012]

Reads finished run folders with their credit logs, groups them by method and settings, and writes lab/original/appendix-b.md
with two pictures beside it. Any methods will do, if the runs of GRPO (`none`) are there and all took as many steps.

Differences from the original's tables:
1. The contribution, credit * log p, includes the method's weight. Their log stored advantage * log p, which shows
   no weight and changes only with what the model learns; columns called `as they logged` hold that measure.
2. Tags and the end token are a type of their own, `structure`. In their tables they are filler; where a column or row
   counts them as filler, it says so.
3. Every figure is a mean over seeds with an interval.
"""
from pathlib import Path

import numpy as np

from analyze import COLOURS, figure_cell, load_runs, mean_size, method_name, read_log, training_time
from lab.estimates import points
from lab.study.rows import name_of
from plumbing.report import GREY, PALETTE, Table, bins, interval, new_figure, plt, ratio, save_figure, t_estimate
from plumbing.runs import (Group, group_runs, read_config, read_final, read_metrics, unequal_inputs, unequal_steps,
                           work_on_folders)
from tasks.text import ROLES

RESULTS = Path(__file__).parent
FILE = "appendix-b"  # .md, and the two pictures -learning.png and -types.png
MEASURES = ("credit", "contribution", "gradient", "as they logged")
TAGGED = "filler and tags"  # what the original calls filler
TYPES = dict(zip(ROLES, ([0], [1], [2]))) | {TAGGED: [0, 2], "all": [0, 1, 2]}  # the roles of each
FIFTHS = {f"{20 * i}-{20 * i + 20}%": [i] for i in range(5)}
MEANS = "Mean over seeds ± half of its 95% interval (Student's t)."


# --------------------------------------------------------------------------------------------------- one run


def check_run(folder: Path) -> None:
    """ValueError or FileNotFoundError for a folder that is no finished run with a credit log."""
    if read_final(folder).get("step") != read_config(folder)["settings"]["steps"]:
        raise ValueError(f"{folder} is not finished; resume it with: python train.py --resume {folder}")
    if not any(folder.glob("credit/step-*.npz")):
        raise ValueError(f"{folder} has no credit log; lab.study.run keeps those of its runs with --keep")


def size_figures(log: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one run, the mean size of each measure by type of token and fifth of the response, and the ratios of these.

    `gradient, filler, 0-20%` is a mean over tokens, `gradient, filler share` a type's share of the summed sizes, and
    `gradient, first / last` a ratio of means. analyze.summarize has filler / reasoning without the tags.
    """
    part = 5 * log["role"] + bins(log["relative"], 5)  # (N,) type and fifth of each token
    count = np.bincount(part, minlength=15).reshape(3, 5)
    figures = {f"tokens, {role} share": count[i].sum() / count.sum() for i, role in enumerate(ROLES)}
    for measure in MEASURES:
        total = np.bincount(part, np.abs(log[measure]), 15).reshape(3, 5)
        mean = {(kind, fifth): ratio(total[np.ix_(roles, columns)].sum(), count[np.ix_(roles, columns)].sum())
                for kind, roles in TYPES.items() for fifth, columns in (FIFTHS | {"all": range(5)}).items()}
        figures |= {f"{measure}, {kind}, {fifth}": value for (kind, fifth), value in mean.items()}
        figures |= {f"{measure}, {role} share": ratio(total[i].sum(), total.sum()) for i, role in enumerate(ROLES)}
        figures[f"{measure}, {TAGGED} / reasoning"] = ratio(mean[TAGGED, "all"], mean["reasoning", "all"])
        figures[f"{measure}, first / last"] = ratio(mean["all", "0-20%"], mean["all", "80-100%"])
    return figures


def quarter_figures(log: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one run, filler / reasoning by mean size in the first and in the last quarter of its steps.

    A run that breaks writes less and less filler, and gives no credit while all responses fail alike. A ratio over the
    whole run compares the types at different times.
    """
    quarter, figures = bins(training_time(log), 4), {}  # (N,)
    for measure in ("contribution", "gradient"):
        for name, i in (("first quarter", 0), ("last quarter", 3)):
            filler, reasoning = (mean_size(log, (quarter == i) & (log["role"] == role), measure)[0] for role in (0, 1))
            figures[f"{measure}, {name}"] = ratio(filler, reasoning)
    return figures


def weight_figures(log: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one run, the weights w = abs(credit) / its mean over the response, in responses that received credit.

    largest weight: the largest w of a response, averaged over responses; and the largest of the whole run.
    effective number: (sum w)^2 / sum w^2, a number of tokens, averaged over responses.
    """
    size, response = np.abs(log["credit"]).astype(float), log["id"]  # (N,) each
    total, square, length = np.bincount(response, size), np.bincount(response, size**2), np.bincount(response)
    largest = np.maximum.reduceat(size, np.flatnonzero(np.diff(response, prepend=-1)))  # (R,)
    credited = total > 0
    if not credited.any():
        return dict.fromkeys(("largest weight", "largest of the run", "effective number"), float("nan"))
    weight = (largest * length)[credited] / total[credited]  # (R',) the largest of each response
    return {"largest weight": weight.mean(), "largest of the run": weight.max(),
            "effective number": (total[credited] ** 2 / square[credited]).mean()}


def norm_figures(metrics: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean gradient norm at both ends of a run, and the spread over its steps as a multiple of the mean."""
    norm = metrics["grad_norm"][1:]  # row 0 is the start model
    return {"first ten steps": norm[:10].mean(), "last ten steps": norm[-10:].mean(),
            "spread / mean": ratio(norm.std(), norm.mean())}


def all_figures(folder: Path) -> dict[str, float]:
    """Everything that the tables here show of a run beyond analyze.summarize."""
    metrics = read_metrics(folder)
    log = read_log(folder, metrics)
    log["as they logged"] = log["advantage"] * log["logprob"]
    return size_figures(log) | quarter_figures(log) | weight_figures(log) | norm_figures(metrics)


def load_groups(folders: list[Path]) -> list[Group]:
    """The runs by method and settings: GRPO first, then methods in the order they were named, their settings sorted."""
    for folder in folders:
        check_run(folder)
    runs = [run._replace(figures=run.figures | all_figures(Path(run.name))) for run in load_runs(folders)]
    if warning := unequal_steps(runs) or unequal_inputs(runs):
        raise ValueError(warning)
    order = list(dict.fromkeys(method_of(run.label) for run in runs))
    groups = sorted(group_runs(runs), key=lambda group: (group.baseline is not group,
                                                         order.index(method_of(group.label)), group.label))
    if len(groups) == 1 or any(group.baseline is not groups[0] for group in groups):
        raise ValueError("name runs of GRPO (none) and of other methods, with the same settings but for the method's")
    return groups


def method_of(label: str) -> str:
    """The method of a label such as `inverse_logprob epsilon=0.5`."""
    return label.split()[0]


# ---------------------------------------------------------------------------------------------------- tables


def table_of(title: str, note: str, groups: list[Group], columns: dict[str, str]) -> Table:
    """A row per setting, with the figure of each column, whose heading is the key."""
    rows = [[name_of(group.label), f"{len(group.rows)}",
             *(figure_cell(figure, t_estimate(group.values(figure))) for figure in columns.values())]
            for group in groups]
    return Table(title, note, ["method", "seeds", *columns], rows)


def table_learning(groups: list[Group]) -> Table:
    """Held-out success by step, its end, and the end's difference to GRPO."""
    steps, rows = common_steps(groups), []
    for group in groups:
        difference = points(group.difference("end")) if group.compared else ""
        curve = [points(t_estimate([row["curve"][step] for row in group.rows.values()])) for step in steps]
        rows.append([name_of(group.label), f"{len(group.rows)}", *curve, difference])
    note = ("Held-out success in percent by step, mean over seeds ± half of its 95% interval (Student's t). Last, the "
            "difference to GRPO at the end in points, ± half of Welch's 95% interval.")
    return Table("Learning", note, ["method", "seeds", *(f"step {step:.0f}" for step in steps), "end - GRPO"], rows)


def common_steps(groups: list[Group]) -> list[float]:
    """The steps at which all runs were measured."""
    return sorted(set.intersection(*(set(row["curve"]) for group in groups for row in group.rows.values())))


def tables_summary(groups: list[Group]) -> list[Table]:
    """The original's summary, by its measure and by the gradient."""
    note = (f"Mean size over all tokens of a run, and ratios of such means. {MEANS} `tags as filler`: the original's "
            "types, in which tags and the end token are filler.")
    logged = (" `as they logged`: the same ratio of advantage · log p, which leaves out the method's weight.")
    tables = []
    for measure in ("contribution", "gradient"):
        columns = {kind: f"{measure}, {kind}, all" for kind in ("filler", "reasoning", "structure")} | {
            "filler / reasoning": f"{measure}, filler / reasoning",
            "tags as filler": f"{measure}, {TAGGED} / reasoning"}
        if measure == "contribution":
            columns["as they logged"] = f"as they logged, {TAGGED} / reasoning"
        tables.append(table_of(f"Summary, {measure}", note + logged * (measure == "contribution"), groups, columns))
    return tables


def table_positions(groups: list[Group], measure: str) -> Table:
    """Types of token at the same place in the response."""
    rows = [[name_of(group.label), kind, *(figure_cell(fifth, t_estimate(group.values(f"{measure}, {kind}, {fifth}")))
                                           for fifth in FIFTHS)]
            for group in groups for kind in ("filler", TAGGED, "reasoning")]
    return Table(f"Type by position, {measure}", f"Mean size in each fifth of a response. {MEANS}",
                 ["method", "type", *FIFTHS], rows)


def tables_types(groups: list[Group]) -> list[Table]:
    """Types against each other in two parts of the training, their shares, and their place in the response."""
    quarters = [f"{measure}, {when} quarter" for measure in ("contribution", "gradient") for when in ("first", "last")]
    shares = {f"{measure}, {role}": f"{measure}, {role} share"
              for measure in ("tokens", "credit", "contribution", "gradient") for role in ("filler", "reasoning")}
    return [
        table_of("Filler / reasoning over training", "Ratio of mean sizes in the first and in the last quarter of the "
                 "steps. A run that breaks does not write the types in the same proportion all the time, so its ratio "
                 f"over all steps compares different times. {MEANS}", groups, {name: name for name in quarters}),
        table_of("Token-type distribution", "Shares of the tokens, and of the summed sizes of each measure, that are "
                 f"filler and reasoning; the rest is structure. {MEANS}", groups, shares),
        *(table_positions(groups, measure) for measure in ("contribution", "gradient")),
        table_of("Early and late", "Mean size over the first fifth of a response divided by that over the last. Below "
                 f"1, late tokens get more. {MEANS}", groups,
                 {measure: f"{measure}, first / last" for measure in MEASURES}),
    ]


def tables_weights(groups: list[Group]) -> list[Table]:
    """How unequal the weights are, and the norm of the gradient that they lead to."""
    weights = {name: name for name in ("largest weight", "largest of the run", "effective number")}
    norms = {name: name for name in ("spread / mean", "first ten steps", "last ten steps")}
    return [
        table_of("Weights", "A token's weight is the size of its credit over its response's mean. Largest weight: that "
                 "of a response, averaged over responses, then the largest of the run. Effective number: (sum w)^2 / "
                 "sum w^2, in tokens, and as a share of the response's length: 1 where all weights are equal. Only "
                 f"responses that received credit count. {MEANS}", groups,
                 weights | {"its share": "effective sample size"}),
        table_of("Gradient norm", "Of the whole update, before clipping: mean over the steps of a run, standard "
                 f"deviation over its steps, and that as a multiple of the mean. {MEANS}", groups,
                 {"mean": "gradient norm", "spread": "its spread"} | norms),
    ]


# -------------------------------------------------------------------------------------------------- pictures


def short_name(label: str) -> str:
    """What a setting is called in a picture: its flags, without the method where it has flags."""
    return label.partition(" ")[2] or method_name(label)


def draw_learning(groups: list[Group], file: Path) -> None:
    """A panel per method with the learning curve of each of its settings, and GRPO's in grey."""
    baseline, methods = groups[0], dict.fromkeys(method_of(group.label) for group in groups[1:])
    figure, axes = new_figure(len(methods), 1, 3.8, sharey=True)
    for axis, method in zip(axes.flat, methods):
        drawn = [baseline, *(group for group in groups[1:] if method_of(group.label) == method)]
        for i, group in enumerate(drawn):
            draw_curve(axis, group, i - len(drawn) // 2, PALETTE[(i - 1) % len(PALETTE)] if i else GREY)
        axis.set(xlabel="step", title=method, ylim=(0, None), xticks=common_steps(drawn))
        axis.yaxis.set_major_formatter("{x:.0%}")
        axis.legend(fontsize=8)
    axes[0, 0].set_ylabel("held-out puzzles solved")
    save_figure(figure, file)


def draw_curve(axis: plt.Axes, group: Group, place: int, colour: str) -> None:
    """Mean over seeds with its 95% interval, `place` points to the right so that the bars of curves do not overlap."""
    curves = [row["curve"] for row in group.rows.values()]
    steps = np.array(common_steps([group]))  # (S,)
    mean, half = np.array([interval([curve[step] for curve in curves]) for step in steps]).T  # (S,) each
    axis.errorbar(steps + 0.012 * np.ptp(steps) * place, mean, half, color=colour, marker="os^Dv"[place % 5], ms=4,
                  capsize=2, lw=1.5, elinewidth=1, label=short_name(group.label))


def draw_types(groups: list[Group], file: Path) -> None:
    """Bars of the shares of filler, reasoning and structure in tokens, credit and gradient, a line per setting."""
    measures, lines = ("tokens", "credit", "gradient"), np.arange(len(groups))
    figure, axes = new_figure(len(measures), 1, 1.0 + 0.27 * len(groups), sharey=True)
    for axis, measure in zip(axes.flat, measures):
        left = np.zeros(len(groups))
        for role in ("reasoning", "filler", "structure"):
            share = np.array([group.values(f"{measure}, {role} share").mean() for group in groups])
            axis.barh(lines, share, left=left, color=COLOURS[role], label=role, height=0.7)
            left += share
        axis.set(title=f"Share of all {measure}", xlim=(0, 1))
        axis.xaxis.set_major_formatter("{x:.0%}")
    axes[0, 0].set_yticks(lines, [short_name(group.label) for group in groups])
    axes[0, 0].invert_yaxis()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save_figure(figure, file)


# ---------------------------------------------------------------------------------------------- command line


def write_page(folders: list[Path], out: Path) -> None:
    """Print all tables; write them, and the pictures beside them."""
    groups = load_groups(folders)
    tables = [table_learning(groups), *tables_summary(groups), *tables_types(groups), *tables_weights(groups)]
    text = "# Appendix B and experiments 1 and 2\n\n" + "\n".join(map(str, tables))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{FILE}.md").write_text(text, encoding="utf-8")
    draw_learning(groups, out / f"{FILE}-learning.png")
    draw_types(groups, out / f"{FILE}-types.png")
    print(f"{text}\nwrote {out / FILE}.md, and two pictures beside it")


def main() -> None:
    """Read the command line; report what can't be read in one sentence."""
    work_on_folders(lambda folders: write_page(folders, RESULTS), __doc__,
                    "name finished run folders, and no flags, such as: "
                    "python -m lab.original.appendix_b runs/*-seed[012]")


if __name__ == "__main__":
    main()
