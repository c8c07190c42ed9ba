"""Speed and memory as ratios: our code against other libraries, plain code, and what the machine can do.

Shared machines are noisy. So the things compared take turns, A B C A B C, and each round gives one ratio. The figure is
the median of the ratios. The smallest and the largest are beside it. Rates are in tokens sampled per second, the end
tokens included. Each library works in a process of its own: see contestants.py. The figures go into
lab/speed/benchmark.csv, the ratios into tables.md beside it.

Run it:  python -m lab.speed.benchmark          eight minutes on two cores; needs tests/requirements.txt
         python -m lab.speed.benchmark --trl    also whole steps of TRL's GRPOTrainer; needs `pip install trl`
         python -m lab.speed.benchmark --big    also the memory of an update of Qwen2.5-0.5B's shape: six minutes,
                                                  11 GiB

CTranslate2 takes part where it is installed: `pip install ctranslate2`.
"""
import argparse
import contextlib
import copy
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

import numpy as np
import torch
from torch import Tensor

import countdown_task
from countdown_task import CHAT, Puzzle, generate_puzzles
from grpo import compare, update
from lab.speed.contestants import ANSWERS, PUZZLES, TOKENIZER, bundled, prompts_of
from lab.truth import measure as ground_truth
from methods import MITIGATIONS
from methods.heads import HEADS
from mitigations import CreditFunction, required
from plumbing.metrics import write_credit_log
from plumbing.optimizer import Optimizer
from plumbing.progress import Progress, fail
from plumbing.report import Table, write_csv
from qwen2_model import Qwen2, read_config
from rollout import ROWS_AT_ONCE, Policy, TokenBatch, draw_uniforms, generate_and_grade, rollout
from sampler import generate
from tests.fixtures import FakeQueries, make_batch
from tests.plain import plain_update
from train import BUNDLED, Settings

ROOT = Path(__file__).parents[2]
LIMIT = Settings.max_new_tokens
TOKENS, THREADS = 64, 2
CASES = {f"x {TOKENS} tokens": {"limit": TOKENS, "fixed": True}, "real lengths": {"limit": LIMIT, "fixed": False}}


# ------------------------------------------------------------------------------------------------ the contest


class Benchmark:
    """How often everything is repeated, and the rows of the CSV so far."""

    def __init__(self, repeats: int):
        self.repeats, self.rows = repeats, []

    def record(self, what: str, value: float, unit: str, ratios: list[float] | None = None, against: str = "",
               peer: float = 0.0) -> None:
        """Keep a figure, with its ratio to the peer's in each round and the peer's own, and print it."""
        row = {"what": what, "value": value, "unit": unit, "ratio": None, "low": None, "high": None, "against": against}
        if ratios:
            row |= {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "peer": peer}
        self.rows.append(row)
        ratio = f", {row['ratio']:.2f} times {against}" if ratios else ""
        print(f"{what}: {short(value)} {unit}{ratio}", flush=True)

    def compare(self, what: str, ours: list[float], peer: list[float], against: str, unit: str = "tokens/s") -> None:
        """Record our rate in each round against a peer's."""
        ratios = [a / b for a, b in zip(ours, peer)]
        self.record(what, statistics.median(ours), unit, ratios, against, statistics.median(peer))

    def duel(self, what: str, rivals: dict[str, subprocess.Popen], case: dict) -> None:
        """Record the rate of the first rival against each other's.

        A peer may compete with several settings, named after a comma. Only the fastest one counts.
        """
        rates = take_turns(what, self.repeats, 2, {name: functools.partial(turn, name, process, case)
                                                   for name, process in rivals.items()})
        libraries = defaultdict(list)
        for name, values in rates.items():
            libraries[name.split(",")[0]].append((statistics.median(values), name, values))
        (_, _, ours), *peers = map(max, libraries.values())
        for _, name, values in peers:
            self.compare(what, ours, values, name)


def take_turns(what: str, repeats: int, warm_ups: int,
               work: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """What each function returned in each counted round. All take turns, and are told the number of the round."""
    progress, found = Progress(what, repeats + warm_ups), defaultdict(list)
    for i in range(repeats + warm_ups):
        for name, function in work.items():
            found[name].append(function(i))
        progress.show(i + 1)
    return {name: values[warm_ups:] for name, values in found.items()}


def seconds(function: Callable, *arguments: object, **options: object) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - start


def start(kind: str, threads: int, *arguments: object, processes: int = 1, **environment: str) -> subprocess.Popen:
    """The process of a contestant, or that of torchrun where it has several processes."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    script = [str(Path(__file__).with_name("contestants.py")), kind, *map(str, arguments)]
    command = [sys.executable, *several * (processes > 1), *script]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | environment)


def turn(name: str, process: subprocess.Popen, case: dict, seed: int) -> float:
    """Tokens per second of one case."""
    print(json.dumps(case | {"seed": seed}), file=process.stdin, flush=True)
    reply = process.stdout.readline()
    if not reply:
        fail(f"{name} stopped without an answer to {case}; its own message is above")
    if name.startswith("CTranslate2"):
        time.sleep(0.25)  # until its idle threads no longer spin
    tokens, took = json.loads(reply)
    return tokens / took


def convert_model(folder: Path) -> bool:
    """Write the bundled model and our prompts for CTranslate2; False where that is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        print("CTranslate2: skipped; to compare with it, pip install ctranslate2", flush=True)
        return False
    converter = [sys.executable, "-m", "ctranslate2.converters.transformers", "--model", str(BUNDLED)]
    subprocess.run([*converter, "--output_dir", str(folder), "--force"], check=True, capture_output=True)
    names = TOKENIZER.library.id_to_token
    prompts = [[names(token) for token in prompt] for prompt in prompts_of(Settings.questions)]
    ends = [names(token) for token in TOKENIZER.end_tokens]
    (folder / "prompts.json").write_text(json.dumps({"prompts": prompts, "ends": ends}))
    return True


def contest(bench: Benchmark, work: str, how: str, commands: dict[str, Callable[[], subprocess.Popen]],
            puzzles: tuple[int, ...] = (PUZZLES,), cases: dict[str, dict] = CASES) -> None:
    """Start the processes, and record the rate of the first against each other's in every case."""
    with contextlib.ExitStack() as stack:
        rivals = {name: stack.enter_context(command()) for name, command in commands.items()}
        for Q in puzzles:
            for name, case in cases.items():
                bench.duel(f"{work}, {Q} x {ANSWERS} {name}, {how}", rivals, case | {"puzzles": Q, "work": work})


def sampler(bench: Benchmark) -> None:
    """Against CTranslate2 and, with two threads, transformers' generate."""
    with tempfile.TemporaryDirectory() as folder:
        converted = convert_model(Path(folder))
        for threads in (1, THREADS) if converted else (THREADS,):
            commands = {"ours": lambda: start("ours", threads)}
            if converted:  # which of its two backends is the faster one depends on processor and threads
                commands |= {"CTranslate2, default backend": lambda: start("ctranslate2", threads, folder),
                             "CTranslate2, oneDNN": lambda: start("ctranslate2", threads, folder, CT2_USE_MKL="0")}
            if threads == THREADS:
                commands["transformers' generate"] = lambda: start("transformers", threads)
            how = "1 thread" if threads == 1 else f"{threads} threads"
            contest(bench, "sampler", how, commands, (PUZZLES, Settings.questions))


def processes(bench: Benchmark) -> None:
    """Two processes of one thread against one process of two threads."""
    for work in ("sampler", "step"):
        contest(bench, work, "two processes", {"ours": lambda: start("ours", 1, processes=2),
                                               "one process of two threads": lambda: start("ours", 2)})


def trl(bench: Benchmark) -> None:
    """A whole step against that of TRL's GRPOTrainer."""
    for name, case in CASES.items():
        rivals = {"ours": lambda: start("ours", THREADS),
                  "TRL's GRPOTrainer": lambda: start("trl", THREADS, case["limit"], int(case["fixed"]))}
        contest(bench, "step", f"{THREADS} threads", rivals, cases={name: case})


# ------------------------------------------------------------------------------ against plain code, in this process


def random_batch(model: Qwen2, prompts: list[list[int]], tokens: int) -> tuple[TokenBatch, Tensor]:
    """8 responses of `tokens` random tokens to each prompt, and a credit (B, tokens) that is 0 nowhere."""
    B = len(prompts) * ANSWERS
    samples = torch.randint(model.real_vocab, (B, tokens))
    batch = make_batch([tokens] * B, [0.0] * B, [i // ANSWERS for i in range(B)], tokens=samples)
    batch.ask = FakeQueries(prompts=prompts)
    return batch, torch.randn(B, tokens)


def sampled(policy: Policy, puzzles: list[Puzzle], answers: int) -> TokenBatch:
    """The batch of a real step."""
    batch = rollout(policy, puzzles, Settings(answers=answers), step=1)
    batch.advantage = compare(batch)
    return batch


def updates(bench: Benchmark) -> None:
    """Against the plain layout of tests/plain.py: the batch of a real step, and prompts as long as the original's."""
    policy, s = bundled(), Settings()
    optimizer = Optimizer(policy.model, lr=0.0)
    real = sampled(policy, generate_puzzles(PUZZLES, "train"), ANSWERS)
    text = CHAT.format(numbers=[4, 3, 5], target=8)
    long = [(TOKENIZER.encode(text) * 2)[:140]] * PUZZLES
    cases = {"a real step": (prompts_of(PUZZLES), real, MITIGATIONS["none"](real)),
             "prompts of 140 tokens, answers of 50": (long, *random_batch(policy.model, long, 50))}
    for name, (prompts, batch, credit) in cases.items():
        took = take_turns(f"update, {name}", bench.repeats, 1, {
            "ours": lambda _: seconds(update, policy, optimizer, batch, credit, s),
            "plain": lambda _: seconds(plain_update, policy.model, prompts, batch, credit)})
        ours, plain = ([batch.mask.sum().item() / s for s in each] for each in took.values())
        bench.compare(f"update, {name}", ours, plain, "the plain layout")


def credit(bench: Benchmark) -> None:
    """What each credit function and the credit log add to a default step of `none`, and the size of the log."""
    plain, puzzles, s = bundled(), generate_puzzles(Settings.questions, "train"), Settings()
    optimizer = Optimizer(plain.model, lr=0.0)
    heads = {name: head(plain.model.config.hidden_size) for name, head in HEADS.items()}
    policy = plain._replace(heads=heads, reference=copy.deepcopy(plain.model).requires_grad_(False))

    def step() -> None:
        batch = sampled(policy, puzzles, s.answers)
        update(plain, optimizer, batch, MITIGATIONS["none"](batch), s)  # no head learns

    def assign(method: CreditFunction, batch: TokenBatch) -> None:
        method(batch)
        for name in heads.keys() & required(method.name, {}):
            heads[name].learn(batch)

    with tempfile.TemporaryDirectory() as folder:
        file, batch = Path(folder) / "step-000001.npz", sampled(policy, puzzles, s.answers)
        log = functools.partial(write_credit_log, file, 1, batch, MITIGATIONS["none"](batch))
        work = {"step": lambda _: seconds(step), "log": lambda _: seconds(log)}
        for name, method in MITIGATIONS.items():  # each gets a new batch: it remembers what it asked the model
            work[name] = lambda _, method=method: seconds(assign, method, sampled(policy, puzzles, s.answers))
        took = take_turns("credit", bench.repeats // 2 + 1, 0, work)
        size = file.stat().st_size / batch.mask.sum().item()
    step_seconds, log, *each = map(statistics.median, took.values())
    bench.record("credit log", 100 * log / step_seconds, f"% of a step of {step_seconds:.2f} s")
    bench.record("credit log, size", size, "bytes a token")
    for name, took in zip(MITIGATIONS, each):
        bench.record(f"credit of {name}", 100 * took / step_seconds, "% of a step of none")


def truth(bench: Benchmark) -> None:
    """Tokens sampled for the ground truth of 8 responses, against plain Monte Carlo from before every token.

    Compared at the same root mean square error over the tokens; the squared error falls as 1 / tokens sampled. For the
    ground truth it is the error its file states, an overestimate; that of plain Monte Carlo is unbiased.
    """
    policy, puzzles = bundled(), generate_puzzles(4, "heldout")
    batch = sampled(policy, puzzles, 2)
    columns = ground_truth.describe(batch, {})
    ground_truth.sample_truth(policy, puzzles, columns, 100, 0, LIMIT, lambda: None)
    ground_truth.add_values(columns)
    tokens, value_variance, a_star_variance = monte_carlo(policy, puzzles, batch, 8)
    for name, variance, column in (("A*", a_star_variance, "a_star_error"), ("V", value_variance, "value_error")):
        error, spent = np.mean(columns[column] ** 2), columns["sampled"]
        needed = tokens * np.mean(variance) / error  # tokens with which plain Monte Carlo is as accurate
        bench.record(f"truth of {name} to {error**0.5:.3f} in {len(columns['token'])} tokens", spent,
                     "tokens sampled", [needed / spent], "continuations from every prefix", needed)


def monte_carlo(policy: Policy, puzzles: list[Puzzle], batch: TokenBatch,
                k: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Tokens in k continuations from before each token of a batch; the variances (N,) of V and A* estimated by them."""
    places, generator = batch.mask.nonzero(), torch.Generator().manual_seed(0)  # (N, 2)
    B, T = batch.mask.shape
    variance, tokens = torch.zeros(B, T + 1, dtype=torch.float64), 0
    progress, done = Progress("plain Monte Carlo, tokens", len(places)), 0
    for chunk in places[places[:, 1].argsort()].split(ROWS_AT_ONCE // k):  # (n, 2)
        asked = [puzzles[batch.group[i]] for i in chunk[:, 0]]
        left = (LIMIT - chunk[:, 1]).repeat_interleave(k)  # (n * k,)
        uniforms = torch.rand(len(left), left.max(), generator=generator, dtype=torch.float64)
        prefixes = [batch.tokens[i, :t].tolist() for i, t in chunk.tolist()]
        samples, grades = generate_and_grade(policy, asked, uniforms, prefixes, left)
        rate = torch.tensor([grade["answer"] for grade in grades], dtype=torch.float64).view(-1, k).mean(1)  # (n,)
        variance[chunk[:, 0], chunk[:, 1]] = rate * (1 - rate) / (k - 1)
        tokens, done = tokens + int(samples.mask.sum()), done + len(chunk)
        progress.show(done)
    of_A = variance[:, :-1] + variance[:, 1:]  # (B, T); after the last token V is known
    return tokens, variance[:, :-1][batch.mask].numpy(), of_A[batch.mask].numpy()


# ---------------------------------------------------------------------------- against the machine, in this process


def random_model(width: int = 128, dtype: torch.dtype = torch.float32, **size: int) -> Qwen2:
    """A Qwen2 with random weights, in the shape of the bundled one but for its width."""
    source = {"model_type": "qwen2", "vocab_size": 783, "hidden_size": width, "intermediate_size": 3 * width,
              "num_hidden_layers": 4, "num_attention_heads": width // 32, "num_key_value_heads": width // 64,
              "tie_word_embeddings": True, "max_position_embeddings": 2048} | size
    with torch.device("meta"):
        model = Qwen2(read_config(source))
    model = model.to(dtype).to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return model


def sample_and_update(model: Qwen2, prompts: list[list[int]], tokens: int,
                      micro_batch: int = 16) -> dict[str, Callable[[], object]]:
    """Sampler and update on 8 responses of exactly `tokens` tokens to each prompt."""
    uniforms, policy = draw_uniforms(0, 0, len(prompts), ANSWERS, tokens), Policy(model, TOKENIZER, countdown_task)
    (batch, credit), optimizer = random_batch(model, prompts, tokens), Optimizer(model, lr=0.0)
    s = Settings(max_new_tokens=tokens, micro_batch=micro_batch)
    optimizer.step(1.0)  # allocates Adam's moments
    return {"sampler": lambda: generate(model, prompts, uniforms, []),
            "update": lambda: update(policy, optimizer, batch, credit, s)}


def bare_products(rows: int, width: int, operations: float) -> tuple[Callable[[], None], float]:
    """Products of (rows, width) and (width, 6 width), as in the MLP, of so many operations, and their exact number."""
    x, w, out = torch.randn(rows, width), torch.randn(width, 6 * width), torch.empty(rows, 6 * width)
    of_one = 2 * rows * w.numel()
    count = max(1, round(operations / of_one))

    def run() -> None:
        for _ in range(count):
            torch.mm(x, w, out=out)

    return run, count * of_one


def against_products(name: str, model: Qwen2, prompts: list[list[int]], tokens: int,
                     repeats: int) -> dict[str, tuple[float, list[float], list[float]]]:
    """Of sampler and update: the operations in matrix products, their seconds in each round, and seconds if bare.

    The bare product has the rows and the width of the real ones. It runs for a tenth of the operations.
    """
    c, B = model.config, ANSWERS * len(prompts)
    weights, read = sum(p.numel() for p in model.parameters()), B * tokens + sum(map(len, prompts))
    pairs = B * tokens * (len(prompts[0]) + tokens / 2)  # of a token and one that it attends to
    forward = 2 * (weights * read + 2 * c.num_hidden_layers * c.hidden_size * pairs)
    total, rows = {"sampler": forward, "update": 3 * forward}, {"sampler": B, "update": 16 * tokens}
    bare = {part: bare_products(rows[part], c.hidden_size, total[part] / 10) for part in total}
    work = sample_and_update(model, prompts, tokens) | {f"bare {part}": run for part, (run, _) in bare.items()}
    took = take_turns(name, repeats, 1, {part: lambda _, run=run: seconds(run) for part, run in work.items()})
    return {part: (total[part], took[part], [s * total[part] / bare[part][1] for s in took[f"bare {part}"]])
            for part in total}


def machine(bench: Benchmark) -> None:
    """Matrix products per second in update and sampler, against bare products of the same shapes."""
    found = against_products("machine", bundled().model, prompts_of(PUZZLES), TOKENS, bench.repeats)
    for part, (operations, *took) in found.items():
        speed, bare = ([operations / s / 1e9 for s in each] for each in took)
        bench.compare(f"{part}, matrix products", speed, bare, "a bare product", "GFLOP/s")


def memory(case: str) -> float:
    """GiB by which the memory of this process, which runs nothing else, rises at most in one case (on Linux)."""
    def resident(key: str) -> float:
        return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20

    model, prompts, tokens = bundled().model, prompts_of(PUZZLES), TOKENS
    if case == "big":
        model = random_model(896, torch.bfloat16, vocab_size=151936, intermediate_size=4864, num_hidden_layers=24,
                             num_attention_heads=14, num_key_value_heads=2)
        model.real_vocab, model.checkpoint_activations = 151665, True
        prompts, tokens = [torch.randint(0, 151643, (140,)).tolist()], 512
    work = sample_and_update(model, prompts, tokens, micro_batch=4)["sampler" if case == "sampler" else "update"]
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def memories(bench: Benchmark, big: bool) -> None:
    """Peak memory above weights, gradients and optimizer, each in a process of its own."""
    names = {"update": "update of 64 x 64 tokens", "sampler": "sampler of 64 x 64 tokens"}
    if big:
        names["big"] = "update of 8 x 512 tokens, Qwen2.5-0.5B's shape, bfloat16, --checkpoint_activations"
    for case, name in names.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            peak = pool.submit(memory, case).result()
        bench.record(f"memory, {name}", peak, "GiB above weights, gradients and optimizer")


# -------------------------------------------------------------------------------------------- table and command


def short(value: float) -> str:
    """A number with three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def tables(rows: list[dict]) -> str:
    """The ratios of speeds, then the other ones."""
    rows = [row for row in rows if row["ratio"]]
    return "\n".join(str(table(title, [row for row in rows if (row["unit"] == "tokens/s") == is_speed]))
                     for title, is_speed in (("Speed", True), ("Truth and matrix products", False)))


def table(title: str, rows: list[dict]) -> Table:
    """A line for each ratio."""
    lines = [[row["what"], f"{short(row['value'])} {row['unit']}", f"{row['against']}: {short(row['peer'])}",
              f"{row['ratio']:.2f}",
              f"{row['low']:.2f} to {row['high']:.2f}" if row["low"] < row["high"] else ""]
             for row in rows]
    return Table(title, "The median of the ratios of all rounds, then the smallest and the largest of them.",
                 ["what", "ours", "peer", "ratio", "min to max"], lines)


def save(bench: Benchmark, folder: Path) -> None:
    """Write the CSV and the table, and print the table."""
    numbers = {"value": ".4g", "ratio": ".3g", "low": ".3g", "high": ".3g"}
    written = [{name: format(value, numbers[name]) if name in numbers and value is not None else value
                for name, value in row.items() if name != "peer"} for row in bench.rows]
    write_csv(written, folder / "benchmark.csv")
    (folder / "tables.md").write_text(tables(bench.rows))
    print(f"\n{tables(bench.rows)}")


def main() -> None:
    """Measure everything on the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", action="store_true", help="also measure an update of Qwen2.5-0.5B's shape")
    parser.add_argument("--trl", action="store_true", help="also measure steps of TRL's GRPOTrainer")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of benchmark.csv and tables.md")
    parser.add_argument("--repeats", type=int, default=7, help="1 only shows that everything runs (default 7)")
    args = parser.parse_args()
    if args.trl and importlib.util.find_spec("trl") is None:
        fail("--trl compares with TRL, which is not installed: pip install trl")
    torch.set_num_threads(THREADS)
    bench = Benchmark(args.repeats)
    for part in (sampler, *[trl] * args.trl, processes, updates, credit, truth, machine):
        part(bench)
    memories(bench, args.big)
    save(bench, args.out)


if __name__ == "__main__":
    main()
