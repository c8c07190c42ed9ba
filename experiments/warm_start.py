"""The supervised warm start: makes models/countdown-tiny, the bundled model, from nothing.

A base model that knows nothing can't be taught by reward alone, and a real one can't be bundled. So a tiny Qwen2
learns to imitate written searches: try an expression step by step, say whether it hits, try again, answer.

     Maybe 5 - 3 = 2, 4 * 2 = 9. That is not 8. How about 5 - 3 = 2, 4 * 2 = 8. That works!</think>
    <answer>4 * (5 - 3)</answer><|im_end|>

By construction the opening words are filler (uncertain, without consequence), operands and operators are the
decisions, and results, verdicts, tags and the copied answer follow from what stands before them.

Most attempts are random. Some are a known solution: often in the first part of the schedule, where the model learns
to find them, rarely in the last, where it learns to search at random. It ends up knowing more than it shows, which
is what reinforcement has to work with.

Run it:  python -m experiments.warm_start        (about 10 minutes on two cores)
"""
import argparse
import functools
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from countdown_task import (ANSWER, END_ANSWER, END_THINK, PLAIN, TAGS, Codec, Problem, Step, combine, expression,
                            generate_problems, reward, solutions, split, universe)
from qwen2_model import Qwen2, generate, read_config, save_model, take

OPENINGS = ("Maybe", "How about", "Let me try", "What about", "Perhaps", "I could try", "Let us see", "Next")
LARGEST = 400  # no attempt goes beyond: the product of two numbers, and one token each
CONFIG = {
    "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "use_sliding_window": False,
}


def random_attempt(rng: np.random.Generator, numbers: tuple[int, ...]) -> list[Step]:
    """Combine the numbers at random, two at a time, by whole-number steps up to LARGEST."""
    values, steps = list(numbers), []
    while len(values) > 1:
        i, j = rng.choice(len(values), 2, replace=False)
        options = [s for s in combine(values[i], values[j], whole=True) if 0 < s.result <= LARGEST]
        steps.append(options[rng.integers(len(options))])
        values = [v for k, v in enumerate(values) if k not in (i, j)] + [steps[-1].result]
    return steps


@functools.lru_cache(maxsize=None)
def known_solutions(numbers: tuple[int, ...], target: int) -> list[tuple[Step, ...]]:
    """All whole-number solutions, computed once per puzzle."""
    return [s for s in solutions(Problem(numbers, target), whole=True) if all(0 < step.result for step in s)] or \
        solutions(Problem(numbers, target), whole=True)


def demonstration(rng: np.random.Generator, problem: Problem, known: float, attempts: int) -> str:
    """A response: up to `attempts` attempts, each a known solution with probability `known`, and the answer."""
    text = ""
    for _ in range(attempts):
        if rng.random() < known:
            options = known_solutions(tuple(sorted(problem.numbers)), problem.target)
            steps = options[rng.integers(len(options))]
        else:
            steps = random_attempt(rng, problem.numbers)
        text += f" {OPENINGS[rng.integers(len(OPENINGS))]} "
        text += ", ".join(f"{a} {operator} {b} = {result}" for a, operator, b, result in steps)
        if steps[-1].result == problem.target:
            text += ". That works!"
            break
        text += f". That is not {problem.target}."
    return f"{text}{END_THINK}\n{ANSWER}{expression(problem.numbers, steps)}{END_ANSWER}"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE in which a whole number, with the space before it, is one token, and so is each tag."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r" ?[0-9]+| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    numbers = [f"{n} {n}" for n in range(21)] * 1000 + [f" {n}" for n in range(LARGEST + 1)] * 1000
    trainer = trainers.BpeTrainer(vocab_size=1024, min_frequency=200, show_progress=False,
                                  special_tokens=["<|endoftext|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts + numbers, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def batches(codec: Codec, problems: list[Problem], steps: int, size: int, known: tuple[float, float],
            mix: float, attempts: int, seed: int):
    """Yield `steps` batches of tokens (B, S) and response mask (B, S), rows of like length together."""
    rng, pool = np.random.default_rng(seed), []
    for step in range(steps):
        if not pool:
            probability = known[0] if step < mix * steps else known[1]
            rows = []
            for index in rng.integers(len(problems), size=size * 16):
                problem = Problem(tuple(int(n) for n in rng.permutation(problems[index].numbers)), problems[index].target)
                prompt = codec.prompt(problem)
                text = demonstration(rng, problem, probability, attempts)
                rows.append((prompt, codec.tokenizer.encode(text, add_special_tokens=False).ids + [codec.end_tokens[0]]))
            rows.sort(key=lambda row: len(row[0]) + len(row[1]))
            pool = [rows[i : i + size] for i in range(0, len(rows), size)]
            rng.shuffle(pool)
        batch = pool.pop()
        S = max(len(p) + len(r) for p, r in batch)
        yield (torch.tensor([p + r + [0] * (S - len(p) - len(r)) for p, r in batch]),
               torch.tensor([[False] * len(p) + [True] * len(r) + [False] * (S - len(p) - len(r)) for p, r in batch]))


def train(model: Qwen2, data, steps: int, lr: float) -> None:
    """AdamW on the response tokens' cross-entropy, linear warm-up and decay, bf16 autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 50, max(0.01, 1 - i / steps)))
    start = time.time()
    for step, (tokens, mask) in enumerate(data, 1):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(tokens[:, :-1])  # (B, S - 1, D)
        log_probs = model.log_probs(hidden[mask[:, 1:]])  # (N, V)
        loss = -take(log_probs, tokens[:, 1:][mask[:, 1:]]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            left = (time.time() - start) / step * (steps - step)
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {left / 60:.1f} min left", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="models/countdown-tiny")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--known", type=float, nargs=2, default=(0.5, 0.15))
    parser.add_argument("--mix", type=float, default=0.8)
    parser.add_argument("--attempts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    everything = universe()
    problems = [p for p in everything if split(p) == "train"]
    print(f"universe: {len(everything)} puzzles, {len(problems)} of them to train on", flush=True)
    rng, out = np.random.default_rng(args.seed), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    texts = [PLAIN.format(numbers=list(p.numbers), target=p.target) + demonstration(rng, p, 0.3, args.attempts)
             for p in problems[:4000]]
    train_tokenizer(texts).save(str(out / "tokenizer.json"))
    codec = Codec(out)
    torch.manual_seed(args.seed)
    model = Qwen2(read_config(CONFIG | {"vocab_size": codec.size}))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.02 if p.shape[0] == codec.size else p.shape[1] ** -0.5)
    print(f"{codec.size} tokens, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, batches(codec, problems, args.steps, args.batch, args.known, args.mix, args.attempts, args.seed), args.steps, args.lr)
    save_model(model.to(torch.bfloat16), out)
    model = model.float()
    for part in ("train", "heldout", "new_numbers"):
        asked = generate_problems(512, part, seed=1)
        for temperature in (1.0, 0.0):
            t0 = time.time()
            u = torch.rand(512, 160, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            s = generate(model, [codec.prompt(p) for p in asked], u, codec.end_tokens, temperature)
            r = [reward(codec.decode(s.tokens[i][s.mask[i]].tolist())[0], *p) for i, p in enumerate(asked)]
            print(part, temperature, {k: float(np.mean([x[k] for x in r])) for k in r[0]},
                  "length", s.mask.sum(1).float().mean().item(), "entropy", (s.entropy.sum() / s.mask.sum()).item(), f"{time.time() - t0:.1f}s", flush=True)
    for i in range(6):
        print(asked[i], codec.decode(s.tokens[i][s.mask[i]].tolist())[0])


if __name__ == "__main__":
    main()
