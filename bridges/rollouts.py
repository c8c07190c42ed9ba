"""Other programs' rollouts as a run folder that analyze.py reads: which tokens did *your* trainer pay?

    python -m bridges.rollouts out/rollouts-*.jsonl --model Qwen2.5-0.5B-Instruct --out runs/theirs
    python analyze.py runs/theirs

Reads rows of tokens, which bridges/recorder.py writes (docs/trl.md). Log p, entropy and logit gradient of each token
come from one reading by --model; so they are those of the policy that sampled only if that is --model, or a trainer's
output folder with the checkpoints of its steps. The advantage is the file's, or ours. Credit is any function that needs
no trained head.
"""
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Iterable

import torch
from torch import Tensor

from bridges import own_modules
from bridges.foreign import TASK, ForeignBatch, assign_credit, find_credit, identity, label, layout
from bridges.rows import read_rollouts

with own_modules():
    from grpo import ADVANTAGES, instrument
    from methods.registry import CREDIT_FUNCTIONS
    from methods.queries import Queries
    from plumbing import run_folder
    from plumbing.compute import in_parts
    from plumbing.files import check_fields, read_json, require
    from plumbing.flags import check_range, functions_help, new_parser, parse_with
    from plumbing.metrics import add_step_columns, write_credit_log
    from plumbing.terminal import fail, follow, one_sentence
    from qwen2_model import Cache, Qwen2
    from rollout import Policy
    from sampler import Piece, measure, read_responses, states_of
    from settings import Settings
    from start import CHOICES, load_policy

ROWS = 64  # states whose logits over the whole vocabulary are computed at once
SAVE = "save the start model as checkpoint-0, without save_total_limit, which deletes it"
NOTICED = 0.05  # nats a token: what training and rounding may make of log p


@dataclass(frozen=True)
class Options:
    """Every flag but the credit function's own: its default and its meaning."""

    model: str = ""  # the folder of the model that sampled, or a trainer's with checkpoint-N: before step N + 1
    out: str = "runs/theirs"  # the run folder, which must not exist
    mitigation: str = "none"  # the credit function, see the end of --help
    advantage: str = "theirs"  # that of the file, or one of ours, which compares rewards within a group
    normalize: str = "response"  # rescale a method's weights to mean 1 in each response, in the step, or not (none)
    temperature: float = 1.0  # at which they were sampled
    every: int = 1  # read every n-th of the steps, from the first one on
    micro_batch: int = 16  # responses in one forward pass
    device: str = "cpu"  # any torch device that has float64
    dtype: str = "float32"  # of the model


def in_groups(rollouts: list) -> tuple[list, int, list[str]]:
    """Rollouts with a reward, those of a group side by side, in ascending steps; the usual size G of a group; and what a
    reader must know. A group has one step, name and prompt."""
    groups, scored = {}, [r for r in rollouts if r.reward == r.reward]
    require(scored, "no rollout has a reward")
    for r in scored:
        groups.setdefault((r.step, r.group, tuple(r.prompt_ids)), []).append(r)
    sizes = Counter(map(len, groups.values()))
    G = max(sizes, key=lambda n: (n * sizes[n], n))
    notes = {"were left out: they have no reward": len(rollouts) - len(scored),
             "get no credit: nothing else answers their prompt": sizes[1] * (G > 1),
             f"are in groups that are not of {G}, as most are": sum(n * sizes[n] for n in sizes if n not in (1, G))}
    found = [rollout for rows in groups.values() for rollout in rows]
    return sorted(found, key=lambda rollout: rollout.step), G, [
        f"{count:,} rollouts {what}" for what, count in notes.items() if count]


def measured_by(model: Qwen2, inputs: Tensor, cache: Cache, piece: Piece) -> Tensor:
    """Log-prob, entropy, logit gradient, as in Samples, and the variance of log p of a token drawn there: (n, 4) of the
    tokens of some responses."""
    def of_some(states: Tensor, tokens: Tensor) -> Tensor:
        log_probs = model.logits(states).log_softmax(-1)  # (ROWS, V)
        square = torch.linalg.vecdot(log_probs.exp(), log_probs.square())  # (ROWS,) the mean of log p squared
        known = measure(log_probs, log_probs.exp(), tokens[:, None])  # (ROWS, 3)
        return torch.cat((known, (square - known[:, 1] ** 2)[:, None]), dim=1)
    return in_parts(of_some, states_of(model, inputs, cache, piece), piece.text[piece.sampled], row_size=1, at_once=ROWS)


def read_step(rollouts: list, parts: Iterable[str], middle: float, policy: Policy, s: Settings,
              step: int) -> tuple[ForeignBatch, Tensor]:
    """The batch of one step, and log p, entropy and variance of log p of its n tokens (3, n). rollouts: those of a
    group side by side, with these parts of the reward, one above the middle of which counts as success."""
    tokenizer, device = policy.tokenizer, policy.model.output_weight.device
    column = lambda values: torch.tensor([*values], dtype=torch.float64, device=device)  # (B,)
    own = layout([r.completion_ids for r in rollouts], [r.tool_mask for r in rollouts], device=device)
    task = SimpleNamespace(**vars(TASK) | ({"reply": None} if any(own.before) else {}))
    task.show = lambda rollout: " ".join(tokenizer.decode(rollout.prompt_ids)[0].split())[-200:]
    grades = {name: column(r.rewards.get(name, math.nan) for r in rollouts) for name in parts}
    grades["reward"] = column(r.reward for r in rollouts)
    batch = ForeignBatch(own, lambda _: {"tokenizer": tokenizer}, grades, grades["reward"] > middle,
                         [(r.group, *r.prompt_ids) for r in rollouts], puzzles=rollouts,
                         prompts=[r.prompt_ids for r in rollouts], task=task, normalize=s.normalize,
                         ended=column(r.completion_ids[-1] in tokenizer.end_tokens for r in rollouts).bool(),
                         asks=lambda part, rows: Queries(policy, part, s, step))
    with torch.no_grad():
        rows = torch.arange(len(rollouts), device=device)  # (B,)
        found = read_responses(policy.model, batch, rows, measured_by, at_once=s.micro_batch)  # (B, T, 4)
    batch.logprob, batch.entropy, batch.logit_grad, _ = found.unbind(-1)
    batch.ask = Queries(policy, batch, s, step)
    if s.advantage == "theirs":
        batch.advantage = column(r.advantage for r in rollouts).float()
    return batch, found[own.mask][:, [0, 1, 3]].T.double()


def verdict(logprob: Tensor, entropy: Tensor, variance: Tensor) -> str:
    """Whether the model wrote n tokens: then log p of each has this variance, and minus the entropy as mean; (n,)."""
    gap, error = (logprob + entropy).mean().item(), variance.sum().clamp(min=0).sqrt().item() / len(variance)
    allowed = NOTICED + 4 * error
    so = ("so this model did NOT write these tokens: another model, prompt or temperature" if gap < -allowed else
          "so they are too probable to be sampled: greedily, with top_p, or at a lower --temperature?" if gap > allowed
          else "so it may have written them" if 2 * error < NOTICED else "but these are too few tokens to tell")
    return (f"log p plus entropy has a mean of {gap:.3f} nats; of tokens that this model sampled it is within "
            f"{allowed:.3f} of 0 ({NOTICED} and four standard errors), {so}")


def weights_of(folder: Path) -> dict:
    """The settings that name a folder's weights: the model, or an adapter's base and the adapter."""
    adapter = read_json(file := folder / "adapter_config.json", missing={})
    if not adapter:
        return {"model": str(folder)}
    check_fields(adapter, {"base_model_name_or_path": str, "r": int, "lora_alpha": float}, file)
    return {"model": adapter["base_model_name_or_path"], "adapter": str(folder), "lora_rank": adapter["r"],
            "lora_alpha": adapter["lora_alpha"]}


def load(folder: Path, options: Options | Settings) -> Policy:
    """The policy of a folder."""
    given = {name: getattr(options, name) for name in ("device", "dtype", "temperature")}
    policy = load_policy(Settings(**given, **weights_of(folder)), TASK)
    policy.model.real_vocab = policy.model.config.vocab_size  # that of the weights, as in other trainers
    return policy


def checkpoints(model: str, runs: set[str]) -> tuple[dict[float, Path], list[str]]:
    """The checkpoints in a trainer's output folder by their steps, in order, but for those that say they are of another
    run than the recorded ones, whose names come second; of a model's folder the folder itself."""
    found = {path.name.removeprefix("checkpoint-"): path for path in Path(model).glob("checkpoint-*")}
    found, others = {int(n): found[n] for n in sorted(filter(str.isdigit, found), key=int)}, []
    for n, path in [*found.items()]:
        state = read_json(path / "trainer_state.json", missing={}).get("stateful_callbacks", {})
        run = state.get("CreditRecord", {}).get("attributes", {}).get("record", {}).get("run")
        if runs and run and run not in runs:
            others.append(found.pop(n).name)
    require(found or not others, f"the checkpoints of {model} are of another run than the rollouts")
    return found or {-math.inf: Path(model)}, others


def upside_down(rollouts: list) -> bool:
    """Whether the higher reward has the lower advantage in every group that has both."""
    groups, signs = {}, set()
    for r in rollouts:
        groups.setdefault((r.step, r.group, tuple(r.prompt_ids)), []).append(r)
    for rows in groups.values():
        low, high = (pick(rows, key=lambda r: r.reward) for pick in (min, max))
        if low.reward != high.reward and low.advantage != high.advantage:
            signs.add(high.advantage > low.advantage)
    return signs == {False}


def check_options(files: list[Path], options: Options) -> None:
    """ValueError for words of the command that can't work."""
    if wrong := [file for file in files if not file.is_file() or files.count(file) > 1]:
        raise ValueError(f"{wrong[0]} is named twice" if wrong[0].is_file() else f"there is no file {wrong[0]}")
    require(not Path(options.out).exists(), f"{options.out} exists: remove it, or choose another --out")
    check_range(options, ("micro_batch", "every"), lowest=1)
    check_range(options, ("temperature",), lowest=1e-6)
    require(options.model, "name the folder of the model that sampled: --model FOLDER")


def settings_of(options: Options, files: list[Path], folder: Path, rollouts: list, G: int) -> Settings:
    """The settings for config.json; ValueError where they are too large for a log, or nothing can be compared."""
    sizes, length = Counter(r.step for r in rollouts), max(len(r.completion_ids) for r in rollouts)
    require(max(length, *sizes.values()) <= 2**16, "a step may have 65,536 responses, and a response as many tokens")
    require(G > 1 or options.advantage == "theirs",
            "most groups have one rollout: there is nothing to compare a reward with")
    given = {name: value for name, value in asdict(options).items() if name not in ("model", "every")}
    return Settings(**given, **weights_of(folder), data=str(files[0]), task="rollouts", steps=len(sizes), responses=G,
                    max_new_tokens=length)


def give_credit(rollouts: list, middle: float, folders: dict[int, Path], policy: Policy, s: Settings,
                hyper_parameters: dict) -> Tensor:
    """Write the run folder, step by step. Log p, entropy and variance of log p of all its tokens: (3, n)."""
    run, known, folder = Path(s.out), [], Path(s.adapter or s.model)
    parts = dict.fromkeys(name for r in rollouts for name in r.rewards)  # some rows may lack some
    steps = {step: [*found] for step, found in groupby(rollouts, key=lambda rollout: rollout.step)}
    told = {"attention", "log-probs with tokens hidden"}
    credit = find_credit(partial(CREDIT_FUNCTIONS[s.mitigation], **hyper_parameters), TASK, told, "a file of rollouts")
    for step, (their_step, found) in enumerate(follow("reading steps", steps.items()), 1):
        began = perf_counter()
        if folder != folders[their_step]:
            folder = folders[their_step]
            policy = load(folder, s)
        batch, read = read_step(found, parts, middle, policy, s, step)
        known.append(read)
        found_credit = assign_credit(batch, credit, step, s.advantage)  # (B, T)
        if step == 1:  # not before, since the credit function may have refused
            run_folder.start_run(run, asdict(s), hyper_parameters, {}, ["their_step", "log_p_plus_entropy", *parts])
            run_folder.append_row(run, {"step": 0})
        measured = instrument(batch, found_credit, s)
        checksum = write_credit_log(run / "credit" / f"step-{step:06d}.npz", step, batch, measured)
        row = {"credit_checksum": checksum, "their_step": their_step,
               "log_p_plus_entropy": read[:2].sum(0).mean().item()}
        add_step_columns(row, step, batch, measured, began)
        run_folder.append_row(run, row)
        run_folder.write_samples(run, step, batch)
    return torch.cat(known, dim=1)


def convert(files: list[Path], options: Options, hyper_parameters: dict) -> None:
    """Read the rollouts, give credit, write the run folder, and say what was done."""
    check_options(files, options)
    first = min(checkpoints(options.model, set())[0].items())[1]
    policy = load(first, options)
    found, told = read_rollouts(files, policy)
    saved, others = checkpoints(options.model, {rollout.run for rollout in found if rollout.run})
    folder = min(saved.items())[1]
    policy = policy if folder == first else load(folder, options)
    if options.advantage == "theirs" and all(r.advantage is None for r in found):
        options = replace(options, advantage="grpo")
    read = sorted({rollout.step for rollout in found})[:: options.every]
    grouped, G, notes = in_groups([r for r in found if r.step in read])
    notes += told + [f"{', '.join(others)} of {options.model} are of another run: not used"] * bool(others)
    if options.advantage == "theirs" and upside_down(grouped):
        notes.append("in every group the higher reward has the LOWER advantage: is the sign of one of them turned round?")
    now = label(identity(partial(CREDIT_FUNCTIONS[options.mitigation], **hyper_parameters)))
    recorded = {r.credit for r in grouped if r.credit} - {now, options.mitigation}
    notes += [f"recorded with credit {', '.join(sorted(recorded))}; read with {now}"] * bool(recorded)
    rollouts = [rollout for rollout in grouped if rollout.step > min(saved)]
    require(rollouts, f"{options.model} has no checkpoint before step {grouped[-1].step}: {SAVE}")
    folders = {r.step: saved[max(n for n in saved if n < r.step)] for r in rollouts}
    early = len(grouped) - len(rollouts)
    middle = (min(r.reward for r in rollouts) + max(r.reward for r in rollouts)) / 2
    s = settings_of(options, files, folder, rollouts, G)
    known = give_credit(rollouts, middle, folders, policy, s, hyper_parameters)
    taken = ", ".join(f"{step} by {taken.name}" for step, taken in folders.items())
    said = [f"read {', '.join(map(str, files))}",
            f"{len(rollouts):,} responses, {G} to a prompt, in {s.steps} steps; advantage: "
            f"{'ours, ' * (s.advantage != 'theirs')}{s.advantage}; credit: {s.mitigation}; a reward above {middle:g} "
            "counts as success",
            *[f"each step was read by the newest checkpoint before it: {taken}"] * (folder != Path(options.model)),
            *notes,
            *[f"{early:,} rollouts were left out: there is no checkpoint before their step; {SAVE}"] * (early > 0),
            verdict(*known)]
    text = "\n".join(said) + "\n"
    (Path(s.out) / "rollouts.txt").write_text(text, encoding="utf-8")
    print(f"{text}wrote {s.out}; read it with: python analyze.py {s.out}")


@one_sentence()
def main() -> None:
    """Turn files of rollouts into a run folder."""
    words = list(takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    parser = new_parser(usage="python -m bridges.rollouts FILE ... --model FOLDER [--flag value ...]",
                        description=__doc__, epilog=functions_help(CREDIT_FUNCTIONS))
    choices = CHOICES | {"advantage": ("theirs", *(name for name in ADVANTAGES if name != "gdpo"))}  # which needs parts
    found = parse_with(parser, sys.argv[1 + len(words) :], Options(), CREDIT_FUNCTIONS, choices)
    if not words:
        fail("name the files of rollouts first, such as: python -m bridges.rollouts rollouts.jsonl --model FOLDER")
    with torch.no_grad():
        convert([Path(word) for word in words], found.settings, found.hyper_parameters)


if __name__ == "__main__":
    main()
