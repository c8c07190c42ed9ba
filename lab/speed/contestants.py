"""The contestants of benchmark.py: our sampler and step, transformers and TRL, each in a process.

A contestant reads cases from stdin and answers each with a line on stdout: tokens and seconds. A case has its work, the
number of puzzles, the most tokens a response may have (limit), whether all have exactly as many (fixed), and a seed.
"""
import json
import os
import sys
import tempfile
import time
from typing import Callable

import torch

import countdown_task
from grpo import update
from plumbing.launch import BUNDLED
from plumbing.optimizer import Optimizer
from plumbing.processes import first_alone, join, leave
from plumbing.tokenizer import Tokenizer
from queries import Queries
from rollout import Policy, draw_uniforms, rollout, sample
from settings import Settings
from start import load_policy

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
PUZZLES, ANSWERS = 8, 8  # the responses to each puzzle


def hear() -> dict | None:
    """The next case; None when there are no more."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def answer(tokens: int, start: float) -> None:
    """Say how many tokens were sampled since `start`, and in how many seconds."""
    print(json.dumps((tokens, time.perf_counter() - start)), flush=True)


def asked() -> tuple[Tokenizer, list, list[list[int]]]:
    """The bundled model's tokenizer, its puzzles, and their prompts."""
    policy = Policy(None, Tokenizer(BUNDLED), countdown_task)
    puzzles = countdown_task.load("train", Settings.questions)
    return policy.tokenizer, puzzles, [policy.prompt(puzzle) for puzzle in puzzles]


def ours() -> Callable[[dict], int]:
    """Our sampler, or a whole step: sample, grade, and update with a random credit."""
    policy, (_, puzzles, _) = load_policy(Settings(answers=ANSWERS)), asked()
    tokenizer, ends, optimizer = policy.tokenizer, policy.tokenizer.end_tokens, Optimizer(policy.model, lr=0.0)

    def run(case: dict) -> int:
        """Do the work of a case; returns how many tokens its responses have."""
        Q, T, tokenizer.end_tokens = case["puzzles"], case["limit"], [] if case["fixed"] else ends
        s = Settings(answers=ANSWERS, seed=case["seed"], max_new_tokens=T)
        if case["work"] == "sampler":
            uniforms = draw_uniforms(s.seed, 0, Q, ANSWERS, T)  # (B, T)
            return int(sample(policy, puzzles[:Q], uniforms).mask.sum())
        batch = rollout(policy, puzzles[:Q], s, step=0)
        batch.ask = Queries(policy, batch, s, 0)
        credit = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(s.seed))  # (B, T)
        update(policy, optimizer, batch, credit, s)
        return int(batch.mask.sum())

    return run


def theirs() -> Callable[[dict], int]:
    """transformers' generate."""
    from transformers import AutoModelForCausalLM
    (tokenizer, _, prompts), network = asked(), AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)

    def run(case: dict) -> int:
        """Sample the responses of a case; returns how many tokens that were."""
        torch.manual_seed(case["seed"])
        repeated = [prompt for prompt in prompts[: case["puzzles"]] for _ in range(ANSWERS)]
        P, limit = max(map(len, repeated)), case["limit"]
        rows = torch.tensor([[0] * (P - len(prompt)) + prompt for prompt in repeated])  # (B, P)
        real = torch.tensor([[column >= P - len(prompt) for column in range(P)] for prompt in repeated])  # (B, P)
        ends = {"min_new_tokens": limit} if case["fixed"] else {"eos_token_id": tokenizer.end_tokens}
        sampled = network.generate(rows, attention_mask=real.long(), do_sample=True, top_k=0, top_p=1.0,
                                   temperature=1.0, repetition_penalty=1.0, max_new_tokens=limit, pad_token_id=0,
                                   **ends)[:, P:]  # (B, T)
        is_end = torch.isin(sampled, torch.tensor(tokenizer.end_tokens)) & (not case["fixed"])  # (B, T)
        return int((is_end.cumsum(1) - is_end.long() == 0).sum())  # tokens with no end before them

    return run


def train_with_trl() -> None:
    """TRL's GRPOTrainer, which waits for a case before each step, and answers after it: pip install trl datasets."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    start, tokens, turns = 0.0, 0, TrainerCallback()

    def reward(completion_ids: list[list[int]], **_) -> list[float]:
        nonlocal tokens
        tokens = sum(map(len, completion_ids))
        return [float(i % ANSWERS) for i in range(len(completion_ids))]  # responses differ, so that there is an update

    def begin(*_, **__) -> None:
        nonlocal start
        if hear() is None:
            sys.exit()
        start = time.perf_counter()

    turns.on_step_begin, turns.on_step_end = begin, lambda *_, **__: answer(tokens, start)
    tokenizer, _, prompts = asked()
    texts = [tokenizer.decode(prompt)[0] for prompt in prompts[:PUZZLES]]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.end_tokens
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, per_device_train_batch_size=PUZZLES * ANSWERS, num_generations=ANSWERS, max_steps=10**6,
            max_completion_length=Settings.max_new_tokens, learning_rate=0.0, beta=0.0, gradient_checkpointing=False,
            use_cpu=True, bf16=False, shuffle_dataset=False, disable_tqdm=True, logging_strategy="no",
            save_strategy="no", report_to="none")
        # AutoTokenizer of transformers 5 splits numbers into digits, which this tokenizer.json does not.
        GRPOTrainer(model, reward, config, Dataset.from_dict({"prompt": texts * 100}), callbacks=[turns],
                    processing_class=PreTrainedTokenizerFast.from_pretrained(BUNDLED)).train()


def work(kind: str) -> None:
    """What a contestant's process does until there are no more cases."""
    if kind == "trl":
        return train_with_trl()
    join("cpu")
    run = {"ours": ours, "transformers": theirs}[kind]()
    while case := first_alone(hear):
        start = time.perf_counter()
        answer(run(case), start)
    leave()


if __name__ == "__main__":
    work(*sys.argv[1:])
