"""What a step of each method costs: the tokens that it samples, reads and updates on, which no machine changes.

    python train.py --mitigation none --out runs/easy-end
    python -m experiments.costs --end runs/easy-end/checkpoint

Three steps of every method of the study are taken from the bundled model, and three from the checkpoint of a run of
GRPO, since responses grow with training. results/costs.csv receives a row for each method and each of the two models,
with the mean tokens a step. The study weighs them by analyze.COSTS.
"""
import csv
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from analyze import COSTS
from experiments.study import LEVELS, METHODS, RLOO, write_hard_puzzles
from experiments.study_tables import TOKENS
from plumbing.flags import new_parser
from plumbing.progress import Progress, one_sentence
from plumbing.report import write_csv
from plumbing.runs import read_metrics
from train import BUNDLED

FILE = Path("results") / TOKENS
TRIAL = " --steps 3 --eval_every 0 --eval_problems 1 --state_every 0"


def cost_row(flags: str, level: str, model: Path, folder: Path) -> dict:
    """Mean tokens a step of a method, by column of metrics.csv, in a trial that begins from a model."""
    command = f"train.py --mitigation {flags}{LEVELS[level]}{TRIAL} --model {model} --out {folder}"
    done = subprocess.run([sys.executable, *shlex.split(command)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{command} failed: {done.stderr.strip().splitlines()[-1]}")
    metrics = read_metrics(folder)
    name, *settings = flags.split(" --")
    label = " ".join([name, *(setting.replace(" ", "=") for setting in settings)])  # as in results/runs.csv
    return {"level": level, "method": label, "model": "start" if model == BUNDLED else "end"} | {
        column: f"{metrics[column][1:].mean():.0f}" for column in COSTS}


@one_sentence()
def main() -> None:
    """Measure every method from both models, and replace this level's rows of the file."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--end", type=Path, required=True, help="the checkpoint of a finished run of GRPO")
    parser.add_argument("--level", choices=list(LEVELS), default="easy", help="the puzzles of that run (default easy)")
    args = parser.parse_args()
    write_hard_puzzles()
    trials = [(flags, model) for flags in (*METHODS, RLOO) for model in (BUNDLED, args.end)]
    rows, progress = [], Progress("trials", len(trials))
    with tempfile.TemporaryDirectory() as folder:
        for i, (flags, model) in enumerate(trials):
            rows.append(cost_row(flags, args.level, model, Path(folder) / str(i)))
            progress.show(len(rows))
    kept = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines())) if FILE.is_file() else []
    write_csv([row for row in kept if row["level"] != args.level] + rows, FILE)
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
