"""What is measured of a step: the columns of metrics.csv, and those of the credit log.

docs/running.md explains each column.
"""
import math
import time
from collections import Counter
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from plumbing.compute import distinct_texts
from plumbing.files import checksum, replace_file, require
from plumbing.terminal import clock
from tasks.text import ROLES, fingerprint

COLUMNS = ["step", "reward", "success", "format", "length", "truncated", "entropy", "grad_norm",
           "loss", "clip_fraction", *(f"clip_{role}" for role in ROLES), "ratio_error", "ratio_spread",
           "kl", "zero_variance_groups", "tokens_sampled", "tokens_read", "tokens_updated", "seconds",
           "tokens_per_second", "credit_checksum", "heldout_success", "heldout_stderr",
           *(f"gradient_{role}" for role in ROLES)]  # of metrics.csv: ours
# The columns of credit/step-*.npz.
CREDIT_LOG = {"step": np.int32, "response": np.uint16, "group": np.uint16, "position": np.uint16, "token": np.int32,
              "logprob": np.float32, "entropy": np.float32, "logit_grad": np.float32, "advantage": np.float32,
              "credit": np.float32, "reward": np.float32, "role": np.int8, "in_answer": np.int8}
# Where the task replies, also the turn of a token; and for each token of a reply its response and the next position.
TURN_LOG = {"turn": np.uint16, "reply_response": np.uint16, "reply_position": np.uint16, "reply_token": np.int32}
# Names that batch.log may not have: those above, what analyze.py makes of them, and arguments of np.savez.
TAKEN = {*CREDIT_LOG, *TURN_LOG, "puzzle_text", "puzzle_key", "response_success", "response_id", "puzzle", "length", "relative",
         "contribution", "gradient", "file", "allow_pickle"}
PUZZLE_LETTERS = 500  # at most so many of a puzzle's text are kept in the credit log


def share(part: float, whole: float) -> float | None:
    """part / whole, None where whole is 0."""
    return part / whole if whole else None


def add_step_columns(row: dict, step: int, batch: Any, measured: dict[str, Tensor], began: float) -> None:
    """Add the columns that describe a step's responses and tokens to a row of metrics.csv, and the means of the further
    numbers that the task's `grade` returns. measured: by `instrument` of grpo.py. began: when the step did."""
    tokens = batch.mask.sum().item()
    seconds = time.perf_counter() - began  # after .item(), which waits for the device
    of_groups = batch.reward.new_zeros(len(batch.puzzles))  # (Q,)
    highest, lowest = (of_groups.scatter_reduce(0, batch.group, batch.reward, which, include_self=False)
                       for which in ("amax", "amin"))  # (Q,) each; groups from elsewhere may be of unequal size
    row |= {"step": step, "reward": batch.reward.mean().item(), "success": batch.success.mean().item(),
            "format": batch.format.mean().item(), "length": tokens / len(batch.text),
            "truncated": 1 - batch.ended.float().mean().item(), "entropy": batch.entropy[batch.mask].mean().item(),
            "zero_variance_groups": int((highest == lowest).sum()), "tokens_sampled": batch.ask.tokens_sampled,
            "tokens_read": batch.ask.tokens_read, "seconds": seconds, "tokens_per_second": tokens / seconds}
    size = measured["gradient"].abs() * measured["share"]  # (B, T) of each token's gradient in the loss
    row |= {f"gradient_{name}": share(size[batch.role == role].sum().item(), size.sum().item())
            for role, name in enumerate(ROLES)}
    further = [name for name in batch.grades if name not in ("reward", "answer", "format")]  # these are columns of ours
    add_columns(row, {name: batch.grades[name].nanmean() for name in further}, owner="the task's grade")


def add_columns(row: dict, found: dict | None, owner: str) -> None:
    """Add numbers by name, or nothing, that somebody's code found, to a row of metrics.csv. owner: of that code.
    ValueError for a name that is taken or no text in one line, and for what is no number."""
    require(isinstance(found, dict | None),
            f"{owner} must return a dict of columns, or nothing, not {type(found).__name__}")
    for name, value in (found or {}).items():
        require(isinstance(name, str) and name.strip() and name.isprintable(),
                f"{owner} names a column {name!r:.50}: its name must be text in one line")
        require(name not in COLUMNS and name not in row,
                f"{owner} gives a column {name}, but metrics.csv has one of that name: choose another")
        row[name] = None if value is None else number(value, f"{owner}: {name}")


def number(value: Any, name: str) -> float:
    """A number of any kind, of Python, numpy or torch, as a float. ValueError, with its name, for anything else."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real | Decimal):
            return float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several elements, or too large
        pass
    raise ValueError(f"{name} must be a number, not {repr(value).splitlines()[0]:.50}")


def line_of(row: dict, steps: int, seconds_left: float) -> str:
    """A row of metrics.csv as one line of the terminal."""
    return (f"step {row['step']:>4}/{steps}  reward {row['reward']:.3f}  success {row['success']:.3f}  "
            f"format {row['format']:.2f}  length {row['length']:5.1f}  entropy {row['entropy']:.3f}  "
            f"grad {row['grad_norm']:.3f}  {row['tokens_per_second']:6.0f} tok/s  "
            f"ETA {clock(seconds_left)}{heldout_text(row)}")


def heldout_text(row: dict) -> str:
    """Held-out success and its 95% interval, where it was measured."""
    if "heldout_success" not in row:
        return ""
    return f"  held-out {share_text(row['heldout_success'], row['heldout_stderr'], '.1%')}"


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of n independent values from 0 to 1; NaN for a single one. Of equal ones it is
    1.96 / (n + 1.96^2), not 0: from 0, 1.96 of it reach as far as Wilson's interval of 0 of n."""
    if (n := len(values)) < 2:
        return float("nan")
    return float(values.std(ddof=1) / n**0.5) if np.ptp(values) else 1.96 / (n + 1.96**2)


def share_interval(share: float, error: float) -> tuple[float, float]:
    """The 95% interval of a share with this `standard_error`, NaN without one: share ± 1.96 error; but Wilson's (1927)
    where fewer than ten of the n values are 1, or fewer than ten 0. It has each q with |share - q| below 1.96 standard
    deviations of such a share of true value q, 1.96 sqrt(q (1 - q) / n)."""
    if not error > 0:  # older runs have an error of 0 where all values are equal
        return float("nan"), float("nan")
    z = 1.96
    n = share * (1 - share) / error**2 + 1 if 0 < share < 1 else z / error - z**2
    if n * min(share, 1 - share) > 9.5:  # n is not exact
        return share - z * error, share + z * error
    middle, half = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    low, high = (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)
    return low if share > 0 else 0.0, high if share < 1 else 1.0  # without rounding


def share_text(share: float, error: float, form: str) -> str:
    """A share and its interval, such as `50.4% ± 4.3%` or, lopsided, `0.0% (0.0% to 49.0%)`; empty for NaN."""
    low, high = share_interval(share, error)
    below, above = f"{share - low:{form}}", f"{high - share:{form}}"
    interval = f" ± {above}" if below == above else f" ({low:{form}} to {high:{form}})"
    return "" if math.isnan(share) else f"{share:{form}}" + interval * (not math.isnan(low))


class UpdateColumns:
    """What metrics.csv is told of the updates on a batch: sums over the tokens of each."""

    def __init__(self, batch: Any, used: Tensor):
        """used (m,): the responses that are read in every update."""
        self.batch, self.sums, self.updates = batch, Counter(), []
        self.read = tokens_in(batch, used)

    @torch.no_grad()
    def add(self, rows: Tensor, logprob: Tensor, loss: Tensor, stopped: Tensor, kl: Tensor | None,
            own: dict[str, Tensor]) -> None:
        """Count a micro-batch: its rows (b,), and (b, T) of each other. own: the loss's own columns, by name."""
        batch, mask = self.batch, self.batch.mask[rows]  # (b, T)
        role, change = batch.role[rows], logprob - batch.logprob[rows]  # (b, T) each
        values = {"tokens": mask, "loss": loss, "stopped": stopped, "error": change.abs(), "spread": change.square(),
                  **{("own", name): x for name, x in own.items()}, **({} if kl is None else {"kl": kl})}
        for i, name in enumerate(ROLES):
            values |= {f"tokens_{name}": role == i, f"stopped_{name}": (role == i) * stopped}
        self.sums.update({name: torch.where(mask, x, 0).double().sum() for name, x in values.items()})  # adds

    def end_update(self, grad_norm: float) -> None:
        """An update is over; its gradient had this norm."""
        self.updates.append(Counter({name: float(x) for name, x in self.sums.items()} | {"grad_norm": grad_norm}))
        self.sums.clear()

    def means(self, learned: dict[str, dict | None]) -> dict[str, float | None]:
        """The columns: means over the tokens, None where there was no token; and those of `learn` of heads, by name.
        ratio_error is of the first update: the model is still the one that sampled, so anything but rounding means that
        sampler and update disagree. ratio_spread is of the last one, if not the first."""
        first, last, total, n = self.updates[0], self.updates[-1], Counter(), len(self.updates)
        for sums in self.updates:
            total.update(sums)
        N, tokens = first["tokens"], total["tokens"]  # each update has N tokens
        row = {"loss": total["loss"] / n, "grad_norm": total["grad_norm"] / n,
               "clip_fraction": share(total["stopped"], tokens),
               **{f"clip_{role}": share(total[f"stopped_{role}"], total[f"tokens_{role}"]) for role in ROLES},
               "ratio_error": share(first["error"], N),
               "ratio_spread": share(last["spread"], N) ** 0.5 if tokens > N else None,
               "kl": share(total["kl"], tokens) if "kl" in total else None, "tokens_updated": n * self.read}
        add_columns(row, {name[1]: share(total[name], tokens) for name in total if isinstance(name, tuple)}, "the loss")
        for name, columns in learned.items():
            add_columns(row, columns, owner=f"learn of the head {name}")
        return row


def tokens_in(batch: Any, rows: Tensor) -> int:
    """How many tokens the responses rows (b,) have, with their replies, and with each of their prompts once, however
    often a micro-batch reads it."""
    prompts = sum(len(batch.prompts[q]) for q in {*batch.group[rows].tolist()})
    replies = sum(len(said) for i in rows.tolist() for said in batch.before[i].values())
    return prompts + int(batch.mask[rows].sum()) + replies


def sampling_cost(texts: Sequence[list[int]], samples: Any) -> tuple[int, int]:
    """The tokens that were sampled, and those that were read for it, where each of Q texts got B / Q of the samples. A
    text that begins another one is not read separately, so it doesn't count."""
    G = len(samples.before) // len(texts)
    return int(samples.mask.sum()), sum(map(len, distinct_texts(texts)[0])) + sum(
        tokens_reread(texts[i // G], replies) for i, replies in enumerate(samples.before))


def tokens_reread(prompt: list[int], before: dict[int, list[int]]) -> int:
    """How many tokens an episode reads again for its turns after the first one, and with them its replies."""
    texts, said = 0, len(prompt)
    for t in sorted(before):
        said += len(before[t])  # the prompt and the replies so far
        texts += t + said
    return texts


def turn_of(batch: Any) -> Tensor:
    """The turn (B, T) of each token, from 0 on."""
    begins = [[t in replies for t in range(batch.tokens.shape[1])] for replies in batch.before]
    return torch.tensor(begins, device=batch.tokens.device).cumsum(1)


def write_credit_log(file: Path, step: int, batch: Any, measured: dict[str, Tensor]) -> int:
    """Write the columns of a step to an .npz file, one row per token, puzzle_text and puzzle_key (Q,) of each group, and
    response_success (B,); returns the file's CRC-32."""
    texts = np.array([batch.task.show(puzzle)[:PUZZLE_LETTERS] for puzzle in batch.puzzles])  # (Q,)
    keys = np.array([fingerprint(str([*prompt])) for prompt in batch.prompts], np.uint64)  # (Q,) equal for equal prompts
    each = {"puzzle_text": texts, "puzzle_key": keys, "response_success": batch.success.cpu().numpy()}
    replace_file(file, lambda part: np.savez(part, **each, **log_columns(step, batch, measured)))
    return checksum(file)


def log_columns(step: int, batch: Any, measured: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The columns (N,) of the credit log, at last those of batch.log: one row for each of the N tokens of a step."""
    mask = batch.mask
    response, position = mask.nonzero(as_tuple=True)  # (N,) each
    known = {name: x[mask] for name, x in measured.items()} | {
        "step": torch.full_like(response, step), "response": response, "group": batch.group[response],
        "position": position, "token": batch.tokens[mask], "reward": batch.reward[response],
        "role": batch.role[mask], "in_answer": batch.in_answer[mask]}
    columns = {name: known[name] for name in CREDIT_LOG}
    if hasattr(batch.task, "reply"):
        said = [(i, t, x) for i, replies in enumerate(batch.before) for t, words in replies.items() for x in words]
        columns |= zip(TURN_LOG, (turn_of(batch)[mask], *torch.tensor(said, dtype=torch.long).view(-1, 3).T))
    columns |= {name: values[mask] for name, values in batch.log.items()}
    kinds = CREDIT_LOG | TURN_LOG
    return {name: values.cpu().numpy().astype(kinds.get(name, np.float32)) for name, values in columns.items()}


def own_columns(names: Iterable[str]) -> list[str]:
    """Those columns of a credit log that its credit function put into batch.log."""
    return [name for name in names if name not in TAKEN]
