"""GRPO (group relative policy optimization): the settings, the loop, and the evaluation.

    python train.py --mitigation none                                       the bundled model, three minutes
    python train.py --mitigation outcome_conditional --think_discount 0.5   another way to assign credit
    python train.py --model path/to/Qwen2.5-0.5B-Instruct --lr 1e-6         a real checkpoint
    python train.py --task guess                                            another task, in several turns
    python train.py --steps 0                                               only evaluate
    python train.py --resume runs/none-seed0                                continue a run that was stopped or killed
    python train.py --config runs/none-seed0/config.json --seed 1           the settings of a run, but for those given
    python train.py --on_step tracking:tensorboard                          hand each row of metrics.csv to a function
    torchrun --nproc_per_node 2 train.py --mitigation none                  the same run in several processes

Shapes: Q puzzles a step, G responses to each puzzle (a group), B = Q G responses, T tokens of the longest response.

A run folder receives config.json, metrics.csv, credit/, samples.txt, checkpoint/, state.pt (for --resume) and
final.json. Read it with `python analyze.py runs/none-seed0`.
"""
import copy
import inspect
import math
import random
import shlex
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Callable

import numpy as np
import torch
from torch import Tensor

from grpo import ADVANTAGES, KL_GRADIENTS, LOSS_NORMS, LOSSES, compare, update
from lora import add_adapters, load_adapters, merged, save_adapters
from methods import MITIGATIONS  # all credit functions, by name: those of mitigations.py and of methods/
from methods.heads import HEADS, load_head, save_head
from mitigations import NORMALIZATIONS
from plumbing import run_folder
from plumbing.flags import Arguments, changed, check_device, load_function, parse
from plumbing.launch import advice, check, check_puzzles, lacking, responses_that_fit, with_model
from plumbing.metrics import add_columns, heldout_text, line_of, standard_error, step_columns
from plumbing.optimizer import Optimizer, learning_rate
from plumbing.processes import check_equal, join, leave
from plumbing.progress import Progress, one_sentence
from plumbing.registry import check_order, check_pure, required
from plumbing.run_folder import Writer
from plumbing.task_file import load_puzzles, load_task
from plumbing.tokenizer import Tokenizer
from qwen2_model import load_model, save_model
from queries import Queries
from rollout import EVALUATION, Policy, TokenBatch, draw_puzzles, draw_uniforms, generate_and_grade, rollout, seed_of
from settings import Settings
from turns import reply

CHOICES = {"reward": ("graded", "random"), "advantage": ADVANTAGES, "loss": LOSSES, "loss_norm": LOSS_NORMS,
           "normalize": NORMALIZATIONS, "dtype": ("float32", "bfloat16"), "optimizer_device": ("", "cpu"),
           "old_logprob": ("sampler", "update"), "kl_gradient": KL_GRADIENTS}


# ------------------------------------------------------------------------------------------------- the loop


def train(s: Settings, mitigation: Callable[[TokenBatch], Tensor], policy: Policy, training: list, heldout: list,
          optimizer: Optimizer, writer: Writer, done: int) -> dict:
    """GRPO from step done + 1 to the last one. Returns the last row of metrics.csv, {} where there was no step."""
    row, began = {}, time.perf_counter()
    for step in range(done + 1, s.steps + 1):
        step_began = time.perf_counter()
        optimizer.set_lr(learning_rate(s, step))  # the same in every step, by default
        puzzles = draw_puzzles(training, s, step)  # Q
        batch = rollout(policy, puzzles, s, step)  # B responses and their rewards
        batch.ask = Queries(policy, batch, s, step)  # what a credit function may ask the model
        batch.advantage = compare(batch, s.advantage)  # (B,)
        credit = assign_credit(batch, mitigation, s)  # (B, T)
        row = learn(policy, optimizer, batch, credit, s)  # columns of metrics.csv
        row |= step_columns(step, batch, step_began)  # columns of the rollout: means of the batch, tokens, seconds
        if step == s.steps or (s.eval_every and step % s.eval_every == 0):
            row |= measure_heldout(policy, heldout, s)
        writer.step(step, batch, credit, row)
        seconds_left = (time.perf_counter() - began) / (step - done) * (s.steps - step)
        print(line_of(row, s.steps, seconds_left), flush=True)
    return row


@torch.no_grad()
def assign_credit(batch: TokenBatch, mitigation: Callable[[TokenBatch], Tensor], s: Settings) -> Tensor:
    """The credit (B, T) that the chosen function of mitigations.py or methods/ gives to each token."""
    credit = mitigation(batch)  # (B, T)
    return credit * batch.ended[:, None] if s.skip_unfinished else credit


def learn(policy: Policy, optimizer: Optimizer, batch: TokenBatch, credit: Tensor, s: Settings) -> dict:
    """The heads learn, such as PPO's critic, and the policy. Returns columns of metrics.csv: of the update, of the
    heads (whatever their `learn` returns), and the means of further numbers in the task's grades."""
    # Heads learn after the credit, which would be biased by a critic that knew these rewards.
    found = {name: head.learn(batch) for name, head in policy.heads.items()}
    row = update(policy, optimizer, batch, credit, s)
    for name, columns in found.items():
        add_columns(row, columns, owner=f"learn of the head {name}")
    add_columns(row, {name: values.nanmean() for name, values in batch.grades.items()}, owner="the task's grade")
    return row


# ------------------------------------------------------------------------------------------------- evaluation


def evaluate(policy: Policy, puzzles: list, G: int, s: Settings) -> np.ndarray:
    """Success (Q, G) of G responses to each of Q puzzles, with the same random numbers every time."""
    uniforms = draw_uniforms(0, EVALUATION, len(puzzles), G, s.max_new_tokens)  # (B, max_new_tokens)
    at_once = max(1, responses_that_fit(policy, puzzles, s) // G)  # puzzles
    success, progress = [], Progress("evaluating", len(uniforms))
    for i in range(0, len(puzzles), at_once):
        rows = uniforms[i * G : (i + at_once) * G]
        watch = progress.part(len(success), *rows.shape)  # responses done, those of this part, the token limit
        _, graded = generate_and_grade(policy, puzzles[i : i + at_once], rows, greedy=s.eval_greedy, watch=watch)
        success += [grade["answer"] for grade in graded]  # 1.0 where the answer is right, else 0.0
    return np.array(success).reshape(len(puzzles), G)


def measure_heldout(policy: Policy, heldout: list, s: Settings) -> dict[str, float]:
    """Held-out success, one response per puzzle, and its standard error."""
    success = evaluate(policy, heldout, 1, s)[:, 0]
    return {"heldout_success": float(success.mean()), "heldout_stderr": standard_error(success)}


def measure_pass(policy: Policy, heldout: list, s: Settings) -> dict[str, float]:
    """The share of held-out puzzles that at least one of --pass_at sampled responses solves, and its standard error."""
    if (k := s.pass_at) == 0:
        return {}
    print(f"measuring pass@{k}: {k} responses to each of {len(heldout)} held-out puzzles", flush=True)
    success = evaluate(policy, heldout, k, replace(s, eval_greedy=False))  # (Q, k)
    fewer = sorted({k} | {2**i for i in range(k.bit_length())})  # the same samples tell of these, too
    print("  ".join(f"pass@{j} {best_of(success, j):.1%}" for j in fewer), flush=True)
    solved = success.max(1)
    return {f"pass@{k}": float(solved.mean()), f"pass@{k}_stderr": standard_error(solved),
            f"pass@{k}_problems": len(solved)}


def best_of(success: np.ndarray, j: int) -> float:
    """pass@j from k >= j responses to each puzzle, success (Q, k): the best of j of them, on average (2107.03374)."""
    k = success.shape[1]
    share = [math.comb(i, j - 1) / math.comb(k, j) for i in range(k)]  # of the draws of j whose best is the i-th
    return float((np.sort(success, 1) @ share).mean())


def measure_start(policy: Policy, heldout: list, s: Settings) -> dict[str, float]:
    """Row 0 of metrics.csv."""
    print(f"measuring the start model on {len(heldout)} held-out puzzles", flush=True)
    row = {"step": 0} | measure_heldout(policy, heldout, s)
    print(f"start{heldout_text(row)}", flush=True)
    return row


def measure_end(row: dict, policy: Policy, heldout: list, s: Settings) -> dict[str, float]:
    """What final.json has: held-out success of the last row of metrics.csv, and pass@k."""
    # Held-out success is lacking in a run that is resumed with --steps equal to those already done.
    last = row if "heldout_success" in row else measure_heldout(policy, heldout, s)
    return {"step": s.steps, "heldout_success": last["heldout_success"], "heldout_stderr": last["heldout_stderr"],
            "heldout_problems": len(heldout)} | measure_pass(policy, heldout[:128], s)  # more would take long


# --------------------------------------------------------------------------------------- from the command line
# A first reading can stop here.


def main() -> None:
    """Train as the command line says. What can't work is refused in one sentence, before anything is written."""
    with one_sentence("interrupted before training began"):
        s, hyper_parameters, resume, on_step = parse_flags(sys.argv[1:])
        differences = changed(s, Settings(), hyper_parameters, MITIGATIONS[s.mitigation])
        run = resume or Path(s.out or run_folder.default_folder(s.mitigation, s.seed, differences))
        check(s)
        s = with_model(s)  # so that config.json names the folder
        policy, training, heldout = prepare(s, hyper_parameters)
        mitigation = partial(MITIGATIONS[s.mitigation], **hyper_parameters)
        weights = [p for module in (policy.model, *policy.heads.values()) for p in module.parameters()]
        run_folder.check_disk(run, s, weights)
        optimizer = Optimizer(policy.model, s.lr, (s.beta1, s.beta2), s.weight_decay, s.optimizer_device or None)
        columns, logged = try_step(policy, optimizer, training, s, mitigation)
        # What a run must find unchanged when it is resumed, besides its settings.
        fixed = {f"the task {s.task}": inspect.getsource(policy.task),
                 "the list of puzzles": names_of(training + heldout),
                 f"the credit function {s.mitigation}": inspect.getsource(MITIGATIONS[s.mitigation].function)}
        writer = Writer(run, s, hyper_parameters, learners(policy, optimizer), partial(save_policy, policy, s),
                        load_function(on_step), logged)
        done, row = writer.open(fixed, columns, bool(resume))  # row of metrics.csv, {} in a new run
    with one_sentence(f"interrupted; continue with: python train.py --resume {shlex.quote(str(run))}", run):
        trained = sum(w.numel() for w in optimizer.weights.values())
        print(f"{trained:,} parameters, {len(training)} puzzles to train on, into {run}")
        shown = ", ".join(f"{name}={value}" for name, value in differences.items())
        print(f"settings: {shown or 'all at their defaults'}", *advice(s, len(heldout)), sep="\n", flush=True)
        if resume:
            print(f"resuming after step {done}" + (", for no state was written yet" if done == 0 else ""), flush=True)
        if done == 0:
            row = measure_start(policy, heldout, s)
            writer.start(row)
        row = train(s, mitigation, policy, training, heldout, optimizer, writer, done) or row
        writer.finish(measure_end(row, policy, heldout, s))
        print(f"wrote {run}" + (f"; read it with: python analyze.py {shlex.quote(str(run))}" if s.steps else ""))
    leave()


def try_step(policy: Policy, optimizer: Optimizer, puzzles: list, s: Settings, mitigation: Callable) -> tuple:
    """Try a small step, of three short responses to each of two puzzles, so that a mistake in somebody's own function
    is seen before the run begins. Returns its columns of metrics.csv, and the names in batch.log.

    It leaves no trace: no weight moves, copies of the heads learn, and random numbers are drawn as if nothing had been.
    """
    states, device = (random.getstate(), np.random.get_state()), policy.model.output_weight.device
    s = replace(s, answers=3, max_new_tokens=min(8, s.max_new_tokens), updates_per_batch=1)
    policy = policy._replace(heads=copy.deepcopy(policy.heads))
    # An optimizer whose step clips the gradient, which says its norm, and moves nothing.
    still = SimpleNamespace(zero_grad=optimizer.zero_grad, step=optimizer.clip)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        check_order(s, device, ADVANTAGES[s.advantage], LOSS_NORMS[s.loss_norm], LOSSES[s.loss])
        batch = rollout(policy, [puzzles[0], puzzles[-1]], s, step=0)  # of a single one two copies
        batch.ask = Queries(policy, batch, s, step=0)
        batch.advantage = compare(batch, s.advantage)
        if hasattr(policy.task, "reply"):  # in so few tokens perhaps no turn has ended
            ends, tokens = policy.tokenizer.end_tokens, batch.tokens[0][batch.mask[0]].tolist()
            reply(policy, puzzles[0], [*takewhile(lambda token: token not in ends, tokens), ends[0]])
        check_pure(s.mitigation, batch, lambda: assign_credit(batch, mitigation, s))
        # Credit 1, so that no response is left out. A run that only evaluates need not have room for gradients.
        row = learn(policy, still, batch, batch.mask.float(), s) if s.steps else {}
        row |= step_columns(0, batch, time.perf_counter())
    for weight in optimizer.master.values():  # the weights that AdamW moves, which have the gradients
        weight.grad = None
    random.setstate(states[0])
    np.random.set_state(states[1])
    return row, {*batch.log}


def save_policy(policy: Policy, s: Settings, folder: Path) -> None:
    """Write the model, its adapters merged into it and, exact, beside it, and the heads that were trained with it."""
    save_model(merged(policy.model), folder)
    if s.lora_rank:
        save_adapters(policy.model, folder / "adapter", s.model)
    for name, head in policy.heads.items():
        save_head(name, head, folder)


def learners(policy: Policy, optimizer: Optimizer) -> dict:
    """What changes from step to step, by its name in state.pt. (The optimizer's state includes the model's weights.)"""
    heads = policy.heads
    return {"optimizer": optimizer, **heads, **{f"{name}_adamw": head.optimizer for name, head in heads.items()}}


def prepare(s: Settings, hyper_parameters: dict) -> tuple[Policy, list, list]:
    """The policy, and the puzzles to train on and those held out, once it is clear that they work together."""
    task = load_task(s.task)
    device = join(s.device)  # connects to the other processes of torchrun; each has its own GPU
    training, heldout = load_puzzles(task, s.eval_problems, s.data, s.eval_data)
    check_equal(asdict(s) | hyper_parameters | {"data": names_of(training + heldout)})  # in all processes
    policy = load_policy(replace(s, device=device), task, required(s.mitigation, hyper_parameters))
    check_puzzles(policy, puzzles_of_run(training, s), heldout, s)
    return policy, training, heldout


def puzzles_of_run(training: list, s: Settings) -> list:
    """The puzzles that a run trains on, drawn at once: all, unless --steps times --questions are fewer."""
    return draw_puzzles(training, replace(s, questions=min(s.steps * s.questions, len(training))), step=1)


def names_of(puzzles: list) -> str:
    """The ids of puzzles, one a line."""
    return "\n".join(puzzle.id for puzzle in puzzles)


def parse_flags(arguments: list[str]) -> Arguments:
    """The settings, the credit function's hyper-parameters, the run to resume, --on_step; exits where one is wrong."""
    return parse(arguments, Settings(), MITIGATIONS, CHOICES, __doc__)


def load_policy(s: Settings, task: ModuleType | None = None, needs: tuple[str, ...] = ()) -> Policy:
    """The model, its tokenizer, the task, and what the credit function needs: heads, and the reference model."""
    check_device(s.device)
    s, task = with_model(s), task or load_task(s.task)  # main has done both; the laboratory calls this alone
    model, tokenizer = load_model(s.model, s.device, getattr(torch, s.dtype)), Tokenizer(s.model)
    model.temperature = s.temperature
    model.real_vocab = tokenizer.size  # the embedding may have more rows than there are tokens; they are never sampled
    model.checkpoint_activations = s.checkpoint_activations
    if s.lora_rank:
        add_adapters(model, s.lora_rank, s.lora_alpha, seed_of("adapters", s.seed))
    if s.adapter:
        load_adapters(model, s.adapter, s.lora_rank, s.lora_alpha, s.model)
    if missing := lacking(needs, task, HEADS):
        raise ValueError(f"--mitigation {s.mitigation} needs {missing[0]}, which is neither a function of the task "
                         f"{s.task} nor a head ({', '.join(HEADS)})")
    heads = {name: load_head(name, s.model, model) for name in HEADS if name in needs}
    # What deepcopy finds here it does not copy: with LoRA, all but the adapters.
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    reference = copy.deepcopy(model, shared).requires_grad_(False) if s.kl > 0 or "reference" in needs else None
    return Policy(model, tokenizer, task, heads, reference)


if __name__ == "__main__":
    main()
