"""What a credit function costs in TRL, beside TRL's own step, and how long its first gradient is beside GRPO's.

Trainers of TRL's and of ours, with the same seed and without an update, take turns with a step: of sampling, rewards,
credit, loss and gradients, in one thread. Needs an idle machine, but for --rounds 0, the gradients and memory alone.

Run it:  python -m bridges.measure --out bridges/tables.md
"""
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import truediv
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bridges import own_modules
from bridges.foreign import FACTS
from bridges.trl import CreditTrainer

with own_modules():
    import countdown_task
    from plumbing.flags import new_parser
    from plumbing.launch import BUNDLED
    from plumbing.progress import follow
    from plumbing.report import Table

CREDITS = ("none", "token_type", "prefix_tree", "tempo", "ktae", "inverse_logprob", "advantage_reweighting",
           "entropy_ratio", "entropy_masking", "optimal_baseline")
TIMED = "none", "prefix_tree", "entropy_ratio", "optimal_baseline"
LARGER = dict(vocab_size=20000, hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6,
              num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)  # 20 million parameters
NOTE = ("Written by `python -m bridges.measure` with TRL 1.16.0: 8 puzzles, 4 responses each, 64 tokens. *Gradient*: "
        "the length of the first one over that of `{first}`, on the bundled model. *Memory*: the most that two steps "
        "of the larger model need, over TRL's own. By parameters, and *twice* with `num_iterations=2`, where TRL reads "
        "the batch itself: processor time of a step in one thread over that of TRL's own, by turns, the median of "
        "{rounds} rounds; and, of the same steps together, over their time without the credit. By how much the two "
        "differ for `{first}`, which does nothing, is noise: these need an idle machine. Four functions stand for all.")


class Watched(CreditTrainer):
    """A CreditTrainer that adds up the time of what it does beside TRL."""

    own = 0.0

    def assign(self, *arguments: Any) -> torch.Tensor:
        """The credit."""
        began = process_time()
        credit = super().assign(*arguments)
        self.own += process_time() - began
        return credit


def prepared(cls: type, large: bool, iterations: int, **options: Any) -> Any:
    """A trainer after its first step, which warms up."""
    puzzles = countdown_task.load("train", 64)
    reward = lambda completions, n, **_: [countdown_task.grade(text, puzzles[i])["format"]
                                          for text, i in zip(completions, n)]
    torch.manual_seed(0)
    model = (Qwen2ForCausalLM(Qwen2Config(**LARGER)) if large else
             Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32))
    rows = [{"prompt": "".join(countdown_task.prompt(puzzle, False)), "n": i} for i, puzzle in enumerate(puzzles)]
    with TemporaryDirectory() as folder:
        config = GRPOConfig(folder, max_steps=1, num_iterations=iterations, num_generations=4, seed=3,
                            per_device_train_batch_size=32, max_completion_length=64, use_cpu=True, bf16=False,
                            learning_rate=1e-5, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True)
        trainer = cls(model, reward, config, Dataset.from_list(rows),
                      processing_class=PreTrainedTokenizerFast.from_pretrained(BUNDLED), **options)
        trainer.train()
    trainer.rows, trainer._step = [row for row in rows[:8] for _ in range(4)], 0
    return trainer


def seconds(trainer: Any, seed: int) -> float:
    """The processor time of TRL's steps with one batch, from sampling it to its gradients."""
    torch.manual_seed(seed)
    began = process_time()
    for _ in range(trainer.num_iterations):
        trainer.training_step(trainer.model, trainer.rows, None)
        trainer.model.zero_grad()
    return process_time() - began


def ratios(large: bool, iterations: int, rounds: int) -> dict[str, str]:
    """The time of steps with a credit function over TRL's own: by turns, the median, and within the same steps."""
    plain = prepared(GRPOTrainer, large, iterations)
    trainers = {credit: prepared(Watched, large, iterations, credit=credit) for credit in TIMED}
    rows = []  # of times, TRL's first
    for trainer in trainers.values():
        trainer.own = 0.0  # without its first step
    for seed in follow("rounds", range(rounds)):
        rows.append([seconds(trainer, seed) for trainer in (plain, *trainers.values())])
    theirs, *ours = zip(*rows)
    beside = {credit: median(map(truediv, found, theirs)) for credit, found in zip(trainers, ours)}
    within = {credit: sum(found) / (sum(found) - trainers[credit].own) for credit, found in zip(trainers, ours)}
    return {credit: f"{beside[credit]:.2f}, {within[credit]:.3f}" for credit in trainers}


def high_water() -> int:
    """The most memory that this process has had so far, in kB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def memory(cls: type, **options: Any) -> int:
    """What two steps of the larger model add to it."""
    torch.set_num_threads(1)
    before = high_water()
    seconds(prepared(cls, True, 1, **options), 0)
    return high_water() - before


def main() -> None:
    """Measure, and write the table."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bridges/tables.md"))
    parser.add_argument("--rounds", type=int, default=5)
    found, rows = parser.parse_args(), []
    torch.set_num_threads(1)
    times = {f"{'20M' if large else '0.9M'}{', twice' * (k - 1)}": ratios(large, k, found.rounds)
             for large in (True, False) for k in (1, 2) if found.rounds}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as apart:  # a new process for each
        plain = apart.submit(memory, GRPOTrainer).result()
        needed = {credit: apart.submit(memory, CreditTrainer, credit=credit).result() / plain for credit in TIMED}
    first = None  # the gradient's length with CREDITS[0], plain GRPO
    for credit in follow("gradients", CREDITS):
        trainer = prepared(CreditTrainer, False, 1, credit=credit)
        norm = trainer.state.log_history[0]["grad_norm"]
        first = first or norm
        seen = [fact for fact in FACTS if fact in vars(trainer.batch)]
        rows.append([f"`{credit}`", "one" if seen else "none", f"{norm / first:.2f}",
                     f"{needed[credit]:.2f}" if credit in TIMED else "-",
                     *(column.get(credit, "-") for column in times.values())])
    head = ["credit", "further pass", "gradient", "memory", *times]
    note = NOTE.format(first=CREDITS[0], rounds=found.rounds)
    found.out.write_text(str(Table("Credit in TRL", note, head, rows)), encoding="utf-8")
    print(f"wrote {found.out}")


if __name__ == "__main__":
    main()
