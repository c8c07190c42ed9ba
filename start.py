"""From a command line to the first step of a run: its settings, policy, puzzles, a trial step, and
its folder.

A first reading can skip it. What can't work is refused here in one sentence, before anything is
written. `s` is the Settings.

Run it:  python train.py --mitigation none
"""
import copy
import inspect
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Callable

import torch
from torch import Tensor

from extras import turns
from extras.lora import add_adapters, load_adapters, merged, save_adapters
from grpo import (ADVANTAGES, KL_GRADIENTS, LOSS_NORMS, LOSSES, SHAPINGS, assign_credit, compare, instrument,
                  shape_reward, update)
from methods.heads import HEADS, load_head, save_head
from methods.queries import Queries
from methods.registry import CREDIT_FUNCTIONS
from mitigations import NORMALIZATIONS
from plumbing.checks import check_order, check_pure, required
from plumbing.files import require
from plumbing.flags import Arguments, changed, check_device, load_function, parse
from plumbing.launch import (announce, arithmetic_for, as_if_nothing_was_drawn, check, check_memory, check_puzzles,
                             check_there, lacking, with_model)
from plumbing.metrics import add_step_columns
from plumbing.model_folder import write_end_tokens
from plumbing.optimizer import Optimizer
from plumbing.run_folder import Writer, default_folder
from plumbing.task_file import load_puzzles, load_task, read_weights
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2, load_model, save_model
from rollout import Policy, TokenBatch, draw_puzzles, rollout, seed_of
from settings import Settings

CHOICES = {"reward": ("graded", "random"), "shaping": SHAPINGS, "advantage": ADVANTAGES, "loss": LOSSES,
           "loss_norm": LOSS_NORMS, "normalize": NORMALIZATIONS, "dtype": ("float32", "bfloat16"),
           "arithmetic": ("", "float32", "bfloat16"), "optimizer_device": ("", "cpu"),
           "old_logprob": ("sampler", "update"), "kl_gradient": KL_GRADIENTS}


@dataclass
class Run:
    """What a command line asks for, ready for the first step."""

    s: Settings
    credit_function: Callable[[TokenBatch], Tensor]  # with its hyper-parameters
    policy: Policy
    training: list  # puzzles
    heldout: list
    optimizer: Optimizer
    writer: Writer  # of the run folder
    done: int  # steps that were taken before
    row: dict  # the latest one of metrics.csv; {} in a new run


def start(arguments: list[str], usage: str) -> Run:
    """The run that a command line asks for. usage: what --help says above the flags."""
    s, hyper_parameters, resume, on_step = parse_flags(arguments, usage)
    chosen = CREDIT_FUNCTIONS[s.mitigation]
    differences = changed(s, Settings(), hyper_parameters, chosen)
    if resume:
        check_there(s, resume)
    folder = resume or Path(s.out or default_folder(s.mitigation, s.seed, differences))
    check(s)
    s = with_model(s)  # so that config.json names the folder
    task = load_task(s.task)
    training, heldout = load_puzzles(task, s.eval_problems, s.data, s.eval_data)
    policy = load_policy(s, task, required(chosen, hyper_parameters))
    check_puzzles(policy, puzzles_of_run(training, s), heldout, s)
    s = replace(s, arithmetic=str(policy.model.dtype).removeprefix("torch."))  # as it was found, for --resume
    credit_function = partial(chosen, **hyper_parameters)
    optimizer = Optimizer(policy.model, s.lr, (s.beta1, s.beta2), s.weight_decay, s.optimizer_device or None)
    first = draw_puzzles(training, s, 1) if s.steps else heldout
    columns, logged = try_step(policy, optimizer, first, s, credit_function)
    # What a run must find unchanged when it is resumed, besides its settings.
    fixed = {f"the task {s.task}": inspect.getsource(policy.task),
             "the list of puzzles": "\n".join(puzzle.id for puzzle in training + heldout),
             f"the credit function {s.mitigation}": inspect.getsource(chosen.function)}
    # What changes from step to step, by its name in state.pt. (The optimizer's state includes the
    # model's weights.)
    learners = {"optimizer": optimizer, **policy.heads, **{
        f"{name}_adamw": head.optimizer for name, head in policy.heads.items() if hasattr(head, "optimizer")}}
    writer = Writer(folder, s, hyper_parameters, learners, partial(save_policy, policy, s), load_function(on_step), logged)
    done, row = writer.open(fixed, columns, bool(resume))
    differences |= {"arithmetic": s.arithmetic} if s.arithmetic != s.dtype else {}
    parts = policy.parts if s.reward == "graded" else {"coin": 1}
    announce(optimizer.weights.values(), parts, len(training), len(heldout), folder, differences,
             done if resume else None)
    return Run(s, credit_function, policy, training, heldout, optimizer, writer, done, row)


def try_step(policy: Policy, optimizer: Optimizer, puzzles: list, s: Settings,
             credit_function: Callable) -> tuple[dict, set[str]]:
    """Try a small step, of three short responses to each of two puzzles, so that a mistake in
    somebody's own function is seen before the run begins. Returns its columns of metrics.csv, and
    the names in batch.log. It leaves no trace: no weight moves, copies of the heads learn, random
    numbers are drawn as if nothing had been, and no function may remember it."""
    s = replace(s, questions=2, responses=3, max_new_tokens=min(8, s.max_new_tokens), updates_per_batch=1)
    policy = policy._replace(heads=copy.deepcopy(policy.heads))
    moves_nothing = SimpleNamespace(zero_grad=optimizer.zero_grad, parameters=optimizer.parameters,
                                    step=lambda: None)
    with as_if_nothing_was_drawn(policy.model.norm.device):
        check_order(s, policy.model.norm.device, ADVANTAGES[s.advantage], LOSS_NORMS[s.loss_norm], LOSSES[s.loss])
        batch = rollout(policy, [puzzles[0], puzzles[-1]], s, step=0)  # of a single one two copies
        batch.ask = Queries(policy, batch, s, step=0)
        batch.advantage = compare(batch, s.advantage, shape_reward(batch, s))
        if policy.play:  # in so few tokens perhaps no turn has ended
            ends, tokens = policy.tokenizer.end_tokens, batch.tokens[0][batch.mask[0]].tolist()
            turn = [*takewhile(lambda token: token not in ends, tokens), ends[0]]
            turns.reply_to(policy, puzzles[0], turn)
        check_pure(s.mitigation, batch, lambda: assign_credit(batch, credit_function, s))
        short = replace(s, max_new_tokens=max(1, s.max_new_tokens // 2))
        other = rollout(policy, [puzzles[-1], puzzles[0]], short, step=0)  # which no function has seen
        other.ask = Queries(policy, other, short, step=0)
        check_memory(s, other, batch, lambda drawn: ask_all(drawn, s, credit_function))
        # Credit 1, so that no response is left out. A run that only evaluates need not have room
        # for gradients.
        credit = batch.mask.float()
        row = update(policy, moves_nothing, batch, credit, s) if s.steps else {}
        add_step_columns(row, 0, batch, instrument(batch, credit, s), time.perf_counter())
    for weight in optimizer.parameters():
        weight.grad = None
    return row, {*batch.log}


def ask_all(batch: TokenBatch, s: Settings, credit_function: Callable) -> dict[str, Tensor]:
    """What each of the run's functions makes of a batch, by its flag."""
    shaped, p = shape_reward(batch, s), batch.logprob  # (B,), (B, T)
    old = p - batch.reward[:, None].float()  # (B, T) so that the ratio is not 1
    batch.advantage = compare(batch, s.advantage, shaped)  # (B,)
    gain = LOSSES[s.loss](p, old, batch.advantage[:, None] * batch.mask, batch.mask, s)[0]
    return {"shaping": shaped, "advantage": batch.advantage, "mitigation": assign_credit(batch, credit_function, s),
            "loss": gain, "loss_norm": LOSS_NORMS[s.loss_norm](batch.mask, s),
            "kl_gradient": KL_GRADIENTS[s.kl_gradient](p, old, p)}


def puzzles_of_run(training: list, s: Settings) -> list:
    """The puzzles that a run trains on, drawn at once: all, unless --steps times --questions are
    fewer."""
    return draw_puzzles(training, replace(s, questions=min(s.steps * s.questions, len(training))), step=1)


def parse_flags(arguments: list[str], usage: str = "") -> Arguments:
    """The settings, the credit function's hyper-parameters, the run to resume, --on_step; exits
    where one is wrong."""
    return parse(arguments, Settings(), CREDIT_FUNCTIONS, CHOICES, usage)


def load_policy(s: Settings, task: ModuleType | None = None, needs: tuple[str, ...] = ()) -> Policy:
    """The model, its tokenizer, the task, and what the credit function needs: heads, and the
    reference model."""
    check_device(s.device)
    s, task = with_model(s), task or load_task(s.task)  # `start` has done both; the laboratory calls this alone
    model, tokenizer = load_trainable(s), Tokenizer(s.model)
    model.real_vocab = tokenizer.size  # the embedding may have more rows than there are tokens; they are never sampled
    missing = lacking(needs, task, HEADS)
    require(not missing, f"--mitigation {s.mitigation} needs {', '.join(missing)}, which is neither a function of the "
            f"task {s.task} nor a head ({', '.join(HEADS)})")
    heads = {name: load_head(name, s.model, model) for name in HEADS if name in needs}
    # deepcopy shares what this memo has, the frozen weights: with LoRA, all but the adapters.
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    compared = s.kl > 0 or s.shaping == "kl" or "reference" in needs
    reference = copy.deepcopy(model, shared).requires_grad_(False) if compared else None
    play = turns.respond if hasattr(task, "reply") else None  # in several turns
    return Policy(model, tokenizer, task, heads, reference, read_weights(s.reward_weights), play=play)


def load_trainable(s: Settings) -> Qwen2:
    """The model as it is sampled from and trained: with its temperature, the dtype of its products,
    its adapters."""
    model = load_model(s.model, s.device, getattr(torch, s.dtype))
    model.temperature, model.checkpoint_activations = s.temperature, s.checkpoint_activations
    arithmetic = s.arithmetic or arithmetic_for(s.dtype, s.device)
    model.arithmetic = getattr(torch, arithmetic) if arithmetic != s.dtype else None  # then .double() changes both
    if s.lora_rank:
        add_adapters(model, s.lora_rank, s.lora_alpha, seed_of("adapters", s.seed))
    if s.adapter:
        load_adapters(model, s.adapter, s.lora_rank, s.lora_alpha, s.model)
    return model


def save_policy(policy: Policy, s: Settings, folder: Path) -> None:
    """Write the model, with its adapters merged into it, the adapters themselves, and the heads."""
    save_model(merged(policy.model), folder)
    write_end_tokens(folder, policy.tokenizer.end_tokens)
    if s.lora_rank:
        save_adapters(policy.model, folder / "adapter", s.model)
    for name, head in policy.heads.items():
        save_head(name, head, folder / "heads")  # loaders may read all weights that lie beside the model's
