"""Tables and pictures of a pretrained model's credit, from the arrays published in lab/real/data.

first-countdown.npz and first-words.npz are the credit logs of part `first` (designs.md, section 1); truth-start.npz and
truth-trained.npz are what lab/truth/measure.py measured before and after training (section 2). A folder of learning/
has a copy of a whole run's metrics.csv (section 4), and one of them its credit log, all steps in one file. original/,
warm/ and first-smollm2/ have both of the runs of sections 5 and 6.

Run it:  python -m lab.real.report        writes tables.md, truth.png and learning.png beside this file
         python -m lab.real.report --publish runs/study-2/warm/none-advantage-rloo-lr-2e-05-seed0 lab/real/data/warm
"""
import shutil
from pathlib import Path

import numpy as np

from analyze import credit_tables, position_bins, with_measures
from lab.estimates import cell
from lab.picture import draw
from lab.real.twenty import tables_twenty
from lab.statistics import mean_ratio, rank_pair
from lab.study.engine import read_levels, read_rows, to_run
from lab.study.pictures import short
from lab.study.plan import COUNTED
from lab.truth.checks import noise_alone
from lab.truth.file import read_truth
from lab.truth.measure import add_values
from lab.truth.scoring import HALVES, all_credit, share_of, squares, top_tenth
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import GREY, PALETTE, Estimate, Table, clustered_mean, new_figure, pm, t_statistics
from plumbing.runs import read_credit, read_metrics
from tasks.text import FILLER, REASONING, ROLES

ROOM = Path(__file__).parent
TOY = ROOM.parent / "truth" / "data" / "ground_truth.npz"  # of the bundled model, on Countdown
FIRST = {"Countdown": "first-countdown", "word problems": "first-words"}
TRUTHS = {"at the start": "truth-start", "after training": "truth-trained"}
MEASURES = ("contribution", "gradient")
UNPUBLISHED = ("advantage", "puzzle_text")  # the first follows from rewards
LEARNING = ROOM / "data" / "learning"
# What each run is whose credit is shown, and where its credit log and metrics are.
SHOWN = {"RLOO on word problems": LEARNING / "none-seed0", "GRPO on Countdown": ROOM / "data" / "original",
         "RLOO on Countdown after a warm start": ROOM / "data" / "warm"}
SPACE = {"Qwen": 220, "SmolLM2": 216}  # tokens of their vocabularies
# Document 000, over its 100 steps, by advantage * log p; its filler counts tags.
THEIRS = {"reasoning, share of tokens": "32.2%", "length, tokens": "183 at first, 42 at the end",
          "responses, tokens": "6,400, 303,042", "filler and tags / reasoning, contribution": "1.31",
          "log p: filler and tags, reasoning": "-0.555, -0.489", "first tenth / last, contribution": "1.63",
          "mean contribution: credit above 0, 0 or below": "-0.560, 0.242",
          "mean contribution: filler and tags, reasoning": "0.0786, 0.0793",
          "share with abs(t) above 3, below 1.5": "20%, 39%", "mean abs(t)": "1.92"}
THEIR_FIFTHS = ((0.358, 0.346), (0.366, 0.208), (0.318, 0.298), (0.389, 0.236), (0.236, 0.257))


def ratio_of(log: dict, measure: str, over: np.ndarray, under: np.ndarray) -> Estimate:
    """Mean size of a measure over some tokens (N,) bool over that of others, with its interval over puzzles."""
    return mean_ratio(np.abs(log[measure]), over, under, np.unique(log["puzzle"], return_inverse=True)[1])


def first_figures(log: dict, space: int) -> dict[str, str]:
    """What credit looks like. space: the token of a single space, which stands before nearly every number; the toy's
    tokens have it in the number's token, and so as reasoning."""
    filler, reasoning, tags = (log["role"] == role for role in range(3))
    words = filler & (log["token"] != space)
    (_, first), *_, (_, last) = position_bins(log, 10)
    t = np.abs(t_statistics(log["contribution"], log["position"]))
    answer = log["in_answer"] > 0

    def ratios(name: str, over: np.ndarray, under: np.ndarray) -> dict[str, str]:
        return {f"{name}, {measure}": cell(ratio_of(log, measure, over, under)) for measure in MEASURES}

    return {
        "responses, tokens": f"{log['response_id'][-1] + 1:,}, {len(log['response_id']):,}",
        "length, tokens": f"{len(log['response_id']) / (log['response_id'][-1] + 1):.0f}",
        "reasoning, share of tokens": f"{reasoning.mean():.1%}",
        **ratios("filler / reasoning", filler, reasoning),
        "lone spaces, share of filler": f"{1 - words.sum() / filler.sum():.1%}",
        **ratios("filler without lone spaces / reasoning", words, reasoning),
        **ratios("filler and tags / reasoning", filler | tags, reasoning),
        "log p: filler and tags, reasoning": ", ".join(
            f"{log['logprob'][x].mean():.3f}" for x in (filler | tags, reasoning)),
        **ratios("first tenth / last", first, last),
        **ratios("answer / thoughts", answer, ~answer),
        "mean contribution: credit above 0, 0 or below": ", ".join(
            f"{log['contribution'][x].mean():.3f}" for x in (log["credit"] > 0, log["credit"] <= 0)),
        "mean contribution: credit below 0": f"{log['contribution'][log['credit'] < 0].mean():.3f}",
        "mean contribution: filler and tags, reasoning": ", ".join(
            f"{log['contribution'][x].mean():.4f}" for x in (filler | tags, reasoning)),
        "share with abs(t) above 3, below 1.5": f"{(t > 3).mean():.0%}, {(t < 1.5).mean():.0%}",
        "mean abs(t)": f"{t.mean():.2f}"}


def table_first(logs: dict[str, dict]) -> Table:
    """A step before any training, of each task, and two whole runs, beside the original's figures."""
    figures = [first_figures(log, SPACE["SmolLM2" if name.startswith("SmolLM2") else "Qwen"])
               for name, log in logs.items()]
    rows = [[name, *(f[name] for f in figures), THEIRS.get(name, "")] for name in figures[0]]
    return Table("Beside the original's figures", (
        "RLOO's credit on zero-shot responses, 8 to each of 64 problems; then pooled over training, as the original's "
        "in the last column, GRPO's. SmolLM2's, on easy Countdown, by RLOO: zero-shot, and, after imitating the toy's "
        "searches, pooled over training. Ratios are of mean sizes, with 95% intervals over problems. t: of the mean at "
        "each position that 30 responses reach. The original's groups of equal rewards count with credit below 0."),
        ["", *logs, "the original, Countdown"], rows)


def table_fifths(log: dict) -> Table:
    """Filler with tags against reasoning, by fifths of a response, beside the original's figures."""
    reasoning, rows = log["role"] == REASONING, []
    for (name, part), (filler, other) in zip(position_bins(log, 5), THEIR_FIFTHS):
        rows.append([name, *(cell(ratio_of(log, measure, part & ~reasoning, part & reasoning))
                             for measure in MEASURES), f"{filler / other:.2f}"])
    return Table("Filler and tags over reasoning, by position, Countdown", (
        "Ratio of mean sizes, with its 95% interval over puzzles."), ["position", "contribution", "gradient",
                                                                      "the original, contribution"], rows)


def table_learning(what: str, log: dict, metrics: dict[str, np.ndarray]) -> Table:
    """A run by tens of its steps: what its responses are like, and where the credit goes. what: its method and task."""
    measured = zip(metrics["step"], metrics["heldout_success"], metrics["heldout_stderr"])
    rows, heldout = [], ", ".join(f"{success:.1%} ± {1.96 * error:.1%} at step {step:.0f}"
                                  for step, success, error in measured if not np.isnan(success))
    for first in range(1, int(log["step"].max()) + 1, 10):
        part = {name: column[(log["step"] >= first) & (log["step"] < first + 10)] for name, column in log.items()}
        begins = part["position"] == 0
        reward, step, puzzle = (part[name][begins] for name in ("reward", "step", "puzzle"))
        right = reward > 0.5  # 0.1 for the layout, and 1 for the answer
        equal = [np.ptp(reward[puzzle == p]) == 0 for p in np.unique(puzzle)]
        filler, reasoning = part["role"] == FILLER, part["role"] == REASONING
        ratios = [cell(Estimate(ratio_of(part, measure, filler, reasoning).value)) for measure in MEASURES]
        rows.append([f"{first}-{step.max()}", f"{begins.sum()}", f"{right.mean():.2f}",
                     f"{10 * (reward - right).mean():.2f}", f"{len(begins) / begins.sum():.0f}",
                     f"{part['entropy'].mean():.3f}", f"{np.mean(equal):.0%}", f"{filler.mean():.1%}",
                     f"{(part['in_answer'] > 0).mean():.1%}", *ratios])
    return Table(f"{what} while it learns", (
        f"One run, {np.sum(log['position'] == 0) // log['step'].max()} responses a step. The responses of each ten "
        "steps: the share that is right, how much of the layout they have, tokens, mean entropy in nats, groups whose "
        "rewards are all equal, the shares of filler and of what stands from the graded answer on, and the ratio of "
        "filler's mean size to reasoning's, by contribution and by gradient. Held-out success, 256 problems: "
        f"{heldout}."),
        ["steps", "responses", "right", "format", "length", "entropy", "equal groups", "filler", "from the answer on",
         "contribution", "gradient"], rows)


def published_runs() -> list[tuple[str, int, dict[str, np.ndarray]]]:
    """Method, seed and metrics of every run in data/learning."""
    names = [(folder, *folder.name.rsplit("-seed", 1)) for folder in sorted(LEARNING.iterdir())]
    return [(method, int(seed), read_metrics(folder)) for folder, method, seed in names]


def table_runs(rows: list[dict[str, str]]) -> Table:
    """Every run of section 4 by its metrics; rows, of lab/real/runs.csv, have its success on GSM-Symbolic, once it is
    measured."""
    runs = [to_run(row) for row in rows if row["level"] == "laptop"]
    others = {(run.label.split()[0], run.seed): 100 * run.figures["others"] for run in runs}
    shown = []
    for name, seed, metrics in published_runs():
        success = [pm(100 * metrics["heldout_success"][step], 196 * metrics["heldout_stderr"][step], 1)
                   for step in (0, 20, 40)]
        other = f"{others[name, seed]:.1f}" if (name, seed) in others else ""
        spent = [f"{np.nansum(metrics[column]):,.0f}" for column in ("tokens_sampled", "tokens_updated", "seconds")]
        shown.append([short(name + " advantage=rloo"), str(seed), *success, other, *spent])
    return Table("The runs", (
        "Held-out success on 256 problems after 0, 20 and 40 steps, and on 256 of GSM-Symbolic after 40, in percent, "
        "± half of a 95% interval over problems; tokens; seconds of all steps on one or two cores, with other "
        "programs beside them."),
        ["method", "seed", "start", "step 20", "step 40", "GSM-Symbolic", "sampled", "updated", "seconds"], shown)


def draw_learning(file: Path) -> None:
    """Success by step: of the responses (lines, means of five steps), held out (dots); and the entropy of each run."""
    figure, (left, right) = new_figure(2, 3.6)
    for (name, seed, metrics), colour in zip(published_runs(), (*PALETTE, GREY, "#a794d0", "#000000")):
        label = f"{short(name + ' advantage=rloo')}, seed {seed}"
        means = {column: np.convolve(metrics[column][1:], np.ones(5) / 5, "valid") for column in ("success", "entropy")}
        steps = np.arange(len(means["success"])) + 3  # the middle of each five
        style = {"color": colour, "linestyle": ("-", "--", ":", "-.", (0, (1, 5)))[seed]}
        left.plot(steps, 100 * means["success"], label=label, **style)
        left.errorbar(metrics["step"], 100 * metrics["heldout_success"], 196 * metrics["heldout_stderr"], fmt="o",
                      color=colour)
        right.plot(steps, means["entropy"], **style)
    left.set(xlabel="step", ylabel="problems solved, %", title="Success by step")
    right.set(xlabel="step", ylabel="entropy, nats", title="Exploration by step", ylim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file)


def table_where(title: str, truth: dict, space: int | None = None) -> Table:
    """On which tokens the truth lies. space: as in `first_figures`."""
    other, size, credit = -np.expm1(truth["logprob"]), np.abs(truth["a_star"]), np.abs(truth["advantage"])
    largest, square = "the tenth with the largest abs(A*)", squares(truth)  # largest: chosen by its noise, too
    noise = noise_alone(truth)
    by_problem = np.bincount(truth["group"].astype(int), square)
    groups = {role: truth["role"] == i for i, role in enumerate(ROLES)}
    if space is not None:
        groups["filler without lone spaces"] = groups["filler"] & (truth["token"] != space)
    groups |= {"thoughts": truth["in_answer"] == 0, "answer": truth["in_answer"] > 0,
               largest: top_tenth(size), "the tenth with the largest 1 - p": top_tenth(other)}
    rows = [[name, f"{use.mean():.1%}", cell(share_of(truth, use, size)),
             "" if name == largest else cell(share_of(truth, use, square)),
             f"{credit @ use / credit.sum():.1%}", f"{other @ use / use.sum():.2f}"] for name, use in groups.items()]
    return Table(title, (
        f"{len(np.unique(truth['response']))} responses to {len(np.unique(truth['group']))} problems. Share of the sum "
        "of abs(A*), which holds the noise of A*, too; of A* squared, by products of two halves of the rollouts, which "
        "does not; with 95% intervals over problems; and of GRPO's credit. Of noise alone, the difference of the "
        f"halves, the largest tenth has {noise @ top_tenth(noise) / noise.sum():.0%}. One token has "
        f"{square.max() / square.sum():.0%} of A* squared, one problem {by_problem.max() / square.sum():.0%}."),
        ["tokens", "share of tokens", "share of abs(A*)", "share of A* squared", "share of abs(credit)",
         "mean 1 - p"], rows)


def table_ranks(truth: dict) -> Table:
    """Which function's credit comes close to A*."""
    found = {name: rank_pair(x, truth["a_star"], truth) for name, x in all_credit(truth).items()}
    found[HALVES] = rank_pair(*truth["a_star_halves"].T, truth)
    order = sorted(found, key=lambda name: -np.nan_to_num(found[name][1].value, nan=-2.0))
    return Table("Credit against A*, at the start", (
        "Rank correlation over all tokens, and within responses over those with rollouts; empty where credit is the "
        "same on all tokens of a response. 95% intervals over problems, by bootstrap."),
        ["function", "all tokens", "within responses"], [[name, *map(cell, found[name])] for name in order])


def table_sizes(when: str, truth: dict) -> Table:
    """Do the sizes that are cheap to know find the tokens that matter?"""
    listed = {"1 - p": -np.expm1(truth["logprob"]), "entropy": truth["entropy"], "abs(log p)": -truth["logprob"],
              "‖onehot - p‖": truth["logit_grad"]}
    rows = [[name, *(cell(e) for y in (np.abs(truth["a_star"]), noise_alone(truth)) for e in rank_pair(x, y, truth))]
            for name, x in listed.items()]
    return Table(f"Size against abs(A*), {when}", (
        "Rank correlation, as above; then with A*'s noise alone, the difference of the halves."),
        ["size", "all tokens", "within responses", "noise, all tokens", "noise, within responses"], rows)


def table_measured(truths: dict[str, dict]) -> Table:
    """How much was sampled, and how exactly."""
    figures = []
    for truth in truths.values():
        first, tried = truth["position"] == 0, truth["packets"] > 0
        figures.append({
            "responses, tokens": f"{first.sum()}, {len(first):,}", "right": f"{truth['success'][first].mean():.1%}",
            "rollouts, tokens sampled for them": f"{8 * truth['packets'].sum():,}, {truth['sampled']:,}",
            "tokens with rollouts": f"{tried.mean():.1%}",
            "standard error of A*, root mean square": f"{np.sqrt(np.mean(truth['a_star_error'][tried] ** 2)):.3f}",
            "mean abs(A*) ± half of its interval": pm(*clustered_mean(
                np.abs(truth["a_star"][tried]), truth["group"][tried].astype(int)))})
    return Table("What was measured", "A* of success, backwards from the end of a response.", ["", *truths],
                 [[name, *(f[name] for f in figures)] for name in figures[0]])


def publish(run: Path, folder: Path) -> None:
    """Copy a run's metrics.csv, and its credit log as one file."""
    steps = read_credit(run, read_metrics(run))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "credit.npz", **{name: np.concatenate([step[name] for step in steps])
                                                  for name in steps[0] if name not in UNPUBLISHED})
    shutil.copy(run / "metrics.csv", folder)


@one_sentence()
def main() -> None:
    """Write tables.md, truth.png and learning.png, from the published arrays; or publish those of a run."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--publish", nargs=2, type=Path, metavar=("RUN", "FOLDER"), help="only copy a run's arrays")
    if given := parser.parse_args().publish:
        return publish(*given)
    first = {task: with_measures(dict(np.load(ROOM / "data" / f"{name}.npz"))) for task, name in FIRST.items()}
    truths = {when: read_truth(ROOM / "data" / f"{name}.npz") for when, name in TRUTHS.items()}
    for truth in truths.values():
        add_values(truth)  # errors as they are estimated today
    learning = {what: with_measures(dict(np.load(run / "credit.npz"))) for what, run in SHOWN.items()}
    own = with_measures(dict(np.load(ROOM / "data" / "first-smollm2" / "credit.npz")))
    tables = [table_first(first | {"Countdown, 60 steps": learning["GRPO on Countdown"], "SmolLM2, zero-shot": own,
                                   "SmolLM2, 40 steps": learning["RLOO on Countdown after a warm start"]}),
              table_fifths(first["Countdown"]),
              *(table._replace(title=f"GRPO on Countdown: {table.title.lower()}") for table in credit_tables(
                  learning["GRPO on Countdown"] | {"advantage": learning["GRPO on Countdown"]["credit"]}, None)),
              *(table_learning(what, learning[what], read_metrics(run)) for what, run in SHOWN.items()),
              table_runs(read_rows(ROOM / "runs.csv")),
              *tables_twenty(read_levels(ROOM / "runs.csv", *COUNTED).get("twenty", {})),
              table_measured(truths),
              *(table_where(f"Where the truth lies {when}", truth, SPACE["Qwen"]) for when, truth in truths.items()),
              table_where("Where it lies in the toy", read_truth(TOY)),
              table_ranks(truths["at the start"]),  # after training hardly a pair of responses differs
              *(table_sizes(when, truth) for when, truth in truths.items())]
    (ROOM / "tables.md").write_text("\n".join(map(str, tables)), encoding="utf-8")
    draw(truths["at the start"], ROOM / "truth.png")
    draw_learning(ROOM / "learning.png")
    print(f"wrote {ROOM / 'tables.md'}, truth.png and learning.png")


if __name__ == "__main__":
    main()
