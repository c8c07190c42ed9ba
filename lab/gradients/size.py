"""How large a token's gradient is: the original work's measure, the logits' gradient, and the exact one.

The original work measured abs(credit * log p) and found 31% more on filler. Beside that measure stand the gradient in
logit space, abs(credit) * ||onehot - p||, and the exact one, abs(credit) times the norm of grad log pi(token) over all
parameters. The original's phase 1, the gradient of the summed log-probs at the input embeddings, is repeated as the
mistake it is: the embedding of token j collects the gradients of all losses behind j, so early tokens have more.

Run it:  python -m lab.gradients.measure
"""
import itertools
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
from tasks.text import FILLER, REASONING, ROLES

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


def token_columns(batch: TokenBatch, seed: int, each: int | None = None) -> dict:
    """The columns of the truth's file, and `whole`, `before` and `phase1` (N,), NaN where not computed.

    `before` is on the token that holds the embedding. each: how many tokens of a response to choose on average, EACH
    without it. Every token is as likely to be chosen as any other.
    """
    model, columns, lengths = batch.ask.policy.model, describe(batch, {}), batch.mask.sum(1).tolist()
    N, first, progress = len(columns["token"]), 0, Progress("gradients of single tokens", len(lengths))
    measured = np.zeros(N, bool)
    measured[np.random.default_rng(seed).choice(N, min(N, (each or EACH) * len(lengths)), replace=False)] = True
    columns |= {name: np.full(N, np.nan) for name in ("whole", "before", "phase1")}
    columns |= {"group": columns["group"].astype(int), "relative": columns["position"] / np.repeat(lengths, lengths)}
    for i, L in enumerate(lengths):
        chosen = np.flatnonzero(measured[first : first + L])  # (n,)
        prompt = batch.ask.prompts[int(batch.group[i])]
        whole, before, phase1 = token_gradients(model, prompt, batch.tokens[i, :L], chosen.tolist())
        columns["whole"][first + chosen] = whole
        columns["before"][first + chosen[chosen > 0] - 1] = before[chosen > 0]
        columns["phase1"][first : first + L - 1] = phase1[:-1]  # there is no loss behind the last token
        first += L
        progress.show(i + 1)
    return columns


def mean_ratio(x: np.ndarray, over: np.ndarray, under: np.ndarray, puzzle: np.ndarray,
               stratum: np.ndarray | int = 0) -> Estimate:
    """Mean of x (N,) on the tokens `over` (N,) bool, divided by its mean on `under`.

    Given strata (N,), `over` is weighted so that it has the distribution of `under` over them.
    """
    columns = [np.where(use & (stratum == i), values, 0.0) for i in range(np.max(stratum) + 1)
               for use in (over, under) for values in (x, np.ones(len(x)))]

    def statistic(s: np.ndarray) -> np.ndarray:
        over, n_over, under, n_under = np.moveaxis(s.reshape(*s.shape[:-1], -1, 4), -1, 0)  # (..., strata) each
        both = (n_over > 0) & (n_under > 0)
        weighted = np.where(both, n_under * over / np.maximum(n_over, 1), 0).sum(-1)
        return weighted / np.where(both, under, 0).sum(-1)

    return bootstrap(statistic, sums(puzzle, *columns))


def type_ratios(x: np.ndarray, c: dict, use: np.ndarray) -> list[str]:
    """Filler against reasoning among the tokens `use` (N,), as it is and matched for the tenth of the response."""
    filler, reasoning = (use & (c["role"] == role) for role in (FILLER, REASONING))
    return [cell(mean_ratio(x, filler, reasoning, c["group"], stratum)) for stratum in (0, bins(c["relative"], 10))]


def tables_tokens(c: dict) -> list[Table]:
    """The three measures of the gradient from GRPO's credit: rank correlations, and filler against reasoning."""
    A = np.abs(c["advantage"])
    sizes = dict(zip(MEASURES, (A * np.abs(c["logprob"]), A * c["logit_grad"], A * c["whole"])))
    use = np.isfinite(c["whole"]) & (A > 0)
    pairs = [[a, b, cell(correlate(ranks(sizes[a][use]), ranks(sizes[b][use]), c["group"][use]), 3),
              cell(within(sizes[a], sizes[b], c, use, True), 3)] for a, b in itertools.combinations(MEASURES, 2)]
    opening, decides = (use & np.isin(c["kind"], [KINDS.index(k) for k in kinds]) for kinds in (["opening"], DECISIONS))
    types = [[name, *type_ratios(x, c, use), cell(mean_ratio(x, opening, decides, c["group"]))]
             for name, x in sizes.items()]
    note = (f"{use.sum():,} tokens, drawn from all those of responses that have an advantage. In brackets, 95% "
            "bootstrap intervals over puzzles.")
    return [Table("Three sizes of a token's gradient: rank correlation", note, ["", "", "all", "within"], pairs),
            Table("Filler against reasoning", f"Mean size on filler over that on reasoning. Matched: with the same "
                  f"distribution over the tenths of a response. {note}",
                  ["", "filler / reasoning", "matched for position", "opening words / operands and operators"], types)]


def table_phase1(c: dict) -> Table:
    """The original's first phase, and what is left of it when position is controlled."""
    fifth, tenth, rows = bins(c["relative"], 5), bins(c["relative"], 10), []
    for name, x in {"all losses behind the token (phase 1)": c["phase1"],
                    "the next token's loss alone": c["before"]}.items():
        use = np.isfinite(x)
        level, place = np.log(x[use] + 1e-30), tenth[use]
        by_position = explained(level, place)
        beyond = explained(level, place * len(ROLES) + c["role"][use]) - by_position
        t = t_statistics(x[use], c["position"][use].astype(int))
        rows.append([name, cell(mean_ratio(x, use & (fifth == 0), use & (fifth == 4), c["group"])),
                     *type_ratios(x, c, use), f"{by_position:.0%}", f"{beyond:.0%}",
                     f"{(t > 3).mean():.0%}" if len(t) else ""])
    return Table("Phase 1 of the original work: gradients at the input embeddings", (
        "No credit: all log-probs of a response summed, as cross-entropy does. First over last fifth of a response; "
        "filler over reasoning, as it is and matched for position; the share of the variance of its logarithm that the "
        "tenth of the response explains, and that the type adds to it; positions at which the t-statistic of the norm "
        "exceeds 3 (per position, across responses; it says nothing, because a norm is never below 0). In brackets, "
        "95% bootstrap intervals over puzzles."),
        ["norm of the gradient of", "first / last fifth", "filler / reasoning", "matched for position",
         "explained by position", "by type, beyond position", "t > 3"], rows)


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
