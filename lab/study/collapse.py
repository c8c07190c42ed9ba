"""What breaks first when a run collapses: format, length, entropy or the gradient norm?

    python -m lab.study.run --parts main breaks updates
    python -m lab.study.collapse runs/study-2/hard/{none,*-rloo,ppo,optimal*,vineppo,value*,token*}-seed[0-7] \\
        runs/study-2/easy/{none,*-updates_per_batch-4}-seed?

Reads run folders; those in the same parent form a level. Of these the runs of GRPO (`none`) with one update a
batch are the reference: at each step the mean of their seeds, and the standard deviation of a seed around it, averaged
over steps. A run *leaves* the reference in a measure at the first of 3 steps in a row that are more than 3 standard
deviations away, on the same side. Somebody who watches the run knows two steps later. A run *falls* where its success
leaves downwards, even if it was ahead before. Writes lab/study/collapse-tables.md and a picture of the runs that fell.
"""
import itertools
import json
from pathlib import Path
from typing import Iterable

import numpy as np

from analyze import method_name
from plumbing.report import GREY, PALETTE, Table, new_figure, save_figure
from plumbing.runs import read_config, read_metrics, run_method, shared_settings, work_on_folders
from train import Settings

RESULTS = Path(__file__).parent
MEASURES = {"success": "success", "format": "format", "truncated": "cut off", "length": "length (tokens)",
            "entropy": "entropy (nats)", "grad_norm": "gradient norm"}  # columns of metrics.csv
SHARES = ("success", "format", "truncated")  # from 0 to 1
WINDOW = 5  # steps averaged, because a step has few responses
FAR = 3.0  # standard deviations
LASTING = 3  # steps in a row, chosen by the runs of seeds 0 to 4 on hard puzzles
MAY_DIFFER = {"answers", "updates_per_batch", "clip_high"}  # settings in which a run may differ from the reference


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean (n,) of each step's value and those of up to WINDOW - 1 steps before it."""
    return np.array([values[max(0, end - WINDOW) : end].mean() for end in range(1, len(values) + 1)])


def curves(run: Path) -> dict[str, np.ndarray]:
    """The smoothed measures (steps,) of a run."""
    metrics = read_metrics(run)
    return {name: smooth(metrics[name][1:]) for name in MEASURES}  # row 0 is the start model


def reference(runs: list[dict[str, np.ndarray]]) -> dict[str, tuple[np.ndarray, float]]:
    """By measure, the mean (steps,) over runs, and the standard deviation of a run around it, one for all steps."""
    found = {}
    for name in MEASURES:
        values = np.stack([run[name] for run in runs])  # (seeds, steps)
        found[name] = values.mean(0), float(np.sqrt(values.var(0, ddof=1).mean()))
    return found


def leaves(values: np.ndarray, mean: np.ndarray, deviation: float) -> tuple[int, str] | None:
    """The step at which a curve (steps,) leaves the reference and in which direction, or None."""
    distance = (values - mean) / max(deviation, 1e-9)  # (steps,)
    for start in range(len(distance) - LASTING + 1):
        stretch = distance[start : start + LASTING]
        if (stretch > FAR).all() or (stretch < -FAR).all():
            return start + 1, "up" if stretch[0] > 0 else "down"
    return None


def departures(run: dict[str, np.ndarray], band: dict) -> dict[str, tuple[int, str] | None]:
    """By measure, when a run leaves the reference and in which direction, or None.

    For success, when the run falls: a lead before that does not count.
    """
    mean, deviation = band["success"]
    fall = leaves(np.minimum(run["success"], mean), mean, deviation)
    return {measure: leaves(run[measure], *band[measure]) for measure in MEASURES} | {"success": fall}


def table_collapse(level: str, fallen: dict[str, dict], others: list[dict]) -> Table:
    """When each measure of each run that fell left the reference; last, how many of the others left it, since a measure
    that leaves in every run is no alarm."""
    rows = [[name, *("" if at is None else f"{at[0]}, {at[1]}" for at in left.values())]
            for name, left in fallen.items()]
    rows.append([f"the other {len(others)}", *(count_sides(left[measure] for left in others) for measure in MEASURES)])
    note = (f"The step at which a run leaves GRPO's seeds in each measure, and whether up or down: the first of "
            f"{LASTING} steps in a row more than {FAR:g} standard deviations from their mean, all as means over "
            f"{WINDOW} steps. Empty where it never does; success counts downwards only. Last, how many of the other "
            f"runs leave, and where to. {len(fallen)} of {len(fallen) + len(others)} runs fell.")
    return Table(f"What breaks first, {level}", note, ["run", *MEASURES.values()], rows)


def count_sides(left: Iterable[tuple[int, str] | None]) -> str:
    """How many runs left up and how many down, such as `3 up, 1 down`."""
    sides = [at[1] for at in left if at]
    return ", ".join(f"{sides.count(side)} {side}" for side in ("up", "down") if side in sides) or "0"


def draw_collapse(fallen: list[tuple[str, dict]], band: dict, file: Path) -> None:
    """A panel per measure: GRPO's band in grey, and each run, after its name, in the colour and line of its method."""
    figure, axes = new_figure(3, 2, 5.6)
    line_of = dict(zip(dict.fromkeys(name for name, _ in fallen), itertools.product(("-", "--"), PALETTE)))
    for axis, (measure, title) in zip(axes.flat, MEASURES.items()):
        mean, deviation = band[measure]
        steps = np.arange(1, len(mean) + 1)
        low, high = mean - FAR * deviation, mean + FAR * deviation  # (steps,) each
        if measure in SHARES:
            low, high = low.clip(0, 1), high.clip(0, 1)
        axis.fill_between(steps, low, high, color=GREY, alpha=0.2, lw=0)
        lines = {"GRPO": axis.plot(steps, mean, color=GREY, lw=1)[0]}
        for name, run in fallen:
            style, colour = line_of[name]
            lines[name] = axis.plot(steps, run[measure], style, color=colour, lw=1.2)[0]
        axis.set(title=title, xlabel="step")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3)
    save_figure(figure, file)


def curve_name(config: dict) -> str:
    """What the curve of a run is called: its method, and its responses and updates where they are not the default."""
    named = [method_name(run_method(config))]
    for name, unit in {"answers": "responses", "updates_per_batch": "updates"}.items():
        usual = getattr(Settings, name)
        count = config["settings"].get(name, usual)
        named += [f"{count} {unit}"] * (count != usual)
    return ", ".join(named)


def write_page(folders: list[Path]) -> None:
    """Print a table for each level, that is, for folders side by side; write them and the pictures."""
    levels: dict[Path, list[Path]] = {}
    for folder in folders:
        levels.setdefault(folder.resolve().parent, []).append(folder)
    text = "\n".join(str(examine(level.name, members)) for level, members in levels.items())
    (RESULTS / "collapse-tables.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {RESULTS / 'collapse-tables.md'}, and a picture for each level where up to six runs fell")


def examine(level: str, folders: list[Path]) -> Table:
    """The table of a level, with its runs of GRPO as the reference; draws the runs that fell, if few did."""
    configs = {folder: read_config(folder) for folder in folders}
    if len({json.dumps({name: value for name, value in shared_settings(config).items() if name not in MAY_DIFFER})
            for config in configs.values()}) > 1:
        raise ValueError("the runs must have the same settings, but for the method's: name those of one level")
    names = {folder: curve_name(config) for folder, config in configs.items()}
    grpo, others = ([folder for folder in folders if (names[folder] == "GRPO") == wanted] for wanted in (True, False))
    if len(grpo) < 2 or not others:
        raise ValueError("name at least two runs of GRPO (none), and runs of other methods")
    runs = {folder: curves(folder) for folder in folders}
    band = reference([runs[folder] for folder in grpo])
    left = {folder: departures(runs[folder], band) for folder in others}
    fallen = [folder for folder in others if left[folder]["success"]]
    if 0 < len(fallen) <= 6:  # more lines can't be told apart
        draw_collapse([(names[folder], runs[folder]) for folder in fallen], band, RESULTS / f"collapse-{level}.png")
    rows = {f"{names[folder]}, seed {configs[folder]['settings']['seed']}": left[folder] for folder in fallen}
    return table_collapse(level, rows, [left[folder] for folder in others if folder not in fallen])


def main() -> None:
    """Read the command line; report what can't be read in one sentence."""
    work_on_folders(write_page, __doc__,
                    "name run folders, and no flags, such as: python -m lab.study.collapse runs/*-seed[012]")


if __name__ == "__main__":
    main()
