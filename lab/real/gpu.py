"""The runs of pretrained models on a GPU that is lent for some minutes: several at a time, and small files come back.

Takes the parts `first` and `words` of lab/study/plan.py in the order of their seeds, and beside them measures the truth
about some tokens. Each worker is one process that makes one run after the other, so that only its first one waits for
libraries. No run begins that would not end in time. What comes back for each run: its row, its curves, its samples, the
tables of analyze.py, and the credit log of a few steps. Weights and states stay there.

Run it:  python -m lab.real.gpu --minutes 8 --out results        needs weights/qwen and the files of lab.real.problems
"""
import contextlib
import gc
import multiprocessing
import os
import shlex
import subprocess
import sys
import tarfile
import time
import traceback
from pathlib import Path

import torch

import train
from analyze import analyze_run
from lab.study.plan import PRETRAINED, RUNS
from lab.study.run import Experiment, list_experiments, make_row
from methods import MITIGATIONS
from plumbing import run_folder
from plumbing.files import write_json
from plumbing.flags import new_parser

PARTS = ["first", "words"]
STEPS = {1, 2, 5, 10, 20, 30, 40}  # whose credit logs come back, of the runs with seed 0 and 1
TRUTH = ("-m lab.truth.measure --task math --dtype bfloat16 --max_new_tokens 128 --rollouts 50 --critic_batches 0 "
         "--only_rollouts")
SLICE = 15 * 2**20  # bytes of a file that comes back


def save_weights(run: Path, step: int, settings: train.Settings, _, write_weights, __) -> None:
    """In place of run_folder.save: the last weights, and no state of 6 GB, since nobody will resume."""
    if step == settings.steps:
        write_weights(run / "checkpoint")


def work(waiting: multiprocessing.Queue, until: float) -> None:
    """Make the runs of a queue, one after the other, while the next one can still end in time."""
    run_folder.save, longest = save_weights, 0.0
    while time.time() + 1.1 * longest < until and (e := waiting.get()) is not None:
        began = time.time()
        e.log.parent.mkdir(parents=True, exist_ok=True)
        with e.log.open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                make(e)
            except (Exception, SystemExit):  # one run that fails costs only itself
                traceback.print_exc(file=log)
        longest = max(longest, time.time() - began)


def make(e: Experiment) -> None:
    """One run, its row and its tables."""
    sys.argv = shlex.split(e.command)[1:]
    train.main()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    write_json(e.folder / "row.json", make_row(e))
    if e.seed == 0:
        analyze_run(e.folder)


def measure_truth(run: Path, device: str, until: float) -> None:
    """The truth about the start model's tokens, then about those of the model of a run, once that is finished."""
    measure_one("start", f"--questions 24 --model weights/qwen --device {device}", until)
    while not (run / "row.json").is_file():
        time.sleep(1)
    measure_one("trained", f"--questions 12 --model {run / 'checkpoint'} --device {device}", until)


def measure_one(name: str, flags: str, until: float) -> None:
    """The truth about one model's tokens, with its log beside it."""
    out = RUNS / f"truth-{name}"
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log").open("w") as log:
        subprocess.run([sys.executable, *shlex.split(f"{TRUTH} --answers 2 {flags} --out {out}")], stdout=log,
                       stderr=log, timeout=max(1, until - time.time()))


def files_of(run: Path) -> list[Path]:
    """What comes back of a run."""
    credit = [file for file in run.glob("credit/*.npz") if int(file.stem.removeprefix("step-")) in STEPS]
    return [run / name for name in ("config.json", "metrics.csv", "final.json", "samples.txt", "row.json",
                                    "analysis/tables.md") if (run / name).is_file()] + credit * (run.name[-1] in "01")


def pack(experiments: list[Experiment], out: Path) -> None:
    """Write everything that comes back to results.tar.gz.00, .01, ..."""
    out.mkdir(parents=True, exist_ok=True)
    files = [file for e in experiments for file in [e.log, *files_of(e.folder)] if file.is_file()]
    files += [file for file in RUNS.glob("truth-*/*") if file.is_file()]
    whole = RUNS / "results.tar.gz"
    with tarfile.open(whole, "w:gz", compresslevel=1) as tar:
        for file in files:
            tar.add(file)
    content = whole.read_bytes()
    for i in range(0, len(content), SLICE):
        (out / f"results.tar.gz.{i // SLICE:02d}").write_bytes(content[i : i + SLICE])
    print(f"{len(files)} files, {len(content) / 2**20:.1f} MiB, in {out}")


def main() -> None:
    """Start the workers and the measurement of truth, wait until the time is over, and pack."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="until everything is packed (default 8)")
    parser.add_argument("--workers", type=int, default=5, help="runs at a time (default 5)")
    parser.add_argument("--device", default="cuda", help="any torch device (default cuda)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for what comes back")
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes - 15  # seconds to pack
    experiments = list_experiments(PARTS, list(PRETRAINED), list(MITIGATIONS), args.device)
    os.environ["OMP_NUM_THREADS"] = "2"
    start = multiprocessing.get_context("spawn")
    waiting = start.Queue()
    for e in [*experiments, *[None] * args.workers]:
        waiting.put(e)
    first = next(e for e in experiments if e.level == "words").folder
    processes = [start.Process(target=work, args=(waiting, until)) for _ in range(args.workers)]
    processes.append(start.Process(target=measure_truth, args=(first, args.device, until)))
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, until - time.time()))
    for process in processes:
        process.kill()
    pack(experiments, args.out)


if __name__ == "__main__":
    main()
