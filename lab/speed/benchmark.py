"""Speed as ratios: our sampler and whole step against other libraries, and two processes against one.

Shared machines are noisy. So the things compared take turns, A B C A B C, and each round gives one ratio, of which the
table has the median, the smallest and the largest. Rates are in tokens sampled per second, the end tokens included.
Each library works in a process of its own: see contestants.py.

Run it:  python -m lab.speed.benchmark          a few minutes on two cores; pip install -r tests/requirements.txt
         python -m lab.speed.benchmark --trl    also whole steps of TRL's GRPOTrainer: pip install trl datasets
CTranslate2 takes part where it is installed: pip install ctranslate2.
"""
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from lab.quiet import quiet
from lab.speed.contestants import ANSWERS, PUZZLES, asked
from plumbing.flags import new_parser
from plumbing.progress import fail, follow
from plumbing.report import Table
from train import BUNDLED, Settings

TOKENS, THREADS, WARM_UPS = 64, 2, 2
FIXED = {f"x {TOKENS} tokens": {"limit": TOKENS, "fixed": True}}
REAL = {"real lengths": {"limit": Settings.max_new_tokens, "fixed": False}}
NOTE = ("Written by `python -m lab.speed.benchmark --trl` on two cores, where the programs of a row took turns. `ours` "
        "and `peer` are medians over the rounds, `ratio` is the median of the rounds' own ratios, and `min to max` the "
        "smallest and the largest of these. A row names puzzles x responses x tokens; at real lengths, responses end "
        "where the model ends them.")


def take_turns(what: str, repeats: int, rivals: dict[str, subprocess.Popen], case: dict) -> dict[str, list[float]]:
    """The rate of each program in each counted round of a case. All take turns, and sample with the round's number."""
    found = defaultdict(list)
    for i in follow(what, range(repeats + WARM_UPS)):
        for name, process in rivals.items():
            found[name].append(turn(name, process, case, seed=i))
    return {name: values[WARM_UPS:] for name, values in found.items()}


def table_rows(what: str, rates: dict[str, list[float]]) -> list[list[str]]:
    """The rates of the first program, in each round, against those of each other.

    A peer may compete with several settings, named after a comma. Only the fastest one counts.
    """
    libraries = defaultdict(list)
    for name, values in rates.items():
        libraries[name.split(",")[0]].append((statistics.median(values), name, values))
    (ours, _, our_rates), *peers = map(max, libraries.values())
    rows = []
    for peer, name, values in peers:
        ratios = [a / b for a, b in zip(our_rates, values)]
        rows.append([what, f"{ours:,.0f} tokens/s", f"{name}: {peer:,.0f}", f"{statistics.median(ratios):.2f}",
                     f"{min(ratios):.2f} to {max(ratios):.2f}"])
        print(f"{what}: {rows[-1][3]} times {name}", flush=True)
    return rows


def start(kind: str, threads: int, *arguments: object, processes: int = 1, **environment: str) -> subprocess.Popen:
    """The process of a contestant, or that of torchrun where it has several processes."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    contestant = ["-m", "lab.speed.contestants", kind, *map(str, arguments)]
    command = [sys.executable, *several * (processes > 1), *contestant]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | environment)


def turn(name: str, process: subprocess.Popen, case: dict, seed: int) -> float:
    """Tokens per second of one case."""
    print(json.dumps(case | {"seed": seed}), file=process.stdin, flush=True)
    reply = process.stdout.readline()
    if not reply:
        fail(f"{name} stopped without an answer to {case}; its own message is above")
    tokens, took = json.loads(reply)
    if name.startswith("CTranslate2"):
        time.sleep(0.25)  # until its idle threads no longer spin
    return tokens / took


def contest(repeats: int, work: str, how: str, rivals: dict[str, subprocess.Popen], puzzles: int = PUZZLES,
            cases: dict[str, dict] = REAL) -> list[list[str]]:
    """Compare the rate of the first process with each other's in every case, then end them all."""
    rows = []
    with contextlib.ExitStack() as stack:
        for process in rivals.values():
            stack.enter_context(process)
        for case_name, case in cases.items():
            what = f"{work}, {puzzles} x {ANSWERS} {case_name}, {how}"
            rows += table_rows(what, take_turns(what, repeats, rivals, case | {"puzzles": puzzles, "work": work}))
    return rows


def convert_model(folder: str) -> None:
    """Write the bundled model and our prompts for CTranslate2."""
    converter = [sys.executable, "-m", "ctranslate2.converters.transformers", "--model", str(BUNDLED)]
    subprocess.run([*converter, "--output_dir", folder, "--force"], check=True, capture_output=True)
    tokenizer, _, prompts = asked()
    *prompts, ends = [[*map(tokenizer.library.id_to_token, row)] for row in (*prompts, tokenizer.end_tokens)]
    Path(folder, "prompts.json").write_text(json.dumps({"prompts": prompts, "ends": ends}))


def sampler(repeats: int) -> list[list[str]]:
    """Against transformers' generate and, where it is installed, CTranslate2."""
    with tempfile.TemporaryDirectory() as folder:
        rivals = {"ours": start("ours", THREADS), "transformers' generate": start("transformers", THREADS)}
        if importlib.util.find_spec("ctranslate2"):  # which of its two backends is the faster one depends on processors
            convert_model(folder)
            rivals |= {"CTranslate2, default backend": start("ctranslate2", THREADS, folder),
                       "CTranslate2, oneDNN": start("ctranslate2", THREADS, folder, CT2_USE_MKL="0")}
        return contest(repeats, "sampler", f"{THREADS} threads", rivals, Settings.questions, FIXED | REAL)


def steps(repeats: int, trl: bool) -> list[list[str]]:
    """A whole step against TRL's, if asked for, and in two processes of one thread against one of two threads."""
    rows = []
    if trl:
        rivals = {"ours": start("ours", THREADS), "TRL's GRPOTrainer": start("trl", THREADS)}
        rows = contest(repeats, "step", f"{THREADS} threads", rivals)
    rivals = {"ours": start("ours", 1, processes=2), "one process of two threads": start("ours", THREADS)}
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
