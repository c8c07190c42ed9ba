"""Rank, sparsity and phase 1 in a pretrained model, SmolLM2 (designs.md).

Run it:  python -m lab.gradients.pretrained                     pretrained.md, from data/
         python -m lab.gradients.pretrained --measure math      into data/: half an hour of one core, 7 GB

Where designs.md's run has left a checkpoint, the sparsity is that after its training, and nothing else is measured.
"""
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from grpo import compare
from lab.estimates import cell
from lab.gradients.rank import controls, group_spectra, rank_rows, responses_of, table_along, tables_rank
from lab.statistics import mean_ratio
from lab.study import engine
from lab.updates import credit_gradients
from plumbing.flags import new_parser
from plumbing.progress import follow, one_sentence
from plumbing.report import Table, t_statistics
from queries import Queries
from rollout import TokenBatch, by_group, rollout
from sampler import response_logprobs
from settings import Settings
from tasks.text import FILLER, REASONING
from start import load_policy

DATA = Path(__file__).parent / "data"
TASKS, LIMITS = {"math": "word problems", "countdown": "easy Countdown"}, {"math": 128, "countdown": 200}  # tokens
PROBLEMS, ANSWERS, GROUPS, READ = 24, 8, 8, 12  # sampled; to each; of those that differ; for phase 1
LAYER, SINGLE, STEPS = "layers.15.", 3, 20  # decomposed; tokens of a response whose own loss is looked at; of a run
SPARSITY = ("Hoyer", "Gini", "share below 0.01 rms")
NOTE = "SmolLM2. GRPO: rewards as trained; binary: every other response counts as right. Weights of layer 15."


def differing(batch: TokenBatch) -> dict[int, list[int]]:
    """By problem, its responses if their rewards differ: the first one and the first that differs from it lead."""
    found = {}
    for q, rewards in enumerate(by_group(batch, batch.reward).tolist()):
        other = next((i for i, r in enumerate(rewards) if r != rewards[0]), 0)
        if other:
            found[q] = [q * len(rewards) + i for i in dict.fromkeys((0, other, *range(len(rewards))))]
    return found


def credits_of(group: TokenBatch, rng: np.random.Generator) -> dict[str, Tensor]:
    """By name, the credit (R, T) of a group: by its rewards, by every other response as right, and controls."""
    binary = compare(dataclasses.replace(group, reward=(torch.arange(len(group.text)) % 2 == 0).float()))
    found = {name: A[:, None] * group.mask for name, A in (("GRPO", group.advantage), ("GRPO, binary", binary))}
    return found | controls(group, rng) if len(group.text) == ANSWERS else found


def sparsity(x: np.ndarray) -> dict[str, float]:
    """Of |x| (P,): Hoyer's measure and the Gini coefficient, 0 where all are equal and 1 where one has all; and the
    share below a hundredth of the root mean square."""
    x, n = np.sort(np.abs(x)), len(x)
    total, rms = x.sum(dtype=np.float64), np.sqrt(np.mean(x**2, dtype=np.float64))
    return dict(zip(SPARSITY, ((np.sqrt(n) - total / rms / np.sqrt(n)) / (np.sqrt(n) - 1),
                               2 * np.dot(np.arange(1.0, n + 1), x) / n / total - (n + 1) / n,
                               np.searchsorted(x, 0.01 * rms) / n)))


def phase1_columns(batch: TokenBatch, i: int, single: np.ndarray) -> dict[str, Tensor]:
    """Of response i, a value for each of its L tokens but the last (L - 1,). `norm` and `mean`: of the components of
    the gradient, at the token's input embedding, of the sum of all log-probs; `next`: the norm of that of the next
    token's log-prob alone, at the tokens `single`, else NaN. `relative`: position over L."""
    inputs, model, n = [], batch.ask.policy.model, int(batch.mask[i].sum()) - 1

    def from_here(_, args: tuple) -> tuple:
        """The arguments of the first layer, with embeddings that a gradient can be taken at."""
        inputs.append(args[0].detach().requires_grad_())
        return inputs[-1], *args[1:]

    hook = model.layers[0].register_forward_pre_hook(from_here)
    rows = (x[[i]] for x in (batch.group, batch.tokens, batch.mask))
    logprob = response_logprobs(model, batch.prompts, *rows)[0]  # (T,)
    hook.remove()
    whole, *alone = (torch.autograd.grad(total, inputs[-1:], retain_graph=True)[0][0, 1:]  # behind the prompt
                     for total in (logprob.sum(), *logprob[single + 1]))
    t, following = torch.arange(n), whole.new_full((n,), torch.nan)
    following[single] = torch.stack([x[t].norm() for x, t in zip(alone, single)])
    return {"puzzle": batch.group[i].expand(n), "position": t, "relative": t / (n + 1), "role": batch.role[i, :n],
            "norm": whole.norm(dim=1), "mean": whole.mean(1), "next": following}


def measure(task: str) -> None:
    """Write a task's files into data/."""
    step, trained = 0, Path(f"runs/smollm2-{task}/checkpoint")
    if (trained / "model.safetensors").is_file():
        step = STEPS
    s = Settings(model=str(trained) if step else "weights/smollm2", task=task, answers=ANSWERS,
                 max_new_tokens=LIMITS[task])
    policy = load_policy(s)
    batch = rollout(policy, policy.task.load("train", PROBLEMS), s, 0)
    batch.ask = Queries(policy, batch, s, 0)
    DATA.mkdir(exist_ok=True)
    groups = differing(batch)
    started = [int(row["puzzle"]) for row in read_rows("sparsity") if (row["task"], row["step"]) == (TASKS[task], 0)]
    groups = {q: groups[q] for q in (started if step else list(groups)[:GROUPS]) if q in groups}
    if not groups:
        raise ValueError(f"no group's rewards differ, so there is no gradient: {s.model} can't be measured")
    sparse = []
    for q, rows in follow("sparsity", groups.items()):
        group = responses_of(batch, rows)
        (gradient,) = next(credit_gradients(group, (group.advantage[:, None] * group.mask)[None], ANSWERS))  # (P,)
        sparse.append({"puzzle": q, "levels": len(group.reward.unique()), "right": int(group.success.sum()),
                       **sparsity(gradient.numpy())})
    engine.write_rows(sparse, DATA / f"sparsity-{task}-{step}.csv")
    if not step:
        chosen = responses_of(batch, [i for rows in groups.values() for i in rows])
        ranks = rank_rows(group_spectra(chosen, credits_of, LAYER, torch.bfloat16))
        rounded = [{name: f"{x:.5g}" if isinstance(x, float) else x for name, x in row.items()} for row in ranks]
        engine.write_rows(rounded, DATA / f"ranks-{task}.csv")
        policy.model.requires_grad_(False)  # from here on no gradient of a weight is asked for
        rng, lengths = np.random.default_rng(0), batch.mask.sum(1).tolist()
        parts = [phase1_columns(batch, i, rng.choice(lengths[i] - 1, min(SINGLE, lengths[i] - 1), replace=False))
                 for i in follow("phase 1", range(READ * ANSWERS)) if lengths[i] > 1]
        np.savez_compressed(DATA / f"phase1-{task}.npz", **{
            name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]})


def read_rows(name: str) -> list[dict]:
    """The rows of all CSV files of data/ whose name begins so, with numbers as such, and with their task and step."""
    files = [(file, *file.stem.split("-")[1:]) for file in sorted(DATA.glob(f"{name}-*.csv"))]
    return [{"task": TASKS[task], "step": int(step[0]) if step else 0}
            | {key: text if key in ("credit", "matrix") else float(text) for key, text in row.items()}
            for file, task, *step in files for row in engine.read_rows(file)]


def table_phase1() -> Table:
    """The gradient at the input embeddings by position and by type of token."""
    cells = []
    for file, column in itertools.product(sorted(DATA.glob("phase1-*.npz")), ("norm", "next", "mean")):
        c = np.load(file)
        use, size = np.isfinite(c[column]), np.nan_to_num(np.abs(c[column].astype(float)))
        fifth, tenth = ((n * c["relative"]).astype(int) for n in (5, 10))
        pairs = (fifth == 0, fifth == 4, 0), *((c["role"] == FILLER, c["role"] == REASONING, x) for x in (0, tenth))
        t = np.abs(t_statistics(c[column][use], c["position"][use]))
        cells.append([column, TASKS[file.stem.split("-")[1]],
                      *(cell(mean_ratio(size, use & x, use & y, c["puzzle"], stratum)) for x, y, stratum in pairs),
                      *(f"{share.mean():.0%}" if len(t) else "" for share in (t > 3, t < 1.5))])
    note = (f"SmolLM2, {READ * ANSWERS} responses. Norm, and mean component, of the gradient of all log-probs behind a "
            "token; next: norm of that of the next token's alone. First over last fifth of a response; filler over "
            "reasoning, as it is and matched for the tenth of the response; 95% bootstrap intervals over problems. t: "
            "at each position that 30 responses reach.")
    return Table("Phase 1: gradients at the input embeddings", note, [
        "", "task", "first / last fifth", "filler / reasoning", "matched for position", "abs(t) above 3", "below 1.5"],
        cells)


def tables() -> str:
    """All tables, from data/."""
    sparse = [row | {"measure": name, "value": row[name]} for name in SPARSITY for row in read_rows("sparsity")]
    return "\n".join(map(str, (
        *tables_rank(read_rows("ranks"), NOTE, ("matrix", "credit", "task")), table_phase1(),
        table_along("Sparsity", f"{NOTE} All parameters, R = 8.", sparse, ("measure", "task"), "step", "value", 3))))


@one_sentence()
def main() -> None:
    """Measure, or write the tables."""
    parser = new_parser(description=__doc__)
    parser.add_argument("--measure", choices=TASKS, help="the task that is measured; without it the tables are written")
    if task := parser.parse_args().measure:
        measure(task)
    else:
        DATA.with_name("pretrained.md").write_text(tables(), encoding="utf-8")


if __name__ == "__main__":
    main()
