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
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Iterable, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo import ADVANTAGES, compare
from lab.rollouts.rows import Rollout, RowReader, by_step, checkpoints, find_files, read_rollouts, with_rewards
from lora import add_adapters, load_adapters, merged
from methods import MITIGATIONS
from plumbing import run_folder
from plumbing.files import read_json
from plumbing.flags import check_device, check_range, methods_help, new_parser, parse_with
from plumbing.metrics import step_columns, write_credit_log
from plumbing.progress import fail, follow, one_sentence
from plumbing.registry import required
from qwen2_model import Qwen2, load_model, scaled
from queries import Queries
from rollout import Policy, token_batch
from sampler import Part, Samples, describe, part_states
from settings import Settings
from tasks.math_task import calculations
from tasks.text import roles, sentence_starts
from train import CHOICES

RARE = 0.01  # an end token that was only assumed is dropped where it is less probable
ROWS = 64  # states whose logits over the whole vocabulary are computed at once
NOTICED = 0.05  # nats a token: what training and rounding may make of log p


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


class Prompt(NamedTuple):
    """What stands for a puzzle: the tokens that its responses follow."""

    tokens: list[int]
    text: str


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
        log_probs = scaled(model.logits(state), model.temperature).log_softmax(-1)  # (ROWS, V)
        square = torch.linalg.vecdot(log_probs.exp(), log_probs.square())  # (ROWS,) the mean of log p squared
        known = describe(log_probs, log_probs.exp(), token[:, None])  # (3, ROWS)
        found.append(torch.cat((known, (square - known[1] ** 2)[None])).T)
    return torch.cat(found)


def read_step(rollouts: list[Rollout], policy: Reader, s: Settings, step: int, middle: float) -> tuple:
    """The batch of one step, and the variance (n,) of log p before each of its n tokens. rollouts: in groups of equal
    size, side by side; they lose an end token that was assumed and is RARE. middle: rewards above it are success."""
    device = policy.model.output_weight.device
    pad = lambda rows: pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    tokens = pad([rollout.tokens for rollout in rollouts])  # (B, T)
    mask = pad([[True] * len(rollout.tokens) for rollout in rollouts])  # (B, T)
    last = mask.sum(1, keepdim=True) - 1  # (B, 1)
    prompts = tuple(Prompt(r.prompt, policy.tokenizer.decode(r.prompt)[0]) for r in rollouts[:: s.answers])
    samples = Samples(tokens, mask, *torch.zeros(3, *mask.shape, device=device), mask[:, 0], ({},) * len(rollouts))
    graded = policy._replace(task=GRADED)
    read = Queries(policy, token_batch(graded, prompts, samples, s, step), s, step).read(facts, policy.model)  # (B, T, 4)
    assumed = torch.tensor([rollout.end_assumed for rollout in rollouts], device=device)  # (B,)
    drop = assumed[:, None] & (last > 0) & (read[..., 0].gather(1, last) < math.log(RARE))  # (B, 1)
    mask = mask.scatter(1, last, ~drop)  # what the limit cut off had no end token
    tokens, read = tokens * mask, read.masked_fill(~mask[..., None], 0)
    ended = torch.isin(tokens.gather(1, last), torch.tensor(policy.tokenizer.end_tokens, device=device))  # (B, 1)
    samples = Samples(tokens, mask, *read[..., :3].unbind(-1), (ended & ~drop)[:, 0], samples.before)
    batch = token_batch(graded, prompts, samples, s, step)  # whose zeros are replaced by the file's rewards:
    reward = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64, device=device)  # (B,)
    batch = replace(batch, task=TASK, reward=reward, success=(reward > middle).float(),
                    format=torch.full_like(reward, torch.nan))
    batch.ask = Queries(policy._replace(task=TASK), batch, s, step)
    theirs = [rollout.advantage for rollout in rollouts]
    batch.advantage = torch.tensor(theirs, device=device) if s.advantage == "theirs" else compare(batch, s.advantage)
    return batch, read[..., 3][mask]


def verdict(logprob: Tensor, entropy: Tensor, variance: Tensor) -> str:
    """Whether the model wrote n tokens: then log p of each has this variance, and as mean minus the entropy; (n,) each.
    """
    gap, error = (logprob + entropy).mean().item(), variance.sum().clamp(min=0).sqrt().item() / len(variance)
    allowed = NOTICED + 4 * error
    said = (f"log p plus entropy has a mean of {gap:.3f} nats; of tokens that this model sampled it is within "
            f"{allowed:.3f} of 0 ({NOTICED} and four standard errors), ")
    if gap < -allowed:
        return said + "so this model did NOT write these tokens: another model, template, temperature, or text cut anew"
    if gap > allowed:
        return said + "so they are too probable to be sampled: greedily, with top_p, or at a lower --temperature?"
    return said + ("so it may have written them" if 2 * error < NOTICED else "but these are too few tokens to tell")


def assumptions(notes: Counter, left_out: Counter, G: int) -> list[str]:
    """What was assumed of the rollouts, how far that could matter, and which were left out."""
    tokens, responses = notes["tokens from text"], notes["responses from text"]
    possible = {
        f"{tokens:,} tokens of {responses:,} responses were made from text: each could differ from the one sampled, "
        "for a text can be cut in several ways": tokens,
        f"an end token was assumed behind {notes['assumed']:,} responses, but for {notes['cut off']:,} where its p is "
        f"below {RARE}: those count as cut off by the limit": notes["assumed"],
        f"{notes['padding']:,} tokens of padding were cut off": notes["padding"],
        f"{notes['lost']:,} characters of them are U+FFFD, bytes that were lost": notes["lost"],
        f"{notes['rendered']:,} prompts were rendered by the chat template of --model": notes["rendered"],
        f"{notes['ChatML']:,} prompts without special tokens were put into ChatML, role by role": notes["ChatML"],
        f"{notes['as text']:,} prompts were tokenized as they stand": notes["as text"],
        "no group or uid occurs twice in a step, so each names a response: equal prompts are a group": notes["single"],
        f"{notes['several prompts']:,} groups have several prompts: the responses to each count as a group":
            notes["several prompts"],
        f"{notes['cut']:,} prompts were asked several times: each {G} of their responses are a group": notes["cut"]}
    why = {"repeated": "they repeat a step or a file, as TRL does with num_iterations above 1",
           "evaluation": "they are of an evaluation, or TRL's of a step that an evaluation partly replaced",
           "other size": f"their groups are not of {G}, the most frequent size",
           "no checkpoint": "there is no checkpoint before their step; save the start model as checkpoint-0"}
    return [said for said, applies in possible.items() if applies] + [
        f"{n:,} rollouts were left out: {why[reason]}" for reason, n in left_out.items() if n]


def load_weights(folder: Path, options: Options) -> Qwen2:
    """The model of a folder, or of an adapter's base and the adapter, merged."""
    adapter = read_json(folder / "adapter_config.json", missing={})
    base = adapter.get("base_model_name_or_path", folder)
    model = load_model(base, options.device, getattr(torch, options.dtype))
    if adapter:
        add_adapters(model, adapter["r"], adapter["lora_alpha"], 0)
        load_adapters(model, str(folder), adapter["r"], adapter["lora_alpha"], base)
        model = merged(model)
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


def settings_of(options: Options, files: list[Path], folder: Path, steps: dict, G: int) -> Settings:
    """The settings for config.json. ValueError where they are too large for a credit log, or nothing can be compared.
    """
    rollouts = [rollout for chosen in steps.values() for rollout in chosen]
    length = max(len(rollout.tokens) for rollout in rollouts)
    if length > 2**16 or max(map(len, steps.values())) > 2**16:
        raise ValueError("a step may have 65,536 responses, and a response as many tokens")
    advantage = "grpo" if options.advantage == "theirs" and rollouts[0].advantage is None else options.advantage
    if G == 1 and advantage != "theirs":
        raise ValueError("no two rollouts of a step answer the same prompt: there is nothing to compare a reward with")
    given = {name: value for name, value in asdict(options).items() if name not in ("advantage", "rewards", "model")}
    return Settings(**given, model=str(folder), advantage=advantage, data=str(files[0]), task="rollouts",
                    steps=len(steps), answers=G, max_new_tokens=length)


def checkpoint_of_steps(steps: Iterable[int], model: str) -> dict[int, Path]:
    """For each step the folder of the model that sampled it: --model, or its newest checkpoint before the step. Without
    those steps that have none; ValueError where no step has one."""
    folders = checkpoints(Path(model)) or {-math.inf: Path(model)}
    taken = {step: folders[max(n for n in folders if n < step)] for step in steps if step > min(folders)}
    if not taken:
        raise ValueError(f"{model} has no checkpoint before step {max(steps)}: save the start model as checkpoint-0")
    return taken


def convert(files: list[Path], options: Options, hyper_parameters: dict) -> None:
    """Read the rollouts, give credit, and write the run folder."""
    check_options(options, hyper_parameters)
    run, folder = Path(options.out), next(iter(checkpoints(Path(options.model)).values()), Path(options.model))
    read = RowReader(folder)
    policy = Reader(load_weights(folder, options), read.tokenizer, TASK)
    rollouts, left_out = read_rollouts(files, read, policy.model.config.max_position_embeddings)
    steps, G, notes = by_step(rollouts, options.advantage != "theirs" or rollouts[0].advantage is None)
    folders = checkpoint_of_steps(steps, options.model)
    left_out["other size"] = notes["other size"]
    left_out["no checkpoint"] = sum(len(rollouts) for step, rollouts in steps.items() if step not in folders)
    steps, said = with_rewards({step: steps[step] for step in folders}, G, options.rewards)
    s = settings_of(options, files, folder, steps, G)
    rewards = [rollout.reward for chosen in steps.values() for rollout in chosen]
    middle, known = (min(rewards) + max(rewards)) / 2, []
    for step, (their_step, chosen) in enumerate(follow("reading steps", steps.items()), 1):
        began = perf_counter()
        if folder != folders[their_step]:
            folder = folders[their_step]
            policy = policy._replace(model=load_weights(folder, options))
        batch, variance = read_step(chosen, policy, s, step, middle)
        credit = MITIGATIONS[s.mitigation](batch, **hyper_parameters)  # (B, T)
        if step == 1:  # not before, since the credit function may have refused
            run_folder.start_run(run, asdict(s), hyper_parameters, {}, ["their_step", "log_p_plus_entropy"])
            run_folder.append_row(run, {"step": 0})
        known.append(torch.stack((batch.logprob[batch.mask], batch.entropy[batch.mask], variance)).double())  # (3, n)
        notes["cut off"] += sum(len(rollout.tokens) for rollout in chosen) - len(variance)
        notes.update(sum((rollout.notes for rollout in chosen), Counter()))
        checksum = write_credit_log(run / "credit" / f"step-{step:06d}.npz", step, batch, credit)
        run_folder.append_row(run, step_columns(step, batch, began) | {
            "credit_checksum": checksum, "their_step": their_step,
            "log_p_plus_entropy": known[-1][:2].sum(0).mean().item()})
        run_folder.write_samples(run, step, batch)
    if str(folder) != options.model:
        said.append("each step was read by the newest checkpoint before it: " + ", ".join(
            f"{step} by {taken.name}" for step, taken in folders.items()))
    compared = "theirs" if s.advantage == "theirs" else f"ours, {s.advantage}"
    said = [f"read {', '.join(map(str, files[:3]))}" + f" and {len(files) - 3} more" * (len(files) > 3),
            f"{len(rewards):,} responses, {G} to a prompt, in {len(steps)} steps; advantage: {compared}; a reward "
            f"above {middle:g} counts as success", *said, *assumptions(notes, left_out, G),
            verdict(*torch.cat(known, dim=1))]
    (run / "rollouts.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    print("\n".join(said) + f"\nwrote {run}; read it with: python analyze.py {run}")


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
