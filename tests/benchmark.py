"""Speed as ratios, measured side by side: our sampler and update against transformers, and what log and methods cost.

These machines are shared and noisy, so what is compared runs in turn, A B A B, and medians are reported.

Run it:  python -m tests.benchmark        (about four minutes on two cores; needs tests/requirements.txt)
"""

import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Callable

import torch
from transformers import AutoModelForCausalLM

import grpo
from critic import Critic
from countdown_task import Codec, generate_problems
from mitigations import MITIGATIONS, none
from qwen2_model import generate, left_pad, load_model
from train import BUNDLED, Settings, train_step

QUESTIONS, ANSWERS, TOKENS, REPEATS = 8, 8, 64, 9


def interleave(**work: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each function, all of them run in turn REPEATS times after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(REPEATS + 1):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def benchmark_sampler(ours, theirs, prompts: list[list[int]]) -> None:
    """The same number of tokens from the same weights: 64 responses of exactly 64 tokens."""
    uniforms = grpo.draw_uniforms(0, 0, QUESTIONS, ANSWERS, TOKENS)
    tokens, pad = left_pad(prompts, torch.device("cpu"))
    tokens, attention = (
        tokens.repeat_interleave(ANSWERS, 0),
        (torch.arange(tokens.shape[1]) >= pad[:, None]).long().repeat_interleave(ANSWERS, 0),
    )
    options = dict(do_sample=True, top_k=0, min_new_tokens=TOKENS, max_new_tokens=TOKENS, pad_token_id=0)
    seconds = interleave(
        ours=lambda: generate(ours, prompts, uniforms, []),
        theirs=lambda: theirs.generate(tokens, attention_mask=attention, **options),
    )
    count = QUESTIONS * ANSWERS * TOKENS
    print(
        f"sampler: {count / seconds['ours']:,.0f} tokens/s, {seconds['theirs'] / seconds['ours']:.2f} times transformers' generate"
    )


def benchmark_update(ours, theirs, batch, prompts: list[list[int]]) -> None:
    """One forward and backward of the policy gradient over a step's responses, ours in micro-batches, theirs in one."""
    credit, optimizer = none(batch), torch.optim.AdamW(ours.parameters(), 0.0)
    tokens, pad = left_pad([prompts[g] for g in batch.group], torch.device("cpu"))
    rows, P = torch.cat((tokens, batch.tokens), 1), tokens.shape[1]
    attention = (torch.arange(rows.shape[1]) >= pad[:, None]).long()

    def plain() -> None:
        theirs.zero_grad()
        logits = theirs(rows, attention_mask=attention).logits[:, P - 1 : -1]
        logprob = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.tokens.flatten(), reduction="none"
        ).view(credit.shape)
        (-(logprob * credit * batch.mask).sum() / batch.mask.sum()).backward()

    seconds = interleave(
        ours=lambda: grpo.update(ours, optimizer, prompts, batch, credit, max_new_tokens=120), theirs=plain
    )
    count = batch.mask.sum().item()
    print(
        f"update: {count / seconds['ours']:,.0f} tokens/s, {seconds['theirs'] / seconds['ours']:.2f} times plain code on transformers' model"
    )


def benchmark_log(model, codec: Codec) -> None:
    """What the credit log costs of a step with the default settings, and its bytes a token."""
    s, problems = Settings(), generate_problems(Settings().questions, "train")
    optimizer, critic = torch.optim.AdamW(model.parameters(), 0.0), Critic(model.config.hidden_size)
    batch, credit, _ = train_step(model, optimizer, codec, problems, s, {}, 1, None, critic)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step-000001.npz"
        seconds = interleave(
            step=lambda: train_step(model, optimizer, codec, problems, s, {}, 1, None, critic),
            log=lambda: grpo.write_credit_log(file, 1, batch, credit),
        )
        size = file.stat().st_size / batch.mask.sum().item()
    print(
        f"credit log: {seconds['log'] / seconds['step']:.2%} of a step of {seconds['step']:.2f} s, {size:.1f} bytes a token on disk"
    )


def benchmark_methods(model, codec: Codec) -> None:
    """What each credit function takes, the critic's learning included, against the step of `none` that it comes on top of."""
    s, problems, reference = Settings(), generate_problems(Settings().questions, "train"), copy.deepcopy(model)
    optimizer, critic = torch.optim.AdamW(model.parameters(), 0.0), Critic(model.config.hidden_size)
    seconds: dict[str, list[float]] = {name: [] for name in ("step", *MITIGATIONS)}
    for repeat in range(REPEATS + 1):
        for name in seconds:
            if name == "step":
                seconds[name].append(train_step(model, optimizer, codec, problems, s, {}, 1, None, critic)[2]["seconds"])
                continue
            uniforms = grpo.draw_uniforms(0, 1, s.questions, s.answers, s.max_new_tokens)  # the same responses each time
            batch = grpo.rollout(model, codec, problems, uniforms, reference=reference, critic=critic)
            start = time.perf_counter()
            with torch.no_grad():
                MITIGATIONS[name](batch)
            critic.learn(batch.reward)
            seconds[name].append(time.perf_counter() - start)
    step, *methods = (statistics.median(values[1:]) for values in seconds.values())
    print(f"credit, in percent of a step of {step:.2f} s with `none`: ", end="")
    print(", ".join(f"{name} {took / step:.1%}" for name, took in zip(MITIGATIONS, methods)))


def main() -> None:
    """All four, on the bundled model."""
    codec, ours = Codec(BUNDLED), load_model(BUNDLED)
    ours.real_vocab = codec.size
    theirs = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    problems = generate_problems(QUESTIONS, "train")
    prompts = [codec.prompt(p) for p in problems]
    benchmark_sampler(ours, theirs, prompts)
    benchmark_update(
        ours, theirs, grpo.rollout(ours, codec, problems, grpo.draw_uniforms(0, 1, QUESTIONS, ANSWERS, 120)), prompts
    )
    benchmark_log(ours, codec)
    benchmark_methods(ours, codec)


if __name__ == "__main__":
    main()
