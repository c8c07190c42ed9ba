"""How often the screen errs and what a word costs, by its rule and by the one before: on stored curves, drawn anew.

A function is an arm that was ever screened on Countdown: each seed is a curve of the arm minus the arm's mean, drawn
with replacement, on top of RLOO's mean and of a lead in one of three shapes. The box is drawn from RLOO's curves alike.
So collapses, skew and deviations are those of real runs; the function's deviation is its arm's, not RLOO's.

Run it:  python -m lab.screen.simulation
"""
from functools import cache
from pathlib import Path

import numpy as np

from lab import arms
from lab.screen import bounds
from plumbing.report import Table, student

PLACES = np.arange(0, 101, bounds.EVERY)  # steps, (6,)
SHAPES = {"constant": (0, 1, 1, 1, 1, 1), "growing": (0, 1, 2, 3, 4, 5), "in the last half": (0, 0, 0, 1, 1, 1)}
BOX, FORMER_BOX, FORMER_LEVEL = 41, 20, 0.0071  # runs of RLOO, and the p below which the former rule has a try
PATHS = 20_000


def until(curves: np.ndarray) -> np.ndarray:
    """The area (..., 5) of curves (..., 6) until each place but the first."""
    return ((curves[..., 1:] + curves[..., :-1]) / 2 * bounds.EVERY).cumsum(-1) / PLACES[1:]


@cache
def pools() -> dict[str, np.ndarray]:
    """By arm the areas (n, 5) of its curves minus their mean, as far apart as independent ones; RLOO's is the first."""
    found = {}
    for folder in (Path(__file__).parent, Path(__file__).parent / "calibration"):
        for row in arms.Room(folder, "", (), {}).rows().values():
            if "--task" not in row["arm"] and int(row["steps"]) == PLACES[-1]:
                curve = arms.figures_of(row)["curve"]
                name = row["arm"].replace("none --advantage rloo", "RLOO")
                found.setdefault(name, []).append([curve[place] for place in PLACES])
    return {name: until((np.array(x) - np.mean(x, 0)) * (len(x) / (len(x) - 1)) ** 0.5)
            for name, x in found.items() if len(x) > 2}


@cache
def draw(shape: str, lead: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Areas until each place of the seeds of functions, (PATHS, LAST, 5), and of the boxes beside, (PATHS, BOX, 5)."""
    rng, by_arm = np.random.default_rng(seed), pools()
    size = np.array([len(pool) for pool in by_arm.values()])
    arm, own = rng.choice(len(size), PATHS, p=size / size.sum()), np.empty((PATHS, bounds.LAST, 5))
    for i, pool in enumerate(by_arm.values()):
        own[arm == i] = pool[rng.integers(0, len(pool), ((arm == i).sum(), bounds.LAST))]
    added, rloo = until(np.array(SHAPES[shape], float)), by_arm["RLOO"]
    return own + lead * added / added[-1], rloo[rng.integers(0, len(rloo), (PATHS, BOX))]


def former(own: np.ndarray, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule before this one, on areas (paths, n) and (paths, runs): the word (paths,), and the seeds (paths,) that
    it took. From the third seed on, killed where the lead is not above 0, and a try at one level, by Welch's error with
    n - 1 degrees of freedom."""
    words, took = np.full(len(own), "undecided"), np.full(len(own), own.shape[1])
    for n in range(3, own.shape[1] + 1):
        x, runs = own[:, :n], box.shape[1]
        lead = x.mean(1) - box.mean(1)
        error = np.sqrt(x.var(1, ddof=1) / n + box.var(1, ddof=1) / runs)
        p = np.interp(lead / error, *student(min(n, runs) - 1)) / 2
        for word, now in (("kill", lead <= 0), ("try", (lead > 0) & (p < FORMER_LEVEL))):
            now = now & (words == "undecided")
            words[now], took[now] = word, n
    return words, took


def present(own: np.ndarray, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """This rule, on areas (paths, n, 5) and (paths, runs, 5) until each place: the word (paths,), and the runs (paths,)
    that it took, of which the first may have been stopped."""
    words, took = np.full(len(own), "undecided"), np.full(len(own), float(own.shape[1]))

    def end(word: str, now: np.ndarray, runs: float) -> None:
        now = now & (words == "undecided")
        words[now], took[now] = word, runs

    for i, place in enumerate(PLACES[1:]):
        end("kill", bounds.is_behind(bounds.leads(own[:, :1, i], box[:, :, i])), place / PLACES[-1])
    for n in range(bounds.FIRST, own.shape[1] + 1):
        e = bounds.leads(own[:, :n, -1], box[:, :, -1])
        end("try", bounds.is_try(e), n)
        end("kill", bounds.is_futile(e), n)
    return words, took


def table() -> Table:
    """Words and runs by both rules, of each lead in each shape."""
    rows = []
    for lead in (0, 1.5, 2.5, -4):
        for shape in SHAPES:
            own, box = draw(shape, lead / 100)
            sides = former(own[..., -1], box[:, :FORMER_BOX, -1]), present(own, box)
            cells = [f"{100 * np.mean(words == word):.1f}" for words, _ in sides for word in ("kill", "try")]
            took = [runs.mean() for _, runs in sides]
            rows.append([f"{lead}", shape, *cells, *(f"{x:.2f}" for x in took), f"{took[1] / took[0]:.2f}"])
    return Table("How often the screen ends in which word", (
        f"Leads in points of area, added to stored curves in three shapes; {PATHS:,} functions each, the first that is "
        "screened, on one of two axes. In percent; former: the rule of 7bd0384d, with its box of 20. Runs: the mean "
        "number that a word takes, one at a time, a stopped one by its share."),
        ["lead", "shape", "former: kill", "try", "now: kill", "try", "former: runs", "now: runs", "ratio"], rows)


if __name__ == "__main__":
    print(table())
