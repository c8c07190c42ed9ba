"""What does the ratio pi / pi_old add to a token's credit when a batch is used for several updates?

Before the first update on a batch the ratio is 1. From the second on, the gradient of PPO's loss is

    sum_t share_t * factor_t * credit_t * grad log pi(token_t),    factor = ratio, or 0 where the clip takes over

with share_t the token's share of the loss. So each token's credit is multiplied by a factor of its own, also in GRPO,
whose credit is the same on all tokens. Is that credit assignment? Three measurements before updates 2, 3 and 4, on the
tokens that have credit:

1. The factor: how many tokens are clipped, how far the ratio spreads, and how much of that is within responses.
2. The gradient: its cosine with the one of the same tokens, at the same weights, with all factors 1. Beside it are the
   ratio without the clip, and the clip without the ratio.
3. Where the factor goes: its correlation with entropy, and its mean by role of the token.

The bundled model first trains for some steps of four updates, because Adam's moments decide how far an update goes.
Every batch then starts from that state, so batches differ in their samples only. The clips are the default and DAPO's
(2503.14476), which lets rare tokens rise further.

Run it:  python -m lab.gradients.ratio         the bundled model, about ten minutes
"""
import argparse
import copy
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from analyze import COLOURS, method_name
from countdown_task import Puzzle
from grpo import compare, policy_loss, token_weights, update
from lab.estimates import read_cell, read_table
from lab.statistics import explained
from lab.updates import credit_gradients
from plumbing.flags import new_parser
from plumbing.optimizer import Optimizer
from plumbing.progress import Progress, fail, one_sentence
from plumbing.report import GREY, PALETTE, Table, interval, new_figure, pm, save_figure
from rollout import Policy, TokenBatch, draw_puzzles, rollout
from sampler import response_logprobs
from tasks.text import ROLES
from train import BUNDLED, Settings, assign_credit, load_policy

METHODS = ("none", "entropy_masking")
CLIPS = (0.2, 0.28)  # --clip_high: the default, and DAPO's
UPDATES = 4  # on each batch
GRADIENTS = ("ratio and clip", "ratio alone", "clip alone")  # each against factors of 1
TITLES = ("The ratio and the clip", "The gradient", "Where the factor goes")


# --------------------------------------------------------------------------------------------- one batch, one update


def gradient_facts(gradients: Tensor) -> dict[str, float]:
    """Of four gradients (4, P), the cosine of the first three with the last, whose factors are 1, and the first one's
    size relative to it."""
    g = gradients.double()
    sizes = g.norm(dim=1)  # (4,)
    cosines = (g[:3] @ g[3] / (sizes[:3] * sizes[3])).tolist()
    return dict(zip(GRADIENTS, cosines)) | {"size": (sizes[0] / sizes[3]).item()}


def factor_facts(c: dict[str, np.ndarray]) -> dict[str, float]:
    """Statistics of tokens with credit, from columns (N,) log_ratio, clipped, credit, entropy, role and response.

    Those of no tokens are NaN.
    """
    x, clipped, factor = c["log_ratio"], c["clipped"], np.exp(c["log_ratio"]) * ~c["clipped"]
    found = {"clipped": clipped.mean(), "deviation": x.std(), "within": 1 - explained(x, c["response"])}
    found |= {f"clipped, {role}": mean(clipped[c["role"] == i]) for i, role in enumerate(ROLES)}
    for sign, use in {"+": c["credit"] > 0, "-": c["credit"] < 0}.items():
        found[f"entropy {sign}"] = np.corrcoef(factor[use], c["entropy"][use])[0, 1] if use.sum() > 1 else np.nan
        found |= {f"{role} {sign}": mean(factor[use & (c["role"] == i)]) for i, role in enumerate(ROLES)}
    return {name: float(value) for name, value in found.items()}


def mean(values: np.ndarray) -> float:
    """The mean of values (n,), NaN of none."""
    return float(values.mean()) if len(values) else float("nan")


def observe(batch: TokenBatch, credit: Tensor, s: Settings) -> dict[str, float]:
    """All measurements before the next update on a batch with credit (B, T)."""
    logprob, share = batch.ask.read(response_logprobs, batch.ask.policy.model), token_weights(batch.mask, s)  # (B, T)
    log_ratio = logprob - batch.logprob  # (B, T)
    (_, clipped), ratio = policy_loss(logprob, batch.logprob, credit, share, s), log_ratio.exp()  # (B, T) each
    factors = torch.stack((ratio * ~clipped, ratio, (~clipped).float(), torch.ones_like(ratio)))  # (4, B, T)
    parts = credit_gradients(batch, factors * share * credit, s.answers)
    use = batch.mask & (credit != 0)  # (B, T)
    columns = {"log_ratio": log_ratio, "clipped": clipped, "credit": credit, "entropy": batch.entropy,
               "role": batch.role, "response": torch.arange(len(credit))[:, None].expand(credit.shape)}
    return gradient_facts(sum(parts)) | factor_facts({name: x[use].numpy() for name, x in columns.items()})


# ------------------------------------------------------------------------------------------------------ all batches


def sampled(policy: Policy, training: list[Puzzle], s: Settings, step: int) -> tuple[TokenBatch, Tensor]:
    """Responses and credit (B, T) of a step."""
    batch = rollout(policy, draw_puzzles(training, s, step), s, step)
    batch.advantage = compare(batch, s.advantage)
    return batch, assign_credit(batch, s, {})


def observations(policy: Policy, s: Settings, batches: int, warm_up: int) -> Iterator[dict]:
    """Facts before updates 2, 3, ... with each clip, on `batches` independent batches, after `warm_up` steps."""
    optimizer, training = Optimizer(policy.model, s.lr, (s.beta1, s.beta2)), policy.task.load("train", path=s.data)
    progress = Progress(s.mitigation, warm_up + batches)
    for step in range(1, warm_up + 1):
        batch, credit = sampled(policy, training, s, step)
        for _ in range(UPDATES):
            update(policy, optimizer, batch, credit, s)
        progress.show(step)
    start = copy.deepcopy(optimizer.state_dict())
    for step in range(warm_up + 1, warm_up + batches + 1):
        optimizer.load_state_dict(copy.deepcopy(start))  # weights and moments; a copy, since Adam changes what it loads
        batch, credit = sampled(policy, training, s, step)
        for clip in CLIPS:
            optimizer.load_state_dict(copy.deepcopy(start))
            for facts in observed_updates(policy, optimizer, batch, credit, replace(s, clip_high=clip)):
                yield {"method": s.mitigation, "clip": clip, "batch": step} | facts
        progress.show(step)


def observed_updates(policy: Policy, optimizer: Optimizer, batch: TokenBatch, credit: Tensor,
                     s: Settings) -> Iterator[dict]:
    """Facts before each of UPDATES updates on a batch with credit (B, T), but the first.

    Four single updates are what train.py does with --updates_per_batch 4.
    """
    for number in range(2, UPDATES + 1):
        update(policy, optimizer, batch, credit, s)
        yield {"update": number} | observe(batch, credit, s)


# ------------------------------------------------------------------------------------------------ tables and picture


def average(found: list[dict], name: str, digits: int, **where) -> str:
    """Mean of a fact over batches, among the rows that match `where`, ± half of its 95% interval, as a cell.

    Shares of clipped tokens are given in percent.
    """
    unit = 100 if name.startswith("clipped") else 1
    values = [unit * row[name] for row in found if all(row[key] == value for key, value in where.items())]
    values = [x for x in values if np.isfinite(x)]
    return pm(*interval(values), digits) if values else ""


def tables_ratio(found: list[dict], note: str) -> list[Table]:
    """The three tables, with a line for each method, clip and update."""
    lines = list(dict.fromkeys((row["method"], row["clip"], row["update"]) for row in found))

    def rows(names: dict[str, int]) -> list[list[str]]:
        """The lines of a table of these facts, each with its digits."""
        facts = names.items()
        return [[m, f"{c}", f"{u}"] + [average(found, name, n, method=m, clip=c, update=u) for name, n in facts]
                for m, c, u in lines]

    head, signs = ["method", "clip_high", "update"], {"+": "credit > 0", "-": "credit < 0"}
    spread = {"clipped": 2, **{f"clipped, {role}": 2 for role in ROLES}, "deviation": 3, "within": 3}
    cosines = {**dict.fromkeys(GRADIENTS, 2), "size": 2}
    places = {f"{name} {sign}": 3 for sign in signs for name in ("entropy", *ROLES)}
    titled = [f"{name[:-2]}, {signs[name[-1]]}" for name in places]
    return [
        Table(TITLES[0], "Tokens clipped in percent, of all and of each role; standard deviation of the log ratio; "
              f"share of the variance of the log ratio that is within responses. {note}",
              [*head, *list(spread)[:4], "deviation of log ratio", "within responses"], rows(spread)),
        Table(TITLES[1], f"Cosine with the gradient of factors 1; size over the size of that one, with ratio and clip. "
              f"{note}", [*head, *GRADIENTS, "relative size"], rows(cosines)),
        Table(TITLES[2], f"The factor is the ratio, or 0 where clipped: its correlation with entropy, and its mean by "
              f"role, where credit is positive and where it is negative. {note}", [*head, *titled], rows(places))]


def draw_ratio(tables: Path, file: Path) -> None:
    """Share of clipped tokens by role at the last update, and the cosine by update, read from the file of tables."""
    figure, ((left, right),) = new_figure(2, 1, 4.4)
    header, rows = read_table(tables, TITLES[0])
    last = [dict(zip(header, row)) for row in rows if row[2] == str(UPDATES)]
    for i, (role, marker) in enumerate(zip(ROLES, "os^")):
        e = np.array([read_cell(row[f"clipped, {role}"]) for row in last])[:, :3]  # (cases, 3) percent
        x = np.arange(len(last)) + 0.2 * (i - 1)
        left.errorbar(x, e[:, 0], e[:, 2] - e[:, 0], fmt=marker, color=COLOURS[role], capsize=3, label=role,
                      clip_on=False)
    names = [f"{method_name(row['method'])}\n{row['clip_high']}".replace("_", "_\n") for row in last]
    left.set_xticks(range(len(last)), names)
    left.set(ylabel="clipped tokens, %, 95% interval", ylim=(0, None), title=f"Clipped at update {UPDATES}, by role",
             xlabel="method and clip_high")
    header, rows = read_table(tables, TITLES[1])
    for method, colour, marker in zip(dict.fromkeys(row[0] for row in rows), PALETTE, "os^"):
        for clip, line, shift in zip(CLIPS, ("-", "--"), (-0.04, 0.04)):
            chosen = [dict(zip(header, row)) for row in rows if row[:2] == [method, f"{clip}"]]
            e = np.array([read_cell(row[GRADIENTS[0]]) for row in chosen])[:, :3]  # (updates, 3)
            right.errorbar([int(row["update"]) + shift for row in chosen], e[:, 0], e[:, 2] - e[:, 0], ls=line,
                           marker=marker, color=colour, capsize=3, label=f"{method_name(method)}, {clip}")
    right.axhline(1, color=GREY, lw=1)
    right.set(xlabel="update on the same batch", ylabel="cosine, 95% interval", title="Gradient against ratio 1",
              xticks=range(2, UPDATES + 1), ylim=(0, 1.03))
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32), ncols=3)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, handlelength=3, title="method, clip_high")
    save_figure(figure, file)


# ------------------------------------------------------------------------------------------------------- the command


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED), help="a model folder, such as a run's checkpoint")
    parser.add_argument("--batches", type=int, default=10, help="to measure on, for each method (default 10)")
    parser.add_argument("--warm_up", type=int, default=10, help="steps of training before (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of puzzles and responses (default 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/ratio"), help="folder (default runs/ratio)")
    args = parser.parse_args()
    if args.batches < 2 or args.warm_up < 0:
        fail("--batches must be at least 2, --warm_up 0 or more")
    return args


def measure(args: argparse.Namespace) -> list[dict]:
    """The facts for each method, batch, clip and update."""
    found = []
    for method in METHODS:
        s = Settings(mitigation=method, model=args.model, seed=args.seed)
        found += observations(load_policy(s), s, args.batches, args.warm_up)
    return found


@one_sentence()
def main() -> None:
    """Measure, print, and write ratio.md and a picture of its tables."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    found = measure(args)
    note = (f"Tokens with credit, before each update on their batch, after {args.warm_up} steps of training; means "
            f"over {args.batches} batches of {Settings.questions * Settings.answers} responses, ± half of a 95% "
            "interval (Student's t).")
    text = "\n".join(map(str, tables_ratio(found, note)))
    (args.out / "ratio.md").write_text(text, encoding="utf-8")
    draw_ratio(args.out / "ratio.md", args.out / "ratio.png")
    print(f"{text}\nwrote {args.out}")


if __name__ == "__main__":
    main()
