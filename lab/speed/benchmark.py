"""Speed as ratios: our sampler and whole step against other libraries, and two processes against one.

Shared machines are noisy. So the things compared take turns, A B C A B C, and each round gives one ratio, of which the
table has the median, the smallest and the largest. Rates are in tokens sampled per second, the end tokens included.
Each library works in a process of its own: see contestants.py.

Run it:  python -m lab.speed.benchmark          a few minutes on two cores; pip install -r tests/requirements.txt
         python -m lab.speed.benchmark --trl    also whole steps of TRL's GRPOTrainer: pip install trl datasets
"""
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from lab.quiet import quiet
from lab.speed.contestants import ANSWERS, PUZZLES
from plumbing.flags import new_parser
from plumbing.progress import fail, follow
from plumbing.report import Table
from settings import Settings

TOKENS, THREADS, WARM_UPS, ROUNDS = 64, 2, 2, 7
FIXED = {f"x {TOKENS} tokens": {"limit": TOKENS, "fixed": True}}
REAL = {"real lengths": {"limit": Settings.max_new_tokens, "fixed": False}}
NOTE = ("Written by `python -m lab.speed.benchmark`, TRL's rows with `--trl`, on two cores; the programs of a row "
        "took turns. `ours` and `peer` are medians over the rounds, `ratio` is the median of the rounds' own ratios, and "
        "`min to max` the smallest and the largest of these. A row names puzzles x responses x tokens; at real lengths, "
        "responses end where the model ends them.")


def take_turns(what: str, rivals: dict[str, subprocess.Popen], case: dict) -> dict[str, list[float]]:
    """The rate of each program in each counted round of a case. All take turns, and sample with the round's number."""
    rounds = [{name: turn(name, process, case, seed=i) for name, process in rivals.items()}
              for i in follow(what, range(WARM_UPS + ROUNDS))]
    return {name: [rates[name] for rates in rounds[WARM_UPS:]] for name in rivals}


def table_rows(what: str, rates: dict[str, list[float]]) -> list[list[str]]:
    """The rates of the first program, in each round, against those of each other."""
    (_, ours), *peers = rates.items()
    rows = []
    for name, theirs in peers:
        ratios = [a / b for a, b in zip(ours, theirs)]
        rows.append([what, f"{statistics.median(ours):,.0f} tokens/s", f"{name}: {statistics.median(theirs):,.0f}",
                     f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
        print(f"{what}: {rows[-1][3]} times {name}", flush=True)
    return rows


def start(kind: str, threads: int, processes: int = 1) -> subprocess.Popen:
    """The process of a contestant, or that of torchrun where it has several processes."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *several * (processes > 1), "-m", "lab.speed.contestants", kind]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": str(threads)})


def turn(name: str, process: subprocess.Popen, case: dict, seed: int) -> float:
    """Tokens per second of one case."""
    print(json.dumps(case | {"seed": seed}), file=process.stdin, flush=True)
    if not (reply := process.stdout.readline()):
        fail(f"{name} stopped without an answer to {case}; its own message is above")
    tokens, took = json.loads(reply)
    return tokens / took


def compete(trl: bool) -> list[list[str]]:
    """The sampler against transformers' generate; a whole step against TRL's, if asked for, and in two processes of one
    thread against one of two threads. Each process ends with its contest."""
    several, ours = f"{THREADS} threads", ("ours", THREADS)
    contests = [("sampler", several, Settings.questions, FIXED | REAL,
                 {"ours": ours, "transformers' generate": ("transformers", THREADS)})]
    contests += [("step", several, PUZZLES, REAL, {"ours": ours, "TRL's GRPOTrainer": ("trl", THREADS)})] * trl
    contests += [("step", "two processes", PUZZLES, REAL, {"ours": ("ours", 1, 2), "one process of two threads": ours})]
    rows = []
    for work, how, puzzles, cases, programs in contests:
        with contextlib.ExitStack() as stack:
            rivals = {name: stack.enter_context(start(*given)) for name, given in programs.items()}
            for name, case in cases.items():
                what = f"{work}, {puzzles} x {ANSWERS} {name}, {how}"
                rows += table_rows(what, take_turns(what, rivals, case | {"puzzles": puzzles, "work": work}))
    return rows


def main() -> None:
    """Measure everything, and write the table."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--trl", action="store_true", help="also measure steps of TRL's GRPOTrainer")
    parser.add_argument("--out", type=Path, default=Path("runs/speed.md"), help="file to write (default runs/speed.md)")
    args = parser.parse_args()
    with quiet():
        rows = compete(args.trl)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    table = Table("Speed", NOTE, ["what", "ours", "peer", "ratio", "min to max"], rows)
    args.out.write_text(str(table), encoding="utf-8")
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
