"""One engine for every room that trains. A room's run.py declares its arms, what is alike, and its seeds:

    ROOM = Room(Path(__file__).parent, "--steps 50 --lr 2.8e-4", range(5), {
        "RLOO": "none --advantage rloo", "GRPO": "none", "half": "outcome_conditional --think_discount 0.5"})

    if __name__ == "__main__":
        main(ROOM, __doc__)

`python -m lab.NAME.run` trains what has no row in the room's runs.csv, seeds in the outer loop, and resumes; then, or
with --tables at once, it writes tables.md: each arm beside the first one. A run that has its row loses its logs and
checkpoints, not its model. Not on Windows.
"""
import csv
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

import numpy as np
import torch

from lab.statistics import holm, points
from plumbing.comparison import Group
from plumbing.files import read_json, replace_file, require, write_json
from plumbing.flags import new_parser
from plumbing.terminal import clock, fail, one_sentence
from plumbing.report import Estimate, Table, t_estimate
from plumbing.runs import FREE, heldout, is_finished, read_config, read_metrics
from settings import Settings

LOOK, SAID = 0.5, 20.0  # seconds between two looks at the runs, and between two lines that say how far they are
LEAST = 2  # seeds that all arms must have before there are tables
BY_STEP = ("curve", "spent")  # success, and weighted tokens so far, as `step:value` pairs
COSTS = {"tokens_sampled": 1, "tokens_read": 1, "tokens_updated": 3}  # in forward passes; a backward pass is two
# Settings that change no result but by rounding, or that are no property of an arm.
NEUTRAL = {"mitigation", "seed", "out", *FREE} - {"steps", "eval_every", "pass_at"}
FIGURES = ("version", "steps", "area", "start", "end", *COSTS, "seconds")
NOTE = ("Success in percent, at the end and averaged over training (area), ± half of a 95% interval over seeds; "
        "differences in points, with Welch's. * is significant at 5% after Holm's correction over the column. Equal "
        "cost: until the arm that spent less ended. Cost: weighted tokens, the first arm's = 1.")


class Room(NamedTuple):
    """What a room trains."""

    folder: Path  # of runs.csv and tables.md
    alike: str  # flags of all arms
    seeds: Iterable[int]
    arms: dict[str, str]  # by name, the method and its flags; the others are compared with the first
    version: int = 3  # of a new row. Raise it when a change alters what runs give: no contrast spans two versions
    program: str = "train.py"

    def runs(self) -> list["Experiment"]:
        """All runs, in order."""
        return [Experiment(self, arm, seed) for seed in self.seeds for arm in self.arms]

    def rows(self) -> dict[str, dict[str, str]]:
        """The rows of runs.csv by run. ValueError where it is damaged, or a run has other flags now."""
        file = self.folder / "runs.csv"
        rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []
        require(not any(None in (*row, *row.values()) for row in rows),
                f"{file} has a line that is not a row: was a merge conflict left in it?")
        found = {row["run"]: row for row in rows}
        for e in self.runs():
            require(found.get(e.folder.name, {}).get("command", e.command) == e.command, f"{file} has {e.folder.name} "
                    f"with other flags than this room's: take out its line, and move {e.folder} away")
        return found


def check_settings(folder: Path, now: Settings, given: Iterable[str]) -> None:
    """ValueError where a folder's runs were trained with another value of a setting than would be trained with now, but
    for those that are given in a command. settings.json beside runs.csv has the defaults that they were trained with.
    """
    before = read_json(folder / "settings.json", missing={})
    for name in before.keys() - {*given}:
        here = getattr(now, name, "gone")
        require(here == before[name], f"the runs of {folder} were trained with {name} {before[name]}, and now it would "
                f"be {here}: they can't be compared. Give --{name} {before[name]} in the command, or train them anew")


class Experiment(NamedTuple):
    """One run of a room."""

    room: Room
    arm: str
    seed: int

    @property
    def folder(self) -> Path:
        """The run folder; its name is that of the row."""
        flags = self.room.arms[self.arm].replace(" --", "-").replace(" ", "-")
        return Path("runs", self.room.folder.name, f"{flags}-seed{self.seed}")

    @property
    def log(self) -> Path:
        """Where the output of the run goes."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> str:
        """The command that makes the run."""
        return (f"python {self.room.program} --mitigation {self.room.arms[self.arm]} {self.room.alike} "
                f"--seed {self.seed} --out {self.folder}")


# ----------------------------------------------------------------------------------------------- runs, and rows


def train(room: Room, processes: int, stop: Callable[[dict], bool] | None = None) -> None:
    """Start or resume what has no row, `processes` runs at a time. Nothing runs after this ends, however it does. stop:
    whether a run ends here, by its row so far, asked after each evaluation."""
    file = room.folder / "settings.json"
    if not file.is_file() and not room.rows():
        room.folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {name: x for name, x in vars(Settings()).items() if name not in NEUTRAL})
    for words in room.arms.values():
        check_settings(room.folder, Settings(), [word.lstrip("-") for word in f"{words} {room.alike}".split()])
    rows, running, failed, threads = room.rows(), [], 0, max(1, (os.cpu_count() or 1) // processes)
    waiting = [e for e in room.runs() if e.folder.name not in rows]
    print(progress(room, processes), flush=True)
    said, seen = time.monotonic(), {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append((waiting[0], start(waiting.pop(0), threads)))
            for e, process in running if stop else ():
                row = row_so_far(e)
                if row and row["curve"] != seen.get(e.folder) and stop(row):
                    process.terminate()
                    process.wait()
                    add_row(e, row)
                seen[e.folder] = row.get("curve")
            for e, process in [pair for pair in running if pair[1].poll() is not None]:
                running.remove((e, process))
                problem = take_over(e, process.returncode)
                failed += bool(problem)
                print(f"{progress(room, processes)}  {e.folder.name}: {problem or 'done'}", flush=True)
            if time.monotonic() - said > SAID:
                said = time.monotonic()
                print(progress(room, processes), *(place(e) for e, _ in running), sep="  ", flush=True)
            time.sleep(LOOK)
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()
    if failed:
        fail(f"runs that failed: {failed}; see above, and {e.folder.parent}/*.log")


def progress(room: Room, processes: int) -> str:
    """How many runs are done, and how long the others will take: a fifth more, for evaluation, than those did."""
    runs, rows = room.runs(), room.rows()
    took = [float(rows[e.folder.name]["seconds"]) for e in runs if e.folder.name in rows]
    eta = clock(1.2 * np.mean(took) * (len(runs) - len(took)) / processes) if took else "after the first run"
    return f"{len(took)}/{len(runs)} runs done, ETA {eta}"


def place(e: Experiment) -> str:
    """How far a run is."""
    try:
        return f"{e.folder.name} after step {read_metrics(e.folder)['step'][-1]:.0f}"
    except (ValueError, OSError):
        return f"{e.folder.name} at its start"


def start(e: Experiment, threads: int) -> subprocess.Popen:
    """Start or resume a run, its output in its log; nothing is left to do for a finished one. ValueError for one with
    other settings, as after a trial."""
    e.folder.parent.mkdir(parents=True, exist_ok=True)
    flags = lambda command: command.partition(" --")[2]
    begun = (e.folder / "config.json").is_file()
    require(not begun or flags(read_config(e.folder)["command"]) == flags(e.command), f"{e.folder} was "
            "made by another command than this room's: move it away")
    command = f"python {e.room.program} --resume {e.folder}" if begun else e.command
    words = ["-c", ""] if is_finished(e.folder) else shlex.split(command)[1:]
    with e.log.open("a") as log:
        return subprocess.Popen([sys.executable, *words], stdout=log, stderr=log,
                                env=os.environ | {"OMP_NUM_THREADS": str(threads)})


def row_so_far(e: Experiment) -> dict:
    """The row of a run that has more than one evaluation; empty for another."""
    try:
        metrics = read_metrics(e.folder)
        return make_row(e, metrics) if len(heldout(metrics)[0]) > 1 else {}
    except (ValueError, OSError):  # it has only begun, or is writing
        return {}


def make_row(e: Experiment, metrics: dict[str, np.ndarray]) -> dict:
    """The row of a run, as far as its metrics.csv is."""
    curve = dict(zip(*(column.tolist() for column in heldout(metrics)[:2])))
    cost = np.nancumsum(sum(weight * metrics[name] for name, weight in COSTS.items()))  # (steps + 1,) NaN at the start
    steps, values = list(curve), list(curve.values())
    figures = {"steps": steps[-1], "area": np.trapezoid(values, steps) / np.ptp(steps), "start": values[0],
               "end": values[-1], **{name: np.nansum(metrics[name]) for name in (*COSTS, "seconds")}}
    return {"run": e.folder.name, "version": e.room.version, "arm": e.arm, "seed": e.seed, "command": e.command,
            **{name: f"{x:.7g}" for name, x in figures.items()},
            "curve": " ".join(f"{step:.0f}:{x:.6f}" for step, x in curve.items()),
            "spent": " ".join(f"{step:.0f}:{cost[int(step)]:.7g}" for step in curve),
            "training": " ".join(f"{x:.4g}" for x in metrics["success"][1:]),  # of each step's responses
            "processor": torch.backends.cpu.get_cpu_capability()}  # its instructions, which decide the rounding


def write_rows(rows: list[dict], file: Path) -> None:
    """A runs.csv with the columns of all rows; a row may lack some."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def add_row(e: Experiment, row: dict) -> None:
    """Write the row of a run to its room."""
    rows = [*e.room.rows().values(), row]
    replace_file(e.room.folder / "runs.csv", lambda part: write_rows(rows, part))


def take_over(e: Experiment, code: int) -> str:
    """Give a run that ended its row, and remove what is large of it. Returns what is wrong where it gets none."""
    try:
        has_row = e.folder.name in e.room.rows()
        if not has_row and not is_finished(e.folder):
            lines = e.log.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing"]
            return f"ended with code {code}, and its last line was: {lines[-1]}"
        if not has_row:
            add_row(e, make_row(e, read_metrics(e.folder)))
    except (ValueError, OSError) as error:
        return str(error)
    for name in ("credit", "checkpoints"):
        shutil.rmtree(e.folder / name, ignore_errors=True)
    (e.folder / "state.pt").unlink(missing_ok=True)
    return ""


# ----------------------------------------------------------------------------------------------------- tables


def figures_of(row: dict[str, str]) -> dict:
    """The numbers of a row."""
    return {name: float(row.get(name) or "nan") for name in FIGURES} | {
        name: dict(map(float, point.split(":")) for point in row[name].split()) for name in BY_STEP}


def read_groups(room: Room) -> dict[str, Group]:
    """The runs of each arm, on the seeds that all arms have. ValueError where these are too few, or where rows are of
    several versions."""
    rows, found = room.rows(), {arm: {} for arm in room.arms}
    for e in room.runs():
        if e.folder.name in rows:
            found[e.arm][e.seed] = figures_of(rows[e.folder.name])
    seeds = [seed for seed in room.seeds if all(seed in runs for runs in found.values())]
    require(len(seeds) >= LEAST, f"{len(seeds)} seeds have all arms, and tables wait for {LEAST}: run without --tables")
    groups = {arm: Group(arm, {seed: runs[seed] for seed in seeds}) for arm, runs in found.items()}
    versions = {row["version"]: arm for arm, group in groups.items() for row in group.rows.values()}
    require(len(versions) == 1, "runs of several versions can't be compared: "
            + ", ".join(f"{arm} ({version:.0f})" for version, arm in versions.items()))
    return groups


def measured(group: Group) -> np.ndarray:
    """The steps (m,) at which success of a group's runs was measured."""
    return np.array(list(next(iter(group.rows.values()))["curve"]))


def spent(group: Group) -> np.ndarray:
    """The mean cost (m,) of a group's runs up to each measurement."""
    return np.mean([list(row["spent"].values()) for row in group.rows.values()], 0)


def areas(a: Group, b: Group, places: Callable[[Group], np.ndarray]) -> list[np.ndarray]:
    """The mean success (n,) of each run of two groups, until the last step or cost that both groups reached.

    A line between two measurements lies below a concave curve, and further below where they are far apart. So both are
    read at the places (m,) of the group whose measurements are further apart.
    """
    sides = [(group, places(group)) for group in (a, b)]
    last = min(own[-1] for _, own in sides)
    coarser = max((own for _, own in sides), key=lambda own: own[1])
    shared = np.append(coarser[coarser < last * (1 - 1e-9)], last)  # (n,)
    curves = ([np.interp(shared, own, list(row["curve"].values())) for row in group.rows.values()]
              for group, own in sides)  # (seeds, n) each, linear between the measurements
    return [np.trapezoid(curve, shared) / np.ptp(shared) for curve in curves]


def apart(a: Group, b: Group, places: Callable[[Group], np.ndarray]) -> Estimate:
    """The mean of these areas of a group minus another one's."""
    return t_estimate(*areas(a, b, places))


def difference(a: Group, b: Group) -> Estimate:
    """The area of a group minus another one's, until the last step that both reached."""
    return apart(a, b, measured)


def make_table(title: str, note: str, columns: dict[str, dict[str, Estimate | str]],
               corrected: tuple[str, ...] = ()) -> Table:
    """Columns by header, each by row; the first has all rows. An Estimate is in points, with * where it is significant
    after Holm's correction over a column that is `corrected`."""
    texts = []
    for header, column in columns.items():
        p = {name: e.p for name, e in column.items() if isinstance(e, Estimate)}
        significant = holm(p) if header in corrected else ()
        texts.append({name: points(e) + " *" * (name in significant) if name in p else e for name, e in column.items()})
    rows = [[name, *(column.get(name, "") for column in texts)] for name in texts[0]]
    return Table(title, note, ["arm", *columns], rows)


def write_tables(room: Room) -> None:
    """What each arm learned, and that minus what the first one did, as tables.md."""
    first, *others = groups = list(read_groups(room).values())
    ordered, minus = sorted(groups, key=lambda group: -group.values("area").mean()), f"area - {first.label}"
    (room.folder / "tables.md").write_text(str(make_table("What the arms learned", NOTE, {
        "seeds": {g.label: f"{len(g.rows)}" for g in ordered},
        **{figure: {g.label: t_estimate(g.values(figure)) for g in ordered} for figure in ("end", "area")},
        minus: {g.label: difference(g, first) for g in others},
        "equal cost": {g.label: apart(g, first, spent) for g in others},
        "cost": {g.label: f"{spent(g)[-1] / spent(first)[-1]:.2f}" for g in ordered}},
        (minus, "equal cost"))), encoding="utf-8")


@one_sentence("stopped; the same command resumes from here")
def main(room: Room, description: str) -> None:
    """Train what a room lacks, and write its tables."""
    parser = new_parser(description=description)
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default 1)")
    args = parser.parse_args()
    require(args.processes > 0, "--processes must be at least 1")
    if not args.tables:
        train(room, args.processes)
    write_tables(room)
