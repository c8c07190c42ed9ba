"""TRL's GRPOTrainer, recording its rollouts in rollouts-0.jsonl of its output_dir, a file for each process.

A copy of this file works without the rest. Runs with `tools` are not for it: their results would pass for sampled
tokens. It was written for trl==1.16.0, and reads one of its private methods.
"""
import json
from pathlib import Path
from typing import Any

from trl import GRPOTrainer


class RolloutTrainer(GRPOTrainer):
    """A trainer that writes what it samples: a row for each response, as lab/rollouts reads it."""

    mode = "w"  # a new file for each run; a run resumed from a checkpoint appends

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        """TRL's batch of B responses, unchanged, after its rows were written; those of an evaluation are not."""
        batch, process = super()._generate_and_score_completions(inputs), self.accelerator
        kept = batch["completion_mask"].amax(1)  # (B,) 0 where mask_truncated_completions leaves a response out
        mode, self.mode = "a" if self.state.global_step else self.mode, "a"
        with Path(self.args.output_dir, f"rollouts-{process.process_index}.jsonl").open(mode) as file:
            for i in range(len(kept) if self.model.training else 0):
                j = i - len(kept) * (process.num_processes - process.process_index)  # logs have those of all processes
                own = {name: self._logs["rewards"][name][j] for name in self.reward_func_names}
                own = {name: x if x == x else None for name, x in own.items()}  # NaN where a function returned none
                weighted = zip(self.reward_weights.tolist(), own.values())
                row = {"step": self.state.global_step + 1, "reward": sum(w * x for w, x in weighted if x is not None),
                       "rewards": own,
                       "prompt_ids": batch["prompt_ids"][i][batch["prompt_mask"][i] > 0].tolist(),
                       "completion_ids": batch["completion_ids"][i][batch["completion_mask"][i] >= kept[i]].tolist(),
                       "advantage": (kept[i] * batch["advantages"][i]).item()}
                print(json.dumps(row), file=file)
        return batch
