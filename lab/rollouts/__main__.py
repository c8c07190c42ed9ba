"""Other programs' rollouts as a run folder that analyze.py reads: which tokens did *your* trainer pay?

    python -m lab.rollouts rollouts.jsonl --model Qwen2.5-0.5B-Instruct --out runs/theirs
    python analyze.py runs/theirs

Reads plain jsonl, TRL's completions and verl's rollout dumps: files, or folders of them (docs/trl.md). Log p, entropy
and logit gradient of each token come from one reading by --model; so they are those of the policy that sampled only if
that is --model, or a trainer's output folder with the checkpoints of its steps. The advantage is the file's, or ours.
Credit is any function that needs no trained head.
"""
import math
import sys
from collections import Counter, namedtuple
from dataclasses import asdict, dataclass, replace
from itertools import groupby, takewhile
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Iterable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo import ADVANTAGES, compare
from lab.rollouts.rows import Rollout, RowReader, checkpoints, find_files, in_groups, read_rollouts, with_rewards
from lora import add_adapters, load_adapters, merged
from methods import MITIGATIONS
from plumbing import run_folder
from plumbing.files import read_json
from plumbing.flags import check_device, check_range, methods_help, new_parser, parse_with
from plumbing.launch import arithmetic_for
from plumbing.metrics import step_columns, write_credit_log
from plumbing.progress import fail, follow, one_sentence
from plumbing.registry import required
from qwen2_model import Qwen2, load_model
from queries import Queries
from rollout import Policy, TokenBatch, token_batch
from sampler import Part, Samples, describe, part_states
from settings import Settings
from tasks.math_task import calculations
from tasks.text import roles, sentence_starts
from start import CHOICES

RARE = 0.01  # an end token that was only assumed is dropped where it is less probable
ROWS = 64  # states whose logits over the whole vocabulary are computed at once
NOTICED = 0.05  # nats a token: what training and rounding may make of log p
SAID = {  # of what was assumed and of what was left out, by the note that counts it
    "tokens from text": "{tokens from text:,} tokens of {responses from text:,} responses were made from text: each "
                        "could differ from the one sampled, for a text can be cut in several ways",
    "assumed": "an end token was assumed behind {assumed:,} responses, but for {cut off:,} where its p is below "
               f"{RARE}: those count as cut off by the limit",
    "padding": "{padding:,} tokens of padding were cut off",
    "lost": "{lost:,} characters of them are U+FFFD, bytes that were lost",
    "rendered": "{rendered:,} prompts were rendered by the chat template of --model",
    "ChatML": "{ChatML:,} prompts without special tokens were put into ChatML, role by role",
    "as text": "{as text:,} prompts were tokenized as they stand",
    "single": "no group or uid occurs twice in a step, so each names a response: equal prompts are a group",
    "several prompts": "{several prompts:,} groups have several prompts: the responses to each count as a group",
    "cut": "{cut:,} prompts were asked several times: each {size} of their responses are a group"} | {
    reason: f"{{{reason}:,}} rollouts were left out: {why}" for reason, why in {
        "repeated": "they repeat a step or a file, as TRL does with num_iterations above 1",
        "evaluation": "they are of an evaluation, or TRL's of a step that an evaluation partly replaced",
        "other size": "their groups are not of {size}, the most frequent size",
        "no checkpoint": "there is no checkpoint before their step; save the start model as checkpoint-0"}.items()}


@dataclass(frozen=True)
class Options:
    """Every flag but the credit function's own: its default and its meaning."""

    model: str = ""  # the folder of the model that sampled, or a trainer's with checkpoint-N: before step N + 1
    out: str = "runs/theirs"  # the run folder, which must not exist
    rewards: str = ""  # columns whose sum is the reward, each NAME or NAME=WEIGHT
    mitigation: str = "none"  # the credit function, see the end of --help
    advantage: str = "theirs"  # that of the file, or one of ours, which compares rewards within a group
    normalize: str = "response"  # rescale a method's weights to mean 1 in each response, in the step, or not (none)
    temperature: float = 1.0  # at which they were sampled
    micro_batch: int = 16  # responses in one forward pass
    device: str = "cpu"  # any torch device that has float64
    dtype: str = "float32"  # of the model


Prompt = namedtuple("Prompt", "tokens text")  # stands for a puzzle: the tokens that its responses follow


class Reader(Policy):
    """A policy whose prompts are those of the file."""

    def prompt(self, puzzle: Prompt) -> list[int]:
        """The tokens of a prompt."""
        return puzzle.tokens


def no_grader(*_: Any) -> dict:
    """Stands for the task's grade, which samples continuations would need."""
    raise ValueError("this credit function samples continuations, and rollouts from a file have no grader: train with "
                     "a task, see docs/extend.md")


# What a task is to rollouts: what a text says by itself, but nothing that must be known of a puzzle.
TASK = SimpleNamespace(roles=roles, sentence_starts=sentence_starts, calculations=calculations, grade=no_grader,
                       show=lambda prompt: " ".join(prompt.text.split())[-200:])
GRADED = SimpleNamespace(**vars(TASK) | {"grade": lambda *_: {"reward": 0.0, "answer": 0.0, "format": 0.0}})


def facts(model: Qwen2, part: Part) -> Tensor:
    """Log-prob, entropy, logit gradient, as in Samples, and the variance of log p of a token drawn there: (n, 4) of the
    tokens of some responses."""
    found = []
    for state, token in zip(part_states(model, part).split(ROWS), part.tokens.split(ROWS)):
        log_probs = model.logits(state).log_softmax(-1)  # (ROWS, V)
        square = torch.linalg.vecdot(log_probs.exp(), log_probs.square())  # (ROWS,) the mean of log p squared
        known = describe(log_probs, log_probs.exp(), token[:, None])  # (3, ROWS)
        found.append(torch.cat((known, (square - known[1] ** 2)[None])).T)
    return torch.cat(found)


def read_step(rollouts: list[Rollout], policy: Reader, s: Settings, step: int) -> tuple[TokenBatch, Tensor]:
    """The batch of one step, and log p, entropy and variance of log p of its n tokens (3, n). rollouts: in groups of
    equal size, side by side; they lose an end token that was assumed and is RARE."""
    device = policy.model.output_weight.device
    pad = lambda rows: pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    tokens = pad([rollout.tokens for rollout in rollouts])  # (B, T)
    mask = pad([[True] * len(rollout.tokens) for rollout in rollouts])  # (B, T)
    last = mask.sum(1, keepdim=True) - 1  # (B, 1)
    prompts = tuple(Prompt(r.prompt, policy.tokenizer.decode(r.prompt)[0]) for r in rollouts[:: s.answers])
    samples = Samples(tokens, mask, *torch.zeros(3, *mask.shape, device=device), mask[:, 0], ({},) * len(rollouts))
    graded = policy._replace(task=GRADED)
    asked = Queries(policy, token_batch(graded, prompts, samples, s, step), s, step)
    read = asked.read(facts, policy.model)  # (B, T, 4)
    assumed = torch.tensor([rollout.end_assumed for rollout in rollouts], device=device)  # (B,)
    drop = assumed[:, None] & (last > 0) & (read[..., 0].gather(1, last) < math.log(RARE))  # (B, 1)
    mask = mask.scatter(1, last, ~drop)  # what the limit cut off had no end token
    tokens, read = tokens * mask, read.masked_fill(~mask[..., None], 0)
    ended = torch.isin(tokens.gather(1, last), torch.tensor(policy.tokenizer.end_tokens, device=device))  # (B, 1)
    samples = Samples(tokens, mask, *read[..., :3].unbind(-1), (ended & ~drop)[:, 0], samples.before)
    batch = token_batch(graded, prompts, samples, s, step)  # whose zeros are replaced by the file's rewards:
    reward = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64, device=device)  # (B,)
    success = torch.tensor([float(rollout.success) for rollout in rollouts], device=device)  # (B,)
    batch = replace(batch, task=TASK, reward=reward, success=success, format=torch.full_like(reward, torch.nan))
    batch.ask = Queries(policy._replace(task=TASK), batch, s, step)
    theirs = [rollout.advantage for rollout in rollouts]
    batch.advantage = torch.tensor(theirs, device=device) if s.advantage == "theirs" else compare(batch, s.advantage)
    return batch, read[mask][:, [0, 1, 3]].T.double()


def verdict(logprob: Tensor, entropy: Tensor, variance: Tensor) -> str:
    """Whether the model wrote n tokens: then log p of each has this variance, and minus the entropy as mean; (n,)."""
    gap, error = (logprob + entropy).mean().item(), variance.sum().clamp(min=0).sqrt().item() / len(variance)
    allowed = NOTICED + 4 * error
    said = (f"log p plus entropy has a mean of {gap:.3f} nats; of tokens that this model sampled it is within "
            f"{allowed:.3f} of 0 ({NOTICED} and four standard errors), ")
    if gap < -allowed:
        return said + "so this model did NOT write these tokens: another model, template, temperature, or text cut anew"
    if gap > allowed:
        return said + "so they are too probable to be sampled: greedily, with top_p, or at a lower --temperature?"
    return said + ("so it may have written them" if 2 * error < NOTICED else "but these are too few tokens to tell")


def load_weights(folder: Path, options: Options | Settings) -> Qwen2:
    """The model of a folder, or of an adapter's base and the adapter, merged."""
    adapter = read_json(folder / "adapter_config.json", missing={})
    base = adapter.get("base_model_name_or_path", folder)
    model = load_model(base, options.device, getattr(torch, options.dtype))
    if adapter:
        add_adapters(model, adapter["r"], adapter["lora_alpha"], 0)
        load_adapters(model, str(folder), adapter["r"], adapter["lora_alpha"], base)
        model = merged(model)
    model.arithmetic = getattr(torch, arithmetic_for(options.dtype, options.device))
    model.temperature = options.temperature  # real_vocab stays that of the weights, as in other trainers
    return model.requires_grad_(False)


def check_options(options: Options, hyper_parameters: dict) -> None:
    """ValueError where the credit function needs what a file of rollouts doesn't have, and for other wrong flags."""
    if Path(options.out).exists():
        raise ValueError(f"{options.out} exists: remove it, or choose another --out")
    check_range(options, ("micro_batch",), lowest=1)
    check_range(options, ("temperature",), lowest=1e-6)
    check_device(options.device)
    if missing := [need for need in required(options.mitigation, hyper_parameters) if not hasattr(TASK, need)]:
        raise ValueError(f"--mitigation {options.mitigation} needs {missing[0]}, which rollouts of a file don't have")
    if not options.model:
        raise ValueError("name the folder of the model that sampled: --model FOLDER")


def settings_of(options: Options, files: list[Path], folder: Path, rollouts: list[Rollout], G: int) -> Settings:
    """The settings for config.json; ValueError where they are too large for a log, or nothing can be compared."""
    sizes, length = Counter(rollout.step for rollout in rollouts), max(len(rollout.tokens) for rollout in rollouts)
    if max(length, *sizes.values()) > 2**16:
        raise ValueError("a step may have 65,536 responses, and a response as many tokens")
    if G == 1 and options.advantage != "theirs":
        raise ValueError("no two rollouts of a step answer the same prompt: there is nothing to compare a reward with")
    given = {name: value for name, value in asdict(options).items() if name not in ("rewards", "model")}
    return Settings(**given, model=str(folder), data=str(files[0]), task="rollouts", steps=len(sizes), answers=G,
                    max_new_tokens=length)


def checkpoint_of_steps(steps: Iterable[int], model: str) -> dict[int, Path]:
    """For each step the folder of the model that sampled it: --model, or its newest checkpoint before the step. Without
    those steps that have none; ValueError where no step has one."""
    folders = checkpoints(Path(model)) or {-math.inf: Path(model)}
    taken = {step: folders[max(n for n in folders if n < step)] for step in steps if step > min(folders)}
    if not taken:
        raise ValueError(f"{model} has no checkpoint before step {max(steps)}: save the start model as checkpoint-0")
    return taken


def give_credit(rollouts: list[Rollout], folders: dict[int, Path], policy: Reader, s: Settings,
                hyper_parameters: dict) -> Tensor:
    """Write the run folder, step by step. Log p, entropy and variance of log p of all its tokens: (3, n)."""
    run, known, folder = Path(s.out), [], Path(s.model)
    steps = {step: [*found] for step, found in groupby(rollouts, key=lambda rollout: rollout.step)}
    for step, (their_step, found) in enumerate(follow("reading steps", steps.items()), 1):
        began = perf_counter()
        if folder != folders[their_step]:
            folder = folders[their_step]
            policy = policy._replace(model=load_weights(folder, s))
        batch, read = read_step(found, policy, s, step)
        known.append(read)
        credit = MITIGATIONS[s.mitigation](batch, **hyper_parameters)  # (B, T)
        if step == 1:  # not before, since the credit function may have refused
            run_folder.start_run(run, asdict(s), hyper_parameters, {}, ["their_step", "log_p_plus_entropy"])
            run_folder.append_row(run, {"step": 0})
        checksum = write_credit_log(run / "credit" / f"step-{step:06d}.npz", step, batch, credit)
        run_folder.append_row(run, step_columns(step, batch, began) | {
            "credit_checksum": checksum, "their_step": their_step, "log_p_plus_entropy": read[:2].sum(0).mean().item()})
        run_folder.write_samples(run, step, batch)
    return torch.cat(known, dim=1)


def convert(files: list[Path], options: Options, hyper_parameters: dict) -> None:
    """Read the rollouts, give credit, write the run folder, and say what was done."""
    check_options(options, hyper_parameters)
    folder = next(iter(checkpoints(Path(options.model)).values()), Path(options.model))
    model = load_weights(folder, options)
    read = RowReader(folder, model.config.max_position_embeddings)
    rollouts, notes = read_rollouts(files, read)
    if options.advantage == "theirs" and rollouts[0].advantage is None:
        options = replace(options, advantage="grpo")
    rollouts, G = in_groups(rollouts, options.advantage != "theirs", notes)
    folders = checkpoint_of_steps(sorted({rollout.step for rollout in rollouts}), options.model)
    notes["no checkpoint"] = sum(rollout.step not in folders for rollout in rollouts)
    rollouts, rewarded = with_rewards([r for r in rollouts if r.step in folders], G, options.rewards)
    s = settings_of(options, files, folder, rollouts, G)
    known = give_credit(rollouts, folders, Reader(model, read.tokenizer, TASK), s, hyper_parameters)
    notes = sum((rollout.notes for rollout in rollouts), notes)
    notes["cut off"] = sum(len(rollout.tokens) for rollout in rollouts) - known.shape[1]
    taken = ", ".join(f"{step} by {taken.name}" for step, taken in folders.items())
    said = [f"read {', '.join(map(str, files[:3]))}" + f" and {len(files) - 3} more" * (len(files) > 3),
            f"{len(rollouts):,} responses, {G} to a prompt, in {s.steps} steps; advantage: "
            f"{'ours, ' * (s.advantage != 'theirs')}{s.advantage}", rewarded,
            *[f"each step was read by the newest checkpoint before it: {taken}"] * (folder != Path(options.model)),
            *(sentence.format_map(notes) for note, sentence in SAID.items() if notes[note]), verdict(*known)]
    text = "\n".join(said) + "\n"
    (Path(s.out) / "rollouts.txt").write_text(text, encoding="utf-8")
    print(f"{text}wrote {s.out}; read it with: python analyze.py {s.out}")


@one_sentence()
def main() -> None:
    """Turn files of rollouts into a run folder."""
    words = list(takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    parser = new_parser(usage="python -m lab.rollouts FILE ... --model FOLDER [--flag value ...]", description=__doc__,
                        epilog=methods_help(MITIGATIONS))
    choices = CHOICES | {"advantage": ("theirs", *ADVANTAGES)}
    flags = sys.argv[1 + len(words) :]
    if "--rewards" in flags:  # takes several words
        names = list(takewhile(lambda word: not word.startswith("-"), flags[(at := flags.index("--rewards") + 1) :]))
        flags[at : at + len(names)] = [" ".join(names)]
    found = parse_with(parser, flags, Options(), MITIGATIONS, choices)
    if not words:
        fail("name the files of rollouts first, such as: python -m lab.rollouts rollouts.jsonl --model FOLDER")
    with torch.no_grad():
        convert(find_files([Path(word) for word in words]), found.settings, found.hyper_parameters)


if __name__ == "__main__":
    main()
