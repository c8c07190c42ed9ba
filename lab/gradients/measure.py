"""Gradient anatomy: how large a token's gradient is, what a step's gradient is made of, and which method's is biased.

Four questions about a fixed policy, and, with --run, about the checkpoints of a run:

1. Which tokens get the most gradient? The original work measured abs(credit * log p) and found 31% more on filler.
   Beside that measure stand the gradient in logit space, abs(credit) * ||onehot - p||, and the exact one, abs(credit)
   times the norm of grad log pi(token) over all parameters, each with and without control for position.
   The original's phase 1 took the gradient of the summed cross-entropy at the input embeddings. It is repeated here as
   the mistake it is: the embedding of token j collects the gradients of all losses behind j, so early tokens have more.
2. Is the gradient of a group of rank 2? See lab/gradients/rank.py.
3. When is the group mean the best baseline? See lab/gradients/noise.py.
4. How biased and how noisy is each method's gradient? See there, too.

Run it:  python -m lab.gradients.measure                                  the bundled model, about four minutes
         python -m lab.gradients.measure --run runs/watched               also along runs/watched/checkpoints
"""
import argparse
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from countdown_task import Puzzle, generate_puzzles
from lab.estimates import cell, draw_estimate, read_cell, read_table
from lab.gradients.noise import method_gradients, table_baseline, table_methods
from lab.gradients.rank import (CONTROLS_AT, SIZES, TRUTH_PUZZLES, by_success, draw_ranks, effective_rank,
                                       gram_spectrum, products, rank_rows, tables_rank)
from lab.statistics import bootstrap, correlate, explained, ranks, sums, within
from lab.truth.critic import LIMIT, find_heads, sample
from lab.truth.measure import add_values, describe, sample_truth
from lab.truth.solver import DECISIONS, KINDS
from lab.updates import credit_gradients, on_tokens
from plumbing.flags import new_parser
from plumbing.progress import Progress, fail, one_sentence
from plumbing.report import GREY, PALETTE, Estimate, Table, bins, interval, new_figure, pm, save_figure, t_statistics
from plumbing.runs import read_config
from qwen2_model import Qwen2, take
from rollout import Policy, TokenBatch
from tasks.text import FILLER, REASONING
from train import BUNDLED, Settings, check_lengths, load_policy

EACH = 12  # tokens per response, on average, whose exact gradient is computed
TRUTH_ROLLOUTS = 24  # of a token, for the control A*
SPARSITY = ("Hoyer", "Gini", "below rms / 100")
MEASURES = ("abs(A log p)", "abs(A)·‖onehot - p‖", "abs(A)·‖grad log p‖, all parameters")


# -------------------------------------------------------------------------------------------- a token's gradient


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


# -------------------------------------------------------------------------------------------- over training


def sparsity(x: np.ndarray) -> dict[str, float]:
    """Hoyer's measure and the Gini coefficient of |x| (P,), 0 where all are equal and 1 where one has all; and the
    share of entries below a hundredth of the root mean square."""
    x, n = np.sort(np.abs(x.astype(np.float64))), len(x)
    rms = np.sqrt((x**2).mean())
    return dict(zip(SPARSITY, ((np.sqrt(n) - x.sum() / (rms * np.sqrt(n))) / (np.sqrt(n) - 1),
                               1 - 2 * ((x / x.sum()) * (n - np.arange(1, n + 1) + 0.5) / n).sum(),
                               (x < 0.01 * rms).mean())))


def checkpoint_row(folder: Path, puzzles: list[Puzzle], answers: int, seed: int) -> list[str]:
    """One line of the table over training."""
    policy = load_policy(Settings(model=str(folder)))
    batch = by_success(sample(policy, puzzles, answers, (seed, 0)))
    c = token_columns(batch, seed)
    sizes = three_sizes(c)
    use = known(c, *sizes.values())
    credit = (batch.advantage[:, None] * batch.mask)[None]  # (1, B, T)
    rows = torch.cat(list(credit_gradients(batch, credit, 1))).view(len(puzzles), answers, -1)
    groups = [g for g in rows if g.any()]  # (G, P) each
    sparse = [sparsity(g.sum(0).numpy()) for g in groups]
    ranked = [effective_rank(gram_spectrum(products(g, g))) for g in groups]
    columns = [([s[k] for s in sparse], 3) for k in SPARSITY] + [(ranked, 1)]
    return [f"{batch.success.mean():.2f}", *(pm(*interval(x), digits) if x else "" for x, digits in columns),
            *(cell(type_ratio(x, c, use, False)) for x in sizes.values())]


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Step and folder of each complete checkpoint of a run."""
    folders = [file.parent for file in sorted(run.glob("checkpoints/step-*/model.safetensors"))]
    return [(int(folder.name[5:]), folder) for folder in folders]


def table_training(run: Path, puzzles: list[Puzzle], answers: int, seed: int) -> Table:
    """How sparse, of what rank, and on which tokens the gradient is along a run."""
    start = Path(read_config(run)["settings"]["model"])
    rows = []
    for step, folder in [(0, start), *checkpoints(run)]:
        print(f"checkpoint of step {step}", flush=True)
        rows.append([str(step), *checkpoint_row(folder, puzzles, answers, seed)])
    return Table("Over training", (
        f"{run.name}; the same {len(puzzles)} puzzles at each checkpoint, {answers} answers each. Sparsity of a "
        "puzzle's gradient, effective rank of its responses x parameters, means over puzzles ± half of a 95% "
        "interval; filler / reasoning by the three measures with 95% bootstrap intervals over puzzles."),
        ["step", "success", *SPARSITY, "effective rank", *MEASURES], rows)


# -------------------------------------------------------------------------------------------- the command


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--run", type=Path, help="a run made with --checkpoint_every: also over its training")
    parser.add_argument("--questions", type=int, default=12, help="training puzzles (default 12)")
    parser.add_argument("--batches", type=int, default=12, help="of 6 x 8 responses, for noise and bias (default 12)")
    parser.add_argument("--critic_batches", type=int, default=30, help="of 96 responses, for `ppo` (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of responses (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), help="folder (default runs/gradients)")
    args = parser.parse_args()
    if args.questions < TRUTH_PUZZLES or args.batches < 4 or args.critic_batches < 1:
        fail(f"--questions must be at least {TRUTH_PUZZLES}, --batches 4 and --critic_batches 1")
    if args.run and not checkpoints(args.run):
        fail(f"{args.run} has no checkpoints: make the run with --checkpoint_every 25")
    if args.run and not (args.run / "config.json").is_file():
        fail(f"{args.run} is not a run folder: it has no config.json")
    return args


def sampled_truth(batch: TokenBatch, seed: int) -> Tensor:
    """A* (B, T) of the first CONTROLS_AT answers to the first TRUTH_PUZZLES puzzles, 0 elsewhere."""
    ask, G, truth = batch.ask, len(batch.text) // len(batch.puzzles), describe(batch, {})
    chosen = (truth["response"] % G < CONTROLS_AT) & (truth["group"] < TRUTH_PUZZLES)
    truth["logprob"] = np.where(chosen, truth["logprob"], 0.0).astype(np.float32)  # a certain token gets no rollouts
    sample_truth(ask.policy, ask.puzzles, truth, TRUTH_ROLLOUTS, seed, LIMIT, lambda: None)
    add_values(truth)
    return on_tokens(truth["a_star"], batch)


def independent_batches(policy: Policy, count: int, seed: int) -> Iterator[TokenBatch]:
    """`count` batches: 8 answers to each of 6 puzzles that no other batch has."""
    puzzles = generate_puzzles(6 * count, "train", seed=seed + 1)
    progress = Progress("gradients of the methods", count)
    for i in range(count):
        yield sample(policy, puzzles[6 * i : 6 * i + 6], 8, (seed, 1000 + i))
        progress.show(i + 1)


def measure(args: argparse.Namespace) -> list[Table]:
    """All tables."""
    s = Settings(model=args.model, max_new_tokens=LIMIT)
    policy = load_policy(s)
    puzzles = generate_puzzles(args.questions, "train", seed=args.seed)
    check_lengths(policy, puzzles, s)
    args.out.mkdir(parents=True, exist_ok=True)
    policy = policy._replace(heads=find_heads(args.out, args.model, policy, args.critic_batches))
    batch = by_success(sample(policy, puzzles, max(SIZES), (args.seed, 0)))
    if not batch.advantage.any():
        raise ValueError("no puzzle got both right and wrong answers, so there is no gradient: ask more --questions, "
                         "or take a --model that solves some")
    columns = token_columns(batch, args.seed)
    truth = sampled_truth(batch, args.seed)
    found = rank_rows(batch, truth, args.seed)
    ones = credit_gradients(batch, batch.mask.float()[None], 1)
    shape = len(puzzles), max(SIZES)
    norms = np.array([g.double().square().sum().item() for g in ones]).reshape(shape)
    success = batch.success.view(shape).numpy().astype(float)
    tables = [*tables_tokens(columns), table_phase1(columns), *tables_rank(found), table_baseline(success, norms)]
    batches = independent_batches(policy, args.batches, args.seed)
    tables.append(table_methods(method_gradients(batches)))
    if args.run:
        tables.append(table_training(args.run, puzzles, CONTROLS_AT, args.seed))
    return tables


@one_sentence()
def main() -> None:
    """Measure, print, and write gradients.md and two pictures of its tables."""
    args = arguments()
    tables = measure(args)
    text = "\n".join(map(str, tables))
    (args.out / "tables.md").write_text(text, encoding="utf-8")
    draw_sizes(args.out / "tables.md", args.out / "size.png")
    draw_ranks(args.out / "tables.md", args.out / "rank.png")
    print(f"{text}\nwrote {args.out}")


if __name__ == "__main__":
    main()
