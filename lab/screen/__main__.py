"""Is a credit function worth more than an afternoon? It ends in kill, undecided or try, at equal steps and equal cost.

    python -m lab.screen surprise --power 0.5 --advantage rloo      its name and flags, as for train.py --mitigation
    python -m lab.screen surprise --advantage rloo --tasks math     on word problems, too, unless Countdown kills it
    python -m lab.screen                                            trains what the box lacks, runs of RLOO

After a step and a score it is trained as the box was, on fresh seeds, with a look after each from the third to the
eighth, see bounds.py; a try has to lead its own credit in random order, too. Stopped, it resumes, from runs/screen/.
"""
import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab import arms
from lab.gradients.measure import measure
from lab.screen import bounds
from lab.statistics import points
from methods.registry import CREDIT_FUNCTIONS
from plumbing.comparison import Group
from plumbing.files import require
from plumbing.flags import Arguments, changed, new_parser
from plumbing.terminal import clock, one_sentence
from plumbing.report import Estimate, Table, new_figure, student
from plumbing.runs import read_metrics
from settings import Settings
from start import parse_flags

RLOO = "none --advantage rloo"
TASKS = {"countdown": bounds.BOX, "math": 5, "latin": 5}  # and how many runs of RLOO the box has
BOX = arms.Room(Path(__file__).parent, "--eval_every 10 --pass_at 0", (), {})
ROOM = arms.Room(Path("runs/screen"), "--eval_every 20 --pass_at 0", (), {})  # least noise per second: README.md
AGAIN, CONTROL = range(2), 3  # the box's seeds that are trained here, too; seeds of the credit in random order
FIXED = ("model", "task", "data", "eval_data", "out", "seed", "steps", "questions", "responses", "max_new_tokens",
         "temperature", "normalize", "eval_every", "eval_problems", "eval_greedy", "pass_at")
AXES = {"equal steps": arms.measured, "equal cost": arms.spent}


class Lead(NamedTuple):
    """How a function fares on one task and axis."""

    task: str
    axis: str
    word: str
    looks: list[Estimate]  # its lead over the box at each look
    decided: int  # seeds at the look that decided, or at the last one
    cost: float  # of its runs, over the box's
    why: str = ""


def on(task: str, words: str) -> str:
    """A function and its flags, on a task."""
    return words + f" --task {task}" * (task != Settings.task)


def box(task: str) -> arms.Room:
    """The runs of RLOO on a task."""
    return BOX._replace(seeds=range(TASKS[task]), arms={on(task, "RLOO"): on(task, RLOO)})


def stored(task: str) -> Group:
    """The runs of RLOO on a task that the box has."""
    return arms.read_groups(box(task))[on(task, "RLOO")]


def looks(own: Group, rloo: Group, axis: str) -> list[Estimate]:
    """The lead over the box of the seeds so far, at each look."""
    rows = list(own.rows.items())
    return [arms.apart(Group("", dict(rows[:n])), rloo, AXES[axis], bounds.freedom(n, len(rloo.rows)))
            for n in range(bounds.FIRST, len(rows) + 1)]


def word(leads: list[Estimate], below: float) -> tuple[str, int]:
    """The word by the first look that decides, and after how many seeds; a lead that is no number is none."""
    for n, e in enumerate(leads, bounds.FIRST):
        if not e.value > 0 or e.p / 2 < below:
            return "try" if e.value > 0 else "kill", n
    return "undecided", bounds.FIRST + len(leads) - 1


def seeds_to_decide(e: Estimate, n: int, below: float, rloo: Group) -> str:
    """About how many seeds make a try of a lead that stays as it is after n: their squared error falls as 1 / n, and
    that of the box stays."""
    runs = len(rloo.rows)
    t, further = student(bounds.freedom(n, runs))
    box = rloo.values("area").var(ddof=1) / runs
    own = max(0, (e.value / np.interp(-e.p, -further, t)) ** 2 - box)
    for more in range(n + 1, 101):
        if np.interp(e.value / (own * n / more + box) ** 0.5, *student(bounds.freedom(more, runs))) / 2 < below:
            return f"a try after about {more} seeds, if its lead stays"
    return "no try after 100 seeds"


def trained(words: str, seeds: range, processes: int) -> Group:
    """The runs of a function with these seeds; what is missing is trained."""
    room = ROOM._replace(seeds=seeds, arms={words: words})
    arms.train(room, processes)
    return arms.read_groups(room)[words]


def check(words: list[str], folder: Path) -> Arguments:
    """What the words ask for, and the function written down; exits where that can't be compared."""
    found = parse_flags(["--mitigation", *words])
    given = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("--")}
    arms.check_settings(BOX.folder, found.settings, given - {*FIXED})
    source, file = inspect.getsource(CREDIT_FUNCTIONS[words[0]].function), folder / "function.txt"
    require(not file.is_file() or file.read_text(encoding="utf-8") == source, f"{words[0]} was changed since its runs: "
            f"give it another name, or remove {folder}*, and its rows from {ROOM.folder}/runs.csv")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return found


def run(*words: str) -> str:
    """The output of a program on one thread, as a run has; exits with its last sentence where it fails, and the command
    that says more."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    require(not done.returncode, (done.stderr.strip() or "it said nothing").splitlines()[-1].removeprefix("error: ")
            + f" (from: python {shlex.join(words)})")
    return done.stdout


def first_step(found: Arguments, words: list[str], folder: Path) -> dict:
    """metrics.csv of one step on the box's first batch; the credit's score, noise and bias are printed."""
    step, noise = folder / "step", folder / "noise.md"
    scored = found.hyper_parameters | {"advantage": found.settings.advantage}
    if not (step / "final.json").is_file():
        run("train.py", "--mitigation", *words, "--steps=1", "--eval_problems=16", "--pass_at=0", f"--out={step}")
    print(run("-m", "lab.truth.score", "--mitigation", words[0], *(f"--{name}={x}" for name, x in scored.items())))
    if not noise.is_file():
        measure(["--mitigation", *words], folder)
    print(noise.read_text(encoding="utf-8"), flush=True)
    return read_metrics(step)


def compare(step: dict, again: Group, rloo: Group) -> str:
    """What the first step and the box's first seeds say here, beside RLOO."""
    first = read_metrics(Path(ROOM.folder, "none-advantage-rloo-seed0"))
    longer = step["grad_norm"][1] / first["grad_norm"][1]
    cost = np.divide(*(sum(weight * x[name][1] for name, weight in arms.COSTS.items()) for x in (step, first)))
    clipped = step["grad_norm"][1] > Settings.max_grad_norm
    advice = f", but --max_grad_norm clips: set it to {longer * Settings.max_grad_norm:.1f}" * bool(clipped)
    here = arms.difference(again, Group("", {seed: rloo.rows[seed] for seed in again.rows})).value
    differs = ": this machine differs" * bool(abs(here) > 2 * rloo.values("area").std(ddof=1))
    return (f"its first step costs {cost:.2f} of RLOO's; its gradient is {longer:.2f} times as long: AdamW undoes "
            f"that, at the same rate{advice}\nRLOO is {100 * here:+.1f} points from the box here{differs}")


def control_words(found: Arguments) -> str:
    """The function's credit in random order, with its hyper-parameters and settings."""
    method = CREDIT_FUNCTIONS[found.settings.mitigation]
    other = changed(found.settings, Settings(mitigation=method.name), found.hyper_parameters, method)
    of = ":".join([method.name, *(f"{name}={other.pop(name)}" for name in method.parameters if name in other)])
    return " ".join(["shuffled --of", shlex.quote(of), *(f"--{name} {value}" for name, value in other.items())])


def judge(task: str, own: Group, rloo: Group, below: float, control: Estimate | None = None) -> list[Lead]:
    """The words of a function on a task, at equal steps and at equal cost."""
    leads = []
    for axis in AXES:
        seen = looks(own, rloo, axis)
        found, n = word(seen, below)
        why = "ahead" if found == "try" else "behind" if seen[n - bounds.FIRST].high < 0 else "not shown to be behind"
        if found == "try" and control and not (control.value > 0 and control.p / 2 < bounds.ERROR):
            found, why = "undecided", "not shown to be ahead of its credit in random order"
        elif found == "undecided":
            why = seeds_to_decide(seen[-1], n, below, rloo)
        leads.append(Lead(task, axis, found, seen, n, arms.spent(own)[-1] / arms.spent(rloo)[-1], why))
    return leads


def on_task(task: str, words: str, control: str, error: float, seed: int, processes: int) -> list[Lead]:
    """The words on a task, with training, from a first seed on. error: the probability of any try on it that errs."""
    rloo = stored(task)
    below = bounds.level(error / len(AXES))
    for n in (*range(bounds.FIRST, bounds.LAST, processes), bounds.LAST):
        own = trained(on(task, words), range(seed, seed + n), processes)
        leads = judge(task, own, rloo, below)
        said = ", ".join(f"{e.word} at {e.axis} ({points(e.looks[-1])} points)" for e in leads)
        print(f"{task}, after {n} seeds: {said}; a try needs p below {below:.5f}, and its control", flush=True)
        if "undecided" not in (e.word for e in leads):
            break
    if "try" not in (e.word for e in leads):
        return leads
    print(f"its control is its credit in random order, {control}", flush=True)
    ahead = arms.difference(own, trained(on(task, control), range(seed, seed + CONTROL), processes))
    print(f"{task}, over its control: {points(ahead)} points", flush=True)
    return judge(task, own, rloo, below, ahead)


def report(title: str, leads: list[Lead], note: str, folder: Path) -> str:
    """What the words rest on, as tables.md and leads.png; returns the words."""
    killed = dict.fromkeys(e.task for e in leads[len(AXES):] if e.word == "kill")
    rows = [[e.task, e.axis, e.word, f"{e.decided}", points(e.looks[e.decided - bounds.FIRST]), f"{e.cost:.2f}", e.why]
            for e in leads]
    figure, axes = new_figure(len(leads) // 2, 3, sharey=True)
    for part, pair in zip(axes, zip(leads[::2], leads[1::2])):
        for i, e in enumerate(pair):
            value, low, high, _ = 100 * np.array(e.looks).T
            part.errorbar(np.arange(len(value)) + bounds.FIRST + i / 9, value, (value - low, high - value), fmt="o",
                          label=f"{e.axis}: {e.word} after {e.decided}")
        part.set(xlabel="seeds", title=f"{title}, {e.task}", xlim=(bounds.FIRST - 0.5, bounds.LAST + 0.5))
        part.axhline(0, color="black", linewidth=1)
        part.margins(y=0.35)  # the legend stands on no interval
        part.legend(loc="upper right")
    axes[0].set_ylabel("points above RLOO, 95%")
    figure.savefig(folder / "leads.png")
    in_all = ", ".join(f"{e.word} at {e.axis}" for e in leads[:len(AXES)]) + "".join(f"; kill on {x}" for x in killed)
    table = Table(title, f"In all: {in_all}. {note}", ["task", "at", "word", "seeds", "lead", "cost", "why"],
                  rows)
    (folder / "tables.md").write_text(str(table), encoding="utf-8")
    return f"{table}\nin all: {in_all}\nwrote {folder}/tables.md and leads.png"


def screen(words: list[str], tasks: list[str], seed: int, processes: int) -> None:
    """All stages of one function."""
    folder = ROOM.folder / "-".join(text.lstrip("-") for text in words)
    found, tried = check(words, folder), len(list(ROOM.folder.glob("*/function.txt")))
    step = first_step(found, words, folder)
    each = 125 * step["seconds"][1] / processes  # a hundred steps, and a quarter for evaluation
    print(f"{bounds.FIRST} to {bounds.LAST} runs of it, first {len(AGAIN)} of RLOO, for a try {CONTROL} of a control: "
          f"{clock(bounds.FIRST * each)} to {clock((len(AGAIN) + bounds.LAST + CONTROL) * each)} on each task")
    print(compare(step, trained(RLOO, AGAIN, processes), stored(Settings.task)), flush=True)
    error, leads = bounds.ERROR / tried / (1 + len(tasks)), []
    note = (f"Lead over runs of RLOO in success averaged over training, in points, ± half of a 95% interval without "
            f"regard to the looks; cost of a run, RLOO's = 1. Functions screened here: {tried}. If it is no better, "
            f"the chance of a try on a task was {error:.1%} at most.")
    for task in (Settings.task, *tasks):
        leads += on_task(task, shlex.join(words), control_words(found), error, seed, processes)
        print(report(" ".join(words), leads, note, folder), flush=True)
        if all(e.word == "kill" for e in leads):
            break
    if leads[0].word == "try":
        print("docs/trl.md carries it to TRL, unchanged")


@one_sentence("stopped; the same command resumes from here")
def main() -> None:
    """Screen the function that the command line names."""
    parser = new_parser(usage="python -m lab.screen FUNCTION [--flag value ...]", description=__doc__)
    parser.add_argument("--tasks", default="", help="further tasks, such as math,latin")
    parser.add_argument("--seed", type=int, default=20, help="its first seed (default 20)")
    cores = min(os.cpu_count() or 1, bounds.FIRST)
    parser.add_argument("--processes", type=int, default=cores, help=f"runs at a time (default {cores}, one a core)")
    args, words = parser.parse_known_args()
    tasks = args.tasks.split(",") if args.tasks else []
    require(set(tasks) < set(TASKS), f"--tasks {args.tasks}: the box has {', '.join(TASKS)}")
    if words:
        return screen(words, tasks, args.seed, args.processes)
    for task in TASKS:
        arms.train(box(task), args.processes)


if __name__ == "__main__":
    main()
