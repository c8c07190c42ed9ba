"""Gradient anatomy: how large a token's gradient is, what a step's gradient is made of, and which method's is biased.

Four questions, each asked of a fixed policy (and, with --run, along a run's checkpoints):

1. Which tokens get the most gradient? The original work measured abs(credit * log p) and found 31% more on filler.
   Beside it stand the gradient in logit space, abs(credit) * ||onehot - p||, and the exact one, abs(credit) * the norm
   of grad log pi(token) over all parameters; with and without control for position.
   Its first phase, the gradient of the summed cross-entropy at the input embeddings, is repeated as the mistake it is:
   the embedding of token j collects the gradients of all losses behind j, so early tokens have more.
2. Is the gradient of a group of rank 2? So a paper claims of GRPO, whatever the group size R, without saying of which
   matrix. Here: rollouts x parameters (row i is A_i g_i), each weight matrix, and tokens x (vocabulary * hidden), whose
   row is credit * (onehot - p) outer the hidden state. Rewards are right or wrong, nothing else, the only case in which
   a 2 is in the algebra: the group's gradient is then A+ S+ + A- S-, with S+ and S- the sums over right and wrong, the
   two rows of the first matrix.
   Controls: shuffled advantages, random credit, all credit 1 (imitation), a reward for each calculation, and A*.
3. When is the group mean the best baseline? When the size of a response's gradient says nothing about its success.
4. How biased and how noisy is each method's gradient?

Run it:  python -m experiments.gradients                                  the bundled model, about four minutes
         python -m experiments.gradients --run runs/watched               also along runs/watched/checkpoints
"""
import argparse
import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import grpo
from analyze import COLOURS, Estimate, Table, cell, interval, new_figure, plt, pm, ranks, ratio, t_statistics
from countdown_task import FILLER, REASONING, Codec, Problem, generate_problems
from experiments.ground_truth import (KINDS, add_values, bootstrap, centred, correlate, credit_gradients, describe,
                                      jackknife, sample_truth, sums, the_critic)
from mitigations import MITIGATIONS, TokenBatch, group_advantage, reward_decomposition
from qwen2_model import Qwen2, load_model, read_json, split_fused, take
from train import BUNDLED, check_lengths, fail

LIMIT = 140  # tokens of a response
EACH = 12  # tokens whose exact gradient is computed, for each response on average
SIZES = (2, 4, 8, 16)  # of a group
CONTROLS_AT = 8  # group size at which the controls are made
TRUTH = 4, 24  # questions of which A* is sampled, for that control, and rollouts of a token
SPARSITY = ("Hoyer", "Gini", "below rms / 100")
MEASURES = ("abs(A log p)", "abs(A)·‖onehot - p‖", "abs(A)·‖grad log p‖, all parameters")


# ----------------------------------------------------------------------------------------------- the responses


def sample_groups(model: Qwen2, codec: Codec, problems: list[Problem], answers: int, key: tuple[int, int],
                  critic=None) -> TokenBatch:
    """Responses to training puzzles."""
    uniforms = grpo.draw_uniforms(*key, len(problems), answers, LIMIT)
    return grpo.rollout(model, codec, problems, uniforms, key=key, reference=model, critic=critic)


def by_success(batch: TokenBatch) -> TokenBatch:
    """The same with rewards that are right or wrong and nothing else."""
    G = len(batch.text) // len(batch.numbers)
    advantage = group_advantage(batch.success.view(-1, G)).flatten()
    return dataclasses.replace(batch, reward=batch.success, advantage=advantage)


# ------------------------------------------------------------------------------------------ 1. a token's gradient


def token_gradients(model: Qwen2, prompt: list[int], tokens: Tensor, chosen: list[int]) -> tuple[np.ndarray, ...]:
    """Of a response (L,): the norm of grad log pi, over all parameters, of its tokens `chosen` (n,); the norm (n,) of
    its gradient at the input embedding of the token before it, NaN for the first; and at the input embedding of every
    token, the norm (L,) of the gradient of all its log-probs' sum: phase 1 of the original work."""
    inputs, weights = [], list(model.parameters())
    hook = model.model["embed_tokens"].register_forward_hook(lambda *call: inputs.append(call[-1]))
    row = torch.cat((torch.tensor(prompt), tokens))  # (P + L,)
    states = model.hidden(row[None])[0, len(prompt) - 1 : -1]  # (L, D)
    hook.remove()
    logprob = take(model.log_probs(states), tokens)  # (L,)
    whole, before = [], []
    for t in chosen:
        *of_weights, at_inputs = torch.autograd.grad(logprob[t], weights + inputs, retain_graph=True)
        whole.append(sum(g.square().sum() for g in of_weights).sqrt().item())
        before.append(at_inputs[0, len(prompt) + t - 1].norm().item() if t else np.nan)
    summed = torch.autograd.grad(logprob.sum(), inputs)[0][0, len(prompt) :]  # (L, D)
    return np.array(whole), np.array(before), summed.norm(dim=1).detach().numpy()


def token_columns(model: Qwen2, codec: Codec, problems: list[Problem], batch: TokenBatch, seed: int) -> dict:
    """The log's columns and, NaN where not computed, the exact norm `whole`, `before` and `phase1` of each token."""
    columns, lengths, start = describe(batch, {}), batch.mask.sum(1).tolist(), time.perf_counter()
    N, first = len(columns["token"]), 0
    measured = np.zeros(N, bool)
    measured[np.random.default_rng(seed).choice(N, min(N, EACH * len(lengths)), replace=False)] = True
    columns |= {name: np.full(N, np.nan) for name in ("whole", "before", "phase1")}
    columns["relative"] = columns["position"] / np.repeat(lengths, lengths)
    for i, L in enumerate(lengths):
        place = first + np.flatnonzero(measured[first : first + L])  # (n,)
        prompt = codec.prompt(problems[int(batch.group[i])])
        whole, before, phase1 = token_gradients(model, prompt, batch.tokens[i, :L].cpu(), (place - first).tolist())
        columns["whole"][place] = whole
        columns["before"][place[place > first] - 1] = before[place > first]  # on the token that holds the embedding
        columns["phase1"][first : first + L - 1] = phase1[:-1]  # behind the last one there is no loss
        first += L
        grpo.progress("gradients of single tokens", i + 1, len(lengths), start)
    return columns


def three_sizes(c: dict) -> dict[str, np.ndarray]:
    """How much gradient each token (N,) gets from GRPO's credit, by the three measures."""
    A = np.abs(c["advantage"])
    return dict(zip(MEASURES, (A * np.abs(c["logprob"]), A * c["logit_grad"], A * c["whole"])))


def type_ratio(x: np.ndarray, c: dict, use: np.ndarray, matched: bool) -> Estimate:
    """Mean of x (N,) on filler over its mean on reasoning, among the tokens `use`; matched: both types with reasoning's
    distribution over the tenths of a response."""
    place = np.minimum((c["relative"] * 10).astype(int), 9) if matched else np.zeros(len(x), int)  # (N,)
    columns = [(np.where(use & (c["role"] == role) & (place == b), v, 0.0)) for b in range(place.max() + 1)
               for role in (FILLER, REASONING) for v in (x, np.ones(len(x)))]
    def statistic(s: np.ndarray) -> np.ndarray:
        fx, fn, rx, rn = np.moveaxis(s.reshape(*s.shape[:-1], -1, 4), -1, 0)  # (..., bins) each
        both = (fn > 0) & (rn > 0)
        filler = np.where(both, rn * fx / np.maximum(fn, 1), 0).sum(-1)
        return filler / np.where(both, rx, 0).sum(-1)
    return bootstrap(statistic, sums(c["group"].astype(int), *columns))


def mean_ratio(x: np.ndarray, over: np.ndarray, under: np.ndarray, question: np.ndarray) -> Estimate:
    """Mean of x (N,) on the tokens `over`, divided by its mean on `under`."""
    columns = [np.where(w, v, 0.0) for w in (over, under) for v in (x, np.ones(len(x)))]
    return bootstrap(lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3]), sums(question, *columns))


def known(c: dict, *columns: np.ndarray) -> np.ndarray:
    """Which tokens (N,) have a number in each column, and belong to a response with an advantage."""
    return np.all([np.isfinite(x) for x in columns], axis=0) & (c["advantage"] != 0)


def tables_tokens(c: dict) -> list[Table]:
    """The three measures: rank correlations, filler against reasoning, and by kind."""
    sizes = three_sizes(c)
    use = known(c, *sizes.values())
    question, response = c["group"][use].astype(int), c["response"][use]
    pairs = [(a, b) for i, a in enumerate(MEASURES) for b in MEASURES[i + 1 :]]
    correlations = [[a, b, cell(correlate(ranks(sizes[a][use]), ranks(sizes[b][use]), question), 3),
                     cell(correlate(*(centred(sizes[k][use], response, True) for k in (a, b)), question), 3)]
                    for a, b in pairs]
    types = [[name] + [cell(type_ratio(np.nan_to_num(x), c, use, matched)) for matched in (False, True)] + [
             cell(mean_ratio(np.nan_to_num(x), use & (c["kind"] == KINDS.index("opening")),
                             use & (c["kind"] < 2), c["group"].astype(int)))] for name, x in sizes.items()]
    kinds = [[name] + [f"{x[here].mean() / x[use].mean():.2f}" if here.any() else ""
                       for here in (use & (c["kind"] == k) for k in range(len(KINDS)))] for name, x in sizes.items()]
    drawn = f"{use.sum():,} tokens, drawn from all those of responses that have an advantage."
    note = f"{drawn} In brackets, 95% bootstrap intervals over questions."
    return [Table("Three sizes of a token's gradient: rank correlation", note, ["", "", "all", "within"], correlations),
            Table("Filler against reasoning", f"Mean size on filler over that on reasoning. Matched: with the same "
                  f"distribution over the tenths of a response. {note}",
                  ["", "filler / reasoning", "matched for position", "opening words / operands and operators"], types),
            Table("By kind of token", f"Mean size over the mean of all tokens. {drawn}", ["", *KINDS], kinds)]


def table_phase1(c: dict) -> Table:
    """The original's first phase, and what is left of it when position is controlled."""
    question, rows = c["group"].astype(int), []
    fifth = np.minimum((c["relative"] * 5).astype(int), 4)
    for name, x in {"all losses behind the token (phase 1)": c["phase1"], "the next token's loss alone": c["before"],
                    "grad log pi of the token itself, all parameters": c["whole"]}.items():
        some, flat = np.isfinite(x), np.nan_to_num(x)
        t = t_statistics(x[some], c["position"][some].astype(int))
        position, role = np.minimum((c["relative"][some] * 10).astype(int), 9), c["role"][some]
        level = np.log(x[some] + 1e-30)
        by_position, by_both = explained(level, position), explained(level, position * 3 + role)
        rows.append([name, cell(mean_ratio(flat, some & (fifth == 0), some & (fifth == 4), question)),
                     *(cell(type_ratio(flat, c, some, matched)) for matched in (False, True)),
                     f"{by_position:.0%}", f"{explained(level, role):.0%}", f"{by_both - by_position:.0%}",
                     f"{(t > 3).mean():.0%}" if len(t) else ""])
    return Table("Phase 1 of the original work: gradients at the input embeddings", (
        "No credit: all log-probs of a response summed, as cross-entropy does. First over last fifth of a response; "
        "filler over reasoning, as it is and matched for position; the share of the variance of its logarithm that the "
        "tenth of the response explains, that the type explains, and that the type adds to the tenth; positions at "
        "which the t-statistic of the norm exceeds 3 (per position, across responses; a norm is never below 0, so that "
        "it says nothing). In brackets, 95% bootstrap intervals over questions."),
        ["norm of the gradient of", "first / last fifth", "filler / reasoning", "matched for position",
         "explained by position", "by type", "by type, beyond position", "t > 3"], rows)


def explained(x: np.ndarray, label: np.ndarray) -> float:
    """Share of the variance of x (n,) that lies between labels (n,)."""
    count = np.maximum(np.bincount(label), 1)
    return float(((np.bincount(label, x) / count)[label] - x.mean()).var() / x.var())


# --------------------------------------------------------------------------------------------- 2. how many directions


def effective_rank(s: np.ndarray) -> float:
    """exp of the entropy of singular values (k,) as shares of their sum (Roy and Vetterli, 2007); NaN if all are 0."""
    if not s.any():
        return float("nan")
    p = s[s > 0] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def stable_rank(s: np.ndarray) -> float:
    """Energy over that of the largest singular value (k,)."""
    return ratio((s**2).sum(), s.max() ** 2)


def components(s: np.ndarray, energy: float) -> int:
    """How many of the largest singular values (k,) it takes for a share of the energy."""
    part = np.sort(s**2)[::-1].cumsum()
    return int(np.searchsorted(part, energy * part[-1] * (1 - 1e-9)) + 1)


def products(x: Tensor, y: Tensor) -> np.ndarray:
    """All inner products (n, m) of the rows of x (n, P) and y (m, P), in double precision."""
    return (x.double() @ y.double().T).cpu().numpy()


def gram_spectrum(gram: np.ndarray) -> np.ndarray:
    """Singular values of X from X X^T (n, n), in double precision; what is below its rounding is 0."""
    values = np.linalg.eigvalsh(gram.astype(np.float64))[::-1]
    return np.sqrt(np.where(values > 1e-12 * values.max(), values, 0.0)) if values.max() > 0 else np.zeros(len(values))


def weight_matrices(model: Qwen2, flat: Tensor) -> dict[str, Tensor]:
    """A gradient (P,) of all parameters as the weight matrices of a checkpoint, by name."""
    names, weights = zip(*model.named_parameters())
    parts = dict(zip(names, (g.view_as(w) for g, w in zip(flat.split([w.numel() for w in weights]), weights))))
    return {name: g for name, g in split_fused(model.config, parts).items() if g.dim() == 2}


def short(name: str) -> str:
    """What kind of matrix a weight is: `q_proj` of model.layers.0.self_attn.q_proj.weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


@torch.no_grad()
def token_gram(model: Qwen2, group: TokenBatch, credit: Tensor) -> np.ndarray:
    """X X^T (N, N) of the N tokens of some responses: row of X = credit * (onehot - p) outer hidden state, of size V D.

    <a outer b, c outer d> = <a, c> <b, d>, so the rows are never made.
    """
    states = group.hidden()[group.mask]  # (N, D)
    error = -model.log_probs(states).exp()  # (N, V)
    error[torch.arange(len(states)), group.tokens[group.mask]] += 1
    c, error, states = credit[group.mask].double(), error.double(), states.double()
    return ((c[:, None] * c) * (error @ error.T) * (states @ states.T)).cpu().numpy()


def spectra(model: Qwen2, group: TokenBatch, credit: Tensor, gradients: Tensor) -> dict[str, list]:
    """Singular values of the matrices of R responses with credit (R, T), which is in their gradients (R, P)."""
    right = group.success > 0  # (R,)
    sides = torch.stack([gradients[side].sum(0) for side in (right, ~right)])  # (2, P)
    found = {"right, wrong x parameters": [gram_spectrum(products(sides, sides))],
             "rollouts x parameters": [gram_spectrum(products(gradients, gradients))],
             "tokens x (vocabulary · hidden)": [gram_spectrum(token_gram(model, group, credit))]}
    for name, g in weight_matrices(model, gradients.sum(0)).items():
        found.setdefault(short(name), []).append(torch.linalg.svdvals(g.double()).cpu().numpy())
    return found


def group_of(batch: TokenBatch, q: int, R: int) -> TokenBatch:
    """The first R responses to question q as a batch of their own, their advantages those of right against wrong."""
    B, Q = len(batch.text), len(batch.numbers)
    rows = slice(B // Q * q, B // Q * q + R)
    own = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    own = {name: x[rows] for name, x in own.items() if isinstance(x, (Tensor, list)) and len(x) == B}
    own |= {"group": torch.zeros_like(own["group"]), "numbers": [batch.numbers[q]], "target": [batch.target[q]]}
    return by_success(dataclasses.replace(batch, **own, hidden=lambda: batch.hidden()[rows]))


def controls(group: TokenBatch, a_star: Tensor | None, rng: np.random.Generator) -> dict[str, Tensor]:
    """By name, other credit (R, T) than GRPO's for a group."""
    A, mask = group.advantage[:, None], group.mask
    w = torch.from_numpy(rng.exponential(size=mask.shape)).float()  # (R, T)
    credits = {"shuffled advantages": A[torch.from_numpy(rng.permutation(len(A)))] * mask,
               "random credit": A * w * mask, "imitation: credit 1": mask.float(),
               "a reward for each calculation": reward_decomposition(group, stepwise=True)}
    return credits if a_star is None else credits | {"A*": a_star}


def rank_rows(model: Qwen2, codec: Codec, problems: list[Problem], batch: TokenBatch, truth: Tensor,
              seed: int) -> list[dict]:
    """One row for each question, group size, kind of credit and matrix: its measures of rank, and its spectrum.

    truth (B, T): A* where it was sampled. A group whose answers are all right or all wrong teaches nothing.
    """
    found, G, rng, start = [], len(batch.text) // len(problems), np.random.default_rng(seed), time.perf_counter()
    for q, R in itertools.product(range(len(problems)), SIZES):
        group = group_of(batch, q, R)
        if not group.advantage.any():
            continue
        credits = {"GRPO": group.advantage[:, None] * group.mask}
        if R == CONTROLS_AT:
            credits |= controls(group, truth[G * q : G * q + R] if q < TRUTH[0] else None, rng)
        for variant, credit in credits.items():
            gradients = torch.cat(list(credit_gradients(model, codec, [problems[q]], group, credit[None], 1)))  # (R, P)
            for matrix, all_values in spectra(model, group, credit, gradients).items():
                found += [{"question": q, "R": R, "variant": variant, "matrix": matrix, "spectrum": s,
                           "effective": effective_rank(s), "stable": stable_rank(s),
                           **{f"{e:.0%}": components(s, e) for e in (0.9, 0.95, 0.99)}} for s in all_values]
        grpo.progress("ranks", q + 1, len(problems), start)
    return found


def over_questions(found: list[dict], measure: str, **where) -> str:
    """Mean of a measure over questions, ± half of its 95% interval, as a cell; a question's matrices averaged first."""
    values = {}
    for row in found:
        if all(row[k] == v for k, v in where.items()) and np.isfinite(row[measure]):
            values.setdefault(row["question"], []).append(row[measure])
    return pm(*interval([np.mean(v) for v in values.values()]), 1) if values else ""


def tables_rank(found: list[dict]) -> list[Table]:
    """Effective rank by group size, all measures at one size, and under the controls."""
    matrices = list(dict.fromkeys(row["matrix"] for row in found))
    variants = list(dict.fromkeys(row["variant"] for row in found))
    count = len({row["question"] for row in found})
    note = (f"Mean over up to {count} questions, those whose answers are not all alike, ± half of its 95% interval "
            "(Student's t); weight matrices averaged over layers.")
    by_size = [[m] + [over_questions(found, "effective", matrix=m, variant="GRPO", R=R) for R in SIZES]
               for m in matrices]
    names = ("effective", "stable", "90%", "95%", "99%")
    by_measure = [[m] + [over_questions(found, n, matrix=m, variant="GRPO", R=CONTROLS_AT) for n in names]
                  for m in matrices]
    by_variant = [[v] + [over_questions(found, "effective", matrix=m, variant=v, R=CONTROLS_AT) for m in matrices]
                  for v in variants]
    return [Table("Effective rank by group size", f"GRPO, rewards right or wrong. {note}",
                  ["matrix", *(f"R = {R}" for R in SIZES)], by_size),
            Table(f"Measures of rank, R = {CONTROLS_AT}", f"GRPO; stable rank; singular values for 90, 95, 99% of the "
                  f"energy. {note}", ["matrix", "effective rank", "stable rank", *names[2:]], by_measure),
            Table(f"Effective rank under other credit, R = {CONTROLS_AT}",
                  f"A* on the first {TRUTH[0]} questions. {note}", ["credit", *matrices], by_variant)]


# ------------------------------------------------------------------------------------------------- 3. the baseline


def table_baseline(batch: TokenBatch, norms: np.ndarray) -> Table:
    """The noise of (r - b) grad log pi by baseline b, from the squared norms (Q, G) of responses' gradients.

    The mean of the estimator is the same with each b that does not see the response itself, so its variance is
    E (r - b)^2 |g|^2 minus a constant.
    """
    Q, G = norms.shape
    r = batch.success.view(Q, G).cpu().numpy().astype(float)
    rows = []
    for R in SIZES:
        if R > G:
            continue
        s, n = r[:, :R], norms[:, :R]
        others = (s.sum(1, keepdims=True) - s) / (R - 1)  # (Q, R) leave-one-out mean
        best = ((s * n).sum(1, keepdims=True) - s * n) / (n.sum(1, keepdims=True) - n)  # (Q, R) leave-one-out optimum
        noise = {k: ((s - b) ** 2 * n).sum(1) for k, b in (("none", 0.0), ("others", others), ("best", best),
                                                           ("mean", s.mean(1, keepdims=True)))}
        columns = np.stack([noise[k] for k in ("none", "mean", "best", "others")], axis=1)  # (Q, 4)
        cells = [cell(bootstrap(lambda x, i=i: x[..., i] / x[..., 3], columns)) for i in range(3)]
        rows.append([f"{R}", cells[0], "1", f"{cells[1]}", f"{((R - 1) / R) ** 2:.2f}", cells[2]])
    return Table("Which baseline is best?", (
        "E (r - b)^2 |grad log pi(response)|^2 over that with b the mean of the other answers, r right or wrong. The "
        "group's mean, the response itself included, makes every credit (R - 1)/R as large, and so this figure "
        "((R - 1)/R)^2 of it: a shorter step, not a better direction. Optimum: the mean of the others' rewards, "
        f"weighted by their |grad|^2. {correlation_text(r, norms)} 95% bootstrap intervals over questions."),
        ["R", "no baseline", "others' mean", "group mean", "((R - 1)/R)^2", "optimum"], rows)


def correlation_text(r: np.ndarray, norms: np.ndarray) -> str:
    """What decides it: whether success goes with a large gradient within a question."""
    Q, G = r.shape
    question, response = np.repeat(np.arange(Q), G), np.repeat(np.arange(Q), G)
    x, y = (centred(v.flatten(), response, False) for v in (r, norms))
    return f"Within questions, success and |grad|^2 correlate by {cell(correlate(x, y, question))}."


# --------------------------------------------------------------------------------------- 4. bias and noise of methods


def cross(gram: np.ndarray, use: np.ndarray) -> float:
    """Unbiased estimate of <E x, E y> from the products (n, n) of two methods' gradients: of different batches."""
    part, n = gram[np.ix_(use, use)], use.sum()
    return (part.sum() - np.trace(part)) / (n * (n - 1))


def signal_to_noise(gram: np.ndarray, use: np.ndarray) -> float:
    """|E g|^2 / tr Cov(g) from the products (n, n): (|mean|^2 - S / n) / S is this."""
    part = gram[np.ix_(use, use)]
    noise = (np.trace(part) - part.sum() / use.sum()) / (use.sum() - 1)
    return cross(gram, use) / noise


def cosines(xy: np.ndarray, xx: np.ndarray, yy: np.ndarray, use: np.ndarray) -> tuple[float, float]:
    """Of the means over the same batches; and of the expectations, freed of the noise that makes it smaller and that,
    shared, makes it larger (NaN where a method's noise hides its signal)."""
    def total(gram: np.ndarray) -> float:
        return gram[np.ix_(use, use)].sum()
    signals = cross(xx, use) * cross(yy, use)
    clean = cross(xy, use) / np.sqrt(signals) if signals > 0 and cross(xx, use) > 0 else float("nan")
    return total(xy) / np.sqrt(total(xx) * total(yy)), clean


def halves_cosine(yy: np.ndarray) -> float:
    """The cosine of the means of two halves of the batches, averaged over 200 ways to halve them."""
    n, rng, found = len(yy), np.random.default_rng(0), []
    for _ in range(200):
        a, b = np.split(rng.permutation(n)[: n // 2 * 2], 2)
        found.append(yy[np.ix_(a, b)].sum() / np.sqrt(yy[np.ix_(a, a)].sum() * yy[np.ix_(b, b)].sum()))
    return float(np.mean(found))


def method_gradients(model: Qwen2, codec: Codec, critic, batches: int, questions: int, seed: int) -> Tensor:
    """(M + 1, n, P): each method's gradient of n independent batches, as the trainer's loss makes it; the last is the
    unbiased policy gradient, r - mean of the others."""
    out, start = [], time.perf_counter()
    problems = generate_problems(questions * batches, "train", seed=seed + 1)
    for i in range(batches):
        asked = problems[i * questions : (i + 1) * questions]
        batch = sample_groups(model, codec, asked, 8, (seed, 1000 + i), critic)
        with torch.no_grad():
            credits = [method(batch) / batch.mask.sum() for method in MITIGATIONS.values()]
            unbiased = group_advantage(batch.reward.view(questions, -1), "rloo").view(-1, 1)
            credits.append(unbiased * batch.mask / len(batch.text))
        out.append(sum(credit_gradients(model, codec, asked, batch, torch.stack(credits), 8)))  # (M + 1, P)
        grpo.progress("gradients of the methods", i + 1, batches, start)
    return torch.stack(out, dim=1)


def table_methods(gradients: Tensor) -> Table:
    """Signal to noise, and direction against the unbiased policy gradient, of each method's gradient (M + 1, n, P)."""
    n, unbiased = gradients.shape[1], gradients[-1]
    yy, rows = products(unbiased, unbiased), []
    for name, g in zip((*MITIGATIONS, "r - others' mean"), gradients):
        xx, xy = products(g, g), products(g, unbiased)
        ratio_of = jackknife(lambda use: signal_to_noise(xx, use), n)
        same, clean = (jackknife(lambda use, k=k: cosines(xy, xx, yy, use)[k], n) for k in (0, 1))
        rows.append([name, cell(ratio_of, 3), cell(same), cell(clean) if np.isfinite(clean.low) else ""])
    return Table("Noise and bias of each method's gradient", (
        f"{n} batches. Signal to noise: |E g|^2 / tr Cov(g), corrected for the noise in the mean. Cosine of the mean "
        "with that of the unbiased policy gradient of the reward (r - the others' mean) on the same responses; two "
        f"halves of the latter agree by {halves_cosine(yy):.2f}. Corrected: the cosine of the expectations, estimated "
        "from pairs of different batches; empty where noise hides the signal. Jackknife 95% intervals."),
        ["method", "signal to noise", "cosine, same responses", "cosine, corrected"], rows)


# ------------------------------------------------------------------------------------------------- over training


def sparsity(x: np.ndarray) -> dict[str, float]:
    """Hoyer's measure and the Gini coefficient of |x| (P,), 0 where all are equal and 1 where one has all; and the
    share of entries below a hundredth of the root mean square."""
    x, n = np.sort(np.abs(x.astype(np.float64))), len(x)
    rms = np.sqrt((x**2).mean())
    return dict(zip(SPARSITY, ((np.sqrt(n) - x.sum() / (rms * np.sqrt(n))) / (np.sqrt(n) - 1),
                               1 - 2 * ((x / x.sum()) * (n - np.arange(1, n + 1) + 0.5) / n).sum(),
                               (x < 0.01 * rms).mean())))


def checkpoint_row(folder: Path, codec: Codec, problems: list[Problem], answers: int, seed: int) -> list[str]:
    """One line of the table over training."""
    model = prepared(folder)
    batch = by_success(sample_groups(model, codec, problems, answers, (seed, 0)))
    c = token_columns(model, codec, problems, batch, seed)
    sizes = three_sizes(c)
    use = known(c, *sizes.values())
    credit = (batch.advantage[:, None] * batch.mask)[None]  # (1, B, T)
    rows = torch.cat(list(credit_gradients(model, codec, problems, batch, credit, 1))).view(len(problems), answers, -1)
    taught = [g for g in rows if g.any()]  # (G, P) each
    sparse = [sparsity(g.sum(0).numpy()) for g in taught]
    c = token_columns(model, codec, problems, batch, seed)
    sizes = three_sizes(c)
    use = known(c, *sizes.values())
    ranked = [effective_rank(gram_spectrum(products(g, g))) for g in taught]
    figures = [pm(*interval([s[k] for s in sparse])) if sparse else "" for k in SPARSITY]
    return [f"{batch.success.mean():.2f}", *figures, pm(*interval(ranked), 1) if ranked else "",
            *(cell(type_ratio(np.nan_to_num(x), c, use, False)) for x in sizes.values())]


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint of a run."""
    places = sorted((run / "checkpoints").glob("step-*"))
    return [(int(p.name[5:]), p) for p in places if p.name[5:].isdigit()]  # not one that was being written


def table_training(run: Path, problems: list[Problem], answers: int, seed: int) -> Table:
    """How sparse, of what rank, and on which tokens the gradient is along a run."""
    places = [(0, Path(read_json(run / "config.json")["settings"]["model"]))]
    places += checkpoints(run)
    codec, rows, start = Codec(places[0][1]), [], time.perf_counter()
    for i, (step, folder) in enumerate(places):
        rows.append([str(step), *checkpoint_row(folder, codec, problems, answers, seed)])
        eta = (time.perf_counter() - start) / (i + 1) * (len(places) - i - 1)
        print(f"checkpoint of step {step}  ETA {grpo.clock(eta)}", flush=True)
    return Table("Over training", (
        f"{run.name}; the same {len(problems)} puzzles at each checkpoint, {answers} answers each. Sparsity of a "
        "question's gradient, effective rank of its rollouts x parameters, means over questions ± half of a 95% "
        "interval; filler / reasoning by the three measures with 95% bootstrap intervals over questions."),
        ["step", "success", *SPARSITY, "effective rank", *MEASURES], rows)


# ------------------------------------------------------------------------------------------------- the command


def draw(c: dict, found: list[dict], file: Path) -> None:
    """Where the gradient goes by three measures; spectra of the three matrices; effective rank by group size."""
    figure, ((left, middle, right),) = new_figure(3, width=5.0, height=4.0)
    use = known(c, *three_sizes(c).values())
    fifth = np.minimum((c["relative"] * 5).astype(int), 4)
    for (name, x), colour, marker in zip(three_sizes(c).items(), COLOURS.values(), "os^"):
        roles = [[use & (fifth == i) & (c["role"] == role) for role in (FILLER, REASONING)] for i in range(5)]
        points = [mean_ratio(np.nan_to_num(x), *pair, c["group"].astype(int)) for pair in roles]
        low, high = ([getattr(p, k) for p in points] for k in ("low", "high"))
        left.plot(range(5), [p.value for p in points], marker=marker, color=colour, label=name)
        left.fill_between(range(5), low, high, color=colour, alpha=0.15, lw=0)
    left.axhline(1, color="black", lw=0.8)
    left.set(xlabel="position in the response", ylabel="filler / reasoning, mean size", ylim=(0, None), xticks=range(5),
             xticklabels=[f"{20 * i}-{20 * i + 20}%" for i in range(5)],
             title="Who gets more gradient? (95% intervals)")
    matrices = ["rollouts x parameters", "tokens x (vocabulary · hidden)", "q_proj", "down_proj"]
    styles = list(zip(matrices, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), "os^D"))
    for matrix, colour, marker in styles:
        rows = [r for r in found if r["matrix"] == matrix and r["variant"] == "GRPO"]
        shown = np.array([np.pad(r["spectrum"], (0, 40))[:40] / r["spectrum"].max() for r in rows
                          if r["R"] == CONTROLS_AT and r["spectrum"].any()]).mean(0)
        shown = shown[shown > 1e-3]
        middle.plot(np.arange(1, len(shown) + 1), shown, marker=marker, ms=3, color=colour, label=matrix)
        sizes = [R for R in SIZES if any(r["R"] == R for r in rows)]
        means = [interval(question_means(rows, R)) for R in sizes]
        right.errorbar(sizes, *zip(*means), marker=marker, color=colour, capsize=3)
    middle.set(xlabel="singular value", ylabel="share of the largest", yscale="log",
               title=f"Spectra, R = {CONTROLS_AT} (means)")
    right.plot(SIZES, SIZES, color="0.6", ls=":", label="R")
    right.axhline(2, color="black", lw=0.8, ls="--", label="2, the claim")
    right.set(xlabel="group size R", ylabel="effective rank", xscale="log", yscale="log",
              title="Effective rank of the same matrices (95% intervals)")
    right.set_xticks(SIZES, SIZES)
    right.set_yticks((1, 2, 5, 10, 20, 50), (1, 2, 5, 10, 20, 50))
    right.minorticks_off()
    for axis in (left, middle, right):
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def question_means(rows: list[dict], R: int) -> list[float]:
    """The mean effective rank of each question's matrices at a group size."""
    questions = {r["question"] for r in rows if r["R"] == R}
    return [np.nanmean([r["effective"] for r in rows if r["R"] == R and r["question"] == q]) for q in questions]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--run", type=Path, help="a run made with --checkpoint_every: also over its training")
    parser.add_argument("--questions", type=int, default=12, help="training puzzles (default 12)")
    parser.add_argument("--batches", type=int, default=12, help="of 6 x 8 responses, for noise and bias (default 12)")
    parser.add_argument("--critic_batches", type=int, default=30, help="of 96 responses, for `ppo` (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of responses (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args = parser.parse_args()
    if args.questions < TRUTH[0] or args.batches < 4 or args.critic_batches < 1:
        fail(f"--questions must be at least {TRUTH[0]}, --batches 4 and --critic_batches 1")
    if args.run and not checkpoints(args.run):
        fail(f"{args.run} has no checkpoints: make the run with --checkpoint_every 25")
    if args.run and not (args.run / "config.json").is_file():
        fail(f"{args.run} is no run folder: it has no config.json")
    return args


def prepared(folder: str | Path) -> Qwen2:
    """A model to be asked for gradients."""
    model = load_model(folder)
    model.requires_grad_(True).real_vocab = Codec(folder).size
    return model


def sampled_truth(model: Qwen2, codec: Codec, problems: list[Problem], batch: TokenBatch, seed: int) -> Tensor:
    """A* (B, T) of the first CONTROLS_AT answers to the first questions, 0 elsewhere."""
    G = len(batch.text) // len(problems)
    rows = torch.arange(len(batch.text))
    rows = rows[(rows % G < CONTROLS_AT) & (rows // G < TRUTH[0])]
    truth = describe(batch, {})
    skip = ~np.isin(truth["response"], rows.numpy())
    truth["logprob"] = np.where(skip, 0.0, truth["logprob"]).astype(np.float32)  # as if certain: no rollouts
    sample_truth(model, codec, problems, truth, TRUTH[1], seed, LIMIT, lambda: None)
    add_values(truth)
    a_star = torch.zeros_like(batch.logprob)
    return a_star.masked_scatter(batch.mask, torch.from_numpy(truth["a_star"]).float())


def measure(args: argparse.Namespace) -> tuple[list[Table], dict, list[dict]]:
    """All tables, the columns of the tokens and the rows of the ranks."""
    model, codec, G = prepared(args.model), Codec(args.model), max(SIZES)
    problems = generate_problems(args.questions, "train", seed=args.seed)
    check_lengths(model, codec, set(problems), argparse.Namespace(model=args.model, max_new_tokens=LIMIT))
    args.out.mkdir(parents=True, exist_ok=True)
    critic = the_critic(args.out, args.model, model, codec, args.critic_batches)
    batch = by_success(sample_groups(model, codec, problems, G, (args.seed, 0)))
    if not batch.advantage.any():
        raise ValueError("no puzzle got both right and wrong answers, so nothing is taught: ask more --questions, or "
                         "take a --model that solves some")
    print(f"{len(batch.text)} responses; gradients of single tokens", flush=True)
    c = token_columns(model, codec, problems, batch, args.seed)
    print("values by rollouts, for one of the controls", flush=True)
    truth = sampled_truth(model, codec, problems, batch, args.seed)
    print("ranks", flush=True)
    found = rank_rows(model, codec, problems, batch, truth, args.seed)
    ones = credit_gradients(model, codec, problems, batch, batch.mask.float()[None], 1)
    norms = np.array([g.double().square().sum().item() for g in ones]).reshape(len(problems), G)
    tables = [*tables_tokens(c), table_phase1(c), *tables_rank(found), table_baseline(batch, norms)]
    print("gradients of every method", flush=True)
    tables.append(table_methods(method_gradients(model, codec, critic, args.batches, 6, args.seed)))
    if args.run:
        tables.append(table_training(args.run, problems, CONTROLS_AT, args.seed))
    return tables, c, found


def main() -> None:
    """Measure, print, and write gradients.md and gradients.png."""
    args = arguments()
    try:
        tables, c, found = measure(args)
        text = "\n".join(map(str, tables))
        (args.out / "gradients.md").write_text(text, encoding="utf-8")
        draw(c, found, args.out / "gradients.png")
        print(f"{text}\nwrote {args.out}")
    except (ValueError, OSError, FloatingPointError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
