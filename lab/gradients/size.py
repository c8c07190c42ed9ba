"""How large a token's gradient is: the original work's measure, the logits' gradient, and the exact one.

The original work measured abs(credit * log p) and found 31% more on filler. Beside that measure stand the gradient in
logit space, abs(credit) * ||onehot - p||, and the exact one, abs(credit) times the norm of grad log pi(token) over all
parameters, each with and without control for position.

The original's phase 1 took the gradient of the summed cross-entropy at the input embeddings. It is repeated here as the
mistake it is: the embedding of token j collects the gradients of all losses behind j, so early tokens have more.

Run it:  python -m lab.gradients.measure
"""
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lab.estimates import cell, draw_estimate, read_cell, read_table
from lab.statistics import bootstrap, correlate, explained, ranks, sums, within
from lab.truth.measure import describe
from lab.truth.solver import DECISIONS, KINDS
from plumbing.progress import Progress
from plumbing.report import GREY, PALETTE, Estimate, Table, bins, new_figure, save_figure, t_statistics
from qwen2_model import Qwen2, take
from rollout import TokenBatch
from tasks.text import FILLER, REASONING

EACH = 12  # tokens per response, on average, whose exact gradient is computed
MEASURES = ("abs(A log p)", "abs(A)·‖onehot - p‖", "abs(A)·‖grad log p‖, all parameters")


def token_gradients(model: Qwen2, prompt: list[int], tokens: Tensor, chosen: list[int]) -> tuple[np.ndarray, ...]:
    """Three norms of gradients of a response tokens (L,) to a prompt.

    whole (n,): of log pi of each of the tokens `chosen`, over all parameters. before (n,): of the same at the input
    embedding of the token before, NaN for the first. phase1 (L,): of the sum of all log-probs, at each token's input
    embedding.
    """
    inputs, weights = [], list(model.parameters())
    hook = model.model["embed_tokens"].register_forward_hook(lambda *call: inputs.append(call[-1]))
    row = torch.cat((torch.tensor(prompt), tokens))  # (P + L,)
    logits = model(row[None])[0, len(prompt) - 1 : -1, : model.real_vocab]  # (L, V)
    hook.remove()
    logprob = take(logits.log_softmax(-1), tokens)  # (L,)
    whole, before = [], []
    for t in chosen:
        *at_weights, at_inputs = torch.autograd.grad(logprob[t], weights + inputs, retain_graph=True)
        whole.append(sum(g.square().sum() for g in at_weights).sqrt().item())
        before.append(at_inputs[0, len(prompt) + t - 1].norm().item() if t else np.nan)
    phase1 = torch.autograd.grad(logprob.sum(), inputs)[0][0, len(prompt) :].norm(dim=1)  # (L,)
    return np.array(whole), np.array(before), phase1.numpy()


def token_columns(batch: TokenBatch, seed: int) -> dict:
    """The columns of the truth's file, and `whole`, `before` and `phase1` (N,), NaN where not computed.

    `before` is on the token that holds the embedding. Every token is as likely to be chosen as any other.
    """
    columns, lengths = describe(batch, {}), batch.mask.sum(1).tolist()
    N, first, progress = len(columns["token"]), 0, Progress("gradients of single tokens", len(lengths))
    measured = np.zeros(N, bool)
    measured[np.random.default_rng(seed).choice(N, min(N, EACH * len(lengths)), replace=False)] = True
    columns |= {name: np.full(N, np.nan) for name in ("whole", "before", "phase1")}
    columns["relative"] = columns["position"] / np.repeat(lengths, lengths)
    for i, L in enumerate(lengths):
        chosen = np.flatnonzero(measured[first : first + L])  # (n,)
        prompt = batch.ask.prompts[int(batch.group[i])]
        whole, before, phase1 = token_gradients(batch.ask.policy.model, prompt, batch.tokens[i, :L].cpu(),
                                                chosen.tolist())
        columns["whole"][first + chosen] = whole
        columns["before"][first + chosen[chosen > 0] - 1] = before[chosen > 0]
        columns["phase1"][first : first + L - 1] = phase1[:-1]  # there is no loss behind the last token
        first += L
        progress.show(i + 1)
    return columns


def three_sizes(c: dict) -> dict[str, np.ndarray]:
    """How much gradient each token (N,) gets from GRPO's credit, by the three measures."""
    A = np.abs(c["advantage"])
    return dict(zip(MEASURES, (A * np.abs(c["logprob"]), A * c["logit_grad"], A * c["whole"])))


def known(c: dict, *columns: np.ndarray) -> np.ndarray:
    """Which tokens (N,) have a number in each column, and belong to a response with an advantage."""
    return np.all([np.isfinite(x) for x in columns], axis=0) & (c["advantage"] != 0)


def type_ratio(x: np.ndarray, c: dict, use: np.ndarray, matched: bool) -> Estimate:
    """Mean of x (N,) on filler over its mean on reasoning, among the tokens `use` (N,).

    matched: filler is weighted so that both types have reasoning's distribution over the tenths of a response.
    """
    tenth = bins(c["relative"], 10) if matched else np.zeros(len(x), int)  # (N,)
    columns = [np.where(use & (c["role"] == role) & (tenth == b), values, 0.0) for b in range(tenth.max() + 1)
               for role in (FILLER, REASONING) for values in (x, np.ones(len(x)))]
    def statistic(s: np.ndarray) -> np.ndarray:
        filler, n_filler, reasoning, n_reasoning = np.moveaxis(s.reshape(*s.shape[:-1], -1, 4), -1, 0)  # (..., tenths)
        both = (n_filler > 0) & (n_reasoning > 0)
        weighted = np.where(both, n_reasoning * filler / np.maximum(n_filler, 1), 0).sum(-1)
        return weighted / np.where(both, reasoning, 0).sum(-1)
    return bootstrap(statistic, sums(c["group"].astype(int), *columns))


def mean_ratio(x: np.ndarray, over: np.ndarray, under: np.ndarray, puzzle: np.ndarray) -> Estimate:
    """Mean of x (N,) on the tokens `over`, divided by its mean on `under`."""
    columns = [np.where(use, values, 0.0) for use in (over, under) for values in (x, np.ones(len(x)))]
    return bootstrap(lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3]), sums(puzzle, *columns))


def tables_tokens(c: dict) -> list[Table]:
    """The three measures: rank correlations, and filler against reasoning."""
    sizes = three_sizes(c)
    use = known(c, *sizes.values())
    puzzle = c["group"][use].astype(int)
    pairs = [(a, b) for i, a in enumerate(MEASURES) for b in MEASURES[i + 1 :]]
    correlations = [[a, b, cell(correlate(ranks(sizes[a][use]), ranks(sizes[b][use]), puzzle), 3),
                     cell(within(sizes[a], sizes[b], c, use, True), 3)] for a, b in pairs]
    opening, decides = (use & np.isin(c["kind"], [KINDS.index(k) for k in kinds]) for kinds in (["opening"], DECISIONS))
    types = [[name, *(cell(type_ratio(x, c, use, matched)) for matched in (False, True)),
              cell(mean_ratio(x, opening, decides, c["group"].astype(int)))] for name, x in sizes.items()]
    note = (f"{use.sum():,} tokens, drawn from all those of responses that have an advantage. In brackets, 95% "
            "bootstrap intervals over puzzles.")
    return [Table("Three sizes of a token's gradient: rank correlation", note, ["", "", "all", "within"], correlations),
            Table("Filler against reasoning", f"Mean size on filler over that on reasoning. Matched: with the same "
                  f"distribution over the tenths of a response. {note}",
                  ["", "filler / reasoning", "matched for position", "opening words / operands and operators"], types)]


def table_phase1(c: dict) -> Table:
    """The original's first phase, and what is left of it when position is controlled."""
    puzzle, fifth, rows = c["group"].astype(int), bins(c["relative"], 5), []
    for name, x in {"all losses behind the token (phase 1)": c["phase1"], "the next token's loss alone": c["before"],
                    "grad log pi of the token itself, all parameters": c["whole"]}.items():
        use = np.isfinite(x)
        level, tenth, role = np.log(x[use] + 1e-30), bins(c["relative"], 10)[use], c["role"][use]
        by_position, by_both = explained(level, tenth), explained(level, tenth * 3 + role)
        t = t_statistics(x[use], c["position"][use].astype(int))
        rows.append([name, cell(mean_ratio(x, use & (fifth == 0), use & (fifth == 4), puzzle)),
                     *(cell(type_ratio(x, c, use, matched)) for matched in (False, True)),
                     f"{by_position:.0%}", f"{explained(level, role):.0%}", f"{by_both - by_position:.0%}",
                     f"{(t > 3).mean():.0%}" if len(t) else ""])
    return Table("Phase 1 of the original work: gradients at the input embeddings", (
        "No credit: all log-probs of a response summed, as cross-entropy does. First over last fifth of a response; "
        "filler over reasoning, as it is and matched for position; the share of the variance of its logarithm that the "
        "tenth of the response explains, that the type explains, and that the type adds to the tenth; positions at "
        "which the t-statistic of the norm exceeds 3 (per position, across responses; it says nothing, because a norm "
        "is never below 0). In brackets, 95% bootstrap intervals over puzzles."),
        ["norm of the gradient of", "first / last fifth", "filler / reasoning", "matched for position",
         "explained by position", "by type", "by type, beyond position", "t > 3"], rows)


def draw_sizes(tables: Path, file: Path) -> None:
    """Filler against reasoning by the three measures, as tables_tokens tells it, read from the file of the tables."""
    header, rows = read_table(tables, "Filler against reasoning")
    figure, ((axis,),) = new_figure(1, 1, 3.2)
    axis.axvline(1, color=GREY, lw=1)
    for i, ((name, *cells), colour, marker) in enumerate(zip(rows, PALETTE, "os^")):
        for y, text in enumerate(cells):
            draw_estimate(axis, y + 0.2 * (i - 1), read_cell(text), colour=colour, marker=marker)
        axis.plot([], [], marker, color=colour, label=name)
    axis.set_yticks(range(len(header) - 1), [name.replace(" / ", " /\n") for name in header[1:]])
    axis.set(xlim=(0, None), xlabel="ratio of mean sizes, 95% interval", title="Which tokens get more gradient?")
    axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    save_figure(figure, file)
