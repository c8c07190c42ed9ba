"""Is a group's gradient of rank 2? A paper claims so of GRPO, whatever the group size R, but not of which matrix.

So several matrices are decomposed, by several measures of rank: responses x parameters (row i is A_i g_i, with g_i the
gradient of response i's log-prob), each weight matrix, and tokens x (vocabulary * hidden), whose row is
credit * (onehot - p) outer the hidden state. Rewards are right or wrong and nothing else, because only then is there a
2 in the algebra. The group's gradient is then A+ S+ + A- S-, with S+ and S- the sums of g_i over right and over wrong
responses: two directions, the rows of the matrix "right, wrong x parameters".

Controls: shuffled advantages, random credit, all credit 1 (imitation), a reward for each calculation, other baselines,
other methods, and A*. RLOO's credit is GRPO's times a number that all responses of the group share, and rank ignores
scale: that its row equals GRPO's checks the measurement.

Run it:  python -m lab.gradients.measure
"""
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from grpo import group_advantage
from lab.estimates import read_cell, read_table
from lab.updates import credit_gradients
from methods import MITIGATIONS
from methods.calculations import reward_decomposition
from plumbing.progress import Progress
from plumbing.report import GREY, PALETTE, Table, interval, new_figure, pm, ratio, save_figure
from qwen2_model import Qwen2
from rollout import TokenBatch, by_group

SIZES = (2, 4, 8, 16)  # of a group
CONTROLS_AT = 8  # group size of the controls
TRUTH_PUZZLES = 4  # puzzles with the control A*
METHODS = ("optimal_baseline", "token_type", "ppo")  # credit functions that are controls, too
SHOWN = ("responses x parameters", "right, wrong x parameters", "tokens x (vocabulary · hidden)", "q_proj")  # drawn


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
    advantage = group_advantage(by_group(batch, batch.success)).flatten()  # (B,)
    return dataclasses.replace(batch, reward=batch.success, advantage=advantage)


def group_of(batch: TokenBatch, q: int, R: int) -> TokenBatch:
    """The first R responses to puzzle q as a batch of their own, with the advantages of right against wrong."""
    B, Q = len(batch.text), len(batch.puzzles)
    rows = slice(B // Q * q, B // Q * q + R)
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    fields = {name: x[rows] for name, x in fields.items() if isinstance(x, (Tensor, tuple)) and len(x) == B}
    fields |= {"group": torch.zeros_like(fields["group"]), "puzzles": (batch.puzzles[q],)}
    ask = SimpleNamespace(policy=batch.ask.policy, prompts=[batch.ask.prompts[q]], hidden=batch.ask.hidden[rows],
                          head=lambda name: batch.ask.head(name)[rows])
    return by_success(dataclasses.replace(batch, **fields, ask=ask))


def weight_matrices(model: Qwen2, flat: Tensor) -> dict[str, list[Tensor]]:
    """A gradient (P,) of all parameters as weight matrices, by their name within a layer, one for each layer."""
    found = {}
    for (name, weight), g in zip(model.named_parameters(), flat.split([w.numel() for w in model.parameters()])):
        if weight.dim() == 2:
            found.setdefault(name.split(".")[-2], []).append(g.view_as(weight))
    return found


@torch.no_grad()
def token_gram(model: Qwen2, group: TokenBatch, credit: Tensor) -> np.ndarray:
    """X X^T (N, N) of a group's N tokens with credit (R, T); a row of X is credit * (onehot - p) outer hidden state.

    <a outer b, c outer d> = <a, c> <b, d>, so the rows, which are of size V D, are never made.
    """
    states = group.ask.hidden[group.mask]  # (N, D)
    error = -model.log_probs(states).exp()  # (N, V)
    error[torch.arange(len(states)), group.tokens[group.mask]] += 1
    c = credit[group.mask].double()  # (N,)
    return (c[:, None] * c).cpu().numpy() * products(error, error) * products(states, states)


def spectra(model: Qwen2, group: TokenBatch, credit: Tensor, gradients: Tensor) -> dict[str, list]:
    """Singular values of the matrices of R responses with credit (R, T), which is in their gradients (R, P)."""
    right = group.success > 0  # (R,)
    sides = torch.stack([gradients[side].sum(0) for side in (right, ~right)])  # (2, P)
    found = {"right, wrong x parameters": [gram_spectrum(products(sides, sides))],
             "responses x parameters": [gram_spectrum(products(gradients, gradients))],
             "tokens x (vocabulary · hidden)": [gram_spectrum(token_gram(model, group, credit))]}
    return found | {name: [torch.linalg.svdvals(g.double()).cpu().numpy() for g in matrices]
                    for name, matrices in weight_matrices(model, gradients.sum(0)).items()}


def controls(group: TokenBatch, a_star: Tensor | None, rng: np.random.Generator) -> dict[str, Tensor]:
    """By name, credit (R, T) other than GRPO's for a group."""
    A, mask = group.advantage[:, None], group.mask
    w = torch.from_numpy(rng.exponential(size=mask.shape)).float()  # (R, T)
    rloo = group_advantage(group.success[None], "rloo").view(-1, 1)  # (R, 1)
    credits = {"shuffled advantages": A[torch.from_numpy(rng.permutation(len(A)))] * mask,
               "random credit": A * w * mask, "imitation: credit 1": mask.float(),
               "a reward for each calculation": reward_decomposition(group, stepwise=True),
               "RLOO": rloo * mask, "no baseline: credit r": group.success[:, None] * mask}
    for name in METHODS:
        # The critic predicts the reward with its part for the format, so `ppo` gets that reward.
        credits[name] = MITIGATIONS[name](with_format(group) if name == "ppo" else group)
    return credits if a_star is None else credits | {"A*": a_star}


def with_format(group: TokenBatch) -> TokenBatch:
    """The same group with the reward of training, 0.1 * format + success."""
    return dataclasses.replace(group, reward=0.1 * group.format + group.success)


def rank_rows(batch: TokenBatch, truth: Tensor, seed: int) -> list[dict]:
    """A row for each puzzle, group size, kind of credit and matrix: its measures of rank, and its spectrum.

    truth (B, T): A* of the first TRUTH_PUZZLES puzzles. Groups that are all right or all wrong have no gradient.
    """
    Q, found, rng = len(batch.puzzles), [], np.random.default_rng(seed)
    G = len(batch.text) // Q
    groups = [(q, R, group) for q, R in itertools.product(range(Q), SIZES)
              if (group := group_of(batch, q, R)).advantage.any()]
    progress = Progress("ranks", len(groups))
    for i, (q, R, group) in enumerate(groups, 1):
        credits = {"GRPO": group.advantage[:, None] * group.mask}
        if R == CONTROLS_AT:
            credits |= controls(group, truth[G * q : G * q + R] if q < TRUTH_PUZZLES else None, rng)
        for variant, credit in credits.items():
            gradients = torch.cat(list(credit_gradients(group, credit[None], 1)))  # (R, P)
            for matrix, all_values in spectra(batch.ask.policy.model, group, credit, gradients).items():
                found += [{"puzzle": q, "R": R, "variant": variant, "matrix": matrix, "spectrum": s,
                           "effective": effective_rank(s), "stable": stable_rank(s)} for s in all_values]
        progress.show(i)
    return found


def puzzle_means(found: list[dict], measure: str, **where) -> dict[int, float]:
    """By puzzle, the mean of a measure over its matrices, among the rows that are as `where` says."""
    values = {}
    for row in found:
        if all(row[key] == value for key, value in where.items()) and np.isfinite(row[measure]):
            values.setdefault(row["puzzle"], []).append(row[measure])
    return {puzzle: float(np.mean(v)) for puzzle, v in values.items()}


def over_puzzles(found: list[dict], measure: str, **where) -> str:
    """Mean of a measure over puzzles, ± half of its 95% interval, as a cell."""
    means = list(puzzle_means(found, measure, **where).values())
    return pm(*interval(means), 1) if means else ""


def less_grpo(found: list[dict], **where) -> str:
    """Effective rank under a kind of credit minus that under GRPO's, by puzzle: mean ± half of its 95% interval."""
    other, grpo = (puzzle_means(found, "effective", **where | variant) for variant in ({}, {"variant": "GRPO"}))
    differences = [other[puzzle] - grpo[puzzle] for puzzle in other if puzzle in grpo]
    return pm(*interval(differences), 1) if differences else ""


def tables_rank(found: list[dict]) -> list[Table]:
    """Effective rank by group size, all measures at one size, and effective rank under the controls."""
    matrices, variants = (list(dict.fromkeys(row[key] for row in found)) for key in ("matrix", "variant"))
    note = (f"Mean over up to {len({row['puzzle'] for row in found})} puzzles, those whose answers are not all "
            "alike, ± half of its 95% interval (Student's t); weight matrices averaged over layers.")
    by_size = [[m] + [over_puzzles(found, "effective", matrix=m, variant="GRPO", R=R) for R in SIZES]
               for m in matrices]
    by_measure = [[m] + [over_puzzles(found, measure, matrix=m, variant="GRPO", R=CONTROLS_AT)
                         for measure in ("effective", "stable")] for m in matrices]
    by_variant = [[v] + [over_puzzles(found, "effective", matrix=m, variant=v, R=CONTROLS_AT) for m in matrices]
                  + [less_grpo(found, matrix=SHOWN[0], variant=v, R=CONTROLS_AT)] for v in variants]
    return [Table("Effective rank by group size", f"GRPO, rewards right or wrong. {note}",
                  ["matrix", *(f"R = {R}" for R in SIZES)], by_size),
            Table(f"Measures of rank, R = {CONTROLS_AT}", f"GRPO. {note}",
                  ["matrix", "effective rank", "stable rank"], by_measure),
            Table(f"Effective rank under other credit, R = {CONTROLS_AT}",
                  f"A* on the first {TRUTH_PUZZLES} puzzles; `ppo` with the reward that its critic was fitted to, "
                  f"0.1 · format + success. Last column: difference on the same puzzles. {note}",
                  ["credit", *matrices, f"{SHOWN[0]}, minus GRPO's"], by_variant)]


def draw_ranks(tables: Path, file: Path) -> None:
    """Effective rank of GRPO's matrices by group size, read from the file of tables_rank, beside the claimed 2."""
    header, rows = read_table(tables, "Effective rank by group size")
    sizes, found = [int(name.removeprefix("R = ")) for name in header[1:]], {row[0]: row[1:] for row in rows}
    figure, ((axis,),) = new_figure(1, 1, 4.0)
    for matrix, colour, marker in zip(SHOWN, PALETTE, "os^D"):
        value, low, high, _ = np.array([read_cell(text) for text in found[matrix]]).T  # (sizes,) each
        axis.errorbar(sizes, value, high - value, color=colour, marker=marker, capsize=3)
        axis.annotate(f"{matrix} ({value[-1]:.1f})", (sizes[-1], value[-1]), (10, 0), textcoords="offset points",
                      va="center", color=colour)
    axis.plot(sizes, sizes, color=GREY, ls=":")
    axis.plot(sizes, [2] * len(sizes), color=GREY, ls="--")
    for text, height in {"R": 5.6, "2, the claim": 2}.items():
        axis.annotate(text, (5.6, height), (0, 5), textcoords="offset points", ha="right")
    axis.set(xlabel="group size R", ylabel="effective rank, 95% interval", xscale="log", yscale="log", xlim=(1.9, 60),
             ylim=(1, None), title="Effective rank of the gradient of a group")
    axis.set_xticks(sizes, sizes)
    axis.set_yticks((1, 2, 5, 10, 20, 50), (1, 2, 5, 10, 20, 50))
    axis.minorticks_off()
    save_figure(figure, file)
