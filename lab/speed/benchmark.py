"""Speed as ratios: our sampler, update and whole step against other libraries, two processes and plain code.

Shared machines are noisy. So the things compared take turns, A B C A B C, and each round gives one ratio, of which the
table has the median, the smallest and the largest. Rates are in tokens sampled per second, the end tokens included.
Each library works in a process of its own: see contestants.py. Writes tables.md, with the memory of an update as well.

Run it:  python -m lab.speed.benchmark          a few minutes on two cores; pip install -r tests/requirements.txt
         python -m lab.speed.benchmark --trl    also whole steps of TRL's GRPOTrainer: pip install trl datasets
         python -m lab.speed.benchmark --model weights/qwen    a pretrained model in bfloat16: writes pretrained.md
         python -m lab.speed.benchmark --model weights/qwen --checkout OLD    beside an older checkout of this code

CTranslate2 takes part where it is installed: pip install ctranslate2.
"""
import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Callable

import torch

from countdown_task import CHAT, generate_puzzles
from grpo import compare, update
from lab.quiet import quiet
from lab.speed.contestants import ANSWERS, PUZZLES, TOKENIZER, prompts_of
from methods import MITIGATIONS
from plumbing.optimizer import Optimizer
from plumbing.progress import Progress, fail
from plumbing.report import Table
from rollout import TokenBatch, rollout
from tests.fixtures import FakeQueries, make_batch
from tests.plain import plain_update
from train import BUNDLED, Settings, load_policy

TOKENS, THREADS, WARM_UPS = 64, 2, 2
REAL = "real lengths"
CASES = {f"x {TOKENS} tokens": {"limit": TOKENS, "fixed": True},
         REAL: {"limit": Settings.max_new_tokens, "fixed": False}}
NOTE = ("Written by `python -m lab.speed.benchmark --trl` on two cores, where the programs of a row took turns. `ours` "
        "and `peer` are medians over the rounds, `ratio` is the median of the rounds' own ratios, and `min to max` the "
        "smallest and the largest of these. A row names puzzles x responses x tokens; at real lengths, responses end "
        "where the model ends them.")


# ---------------------------------------------------------------------------------------------- taking turns


def take_turns(what: str, repeats: int, work: dict[str, Callable[[int], float]],
               warm_ups: int = WARM_UPS) -> dict[str, list[float]]:
    """What each function returned in each counted round. All take turns, and are told the number of the round."""
    progress, found = Progress(what, repeats + warm_ups), defaultdict(list)
    for i in range(repeats + warm_ups):
        for name, function in work.items():
            found[name].append(function(i))
        progress.show(i + 1)
    return {name: values[warm_ups:] for name, values in found.items()}


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


# ---------------------------------------------------------------------------- against others, in their processes


def start(kind: str, threads: int, *arguments: object, processes: int = 1, **environment: str) -> subprocess.Popen:
    """The process of a contestant, or that of torchrun where it has several processes."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    contestant = ["-m", "lab.speed.contestants", kind, *map(str, arguments)]
    command = [sys.executable, *several * (processes > 1), *contestant]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | environment)


def ask(name: str, process: subprocess.Popen, case: dict) -> list[float]:
    """What a contestant answers to a case: first its tokens and its seconds."""
    print(json.dumps(case), file=process.stdin, flush=True)
    reply = process.stdout.readline()
    if not reply:
        fail(f"{name} stopped without an answer to {case}; its own message is above")
    return json.loads(reply)


def turn(name: str, process: subprocess.Popen, case: dict, seed: int) -> float:
    """Tokens per second of one case."""
    tokens, took = ask(name, process, case | {"seed": seed})
    if name.startswith("CTranslate2"):
        time.sleep(0.25)  # until its idle threads no longer spin
    return tokens / took


def contest(repeats: int, work: str, how: str, commands: dict[str, Callable[[], subprocess.Popen]],
            puzzles: int = PUZZLES, cases: dict[str, dict] = CASES) -> list[list[str]]:
    """Start the processes, and compare the rate of the first with each other's in every case."""
    rows = []
    with contextlib.ExitStack() as stack:
        rivals = {name: stack.enter_context(command()) for name, command in commands.items()}
        for case_name, case in cases.items():
            what, case = f"{work}, {puzzles} x {ANSWERS} {case_name}, {how}", case | {"puzzles": puzzles, "work": work}
            turns = {name: functools.partial(turn, name, process, case) for name, process in rivals.items()}
            rows += table_rows(what, take_turns(what, repeats, turns))
    return rows


def convert_model(folder: str) -> None:
    """Write the bundled model and our prompts for CTranslate2."""
    converter = [sys.executable, "-m", "ctranslate2.converters.transformers", "--model", str(BUNDLED)]
    subprocess.run([*converter, "--output_dir", folder, "--force"], check=True, capture_output=True)
    names = TOKENIZER.library.id_to_token
    prompts = [[names(token) for token in prompt] for prompt in prompts_of(Settings.questions)]
    ends = [names(token) for token in TOKENIZER.end_tokens]
    Path(folder, "prompts.json").write_text(json.dumps({"prompts": prompts, "ends": ends}))


def sampler(repeats: int) -> list[list[str]]:
    """Against transformers' generate and, where it is installed, CTranslate2."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {"ours": lambda: start("ours", THREADS),
                    "transformers' generate": lambda: start("transformers", THREADS)}
        if importlib.util.find_spec("ctranslate2"):  # which of its two backends is the faster one depends on processors
            convert_model(folder)
            commands |= {"CTranslate2, default backend": lambda: start("ctranslate2", THREADS, folder),
                         "CTranslate2, oneDNN": lambda: start("ctranslate2", THREADS, folder, CT2_USE_MKL="0")}
        return contest(repeats, "sampler", f"{THREADS} threads", commands, puzzles=Settings.questions)


def trl(repeats: int) -> list[list[str]]:
    """A whole step against that of TRL's GRPOTrainer."""
    case = CASES[REAL]
    rivals = {"ours": lambda: start("ours", THREADS),
              "TRL's GRPOTrainer": lambda: start("trl", THREADS, case["limit"], int(case["fixed"]))}
    return contest(repeats, "step", f"{THREADS} threads", rivals, cases={REAL: case})


def processes(repeats: int) -> list[list[str]]:
    """A step in two processes of one thread against one process of two threads."""
    rivals = {"ours": lambda: start("ours", 1, processes=2), "one process of two threads": lambda: start("ours", 2)}
    return contest(repeats, "step", "two processes", rivals, cases={REAL: CASES[REAL]})


# ------------------------------------------------------------------------------------------- a pretrained model


def in_own_process(name: str, kind: str, folder: Path, root: Path, case: dict) -> list[float]:
    """Tokens, seconds and the peak of memory of a contestant of pretrained.py that imports the code in `root`.

    It starts for this case alone, after a short one to warm up: several of them would not fit into the memory.
    """
    command = [sys.executable, str(Path(__file__).with_name("pretrained.py")), kind, str(folder.resolve())]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=environment) as process:
        ask(name, process, case | {"limit": 8})
        return ask(name, process, case)


def pretrained(repeats: int, folder: Path, checkout: Path | None) -> list[Table]:
    """Our sampler and update of a pretrained model against transformers, bare products, and an older checkout."""
    root, peaks, rows = Path(__file__).parents[2], {}, []
    places = {"ours": ("ours", folder, root), "transformers": ("transformers", folder, root),
              "bare products": ("products", folder, root)}
    places |= {"the older checkout": ("ours", folder, checkout.resolve())} if checkout else {}

    def take(name: str, work: str, seed: int) -> float:
        case = {"work": work, "puzzles": 4, "limit": 64, "seed": seed}
        tokens, took, peaks[work, name] = in_own_process(name, *places[name], case)
        return tokens / took

    for work in ("sampler", "update"):
        what, turns = f"{work}, {folder.name}", {name: functools.partial(take, name, work) for name in places}
        rows += table_rows(what, take_turns(what, repeats, turns, warm_ups=0))
    note = (f"Tokens per second of 4 puzzles x {ANSWERS} responses x 64 tokens in bfloat16 on {THREADS} cores; medians "
            f"of {repeats} rounds, in which all take turns. Bare products: the model's matrix products alone.")
    memory = [[f"{work}, {folder.name}", name, f"{gib:.1f}"] for (work, name), gib in peaks.items()]
    return [Table(f"Speed, {folder.name}", note, ["what", "ours", "peer", "ratio", "min to max"], rows),
            Table(f"Memory, {folder.name}", "The most that the process had, in GiB.", ["what", "who", "GiB"], memory)]


# ------------------------------------------------------------------------------ against plain code, in this process


def random_batch(vocabulary: int, prompts: list[list[int]], tokens: int) -> tuple[TokenBatch, torch.Tensor]:
    """8 responses of `tokens` random tokens to each prompt, and a credit (B, tokens) that is 0 nowhere."""
    B = len(prompts) * ANSWERS
    samples = torch.randint(vocabulary, (B, tokens))
    batch = make_batch([tokens] * B, [0.0] * B, [i // ANSWERS for i in range(B)], tokens=samples)
    batch.ask = FakeQueries(prompts=prompts)
    return batch, torch.randn(B, tokens)


def seconds(function: Callable, *arguments: object) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def updates(repeats: int) -> list[list[str]]:
    """Against the plain layout of tests/plain.py: the batch of a real step, and prompts as long as the original's."""
    policy, s, rows = load_policy(Settings()), Settings(answers=ANSWERS), []
    optimizer = Optimizer(policy.model, lr=0.0)
    real = rollout(policy, generate_puzzles(PUZZLES, "train"), s, step=1)
    real.advantage = compare(real)
    long = [(TOKENIZER.encode(CHAT.format(numbers=[4, 3, 5], target=8)) * 2)[:140]] * PUZZLES
    cases = {"a real step": (prompts_of(PUZZLES), real, MITIGATIONS["none"](real)),
             "prompts of 140 tokens, answers of 50": (long, *random_batch(TOKENIZER.size, long, 50))}
    for name, (prompts, batch, credit) in cases.items():
        tokens = batch.mask.sum().item()
        rates = take_turns(f"update, {name}", repeats, {
            "ours": lambda _: tokens / seconds(update, policy, optimizer, batch, credit, s),
            "the plain layout": lambda _: tokens / seconds(plain_update, policy.model, prompts, batch, credit)})
        rows += table_rows(f"update, {name}", rates)
    return rows


def memory() -> float:
    """GiB by which the memory of this process, which runs nothing else, rises at most in an update (on Linux)."""
    def resident(key: str) -> float:
        return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20

    policy, (batch, credit) = load_policy(Settings()), random_batch(TOKENIZER.size, prompts_of(PUZZLES), TOKENS)
    optimizer = Optimizer(policy.model, lr=0.0)
    optimizer.step(1.0)  # allocates Adam's moments
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
    before = resident("VmRSS")
    update(policy, optimizer, batch, credit, Settings(micro_batch=4))
    return resident("VmHWM") - before


# ---------------------------------------------------------------------------------------------- command line


def main() -> None:
    """Measure everything on the bundled model, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", action="store_true", help="also measure steps of TRL's GRPOTrainer")
    parser.add_argument("--model", type=Path, help="measure this pretrained model instead")
    parser.add_argument("--checkout", type=Path, help="with --model: an older checkout of this code, to compare with")
    parser.add_argument("--out", type=Path, help="file of the tables (default tables.md or pretrained.md, beside this)")
    parser.add_argument("--repeats", type=int, default=7, help="1 only shows that everything runs (default 7)")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    args.out = args.out or Path(__file__).with_name("pretrained.md" if args.model else "tables.md")
    if args.model:
        with quiet():
            text = "\n".join(map(str, pretrained(args.repeats, args.model, args.checkout)))
        args.out.write_text(text, encoding="utf-8")
        return print(f"\n{text}")
    with quiet():
        rows = [row for part in (sampler, *[trl] * args.trl, processes, updates) for row in part(args.repeats)]
    speed = Table("Speed", NOTE, ["what", "ours", "peer", "ratio", "min to max"], rows)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        peak = pool.submit(memory).result()
    of_update = Table("Memory", "Peak above weights, gradients and optimizer.", ["what", "GiB"],
                      [[f"update of {PUZZLES * ANSWERS} x {TOKENS} tokens", f"{peak:.3f}"]])
    args.out.write_text(f"{speed}\n{of_update}", encoding="utf-8")
    print(f"\n{speed}\n{of_update}")


if __name__ == "__main__":
    main()
