"""The runs of a pretrained model on a GPU that is lent for some minutes: several at a time, and small files come back.

They are those of part `words` (designs.md, section 3) that have no row yet, in the order of their seeds. At each call
the run of part `first` comes before them, one update at a learning rate of 0: unless its gradient is finite, nothing
else begins.
Each run is a process of its own, so one that fails costs only itself. None begins that would not end in time, and none
outlives the limit. The same command goes on with what is left.

What comes back of each run is its log, its row, its curves and its samples; of seed 0 also the credit log. Weights stay
there, and no state of 6 GB is written, since nobody will resume.

    python -m lab.real.gpu --minutes 8 --out results       needs weights/qwen and, beside it, gsm_symbolic.jsonl
    cat results/* | tar xz                                 at home; then this adds the rows to lab/real/runs.csv:
    python -m lab.study.run --parts words --collect --keep
"""
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import train
from lab.study.plan import RUNS
from lab.study.run import OTHERS, Experiment, done_runs, list_experiments, make_row
from methods import MITIGATIONS
from plumbing import run_folder
from plumbing.files import write_json
from plumbing.flags import new_parser
from plumbing.progress import fail, one_sentence

PARTS, LEVELS = ["first", "words"], ["first-words", "words"]
PACKING = 15  # seconds
SLICE = 15 * 2**20  # bytes of a file that comes back


def save_weights(run: Path, step: int, settings: train.Settings, _, write_weights, __) -> None:
    """In place of run_folder.save: the last weights, on which the row measures GSM-Symbolic."""
    if step == settings.steps:
        write_weights(run / "checkpoint")


def make(e: Experiment) -> None:
    """A run and its row, in this process."""
    shutil.rmtree(e.folder, ignore_errors=True)  # of a try that was cut off
    run_folder.save, sys.argv = save_weights, shlex.split(e.command)[1:]
    train.main()
    write_json(e.folder / "row.json", make_row(e))


def command_of(e: Experiment) -> list[str]:
    """What makes a run in a process of its own."""
    return [sys.executable, "-m", "lab.real.gpu", "--run", e.name, "--device", e.device]


def attempt(e: Experiment, until: float, took: list[float]) -> bool:
    """Make a run, unless the longest before it shows that it would not end in time. Returns whether it ended well.

    until: time.time() at the limit, when it is killed. took: seconds of those that ended, to which it adds its own.
    """
    began = time.time()
    if began + max(took, default=0.0) > until:
        return False
    e.log.parent.mkdir(parents=True, exist_ok=True)
    with e.log.open("w") as log:
        try:
            code = subprocess.run(command_of(e), stdout=log, stderr=log, timeout=until - began).returncode
        except subprocess.TimeoutExpired:  # it was killed
            print(f"{e.name}: cut off", flush=True)
            return False
    took.append(time.time() - began)
    lines = e.log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    print(f"{e.name}: {took[-1]:.0f} s" + (f", failed with code {code}: {lines[-1]}" if code else ""), flush=True)
    return code == 0


def pack(experiments: list[Experiment], out: Path) -> None:
    """Write what comes back to results.tar.gz.00, .01, ..."""
    out.mkdir(parents=True, exist_ok=True)
    found = [file for e in experiments for file in (
        e.log, *e.folder.glob("*"), *(e.folder.glob("credit/*") if e.seed == 0 else ())) if file.is_file()]
    whole = RUNS / "results.tar.gz"
    with tarfile.open(whole, "w:gz", compresslevel=1) as tar:
        for file in found:
            tar.add(file)
    content = whole.read_bytes()
    for i in range(0, len(content), SLICE):
        (out / f"results.tar.gz.{i // SLICE:02d}").write_bytes(content[i : i + SLICE])
    rows = sum(file.name == "row.json" for file in found)
    print(f"{rows} of {len(experiments)} rows: {len(found)} files, {len(content) / 2**20:.1f} MiB, in {out}")


@one_sentence()
def main() -> None:
    """Make the first run, then the others, several at a time, until the limit; and pack."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="until everything is packed (default 8)")
    parser.add_argument("--workers", type=int, default=5, help="runs at a time, of 15 GB each (default 5)")
    parser.add_argument("--device", default="cuda", help="any torch device (default cuda)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for what comes back")
    parser.add_argument("--run", metavar="NAME", help="make only this run, and pack nothing")
    args = parser.parse_args()
    experiments = list_experiments(PARTS, LEVELS, list(MITIGATIONS), args.device)
    if args.run:
        for e in experiments:
            if e.name == args.run:
                return make(e)
        raise ValueError(f"--run {args.run}: there is no such run")
    if not Path(OTHERS).is_file():  # the last thing that a run reads
        raise FileNotFoundError(f"there is no {OTHERS}: make it with python -m lab.real.problems")
    os.environ["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // args.workers))
    one = partial(attempt, until=time.time() + 60 * args.minutes - PACKING, took=[])
    first, *others = experiments
    done = done_runs()
    left = [e for e in others if e.name not in done and not (e.folder / "row.json").is_file()]
    if works := one(first):
        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(one, left))
    pack(experiments, args.out)
    if not works:
        fail(f"the first run failed, so no other began: see {first.log}")


if __name__ == "__main__":
    main()
