"""The supervised warm start: makes the bundled models in models/ from nothing.

Reward alone can't teach a model that knows nothing, and a real model is too large to bundle. So a tiny Qwen2 imitates
the responses that a task's `demonstrate(puzzle, rng, known)` writes: for Countdown searches, see tasks/searches.py.

`known` is the probability that a decision is a right one, and not a random one. The task's KNOWN has two: it is high in
the first part of the schedule, which teaches the model what is right, and low in the last, which teaches it to decide
at random. It ends up knowing more than it shows, and that is what reinforcement learning can bring out.

Run it:  python -m models.warm_start --out models/rebuilt                about 12 minutes on two cores
         python -m models.warm_start --task math --out models/math       the start model of another task
         python -m models.warm_start --task latin --puzzles 20000 --out models/latin
         python -m models.warm_start --task guess --steps 2500 --out models/guess
         python -m models.warm_start --size small --steps 12000 --out models/small    half an hour
         python -m models.warm_start --from weights/smollm2 --until 0.25 --out weights/warm      a pretrained model
         python -m models.warm_start --report models/countdown-tiny      half a minute
"""
import json
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from extras.turns import begun_with, decode_and_grade
from grpo import update
from plumbing.compute import interleave
from plumbing.flags import new_parser
from plumbing.metrics import share_text, standard_error
from plumbing.optimizer import Optimizer
from plumbing.terminal import clock, one_sentence
from plumbing.run_folder import copy_tokenizer
from plumbing.task_file import check_data, load_task
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2, parse_config
from rollout import Policy, TokenBatch, draw_uniforms, respond, token_batch
from sampler import Samples
from settings import Settings
from start import load_policy, save_policy
from tasks.text import TAGS
from train import evaluate

FIRST_PART = 0.8  # share of the schedule
BATCH, LR = 32, 3e-3
CHECK = 20  # steps of a pretrained model between measurements of held-out success
# CISPO's objective, with the ratio 1 of old log-probs from the update's own pass, is credit * log p: with credit 1 it
# is minus the cross-entropy.
TUNING = {"lr": 1e-4, "questions": 8, "responses": 8, "loss": "cispo", "old_logprob": "update", "dtype": "bfloat16",
          "max_new_tokens": 256}
CONFIG = {
    "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "use_sliding_window": False,
}
SIZES = {  # what differs from CONFIG
    "small": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 2,
              "num_key_value_heads": 1},  # 0.2 million parameters
    "tiny": {},  # 0.9, the bundled model
    "large": {"hidden_size": 256, "intermediate_size": 832, "num_attention_heads": 8,
              "num_key_value_heads": 4},  # 3.6
}
PAD, END = "<|endoftext|>", "<|im_end|>"
TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE in which each tag is a token, and each whole number up to the largest in the texts.

    A number with a space before it is another token than one without; so each has a largest of its own.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    pattern = Regex(r" ?[0-9]+| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    numbers = []
    for space in ("", " "):
        found = re.findall(rf"(?<![ 0-9]){space}([0-9]+)", "\n".join(texts))
        numbers += [f"{space}{n}" for n in range(1 + max(map(int, found), default=-1))] * 1000
    trainer = trainers.BpeTrainer(vocab_size=1024, min_frequency=200, show_progress=False, special_tokens=[PAD, END],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts + numbers, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def demonstration(policy: Policy, puzzle: Any, rng: np.random.Generator, known: float) -> list[int]:
    """The tokens of a response that the task writes, the end token of each turn included, without replies."""
    found = policy.task.demonstrate(puzzle, rng, known)
    return [token for turn in ([found] if isinstance(found, str) else found)
            for token in policy.tokenizer.encode(turn) + policy.tokenizer.end_tokens[:1]]


def written(task: ModuleType, puzzle: Any, rng: np.random.Generator, known: float) -> tuple[str, dict[str, float]]:
    """The text of a demonstration, with its replies, and its grades."""
    text, turns = task.demonstrate(puzzle, rng, known), []
    if not isinstance(text, str):
        turns = text
        said = ["".join(task.reply(text[:i], puzzle, False)) for i in range(1, len(text))]
        text = "".join(map("".join, zip(text, [*said, ""])))
    grade = task.grade(text, puzzle, *[turns] * hasattr(task, "reply"))
    return text, Policy(None, None, task).with_reward(grade)


def whole(policy: Policy, puzzle: Any, response: list[int]) -> tuple[list[int], list[bool]]:
    """A text, with its prompt and replies, and which of its tokens are learned from: those of the response."""
    prompt, before = policy.prompt(puzzle), begun_with(policy, puzzle, response[:-1]).before
    own = interleave([True] * len(response), {t: [False] * len(said) for t, said in before.items()})
    return prompt + interleave(response, before), [False] * len(prompt) + own


def batches(policy: Policy, puzzles: list, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` batches of similar lengths: tokens (B, S) padded on the right, and a mask (B, S) of responses."""
    rng, pool = np.random.default_rng(seed), []
    for step in range(steps):
        if not pool:
            known = policy.task.KNOWN[step >= FIRST_PART * steps]
            chosen = [puzzles[i] for i in rng.integers(len(puzzles), size=16 * BATCH)]
            rows = [whole(policy, puzzle, demonstration(policy, puzzle, rng, known)) for puzzle in chosen]
            rows.sort(key=lambda row: len(row[0]))
            pool = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
            rng.shuffle(pool)
        rows = pool.pop()
        yield tuple(pad_sequence([torch.tensor(row[k]) for row in rows], batch_first=True) for k in (0, 1))


def new_model(vocabulary: int, size: str = "tiny") -> Qwen2:
    """A Qwen2 with random matrices of the usual scale: 0.02 for the embedding, 1 / sqrt(inputs) for the others."""
    model = Qwen2(parse_config(CONFIG | SIZES[size] | {"vocab_size": vocabulary}))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
    return model


def imitate(model: Qwen2, data: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    """Minimize the cross-entropy of the response tokens: AdamW, warm-up and linear decay, matrix products in bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 50, max(0.01, 1 - i / steps)))
    start = time.perf_counter()
    for step, (tokens, mask) in enumerate(data, 1):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])[mask[:, 1:]]  # (N, V), N response tokens
        loss = F.cross_entropy(logits.float(), tokens[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            eta = (time.perf_counter() - start) / step * (steps - step)
            print(f"step {step}/{steps}  loss {loss.item():.3f}  ETA {clock(eta)}", flush=True)


def demonstrations(policy: Policy, puzzles: list, rng: np.random.Generator, s: Settings) -> TokenBatch:
    """A batch whose responses the task wrote: s.responses demonstrations of each puzzle, of the schedule's first part."""
    asked = [puzzle for puzzle in puzzles for _ in range(s.responses)]  # B
    responses = [demonstration(policy, puzzle, rng, policy.task.KNOWN[0]) for puzzle in asked]
    before = tuple(begun_with(policy, puzzle, row[:-1]).before for puzzle, row in zip(asked, responses))
    rows = [torch.tensor(row, device=s.device) for row in responses]
    tokens, mask = (pad_sequence(x, batch_first=True) for x in (rows, [row >= 0 for row in rows]))  # (B, T) each
    unknown, ended = torch.zeros(mask.shape, device=s.device), mask.any(1)  # (B, T) what sampling records, (B,)
    samples = Samples(tokens, mask, unknown, unknown, unknown, ended, before)
    prompts = [policy.prompt(puzzle) for puzzle in puzzles]
    return token_batch(policy, puzzles, prompts, decode_and_grade(policy, puzzles, samples), s)


def tune(policy: Policy, puzzles: list, steps: int, until: float, s: Settings) -> None:
    """`imitate` for a pretrained model, by the update of grpo.py with credit 1 on every token of the demonstrations.

    In its own precision, until held-out success, measured every CHECK steps, is as high as `until`.
    """
    optimizer, rng = Optimizer(policy.model, s.lr, (0.9, 0.99), weight_decay=0.01), np.random.default_rng(s.seed)
    heldout, start = policy.task.load("heldout", 256, s.data), time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.set_lr(s.lr * min(1.0, step / 20))
        batch = demonstrations(policy, [puzzles[i] for i in rng.integers(len(puzzles), size=s.questions)], rng, s)
        row = update(policy, optimizer, batch, batch.mask.float(), s)
        line, success = f"step {step}  loss {row['loss']:.3f}  {clock(time.perf_counter() - start)}", 0.0
        if step % CHECK == 0:
            success = float(evaluate(policy, heldout, 1, s).mean())
            line += f"  held-out {success:.1%}"
        print(line, flush=True)
        if success >= until:
            break


def preview(task: ModuleType, puzzles: list) -> None:
    """Print how many demonstrations are right, so that a mistake in the task is seen before minutes of training."""
    rng = np.random.default_rng(0)
    for known in task.KNOWN:
        grades = [written(task, puzzle, rng, known)[1] for puzzle in puzzles[:200]]
        answer, format = (np.mean([grade[name] for grade in grades]) for name in ("answer", "format"))
        print(f"demonstrations, known {known:g}: {answer:.0%} right, format {format:.0%}", flush=True)


def report(folder: Path, task: ModuleType, count: int = 1024) -> None:
    """Print success and format on puzzles seen and on held-out ones, one response each; of 256 the best of 8, too."""
    policy = load_policy(Settings(model=str(folder)), task)
    print("| puzzles | asked | success | pass@8 | format | length |\n|---|--:|--:|--:|--:|--:|")
    for part, name in (("train", "seen"), ("heldout", "held out")):
        puzzles = task.load(part, count)
        uniforms = draw_uniforms(0, "evaluation", len(puzzles), 1, Settings.max_new_tokens)
        graded = respond(policy, puzzles, [policy.prompt(puzzle) for puzzle in puzzles], uniforms)
        success, format = (np.array([grade[name] for grade in graded.grades]) for name in ("answer", "format"))
        best = evaluate(policy, puzzles[:256], 8, Settings()).max(1)
        length = graded.samples.mask.sum(1).float().mean()
        print(f"| {name} | {len(puzzles):,} | {share_text(success.mean(), standard_error(success), '.1%')} "
              f"| {share_text(best.mean(), standard_error(best), '.1%')} | {format.mean():.1%} | {length:.1f} |",
              flush=True)


def build(out: Path, task: ModuleType, count: int, steps: int, seed: int, size: str) -> None:
    """Train a tokenizer on demonstrations of `count` puzzles, then a model, and write both to a new model folder."""
    puzzles, rng = list(task.load("train", count)), np.random.default_rng(seed)
    preview(task, puzzles)
    texts = ["".join(task.prompt(p, False)) + written(task, p, rng, task.KNOWN[1])[0] for p in puzzles[:4000]]
    out.mkdir(parents=True)
    train_tokenizer(texts).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG) + "\n")
    tokenizer = Tokenizer(out)
    torch.manual_seed(seed)
    model = new_model(tokenizer.size, size)
    print(f"{tokenizer.size} tokens, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    imitate(model, batches(Policy(model, tokenizer, task), puzzles, steps, seed), steps)
    # In bfloat16 it has half the size; train.py loads it in float32.
    save_policy(Policy(model.bfloat16(), tokenizer, task), Settings(), out)


def build_from(source: Path, out: Path, task: ModuleType, count: int, steps: int, until: float, **flags) -> None:
    """Tune a pretrained model on demonstrations, and write it to a new folder. flags: further Settings."""
    s = Settings(model=str(source), **flags, **TUNING)
    check_data(s.data)
    policy, puzzles = load_policy(s, task), task.load("train", count if not s.data else None, s.data)
    preview(task, puzzles)
    copy_tokenizer(source, out)
    tune(policy, puzzles, steps, until, s)
    save_policy(policy, s, out)


@one_sentence()
def main() -> None:
    """Build a model and report on it, or only report on an existing one."""
    parser = new_parser(description="Make a model like the bundled ones.")
    parser.add_argument("--task", default="countdown", help="a name or a path, as of train.py (default countdown)")
    parser.add_argument("--out", type=Path, default="models/rebuilt", help="new model folder (default models/rebuilt)")
    parser.add_argument("--steps", type=int, default=5000, help=f"batches of {BATCH} demonstrations (default 5000)")
    parser.add_argument("--puzzles", type=int, default=10_000, help="to demonstrate, again and again (default 10000)")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the model (default tiny)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations (default 0)")
    parser.add_argument("--report", type=Path, help="only report on the model in this folder")
    parser.add_argument("--from", type=Path, dest="source", help="a pretrained model folder to begin with")
    parser.add_argument("--until", type=float, default=0.25, help="with --from: success to reach (default 0.25)")
    parser.add_argument("--data", default="", help="with --from: a file of puzzles; empty: generated ones")
    parser.add_argument("--device", default="cpu", help="with --from: any torch device (default cpu)")
    parser.add_argument("--lora_rank", type=int, default=0, help="with --from: of adapters; 0: none (default 0)")
    parser.add_argument("--lora_alpha", type=float, default=32.0, help="with --from: see train.py (default 32)")
    args = parser.parse_args()
    task = load_task(args.task)
    if not args.report:
        if min(args.steps, args.puzzles) < 1:
            raise ValueError("--steps and --puzzles must be at least 1")
        if not hasattr(task, "demonstrate") or not hasattr(task, "KNOWN"):
            raise ValueError(f"the task {args.task} has no demonstrate or no KNOWN, which say what to imitate")
        if args.source:
            return build_from(args.source, args.out, task, args.puzzles, args.steps, args.until, device=args.device,
                              data=args.data, seed=args.seed, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha)
        build(args.out, task, args.puzzles, args.steps, args.seed, args.size)
    report(args.report or args.out, task)


if __name__ == "__main__":
    main()
