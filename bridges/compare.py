"""Does a credit function learn more than TRL's own credit, on your model? Trains both by TRL, with seeds, and compares.

    python -m bridges.compare --model Qwen2.5-1.5B-Instruct --credit none entropy_ratio --seeds 0 1 2 \
        --task math --data train.parquet --eval_data test.parquet --lora_rank 16

Tasks, data files and graders are those of train.py; docs/running.md says where GSM8K's own split is. Each credit is
trained with each seed; stopped, the same command resumes. It writes rows.csv, tables.md and leads.png: success on
held-out puzzles at the end, and on the training responses on average, each minus the first credit's.
"""
import csv
import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

from bridges import own_modules
from bridges.trl import CreditTrainer

with own_modules():
    from plumbing.files import replace_file, require
    from plumbing.flags import new_parser
    from plumbing.report import Table, new_figure, pm, t_estimate
    from plumbing.task_file import load_puzzles, load_task
    from plumbing.terminal import one_sentence
    from plumbing.tokenizer import Tokenizer
    from rollout import Policy

FLAGS = {  # default and meaning
    "task": ("countdown", "of train.py, in one turn"), "data": ("", "a file of puzzles; empty: the task's own"),
    "eval_data": ("", "a file of held-out puzzles"), "eval_problems": (256, "held-out puzzles"),
    "steps": (100, "of training"), "questions": (12, "puzzles a step"), "responses": (8, "to each"),
    "max_new_tokens": (256, "a longer response is cut off"), "lr": (1e-5, "learning rate, the same for all"),
    "lora_rank": (0, "of adapters; 0: all weights"), "micro_batch": (8, "responses whose gradient is computed at once"),
    "advantage": ("theirs", "TRL's, or a name of train.py's --advantage"), "out": ("runs/compare", "folder")}
SAVE = 10  # steps between checkpoints


def rows_of(puzzles: list, policy: Policy) -> Dataset:
    """Puzzles as TRL has them: the text of each one's prompt, and its number."""
    prompts = [policy.tokenizer.decode(policy.prompt(puzzle))[0] for puzzle in puzzles]
    return Dataset.from_list([{"prompt": prompt, "n": n, "heldout": False} for n, prompt in enumerate(prompts)])


def tokenizer_of(folder: str, policy: Policy, puzzle: Any) -> Any:
    """The tokenizer of transformers that reads a puzzle's prompt as train.py does: AutoTokenizer takes another one for
    some folders. ValueError where none does."""
    expected = policy.prompt(puzzle)
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        found = kind.from_pretrained(folder)
        if getattr(found.backend_tokenizer.model, "dropout", None):
            found.backend_tokenizer.model.dropout = None  # off, as in train.py: else a text has other tokens each time
        if found(policy.tokenizer.decode(expected)[0])["input_ids"] == expected:
            return found
    raise ValueError(f"transformers reads a prompt as other tokens than train.py, with the tokenizer of {folder}")


def grader(part: str, policy: Policy, training: list, heldout: list) -> Any:
    """A reward function: a part of what the task's grade says."""
    def graded(completions: list, n: list, heldout: list, **_: Any) -> list[float]:
        asked = [(puzzles_held if held else training)[i] for i, held in zip(n, heldout)]
        return [float(policy.task.grade(text, puzzle)[part]) for text, puzzle in zip(completions, asked)]
    puzzles_held, graded.__name__ = heldout, part
    return graded


def make(args: Any, credit: str, seed: int, folder: Path) -> CreditTrainer:
    """A trainer of one run."""
    task, gpu = load_task(args.task), torch.cuda.is_available()
    require(not hasattr(task, "reply"), f"the task {args.task} has several turns: this trains tasks in one")
    policy = Policy(None, Tokenizer(args.model), task)
    training, heldout = load_puzzles(task, args.eval_problems, args.data, args.eval_data)
    sizes = dict(per_device_train_batch_size=args.micro_batch, num_generations=args.responses,
                 gradient_accumulation_steps=max(1, args.questions * args.responses // args.micro_batch))
    config = GRPOConfig(
        str(folder), max_steps=args.steps, learning_rate=args.lr, max_completion_length=args.max_new_tokens, seed=seed,
        reward_weights=[*policy.parts.values()], logging_steps=1, save_steps=SAVE, save_total_limit=1, report_to=[],
        use_cpu=not gpu, bf16=gpu, use_vllm=gpu and importlib.util.find_spec("vllm") is not None, disable_tqdm=True,
        vllm_mode="colocate", per_device_eval_batch_size=args.micro_batch, num_generations_eval=1, **sizes)
    held = rows_of(heldout, policy).remove_columns("heldout").add_column("heldout", [True] * len(heldout))
    adapters = {"peft_config": LoraConfig(r=args.lora_rank, target_modules="all-linear")} if args.lora_rank else {}
    return CreditTrainer(args.model, [grader(part, policy, training, heldout) for part in policy.parts], args=config,
                         processing_class=tokenizer_of(args.model, policy, training[0]),
                         train_dataset=rows_of(training, policy), eval_dataset=held, credit=credit,
                         advantage=args.advantage, success="answer", **adapters)


def trained(args: Any, credit: str, seed: int, folder: Path) -> dict[str, Any]:
    """The row of a run, trained or resumed."""
    began, trainer = time.monotonic(), make(args, credit, seed, folder)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    seen = [row["rewards/answer/mean"] for row in trainer.state.log_history if "rewards/answer/mean" in row]
    end = trainer.evaluate()["eval_rewards/answer/mean"]
    return {"credit": credit, "seed": seed, "end": f"{end:.6f}", "average": f"{np.mean(seen):.6f}", "steps": args.steps,
            "training": " ".join(f"{x:.4g}" for x in seen), "seconds": f"{time.monotonic() - began:.0f}"}


def read(file: Path) -> list[dict[str, str]]:
    """The rows so far."""
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []


def write(rows: list[dict], part: Path) -> None:
    """rows.csv."""
    with part.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def report(rows: list[dict], out: Path) -> str:
    """tables.md and leads.png: what each credit reached, and that minus the first one's."""
    credits = [*dict.fromkeys(row["credit"] for row in rows)]
    of = lambda name, credit: 100 * np.array([float(row[name]) for row in rows if row["credit"] == credit])
    said = lambda e: pm(e.value, e.high - e.value, 1)
    cells, (axes,) = [], (drawn := new_figure(1, 3))[1]
    for i, name in enumerate(("end", "average")):
        leads = [t_estimate(of(name, credit), of(name, credits[0])) for credit in credits]
        cells += [[said(t_estimate(of(name, credit))) for credit in credits], ["", *map(said, leads[1:])]]
        value, low, high, _ = np.array(leads[1:] or [leads[0]]).T
        axes.errorbar(value, np.arange(len(value)) + 0.2 * i, xerr=(value - low, high - value), fmt="o", label=name)
    axes.set(yticks=range(len(credits[1:] or credits)), yticklabels=credits[1:] or credits,
             xlabel=f"points of success above {credits[0]}, 95%", ylim=(-0.6, len(credits[1:] or credits) - 0.2))
    axes.axvline(0, color="black", linewidth=1)
    axes.legend()
    drawn[0].savefig(out / "leads.png")
    table = Table("Credit compared", "Success in percent, and differences in points, ± half of a 95% interval over seeds "
                  "(Welch's): on held-out puzzles at the end, and on the training responses on average.",
                  ["credit", "seeds", "end", f"end - {credits[0]}", "average", f"average - {credits[0]}"],
                  [[credit, f"{len(of('end', credit))}", *column] for credit, *column in zip(credits, *cells)])
    (out / "tables.md").write_text(str(table), encoding="utf-8")
    return str(table)


@one_sentence("stopped; the same command resumes from here")
def main() -> None:
    """Train what has no row, and compare."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", required=True, help="the folder of the model")
    parser.add_argument("--credit", nargs="+", default=["none", "entropy_ratio"], help="credit functions by name")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    for name, (default, meaning) in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{meaning} (default {default or 'empty'})")
    args = parser.parse_args()
    out, runs = Path(args.out), [(credit, seed) for seed in args.seeds for credit in args.credit]
    out.mkdir(parents=True, exist_ok=True)
    for credit, seed in runs:
        rows, folder = read(out / "rows.csv"), out / f"{credit}-seed{seed}"
        if any((row["credit"], int(row["seed"])) == (credit, seed) for row in rows):
            continue
        print(f"{len(rows)} of {len(runs)} runs are done; now {folder}", flush=True)
        rows.append(trained(args, credit, seed, folder))
        replace_file(out / "rows.csv", lambda part: write(rows, part))
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{report(read(out / 'rows.csv'), out)}\nwrote {out}")


if __name__ == "__main__":
    main()
