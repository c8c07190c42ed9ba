"""Is a credit function worth more than an afternoon? It ends in kill, undecided or try, at equal steps and equal cost.

    python -m lab.screen surprise --power 0.5        its name and flags, as for train.py --mitigation
    python -m lab.screen                             trains what the box lacks, the runs that it is compared with

After a step and a score it is trained as the box was, on fresh seeds, with a look after each from the third to the
eighth, see bounds.py; a try has to lead its own credit in random order, too. Stopped, it resumes, from runs/screen/.
"""
import inspect
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from lab import arms
from lab.screen import bounds
from lab.statistics import points
from methods import MITIGATIONS
from plumbing.comparison import Group
from plumbing.files import require
from plumbing.flags import Arguments, changed, new_parser
from plumbing.progress import clock, one_sentence
from plumbing.report import Estimate, Figure, Table
from plumbing.runs import read_metrics
from settings import Settings
from start import parse_flags

RLOO = "none --advantage rloo"
BOX = arms.Room(Path(__file__).parent, "--eval_every 10 --pass_at 0", range(bounds.BOX), {"RLOO": RLOO})
SCREEN = Path("runs/screen")
AGAIN, CONTROL = range(2), 3  # the box's seeds that are trained here, too; seeds of the credit in random order
FIXED = ("model", "task", "data", "eval_data", "out", "seed", "steps", "questions", "responses", "max_new_tokens",
         "temperature", "normalize", "eval_every", "eval_problems", "eval_greedy", "pass_at")
AXES = {"equal steps": arms.difference, "equal cost": lambda own, box: arms.apart(own, box, arms.spent)}


def looks(own: Group, box: Group, axis: str) -> list[Estimate]:
    """The lead over the box of the seeds so far, at each look."""
    rows = list(own.rows.items())
    return [AXES[axis](Group("", dict(rows[:n])), box) for n in range(bounds.FIRST, len(rows) + 1)]


def word(leads: list[Estimate], below: float) -> tuple[str, int]:
    """The word by the first look that decides, and after how many seeds; a lead that is no number is none."""
    for n, e in enumerate(leads, bounds.FIRST):
        if not e.value > 0 or e.p / 2 < below:
            return "try" if e.value > 0 else "kill", n
    return "undecided", bounds.FIRST + len(leads) - 1


def seeds_to_decide(e: Estimate, n: int, below: float) -> str:
    """About how many seeds make a try of a lead that stays as it is after n: its squared error falls as 1 / n."""
    more = np.arange(n + 1, 101)
    error = (e.high - e.value) / 1.96 * np.sqrt(n / more)
    enough = more[bounds.tail(e.value / error, more - 1) < below]
    return f"a try after about {enough[0]} seeds, if its lead stays" if len(enough) else "no try after 100 seeds"


def trained(words: str, seeds: range, processes: int) -> Group:
    """The runs of a function with these seeds; what is missing is trained."""
    room = BOX._replace(folder=SCREEN, seeds=seeds, arms={words: words})
    arms.train(room, processes)
    return arms.read_groups(room)[words]


def check(words: list[str], folder: Path) -> Arguments:
    """What the words ask for, and the function written down; exits where that can't be compared."""
    found = parse_flags(["--mitigation", *words])
    other = [f"--{name}" for name in FIXED if getattr(found.settings, name) != getattr(Settings(), name)]
    require(not other, f"{', '.join(other)} would differ from the runs of RLOO that it is compared with")
    source, file = inspect.getsource(MITIGATIONS[words[0]].function), folder / "function.txt"
    require(not file.is_file() or file.read_text(encoding="utf-8") == source, f"{words[0]} was changed since its runs: "
            f"give it another name, or remove {folder}*, and its rows from {SCREEN}/runs.csv")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return found


def run(*words: str) -> str:
    """The output of a program; exits with its last sentence where it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    require(not done.returncode, (done.stderr.strip() or "it said nothing").splitlines()[-1].removeprefix("error: "))
    return done.stdout


def first_step(found: Arguments, words: list[str], folder: Path) -> dict:
    """metrics.csv of one step on the box's first batch; the credit's score is printed."""
    step, scored = folder / "step", found.hyper_parameters | {"advantage": found.settings.advantage}
    if not (step / "final.json").is_file():
        run("train.py", "--mitigation", *words, "--steps=1", "--eval_problems=16", "--pass_at=0", f"--out={step}")
    print(run("-m", "lab.truth.score", "--mitigation", words[0], *(f"--{name}={x}" for name, x in scored.items())))
    return read_metrics(step)


def compare(step: dict, again: Group, box: Group) -> str:
    """What the first step and the box's first seeds say here, beside RLOO."""
    norm, rloo = (x["grad_norm"][1] for x in (step, read_metrics(BOX.runs()[0].folder)))
    clipped = ", and --max_grad_norm clips it" * bool(norm > Settings.max_grad_norm)
    here = np.mean([row["area"] - box.rows[seed]["area"] for seed, row in again.rows.items()])
    differs = ": this machine differs" * bool(abs(here) > 2 * box.values("area").std(ddof=1))
    return (f"its first gradient is {norm / rloo:.2f} times as long as RLOO's{clipped}\n"
            f"RLOO is {100 * here:+.1f} points from the box here{differs}")


def control_words(found: Arguments) -> str:
    """The function's credit in random order, with its hyper-parameters and settings."""
    method = MITIGATIONS[found.settings.mitigation]
    other = changed(found.settings, Settings(mitigation=method.name), found.hyper_parameters, method)
    of = ":".join([method.name, *(f"{name}={other.pop(name)}" for name in method.parameters if name in other)])
    return shlex.join(["shuffled", "--of", of, *(f"--{name}={value}" for name, value in other.items())])


def report(own: Group, box: Group, below: float, control: Estimate | None, note: str, folder: Path) -> Table:
    """The words at equal steps and equal cost, with what they rest on, as tables.md and leads.png."""
    rows, axes = [], Figure((6, 3)).subplots()
    for i, axis in enumerate(AXES):
        leads = looks(own, box, axis)
        found, n = word(leads, below)
        e, why = leads[n - bounds.FIRST], ""
        if found == "try" and control and not (control.value > 0 and control.p / 2 < bounds.ERROR):
            found, why = "undecided", "not shown to be ahead of its credit in random order"
        elif found == "undecided":
            why = seeds_to_decide(e, n, below)
        rows.append([axis, found, f"{n}", points(e), f"{arms.spent(own)[-1] / arms.spent(box)[-1]:.2f}", why])
        value, low, high, _ = 100 * np.array(leads).T
        axes.errorbar(np.arange(len(leads)) + bounds.FIRST + i / 9, value, (value - low, high - value), fmt="o",
                      label=f"{axis}: {found}")
    axes.set(xlabel="seeds", ylabel="points above RLOO", title=own.label)
    axes.legend()
    axes.figure.savefig(folder / "leads.png")
    note += f" Over its credit in random order: {points(control)}." if control else ""
    table = Table(own.label, note, ["at", "word", "seeds", "lead", "cost", ""], rows)
    (folder / "tables.md").write_text(str(table), encoding="utf-8")
    return table


def screen(words: list[str], seed: int, processes: int) -> None:
    """All stages of one function."""
    folder = SCREEN / "-".join(text.lstrip("-") for text in words)
    found, done = check(words, folder), [e.seed for e in BOX.runs() if e.folder.name in BOX.rows()]
    box, tried = arms.read_groups(BOX._replace(seeds=done))["RLOO"], len(list(SCREEN.glob("*/function.txt")))
    below = bounds.level(bounds.ERROR / len(AXES) / tried, len(done))
    step = first_step(found, words, folder)
    each = 125 * step["seconds"][1] / processes  # a hundred steps, and a quarter for evaluation
    print(f"{bounds.FIRST} to {bounds.LAST} runs of it, first {len(AGAIN)} of RLOO, for a try {CONTROL} of a control: "
          f"{clock(bounds.FIRST * each)} to {clock((len(AGAIN) + bounds.LAST + CONTROL) * each)}", flush=True)
    print(compare(step, trained(RLOO, AGAIN, processes), box), flush=True)
    for n in (*range(bounds.FIRST, bounds.LAST, processes), bounds.LAST):
        own = trained(shlex.join(words), range(seed, seed + n), processes)
        by_axis = {axis: word(looks(own, box, axis), below)[0] for axis in AXES}
        print(f"after {n} seeds, at {', at '.join(f'{axis}: {found}' for axis, found in by_axis.items())}", flush=True)
        if "undecided" not in by_axis.values():
            break
    control = None
    if "try" in by_axis.values():
        control = arms.difference(own, trained(control_words(found), range(seed, seed + CONTROL), processes))
    note = (f"Lead over {len(done)} runs of RLOO in success averaged over training, in points, ± half of a 95% "
            f"interval without regard to the looks; cost of a run, RLOO's = 1. A try has p below {below:.5f}. Tried "
            f"here: {tried}. One that is no better is ever a try with a chance of {bounds.ERROR / tried:.1%} at most.")
    print(f"{report(own, box, below, control, note, folder)}\nwrote {folder}/tables.md and leads.png")


@one_sentence("stopped; the same command resumes from here")
def main() -> None:
    """Screen the function that the command line names."""
    parser = new_parser(usage="python -m lab.screen FUNCTION [--flag value ...]", description=__doc__)
    parser.add_argument("--seed", type=int, default=20, help="its first seed (default 20)")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default 1)")
    args, words = parser.parse_known_args()
    if words:
        return screen(words, args.seed, args.processes)
    arms.train(BOX, args.processes)
    arms.write_tables(BOX)


if __name__ == "__main__":
    main()
