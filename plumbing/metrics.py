"""What is measured of a step: the columns of metrics.csv, and those of the credit log.

docs/running.md explains each column.
"""
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plumbing.files import checksum, replace_file
from plumbing.processes import sum_over_processes
from plumbing.progress import clock
from tasks.text import ROLES

COLUMNS = ["step", "reward", "success", "format", "length", "truncated", "entropy", "grad_norm", "step_length",
           "step_cosine", "loss", "clip_fraction", *(f"clip_{role}" for role in ROLES), "ratio_error", "ratio_spread",
           "kl", "zero_variance_groups", "tokens_sampled", "tokens_read", "tokens_updated", "seconds",
           "tokens_per_second", "credit_checksum", "heldout_success", "heldout_stderr", "critic_loss",
           "explained_variance"]  # of metrics.csv
# The columns of credit/step-*.npz.
CREDIT_LOG = {"step": np.int32, "response": np.uint16, "group": np.uint16, "position": np.uint16, "token": np.int32,
              "logprob": np.float32, "entropy": np.float32, "logit_grad": np.float32, "advantage": np.float32,
              "credit": np.float32, "reward": np.float32, "role": np.int8, "in_answer": np.int8}


def share(part: float, whole: float) -> float | None:
    """part / whole, None where whole is 0."""
    return part / whole if whole else None


def step_columns(step: int, batch: Any, began: float) -> dict[str, float]:
    """The columns of metrics.csv that describe a step's responses. began: when the step did."""
    tokens = batch.mask.sum().item()
    seconds = time.perf_counter() - began  # after .item(), which waits for the device
    rewards = batch.reward.view(len(batch.puzzles), -1)  # (Q, G)
    equal = rewards.amax(1) == rewards.amin(1)  # (Q,)
    return {"step": step, "reward": batch.reward.mean().item(), "success": batch.success.mean().item(),
            "format": batch.format.mean().item(), "length": tokens / len(batch.text),
            "truncated": 1 - batch.ended.float().mean().item(), "entropy": batch.entropy[batch.mask].mean().item(),
            "zero_variance_groups": int(equal.sum()), "tokens_sampled": batch.ask.tokens_sampled,
            "tokens_read": batch.ask.tokens_read, "seconds": seconds, "tokens_per_second": tokens / seconds}


def line_of(row: dict, steps: int, seconds_left: float) -> str:
    """A row of metrics.csv as one line of the terminal."""
    return (f"step {row['step']:>4}/{steps}  reward {row['reward']:.3f}  success {row['success']:.3f}  "
            f"format {row['format']:.2f}  length {row['length']:5.1f}  entropy {row['entropy']:.3f}  "
            f"grad {row['grad_norm']:.3f}  {row['tokens_per_second']:6.0f} tok/s  "
            f"ETA {clock(seconds_left)}{heldout_text(row)}")


def heldout_text(row: dict) -> str:
    """Held-out success and half of its 95% interval, where it was measured."""
    if "heldout_success" not in row:
        return ""
    error = row["heldout_stderr"]  # NaN for a single puzzle
    return f"  held-out {row['heldout_success']:.1%}" + ("" if np.isnan(error) else f" ± {1.96 * error:.1%}")


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of independent values; NaN for a single one."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


class UpdateLog:
    """What metrics.csv says of the updates on one batch."""

    def __init__(self, batch: Any):
        self.batch = batch
        self.used = torch.zeros_like(batch.mask)  # (B, T) the tokens that are updated on
        # Of the latest update on each token, (B, T) each:
        self.logprob = batch.logprob.clone()
        self.loss, self.kl = torch.zeros_like(self.logprob), torch.zeros_like(self.logprob)
        self.removed = torch.zeros_like(batch.mask)
        self.prompt_tokens = 0  # read beside those of the responses, in the current update
        self.sums: list[dict[str, float]] = []  # an entry per update
        self.optimizer_columns: list[dict[str, float]] = []  # what the optimizer says of each update

    def add(self, rows: Tensor, logprob: Tensor, loss: Tensor, removed: Tensor, kl: Tensor, prompt_tokens: int) -> None:
        """Keep what belongs to the tokens of some rows (b,), (b, t) each, and the prompts' tokens read for them."""
        t = logprob.shape[1]
        self.used[rows] = self.batch.mask[rows]
        self.logprob[rows, :t] = logprob.detach()
        self.loss[rows, :t], self.kl[rows, :t] = loss.detach(), kl.detach()
        self.removed[rows, :t] = removed
        self.prompt_tokens += prompt_tokens

    def end(self, optimizer_columns: dict[str, float]) -> None:
        """Sum up an update over the tokens that were used, in all and by role. optimizer_columns: of Optimizer.step."""
        log_ratio = (self.logprob - self.batch.logprob)[self.used]  # (N,)
        sums = {"loss": self.loss.sum(), "abs_log_ratio": log_ratio.abs().sum(),
                "squared_log_ratio": log_ratio.square().sum(), "kl": self.kl[self.used].sum(),
                "prompts": self.prompt_tokens}
        for i, role in enumerate(ROLES):
            of_role = self.used & (self.batch.role == i)  # (B, T)
            sums |= {f"tokens_{role}": of_role.sum(), f"removed_{role}": (of_role & self.removed).sum()}
        self.sums.append({name: float(value) for name, value in sums.items()})
        self.optimizer_columns.append(optimizer_columns)
        self.prompt_tokens = 0

    def metrics(self) -> dict[str, float | None]:
        """Columns of metrics.csv, over all processes; shares and means over tokens are None where none was updated.

        They are means over the updates, with three exceptions. tokens_updated is a sum. ratio_error is the mean |log
        ratio| of the first update: there the model has not changed since it sampled, so anything but rounding means
        that sampler and update disagree. ratio_spread is the root mean square of the log ratio at the last update, None
        if that is the first.
        """
        names = list(self.sums[0])  # n
        table = torch.tensor([[row[name] for name in names] for row in self.sums], dtype=torch.float64)  # (updates, n)
        sum_over_processes([table])
        first, mean, last = (dict(zip(names, row.tolist())) for row in (table[0], table.mean(0), table[-1]))
        N = sum(mean[f"tokens_{role}"] for role in ROLES)  # the same in every update
        removed = sum(mean[f"removed_{role}"] for role in ROLES)
        by_role = {f"clip_{role}": share(mean[f"removed_{role}"], mean[f"tokens_{role}"]) for role in ROLES}
        several = N and len(self.sums) > 1
        return {"loss": mean["loss"], "clip_fraction": share(removed, N), **by_role,
                "ratio_error": share(first["abs_log_ratio"], N),
                "ratio_spread": share(last["squared_log_ratio"], N) ** 0.5 if several else None,
                "kl": share(mean["kl"], N),
                "tokens_updated": round(len(self.sums) * (N + mean["prompts"])),
                # A run's first update has no step_cosine.
                **{name: float(np.mean([columns[name] for columns in self.optimizer_columns if name in columns]))
                   for name in self.optimizer_columns[-1]}}


def write_credit_log(file: Path, step: int, batch: Any, credit: Tensor) -> int:
    """Write the columns of a step to an .npz file, one row of 40 bytes per token; returns the file's CRC-32."""
    replace_file(file, lambda part: np.savez(part, **log_columns(step, batch, credit)))
    return checksum(file)


def log_columns(step: int, batch: Any, credit: Tensor) -> dict[str, np.ndarray]:
    """The columns (N,) of the credit log: one row for each of the N tokens of a step."""
    mask = batch.mask
    response, position = mask.nonzero(as_tuple=True)  # (N,) each
    columns = {
        "step": torch.full_like(response, step), "response": response, "group": batch.group[response],
        "position": position, "token": batch.tokens[mask], "logprob": batch.logprob[mask],
        "entropy": batch.entropy[mask], "logit_grad": batch.logit_grad[mask], "advantage": batch.advantage[response],
        "credit": credit[mask], "reward": batch.reward[response], "role": batch.role[mask],
        "in_answer": batch.in_answer[mask],
    }
    return {name: values.cpu().numpy().astype(CREDIT_LOG[name]) for name, values in columns.items()}
