"""Figures that pages quote and no room's table has, looked at when results were known: python -m lab.rows."""
import csv
from pathlib import Path

import numpy as np
import torch

from lab.arms import apart, figures_of, measured, spent
from lab.statistics import cell, jackknife, points, read_column, within
from lab.truth.measure import PACKET, a_star_of
from lab.truth.score import Options, load_batch, read_truth
from lab.truth.scoring import WITHIN, share_of_tenth, updates_of
from methods import MITIGATIONS
from plumbing.comparison import Group
from plumbing.progress import one_sentence
from plumbing.report import Estimate, Table, t_estimate

LAB = Path(__file__).parent
TRUTHS = {name: LAB / file for name, file in (("countdown-tiny", "truth/data/ground_truth.npz"), (
    "countdown-small", "truth/data-small/ground_truth.npz"), ("Qwen, at the start", "real/data/truth-start.npz"))}
DRAWS = 200  # of a random A*
RLOO = "none advantage=rloo"
METHODS = {"vineppo": "vineppo", "ppo": "ppo", "entropy_ratio": "entropy_ratio advantage=rloo",
           "expert_iteration": "expert_iteration", "GRPO": "none"}
STUDY, HEADLINE, REAL = (list(csv.DictReader((LAB / name / "runs.csv").read_text(encoding="utf-8").splitlines()))
                         for name in ("study", "headline/final", "real"))


def study(level: str, label: str, *parts: str) -> Group:
    """Runs of the study, at the default rate unless the label names another."""
    return Group(label, {int(row["seed"]): figures_of(row) for row in STUDY if row["level"] == level and row["part"] in
                         parts and {row["method"], *row["setting"].split()} == {*label.split()}
                         and row["version"] == "2"})


def minus(a: Group, b: Group, *figures: str) -> list[str]:
    """How many runs both groups have, and one minus the other in each figure, in points."""
    return [f"{len(a.rows)}, {len(b.rows)}", *(points(t_estimate(a.values(x), b.values(x))) for x in figures)]


def tenths() -> Table:
    """What finds the tokens that decide, beside the choice by A* itself and what that would hold by chance."""
    rows, known = [], read_column(LAB / "truth" / "checks.md", "Do few tokens decide?", "largest tenth")
    for name, file in TRUTHS.items():
        truth = read_truth(file)
        other, tried = -np.expm1(truth["logprob"].astype(float)), truth["packets"] > 0  # (N,) each
        credit = truth["credits"][truth["methods"].tolist().index("entropy_ratio")]
        sizes = (truth["entropy"], other, np.abs(credit), np.abs(truth["advantage"]) * truth["logit_grad"])
        square = np.sort((np.where(tried, other, 0) * np.random.default_rng(0).normal(size=(DRAWS, len(tried)))) ** 2)
        chance = square[:, -(len(tried) // 10):].sum(1) / square.sum(1)  # (DRAWS,)
        rows.append([name, *(cell(share_of_tenth(x, truth)) for x in sizes), f"{0.1 / tried.mean():.2f}",
                     cell(known[name]), f"{chance.mean():.2f}"])
    return Table("The tenth of the tokens", (
        "Its share of A* squared, where it is chosen by a token's entropy; by 1 - p; by the size of entropy_ratio's "
        "credit, and of GRPO's gradient at the logits, which hold abs(A), too; at random among tokens with rollouts; "
        "by A* of other rollouts. Chance: the last, if A* were random with deviation 1 - p, its bound. 95% intervals "
        "over puzzles."),
        ["truth", "entropy", "1 - p", "entropy_ratio", "GRPO's gradient", "random", "A*", "chance"], rows)


def signs() -> Table:
    """The cheap methods with the largest rank correlation within responses."""
    truth = read_truth(TRUTHS["countdown-tiny"])
    batch = load_batch(truth, Options("regrade_ablation"), ())
    credit = MITIGATIONS["regrade_ablation"](batch, tokens=True)[batch.mask].double().numpy()  # (N,)
    tried, tag = truth["packets"] > 0, truth["piece"] == "</think>"
    found = {"regrade_ablation --tokens True": tried, "the same, without `</think>`": tried & ~tag}
    rows = [[name, "Countdown", cell(within(credit, truth["a_star"], truth, use, by_rank=True))]
            for name, use in found.items()]
    for name, task, file in (("token_type", "Countdown", "scores"), ("tempo", "Countdown", "scores"),
                             ("tempo", "squares", "scores-latin")):
        rows.append([name, task, cell(read_column(LAB / "truth" / f"{file}.md", WITHIN, "Spearman")[name])])
    return Table("Who finds the sign", (
        "Rank correlation of credit with A* within responses, over tokens with rollouts, 95% intervals over puzzles; "
        "the last three are of scores.md and scores-latin.md."), ["method", "task", "rank in response"], rows)


def ends() -> Table:
    """The last success at one rate."""
    rloo, *runs = (study("easy", label, "main", "forms", "fresh", "tune") for label in (RLOO, *METHODS.values()))
    return Table("Ends at the default rate", (
        "Easy puzzles, all at 2e-4, minus RLOO, on all seeds there are; Welch's intervals, uncorrected."),
        ["method", "seeds", "end", "area"],
        [[name, *minus(run, rloo, "end", "area")] for name, run in zip(METHODS, runs)])


def at_all_points(a: Group, b: Group) -> list[Estimate]:
    """Area and success of a group minus another one's up to the cost that both reached, read where either was."""
    last = min(spent(a)[-1], spent(b)[-1])
    inside = np.unique([*spent(a), *spent(b)])
    shared = np.append(inside[inside < last * (1 - 1e-9)], last)  # (n,)
    curves = [np.array([np.interp(shared, spent(side), list(row["curve"].values())) for row in side.rows.values()])
              for side in (a, b)]  # (seeds, n) each
    return [t_estimate(*(np.trapezoid(curve, shared) / np.ptp(shared) for curve in curves)),
            t_estimate(*(curve[:, -1] for curve in curves))]


def equal_cost() -> Table:
    """Areas at equal cost by two readings, and success there."""
    test = {name: study("easy", f"{label} lr=0.00028", "test") for name, label in (METHODS | {"RLOO": RLOO}).items()}
    pairs = {f"{name} - RLOO, easy, 2.8e-4": (test[name], test["RLOO"]) for name in METHODS if name != "GRPO"}
    pairs |= {f"{name} - RLOO, {level}": [study(level, label, "main") for label in (METHODS[name], RLOO)]
              for name, level in (("GRPO", "easy"), ("vineppo", "hard"))}
    many, oracle, few = (Group(arm, {int(row["seed"]): figures_of(row) for row in HEADLINE if row["arm"] == arm})
                         for arm in ("RLOO, 45 responses", "oracle, k=4", "RLOO"))
    pairs |= {"oracle, k=4 - RLOO": (oracle, few), "45 responses - RLOO": (many, few),
              "oracle, k=4 - 45 responses": (oracle, many)}
    rows = []
    for name, (a, b) in pairs.items():
        dear, last = max((a, b), key=lambda side: spent(side)[-1]), min(spent(a)[-1], spent(b)[-1])
        reached = np.interp(last, spent(dear), measured(dear))
        rows.append([name, *minus(a, b), f"{reached:.0f}", f"{1 + (measured(dear) < reached).sum()}",
                     points(apart(a, b, spent)), *map(points, at_all_points(a, b))])
    return Table("Equal cost", (
        "Up to the cost of the cheaper one: the steps of the dearer one, and the points of its curve; area, both read "
        "at the points of the one measured less often, then at all points; success there. A line between points lies "
        "below a concave curve: the first reading wrongs both, the second the dearer one, and with few points its area "
        "is not known. Welch's intervals, uncorrected."),
        ["contrast", "seeds", "steps", "points", "area, fewer points", "area, all points", "success"], rows)


def prices() -> Table:
    """What the headline's arms cost, by the price of training."""
    rows = []
    for price in (0, 1, 3, 6):
        weight, cost = {"tokens_sampled": 1, "tokens_read": price > 0, "tokens_updated": price}, {}
        for row in HEADLINE:
            cost[row["arm"]] = cost.get(row["arm"], 0) + sum(w * float(row[x]) for x, w in weight.items())
        few, many, oracle = (cost[arm] for arm in ("RLOO", "RLOO, 45 responses", "oracle, k=4"))  # ten runs each
        rows.append([f"{price}", f"{many / few:.1f}", f"{oracle / few:.1f}", f"{many / oracle:.2f}"])
    return Table("The headline's cost", (
        "In runs of RLOO, and 45 responses over measured credit, K = 4, if a token that is trained on costs so many "
        "passes beside sampling; at 0 a token that is read costs nothing, too."),
        ["passes", "45 responses", "measured credit", "ratio"], rows)


def noise() -> Table:
    """How much of the noise of measured credit is its rollouts'."""
    known = read_column(LAB / "study" / "signal.md", "Noise of a step", "all")
    rows = [[f"{arm}, three policies", cell(known[arm], 3)] for arm in ("none answers=45 advantage=rloo", "oracle k=4")]
    for m in (0.25, 0.5):
        mixed, pure, uniform = (known[f"oracle k=4{x}"].value for x in (f" mix={m}", "", " mix=1.0"))
        left = mixed - (1 - m) ** 2 * pure - m**2 * uniform
        rows.append([f"exact credit, by mix {m}", f"{left / (2 * m * (1 - m)):.3f}"])
    return Table("Noise of exact credit", (
        "Trace of the covariance of a step's gradient, RLOO's with 8 responses = 1. Credit mixed by m with uniform "
        "credit has (1 - m)^2 of its own noise, m^2 of that one's, and 2 m (1 - m) of their covariance. That is the "
        "noise of exact credit, as far as the gradients of different tokens are unrelated. At the start: measured on "
        "the groups of the small model's truth, with A* of success by up to K (1 - p) of its rollouts."),
        ["credit", "noise"], [*rows, *at_the_start()])


def at_the_start() -> list[list[str]]:
    """The noise of credit from K (1 - p) rollouts over RLOO's, with its interval by jackknife over puzzles."""
    file, rng = TRUTHS["countdown-small"], np.random.default_rng(0)
    batch = load_batch(truth := read_truth(file), Options("none", truth=str(file.parent)), ())
    tried, solved = truth["packets"] * PACKET, truth["solved"].sum(1)  # (N,) each

    def by_rollouts(K: int) -> np.ndarray:
        some = np.where(tried > 0, np.ceil(-np.expm1(truth["logprob"].astype(float)) * K), 0).astype(int)
        return a_star_of(truth, rng.hypergeometric(solved, tried - solved, some), some)[0]

    right = truth["success"][truth["position"] == 0].reshape(len(batch.puzzles), -1)  # (Q, 8)
    rloo = (right - right.mean(1, keepdims=True)).ravel() * right.shape[1] / (right.shape[1] - 1)  # minus the others'
    credits = [rloo[truth["response"].astype(int)], truth["a_star"], *(by_rollouts(K) for K in (16, 4, 4, 4, 4))]
    base, *grams = (g @ g.T for g in updates_of(credits, batch).astype(float))  # (Q, Q) each
    spread = lambda g, use: np.trace(g[use][:, use]) - g[use][:, use].sum() / use.sum()
    over = lambda some: jackknife(lambda use: np.mean([spread(g, use) for g in some]) / spread(base, use), len(base))
    return [[f"{name}, at the start", cell(over(part), 3)] for name, part in (
        ("A*, K = 200", grams[:1]), ("K = 16", grams[1:2]), ("K = 4, four draws", grams[2:]))]


def filler() -> Table:
    """Filler against reasoning while a real model learns."""
    runs: dict[tuple[str, ...], list[dict]] = {}
    tasks = {"original": "Countdown", "laptop": "word problems", "twenty": "word problems"}
    for row in REAL:
        if row["method"] == "none" and "lora_rank" not in row["setting"] and row["level"] in tasks:
            method = "RLOO" if "rloo" in row["setting"] else "GRPO"
            runs.setdefault((tasks[row["level"]], method, row["steps"]), []).append(row)
    show = lambda rows, x: ", ".join(f"{float(row[f'{x}, filler / reasoning']):.2f}" for row in rows)
    return Table("Filler over reasoning while a real model learns", (
        "Ratio of mean sizes over all tokens of a run, by seed; filler holds lone spaces."),
        ["task", "method", "steps", "contribution", "gradient"],
        [[*key, show(rows, "contribution"), show(rows, "gradient")] for key, rows in runs.items()])


@one_sentence()
def main() -> None:
    """Write rows.md."""
    torch.set_num_threads(1)
    tables = [make() for make in (tenths, signs, ends, equal_cost, prices, noise, filler)]
    (LAB / "study" / "rows.md").write_text("\n".join(map(str, tables)), encoding="utf-8")


if __name__ == "__main__":
    main()
