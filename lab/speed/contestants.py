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
from torch.nn.utils.rnn import pad_sequence

import countdown_task
from grpo import update
from plumbing.launch import BUNDLED
from plumbing.optimizer import Optimizer
from plumbing.processes import first_alone, join, leave
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


def bundled() -> tuple[Policy, list]:
    """The bundled model, and puzzles for it."""
    return load_policy(Settings()), countdown_task.load("train", Settings.questions)


def ours() -> Callable[[dict], int]:
    """Our sampler, or a whole step: sample, grade, and update with a random credit."""
    policy, puzzles = bundled()
    ends, optimizer = policy.tokenizer.end_tokens, Optimizer(policy.model, lr=0.0)

    def run(case: dict) -> int:
        """Do the work of a case; returns how many tokens its responses have."""
        Q, T, policy.tokenizer.end_tokens = case["puzzles"], case["limit"], [] if case["fixed"] else ends
        s = Settings(answers=ANSWERS, seed=case["seed"], max_new_tokens=T)
        if case["work"] == "sampler":
            return int(sample(policy, puzzles[:Q], draw_uniforms(s.seed, 0, Q, ANSWERS, T)).mask.sum())
        batch = rollout(policy, puzzles[:Q], s, step=0)
        batch.ask = Queries(policy, batch, s, 0)
        credit = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(s.seed))  # (B, T)
        update(policy, optimizer, batch, credit, s)
        return int(batch.mask.sum())

    return run


def theirs() -> Callable[[dict], int]:
    """transformers' generate."""
    from transformers import AutoModelForCausalLM
    (policy, puzzles), network = bundled(), AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    stop = policy.tokenizer.end_tokens

    def run(case: dict) -> int:
        """Sample the responses of a case; returns how many tokens that were."""
        torch.manual_seed(case["seed"])
        prompts = [torch.tensor(policy.prompt(p)) for p in puzzles[: case["puzzles"]] for _ in range(ANSWERS)]
        rows, real = (pad_sequence(some, True, padding_side="left")  # (B, P)
                      for some in (prompts, [torch.ones_like(prompt) for prompt in prompts]))
        ends = {"min_new_tokens": case["limit"]} if case["fixed"] else {"eos_token_id": stop}
        sampled = network.generate(rows, attention_mask=real, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                                   repetition_penalty=1.0, max_new_tokens=case["limit"], pad_token_id=0,
                                   **ends)[:, rows.shape[1]:]  # (B, T)
        is_end = torch.isin(sampled, torch.tensor(stop)) & (not case["fixed"])  # (B, T)
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
    policy, puzzles = bundled()
    texts = [policy.tokenizer.decode(policy.prompt(puzzle))[0] for puzzle in puzzles[:PUZZLES]]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    model.generation_config.eos_token_id = policy.tokenizer.end_tokens
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
