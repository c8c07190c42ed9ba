"""Is a credit function worth more than an afternoon? It ends in kill, undecided or try, at equal steps and equal cost.

    python -m lab.screen surprise --power 0.5 --advantage rloo      its name and flags, as for train.py --mitigation
    python -m lab.screen surprise --advantage rloo --minutes 20     as many looks as fit into that time
    python -m lab.screen surprise --advantage rloo --tasks math     on word problems, too, unless Countdown kills it
    python -m lab.screen                                            trains what the box lacks, runs of RLOO

A kill usually takes two runs, of some three minutes each, or part of the first one; a try two to five, and three of its
credit in random order, which it has to lead. There is a look every twenty steps of the first run, and after each from
the second to the eighth: bounds.py. Stopped, it resumes, from runs/screen/.
"""
import inspect
import math
import os
import shlex
import subprocess
import sys
import time
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
from plumbing.report import Table, new_figure
from plumbing.runs import read_metrics
from settings import Settings
from start import parse_flags

RLOO = "none --advantage rloo"
TASKS = {"countdown": 20, "math": 5, "latin": 5}  # and how many runs of RLOO the box has; Countdown's, 21 more
BOX = arms.Room(Path(__file__).parent, "--eval_every 10 --pass_at 0", (), {})
# Evaluated so often there is the least noise per second: README.md
ROOM = arms.Room(Path("runs/screen"), f"--eval_every {bounds.EVERY} --pass_at 0", (), {})
CONTROL, CONTROL_LEVEL = 3, 0.05  # seeds of the credit in random order, and the p below which it is behind
ERROR = 0.03  # of any try of one function that is no better, at equal steps or equal cost: simulation.md
FIXED = ("model", "task", "data", "eval_data", "out", "seed", "steps", "questions", "responses", "max_new_tokens",
         "temperature", "normalize", "eval_every", "eval_problems", "eval_greedy", "pass_at")
AXES = {"equal steps": arms.measured, "equal cost": arms.spent}


class Clock(NamedTuple):
    """The time that is left."""

    run: float  # about how many seconds one takes
    begun: float  # when time.monotonic() said so
    end: float  # when it will say so

    def needs(self, runs: int, processes: int) -> str:
        """The time that so many runs take, so many at a time."""
        return clock(self.run * -(-runs // processes))

    def enough(self, runs: int, processes: int) -> str:
        """The flag with which they would end in time, if what is done need not be done again."""
        left = time.monotonic() - self.begun + self.run * -(-runs // processes)
        return f"--minutes {math.ceil(left / 60)} is enough, or the same again: what is done is kept"

    def has(self, runs: int, processes: int) -> bool:
        """Whether they would end before it does."""
        return time.monotonic() + self.run * -(-runs // processes) < self.end


class Lead(NamedTuple):
    """How a function fares on one task and axis."""

    task: str
    axis: str
    word: str
    looks: dict[float, bounds.Leads]  # its lead over the box after so many runs
    decided: float  # the runs at the look that decided, or at the last one
    cost: float  # of its runs, over the box's
    why: str = ""


def on(task: str, words: str) -> str:
    """A function and its flags, on a task."""
    return words + f" --task {task}" * (task != Settings.task)


def box(task: str) -> arms.Room:
    """The runs of RLOO on a task, but those that were screened as a function."""
    return BOX._replace(seeds=range(TASKS[task]), arms={on(task, "RLOO"): on(task, RLOO)})


def until(row: dict, step: float) -> dict:
    """The figures of a run, up to a step, at the steps of looks."""
    return row | {name: {at: x for at, x in row[name].items() if at <= step and at % bounds.EVERY == 0}
                  for name in arms.BY_STEP}


def stored(task: str) -> dict[str, Group]:
    """The runs of RLOO on a task that are stored, the box, by axis. At equal steps with those that were screened, which
    were evaluated every twenty steps: a cost between two of these would be read off a line, up to a point too low."""
    rows = arms.read_groups(box(task))[on(task, "RLOO")].rows
    later = arms.Room(BOX.folder / "calibration", "", (), {}).rows().values()
    more = {int(row["seed"]): arms.figures_of(row) for row in later if row["arm"] == on(task, RLOO)}
    return {"equal steps": Group("RLOO", {seed: until(row, np.inf) for seed, row in (rows | more).items()}),
            "equal cost": Group("RLOO", rows)}


def looks(own: Group, rloo: dict[str, Group], axis: str) -> dict[float, bounds.Leads]:
    """The lead over the box every twenty steps of the first run, then after each run."""
    (seed, first), *_ = rows = list(own.rows.items())
    parts = {step / 100: Group("", {seed: until(first, step)}) for step in until(first, np.inf)["curve"] if step}
    parts |= {n: Group("", dict(rows[:n])) for n in range(bounds.FIRST, len(rows) + 1)}
    return {at: bounds.leads(*arms.areas(part, rloo[axis], AXES[axis])) for at, part in parts.items()}


def stopped(seen: dict[str, dict[float, bounds.Leads]]) -> float | None:
    """After which part of the first run its looks, by axis, are so far behind on all of them that it ends."""
    return next((at for at in min(seen.values(), key=len) if at <= 1
                 and all(bounds.is_behind(of[at]) for of in seen.values())), None)


def is_behind(row: dict, rloo: dict[str, Group]) -> bool:
    """Whether a run ends here, by its row so far."""
    own = Group("", {0: arms.figures_of(row)})
    return stopped({axis: looks(own, rloo, axis) for axis in AXES}) is not None


def word(leads: dict[float, bounds.Leads], share: float, end: float | None) -> tuple[str, float]:
    """The word by the first look that decides, and after how many runs. end: where the first run was stopped."""
    for at, e in leads.items():
        if at > 1 and bounds.is_try(e, share):
            return "try", at
        if at == end or at > 1 and bounds.is_futile(e):
            return "kill", at
    return "undecided", at


def seeds_to_decide(e: bounds.Leads, share: float, rloo: np.ndarray) -> str:
    """About how many seeds make a try of a lead that stays as it is: their squared error falls as 1 / n, and that of
    the box's areas (runs,) stays."""
    box = bounds.variance(rloo) / len(rloo)
    for n in range(e.seeds + 1, 101):
        error = ((e.error**2 - box) * e.seeds / n + box) ** 0.5
        if bounds.is_try(e._replace(error=error, seeds=min(n, bounds.LAST)), share):
            return f"a try after about {n} seeds, if its lead stays"
    return "no try after 100 seeds"


def trained(words: str, seeds: range, processes: int, rloo: dict[str, Group] | None = None) -> Group:
    """The runs of a function with these seeds; what is missing is trained. rloo: end a first one that is far behind."""
    room = ROOM._replace(seeds=seeds, arms={words: words})
    arms.train(room, processes, rloo and (lambda row: is_behind(row, rloo)))
    rows = room.rows()
    return Group(words, {e.seed: arms.figures_of(rows[e.folder.name]) for e in room.runs()})


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


def first_step(found: Arguments, words: list[str], folder: Path) -> tuple[dict, dict]:
    """metrics.csv of one step on the box's first batch, and RLOO's; the credit's score is printed."""
    both = (folder / "step", words), (ROOM.folder / "RLOO-step", RLOO.split())
    scored = found.hyper_parameters | {"advantage": found.settings.advantage}
    for step, of in both:
        if not (step / "final.json").is_file():
            run("train.py", "--mitigation", *of, "--steps=1", "--eval_problems=16", "--pass_at=0", f"--out={step}")
    print(run("-m", "lab.truth.score", "--mitigation", words[0], *(f"--{name}={x}" for name, x in scored.items())))
    return tuple(read_metrics(step) for step, _ in both)


def print_noise(words: list[str], folder: Path, watch: Clock) -> None:
    """The noise and bias of its gradient. They decide nothing, and take about as long as a run: only if there is time for
    it and two runs."""
    if not (folder / "noise.md").is_file():
        if not watch.has(3, 1):
            return print(f"the noise of its gradient would take about {watch.needs(1, 1)}: left out", flush=True)
        print(f"the noise of its gradient, about {watch.needs(1, 1)}, decides nothing:", flush=True)
        measure(["--mitigation", *words], folder)
    print((folder / "noise.md").read_text(encoding="utf-8"), flush=True)


def compare(step: dict, rloo: dict) -> str:
    """What the first step says, beside RLOO's."""
    longer = step["grad_norm"][1] / rloo["grad_norm"][1]
    cost = np.divide(*(sum(weight * x[name][1] for name, weight in arms.COSTS.items()) for x in (step, rloo)))
    clipped = step["grad_norm"][1] > Settings.max_grad_norm
    advice = f", but --max_grad_norm clips: set it to {longer * Settings.max_grad_norm:.1f}" * bool(clipped)
    return (f"its first step costs {cost:.2f} of RLOO's; its gradient is {longer:.2f} times as long: AdamW undoes "
            f"that, at the same rate{advice}")


def control_words(found: Arguments) -> str:
    """The function's credit in random order, with its hyper-parameters and settings."""
    method = CREDIT_FUNCTIONS[found.settings.mitigation]
    other = changed(found.settings, Settings(mitigation=method.name), found.hyper_parameters, method)
    of = ":".join([method.name, *(f"{name}={other.pop(name)}" for name in method.parameters if name in other)])
    return " ".join(["shuffled --of", shlex.quote(of), *(f"--{name} {value}" for name, value in other.items())])


def judge(task: str, own: Group, rloo: dict[str, Group], share: float = 1.0,
          control: bounds.Leads | None = None) -> list[Lead]:
    """The words of a function on a task, at equal steps and at equal cost; share: of the error that is allowed."""
    seen, leads = {axis: looks(own, rloo, axis) for axis in AXES}, []
    end = stopped(seen)
    for axis, of in seen.items():
        found, at = word(of, share, end)
        e = of[at]
        most = 100 * float(e.value + e.within(0.9))
        why = {"try": "ahead", "kill": f"not {most:.1f} points better (95%)" if most > 0 else "behind (95%)"}.get(found)
        if found == "try" and control and not (control.value > 0 and control.p < CONTROL_LEVEL):
            found, why = "undecided", "not shown to be ahead of its credit in random order"
        elif found == "undecided":
            why = seeds_to_decide(e, share, arms.areas(own, rloo[axis], AXES[axis])[1])
        runs = rloo[axis]
        cost = arms.spent(own)[-1] / np.interp(arms.measured(own)[-1], arms.measured(runs), arms.spent(runs))
        leads.append(Lead(task, axis, found, of, at, cost, why))
    return leads


def on_task(task: str, words: str, control: str, share: float, seed: int, processes: int, watch: Clock) -> list[Lead]:
    """The words on a task, with training, from a first seed on."""
    rloo, leads, done = stored(task), [], 0
    for n in (1, *range(bounds.FIRST, bounds.LAST, processes), bounds.LAST):
        if not watch.has(n - done, processes):
            return too_early(leads, f"the {'next' if done else 'first'} run ends in about {watch.needs(n - done, processes)}: "
                             + watch.enough(n - done, processes))
        side_by_side, stop_by = 1 if n <= bounds.FIRST else processes, rloo if n == 1 else None
        own = trained(on(task, words), range(seed, seed + n), side_by_side, stop_by)
        leads, done = judge(task, own, rloo, share), n
        said = ", ".join(f"{e.word} at {e.axis} ({points(e.looks[e.decided].estimate)} points: {e.why})" for e in leads)
        print(f"{task}, after {max(e.decided for e in leads):g} runs: {said}", flush=True)
        if "undecided" not in (e.word for e in leads):
            break
    if "try" not in (e.word for e in leads):
        return leads
    if not watch.has(CONTROL, processes):
        return too_early(leads, f"its control takes about {watch.needs(CONTROL, processes)}: "
                         + watch.enough(CONTROL, processes))
    print(f"its control is its credit in random order, {control}", flush=True)
    ahead = over(own, trained(on(task, control), range(seed, seed + CONTROL), processes))
    print(f"{task}, over its control: {points(ahead.estimate)} points", flush=True)
    return judge(task, own, rloo, share, ahead)


def too_early(leads: list[Lead], why: str) -> list[Lead]:
    """The words where the time ends: what is not killed is open."""
    print(f"too early: {why}", flush=True)
    return [e if e.word == "kill" else e._replace(word="too early", why=why) for e in leads]


def over(own: Group, control: Group) -> bounds.Leads:
    """The lead of a function over its control, at equal steps."""
    return bounds.leads(*arms.areas(own, control, arms.measured))


def report(title: str, leads: list[Lead], note: str, folder: Path) -> str:
    """What the words rest on, as tables.md and leads.png; returns the words."""
    killed = dict.fromkeys(e.task for e in leads[len(AXES):] if e.word == "kill")
    rows = [[e.task, e.axis, e.word, f"{e.decided:g}", points(e.looks[e.decided].estimate), f"{e.cost:.2f}", e.why]
            for e in leads]
    figure, axes = new_figure(len(leads) // 2, 3, sharey=True)
    for part, pair in zip(axes, zip(leads[::2], leads[1::2])):
        for i, e in enumerate(pair):
            value, low, high, _ = 100 * np.array([look.estimate for look in e.looks.values()]).T
            part.errorbar(np.array([*e.looks]) + i / 15, value, (value - low, high - value), fmt="o",
                          label=f"{e.axis}: {e.word} after {e.decided:g}")
        part.set(xlabel="runs", title=f"{title}, {e.task}", xlim=(0, bounds.LAST + 0.5))
        part.axhline(0, color="black", linewidth=1)
        part.margins(y=0.35)  # the legend stands on no interval
        part.legend(loc="upper right")
    axes[0].set_ylabel("points above RLOO, 95%")
    figure.savefig(folder / "leads.png")
    in_all = ", ".join(f"{e.word} at {e.axis}" for e in leads[:len(AXES)]) + "".join(f"; kill on {x}" for x in killed)
    table = Table(title, f"In all: {in_all}. {note}", ["task", "at", "word", "runs", "lead", "cost", "why"],
                  rows)
    (folder / "tables.md").write_text(str(table), encoding="utf-8")
    return f"{table}\nin all: {in_all}\nwrote {folder}/tables.md and leads.png"


def screen(words: list[str], tasks: list[str], seed: int, processes: int, minutes: float) -> None:
    """All stages of one function."""
    begun, folder = time.monotonic(), ROOM.folder / "-".join(text.lstrip("-") for text in words)
    found = check(words, folder)
    seen = {row["arm"].partition(" --task")[0] for row in ROOM.rows().values()} - {control_words(found)}
    tried = len({name for name in seen if not name.startswith("shuffled --of")} | {shlex.join(words)})  # with runs
    print("a first step, then the score against A*: about a minute", flush=True)
    step, rloo = first_step(found, words, folder)
    watch = Clock(125 * step["seconds"][1], begun, begun + 60 * minutes)  # a hundred steps, and a quarter for evaluation
    print(f"a run takes about {watch.needs(1, 1)}. A kill takes one or two, often less; a try two to {bounds.LAST}, and "
          f"{CONTROL} of a control\n{compare(step, rloo)}", flush=True)
    print_noise(words, folder, watch)
    share, leads = 1 / tried / (1 + len(tasks)), []
    note = (f"Lead over runs of RLOO in success averaged over training, in points, ± half of a 95% interval without "
            f"regard to the looks; cost of a run, RLOO's = 1. Functions screened here: {tried}. If it is no better, "
            f"the chance of a try on a task was about {ERROR * share:.1%} at most.")
    for task in (Settings.task, *tasks):
        leads += on_task(task, shlex.join(words), control_words(found), share, seed, processes, watch)
        if not leads or leads[-1].task != task:
            break
        print(report(" ".join(words), leads, note, folder), flush=True)
        if all(e.word in ("kill", "too early") for e in leads):
            break
    if leads and leads[0].word == "try":
        print("docs/trl.md carries it to TRL, unchanged")


@one_sentence("stopped; the same command resumes from here")
def main() -> None:
    """Screen the function that the command line names."""
    parser = new_parser(usage="python -m lab.screen FUNCTION [--flag value ...]", description=__doc__)
    parser.add_argument("--tasks", default="", help="further tasks, such as math,latin")
    parser.add_argument("--seed", type=int, default=20, help="its first seed (default 20)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run that would end later")
    cores = min(os.cpu_count() or 1, bounds.LAST - bounds.FIRST)
    parser.add_argument("--processes", type=int, default=cores, help=f"runs at a time (default {cores}, one a core)")
    args, words = parser.parse_known_args()
    tasks = args.tasks.split(",") if args.tasks else []
    require(set(tasks) < set(TASKS), f"--tasks {args.tasks}: the box has {', '.join(TASKS)}")
    if words:
        return screen(words, tasks, args.seed, args.processes, args.minutes)
    for task in TASKS:
        arms.train(box(task), args.processes)


if __name__ == "__main__":
    main()
