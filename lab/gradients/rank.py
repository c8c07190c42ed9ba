"""Is a group's gradient of rank 2? A paper claims so of GRPO, whatever the group size R, but not of which matrix.

So several are decomposed: responses x parameters (row i is A_i g_i, with g_i the gradient of response i's log-prob),
tokens x (vocabulary * hidden) (a row is credit * (onehot - p) outer the hidden state), and each weight matrix. Rewards
are right or wrong and nothing else, because only then is there a 2 in the algebra: the group's gradient is
A+ S+ + A- S-, with S+ and S- the sums of g_i over right and over wrong responses, the rows of a fourth matrix.

Run it:  python -m lab.gradients.measure
"""
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import numpy as np
import torch
from torch import Tensor

from grpo import compare
from lab.estimates import mean_cell, read_cell, read_table
from lab.updates import credit_gradients
from methods.calculations import reward_decomposition
from methods.groups import optimal_baseline
from mitigations import ppo
from plumbing.progress import follow
from plumbing.report import GREY, PALETTE, Table, new_figure, ratio
from qwen2_model import scaled, split
from rollout import TokenBatch

SIZES = (2, 4, 8, 16)  # of a group
CONTROLS_AT = 8  # group size of the controls
SIDES, RESPONSES, TOKENS = "right, wrong x parameters", "responses x parameters", "tokens x (vocabulary · hidden)"
SHOWN = (RESPONSES, SIDES, TOKENS, "q_proj")  # drawn

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


def group_of(batch: TokenBatch, q: int, R: int) -> TokenBatch:
    """The first R responses to puzzle q as a batch of their own, with the advantages of right against wrong."""
    B, Q = len(batch.text), len(batch.puzzles)
    rows = slice(B // Q * q, B // Q * q + R)
    fields = {name: x[rows] for name, x in vars(batch).items() if isinstance(x, (Tensor, tuple)) and len(x) == B}
    fields |= {"group": torch.zeros_like(fields["group"]), "puzzles": (batch.puzzles[q],)}
    ask = SimpleNamespace(policy=batch.ask.policy, prompts=[batch.ask.prompts[q]], hidden=batch.ask.hidden[rows],
                          head=lambda name: batch.ask.head(name)[rows])
    return by_success(dataclasses.replace(batch, **fields, ask=ask))


@torch.no_grad()
def token_gram(group: TokenBatch, credit: Tensor) -> np.ndarray:
    """X X^T (N, N) of a group's N tokens with credit (R, T); a row of X is credit * (onehot - p) outer hidden state.

    <a outer b, c outer d> = <a, c> <b, d>, so the rows, which are of size V D, are never made.
    """
    states = group.ask.hidden[group.mask]  # (N, D)
    model = group.ask.policy.model
    error = -scaled(model.logits(states.to(model.output_weight.dtype)), model.temperature).softmax(-1)  # (N, V)
    error[torch.arange(len(states)), group.tokens[group.mask]] += 1
    c = credit[group.mask].double()  # (N,)
    return (c[:, None] * c).cpu().numpy() * products(error, error) * products(states, states)


def spectra(group: TokenBatch, credit: Tensor, inner: bool) -> dict[str, list[np.ndarray]]:
    """Singular values of a group's matrices with credit (R, T); inner: also those of tokens and of weight matrices."""
    right = group.success > 0  # (R,)
    rows = torch.cat(list(credit_gradients(group, credit[None], 1)))  # (R, P)
    sides = torch.stack([rows[side].sum(0) for side in (right, ~right)])  # (2, P)
    found = {name: [gram_spectrum(products(x, x))] for name, x in ((SIDES, sides), (RESPONSES, rows))}
    if inner:
        found[TOKENS] = [gram_spectrum(token_gram(group, credit))]
        names, weights = zip(*group.ask.policy.model.named_parameters())
        parts = rows.sum(0).split([weight.numel() for weight in weights])
        gradients = {name: g.view_as(weight) for name, weight, g in zip(names, weights, parts)}
        for name, g in split(gradients, group.ask.policy.model.config).items():
            if g.dim() == 2:  # by its name within a layer
                s = torch.linalg.svdvals(g.double()).cpu().numpy()
                found.setdefault(name.split(".")[-2], []).append(s)
    return found


def controls(group: TokenBatch, rng: np.random.Generator) -> dict[str, Tensor]:
    """By name, credit (R, T) other than GRPO's for a group."""
    A, mask = group.advantage[:, None], group.mask
    w = torch.from_numpy(rng.exponential(size=mask.shape)).float()  # (R, T)
    trained = dataclasses.replace(group, reward=0.1 * group.format + group.success)  # what the critic predicts
    return {"shuffled advantages": A[torch.from_numpy(rng.permutation(len(A)))] * mask,
            "random credit": A * w * mask, "imitation: credit 1": mask.float(),
            "a reward for each calculation": reward_decomposition(group, stepwise=True),
            "no baseline: credit r": group.success[:, None] * mask, "optimal_baseline": optimal_baseline(group),
            "ppo": ppo(trained)}


def group_spectra(batch: TokenBatch) -> Spectra:
    """The spectra of every puzzle with GRPO's credit, and at one group size with the controls."""
    Q, found, rng = len(batch.puzzles), {}, np.random.default_rng(0)
    for q, R in follow("ranks", [*itertools.product(range(Q), SIZES)]):
        group = group_of(batch, q, R)
        if group.advantage.any():  # else all are right or all wrong, and there is no gradient
            credits = {"GRPO": group.advantage[:, None] * group.mask}
            credits |= controls(group, rng) if R == CONTROLS_AT else {}
            for variant, credit in credits.items():
                for matrix, layers in spectra(group, credit, inner=variant == "GRPO").items():
                    found.setdefault((R, variant, matrix), {})[q] = layers
    return found


def puzzle_means(found: Spectra, R: int, variant: str, matrix: str, measure: Callable = effective_rank) -> dict:
    """By puzzle, the mean of a measure of rank over the spectra of its layers; without puzzles whose gradient is 0."""
    puzzles = found.get((R, variant, matrix), {})
    return {puzzle: np.mean([measure(s) for s in layers]) for puzzle, layers in puzzles.items()
            if all(s.any() for s in layers)}


def over_puzzles(means: dict[int, float]) -> str:
    """Mean over puzzles, ± half of its 95% interval, as a cell."""
    return mean_cell(list(means.values()), 1)


def tables_rank(found: Spectra) -> list[Table]:
    """Rank of all matrices by group size, and of the responses' gradients under the controls."""
    _, variants, matrices = (list(dict.fromkeys(names)) for names in zip(*found))
    by_size = [[m, *(over_puzzles(puzzle_means(found, R, "GRPO", m)) for R in SIZES),
                over_puzzles(puzzle_means(found, CONTROLS_AT, "GRPO", m, stable_rank))] for m in matrices]
    grpo, by_variant = puzzle_means(found, CONTROLS_AT, "GRPO", RESPONSES), []
    for v in variants:
        sides, responses = (puzzle_means(found, CONTROLS_AT, v, m) for m in (SIDES, RESPONSES))
        less_grpo = {puzzle: mean - grpo[puzzle] for puzzle, mean in responses.items()}
        by_variant.append([v, *map(over_puzzles, (sides, responses, less_grpo))])
    note = (f"Mean over up to {len(set().union(*found.values()))} puzzles, those whose answers are not all alike, "
            "± half of its 95% interval (Student's t)")
    return [Table("Effective rank by group size",
                  f"GRPO, rewards right or wrong. {note}; weight matrices averaged over layers.",
                  ["matrix", *(f"R = {R}" for R in SIZES), f"stable rank, R = {CONTROLS_AT}"], by_size),
            Table(f"Effective rank under other credit, R = {CONTROLS_AT}",
                  "`ppo` with the reward that its critic was fitted to, 0.1 · format + success. Last column: "
                  f"difference on the same puzzles. {note}.",
                  ["credit", SIDES, RESPONSES, f"{RESPONSES}, minus GRPO's"], by_variant)]


def draw_ranks(tables: Path, file: Path) -> None:
    """Effective rank of GRPO's matrices by group size, read from the file of tables_rank, beside the claimed 2."""
    found = {matrix: cells for matrix, *cells, _ in read_table(tables, "Effective rank by group size")[1]}
    figure, (axis,) = new_figure(1, 4.0)
    for matrix, colour, marker in zip(SHOWN, PALETTE, "os^D"):
        value, _, high, _ = np.array([read_cell(text) for text in found[matrix]]).T  # (sizes,) each
        axis.errorbar(SIZES, value, high - value, color=colour, marker=marker, capsize=3, label=matrix)
    axis.plot(SIZES, SIZES, color=GREY, ls=":", label="R")
    axis.axhline(2, color=GREY, ls="--", label="2, the claim")
    axis.set(xlabel="group size R", ylabel="effective rank, 95% interval", xscale="log", yscale="log", ylim=(1, None),
             title="Only one matrix has rank 2 whatever the group size")
    axis.set_xticks(SIZES, SIZES)
    axis.set_yticks((1, 2, 5, 10, 20, 50), (1, 2, 5, 10, 20, 50))
    axis.minorticks_off()
    figure.legend(loc="outside right upper")
    figure.savefig(file)
