"""Speed as ratios: our sampler and whole step against other libraries, and two processes against one.

Shared machines are noisy. So the things compared take turns, A B C A B C, and each round gives one ratio, of which the
table has the median, the smallest and the largest. Rates are in tokens sampled per second, the end tokens included.
Each library works in a process of its own: see contestants.py.

Run it:  python -m lab.speed.benchmark          a few minutes on two cores; pip install -r tests/requirements.txt
         python -m lab.speed.benchmark --trl    also whole steps of TRL's GRPOTrainer: pip install trl datasets
"""
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Callable

from lab.quiet import quiet
from lab.speed.contestants import ANSWERS, PUZZLES
from plumbing.flags import new_parser
from plumbing.progress import Progress, fail
from plumbing.report import Table
from train import Settings

TOKENS, THREADS, WARM_UPS = 64, 2, 2
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
FIXED = {f"x {TOKENS} tokens": {"limit": TOKENS, "fixed": True}}
REAL = {"real lengths": {"limit": Settings.max_new_tokens, "fixed": False}}
NOTE = ("Written by `python -m lab.speed.benchmark --trl` on two cores, where the programs of a row took turns. `ours` "
        "and `peer` are medians over the rounds, `ratio` is the median of the rounds' own ratios, and `min to max` the "
        "smallest and the largest of these. A row names puzzles x responses x tokens; at real lengths, responses end "
        "where the model ends them.")


def take_turns(what: str, repeats: int, work: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """What each function returned in each counted round. All take turns, and are told the number of the round."""
    progress, found = Progress(what, repeats + WARM_UPS), defaultdict(list)
    for i in range(repeats + WARM_UPS):
        for name, function in work.items():
            found[name].append(function(i))
        progress.show(i + 1)
    return {name: values[WARM_UPS:] for name, values in found.items()}


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
                            env=os.environ | QUIET | {"OMP_NUM_THREADS": str(threads)})


def turn(name: str, process: subprocess.Popen, case: dict, seed: int) -> float:
    """Tokens per second of one case."""
    print(json.dumps(case | {"seed": seed}), file=process.stdin, flush=True)
    reply = process.stdout.readline()
    if not reply:
        fail(f"{name} stopped without an answer to {case}; its own message is above")
    tokens, took = json.loads(reply)
    return tokens / took


def contest(repeats: int, work: str, how: str, commands: dict[str, Callable[[], subprocess.Popen]],
            puzzles: int = PUZZLES, cases: dict[str, dict] = REAL) -> list[list[str]]:
    """Start the processes, and compare the rate of the first with each other's in every case."""
    rows = []
    with contextlib.ExitStack() as stack:
        rivals = {name: stack.enter_context(command()) for name, command in commands.items()}
        for case_name, case in cases.items():
            what, case = f"{work}, {puzzles} x {ANSWERS} {case_name}, {how}", case | {"puzzles": puzzles, "work": work}
            turns = {name: functools.partial(turn, name, process, case) for name, process in rivals.items()}
            rows += table_rows(what, take_turns(what, repeats, turns))
    return rows


def sampler(repeats: int) -> list[list[str]]:
    """Against transformers' generate."""
    rivals = {"ours": lambda: start("ours", THREADS), "transformers' generate": lambda: start("transformers", THREADS)}
    return contest(repeats, "sampler", f"{THREADS} threads", rivals, Settings.questions, FIXED | REAL)


def steps(repeats: int, trl: bool) -> list[list[str]]:
    """A whole step against TRL's, if asked for, and in two processes of one thread against one of two threads."""
    one = functools.partial(start, "ours", THREADS)
    rivals = {"ours": one, "TRL's GRPOTrainer": lambda: start("trl", THREADS)}
    rows = contest(repeats, "step", f"{THREADS} threads", rivals) if trl else []
    rivals = {"ours": lambda: start("ours", 1, processes=2), "one process of two threads": one}
    return rows + contest(repeats, "step", "two processes", rivals)


def main() -> None:
    """Measure everything, and write the table."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--trl", action="store_true", help="also measure steps of TRL's GRPOTrainer")
    parser.add_argument("--out", type=Path, default=Path("runs/speed.md"), help="file to write (default runs/speed.md)")
    parser.add_argument("--repeats", type=int, default=7, help="1 only shows that everything runs (default 7)")
    args = parser.parse_args()
    with quiet():
        rows = [*sampler(args.repeats), *steps(args.repeats, args.trl)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    table = Table("Speed", NOTE, ["what", "ours", "peer", "ratio", "min to max"], rows)
    args.out.write_text(str(table), encoding="utf-8")
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
