"""Does exact credit of turns learn faster than GRPO and RLOO? The runs of designs.md, their table and their picture.

    python -m lab.turns.run             trains what has no row in lab/turns/runs.csv, one run at a time; resumes
    python -m lab.turns.run --tables    only writes lab/turns/tables.md and learning.png

Success is exact: V(prompt) of values.py at every tenth step, from the run's checkpoints. Seeds are the outer loop. A
finished run loses its folder. While a program measures speed (lab/quiet.py) the run pauses.
"""
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.estimates import points
from lab.statistics import holm
from lab.study.decided import above_line, read_noise, values_of
from lab.study.engine import (COSTS, RLOO, difference, measured, name_of, read_levels, read_rows, select, spent,
                              write_rows)
from lab.study.pictures import draw_curve
from lab.study.run import train_all
from lab.turns.values import grow
from plumbing.comparison import Group
from plumbing.files import replace_file
from plumbing.flags import new_parser
from plumbing.progress import clock, one_sentence
from plumbing.registry import require
from plumbing.report import GREY, PALETTE, Estimate, Table, new_figure, t_estimate
from plumbing.runs import read_config, read_metrics
from settings import Settings
from start import load_policy

HERE, RUNS = Path(__file__).parent, Path("runs/turns")
RESULTS = HERE / "runs.csv"
ALIKE = "--task guess --max_new_tokens 24 --steps 100 --checkpoint_every 10 --eval_every 0 --pass_at 0"
EVERY, SEEDS, LEAST = 10, range(10), 6  # seeds, and how many of them tables need
GAMES = {f"none questions={Q} advantage=rloo": Q for Q in (24, 72, 216)}  # RLOO with more games a step
LINE = (RLOO, *GAMES)  # its area by its noise
GRPO, WITH, WITHOUT = "none", "exact_turns", "exact_turns luck=false"  # A1, A2
MIXED = "exact_turns luck=false mix=0.74"  # as noisy as A1
ARMS = (GRPO, *LINE, WITH, WITHOUT, MIXED, "turn_vine", "turn_baseline")
MARGIN = 0.02  # of area, the smallest effect of interest


class Experiment(NamedTuple):
    """A run: what train_all of lab/study/run.py starts or resumes."""

    label: str
    seed: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.label.replace(' ', '-').replace('=', '-')}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return RUNS / self.name

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return RUNS / f"{self.name}.log"

    @property
    def command(self) -> str:
        """The command that makes it."""
        flags = self.label.replace(" ", " --").replace("=", " ")
        return f"python -m lab.turns.credit --mitigation {flags} {ALIKE} --seed {self.seed} --out {self.folder}"

    def next_command(self) -> str:
        """The same, or the one that resumes it."""
        return f"python -m lab.turns.credit --resume {self.folder}" if self.folder.is_dir() else self.command


def exact_success(e: Experiment) -> dict[int, float]:
    """V(prompt) of the start model and of each checkpoint, by step."""
    s = Settings(**read_config(e.folder)["settings"])
    weights = {0: s.model} | {step: f"{e.folder}/checkpoints/step-{step:06d}" for step in range(EVERY, s.steps, EVERY)}
    weights[s.steps] = f"{e.folder}/checkpoint"
    return {step: float(grow(load_policy(replace(s, model=model))).V[0].mean()) for step, model in weights.items()}


def make_row(e: Experiment) -> dict:
    """The row of a finished run."""
    curve, metrics = exact_success(e), read_metrics(e.folder)
    cost = np.nancumsum(sum(weight * metrics[name] for name, weight in COSTS.items()))  # (steps + 1,) NaN at the start
    method, _, setting = e.label.partition(" ")
    area = np.trapezoid(list(curve.values()), list(curve)) / max(curve)
    figures = {"area": area, "start": curve[0], "end": curve[max(curve)],
               **{name: np.nansum(metrics[name]) for name in (*COSTS, "seconds")}}
    # Version 2 charges a text that is read again for each turn; 1, of all rows so far, kept it in a cache.
    return {"run": e.name, "version": 2, "part": "turns", "level": "guess", "method": method, "setting": setting,
            "seed": e.seed, "command": e.command, "steps": max(curve),
            **{name: f"{x:.7g}" for name, x in figures.items()},
            "curve": " ".join(f"{step}:{x:.6f}" for step, x in curve.items()),
            "spent": " ".join(f"{step}:{cost[step]:.7g}" for step in curve)}


def run() -> None:
    """Train what has no row."""
    done = {row["run"] for row in read_rows(RESULTS)}
    todo = [e for seed in SEEDS for label in ARMS if (e := Experiment(label, seed)).name not in done]
    seconds, total = [], len(SEEDS) * len(ARMS)
    with closing(train_all(todo, 1, 1)) as ended:
        for i, (e, code) in enumerate(ended, 1):
            if code:
                raise ValueError(f"{e.name} ended with code {code}: see {e.log}")
            rows = [*read_rows(RESULTS), make_row(e)]
            replace_file(RESULTS, lambda part: write_rows(rows, part))
            shutil.rmtree(e.folder)
            seconds.append(float(rows[-1]["seconds"]))
            print(f"{total - len(todo) + i}/{total} runs done  {e.name}  "
                  f"ETA {clock(1.3 * np.mean(seconds) * (len(todo) - i))}", flush=True)


# ---------------------------------------------------------------------------------------------- tables and picture


def read_quiet() -> dict[str, Estimate]:
    """1 / the noise of a step, RLOO's = 1, by arm. Games are independent, so with Q instead of 12 it is Q / 12."""
    return read_noise(HERE / "noise.md") | {name: Estimate(Q / 12, Q / 12, Q / 12) for name, Q in GAMES.items()}


def above(groups: dict[str, Group], quiet: dict[str, Estimate], name: str) -> Estimate:
    """The area of an arm minus that of RLOO where it is as noisy."""
    return above_line(groups, values_of(quiet), (name,), line=LINE)


def above_at_ends(groups: dict[str, Group], quiet: dict[str, Estimate], name: str) -> str:
    """The same, with the arm's noise at either end of its interval."""
    ends = [quiet | {name: Estimate(place)} for place in (quiet[name].low, quiet[name].high)]
    low, high = sorted(above(groups, other, name).value for other in ends)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def contrasts(groups: dict[str, Group], quiet: dict[str, Estimate]) -> dict[str, Estimate]:
    """The primary contrasts of designs.md, in area."""
    found = {f"{a} - {b}": difference(groups[x], groups[y]) for a, x in (("A1", WITH), ("A2", WITHOUT))
             for b, y in (("RLOO", RLOO), ("GRPO", GRPO))}
    return found | {"A1 - RLOO as noisy": above(groups, quiet, WITH),
                    "A2 - RLOO as noisy": above(groups, quiet, WITHOUT),
                    "A2 as noisy as A1 - A1": difference(groups[MIXED], groups[WITH])}


def complete() -> dict[str, Group]:
    """The arms, on the seeds that have all of them; at least LEAST: designs.md lets nobody look before."""
    parts = read_levels(RESULTS, 1, 2)["guess"]
    arms = Counter(run.seed for run in parts["turns"])
    seeds = {seed for seed, n in arms.items() if n == len(ARMS)}
    require(len(seeds) >= LEAST, f"{len(seeds)} seeds have all arms, and tables wait for {LEAST}: run without --tables")
    return select(parts, "turns", seeds=seeds)


def write_tables() -> None:
    """tables.md and learning.png."""
    groups = complete()
    quiet, unit = read_quiet(), spent(groups[GRPO])[-1]
    rows = [[title(name), f"{len(g.rows)}", points(t_estimate(g.values("end"))), points(t_estimate(g.values("area"))),
             "" if name == RLOO else points(difference(g, groups[RLOO])),
             f"{quiet[name].value:.2f}" if name in quiet else "",
             *([""] * 2 if name in LINE or name not in quiet else
               [points(above(groups, quiet, name)), above_at_ends(groups, quiet, name)]),
             f"{spent(g)[-1] / unit:.1f}"]
            for name, g in sorted(groups.items(), key=lambda item: -item[1].values("area").mean())]
    note = ("±: half of a 95% interval over seeds; end and area in percent, exact. Quiet: 1 / noise of a step "
            "(noise.md). Above the line: area minus RLOO's as noisy at RLOO's policies, noise taken as known; by noise: "
            "the same with the arm's noise at either end of its interval. Beyond 18 the line stays at its end. Cost: "
            "weighted tokens, GRPO = 1.")
    arms = Table("Learning", note, ["arm", "seeds", "end", "area", "area - RLOO", "quiet", "above the line", "by noise",
                                    "cost"], rows)
    found = contrasts(groups, quiet)
    significant = holm({name: e.p for name, e in found.items()})
    primary = Table("Primary contrasts", "Of area, in points. * is significant at 5% after Holm's correction over the "
                    f"rows. Margin: {100 * MARGIN:.0f} points.", ["contrast", "area", "interval"],
                    [[name, points(e) + " *" * (name in significant), verdict(e)] for name, e in found.items()])
    others = {"A2 - A1": difference(groups[WITHOUT], groups[WITH]),
              **{f"{name} - RLOO": difference(groups[name], groups[RLOO]) for name in ("turn_vine", "turn_baseline")},
              **{f"{a} - RLOO, end": difference(groups[x], groups[RLOO], "end")
                 for a, x in (("A1", WITH), ("A2", WITHOUT))}}
    secondary = Table("Secondary contrasts", "Uncorrected. Of area, in points, where it does not say the end.",
                      ["contrast", "difference"], [[name, points(e)] for name, e in others.items()])
    (HERE / "tables.md").write_text(f"{arms}\n{primary}\n{secondary}", encoding="utf-8")
    draw(groups, quiet, HERE / "learning.png")


def title(label: str) -> str:
    """An arm's name in a table."""
    return name_of(label).strip("`").replace(WITHOUT, "A2").replace(WITH, "A1")


def verdict(e: Estimate) -> str:
    """Where the 95% interval lies, if it says more than that it is wide."""
    inside, beyond = max(-e.low, e.high) < MARGIN, max(e.low, -e.high) > MARGIN
    return "within the margin" if inside else "beyond the margin" if beyond else ""


def draw(groups: dict[str, Group], quiet: dict[str, Estimate], file: Path) -> None:
    """Exact success by step, and area by how quiet an update is."""
    figure, (left, right) = new_figure(2, 4.2)
    styles = {WITHOUT: ("o-", PALETTE[0]), WITH: ("s-", PALETTE[1]), "turn_vine": ("D--", PALETTE[2]),
              "turn_baseline": ("v--", PALETTE[3]), RLOO: ("^-", GREY), GRPO: ("x:", GREY)}
    for name, (line, colour) in styles.items():
        draw_curve(left, measured(groups[name]), groups[name], line, title(name).strip("`"), colour)
    area = {name: t_estimate(100 * groups[name].values("area")) for name in groups if name in quiet}
    right.plot([quiet[name].value for name in LINE], [area[name].value for name in LINE], color=GREY)
    for name, up in area.items():
        colour = GREY if name in LINE else PALETTE[0] if "luck=false" in name else PALETTE[1]
        across, upright = ([[e.value - e.low], [e.high - e.value]] for e in (quiet[name], up))
        right.errorbar(quiet[name].value, up.value, upright, across, "^" if name in LINE else "o", color=colour)
    left.set(xlabel="step", ylabel="exact success V(prompt), %", title="Equal responses")
    right.set(xlabel="1 / noise of a step, RLOO = 1 (logarithmic)", ylabel="area, %", xscale="log",
              title="By noise at RLOO's policies (line: 12 to 216 games)")
    right.set_xticks([1, 2, 6, 18], ["1", "2", "6", "18"])
    right.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(file)


@one_sentence("stopped; the same command resumes from here")
def main() -> None:
    """Train, or only write the tables."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="train nothing")
    if not parser.parse_args().tables:
        run()
    write_tables()


if __name__ == "__main__":
    main()
