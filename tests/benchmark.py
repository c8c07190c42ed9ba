"""Speed and memory as ratios: our code against transformers, against plain code, and against what the machine can do.

Shared machines are noisy. So the things compared run alternately, A B A B, and medians are reported. The figures go
into results/benchmark.csv, plots of them into benchmark.png and growth.png there.

Run it:  python tests/benchmark.py          about six minutes on two cores; needs tests/requirements.txt
         python tests/benchmark.py --big    also the memory of an update of Qwen2.5-0.5B's shape: six minutes, 11 GiB
"""
import argparse
import contextlib
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Callable, Iterator
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import grpo
from countdown_task import CHAT, Codec, Puzzle, generate_puzzles
from critic import Critic
from experiments import ground_truth
from mitigations import MITIGATIONS, TokenBatch
from plumbing.optimizer import Optimizer
from plumbing.processes import join, leads, leave, my_share
from plumbing.report import GREY, PALETTE, new_figure, save_figure, write_csv
from qwen2_model import Qwen2, load_model, read_config
from sampler import generate
from tests.conftest import make_batch
from tests.plain import plain_rows, plain_update
from train import BUNDLED, Settings

PUZZLES, ANSWERS, TOKENS = 8, 8, 64
LIMIT = Settings.max_new_tokens
# TRL's GRPOTrainer took 0.525 s for a step of 64 x 64 tokens where transformers' generate sampled 18,700 tokens/s. So
TRL_STEP = 0.525 / (64 * 64 / 18_700)  # a step of TRL's takes this many times as long as generate does beside us.
CODEC = Codec(BUNDLED)


class Benchmark:
    """How often everything is repeated, and the rows of the CSV so far."""

    def __init__(self, repeats: int):
        self.repeats, self.rows = repeats, []

    def record(self, what: str, value: float, unit: str, ratio: float | None = None, against: str = "") -> None:
        """Keep a figure, and print it."""
        self.rows.append({"what": what, "value": f"{value:.4g}", "unit": unit, "ratio": ratio and f"{ratio:.3g}",
                          "against": against})
        print(f"{what}: {value:,.4g} {unit}" + (f", {ratio:.2f} times {against}" if ratio else ""), flush=True)

    def interleave(self, **work: Callable[[], object]) -> dict[str, float]:
        """Median seconds of each function; all of them take turns, after one warm-up."""
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(self.repeats + 1):
            for name, function in work.items():
                start = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - start)
        return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def bundled(dtype: torch.dtype = torch.float32) -> Qwen2:
    """Our model with the bundled weights."""
    model = load_model(BUNDLED, dtype=dtype)
    model.real_vocab = CODEC.size
    return model


def random_model(dtype: torch.dtype = torch.float32, **size: int) -> Qwen2:
    """A Qwen2 with random weights."""
    source = {"model_type": "qwen2", "vocab_size": 783, "num_hidden_layers": 4, "tie_word_embeddings": True} | size
    with torch.device("meta"):
        model = Qwen2(read_config(source))
    model = model.to(dtype).to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return model


def prompts_of(puzzles: int = PUZZLES) -> list[list[int]]:
    """Prompts of the bundled model."""
    return [CODEC.prompt(puzzle) for puzzle in generate_puzzles(puzzles, "train")]


def random_batch(model: Qwen2, prompts: list[list[int]], tokens: int) -> tuple[TokenBatch, Tensor]:
    """8 responses of `tokens` random tokens to each prompt, and a credit (B, tokens) that is 0 nowhere."""
    B = len(prompts) * ANSWERS
    samples = torch.randint(model.real_vocab, (B, tokens))
    return make_batch([tokens] * B, [0.0] * B, [i // ANSWERS for i in range(B)], tokens=samples), torch.randn(B, tokens)


# -------------------------------------------------------------------------------------- against other code


def our_generate(model: Qwen2, limit: int, ends: list[int]) -> Callable[[], object]:
    """Our sampler for 64 responses, or for this process's share of them."""
    uniforms = grpo.draw_uniforms(0, 0, PUZZLES, ANSWERS, limit).split(ANSWERS)  # Q of (G, limit)
    prompts, mine = my_share(prompts_of()), torch.cat(my_share(uniforms))
    return lambda: generate(model, prompts, mine, ends)


def their_generate(limit: int, ends: list[int]) -> Callable[[], object]:
    """transformers' sampler for the same 64 responses; without `ends`, of exactly `limit` tokens."""
    theirs = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    repeated = [prompt for prompt in prompts_of() for _ in range(ANSWERS)]
    tokens, pad, P = plain_rows(repeated, torch.zeros(len(repeated), 0, dtype=torch.long))  # (B, P), (B,)
    attention = (torch.arange(P) >= pad[:, None]).long()  # (B, P)
    options = dict(do_sample=True, top_k=0, max_new_tokens=limit, pad_token_id=0)
    options |= {"eos_token_id": ends} if ends else {"min_new_tokens": limit}
    return lambda: theirs.generate(tokens, attention_mask=attention, **options)


def sampler(bench: Benchmark) -> None:
    """Against transformers' generate: responses of exactly 64 tokens, and of their real lengths."""
    model = bundled()
    for name, limit, ends in (("exactly 64 tokens", TOKENS, []), ("real lengths", LIMIT, CODEC.end_tokens)):
        ours = our_generate(model, limit, ends)
        tokens = ours().mask.sum().item()
        took = bench.interleave(ours=ours, theirs=their_generate(limit, ends))
        bench.record(f"sampler, {name}", tokens / took["ours"], "tokens/s", took["theirs"] / took["ours"],
                     "transformers' generate")


def updates(bench: Benchmark) -> None:
    """Against the plain layout of tests/plain.py: the batch of a real step, and prompts as long as the original's."""
    model, puzzles = bundled(), generate_puzzles(PUZZLES, "train")
    optimizer = Optimizer(model, lr=0.0)
    real = grpo.rollout(model, CODEC, puzzles, grpo.draw_uniforms(0, 1, PUZZLES, ANSWERS, LIMIT))
    text = CHAT.format(numbers=[4, 3, 5], target=8)
    long = [(CODEC.tokenizer.encode(text, add_special_tokens=False).ids * 2)[:140]] * PUZZLES
    cases = {"a real step": (prompts_of(), real, MITIGATIONS["none"](real)),
             "prompts of 140 tokens, answers of 50": (long, *random_batch(model, long, 50))}
    for name, (prompts, batch, credit) in cases.items():
        took = bench.interleave(
            ours=lambda: grpo.update(model, optimizer, prompts, batch, credit, max_new_tokens=LIMIT),
            plain=lambda: plain_update(model, prompts, batch, credit))
        bench.record(f"update, {name}", batch.mask.sum().item() / took["ours"], "tokens/s",
                     took["plain"] / took["ours"], "the plain layout")


def whole_step(model: Qwen2) -> Callable[[], object]:
    """Sample and annotate 64 responses of exactly 64 tokens, then update on all of them."""
    optimizer, puzzles, codec = Optimizer(model, lr=0.0), generate_puzzles(PUZZLES, "train"), copy.copy(CODEC)
    codec.end_tokens = []
    uniforms, prompts = grpo.draw_uniforms(0, 0, PUZZLES, ANSWERS, TOKENS), prompts_of()
    credit = torch.randn(len(uniforms), TOKENS, generator=torch.Generator().manual_seed(0))  # (B, T)

    def step() -> None:
        batch = grpo.rollout(model, codec, puzzles, uniforms)
        grpo.update(model, optimizer, prompts, batch, credit, max_new_tokens=TOKENS)

    return step


def record_steps(bench: Benchmark, took: dict[str, float], how: str) -> None:
    """Whole steps against TRL's, whose time follows from that of generate."""
    for name in ("float32", "bfloat16"):
        bench.record(f"step of 64 x 64 tokens, {name}, {how}", took[name], "s", TRL_STEP * took["theirs"] / took[name],
                     "TRL's GRPOTrainer")


def steps(bench: Benchmark) -> None:
    """A whole step in one process of two threads."""
    took = bench.interleave(float32=whole_step(bundled()), bfloat16=whole_step(bundled(torch.bfloat16)),
                            theirs=their_generate(TOKENS, []))
    record_steps(bench, took, "one process")


def processes(bench: Benchmark) -> None:
    """The same, shared by two processes of one thread each: this file under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__,
               "--pair", "--repeats", str(bench.repeats)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    took = json.loads(printed.splitlines()[-1])
    for name, length in (("exactly 64 tokens", "fixed"), ("real lengths", "real")):
        ours, theirs = took[f"our {length}"], took[f"their {length}"]
        bench.record(f"sampler, {name}, two processes", ours, "s", theirs / ours, "transformers' generate")
    record_steps(bench, took | {"theirs": took["their fixed"]}, "two processes")
    bench.record("step of 64 x 64 tokens, two processes of one thread", took["float32"], "s",
                 took["alone"] / took["float32"], "one process of one thread")


def pair(repeats: int) -> None:
    """What each of the two processes runs. The first one also runs, alone, what they are compared with."""
    join("cpu")

    def both(work: Callable) -> Callable[[], None]:
        return lambda: (work(), dist.barrier())

    def alone(work: Callable, threads: int) -> Callable[[], None]:
        """The first process works as if it were the only one, and the second waits."""
        def run() -> None:
            if leads():
                torch.set_num_threads(threads)
                with mock.patch("torch.distributed.is_initialized", return_value=False):
                    work()
                torch.set_num_threads(1)
            dist.barrier()
        return run

    model = bundled()
    took = Benchmark(repeats).interleave(**{
        "our fixed": both(our_generate(model, TOKENS, [])),
        "their fixed": alone(their_generate(TOKENS, []), threads=2),
        "our real": both(our_generate(model, LIMIT, CODEC.end_tokens)),
        "their real": alone(their_generate(LIMIT, CODEC.end_tokens), threads=2),
        "alone": alone(whole_step(model), threads=1),
        "float32": both(whole_step(model)),
        "bfloat16": both(whole_step(bundled(torch.bfloat16)))})
    print(json.dumps(took), flush=True)
    leave()


# -------------------------------------------------------------------------------------- what credit costs


def credit(bench: Benchmark) -> None:
    """What each credit function and the credit log add to a default step of `none`, and the size of the log."""
    model, puzzles = bundled(), generate_puzzles(Settings.questions, "train")
    optimizer, critic = Optimizer(model, lr=0.0), Critic(model.config.hidden_size)
    reference, prompts = copy.deepcopy(model).requires_grad_(False), prompts_of(len(puzzles))
    uniforms = grpo.draw_uniforms(0, 1, len(puzzles), Settings.answers, LIMIT)
    seconds: dict[str, list[float]] = {name: [] for name in ("step", "log", *MITIGATIONS)}

    def sampled() -> TokenBatch:
        return grpo.rollout(model, CODEC, puzzles, uniforms, reference=reference, critic=critic)

    @contextlib.contextmanager
    def clock(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name].append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step-000001.npz"
        for _ in range(bench.repeats // 2 + 1):
            with clock("step"):
                batch = sampled()
                weight = MITIGATIONS["none"](batch)
                grpo.update(model, optimizer, prompts, batch, weight, max_new_tokens=LIMIT)
            with clock("log"):
                grpo.write_credit_log(file, 1, batch, weight)
            for name, method in MITIGATIONS.items():
                batch = sampled()  # a new one each time: it would remember what it asked the model before
                with clock(name):
                    method(batch)
                    if "critic" in method.needs:
                        critic.learn(batch.ask.hidden, batch.mask, batch.ask.values, batch.reward)
        size = file.stat().st_size / batch.mask.sum().item()
    step, log, *each = map(statistics.median, seconds.values())
    bench.record("credit log", 100 * log / step, f"% of a step of {step:.2f} s")
    bench.record("credit log, size", size, "bytes a token")
    for name, took in zip(MITIGATIONS, each):
        bench.record(f"credit of {name}", 100 * took / step, "% of a step of none")


def truth(bench: Benchmark) -> None:
    """Tokens sampled for the ground truth of 8 responses, against plain Monte Carlo from before every token.

    Compared at the same root mean square error over the tokens; the squared error falls as 1 / tokens sampled. For the
    ground truth it is the error its file states, an overestimate; that of plain Monte Carlo is unbiased.
    """
    model, puzzles = bundled(), generate_puzzles(4, "heldout")
    batch = grpo.rollout(model, CODEC, puzzles, grpo.draw_uniforms(0, 1, len(puzzles), 2, LIMIT))
    columns = ground_truth.describe(batch, {})
    ground_truth.sample_truth(model, CODEC, puzzles, columns, 100, 0, LIMIT, lambda: None)
    ground_truth.add_values(columns)
    tokens, value_variance, a_star_variance = monte_carlo(model, puzzles, batch, 8)
    for name, variance, column in (("A*", a_star_variance, "a_star_error"), ("V", value_variance, "value_error")):
        error = np.mean(columns[column] ** 2)
        needed = tokens * np.mean(variance) / error  # tokens with which plain Monte Carlo is as accurate
        bench.record(f"truth of {name} to {error**0.5:.3f} in {len(columns['token'])} tokens", columns["sampled"],
                     "tokens sampled", needed / columns["sampled"], "continuations from every prefix")


def monte_carlo(model: Qwen2, puzzles: list[Puzzle], batch: TokenBatch, k: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Tokens in k continuations from before each token of a batch; the variances (N,) of V and A* estimated by them."""
    places, generator = batch.mask.nonzero(), torch.Generator().manual_seed(0)  # (N, 2)
    B, T = batch.mask.shape
    variance, tokens = torch.zeros(B, T + 1, dtype=torch.float64), 0
    for chunk in places[places[:, 1].argsort()].split(grpo.ROWS_AT_ONCE // k):  # (n, 2)
        asked = [puzzles[batch.group[i]] for i in chunk[:, 0]]
        left = (LIMIT - chunk[:, 1]).repeat_interleave(k)  # (n * k,)
        uniforms = torch.rand(len(left), left.max(), generator=generator, dtype=torch.float64)
        prefixes = [batch.tokens[i, :t].tolist() for i, t in chunk.tolist()]
        samples, _, grades = grpo.respond(model, CODEC, asked, uniforms, prefixes, left)
        rate = torch.tensor([grade["answer"] for grade in grades], dtype=torch.float64).view(-1, k).mean(1)  # (n,)
        variance[chunk[:, 0], chunk[:, 1]] = rate * (1 - rate) / (k - 1)
        tokens += int(samples.mask.sum())
    of_A = variance[:, :-1] + variance[:, 1:]  # (B, T); after the last token V is known
    return tokens, variance[:, :-1][batch.mask].numpy(), of_A[batch.mask].numpy()


# -------------------------------------------------------------------------------------- against the machine


def sample_and_update(model: Qwen2, prompts: list[list[int]], tokens: int,
                      micro_batch: int = 16) -> dict[str, Callable[[], object]]:
    """Sampler and update on 8 responses of exactly `tokens` tokens to each prompt."""
    uniforms = grpo.draw_uniforms(0, 0, len(prompts), ANSWERS, tokens)
    (batch, credit), optimizer = random_batch(model, prompts, tokens), Optimizer(model, lr=0.0)
    optimizer.step(1.0)  # allocates Adam's moments
    return {"sampler": lambda: generate(model, prompts, uniforms, []),
            "update": lambda: grpo.update(model, optimizer, prompts, batch, credit, max_new_tokens=tokens,
                                          micro_batch=micro_batch)}


def machine(bench: Benchmark) -> None:
    """Matrix products per second in update and sampler, against bare products of the same shapes."""
    model, prompts = bundled(), prompts_of()
    many, few, w = torch.randn(2048, 128), torch.randn(64, 128), torch.randn(768, 128)  # rows in update, decoding
    took = bench.interleave(**sample_and_update(model, prompts, TOKENS), many=lambda: [many @ w.T for _ in range(20)],
                            few=lambda: [few @ w.T for _ in range(400)])
    weights = sum(p.numel() for p in model.parameters())
    tokens = PUZZLES * ANSWERS * TOKENS + sum(map(len, prompts))  # that pass through the model
    for name, operations, bare in (("update", 6 * weights * tokens, 20 * 2 * 2048 * 128 * 768 / took["many"]),
                                   ("sampler", 2 * weights * tokens, 400 * 2 * 64 * 128 * 768 / took["few"])):
        reached = operations / took[name]
        bench.record(f"{name}, matrix products", reached / 1e9, "GFLOP/s", reached / bare,
                     f"the {bare / 1e9:.0f} of a bare product")


def growth(bench: Benchmark) -> None:
    """Seconds of sampler and update as the number of responses, their length and the model grow."""
    model, cases = bundled(), []
    for puzzles, tokens in ((2, 64), (4, 64), (8, 64), (16, 64), (32, 64), (8, 32), (8, 128), (8, 256)):
        cases.append((f"{ANSWERS * puzzles} responses of {tokens} tokens", model, puzzles, tokens))
    for width in (64, 128, 256, 512):
        model = random_model(hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 32,
                             num_key_value_heads=width // 64)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        cases.append((f"{millions:.2f} million parameters", model, PUZZLES, TOKENS))
    for name, model, puzzles, tokens in cases:
        took = bench.interleave(**sample_and_update(model, prompts_of(puzzles), tokens))
        for part, seconds in took.items():
            bench.record(f"growth, {part}, {name}", seconds, "s")


def memory(case: str) -> float:
    """GiB by which the memory of this process, which runs nothing else, rises at most in one case (on Linux)."""
    def resident(key: str) -> float:
        return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20

    model, prompts, tokens = bundled(), prompts_of(), TOKENS
    if case == "big":
        model = random_model(torch.bfloat16, vocab_size=151936, hidden_size=896, intermediate_size=4864,
                             num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
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


# -------------------------------------------------------------------------------------- plot and command

PANELS = {  # axis label: the names of the rows that belong there, and in them the number on the axis
    "responses of 64 tokens": r"(\d+) responses of 64 tokens",
    "tokens of each of 64 responses": r"64 responses of (\d+) tokens",
    "million parameters, 64 x 64 tokens": r"([\d.]+) million parameters"}


def plot_growth(rows: list[dict], file: Path) -> None:
    """Seconds of sampler and update as one number grows, a panel for each of PANELS."""
    figure, axes = new_figure(len(PANELS), 1, 3.2, sharey=True)
    for axis, (label, pattern) in zip(axes.flat, PANELS.items()):
        for part, marker in (("sampler", "o"), ("update", "s")):
            found = [(re.fullmatch(f"growth, {part}, {pattern}", r["what"]), float(r["value"])) for r in rows]
            xs, ys = zip(*sorted((float(match[1]), seconds) for match, seconds in found if match))
            axis.loglog(xs, ys, marker=marker, label=part)
        axis.minorticks_off()
        axis.set_xticks(xs, [f"{x:g}" for x in xs])
        axis.set_xlabel(label)
    axes[0, 0].set_yticks((0.1, 0.2, 0.5, 1, 2), (0.1, 0.2, 0.5, 1, 2))
    axes[0, 0].set_ylabel("seconds")
    axes[0, 0].legend()
    save_figure(figure, file)


def plot_ratios(rows: list[dict], file: Path) -> None:
    """A bar for each ratio, below the name of what it is compared to."""
    rows = [row for row in rows if row["against"] and not re.search("matrix|truth", row["what"])]  # ratios of times
    baselines = dict.fromkeys(row["against"] for row in rows)
    figure, ((axis,),) = new_figure(1, 1, 0.7 + 0.25 * (len(rows) + len(baselines)))
    names = []
    for baseline, colour in zip(baselines, PALETTE):
        names.append(f"against {baseline}:")
        for row in (row for row in rows if row["against"] == baseline):
            ratio = float(row["ratio"])
            axis.barh(len(names), ratio, color=colour)
            axis.text(ratio + 0.03, len(names), f"{ratio:.2f}", va="center")
            names.append(row["what"])
    axis.axvline(1, color=GREY, lw=1)
    axis.set_yticks(range(len(names)), names)
    for label in axis.get_yticklabels():
        label.set_weight("bold" if label.get_text().endswith(":") else "normal")
    axis.margins(x=0.08)
    axis.set(xlabel="times as fast", ylim=(len(names) - 0.5, -0.5))
    axis.grid(axis="y", visible=False)
    save_figure(figure, file)


def main() -> None:
    """Measure everything on the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", action="store_true", help="also measure an update of Qwen2.5-0.5B's shape")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of benchmark.csv and the plots")
    parser.add_argument("--repeats", type=int, default=7, help="1 only shows that everything runs (default 7)")
    parser.add_argument("--pair", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pair:
        return pair(args.repeats)
    bench = Benchmark(args.repeats)
    for part in (sampler, updates, steps, processes, credit, truth, machine, growth):
        part(bench)
    memories(bench, args.big)
    write_csv(bench.rows, args.out / "benchmark.csv")
    plot_ratios(bench.rows, args.out / "benchmark.png")
    plot_growth(bench.rows, args.out / "growth.png")


if __name__ == "__main__":
    main()
