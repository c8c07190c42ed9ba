"""CreditTrainer, and with credit="none" TRL's GRPOTrainer, recording its rollouts in its output_dir: rollouts-0.jsonl
and so on, a file for each process, which bridges/rollouts.py reads.
"""
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from bridges.foreign import label
from bridges.trl import CreditTrainer


class RolloutTrainer(CreditTrainer):
    """A CreditTrainer that writes what it samples, a row for each response."""

    begun = False  # whether this call of `train` has written yet

    def train(self, *arguments: Any, **options: Any) -> Any:
        """TRL's. What was recorded beyond the checkpoint that it begins from, or of another run, is removed first."""
        self.begun = False
        return super().train(*arguments, **options)

    def begin(self, folder: Path) -> None:
        """Keep the rows of the steps that are done, in the files of all processes."""
        self.begun = True
        if self.accelerator.is_main_process:
            for file in folder.glob("rollouts-*.jsonl"):
                rows = [row for row in file.read_text(encoding="utf-8").splitlines()
                        if row.endswith("}") and json.loads(row)["step"] <= self.state.global_step]  # a kill cuts a row
                file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8") if rows else file.unlink()
        self.accelerator.wait_for_everyone()

    def assign(self, *arguments: Any) -> Tensor:
        """The credit (b, C), after the rows were written. A response that TRL masks has the advantage 0 there."""
        credit, batch, step = super().assign(*arguments), self.batch, self.state.global_step
        number = lambda x: x if x == x else None  # None for NaN, where a reward function returned none
        file = Path(self.args.output_dir, f"rollouts-{self.accelerator.process_index}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not self.begun:
            self.begin(file.parent)
        paid = batch.advantage * (batch.ended if self.mask_truncated_completions else 1)  # (B,)
        masks = self.generated[2] or [None] * len(credit)  # b
        with file.open("a", encoding="utf-8") as rows:
            for i, prompt, tokens, mask in zip(self.mine(range(len(paid))), *self.generated[:2], masks):
                row = {"run": self.record["run"], "credit": label(self.record), "step": step + 1,
                       "group": f"{self._step}-{batch.group[i]}", "reward": number(batch.reward[i].item()),
                       "rewards": {name: number(batch.grades[name][i].item()) for name in batch.parts},
                       "prompt_ids": prompt, "completion_ids": tokens, "advantage": paid[i].item()}
                print(json.dumps(row | ({"tool_mask": mask} if mask else {})), file=rows)
        return credit
