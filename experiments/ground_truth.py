"""Ground truth: what each token of a response did to the chance of success, and which method's credit comes close.

V_t is the probability that a response succeeds when the policy goes on from before token t, and the truth about token t
is A*_t = V_{t+1} - V_t. Plain Monte Carlo asks for V from every prefix, and its error is as large as most differences.
But the token that was taken is one of the two ways in which the policy could have gone on. With p_t its probability,

    V_t = p_t V_{t+1} + (1 - p_t) U_t          U_t: the value if the token at t is any other one

so, backwards from V_L = the response's own success, rollouts are needed for U_t alone: the first token drawn from all
but the actual one, the rest as usual, with what is left of the token limit. Then

    A*_t = V_{t+1} - V_t = (1 - p_t)(V_{t+1} - U_t)          hence |A*_t| <= 1 - p_t, exactly
    Var V_t = p_t^2 Var V_{t+1} + (1 - p_t)^2 Var U_t        Var A*_t = (1 - p_t)^2 (Var V_{t+1} + Var U_t)

and the A* of a response sum to its success - V_0 whatever the errors are. The share of the error that U_t causes grows
with 1 - p_t, and so does the number of rollouts it gets; a token that was all but certain (most are) needs none. We
have not found this form published. The truth is that of success under this policy: not what a perfect player would do.

A second truth knows no policy: on operands, operators and results of a written calculation an exact solver says
whether the target can still be reached in the attempt being written.

Run it:  python -m experiments.ground_truth                                   128 responses of the bundled model
         python -m experiments.ground_truth --rollouts 200                    the same, with more rollouts added
         python -m experiments.ground_truth --model runs/none-seed0/checkpoint --out runs/truth-trained
"""
import argparse
import functools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

import grpo
from analyze import Estimate, Table, cell, clustered_mean, new_figure, plt, pm, ranks, spread_within
from countdown_task import (SENTENCE_END, STRUCTURE, Codec, Problem, StepSpan, anchors, calculate,
                            derivations, find_steps, follow, is_true)
from critic import FILE, Critic, fit, load_critic
from mitigations import MITIGATIONS, TokenBatch
from qwen2_model import Answers, Prompts, Qwen2, load_model, replace_file
from train import BUNDLED, Settings, check, check_lengths, choose_problems, fail

SURE = 0.005  # a token as certain as 1 - p <= SURE gets no rollouts: its A* is taken as 0 and can't be more than that
PACKET = 8  # rollouts that start together; the first and the second half of a packet are the two halves of the noise
SAVE_EVERY = 10.0  # seconds
RESAMPLES = 2000  # of the bootstrap
TOP = 0.1  # share of the tokens that matter most
KINDS = ("operand", "operator", "result", "= and commas", "opening", "verdict", "tag", "answer", "unfinished")
DECISIONS = KINDS[:2]


# -------------------------------------------------------------------------------------------- values by rollouts


def packets_wanted(logprob: np.ndarray, rollouts: int) -> np.ndarray:
    """How many packets of rollouts each token (N,) gets: about `rollouts` * (1 - p) of them, none where it was sure."""
    other = -np.expm1(logprob)  # (N,) 1 - p
    return np.where(other > SURE, np.ceil(rollouts * other / PACKET), 0).astype(int)


def chunks(todo: np.ndarray, position: np.ndarray) -> list[np.ndarray]:
    """The tokens that have packets to do (N,), those of like positions together, as many as are sampled at once.

    In random order, so that the time for the first of them says how long the rest will take.
    """
    order = np.argsort(position, kind="stable")
    order = order[todo[order] > 0]
    number = np.cumsum(todo[order]) * PACKET // grpo.ROWS_AT_ONCE
    parts = np.split(order, np.flatnonzero(np.diff(number)) + 1) if len(order) else []
    return [parts[i] for i in np.random.default_rng(0).permutation(len(parts))]


def chance_of(seed: int, response: int, position: int, packets: range, left: int) -> np.ndarray:
    """Uniforms (packets * PACKET, left) of a token's rollouts: the same whatever else is sampled, and when."""
    return np.concatenate([np.random.default_rng([seed, response, position, i]).random((PACKET, left))
                           for i in packets])


def roll(model: Qwen2, codec: Codec, problems: list[Problem], truth: dict, part: np.ndarray, more: np.ndarray,
         seed: int, limit: int) -> tuple[np.ndarray, int]:
    """Success (rows,) of `more` (n,) new packets for each of the tokens `part` (n,), and how many tokens that took."""
    asked, prefixes, chances, left, other = [], [], [], [], []
    for i, packets in zip(part, more):
        response, t, done = truth["response"][i], int(truth["position"][i]), int(truth["packets"][i])
        asked += [problems[truth["group"][i]]] * packets
        prefixes += [truth["token"][i - t : i].tolist()] * packets
        chances.append(chance_of(seed, int(response), t, range(done, done + packets), limit - t))
        left += [limit - t] * (packets * PACKET)
        other += [int(truth["token"][i])] * (packets * PACKET)
    uniforms = np.zeros((len(left), max(left)))
    for rows, chance in zip(np.split(uniforms, np.cumsum([len(c) for c in chances])[:-1]), chances):
        rows[:, : chance.shape[1]] = chance
    samples, _, grades = grpo.respond(model, codec, asked, torch.from_numpy(uniforms), prefixes, torch.tensor(left),
                                      torch.tensor(other))
    return np.array([grade["answer"] for grade in grades]), int(samples.mask.sum())


def sample_truth(model: Qwen2, codec: Codec, problems: list[Problem], truth: dict, rollouts: int, seed: int, limit: int,
                 save: Callable[[], None]) -> None:
    """Bring every token to the rollouts it should have: adds to the columns packets, solved and sampled of `truth`, and
    says in `complete` whether all were made."""
    todo = np.maximum(packets_wanted(truth["logprob"], rollouts) - truth["packets"], 0)  # (N,)
    start = saved = time.perf_counter()
    done, total = 0, int(todo.sum())
    truth["complete"] = np.array(total == 0)
    for part in chunks(todo, truth["position"]):
        success, tokens = roll(model, codec, problems, truth, part, todo[part], seed, limit)
        halves = success.reshape(-1, 2, PACKET // 2).sum(2)  # (packets, 2)
        np.add.at(truth["solved"], np.repeat(part, todo[part]), halves.astype(int))
        truth["packets"][part] += todo[part]
        truth["sampled"] += tokens
        done, now = done + int(todo[part].sum()), time.perf_counter()
        truth["complete"] = np.array(done == total)
        if now - saved > SAVE_EVERY:
            save()
            saved = now
            print(f"rollouts {done * PACKET:,}/{total * PACKET:,}  {truth['sampled']:,} tokens  "
                  f"ETA {grpo.clock((now - start) / done * (total - done))}", flush=True)


def backward(logprob: np.ndarray, solved: np.ndarray, tried: np.ndarray, success: float) -> np.ndarray:
    """V, its standard error, A*, its standard error (4, L) of the tokens (L,) of one response.

    solved of tried (L,): the rollouts from any token but this one; where none were tried U is taken as V_{t+1}, and the
    error of A* as its bound 1 - p. The error of U comes from the rate (s + 1) / (K + 2), since the plain one says 0 at
    s = 0.
    """
    out, V, variance = np.zeros((4, len(logprob))), float(success), 0.0
    for t in reversed(range(len(logprob))):
        q = -np.expm1(float(logprob[t]))  # 1 - p
        if tried[t]:
            U, rate = solved[t] / tried[t], (solved[t] + 1) / (tried[t] + 2)
            of_U = rate * (1 - rate) / tried[t]
            a_star, error = q * (V - U), q * np.sqrt(variance + of_U)
            V, variance = V - a_star, (1 - q) ** 2 * variance + q**2 * of_U
        else:
            a_star, error = 0.0, q
        out[:, t] = V, np.sqrt(variance), a_star, error
    return out


def add_values(truth: dict) -> None:
    """Columns value, value_error, a_star, a_star_error (N,) and a_star_halves (N, 2): of half of the rollouts."""
    tried, solved, logprob = truth["packets"] * PACKET, truth["solved"], truth["logprob"]
    for name in ("value", "value_error", "a_star", "a_star_error"):
        truth[name] = np.zeros(len(logprob))
    truth["a_star_halves"] = np.zeros((len(logprob), 2))
    for where in by_response(truth):
        success = truth["success"][where.start]
        values = backward(logprob[where], solved[where].sum(1), tried[where], success)
        for name, column in zip(("value", "value_error", "a_star", "a_star_error"), values):
            truth[name][where] = column
        for half in (0, 1):
            truth["a_star_halves"][where, half] = backward(logprob[where], solved[where, half], tried[where] // 2,
                                                           success)[2]


def by_response(truth: dict) -> Iterator[slice]:
    """The rows of each response."""
    starts = np.flatnonzero(truth["position"] == 0).tolist() + [len(truth["position"])]
    return map(slice, starts, starts[1:])


# ---------------------------------------------------------------------------------------------- the exact solver


@functools.lru_cache(maxsize=None)
def results(values: tuple) -> frozenset:
    """All that the values (sorted) can make, every one of them used once, by + - * / and exact fractions."""
    return frozenset(result for result, _ in derivations(values))


def reaches(pool: Counter, a: int | None = None, operator: str | None = None, b: int | None = None,
            target: int = 0) -> bool:
    """Whether some solution from the values at hand goes on with a, a operator, a operator b; None: with anything."""
    values = list(pool.elements())
    if len(values) == 1:
        return a is None and values[0] == target
    for i, x in enumerate(values):
        for j, y in enumerate(values):
            if i == j or a not in (None, x) or b not in (None, y):
                continue
            rest = [v for k, v in enumerate(values) if k not in (i, j)]
            made = (calculate(x, o, y) for o in ("+-*/" if operator is None else operator))
            if any(m is not None and target in results(tuple(sorted(rest + [m]))) for m in made):
                return True
    return False


def reachability(text: str, steps: list[StepSpan], numbers: tuple[int, ...], target: int) -> np.ndarray:
    """Whether the target can still be reached before a calculation, after its a, operator, b and result (S, 5) bool.

    Within the attempt being written; a new one starts afresh. Once a result is wrong or a value was not at hand the
    attempt is dead, since every number must be used. Where it is open which attempt goes on, either will do.

    >>> reachability("5 - 3 = 2, 4 + 2 = 6", find_steps("5 - 3 = 2, 4 + 2 = 6"), (3, 4, 5), 8).tolist()
    [[True, True, True, True, True], [True, True, False, False, False]]
    """
    rows = []
    for step, attempts in follow(text, steps, numbers):
        alive, taken = [pool for pool, right in attempts if right], Counter([step.a, step.b])
        written = (None,) * 3, (step.a, None, None), (step.a, step.operator, None), (step.a, step.operator, step.b)
        row = [any(reaches(pool, *parts, target=target) for pool in alive) for parts in written]
        left = [pool - taken + Counter([step.result]) for pool in alive if taken <= pool and is_true(step)]
        rows.append(row + [any(target in results(tuple(sorted(pool.elements()))) for pool in left)])
    return np.array(rows, bool).reshape(-1, 5)


def solver_columns(text: str, spans: list[tuple[int, int]], numbers: tuple[int, ...],
                   target: int) -> tuple[np.ndarray, np.ndarray]:
    """Reachable before and after each token (L,) int8 of a response: 1 yes, 0 no, -1 no operand, operator or result."""
    steps, where = find_steps(text), anchors(text, spans)
    before, after = np.full((2, len(where)), -1, np.int8)
    for row, step in zip(reachability(text, steps, numbers, target).astype(np.int8), steps):
        for i, (start, end) in enumerate(step):
            tokens = (where >= start) & (where < end)
            first = tokens & (np.cumsum(tokens) == 1)  # a number of several tokens is judged as a whole, at the first
            before[first], after[first] = row[i], row[i + 1]
    return before, after


def token_kinds(text: str, spans: list[tuple[int, int]], role: np.ndarray, in_answer: np.ndarray) -> np.ndarray:
    """Index in KINDS of each token (L,): what it does in the search.

    opening: what stands in a sentence before its first calculation; verdict: a sentence without one; unfinished: the
    last sentence if it has neither a calculation nor an end.
    """
    where, steps = anchors(text, spans), find_steps(text)
    ends = [m.end() for m in SENTENCE_END.finditer(text)] + [len(text) + 1]
    sentence, inside = np.searchsorted(ends, where, side="right"), np.array([s.a[0] for s in steps], int)
    kinds = np.full(len(where), KINDS.index("= and commas"))
    for i in np.unique(sentence):
        here, start = sentence == i, ends[i - 1] if i else 0
        own = inside[(inside >= start) & (inside < ends[i])]
        finished = i + 1 < len(ends) or (role[here] == STRUCTURE).any()
        kinds[here] = KINDS.index("verdict" if finished else "unfinished") if not len(own) else kinds[here]
        if len(own):
            kinds[here & (where < own[0])] = KINDS.index("opening")
    for step in steps:
        for name, (start, end) in zip(("operand", "operator", "operand", "result"), step):
            kinds[(where >= start) & (where < end)] = KINDS.index(name)
    kinds[in_answer > 0] = KINDS.index("answer")
    kinds[role == STRUCTURE] = KINDS.index("tag")
    return kinds.astype(np.int8)


# ------------------------------------------------------------------------------------------------------- scores


class Score(NamedTuple):
    """How close credit x is to the truth y; see `score_columns` for what each says."""

    pooled_spearman: Estimate
    pooled_pearson: Estimate
    sign: Estimate
    within_spearman: Estimate
    within_pearson: Estimate
    top: Estimate
    cosine: Estimate
    solver: Estimate


def centred(x: np.ndarray, response: np.ndarray, rank: bool) -> np.ndarray:
    """Values (n,), or their ranks as shares, minus the mean of their response; exactly 0 where it has but one value."""
    out = np.zeros(len(x))
    for r in np.unique(response):
        here = response == r
        values = ranks(x[here]) / here.sum() if rank else x[here].astype(float)
        if np.ptp(x[here]) > 1e-6 * np.abs(x[here]).max():
            out[here] = values - values.mean()
    return out


def sums(question: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """The sums (Q, k) of k columns (n,) over the tokens of each question."""
    return np.stack([np.bincount(question, c, question.max(initial=-1) + 1) for c in columns], axis=1)


def correlation(s: np.ndarray) -> np.ndarray:
    """Pearson's r (...) from sums (..., 6) of 1, x, y, x^2, y^2, xy; NaN where either does not vary."""
    n, x, y, xx, yy, xy = np.moveaxis(s, -1, 0)
    over = (n * xx - x**2) * (n * yy - y**2)
    varies = over > 1e-9 * n**2 * xx * yy
    return np.where(varies, (n * xy - x * y) / np.sqrt(np.where(varies, over, 1.0)), np.nan)


def share(s: np.ndarray) -> np.ndarray:
    """The first sum over the second (...) of sums (..., 2)."""
    return s[..., 0] / s[..., 1]


def resampled(Q: int) -> np.ndarray:
    """How often each of Q questions is drawn (RESAMPLES, Q) in the bootstrap; the same for everything compared."""
    return np.random.default_rng(0).multinomial(Q, np.full(Q, 1 / Q), size=RESAMPLES)


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], by_question: np.ndarray) -> Estimate:
    """statistic of the total of sums (Q, k), with the 95% percentile interval over resampled questions.

    Questions, not responses or tokens: answers to one share its difficulty, and their advantages depend on each other.
    """
    if not len(by_question):
        return Estimate(float("nan"))
    draws = resampled(len(by_question)) @ by_question  # (RESAMPLES, k)
    with np.errstate(invalid="ignore", divide="ignore"):
        (value,), found = statistic(by_question.sum(0)[None]), statistic(draws)
    found = found[np.isfinite(found)]  # some draws may leave it undefined
    return Estimate(float(value), *np.percentile(found, (2.5, 97.5))) if np.isfinite(value) else Estimate(float("nan"))


def correlate(x: np.ndarray, y: np.ndarray, question: np.ndarray) -> Estimate:
    """Pearson's r of two columns (n,), with its interval."""
    return bootstrap(correlation, sums(question, np.ones(len(x)), x, y, x * x, y * y, x * y))


def jackknife(statistic: Callable[[np.ndarray], float], n: int) -> Estimate:
    """statistic(which (n,) bool) of all n questions, or batches, ± 1.96 of its jackknife error."""
    parts = np.array([statistic(np.arange(n) != i) for i in range(n)])
    value = statistic(np.ones(n, bool))
    error = np.sqrt((n - 1) / n * ((parts - parts.mean()) ** 2).sum())
    return Estimate(value, value - 1.96 * error, value + 1.96 * error)


def cosine_of(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Cosine of two sums of question gradients (Q, P), with its interval.

    By the jackknife: drawing questions twice leaves fewer of them, whose noise makes every cosine smaller.
    """
    grams = x @ y.T, x @ x.T, y @ y.T  # (Q, Q) each
    def cosine(use: np.ndarray) -> float:
        xy, xx, yy = (gram[np.ix_(use, use)].sum() for gram in grams)
        return xy / np.sqrt(xx * yy) if xx * yy > 0 else np.nan
    value, low, high = jackknife(cosine, len(x))
    return Estimate(value, max(low, -1.0), min(high, 1.0))


def on_top(y: np.ndarray) -> np.ndarray:
    """Which tokens (N,) are the tenth with the largest abs(y) (N,); none where it is 0."""
    size = np.abs(y)
    return (size >= np.sort(size)[-max(1, round(TOP * len(y)))]) & (size > 0)


def score(x: np.ndarray, y: np.ndarray, truth: dict, cosine: Estimate) -> Score:
    """How close credit x (N,) is to the truth y (N,), pooled and within responses."""
    x, y, question, tried = x.astype(float), y.astype(float), truth["group"].astype(int), truth["packets"] > 0
    inside = [v[tried] for v in (truth["response"], question)]
    within = {rank: [centred(v[tried], inside[0], rank) for v in (x, y)] for rank in (True, False)}
    signed = tried & (y != 0)
    agree = (1 + np.sign(x) * np.sign(y))[signed] / 2
    asked = truth["reachable_before"] == 1
    labels = centred(truth["reachable"][asked], truth["response"][asked], True)
    ranked = centred(x[asked], truth["response"][asked], True)
    return Score(
        correlate(ranks(x), ranks(y), question), correlate(x, y, question),
        bootstrap(share, sums(question[signed], agree, np.ones(len(agree)))),
        *(correlate(*within[rank], inside[1]) for rank in (True, False)),
        bootstrap(share, sums(question, np.abs(x) * on_top(y), np.abs(x))), cosine,
        correlate(ranked, labels, question[asked]))


def credit_gradients(model: Qwen2, codec: Codec, problems: list[Problem], batch: TokenBatch, credits: Tensor,
                     each: int) -> Iterator[Tensor]:
    """The gradients (M, P) of sum credit * log pi, with respect to all P parameters, by each of the credits (M, B, T),
    for every `each` responses; those must be to the same question."""
    for first in range(0, len(batch.text), each):
        rows, problem = slice(first, first + each), problems[int(batch.group[first])]
        T = int(batch.mask[rows].sum(1).max())
        past = Answers(Prompts(model, [codec.prompt(problem)]), torch.zeros(each, dtype=torch.long))
        logprob = grpo.response_logprobs(model, past, batch.tokens[rows, :T], batch.mask[rows, :T])  # (each, T)
        parts = [torch.autograd.grad(logprob, list(model.parameters()), credit[rows, :T], retain_graph=True)
                 for credit in credits]
        yield torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])


def all_scores(model: Qwen2, codec: Codec, problems: list[Problem], batch: TokenBatch, truth: dict) -> dict[str, Score]:
    """The score of every method, of the original's two measures, and of one half of the rollouts against the other."""
    def update(credit: np.ndarray) -> np.ndarray:  # (Q, P)
        spread = torch.zeros(batch.mask.shape).masked_scatter(batch.mask.cpu(), torch.from_numpy(credit).float())
        parts = credit_gradients(model, codec, problems, batch, spread[None].to(batch.mask.device), each)
        return torch.cat(list(parts)).cpu().numpy()
    each = len(batch.text) // len(problems)
    a_star, halves, scores, start = truth["a_star"], truth["a_star_halves"].T, {}, time.perf_counter()
    best, (_, *listed) = update(a_star), all_credit(truth).items()
    for i, (name, credit) in enumerate(listed):
        scores[name] = score(credit, a_star, truth, cosine_of(update(credit), best))
        grpo.progress("scoring", i + 1, len(listed), start)
    return scores | {"noise ceiling": score(*halves, truth, cosine_of(*map(update, halves)))}


def all_credit(truth: dict) -> dict[str, np.ndarray]:
    """By name what lies on each token (N,): A* first, then the credit of every method, then the two measures."""
    return {"A*": truth["a_star"]} | dict(zip(truth["methods"].tolist(), truth["credits"])) | seed_measures(truth)


def seed_measures(truth: dict) -> dict[str, np.ndarray]:
    """What the original work tabulated of GRPO's credit, and its gradient in logit space; signed as the advantage."""
    return {"A·abs(log p)": truth["advantage"] * -truth["logprob"],
            "A·‖onehot - p‖": truth["advantage"] * truth["logit_grad"]}


# -------------------------------------------------------------------------------------------- tables and picture


def table_facts(truth: dict) -> Table:
    """What was measured, and how well."""
    starts, tried, question = truth["position"] == 0, truth["packets"] > 0, truth["group"].astype(int)
    count = np.bincount(question)  # tokens
    rows = [["questions, responses, tokens", f"{len(count)}, {starts.sum()}, {len(tried):,}"],
            ["success", pm(*clustered_mean(truth["success"][starts], question[starts]))],
            ["rollouts, tokens sampled for them", f"{truth['packets'].sum() * PACKET:,}, {truth['sampled']:,}"],
            ["tokens with rollouts (1 - p above %g)" % SURE, f"{tried.mean():.1%}"],
            ["mean abs(A*), with rollouts", pm(*clustered_mean(np.abs(truth["a_star"][tried]), question[tried]))],
            ["standard error of A*, with rollouts: root mean square, largest",
             f"{np.sqrt(np.mean(truth['a_star_error'][tried] ** 2)):.3f}, {truth['a_star_error'][tried].max():.3f}"],
            ["standard error of V: root mean square", f"{np.sqrt(np.mean(truth['value_error'] ** 2)):.3f}"]]
    return Table("What was measured", "± is one standard error clustered by question.", ["", ""], rows)


def table_pooled(scores: dict[str, Score]) -> Table:
    """Each method against A*, all tokens together."""
    rows = [[name, *map(cell, (s.pooled_spearman, s.pooled_pearson, s.sign, s.top, s.cosine))]
            for name, s in scores.items()]
    return Table("Credit against A*, all tokens", (
        "Rank correlation, correlation; share of tokens with rollouts on which the sign is A*'s (no credit counts "
        f"half, no A* does not count); share of abs(credit) on the {TOP:.0%} of the tokens with the largest abs(A*); "
        "cosine of the update that the credit causes, in all parameters, with the one that A* causes. In brackets, 95% "
        "intervals over questions, by bootstrap, for the cosine by jackknife. Noise ceiling: A* by one half of the "
        "rollouts against A* by the other; halves that agree by r leave room for about sqrt(2 r / (1 + r))."),
        ["method", "Spearman", "Pearson", "sign", "top tokens", "cosine of update"], rows)


def table_within(scores: dict[str, Score], truth: dict) -> Table:
    """Each method against A* and the solver, only what differs within a response."""
    shape = {name: spread_within(credit, truth["response"].astype(int)) for name, credit in all_credit(truth).items()}
    exact = score(truth["a_star"], truth["a_star"], truth, Estimate(1.0))
    rows = [[name, *map(cell, (s.within_spearman, s.within_pearson, s.solver)),
             *(f"{shape[name][k]:.2f}" if name in shape else "" for k in ("effective sample size", "varies within"))]
            for name, s in (scores | {"A*": exact}).items()]
    return Table("Credit against A* and the solver, within responses", (
        "Tokens with rollouts, ranks and values centred in each response: what a method knows beyond the outcome; "
        "empty where its credit is the same on all tokens. Solver: rank correlation with what an operand, operator or "
        "result does, 0 or -1 where it makes the target unreachable, among those before which it was reachable. "
        "Effective sample size and share of the credit that varies within a response: see analyze.py."),
        ["method", "Spearman", "Pearson", "solver", "effective sample size", "varies within"], rows)


def table_sizes(truth: dict) -> Table:
    """Is more credit, or more gradient, on a token anything like `matters`?"""
    tried, question, a_star = truth["packets"] > 0, truth["group"].astype(int), np.abs(truth["a_star"])
    sizes = {"abs(A)": np.abs(truth["advantage"])} | {
        f"abs({k})": np.abs(v) for k, v in seed_measures(truth).items()} | {
        "entropy": truth["entropy"], "1 - p": -np.expm1(truth["logprob"])}
    rows, response, top = [], truth["response"][tried], on_top(a_star)
    for name, x in sizes.items():
        within = correlate(centred(x[tried], response, True), centred(a_star[tried], response, True), question[tried])
        rows.append([name, cell(correlate(ranks(x), ranks(a_star), question)), cell(within),
                     cell(bootstrap(share, sums(question, x * top, x)))])
    return Table("Size against abs(A*)", (
        "Rank correlation over all tokens, and within responses over those with rollouts; share of it on the "
        f"{TOP:.0%} of the tokens with the largest abs(A*)."), ["size", "all tokens", "within", "on top tokens"], rows)


def table_kinds(truth: dict) -> Table:
    """How much credit each kind of token gets."""
    decides = np.isin(truth["kind"], [KINDS.index(k) for k in DECISIONS])
    groups = [decides, ~decides, *(truth["kind"] == k for k in range(len(KINDS)))]
    rows = [["tokens"] + [f"{g.mean():.1%}" for g in groups]]
    for name, credit in all_credit(truth).items():
        size = np.abs(credit.astype(float))
        parts = (clustered_mean(size[g] / size.mean(), truth["group"][g].astype(int)) for g in groups)
        rows.append([name] + [pm(*part, 2) for part in parts])
    signed = (clustered_mean(truth["a_star"][g], truth["group"][g].astype(int)) for g in groups)
    rows.append(["mean A*"] + [pm(*part, 3) for part in signed])
    return Table("Where it lies", (
        "Mean abs(credit) of a kind of token over the mean of all tokens, ± one standard error clustered by question. "
        "Decisions are operands and operators. Opening: words before a sentence's first calculation; verdict: a "
        "sentence without one; unfinished: cut off."), ["", "decisions", "the rest", *KINDS], rows)


def table_solver(truth: dict) -> Table:
    """What the policy's value says of the tokens that the solver condemns."""
    rows, question = [], truth["group"].astype(int)
    for name in ("operand", "operator", "result"):
        asked = (truth["kind"] == KINDS.index(name)) & (truth["reachable_before"] == 1)
        lost = asked & (truth["reachable"] == 0)
        kept = asked & (truth["reachable"] == 1)
        rows.append([name, f"{asked.sum():,}", f"{lost.sum() / asked.sum():.1%}" if asked.any() else "",
                     *(pm(*clustered_mean(truth["a_star"][w], question[w])) for w in (kept, lost))])
    return Table("The solver's verdict and A*", (
        "Tokens before which the target could be reached in the attempt being written; how many of them lose it; mean "
        "A* where they keep it and where they lose it, ± one standard error clustered by question."),
        ["", "tokens", "lose the target", "A*, kept", "A*, lost"], rows)


def draw_scores(scores: dict[str, Score], file: Path) -> None:
    """Two panels of the scores with their intervals, the best at the top."""
    figure, ((left, right),) = new_figure(2, width=5.6, height=0.26 * len(scores) + 0.8, sharey=True)
    ceiling = scores["noise ceiling"]
    names = [name for name in scores if name != "noise ceiling"]
    names.sort(key=lambda name: np.nan_to_num(scores[name].within_spearman.value))
    for axis, field, title in ((left, "within_spearman", "Within a response: rank correlation with A*"),
                               (right, "cosine", "As a whole: cosine of the update with A*'s")):
        for y, name in enumerate(names):
            e = getattr(scores[name], field)
            colour = "0.55" if name in ("random", "inverted") else "#0072B2"
            axis.plot([e.low, e.high], [y, y], color=colour, lw=1.5)
            axis.plot([e.value], [y], "o", color=colour, ms=4)
        axis.axvline(0, color="black", lw=0.8)
        axis.axvline(getattr(ceiling, field).value, color="#D55E00", ls="--", lw=1.2,
                     label="noise ceiling:\none half of A*'s rollouts\nagainst the other")
        axis.set(title=title, xlabel="95% intervals over puzzles; grey: the controls")
        axis.set_yticks(range(len(names)), names)
    left.legend(frameon=False, loc="lower right", bbox_to_anchor=(0.93, 0))
    figure.savefig(file, dpi=120)
    plt.close(figure)


# -------------------------------------------------------------------------------------------------- the command


def describe(batch: TokenBatch, settings: dict) -> dict:
    """The columns of ground_truth.npz that are known before any rollout; see README."""
    truth = grpo.log_columns(0, batch, batch.advantage[:, None].expand(batch.mask.shape))
    del truth["credit"]  # stands in `credits`
    N = len(truth["token"])
    lengths = batch.mask.sum(1).tolist()
    truth["success"] = np.repeat(batch.success.cpu().numpy().astype(np.float32), lengths)
    columns = {name: [] for name in ("kind", "reachable_before", "reachable", "piece")}
    for i, (text, spans, length) in enumerate(zip(batch.text, batch.spans, lengths)):
        g = int(batch.group[i])
        before, after = solver_columns(text, spans, batch.numbers[g], batch.target[g])
        roles = (x[i, :length].cpu().numpy() for x in (batch.role, batch.in_answer))
        stops = [0] + [stop for _, stop in spans]
        parts = token_kinds(text, spans, *roles), before, after, [text[a:b] for a, b in zip(stops, stops[1:])]
        for name, part in zip(columns, parts):
            columns[name].append(part)
    prompts = [f"{list(batch.numbers[g])} -> {batch.target[g]}" for g in batch.group.tolist()]
    return truth | {name: np.concatenate(parts) for name, parts in columns.items()} | {
        "kinds": np.array(KINDS), "prompts": np.array(prompts), "settings": np.array(json.dumps(settings)),
        "packets": np.zeros(N, int), "solved": np.zeros((N, 2), int), "sampled": np.array(0)}


def take_over(truth: dict, file: Path) -> None:
    """Go on with the rollouts of a file that exists; ValueError where they are of other responses."""
    try:
        old = dict(np.load(file))
        same = old["settings"] == truth["settings"] and np.array_equal(old["token"], truth["token"])
    except Exception:  # a cut-off zip shows itself in many ways
        raise ValueError(f"{file} can't be read: remove it, or choose another --out") from None
    if not same:
        raise ValueError(f"{file} is of other responses: choose another --out, or the settings it was made with, "
                         f"{old['settings']}")
    truth |= {name: old[name] for name in ("packets", "solved", "sampled")}


def the_critic(folder: Path, model_folder: str, model: Qwen2, codec: Codec, batches: int) -> Critic:
    """The critic of an earlier call, or the one beside the model, or one fitted to responses to training puzzles."""
    for place in (folder, Path(model_folder)):
        if (place / FILE).is_file():
            return load_critic(place, model)
    print(f"no critic beside the model: fitting one to {batches} batches of responses", flush=True)
    critic, _ = fit(model, codec, batches, "reward")
    critic.save(folder)
    return critic


def add_credit(truth: dict, batch: TokenBatch) -> None:
    """Columns methods (M,) and credits (M, N): the credit that every method gives, at its defaults."""
    credits, start = [], time.perf_counter()
    for i, (name, method) in enumerate(MITIGATIONS.items()):
        credits.append(method(batch)[batch.mask].cpu().numpy().astype(np.float32))
        grpo.progress("credit of every method", i + 1, len(MITIGATIONS), start)
    truth |= {"methods": np.array(list(MITIGATIONS)), "credits": np.stack(credits)}


def save_truth(truth: dict, file: Path) -> None:
    """Write ground_truth.npz, with the values that follow from the rollouts so far."""
    add_values(truth)
    replace_file(file, lambda part: np.savez(part, **truth))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--data", default="", help=".jsonl or .parquet of puzzles; empty: generated ones")
    parser.add_argument("--questions", type=int, default=16, help="held-out puzzles (default 16)")
    parser.add_argument("--answers", type=int, default=8, help="responses to each (default 8)")
    parser.add_argument("--rollouts", type=int, default=100, help="of a token, times 1 - p (default 100)")
    parser.add_argument("--max_new_tokens", type=int, default=140, help="a response that is longer is cut off")
    parser.add_argument("--seed", type=int, default=0, help="of responses and rollouts (default 0)")
    parser.add_argument("--critic_batches", type=int, default=100, help="of 96 responses, for `ppo` (default 100)")
    parser.add_argument("--device", default="cpu", help="or cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/truth"), help="folder (default runs/truth)")
    args = parser.parse_args()
    for name, least in {"questions": 2, "rollouts": 1, "critic_batches": 1}.items():  # intervals are over questions
        if getattr(args, name) < least:
            fail(f"--{name} must be at least {least}")
    return args


def prepare(args: argparse.Namespace) -> tuple[Qwen2, Codec, list[Problem], TokenBatch, dict]:
    """Model, puzzles, responses, and the columns of ground_truth.npz without values; ValueError where that can't be."""
    s = Settings(model=args.model, data=args.data, eval_problems=args.questions, answers=args.answers,
                 max_new_tokens=args.max_new_tokens, seed=args.seed, device=args.device)
    check(s)
    model, codec = load_model(args.model, args.device), Codec(args.model)
    model.requires_grad_(True).real_vocab = codec.size
    problems = choose_problems(s)[1]
    check_lengths(model, codec, set(problems), s)
    settings = {k: getattr(args, k) for k in ("questions", "answers", "max_new_tokens", "seed")}
    settings = {"model": Path(args.model).name, "data": Path(args.data).name} | settings  # no machine's paths
    args.out.mkdir(parents=True, exist_ok=True)
    critic = the_critic(args.out, args.model, model, codec, args.critic_batches)
    uniforms = grpo.draw_uniforms(args.seed, grpo.EVALUATION - 1, len(problems), args.answers, args.max_new_tokens)
    batch = grpo.rollout(model, codec, problems, uniforms, key=(args.seed, 0), reference=model, critic=critic)
    return model, codec, problems, batch, describe(batch, settings)


def report(truth: dict, scores: dict[str, Score], out: Path) -> None:
    """Print and write all tables, and the picture."""
    tables = [table_facts(truth), table_pooled(scores), table_within(scores, truth), table_sizes(truth),
              table_kinds(truth), table_solver(truth)]
    text = "\n".join(map(str, tables))
    (out / "scores.md").write_text(text, encoding="utf-8")
    draw_scores(scores, out / "scores.png")
    print(f"{text}\nwrote {out}; look at it with: python -m experiments.credit_page {out / 'ground_truth.npz'}")


def main() -> None:
    """Responses, their credit by every method, their truth by rollouts, and how close the ones are to the other."""
    args = arguments()
    file = args.out / "ground_truth.npz"
    try:
        model, codec, problems, batch, truth = prepare(args)
        if file.is_file():
            take_over(truth, file)
        add_credit(truth, batch)
        save = functools.partial(save_truth, truth, file)
        sample_truth(model, codec, problems, truth, args.rollouts, args.seed, args.max_new_tokens, save)
        save()
        report(truth, all_scores(model, codec, problems, batch, truth), args.out)
    except (ValueError, OSError, FloatingPointError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"interrupted; the same command goes on with what is in {args.out}")


if __name__ == "__main__":
    main()
