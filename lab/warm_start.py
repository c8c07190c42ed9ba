"""The supervised warm start: makes the bundled models in models/ from nothing.

Reward alone can't teach a model that knows nothing, and a real model is too large to bundle. So a tiny Qwen2 imitates
written searches: try an expression step by step, say whether it hits the target, try again or give up, answer.

     Maybe 5 - 3 = 2, 4 + 2 = 6. That is not 8. How about 5 - 3 = 2, 4 * 2 = 8. That works!</think>
    <answer>4 * (5 - 3)</answer><|im_end|>

By construction, opening words are filler: uncertain, but without consequence. Operands, operators and giving up are
decisions. Results, verdicts, tags and the copied answer follow from the tokens before them.

Most attempts are random, the others a known solution. Known solutions are frequent in the first part of the schedule,
which teaches the model to find them, and rare in the last, which teaches it to search at random. It ends up knowing
more than it shows, and that is what reinforcement learning can bring out.

Run it:  python -m lab.warm_start --out models/rebuilt                about 12 minutes on two cores
         python -m lab.warm_start --size small --steps 12000 --out models/small    half an hour
         python -m lab.warm_start --report models/countdown-tiny      half a minute
"""
import functools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Iterator

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import countdown_task
from countdown_task import (ANSWER, END_ANSWER, END_THINK, PLAIN, TAGS, Puzzle, expression, generate_puzzles, solutions,
                            split, universe)
from plumbing.flags import new_parser
from plumbing.progress import clock, one_sentence
from plumbing.tokenizer import Tokenizer
from qwen2_model import Qwen2, read_config, save_model
from rollout import EVALUATION, draw_uniforms, generate_and_grade
from tasks.arithmetic import Calculation, combine
from train import Settings, load_policy, standard_error

OPENINGS = ("Maybe", "How about", "Let me try", "What about", "Perhaps", "I could try", "Let us see", "Next")
ATTEMPTS = 6  # at most
GIVE_UP = 0.2  # probability of stopping after a failed attempt, and answering with it
KNOWN_FIRST, KNOWN_LAST = 0.5, 0.15  # probability that an attempt is a known solution
FIRST_PART = 0.8  # share of the schedule
BATCH, LR = 32, 3e-3
LARGEST = 100  # largest result in a random attempt: fewer facts of arithmetic to learn, and each is seen more often
LARGEST_TOKEN = 400  # the largest product of two numbers
CONFIG = {
    "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "use_sliding_window": False,
}
SIZES = {  # what differs from CONFIG
    "small": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 2,
              "num_key_value_heads": 1},  # 0.2 million parameters
    "tiny": {},  # 0.9, the bundled model
    "large": {"hidden_size": 256, "intermediate_size": 832, "num_attention_heads": 8, "num_key_value_heads": 4},  # 3.5
}
PAD, END = "<|endoftext|>", "<|im_end|>"
TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}


def random_attempt(rng: np.random.Generator, numbers: tuple[int, ...]) -> list[Calculation]:
    """Combine two numbers at random until one is left, with whole results up to LARGEST."""
    values, calculations = list(numbers), []
    while len(values) > 1:
        i, j = rng.choice(len(values), 2, replace=False)
        options = [s for s in combine(values[i], values[j], whole=True) if 0 < s.result <= LARGEST]
        calculations.append(options[rng.integers(len(options))])
        values = [v for k, v in enumerate(values) if k not in (i, j)] + [calculations[-1].result]
    return calculations


@functools.lru_cache(maxsize=None)
def known_solutions(numbers: tuple[int, ...], target: int) -> list[tuple[Calculation, ...]]:
    """All whole-number solutions of a puzzle, or only those with results up to LARGEST if there are any."""
    found = solutions(Puzzle(numbers, target), whole=True)
    return [solution for solution in found if max(c.result for c in solution) <= LARGEST] or found


def demonstration(rng: np.random.Generator, puzzle: Puzzle, known: float) -> str:
    """A response: attempts, each a known solution with probability `known`, until a hit or giving up."""
    text = ""
    for _ in range(ATTEMPTS):
        if rng.random() < known:
            options = known_solutions(tuple(sorted(puzzle.numbers)), puzzle.target)
            calculations = options[rng.integers(len(options))]
        else:
            calculations = random_attempt(rng, puzzle.numbers)
        text += f" {OPENINGS[rng.integers(len(OPENINGS))]} "
        text += ", ".join(f"{a} {operator} {b} = {result}" for a, operator, b, result in calculations)
        if calculations[-1].result == puzzle.target:
            text += ". That works!"
            break
        text += f". That is not {puzzle.target}."
        if rng.random() < GIVE_UP:
            break
    return f"{text}{END_THINK}\n{ANSWER}{expression(puzzle.numbers, calculations)}{END_ANSWER}"


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE in which a whole number is one token, with the space before it, and so is each tag."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    pattern = Regex(r" ?[0-9]+| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    numbers = [f"{n} {n}" for n in range(21)] * 1000 + [f" {n}" for n in range(LARGEST_TOKEN + 1)] * 1000
    trainer = trainers.BpeTrainer(vocab_size=1024, min_frequency=200, show_progress=False, special_tokens=[PAD, END],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts + numbers, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def example(rng: np.random.Generator, tokenizer: Tokenizer, puzzle: Puzzle,
            known: float) -> tuple[list[int], list[int]]:
    """Prompt and response tokens of one demonstration, with the puzzle's numbers in random order."""
    puzzle = Puzzle(tuple(int(n) for n in rng.permutation(puzzle.numbers)), puzzle.target)
    response = tokenizer.encode(demonstration(rng, puzzle, known))
    return tokenizer.encode(countdown_task.prompt(puzzle, tokenizer.chat)), response + tokenizer.end_tokens[:1]


def batches(tokenizer: Tokenizer, puzzles: list[Puzzle], steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` batches of similar lengths: tokens (B, S) padded on the right, and a mask (B, S) of responses."""
    rng, pool = np.random.default_rng(seed), []
    for step in range(steps):
        if not pool:
            known = KNOWN_FIRST if step < FIRST_PART * steps else KNOWN_LAST
            rows = [example(rng, tokenizer, puzzles[i], known) for i in rng.integers(len(puzzles), size=16 * BATCH)]
            rows.sort(key=lambda row: len(row[0]) + len(row[1]))
            pool = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
            rng.shuffle(pool)
        rows = pool.pop()
        S = max(len(prompt) + len(response) for prompt, response in rows)
        tokens, mask = torch.zeros(BATCH, S, dtype=torch.long), torch.zeros(BATCH, S, dtype=torch.bool)  # (B, S)
        for i, (prompt, response) in enumerate(rows):
            end = len(prompt) + len(response)
            tokens[i, :end], mask[i, len(prompt) : end] = torch.tensor(prompt + response), True
        yield tokens, mask


def new_model(vocabulary: int, size: str = "tiny") -> Qwen2:
    """A Qwen2 with random matrices of the usual scale: 0.02 for the embedding, 1 / sqrt(inputs) for the others."""
    model = Qwen2(read_config(CONFIG | SIZES[size] | {"vocab_size": vocabulary}))
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


def report(folder: Path, count: int = 1024) -> None:
    """Print success and format on puzzles seen, on held-out puzzles, and on puzzles whose number sets were held out."""
    policy = load_policy(Settings(model=str(folder)))
    sizes = Counter(map(split, universe()))
    parts = {"train": "seen", "heldout": "held out", "new_numbers": "held out with their numbers"}
    print("| puzzles | in the universe | asked | success | format | length |\n|---|--:|--:|--:|--:|--:|")
    for part, name in parts.items():
        puzzles = generate_puzzles(count, part)
        uniforms = draw_uniforms(0, EVALUATION, count, 1, Settings.max_new_tokens)
        samples, grades = generate_and_grade(policy, puzzles, uniforms)
        success, format = (np.array([grade[name] for grade in grades]) for name in ("answer", "format"))
        length = samples.mask.sum(1).float().mean()
        print(f"| {name} | {sizes[part]:,} | {count:,} | {success.mean():.1%} ± {standard_error(success):.1%} "
              f"| {format.mean():.1%} | {length:.1f} |", flush=True)


def build(out: Path, steps: int, seed: int, size: str) -> None:
    """Train a tokenizer on demonstrations, then a model, and write both to a new model folder."""
    puzzles = [p for p in universe() if split(p) == "train"]
    out.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    texts = [PLAIN.format(numbers=list(p.numbers), target=p.target) + demonstration(rng, p, KNOWN_LAST)
             for p in puzzles[:4000]]
    train_tokenizer(texts).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG) + "\n")
    tokenizer = Tokenizer(out)
    torch.manual_seed(seed)
    model = new_model(tokenizer.size, size)
    print(f"{tokenizer.size} tokens, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    imitate(model, batches(tokenizer, puzzles, steps, seed), steps)
    save_model(model.bfloat16(), out)  # half the size; train.py loads it in float32


@one_sentence()
def main() -> None:
    """Build a model and report on it, or only report on an existing one."""
    parser = new_parser(description="Make a model like the bundled one.")
    parser.add_argument("--out", type=Path, default="models/rebuilt", help="new model folder (default models/rebuilt)")
    parser.add_argument("--steps", type=int, default=5000, help=f"batches of {BATCH} demonstrations (default 5000)")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the model (default tiny)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations (default 0)")
    parser.add_argument("--report", type=Path, help="only report on the model in this folder")
    args = parser.parse_args()
    if not args.report:
        if args.out.exists():
            raise ValueError(f"{args.out} exists: remove it, or choose another --out")
        if args.steps < 1:
            raise ValueError("--steps must be at least 1")
        build(args.out, args.steps, args.seed, args.size)
    report(args.report or args.out)


if __name__ == "__main__":
    main()
