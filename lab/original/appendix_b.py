"""Appendix B and experiments 1 and 2 of the original work: what the discount of `outcome_conditional` and the epsilon
of `inverse_logprob` do to learning and to credit.

    python -m lab.original.appendix_b runs/*-seed[012]      README.md here has the commands that made the runs

Reads finished run folders with their credit logs, groups them by method and settings, and writes appendix-b.md with two
pictures beside it. Any methods will do, if the runs of GRPO (`none`) are there and all took as many steps.

Differences from the original's tables:
1. The contribution, credit * log p, includes the method's weight. Their log stored advantage * log p, which shows
   no weight and changes only with what the model learns; the column `as they logged` holds that measure.
2. Tags and the end token are a type of their own, `structure`. In their tables they are filler; where a column
   counts them as filler, it says so.
3. Every figure is a mean over seeds with an interval.
"""
from pathlib import Path

import numpy as np

from analyze import COLOURS, MEASURES, load_runs, mean_size, method_name, position_bins, read_log, training_time
from lab.estimates import points
from lab.study.engine import name_of
from plumbing.report import GREY, PALETTE, Table, interval, new_figure, plt, pm, ratio, save_figure, t_estimate
from plumbing.runs import Group, group_runs, read_metrics, unequal_inputs, unequal_steps, unfinished, work_on_folders
from tasks.text import ROLES

RESULTS = Path(__file__).parent
FIFTHS = tuple(f"{20 * i}-{20 * i + 20}%" for i in range(5))
SHARES = ("tokens", "credit", "gradient")  # what each type of token has a share of
MEANS = "Mean over seeds ± half of its 95% interval (Student's t)."


# --------------------------------------------------------------------------------------------------- one run


def type_figures(log: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one run, filler / reasoning by mean size, and the share of each type in tokens, credit and gradient.

    A run that breaks writes less and less filler, and gives no credit while all responses fail alike. A ratio over the
    whole run compares the types at different times; one over its first quarter does not.
    """
    filler, reasoning = (log["role"] == i for i in (0, 1))  # (N,) each
    first = training_time(log) < 0.25  # (N,)
    figures = {"as they logged": size_ratio(log, "as they logged", ~reasoning, reasoning)}
    for measure in MEASURES:
        figures[f"{measure}, tags as filler"] = size_ratio(log, measure, ~reasoning, reasoning)
        figures[f"{measure}, first quarter"] = size_ratio(log, measure, filler & first, reasoning & first)
    for name in SHARES:
        total = np.bincount(log["role"], np.abs(log[name]), 3)  # (3,)
        figures |= {f"{name}, {role}": ratio(total[i], total.sum()) for i, role in enumerate(ROLES)}
    return figures


def size_ratio(log: dict[str, np.ndarray], measure: str, over: np.ndarray, under: np.ndarray) -> float:
    """The mean size of a measure over some tokens (N,) bool, divided by that over others."""
    return ratio(mean_size(log, over, measure)[0], mean_size(log, under, measure)[0])


def position_figures(log: dict[str, np.ndarray]) -> dict[str, float]:
    """Of one run, the mean size of each measure by type and fifth of the response, and the first fifth by the last."""
    parts, figures = position_bins(log, 5), {}
    for measure in MEASURES:
        figures[f"{measure}, first / last"] = size_ratio(log, measure, parts[0][1], parts[-1][1])
        for fifth, inside in parts:
            for i, role in enumerate(ROLES[:2]):
                figures[f"{measure}, {role}, {fifth}"] = mean_size(log, inside & (log["role"] == i), measure)[0]
    return figures


def norm_figures(metrics: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean gradient norm at both ends of a run, and the spread over its steps as a multiple of the mean."""
    norm = metrics["grad_norm"][1:]  # row 0 is the start model
    return {"first ten steps": norm[:10].mean(), "last ten steps": norm[-10:].mean(),
            "spread / mean": ratio(norm.std(), norm.mean())}


def all_figures(folder: Path) -> dict[str, float]:
    """Everything that the tables here show of a run beyond analyze.summarize."""
    metrics = read_metrics(folder)
    log = read_log(folder, metrics)
    log |= {"as they logged": log["advantage"] * log["logprob"], "tokens": np.ones(len(log["role"]))}
    return type_figures(log) | position_figures(log) | norm_figures(metrics)


def load_groups(folders: list[Path]) -> list[Group]:
    """The runs by method and settings: GRPO first, then methods in the order they were named, their settings sorted."""
    runs = [run._replace(figures=run.figures | all_figures(Path(run.name))) for run in load_runs(folders)]
    if warning := unequal_steps(runs) or unfinished(runs) or unequal_inputs(runs):
        raise ValueError(warning)
    order = [run.label.split()[0] for run in runs]  # a label is a method and its settings
    groups = sorted(group_runs(runs), key=lambda group: (group.baseline is not group,
                                                         order.index(group.label.split()[0]), group.label))
    if len(groups) == 1 or any(group.baseline is not groups[0] for group in groups):
        raise ValueError("name runs of GRPO (none) and of other methods, with the same settings but for the method's")
    return groups


# ---------------------------------------------------------------------------------------------------- tables


def cells(group: Group, figures: list[str]) -> list[str]:
    """The mean of each figure over the runs of a group, with its interval."""
    return [pm(*interval(group.values(figure))) for figure in figures]


def table_of(title: str, note: str, groups: list[Group], figures: list[str]) -> Table:
    """A row per setting, with these figures."""
    rows = [[name_of(group.label), f"{len(group.rows)}", *cells(group, figures)] for group in groups]
    return Table(title, f"{note} {MEANS}", ["method", "seeds", *figures], rows)


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


def table_positions(groups: list[Group], measure: str) -> Table:
    """Types of token at the same place in the response."""
    rows = [[name_of(group.label), role, *cells(group, [f"{measure}, {role}, {fifth}" for fifth in FIFTHS])]
            for group in groups for role in ROLES[:2]]
    return Table(f"Type by position, {measure}", f"Mean size in each fifth of a response. {MEANS}",
                 ["method", "type", *FIFTHS], rows)


def all_tables(groups: list[Group]) -> list[Table]:
    """Everything on the page."""
    ratios = [f"{measure}, {name}" for measure in MEASURES
              for name in ("filler / reasoning", "tags as filler", "first quarter")]
    return [
        table_learning(groups),
        table_of("Filler / reasoning", "Ratio of mean sizes over a run. `tags as filler`: the original's types, in "
                 "which tags and the end token are filler. `first quarter`: of the steps, since a run that breaks does "
                 "not write the types in the same proportion all the time. `as they logged`: advantage · log p, which "
                 "leaves out the method's weight, with tags as filler.", groups, [*ratios, "as they logged"]),
        table_of("Token-type distribution", "Shares of the tokens, and of the summed sizes of credit and gradient, "
                 "that are filler and reasoning; the rest is structure.", groups,
                 [f"{name}, {role}" for name in SHARES for role in ROLES[:2]]),
        *(table_positions(groups, measure) for measure in MEASURES),
        table_of("Early and late", "Mean size over the first fifth of a response divided by that over the last. Below "
                 "1, late tokens get more.", groups, [f"{measure}, first / last" for measure in MEASURES]),
        table_of("Gradient norm", "Of the whole update, before clipping: its standard deviation over the steps of a "
                 "run as a multiple of its mean, and the mean at both ends.", groups,
                 ["spread / mean", "first ten steps", "last ten steps"]),
    ]


# -------------------------------------------------------------------------------------------------- pictures


def short_name(label: str) -> str:
    """What a setting is called in a picture: its flags, without the method where it has flags."""
    return label.partition(" ")[2] or method_name(label)


def draw_learning(groups: list[Group], file: Path) -> None:
    """A panel per method with the learning curve of each of its settings, and GRPO's in grey."""
    baseline, methods = groups[0], dict.fromkeys(group.label.split()[0] for group in groups[1:])
    figure, axes = new_figure(len(methods), 1, 3.8, sharey=True)
    for axis, method in zip(axes.flat, methods):
        drawn = [baseline, *(group for group in groups[1:] if group.label.split()[0] == method)]
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
    lines = np.arange(len(groups))
    figure, axes = new_figure(len(SHARES), 1, 1.0 + 0.27 * len(groups), sharey=True)
    for axis, measure in zip(axes.flat, SHARES):
        left = np.zeros(len(groups))
        for role in ("reasoning", "filler", "structure"):
            share = np.array([group.values(f"{measure}, {role}").mean() for group in groups])
            axis.barh(lines, share, left=left, color=COLOURS[role], label=role, height=0.7)
            left += share
        axis.set(title=f"Share of all {measure}", xlim=(0, 1))
        axis.xaxis.set_major_formatter("{x:.0%}")
    axes[0, 0].set_yticks(lines, [short_name(group.label) for group in groups])
    axes[0, 0].invert_yaxis()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save_figure(figure, file)


# ---------------------------------------------------------------------------------------------- command line


def write_page(folders: list[Path]) -> None:
    """Print all tables; write them, and the pictures beside them."""
    groups = load_groups(folders)
    text = "# Appendix B and experiments 1 and 2\n\n" + "\n".join(map(str, all_tables(groups)))
    (RESULTS / "appendix-b.md").write_text(text, encoding="utf-8")
    draw_learning(groups, RESULTS / "appendix-b-learning.png")
    draw_types(groups, RESULTS / "appendix-b-types.png")
    print(f"{text}\nwrote {RESULTS / 'appendix-b.md'}, and two pictures beside it")


def main() -> None:
    """Read the command line; report what can't be read in one sentence."""
    work_on_folders(write_page, __doc__, "name finished run folders, and no flags, such as: "
                                         "python -m lab.original.appendix_b runs/*-seed[012]")


if __name__ == "__main__":
    main()
