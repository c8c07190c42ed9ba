"""Do the original's mitigations break runs of a real model? Section 3 of lab/archive/headline-designs.md.

    python -m lab.headline.breaks.run             trains what has no row in lab/headline/breaks/runs.csv; resumes
    python -m lab.headline.breaks.run --tables    only writes steps.csv, a row a step, and tables.md

weights/qwen: by python -m lab.real.weights. A run takes an hour of a core.
"""
from pathlib import Path

import numpy as np

from lab.arms import Room, difference, main, make_table, read_groups, read_rows, write_rows
from lab.statistics import holm
from methods.ktae import fisher_p
from plumbing.report import t_estimate

ROOM = Room(
    Path(__file__).parent,
    "--task math --model weights/qwen --dtype bfloat16 --arithmetic float32 --lora_rank 8 --lr 1.5e-4 --steps 20 "
    "--questions 4 --answers 8 --max_new_tokens 128 --micro_batch 8 --eval_every 0 --eval_problems 256 --pass_at 0",
    range(10, 16),
    {"GRPO": "none", "inverse": "inverse_undetached --epsilon 0.1 --normalize none",
     "discounted": "outcome_conditional --think_discount 0.5"},
    least=6, program="-m lab.original.undetached")
LOGGED = ("success", "format", "length", "truncated", "entropy", "zero_variance_groups", "ratio_error", "grad_norm")
BEFORE = 3  # steps before a break that are shown


def read_steps(room: Room) -> dict[str, np.ndarray]:
    """What was logged of each step (steps, columns), by run. steps.csv keeps it; runs that it lacks are added to it."""
    file = room.folder / "steps.csv"
    rows = read_rows(file)
    for name in room.rows().keys() - {row["run"] for row in rows}:
        log = read_rows(Path("runs", room.folder.name, name, "metrics.csv"))
        rows += [{"run": name} | {key: row[key] for key in ("step", *LOGGED)} for row in log if row["success"]]
    write_rows(sorted(rows, key=lambda row: (row["run"], int(row["step"]))), file)
    return {name: np.array([[float(row[key] or "nan") for key in LOGGED] for row in rows if row["run"] == name])
            for name in {row["run"]: None for row in rows}}


def before_breaks(room: Room) -> dict[str, np.ndarray]:
    """What was logged (columns,) before each break, and by GRPO's runs in the same steps."""
    rows, steps, found = room.rows(), read_steps(room), {}
    calm = np.array([steps[e.folder.name] for e in room.runs() if e.arm == "GRPO" and e.folder.name in steps])
    for e in room.runs():
        if (row := rows.get(e.folder.name)) and float(row["end"]) < float(row["start"]):
            log = steps[e.folder.name]  # (steps, columns)
            last = int(np.flatnonzero(log[:, 0] >= float(row["start"])).max(initial=-1)) + 1  # the last step not below
            window = slice(max(0, last - BEFORE), last)
            found[f"{e.arm}, seed {e.seed}, up to step {last}"] = np.nanmean(log[window], 0)
            found[f"GRPO, up to step {last}"] = np.nanmean(calm[:, window], (0, 1))
    return found


def write(room: Room) -> None:
    """steps.csv and tables.md."""
    groups, shown = read_groups(room), before_breaks(room)
    broken = {arm: int((group.values("end") < group.values("start")).sum()) for arm, group in groups.items()}
    first, n = groups["GRPO"], len(groups["GRPO"].rows)
    p = {arm: fisher_p(n, n)[broken["GRPO"], count].item() for arm, count in broken.items() if arm != "GRPO"}
    verdict = make_table(
        "Do they break?", f"{n} runs each. Broken: ended below the start; p: Fisher's exact test against GRPO, * after "
        "Holm's correction over the two. Ends in percent, differences in points, Welch's interval.", {
            "end, by seed": {arm: ", ".join(f"{100 * x:.1f}" for x in g.values("end")) for arm, g in groups.items()},
            "broken": {arm: f"{count}" for arm, count in broken.items()},
            "p": {arm: f"{value:.3f}" + " *" * (arm in holm(p)) for arm, value in p.items()},
            "end": {arm: t_estimate(group.values("end")) for arm, group in groups.items()},
            "end - GRPO": {arm: difference(groups[arm], first, "end") for arm in p}})
    before = make_table("Before a break", f"Means of the {BEFORE} last steps before success while training stays below "
                        "the start's for good; and all runs of GRPO in the same steps.",
                        {name: {row: f"{x[i]:.3g}" for row, x in shown.items()} for i, name in enumerate(LOGGED)},
                        of="run")
    (room.folder / "tables.md").write_text(f"{verdict}\n{before}", encoding="utf-8")


if __name__ == "__main__":
    main(ROOM, __doc__, write)
