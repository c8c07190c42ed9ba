"""What a credit function costs in TRL, beside TRL's own step, and how long its first gradient is beside GRPO's.

A trainer of TRL and a CreditTrainer with the same seed take turns; a round gives the ratio of their processor time,
without the first step, which warms up. Needs an idle machine, but for --rounds 0, the gradients alone.

Run it:  python -m bridges.measure --out bridges/tables.md
"""
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
LARGER = dict(vocab_size=20000, hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6,
              num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)  # 20 million parameters
NOTE = ("Written by `python -m bridges.measure` with TRL 1.16.0: 8 puzzles, 4 responses each, 64 tokens. Length of the "
        "first gradient over that of `none`, on the bundled model. In {rounds} rounds, processor time of a step over "
        "TRL's own, the median and the largest: by parameters, and *twice* with `num_iterations=2`, where TRL reads "
        "the batch itself. (The times need an idle machine; with `--rounds 0` there are none.)")


def run(cls: type, large: bool, iterations: int, steps: int, **options: Any) -> tuple[Any, float]:
    """A trainer after some steps, and the processor time of all but those of the first batch."""
    puzzles, seconds = countdown_task.load("train", 64), []
    reward = lambda completions, n, **_: [countdown_task.grade(text, puzzles[i])["format"]
                                          for text, i in zip(completions, n)]

    class Timed(cls):
        def training_step(self, *arguments: Any) -> torch.Tensor:
            """TRL's, which also samples."""
            began = process_time()
            loss = super().training_step(*arguments)
            seconds.append(process_time() - began)
            return loss

    torch.manual_seed(0)
    model = (Qwen2ForCausalLM(Qwen2Config(**LARGER)) if large else
             Qwen2ForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32))
    with TemporaryDirectory() as folder:
        config = GRPOConfig(folder, max_steps=steps * iterations, num_iterations=iterations, num_generations=4, seed=3,
                            per_device_train_batch_size=32, max_completion_length=64, use_cpu=True, bf16=False,
                            learning_rate=1e-5, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True)
        rows = [{"prompt": "".join(countdown_task.prompt(puzzle, False)), "n": i} for i, puzzle in enumerate(puzzles)]
        trainer = Timed(model, reward, config, Dataset.from_list(rows),
                        processing_class=PreTrainedTokenizerFast.from_pretrained(BUNDLED), **options)
        trainer.train()
    return trainer, sum(seconds[iterations:])


def ratios(credit: str, large: bool, iterations: int, rounds: int) -> str:
    """The time of steps with a credit function over TRL's own: the median of the rounds, and the largest."""
    found = [run(CreditTrainer, large, iterations, 4, credit=credit)[1] / run(GRPOTrainer, large, iterations, 4)[1]
             for _ in range(rounds)]
    return f"{median(found):.2f}, {max(found):.2f}" if found else ""


def main() -> None:
    """Measure, and write the table."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bridges/tables.md"))
    parser.add_argument("--rounds", type=int, default=5)
    found, rows, plain = parser.parse_args(), [], None
    for credit in follow("measuring", CREDITS):
        trainer, _ = run(CreditTrainer, False, 1, 1, credit=credit)
        norm = trainer.state.log_history[0]["grad_norm"]
        plain = plain or norm  # that of `none`, which comes first
        seen = [fact for fact in FACTS if fact in vars(trainer.batch)]
        rows.append([f"`{credit}`", "one" if seen else "none", f"{norm / plain:.2f}",
                     *(ratios(credit, large, k, found.rounds) for large in (False, True) for k in (1, 2))])
    head = ["credit", "further pass", "gradient", "0.9M", "0.9M, twice", "20M", "20M, twice"]
    n = len(head) if found.rounds else 3  # columns
    table = Table("Credit in TRL", NOTE.format(rounds=found.rounds), head[:n], [row[:n] for row in rows])
    found.out.write_text(str(table), encoding="utf-8")
    print(f"wrote {found.out}")


if __name__ == "__main__":
    main()
