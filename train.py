"""The command line and the loop: sample, grade, assign credit, update, log.

    python train.py --mitigation none                                       the bundled model, two to three minutes
    python train.py --mitigation outcome_conditional --think_discount 0.5   another way to give credit
    python train.py --model path/to/Qwen2.5-0.5B-Instruct --lr 1e-6         a real checkpoint
    python train.py --steps 0                                               only evaluate
    python train.py --resume runs/none-seed0                                go on with a run that was stopped or killed
    torchrun --nproc_per_node 2 train.py --mitigation none                  the same run by several processes

A run folder receives config.json, metrics.csv, credit/, samples.txt, checkpoint/ and final.json; read it with
`python analyze.py runs/none-seed0`. Ctrl-C stops after the running step and leaves all of it usable.
"""
import argparse
import copy
import csv
import inspect
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import grpo
from countdown_task import Codec, Problem, fingerprint, generate_problems, is_solvable, puzzle_key, read_problems, split
from critic import Critic, load_critic
from mitigations import (ADVANTAGES, MITIGATIONS, NORMALIZATIONS, TokenBatch, has_variance, is_reweighting, mentions,
                         parameters, summary)
from qwen2_model import Qwen2, load_model, read_json, replace_file, save_model

STATE, LOGS = "state.safetensors", ("metrics.csv", "samples.txt")  # in a run folder
BUNDLED = Path(__file__).parent / "models" / "countdown-tiny"
COLUMNS = ["step", "reward", "success", "format", "length", "truncated", "entropy", "grad_norm", "loss",
           "clip_fraction", "ratio_error", "kl", "zero_variance_groups", "seconds", "tokens_per_second",
           "heldout_success", "heldout_stderr"]  # of metrics.csv; the README explains each
CHOICES = {"mitigation": tuple(MITIGATIONS), "advantage": ADVANTAGES, "loss_norm": grpo.LOSS_NORMS,
           "normalize": NORMALIZATIONS, "dtype": ("float32", "bfloat16"), "optimizer_device": ("", "cpu")}


@dataclass
class Settings:
    """Every flag, its default and its meaning."""

    mitigation: str = "none"  # the credit function, see below
    model: str = str(BUNDLED)  # a Hugging Face folder with Qwen2 or Qwen3 weights
    data: str = ""  # .jsonl or .parquet with `nums` and `target`; empty: generate 3 numbers from 1..20
    out: str = ""  # the run folder, which must not exist; empty: runs/<mitigation>-seed<seed>
    steps: int = 100  # 0 only evaluates
    questions: int = 12  # puzzles a step
    answers: int = 8  # responses to each
    max_new_tokens: int = 140  # a response that is longer is cut off
    seed: int = 0  # of puzzles and sampling
    lr: float = 2e-4  # AdamW's learning rate
    beta1: float = 0.9  # share of its mean gradient that AdamW keeps in a step
    beta2: float = 0.999  # share of its mean squared gradient
    weight_decay: float = 0.0  # AdamW's pull towards 0
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    advantage: str = "grpo"  # of a response within its group
    normalize: str = "response"  # how a reweighting is rescaled: mean 1 a response, mean 1 a batch, or as it is
    loss_norm: str = "token"  # averaged over: all tokens, sequences first, or a constant length
    clip_low: float = 0.2  # PPO's clip below 1
    clip_high: float = 0.2  # PPO's clip above 1 (DAPO: 0.28)
    updates_per_batch: int = 1  # optimizer steps on each batch
    kl: float = 0.0  # weight of the KL penalty to the start model
    skip_unfinished: bool = False  # no credit to responses that the token limit cut off (DAPO)
    micro_batch: int = 16  # responses in one forward and backward; changes memory, not results
    checkpoint_activations: bool = False  # less memory, more time: the backward pass computes each layer again
    eval_every: int = 25  # steps between measurements of held-out success; 0: at start and end only
    eval_problems: int = 512  # held-out puzzles, one response each
    sample_every: int = 10  # steps between writing whole responses to samples.txt
    checkpoint_every: int = 0  # steps between checkpoints/step-...; 0: only the last
    state_every: int = 10  # steps between writing what --resume goes on from; 0: only where the run stops
    device: str = "cpu"  # or cuda
    dtype: str = "float32"  # of the model; the optimizer works on float32 weights in any case
    optimizer_device: str = ""  # cpu: the optimizer keeps its weights, gradients and moments there; empty: as --device


# --------------------------------------------------------------------------------------------- command line


def comments() -> dict[str, str]:
    """The comment behind each field of Settings: it is the flag's help."""
    lines = [line.split("  # ") for line in inspect.getsource(Settings).splitlines()]
    return {line[0].split(":")[0].strip(): line[1] for line in lines if len(line) == 2}


def to_bool(text: str) -> bool:
    """A flag's value: true or false."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")
    return text.lower() == "true"


def parse(arguments: list[str]) -> tuple[Settings, dict, Path | None]:
    """From the command line: settings, hyper-parameters of the chosen credit function, and the run to go on with."""
    if any(word.split("=")[0] == "--resume" for word in arguments):
        return parse_resume(arguments)
    parser = argparse.ArgumentParser(usage="python train.py [--flag value ...]", allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__, epilog=method_help())
    parser.error = fail
    helps = comments()
    for field in fields(Settings):
        add_flag(parser, field.name, field.default, helps[field.name], CHOICES.get(field.name))
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.error = fail
    chosen.add_argument("--mitigation", default="none")
    name = chosen.parse_known_args(arguments)[0].mitigation
    own = parameters(name) if name in MITIGATIONS else {}
    for key, default in own.items():
        add_flag(parser, key, default, f"of {name}", None)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        takes = f"; of its own it takes --{', --'.join(own)}" if own else ""
        fail(f"--mitigation {name} takes no {unknown[0]}{takes}")
    if known.normalize != "response" and not is_reweighting(name):
        fail(f"--mitigation {name} is not a reweighting: it takes no --normalize")
    if known.advantage != "grpo" and not any(mentions(name, part) for part in ("advantage", "reweight", "none")):
        fail(f"--mitigation {name} has an advantage of its own: it takes no --advantage")
    values = vars(known)
    if wild := [key for key in own if isinstance(values[key], float) and not math.isfinite(values[key])]:
        fail(f"--{wild[0]} must be a finite number")
    return Settings(**{f.name: values[f.name] for f in fields(Settings)}), {k: values[k] for k in own}, None


def parse_resume(arguments: list[str]) -> tuple[Settings, dict, Path]:
    """The same of `--resume runs/... [--steps N]`: all else is as the run began."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.error = fail
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        fail(f"--resume goes on with the settings that the run began with: it takes --steps and no {unknown[0]}")
    try:
        if not (known.resume / "config.json").is_file():
            raise ValueError(f"{known.resume} is no run folder: it has no config.json")
        config = read_json(known.resume / "config.json")
        s = Settings(**config["settings"])
        return replace(s, steps=s.steps if known.steps is None else known.steps), config["method"], known.resume
    except (KeyError, TypeError, ValueError) as error:
        other = f"{known.resume}/config.json is of another version of train.py"
        fail(str(error) if type(error) is ValueError else other)


def add_flag(parser: argparse.ArgumentParser, name: str, default, meaning: str, choices: tuple | None) -> None:
    """One flag, of the type of its default. A bool alone means true."""
    kind = {"type": to_bool, "nargs": "?", "const": True} if type(default) is bool else {"type": type(default)}
    shown = default if default != "" else "none"
    parser.add_argument(f"--{name}", default=default, choices=choices, help=f"{meaning} (default {shown})", **kind)


def method_help() -> str:
    """The credit functions with their formulas and flags, for --help."""
    flags = {name: "".join(f" --{k} {v}" for k, v in parameters(name).items()) for name in MITIGATIONS}
    methods = "\n".join(f"  {name}{flags[name]}\n      {summary(name)}" for name in MITIGATIONS)
    alphabet = "A advantage, L length, r reward; of the token: p probability, H entropy, V expected reward; z z-score"
    return f"credit functions ({alphabet}):\n{methods}"


def fail(message: str) -> None:
    """Say what is wrong in one sentence and end with an error."""
    sys.exit(f"error: {message}" if leads() else 1)


def leads() -> bool:
    """Whether this process writes and speaks: the only one, or the first that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def check(s: Settings) -> None:
    """ValueError for settings that can't work."""
    for name in ("questions", "answers", "max_new_tokens", "updates_per_batch", "micro_batch", "eval_problems",
                 "sample_every"):
        if getattr(s, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    for name in ("steps", "seed", "eval_every", "checkpoint_every", "state_every", "lr", "kl", "weight_decay",
                 "clip_high"):
        if not 0 <= getattr(s, name) < float("inf"):  # not NaN, either
            raise ValueError(f"--{name} must be 0 or more")
    for name in ("beta1", "beta2", "clip_low"):
        if not 0 <= getattr(s, name) < 1:
            raise ValueError(f"--{name} must be at least 0 and below 1")
    if not s.max_grad_norm > 0:
        raise ValueError("--max_grad_norm must be above 0")
    if s.answers == 1 and s.steps > 0:
        raise ValueError("--answers 1 leaves no group to compare with: ask for 2 or more")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", s.device):
        raise ValueError(f"--device {s.device} is none of cpu, cuda and cuda:0, cuda:1, ...")
    needed = max(int(s.device[5:] or 0) + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if s.device != "cpu" and needed > torch.cuda.device_count():
        raise ValueError(f"--device {s.device}: {needed} GPUs are needed, and this PyTorch sees "
                         f"{torch.cuda.device_count()}; use --device cpu, or fewer processes")


# ------------------------------------------------------------------------------------------------ the puzzles


def choose_problems(s: Settings) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out puzzles, generated or those of --data. A hash says which are held out, whatever the seed."""
    if not s.data:
        return generate_problems(4096, "train"), generate_problems(s.eval_problems, "heldout")
    distinct = {puzzle_key(p): p for p in read_problems(s.data)}  # the public set lists many puzzles twice
    by_hash = [distinct[k] for k in sorted(distinct, key=fingerprint)]
    train, heldout = ([p for p in by_hash if split(p) == part] for part in ("train", "heldout"))
    for name, part in (("train", train), ("held-out", heldout)):
        if not part:
            raise ValueError(f"{s.data} has no {name} puzzle among its {len(distinct)}: it needs more rows")
    return train, heldout[: s.eval_problems]


def check_solvable(s: Settings, problems: set[Problem]) -> None:
    """ValueError when a puzzle that this run will ask has no solution, or is too large to tell."""
    for i, problem in enumerate(problems, 1):
        grpo.progress("checking puzzles", i, len(problems))
        if len(problem.numbers) > 6:
            raise ValueError(f"{s.data}: {list(problem.numbers)} are too many numbers; 6 are the most we can solve")
        if not is_solvable(problem):
            raise ValueError(f"{s.data}: {list(problem.numbers)} can't make {problem.target}; remove that row")


def draw_problems(problems: list[Problem], s: Settings, step: int) -> list[Problem]:
    """The step's questions: the puzzles in an order shuffled anew each time round. Depends on seed and step alone."""
    places = np.arange((step - 1) * s.questions, step * s.questions)
    order = {r: np.random.default_rng([s.seed, 0, r]).permutation(len(problems))  # a step of 0 samples no responses
             for r in set(places // len(problems))}
    return [problems[order[place // len(problems)][place % len(problems)]] for place in places]


def check_lengths(model: Qwen2, codec: Codec, problems: set[Problem], s: Settings) -> None:
    """ValueError when prompt and response do not fit the model, or the tokenizer not the vocabulary."""
    if codec.size > model.config.vocab_size:
        raise ValueError(f"the tokenizer in {s.model} has {codec.size} tokens, the model {model.config.vocab_size}")
    longest, limit = max(len(codec.prompt(p)) for p in problems), model.config.max_position_embeddings
    if longest + s.max_new_tokens > limit:
        raise ValueError(f"a prompt of {longest} tokens and --max_new_tokens {s.max_new_tokens} exceed the model's "
                         f"{limit}; ask for fewer new tokens")


# --------------------------------------------------------------------------------------------- the run folder


def start_run(s: Settings, own: dict, codec_folder: Path) -> Path:
    """Create the run folder with config.json, empty metrics.csv and the tokenizer of its checkpoint, all or nothing."""
    run = Path(s.out or f"runs/{s.mitigation}-seed{s.seed}")
    if run.exists():
        raise ValueError(f"{run} exists: go on with it by --resume {run}, remove it, or choose another --out or --seed")
    if dist.is_initialized():
        dist.barrier()  # until every process has looked
    if leads():
        part = run.with_name(run.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        (part / "credit").mkdir(parents=True)
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        config = {"settings": asdict(s), "method": own, "versions": versions,
                  "command": shlex.join(["python"] + sys.argv)}
        write_json(part / "config.json", config)
        append_row(part, None)
        copy_tokenizer(codec_folder, part / "checkpoint")
        part.rename(run)
    return run


def resume_run(run: Path, s: Settings) -> Path:
    """Check that there is something left to do, and write down how many steps are wanted now."""
    config, final = read_json(run / "config.json"), run / "final.json"
    if final.is_file() and "pass@16" in read_json(final) and read_json(final)["step"] >= s.steps:
        raise ValueError(f"{run} has finished its {s.steps} steps; --steps N asks for more")
    if (done := steps_done(run)) > s.steps:
        raise ValueError(f"{run} has {done} steps already, more than --steps {s.steps}")
    if dist.is_initialized():
        dist.barrier()  # until every process has read it
    if leads():
        final.unlink(missing_ok=True)
        config["settings"]["steps"] = s.steps
        write_json(run / "config.json", config)
    return run


def steps_done(run: Path) -> int:
    """How many steps a run can go on from."""
    if not (run / STATE).is_file():
        return 0
    try:
        with safe_open(run / STATE, framework="pt") as file:
            return int(file.metadata()["step"])
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(f"{run / STATE} is broken ({error}); remove it to begin the run again") from None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Take the tokenizer along, so that a checkpoint is a whole model folder."""
    target.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / file).is_file():
            shutil.copy(source / file, target / file)


def append_row(run: Path, row: dict | None) -> None:
    """Add a row to metrics.csv; None writes the header. What was not measured stays empty."""
    with (run / "metrics.csv").open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader() if row is None else writer.writerow(row)


def write_samples(run: Path, step: int, batch: TokenBatch) -> None:
    """Append three whole responses, and what they earned, to samples.txt."""
    answers = len(batch.text) // len(batch.numbers)
    with (run / "samples.txt").open("a", encoding="utf-8") as file:
        for i in range(0, min(3 * answers, len(batch.text)), answers):
            numbers, target = batch.numbers[i // answers], batch.target[i // answers]
            file.write(f"=== step {step}  {list(numbers)} -> {target}  reward {batch.reward[i]:.2f}  "
                       f"advantage {batch.advantage[i]:+.2f}\n{batch.text[i]}\n\n")


# ------------------------------------------------------------------------------------------------- the loop


class Stop:
    """Within `with Stop() as stop`, Ctrl-C sets stop.asked; a second one interrupts at once."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "Stop":
        self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self.before)

    def agreed(self) -> bool:
        """Whether any of the processes was asked to stop."""
        asked = torch.tensor(float(self.asked))
        grpo.sum_over_processes([asked])
        return bool(asked)

    def ask(self, *_) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this step; Ctrl-C again stops at once", flush=True)


def assign_credit(model: Qwen2, codec: Codec, problems: list[Problem], s: Settings, own: dict, step: int,
                  reference: Qwen2 | None, critic: Critic) -> tuple[TokenBatch, torch.Tensor]:
    """Sample a step's responses, and give their tokens credit (B, T)."""
    uniforms = grpo.draw_uniforms(s.seed, step, len(problems), s.answers, s.max_new_tokens)
    with torch.no_grad():
        batch = grpo.rollout(model, codec, problems, uniforms, advantage=s.advantage, normalize=s.normalize,
                             key=(s.seed, step), reference=reference, critic=critic, micro_batch=s.micro_batch)
        credit = MITIGATIONS[s.mitigation](batch, **own)  # (B, T)
    if dist.is_initialized():
        dist.broadcast(credit := credit.contiguous(), 0)  # the same to the last bit: it says who updates on what
    if credit.shape != batch.mask.shape or not credit.isfinite().all():
        raise ValueError(f"{s.mitigation} must return finite credit of shape {tuple(batch.mask.shape)}")
    return batch, credit * batch.ended[:, None] if s.skip_unfinished else credit


def train_step(model: Qwen2, optimizer: grpo.Optimizer, codec: Codec, problems: list[Problem], s: Settings, own: dict,
               step: int, reference: Qwen2 | None, critic: Critic) -> tuple[TokenBatch, torch.Tensor, dict]:
    """One step of GRPO: its batch, its credit, and its row of metrics.csv."""
    start = time.perf_counter()
    batch, credit = assign_credit(model, codec, problems, s, own, step, reference, critic)
    critic.learn(batch.reward)
    measured = grpo.update(
        model, optimizer, [codec.prompt(p) for p in problems], batch, credit,
        reference=reference if s.kl > 0 else None, kl=s.kl, clip_low=s.clip_low, clip_high=s.clip_high,
        loss_norm=s.loss_norm, max_new_tokens=s.max_new_tokens, updates_per_batch=s.updates_per_batch,
        max_grad_norm=s.max_grad_norm, micro_batch=s.micro_batch)
    tokens, seconds = batch.mask.sum().item(), time.perf_counter() - start  # in this order: a GPU is waited for
    return batch, credit, measured | {
        "step": step, "reward": batch.reward.mean().item(), "success": batch.success.mean().item(),
        "format": batch.format.mean().item(), "length": tokens / len(batch.text),
        "truncated": 1 - batch.ended.float().mean().item(), "entropy": batch.entropy[batch.mask].mean().item(),
        "zero_variance_groups": int((~has_variance(batch.reward.view(len(problems), -1))).sum()),
        "seconds": seconds, "tokens_per_second": tokens / seconds}


def measure_heldout(model: Qwen2, codec: Codec, heldout: list[Problem], s: Settings) -> dict[str, float]:
    """Held-out success, one response a puzzle, and its standard error."""
    solved = grpo.evaluate(model, codec, heldout, 1, s.max_new_tokens, s.questions * s.answers)[:, 0]
    return {"heldout_success": float(solved.mean()), "heldout_stderr": grpo.standard_error(solved)}


def measure_pass(model: Qwen2, codec: Codec, heldout: list[Problem], s: Settings, k: int = 16) -> dict[str, float]:
    """The share of held-out puzzles that at least one of k responses solves, and its standard error."""
    solved = grpo.evaluate(model, codec, heldout, k, s.max_new_tokens, s.questions * s.answers).max(1)
    return {f"pass@{k}": float(solved.mean()), f"pass@{k}_stderr": grpo.standard_error(solved),
            f"pass@{k}_problems": len(solved)}


def show(row: dict, s: Settings, eta: float) -> None:
    """Print a step in one line."""
    print(f"step {row['step']:>4}/{s.steps}  reward {row['reward']:.3f}  success {row['success']:.3f}  "
          f"format {row['format']:.2f}  length {row['length']:5.1f}  entropy {row['entropy']:.3f}  "
          f"grad {row['grad_norm']:.3f}  {row['tokens_per_second']:6.0f} tok/s  "
          f"ETA {grpo.clock(eta)}{heldout_text(row)}", flush=True)


def heldout_text(row: dict) -> str:
    """Held-out success with its standard error, where the row has it."""
    return f"  held-out {row['heldout_success']:.1%} ± {row['heldout_stderr']:.1%}" if "heldout_success" in row else ""


def train(s: Settings, own: dict, model: Qwen2, codec: Codec, problems: list[Problem], heldout: list[Problem],
          run: Path, reference: Qwen2 | None, critic: Critic) -> None:
    """Measure, train all steps or those until Ctrl-C, measure again."""
    optimizer = grpo.Optimizer(model, s.lr, (s.beta1, s.beta2), s.weight_decay, s.optimizer_device or None)
    done = load_state(run, optimizer, critic)
    if done == 0:
        measure_start(run, model, codec, heldout, s)
    step, row, stopped = done, {}, False
    try:
        with Stop() as stop:
            start = time.perf_counter()
            for step in range(done + 1, s.steps + 1):
                asked = draw_problems(problems, s, step)
                batch, credit, row = train_step(model, optimizer, codec, asked, s, own, step, reference, critic)
                if step == s.steps or s.eval_every and step % s.eval_every == 0:
                    row |= measure_heldout(model, codec, heldout, s)
                stopped = stop.agreed()
                if leads():
                    eta = (time.perf_counter() - start) / (step - done) * (s.steps - step)
                    write_step(run, row, batch, credit, s, eta)
                    save_step(run, step, model, optimizer, critic, s, stopped or step == s.steps)
                if stopped:
                    break
    finally:  # also when a second Ctrl-C, or a lack of memory, ends the run
        if leads():
            save_checkpoint(run / "checkpoint", model, critic)
    finish(run, {"step": step} | row, model, codec, heldout, s, stopped)


def measure_start(run: Path, model: Qwen2, codec: Codec, heldout: list[Problem], s: Settings) -> None:
    """Row 0 of metrics.csv."""
    print(f"measuring the start model on {len(heldout)} held-out puzzles", flush=True)
    row = {"step": 0} | measure_heldout(model, codec, heldout, s)
    print(f"start{heldout_text(row)}", flush=True)
    if leads():
        append_row(run, row)


def finish(run: Path, row: dict, model: Qwen2, codec: Codec, heldout: list[Problem], s: Settings,
           stopped: bool) -> None:
    """Measure the model that came out, as far as the last row does not say it, and write final.json."""
    if stopped and dist.is_initialized():  # torchrun allows half a minute, and that was for the step
        return print(f"stopped; go on with: torchrun ... train.py --resume {run}")
    if "heldout_success" not in row:
        row = row | measure_heldout(model, codec, heldout, s)
    final = {k: row[k] for k in ("step", "heldout_success", "heldout_stderr")} | {"heldout_problems": len(heldout)}
    if leads():
        write_json(run / "final.json", final)
    if not stopped:
        final |= measure_pass(model, codec, heldout[:128], s)
    if leads():
        write_json(run / "final.json", final)
    print(f"wrote {run}" + (f"; go on with: python train.py --resume {run}" if stopped else
                            f"; read it with: python analyze.py {run}" if s.steps else ""))


def write_json(file: Path, content: dict) -> None:
    """Write a JSON file to be read by people, too."""
    replace_file(file, lambda part: part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def write_step(run: Path, row: dict, batch: TokenBatch, credit: torch.Tensor, s: Settings, eta: float) -> None:
    """The step's credit log, every now and then some whole responses, its row of metrics.csv and its line."""
    grpo.write_credit_log(run / "credit" / f"step-{row['step']:06d}.npz", row["step"], batch, credit)
    if row["step"] == 1 or row["step"] % s.sample_every == 0:
        write_samples(run, row["step"], batch)
    append_row(run, row)
    show(row, s, eta)


# ------------------------------------------------------------------------------------- what is kept on the way


def save_checkpoint(folder: Path, model: Qwen2, critic: Critic) -> None:
    """The model, and the critic if it was ever trained."""
    save_model(model, folder)
    if critic.trained:
        critic.save(folder)


def save_step(run: Path, step: int, model: Qwen2, optimizer: grpo.Optimizer, critic: Critic, s: Settings,
              last: bool) -> None:
    """A checkpoint, and the state to go on from, where they are due; the state last, since it says what there is."""
    if s.checkpoint_every and step % s.checkpoint_every == 0:
        folder = run / "checkpoints" / f"step-{step:06d}"
        part = folder.with_suffix(".part")
        for old in (part, folder):  # of a run that was killed
            shutil.rmtree(old, ignore_errors=True)
        copy_tokenizer(run / "checkpoint", part)
        save_checkpoint(part, model, critic)
        part.rename(folder)
    if last or s.state_every and step % s.state_every == 0:
        save_state(run, step, optimizer, critic)


def adam_tensors(weights: dict[str, torch.Tensor], adamw: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Weights, and what AdamW has gathered about them, by name: `weight.model.norm`, `exp_avg.model.norm`, ..."""
    moments = {f"{key}.{name}": x for name, w in weights.items() for key, x in adamw.state.get(w, {}).items()}
    return {f"weight.{name}": w.detach() for name, w in weights.items()} | moments


@torch.no_grad()
def restore(weights: dict[str, torch.Tensor], adamw: torch.optim.AdamW, tensors: dict[str, torch.Tensor]) -> None:
    """Undo `adam_tensors`."""
    for name, w in weights.items():
        w.copy_(tensors[f"weight.{name}"])
        if f"step.{name}" in tensors:  # a critic that has not learned in this run has none
            adamw.state[w] = {key: tensors[f"{key}.{name}"].to(w.device) for key in ("step", "exp_avg", "exp_avg_sq")}


def save_state(run: Path, step: int, optimizer: grpo.Optimizer, critic: Critic) -> None:
    """All that the next step depends on, and how long the logs are, in one file that is there whole or not at all."""
    tensors = adam_tensors(optimizer.master, optimizer.adamw)
    if critic.trained:
        own = adam_tensors(dict(critic.named_parameters()), critic.optimizer)
        tensors |= {f"critic.{name}": tensor for name, tensor in own.items()}
    lengths = {name: (run / name).stat().st_size for name in LOGS if (run / name).is_file()}
    known = {"step": str(step), "lengths": json.dumps(lengths)}
    replace_file(run / STATE, lambda part: save_file({k: x.contiguous() for k, x in tensors.items()}, part, known))


def load_state(run: Path, optimizer: grpo.Optimizer, critic: Critic) -> int:
    """Put everything back as it was, the logs too; how many steps were done, 0 where no state was written."""
    device, lengths, step = next(iter(optimizer.master.values())).device, {}, 0
    if (run / STATE).is_file():
        with safe_open(run / STATE, framework="pt", device=str(device)) as file:
            tensors, known = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        own = {name.removeprefix("critic."): x for name, x in tensors.items() if name.startswith("critic.")}
        try:
            step, lengths = int(known["step"]), json.loads(known["lengths"])
            restore(optimizer.master, optimizer.adamw, tensors)
            if own:
                restore(dict(critic.named_parameters()), critic.optimizer, own)
        except (KeyError, RuntimeError):
            raise ValueError(f"{run / STATE} is the state of another model; put back the right one") from None
        optimizer.copy_back()
        critic.trained |= bool(own)
    if leads():
        cut_logs(run, step, lengths)
    return step


def cut_logs(run: Path, step: int, lengths: dict[str, int]) -> None:
    """Take away what was written after the step that a run goes on from."""
    for file in (*(run / "credit").glob("step-*.npz"), *(run / "checkpoints").glob("step-*")):
        if int(file.stem.removeprefix("step-")) > step:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    for name in LOGS:
        if (run / name).is_file():
            os.truncate(run / name, lengths.get(name, 0))
    if not lengths:
        append_row(run, None)


def rehearse(model: Qwen2, codec: Codec, problems: list[Problem], s: Settings, own: dict, reference: Qwen2 | None,
             critic: Critic) -> None:
    """Assign credit to a few short responses, so that a method or a value that can't work is refused before the run."""
    small = replace(s, answers=2, max_new_tokens=min(8, s.max_new_tokens))
    assign_credit(model, codec, problems[:2], small, own, 0, reference, critic)
    critic.scored = None


def join_processes(s: Settings) -> Settings:
    """Meet the other processes, if torchrun started several; each has a GPU of its own, and only the first speaks."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return s
    import torch.distributed.nn  # noqa: F401 (imported later, by the first optimizer, it holds on to the group, and
    # gloo's threads then outlive Python, which now and then aborts a finished process)
    dist.init_process_group("gloo" if s.device == "cpu" else "cpu:gloo,cuda:nccl")
    if not leads():
        sys.stdout = open(os.devnull, "w")
    return s if s.device == "cpu" else replace(s, device=f"cuda:{os.environ['LOCAL_RANK']}")


def main() -> None:
    """Refuse what can't work in one sentence, before anything is written; then train."""
    s, own, resumed = parse(sys.argv[1:])
    try:
        s = join_processes(s)
        check(s)
        if s.device != "cpu":
            torch.cuda.set_device(s.device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and an update has many
        model, codec = load_model(s.model, s.device, getattr(torch, s.dtype)), Codec(s.model)
        problems, heldout = choose_problems(s)
        asked = {p for step in range(1, s.steps + 1) for p in draw_problems(problems, s, step)} | set(heldout)
        if s.data:
            check_solvable(s, asked)
        check_lengths(model, codec, asked, s)
        model.real_vocab, critic = codec.size, load_critic(s.model, model)
        model.checkpoint_activations = s.checkpoint_activations
        needs_reference = s.kl > 0 or mentions(s.mitigation, "reference_logprob")
        rehearse(model, codec, problems, s, own, model if needs_reference else None, critic)
        run = resume_run(resumed, s) if resumed else start_run(s, own, Path(s.model))
    except (ValueError, OSError, FloatingPointError) as error:
        fail(str(error))
    reference = copy.deepcopy(model).requires_grad_(False) if needs_reference else None
    changed = {f.name: getattr(s, f.name) for f in fields(s) if getattr(s, f.name) != f.default} | own
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(problems)} puzzles to train on, into {run}")
    print(f"settings: {', '.join(f'{k}={v}' for k, v in changed.items()) or 'all at their defaults'}", flush=True)
    try:
        train(s, own, model, codec, problems, heldout, run, reference, critic)
    except KeyboardInterrupt:
        fail(f"interrupted; go on with: python train.py --resume {run}")
    except (ValueError, FloatingPointError) as error:
        fail(f"{error}; what was finished before is in {run}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
