"""What breaks first when a run collapses: format, length, entropy or the gradient norm?

    python -m experiments.study --parts main breaks --levels hard
    python -m experiments.collapse runs/study-2/hard/{none,*-rloo,ppo,optimal*,vineppo-k-3,value*,token*}-seed?

Reads run folders. Those of GRPO (`none`) are the reference: at each step the mean of their seeds, and the standard
deviation of a seed around it, averaged over steps. A run *leaves* the reference in a measure at the first of 3 steps
in a row that are more than 3 standard deviations away, on the same side. Somebody who watches the run knows two steps
later. Writes results/collapse.md and a picture of the runs whose success fell.
"""
import json
from pathlib import Path

import numpy as np

from plumbing.report import GREY, PALETTE, Table, new_figure, save_figure
from plumbing.runs import read_config, read_metrics, run_method, shared_settings, work_on_folders

RESULTS = Path("results")
MEASURES = {"success": "success", "format": "format", "truncated": "cut off", "length": "length (tokens)",
            "entropy": "entropy (nats)", "grad_norm": "gradient norm"}  # columns of metrics.csv
WINDOW = 5  # steps averaged, because a step has few responses
FAR = 3.0  # standard deviations
LASTING = 3  # steps in a row, chosen by the runs of seeds 0 to 4


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean (n,) of each step's value and those of up to WINDOW - 1 steps before it."""
    total = np.cumsum(np.insert(values, 0, 0.0))  # (n + 1,)
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - WINDOW, 0)
    return (total[end] - total[start]) / (end - start)


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


def table_collapse(broken: dict[Path, dict], others: list[dict], band: dict) -> Table:
    """For each run that broke, when each of its measures left the reference, and which was first; last, how many of the
    others left it, since a measure that leaves in every run is no alarm."""
    rows = []
    for folder, run in broken.items():
        left = {measure: leaves(run[measure], *band[measure]) for measure in MEASURES}
        when = {measure: at[0] for measure, at in left.items() if at}
        first = [MEASURES[m].partition(" (")[0] for m in when if when[m] == min(when.values())]
        rows.append([f"`{folder.name}`", *("" if at is None else f"{at[0]}, {at[1]}" for at in left.values()),
                     " and ".join(first)])
    left = [sum(leaves(run[measure], *band[measure]) is not None for run in others) for measure in MEASURES]
    rows.append(["runs that did not break", *(f"{count} of {len(others)}" for count in left), ""])
    note = (f"The step at which a run leaves GRPO's seeds in each measure, and whether up or down: the first of "
            f"{LASTING} steps in a row more than {FAR:g} standard deviations from their mean, all as means over "
            f"{WINDOW} steps. Empty where it never does. Last, how many of the other runs leave at all.")
    return Table("What breaks first", note, ["run", *MEASURES.values(), "first"], rows)


def draw_collapse(broken: dict[Path, dict], band: dict, file: Path) -> None:
    """A panel per measure: GRPO's band in grey, and each run."""
    figure, axes = new_figure(3, 2, 5.6)
    for axis, (measure, title) in zip(axes.flat, MEASURES.items()):
        mean, deviation = band[measure]
        steps = np.arange(1, len(mean) + 1)
        axis.fill_between(steps, mean - FAR * deviation, mean + FAR * deviation, color=GREY, alpha=0.2, lw=0,
                          label="GRPO")
        axis.plot(steps, mean, color=GREY, lw=1)
        for i, (folder, run) in enumerate(broken.items()):
            axis.plot(np.arange(1, len(run[measure]) + 1), run[measure], color=PALETTE[i % len(PALETTE)],
                      ls=("-", "--", ":")[i // len(PALETTE) % 3], lw=1.3, label=folder.name)
        axis.set(title=title, xlabel="step")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, file)


def write_page(folders: list[Path]) -> None:
    """Print the table; write it and the picture."""
    configs = [read_config(folder) for folder in folders]
    methods = {folder: run_method(config) for folder, config in zip(folders, configs)}
    grpo = [curves(folder) for folder in folders if methods[folder] == "none"]
    others = {folder: curves(folder) for folder in folders if methods[folder] != "none"}
    if len(grpo) < 2 or not others:
        raise ValueError("name at least two runs of GRPO (none), and runs of other methods")
    if len({len(run["success"]) for run in (*grpo, *others.values())}) > 1:
        raise ValueError("the runs must have the same number of steps")
    if len({json.dumps(shared_settings(config)) for config in configs}) > 1:
        raise ValueError("the runs must have the same settings, but for the method's: name those of one level")
    band = reference(grpo)
    broken = {folder: run for folder, run in others.items()
              if (left := leaves(run["success"], *band["success"])) and left[1] == "down"}
    whole = [run for folder, run in others.items() if folder not in broken]
    text = (f"{table_collapse(broken, whole, band)}\n"
            f"{len(broken)} of {len(others)} runs fell out of GRPO's band in success.\n")
    (RESULTS / "collapse.md").write_text(text, encoding="utf-8")
    if broken:
        draw_collapse(broken, band, RESULTS / "collapse.png")
    print(f"{text}wrote {RESULTS / 'collapse.md'}" + " and collapse.png" * bool(broken))


def main() -> None:
    """Read the command line; report what can't be read in one sentence."""
    work_on_folders(write_page, __doc__,
                    "name run folders, and no flags, such as: python -m experiments.collapse runs/*-seed[012]")


if __name__ == "__main__":
    main()
