"""Speed and memory, as ratios measured side by side in one run: ours against transformers, plain code and the machine.

These machines are shared and noisy, so what is compared runs in turn, A B A B, and medians are reported. Everything
goes into results/benchmark.csv, and a picture of it into results/benchmark.png.

Run it:  python tests/benchmark.py          (about six minutes on two cores; needs tests/requirements.txt)
         python tests/benchmark.py --big    (the memory of an update of Qwen2.5-0.5B's shape, too: six minutes, 11 GiB)
"""

import argparse
import contextlib
import copy
import csv
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import grpo
from conftest import make_batch
from countdown_task import CHAT, Codec, generate_problems
from critic import Critic
from experiments import ground_truth
from mitigations import MITIGATIONS, none
from qwen2_model import Qwen2, empty_model, generate, left_pad, load_model, read_config
from tests.plain import plain_update
from train import BUNDLED, Settings, join_processes, train_step

QUESTIONS, ANSWERS, TOKENS = 8, 8, 64
REPEATS = 1 if "--quick" in sys.argv else 7
TRL_STEP = 0.525 * 18_700 / 4096  # whole steps of 64 x 64 tokens by TRL's GRPOTrainer, in times of `generate` beside it
CODEC = Codec(BUNDLED)
rows: list[dict] = []  # of the CSV


def record(what: str, value: float, unit: str, ratio: float | None = None, against: str = "") -> None:
    """Keep a figure, and print it."""
    rows.append(
        {"what": what, "value": f"{value:.4g}", "unit": unit, "ratio": ratio and f"{ratio:.3g}", "against": against}
    )
    print(f"{what}: {value:,.4g} {unit}" + (f", {ratio:.2f} times {against}" if ratio else ""), flush=True)


def interleave(**work: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each function, all of them run in turn REPEATS times after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(REPEATS + 1):
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


def prompts_of(questions: int = QUESTIONS) -> list[list[int]]:
    """The bundled model's prompts."""
    return [CODEC.prompt(p) for p in generate_problems(questions, "train")]


def their_generate(limit: int, ends: list[int] | None) -> Callable[[], object]:
    """transformers' `generate` for 64 responses; to their end, or of exactly `limit` tokens."""
    theirs = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    tokens, pad = left_pad(prompts_of(), torch.device("cpu"))
    attention = (torch.arange(tokens.shape[1]) >= pad[:, None]).long().repeat_interleave(ANSWERS, 0)
    options = dict(do_sample=True, top_k=0, max_new_tokens=limit, pad_token_id=0)
    options |= {"eos_token_id": ends} if ends else {"min_new_tokens": limit}
    return lambda: theirs.generate(tokens.repeat_interleave(ANSWERS, 0), attention_mask=attention, **options)


def our_generate(model: Qwen2, limit: int, ends: list[int], questions: slice = slice(None)) -> Callable[[], object]:
    """Our sampler for the same 64 responses, or for those to some of the questions."""
    uniforms = (
        grpo.draw_uniforms(0, 0, QUESTIONS, ANSWERS, limit).unflatten(0, (QUESTIONS, ANSWERS))[questions].flatten(0, 1)
    )
    return lambda: generate(model, prompts_of()[questions], uniforms, ends)


def sampler() -> None:
    """Against transformers' `generate`: responses of exactly 64 tokens, and real ones, of up to 140."""
    ours = bundled()
    for name, limit, ends in (("exactly 64 tokens", TOKENS, []), ("real lengths", 140, CODEC.end_tokens)):
        mine = our_generate(ours, limit, ends)
        count = mine().mask.sum().item()
        took = interleave(ours=mine, theirs=their_generate(limit, ends))
        record(
            f"sampler, {name}",
            count / took["ours"],
            "tokens/s",
            took["theirs"] / took["ours"],
            "transformers' generate",
        )


def fixed_batch(model: Qwen2, prompts: list[list[int]], tokens: int):
    """A TokenBatch of 8 responses to each prompt, of exactly so many tokens, and a credit that is 0 nowhere."""
    uniforms = grpo.draw_uniforms(0, 0, len(prompts), ANSWERS, tokens)
    samples = generate(model, prompts, uniforms, [])
    group = [q for q in range(len(prompts)) for _ in range(ANSWERS)]
    batch = make_batch([tokens] * len(group), [0.0] * len(group), group, **samples._asdict())
    return batch, torch.randn(len(group), 1, generator=torch.Generator().manual_seed(0)) * batch.mask


def updates() -> None:
    """Against the plain layout: prompt repeated, padded, all logits; a real step, and the original long instruction."""
    model = bundled()
    optimizer, prompts = grpo.Optimizer(model, 0.0), prompts_of()
    real = grpo.rollout(
        model, CODEC, generate_problems(QUESTIONS, "train"), grpo.draw_uniforms(0, 1, QUESTIONS, ANSWERS, 140)
    )
    text = CHAT.format(numbers=[4, 3, 5], target=8)
    long = [(CODEC.tokenizer.encode(text, add_special_tokens=False).ids * 2)[:140]] * QUESTIONS
    cases = {
        "a real step": (prompts, real, none(real)),
        "prompts of 140 tokens, answers of 50": (long, *fixed_batch(model, long, 50)),
    }
    for name, (asked, batch, credit) in cases.items():
        took = interleave(
            ours=lambda: grpo.update(model, optimizer, asked, batch, credit, max_new_tokens=140),
            plain=lambda: plain_update(model, asked, batch, credit),
        )
        record(
            f"update, {name}",
            batch.mask.sum().item() / took["ours"],
            "tokens/s",
            took["plain"] / took["ours"],
            "the plain layout",
        )


def whole_step(model: Qwen2) -> Callable[[], object]:
    """Sampling 64 responses of exactly 64 tokens, annotating them, and an update on all of them."""
    optimizer, problems, codec = grpo.Optimizer(model, 0.0), generate_problems(QUESTIONS, "train"), copy.copy(CODEC)
    codec.end_tokens = []
    uniforms, prompts = grpo.draw_uniforms(0, 0, QUESTIONS, ANSWERS, TOKENS), prompts_of()
    credit = torch.randn(len(uniforms), TOKENS, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        batch = grpo.rollout(model, codec, problems, uniforms)
        grpo.update(model, optimizer, prompts, batch, credit, max_new_tokens=TOKENS)

    return step


def report_steps(took: dict[str, float], how: str) -> None:
    """Whole steps against TRL's, by way of `generate`."""
    for name in ("float32", "bfloat16"):
        record(
            f"step of 64 x 64 tokens, {name}, {how}",
            took[name],
            "s",
            TRL_STEP * took["theirs"] / took[name],
            "TRL's GRPOTrainer",
        )


def steps() -> None:
    """A whole step in one process of two threads."""
    took = interleave(
        float32=whole_step(bundled()), bfloat16=whole_step(bundled(torch.bfloat16)), theirs=their_generate(TOKENS, None)
    )
    report_steps(took, "one process")


def processes() -> None:
    """The same shared by two processes of one thread: this file again, under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        __file__,
        "--pair",
    ]
    command += ["--quick"] * (REPEATS == 1)
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ).stdout
    took = json.loads(out.splitlines()[-1])
    for name, limit in (("exactly 64 tokens", "fixed"), ("real lengths", "real")):
        record(
            f"sampler, {name}, two processes",
            took[f"our {limit}"],
            "s",
            took[f"their {limit}"] / took[f"our {limit}"],
            "transformers' generate",
        )
    report_steps(took | {"theirs": took["their fixed"]}, "two processes")
    record(
        "step of 64 x 64 tokens, two processes of one thread",
        took["float32"],
        "s",
        took["alone"] / took["float32"],
        "one process of one thread",
    )


def pair() -> None:
    """What each of the two processes does; the first also runs, with both cores, what is compared."""
    join_processes(Settings())
    first, half = dist.get_rank() == 0, grpo.share(QUESTIONS)

    def alone(work: Callable, threads: int) -> Callable:
        """Run by the first process only, while the other waits."""

        def run() -> None:
            if first:
                torch.set_num_threads(threads)
                shared, grpo.world = grpo.world, lambda: (0, 1)
                work()
                grpo.world = shared
                torch.set_num_threads(1)
            dist.barrier()

        return run

    def together(work: Callable) -> Callable:
        def run() -> None:
            work()
            dist.barrier()

        return run

    model = bundled()
    took = interleave(
        **{
            "our fixed": together(our_generate(model, TOKENS, [], half)),
            "their fixed": alone(their_generate(TOKENS, None), 2),
            "our real": together(our_generate(model, 140, CODEC.end_tokens, half)),
            "their real": alone(their_generate(140, CODEC.end_tokens), 2),
            "alone": alone(whole_step(model), 1),
            "float32": together(whole_step(model)),
            "bfloat16": together(whole_step(bundled(torch.bfloat16))),
        }
    )
    if first:
        print(json.dumps(took))
    dist.destroy_process_group()


def log_cost() -> None:
    """What the credit log costs of a step with the default settings, and its bytes a token."""
    model, s, problems = bundled(), Settings(), generate_problems(Settings().questions, "train")
    optimizer, critic = grpo.Optimizer(model, 0.0), Critic(model.config.hidden_size)
    batch, credit, _ = train_step(model, optimizer, CODEC, problems, s, {}, 1, None, critic)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step-000001.npz"
        took = interleave(
            step=lambda: train_step(model, optimizer, CODEC, problems, s, {}, 1, None, critic),
            log=lambda: grpo.write_credit_log(file, 1, batch, credit),
        )
        size = file.stat().st_size / batch.mask.sum().item()
    record("credit log", 100 * took["log"] / took["step"], f"% of a step of {took['step']:.2f} s")
    record("credit log, size", size, "bytes a token")


def methods() -> None:
    """What each credit function takes, the critic's learning included, of the step of `none` it comes on top of."""
    model, s, problems = bundled(), Settings(), generate_problems(Settings().questions, "train")
    reference, optimizer, critic = copy.deepcopy(model), grpo.Optimizer(model, 0.0), Critic(model.config.hidden_size)
    took: dict[str, list[float]] = {name: [] for name in ("step", *MITIGATIONS)}
    for _ in range(REPEATS // 2 + 1):
        for name in took:
            if name == "step":
                took[name].append(train_step(model, optimizer, CODEC, problems, s, {}, 1, None, critic)[2]["seconds"])
                continue
            uniforms = grpo.draw_uniforms(
                0, 1, s.questions, s.answers, s.max_new_tokens
            )  # the same responses each time
            batch = grpo.rollout(model, CODEC, problems, uniforms, reference=reference, critic=critic)
            start = time.perf_counter()
            with torch.no_grad():
                MITIGATIONS[name](batch)
            critic.learn(batch.reward)
            took[name].append(time.perf_counter() - start)
    step, *each = (statistics.median(values[len(values) > 1 :]) for values in took.values())
    for name, seconds in zip(MITIGATIONS, each):
        record(f"credit of {name}", 100 * seconds / step, "% of a step of none")


def truth() -> None:
    """Tokens sampled for the truth about every token of 8 responses, against fresh ends from before each of them.

    Scaled to the same root mean square error over tokens, the square of which goes down as the tokens go up. Ours is the
    error that the file states, which is rather too large; that of fresh ends is unbiased.
    """
    model, problems, limit = bundled(), generate_problems(4, "heldout"), 140
    batch = grpo.rollout(model, CODEC, problems, grpo.draw_uniforms(0, 1, len(problems), 2, limit))
    columns = ground_truth.describe(batch, {})
    with contextlib.redirect_stdout(io.StringIO()):
        ground_truth.sample_truth(model, CODEC, problems, columns, 100, 0, limit, lambda: None)
    ground_truth.add_values(columns)
    tokens, of_V, of_A = fresh_ends(model, problems, batch, limit, 8)
    for name, plain, error in (("A*", of_A, "a_star_error"), ("V", of_V, "value_error")):
        mine = np.mean(columns[error] ** 2)
        needed = tokens * np.mean(plain) / mine  # tokens of fresh ends that would get there, too
        record(
            f"truth of {name} to {mine**0.5:.3f} in {len(columns['token'])} tokens",
            columns["sampled"],
            "tokens sampled",
            needed / columns["sampled"],
            "fresh ends from every prefix",
        )


def fresh_ends(model: Qwen2, problems: list, batch, limit: int, k: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Tokens of k fresh ends from before every token of a batch, and the variances (N,) of V and A* that follow."""
    places, generator = batch.mask.nonzero(), torch.Generator().manual_seed(0)  # (N, 2)
    variance, tokens = torch.zeros(batch.mask.shape[0], batch.mask.shape[1] + 1, dtype=torch.float64), 0
    for part in places[places[:, 1].argsort()].split(grpo.ROWS_AT_ONCE // k):
        asked = [problems[batch.group[i]] for i in part[:, 0]]
        left = (limit - part[:, 1]).repeat_interleave(k)
        chance = torch.rand(len(left), left.max(), generator=generator, dtype=torch.float64)
        prefixes = [batch.tokens[i, :t].tolist() for i, t in part.tolist()]
        samples, _, grades = grpo.respond(model, CODEC, asked, chance, prefixes, left)
        rate = torch.tensor([grade["answer"] for grade in grades], dtype=torch.float64).view(-1, k).mean(1)
        variance[part[:, 0], part[:, 1]] = rate * (1 - rate) / (k - 1)
        tokens += int(samples.mask.sum())
    of_A = variance[:, :-1] + variance[:, 1:]  # the value behind the last token is known
    return tokens, variance[:, :-1][batch.mask].numpy(), of_A[batch.mask].numpy()


def limit() -> None:
    """The share of the machine's matrix products, measured beside it, that an update and the sampler reach."""
    model, prompts = bundled(), prompts_of()
    (batch, credit), optimizer = fixed_batch(model, prompts, TOKENS), grpo.Optimizer(model, 0.0)
    x, decoding, w = torch.randn(2048, 128), torch.randn(64, 128), torch.randn(768, 128)
    took = interleave(
        update=lambda: grpo.update(model, optimizer, prompts, batch, credit, max_new_tokens=TOKENS),
        sampler=our_generate(model, TOKENS, []),
        long=lambda: [x @ w.T for _ in range(20)],
        short=lambda: [decoding @ w.T for _ in range(400)],
    )
    weights = sum(p.numel() for p in model.parameters())
    read = batch.mask.sum().item() + sum(map(len, prompts))  # tokens that go through the model
    for name, work, rate in (
        ("update", 6 * weights * read, 20 * 2 * 2048 * 128 * 768 / took["long"]),
        ("sampler", 2 * weights * read, 400 * 2 * 64 * 128 * 768 / took["short"]),
    ):
        reached = work / took[name]
        record(
            f"{name}, matrix products",
            reached / 1e9,
            "GFLOP/s",
            reached / rate,
            f"the {rate / 1e9:.0f} of a bare product",
        )


def random_model(size: dict, dtype: torch.dtype = torch.float32) -> Qwen2:
    """A Qwen2 with random weights."""
    config = read_config(
        {"model_type": "qwen2", "vocab_size": 783, "num_hidden_layers": 4, "tie_word_embeddings": True} | size
    )
    model = empty_model(config).to_empty(device="cpu").to(dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return model


def growth() -> None:
    """Seconds of sampler and update as responses, length and parameters grow."""
    model, problems = bundled(), generate_problems(32, "train")
    for questions, tokens in ((2, 64), (4, 64), (8, 64), (16, 64), (32, 64), (8, 32), (8, 128), (8, 256)):
        grow(
            f"{8 * questions} responses of {tokens} tokens",
            model,
            [CODEC.prompt(p) for p in problems[:questions]],
            tokens,
        )
    for width in (64, 128, 256, 512):
        size = dict(
            hidden_size=width,
            intermediate_size=3 * width,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
        )
        model = random_model(size)
        grow(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters", model, prompts_of(), TOKENS)


def grow(name: str, model: Qwen2, prompts: list[list[int]], tokens: int) -> None:
    """One point of the curves."""
    uniforms = grpo.draw_uniforms(0, 0, len(prompts), ANSWERS, tokens)
    (batch, credit), optimizer = fixed_batch(model, prompts, tokens), grpo.Optimizer(model, 0.0)
    took = interleave(
        sampler=lambda: generate(model, prompts, uniforms, []),
        update=lambda: grpo.update(model, optimizer, prompts, batch, credit, max_new_tokens=tokens),
    )
    record(f"growth, sampler, {name}", took["sampler"], "s")
    record(f"growth, update, {name}", took["update"], "s")


def resident(key: str = "VmRSS") -> float:
    """Memory of this process, now or at its peak ("VmHWM"), GiB."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(key)) / 2**20


def peak(work: Callable[[], object]) -> float:
    """GiB by which the memory of this process rises above what it is now."""
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before = resident()
    work()
    return resident("VmHWM") - before


def memory(what: str) -> None:
    """Print the peak of one thing, in a process of its own."""
    if what == "big":
        size = dict(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
        )
        model = random_model(size, torch.bfloat16)
        model.real_vocab, model.checkpoint_activations = 151665, True
        prompts, tokens, answers = [torch.randint(0, 151643, (140,)).tolist()], 512, 8
    else:
        model, prompts, tokens, answers = bundled(), prompts_of(), TOKENS, ANSWERS
    optimizer, B = grpo.Optimizer(model, 0.0), len(prompts) * answers
    optimizer.step(1.0)  # makes Adam's moments
    batch = make_batch(
        [tokens] * B,
        [0.0] * B,
        [i // answers for i in range(B)],
        tokens=torch.randint(0, model.real_vocab, (B, tokens)),
    )
    uniforms = grpo.draw_uniforms(0, 0, len(prompts), answers, tokens)
    work = {"sampler": lambda: generate(model, prompts, uniforms, [])}.get(
        what,
        lambda: grpo.update(
            model, optimizer, prompts, batch, torch.randn(B, tokens), max_new_tokens=tokens, micro_batch=4
        ),
    )
    print(peak(work))


def memories(big: bool) -> None:
    """Peak memory above weights, gradients and optimizer."""
    names = {
        "update": "update of 64 x 64 tokens",
        "sampler": "sampler of 64 x 64 tokens",
        "big": "update of 8 x 512 tokens, Qwen2.5-0.5B's shape, bfloat16, --checkpoint_activations",
    }
    for what, name in names.items():
        if what != "big" or big:
            out = subprocess.run(
                [sys.executable, __file__, "--memory", what], capture_output=True, text=True, check=True
            )
            record(f"memory, {name}", float(out.stdout.splitlines()[-1]), "GiB above weights, gradients and optimizer")


PANELS = (  # of the picture: what grows, and its place among the words of a row
    ("responses of 64 tokens", lambda words: words[0] if words[-2:] == ["64", "tokens"] else None),
    ("tokens of each of 64 responses", lambda words: words[3] if words[0] == "64" and words[-1] == "tokens" else None),
    ("million parameters, 64 x 64 tokens", lambda words: words[0] if words[-1] == "parameters" else None),
)


def picture(file: Path) -> None:
    """Ratios as bars; growth as lines."""
    figure, (bars, *lines) = plt.subplots(1, 4, figsize=(16, 4.4), width_ratios=[1.7, 1, 1, 1], layout="constrained")
    compared = [r for r in rows if r["ratio"] and "matrix" not in r["what"]][::-1]
    ratios = [float(r["ratio"]) for r in compared]
    bars.barh([r["what"] for r in compared], ratios, color="#0072B2")
    for y, (r, ratio) in enumerate(zip(compared, ratios)):
        bars.text(ratio + 0.05, y, f"{ratio:.2f}  {r['against']}", va="center", fontsize=7)
    bars.axvline(1, color="black", linewidth=1)
    bars.set(xlabel="times as fast as", xlim=(0, max(ratios) * 1.7))
    bars.tick_params(axis="y", labelsize=7)
    grown = [(*r["what"].split(", ")[1:], float(r["value"])) for r in rows if r["what"].startswith("growth")]
    for axes, (label, pick) in zip(lines, PANELS):
        for name, marker, colour in (("sampler", "o", "#0072B2"), ("update", "s", "#D55E00")):
            points = [(pick(what.split()), value) for kind, what, value in grown if kind == name]
            xs, ys = zip(*sorted((float(x), value) for x, value in points if x))
            axes.loglog(xs, ys, marker=marker, color=colour, label=name)
        axes.set(xlabel=label, ylabel="seconds", xticks=xs, xticklabels=[f"{x:g}" for x in xs], ylim=(0.05, 3))
        axes.set(yticks=(0.1, 0.2, 0.5, 1, 2), yticklabels=("0.1", "0.2", "0.5", "1", "2"))
        axes.minorticks_off()
        axes.grid(linewidth=0.3)
        axes.legend(loc="upper left")
    figure.savefig(file, dpi=110)


def main() -> None:
    """All of it, on the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", action="store_true", help="measure the update of Qwen2.5-0.5B's shape, too")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of benchmark.csv and benchmark.png")
    parser.add_argument("--quick", action="store_true", help="one repeat of everything: only to see that it works")
    parser.add_argument("--pair", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pair or args.memory:
        return pair() if args.pair else memory(args.memory)
    for part in (sampler, updates, steps, processes, log_cost, methods, truth, limit, growth):
        part()
    memories(args.big)
    with (args.out / "benchmark.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    picture(args.out / "benchmark.png")


if __name__ == "__main__":
    main()
