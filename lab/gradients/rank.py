"""Is a group's gradient of rank 2? A paper claims so of GRPO, whatever the group size R, but not of which matrix.

So several are decomposed: responses x parameters (row i is A_i g_i, with g_i the gradient of response i's log-prob) and
each weight matrix. In the toy rewards are right or wrong and nothing else, because only then is there a 2 in the
algebra: the group's gradient is A+ S+ + A- S-, with S+ and S- the sums of g_i over right and over wrong responses, the
rows of a third matrix.

Run it:  python -m lab.gradients.measure          the toy
         python -m lab.gradients.pretrained       a pretrained model
"""
import dataclasses
from functools import partial
from typing import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo import compare
from lab.estimates import mean_cell
from lab.updates import credit_gradients
from methods.calculations import reward_decomposition
from methods.groups import optimal_baseline
from mitigations import ppo
from plumbing.progress import follow
from plumbing.report import Table, ratio
from qwen2_model import to_checkpoint
from queries import Queries
from rollout import TokenBatch

SIZES = (2, 4, 8, 16)  # of a group
CONTROLS_AT = 8  # group size of the controls
SIDES, RESPONSES = "right, wrong x parameters", "responses x parameters"

# By group size, kind of credit and matrix, then by puzzle: singular values (of a weight matrix: in each layer).
Spectra = dict[tuple[int, str, str], dict[int, list[np.ndarray]]]


def effective_rank(s: np.ndarray) -> float:
    """exp of the entropy of singular values (k,) as shares of their sum (Roy and Vetterli, 2007); NaN if all are 0."""
    if not s.any():
        return float("nan")
    p = s[s > 0] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def stable_rank(s: np.ndarray) -> float:
    """The energy of singular values (k,) over that of the largest."""
    return ratio((s**2).sum(), s.max() ** 2)


def components(s: np.ndarray, share: float) -> float:
    """How many of the largest singular values (k,) have this share of the energy; NaN if all are 0."""
    energy = np.cumsum(np.sort(s)[::-1] ** 2)  # (k,)
    return 1.0 + np.searchsorted(energy, (share - 1e-12) * energy[-1]) if s.any() else float("nan")


MEASURES = {"effective rank": effective_rank, "stable rank": stable_rank,
            **{f"components for {share:.0%} of the energy": partial(components, share=share) for share in (0.9, 0.99)}}


def products(x: Tensor, y: Tensor) -> np.ndarray:
    """All inner products (n, m) of the rows of x (n, P) and y (m, P), in double precision."""
    return (x.double() @ y.double().T).cpu().numpy()


def gram_spectrum(gram: np.ndarray) -> np.ndarray:
    """Singular values (n,) of X from X X^T (n, n), largest first; what is below rounding error becomes 0."""
    values = np.linalg.eigvalsh(gram.astype(np.float64))[::-1]
    return np.sqrt(np.where(values > 1e-12 * max(values.max(), 0.0), values, 0.0))


def by_success(batch: TokenBatch) -> TokenBatch:
    """The same batch with rewards that are right or wrong and nothing else."""
    batch = dataclasses.replace(batch, reward=batch.success)
    return dataclasses.replace(batch, advantage=compare(batch))


def responses_of(batch: TokenBatch, rows: Sequence[int]) -> TokenBatch:
    """These responses, as many to each of their puzzles, as a batch of their own, with advantages of their own."""
    ask, group = batch.ask, batch.group[rows := list(rows)].tolist()
    asked = list(dict.fromkeys(group))
    fields = {name: x[rows] if isinstance(x, Tensor) else tuple(x[i] for i in rows) for name, x in vars(batch).items()
              if isinstance(x, (Tensor, tuple)) and name not in ("puzzles", "prompts")}
    fields |= {name: tuple(getattr(batch, name)[q] for q in asked) for name in ("puzzles", "prompts")}
    group = dataclasses.replace(batch, **fields | {"group": torch.tensor([*map(asked.index, group)])})
    group.ask, group.advantage = Queries(ask.policy, group, ask.s, ask.step), compare(group)
    return group


def response_gradients(group: TokenBatch, credit: Tensor, part: str, dtype: torch.dtype) -> tuple:
    """The inner products (R, R) of the gradients that credit (R, T) causes at R responses, and, by name, these
    gradients (R, ...) in the parameters whose names begin with `part`. dtype: in which all R are held at once."""
    names, weights = zip(*group.ask.policy.model.named_parameters())
    rows, parts = [], []
    for (row,) in credit_gradients(group, credit[None], 1):  # (P,)
        rows.append(row.to(dtype))
        each = zip(names, weights, row.split([weight.numel() for weight in weights]))
        parts.append({name: g.view_as(weight).clone() for name, weight, g in each if name.startswith(part)})
    pieces = zip(*(row.split(2**22) for row in rows))  # so that little is copied at once
    gram = sum(products(x, x) for x in map(torch.stack, pieces))
    return gram, {name: torch.stack([x[name] for x in parts]) for name in parts[0]}


def spectra(group: TokenBatch, gradients: tuple, scale: Tensor, right: Tensor) -> dict[str, list[np.ndarray]]:
    """Singular values of a group's matrices, by name, for each layer that has one. right: (R,) bool.

    gradients: as response_gradients returns them, of which the first R count, each times scale (R,).
    """
    R, c, sides = len(scale), scale.double().numpy(), torch.stack((right, ~right)).double().numpy()  # (2, R)
    gram = gradients[0][:R, :R] * np.outer(c, c)  # (R, R)
    found = {SIDES: [gram_spectrum(sides @ gram @ sides.T)], RESPONSES: [gram_spectrum(gram)]}
    summed = {name: torch.einsum("r,r...->...", scale, rows[:R]) for name, rows in gradients[1].items()}
    for name, g in to_checkpoint(summed, group.ask.policy.model.config).items():
        if g.dim() == 2:  # by its name within a layer
            found.setdefault(name.split(".")[-2], []).append(torch.linalg.svdvals(g.double()).cpu().numpy())
    return found


def controls(group: TokenBatch, rng: np.random.Generator) -> dict[str, Tensor]:
    """By name, credit (R, T) other than GRPO's for a group."""
    A, mask = group.advantage[:, None], group.mask
    w = torch.from_numpy(rng.exponential(size=mask.shape)).float()  # (R, T)
    return {"shuffled advantages": A[torch.from_numpy(rng.permutation(len(A)))] * mask,
            "random credit": A * w * mask, "imitation: credit 1": mask.float()}


def methods(group: TokenBatch) -> dict[str, Tensor]:
    """By name, the credit (R, T) of methods that need a critic or a reward for each calculation, or no baseline."""
    trained = dataclasses.replace(group, reward=0.1 * group.format + group.success)  # what the critic predicts
    return {"a reward for each calculation": reward_decomposition(group, stepwise=True),
            "no baseline: credit r": group.success[:, None] * group.mask, "optimal_baseline": optimal_baseline(group),
            "ppo": ppo(trained)}


def credits_of(group: TokenBatch, rng: np.random.Generator) -> dict[str, Tensor]:
    """By name, the credit (R, T) whose gradient is decomposed: GRPO's and, at one group size, that of others."""
    grpo = {"GRPO": group.advantage[:, None] * group.mask}
    return grpo | controls(group, rng) | methods(group) if len(group.text) == CONTROLS_AT else grpo


def group_spectra(batch: TokenBatch, credits: Callable = credits_of, part: str = "",
                  dtype: torch.dtype = torch.float64) -> Spectra:
    """The spectra of every puzzle's first R responses, for each of the `credits` of these, where there is any. part,
    dtype: as of response_gradients."""
    found, rng, G = {}, np.random.default_rng(0), len(batch.text) // len(batch.puzzles)
    for q in follow("ranks", range(len(batch.puzzles))):
        whole, *groups = (responses_of(batch, range(q * G, q * G + R)) for R in (G, *SIZES) if R <= G)
        alike = response_gradients(whole, whole.mask.to(batch.advantage), part, dtype)  # those of credit 1
        for group in groups:
            for variant, credit in credits(group, rng).items() if group.advantage.any() else ():
                scale, gradients = credit[:, 0], alike
                if not torch.equal(credit, scale[:, None] * group.mask):  # it varies within a response
                    scale, gradients = torch.ones_like(scale), response_gradients(group, credit, part, dtype)
                right = (scale if variant.startswith("GRPO") else group.advantage) > 0
                for matrix, layers in spectra(group, gradients, scale, right).items():
                    found.setdefault((len(scale), variant, matrix), {})[q] = layers
    return found


def rank_rows(found: Spectra) -> list[dict]:
    """A row for each group size, credit, matrix and puzzle, with the means of all measures over the layers."""
    return [{"R": R, "credit": variant, "matrix": matrix, "puzzle": q}
            | {name: float(np.mean([measure(s) for s in layers])) for name, measure in MEASURES.items()}
            for (R, variant, matrix), puzzles in found.items() for q, layers in puzzles.items()]


def table_along(title: str, note: str, rows: list[dict], keys: tuple[str, ...], axis: str, measure: str,
                digits: int = 1) -> Table:
    """For each combination of `keys` and each value of the column `axis`, the mean of a measure over puzzles, and what
    is left of it minus that of the column's first value, on the puzzles that have both. NaN, of a gradient of 0, counts
    for nothing."""
    values, found = sorted({row[axis] for row in rows}), {}
    for row in rows:
        by_value = found.setdefault(tuple(row[key] for key in keys), {value: {} for value in values})
        if np.isfinite(row[measure]):
            by_value[row[axis]][row["puzzle"]] = row[measure]
    cells = []
    for key, by_value in found.items():
        first, *others = by_value.values()  # by puzzle, each
        less = [[x[q] - first[q] for q in x if q in first] for x in others]
        cells.append([*key, ", ".join(str(len(x)) for x in by_value.values()),
                      *(mean_cell(list(x), digits) for x in (*(y.values() for y in by_value.values()), *less))])
    names = [value if isinstance(value, str) else f"{axis} = {value:.0f}" for value in values]
    return Table(title, f"{note} Means over groups, those whose rewards are not all alike, ± half of a 95% interval "
                 "(Student's t); differences on the same groups.",
                 [*keys, "groups", *names, *(f"{name} minus {names[0]}" for name in names[1:])], cells)


def tables_rank(rows: list[dict], note: str, keys: tuple[str, ...] = ("matrix", "credit")) -> list[Table]:
    """All measures of rank by group size, and two of them under other credit beside GRPO's."""
    grpo = [row for row in rows if row["credit"].startswith("GRPO")]
    one_size = [row for row in rows if row["R"] == CONTROLS_AT]
    beside = [row | {"credit": name, "of": "this credit" if row["credit"] == name else "GRPO"}
              for name in dict.fromkeys(row["credit"] for row in one_size if row["credit"] != "GRPO")
              for row in one_size if row["credit"] in ("GRPO", name)]
    return [*(table_along(f"{name.capitalize()} by group size", note, grpo, keys, "R", name) for name in MEASURES),
            *(table_along(f"{name.capitalize()} under other credit, R = {CONTROLS_AT}", note, beside, keys, "of", name)
              for name in ("effective rank", "stable rank"))]
