"""Ground truth: how much each token of a response changed the probability of success.

Let V_t be the probability that the response succeeds when the policy continues from just before token t. Then
A*_t = V_{t+1} - V_t. How it is measured, backwards from the end of a response, stands in methods/oracle.py, which does
the same for the reward while training. Here the rollouts also give its error. With U_t the mean success of rollouts
that begin with another token, independent of everything behind t,

    V_t = p_t V_{t+1} + (1 - p_t) U_t                   Var V_t = p_t^2 Var V_{t+1} + (1 - p_t)^2 Var U_t
    A*_t = (1 - p_t) (V_{t+1} - U_t)                    Var A*_t = (1 - p_t)^2 (Var V_{t+1} + Var U_t)

|A*_t| <= 1 - p_t, exactly. A* is the truth about success under *this* policy, not under a perfect player. Beside it
stand the verdicts of the task's exact solver and every method's credit; scoring.py says how close each comes.

Run it:  python -m lab.truth.measure                                   128 responses of the bundled model
         python -m lab.truth.measure --rollouts 200                    adds rollouts to those of an earlier call
"""
import json
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

import numpy as np
import torch

from extras import turns
from grpo import compare, instrument
from lab.heads import find_heads, fitted_methods
from lab.picture import draw
from lab.statistics import by_response
from lab.truth.scoring import all_scores, score_tables
from methods.registry import CREDIT_FUNCTIONS
from methods.oracle import SURE
from methods.queries import ROWS_AT_ONCE, Queries
from plumbing.checks import check_pure
from plumbing.files import read_arrays, replace_file, require
from plumbing.flags import check_range, new_parser
from plumbing.launch import check, check_lengths, with_model
from plumbing.metrics import log_columns
from plumbing.terminal import clock, follow, one_sentence
from plumbing.report import Table
from rollout import Policy, TokenBatch, draw_uniforms, respond, seed_of, token_batch
from sampler import Rules
from settings import Settings
from start import CHOICES, load_policy
from tasks.arithmetic import find_calculations
from tasks.text import anchors

PACKET = 8  # rollouts that start together; the two halves of a packet belong to two independent estimates
SAVE_EVERY = 10.0  # seconds
FLAGS = (  # name, default, meaning
    ("task", "countdown", "a name or a path, as of train.py"),
    ("model", "", "a model folder, such as a run's checkpoint; empty: the task's own"),
    ("data", "", ".jsonl or .parquet of puzzles; empty: generated ones"),
    ("questions", 16, "held-out puzzles"),
    ("responses", 8, "to each"),
    ("rollouts", 100, "per token, times 1 - p"),
    ("max_new_tokens", 140, "a longer response is cut off"),
    ("seed", 0, "of responses and rollouts"),
    ("critic_batches", 100, "of 96 responses to the task's own puzzles, for `ppo`; 0: no method that needs a head"),
    ("device", "cpu", "any torch device"),
    ("dtype", "float32", "of the model"),
    ("out", "runs/truth", "folder"))


def packets_wanted(logprob: np.ndarray, rollouts: int) -> np.ndarray:
    """How many packets of rollouts each token (N,) gets: about rollouts * (1 - p) rollouts, none where it was sure."""
    other = -np.expm1(logprob)  # (N,) 1 - p
    return np.where(other > SURE, np.ceil(rollouts * other / PACKET), 0).astype(int)


def packets_missing(truth: dict, rollouts: int) -> np.ndarray:
    """How many of them each token (N,) still lacks."""
    return np.maximum(packets_wanted(truth["logprob"], rollouts) - truth["packets"], 0)


def announce(truth: dict, rollouts: int, speed: float) -> None:
    """Say how long the missing rollouts will take: each as many tokens as are left of its response, at the speed, in
    tokens per second, at which the responses were sampled. More are sampled at once, so it is the longest."""
    missing = packets_missing(truth, rollouts) * PACKET  # (N,)
    left = np.concatenate([np.arange(len(rows), 0, -1) for rows in by_response(truth)])  # (N,)
    print(f"{missing.sum():,} rollouts are missing, about {(missing * left).sum():,} tokens: at "
          f"most about {clock((missing * left).sum() / speed)}", flush=True)


def chunks(packets: np.ndarray, position: np.ndarray) -> list[np.ndarray]:
    """The tokens that need packets (N,), as arrays of row numbers that are sampled together, in random order: so the
    first tell how long the rest will take. Rollouts from like positions are of like length, and share a chunk."""
    order = np.argsort(position, kind="stable")  # (N,)
    order = order[packets[order] > 0]
    chunk = np.cumsum(packets[order]) * PACKET // ROWS_AT_ONCE
    return [order[chunk == c] for c in np.random.default_rng(0).permutation(np.unique(chunk))]


def roll(policy: Policy, puzzles: list, truth: dict, rows: np.ndarray, packets: np.ndarray, seed: int,
         limit: int) -> tuple[np.ndarray, int]:
    """Sample `packets` (n,) more packets for each of the tokens `rows` (n,): success (m, PACKET), and tokens sampled.
    The random numbers of a packet depend on its token and its number alone, not on what else is sampled, or when."""
    token = np.repeat(rows, packets)  # (m,) the token that each packet belongs to
    number = truth["packets"][token] + np.concatenate([np.arange(n) for n in packets])  # (m,) of the packet
    position = truth["position"][token].astype(int)  # (m,)
    asked, begun = [puzzles[q] for q in truth["group"][token]], [truth["token"][i - t : i].tolist()
                                                                 for i, t in zip(token, position)]  # m each
    begun = [turns.begun_with(policy, puzzle, tokens) for puzzle, tokens in zip(asked, begun)]  # m
    left = limit - np.array([len(b.text) for b in begun])  # (m,)
    uniforms = np.zeros((len(token), PACKET, left.max()))
    for i, key in enumerate(zip(truth["response"][token].tolist(), position.tolist(), number.tolist())):
        uniforms[i, :, : left[i]] = np.random.default_rng(seed_of("truth", seed, *key)).random((PACKET, left[i]))
    taken = truth["token"][token].astype(int)  # (m,)
    rules = Rules(*(torch.from_numpy(x.repeat(PACKET)) for x in (left, taken)))
    found = turns.respond(policy, asked, [policy.prompt(puzzle) for puzzle in asked],
                    torch.from_numpy(uniforms).flatten(0, 1), rules, begun)
    success = np.array([grade["answer"] for grade in found.grades]).reshape(-1, PACKET)
    return success, int(found.samples.mask.sum())


def sample_truth(policy: Policy, puzzles: list, truth: dict, rollouts: int, seed: int, limit: int,
                 save: Callable[[], None]) -> None:
    """Bring every token to the number of rollouts it should have, and save now and then. Adds to the columns packets,
    solved and sampled of `truth`; `complete` says whether all rollouts were made."""
    missing = packets_missing(truth, rollouts)  # (N,)
    saved, truth["complete"] = time.perf_counter(), np.array(False)
    for rows in follow("rollouts", chunks(missing, truth["position"])):
        success, tokens = roll(policy, puzzles, truth, rows, missing[rows], seed, limit)
        halves = success.reshape(-1, 2, PACKET // 2).sum(2)  # (m, 2)
        np.add.at(truth["solved"], np.repeat(rows, missing[rows]), halves.astype(int))
        truth["packets"][rows] += missing[rows]
        truth["sampled"] += tokens
        if time.perf_counter() - saved > SAVE_EVERY:
            save()
            saved = time.perf_counter()
    truth["complete"] = np.array(True)


def behind(truth: dict, weight: np.ndarray, value: np.ndarray, last: np.ndarray) -> np.ndarray:
    """V_{t+1} (N,) behind each token, from V_t = V_{t+1} + weight_t (value_t - V_{t+1}) and `last` (N,) at the end of
    a response: exactly V_{t+1} where value_t is."""
    V = last.astype(float)
    for i in np.flatnonzero(truth["position"])[::-1]:  # with a token before it
        V[i - 1] = V[i] + weight[i] * (value[i] - V[i])
    return V


def a_star_of(truth: dict, solved: np.ndarray, tried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A* (N,), and V behind each token (N,), where solved (N,) of tried (N,) rollouts succeeded; without any, U counts
    as V_{t+1}, so that A* is 0."""
    weight, U = np.where(tried > 0, -np.expm1(truth["logprob"].astype(float)), 0.0), solved / np.maximum(tried, 1)
    later = behind(truth, weight, U, truth["success"])
    return weight * (later - U), later


def add_values(truth: dict) -> None:
    """Columns value, value_error, a_star, a_star_error (N,); a_star_halves (N, 2) is from each half of the rollouts.
    Where there were no rollouts, the bound 1 - p is the error of A*. The variance of U is that of one more rollout,
    with V_{t+1} as its success: the plain rate claims certainty when all rollouts agree. Over half of the distance
    between halves, by root mean square, the error of A* is 0.98 to 1.06 in the files of checks.md."""
    other, tried, solved = -np.expm1(truth["logprob"].astype(float)), truth["packets"] * PACKET, truth["solved"]
    a_star, later = a_star_of(truth, solved.sum(1), tried)
    weight, rate = np.where(tried > 0, other, 0.0), (solved.sum(1) + later) / (tried + 1)  # (N,) each
    variance_U = rate * (1 - rate) / np.maximum(tried, 1)  # (N,)
    # (1 - w)^2 x + w^2 y = x + u (w^2 y / u - x) with u = w (2 - w), so the variance follows V's recursion.
    variance = behind(truth, weight * (2 - weight), weight * variance_U / (2 - weight), 0 * other)  # (N,) of V_{t+1}
    truth |= {"value": later - a_star, "value_error": np.hypot((1 - weight) * variance**0.5, weight * variance_U**0.5),
              "a_star": a_star, "a_star_error": np.where(tried > 0, other * np.sqrt(variance + variance_U), other),
              "a_star_halves": np.column_stack([a_star_of(truth, half, tried // 2)[0] for half in solved.T])}


def table_facts(truth: dict) -> Table:
    """How much was measured, and how precisely."""
    first, tried = truth["position"] == 0, truth["packets"] > 0
    rows = [["puzzles, responses, tokens", f"{len(np.unique(truth['group']))}, {first.sum()}, {len(tried):,}"],
            ["rollouts, tokens sampled for them", f"{truth['packets'].sum() * PACKET:,}, {truth['sampled']:,}"],
            [f"tokens with rollouts (1 - p above {SURE:g})", f"{tried.mean():.1%}"],
            ["standard error of A*, with rollouts: root mean square",
             f"{np.sqrt(np.mean(truth['a_star_error'][tried] ** 2)):.3f}"]]
    return Table("What was measured", "How much was sampled, and how exact A* is.", ["", ""], rows)


def solver_columns(text: str, spans: list[tuple[int, int]], puzzle: Any, task: ModuleType) -> np.ndarray:
    """Whether success is within reach (2, L) before and after each token of a response: 1 yes, 0 no, -1 unknown.

    A task says so after each token (`within_reach`) or after each part of a calculation (`reachable`): then all other
    tokens have -1, and a number of several tokens is judged as a whole, at its first token.
    """
    if hasattr(task, "within_reach"):
        after = task.within_reach(text, spans, puzzle)
        return np.stack((np.append(1, after[:-1]), after)).astype(np.int8)
    found, where = np.full((2, len(spans)), -1, np.int8), anchors(text, spans)
    for verdicts, parts in zip(task.reachable(text, puzzle) if hasattr(task, "reachable") else (),
                               find_calculations(text)):
        for i, (start, end) in enumerate(parts):
            first = np.flatnonzero((where >= start) & (where < end))[:1]  # none where a token covers several parts
            found[:, first] = np.reshape(verdicts[i : i + 2], (2, 1))
    return found


def describe(batch: TokenBatch, settings: dict) -> dict:
    """The columns of ground_truth.npz that are known before any rollout."""
    credit = batch.advantage[:, None] * batch.mask  # (B, T)
    truth = log_columns(0, batch, instrument(batch, credit, Settings()))
    del truth["credit"]  # every method's credit is in `credits`
    N, puzzles = len(truth["token"]), [batch.puzzles[g] for g in batch.group.tolist()]
    written = list(zip(batch.text, batch.spans, puzzles, strict=True))
    before, after = np.concatenate([solver_columns(*response, batch.task) for response in written], 1)  # (N,) each
    pieces = [text[a:b] for text, spans, _ in written
              for a, b in zip([0, *(stop for _, stop in spans)], (stop for _, stop in spans))]
    return truth | {
        "success": np.repeat(batch.success.cpu().numpy().astype(np.float32), batch.mask.sum(1).tolist()),
        "reachable_before": before, "reachable": after, "piece": np.array(pieces),
        "prompts": np.array([batch.task.show(puzzle) for puzzle in puzzles]),
        "settings": np.array(json.dumps(settings)), "packets": np.zeros(N, int),
        "solved": np.zeros((N, 2), int), "sampled": np.array(0)}


def add_credit(truth: dict, batch: TokenBatch, wanted: list[str]) -> None:
    """Columns methods (M,) and credits (M, N): the credit, at its defaults, of each wanted method that can be asked."""
    allowed = fitted_methods(batch.task, batch.ask.policy.heads)
    methods = {name: allowed[name] for name in wanted if name in allowed}
    require(methods, "none of --methods can be asked: they need a head, or a function of another task")
    credits = [check_pure(name, batch, partial(method, batch))[batch.mask].cpu().numpy().astype(np.float32)
               for name, method in follow("credit of every method", methods.items())]
    truth |= {"methods": np.array(list(methods)), "credits": np.stack(credits)}


def read_rollouts(truth: dict, file: Path) -> None:
    """Take over the rollouts of an existing file. ValueError if it is broken, or about other responses."""
    old = read_arrays(file, ("settings", "token", "packets", "solved", "sampled"))
    require(old["settings"] == truth["settings"] and np.array_equal(old["token"], truth["token"]),
            f"{file} is about other responses: choose another --out, or its settings, {old['settings']}")
    truth |= {name: old[name] for name in ("packets", "solved", "sampled")}


def save_truth(truth: dict, file: Path) -> None:
    """Write ground_truth.npz, with the values that follow from the rollouts so far."""
    add_values(truth)
    replace_file(file, lambda part: np.savez(part, **truth))


def arguments() -> Namespace:
    """The command line."""
    parser = new_parser(description=__doc__)
    for name, default, meaning in FLAGS:
        parser.add_argument(f"--{name}", type=type(default), default=default, choices=CHOICES.get(name),
                            help=f"{meaning} (default {'empty' if default == '' else default})")
    parser.add_argument("--methods", nargs="+", default=[*CREDIT_FUNCTIONS], choices=CREDIT_FUNCTIONS, metavar="NAME",
                        help="to score, and the first to draw (default all that can be asked)")
    parser.add_argument("--only_rollouts", action="store_true", help="score nothing: cosines of updates need "
                        "a gradient of all weights for each puzzle, for which a large model has no room")
    return parser.parse_args()


def prepare(args: Namespace) -> tuple[Policy, list, TokenBatch, dict, float]:
    """Policy, puzzles, responses, the columns known so far, and tokens sampled per second. ValueError for settings that
    can't work."""
    check_range(args, ("rollouts",), lowest=1)
    check_range(args, ("critic_batches",), lowest=0)
    check_range(args, ("questions",), lowest=2)  # intervals are over puzzles
    alike = ("task", "model", "data", "responses", "max_new_tokens", "seed", "device", "dtype")
    s = with_model(Settings(eval_problems=args.questions, **{name: getattr(args, name) for name in alike}))
    check(s)
    policy, out = load_policy(s), Path(args.out)
    puzzles = policy.task.load("heldout", s.eval_problems, s.data)
    check_lengths(policy, puzzles, s)
    out.mkdir(parents=True, exist_ok=True)
    heads = find_heads(out, policy, args.critic_batches) if args.critic_batches else {}
    policy = policy._replace(heads=heads, reference=policy.model)
    uniforms = draw_uniforms(args.seed, "truth", len(puzzles), args.responses, args.max_new_tokens)
    prompts = [policy.prompt(puzzle) for puzzle in puzzles]
    began = time.perf_counter()
    responses = respond(policy, puzzles, prompts, uniforms)
    speed = int(responses.samples.mask.sum()) / (time.perf_counter() - began)
    batch = token_batch(policy, puzzles, prompts, responses, s)
    batch.ask = Queries(policy, batch, s, step=0)
    batch.advantage = compare(batch)
    task = {} if args.task == Settings.task else {"task": args.task}  # early files have none
    settings = task | {"model": Path(s.model).name, "data": Path(args.data).name} | {  # names only: it is published
        "questions": args.questions, "answers": args.responses, "max_new_tokens": args.max_new_tokens,
        "seed": args.seed}
    return policy, puzzles, batch, describe(batch, settings), speed


def main() -> None:
    """Sample responses, measure the truth about their tokens, and score the credit of every method against it."""
    args = arguments()
    out, file = Path(args.out), Path(args.out, "ground_truth.npz")
    with one_sentence(f"interrupted; the same command resumes from what is in {out}"):
        policy, puzzles, batch, truth, speed = prepare(args)
        if file.is_file():
            read_rollouts(truth, file)
        n, right = len(batch.success), int(batch.success.sum())
        if right == 0:
            print(f"0 of {n} responses succeeded: check the task's grade, or take more --questions", flush=True)
        announce(truth, args.rollouts, speed)
        add_credit(truth, batch, args.methods)
        sample_truth(policy, puzzles, truth, args.rollouts, args.seed, args.max_new_tokens,
                     lambda: save_truth(truth, file))
        save_truth(truth, file)
        require(right or truth["solved"].any(), f"none of {n} responses and of their rollouts succeeded, so A* is 0 on "
                "all tokens: check the task's grade, or take more --questions or another --model")
        draw(truth, out / "truth.png", truth["credits"][0], f"credit of {truth['methods'][0]}")
        tables = [table_facts(truth)]
        if not args.only_rollouts:
            tables += score_tables(all_scores(batch, truth))
            (out / "scores.md").write_text("\n".join(map(str, tables)), encoding="utf-8")
        print(*tables, f"wrote {out}", sep="\n")


if __name__ == "__main__":
    main()
